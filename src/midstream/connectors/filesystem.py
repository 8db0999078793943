"""Where files are: paths and URLs to pyarrow filesystems, listings, globs, durable writes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.fs

from midstream.core.errors import ConfigError, StorageError
from midstream.core.local_paths import absolute_path

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_IGNORED = re.compile(r"(?:^|/)[._]|\.(?:tmp|part)\Z")
_OBJECT_STORES = ("s3", "gcs", "abfs")


def resolve(
    path: str | os.PathLike[str], filesystem: pyarrow.fs.FileSystem | None, where: str
) -> tuple[pyarrow.fs.FileSystem, str]:
    """The filesystem of `path`, and the path inside it; local paths become absolute, as slots run elsewhere.

    Raises ConfigError for a URL that pyarrow has no filesystem for.
    """
    text = os.fspath(path)
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{where}: {path!r} is not a path")
    if filesystem is not None:
        return filesystem, text.rstrip("/") or "/"
    if _SCHEME.match(text):
        try:
            found, inner = pyarrow.fs.FileSystem.from_uri(text)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ConfigError(
                f"{where}: cannot use {text!r}: {error}; give a local path, or a URL such as s3://bucket/dir"
            ) from error
        return found, inner.rstrip("/") or "/"
    try:
        return pyarrow.fs.LocalFileSystem(), absolute_path(text)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def is_local(filesystem: pyarrow.fs.FileSystem) -> bool:
    return isinstance(filesystem, pyarrow.fs.LocalFileSystem)


def appears_whole(filesystem: pyarrow.fs.FileSystem) -> bool:
    """Whether a file is there only once all of it is."""
    return filesystem.type_name in _OBJECT_STORES


def is_ignored(relative: str) -> bool:
    """Whether a reader of the directory must not see this file: hidden, or still being written."""
    return _IGNORED.search(relative) is not None


def file_info(filesystem: pyarrow.fs.FileSystem, path: str) -> Any:
    """pyarrow's FileInfo. Raises StorageError when the filesystem does not answer."""
    try:
        return filesystem.get_file_info(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be looked at: {error}") from error


def find_files(filesystem: pyarrow.fs.FileSystem, path: str) -> list[Any]:
    """FileInfos of the file, of what is below the directory, or of what the glob matches; sorted by path.

    What `is_ignored` says below a directory or glob is left out. [] when there is nothing.
    Raises StorageError when a directory cannot be listed.
    """
    info = file_info(filesystem, path)
    if info.type == pyarrow.fs.FileType.File:
        return [info]
    if info.type == pyarrow.fs.FileType.Directory:
        return sorted(_below(filesystem, path), key=_path_of)
    base = glob_base(path)
    if base == path or file_info(filesystem, base).type != pyarrow.fs.FileType.Directory:
        return []
    matches = _glob_regex(path)
    return sorted(
        (found for found in _below(filesystem, base) if matches.fullmatch(found.path)),
        key=_path_of,
    )


def _path_of(info: Any) -> str:
    return str(info.path)


def _below(filesystem: pyarrow.fs.FileSystem, directory: str) -> Iterator[Any]:
    selector = pyarrow.fs.FileSelector(directory, recursive=True)
    try:
        infos = filesystem.get_file_info(selector)
    except OSError as error:
        raise StorageError(f"{directory}: cannot be listed: {error}") from error
    for info in infos:
        if info.is_file and not is_ignored(info.path[len(directory) :].lstrip("/")):
            yield info


def glob_base(path: str) -> str:
    """The directory above the first segment with a wildcard; `path` itself when it has none."""
    head, wild, _ = re.split(r"([*?\[])", path, maxsplit=1) if re.search(r"[*?\[]", path) else (path, "", "")
    if not wild:
        return path
    return head.rsplit("/", 1)[0] or ("/" if head.startswith("/") else ".")


def _glob_regex(pattern: str) -> re.Pattern[str]:
    """`**` crosses directories, `*` and `?` do not."""
    pieces = []
    for piece in re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern):
        if piece == "**/":
            pieces.append("(?:.*/)?")
        elif piece == "**":
            pieces.append(".*")
        elif piece == "*":
            pieces.append("[^/]*")
        elif piece == "?":
            pieces.append("[^/]")
        elif piece.startswith("[") and piece.endswith("]"):
            pieces.append("[" + ("^" + piece[2:-1] if piece[1] == "!" else piece[1:-1]).replace("\\", r"\\") + "]")
        else:
            pieces.append(re.escape(piece))
    try:
        return re.compile("".join(pieces))
    except re.error as error:
        raise ConfigError(f"{pattern}: not a pattern of file names: {error}") from error


def make_durable(filesystem: pyarrow.fs.FileSystem, path: str) -> None:
    """After this a local file or directory survives a power cut; object stores are durable by themselves."""
    if not is_local(filesystem):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(filesystem: pyarrow.fs.FileSystem, path: str) -> None:
    """Object stores have no directories: there a name with slashes is enough."""
    if filesystem.type_name not in _OBJECT_STORES:
        filesystem.create_dir(path, recursive=True)


def delete_if_there(filesystem: pyarrow.fs.FileSystem, path: str) -> None:
    if filesystem.get_file_info(path).type == pyarrow.fs.FileType.File:
        with suppress(FileNotFoundError):
            filesystem.delete_file(path)


def names_in(filesystem: pyarrow.fs.FileSystem, directory: str) -> list[str]:
    """Names of what lies right in `directory`, sorted; [] if there is no such directory."""
    selector = pyarrow.fs.FileSelector(directory, allow_not_found=True)
    return sorted(str(info.base_name) for info in filesystem.get_file_info(selector))


def place_of(filesystem: pyarrow.fs.FileSystem, directory: str) -> str:
    """What a committable says of where it belongs: the kind of filesystem, and the directory in it; no URL, which may hold a password."""
    return f"{filesystem.type_name}:{directory}"


def directory_of(place: str, filesystem: pyarrow.fs.FileSystem, where: str) -> str | None:
    """The directory of a `place_of`; None when it is in a filesystem of another kind.

    Raises StorageError for what `place_of` has not made: places come from checkpoints.
    """
    kind, _, directory = place.partition(":")
    if kind != filesystem.type_name:
        return None
    root = "/" if directory.startswith("/") else ""
    if (is_local(filesystem) and not root) or not _is_plain(directory.removeprefix(root)):
        raise StorageError(
            f"{where}: {directory!r} is not the plain path of a directory; the checkpoint cannot be believed"
        )
    return directory


def below(filesystem: pyarrow.fs.FileSystem, root: str, relative: str) -> str:
    """The path of `relative` in `root`. Raises StorageError when it leads out of there, also through a symbolic link."""
    if not _is_plain(relative):
        raise StorageError(f"{relative!r} is not a plain path in {root}; a checkpoint may only name files of its sink")
    path = f"{root}/{relative}"
    if is_local(filesystem):
        inside, parent = os.path.realpath(root), os.path.realpath(os.path.dirname(path))
        if parent != inside and not parent.startswith(inside.rstrip("/") + "/"):
            raise StorageError(f"{relative!r} leads out of {root} through a symbolic link")
    return path


def _is_plain(path: str) -> bool:
    """Whether each piece of it is a name."""
    return "\0" not in path and "\\" not in path and {"", ".", ".."}.isdisjoint(path.split("/"))
