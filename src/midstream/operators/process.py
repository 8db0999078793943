"""Keyed process functions: a row at a time, with state and timers per key.

    class CountVisits(KeyedProcessFunction):
        count = ValueState(default=0)
        pages = MapState()

        def process(self, row, ctx):
            self.count.value += 1
            self.pages[row["page"]] = self.pages.get(row["page"], 0) + 1
            ctx.timers.event_time(ctx.timestamp + timedelta(minutes=30))
            yield {"user": ctx.key, "visits": self.count.value}

        def on_timer(self, time, ctx):
            self.count.clear()

What is not in a state declared on the class is not in a checkpoint. `process`, `on_timer` and the
like return or yield rows (dicts): one dict, an iterable of dicts, or None. A row counts as it was
when it was returned; of a list or dict in it that is going to change (a state's own), hand out a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from midstream.operators.function_operator import Function, Port
from midstream.operators.process_operator import ProcessOperator
from midstream.operators.rows import Row

Result: TypeAlias = "Row | Iterable[Row] | None"
Instant: TypeAlias = "datetime | int"
"""A datetime (one without time zone is UTC), or int64 microseconds since the epoch."""


class Timers(Protocol):
    """Timers of the current key. Setting one that is set already changes nothing."""

    def event_time(self, at: Instant) -> None:
        """Call `on_timer` once the watermark has reached `at` (at once with the next watermark if it has)."""
        ...

    def processing_time(self, at: Instant) -> None:
        """Call `on_timer` once the wall clock has reached `at`."""
        ...

    def delete_event_time(self, at: Instant) -> None: ...

    def delete_processing_time(self, at: Instant) -> None: ...


class ProcessContext(Protocol):
    """What a function may know and do beside its states. Valid during the call only."""

    @property
    def key(self) -> Any:
        """The key's value; a tuple when there are several key columns; None on a stream without keys."""
        ...

    @property
    def timestamp(self) -> datetime | None:
        """Event time of the row, or of the timer that fires; None when the stream has no event time."""
        ...

    @property
    def watermark(self) -> datetime:
        """How far event time has come; `datetime.min` until the first watermark since a start, `datetime.max` at the end."""
        ...

    @property
    def now(self) -> datetime:
        """The wall clock, UTC, in milliseconds."""
        ...

    @property
    def timers(self) -> Timers: ...

    def side_output(self, tag: str, row: Row) -> None:
        """Emit `row` on the side output `tag`, which must be declared with its schema."""
        ...


class KeyedProcessFunction(Function):
    """For a keyed stream: see the top of this file."""

    def process(self, row: Row, ctx: ProcessContext) -> Result:
        raise NotImplementedError

    def on_timer(self, time: datetime, ctx: ProcessContext) -> Result:
        """A timer of the current key is due. `time` is what it was set to."""
        return None


class CoProcessFunction(Function):
    """For two connected streams; when both are keyed they share the states and timers of a key."""

    def process1(self, row: Row, ctx: ProcessContext) -> Result:
        raise NotImplementedError

    def process2(self, row: Row, ctx: ProcessContext) -> Result:
        raise NotImplementedError

    def on_timer(self, time: datetime, ctx: ProcessContext) -> Result:
        return None


class BroadcastProcessFunction(Function):
    """For a stream connected with a broadcast one. States declared as BroadcastState hold the same on all subtasks.

    They can be written in `process_broadcast` only, which every subtask runs for the same rows in
    the same order: it must be deterministic. On a keyed stream `process` also has keyed states and timers.
    """

    def process(self, row: Row, ctx: ProcessContext) -> Result:
        raise NotImplementedError

    def process_broadcast(self, row: Row, ctx: ProcessContext) -> Result:
        raise NotImplementedError

    def on_timer(self, time: datetime, ctx: ProcessContext) -> Result:
        return None


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
    """The operator of a KeyedProcessFunction. `schema`: the rows it returns; `side_outputs`: tag to schema."""
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
    """Port 0 is the stream (`keys` empty when it is not keyed), port 1 the broadcast one."""
    ports = [
        Port("process", tuple(keys), event_times[0], input_schemas[0]),
        Port("process_broadcast", (), event_times[1], input_schemas[1], broadcast=True),
    ]
    return ProcessOperator(name, function, ports, schema, side_outputs or {})
