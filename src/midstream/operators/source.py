"""The contract of sources: splits are found on the driver and read on the subtasks.

The coordinator runs `discover` and assigns splits to subtasks that ask for one; its position, the splits that are not
yet assigned, and each reader's progress are part of every checkpoint. A source keeps no other state, which is what
makes it exactly-once by construction.
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

    `payload` describes it in the source's own encoding (no pickles). `offset` is where to resume: 0 for a new split,
    else whatever the reader returned with the last batch it emitted. `follows`: the split continues where the split
    found before it ends (parts of one file), so its rows are in order with those as well. The coordinator keeps this
    mark only if all splits found together with it and before it are of the same sequence; event time then does not wait
    until the split is assigned.
    """

    id: str
    payload: bytes
    offset: int = 0
    follows: bool = False


@dataclass(frozen=True, slots=True)
class Discovery:
    """The result of `discover`: new splits, the position after them, and whether there can be more."""

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
        """Return the next batch (at most `rows_max` rows, canonical types) and the offset after it; None at the end of
        the split.

        A batch without rows from a `blocking` source means that there are none at present: it is asked again soon.
        """

    def bad_records(self) -> BadRecords | None:
        """Return what the last `read` has dropped, for a source that `drops_bad_records`; called once after each
        `read`.

        A batch may have bad records and no rows; the offset returned with it is past both.
        """
        return None

    def close(self) -> None: ...


class Source(ABC):
    """The configuration of a source; it must pickle. `schema` is canonical (see core.batches).

    `blocking`: reads wait for files or networks, so they run on the I/O pool, ahead of need; otherwise they only
    compute, and run on the loop. `discovery_interval_s`: how often `discover` is called again until it returns
    `exhausted`. `rows_per_s`: emit at most so many rows per second over all subtasks (None: no limit); a subtask
    catches up for at most one second in which it could not emit.
    """

    schema: pa.Schema
    blocking: bool = True
    bounded: bool = True
    discovery_interval_s: float = 1.0
    rows_per_s: float | None = None
    equal_shares: bool = False
    """True: splits are assigned in equal shares, for subtasks that read all of theirs side by side. False: splits are
    assigned on request.
    """
    drops_bad_records: bool = False
    """True: records that cannot be read are dropped, counted, and emitted on the side output BAD_RECORDS. False: they
    fail the job.
    """
    bad_records_max: tuple[int, int] | None = None
    """(bad, records): the job fails if more than `bad` records are bad in a window of `records`. Each subtask counts
    its input window by window. None: no limit.
    """
    own: OwnCode = OwnCode()
    """The code that the job ships; set before the job is shipped. Untyped values can be instances of its classes."""

    def prepare(self, uid: str, checkpoint_dir: str | None, restoring: bool) -> None:
        """Do work that needs all of Spark's cores. Runs on the driver, once, before any slot is requested.

        The call may block. `checkpoint_dir` is the job's checkpoint directory as the user gave it; `restoring` means
        that the job resumes from a checkpoint, whose splits may come from an earlier preparation.
        """

    @abstractmethod
    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        """Find splits beyond `position` (None at first). Runs on the driver's I/O pool, where it may block, one call at
        a time.

        Called again with the same position it must find the same splits, or splits with the same rows: splits assigned
        after the last checkpoint are assigned again. Splits that are found together may have any event times; those
        found later are assumed to be later. Not called again before all splits found are assigned.
        """

    @abstractmethod
    def open_split(self, split: Split) -> SplitReader:
        """Open a split at `split.offset`. Raises StorageError if it does not exist (any more)."""

    def place(self, split: Split, first: int, last: int) -> str:
        """Describe, for messages, where rows `first` to `last` after the offset of `split` can be found. Must not
        block.
        """
        return f"split {split.id}, {rows_text(first, last)} after offset {split.offset}"

    def splits_per_reader(self, parallelism: int) -> int:
        """Return how many splits a subtask reads side by side, in turns; more than 1 for splits that never end.

        All subtasks together must be able to hold all splits: a split that waits for one that never ends is never read,
        and event time waits for it.
        """
        return 1

    def readers_max(self, parallelism: int) -> int:
        """Return the largest number of subtasks that can have something to read; they share `rows_per_s` equally."""
        return parallelism

    def checkpoint_completed(self, position: bytes | None, unfinished: Sequence[Split] | None = None) -> None:
        """React to a completed checkpoint that holds all rows before `position`, except rows of the `unfinished`
        splits.

        `unfinished`: every split in the checkpoint that has rows left, assigned or not, each at its offset there; None
        if that is unknown. A source may let its system delete only what lies before `position` and in no unfinished
        split. Runs on the driver's I/O pool.
        """

    def close(self) -> None:
        """Stop what `discover` has started. Called on the driver when the job has ended, however it ended."""


def rows_text(first: int, last: int) -> str:
    """Format which rows are meant, counted from 0: the row itself, or that it is one of several."""
    return f"row {first}" if first == last else f"one of the rows {first} to {last}"


def decoded(data: bytes, kind: type[T], where: str) -> T:
    """Decode a split's payload, or a position. Raises ConfigError if another kind of source wrote it.

    That happens when a job resumes from a checkpoint in which another source had the uid.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{where}: the position to resume from was written by another kind of source ({error}); use the source "
            "that the checkpoint was made with, or give this one a new uid to read it from the beginning"
        ) from error


def check_rate(rows_per_s: float | None, where: str) -> None:
    if rows_per_s is not None and not 0 < rows_per_s < float("inf"):
        raise ConfigError(f"{where}: rows_per_s {rows_per_s!r} is not a positive number; None means no limit")
