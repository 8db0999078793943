"""What a source is: splits found on the driver, read on the subtasks.

The coordinator runs `discover` and hands splits to subtasks that ask for one; both its position
and the splits not yet handed out are part of every checkpoint, and so is each reader's progress.
A source keeps no other state, which is what makes it exactly-once by construction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import pyarrow as pa

from midstream.core.errors import ConfigError
from midstream.core.seams import Storage
from midstream.operators.bad_records import BadRecords
from midstream.state.pickles import OwnCode

T = TypeVar("T")


class Split(msgspec.Struct, frozen=True):
    """A part of the input that one reader reads from front to back.

    `payload` says what it is, in the source's own encoding (no pickles). `offset` is where to go
    on: 0 for a new split, else whatever the reader returned with the last batch it emitted.
    `follows`: it goes on where the split found before it ends (parts of one file), so its rows are in
    order with those too. Event time does not wait until it is handed out if all that were found with it
    before are of that same line; the coordinator keeps the mark only then.
    """

    id: str
    payload: bytes
    offset: int = 0
    follows: bool = False


@dataclass(frozen=True, slots=True)
class Discovery:
    """The answer of `discover`: new splits, the position after them, and whether there can be more."""

    splits: tuple[Split, ...]
    position: bytes
    exhausted: bool


@dataclass(frozen=True, slots=True)
class DiscoveryContext:
    """What `discover` may use besides the source's own system."""

    uid: str
    parallelism: int
    storage: Storage | None
    """The job's checkpoint storage, for plans that must be durable before they are read (below `plans/<uid>/`)."""


class SplitReader(ABC):
    @abstractmethod
    def read(self, rows_max: int) -> tuple[pa.RecordBatch, int] | None:
        """The next batch (at most `rows_max` rows, canonical types) and the offset to go on from after it; None at the end of the split.

        Of a `blocking` source a batch without rows says that there are none for now: it is asked again soon.
        """

    def bad_records(self) -> BadRecords | None:
        """What the last `read` has left out, for a source that `drops_bad_records`; called once after each `read`.

        A batch may have bad records and no rows; the offset that came with it is behind both.
        """
        return None

    def close(self) -> None: ...


class Source(ABC):
    """Configuration that pickles. `schema` is canonical (see core.batches).

    `blocking`: reads wait for files or networks, so they run on the I/O pool, ahead of need;
    otherwise they only compute, and run on the loop.
    `discovery_interval_s`: how often `discover` is asked again until it says exhausted.
    `rows_per_s`: emit at most so many rows per second over all subtasks (None: no limit), but that up to a
    second in which a subtask could not emit is made up for.
    """

    schema: pa.Schema
    blocking: bool = True
    bounded: bool = True
    discovery_interval_s: float = 1.0
    rows_per_s: float | None = None
    equal_shares: bool = False
    """Splits are dealt out in equal shares, for readers that read all of theirs side by side; else whoever asks gets the next."""
    drops_bad_records: bool = False
    """Records that cannot be read are left out, counted, and in the side output BAD_RECORDS; else they fail the job."""
    bad_records_max: tuple[int, int] | None = None
    """(bad, records): the job fails when more of so many records that a subtask reads are bad. None: no limit."""
    own: OwnCode = OwnCode()
    """The code that the job ships; set before it does. Untyped values can be of its classes."""

    def prepare(self, uid: str, checkpoint_dir: str | None, restoring: bool) -> None:
        """On the driver, once, before any slot is asked for: for work that needs Spark's cores for itself.

        Blocking. `checkpoint_dir` is the job's checkpoint directory as the user gave it; `restoring`
        says that the job goes on from a checkpoint, whose splits may be of an earlier preparation.
        """

    @abstractmethod
    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        """Find splits beyond `position` (None at first). Blocking; runs on the driver's I/O pool, never twice at once.

        Asked again from the same position it must find the same splits, or splits that stand for
        the same rows: whatever was handed out after the last checkpoint is handed out again. Splits that
        are found together may be of any event times; those found later are taken to be later. Not asked
        again before all that was found is handed out.
        """

    @abstractmethod
    def open_split(self, split: Split) -> SplitReader:
        """Open a split at `split.offset`. Raises StorageError when it is not there (any more)."""

    def place(self, split: Split, first: int, last: int) -> str:
        """Where the rows `first` to `last` behind the offset of `split` are, for people who look for them. May not block."""
        return f"split {split.id}, {rows_text(first, last)} behind offset {split.offset}"

    def splits_per_reader(self, parallelism: int) -> int:
        """How many splits a subtask reads side by side, in turns; more than 1 for splits that never end.

        All of these together must hold them all: splits that wait for one that never ends are never
        read, and event time waits with them.
        """
        return 1

    def readers_max(self, parallelism: int) -> int:
        """How many of the subtasks have something to read at most; they share `rows_per_s` in equal parts."""
        return parallelism

    def checkpoint_completed(self, position: bytes | None, unfinished: Sequence[Split] | None = None) -> None:
        """All rows before `position` are in a completed checkpoint, but for those of the `unfinished` splits that it holds.

        `unfinished`: every split in the checkpoint that has rows left, handed out or not, each at
        its offset there; None when that is not known. A source may let its system forget only what
        lies before `position` and in no unfinished split. Runs on the driver's I/O pool.
        """

    def close(self) -> None:
        """On the driver, when the job has ended, however it ended: stop what `discover` has started."""


def rows_text(first: int, last: int) -> str:
    """Which rows, counted from 0: one is named, of several it is one."""
    return f"row {first}" if first == last else f"one of the rows {first} to {last}"


def decoded(data: bytes, kind: type[T], where: str) -> T:
    """A split's payload, or a position. Raises ConfigError when it is none of this source's.

    That happens when a job goes on from a checkpoint in which the uid was that of another source.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{where}: where the source is to go on from was written by another kind of source ({error}); use the source "
            "that the checkpoint was made with, or give this one a new uid to read it from the beginning"
        ) from error


def check_rate(rows_per_s: float | None, where: str) -> None:
    if rows_per_s is not None and not 0 < rows_per_s < float("inf"):
        raise ConfigError(f"{where}: rows_per_s {rows_per_s!r} is not a positive number; None means no limit")
