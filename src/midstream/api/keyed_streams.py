"""Keyed streams: rows by key, their windows, and functions with state and timers per key."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Never, overload

from midstream.api.data_stream import BroadcastStream, DataStream, main_output
from midstream.api.function_checks import error_policy
from midstream.api.hints import OF_KEYED_STREAMS, Hinted
from midstream.api.picklability import check_shippable
from midstream.api.program import located
from midstream.api.stream_core import StreamCore
from midstream.api.stream_sinks import Writable
from midstream.api.windowed_streams import WindowedStream, check_aggregates, check_no_order_of_arrival, check_top
from midstream.engine.core.config import Duration, interval_s
from midstream.engine.core.errors import ConfigError, JobError
from midstream.engine.core.schemas import SchemaLike, as_schema
from midstream.engine.operators.base import Operator
from midstream.engine.operators.event_time_column import TimeColumn
from midstream.engine.operators.failed_rows import FAIL, ErrorPolicy, FailedMax, OnError
from midstream.engine.operators.functions.batch_functions import BatchFunctionOperator, KeyedBatchFunction
from midstream.engine.operators.functions.function_operator import Function, Port
from midstream.engine.operators.functions.periodic_aggregate import periodic_aggregate_operator, periodic_top_operator
from midstream.engine.operators.functions.process_functions import KeyedProcessFunction
from midstream.engine.operators.functions.process_operator import ProcessOperator
from midstream.engine.operators.functions.running_aggregate import running_aggregate_operator
from midstream.engine.operators.functions.time_sort import sort_by_time_operator
from midstream.engine.operators.windows.aggregates import AnyAggregate
from midstream.engine.operators.windows.window_factory import CountWindow, Window
from midstream.engine.state.declared_state import DeclaredState

if TYPE_CHECKING:
    from midstream.api.connected_streams import BroadcastConnectedStreams, ConnectedStreams


_log = logging.getLogger("midstream")


class KeyedStream(Writable, Hinted):
    """A stream partitioned by the values of `keys`, as `DataStream.key_by` returns it. Its methods process each key on
    its own.

    For example:

        >>> per_user = orders.key_by("user")
        >>> per_user.keys
        ('user',)
        >>> testing.run(per_user.process(Total(), {"user": str, "total": int})).rows
        [{'user': 'ann', 'total': 3}, {'user': 'bob', 'total': 5}, {'user': 'ann', 'total': 7}]
    """

    _hints = OF_KEYED_STREAMS

    def __init__(self, core: StreamCore) -> None:
        super().__init__(core)
        self.keys = core.keys
        self.event_time = core.event_time_name

    @located
    def window(self, window: Window | CountWindow) -> WindowedStream:
        """Put the rows of each key into windows.

        `window`: `tumbling("1 h")`, `sliding("1 h", "5 min")` or `session("30 min")`, by event time; or `count(100)`.

        Returns a WindowedStream, whose `aggregate` computes a row per key and window. Raises JobError if the stream has
        no event time, which windows by count do not need, or if `window` is not a window.

            >>> per_minute = clicks.key_by("user").window(tumbling("1 min")).aggregate(n=Count())
            >>> for row in testing.run(per_minute).rows:
            ...     print(*row.values())
            ann 2024-01-01 12:00:00 2024-01-01 12:01:00 1
            ann 2024-01-01 12:02:00 2024-01-01 12:03:00 1
        """
        return WindowedStream(self.core, window)

    @located
    def aggregate(
        self,
        *unnamed: Never,
        every: Duration | None = None,
        ttl: Duration | None = None,
        **aggregates: AnyAggregate,
    ) -> DataStream:
        """Compute aggregates of all rows of a key so far: a stream of updates.

        `aggregates`: the name of each column with its aggregate: `n=Count(), total=Sum("price")`.
        `every`: emit a row per key only at multiples of this duration that event time passes, if the key had rows since
        the last one. By default there is a row for each row of the stream.
        `ttl`: a row that is later than all rows of its key by more than this duration starts the key's aggregates again
        (with `every`: multiples with rows that are further apart). Without it, a row per key stays in state.
        `unnamed`: nothing; an aggregate without the name of its column is refused.

        Returns a stream of the key columns, the event-time column if there is one, and a column per aggregate; the newest
        row of a key has its current values. For each row there is one with its time and the aggregates up to it, in order
        of arrival; `First` and `Last` depend on event time, and on arrival if there is none. With `every`, the time is the
        multiple, the aggregates are those of all rows before it, and the event time of the row is one unit earlier. With
        `every` or `ttl`, late rows are in `side_output(LATE)` instead, unchanged. Raises what `aggregate` of windows
        raises, and ConfigError for `every` or `ttl` without event time.

            >>> totals = orders.key_by("user").aggregate(n=Count(), total=Sum("price"))
            >>> for row in testing.run(totals).rows:
            ...     print(*row.values())
            ann 1 3
            bob 1 5
            ann 2 7
        """
        check_aggregates(unnamed, aggregates)
        core = self.core
        core.check_not_overwritten("aggregate")
        every_us, ttl_us = _interval_us(every, "aggregate: every"), _interval_us(ttl, "aggregate: ttl")
        if every_us is not None:
            check_no_order_of_arrival(
                aggregates, "aggregates with every= are put together from intervals of event time and"
            )
        if ttl_us is None:
            self._log_growth("aggregate: the state keeps a row for each key")
        event_time = core.event_time
        if event_time is None and (every_us or ttl_us):
            raise ConfigError(
                f"aggregate: {'every' if every_us else 'ttl'} is a duration of event time, and the stream has none; call "
                "with_watermarks(column, strategy) before key_by()"
            )

        def make(name: str) -> Operator:
            shared: dict[str, Any] = {
                "keys": core.keys,
                "aggregates": aggregates,
                "schema": core.schema,
                "ttl_us": ttl_us,
            }
            if every_us is None or event_time is None:
                return running_aggregate_operator(name, event_time=event_time, **shared)
            return periodic_aggregate_operator(name, event_time=event_time, every_us=every_us, **shared)

        result = core.then("aggregate", make)
        if every_us is not None and event_time is not None:
            result = replace(result, event_time=TimeColumn(event_time.name, is_end=True))
        return main_output(result)

    @located
    def top(
        self,
        count: int,
        *,
        by: str | Sequence[str],
        every: Duration,
        descending: bool = True,
        ttl: Duration | None = None,
    ) -> DataStream:
        """Return the first rows of all rows of a key so far, in the order of a column: the largest ones, or the smallest.

        They are emitted at multiples of a duration, so that the newest ones of a key are all of its first rows; a row for
        each change would not say which rows are no longer among them.

        `count`: how many rows at most. The state has no more than these of each key.
        `by`, `descending`: the order, as for `WindowedStream.top`.
        `every`: at each multiple of this duration that event time passes, the rows of a key are emitted, all of them, if they
        are not the same as the last time.
        `ttl`: a key starts again if multiples with rows are further apart. Without it, the rows of a key stay in state.

        Returns a stream of the key columns, the event-time column, which has the multiple, `rank` (1 for the first row), and
        all other columns of the row, except those that are called like one of these: copy the row's time before, to have
        both. The event time of a row is one unit before the multiple. Late rows are in `side_output(LATE)`, unchanged.
        Raises what `top` of windows raises, JobError without event time, and ConfigError for an invalid duration.

            >>> best = clicks.with_columns(minute=pl.col("at").dt.minute()).key_by("user").top(1, by="minute", every="1 min")
            >>> for row in testing.run(best).rows:
            ...     print(*row.values())
            ann 2024-01-01 12:01:00 1 0
            ann 2024-01-01 12:03:00 1 2
        """
        core = self.core
        core.check_event_time("top")
        columns = check_top(core, count, by)
        every_us, ttl_us = _interval_us(every, "top: every"), _interval_us(ttl, "top: ttl")
        if every_us is None:
            raise ConfigError("top: every=None is not a duration; write for example every='10 s'")
        if ttl_us is None:
            self._log_growth(f"top: the state keeps {count} rows for each key")
        event_time, multiple_us = core.event_time, every_us
        assert event_time is not None

        def make(name: str) -> Operator:
            return periodic_top_operator(
                name,
                keys=core.keys,
                event_time=event_time,
                count=count,
                by=columns,
                descending=descending,
                schema=core.schema,
                every_us=multiple_us,
                ttl_us=ttl_us,
            )

        return main_output(replace(core.then("top", make), event_time=TimeColumn(event_time.name, is_end=True)))

    def _log_growth(self, what: str) -> None:
        _log.info(
            "%s (%s) of the whole stream, and grows with their number; with ttl='1 d', keys leave it that had no row for a day",
            what,
            ", ".join(self.keys),
        )

    @located
    def process(
        self,
        function: KeyedProcessFunction,
        schema: SchemaLike,
        *,
        side_outputs: Mapping[str, SchemaLike] | None = None,
        on_error: OnError = "fail",
        failed_max: FailedMax | None = None,
    ) -> DataStream:
        """Call a function row by row, with states and timers of the row's key.

        `function`: an instance of your own subclass of KeyedProcessFunction.
        `schema`: the columns of the rows that the function returns, as an Arrow or polars schema or as `{"column":
        type}`.
        `side_outputs`: the columns of each side output, by its tag.
        `on_error`, `failed_max`: of rows for which `process` fails, as for `DataStream.map`. Their changes of states and
        timers are undone, for which each row works on a copy of what it reads of a state: keep lists and maps short. A
        failure of `on_timer` fails the job.

        Returns the stream of the returned rows; its `side_output(tag)` has the rows of a side output. Raises JobError
        for a function that cannot be sent to the slots, SchemaError for columns that do not fit, ConfigError for other
        values of `on_error` and `failed_max`.

            >>> per_user = orders.key_by("user").process(Total(), {"user": str, "total": int})
            >>> testing.run(per_user).rows
            [{'user': 'ann', 'total': 3}, {'user': 'bob', 'total': 5}, {'user': 'ann', 'total': 7}]
        """
        require_function(function, KeyedProcessFunction, "process")
        self.core.check_not_overwritten("process")
        port = Port("process", self.keys, self.core.event_time, self.schema)
        policy = error_policy(on_error, failed_max, self.schema, "process")
        return processed("process", function, [port], schema, side_outputs, self.core, policy=policy)

    @located
    def process_batches(
        self,
        function: KeyedBatchFunction,
        schema: SchemaLike,
        *,
        on_error: OnError = "fail",
        failed_max: FailedMax | None = None,
    ) -> DataStream:
        """Call a function with batches of rows of many keys, as polars DataFrames; its state is in tables.

        `function`: an instance of your own subclass of KeyedBatchFunction. The engine decides where batches are cut: a
        result must not depend on which rows share one.
        `schema`: the columns of the frames that the function returns; forms as for `process`.
        `on_error`, `failed_max`: as for `process`. What the function has done to its tables for a batch that fails is
        undone, and it is called again with halves of the batch, until each row that fails is alone. A failure of
        `on_watermark` fails the job.

        Returns the stream of the returned rows. Raises as `process` does.

            >>> class RunningTotal(KeyedBatchFunction):
            ...     totals = TableState({"user": str, "total": int})
            ...     def process(self, rows, ctx):
            ...         known = rows.join(self.totals.frame, on="user", how="left", maintain_order="left")
            ...         sums = pl.col("total").fill_null(0) + pl.col("price").cum_sum().over("user")
            ...         made = known.select("user", total=sums)
            ...         self.totals.frame = pl.concat([self.totals.frame, made]).unique("user", keep="last")
            ...         return made
            >>> running = orders.key_by("user").process_batches(RunningTotal(), {"user": str, "total": int})
            >>> testing.run(running).rows
            [{'user': 'ann', 'total': 3}, {'user': 'bob', 'total': 5}, {'user': 'ann', 'total': 7}]
        """
        require_function(function, KeyedBatchFunction, "process_batches")
        self.core.check_not_overwritten("process_batches")
        made = as_schema(schema, "process_batches")
        port = Port("process", self.keys, self.core.event_time, self.schema)
        policy = error_policy(on_error, failed_max, self.schema, "process_batches")
        return main_output(
            self.core.then("process_batches", lambda name: BatchFunctionOperator(name, function, [port], made, policy))
        )

    @located
    def sort_by_time(self) -> DataStream:
        """Put the rows of each key into the order of their event times.

        Rows are held until event time has passed them. Those of one time are ordered by the other columns, from left to
        right; rows that differ in nothing but lists or structs stay in the order of arrival.

        Returns a stream of the same rows; no order holds between different keys after they are sent on. Rows that came
        late are in its `side_output(LATE)`. Raises JobError if the stream has no event time.

            >>> later = env.from_collection([{"user": "ann", "at": datetime(2024, 1, 1, 12, n)} for n in (2, 1, 3)])
            >>> later = later.with_watermarks("at", WatermarkStrategy.bounded("5 min"))
            >>> [row["at"].minute for row in testing.run(later.key_by("user").sort_by_time()).rows]
            [1, 2, 3]
        """
        self.core.check_event_time("sort_by_time")
        port = Port("process", self.keys, self.core.event_time, self.schema)
        return main_output(self.core.then("sort_by_time", lambda name: sort_by_time_operator(name, port)))

    @overload
    def connect(self, other: KeyedStream) -> ConnectedStreams: ...

    @overload
    def connect(self, other: BroadcastStream) -> BroadcastConnectedStreams: ...

    @located
    def connect(self, other: KeyedStream | BroadcastStream) -> ConnectedStreams | BroadcastConnectedStreams:
        """Connect with another keyed stream, which shares the states of a key, or with a broadcast stream.

        `other`: a keyed stream with key columns of the same types in the same order, or a stream after `broadcast()`,
        of the same Environment.

        Returns ConnectedStreams or BroadcastConnectedStreams, whose `process` takes the function. Raises JobError for
        other keys and other streams.

            >>> class Greet(CoProcessFunction):
            ...     name = ValueState(pa.string())
            ...     def process1(self, row, ctx):
            ...         return {"name": self.name.value, "price": row["price"]}
            ...     def process2(self, row, ctx):
            ...         self.name.value = row["name"]
            >>> names = env.from_collection([{"user": "ann", "name": "Ann"}]).uid("names")
            >>> greeted = orders.key_by("user").connect(names.key_by("user")).process(Greet(), {"name": str, "price": int})
            >>> with testing.job(greeted) as job:
            ...     _ = job.feed("names", {"user": "ann", "name": "Ann"})
            ...     job.feed("orders", {"user": "ann", "price": 3}).take()
            [{'name': 'Ann', 'price': 3}]
        """
        from midstream.api.connected_streams import BroadcastConnectedStreams, ConnectedStreams

        if isinstance(other, KeyedStream):
            self.core.check_program(other.core, "connect")
            ours = [self.schema.field(key).type for key in self.keys]
            theirs = [other.schema.field(key).type for key in other.keys]
            if ours != theirs:
                raise JobError(
                    f"connect: the keys do not match: {_keys_text(self)} and {_keys_text(other)}; "
                    "both streams need key columns of the same types in the same order"
                )
            return ConnectedStreams(self.core, other.core)
        if isinstance(other, BroadcastStream):
            self.core.check_program(other.core, "connect")
            return BroadcastConnectedStreams(self.core, other.core)
        raise JobError("connect: a keyed stream connects with another keyed stream (key_by) or with a broadcast() one")


def require_function(function: object, kind: type, method: str) -> None:
    """Raise JobError unless `function` is an instance of `kind` that can be sent to the slots."""
    if isinstance(function, type) and issubclass(function, kind):
        raise JobError(f"{method}: {function.__name__} is a class; give an instance: {function.__name__}(…)")
    if not isinstance(function, kind):
        raise JobError(f"{method}: {function!r} is not a {kind.__name__}; subclass it and give an instance")
    check_shippable(function, f"{method}: {type(function).__name__}")
    for handler in vars(kind):
        if handler.startswith("process") and getattr(type(function), handler) is getattr(kind, handler):
            raise JobError(
                f"{method}: {type(function).__name__} has no method {handler}(); that is what takes the rows"
            )
    for name, value in vars(function).items():
        if isinstance(value, DeclaredState) and not isinstance(getattr(type(function), name, None), DeclaredState):
            raise JobError(
                f"{method}: state {name!r} of {type(function).__name__} is set on the object, where checkpoints do not see it; "
                f"declare it in the class: {name} = {type(value).__name__}(…)"
            )


def processed(
    kind: str,
    function: Function,
    ports: Sequence[Port],
    schema: SchemaLike,
    side_outputs: Mapping[str, SchemaLike] | None,
    first: StreamCore,
    second: StreamCore | None = None,
    policy: ErrorPolicy = FAIL,
) -> DataStream:
    """Return what a process function makes of one stream or two."""
    made = as_schema(schema, "process")
    sides = {}
    for tag, spec in (side_outputs or {}).items():
        if not isinstance(tag, str) or not tag:
            raise JobError(f"process: {tag!r} is not a name for a side output")
        if tag in policy.side_outputs:
            raise JobError(f"process: {tag!r} is the side output of on_error='side_output'; give another one this name")
        sides[tag] = as_schema(spec, f"process: side output {tag!r}")
    return main_output(
        first.then(kind, lambda name: ProcessOperator(name, function, ports, made, sides, policy), second=second)
    )


def _interval_us(value: Duration | None, name: str) -> int | None:
    return None if value is None else round(interval_s(value, name) * 1_000_000)


def _keys_text(stream: KeyedStream) -> str:
    return ", ".join(f"{key} ({stream.schema.field(key).type})" for key in stream.keys)
