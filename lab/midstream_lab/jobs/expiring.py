"""A process function whose states expire, in a simulated job: each call compares what it finds with a record of its own.

The record of a key has its rows and when each was written, without those that had expired at an earlier row: what a row
finds in the states is what the record has of the last `TTL_MS` of event time. For a row that may be late, sweeps may
have removed more; it must find the newest of the record.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import pyarrow as pa

from midstream.engine.core.elements import MIN_WATERMARK_US
from midstream.engine.operators.functions.function_operator import two_ports
from midstream.engine.operators.functions.process_context import instant_us
from midstream.engine.operators.functions.process_functions import CoProcessFunction, ProcessContext
from midstream.engine.operators.functions.process_operator import ProcessOperator
from midstream.engine.operators.row_conversion import Row
from midstream.engine.state.expiring_states import ExpiringState
from midstream.engine.state.keyed_states import ListState, MapState, ReducingState, ValueState
from midstream.engine.state.time_to_live import StateTtl
from midstream.simulation.outside import SOURCE_IDS
from midstream_lab.jobs.recorded_rows import SCHEMA, Outside

EXPIRING: Final = "expiring"
TTL_MS: Final = 60
_TTL: Final = StateTtl(TTL_MS / 1000)
_BY_CLOCK: Final = StateTtl(TTL_MS / 1000, by="clock")
_Record = list[tuple[int, int]]
"""When a row was written, and its id, in order."""


class Expiring(CoProcessFunction):
    """Forwards every row. `on_time`: the sources of which no row is late here."""

    record: ValueState[_Record | None] = ValueState()
    all_ids: ListState[int] = ListState(pa.int64())
    ids: ListState[int] = ListState(pa.int64(), ttl=_TTL)
    newest: ValueState[int | None] = ValueState(pa.int64(), ttl=_TTL)
    places: MapState[int, list[int]] = MapState(key=int, ttl=_TTL)
    together: ReducingState[list[int]] = ReducingState(lambda seen, more: seen + more, ttl=_TTL)
    lately: ListState[int] = ListState(ttl=_BY_CLOCK)

    def __init__(self, uid: str, outside: Outside, on_time: frozenset[int]) -> None:
        self._uid, self._outside, self._on_time = uid, outside, on_time

    def open(self, context: Any) -> None:
        self._outside.check_open(context)

    def process1(self, row: Row, ctx: ProcessContext) -> Row:
        self._outside.work(1)
        number = row["id"]
        if self._outside.poison:
            self._outside.check_poison([number])
        watermark_us = MIN_WATERMARK_US if ctx.watermark == datetime.min else instant_us(ctx.watermark)
        now_us = self._time_of(row, watermark_us)
        record = self._found(number, [each for each in self.record.value or [] if each[0] + TTL_MS * 1000 > now_us])
        lately = list(self.lately)
        all_ids = list(self.all_ids)
        if lately != all_ids[len(all_ids) - len(lately) :]:
            self._bug(number, f"{lately} by the clock, of {all_ids}")
        written_us = max(now_us, record[-1][0] if record else MIN_WATERMARK_US)
        self.ids.append(number)
        self.newest.value = number
        self.places[number] = [len(record)]
        self.together.add([number])
        self.lately.append(number)
        self.all_ids.append(number)
        self.record.value = [*record, (written_us, number)]
        return row

    process2 = process1

    def _time_of(self, row: Row, watermark_us: int) -> int:
        """Return the time of a call: that of its row or, if it is late, the watermark.

        Until the first watermark since a start, only the engine knows that before the restore; no row of `on_time` can be
        before it.
        """
        at_us = instant_us(row["ts"])
        if watermark_us > MIN_WATERMARK_US:
            return max(at_us, watermark_us)
        assert isinstance(self.ids, ExpiringState)
        now_us = self.ids._now_us
        if now_us < at_us or (now_us > at_us and row["id"] // SOURCE_IDS in self._on_time):
            self._bug(row["id"], f"{now_us} as its time, which is {at_us}")
        return now_us

    def _found(self, number: int, living: _Record) -> _Record:
        """Compare what the states hold with what lives of the record, and return what they hold."""
        ids = list(self.ids)
        if number // SOURCE_IDS not in self._on_time and len(ids) < len(living):
            living = living[len(living) - len(ids) :]
        expected = [each for _, each in living]
        newest = self.newest.value
        places = [*dict.fromkeys(reversed(expected))][::-1]  # a row may come twice, by two ways
        if (ids, list(self.places), newest) != (expected, places, expected[-1] if expected else None):
            self._bug(number, f"{ids}, {list(self.places)}, {newest} instead of {expected}")
        if (self.together.value is None) is not (not expected):
            self._bug(number, f"{self.together.value} instead of a reduction of {expected}")
        return living

    def _bug(self, number: int, what: str) -> None:
        self._outside.world.bug(f"{self._uid}: row {number} finds {what}")


def expiring(uid: str, outside: Outside, on_time: frozenset[int]) -> ProcessOperator:
    ports = two_ports((("key",), ("key",)), ("ts", "ts"), (SCHEMA, SCHEMA))
    return ProcessOperator(uid, Expiring(uid, outside, on_time), ports, SCHEMA, {})
