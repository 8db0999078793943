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
    server = without_password(url.scheme, url.netloc)
    return f"{_SCHEMES.get(url.scheme, url.scheme)}://{server}{url.path.rstrip('/')}"


def location_uri(location: str) -> str:
    """Return the URI of a location in the metadata of a table: a URL, or a path of the local filesystem."""
    scheme, colon, path = location.partition(":")
    if not colon or "/" in scheme:
        return f"file://{location}"
    if not path.startswith("//"):  # as Hadoop writes it: file:/lake/orders
        return f"{scheme}://{path}"
    return f"{_SCHEMES.get(scheme, scheme)}:{path.rstrip('/')}"


def without_password(scheme: str, server: str) -> str:
    """Return the server of a URL without the user, whose name may be followed by a password; where the container of a
    storage account stands in the user's place, with that.
    """
    user, _, host = server.rpartition("@")
    container = user.partition(":")[0]
    return f"{container}@{host}" if container and scheme in _CONTAINER_AS_USER else host


def server_uri(scheme: str, server: str, default_port: int, name: str) -> str:
    """Return the URI of what has this name on a server, which is given with or without a port."""
    host, colon, port = server.strip().rpartition(":")
    if not colon or not port.isdigit():
        host, port = server.strip(), str(default_port)
    return f"{scheme}://{host}:{port}/{name}"
