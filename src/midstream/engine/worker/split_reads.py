"""Reads the open splits of one source subtask: in turn, ahead of what is emitted, and again when rows may have come.

A split without rows rests. It is read again after a time that grows with each empty read, or at once if its reader
reports that rows have come. Splits that had few rows are read one after the other by one call of the I/O pool: a call for
each would take longer than the reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

import msgspec
import pyarrow as pa

from midstream.engine.core.batches import invalid_value
from midstream.engine.core.errors import DataError, InvariantError
from midstream.engine.core.interfaces import Done, Failed, Timer
from midstream.engine.operators.bad_records import BadRecords
from midstream.engine.operators.source_api import Source, Split, SplitReader, checked_read
from midstream.engine.worker.interfaces import TaskServices
from midstream.engine.worker.source_rate import SourceRate

REST_S_MIN = 0.004
"""How long a split without rows rests before it is read again. The time doubles, up to REST_S_MAX, with each empty
read."""
REST_S_MAX = 0.05
REPORTED_REST_S_MIN = 0.015
REPORTED_REST_S_MAX = 0.25
"""The same of a split whose reader reports new rows: they end the rest."""
READS_APART_S = 0.002
"""The least time between two reads of several splits: rows that come in the meantime share the cost of a batch."""
FEW_ROWS = 1024
"""Batches with fewer rows are read and emitted together with those of other splits."""
EMPTY_REST_S = 0.016
"""A split that rests this long, after its third read without rows, does not count as one that may have rows: splits that
are kept in step do not wait for it. Counting it out with each empty read would cost messages for each row of a slow source.
"""


@dataclass(frozen=True, slots=True)
class Prefetched:
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
class OpenSplit:
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
    prefetched: Prefetched | None = None
    """The batch of the state PREFETCHED."""
    rest_timer: Timer | None = None
    """The timer of the state RESTING."""
    rest_s: float = 0.0
    """How long the split rested last; 0 if it has had rows since."""
    in_checkpoints: dict[int, int] = field(default_factory=dict)
    """The offset in each checkpoint that is under way, if the reader takes note of completed ones."""


# Reading an enum member takes ten times as long as reading a global.
_IDLE, _UNDER_WAY, _PREFETCHED, _RESTING, _AT_END = Reading


class SplitReads:
    """The reads of one source subtask. `wake`: is called when a split has a batch. `has_none`: is called when a split no
    longer counts as one that may have rows.
    """

    def __init__(
        self,
        source: Source,
        services: TaskServices,
        rate: SourceRate,
        *,
        columns: pa.Schema | None,
        wake: Callable[[], None],
        fail: Callable[[BaseException], None],
        has_none: Callable[[OpenSplit], None],
    ) -> None:
        self._source = source
        self._columns = columns
        self._schema = source.schema if columns is None else columns
        self._services = services
        self._rate = rate
        self._wake = wake
        self._fail = fail
        self._has_none = has_none
        self.is_closed = False
        self._to_read: list[OpenSplit] = []
        """Splits that are read together, next."""
        self._is_reading_some = False
        """Splits are being read together, or will be by a mail or a timer."""
        self._read_some_s = float("-inf")
        """When the last such read began."""

    def next_batch(self, open_split: OpenSplit) -> Prefetched | None:
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
            open_split.reader = self._opened(open_split.split)
        prefetched = self._read(open_split.split, open_split.reader, self._rate.rows_max)
        if prefetched is None:
            open_split.state = _AT_END
        _move_past(open_split, prefetched)
        return prefetched

    def _prefetch(self, open_split: OpenSplit) -> None:
        """Begin to read the next batch of the split on the I/O pool."""
        open_split.state, open_split.rest_timer = _UNDER_WAY, None
        if open_split.reports_rows and open_split.had_few_rows:
            self._to_read.append(open_split)
            if not self._is_reading_some:
                self._is_reading_some = True
                self._read_some_soon()
            return
        open_split.have_come = False
        split, reader, rows_max = open_split.split, open_split.reader, self._rate.rows_max
        clock, report = self._services.clock, partial(self._report_rows, open_split)
        reports_rows = open_split.reports_rows

        def work() -> tuple[SplitReader, bool, Prefetched | None, float]:
            began_s = clock.processor_s()
            if reader is not None:
                return reader, reports_rows, self._read(split, reader, rows_max), clock.processor_s() - began_s
            with ExitStack() as stack:
                opened = self._opened(split)
                stack.callback(opened.close)  # a reader whose first read fails is not returned, and must be closed
                reports = opened.on_rows(report)
                prefetched = self._read(split, opened, rows_max)
                stack.pop_all()
            return opened, reports, prefetched, clock.processor_s() - began_s

        def done(outcome: Done[tuple[SplitReader, bool, Prefetched | None, float]] | Failed) -> None:
            open_split.state = _IDLE
            if isinstance(outcome, Failed):
                self._read_failed((open_split,), outcome.error)
                return
            open_split.reader, open_split.reports_rows, prefetched, worked_s = outcome.value
            self._rate.read_s += worked_s
            self._take(open_split, prefetched)

        self._services.source_reads.submit(work, done)

    def end(self) -> None:
        """Begin no more reads: the source is closed. A reader is closed when its read completes."""
        self.is_closed = True
        waiting, self._to_read = self._to_read, []
        for open_split in waiting:
            open_split.state = _IDLE

    def _read_some_soon(self) -> None:
        """Read, with the splits that now wait, all that get their turn until then."""
        executor = self._services.executor
        wait_s = self._read_some_s + READS_APART_S - self._services.clock.monotonic_s()
        if wait_s > 0:
            executor.call_later(wait_s, self._read_some)  # once it is closed, that finds no splits
        else:
            executor.post(self._read_some)

    def _read_some(self) -> None:
        """Begin to read the splits that had few rows, one after the other, until there are as many as a batch has."""
        open_splits, self._to_read = self._to_read, []
        if not open_splits:
            self._is_reading_some = False
            return
        self._read_some_s = self._services.clock.monotonic_s()
        for open_split in open_splits:
            open_split.have_come = False
        rows_max, clock = self._rate.rows_max, self._services.clock
        to_read = [(each.split, each.reader) for each in open_splits]

        def work() -> tuple[list[Prefetched | None], float]:
            began_s, rows, found = clock.processor_s(), 0, []
            for split, reader in to_read:
                assert reader is not None, "a split is opened by a read of its own"
                prefetched = self._read(split, reader, rows_max)
                found.append(prefetched)
                rows += 0 if prefetched is None else prefetched.batch.num_rows
                if rows >= rows_max:
                    break
            return found, clock.processor_s() - began_s

        def done(outcome: Done[tuple[list[Prefetched | None], float]] | Failed) -> None:
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
            if self.is_closed:
                for open_split in open_splits:
                    self.close(open_split)
                return
            for open_split in open_splits[len(found) :]:
                open_split.state = _UNDER_WAY
                self._to_read.append(open_split)
            for open_split, prefetched in zip(open_splits, found, strict=False):
                self._take(open_split, prefetched)
            if self._to_read:
                self._read_some_soon()
            else:
                self._is_reading_some = False

        self._services.source_reads.submit(work, done)

    def _read_failed(self, open_splits: Sequence[OpenSplit], error: BaseException) -> None:
        if self.is_closed:
            for open_split in open_splits:
                self.close(open_split)
        else:
            self._fail(error)

    def _take(self, open_split: OpenSplit, prefetched: Prefetched | None) -> None:
        """Take what a read has returned."""
        if self.is_closed:
            self.close(open_split)
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

    def _report_rows(self, open_split: OpenSplit) -> None:
        """Note that rows of the split have come. Called from any thread."""
        self._services.executor.post(lambda: self._rows_have_come(open_split))

    def _rows_have_come(self, open_split: OpenSplit) -> None:
        open_split.have_come = True
        if open_split.state is _RESTING and not self.is_closed:
            assert open_split.rest_timer is not None
            open_split.rest_timer.cancel()
            self._prefetch(open_split)

    def _let_rest(self, open_split: OpenSplit, offset: int) -> None:
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
            self._has_none(open_split)
        open_split.rest_timer = self._services.executor.call_later(
            open_split.rest_s, partial(self._prefetch, open_split)
        )

    def close(self, open_split: OpenSplit) -> None:
        reader, open_split.reader = open_split.reader, None
        if reader is None:
            return
        if self._source.blocking:
            self._services.source_reads.submit(reader.close, self._closed_reader)
        else:
            reader.close()

    def _opened(self, split: Split) -> SplitReader:
        if self._columns is None:
            return self._source.open_split(split)
        return self._source.open_projected(split, self._columns)

    def _read(self, split: Split, reader: SplitReader, rows_max: int) -> Prefetched | None:
        """Read the next batch of the split, on the loop or on the I/O pool. Raises SchemaError if it has other columns than
        those that are read, and DataError if a text in it is not UTF-8, or a time is beyond the day.
        """
        found = reader.read(rows_max)
        if found is None:
            return None
        source = self._source
        batch, offset = checked_read(found, self._schema, f"{type(source).__name__}: split {split.id!r}")
        wrong = invalid_value(batch)
        if wrong is not None:
            row, what = wrong
            raise DataError(f"{source.place(split, row, row)}: {what}")
        return Prefetched(batch, offset, reader.bad_records(), batch.num_rows < rows_max)

    def _closed_reader(self, outcome: Done[None] | Failed) -> None:
        if isinstance(outcome, Failed) and not self.is_closed:
            self._fail(outcome.error)


def _move_past(open_split: OpenSplit, prefetched: Prefetched | None) -> None:
    if prefetched is not None:
        open_split.before_last_batch = open_split.split
        open_split.split = msgspec.structs.replace(open_split.split, offset=prefetched.offset)
