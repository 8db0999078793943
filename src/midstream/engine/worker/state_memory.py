"""The memory that a slot's state in columns takes: what is above the limit is moved to the slot's local disk.

The runs of an attempt's operators are examined several times per second. While those in memory exceed the limit, the
oldest are written to files by the I/O pool, a few at a time, and replaced by equal columns that lie in these files. A
run that has got other columns in the meantime keeps them, and is examined again. If the disk fails, everything stays in
memory, and it is tried again after a while.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

import pyarrow as pa

from midstream.engine.core.config import JobConfig
from midstream.engine.core.interfaces import Clock, Done, Executor, Failed, LocalDisk, Timer
from midstream.engine.state.columnar import Columns, FrameRun
from midstream.engine.state.columns_on_disk import bytes_of, on_disk, table_on_disk

POLL_S: Final = 0.25
WRITES_MAX: Final = 2
"""The number of files that are written concurrently."""
RETRY_S: Final = 10.0
"""How long nothing is written after a failure."""

_log = logging.getLogger(__name__)


def state_bytes_max(config: JobConfig, memory_bytes: int, slots: int) -> int | None:
    """Return the bytes of state that one of `slots` slots which share this memory (0: unknown) holds; None for no limit."""
    if config.state_memory == "unlimited":
        return None
    if config.state_memory == "auto":
        return memory_bytes // 2 // slots or None
    return config.state_memory


@dataclass(slots=True)
class RestoredTables:
    """The tables of a checkpoint, of which those above the limit are moved to the disk as they are read.

    `bytes_in_memory`: what the slot holds already. It is used on one thread of the I/O pool.
    """

    limit_bytes: int | None
    disk: LocalDisk
    bytes_in_memory: int = 0

    def keep(self, table: pa.Table) -> pa.Table:
        """Return the table, or an equal one that lies on the disk."""
        size = table.nbytes
        fits = self.limit_bytes is None or self.bytes_in_memory + size <= self.limit_bytes
        if not fits and size >= self.disk.file_bytes_min:
            try:
                return table_on_disk(table, self.disk)
            except OSError as error:
                _log.warning("restored state stays in memory: it cannot be written to %s: %s", self.disk.place, error)
        self.bytes_in_memory += size
        return table


@dataclass(slots=True)
class _Place:
    """Where the columns of a run are."""

    columns: Columns = ()
    """The columns when they were examined."""
    bytes_in_memory: int = 0
    bytes_on_disk: int = 0
    moved: Columns = ()
    """The columns that lie in a file."""
    is_moving: bool = False


@dataclass(slots=True)
class StateMemory:
    """The state of one attempt in one slot. `runs` returns its runs, of each state oldest first.

    `limit_bytes`: None for no limit.
    """

    runs: Callable[[], Iterable[FrameRun]]
    limit_bytes: int | None
    disk: LocalDisk
    clock: Clock
    executor: Executor
    bytes_in_memory: int = 0
    """The size of all runs in memory when they were last examined."""
    bytes_on_disk: int = 0
    warnings: tuple[str, ...] = ()
    """What the job's status has to show."""
    _places: WeakKeyDictionary[FrameRun, _Place] = field(default_factory=WeakKeyDictionary)
    _movable: list[FrameRun] = field(default_factory=list)
    """The runs that may be moved, oldest first."""
    _moving_bytes: int = 0
    _writes: int = 0
    _retry_s: float = 0.0
    """Nothing is written before this time."""
    _timer: Timer | None = None
    _is_closed: bool = False

    def poll(self) -> None:
        """Examine all runs, move some of them if the limit is exceeded, and continue so until `close`."""
        self._timer = self.executor.call_later(POLL_S, self.poll)
        self._examine()
        self._move_some()

    def close(self) -> None:
        """Move nothing more. The outcome of what is under way is dropped."""
        self._is_closed = True
        self._movable.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _examine(self) -> None:
        in_memory = on_disk_bytes = 0
        self._movable.clear()
        least = self.disk.file_bytes_min
        for run in self.runs():
            place = self._places.get(run)
            if place is None:
                place = self._places[run] = _Place()
            _update(place, run.columns())
            in_memory += place.bytes_in_memory
            on_disk_bytes += place.bytes_on_disk
            if place.bytes_in_memory >= least and place.columns and not place.is_moving:
                self._movable.append(run)
        self.bytes_in_memory, self.bytes_on_disk = in_memory, on_disk_bytes

    def _move_some(self) -> None:
        if self.limit_bytes is None or self._is_closed or self.clock.monotonic_s() < self._retry_s:
            return
        self._movable.reverse()
        while self._movable and self._writes < WRITES_MAX and self._excess_bytes > 0:
            self._move(self._movable.pop())
        self._movable.reverse()

    @property
    def _excess_bytes(self) -> int:
        return self.bytes_in_memory - self._moving_bytes - (self.limit_bytes or 0)

    def _move(self, run: FrameRun) -> None:
        place = self._places[run]
        before, size = place.columns, place.bytes_in_memory
        is_moved = [any(column is moved for moved in place.moved) for column in before]
        to_move = tuple(None if moved else column for column, moved in zip(before, is_moved, strict=True))
        place.is_moving = True
        self._writes += 1
        self._moving_bytes += size

        def done(outcome: Done[Columns] | Failed) -> None:
            place.is_moving = False
            self._writes -= 1
            self._moving_bytes -= size
            if self._is_closed:
                return
            if isinstance(outcome, Failed):
                self._failed(outcome.error)
                return
            self.warnings = ()
            now = run.columns()
            if not now:
                return
            files = outcome.value
            moved = tuple(
                there if there is not None and mine is old else mine
                for mine, old, there in zip(now, before, files, strict=True)
            )
            run.move(moved)
            place.moved = tuple(run_column for run_column in (*place.moved, *files) if run_column is not None)
            _update(place, run.columns())
            self.bytes_in_memory -= size - place.bytes_in_memory
            self._move_some()

        self.executor.submit(partial(on_disk, to_move, self.disk), done)

    def _failed(self, error: BaseException) -> None:
        self._retry_s = self.clock.monotonic_s() + RETRY_S
        warning = (
            f"state above state_memory cannot be written to {self.disk.place}, so it stays in memory: {error}. Make room "
            "there, or name a directory on a larger disk"
        )
        if self.warnings != (warning,):
            _log.warning("%s", warning)
        self.warnings = (warning,)


def _update(place: _Place, columns: Columns) -> None:
    """Note what the columns are now, and compute their sizes if they have changed."""
    before = place.columns
    if not columns or (len(before) == len(columns) and all(a is b for a, b in zip(before, columns, strict=True))):
        if not columns:
            place.columns = ()
        return
    place.columns = columns
    place.moved = tuple(column for column in place.moved if any(column is mine for mine in columns))
    place.bytes_in_memory = place.bytes_on_disk = 0
    for column in columns:
        if any(column is moved for moved in place.moved):
            place.bytes_on_disk += bytes_of(column)
        else:
            place.bytes_in_memory += bytes_of(column)
