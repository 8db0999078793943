"""The operator of `map_async`: it calls a function for many rows at a time, outside of the loop.

    process --> waiting --room--> called --outcome--> completed --its turn--> emitted
                                   ^    \\-- failed: after a pause
                                   \\--------/

Rows between two watermarks are a segment. A watermark is emitted when every row of the segments before it has been, so
no result is overtaken by event time. `ordered`: results are emitted in the order of the rows. Otherwise those of the
first segment are emitted as they complete.

The state is the rows that have not been emitted, each with the last watermark before it. After a restore they are called
again: an outcome that was not emitted is lost with the attempt.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CoroutineType
from typing import Any, Final

import pyarrow as pa

from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.batches import canonical_schema
from midstream.engine.core.elements import MIN_WATERMARK_US
from midstream.engine.core.errors import JobError
from midstream.engine.core.interfaces import Call, Done, Failed, FunctionCalls, Outcomes, Timer
from midstream.engine.operators.base import Operator, OperatorContext, Output, Snapshot, SnapshotResult
from midstream.engine.operators.failed_rows import FAIL, ErrorPolicy, FailedRows, function_name
from midstream.engine.operators.row_conversion import (
    USER_ERRORS,
    Row,
    as_it_is_now,
    fields_text,
    to_batch,
    to_rows,
    user_error,
)
from midstream.engine.operators.row_functions import fitting, rows_apart
from midstream.engine.state.state_parts import Chunk, Redistribute, StatePart, check_columns

IN_FLIGHT: Final = "rows in flight"
"""The name of the state part with the rows that have not been emitted."""
RETRY_PAUSE_S_MIN: Final = 0.1
RETRY_PAUSE_S_MAX: Final = 10.0
"""The pause before a row is called again doubles from the minimum to the maximum."""
_OPENING: Final = 0
"""The number of the call of a coroutine function's `open`."""
_PENDING: Final = object()
_EMITTED: Final = object()


@dataclass(frozen=True, slots=True)
class CallLimits:
    """How a function is called. `capacity`: how many rows may be called and not yet emitted."""

    capacity: int = 100
    timeout_s: float = 5.0
    retries: int = 3
    ordered: bool = True


def is_coroutine_function(function: object) -> bool:
    """Whether calling `function` returns a coroutine."""
    call = function if inspect.isroutine(function) else getattr(type(function), "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


@dataclass(frozen=True, slots=True)
class _Failure:
    """The result of a row for which the function fails."""

    error: BaseException


@dataclass(slots=True, eq=False)
class _RowsInFlight:
    """The rows of one input batch."""

    batch: pa.RecordBatch
    segment: _Segment
    given: Iterator[Row | _Failure]
    """The rows that have not been called, made as they are."""
    results: list[Any]
    """For each row _PENDING, the row that was returned, a _Failure, or _EMITTED."""
    called: int = 0
    """How many rows, from the first, have been called."""
    emitted: int = 0
    completed: list[int] = field(default_factory=list)
    """The rows that have completed and are not emitted, unless `ordered`."""


@dataclass(slots=True, eq=False)
class _Segment:
    """The rows between two watermarks."""

    before_us: int
    """The watermark before the rows."""
    rows: dict[_RowsInFlight, None] = field(default_factory=dict)
    """Batches with rows that have not been emitted, in order."""
    completed: dict[_RowsInFlight, None] = field(default_factory=dict)
    """Those of them with rows that have completed since."""


class AsyncMapOperator(Operator):
    """Replaces each row by what `function` returns for it, or awaits.

    `schema`: that of the returned rows. `given`: that of the input rows.
    """

    holds_watermarks = True

    def __init__(
        self,
        name: str,
        function: Callable[[Row], Any],
        schema: pa.Schema,
        given: pa.Schema,
        limits: CallLimits,
        policy: ErrorPolicy = FAIL,
    ) -> None:
        self.schema = canonical_schema(schema)
        self._given = canonical_schema(given)
        self._where = f"operator {name!r}"
        self._function = function
        self._of_coroutines = is_coroutine_function(function)
        self._limits = limits
        self._policy = policy
        self.side_outputs = policy.side_outputs
        self._failed: FailedRows | None = None
        """None if a row that fails is to fail the job."""
        self._out: Output
        self._runtime: OperatorContext | None = None
        """Set while the function is open, or half open."""
        self._calls: FunctionCalls
        self._as_it_is_now = as_it_is_now(self.schema)
        self._called = _awaited if self._of_coroutines else _returned
        self._is_opening = False
        self._number = _OPENING
        self._under_way: dict[int, tuple[_RowsInFlight, int, int]] = {}
        """The calls under way, by number: the row, and how many times it has been called."""
        self._in_flight = 0
        """Rows that have been called and not emitted. At most `capacity`."""
        self._waiting: deque[_RowsInFlight] = deque()
        """Batches with rows that have not been called."""
        self._segments: deque[_Segment] = deque([_Segment(MIN_WATERMARK_US)])
        """The last one is open. The watermark after each other one is that before the next one's rows."""
        self._deadlines: deque[tuple[float, Sequence[int]]] = deque()
        """When calls that were begun together time out, and their numbers."""
        self._deadline_timer: Timer | None = None

    def state_settings(self) -> Mapping[str, Mapping[str, str]]:
        return {IN_FLIGHT: {"the columns of rows in flight": fields_text(self._given)}}

    def open(self, context: OperatorContext, out: Output) -> None:
        self._out = out
        if self._policy.on_error != "fail":
            self._failed = FailedRows(self._policy, self._where, function_name(self._function))
        self._calls = context.open_calls(self._of_coroutines, self._limits.capacity, self._on_outcomes)
        self._runtime = context
        self._segments[-1].before_us = context.watermark_us  # after a restore, that of the operator
        opens = getattr(self._function, "open", None)
        if opens is None:
            return
        self.user_metrics = context.metrics
        if inspect.iscoroutinefunction(opens):
            self._is_opening = True
            self._calls.start([(_OPENING, partial(opens, context))])
            return
        try:
            opens(context)
        except USER_ERRORS as error:
            raise user_error(self._where, "open", error) from error

    # ---- rows and watermarks ----

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        self._accept(batch)
        self._progress()

    def _accept(self, batch: pa.RecordBatch) -> None:
        given: Iterator[Row | _Failure]
        if self._failed is None:
            given = to_rows(batch, self._where)
        else:
            apart = _Apart()
            found = dict(rows_apart(batch, self._where, apart))  # type: ignore[arg-type]
            given = iter([found[index] if index in found else apart.failures[index] for index in range(batch.num_rows)])
        segment = self._segments[-1]
        rows = _RowsInFlight(batch, segment, given, [_PENDING] * batch.num_rows)
        segment.rows[rows] = None
        self._waiting.append(rows)

    def ready(self, wake: Callable[[], None]) -> bool:
        return not self._waiting and self._in_flight < self._limits.capacity

    @property
    def awaits_work(self) -> bool:
        return len(self._segments) > 1 or bool(self._segments[0].rows)

    def advance_watermark(self, watermark_us: int) -> bool:
        last = self._segments[-1]
        if last.rows:
            self._segments.append(_Segment(watermark_us))
            return True
        last.before_us = watermark_us
        if len(self._segments) == 1:
            self._out.watermark(watermark_us)
        return True

    # ---- calls ----

    def _progress(self) -> None:
        """Emit what has its turn, and call as many rows as there is room for."""
        self._emit()
        while self._start():
            self._emit()

    def _start(self) -> bool:
        """Call rows that wait. Returns whether some have completed immediately."""
        room = self._limits.capacity - self._in_flight
        if self._is_opening or room <= 0 or not self._waiting:
            return False
        calls: list[Call] = []
        completed = False
        number, under_way = self._number, self._under_way
        called, function, as_it_is_now = self._called, self._function, self._as_it_is_now
        while room > 0 and self._waiting:
            rows = self._waiting[0]
            first, end = rows.called, min(rows.called + room, rows.batch.num_rows)
            for index, row in zip(range(first, end), rows.given, strict=False):  # it takes no row after the last index
                if isinstance(row, _Failure):
                    self._complete(rows, index, row)
                    completed = True
                else:
                    number += 1
                    under_way[number] = rows, index, 1
                    calls.append((number, partial(called, function, as_it_is_now, row)))
            rows.called = end
            room -= end - first
            self._in_flight += end - first
            if end == rows.batch.num_rows:
                self._waiting.popleft()
        self._begin(calls)
        return completed

    def _begin(self, calls: Sequence[Call]) -> None:
        """Begin calls with the next numbers."""
        if not calls:
            return
        assert self._runtime is not None
        numbers = range(self._number + 1, self._number + 1 + len(calls))
        assert (numbers[0], numbers[-1]) == (calls[0][0], calls[-1][0]), (numbers, calls[0], calls[-1])
        self._number = numbers[-1]
        timeout_s = self._limits.timeout_s
        self._deadlines.append((self._runtime.clock.monotonic_s() + timeout_s, numbers))
        if self._deadline_timer is None:
            self._deadline_timer = self._runtime.call_later(timeout_s, self._on_deadline)
        self._calls.start(calls)

    def _on_deadline(self) -> None:
        """Fail the calls that have taken too long, and wait for the next ones that may."""
        self._deadline_timer = None
        assert self._runtime is not None
        now_s = self._runtime.clock.monotonic_s()
        late: list[int] = []
        while self._deadlines:
            deadline_s, numbers = self._deadlines[0]
            left = [number for number in numbers if number in self._under_way]
            if left and deadline_s > now_s:
                self._deadline_timer = self._runtime.call_later(deadline_s - now_s, self._on_deadline)
                break
            self._deadlines.popleft()
            late += left
        if late:
            self._calls.cancel(late)
            why = "; a coroutine that blocks, instead of awaiting, delays all others" if self._of_coroutines else ""
            error = TimeoutError(f"the call took longer than its timeout of {self._limits.timeout_s:g} s{why}")
            self._on_outcomes([(number, Failed(error)) for number in late])

    def _on_outcomes(self, outcomes: Outcomes) -> None:
        again: dict[int, list[tuple[_RowsInFlight, int]]] = {}
        under_way, ordered = self._under_way, self._limits.ordered
        for number, outcome in outcomes:
            call = under_way.pop(number, None)
            if call is None:
                if number == _OPENING:
                    self._opened(outcome)
                continue  # it has timed out
            rows, index, times = call
            if isinstance(outcome, Done):
                value = outcome.value
                if type(value) is CoroutineType:
                    raise self._not_awaited(value)
                if ordered:
                    rows.results[index] = value
                else:
                    self._complete(rows, index, value)
            elif not isinstance(outcome.error, MemoryError) and times <= self._limits.retries:
                again.setdefault(times, []).append((rows, index))
            elif self._failed is not None:
                self._complete(rows, index, _Failure(outcome.error))
            else:
                raise user_error(self._where, "the function", outcome.error, (rows.batch, index)) from outcome.error
        for times, failed in again.items():
            pause_s = min(RETRY_PAUSE_S_MIN * 2 ** min(times - 1, 16), RETRY_PAUSE_S_MAX)
            assert self._runtime is not None
            self._runtime.call_later(pause_s, partial(self._call_again, times + 1, failed))
        self._progress()

    def _not_awaited(self, coroutine: CoroutineType[Any, Any, Any]) -> JobError:
        coroutine.close()
        return JobError(
            f"{self._where}: {function_name(self._function)} returned a coroutine, and is not a coroutine function itself, so "
            "that it was called in a thread. Give the function that is declared with async def, or declare this one so"
        )

    def _call_again(self, times: int, failed: Sequence[tuple[_RowsInFlight, int]]) -> None:
        calls: list[Call] = []
        for number, (rows, index) in enumerate(failed, self._number + 1):
            [row] = to_rows(rows.batch.slice(index, 1), self._where)  # the function may have changed the first one
            self._under_way[number] = rows, index, times
            calls.append((number, partial(self._called, self._function, self._as_it_is_now, row)))
        self._begin(calls)

    def _opened(self, outcome: Done[Any] | Failed) -> None:
        if isinstance(outcome, Failed):
            raise user_error(self._where, "open", outcome.error) from outcome.error
        self._is_opening = False

    def _complete(self, rows: _RowsInFlight, index: int, result: Any) -> None:
        rows.results[index] = result
        if not self._limits.ordered:
            rows.completed.append(index)
            rows.segment.completed[rows] = None

    # ---- results ----

    def _emit(self) -> None:
        """Emit the results, and then the watermarks, that have their turn."""
        while True:
            first = self._segments[0]
            if self._limits.ordered:
                self._emit_in_order(first)
            else:
                for rows in first.completed:
                    completed, rows.completed = sorted(rows.completed), []
                    self._emit_results(rows, completed)
                first.completed.clear()
            if first.rows or len(self._segments) == 1:
                return
            self._segments.popleft()
            self._out.watermark(self._segments[0].before_us)

    def _emit_in_order(self, segment: _Segment) -> None:
        while segment.rows:
            rows = next(iter(segment.rows))
            first = end = rows.emitted
            results = rows.results
            while end < len(results) and results[end] is not _PENDING:
                end += 1
            if end > first:
                self._emit_results(rows, range(first, end))
            if end < len(results):
                return

    def _emit_results(self, rows: _RowsInFlight, indexes: Sequence[int]) -> None:
        """Emit the results of these rows of a batch, in ascending order."""
        results, schema, batch = rows.results, self.schema, rows.batch
        self._in_flight -= len(indexes)
        rows.emitted += len(indexes)
        if rows.emitted == len(results):
            del rows.segment.rows[rows]
        if isinstance(indexes, range):  # all from the first to the last
            made = results[indexes.start : indexes.stop]
            results[indexes.start : indexes.stop] = [_EMITTED] * len(indexes)
        else:
            made = [results[index] for index in indexes]
            for index in indexes:
                results[index] = _EMITTED
        failed = self._failed
        if failed is None:
            self._out.emit(to_batch(made, schema, self._where, indexes, batch))
            return
        given = batch.take(pa.array(indexes, pa.int64()))
        origin = []
        for position, result in enumerate(made):
            if type(result) is _Failure:
                failed.add(position, result.error)
            else:
                origin.append(position)
        fit = fitting([made[position] for position in origin], origin, schema, self._where, given, failed)
        if fit.num_rows:
            self._out.emit(fit)
        failed.flush(given, self._out)
        self.failed_rows = failed.total

    # ---- state ----

    def snapshot(self, checkpoint_id: int) -> Snapshot:
        assert self._runtime is not None
        new_id = self._runtime.ids.new_id
        tally = Snapshot() if self._failed is None else self._failed.snapshot(new_id)
        left = [
            (segment.before_us, rows.batch, [i for i, result in enumerate(rows.results) if result is not _EMITTED])
            for segment in self._segments
            for rows in segment.rows
        ]
        return Snapshot(tally.now, partial(_in_flight, left, new_id())) if left else tally

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        assert self._runtime is not None
        if self._failed is not None:
            self._failed.restore(parts)
        if IN_FLIGHT not in parts:
            return
        row = pa.struct(list(self._given))
        for chunk in parts[IN_FLIGHT].chunks:
            expected = {"row": row, "watermark_us": pa.int64()}
            check_columns(chunk.table, expected, f"{self._where}: {IN_FLIGHT}")
        # after a rescale, rows of several subtasks: none may be called late because of a watermark of another one
        table = parts[IN_FLIGHT].table().sort_by("watermark_us")
        for part in table.to_batches():
            marks = to_list(part.column("watermark_us"))
            first = 0
            while first < len(marks):
                end = bisect_right(marks, marks[first])
                before_us = min(marks[first], self._runtime.watermark_us)
                last = self._segments[-1]
                if not last.rows:
                    last.before_us = before_us  # the lowest; later ones are in order
                elif before_us > last.before_us:
                    self._segments.append(_Segment(before_us))
                rows = part.column("row").slice(first, end - first)
                assert isinstance(rows, pa.StructArray)
                self._accept(pa.RecordBatch.from_arrays(rows.flatten(), schema=self._given))
                first = end
        self._runtime.submit(_nothing, lambda _: self._progress())  # nothing may be emitted before the task runs

    def close(self) -> None:
        context, self._runtime = self._runtime, None
        if context is None:
            return
        closes = getattr(self._function, "close", None)
        if inspect.iscoroutinefunction(closes):
            self._calls.close(closes)
            return
        self._calls.close()
        if closes is None:
            return
        try:
            closes()
        except USER_ERRORS as error:
            failure = user_error(self._where, "close", error)
            failure.__cause__ = error
            context.fail(failure)  # a task that has failed already keeps its first error


def _nothing() -> None: ...


def _returned(function: Callable[[Row], Any], as_it_is_now: Callable[[Any], Any], row: Row) -> Any:
    return as_it_is_now(function(row))


async def _awaited(function: Callable[[Row], Any], as_it_is_now: Callable[[Any], Any], row: Row) -> Any:
    return as_it_is_now(await function(row))


class _Apart:
    """Takes the rows of a batch that Python cannot represent, until it is their turn."""

    def __init__(self) -> None:
        self.failures: dict[int, _Failure] = {}

    def add(self, row: int, error: BaseException) -> None:
        self.failures[row] = _Failure(error)


def _in_flight(left: Sequence[tuple[int, pa.RecordBatch, list[int]]], chunk_id: str) -> SnapshotResult:
    """Return the state part of rows in flight: those at these positions of each batch, with the watermark before it."""
    tables = []
    for before_us, batch, indexes in left:
        rows = batch if len(indexes) == batch.num_rows else batch.take(pa.array(indexes, pa.int64()))
        row = pa.StructArray.from_arrays(rows.columns, fields=list(batch.schema))
        marks = pa.array([before_us], pa.int64()).take(pa.array([0] * len(indexes), pa.int64()))
        tables.append(pa.table({"row": row, "watermark_us": marks}))
    chunk = Chunk(chunk_id, pa.concat_tables(tables).combine_chunks())
    return SnapshotResult({IN_FLIGHT: StatePart(Redistribute.SPLIT, (chunk,))})
