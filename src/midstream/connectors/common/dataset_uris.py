"""URIs of the datasets that sources read and sinks write, for lineage. None of them has a password or an option."""

from __future__ import annotations

import os
from typing import Final
from urllib.parse import urlsplit

import pyarrow.fs

from midstream.connectors.common.filesystem import is_local

_SCHEMES: Final = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}
_CONTAINER_AS_USER: Final = ("abfs", "abfss", "wasb", "wasbs")


def file_uri(given: str | os.PathLike[str], filesystem: pyarrow.fs.FileSystem, path: str) -> str:
    """Return the URI of `path` in `filesystem`, which was given as `given`, by its path or its URL."""
    if is_local(filesystem):
        return f"file://{path}"
    url = urlsplit(os.fspath(given))
    if not url.scheme or not url.netloc:
        return f"{_SCHEMES.get(filesystem.type_name, filesystem.type_name)}://{path.lstrip('/')}"
    user, _, host = url.netloc.rpartition("@")
    container = user.partition(":")[0]
    if container and url.scheme in _CONTAINER_AS_USER:
        host = f"{container}@{host}"
    return f"{_SCHEMES.get(url.scheme, url.scheme)}://{host}{url.path.rstrip('/')}"


def server_uri(scheme: str, server: str, default_port: int, name: str) -> str:
    """Return the URI of what has this name on a server, which is given with or without a port."""
    host, colon, port = server.strip().rpartition(":")
    if not colon or not port.isdigit():
        host, port = server.strip(), str(default_port)
    return f"{scheme}://{host}:{port}/{name}"
