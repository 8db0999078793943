"""The operators of process functions, made without a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.functions.process_functions import BroadcastProcessFunction, KeyedProcessFunction
from midstream.engine.operators.functions.process_operator import ProcessOperator


def process_operator(
    name: str,
    function: KeyedProcessFunction,
    *,
    keys: Sequence[str],
    event_time: str | None,
    input_schema: pa.Schema,
    schema: pa.Schema,
    side_outputs: Mapping[str, pa.Schema] | None = None,
) -> ProcessOperator:
    """Return the operator of a KeyedProcessFunction. `schema`: the rows it returns; `side_outputs`: tag to schema."""
    port = Port("process", tuple(keys), event_time, input_schema)
    return ProcessOperator(name, function, [port], schema, side_outputs or {})


def broadcast_process_operator(
    name: str,
    function: BroadcastProcessFunction,
    *,
    keys: Sequence[str],
    event_times: tuple[str | None, str | None],
    input_schemas: tuple[pa.Schema, pa.Schema],
    schema: pa.Schema,
    side_outputs: Mapping[str, pa.Schema] | None = None,
) -> ProcessOperator:
    """Return the operator. Port 0 is the stream (`keys` is empty if it is not keyed), port 1 the broadcast stream."""
    ports = [
        Port("process", tuple(keys), event_times[0], input_schemas[0]),
        Port("process_broadcast", (), event_times[1], input_schemas[1], broadcast=True),
    ]
    return ProcessOperator(name, function, ports, schema, side_outputs or {})
