"""The joins of two streams by keys and event time: the checks of their arguments, and the streams that they return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from midstream.api.data_stream import DataStream, checked_keys, main_output
from midstream.api.stream_core import StreamCore
from midstream.engine.core.config import Duration, duration_us, signed_duration_us
from midstream.engine.core.errors import ConfigError, JobError, SchemaError
from midstream.engine.operators.functions.asof_join import asof_join_operator
from midstream.engine.operators.functions.event_time_join import EventTimeJoinOperator
from midstream.engine.operators.functions.function_operator import Port, two_ports
from midstream.engine.operators.functions.interval_join import HOWS, interval_join_operator
from midstream.engine.operators.windows.window_specs import LATE, LATE_RIGHT

On: TypeAlias = "str | Sequence[str] | None"
MakeJoin: TypeAlias = Callable[[str, Sequence[Port]], EventTimeJoinOperator]


def interval_joined(
    left: DataStream, right: DataStream, on: tuple[On, On, On], how: str, within: object, suffix: str
) -> DataStream:
    if how not in HOWS:
        raise ConfigError(f"join: how={how!r} is none of {', '.join(map(repr, HOWS))}")
    if not isinstance(within, Sequence) or isinstance(within, str) or len(within) != 2:
        raise ConfigError(
            f"join: within={within!r} is not a pair of durations; write for example within=('-1 min', '1 h'): the least and "
            "the greatest time by which a row of the right stream may be after one of the left"
        )
    lower: Duration
    upper: Duration
    lower, upper = within
    lower_us, upper_us = (signed_duration_us(value, "join") for value in (lower, upper))
    if lower_us > upper_us:
        raise ConfigError(f"join: within begins at {lower}, after its end {upper}: there are no such pairs")

    def make(name: str, ports: Sequence[Port]) -> EventTimeJoinOperator:
        return interval_join_operator(name, ports, lower_us, upper_us, how, suffix)

    return _joined("join", left, right, on, suffix, make)


def asof_joined(
    left: DataStream, right: DataStream, on: tuple[On, On, On], tolerance: Duration | None, suffix: str
) -> DataStream:
    tolerance_us = None if tolerance is None else duration_us(tolerance, "join_asof: tolerance")

    def make(name: str, ports: Sequence[Port]) -> EventTimeJoinOperator:
        return asof_join_operator(name, ports, tolerance_us, suffix)

    return _joined("join_asof", left, right, on, suffix, make)


def _joined(
    kind: str, left: DataStream, right: DataStream, on: tuple[On, On, On], suffix: str, make: MakeJoin
) -> DataStream:
    if not isinstance(suffix, str) or not suffix:
        raise ConfigError(f"{kind}: suffix={suffix!r} must be a text that is not empty, such as '_right'")
    first, second = (
        _keyed(stream, keys, kind, side)
        for stream, keys, side in zip((left, right), key_columns(kind, *on), ("left", "right"), strict=True)
    )
    types = [[core.schema.field(key).type for key in core.keys] for core in (first, second)]
    if types[0] != types[1]:
        texts = [", ".join(f"{key} ({core.schema.field(key).type})" for key in core.keys) for core in (first, second)]
        raise SchemaError(
            f"{kind}: the keys do not match: {texts[0]} and {texts[1]}; both streams need as many key columns, of the same "
            "types in the same order: cast them with with_columns() first"
        )
    ports = two_ports((first.keys, second.keys), (first.event_time, second.event_time), (first.schema, second.schema))
    made = first.then(kind, lambda name: make(name, ports), second=second)
    [origin] = made.origins
    operator = made.program.graph.nodes[origin.node].operator
    assert isinstance(operator, EventTimeJoinOperator), operator
    sides = {LATE: (left.schema, first.event_time), LATE_RIGHT: (right.schema, second.event_time)}
    return main_output(replace(made, event_time=operator.result_time, side_outputs=sides))


def key_columns(kind: str, on: On, left_on: On, right_on: On) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if (on is None) == (left_on is None) or (left_on is None) != (right_on is None):
        raise JobError(
            f"{kind}: name the key columns with on=, or with left_on= and right_on= if their names differ in the two"
        )
    first, second = (on, on) if on is not None else (left_on, right_on)
    return _names(first), _names(second)


def _names(columns: On) -> tuple[str, ...]:
    assert columns is not None
    return (columns,) if isinstance(columns, str) or not isinstance(columns, Sequence) else tuple(columns)


def _keyed(stream: DataStream, keys: tuple[str, ...], kind: str, side: str) -> StreamCore:
    stream.core.check_not_overwritten(kind)
    if stream.core.event_time is None:
        raise JobError(f"{kind}: the {side} stream has no event time; call with_watermarks(column, strategy) before it")
    return replace(stream.core, keys=checked_keys(stream, keys, kind))
