"""The contract of sources: splits are found on the driver and read on the subtasks.

The coordinator runs `discover` and assigns splits to subtasks that request one; its position, the splits that are not
yet assigned, and each reader's progress are part of every checkpoint. A source keeps no other state, so it
is exactly-once by construction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Annotated, Final, TypeVar

import msgspec
import pyarrow as pa

from midstream.engine.core.batches import conform
from midstream.engine.core.elements import MIN_WATERMARK_US
from midstream.engine.core.errors import UNDECODABLE, ConfigError, StorageError
from midstream.engine.core.interfaces import Storage
from midstream.engine.operators.bad_records import BadRecords
from midstream.engine.operators.event_time_column import FIRST_TIME_US, LAST_TIME_US
from midstream.engine.state.safe_pickle import OwnCode

T = TypeVar("T")
OFFSET_MAX: Final = 2**63 - 1


class Split(msgspec.Struct, frozen=True):
    """A part of the input that one reader reads from front to back.

    `id`: a name that no other split of the source has.
    `payload`: describes it in the source's own encoding (no pickles).
    `offset`: where to resume: 0 for a new split, else whatever the reader returned with the last batch it emitted.
    `follows`: it continues where the split listed before it ends, as the next part of a file does, so the rows of both
    are in order. Event time then does not wait for it to be assigned. The coordinator keeps `follows` only if the
    discovery listed nothing but such a chain.
    `min_time_us`: no row of the split has an earlier event time, in microseconds since 1970 (`DiscoveryContext.event_time`);
    None if that is not known. Event time waits for a split that is still to be assigned only from there on, so list those
    of a backlog in the order of their times.
    `latest_us`: set by the engine, in checkpoints: the latest event time of the rows before `offset`, of a split that holds
    event time back until it has been read.

        >>> from midstream import Split
        >>> Split("file-7", b"in/file-7").offset
        0
    """

    id: str
    payload: bytes
    offset: int = 0
    follows: bool = False
    min_time_us: int | None = None
    latest_us: Annotated[int, msgspec.Meta(ge=FIRST_TIME_US, le=LAST_TIME_US)] | None = None

    @property
    def held_back_at_us(self) -> int:
        """The highest watermark for which no row of the split is late."""
        return MIN_WATERMARK_US if self.min_time_us is None else self.min_time_us - 1


_decode_split = msgspec.msgpack.Decoder(Split).decode


@dataclass(frozen=True, slots=True)
class Discovery:
    """The result of `discover`.

    `splits`: new splits.
    `position`: the position after them, with which `discover` is called the next time.
    `exhausted`: whether there can be no more.

        def discover(self, position, context):
            return Discovery((Split("all", b""),) if position is None else (), b"all", exhausted=True)
    """

    splits: tuple[Split, ...]
    position: bytes
    exhausted: bool


@dataclass(frozen=True, slots=True)
class DiscoveryContext:
    """What `discover` may use in addition to the source's own system.

    `uid`: that of the source in the job. `parallelism`: its number of subtasks. `event_time`: the column of the source's
    rows that the job uses as event time; None if it makes it of something else, or uses none.

        def discover(self, position, context):
            splits = [Split(str(n), b"%d" % n) for n in range(context.parallelism)] if position is None else []
            return Discovery(tuple(splits), b"all", exhausted=True)
    """

    uid: str
    parallelism: int
    storage: Storage | None
    """The job's checkpoint storage, for plans that must be durable before they are read (below `plans/<uid>/`)."""
    event_time: str | None = None


class SplitReader(ABC):
    """Reads one split, in batches; made by `Source.open_split`.

    For example:

        class CountdownReader(SplitReader):
            def __init__(self, done):
                self.done = done

            def read(self, rows_max):
                rows = [100 - n for n in range(self.done, min(self.done + rows_max, 100))]
                self.done += len(rows)
                return (pa.record_batch({"n": pa.array(rows, pa.int64())}), self.done) if rows else None
    """

    @abstractmethod
    def read(self, rows_max: int) -> tuple[pa.RecordBatch, int] | None:
        """Read the next batch.

        `rows_max`: the number of rows at most.

        Return the batch, which has exactly the columns of the source's `schema`, and the offset after it, a whole number
        from 0 on; None at the end of the split. A batch without rows from a `blocking` source means that there are none at present: it is
        read again soon. Return one within a second if no row comes: only then can a split without an end be idle
        (`idle_after`). A read that has not returned may still have rows.

            def read(self, rows_max):
                lines = self.file.readlines_at_most(rows_max)
                return (pa.record_batch({"line": lines}), self.file.tell()) if lines else None
        """

    def bad_records(self) -> BadRecords | None:
        """Return what the last `read` has dropped, for a source that `drops_bad_records`; called once after each
        `read`.

        A batch may have bad records and no rows; the offset returned with it is past both. By default returns None.

            def bad_records(self):
                dropped, self.dropped = self.dropped, None
                return dropped
        """
        return None

    def on_rows(self, wake: Callable[[], None]) -> bool:
        """Arrange that `wake` is called when rows have come, and return whether it will be; called once, before the first
        `read` of a `blocking` source, on the same thread.

        `wake`: to be called, from any thread, when rows come, or are left, after a `read` that returned fewer rows than
        `rows_max`. The split is then read immediately, and `read` must not wait for rows. Calls without need do no harm.

        By default returns False: a split without rows is read again after 4 to 50 ms.

            def on_rows(self, wake):
                self.subscription.on_message(wake)
                return True
        """
        return False

    def checkpointed(self, offset: int) -> None:
        """Take note that a completed checkpoint holds all rows before an offset, so the system may forget them.

        Called on the task's thread, possibly while `read` is under way in another: it must not block, and at most
        records the offset for the next `read`. Not every checkpoint is reported; of several, the newest counts. By
        default does nothing.

        `offset`: one that `read` has returned, or that of the split when it was opened.

            def checkpointed(self, offset):
                self.confirmed = offset
        """

    def close(self) -> None:
        """Release what the reader holds; no call follows.

        For example:

            def close(self):
                self.file.close()
        """


class Source(ABC):
    """A source of your own: its configuration, which must pickle. Splits are found on the driver and read on the
    subtasks.

    The splits not yet assigned and each reader's offset are part of every checkpoint; a source keeps no other state.
    `testing.check_source` checks it.

    `schema`: the columns, in the types of the engine (`large_string` for text, microseconds for times, …). `blocking`:
    reads wait for files or networks, so they run on the I/O pool, in advance; otherwise they only compute, and run
    on the loop. `bounded`: it ends, so none of its splits is ever idle. `splits_end`: it does not end, but each of its
    splits does, as files do. `discovery_interval_s`: the interval at which `discover` is called until it returns
    exhausted. `rows_per_s`: the rate limit over all subtasks (None: no limit); a delayed subtask
    may catch up at most one second.

        >>> from midstream import Discovery, Source, Split, SplitReader
        >>> class CountdownReader(SplitReader):
        ...     def __init__(self, done):
        ...         self.done = done
        ...     def read(self, rows_max):
        ...         rows = [3 - n for n in range(self.done, min(self.done + rows_max, 3))]
        ...         self.done += len(rows)
        ...         return (pa.record_batch({"n": pa.array(rows, pa.int64())}), self.done) if rows else None
        >>> class Countdown(Source):
        ...     blocking = False  # reading waits for nothing
        ...     schema = pa.schema({"n": pa.int64()})
        ...     def discover(self, position, context):
        ...         return Discovery((Split("all", b""),) if position is None else (), b"all", exhausted=True)
        ...     def open_split(self, split):
        ...         return CountdownReader(split.offset)
        >>> testing.check_source(Countdown()).column("n").to_pylist()
        [3, 2, 1]
    """

    schema: pa.Schema
    blocking: bool = True
    bounded: bool = True
    discovery_interval_s: float = 1.0
    rows_per_s: float | None = None
    splits_end: bool = False
    continues_past_end: bool = False
    """True: after a checkpoint in which its last splits had been found, the source, if it is not `bounded` now, discovers
    on from there. After one in which all of it had been read, its subtasks do not run again, so that is refused.
    """
    equal_shares: bool = False
    """True: splits are assigned in equal shares, for subtasks that read all of theirs concurrently. False: splits are
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
    splits_unordered: bool = False
    """True: the rows of a split that ends may have any order. Event time then stays before `min_time_us` of a split, if that
    is known, until the split has been read.
    """
    supports_projection: bool = False
    """True: `open_projected` reads some of the columns, for less than it takes to read all."""
    own: OwnCode = OwnCode()
    """The code that the job ships; set before the job is shipped. Untyped values can be instances of its classes."""

    def prepare(self, uid: str, checkpoint_dir: str | None, restoring: bool) -> None:
        """Do work that needs Spark's cores for itself. Runs on the driver, once, before any slot is requested, and may
        block.

        `uid`: that of the source in the job.
        `checkpoint_dir`: the job's checkpoint directory as the user gave it, or None.
        `restoring`: the job resumes from a checkpoint, whose splits may be of an earlier preparation.

            def prepare(self, uid, checkpoint_dir, restoring):
                self.table = self.session.read.table(self.name).toArrow()
        """

    @abstractmethod
    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        """Find splits beyond a position. Runs on the driver's I/O pool, one call at a time, and may block.

        Called again with the same position it must find the same splits, or splits with the same rows: splits assigned
        after the last checkpoint are assigned again. Splits that are found together may have any event times; those
        found later are assumed to be later. Not called again before all splits found are assigned.

        `position`: that of the last Discovery; None at first.
        `context`: the uid, the parallelism and the job's checkpoint storage.

        Return a Discovery.

            def discover(self, position, context):
                return Discovery((Split("all", b""),) if position is None else (), b"all", exhausted=True)
        """

    def check_resume(self, position: bytes) -> None:
        """Check that the source can continue from a checkpoint. Runs on the driver before the job starts, and may block.

        `discover` is not called again if the source was exhausted in the checkpoint. So a source that now reads another
        input must be refused here, or the job ends without reading it. By default every position is accepted.

        `position`: that of the last Discovery before the checkpoint.

        Raise ConfigError if the input is another one.

            def check_resume(self, position):
                if position != self.table.encode():
                    raise ConfigError(f"the checkpoint is of table {position.decode()}, not of {self.table}")
        """

    @abstractmethod
    def open_split(self, split: Split) -> SplitReader:
        """Open a split at its offset.

        `split`: as `discover` returned it, with the `offset` after the rows that have been read.

        Return a SplitReader. Raise StorageError if the split does not exist (any more).

            def open_split(self, split):
                return CountdownReader(split.offset)
        """

    def open_projected(self, split: Split, columns: pa.Schema) -> SplitReader:
        """Open a split of a source that `supports_projection`, for a job that uses only some of its columns.

        `split`: as for `open_split`.
        `columns`: those to read, at least one, in the order of `schema`.

        Return a SplitReader whose batches have exactly these columns. Offsets must be those of `open_split`: another job
        may read on with other columns. By default raises ConfigError.

            def open_projected(self, split, columns):
                return TableReader(self.path, columns.names, split.offset)
        """
        raise ConfigError(
            f"{type(self).__name__}: supports_projection is true, and there is no open_projected(); add it, or leave "
            "supports_projection out"
        )

    def begin_split(self, split: Split) -> Split:
        """Return the split as this job reads it, which is how later checkpoints have it. Must not block.

        Called in a subtask that is given a split, or restores it, before anything is read. By default it is unchanged;
        a source may add where a split ends that was found by an earlier job.

        `split`: as `discover` or an earlier call of this method returned it, with its offset.

            def begin_split(self, split):
                return Split(split.id, split.payload or self.bounds[split.id], split.offset)
        """
        return split

    def place(self, split: Split, first: int, last: int) -> str:
        """Describe to users where failed rows are in the input. Must not block.

        `split`: the split, with its offset before the batch that has the rows.
        `first`, `last`: the rows after that offset, counted from 0.

        Return a text for a message; by default the split and the rows.

            def place(self, split, first, last):
                return f"{split.payload.decode()}, line {split.offset + first}"
        """
        return f"split {split.id}, {rows_text(first, last)} after offset {split.offset}"

    def datasets(self) -> Sequence[str]:
        """Return the URIs of what the source reads, for lineage; by default none. Runs on the driver once the job has
        started, on a thread that may block.

        The URI of a server's dataset names the server, then the dataset, and has no password.

            def datasets(self):
                return [f"mysql://{self.host}:{self.port}/{self.database}.{self.table}"]
        """
        return ()

    def splits_per_reader(self, parallelism: int) -> int:
        """Return how many splits a subtask reads concurrently, in turns; by default 1.

        More than 1 is for splits that never end. All subtasks together must hold all of these: a split that waits for
        one that never ends is never read, and event time waits for it.

        `parallelism`: the number of subtasks.

            def splits_per_reader(self, parallelism):
                return -(-len(self.partitions) // parallelism)
        """
        return 1

    def splits_per_reader_of(self, split: Split, parallelism: int) -> int:
        """Return how many splits a subtask reads concurrently while it reads this one; by default `splits_per_reader`.

        For a source of which some splits end and others do not. Of several splits, the largest number counts.

        `split`: the split, as `begin_split` returned it. `parallelism`: the number of subtasks.

            def splits_per_reader_of(self, split, parallelism):
                return 1 if split.id.startswith("file:") else self.splits_per_reader(parallelism)
        """
        return self.splits_per_reader(parallelism)

    def readers_max(self, parallelism: int) -> int:
        """Return how many subtasks have something to read at most; they share `rows_per_s` equally. By default all.

        `parallelism`: the number of subtasks.

            def readers_max(self, parallelism):
                return min(parallelism, len(self.partitions))
        """
        return parallelism

    def checkpoint_completed(self, position: bytes | None, unfinished: Sequence[Split] | None = None) -> None:
        """Handle a completed checkpoint. Runs on the driver's I/O pool.

        The checkpoint holds all rows before a position, except rows of unfinished splits. A source may let its system
        delete only what lies before the position and in no unfinished split.

        `position`: that of the last Discovery before the checkpoint; None if there was none.
        `unfinished`: every split in the checkpoint that has rows left, assigned or not, each at its offset there; None
        if that is unknown.

            def checkpoint_completed(self, position, unfinished=None):
                if unfinished == []:
                    self.queue.acknowledge(position)
        """

    def close(self) -> None:
        """Stop what `discover` has started. Called on the driver when the job has ended, however it ended.

        For example:

            def close(self):
                self.client.close()
        """


def checked_discovery(found: object) -> Discovery:
    """Return what `discover` has returned as checkpoints hold it. Raises ConfigError for what they cannot hold."""
    if not isinstance(found, Discovery):
        raise ConfigError(f"discover returned {found!r}, not a Discovery")
    if not isinstance(found.exhausted, bool):
        raise ConfigError(f"discover returned exhausted={found.exhausted!r}, not True or False")
    if isinstance(found.splits, (Split, str)) or not isinstance(found.splits, Iterable):
        raise ConfigError(f"discover returned {found.splits!r} as splits; return a tuple of them, also if it is one")
    splits: dict[str, Split] = {}
    for split in found.splits:
        if not isinstance(split, Split):
            raise ConfigError(f"discover returned {split!r} in place of a Split")
        if not isinstance(split.id, str) or not isinstance(split.payload, bytes):
            raise ConfigError(f"split {split!r} needs an id that is a str, and a payload that is bytes")
        if split.id in splits:
            raise ConfigError(f"discover returned two splits with the id {split.id!r}; each needs its own")
        _check_min_time(split)
        offset = _check_offset(split.offset, f"split {split.id!r}")
        if type(split.offset) is not int:
            split = msgspec.structs.replace(split, offset=offset)
        try:
            splits[split.id] = _decode_split(msgspec.msgpack.encode(split))
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise ConfigError(f"discover returned {split!r}, which checkpoints cannot hold: {error}") from error
    if not isinstance(found.position, bytes) and (found.position is not None or splits):
        raise ConfigError(
            f"discover returned the position {found.position!r}; it must be bytes, with which discover continues "
            "after a restart"
        )
    return Discovery(tuple(splits.values()), found.position, found.exhausted)


def _check_min_time(split: Split) -> None:
    at = split.min_time_us
    if at is not None and (type(at) is not int or not FIRST_TIME_US <= at <= LAST_TIME_US):
        raise ConfigError(
            f"split {split.id!r} has min_time_us={at!r}; it must be a whole number of microseconds since 1970, in the years 1 "
            "to 9999"
        )


def checked_read(found: object, schema: pa.Schema, where: str) -> tuple[pa.RecordBatch, int]:
    """Check what `read` has returned before the end. Raises ConfigError, and SchemaError for other columns."""
    if isinstance(found, (tuple, list)) and len(found) == 2 and isinstance(found[0], pa.RecordBatch):
        return conform(found[0], schema, where), _check_offset(found[1], where)
    kinds = ", ".join(type(each).__name__ for each in found) if isinstance(found, tuple) else None
    raise ConfigError(
        f"{where}: read returned {type(found).__name__ if kinds is None else f'({kinds})'}; return a tuple of a pyarrow.RecordBatch and the offset after it, or "
        "None at the end"
    )


def checked_count(count: object, what: str) -> int:
    """Check how many splits or subtasks a source requests. Raises ConfigError."""
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"{what} returned {count!r}; return a whole number from 1 on")
    return count


def _check_offset(offset: object, where: str) -> int:
    try:
        number = index(offset)  # type: ignore[arg-type]  # other types are refused
    except TypeError:
        number = -1
    if isinstance(offset, bool) or not 0 <= number <= OFFSET_MAX:
        raise ConfigError(
            f"{where}: the offset is {offset!r}; checkpoints hold it, so it must be a whole number from 0 to 2**63 - 1"
        )
    return number


def rows_text(first: int, last: int) -> str:
    """Format which rows are meant, counted from 0: the row itself, or that it is one of several."""
    return f"row {first}" if first == last else f"one of the rows {first} to {last}"


def decoded_splits(encoded: Iterable[bytes], where: str) -> list[Split]:
    """Decode splits of a checkpoint. Raises StorageError for what no source has stored."""
    try:
        splits = list(map(_decode_split, encoded))
    except UNDECODABLE as error:
        raise StorageError(f"{where}: the splits in the checkpoint are damaged: {error}") from error
    for split in splits:
        if split.offset < 0:
            raise StorageError(
                f"{where}: the splits in the checkpoint are damaged: the offset of one is {split.offset}"
            )
    return splits


def decoded(data: bytes, kind: type[T], where: str) -> T:
    """Decode a split's payload, or a position. Raises ConfigError if another kind of source wrote it.

    That happens when a job resumes from a checkpoint in which another source had the uid.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNDECODABLE as error:
        raise ConfigError(
            f"{where}: the position to resume from was written by another kind of source ({error}); use the source "
            "that the checkpoint was made with, or give this one a new uid to read it from the beginning"
        ) from error


def check_rate(rows_per_s: float | None, where: str) -> None:
    if rows_per_s is not None and not 0 < rows_per_s < float("inf"):
        raise ConfigError(f"{where}: rows_per_s {rows_per_s!r} is not a positive number; None means no limit")
