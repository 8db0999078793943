"""Exclusive creation of files in an object store, by a put that the store refuses if the object exists.

pyarrow, which reads and writes everything else, has no such put, but obstore has (`If-None-Match: *`, or its
equivalents of Azure and Google). obstore is given what pyarrow has found in the URL and the environment, so both use
the same location with the same rights; the first `create` checks this with an object of its own, and also that the store
honours the condition.

An answer may be lost after the store has carried out the request: then the next try finds an object, namely its own. So
every call gives its object a unique name, in the object's metadata, by which it recognises it. That works whatever the
content, and however late an abandoned put arrives, since the condition applies to it too.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from datetime import UTC
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from midstream.connectors.common.optional_packages import require
from midstream.engine.core.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from pyarrow import fs

EXTRA: Final = "object-stores"
STORES: Final = ("s3", "gcs", "abfs")
"""The types of pyarrow's filesystems that are object stores."""
RIGHTS: Final = "must allow reading, writing, listing and deleting objects there"
TRIES: Final = 5
FIRST_PAUSE_S: Final = 0.25
"""The pause before the second try; it doubles before each further one."""
CONNECT_S: Final = 5
REQUEST_S: Final = 10
"""The timeout of a request: the objects are small, so a longer one is lost."""

_NAME: Final = "midstreamclaim"
"""The key of the name in the object's metadata. Letters only: Azure allows no hyphens, and proxies drop headers with
underscores.
"""
_log = logging.getLogger(__name__)


def without_secrets(url: str) -> str:
    """Return the URL as messages show it: without user and password, and without parameter values that may be keys."""
    scheme, mark, rest = url.partition("://")
    user = re.match(r"[^/@:?]*(:(?!\d+/)[^@?]*)?@", rest)  # with a password that has a slash in it, too, but not a port
    if mark and user is not None:
        container = user[0].rstrip("@").partition(":")[0] if scheme.startswith("abfs") else ""
        rest = f"{container}{'@' if container else ''}{rest[user.end() :]}"
    shown = f"{scheme}{mark}{rest}"
    return re.sub(r"(?i)([?&][^=&]*(?:key|secret|token|password|sig)[^=&]*=)[^&#]*", r"\1…", shown)


def check_installed(kind: str, who: str) -> None:
    """Raise ConfigError, with the command that installs it, if a package that `create` needs is missing."""
    for module in ("obstore", "botocore") if kind == "s3" else ("obstore",):
        require(module, EXTRA, f"{who}: allowing only one driver to resume a job")


class ConditionalWrites:
    """Exclusive creation in one bucket. Its methods block, and may be called from any thread."""

    def __init__(self, files: fs.FileSystem, root: str, url: str) -> None:
        """Prepare for one bucket. `root`: the bucket and path in `files`, which pyarrow has made from `url`."""
        self._files = files
        self._url = url
        self._root = root.strip("/")
        self._bucket = self._root.partition("/")[0]
        self._shown = without_secrets(url)
        self._proof = threading.Lock()
        self._store: Any = None

    def create(self, full: str, data: bytes) -> bool:
        """Create the object at `full`, a path below the root; False if it exists. Raises StorageError."""
        with self._proof:
            if self._store is None:
                check_installed(self._files.type_name, self._shown)
                self._store = self._proven(self._open())
        return self._create(self._store, full, data)

    def _open(self) -> Any:
        options = _options(self._files)
        client = _client(options, self._url)
        if self._files.type_name == "s3":
            return _open_s3(self._bucket, options, client, self._shown)
        if self._files.type_name == "gcs":
            return _open_gcs(self._bucket, options, client)
        password = unquote(urlsplit(self._url).password or "")  # pyarrow does not reveal it
        return _open_azure(self._bucket, {**options, "account_key": options["account_key"] or password}, client)

    def _proven(self, store: Any) -> Any:
        """Return `store` if it refuses the second of two puts with one name, and pyarrow sees what the first has
        written.
        """
        from pyarrow import fs

        if not {"", ".", ".."}.isdisjoint(self._root.split("/")):
            raise ConfigError(
                f"{self._shown}: a part of its path is empty, or . or .., which obstore does not accept; give a "
                "directory without them"
            )
        probe = f"{self._root}/.tmp-{secrets.token_hex(8)}-probe"
        won = [self._create(store, probe, b"") for _ in range(2)]
        is_seen = self._files.get_file_info(probe).type != fs.FileType.NotFound
        if is_seen:
            self._files.delete_file(probe)
        if won != [True, False]:
            raise StorageError(
                f"{self._shown}: the store ignores the condition of a write that must create an object (If-None-Match: *), "
                "so two drivers of one job could both continue. Use a store that has conditional writes, as Amazon S3, "
                "Google Cloud Storage, Azure and current versions of MinIO and Ceph do, or a file system"
            )
        if not is_seen:
            raise StorageError(
                f"{self._shown}: pyarrow does not find what obstore writes there, so they do not use the same place; "
                "compare "
                "the settings of endpoint and region in the URL with those in the environment (AWS_…, GOOGLE_…, AZURE_…)"
            )
        return store

    def _create(self, store: Any, full: str, data: bytes) -> bool:
        key = full.lstrip("/").partition("/")[2]
        name = secrets.token_hex(16)
        reason = ""
        for number in range(TRIES):
            if number:
                _log.warning("creating %r in %s failed and is retried: %s", key, self._shown, reason)
                time.sleep(FIRST_PAUSE_S * 2 ** (number - 1))
            try:
                found = _put(store, key, data, name)
            except _refusals() as error:
                raise StorageError(f"cannot create {key!r} in {self._shown}: {_refused(error)}") from None
            except Exception as error:  # noqa: BLE001 - after any error, a put with this name may be repeated
                reason = explanation(error)
                continue
            if found is not None:
                return found == name
            reason = "the store reports that it exists, but does not find it"
        raise StorageError(
            f"cannot create {key!r} in {self._shown}: {TRIES} tries failed, the last one because {reason}. It is "
            "unknown whether it exists now"
        )


def _put(store: Any, key: str, data: bytes, name: str) -> str | None:
    """Put the object unless it exists. Returns the name given to the object that exists now; None if there is none."""
    obstore = import_module("obstore")
    try:
        obstore.put(store, key, data, mode="create", attributes={_NAME: name})
        return name
    except import_module("obstore.exceptions").AlreadyExistsError:
        try:
            return str(obstore.get(store, key, options={"head": True}).attributes.get(_NAME, ""))
        except FileNotFoundError:
            return None


def _refusals() -> tuple[type[Exception], ...]:
    """Return the exceptions that a retry would not change."""
    found = import_module("obstore.exceptions")
    return (
        FileNotFoundError,
        found.PermissionDeniedError,
        found.UnauthenticatedError,
        found.InvalidPathError,
        found.NotSupportedError,
    )


def _refused(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{explanation(error)}; create the bucket, or correct its name"
    if type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
        return f"{explanation(error)}; the driver's credentials {RIGHTS}"
    return explanation(error)


def explanation(error: BaseException) -> str:
    """Return what the store, or the connection to it, has reported, in one line."""
    text, _, inside = str(error).partition("\n\nDebug source")
    details = [match[1] for tag in ("Code", "Message") if (match := re.search(f"<{tag}>([^<]*)</{tag}>", text))]
    status = re.search(r"status code: (\d+)", text)
    if details:
        return f"{'HTTP ' + status[1] + ' ' if status else ''}{': '.join(details)}"
    if "token request" in text:
        return f"its credentials cannot be obtained ({' '.join(text.split())[:300]})"
    if "error sending request" not in text:
        return " ".join(text.split())[:300]
    request = re.search(r"(?:PUT|HEAD|GET) \S+", text)
    if "Timeout" in inside:
        cause = f"no answer within {REQUEST_S} s"
    elif "IncompleteMessage" in inside:
        cause = "no answer"
    else:
        found = re.findall(r'(?:message|error): "([^"]*)"', inside)
        cause = found[-1] if found else "no connection"
    return f"{request[0] if request else 'a request'} failed: {cause}"


# ---- what pyarrow has, for obstore -----------------------------------------


def _options(files: fs.FileSystem) -> dict[str, Any]:
    """Return pyarrow's settings from URL and environment, with which it sends a filesystem to other processes."""
    reduced: Any = files.__reduce__()
    _, (options,) = reduced
    return dict(options)


def _open_s3(bucket: str, options: dict[str, Any], client: dict[str, Any], shown: str) -> Any:
    region, endpoint = options["region"] or "us-east-1", options["endpoint_override"]
    if not endpoint:
        endpoint = f"https://s3.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"
    elif "://" not in endpoint:
        endpoint = f"{options['scheme'] or 'https'}://{endpoint}"
    virtual = bool(options.get("force_virtual_addressing"))
    if virtual:
        endpoint = endpoint.replace("://", f"://{bucket}.", 1)
    config = {
        "region": region,
        "endpoint": endpoint,
        "aws_endpoint_url_s3": endpoint,  # otherwise the environment's takes precedence
        "virtual_hosted_style_request": virtual,
        "conditional_put": "etag",
        "skip_signature": bool(options["anonymous"]),
    }
    # pyarrow's S3 ignores HTTP_PROXY and the like, and this is the only way to make obstore ignore them too
    client["client_options"] |= {"proxy_url": "http://127.0.0.1:9", "proxy_excludes": urlsplit(endpoint).hostname or ""}
    provider = None if options["anonymous"] else _aws_credentials(options, shown)
    return import_module("obstore.store").S3Store(bucket, config=config, credential_provider=provider, **client)


def _aws_credentials(options: dict[str, Any], shown: str) -> Callable[[], dict[str, Any]]:
    """Return the credentials of the URL, or those that AWS's libraries find: environment, profile, role of the machine
    or pod.
    """
    if options["access_key"]:
        found = {"access_key_id": options["access_key"], "secret_access_key": options["secret_key"]}
        return lambda: {**found, "token": options["session_token"] or None, "expires_at": None}

    try:
        credentials = import_module("botocore.session").Session().get_credentials()
    except import_module("botocore.exceptions").BotoCoreError as error:
        raise StorageError(f"{shown}: its credentials cannot be obtained: {error}") from error
    if credentials is None:
        raise StorageError(
            f"{shown}: no credentials were found for it. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, where "
            "the driver and the slots run, or give the machine or pod a role"
        )

    def current() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()  # it renews them in time
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": None if frozen.token is None else _soon(),
        }

    return current


def _soon() -> Any:
    from datetime import datetime, timedelta

    return datetime.now(UTC) + timedelta(minutes=1)


def _open_gcs(bucket: str, options: dict[str, Any], client: dict[str, Any]) -> Any:
    config: dict[str, Any] = {}
    if options["endpoint_override"]:
        config["base_url"] = f"{options['scheme'] or 'https'}://{options['endpoint_override']}"
    provider = None
    if (
        options["anonymous"] or options["access_token"]
    ):  # anonymous: without a provider, obstore would look for credentials
        provider = {"token": options["access_token"], "expires_at": None}.copy
    return import_module("obstore.store").GCSStore(bucket, config=config, credential_provider=provider, **client)


def _open_azure(bucket: str, options: dict[str, Any], client: dict[str, Any]) -> Any:
    names = {"account_name": "account_name", "account_key": "account_key", "client_id": "client_id"}
    names |= {"client_secret": "client_secret", "tenant_id": "tenant_id", "sas_token": "sas_key"}
    config = {ours: options[theirs] for theirs, ours in names.items() if options.get(theirs)}
    scheme, authority = options["blob_storage_scheme"] or "https", options["blob_storage_authority"]
    account = config.get("account_name", "")
    config["endpoint"] = (
        f"{scheme}://{account}{authority}" if authority.startswith(".") else f"{scheme}://{authority}/{account}"
    )
    return import_module("obstore.store").AzureStore(bucket, config=config, **client)


def _client(options: dict[str, Any], url: str) -> dict[str, Any]:
    """Return options of the client. Retries are counted in this module, not in obstore."""
    client: dict[str, Any] = {"allow_http": True, "connect_timeout": f"{CONNECT_S}s", "timeout": f"{REQUEST_S}s"}
    authorities = options.get("tls_ca_file_path")
    if authorities:
        try:
            with open(authorities, "rb") as file:
                client["root_certificate"] = file.read()
        except OSError as error:
            raise ConfigError(f"tls_ca_file_path={authorities}: {os.strerror(error.errno or 0)}") from error
    if dict(parse_qsl(urlsplit(url).query)).get("tls_verify_certificates", "").lower() in ("false", "0"):
        client["allow_invalid_certificates"] = True  # pyarrow does not reveal it
    return {"client_options": client, "retry_config": {"max_retries": 0}}
