"""Process functions: they process one row at a time, with state and timers per key.

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

Only states declared on the class are in a checkpoint. `process`, `on_timer` and the like return or yield
rows (dicts): one dict, an iterable of dicts, or None. A row is copied when it is returned or yielded, with
the lists and dicts in it (such as a state's own), so later changes of them do not change the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from midstream.operators.function_operator import Function, Port
from midstream.operators.process_operator import ProcessOperator
from midstream.operators.rows import Row
from midstream.operators.user_metrics import UserMetrics

Result: TypeAlias = "Row | Iterable[Row] | None"
Instant: TypeAlias = "datetime | int"
"""A datetime (UTC if it has no zone), or int64 microseconds since the epoch."""


class Timers(Protocol):
    """Timers of the current key. Setting one that is set, or deleting one that is not, has no effect."""

    def event_time(self, at: Instant) -> None:
        """Call `on_timer` once the watermark has reached `at`; if it has already, with the next watermark."""
        ...

    def processing_time(self, at: Instant) -> None:
        """Call `on_timer` once the wall clock has reached `at`."""
        ...

    def delete_event_time(self, at: Instant) -> None: ...

    def delete_processing_time(self, at: Instant) -> None: ...


class ProcessContext(Protocol):
    """The key, times, timers and side outputs of a process function. Valid during the call only."""

    @property
    def key(self) -> Any:
        """The key's value; a tuple if there are several key columns; None on a stream without keys."""
        ...

    @property
    def timestamp(self) -> datetime | None:
        """Event time of the row, or of the timer that fires; None if the stream has no event time."""
        ...

    @property
    def watermark(self) -> datetime:
        """The current event time: `datetime.min` until the first watermark since a start, `datetime.max` at the end."""
        ...

    @property
    def now(self) -> datetime:
        """The wall clock in UTC, to the millisecond."""
        ...

    @property
    def timers(self) -> Timers: ...

    @property
    def metrics(self) -> UserMetrics:
        """Counters and gauges of the function, for the job's status, its page and `/metrics`."""
        ...

    def side_output(self, tag: str, row: Row) -> None:
        """Emit `row` on the side output `tag`, which must be declared with its schema."""
        ...


class KeyedProcessFunction(Function):
    """A function on the rows of a keyed stream, with states and timers per key; the module shows an example."""

    def process(self, row: Row, ctx: ProcessContext) -> Result:
        """Process one row; return or yield rows as dicts, or return None."""
        raise NotImplementedError

    def on_timer(self, time: datetime, ctx: ProcessContext) -> Result:
        """Handle a timer of the current key that is due. `time` is the time that it was set for."""
        return None


class CoProcessFunction(Function):
    """A function on the rows of two connected streams; if both are keyed they share the states and timers of a key."""

    def process1(self, row: Row, ctx: ProcessContext) -> Result:
        """Process one row of the first stream."""
        raise NotImplementedError

    def process2(self, row: Row, ctx: ProcessContext) -> Result:
        """Process one row of the second stream."""
        raise NotImplementedError

    def on_timer(self, time: datetime, ctx: ProcessContext) -> Result:
        """Handle a timer of the current key that is due. `time` is the time that it was set for."""
        return None


class BroadcastProcessFunction(Function):
    """A function on a stream and a broadcast stream. A BroadcastState has the same contents on all subtasks.

    Broadcast states can be written only in `process_broadcast`, which every subtask runs for the same rows in the
    same order: it must be deterministic. On a keyed stream `process` also has keyed states and timers.
    """

    def process(self, row: Row, ctx: ProcessContext) -> Result:
        """Process one row of the stream; broadcast states can be read."""
        raise NotImplementedError

    def process_broadcast(self, row: Row, ctx: ProcessContext) -> Result:
        """Process one broadcast row; broadcast states can be written."""
        raise NotImplementedError

    def on_timer(self, time: datetime, ctx: ProcessContext) -> Result:
        """Handle a timer of the current key that is due. `time` is the time that it was set for."""
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
