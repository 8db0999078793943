"""The storage of a simulated world: files in memory, which is slow, fails, fills up, and tears files at a crash.

One `Disk` is one storage that every process of the world sees. Each operation is a point where
the process may die and where other processes may run (`World.io_point`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from midstream.engine.core.errors import StorageError
from midstream.simulation.network import SIM
from midstream.simulation.world import Bug, Killed, World

TEMPORARY: Final = ".midstream-"
MARK: Final = "/_dropped."
"""In the names of files that are created before a checkpoint is deleted."""
MARKED: Final = "marked"
DELETED: Final = "deleted"


class Disk:
    """A engine.core.interfaces.Storage. Files never change once they exist; writing one twice is a bug."""

    def __init__(self, world: World) -> None:
        self.files: dict[str, bytes] = {}
        self.torn: dict[str, bytes] = {}
        """The torn files that crashes have left, by their temporary names."""
        self.is_full = False
        self.is_gone = False
        self.failing_writes: set[int] = set()
        """The numbers of the write operations that fail."""
        self.failing_names: dict[str, int] = {}
        """How many of the next writes fail, by the file's base name."""
        self.lies = 0
        """How many of the next writes and deletions happen and are nevertheless reported as failed."""
        self.denials = 0
        """How many of the next exclusively created files are reported as having existed before."""
        self.lying_names: set[str] = set()
        """Base names: the next write of such a file is carried out, and reported as failed."""
        self.failing_parts = 0
        """How many of the next reads of parts of files fail."""
        self.deletes_late = False
        """Whether only the third try deletes the oldest checkpoint of a piece of I/O."""
        self._not_deleted: Counter[str] = Counter()
        self._deleted_in = -1
        """The last step in which something was deleted."""
        self.slow_us = 0
        """How long writing a file takes, during which other steps happen."""
        self.lied = 0
        self.denied: set[str] = set()
        """The directories in which a file was created and reported as having existed before."""
        self._unseen: dict[str, bytes] = {}
        """Files whose writing was reported as failed: `on_write` is called when one of them is first read."""
        self.hangs_us: dict[str, int] = {}
        """How long the next write hangs before it happens, by the file's base name."""
        self.before_write: dict[str, Callable[[], None]] = {}
        """Called once when a file is about to be written, by the file's base name."""
        self.before_dropping: dict[str, Callable[[], int]] = {}
        """Called when a complete checkpoint is about to be marked (`MARKED`) or deleted (`DELETED`), until it returns how
        long that hangs, and not 0.
        """
        self.failures = 0
        self.refusals = 0
        """The number of operations that were refused because the disk was gone."""
        self.writes = 0
        self.on_write: Callable[[str, bytes], None] | None = None
        """Called after every write that is not reported as failed, with the path and the content."""
        self.on_change: list[Callable[[str, bytes | None], None]] = []
        """Called after every change, with the path and the content, or None if the file was deleted."""
        self.torn_in: dict[str, int] = {}
        """The step in which each torn file was left."""
        self.refused_in = -1
        """The last step in which an operation was refused because the disk was gone."""
        self.undeleted_in: list[int] = []
        """The steps of the deletions, and of the marks before them, that were reported as failed since the last deletion
        that was not.
        """
        self._world = world

    def read(self, path: str) -> bytes:
        self._touch()
        name = _confined(path)
        data = self.files.get(name)
        if data is None:
            raise StorageError(f"cannot read {path}: there is no such file")
        if name in self._unseen and not self._world.is_inspecting:
            del self._unseen[name]
            if self.on_write is not None:
                self.on_write(name, data)
        return data

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        data = self.read(path)
        if self.failing_parts and not self._world.is_inspecting:
            self.failing_parts -= 1
            raise StorageError(f"cannot read {path}: input/output error {SIM}")
        return data[offset : offset + length]

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        name = _confined(path)
        data = b"".join(parts)
        if self.slow_us:
            self._world.hang(self.slow_us)
        self._begin_write(name, data)
        if name in self.files:
            self._world.bug(f"{name} is written a second time")
            raise Bug(name)
        self.files[name] = data
        self._world.note(("wrote", name, str(len(data)), "bytes"))
        self._tell(name, data)
        base = name.rpartition("/")[2]
        if self.lies or base in self.lying_names:
            self._unseen[name] = data
            self._lie(name, base)
        if self.on_write is not None:
            self.on_write(name, data)

    def create(self, path: str, data: bytes, durable: bool = True) -> bool:
        name = _confined(path)
        try:
            return self._create(name, data)
        except StorageError:
            if MARK in name:
                self.undeleted_in.append(self._world.step_number)
            raise

    def _create(self, name: str, data: bytes) -> bool:
        if MARK in name:
            self._about_to_drop(name, MARKED)
        self._begin_write(name, data)
        if name in self.files:
            return False
        self.files[name] = data
        self._world.note(("created", name))
        self._tell(name, data)
        if self.denials:
            self.denials -= 1
            self.lied += 1
            self.denied.add(name.partition("/")[0])
            return False
        if self.lies:
            self._lie(name)
        return True

    def delete(self, path: str) -> None:
        self._touch()
        name = _confined(path)
        if self._world.torn:
            raise Killed
        if name in self.files and name.endswith("/_metadata"):
            self._about_to_drop(name, DELETED)
        is_first = self._world.step_number != self._deleted_in
        if self.deletes_late and is_first and name.endswith("/_metadata") and self._not_deleted[name] < 2:
            self._not_deleted[name] += 1
            self.undeleted_in.append(self._world.step_number)
            self._world.note(("it cannot be deleted:", name))
            raise StorageError(f"cannot delete {name}: input/output error {SIM}")
        self._deleted_in = self._world.step_number
        below = name + "/"
        for file in [name] if name in self.files else [file for file in self.files if file.startswith(below)]:
            del self.files[file]
            self._unseen.pop(file, None)
            self._tell(file, None)
        self._world.note(("deleted", name))
        if self.lies:
            self.undeleted_in.append(self._world.step_number)
            self._lie(name)
        self.undeleted_in.clear()

    def list(self, path: str) -> list[str]:
        self._touch()
        name = _confined(path) if path not in ("", ".") else ""
        below = name + "/" if name else ""
        skip = len(below)
        return sorted({file[skip:].split("/", 1)[0] for file in self.files if file.startswith(below)})

    def sweep(self, path: str, unwanted: Callable[[str], bool]) -> None:
        self._touch()
        below = f"{_confined(path)}/{TEMPORARY}" if path else TEMPORARY
        for name in [name for name in self.torn if name.startswith(below) and unwanted(name.removeprefix(below))]:
            del self.torn[name]

    def exists(self, path: str) -> bool:
        self._touch()
        name = _confined(path)
        return name in self.files or any(file.startswith(name + "/") for file in self.files)

    def _tell(self, name: str, data: bytes | None) -> None:
        for callback in self.on_change:
            callback(name, data)

    def _lie(self, name: str, base: str = "") -> None:
        if base in self.lying_names:
            self.lying_names.remove(base)
        else:
            self.lies -= 1
        self.lied += 1
        self._world.note(("it is reported as failed:", name))
        raise StorageError(f"no answer about {name} {SIM}")

    def _about_to_drop(self, name: str, what: str) -> None:
        hook = self.before_dropping.get(what)
        hangs_us = hook() if hook is not None else 0
        if hangs_us:
            del self.before_dropping[what]
            self._world.note((name, "hangs before it is", what))
            self._world.hang(hangs_us)
            self._world.note((name, "continues to be", what))

    def _touch(self) -> None:
        self._world.io_point()
        if self.is_gone and not self._world.is_inspecting:
            self.refusals += 1
            self.refused_in = self._world.step_number
            raise StorageError(f"the storage does not answer {SIM}")

    def _begin_write(self, name: str, data: bytes) -> None:
        world = self._world
        self._touch()
        if world.torn:
            directory, _, base = name.rpartition("/")
            self.torn[f"{directory}/{TEMPORARY}{base}"] = data[: world.below(len(data) + 1)]
            self.torn_in[f"{directory}/{TEMPORARY}{base}"] = world.step_number
            raise Killed
        self.writes += 1
        base = name.rpartition("/")[2]
        if base in self.before_write:
            self.before_write.pop(base)()
        if base in self.hangs_us:
            world.note(("write of", name, "hangs"))
            world.hang(self.hangs_us.pop(base))
            world.note(("write of", name, "continues"))
        is_named = self.failing_names.get(base, 0) > 0
        if is_named:
            self.failing_names[base] -= 1
        if self.is_full or is_named or self.writes in self.failing_writes:
            self.failures += 1
            why = "the disk is full" if self.is_full else "input/output error"
            world.note(("write of", name, "fails:", why))
            raise StorageError(f"cannot write {name}: {why} {SIM}")


class Folder:
    """A directory of a disk, as a engine.core.interfaces.Storage."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = _confined(path)

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


def _confined(path: str) -> str:
    parts = path.split("/")
    if path.startswith("/") or ".." in parts or "" in parts:
        raise StorageError(f"path {path!r} leads out of the storage")
    return path
