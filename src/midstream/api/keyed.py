"""Keyed streams: rows by key, their windows, and functions with state and timers per key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, overload

import pyarrow as pa

from midstream.api.core import StreamCore
from midstream.api.program import located
from midstream.api.shipping import check_shippable
from midstream.api.stream import BroadcastStream, DataStream, main_output
from midstream.core.config import Duration, duration_s
from midstream.core.errors import JobError
from midstream.core.schemas import SchemaLike, as_schema
from midstream.graph.job_graph import Partitioning
from midstream.operators.aggregates import Accumulator, Aggregate, AnyAggregate
from midstream.operators.base import Operator
from midstream.operators.batch_functions import BatchFunctionOperator, KeyedBatchFunction
from midstream.operators.function_operator import Port
from midstream.operators.process import KeyedProcessFunction, process_operator
from midstream.operators.windows import LATE, Session, Sliding, Window, window_operator
from midstream.state.declared import DeclaredState

if TYPE_CHECKING:
    from midstream.api.connected import BroadcastConnectedStreams, ConnectedStreams


class KeyedStream:
    """A stream partitioned by the values of `keys`. Its methods process each key on its own."""

    def __init__(self, core: StreamCore) -> None:
        self.core = core  # for midstream's own modules
        self.keys = core.keys
        self.schema = core.schema
        self.event_time = core.event_time

    @located
    def window(self, window: Window) -> WindowedStream:
        """Put the rows of each key into event-time windows; `aggregate` of the result computes a row per window.

        `window`: `tumbling("1 h")`, `sliding("1 h", "5 min")` or `session("30 min")`. Raises JobError if the
        stream has no event time.

            stream.key_by("user").window(tumbling("1 h")).aggregate(clicks=Count(), spent=Sum("price"))
        """
        return WindowedStream(self.core, window)

    @located
    def process(
        self,
        function: KeyedProcessFunction,
        schema: SchemaLike,
        *,
        side_outputs: Mapping[str, SchemaLike] | None = None,
    ) -> DataStream:
        """Call `function` row by row, with states and timers of the row's key.

        `schema`: the columns of the rows that `function` returns. `side_outputs`: the columns of each side output,
        by tag. Returns the stream of the returned rows; its `.side_output(tag)` has the rows of a side output.
        Raises JobError for a function that cannot be sent to the slots, SchemaError for columns that do not fit.
        """
        require_function(function, KeyedProcessFunction, "process")
        made = as_schema(schema, "process")
        sides = side_schemas(side_outputs, "process")

        def make(name: str) -> Operator:
            return process_operator(
                name,
                function,
                keys=self.keys,
                event_time=self.event_time,
                input_schema=self.schema,
                schema=made,
                side_outputs=sides,
            )

        return main_output(self.core.then("process", make, made, sides))

    @located
    def process_batches(self, function: KeyedBatchFunction, schema: SchemaLike) -> DataStream:
        """Call `function` with batches of rows of many keys, as polars DataFrames; its state is in tables.

        `schema`: the columns of the frames that `function` returns. The engine decides where batches are cut:
        a result must not depend on which rows share one. Raises as `process` does.
        """
        require_function(function, KeyedBatchFunction, "process_batches")
        made = as_schema(schema, "process_batches")
        port = Port("process", self.keys, self.event_time, self.schema)
        return main_output(
            self.core.then("process_batches", lambda name: BatchFunctionOperator(name, function, [port], made), made)
        )

    @overload
    def connect(self, other: KeyedStream) -> ConnectedStreams: ...

    @overload
    def connect(self, other: BroadcastStream) -> BroadcastConnectedStreams: ...

    @located
    def connect(self, other: KeyedStream | BroadcastStream) -> ConnectedStreams | BroadcastConnectedStreams:
        """Connect with another keyed stream, which shares the states of a key, or with a broadcast stream.

        Both keyed streams need key columns of the same types in the same order, else JobError is raised.
        """
        from midstream.api.connected import BroadcastConnectedStreams, ConnectedStreams

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


class WindowedStream:
    """Rows in windows; `aggregate` computes the result."""

    def __init__(self, core: StreamCore, window: Window, allowed_lateness: Duration = 0) -> None:
        if not isinstance(window, (Sliding, Session)):
            raise JobError(
                f"window: {window!r} is not a window; use tumbling('1 h'), sliding('1 h', '5 min') or session('30 min')"
            )
        if core.event_time is None:
            timestamps = [field.name for field in core.schema if pa.types.is_timestamp(field.type)]
            raise JobError(
                "window: the stream has no event time; call with_watermarks(column, strategy) before it "
                f"(timestamp columns: {', '.join(timestamps) or 'none'})"
            )
        self._core = core
        self._window = window
        self._allowed_lateness = allowed_lateness

    @located
    def allowed_lateness(self, lateness: Duration) -> WindowedStream:
        """Accept rows that are up to `lateness` too late; each of them makes its windows be emitted again, updated."""
        duration_s(lateness, "allowed_lateness")
        return WindowedStream(self._core, self._window, lateness)

    @located
    def aggregate(self, **aggregates: AnyAggregate) -> DataStream:
        """Return the key columns, `window_start`, `window_end`, and a column per aggregate, one row per key and window.

        `aggregates`: the name of each column with its aggregate, `n=Count(), total=Sum("value")`. Rows that came
        too late are in `.side_output(LATE)` of the result, unchanged. The result has no event time; to window it
        again, declare one: `.with_watermarks("window_start", WatermarkStrategy.bounded(window_size))`.
        """
        core = self._core
        event_time = core.event_time
        assert event_time is not None
        for column, aggregate in aggregates.items():
            if not isinstance(aggregate, (Aggregate, Accumulator)):
                raise JobError(
                    f"aggregate: {column}={aggregate!r} is not an aggregate; write for example {column}=Count()"
                )
            check_shippable(aggregate, f"aggregate: {column}")
        if not aggregates:
            raise JobError("aggregate: name at least one aggregate, for example n=Count()")

        def make(name: str) -> Operator:
            return window_operator(
                name,
                window=self._window,
                keys=core.keys,
                event_time=event_time,
                aggregates=aggregates,
                schema=core.schema,
                allowed_lateness=self._allowed_lateness,
            )

        late = {LATE: core.schema}
        if core.keys:
            result = core.then("window", make, side_outputs=late)
        else:
            result = core.toward(Partitioning.GLOBAL).then("window_all", make, side_outputs=late, parallelism=1)
        return main_output(replace(result, event_time=None))


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


def side_schemas(side_outputs: Mapping[str, SchemaLike] | None, method: str) -> dict[str, pa.Schema]:
    result = {}
    for tag, spec in (side_outputs or {}).items():
        if not isinstance(tag, str) or not tag:
            raise JobError(f"{method}: {tag!r} is not a name for a side output")
        result[tag] = as_schema(spec, f"{method}: side output {tag!r}")
    return result


def _keys_text(stream: KeyedStream) -> str:
    return ", ".join(f"{key} ({stream.schema.field(key).type})" for key in stream.keys)
