"""Operators that call a user's function on rows or on batches: filter, map, flat_map, map_batches.

A function may be an object with a life: `open(ctx)` before the first row, `close()` at the end. What happens to a row for
which it fails is decided by an ErrorPolicy (engine/operators/failed_rows.py).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from types import GeneratorType
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from midstream.engine.core.batches import concat, to_polars
from midstream.engine.core.error_rows import row_text
from midstream.engine.core.errors import JobError, MidstreamError
from midstream.engine.core.python_values import kind_of
from midstream.engine.core.tracebacks import depends_on_values
from midstream.engine.operators.base import NOTHING, OperatorContext, Output, Snapshot
from midstream.engine.operators.expressions import EXPRESSION_ERRORS
from midstream.engine.operators.failed_rows import FAIL, ErrorPolicy, FailedRows, function_name
from midstream.engine.operators.pandas_frames import from_pandas, is_pandas, to_pandas
from midstream.engine.operators.row_conversion import (
    USER_ERRORS,
    Row,
    as_it_is_now,
    at_row,
    map_rows,
    to_batch,
    to_rows,
    user_error,
    yielded,
)
from midstream.engine.operators.stateless import Stateless, made_batch
from midstream.engine.state.state_parts import StatePart

RowFunction: TypeAlias = Callable[[Row], Row]
RowsFunction: TypeAlias = Callable[[Row], "Iterable[Row] | None"]
BatchForm: TypeAlias = Literal["polars", "arrow", "pandas"]


class FunctionCaller(Stateless):
    """Base of the operators that call a function: its life, and the rows for which it fails."""

    def __init__(self, name: str, function: Callable[[Any], Any], schema: pa.Schema, policy: ErrorPolicy) -> None:
        super().__init__(name, schema)
        self._function = function
        self._policy = policy
        self.side_outputs = policy.side_outputs
        self._failed: FailedRows | None = None
        """None if a row that fails is to fail the job."""
        self._runtime: OperatorContext | None = None
        """Set while the function is open, or half open."""

    def open(self, context: OperatorContext, out: Output) -> None:
        super().open(context, out)
        if self._policy.on_error != "fail":
            self._failed = FailedRows(self._policy, self._where, function_name(self._function))
        self._runtime = context
        opens = getattr(self._function, "open", None)
        if opens is None:
            return
        self.user_metrics = context.metrics
        try:
            opens(context)
        except USER_ERRORS as error:
            raise user_error(self._where, "open", error) from error

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        if self._failed is None:
            made = self._made(batch)
        else:
            made = self._made_apart(batch, self._failed)
        if made is not None and made.num_rows:
            self._out.emit(made)
        if self._failed is not None:
            self._failed.flush(batch, self._out)
            self.failed_rows = self._failed.total

    @abstractmethod
    def _made(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """Return what the function makes of the rows. Raises JobError for a row for which it fails."""

    @abstractmethod
    def _made_apart(self, batch: pa.RecordBatch, failed: FailedRows) -> pa.RecordBatch | None:
        """Return what the function makes of the rows for which it does not fail, and add the others to `failed`."""

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        if self._failed is not None:
            self._failed.restore(parts)

    def snapshot(self, checkpoint_id: int) -> Snapshot:
        if self._failed is None or self._runtime is None:
            return NOTHING
        return self._failed.snapshot(self._runtime.ids.new_id)

    def close(self) -> None:
        context, self._runtime = self._runtime, None
        closes = getattr(self._function, "close", None)
        if context is None or closes is None:
            return
        try:
            closes()
        except USER_ERRORS as error:
            failure = user_error(self._where, "close", error)
            failure.__cause__ = error
            context.fail(failure)  # a task that has failed already keeps its first error


class FilterFunctionOperator(FunctionCaller):
    """Keeps the rows for which `function(row)` is true."""

    keeps_rows = True

    def __init__(
        self, name: str, function: Callable[[Row], object], schema: pa.Schema, policy: ErrorPolicy = FAIL
    ) -> None:
        super().__init__(name, function, schema, policy)

    def input_column(self, name: str) -> str | None:
        return name

    def _made(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        predicate = self._function
        keep: list[bool] = []
        rows = to_rows(batch, self._where)
        try:
            for row in rows:
                result = predicate(row)
                keep.append(result if result is True or result is False else _truth(result))
        except USER_ERRORS as error:
            raise user_error(self._where, "the function", error, (batch, len(keep))) from error
        return batch if all(keep) else batch.filter(pa.array(keep, pa.bool_()))

    def _made_apart(self, batch: pa.RecordBatch, failed: FailedRows) -> pa.RecordBatch:
        kept: list[int] = []
        for index, row in rows_apart(batch, self._where, failed):
            try:
                if _truth(self._function(row)):
                    kept.append(index)
            except USER_ERRORS as error:
                failed.add(index, error)
        return batch if len(kept) == batch.num_rows else batch.take(pa.array(kept, pa.int64()))


def _truth(result: object) -> bool:
    """Raises TypeError for what is always true: a function that was not called, a generator, a coroutine."""
    if callable(result) or isinstance(result, (Iterator, Awaitable, AsyncIterator)):
        raise TypeError(f"the filter returned {kind_of(result)}, which is true for every row; return True or False")
    return bool(result)


class MapOperator(FunctionCaller):
    """Calls `function(row) -> row` for each row; `schema` is that of the returned rows."""

    keeps_rows = True

    def __init__(self, name: str, function: RowFunction, schema: pa.Schema, policy: ErrorPolicy = FAIL) -> None:
        super().__init__(name, function, schema, policy)
        self._as_it_is_now = as_it_is_now(self.schema)

    def _made(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return map_rows(self._function, batch, self.schema, self._where)

    def _made_apart(self, batch: pa.RecordBatch, failed: FailedRows) -> pa.RecordBatch:
        made: list[Row] = []
        origin: list[int] = []
        for index, row in rows_apart(batch, self._where, failed):
            try:
                result = self._as_it_is_now(self._function(row))
            except USER_ERRORS as error:
                failed.add(index, error)
            else:
                made.append(result)
                origin.append(index)
        return fitting(made, origin, self.schema, self._where, batch, failed)


class FlatMapOperator(FunctionCaller):
    """Calls `function(row) -> rows` for each row, which returns an iterable of dicts (or is a generator), or None for
    no row.
    """

    def __init__(self, name: str, function: RowsFunction, schema: pa.Schema, policy: ErrorPolicy = FAIL) -> None:
        super().__init__(name, function, schema, policy)
        self._as_it_is_now = as_it_is_now(self.schema)

    def _made(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        made: list[Row] = []
        origin: list[int] = []
        index = 0
        rows = to_rows(batch, self._where)
        try:
            for index, row in enumerate(rows):
                self._take(row, made, batch, index)
                origin.extend([index] * (len(made) - len(origin)))
        except MidstreamError:
            raise
        except USER_ERRORS as error:
            raise user_error(self._where, "the function", error, (batch, index)) from error
        return to_batch(made, self.schema, self._where, origin, batch) if made else None

    def _made_apart(self, batch: pa.RecordBatch, failed: FailedRows) -> pa.RecordBatch:
        made: list[Row] = []
        origin: list[int] = []
        for index, row in rows_apart(batch, self._where, failed):
            try:
                self._take(row, made, batch, index)
            except USER_ERRORS as error:
                del made[len(origin) :]  # a row's results come out together, or none of them
                failed.add(index, error)
            else:
                origin.extend([index] * (len(made) - len(origin)))
        return fitting(made, origin, self.schema, self._where, batch, failed)

    def _take(self, row: Row, made: list[Row], batch: pa.RecordBatch, index: int) -> None:
        """Call the function for a row, and append its results to `made`."""
        result = self._function(row)
        if result is None:
            return
        if isinstance(result, (dict, str, bytes)):
            raise at_row(
                JobError(
                    f"{self._where}: the function returned {kind_of(result)} for the row {row_text(batch, index)}; return "
                    "an iterable of dicts, or None (map() returns one row for each)"
                ),
                index,
            )
        if type(result) is GeneratorType:
            result = yielded(result)
        made.extend(map(self._as_it_is_now, result))


class MapBatchesOperator(FunctionCaller):
    """Calls `function` on whole batches; it may return any number of rows, with the columns of `schema`.

    `form`: what the function takes: a DataFrame of "polars" or "pandas", or a RecordBatch of "arrow". It may return any of
    these, or an Arrow Table. The engine decides where batches are cut: a result must not
    depend on which rows share a batch.

    So a batch for which the function fails is processed again in halves until each row that fails is alone: those are the
    same rows however batches are cut.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[Any], Any],
        schema: pa.Schema,
        form: BatchForm = "polars",
        policy: ErrorPolicy = FAIL,
    ) -> None:
        super().__init__(name, function, schema, policy)
        self._form = form

    def _made(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        try:
            made = self._function(self._given(batch))
        except EXPRESSION_ERRORS as error:
            # a service that is not available would make each further call wait
            row = self._failing_row(batch) if depends_on_values(error) else None
            raise user_error(self._where, "the function", error, None if row is None else (batch, row)) from error
        return self._fitting(made)

    def _given(self, batch: pa.RecordBatch) -> Any:
        if self._form == "arrow":
            return batch
        return to_polars(batch) if self._form == "polars" else to_pandas(batch)

    def _fitting(self, made: Any) -> pa.RecordBatch:
        if is_pandas(made):
            made = from_pandas(made, self.schema, f"{self._where}: the result of the function")
        return made_batch(made, self.schema, self._where, "the function")

    def _fails(self, batch: pa.RecordBatch) -> bool:
        try:
            self._function(self._given(batch))
        except EXPRESSION_ERRORS:
            return True
        return False

    def _failing_row(self, batch: pa.RecordBatch) -> int | None:
        """Return the first row for which the function fails on its own; None if it is not found by bisection."""
        first, rows = 0, batch.num_rows
        while rows > 1:
            half = rows // 2
            if self._fails(batch.slice(first, half)):
                rows = half
            else:
                first, rows = first + half, rows - half
        return first if batch.num_rows == 1 or self._fails(batch.slice(first, 1)) else None

    def _made_apart(self, batch: pa.RecordBatch, failed: FailedRows) -> pa.RecordBatch | None:
        made: list[pa.RecordBatch] = []
        waiting = [(0, batch.num_rows)]
        while waiting:
            first, rows = waiting.pop()
            try:
                made.append(self._fitting(self._function(self._given(batch.slice(first, rows)))))
            except EXPRESSION_ERRORS as error:
                if rows == 1:
                    failed.add(first, error)
                else:
                    half = rows // 2
                    waiting += [(first + half, rows - half), (first, half)]  # the first half is next
        return concat(made) if made else None


def rows_apart(batch: pa.RecordBatch, where: str, failed: FailedRows) -> Iterator[tuple[int, Row]]:
    """Yield each row with its position; those with a value that Python cannot represent are added to `failed`."""
    try:
        rows = to_rows(batch, where)
    except JobError:
        for index in range(batch.num_rows):
            try:
                [row] = to_rows(batch.slice(index, 1), where)
            except JobError as error:
                failed.add(index, error)
            else:
                yield index, row
    else:
        yield from enumerate(rows)


def fitting(
    made: Sequence[Row], origin: Sequence[int], schema: pa.Schema, where: str, batch: pa.RecordBatch, failed: FailedRows
) -> pa.RecordBatch:
    """Return a batch of `schema` from rows that a function returned, but for those of an input row of which one does not
    fit: that is added to `failed`. `origin[i]` is the position of the input row of `made[i]`, in ascending order.
    """
    wrong: set[int] = set()
    waiting = [(0, len(made))]
    while waiting:
        first, end = waiting.pop()
        try:
            to_batch(made[first:end], schema, where, origin[first:end], batch)
        except MidstreamError as error:
            if origin[first] == origin[end - 1]:
                if origin[first] not in wrong:
                    wrong.add(origin[first])
                    failed.add(origin[first], error)
            else:
                half = (first + end) // 2
                waiting += [(half, end), (first, half)]
    if wrong:
        kept = [index for index, of in enumerate(origin) if of not in wrong]
        made, origin = [made[index] for index in kept], [origin[index] for index in kept]
    return to_batch(made, schema, where, origin, batch)
