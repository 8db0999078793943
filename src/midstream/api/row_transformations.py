"""The methods of streams that turn rows into other rows, each on its own: columns, expressions and functions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast, get_args, overload

import polars as pl
import pyarrow as pa

from midstream.api.columns import Columns, all_of, computes, expressions, renamed, without
from midstream.api.columns import Literal as Constant
from midstream.api.columns import conditions as checked_conditions
from midstream.api.function_checks import call_limits, check_function, error_policy
from midstream.api.program import MakeOperator, located
from midstream.api.stream_core import StreamCore
from midstream.api.stream_sinks import Writable
from midstream.engine.core.batches import check_held_by_polars
from midstream.engine.core.config import Duration
from midstream.engine.core.errors import JobError
from midstream.engine.core.schemas import SchemaLike, as_schema
from midstream.engine.operators.async_map import AsyncMapOperator
from midstream.engine.operators.expectations import ExpectOperator
from midstream.engine.operators.failed_rows import FailedMax, OnError
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.functions.process_functions import KeyedProcessFunction, ProcessFunction
from midstream.engine.operators.pandas_frames import require_pandas
from midstream.engine.operators.row_conversion import Row
from midstream.engine.operators.row_functions import (
    BatchForm,
    FilterFunctionOperator,
    FlatMapOperator,
    MapBatchesOperator,
    MapOperator,
)
from midstream.engine.operators.stateless import ColumnsOperator, FilterOperator, ProjectOperator

if TYPE_CHECKING:
    from midstream.api.data_stream import DataStream


class Transformable(Writable):
    """The methods of a stream that turn its rows into others, one by one or in batches, without any state.

    For example:

        >>> testing.run(orders.filter(pl.col("price") > 3).drop("user")).rows
        [{'price': 5}, {'price': 4}]
    """

    @overload
    def filter(
        self,
        predicate: Callable[[Row], object],
        /,
        *,
        on_error: OnError = ...,
        failed_max: FailedMax | None = ...,
    ) -> DataStream: ...

    @overload
    def filter(self, *predicates: Columns, **equal: Constant) -> DataStream: ...

    @located
    def filter(
        self,
        *predicates: Columns | Callable[[Row], object],
        on_error: Any = "fail",
        failed_max: Any = None,
        **equal: Constant,
    ) -> DataStream:
        """Keep the rows for which all predicates are true; rows for which one is null are dropped.

        `predicates`: boolean polars expressions that compute each row on its own; or one function that takes a row as a
        dict and returns a truth value.
        `on_error`, `failed_max`: as for `map`, with a function.
        `equal`: columns that must have a value: `filter(user="ann")`.

        Returns a stream with the same columns. Raises SchemaError for an expression that names an unknown column or is
        not boolean, JobError for one that does not compute each row on its own, for a function that cannot be called
        with a row or sent to the slots, and if there is no predicate.

            >>> testing.run(orders.filter(pl.col("price") > 3, pl.col("price") < 9)).rows
            [{'user': 'bob', 'price': 5}, {'user': 'ann', 'price': 4}]
            >>> testing.run(orders.filter(lambda row: row["user"] == "ann")).rows
            [{'user': 'ann', 'price': 3}, {'user': 'ann', 'price': 4}]
        """
        policy = error_policy(on_error, failed_max, self.schema, "filter")
        functions = [one for one in predicates if callable(one) and not isinstance(one, pl.Expr)]
        if not functions:
            if policy.on_error != "fail":
                raise JobError("filter: on_error= is for a function; an expression that fails for a row fails the job")
            predicate = all_of(self.schema, cast("Sequence[Columns]", predicates), equal)
            return self._then("filter", lambda name: FilterOperator(name, predicate, self.schema))
        if len(predicates) > 1 or equal:
            raise JobError("filter: a function is the only argument; call filter() once for each condition")
        [function] = functions
        check_function(function, "filter", "write for example filter(lambda row: row['price'] > 3)")
        return self._then("filter", lambda name: FilterFunctionOperator(name, function, self.schema, policy))

    @located
    def expect(
        self, *conditions: Columns, on_error: OnError = "fail", failed_max: FailedMax | None = None
    ) -> DataStream:
        """Pass on the rows that meet all conditions; one that does not fails the job, or as `on_error` says.

        `conditions`: boolean polars expressions that compute each row on its own. One that is null is not met.
        `on_error`, `failed_max`: as for `map`; the error in `side_output(FAILED)` says which condition was not met.

        Returns a stream with the same columns. Raises SchemaError for an expression that names an unknown column or is
        not boolean, JobError for one that does not compute each row on its own, and if there is none.

            >>> testing.run(orders.expect(pl.col("price") > 3, on_error="drop")).rows
            [{'user': 'bob', 'price': 5}, {'user': 'ann', 'price': 4}]
        """
        policy = error_policy(on_error, failed_max, self.schema, "expect")
        found = checked_conditions("expect", self.schema, conditions)
        if not found:
            raise JobError("expect: name at least one condition, for example expect(pl.col('price') >= 0)")
        return self._then("expect", lambda name: ExpectOperator(name, found, self.schema, policy))

    @located
    def select(self, *columns: Columns, **named: pl.Expr | Constant) -> DataStream:
        """Keep only these columns, in this order.

        `columns`: names of columns, or polars expressions, or lists of them. An expression computes each row on its
        own; one whose value depends on other rows of its batch, such as `pl.col("price").sum()`, or on the process, is
        refused. To detect that, it is evaluated on a few rows, with the Python functions in it.
        `named`: further columns, each with its name: an expression (`total=pl.col("price") * 2`), the name of a column
        (`who="user"`), or a constant that is not text (`one=1`; text is `pl.lit("text")`).

        Returns a stream of these columns. Raises SchemaError for an unknown column, JobError for an argument that is
        not an expression or does not compute each row on its own, and if there is none.

            >>> testing.run(orders.select("user", double=pl.col("price") * 2)).rows
            [{'user': 'ann', 'double': 6}, {'user': 'bob', 'double': 10}, {'user': 'ann', 'double': 8}]
        """
        exprs = expressions("select", columns, named)
        return self._projected("select", exprs, keep=False)

    @located
    def drop(self, *columns: Columns) -> DataStream:
        """Keep all columns but these.

        `columns`: names of columns, polars selectors or `pl.col(…)`, or lists of them.

        Returns a stream of the other columns, in their order. Raises SchemaError for an unknown column, JobError for an
        argument that is not a column, if there is none, and if no column is left.

            >>> testing.run(orders.drop("price")).rows
            [{'user': 'ann'}, {'user': 'bob'}, {'user': 'ann'}]
        """
        left = without(self.schema, columns)
        return self._then("drop", lambda name: ColumnsOperator(name, left, self.schema))

    @located
    def rename(self, mapping: Mapping[str, str]) -> DataStream:
        """Give columns other names.

        `mapping`: the new name of each column by its name.

        Returns a stream of all columns in their order. The event-time column stays the event time under its new name.
        Raises SchemaError for an unknown column and for two columns of one name, JobError for another mapping.

            >>> testing.run(orders.rename({"user": "who"})).rows[0]
            {'who': 'ann', 'price': 3}
        """
        names = renamed(self.schema, mapping)
        made = self._then("rename", lambda name: ColumnsOperator(name, names, self.schema))
        time = self.core.event_time
        renamed_time = None if time is None else replace(time, name=names[time.name])
        return self._output(replace(made.core, event_time=renamed_time))

    @located
    def with_columns(self, *columns: Columns, **named: pl.Expr | Constant) -> DataStream:
        """Keep all columns, and add or replace those that the expressions compute.

        `columns`: polars expressions that compute each row on its own, as for `select`, or lists of them.
        `named`: further columns, each with its name, as for `select`.

        Returns a stream with the columns as they were, replaced ones in their position and new ones after them. Raises as
        `select` does.

            >>> testing.run(orders.with_columns(is_dear=pl.col("price") > 4)).rows
            [{'user': 'ann', 'price': 3, 'is_dear': False}, {'user': 'bob', 'price': 5, 'is_dear': True}, {'user': 'ann', 'price': 4, 'is_dear': False}]
        """
        exprs = expressions("with_columns", columns, named)
        return self._projected("with_columns", exprs, keep=True)

    @located
    def map(
        self,
        function: Callable[[Row], Row],
        schema: SchemaLike | None = None,
        *,
        on_error: OnError = "fail",
        failed_max: FailedMax | None = None,
    ) -> DataStream:
        """Replace each row by the row that a function returns.

        `function`: takes a row as a dict and returns a dict with the columns of `schema`. It may be an object with
        `__call__`, for what cannot be pickled: its `open(ctx)`, if it has one, is called once per subtask before the first
        row, with a context that has `uid`, `name`, `subtask`, `parallelism`, `metrics` and `resources`; its `close()` at the end, also
        after a failure.
        `schema`: the columns of the result, as an Arrow or polars schema or as `{"column": type}` with Arrow, polars or
        Python types; by default those of this stream.
        `on_error`: what happens to a row for which the function raises, or returns a value that does not fit its column:
        "fail" fails the job; "drop" drops the row; "side_output" emits it on `side_output(FAILED)`, with the columns `row`,
        `function`, `error_type` and `error`. Both are counted in the job's status.
        `failed_max`: unless "fail": `(100, 10_000)` fails the job when more than 100 of 10,000 rows of a subtask fail.

        Returns a stream of these columns. Raises SchemaError for an invalid schema, JobError for a function that cannot
        be called with a row or sent to the slots, ConfigError for other values of `on_error` and `failed_max`.

            >>> lengths = orders.map(lambda row: {"length": len(row["user"])}, schema={"length": int})
            >>> testing.run(lengths).rows
            [{'length': 3}, {'length': 3}, {'length': 3}]
            >>> shares = orders.map(lambda row: {"share": 20 // (row["price"] - 4)}, {"share": int}, on_error="side_output")
            >>> found = testing.run(shares)
            >>> found.rows
            [{'share': -20}, {'share': 20}]
            >>> [(one["row"], one["error_type"]) for one in found[FAILED]]
            [({'user': 'ann', 'price': 4}, 'ZeroDivisionError')]
        """
        check_function(function, "map", "write for example map(my_function, schema={'word': str})")
        made = self._made_schema(schema, "map")
        policy = error_policy(on_error, failed_max, self.schema, "map")
        return self._then("map", lambda name: MapOperator(name, function, made, policy))

    @located
    def map_async(
        self,
        function: Callable[[Row], Row | Awaitable[Row]],
        schema: SchemaLike | None = None,
        *,
        capacity: int = 100,
        timeout: Duration = "5 s",
        retries: int = 3,
        ordered: bool = True,
        on_error: OnError = "fail",
        failed_max: FailedMax | None = None,
    ) -> DataStream:
        """Replace each row by what a function returns that takes its time: a lookup over the network, for many rows at
        a time.

        `function`: as for `map`, or a coroutine function (`async def`). Coroutines run on one asyncio loop, in a thread of
        the slot's process; other functions run in up to `capacity` threads per subtask, and must allow that. Of an object
        whose `__call__` is a coroutine function, `open(ctx)` and `close()` may be too.
        `schema`: the columns of the result, as for `map`.
        `capacity`: how many rows of a subtask are called at a time. When they are, no more rows are read.
        `timeout`: how long a call may take. A coroutine is cancelled then. A thread cannot be interrupted, and remains
        occupied until the call returns: give the client in it a timeout, too.
        `retries`: how often a row is called again if the call raises or times out: after 0.1 s, 0.2 s, and so on up to
        10 s (in `midstream.testing`, at the end or when the test advances processing time). What happens then is decided
        by `on_error`.
        `ordered`: whether the results of a subtask have the order of its rows. If not, they are emitted as they come, but
        never later than a watermark that came after their row, nor earlier than one that came before it.
        `on_error`, `failed_max`: as for `map`.

        Rows in flight are part of each checkpoint. After a failure they are called again: a row is called at least once,
        and its result is emitted exactly once. Event time waits for rows in flight.

        Returns a stream of these columns. Raises as `map` does.

            >>> import asyncio
            >>> async def with_country(row):
            ...     await asyncio.sleep(0.001)  # a request
            ...     return {**row, "country": "fr" if row["user"] == "ann" else "de"}
            >>> testing.run(orders.map_async(with_country, {"user": str, "price": int, "country": str})).rows
            [{'user': 'ann', 'price': 3, 'country': 'fr'}, {'user': 'bob', 'price': 5, 'country': 'de'}, {'user': 'ann', 'price': 4, 'country': 'fr'}]
        """
        check_function(
            function, "map_async", "write for example map_async(my_lookup, schema={'word': str})", awaits=True
        )
        made, given = self._made_schema(schema, "map_async"), self.schema
        limits = call_limits(capacity, timeout, retries, ordered)
        policy = error_policy(on_error, failed_max, given, "map_async")
        return self._then("map_async", lambda name: AsyncMapOperator(name, function, made, given, limits, policy))

    @located
    def flat_map(
        self,
        function: Callable[[Row], Iterable[Row] | None],
        schema: SchemaLike | None = None,
        *,
        on_error: OnError = "fail",
        failed_max: FailedMax | None = None,
    ) -> DataStream:
        """Replace each row by any number of rows.

        `function`: takes a row as a dict, and returns or yields dicts with the columns of `schema`, or returns None for
        no row. It may be an object as for `map`.
        `schema`: the columns of the result, by default those of this stream; forms as for `map`.
        `on_error`, `failed_max`: as for `map`; of a row that fails, nothing that it has yielded is emitted.

        Returns a stream of these columns. Raises as `map` does.

            >>> testing.run(orders.flat_map(lambda row: [row] * (row["price"] - 3))).rows
            [{'user': 'bob', 'price': 5}, {'user': 'bob', 'price': 5}, {'user': 'ann', 'price': 4}]
        """
        example = "write for example flat_map(my_function, schema={'word': str})"
        check_function(function, "flat_map", example, yields=True)
        made = self._made_schema(schema, "flat_map")
        policy = error_policy(on_error, failed_max, self.schema, "flat_map")
        return self._then("flat_map", lambda name: FlatMapOperator(name, function, made, policy))

    @located
    def process(
        self,
        function: ProcessFunction,
        schema: SchemaLike,
        *,
        side_outputs: Mapping[str, SchemaLike] | None = None,
        on_error: OnError = "fail",
        failed_max: FailedMax | None = None,
    ) -> DataStream:
        """Call a function row by row that has side outputs; `key_by(…).process(…)` has states and timers too.

        `function`: an instance of your own subclass of ProcessFunction.
        `schema`: the columns of the rows that the function returns, as an Arrow or polars schema or as `{"column":
        type}`.
        `side_outputs`: the columns of each side output, by its tag.
        `on_error`, `failed_max`: as for `map`; of a row that fails, nothing is emitted.

        Returns the stream of the returned rows; its `side_output(tag)` has the rows of a side output. Raises as `process` of
        a keyed stream does, and JobError for a function with states or timers.

            >>> class Sorted(ProcessFunction):
            ...     def process(self, row, ctx):
            ...         if row["price"] > 3:
            ...             return row
            ...         ctx.side_output("cheap", row)
            >>> made = orders.process(Sorted(), orders.schema, side_outputs={"cheap": orders.schema})
            >>> testing.run(made)["cheap"]
            [{'user': 'ann', 'price': 3}]
        """
        from midstream.api.keyed_streams import processed, require_function

        if isinstance(function, KeyedProcessFunction):
            raise JobError(
                f"process: {type(function).__name__} is a KeyedProcessFunction, whose states and timers belong to keys; call "
                "key_by(…) first, or derive it from ProcessFunction, which has none"
            )
        require_function(function, ProcessFunction, "process")
        if hasattr(function, "on_timer"):
            raise JobError(
                f"process: {type(function).__name__} has on_timer(), and timers belong to keys. Call key_by(…) first and derive "
                "it from KeyedProcessFunction; for timers of the whole stream, by a column with one value: "
                "with_columns(all=pl.lit(0)).key_by('all')"
            )
        self.core.check_not_overwritten("process")
        port = Port("process", (), self.core.event_time, self.schema)
        policy = error_policy(on_error, failed_max, self.schema, "process")
        return processed("process", function, [port], schema, side_outputs, self.core, policy=policy)

    @located
    def map_batches(
        self,
        function: Callable[[Any], Any],
        schema: SchemaLike | None = None,
        *,
        form: BatchForm = "polars",
        on_error: OnError = "fail",
        failed_max: FailedMax | None = None,
    ) -> DataStream:
        """Replace whole batches of rows, for functions that are faster on many rows together.

        `function`: takes a batch, and returns a polars or pandas DataFrame or an Arrow RecordBatch or Table with the
        columns of `schema` and any number of rows. The engine decides where batches are cut, so a result must not depend
        on which rows share one. It may be an object as for `map`: a model that `open` loads.
        `schema`: the columns of the result, by default those of this stream; forms as for `map`.
        `form`: what the function takes: "polars" or "pandas" for a DataFrame, "arrow" for a RecordBatch. The columns of a
        pandas frame have Arrow types (`int64[pyarrow]`), which hold every value unchanged.
        `on_error`, `failed_max`: as for `map`. The function is called again with halves of a batch for which it fails,
        until each row that fails is alone.

        Returns a stream of these columns. Raises as `map` does, JobError for another `form`, and SchemaError for columns
        that polars cannot hold.

            >>> class Doubled:
            ...     def open(self, ctx):
            ...         self.factor = 2
            ...     def __call__(self, frame):
            ...         return frame.with_columns(price=pl.col("price") * self.factor)
            >>> testing.run(orders.map_batches(Doubled())).rows
            [{'user': 'ann', 'price': 6}, {'user': 'bob', 'price': 10}, {'user': 'ann', 'price': 8}]
        """
        check_function(function, "map_batches", "write for example map_batches(my_function)", takes="batch")
        made = self._made_schema(schema, "map_batches")
        if form not in get_args(BatchForm):
            raise JobError(f"map_batches: form {form!r} is not one of polars, arrow, pandas")
        if form == "polars":
            check_held_by_polars(self.schema, "map_batches")
        elif form == "pandas":
            require_pandas("map_batches")
        policy = error_policy(on_error, failed_max, self.schema, "map_batches")
        return self._then("map_batches", lambda name: MapBatchesOperator(name, function, made, form, policy))

    def _then(self, kind: str, make: MakeOperator) -> DataStream:
        return self._output(self.core.then(kind, make))

    def _output(self, core: StreamCore) -> DataStream:
        from midstream.api.data_stream import main_output

        return main_output(core)

    def _projected(self, method: str, exprs: Sequence[pl.Expr], *, keep: bool) -> DataStream:
        made = self._then(method, lambda name: ProjectOperator(name, exprs, self.schema, keep=keep))
        event_time = self.core.event_time_name
        if event_time is None or not computes(event_time, exprs, self.schema):
            return made
        return self._output(
            replace(
                made.core,
                event_time=None,
                overwritten=f"{method}() computes the event-time column {event_time!r} again",
            )
        )

    def _made_schema(self, schema: SchemaLike | None, method: str) -> pa.Schema:
        return self.schema if schema is None else as_schema(schema, method)
