"""Files of checkpoints and sinks on any filesystem that pyarrow supports: the Storage of engine.core.interfaces.

| scheme | a file is whole and durable because | `create` is exclusive because |
|---|---|---|
| (path), file | temporary name, fsync, rename, fsync of the directory | `link` refuses an existing name |
| s3, gs, gcs, abfs | an object appears when its upload ends, or not at all | the store refuses it: see `exclusive_create` |
| hdfs, viewfs | temporary name, then rename | it is not: looked up, then written |

Where `create` is not exclusive, two coordinators that start at the same moment can both win an epoch. The rest of the
fencing does not rely on it, since the paths of files contain their attempt.

An unfinished upload to an object store, whose writer was killed, has no name, so `sweep` does not find it: a lifecycle
rule of the bucket deletes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Final
from urllib.parse import unquote, urlsplit

from midstream.engine.core.errors import ConfigError, StorageError
from midstream.engine.core.interfaces import Storage
from midstream.engine.core.local_paths import absolute_path
from midstream.runtime.storage.exclusive_create import (
    RIGHTS,
    STORES,
    ConditionalWrites,
    check_installed,
    without_secrets,
)

TEMPORARY: Final = ".tmp-"
"""The prefix of files that were never finished; `list` does not show them."""
PIECES_PER_CALL_MAX: Final = 512
BYTES_PER_CALL_MAX: Final = 2**20

_KINDS: Final = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "abfs", "abfss": "abfs"}
"""pyarrow's name of the object store, by scheme."""
_FILE_SCHEMES: Final = ("hdfs", "viewfs")
_KNOWN: Final = ("file", *_KINDS, *_FILE_SCHEMES)


def FileStorage(url: str) -> Storage:
    """Return the storage whose root is `url`: a path, or a URL of a known scheme.

    Raises ConfigError for an unknown scheme or an invalid URL. Nothing is accessed yet.
    """
    scheme = urlsplit(url).scheme if "://" in url or url.startswith("file:") else ""
    if not url.strip():
        raise ConfigError("storage: an empty path; give a directory or a URL")
    if "\0" in url:
        raise ConfigError(f"storage {without_secrets(url)!r}: a path cannot have a NUL in it")
    if scheme in ("", "file"):
        return LocalStorage(unquote(urlsplit(url).path) if scheme else url)
    if scheme not in _KNOWN:
        raise ConfigError(
            f"storage {without_secrets(url)!r}: unknown scheme {scheme!r}; use a path or one of "
            f"{', '.join(f'{known}://' for known in _KNOWN)}"
        )
    return RemoteStorage(url, scheme)


def absolute(url: str) -> str:
    """Return a location that is the same for every process of this machine, in any working directory.

    Raises ConfigError for an empty path.
    """
    if not url.strip():
        raise ConfigError("an empty path; give a directory or a storage URL")
    return url if "://" in url or url.startswith("file:") else absolute_path(url)


def check_can_create(url: str) -> None:
    """Raise ConfigError if a package is missing that `create` needs for the storage at `url`."""
    kind = _KINDS.get(urlsplit(url).scheme)
    if kind is not None:
        check_installed(kind, without_secrets(url))


def is_exclusive(url: str) -> bool:
    """Whether only one of several concurrent calls of `create` for a file there succeeds."""
    return urlsplit(url).scheme not in _FILE_SCHEMES


def confined(path: str) -> str:
    """Return `path` if it stays below the root to which it is relative. Raises StorageError otherwise."""
    parts = path.split("/")
    if path.startswith("/") or "\0" in path or "\\" in path or ".." in parts or "." in parts or "" in parts:
        raise StorageError(f"path {path!r} is not a plain relative path; a checkpoint may only name files of its own")
    return path


class LocalStorage:
    """A directory of this machine, or one mounted on it."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(os.path.expanduser(root))

    def __repr__(self) -> str:
        return f"LocalStorage({self.root!r})"

    def read(self, path: str) -> bytes:
        with self._explained("read", path) as full, open(full, "rb") as file:
            return file.read()

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        with self._explained("read", path) as full, open(full, "rb") as file:
            count = min(length, os.fstat(file.fileno()).st_size - offset)
            if count <= 0:
                return b""
            file.seek(offset)
            return file.read(count)  # which allocates that much first

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        with self._explained("write", path) as full:
            _make_directories(os.path.dirname(full))
            temporary = _write_temporary(full, parts)
            try:
                os.rename(temporary, full)
            except BaseException:
                _remove(temporary)
                raise
            _sync_directory(os.path.dirname(full))

    def create(self, path: str, data: bytes, durable: bool = True) -> bool:
        with self._explained("create", path) as full:
            _make_directories(os.path.dirname(full))
            temporary = _write_temporary(full, [data], durable)
            try:
                os.link(temporary, full)
            except FileExistsError:
                return False
            finally:
                _remove(temporary)
            if durable:
                _sync_directory(os.path.dirname(full))
            return True

    def delete(self, path: str) -> None:
        with self._explained("delete", path) as full:
            if os.path.isdir(full) and not os.path.islink(full):
                # renamed first, so that a half-deleted directory never appears complete
                doomed = _temporary(full)
                os.rename(full, doomed)
                _remove_tree(doomed)
            else:
                _remove(full)

    def list(self, path: str) -> list[str]:
        with self._explained("list", path, root_too=True) as full:
            try:
                return sorted(name for name in os.listdir(full) if not name.startswith(TEMPORARY))
            except FileNotFoundError:
                return []

    def sweep(self, path: str, unwanted: Callable[[str], bool]) -> None:
        with self._explained("clean up", path, root_too=True) as full:
            if not os.path.isdir(full):
                return
            for name in os.listdir(full):
                if _is_left_of(name, unwanted):
                    doomed = os.path.join(full, name)
                    if os.path.isdir(doomed) and not os.path.islink(doomed):
                        _remove_tree(doomed)
                    else:
                        _remove(doomed)

    def exists(self, path: str) -> bool:
        with self._explained("look for", path) as full:
            return os.path.exists(full)

    @contextmanager
    def _explained(self, verb: str, path: str, root_too: bool = False) -> Iterator[str]:
        """Yield the full path, confined to the root; an OSError in the block becomes a StorageError with the reason."""
        full = self.root if root_too and path in ("", ".") else os.path.join(self.root, confined(path))
        root = os.path.realpath(self.root)
        parent = os.path.realpath(os.path.dirname(full) if full != self.root else full)
        if parent != root and not parent.startswith(root.rstrip("/") + "/"):
            raise StorageError(f"path {path!r} leads out of {self.root} through a symbolic link")
        try:
            yield full
        except OSError as error:
            raise StorageError(f"cannot {verb} {full}: {_explanation(error, parent)}") from error


class RemoteStorage:
    """A bucket or a distributed filesystem, accessed through pyarrow."""

    def __init__(self, url: str, scheme: str) -> None:
        import pyarrow as pa
        from pyarrow import fs

        self.url = without_secrets(url)
        try:
            self._files, self._root = fs.FileSystem.from_uri(url)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ConfigError(f"storage {self.url!r}: {str(error).replace(url, self.url)}") from None
        is_object_store = self._files.type_name in STORES
        self._conditional = ConditionalWrites(self._files, self._root, url) if is_object_store else None
        self._renames = scheme in _FILE_SCHEMES
        self._missing = fs.FileType.NotFound
        self._directory = fs.FileType.Directory
        self._selector = fs.FileSelector

    def __repr__(self) -> str:
        return f"RemoteStorage({self.url!r})"

    def read(self, path: str) -> bytes:
        with self._explained("read", path) as full, self._files.open_input_stream(full) as file:
            data: bytes = file.read()
            return data

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        with self._explained("read", path) as full, self._files.open_input_file(full) as file:
            count = min(length, file.size() - offset)
            if count <= 0:
                return b""  # read_at refuses to begin there
            data: bytes = file.read_at(count, offset)  # type: ignore[call-arg]  # its stub takes no arguments
            return data

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        with self._explained("write", path) as full:
            target = full
            if self._renames:
                self._files.create_dir(str(PurePosixPath(full).parent), recursive=True)
                target = _temporary(full)
            try:
                with self._files.open_output_stream(target) as file:
                    for piece in parts:
                        file.write(piece)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._files.delete_file(target)  # closing a stream publishes even an incomplete file
                raise
            if target != full:
                self._files.move(target, full)

    def create(self, path: str, data: bytes, durable: bool = True) -> bool:
        if self._conditional is not None:
            with self._explained("create", path) as full:
                return self._conditional.create(full, data)
        if self.exists(path):
            return False
        self.write(path, [data])
        return True

    def delete(self, path: str) -> None:
        with self._explained("delete", path) as full:
            kind = self._files.get_file_info(full).type
            if kind == self._directory:
                self._files.delete_dir(full)
            elif kind != self._missing:
                self._files.delete_file(full)

    def list(self, path: str) -> list[str]:
        with self._explained("list", path, root_too=True) as full:
            infos = self._files.get_file_info(self._selector(full, allow_not_found=True))
            return sorted(info.base_name for info in infos if not info.base_name.startswith(TEMPORARY))

    def sweep(self, path: str, unwanted: Callable[[str], bool]) -> None:
        if not self._renames:
            return  # an upload that did not end has no name
        with self._explained("clean up", path, root_too=True) as full:
            for info in self._files.get_file_info(self._selector(full, allow_not_found=True)):
                if _is_left_of(info.base_name, unwanted):
                    with contextlib.suppress(FileNotFoundError):  # its writer has renamed it, or deleted it
                        self._files.delete_file(info.path)

    def exists(self, path: str) -> bool:
        with self._explained("look for", path) as full:
            return bool(self._files.get_file_info(full).type != self._missing)

    @contextmanager
    def _explained(self, verb: str, path: str, root_too: bool = False) -> Iterator[str]:
        full = self._root if root_too and path in ("", ".") else f"{self._root.rstrip('/')}/{confined(path)}"
        try:
            yield full
        except OSError as error:
            raise StorageError(f"cannot {verb} {path!r} in {self.url}: {error}{_way_out(error)}") from error


def _temporary(full: str) -> str:
    """Return a new name in the directory of `full` that ends with `full`'s name, so that its target can be recognised
    later.
    """
    directory, _, name = full.rpartition("/")
    return f"{directory}/{TEMPORARY}{secrets.token_hex(8)}-{name}"


def _is_left_of(name: str, unwanted: Callable[[str], bool]) -> bool:
    """Whether it is a temporary name of a file that is `unwanted`."""
    _, _, final = name.removeprefix(TEMPORARY).partition("-")
    return name.startswith(TEMPORARY) and unwanted(final)


def _write_temporary(full: str, parts: Iterable[bytes | memoryview], durable: bool = True) -> str:
    """Write `parts` to a file next to `full`, synced if `durable`; it is deleted again if that fails."""
    temporary = _temporary(full)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        pieces: list[bytes | memoryview] = []
        waiting_bytes = 0
        for part in parts:
            pieces.append(part)
            waiting_bytes += memoryview(part).nbytes
            if len(pieces) == PIECES_PER_CALL_MAX or waiting_bytes >= BYTES_PER_CALL_MAX:
                _write_all(descriptor, pieces)
                pieces, waiting_bytes = [], 0
        _write_all(descriptor, pieces)
        if durable:
            os.fsync(descriptor)
    except BaseException:
        _remove(temporary)
        raise
    finally:
        os.close(descriptor)
    return temporary


def _write_all(descriptor: int, pieces: list[bytes | memoryview]) -> None:
    """Write everything, calling `writev` until it has written all."""
    views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
    while views:
        written = os.writev(descriptor, views)
        whole = 0
        for view in views:
            if written < len(view):
                break
            written -= len(view)
            whole += 1
        views = views[whole:]
        if written:
            views[0] = views[0][written:]


def _make_directories(directory: str) -> None:
    """Create missing parents of `directory`, durably: each new name is synced in its parent."""
    if os.path.isdir(directory):
        return
    parent = os.path.dirname(directory)
    _make_directories(parent)
    try:
        os.mkdir(directory)
    except FileExistsError:
        if not os.path.isdir(directory):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory) from None
    _sync_directory(parent)


def _sync_directory(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network filesystems cannot sync a directory
            raise
    finally:
        os.close(descriptor)


def _remove_tree(path: str) -> None:
    """Delete a tree, even if another process is deleting it too."""

    def failed(_function: object, _path: str, caught: tuple[type[BaseException], BaseException, object]) -> None:
        if not isinstance(caught[1], FileNotFoundError):
            raise caught[1]

    shutil.rmtree(path, onerror=failed)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(path)


_WHY: Final = {
    errno.ENOENT: "there is no such file or directory",
    errno.EACCES: "permission denied; the user that runs the job must be allowed to read and write there",
    errno.EPERM: "not permitted; the user that runs the job must be allowed to read and write there",
    errno.EROFS: "the filesystem is mounted read-only",
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is exhausted",
    errno.ENOTDIR: "a part of the path is a file, not a directory",
    errno.EISDIR: "it is a directory, not a file",
}


_WAYS_OUT: Final = {
    "ACCESS_DENIED": f"the credentials {RIGHTS}",
    "NO_SUCH_BUCKET": "create the bucket, or correct its name",
    "NETWORK_CONNECTION": "check the endpoint, and that it can be reached from here",
}
"""Remedies by fragments of pyarrow's S3 errors."""


def _way_out(error: OSError) -> str:
    return next((f"; {way_out}" for name, way_out in _WAYS_OUT.items() if name in str(error)), "")


def _explanation(error: OSError, directory: str) -> str:
    why = _WHY.get(error.errno or 0, error.strerror or str(error))
    if error.errno == errno.ENOSPC:
        with contextlib.suppress(OSError):
            disk = os.statvfs(directory)
            free, whole = (blocks * disk.f_frsize / 2**20 for blocks in (disk.f_bavail, disk.f_blocks))
            why += f" ({free:,.1f} of {whole:,.1f} MiB are free{', but no more files' if not disk.f_favail else ''})"
    return why
