"""Two streams of different columns as the inputs of one function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

from midstream.api.core import StreamCore
from midstream.api.keyed import require_function, side_schemas
from midstream.api.program import located
from midstream.api.stream import DataStream, main_output
from midstream.core.config import Duration, duration_us
from midstream.core.errors import ConfigError, JobError
from midstream.core.schemas import SchemaLike, as_schema
from midstream.operators.base import Operator
from midstream.operators.batch_functions import BatchFunctionOperator, CoBatchFunction
from midstream.operators.function_operator import two_ports
from midstream.operators.interval_join import interval_join_operator
from midstream.operators.process import BroadcastProcessFunction, CoProcessFunction, broadcast_process_operator
from midstream.operators.process_operator import ProcessOperator


class ConnectedStreams:
    """Two streams as the inputs of one function; if both are keyed, their rows share the states of a key.

    Event time is the minimum of both: it does not advance while one of them has no watermark.
    """

    def __init__(self, first: StreamCore, second: StreamCore) -> None:
        self._first = first
        self._second = second
        self._ports = two_ports(
            (first.keys, second.keys), (first.event_time, second.event_time), (first.schema, second.schema)
        )

    @located
    def process(
        self,
        function: CoProcessFunction,
        schema: SchemaLike,
        *,
        side_outputs: Mapping[str, SchemaLike] | None = None,
    ) -> DataStream:
        """Call `process1` of `function` with each row of the first stream, `process2` with each row of the second.

        `schema`: the columns of the rows that `function` returns. `side_outputs`: the columns of each side output,
        by tag. No order holds between the two inputs.
        """
        require_function(function, CoProcessFunction, "process")
        made = as_schema(schema, "process")
        sides = side_schemas(side_outputs, "process")
        return main_output(
            self._first.then(
                "co_process",
                lambda name: ProcessOperator(name, function, self._ports, made, sides),
                made,
                sides,
                second=self._second,
            )
        )

    @located
    def process_batches(self, function: CoBatchFunction, schema: SchemaLike) -> DataStream:
        """Call `function` with batches of rows of many keys, as polars DataFrames; its state is in tables.

        `schema`: the columns of the frames that `function` returns. The engine decides where batches are cut:
        a result must not depend on which rows share one. Raises JobError if the streams are not keyed.
        """
        require_function(function, CoBatchFunction, "process_batches")
        if not self._first.keys:
            raise JobError(
                "process_batches: tables are of keyed streams; connect a.key_by(…) with b.key_by(…) "
                "(process() also takes streams without keys)"
            )
        made = as_schema(schema, "process_batches")
        return main_output(
            self._first.then(
                "co_process_batches",
                lambda name: BatchFunctionOperator(name, function, self._ports, made),
                made,
                second=self._second,
            )
        )

    @located
    def interval_join(self, lower: Duration, upper: Duration) -> DataStream:
        """Join rows with the same key of which the second has an event time `lower` to `upper` after that of the first.

        Both bounds are included, and may be negative: `interval_join("-1 min", 0)` joins each row of the first
        stream with the rows of the second in the minute before. A pair has the columns of the first row, then those
        of the second without its keys. Its event time is the first's if `upper` is not above 0, the second's if
        `lower` is not below 0; otherwise it has none. A late row is joined with the rows that are still in state.

        Raises JobError if a stream lacks keys or event time, or if both have another column of the same name;
        ConfigError if `lower` is above `upper`.
        """
        first, second = self._first, self._second
        if not first.keys or first.event_time is None or second.event_time is None:
            raise JobError(
                "interval_join: both streams need keys and event time: "
                "a.with_watermarks(…).key_by(…).connect(b.with_watermarks(…).key_by(…))"
            )
        lower_us, upper_us = (_signed_us(value, "interval_join") for value in (lower, upper))
        if lower_us > upper_us:
            raise ConfigError(f"interval_join: lower ({lower}) is above upper ({upper}): there are no such pairs")
        result = first.then(
            "interval_join", lambda name: interval_join_operator(name, self._ports, lower_us, upper_us), second=second
        )
        # a pair is emitted when its later row arrives, so that row's time is not late downstream
        of_second = dict(zip(second.keys, first.keys, strict=True)).get(second.event_time, second.event_time)
        event_time = first.event_time if upper_us <= 0 else of_second if lower_us >= 0 else None
        return main_output(replace(result, event_time=event_time))


def _signed_us(value: Duration, name: str) -> int:
    if isinstance(value, str):
        text = value.strip()
        return -duration_us(text[1:].strip(), name) if text.startswith("-") else duration_us(text, name)
    zero = timedelta(0) if isinstance(value, timedelta) else 0
    is_negative = isinstance(value, (timedelta, int, float)) and value < zero  # type: ignore[operator]
    return -duration_us(-value, name) if is_negative else duration_us(value, name)


class BroadcastConnectedStreams:
    """A stream, keyed or not, and a broadcast stream, as the inputs of one function.

    Event time is the minimum of both: a broadcast stream without watermarks holds it back until it ends.
    """

    def __init__(self, stream: StreamCore, broadcast: StreamCore) -> None:
        self._stream = stream
        self._broadcast = broadcast

    @located
    def process(
        self,
        function: BroadcastProcessFunction,
        schema: SchemaLike,
        *,
        side_outputs: Mapping[str, SchemaLike] | None = None,
    ) -> DataStream:
        """Call `process` of `function` with each row of the stream, `process_broadcast` with each broadcast row.

        Every subtask gets all broadcast rows. `schema`: the columns of the rows that `function` returns.
        `side_outputs`: the columns of each side output, by tag. No order holds between the two inputs.
        """
        stream, broadcast = self._stream, self._broadcast
        require_function(function, BroadcastProcessFunction, "process")
        made = as_schema(schema, "process")
        sides = side_schemas(side_outputs, "process")

        def make(name: str) -> Operator:
            return broadcast_process_operator(
                name,
                function,
                keys=stream.keys,
                event_times=(stream.event_time, broadcast.event_time),
                input_schemas=(stream.schema, broadcast.schema),
                schema=made,
                side_outputs=sides,
            )

        # what is broadcast does not lend its event time to the result
        second = replace(broadcast, event_time=None)
        return main_output(stream.then("broadcast_process", make, made, sides, second=second))
