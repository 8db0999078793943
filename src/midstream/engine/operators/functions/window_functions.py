"""Functions that get all rows of a key's window at its end.

The state is the rows themselves, in the panes or sessions of the window operators: an aggregation whose parts are rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Protocol

import numpy as np
import polars as pl
import pyarrow as pa

from midstream.engine.core.batches import canonical_schema, check_held_by_polars, empty_batch, to_polars
from midstream.engine.core.config import Duration
from midstream.engine.core.errors import ConfigError, JobError, MidstreamError
from midstream.engine.core.python_values import to_python
from midstream.engine.operators.base import OperatorContext
from midstream.engine.operators.event_time_column import TimeColumn
from midstream.engine.operators.functions.batch_functions import Result
from midstream.engine.operators.functions.function_operator import Function
from midstream.engine.operators.functions.process_context import Calendar
from midstream.engine.operators.row_conversion import USER_ERRORS, user_error
from midstream.engine.operators.stateless import made_batch
from midstream.engine.operators.user_metrics import UserMetrics
from midstream.engine.operators.windows.aggregates import Aggregate, Columns
from midstream.engine.operators.windows.dense_groupby import NO_FOLDS, DenseGroupBy
from midstream.engine.operators.windows.window_aggregation import WindowAggregation, check_output
from midstream.engine.operators.windows.window_factory import operator_of
from midstream.engine.operators.windows.window_operator import WindowOperator
from midstream.engine.operators.windows.window_specs import END, START, WINDOW_END, WINDOW_START, Window
from midstream.engine.state.declared_state import declared_states

_ROWS: Final = "__rows"
"""The prefix of the columns of rows in state."""


class WindowContext(Protocol):
    """The context of a window function. It is valid only during the call.

    For example:

        def process(self, rows, ctx):
            return pl.DataFrame({"shop": [ctx.key], "minutes": [(ctx.window_end - ctx.window_start).seconds // 60]})
    """

    @property
    def key(self) -> Any:
        """The key of the rows; a tuple if there are several key columns, None for `window_all`."""
        ...

    @property
    def window_start(self) -> datetime:
        """The start of the window, to the microsecond; aware, in UTC, if the event time has a zone."""
        ...

    @property
    def window_end(self) -> datetime:
        """The end of the window, to the microsecond; aware, in UTC, if the event time has a zone."""
        ...

    @property
    def metrics(self) -> UserMetrics:
        """Counters and gauges of the function, for the job's status, its page and `/metrics`."""
        ...


class WindowFunction(Function):
    """A function that gets all rows of a key's window at once, when the window ends, for what no aggregate computes.

    The rows are in state until then, each once, however many sliding windows it is in. A function has no other state:
    what comes out must follow from the rows.

        >>> class LargestStep(WindowFunction):
        ...     def process(self, rows, ctx):
        ...         return rows.select(step=pl.col("at").diff().max())
        >>> steps = clicks.key_by("user").window(tumbling("1 h")).process(LargestStep(), {"step": pl.Duration("us")})
        >>> for row in testing.run(steps).rows:
        ...     print(row["user"], row["window_start"], row["step"])
        ann 2024-01-01 12:00:00 0:02:00
    """

    def process(self, rows: pl.DataFrame, ctx: WindowContext) -> Result:
        """Compute what is emitted for one key and window.

        `rows`: a polars DataFrame with the columns of the stream, in the order of event time. Rows of one time are
        ordered by the other columns, from left to right; only those that differ in nothing but lists or structs are in
        the order of arrival.
        `ctx`: the key, the bounds of the window, and metrics; valid during the call only.

        Return a polars DataFrame, or an Arrow RecordBatch or Table, with the columns of the output; None for no rows.

            def process(self, rows, ctx):
                return rows.top_k(3, by="price").select("price")
        """
        raise NotImplementedError


def window_function_operator(
    name: str,
    *,
    window: Window,
    keys: Sequence[str],
    event_time: str | TimeColumn,
    function: WindowFunction,
    made: pa.Schema,
    schema: pa.Schema,
    allowed_lateness: Duration = 0,
) -> WindowOperator:
    """Return the operator that calls `function` with the rows of each key and window.

    It emits `keys`, `window_start`, `window_end`, and the columns of `made`, which the function returns. All else is as
    in `window_operator`.
    """
    aggregation = RowsOfWindows(name, keys, event_time, function, made, schema)
    return operator_of(aggregation, window, allowed_lateness)


class _Rows(Aggregate):
    """Stands for the rows themselves: only the names and the types of its columns are used."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = tuple(columns)

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        return {column: pl.col(column) for column in self.columns}

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        return {column: part(column).first() for column in self.columns}

    def finish(self, part: Columns) -> pl.Expr:
        return pl.lit(0)


class RowsOfWindows(WindowAggregation):
    """All rows of each key, and what a function makes of them. A part is a row."""

    combines = False  # a part is as long as a row

    def __init__(
        self,
        name: str,
        keys: Sequence[str],
        event_time: str | TimeColumn,
        function: WindowFunction,
        made: pa.Schema,
        schema: pa.Schema,
    ) -> None:
        where = f"operator {name!r}"
        schema, made = canonical_schema(schema), canonical_schema(made)
        check_held_by_polars(schema, where)
        check_held_by_polars(made, where)
        if declared_states(type(function)):
            state = next(iter(declared_states(type(function))))
            raise JobError(
                f"{where}: {type(function).__name__} declares the state {state!r}, but a window function has none: it gets all "
                "rows of a window together; compute from these, or use key_by(…).process_batches(…)"
            )
        for column in made.names:
            if column in keys or column in (WINDOW_START, WINDOW_END):
                raise ConfigError(
                    f"{where}: two output columns are called {column!r}: the keys, {WINDOW_START} and {WINDOW_END} are added to "
                    "what the function returns; leave it out, or rename it"
                )
            check_output(column, where)
        read = [column for column in schema.names if column not in keys]
        super().__init__(name, keys, event_time, {_ROWS: _Rows(read)}, schema)
        self.settings = {"the rows of a window": "all"}
        self.schema = pa.schema([*(self.schema.field(each) for each in (*keys, WINDOW_START, WINDOW_END)), *made])
        self._own_arguments = (name, tuple(keys), event_time, function, made, schema)
        self._function = function
        self._made = made
        self._columns = {f"{_ROWS}:{column}": column for column in read}
        ordered = [part for part, column in self._columns.items() if not pa.types.is_nested(schema.field(column).type)]
        time = self.time.column if self.time.column in keys else f"{_ROWS}:{self.time.column}"
        self._order = [END, *self.by, START, *dict.fromkeys([time, *ordered])]
        self._empty = to_polars(empty_batch(made))
        self._calendar = Calendar(aware=self.time.kind.tz is not None)
        self._context: OperatorContext | None = None
        """That of the operator while the function is open."""

    def __reduce__(self) -> tuple[type[WindowAggregation], tuple[object, ...]]:
        return RowsOfWindows, self._own_arguments

    # ---- the function's life ----

    def open(self, context: OperatorContext) -> None:
        self._context = context
        try:
            self._function.open(context)
        except USER_ERRORS as error:
            raise user_error(self.where, "open", error) from error

    def close(self) -> None:
        context, self._context = self._context, None
        if context is None:
            return
        try:
            self._function.close()
        except USER_ERRORS as error:
            failure = user_error(self.where, "close", error)
            failure.__cause__ = error
            context.fail(failure)  # a task that has failed already keeps its first error

    # ---- work ----

    def reduce(
        self, frame: pl.DataFrame, also_by: Sequence[str] = (), also: Mapping[str, DenseGroupBy] = NO_FOLDS
    ) -> pl.DataFrame:
        return self._reduce(frame, also_by, also)

    def _reduce(
        self, frame: pl.DataFrame, also_by: Sequence[str] = (), also: Mapping[str, DenseGroupBy] = NO_FOLDS
    ) -> pl.DataFrame:
        return self._with_bounds(frame, also_by, also).select(*also_by, *self.by, *also, *self._partial)

    def merge(
        self, parts: Sequence[pl.DataFrame], also_by: Sequence[str] = (), also: Mapping[str, DenseGroupBy] = NO_FOLDS
    ) -> pl.DataFrame:
        frame = parts[0] if len(parts) == 1 else pl.concat(parts, rechunk=True)
        return self._with_bounds(frame, also_by, also).select(*also_by, *self.by, *also, *self._columns)

    def _with_bounds(
        self, frame: pl.DataFrame, also_by: Sequence[str], also: Mapping[str, DenseGroupBy]
    ) -> pl.DataFrame:
        """Give each row what all rows of its key and of `also_by` have together."""
        by = (*also_by, *self.by)
        return frame.with_columns(each.expression.over(by).alias(name) for name, each in also.items())

    def finish(self, merged: pl.DataFrame) -> pl.DataFrame:
        """Return what the function makes of each window in rows with START and END, in the order of their ends."""
        rows = merged.sort(self._order, maintain_order=True)
        of_window = [*self.by, START, END]
        begins = pl.any_horizontal(pl.col(name) != pl.col(name).shift() for name in of_window)
        starts = rows.select(begins.fill_null(True).arg_true()).to_series().to_list()
        windows = rows.select(of_window)[starts]
        frames = rows.drop(START, END).rename(self._columns).select(self.input_schema.names)
        bounds = zip(*(windows.get_column(name).to_list() for name in (START, END)), strict=True)
        made = [
            self._call(frames.slice(first, stop - first), start, end)
            for first, stop, (start, end) in zip(starts, [*starts[1:], rows.height], bounds, strict=True)
        ]
        counts = [frame.height for frame in made]
        return windows[np.repeat(np.arange(windows.height), counts)].hstack(pl.concat([self._empty, *made]))

    def _call(self, rows: pl.DataFrame, start: int, end: int) -> pl.DataFrame:
        assert self._context is not None, self.where
        bounds = [self._calendar.datetime(self.time.to_us(each)) for each in (start, end)]
        context = _Context(rows.select(self.keys)[:1], bounds[0], bounds[1], self._context.metrics)
        try:
            made = self._function.process(rows, context)
        except USER_ERRORS as error:
            raise user_error(self.where, f"process, for {context}", error) from error
        if made is None:
            return self._empty
        if isinstance(made, pl.DataFrame) and made.schema == self._empty.schema:
            return made
        try:
            return to_polars(made_batch(made, self._made, self.where, "process"))
        except MidstreamError as error:
            raise type(error)(f"{error} (for {context})") from error


class _Context:
    """See `WindowContext`."""

    def __init__(self, keys: pl.DataFrame, window_start: datetime, window_end: datetime, metrics: UserMetrics) -> None:
        self._keys = keys
        self.window_start = window_start
        self.window_end = window_end
        self.metrics = metrics

    @property
    def key(self) -> Any:
        values = [to_python(column.to_arrow(compat_level=pl.CompatLevel.oldest()))[0] for column in self._keys]
        return values[0] if len(values) == 1 else tuple(values) or None

    def __str__(self) -> str:
        key = (
            ", ".join(f"{name}={value!r}" for name, value in self._keys.to_dicts()[0].items())
            if self._keys.width
            else ""
        )
        return f"the window{' of ' + key if key else ''} from {self.window_start} to {self.window_end}"
