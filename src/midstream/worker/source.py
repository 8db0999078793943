"""Reads the splits of one source subtask and emits their batches.

Every split carries the offset behind the last batch that was emitted; that is all there is to a
source's state. What has been read ahead but not emitted is simply read again after a restore.

Every batch is of one split, and splits take turns, batch by batch: how far event time comes between
them is a matter of batches, and each operator of the chain can know which split it is at (`Splits`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import msgspec
import pyarrow as pa

from midstream.core.arrow_types import to_list
from midstream.core.seams import Done, Failed, Timer
from midstream.operators.bad_records import TALLY, BadRecords, Tally
from midstream.operators.base import Splits
from midstream.operators.source import Source, Split, SplitReader
from midstream.state.parts import Chunk, Redistribute, StatePart
from midstream.worker.seams import TaskSeams
from midstream.worker.source_pace import SourcePace

SPLITS = "splits"
"""The part of a source's state that its readers' splits are in, each at its offset."""
SPLITS_SCHEMA = pa.schema([("split", pa.binary())])
REST_S_MIN = 0.004
"""Before a split that had nothing for now is read again; twice as long each time that it still has nothing."""
REST_S_MAX = 0.05
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Split)


def splits_of(part: StatePart) -> list[Split]:
    """What is in the part SPLITS."""
    return [_decoder.decode(encoded) for encoded in to_list(part.table().column("split"))]


class Progress(Enum):
    EMITTED = auto()
    """Call again when the task can."""
    WAITING = auto()
    """`wake` will be called."""
    ENDED = auto()
    """All splits are read and there are no more."""


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What a reader gave: rows, the offset behind them, and what it has left out beside them."""

    batch: pa.RecordBatch
    offset: int
    bad: BadRecords | None

    @property
    def is_empty(self) -> bool:
        return self.batch.num_rows == 0 and self.bad is None


class Reading(Enum):
    """Where the reading of one open split stands."""

    IDLE = auto()
    """It is read on when it has its turn."""
    UNDER_WAY = auto()
    """On the I/O pool; at most one read of a split at a time."""
    AHEAD = auto()
    """Rows have been read, and wait for their turn."""
    RESTING = auto()
    """It had nothing for now, and is read again when its timer rings."""
    AT_END = auto()
    """All that it has is emitted."""


@dataclass(slots=True)
class _Open:
    """A split that is being read."""

    split: Split
    number: int
    before: Split
    """As it was before the rows that were emitted last."""
    turn_s: float = float("-inf")
    """When rows of it were emitted last."""
    reader: SplitReader | None = None
    state: Reading = Reading.IDLE
    ahead: _Ahead | None = None
    """What AHEAD has read."""
    rest: Timer | None = None
    """Of RESTING."""
    rest_s: float = 0.0


class Asking(Enum):
    """Whether the driver asks the coordinator for splits."""

    MAY_ASK = auto()
    ASKED = auto()
    NO_MORE = auto()
    """There are none."""
    STOPPED = auto()
    """It ends here, as if there were none and all were read (drain)."""
    CLOSED = auto()


# A member takes ten times as long as a global to look up.
_IDLE, _UNDER_WAY, _AHEAD, _RESTING, _AT_END = Reading
_MAY_ASK, _ASKED, _NO_MORE, _STOPPED, _CLOSED = Asking


class SourceDriver(Splits):
    """`operators.base.Splits` is what the operators of the chain see of it."""

    def __init__(
        self,
        source: Source,
        parallelism: int,
        seams: TaskSeams,
        *,
        emit: Callable[[pa.RecordBatch], None],
        emit_bad: Callable[[pa.RecordBatch], None],
        request_split: Callable[[], None],
        wake: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._source = source
        self._clock, self._executor = seams.clock, seams.executor
        self._emit = emit
        self._emit_bad = emit_bad
        self._tally = Tally(source.bad_records_max)
        self._request_split = request_split
        self._wake = wake
        self._fail = fail
        self._splits_wanted = source.splits_per_reader(parallelism)
        rows_per_s = source.rows_per_s / source.readers_max(parallelism) if source.rows_per_s else None
        self._pace = SourcePace(seams.config.batch_rows, rows_per_s)
        self._timer: Timer | None = None
        """Rings when the rate allows the next batch."""
        self._open: deque[_Open] = deque()
        self._opened = 0
        self._current = -1
        self._asking = _MAY_ASK
        self._all_assigned = False
        """Until told otherwise: at first nobody knows which splits there are. Others may ask on when it is True."""
        self._emitting: tuple[_Open, int] | None = None
        """The split whose rows the chain has, and how many; still so when the chain has failed on them."""
        self._listeners: list[Callable[[], None]] = []
        self._changed = True
        """The listeners are to be told, before anything else is emitted."""

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        if SPLITS in parts:
            for split in splits_of(parts[SPLITS]):
                self._add(split)
        if TALLY in parts:
            self._tally.restore(parts[TALLY])

    def add_split(self, encoded: bytes, *, is_last: bool = True) -> None:
        """`is_last`: see `all_assigned`."""
        if self._asking is _ASKED:
            self._asking = _MAY_ASK
        self._all_assigned = is_last
        self._add(_decoder.decode(encoded))
        self._wake()

    def splits_assigned(self) -> None:
        """All that were found have gone to some subtask, this one or others."""
        self._all_assigned = self._changed = True
        self._wake()

    def no_more_splits(self) -> None:
        if self._asking in (_MAY_ASK, _ASKED):
            self._asking = _NO_MORE
        self._wake()

    def stop(self) -> None:
        """End here, as if the input did (drain)."""
        self._asking = _STOPPED
        self._wake()

    def step(self) -> Progress:
        """Emit at most one batch. Splits take turns."""
        if self._asking is _STOPPED:
            return Progress.ENDED
        if len(self._open) < self._splits_wanted and self._asking is _MAY_ASK:
            self._asking = _ASKED
            self._request_split()
        if self._changed and self._tell():
            return Progress.EMITTED
        pace = self._pace
        if pace.has_rate and self._must_wait():
            pace.pause()
            return Progress.WAITING
        for _ in range(len(self._open)):
            current = self._open[0]
            ahead = self._next_ahead(current)
            if ahead is None and current.state is _AT_END:
                self._open.popleft()
                self._close_reader(current)
                self._tell()
                return Progress.EMITTED
            self._open.rotate(-1)
            if ahead is not None:
                bad_rows = 0 if ahead.bad is None else len(ahead.bad.at)
                if pace.has_rate:
                    pace.keep_rate(ahead.batch.num_rows + bad_rows, self._clock.monotonic_s())
                self._tally.count(ahead.batch.num_rows, ahead.bad)
                if ahead.bad is not None:
                    self._emit_bad(ahead.bad.rows)
                if ahead.batch.num_rows:
                    self._emit_timed(current, ahead.batch)
                return Progress.EMITTED
        if not self._open and self._asking is _NO_MORE:
            return Progress.ENDED
        pace.pause()
        return Progress.WAITING

    def snapshot(self, new_id: Callable[[], str]) -> dict[str, StatePart]:
        parts = {}
        encoded = [_encoder.encode(current.split) for current in self._open]
        if encoded:
            table = pa.table({"split": pa.array(encoded, pa.binary())}, schema=SPLITS_SCHEMA)
            parts[SPLITS] = StatePart(Redistribute.SPLIT, (Chunk(new_id(), table),))
        tally = self._tally.snapshot(new_id)
        if tally is not None:
            parts[TALLY] = tally
        return parts

    def close(self) -> None:
        self._asking = _CLOSED
        if self._timer is not None:
            self._timer.cancel()
        while self._open:
            current = self._open.popleft()
            if current.rest is not None:
                current.rest.cancel()
            if current.state is not _UNDER_WAY:  # else the read's completion closes it
                self._close_reader(current)

    # ---- what operators see of it ----

    @property
    def current(self) -> int:
        return self._current

    @property
    def open(self) -> Iterator[int]:
        return (current.number for current in self._open)

    @property
    def all_assigned(self) -> bool:
        return self._all_assigned

    def split_id(self, split: int) -> str | None:
        """None where it is not open any more, which its listeners are told in the next step."""
        return next((current.split.id for current in self._open if current.number == split), None)

    def is_starved(self, split: int, since_s: float) -> bool:
        current = next(current for current in self._open if current.number == split)
        return current.state not in (_UNDER_WAY, _RESTING) and current.turn_s < since_s

    def on_change(self, changed: Callable[[], None]) -> None:
        self._listeners.append(changed)

    def _tell(self) -> bool:
        """Whether anybody wants to know; a watermark may be what comes of it."""
        self._changed = False
        for changed in self._listeners:
            changed()
        return bool(self._listeners)

    @property
    def bad_records(self) -> int:
        """How many were left out since the task was deployed."""
        return self._tally.total

    @property
    def emitting_rows(self) -> int:
        """How many rows the chain has in hand, or has failed on; 0 when it is not at work on rows from here."""
        return 0 if self._emitting is None else self._emitting[1]

    def place(self, row: int | None) -> str:
        """Where the input has this one of those rows, or (None) all of them."""
        assert self._emitting is not None
        current, rows = self._emitting
        return self._source.place(current.before, *((0, rows - 1) if row is None else (row, row)))

    # ---- emitting ----

    def _add(self, split: Split) -> None:
        self._open.append(_Open(split, self._opened, split))
        self._opened += 1
        self._changed = True

    def _emit_timed(self, current: _Open, batch: pa.RecordBatch) -> None:
        """Emit, and size the batches to come by how long that took, and by how fast they are taken."""
        started_s = self._clock.own_core_s()
        current.turn_s, self._current = self._clock.monotonic_s(), current.number
        self._emitting = current, batch.num_rows
        self._emit(batch)
        self._emitting = None
        self._pace.emitted(batch.num_rows, started_s, self._clock.own_core_s())

    # ---- reading ----

    def _next_ahead(self, current: _Open) -> _Ahead | None:
        """The next batch of the split if there is one now; its offset counts as emitted."""
        if self._source.blocking:
            ahead, current.ahead = current.ahead, None
            if current.state in (_IDLE, _AHEAD):
                self._read_ahead(current)
        elif current.state is _AT_END:
            ahead = None
        else:
            if current.reader is None:
                current.reader = self._source.open_split(current.split)
            ahead = _read(current.reader, self._pace.rows_max)
            if ahead is None:
                current.state = _AT_END
        if ahead is None:
            return None
        current.before = current.split
        current.split = msgspec.structs.replace(current.split, offset=ahead.offset)
        return ahead

    def _read_ahead(self, current: _Open) -> None:
        current.state = _UNDER_WAY
        source, split, reader, rows_max = self._source, current.split, current.reader, self._pace.rows_max

        def work() -> tuple[SplitReader, _Ahead | None]:
            if reader is not None:
                return reader, _read(reader, rows_max)
            with ExitStack() as stack:
                opened = source.open_split(split)
                stack.callback(opened.close)  # nobody has it if it cannot be read
                ahead = _read(opened, rows_max)
                stack.pop_all()
            return opened, ahead

        def done(outcome: Done[tuple[SplitReader, _Ahead | None]] | Failed) -> None:
            current.state = _IDLE
            if isinstance(outcome, Failed):
                if self._asking is _CLOSED:
                    self._close_reader(current)
                else:
                    self._fail(outcome.error)
                return
            current.reader, ahead = outcome.value
            if self._asking is _CLOSED:
                self._close_reader(current)
            elif ahead is not None and ahead.is_empty:
                self._let_rest(current, ahead.offset)
            else:
                current.state = _AT_END if ahead is None else _AHEAD
                current.ahead, current.rest_s = ahead, 0.0
                self._wake()

        self._executor.submit(work, done)

    def _let_rest(self, current: _Open, offset: int) -> None:
        """The split has no rows for now; all that it had before are emitted, as a read begins when they are taken."""
        assert current.ahead is None, current.split.id
        current.split = msgspec.structs.replace(current.split, offset=offset)
        current.rest_s = min(max(2 * current.rest_s, REST_S_MIN), REST_S_MAX)
        current.state = _RESTING
        current.rest = self._executor.call_later(current.rest_s, partial(self._rested, current))

    def _rested(self, current: _Open) -> None:
        current.rest = None
        self._read_ahead(current)

    def _close_reader(self, current: _Open) -> None:
        reader, current.reader = current.reader, None
        if reader is None:
            return
        if self._source.blocking:
            self._executor.submit(reader.close, self._closed_reader)
        else:
            reader.close()

    def _closed_reader(self, outcome: Done[None] | Failed) -> None:
        if isinstance(outcome, Failed) and self._asking is not _CLOSED:
            self._fail(outcome.error)

    def _must_wait(self) -> bool:
        delay_s = self._pace.next_emit_s - self._clock.monotonic_s()
        if delay_s <= 0:
            return False
        if self._timer is None:
            self._timer = self._executor.call_later(delay_s, self._timer_fired)
        return True

    def _timer_fired(self) -> None:
        self._timer = None
        self._wake()


def _read(reader: SplitReader, rows_max: int) -> _Ahead | None:
    found = reader.read(rows_max)
    return None if found is None else _Ahead(*found, reader.bad_records())
