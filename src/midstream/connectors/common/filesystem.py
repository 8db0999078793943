"""Paths and URLs as pyarrow filesystems, listings, globs, durable writes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.fs

from midstream.engine.core.errors import ConfigError, DataError, StorageError
from midstream.engine.core.local_paths import absolute_path

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_IGNORED = re.compile(r"(?:^|/)[._]|\.(?:tmp|part)\Z")
_OBJECT_STORES = ("s3", "gcs", "abfs")
_DELTA_LOG = "_delta_log"


def resolve(
    path: str | os.PathLike[str], filesystem: pyarrow.fs.FileSystem | None, where: str
) -> tuple[pyarrow.fs.FileSystem, str]:
    """Return the filesystem of `path`, and the path in it; local paths become absolute, since slots run elsewhere.

    Raises ConfigError for a URL for which pyarrow has no filesystem.
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
    """Whether a file becomes visible only when it is complete."""
    return filesystem.type_name in _OBJECT_STORES


def is_ignored(relative: str) -> bool:
    """Whether readers of the directory must ignore this file: it is hidden, or still being written."""
    return _IGNORED.search(relative) is not None


def file_info(filesystem: pyarrow.fs.FileSystem, path: str) -> Any:
    """Return pyarrow's FileInfo. Raises StorageError if the filesystem does not answer."""
    try:
        return filesystem.get_file_info(path)
    except OSError as error:
        raise StorageError(f"{path}: its status cannot be read: {error}") from error


def find_files(filesystem: pyarrow.fs.FileSystem, path: str) -> list[Any]:
    """Return FileInfos of the file, of the files below the directory, or of those that match the glob; sorted by path.

    Below a directory or glob, files that `is_ignored` excludes are left out. Returns [] if there are none. Raises
    StorageError if a directory cannot be listed, or if a link leads to a file that is found anyway, and ConfigError for the
    files of a Delta table.
    """
    info = file_info(filesystem, path)
    if info.type == pyarrow.fs.FileType.File:
        return [info]
    if info.type == pyarrow.fs.FileType.Directory:
        return _Listing(filesystem, path).files(lambda _: True)
    base = glob_base(path)
    if base == path or file_info(filesystem, base).type != pyarrow.fs.FileType.Directory:
        return []
    matches = _glob_regex(path)
    return _Listing(filesystem, base).files(lambda found: matches.fullmatch(found.path) is not None)


def _path_of(info: Any) -> str:
    return str(info.path)


class _Listing:
    """The files below `root`, and what is noticed on the way to them."""

    def __init__(self, filesystem: pyarrow.fs.FileSystem, root: str) -> None:
        self._filesystem = filesystem
        self._root = root
        self._has_links = False
        self._tables: set[str] = set()
        """Directories of Delta tables."""

    def files(self, is_wanted: Callable[[Any], bool]) -> list[Any]:
        found = self._below_locally(self._root, ()) if is_local(self._filesystem) else self._below()
        files = sorted(filter(is_wanted, found), key=_path_of)
        if self._has_links:
            self._check_once(files)
        for file in files if self._tables else ():
            for table in self._tables:
                # some filesystems leave out the first slash
                if file.path.lstrip("/").startswith(f"{table.lstrip('/')}/"):
                    raise ConfigError(
                        f"{table}: is a Delta table, whose directory also has files that are no longer, or not yet, part of "
                        "it; read it with env.read_delta(…)"
                    )
        return files

    def _below(self) -> Iterator[Any]:
        for info in _listed(self._filesystem, self._root, recursive=True):
            relative = _relative(info, self._root)
            if info.is_file and not is_ignored(relative):
                yield info
            self._notice_table(relative)

    def _notice_table(self, relative: str) -> None:
        above = relative.split("/")
        if _DELTA_LOG in above:
            self._tables.add("/".join([self._root, *above[: above.index(_DELTA_LOG)]]))

    def _below_locally(self, directory: str, above: tuple[str, ...]) -> Iterator[Any]:
        """Yield the files below one directory after the other: a link to a directory above it would never end.

        `above`: the directories that lead to this one, without links.
        """
        try:
            infos = _listed(self._filesystem, directory, recursive=False)
            links = _links_in(directory)
        except StorageError as error:
            if above and isinstance(error.__cause__, FileNotFoundError):
                return  # it was deleted after the directory above it was listed
            raise
        above = (*above, os.path.realpath(directory))
        for info in infos:
            relative = _relative(info, self._root)
            if is_ignored(relative):
                self._notice_table(relative)
                continue
            is_link = info.base_name in links
            self._has_links |= is_link
            if info.is_file:
                yield info
            elif info.type == pyarrow.fs.FileType.Directory:
                if is_link:
                    target = os.path.realpath(info.path)
                    if any(os.path.commonpath((each, target)) == target for each in above):
                        raise DataError(
                            f"{info.path}: links back to {target}, so its files would be found over and over; remove the "
                            "link, or begin its name with a dot"
                        )
                yield from self._below_locally(info.path, above)

    def _check_once(self, files: list[Any]) -> None:
        names: dict[str, str] = {}
        for file in files:
            first = names.setdefault(os.path.realpath(file.path), file.path)
            if first != file.path:
                raise DataError(
                    f"{file.path}: is the same file as {first}, by a link, so its rows would be read twice; remove the link, "
                    "or begin its name with a dot"
                )


def _links_in(directory: str) -> set[str]:
    try:
        with os.scandir(directory) as entries:
            return {entry.name for entry in entries if entry.is_symlink()}
    except OSError as error:
        raise StorageError(f"{directory}: cannot be listed: {error}") from error


def _relative(info: Any, directory: str) -> str:
    try:
        return str(info.path[len(directory) :].lstrip("/"))
    except UnicodeDecodeError as error:
        raise DataError(f"{error.object!r}: the name is not UTF-8; rename the file") from error


def _listed(filesystem: pyarrow.fs.FileSystem, directory: str, *, recursive: bool) -> list[Any]:
    try:
        return filesystem.get_file_info(pyarrow.fs.FileSelector(directory, recursive=recursive))
    except OSError as error:
        raise StorageError(f"{directory}: cannot be listed: {error}") from error


def glob_base(path: str) -> str:
    """Return the directory above the first segment with a wildcard; `path` itself if it has none."""
    head, wild, _ = re.split(r"([*?\[])", path, maxsplit=1) if re.search(r"[*?\[]", path) else (path, "", "")
    if not wild:
        return path
    return head.rsplit("/", 1)[0] or ("/" if head.startswith("/") else ".")


def _glob_regex(pattern: str) -> re.Pattern[str]:
    """Compile a glob: `**` crosses directories, `*` and `?` do not."""
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
            characters = "^" + piece[2:-1] if piece[1] == "!" else piece[1:-1]
            pieces.append("[" + re.sub(r"[\\\[&|~]", r"\\\g<0>", characters) + "]")
        else:
            pieces.append(re.escape(piece))
    try:
        return re.compile("".join(pieces), re.DOTALL)  # names may contain line ends
    except re.error as error:
        raise ConfigError(f"{pattern}: not a valid file name pattern: {error}") from error


def make_durable(filesystem: pyarrow.fs.FileSystem, path: str) -> None:
    """Make a local file or directory survive a power failure; object stores are durable anyway."""
    if not is_local(filesystem):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(filesystem: pyarrow.fs.FileSystem, path: str) -> None:
    """Create a directory, except in object stores, which need only a name with slashes."""
    if filesystem.type_name not in _OBJECT_STORES:
        filesystem.create_dir(path, recursive=True)


def delete_if_there(filesystem: pyarrow.fs.FileSystem, path: str) -> None:
    if filesystem.get_file_info(path).type == pyarrow.fs.FileType.File:
        with suppress(FileNotFoundError):
            filesystem.delete_file(path)


def names_in(filesystem: pyarrow.fs.FileSystem, directory: str) -> list[str]:
    """Return the names right in `directory`, sorted; [] if there is no such directory."""
    selector = pyarrow.fs.FileSelector(directory, allow_not_found=True)
    return sorted(str(info.base_name) for info in filesystem.get_file_info(selector))


def location_of(filesystem: pyarrow.fs.FileSystem, directory: str) -> str:
    """Return the location of a directory, as committables record it: the kind of filesystem and the path.

    It is not a URL, which may contain a password.
    """
    return f"{filesystem.type_name}:{directory}"


def directory_of(location: str, filesystem: pyarrow.fs.FileSystem, where: str) -> str | None:
    """Return the directory of a `location_of`; None if it is in a filesystem of another kind.

    Raises StorageError for a location not made by `location_of`, since locations come from checkpoints.
    """
    kind, _, directory = location.partition(":")
    if kind != filesystem.type_name:
        return None
    root = "/" if directory.startswith("/") else ""
    if (is_local(filesystem) and not root) or not _is_plain(directory.removeprefix(root)):
        raise StorageError(
            f"{where}: {directory!r} is not the plain path of a directory; the checkpoint is corrupt or forged"
        )
    return directory


def below(filesystem: pyarrow.fs.FileSystem, root: str, relative: str) -> str:
    """Return the path of `relative` in `root`. Raises StorageError if it leads out of that, also through a symbolic
    link.
    """
    if not _is_plain(relative):
        raise StorageError(f"{relative!r} is not a plain path in {root}; a checkpoint may only name files of its sink")
    path = f"{root}/{relative}"
    if is_local(filesystem):
        inside, parent = os.path.realpath(root), os.path.realpath(os.path.dirname(path))
        if parent != inside and not parent.startswith(inside.rstrip("/") + "/"):
            raise StorageError(f"{relative!r} leads out of {root} through a symbolic link")
    return path


def _is_plain(path: str) -> bool:
    """Whether each segment of the path is a name."""
    return "\0" not in path and "\\" not in path and {"", ".", ".."}.isdisjoint(path.split("/"))
