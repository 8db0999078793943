"""The storage of a run of the laboratory: it also lies, hangs, fills up, and loses the race with other drivers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from midstream.engine.core.errors import StorageError
from midstream.simulation.disk import Disk, confined
from midstream.simulation.network import SIM
from midstream.simulation.world import World

MARK: Final = "/_dropped."
"""In the names of files that are created before a checkpoint is deleted."""
MARKED: Final = "marked"
DELETED: Final = "deleted"


class FaultyDisk(Disk):
    """A disk with faults that users' jobs do not meet."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.is_full = False
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
        self.before_dropping: dict[str, Callable[[], int]] = {}
        """Called when a complete checkpoint is about to be marked (`MARKED`) or deleted (`DELETED`), until it returns how
        long that hangs, and not 0.
        """
        self.refusals = 0
        """The number of operations that were refused because the disk was gone."""
        self.torn_in: dict[str, int] = {}
        """The step in which each torn file was left."""
        self.refused_in = -1
        """The last step in which an operation was refused because the disk was gone."""
        self.undeleted_in: list[int] = []
        """The steps of the deletions, and of the marks before them, that were reported as failed since the last deletion
        that was not.
        """

    def read(self, path: str) -> bytes:
        data = super().read(path)
        name = confined(path)
        if name in self._unseen and not self._world.is_inspecting:
            del self._unseen[name]
            super()._written(name, data)
        return data

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        data = super().read_range(path, offset, length)
        if self.failing_parts and not self._world.is_inspecting:
            self.failing_parts -= 1
            raise StorageError(f"cannot read {path}: input/output error {SIM}")
        return data

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        if self.slow_us:
            self._world.hang(self.slow_us)
        super().write(path, parts)

    def create(self, path: str, data: bytes, durable: bool = True) -> bool:
        name = confined(path)
        try:
            if MARK in name:
                self._about_to_drop(name, MARKED)
            if not super().create(path, data, durable):
                return False
            if self.denials:
                self.denials -= 1
                self.lied += 1
                self.denied.add(name.partition("/")[0])
                return False
            if self.lies:
                self._lie(name)
        except StorageError:
            if MARK in name:
                self.undeleted_in.append(self._world.step_number)
            raise
        return True

    def _touch(self) -> None:
        try:
            super()._touch()
        except StorageError:
            self.refusals += 1
            self.refused_in = self._world.step_number
            raise

    def _tear(self, name: str, data: bytes) -> None:
        super()._tear(name, data)
        self.torn_in[name] = self._world.step_number

    def _about_to_write(self, name: str, base: str) -> None:
        super()._about_to_write(name, base)
        if base in self.hangs_us:
            self._world.note(("write of", name, "hangs"))
            self._world.hang(self.hangs_us.pop(base))
            self._world.note(("write of", name, "continues"))

    def _failure(self, base: str) -> str:
        why = super()._failure(base)
        return "the disk is full" if self.is_full else why

    def _changed(self, name: str, data: bytes | None) -> None:
        if data is None:
            self._unseen.pop(name, None)
        super()._changed(name, data)

    def _written(self, name: str, data: bytes) -> None:
        base = name.rpartition("/")[2]
        if self.lies or base in self.lying_names:
            self._unseen[name] = data
            self._lie(name, base)
        super()._written(name, data)

    def _delete(self, name: str) -> None:
        world = self._world
        is_checkpoint = name.endswith("/_metadata")
        if name in self.files and is_checkpoint:
            self._about_to_drop(name, DELETED)
        is_first = world.step_number != self._deleted_in
        if self.deletes_late and is_first and is_checkpoint and self._not_deleted[name] < 2:
            self._not_deleted[name] += 1
            self.undeleted_in.append(world.step_number)
            world.note(("it cannot be deleted:", name))
            raise StorageError(f"cannot delete {name}: input/output error {SIM}")
        self._deleted_in = world.step_number
        super()._delete(name)
        if self.lies:
            self.undeleted_in.append(world.step_number)
            self._lie(name)
        self.undeleted_in.clear()

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
