"""The join of two streams by keys and by tumbling or sliding windows of event time: inner, outer, semi and anti.

Each row is joined once for each of its windows. In a window all rows have one time, its last one: so this is the join by
an interval of no length, among rows of the same window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import polars as pl
import pyarrow as pa

from midstream.engine.core.batches import to_polars
from midstream.engine.core.errors import ConfigError
from midstream.engine.operators.event_time_column import EventTime, Int64s, TimeColumn
from midstream.engine.operators.functions.event_time_join import JoinColumns
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.functions.interval_join import IntervalJoinOperator
from midstream.engine.operators.windows.assigned_windows import AssignedWindows
from midstream.engine.operators.windows.window_operator import native_units, room_for
from midstream.engine.operators.windows.window_specs import WINDOW_END, WINDOW_START, Sliding

BOUNDS: Final = (WINDOW_START, WINDOW_END)
WINDOWS_OF_A_ROW_MAX: Final = 1_000
"""Of how many windows a row may be part: it is held once for each."""


def window_join_operator(
    name: str, ports: Sequence[Port], window: Sliding, how: str = "inner", suffix: str = "_right"
) -> WindowJoinOperator:
    """Return the operator that pairs rows of equal keys for each window that both are in.

    A pair is emitted when the later of its rows arrives, a row without a partner when event time has reached the end of the
    window. The bounds of windows have the type of the event times, or microseconds if these are of two types.

    Raises SchemaError for columns that do not fit, ConfigError for windows that do not.
    """
    return WindowJoinOperator(name, ports, window, how, suffix)


class WindowJoinOperator(IntervalJoinOperator):
    def __init__(self, name: str, ports: Sequence[Port], window: Sliding, how: str, suffix: str) -> None:
        where = f"operator {name!r}"
        times = [EventTime(_event_time_of(port), port.schema, where) for port in ports]
        self._kind = _type_of_bounds(times)
        self._window = window
        self._windows = AssignedWindows(window)
        if self._windows.of_a_row > WINDOWS_OF_A_ROW_MAX:
            raise ConfigError(
                f"{where}: a row would be in {self._windows.of_a_row:,} {window}, and it is held once for each; at most "
                f"{WINDOWS_OF_A_ROW_MAX:,} are allowed: choose a longer slide, or join with within=, which has no windows"
            )
        in_windows = [_in_windows(port, self._kind, where) for port in ports]
        columns = JoinColumns.of(in_windows, suffix, where)
        bound = EventTime(columns.left_time, in_windows[0].schema, where)
        for what, length_us in (("size", window.size_us), ("slide", window.slide_us), ("offset", window.offset_us)):
            native_units(length_us, bound, f"{where}: window {what}")
        self._unit_us = 1000 if self._kind.unit == "ms" else 1
        span_us = window.size_us + window.slide_us
        self._rooms = [room_for(_rounded_up(span_us, time), window, time, where) for time in times]
        super().__init__(name, ports, (0, 0), how, columns)

    def state_settings(self) -> Mapping[str, Mapping[str, str]]:
        settings = dict(super().state_settings())
        own = {name: value for name, value in settings[""].items() if name != "the interval"}
        settings[""] = {**own, "the window": str(self._window)}
        return settings

    def _times_us(self, batch: pa.RecordBatch, port: int) -> Int64s:
        time = self._times[port]
        assert time is not None
        return time.us(batch, self._rooms[port])

    def _last_us(self, batch: pa.RecordBatch, port: int) -> Int64s:
        """A row is late if all its windows have ended."""
        return self._windows.last_ends(self._times_us(batch, port)) - self._unit_us

    def _call(self, batch: pa.RecordBatch, port: int) -> None:
        rows, starts, ends = self._windows.of(self._times_us(batch, port))
        is_open = ends - self._unit_us > self._reached(batch, self._ports[port].keys)[rows]
        if not is_open.all():
            rows, starts, ends = rows[is_open], starts[is_open], ends[is_open]
        frame = to_polars(batch.select([name for name in batch.schema.names if name not in BOUNDS]))
        if len(rows) != frame.height or self._windows.of_a_row > 1:
            frame = frame[rows]
        bounds = [self._bound(name, times_us) for name, times_us in zip(BOUNDS, (starts, ends), strict=True)]
        self._emit(self._joined(frame.with_columns(bounds), port))

    def _bound(self, name: str, times_us: Int64s) -> pl.Series:
        native = times_us // 1000 if self._kind.unit == "ms" else times_us * (1000 if self._kind.unit == "ns" else 1)
        return pl.Series(name, native).cast(pl.Datetime(self._kind.unit, self._kind.tz))


def _event_time_of(port: Port) -> str | TimeColumn:
    assert port.event_time is not None, port
    return port.event_time


def _type_of_bounds(times: Sequence[EventTime]) -> Any:
    """Watermarks are in microseconds, so the bounds of windows need not be finer."""
    left, right = (time.kind for time in times)
    return left if left == right else pa.timestamp("us", left.tz)


def _in_windows(port: Port, kind: Any, where: str) -> Port:
    """Return the columns of the rows with their windows, by which they are joined as well as by their keys."""
    for key in port.keys:
        if key in BOUNDS:
            raise ConfigError(
                f"{where}: the key column must not be called {key!r}, which is what the window of a row is called; rows of "
                "the same window are joined: leave the column out of on=, or rename it"
            )
    own = [field for field in port.schema if field.name not in BOUNDS]
    schema = pa.schema([*own, *(pa.field(name, kind) for name in BOUNDS)])
    return replace(port, keys=(*port.keys, *BOUNDS), event_time=TimeColumn(WINDOW_END, is_end=True), schema=schema)


def _rounded_up(span_us: int, time: EventTime) -> int:
    return -(-span_us // 1000) if time.kind.unit == "ms" else span_us * (1000 if time.kind.unit == "ns" else 1)
