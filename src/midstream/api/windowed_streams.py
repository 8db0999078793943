"""Windowed streams: rows in event-time windows, and what is computed from them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Never

from midstream.api.argument_checks import require_column
from midstream.api.data_stream import DataStream, main_output
from midstream.api.hints import OF_WINDOWS, Hinted
from midstream.api.picklability import check_shippable
from midstream.api.program import MakeOperator, located
from midstream.api.stream_core import StreamCore
from midstream.engine.core.config import Duration, duration_s, interval_s, is_whole
from midstream.engine.core.errors import ConfigError, JobError
from midstream.engine.core.schemas import SchemaLike, as_schema
from midstream.engine.graph.job_graph import Partitioning
from midstream.engine.operators.base import Operator
from midstream.engine.operators.event_time_column import TimeColumn
from midstream.engine.operators.functions.count_windows import count_window_operator
from midstream.engine.operators.functions.window_functions import WindowFunction, window_function_operator
from midstream.engine.operators.windows.aggregates import Accumulator, Aggregate, AnyAggregate, First, Last
from midstream.engine.operators.windows.window_factory import (
    WINDOW_END,
    CountWindow,
    Session,
    Sliding,
    Window,
    top_operator,
    window_operator,
)

_log = logging.getLogger("midstream")


class WindowedStream(Hinted):
    """Rows in windows; `aggregate`, `top` or `process` computes the result.

    A window is emitted when the watermark reaches its end, or, if it is one by count, when its last row arrives.

        >>> hours = clicks.key_by("user").window(tumbling("1 h"))
        >>> [row["n"] for row in testing.run(hours.aggregate(n=Count())).rows]
        [2]
    """

    _hints = OF_WINDOWS

    def __init__(
        self,
        core: StreamCore,
        window: Window | CountWindow,
        allowed_lateness: Duration = 0,
        emit_every: Duration = 0,
    ) -> None:
        if not isinstance(window, (Sliding, Session, CountWindow)):
            raise JobError(
                f"window: {window!r} is not a window; use tumbling('1 h'), sliding('1 h', '5 min'), session('30 min') or count(100)"
            )
        if isinstance(window, CountWindow):
            core.check_not_overwritten("window")
            if not core.keys:
                raise ConfigError(
                    "window_all: windows by count are of the rows of a key; call key_by('column').window(count(…))"
                )
        else:
            core.check_event_time("window")
        self._core = core
        self._window = window
        self._allowed_lateness = allowed_lateness
        self._emit_every = emit_every

    @located
    def allowed_lateness(self, lateness: Duration) -> WindowedStream:
        """Accept rows that are too late for their windows by up to a duration.

        Each batch with such rows makes the windows that they change be emitted again, updated.

        `lateness`: a duration, such as "1 min", a number of seconds, or a timedelta; 0 without this call.

        Returns the same rows in windows, with this lateness. Raises ConfigError for an invalid duration.

            >>> minutes = clicks.key_by("user").window(tumbling("1 min")).allowed_lateness("1 h")
            >>> with testing.job(minutes.aggregate(n=Count())) as job:
            ...     _ = job.feed({"user": "ann", "at": "2024-01-01 12:00:10"}).advance_to("2024-01-01 12:05")
            ...     _ = job.feed({"user": "ann", "at": "2024-01-01 12:00:20"})
            ...     [row["n"] for row in job.take()]
            [1, 2]
        """
        duration_s(lateness, "allowed_lateness")
        return WindowedStream(self._core, self._by_time("allowed_lateness")[0], lateness, self._emit_every)

    @located
    def emit_every(self, period: Duration) -> WindowedStream:
        """Emit early results: those so far of windows that have not ended, for `aggregate` and `top`.

        `period`: how long after its first change a key of a window is emitted, by processing time: a duration such as "10 s", a
        number of seconds, or a timedelta. What has not changed is not emitted again, except after a restore.

        Returns the same rows in windows, whose results have the column `is_early` after `window_end`: true for early results, false
        for those at the end of the window and updates of these. The newest result of a key and `window_start` (and `rank`)
        replaces the others; `filter(~pl.col("is_early"))` leaves what there is without this call. Raises ConfigError for an
        invalid duration, 0, sessions, and windows by count.

            >>> hours = clicks.key_by("user").window(tumbling("1 h")).emit_every("10 s").aggregate(n=Count())
            >>> with testing.job(hours) as job:
            ...     _ = job.feed({"user": "ann", "at": "2024-01-01 12:00:10"}).advance_processing_time("10 s")
            ...     _ = job.feed({"user": "ann", "at": "2024-01-01 12:00:20"}).advance_to("2024-01-01 13:00")
            ...     [(row["n"], row["is_early"]) for row in job.take()]
            [(1, True), (2, False)]
        """
        interval_s(period, "emit_every")
        if isinstance(self._window, Session):
            raise ConfigError(
                "emit_every: sessions have no early results: a later row may join two of them, so that one of the results "
                "emitted early would stay. Use tumbling() or sliding() windows, or key_by(…).aggregate(…) without windows"
            )
        window, _ = self._by_time("emit_every")
        return WindowedStream(self._core, window, self._allowed_lateness, period)

    @located
    def aggregate(self, *unnamed: Never, **aggregates: AnyAggregate) -> DataStream:
        """Compute one row per key and window.

        `aggregates`: the name of each column with its aggregate: `n=Count(), total=Sum("price")`.
        `unnamed`: nothing; an aggregate without the name of its column is refused.

        Returns a stream of the key columns, `window_start`, `window_end`, and a column per aggregate. In windows by count,
        these are the smallest and the largest event time of the rows, and are missing without one. Rows that came
        too late are in its `side_output(LATE)`, unchanged. The event time of a row is one unit of the column before
        `window_end`, the last time in the window; for sessions and windows by count it is `window_end`. So windows and joins may follow.
        Raises JobError for an argument that is not an aggregate, and if there is none, SchemaError for a column that is
        missing or does not fit, ConfigError for two columns of one name.

            >>> per_minute = clicks.key_by("user").window(tumbling("1 min")).aggregate(n=Count(), last=Last("at"))
            >>> for row in testing.run(per_minute).rows:
            ...     print(row["user"], row["window_start"], row["n"], row["last"])
            ann 2024-01-01 12:00:00 1 2024-01-01 12:00:00
            ann 2024-01-01 12:02:00 1 2024-01-01 12:02:00
        """
        check_aggregates(unnamed, aggregates)
        core = self._core
        if isinstance(self._window, CountWindow):
            return self._of_count(self._window, aggregates)
        window, event_time = self._by_time("aggregate")
        if isinstance(window, Sliding) and window.slide_us != window.size_us:
            check_no_order_of_arrival(aggregates, "sliding windows put together from intervals of event time")

        def make(name: str) -> Operator:
            return window_operator(
                name,
                window=window,
                keys=core.keys,
                event_time=event_time,
                aggregates=aggregates,
                schema=core.schema,
                allowed_lateness=self._allowed_lateness,
                emit_every=self._emit_every,
            )

        return self._result(make)

    @located
    def top(self, count: int, *, by: str | Sequence[str], descending: bool = True) -> DataStream:
        """Return the first rows of each key and window in the order of a column: the largest ones, or the smallest.

        `count`: how many rows at most. The state has no more than these of each window.
        `by`: the name of the column that decides, or several names. Rows that are equal in it are ordered by all other
        columns, ascending, from left to right, except lists and structs. Nulls and NaN come last.
        `descending`: whether the largest come first.

        Returns a stream of the key columns, `window_start`, `window_end`, `rank` (1 for the first row), and all other
        columns of the row, except those that are called like one of these: rename them before, to have both. Its late
        rows and its event time are those of `aggregate`. Raises SchemaError for an unknown column and one that has no
        order, ConfigError for another `count`, JobError without a column in `by`.

            >>> hours = clicks.with_columns(ms=pl.col("at").dt.minute()).window_all(tumbling("1 h"))
            >>> for row in testing.run(hours.top(1, by="ms")).rows:
            ...     print(row["window_start"], row["rank"], row["user"], row["ms"])
            2024-01-01 12:00:00 1 ann 2
        """
        core = self._core
        window, event_time = self._by_time("top")
        columns = check_top(core, count, by)

        def make(name: str) -> Operator:
            return top_operator(
                name,
                window=window,
                keys=core.keys,
                event_time=event_time,
                count=count,
                by=columns,
                descending=descending,
                schema=core.schema,
                allowed_lateness=self._allowed_lateness,
                emit_every=self._emit_every,
            )

        return self._result(make)

    @located
    def process(self, function: WindowFunction, schema: SchemaLike) -> DataStream:
        """Call a function with all rows of each key and window, when the window ends.

        `function`: an instance of your own subclass of WindowFunction.
        `schema`: the columns of the frames that the function returns, as an Arrow or polars schema or as `{"column":
        type}`.

        Returns a stream of the key columns, `window_start`, `window_end`, and the columns of `schema`. All rows of a
        window are in state until it ends. With `allowed_lateness`, the function is called again with all rows of a
        window that late ones change. Late rows and the event time are those of `aggregate`. Raises JobError for a
        function that cannot be sent to the slots or declares states, SchemaError for columns that do not fit,
        ConfigError for two columns of one name.

            >>> class Gaps(WindowFunction):
            ...     def process(self, rows, ctx):
            ...         return rows.select(gap=pl.col("at").diff()).drop_nulls()
            >>> gaps = clicks.key_by("user").window(tumbling("1 h")).process(Gaps(), {"gap": pl.Duration("us")})
            >>> for row in testing.run(gaps).rows:
            ...     print(row["user"], row["window_end"], row["gap"])
            ann 2024-01-01 13:00:00 0:02:00
        """
        from midstream.api.keyed_streams import require_function

        if self._emit_every:
            raise ConfigError(
                "process: emit_every() is for aggregate() and top(): the rows that a function returns for an open window may be "
                "fewer later, so that some of those emitted early would stay. Leave emit_every() out, or use an Accumulator in "
                "aggregate()"
            )
        require_function(function, WindowFunction, "process")
        made = as_schema(schema, "process")
        core = self._core
        window, event_time = self._by_time("process")

        def make(name: str) -> Operator:
            return window_function_operator(
                name,
                window=window,
                keys=core.keys,
                event_time=event_time,
                function=function,
                made=made,
                schema=core.schema,
                allowed_lateness=self._allowed_lateness,
            )

        return self._result(make)

    def _by_time(self, method: str) -> tuple[Window, TimeColumn]:
        """Return the windows and the event time. Raises ConfigError for windows by count."""
        window, event_time = self._window, self._core.event_time
        if isinstance(window, CountWindow):
            raise ConfigError(
                f"{method}: windows by count have aggregate() only; lists of the values of a window are aggregates too: "
                "aggregate(x=Collect('x'))"
            )
        assert event_time is not None
        return window, event_time

    def _of_count(self, window: CountWindow, aggregates: Mapping[str, AnyAggregate]) -> DataStream:
        core = self._core
        _log.info(
            "window: the state keeps a row for each key (%s) of the whole stream that has an incomplete window of %d rows",
            ", ".join(core.keys),
            window.rows,
        )

        def make(name: str) -> Operator:
            return count_window_operator(
                name,
                window=window,
                keys=core.keys,
                event_time=core.event_time,
                aggregates=aggregates,
                schema=core.schema,
            )

        result = core.then("window", make)
        return main_output(replace(result, event_time=core.event_time and TimeColumn(WINDOW_END)))

    def _result(self, make: MakeOperator) -> DataStream:
        """Return the output of the operator of these windows."""
        core = self._core
        if core.keys:
            result = core.then("window", make)
        else:
            result = core.toward(Partitioning.GLOBAL).then("window_all", make, parallelism=1)
        # a row at the very end of a session would continue it, so a session fires one unit later than other windows
        time = TimeColumn(WINDOW_END, is_end=not isinstance(self._window, Session))
        return main_output(replace(result, event_time=time))


TOP_ROWS_MAX: Final = 2**31 - 1
"""They are in memory, and a larger number may be one that Arrow cannot represent."""


def check_top(core: StreamCore, count: int, by: str | Sequence[str]) -> list[str]:
    """Return the names of the columns that decide. Raises what `top` raises."""
    if not is_whole(count, 1):
        raise ConfigError(f"top: count {count!r} is not a positive whole number")
    if count > TOP_ROWS_MAX:
        raise ConfigError(f"top: count {count} is more than {TOP_ROWS_MAX:,}; give a smaller one")
    columns = [by] if isinstance(by, str) else list(by)
    if not columns:
        raise JobError("top: by= names no column; write for example top(3, by='views')")
    for column in columns:
        require_column(core.schema, column, "top", "column", "Name a column of the stream in by=.")
    return columns


def check_aggregates(unnamed: Sequence[object], aggregates: Mapping[str, object]) -> None:
    if unnamed:
        raise JobError(
            f"aggregate: {type(unnamed[0]).__name__} has no column; name one: aggregate(n=Count(), total=Sum('x'))"
        )
    for column, aggregate in aggregates.items():
        if not isinstance(aggregate, (Aggregate, Accumulator)):
            raise JobError(f"aggregate: {column}={aggregate!r} is not an aggregate; write for example {column}=Count()")
        check_shippable(aggregate, f"aggregate: {column}")
    if not aggregates:
        raise JobError("aggregate: name at least one aggregate, for example n=Count()")


def check_no_order_of_arrival(aggregates: Mapping[str, object], what: str) -> None:
    """Raise ConfigError for a first or last value by arrival where rows are reduced by event time first."""
    for column, aggregate in aggregates.items():
        if isinstance(aggregate, (First, Last)) and aggregate.order == "arrival":
            raise ConfigError(
                f"aggregate: {column}={type(aggregate).__name__}(order='arrival'): {what} do not keep the order in which "
                "rows arrived; leave order= out, or use tumbling or session windows"
            )
