"""Two streams of different columns as the inputs of one function."""

from __future__ import annotations

from collections.abc import Mapping

from midstream.api.arguments import SchemaLike, as_schema
from midstream.api.keyed import require_function, side_schemas
from midstream.api.program import located
from midstream.api.stream import BroadcastStream, DataStream
from midstream.operators.process import (
    BroadcastProcessFunction,
    CoProcessFunction,
    broadcast_process_operator,
    co_process_operator,
)


class ConnectedStreams:
    """Rows of the first go to `process1`, rows of the second to `process2`; keyed ones share the states of a key.

    Event time is the minimum of both: while one has no watermark yet, it does not advance.
    """

    def __init__(
        self, first: DataStream, first_keys: tuple[str, ...], second: DataStream, second_keys: tuple[str, ...]
    ) -> None:
        self._first = first
        self._second = second
        self._keys = (first_keys, second_keys)

    @located
    def process(
        self,
        function: CoProcessFunction,
        schema: SchemaLike,
        *,
        side_outputs: Mapping[str, SchemaLike] | None = None,
    ) -> DataStream:
        """`schema` is that of the rows that `function` returns."""
        first, second = self._first, self._second
        require_function(function, CoProcessFunction, "process")
        made = as_schema(schema, "process")
        sides = side_schemas(side_outputs, "process")
        node, _ = first._program.add(
            "co_process",
            [*first._inputs(0, self._keys[0]), *second._inputs(1, self._keys[1])],
            lambda name: co_process_operator(
                name,
                function,
                keys=self._keys,
                event_times=(first.event_time, second.event_time),
                input_schemas=(first.schema, second.schema),
                schema=made,
                side_outputs=sides,
            ),
            schema=lambda _: made,
        )
        return first._behind(node.id, made, sides, second.event_time)


class BroadcastConnectedStreams:
    """Rows of the stream go to `process`, rows of the broadcast one to `process_broadcast` of every subtask.

    Event time is the minimum of both: a broadcast stream without watermarks holds it back until it ends.
    """

    def __init__(self, stream: DataStream, keys: tuple[str, ...], broadcast: BroadcastStream) -> None:
        self._stream = stream
        self._keys = keys
        self._broadcast = broadcast

    @located
    def process(
        self,
        function: BroadcastProcessFunction,
        schema: SchemaLike,
        *,
        side_outputs: Mapping[str, SchemaLike] | None = None,
    ) -> DataStream:
        """`schema` is that of the rows that `function` returns."""
        stream, broadcast = self._stream, self._broadcast
        require_function(function, BroadcastProcessFunction, "process")
        made = as_schema(schema, "process")
        sides = side_schemas(side_outputs, "process")
        node, _ = stream._program.add(
            "broadcast_process",
            [*stream._inputs(0, self._keys), *broadcast._inputs(1)],
            lambda name: broadcast_process_operator(
                name,
                function,
                keys=self._keys,
                event_times=(stream.event_time, broadcast.event_time),
                input_schemas=(stream.schema, broadcast.schema),
                schema=made,
                side_outputs=sides,
            ),
            schema=lambda _: made,
        )
        return stream._behind(node.id, made, sides)
