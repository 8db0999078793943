"""Reads the splits of one source subtask and emits their batches.

The state of a source is its splits, each with the offset after the last batch that was emitted, and the tally of bad
records. A batch that has been read ahead but not emitted is read again after a restore.

Splits take turns, batch by batch, so their event times differ by a few batches at most. Each operator of the chain can
determine the splits of its rows (`Splits`). Small batches of several splits are emitted as one, which costs the chain hardly
more than each of them would; unless rows are removed before an operator that distinguishes splits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import NamedTuple

import msgspec
import pyarrow as pa

from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.batches import concat, invalid_value
from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US, Assigned
from midstream.engine.core.errors import DataError, InvariantError
from midstream.engine.core.interfaces import Done, Failed, Timer
from midstream.engine.operators.bad_records import TALLY, BadRecordCount, BadRecords
from midstream.engine.operators.base import Splits, SplitTimes
from midstream.engine.operators.source_api import (
    Source,
    Split,
    SplitReader,
    checked_count,
    checked_read,
    decoded_splits,
)
from midstream.engine.state.state_parts import Chunk, Redistribute, StatePart, check_columns
from midstream.engine.worker.drift_limit import DriftLimit
from midstream.engine.worker.interfaces import TaskServices
from midstream.engine.worker.source_rate import SourceRate

SPLITS = "splits"
"""The name of the state part with the splits, each at its offset."""
SPLITS_SCHEMA = pa.schema([("split", pa.binary())])
REST_S_MIN = 0.004
"""How long a split without rows rests before it is read again. The time doubles, up to REST_S_MAX, with each empty
read."""
REST_S_MAX = 0.05
REPORTED_REST_S_MIN = 0.015
REPORTED_REST_S_MAX = 0.25
"""The same of a split whose reader reports new rows: they end the rest."""
FEW_ROWS = 1024
"""Batches with fewer rows are read and emitted together with those of other splits."""
EMPTY_REST_S = 0.016
"""A split that rests this long, after its third read without rows, does not count as one that may have rows: splits that
are kept in step do not wait for it. Counting it out with each empty read would cost messages for each row of a slow source.
"""
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Split)


def splits_of(part: StatePart) -> list[Split]:
    """The splits in the state part SPLITS. Raises StorageError if they are not what a source has stored."""
    where = "the splits of a source"
    for chunk in part.chunks:
        check_columns(chunk.table, {"split": pa.binary()}, where)
    return decoded_splits(to_list(part.table().column("split")), where)


class ReadProgress(Enum):
    """The result of one step of a source."""

    EMITTED = auto()
    """The source may have more to emit immediately."""
    WAITING = auto()
    """The source has nothing to emit now, and will call `wake`."""
    ENDED = auto()
    """All splits have been read, and there are no more."""


@dataclass(frozen=True, slots=True)
class _Prefetched:
    """A batch that has been read ahead, the offset after it, and the bad records that its reader has left out of it.

    `is_all`: it has fewer rows than the reader was asked for.
    """

    batch: pa.RecordBatch
    offset: int
    bad: BadRecords | None
    is_all: bool

    @property
    def is_small(self) -> bool:
        return self.batch.num_rows < FEW_ROWS and self.bad is None


class Reading(Enum):
    """The state of the reading of one open split."""

    IDLE = auto()
    """The split is read when it next has its turn."""
    UNDER_WAY = auto()
    """A read is on the I/O pool. A split has at most one read at a time."""
    PREFETCHED = auto()
    """A batch has been read, and waits for its turn."""
    RESTING = auto()
    """The split had no rows, and is read again when its timer fires."""
    AT_END = auto()
    """Every row of the split has been emitted."""


@dataclass(slots=True)
class _OpenSplit:
    """A split that is being read."""

    split: Split
    number: int
    before_last_batch: Split
    """The split as it was before the batch that was emitted last."""
    splits_max: int
    """How many splits are read concurrently while this one is read."""
    quiet_until_s: float = float("-inf")
    """When the source last delivered rows of the split, or reported that there are none at present."""
    reader: SplitReader | None = None
    reports_rows: bool = False
    """The reader reports when rows have come."""
    have_come: bool = False
    """It has done so since the last read began."""
    had_few_rows: bool = False
    """The last read had few rows."""
    state: Reading = Reading.IDLE
    prefetched: _Prefetched | None = None
    """The batch of the state PREFETCHED."""
    rest_timer: Timer | None = None
    """The timer of the state RESTING."""
    rest_s: float = 0.0
    """How long the split rested last; 0 if it has had rows since."""
    in_checkpoints: dict[int, int] = field(default_factory=dict)
    """The offset in each checkpoint that is under way, if the reader takes note of completed ones."""


class _Assignment(NamedTuple):
    """What the last message was of the splits that are assigned, to this subtask or another."""

    waiting_from_us: int = MIN_WATERMARK_US
    """See `Splits`. The lowest at first, because discovery may not have found any split yet. Other subtasks may still
    request splits when it is the highest."""
    counts: Assigned = ()


class SplitRequestState(Enum):
    """Whether a source requests splits from the coordinator."""

    MAY_REQUEST = auto()
    REQUESTED = auto()
    NONE_AVAILABLE = auto()
    """The coordinator has no split at present, and will send the next one."""
    NO_MORE = auto()
    """The coordinator has no more splits."""
    STOPPED = auto()
    """The source ends now, as if every split had been read (drain)."""
    CLOSED = auto()


# Reading an enum member takes ten times as long as reading a global.
_IDLE, _UNDER_WAY, _PREFETCHED, _RESTING, _AT_END = Reading
_MAY_REQUEST, _REQUESTED, _NONE_AVAILABLE, _NO_MORE, _STOPPED, _CLOSED = SplitRequestState


class SourceReader(Splits):
    """The source of one task. The operators of the chain see it as `engine.operators.base.Splits`."""

    def __init__(
        self,
        source: Source,
        parallelism: int,
        services: TaskServices,
        *,
        emit: Callable[[pa.RecordBatch], None],
        emit_bad: Callable[[pa.RecordBatch], None],
        request_split: Callable[[], None],
        limit: DriftLimit,
        wake: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._source = source
        self._services = services
        self._emit = emit
        self._emit_bad = emit_bad
        self.tally = BadRecordCount(source.bad_records_max)
        self._request_split = request_split
        self._limit = limit
        self._wake = wake
        self._fail = fail
        checked_count(source.splits_per_reader(parallelism), "splits_per_reader")
        self._parallelism = parallelism
        readers = checked_count(source.readers_max(parallelism), "readers_max")
        rows_per_s = source.rows_per_s / readers if source.rows_per_s else None
        self._rate = SourceRate(services.config.batch_rows, rows_per_s)
        self._timer: Timer | None = None
        """Fires when the rate allows the next batch."""
        self._splits: deque[_OpenSplit] = deque()
        self._opened = 0
        self.every_row_passes = True
        """Whether every row reaches the operator that is being opened."""
        self._joins_splits = True
        """Whether batches of several splits may be emitted as one."""
        self._request_state = _MAY_REQUEST
        self._assignment = _Assignment()
        self._emitting: tuple[tuple[_OpenSplit, int], ...] = ()
        """The splits whose batch the chain processes, with their rows, in order. A failure of the chain does not reset it."""
        self._to_read: list[_OpenSplit] = []
        """Splits that are read together, next."""
        self._is_reading_some = False
        """Splits are being read together, or will be by a mail that is posted."""
        self._listeners: list[Callable[[], None]] = []
        self._changed = True
        """Whether the listeners have to be called before anything else is emitted."""

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        if SPLITS in parts:
            for split in splits_of(parts[SPLITS]):
                self._add(split)
        if TALLY in parts:
            self.tally.restore(parts[TALLY])

    def add_split(self, encoded: bytes, *, waiting_from_us: int = MAX_WATERMARK_US, assigned: Assigned = ()) -> None:
        """Read this split as well. `waiting_from_us`: that of the splits that are unassigned now.

        `assigned`: how many splits of the source are assigned now, to any subtask.
        """
        if self._request_state in (_REQUESTED, _NONE_AVAILABLE):
            self._request_state = _MAY_REQUEST
        self._assignment = _Assignment(waiting_from_us, assigned)
        self._add(_decoder.decode(encoded))
        self._limit.assigned(self._waited_for)
        self._wake()

    def splits_assigned(self, none_waits: bool, assigned: Assigned = ()) -> None:
        """Note that every split that was found is assigned to some subtask, this one or another.

        `none_waits`: this is the answer to the last request. `assigned`: as for `add_split`.
        """
        self._assignment, self._changed = _Assignment(MAX_WATERMARK_US, assigned), True
        if none_waits and self._request_state is _REQUESTED:
            self._request_state = _NONE_AVAILABLE
        self._wake()

    def no_more_splits(self) -> None:
        if self._request_state in (_MAY_REQUEST, _REQUESTED, _NONE_AVAILABLE):
            self._request_state = _NO_MORE
        self._wake()

    def stop(self) -> None:
        """End now, as if the input had ended (drain)."""
        self._request_state = _STOPPED
        self._wake()

    def set_ceiling(self, ceiling_us: int) -> None:
        """From now on, no split is read whose event time is above this."""
        self._limit.ceiling_us = ceiling_us
        self._wake()

    def step(self) -> ReadProgress:
        """Emit at most one batch. Splits take turns."""
        progress = self._step()
        self._limit.update(self._waited_for)
        return progress

    def _step(self) -> ReadProgress:
        if self._request_state is _STOPPED:
            return ReadProgress.ENDED
        if self._request_state is _MAY_REQUEST and self._may_read_another():
            self._request_state = _REQUESTED
            self._request_split()
        if self._changed and self._notify_listeners():
            return ReadProgress.EMITTED
        rate = self._rate
        if rate.has_rate and self._must_wait():
            rate.pause()
            return ReadProgress.WAITING
        for _ in range(len(self._splits)):
            open_split = self._splits[0]
            if self._is_held_back(open_split):
                self._splits.rotate(-1)
                continue
            prefetched = self._next_batch(open_split)
            if prefetched is None and open_split.state is _AT_END:
                self._splits.popleft()
                self._close_reader(open_split)
                self._notify_listeners()
                return ReadProgress.EMITTED
            self._splits.rotate(-1)
            if prefetched is not None:
                self._emit_next(open_split, prefetched)
                return ReadProgress.EMITTED
        if not self._splits and self._request_state is _NO_MORE:
            return ReadProgress.ENDED
        rate.pause()
        return ReadProgress.WAITING

    def _may_read_another(self) -> bool:
        return not self._splits or len(self._splits) < max(each.splits_max for each in self._splits)

    def snapshot(self, new_id: Callable[[], str]) -> dict[str, StatePart]:
        parts = {}
        encoded = [_encoder.encode(open_split.split) for open_split in self._splits]
        if encoded:
            table = pa.table({"split": pa.array(encoded, pa.binary())}, schema=SPLITS_SCHEMA)
            parts[SPLITS] = StatePart(Redistribute.SPLIT, (Chunk(new_id(), table),))
        tally = self.tally.snapshot(new_id)
        if tally is not None:
            parts[TALLY] = tally
        return parts

    def begin_checkpoint(self, checkpoint_id: int) -> None:
        """Remember the offsets that this checkpoint has, for `checkpoint_completed`."""
        for open_split in self._splits:
            if _takes_note(open_split.reader):
                open_split.in_checkpoints[checkpoint_id] = open_split.split.offset

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        for open_split in self._splits:
            offset = open_split.in_checkpoints.get(checkpoint_id)
            if offset is not None and open_split.reader is not None:
                open_split.reader.checkpointed(offset)
            for known in [known for known in open_split.in_checkpoints if known <= checkpoint_id]:
                del open_split.in_checkpoints[known]

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        for open_split in self._splits:
            open_split.in_checkpoints.pop(checkpoint_id, None)

    def close(self) -> None:
        self._request_state = _CLOSED
        if self._timer is not None:
            self._timer.cancel()
        while self._splits:
            open_split = self._splits.popleft()
            if open_split.rest_timer is not None:
                open_split.rest_timer.cancel()
            if open_split.state is not _UNDER_WAY:  # else the read's completion closes it
                self._close_reader(open_split)

    # ---- the view of the operators ----

    @property
    def current(self) -> Sequence[tuple[int, int]]:
        return [(open_split.number, rows) for open_split, rows in self._emitting]

    @property
    def open(self) -> Iterator[int]:
        return (open_split.number for open_split in self._splits)

    def held_back_at_us(self, split: int) -> int:
        (found,) = (open_split for open_split in self._splits if open_split.number == split)
        return found.split.held_back_at_us

    @property
    def waiting_from_us(self) -> int:
        return self._assignment.waiting_from_us

    @property
    def assigned(self) -> Assigned:
        return self._assignment.counts

    def split_id(self, split: int) -> str | None:
        """The id of the split, or None if it is no longer open. Listeners are called for that in the next step."""
        return next((open_split.split.id for open_split in self._splits if open_split.number == split), None)

    @property
    def none_waits(self) -> bool:
        return self._request_state is _NONE_AVAILABLE

    def quiet_until_s(self, split: int) -> float:
        if self._source.bounded or self._source.splits_end:
            return float("-inf")
        return next(open_split.quiet_until_s for open_split in self._splits if open_split.number == split)

    def on_change(self, changed: Callable[[], None]) -> None:
        self._listeners.append(changed)
        self._joins_splits = self._joins_splits and self.every_row_passes

    def limit_drift(self, times: SplitTimes, drift_us: int) -> None:
        self._limit.begin(times, drift_us)

    @property
    def _waited_for(self) -> Iterator[int]:
        """The splits whose next rows others may have to wait for: not those that have been empty, until rows are emitted."""
        if self._request_state is not _STOPPED:
            for open_split in self._splits:
                if open_split.rest_s < EMPTY_REST_S:
                    yield open_split.number

    def _is_held_back(self, open_split: _OpenSplit) -> bool:
        return self._limit.holds(open_split.number) and open_split.state is not _AT_END

    @property
    def read_s(self) -> float:
        return self._rate.read_s

    @property
    def splits_ahead(self) -> int:
        """How many splits are not read at present because they are too far ahead."""
        return sum(map(self._is_held_back, self._splits))

    def check(self) -> None:
        """Check what must hold between two steps."""
        self._limit.check(self._waited_for)

    def _notify_listeners(self) -> bool:
        """Call the listeners. Returns whether there are any: they may have emitted a watermark."""
        self._changed = False
        for changed in self._listeners:
            changed()
        return bool(self._listeners)

    @property
    def emitting_rows(self) -> int:
        """How many rows from here the chain processes now, or has failed on. It is 0 when the chain processes none."""
        return sum(rows for _, rows in self._emitting)

    def position_of(self, row: int | None) -> str:
        """The position in the input of this row of `emitting_rows`, or of all of them if `row` is None."""
        if row is None:
            places = [self._source.place(each.before_last_batch, 0, rows - 1) for each, rows in self._emitting]
            return " or ".join(places)
        first = 0
        for open_split, rows in self._emitting:
            if row < first + rows:
                return self._source.place(open_split.before_last_batch, row - first, row - first)
            first += rows
        raise InvariantError(f"row {row} of a batch of {first} rows")

    # ---- emitting ----

    def _add(self, found: Split) -> None:
        split = self._source.begin_split(found)
        splits_max = self._source.splits_per_reader_of(split, self._parallelism)
        self._splits.append(_OpenSplit(split, self._opened, split, splits_max))
        self._opened += 1
        self._changed = True

    def _emit_next(self, open_split: _OpenSplit, prefetched: _Prefetched) -> None:
        """Emit this batch of the split; if it is small, together with those of the splits that are next."""
        now_s = self._services.clock.monotonic_s()
        taken = [(open_split, prefetched)]
        if prefetched.is_small and self._joins_splits:
            taken += self._small_ones(self._rate.rows_max - prefetched.batch.num_rows)
        for each, batch in taken:
            each.quiet_until_s = now_s
            self.tally.count(batch.batch.num_rows, batch.bad)
        bad_rows = 0 if prefetched.bad is None else len(prefetched.bad.at)
        if self._rate.has_rate:
            self._rate.keep_rate(sum(batch.batch.num_rows for _, batch in taken) + bad_rows, now_s)
        if prefetched.bad is not None:
            self._emit_bad(prefetched.bad.rows)
        with_rows = [(each, batch.batch) for each, batch in taken if batch.batch.num_rows]
        if with_rows:
            self._emit_timed(*zip(*with_rows, strict=True))

    def _small_ones(self, rows_max: int) -> list[tuple[_OpenSplit, _Prefetched]]:
        """Take the small batches that have been read of the next splits, up to this many rows."""
        taken = []
        for _ in range(len(self._splits) - 1):
            open_split = self._splits[0]
            waiting = open_split.prefetched
            if open_split.state in (_RESTING, _UNDER_WAY) or self._is_held_back(open_split):
                self._splits.rotate(-1)
                continue
            if waiting is None or not waiting.is_small or waiting.batch.num_rows > rows_max:
                break  # the next step begins with it
            self._splits.rotate(-1)
            taken.append((open_split, waiting))
            rows_max -= waiting.batch.num_rows
            self._next_batch(open_split)
        return taken

    def _emit_timed(self, open_splits: Sequence[_OpenSplit], batches: Sequence[pa.RecordBatch]) -> None:
        """Emit a batch, and set the size of the next ones.

        It depends on how long the chain took, and on how fast downstream tasks take batches.
        """
        batch = concat(batches)
        started_s = self._services.clock.own_core_s()
        self._emitting = tuple((each, part.num_rows) for each, part in zip(open_splits, batches, strict=True))
        self._emit(batch)
        self._emitting = ()
        self._rate.record_emitted(batch.num_rows, started_s, self._services.clock.own_core_s())

    # ---- reading ----

    def _next_batch(self, open_split: _OpenSplit) -> _Prefetched | None:
        """The next batch of the split, or None if it has none now. The split's offset moves past it."""
        if self._source.blocking:
            prefetched, open_split.prefetched = open_split.prefetched, None
            if prefetched is not None:
                open_split.rest_s = 0.0
            _move_past(open_split, prefetched)
            if open_split.state in (_IDLE, _PREFETCHED):
                is_empty = prefetched is not None and prefetched.is_all and open_split.reports_rows
                if is_empty and not open_split.have_come:
                    self._let_rest(open_split, open_split.split.offset)
                else:
                    self._prefetch(open_split)
            return prefetched
        if open_split.state is _AT_END:
            return None
        if open_split.reader is None:
            open_split.reader = self._source.open_split(open_split.split)
        prefetched = _read(self._source, open_split.split, open_split.reader, self._rate.rows_max)
        if prefetched is None:
            open_split.state = _AT_END
        _move_past(open_split, prefetched)
        return prefetched

    def _prefetch(self, open_split: _OpenSplit) -> None:
        """Begin to read the next batch of the split on the I/O pool."""
        open_split.state, open_split.rest_timer = _UNDER_WAY, None
        if open_split.reports_rows and open_split.had_few_rows:
            self._to_read.append(open_split)
            if not self._is_reading_some:  # with all splits that get their turn before this mail
                self._is_reading_some = True
                self._services.executor.post(self._read_some)
            return
        open_split.have_come = False
        source, split, reader, rows_max = self._source, open_split.split, open_split.reader, self._rate.rows_max
        clock, report = self._services.clock, partial(self._report_rows, open_split)

        reports_rows = open_split.reports_rows

        def work() -> tuple[SplitReader, bool, _Prefetched | None, float]:
            began_s = clock.processor_s()
            if reader is not None:
                return reader, reports_rows, _read(source, split, reader, rows_max), clock.processor_s() - began_s
            with ExitStack() as stack:
                opened = source.open_split(split)
                stack.callback(opened.close)  # a reader whose first read fails is not returned, and must be closed
                reports = opened.on_rows(report)
                prefetched = _read(source, split, opened, rows_max)
                stack.pop_all()
            return opened, reports, prefetched, clock.processor_s() - began_s

        def done(outcome: Done[tuple[SplitReader, bool, _Prefetched | None, float]] | Failed) -> None:
            open_split.state = _IDLE
            if isinstance(outcome, Failed):
                self._read_failed((open_split,), outcome.error)
                return
            open_split.reader, open_split.reports_rows, prefetched, worked_s = outcome.value
            self._rate.read_s += worked_s
            self._take(open_split, prefetched)

        self._services.source_reads.submit(work, done)

    def _read_some(self) -> None:
        """Begin to read the splits that had few rows, one after the other, until there are as many as a batch has."""
        open_splits, self._to_read = self._to_read, []
        if self._request_state is _CLOSED:
            self._is_reading_some = False
            for open_split in open_splits:
                open_split.state = _IDLE
                self._close_reader(open_split)
            return
        if not open_splits:
            self._is_reading_some = False
            return
        for open_split in open_splits:
            open_split.have_come = False
        source, rows_max, clock = self._source, self._rate.rows_max, self._services.clock
        to_read = [(each.split, each.reader) for each in open_splits]

        def work() -> tuple[list[_Prefetched | None], float]:
            began_s, rows, found = clock.processor_s(), 0, []
            for split, reader in to_read:
                assert reader is not None, "a split is opened by a read of its own"
                prefetched = _read(source, split, reader, rows_max)
                found.append(prefetched)
                rows += 0 if prefetched is None else prefetched.batch.num_rows
                if rows >= rows_max:
                    break
            return found, clock.processor_s() - began_s

        def done(outcome: Done[tuple[list[_Prefetched | None], float]] | Failed) -> None:
            for open_split in open_splits:
                open_split.state = _IDLE
            if isinstance(outcome, Failed):
                self._is_reading_some = False
                waiting, self._to_read = self._to_read, []
                for open_split in waiting:
                    open_split.state = _IDLE
                self._read_failed((*open_splits, *waiting), outcome.error)
                return
            found, worked_s = outcome.value
            self._rate.read_s += worked_s
            for open_split in open_splits[len(found) :]:
                open_split.state = _UNDER_WAY
                self._to_read.append(open_split)
            for open_split, prefetched in zip(open_splits, found, strict=False):
                self._take(open_split, prefetched)
            self._read_some()

        self._services.source_reads.submit(work, done)

    def _read_failed(self, open_splits: Sequence[_OpenSplit], error: BaseException) -> None:
        if self._request_state is _CLOSED:
            for open_split in open_splits:
                self._close_reader(open_split)
        else:
            self._fail(error)

    def _take(self, open_split: _OpenSplit, prefetched: _Prefetched | None) -> None:
        """Take what a read has returned."""
        if self._request_state is _CLOSED:
            self._close_reader(open_split)
        elif prefetched is not None and prefetched.batch.num_rows == 0 and prefetched.bad is None:
            open_split.had_few_rows = True
            if open_split.have_come:
                open_split.split = msgspec.structs.replace(open_split.split, offset=prefetched.offset)
                self._prefetch(open_split)
            else:
                self._let_rest(open_split, prefetched.offset)
        else:
            open_split.had_few_rows = prefetched is not None and prefetched.is_small
            open_split.state = _AT_END if prefetched is None else _PREFETCHED
            open_split.prefetched = prefetched
            self._wake()

    def _report_rows(self, open_split: _OpenSplit) -> None:
        """Note that rows of the split have come. Called from any thread."""
        self._services.executor.post(lambda: self._rows_have_come(open_split))

    def _rows_have_come(self, open_split: _OpenSplit) -> None:
        open_split.have_come = True
        if open_split.state is _RESTING and self._request_state is not _CLOSED:
            assert open_split.rest_timer is not None
            open_split.rest_timer.cancel()
            self._prefetch(open_split)

    def _let_rest(self, open_split: _OpenSplit, offset: int) -> None:
        """Read the split again later: it has no rows at present.

        All rows that it had before have been emitted, because a read begins when the batch before it is taken.
        """
        if open_split.prefetched is not None:
            raise InvariantError(f"split {open_split.split.id} rests, and has rows that were read ahead")
        open_split.quiet_until_s = self._services.clock.monotonic_s()
        open_split.split = msgspec.structs.replace(open_split.split, offset=offset)
        before_s = open_split.rest_s
        least_s, most_s = (
            (REPORTED_REST_S_MIN, REPORTED_REST_S_MAX) if open_split.reports_rows else (REST_S_MIN, REST_S_MAX)
        )
        open_split.rest_s = min(max(2 * before_s, least_s), most_s)
        open_split.state = _RESTING
        if before_s < EMPTY_REST_S <= open_split.rest_s:
            self._limit.update(self._waited_for)
        open_split.rest_timer = self._services.executor.call_later(
            open_split.rest_s, partial(self._prefetch, open_split)
        )

    def _close_reader(self, open_split: _OpenSplit) -> None:
        reader, open_split.reader = open_split.reader, None
        if reader is None:
            return
        if self._source.blocking:
            self._services.source_reads.submit(reader.close, self._closed_reader)
        else:
            reader.close()

    def _closed_reader(self, outcome: Done[None] | Failed) -> None:
        if isinstance(outcome, Failed) and self._request_state is not _CLOSED:
            self._fail(outcome.error)

    def _must_wait(self) -> bool:
        delay_s = self._rate.next_emit_s - self._services.clock.monotonic_s()
        if delay_s <= 0:
            return False
        if self._timer is None:
            self._timer = self._services.executor.call_later(delay_s, self._timer_fired)
        return True

    def _timer_fired(self) -> None:
        self._timer = None
        self._wake()


def _takes_note(reader: SplitReader | None) -> bool:
    return reader is not None and type(reader).checkpointed is not SplitReader.checkpointed


def _move_past(open_split: _OpenSplit, prefetched: _Prefetched | None) -> None:
    if prefetched is not None:
        open_split.before_last_batch = open_split.split
        open_split.split = msgspec.structs.replace(open_split.split, offset=prefetched.offset)


def _read(source: Source, split: Split, reader: SplitReader, rows_max: int) -> _Prefetched | None:
    """Read the next batch of the split. Raises SchemaError if it has other columns than the source, and DataError if a
    text in it is not UTF-8, or a time is beyond the day.
    """
    found = reader.read(rows_max)
    if found is None:
        return None
    batch, offset = checked_read(found, source.schema, f"{type(source).__name__}: split {split.id!r}")
    wrong = invalid_value(batch)
    if wrong is not None:
        row, what = wrong
        raise DataError(f"{source.place(split, row, row)}: {what}")
    return _Prefetched(batch, offset, reader.bad_records(), batch.num_rows < rows_max)
