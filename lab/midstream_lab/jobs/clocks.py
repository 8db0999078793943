"""A process function with timers of event time and of the wall clock together, and the rules for pending timers.

Every row is held in the state `WAITING`, by the time for which it waits. In every checkpoint, each pending timer must
belong to held rows, and each held row must have a timer.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

import pyarrow as pa

from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.errors import InvariantError
from midstream.engine.core.interfaces import Timer
from midstream.engine.operators.base import OperatorContext, Output
from midstream.engine.operators.functions.function_operator import two_ports
from midstream.engine.operators.functions.process_context import instant_us
from midstream.engine.operators.functions.process_functions import CoProcessFunction, ProcessContext
from midstream.engine.operators.functions.process_operator import ProcessOperator
from midstream.engine.operators.row_conversion import Row
from midstream.engine.state.keyed_states import MapState, ValueState
from midstream.engine.state.state_parts import StatePart
from midstream_lab.jobs.key_types import KeyLayout, stored_keys
from midstream_lab.jobs.recorded_rows import Outside
from midstream_lab.jobs.state_contents import newest
from midstream_lab.jobs.timed import DELAY_US, WAITING

EVENT_TIMERS: Final = "timers:event"
CLOCK_TIMERS: Final = "timers:processing"
WAITING_PART: Final = f"map:{WAITING}"
DEADLINE_PART: Final = "value:deadline"
PARTS: Final = (EVENT_TIMERS, CLOCK_TIMERS, WAITING_PART, DEADLINE_PART)
_EVENT: Final = timedelta(microseconds=DELAY_US)
"""The delay added to event times. Event times and the wall clock have whole milliseconds, so timers of the two differ."""
_MS: Final = timedelta(milliseconds=1)
_FAR: Final = timedelta(hours=1)
_BY_EVENT: Final = "event"
_BY_CLOCK: Final = "clock"
_BY_DEADLINE: Final = ("deadline", None)


class Clocks(CoProcessFunction):
    """Holds every row until event time has passed it, until the wall clock has, or until the deadline of its key.

    There is one deadline per key, which each row that waits for it sets again. A timer of event time ends it early.
    """

    waiting: MapState[tuple[str, datetime | None], list[Row]] = MapState()
    deadline: ValueState[datetime | None] = ValueState(pa.timestamp("us"))

    def __init__(self, outside: Outside) -> None:
        self._outside = outside

    def open(self, context: OperatorContext) -> None:
        self._outside.check_open(context)

    def process1(self, row: Row, ctx: ProcessContext) -> None:
        self._outside.work(1)
        if self._outside.poison:
            self._outside.check_poison([row["id"]])
        number = row["id"]
        if number % 3 == 0:
            at = row["ts"] + _EVENT
            self._wait((_BY_EVENT, at), row)
            if number % 5 == 0:  # the timer is set, deleted, and set again
                ctx.timers.event_time(at)
                ctx.timers.delete_event_time(at)
            ctx.timers.event_time(at)
        elif number % 3 == 1:
            at = ctx.now + _MS * (number % 7) + (_FAR if number % 4 == 0 else 0 * _MS)
            self._wait((_BY_CLOCK, at), row)
            ctx.timers.processing_time(at)
        else:
            self._drop_deadline(ctx)
            self.deadline.value = at = ctx.now + _MS * (2 + number % 4)
            self._wait(_BY_DEADLINE, row)
            ctx.timers.processing_time(at)

    process2 = process1

    def _wait(self, name: tuple[str, datetime | None], row: Row) -> None:
        self.waiting.setdefault(name, []).append(row)

    def _drop_deadline(self, ctx: ProcessContext) -> None:
        before = self.deadline.value
        if before is not None and (_BY_CLOCK, before) not in self.waiting:
            ctx.timers.delete_processing_time(before)
        self.deadline.clear()

    def on_timer(self, time: datetime, ctx: ProcessContext) -> Iterator[Row]:
        self._outside.work(1)
        is_event = time.microsecond % 1000 != 0
        found = self.waiting.pop((_BY_EVENT if is_event else _BY_CLOCK, time), [])
        if is_event:
            if ctx.watermark < time:
                self._bug(ctx, f"a timer of {time} fires when event time has come to {ctx.watermark}")
            self._drop_deadline(ctx)
            found += self.waiting.pop(_BY_DEADLINE, [])
        else:
            if ctx.now < time and ctx.watermark != datetime.max:
                self._bug(ctx, f"a timer of {time} fires at {ctx.now}, before the end")
            if self.deadline.value == time:
                self.deadline.clear()
                found += self.waiting.pop(_BY_DEADLINE, [])
        if not found:
            self._bug(ctx, f"a timer fires at {time}, where nothing waits")
        yield from found

    def _bug(self, ctx: ProcessContext, what: str) -> None:
        self._outside.world.bug(f"key {ctx.key}: {what}")


class Punctual(ProcessOperator):
    """Checks that, after a restore, the operator has requested a call by its earliest wall-clock timer."""

    def open(self, context: OperatorContext, out: Output) -> None:
        self._called_ms: list[int] = []

        def call_at(time_ms: int, mail: Callable[[], None]) -> Timer:
            self._called_ms.append(time_ms)
            return context.call_at(time_ms, mail)

        super().open(replace(context, call_at=call_at), out)

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        super().restore(parts)
        if CLOCK_TIMERS in parts:
            tables = newest(CLOCK_TIMERS, [chunk.table for chunk in parts[CLOCK_TIMERS].chunks])
            due_ms = -(
                -min((time_us for table in tables for time_us in to_list(table.column("time_us"))), default=0) // 1000
            )
            if due_ms and not any(called_ms <= due_ms for called_ms in self._called_ms):
                raise InvariantError(f"a timer is due at {due_ms} ms, and nothing will wake it: {self._called_ms}")


def clocks(uid: str, outside: Outside, layout: KeyLayout) -> ProcessOperator:
    ports = two_ports((layout.keys, layout.keys), ("ts", "ts"), (layout.schema, layout.schema))
    return Punctual(uid, Clocks(outside), ports, layout.schema, {})


def wrong_timers(kind: str, tables: Mapping[str, pa.Table]) -> Iterator[str]:
    """Yield complaints about one subtask of an operator "timer", "alarm" or "clocks", given the tables of its parts."""
    due: dict[str, set[tuple[Any, int]]] = {EVENT_TIMERS: set(), CLOCK_TIMERS: set()}
    if WAITING_PART in tables:
        table = tables[WAITING_PART]
        names = map(pickle.loads, to_list(table.column("namespace")))
        for key, name in zip(stored_keys(table.column("key")), names, strict=True):
            if kind != "clocks":
                due[EVENT_TIMERS if kind == "timer" else CLOCK_TIMERS].add((key, instant_us(name)))
            elif name != _BY_DEADLINE:
                due[EVENT_TIMERS if name[0] == _BY_EVENT else CLOCK_TIMERS].add((key, instant_us(name[1])))
    if DEADLINE_PART in tables:
        table = tables[DEADLINE_PART]
        at_us = to_list(table.column("value").cast(pa.int64()))
        due[CLOCK_TIMERS].update(zip(stored_keys(table.column("key")), at_us, strict=True))
    for part, expected in due.items():
        pending = []
        if part in tables:
            table = tables[part]
            pending = list(zip(stored_keys(table.column("key")), table.column("time_us").to_pylist(), strict=True))
        if len(pending) != len(expected) or set(pending) != expected:
            missing, surplus = sorted(expected.difference(pending)), sorted(set(pending) - expected)
            yield f"{part[7:]} timers (key, µs): {missing[:5]} are not pending, {surplus[:5]} are for nothing"
