"""The storage of a simulated world: files in memory, which fails, goes away, and tears files at a crash.

One `Disk` is one storage that every process of the world sees. Each operation is a point where
the process may die and where other processes may run (`World.io_point`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from midstream.engine.core.errors import StorageError
from midstream.simulation.network import SIM
from midstream.simulation.world import Bug, Killed, World

TEMPORARY: Final = ".midstream-"


class Disk:
    """A engine.core.interfaces.Storage. Files never change once they exist; writing one twice is a bug."""

    def __init__(self, world: World) -> None:
        self.files: dict[str, bytes] = {}
        self.torn: dict[str, bytes] = {}
        """The torn files that crashes have left, by their temporary names."""
        self.is_gone = False
        self.failing_writes: set[int] = set()
        """The numbers of the write operations that fail."""
        self.failing_names: dict[str, int] = {}
        """How many of the next writes fail, by the file's base name."""
        self.before_write: dict[str, Callable[[], None]] = {}
        """Called once when a file is about to be written, by the file's base name."""
        self.writes = 0
        self.on_write: Callable[[str, bytes], None] | None = None
        """Called after every write that is not reported as failed, with the path and the content."""
        self.on_change: list[Callable[[str, bytes | None], None]] = []
        """Called after every change, with the path and the content, or None if the file was deleted."""
        self._world = world

    def read(self, path: str) -> bytes:
        self._touch()
        data = self.files.get(confined(path))
        if data is None:
            raise StorageError(f"cannot read {path}: there is no such file")
        return data

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        return self.read(path)[offset : offset + length]

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        name = confined(path)
        data = b"".join(parts)
        self._begin_write(name, data)
        if name in self.files:
            self._world.bug(f"{name} is written a second time")
            raise Bug(name)
        self.files[name] = data
        self._world.note(("wrote", name, str(len(data)), "bytes"))
        self._changed(name, data)
        self._written(name, data)

    def create(self, path: str, data: bytes, durable: bool = True) -> bool:
        name = confined(path)
        self._begin_write(name, data)
        if name in self.files:
            return False
        self.files[name] = data
        self._world.note(("created", name))
        self._changed(name, data)
        return True

    def delete(self, path: str) -> None:
        self._touch()
        if self._world.torn:
            raise Killed
        self._delete(confined(path))

    def list(self, path: str) -> list[str]:
        self._touch()
        name = confined(path) if path not in ("", ".") else ""
        below = name + "/" if name else ""
        skip = len(below)
        return sorted({file[skip:].split("/", 1)[0] for file in self.files if file.startswith(below)})

    def sweep(self, path: str, unwanted: Callable[[str], bool]) -> None:
        self._touch()
        below = f"{confined(path)}/{TEMPORARY}" if path else TEMPORARY
        for name in [name for name in self.torn if name.startswith(below) and unwanted(name.removeprefix(below))]:
            del self.torn[name]

    def exists(self, path: str) -> bool:
        self._touch()
        name = confined(path)
        return name in self.files or any(file.startswith(name + "/") for file in self.files)

    def _touch(self) -> None:
        self._world.io_point()
        if self.is_gone and not self._world.is_inspecting:
            raise StorageError(f"the storage does not answer {SIM}")

    def _begin_write(self, name: str, data: bytes) -> None:
        world = self._world
        self._touch()
        directory, _, base = name.rpartition("/")
        if world.torn:
            self._tear(f"{directory}/{TEMPORARY}{base}", data)
            raise Killed
        self.writes += 1
        self._about_to_write(name, base)
        why = self._failure(base)
        if why:
            world.note(("write of", name, "fails:", why))
            raise StorageError(f"cannot write {name}: {why} {SIM}")

    def _tear(self, name: str, data: bytes) -> None:
        self.torn[name] = data[: self._world.below(len(data) + 1)]

    def _about_to_write(self, name: str, base: str) -> None:
        if base in self.before_write:
            self.before_write.pop(base)()

    def _failure(self, base: str) -> str:
        """Return why this write fails; "" if it does not."""
        is_named = self.failing_names.get(base, 0) > 0
        if is_named:
            self.failing_names[base] -= 1
        return "input/output error" if is_named or self.writes in self.failing_writes else ""

    def _changed(self, name: str, data: bytes | None) -> None:
        for callback in self.on_change:
            callback(name, data)

    def _written(self, name: str, data: bytes) -> None:
        if self.on_write is not None:
            self.on_write(name, data)

    def _delete(self, name: str) -> None:
        below = name + "/"
        for file in [name] if name in self.files else [file for file in self.files if file.startswith(below)]:
            del self.files[file]
            self._changed(file, None)
        self._world.note(("deleted", name))


class Folder:
    """A directory of a disk, as a engine.core.interfaces.Storage."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = confined(path)

    def _below(self, path: str) -> str:
        return f"{self._path}/{path}" if path not in ("", ".") else self._path

    def read(self, path: str) -> bytes:
        return self._disk.read(self._below(path))

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        return self._disk.read_range(self._below(path), offset, length)

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        self._disk.write(self._below(path), parts)

    def create(self, path: str, data: bytes, durable: bool = True) -> bool:
        return self._disk.create(self._below(path), data, durable)

    def delete(self, path: str) -> None:
        self._disk.delete(self._below(path))

    def list(self, path: str) -> list[str]:
        return self._disk.list(self._below(path))

    def sweep(self, path: str, unwanted: Callable[[str], bool]) -> None:
        self._disk.sweep(self._below(path), unwanted)

    def exists(self, path: str) -> bool:
        return self._disk.exists(self._below(path))


def confined(path: str) -> str:
    """Return the path. Raises StorageError if it leads out of the storage."""
    parts = path.split("/")
    if path.startswith("/") or ".." in parts or "" in parts:
        raise StorageError(f"path {path!r} leads out of the storage")
    return path
