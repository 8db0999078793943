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
from enum import Enum, auto
from typing import NamedTuple

import msgspec
import pyarrow as pa

from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.batches import concat
from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US, Assigned
from midstream.engine.core.errors import InvariantError
from midstream.engine.core.interfaces import Timer
from midstream.engine.operators.bad_records import TALLY, BadRecordCount
from midstream.engine.operators.base import Splits, SplitTimes
from midstream.engine.operators.source_api import (
    Source,
    Split,
    SplitReader,
    checked_count,
    decoded_splits,
)
from midstream.engine.state.state_parts import Chunk, Redistribute, StatePart, check_columns
from midstream.engine.worker.drift_limit import DriftLimit
from midstream.engine.worker.interfaces import TaskServices
from midstream.engine.worker.source_rate import SourceRate
from midstream.engine.worker.split_reads import EMPTY_REST_S, OpenSplit, Prefetched, Reading, SplitReads

SPLITS = "splits"
"""The name of the state part with the splits, each at its offset."""
SPLITS_SCHEMA = pa.schema([("split", pa.binary())])
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
_, _UNDER_WAY, _, _RESTING, _AT_END = Reading
_MAY_REQUEST, _REQUESTED, _NONE_AVAILABLE, _NO_MORE, _STOPPED, _CLOSED = SplitRequestState


class SourceReader(Splits):
    """The source of one task. The operators of the chain see it as `engine.operators.base.Splits`."""

    def __init__(
        self,
        source: Source,
        parallelism: int,
        services: TaskServices,
        *,
        columns: pa.Schema | None = None,
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
        checked_count(source.splits_per_reader(parallelism), "splits_per_reader")
        self._parallelism = parallelism
        readers = checked_count(source.readers_max(parallelism), "readers_max")
        rows_per_s = source.rows_per_s / readers if source.rows_per_s else None
        self._rate = SourceRate(services.config.batch_rows, rows_per_s)
        self._timer: Timer | None = None
        """Fires when the rate allows the next batch."""
        self._splits: deque[OpenSplit] = deque()
        self._opened = 0
        self.every_row_passes = True
        """Whether every row reaches the operator that is being opened."""
        self._request_state = _MAY_REQUEST
        self._assignment = _Assignment()
        self._emitting: tuple[tuple[OpenSplit, int], ...] = ()
        """The splits whose batch the chain processes, with their rows, in order. A failure of the chain does not reset it."""
        self._reads = SplitReads(
            source,
            services,
            self._rate,
            columns=columns,
            wake=wake,
            fail=fail,
            has_none=lambda _: limit.update(self._waited_for),
        )
        self._listeners: list[tuple[Callable[[], None], bool]] = []
        """What to call when splits have changed, and whether every row reaches the operator that is called."""
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
            prefetched = self._reads.next_batch(open_split)
            if prefetched is None and open_split.state is _AT_END:
                self._splits.popleft()
                self._reads.close(open_split)
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
        self._reads.end()
        if self._timer is not None:
            self._timer.cancel()
        while self._splits:
            open_split = self._splits.popleft()
            if open_split.rest_timer is not None:
                open_split.rest_timer.cancel()
            if open_split.state is not _UNDER_WAY:  # else the read's completion closes it
                self._reads.close(open_split)

    # ---- the view of the operators ----

    @property
    def current(self) -> Sequence[tuple[int, int]]:
        return [(open_split.number, rows) for open_split, rows in self._emitting]

    @property
    def open(self) -> Iterator[int]:
        return (open_split.number for open_split in self._splits)

    def held_back_at_us(self, split: int) -> int:
        return self._numbered(split).split.held_back_at_us

    def is_held_to_its_end(self, split: int) -> bool:
        source = self._source
        ends = source.splits_unordered and (source.bounded or source.splits_end)
        return ends and self.held_back_at_us(split) > MIN_WATERMARK_US

    def latest_us(self, split: int) -> int | None:
        return self._numbered(split).split.latest_us

    def note_latest_us(self, split: int, time_us: int) -> None:
        found = self._numbered(split)
        found.split = msgspec.structs.replace(found.split, latest_us=time_us)

    def _numbered(self, split: int) -> OpenSplit:
        return next(open_split for open_split in self._splits if open_split.number == split)

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
        return self._numbered(split).quiet_until_s

    def on_change(self, changed: Callable[[], None]) -> None:
        self._listeners.append((changed, self.every_row_passes))

    def limit_drift(self, times: SplitTimes, drift_us: int) -> None:
        self._limit.begin(times, drift_us)

    @property
    def _waited_for(self) -> Iterator[int]:
        """The splits whose next rows others may have to wait for: not those that have been empty, until rows are emitted."""
        if self._request_state is not _STOPPED:
            for open_split in self._splits:
                if open_split.rest_s < EMPTY_REST_S:
                    yield open_split.number

    def _is_held_back(self, open_split: OpenSplit) -> bool:
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
        for changed, _ in self._listeners:
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
        self._splits.append(OpenSplit(split, self._opened, split, splits_max))
        self._opened += 1
        self._changed = True

    def _emit_next(self, open_split: OpenSplit, prefetched: Prefetched) -> None:
        """Emit this batch of the split; if it is small, together with those of the splits that are next."""
        now_s = self._services.clock.monotonic_s()
        taken = [(open_split, prefetched)]
        if prefetched.is_small and all(gets_every_row for _, gets_every_row in self._listeners):
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

    def _small_ones(self, rows_max: int) -> list[tuple[OpenSplit, Prefetched]]:
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
            self._reads.next_batch(open_split)
        return taken

    def _emit_timed(self, open_splits: Sequence[OpenSplit], batches: Sequence[pa.RecordBatch]) -> None:
        """Emit a batch, and set the size of the next ones.

        It depends on how long the chain took, and on how fast downstream tasks take batches.
        """
        batch = concat(batches)
        started_s = self._services.clock.own_core_s()
        self._emitting = tuple((each, part.num_rows) for each, part in zip(open_splits, batches, strict=True))
        self._emit(batch)
        self._emitting = ()
        self._rate.record_emitted(batch.num_rows, started_s, self._services.clock.own_core_s())

    # ---- the rate ----

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
