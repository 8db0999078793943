"""Event time: which column it is, and how far it has come.

A watermark says that no row at or below it will follow. Here it is the largest event time seen,
less the strategy's delay, less one microsecond (a row with that same time may still come).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import pyarrow as pa

from midstream.core.config import Duration, duration_us
from midstream.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.core.errors import ConfigError
from midstream.core.seams import Timer
from midstream.operators.base import Operator, OperatorContext, Output
from midstream.operators.event_time import EventTime

LATE_LOOK_S = 0.1
"""A timer that is later than this has waited for the task's output, not for its turn."""


@dataclass(frozen=True, slots=True)
class WatermarkStrategy:
    """How far out of order rows may be, and when a silent input stops holding the others back.

    Make one with `monotonous()` or `bounded()`.
    """

    delay_us: int
    """Rows may come this much later than the latest one seen."""
    idle_after_us: int | None = None
    """Without rows for so long (wall clock) the stream counts as idle; None: never."""

    @staticmethod
    def monotonous(idle_after: Duration | None = None) -> WatermarkStrategy:
        """Event times never go back (within one subtask of the stream)."""
        return WatermarkStrategy.bounded(0, idle_after)

    @staticmethod
    def bounded(max_delay: Duration, idle_after: Duration | None = None) -> WatermarkStrategy:
        """A row is at most `max_delay` older than the newest row before it; what is older is late."""
        strategy = WatermarkStrategy(
            delay_us=duration_us(max_delay, "max_delay"),
            idle_after_us=None if idle_after is None else duration_us(idle_after, "idle_after"),
        )
        if strategy.idle_after_us is not None and strategy.idle_after_us < 1000:
            raise ConfigError(f"idle_after: {idle_after!r} is too short; give at least 1 ms")
        return strategy


class TimestampsOperator(Operator):
    """Makes `column` the event time of the stream and emits watermarks; the rows pass unchanged.

    Raises SchemaError at once when `schema` has no such column or it is not a timestamp, and
    JobError when a row has no event time.
    """

    makes_watermarks = True

    def __init__(self, name: str, column: str, strategy: WatermarkStrategy, schema: pa.Schema) -> None:
        self.schema = schema
        self._time = EventTime(column, schema, f"operator {name!r}")
        self._strategy = strategy
        self._watermark_us = MIN_WATERMARK_US
        self._idle = False
        self._ended = False
        self._timer: Timer | None = None
        self._last_row_s = 0.0
        self._look_s = 0.0
        """When the timer is to ring. Monotonic, like the above: the wall clock may be set."""
        self._context: OperatorContext
        self._out: Output

    def open(self, context: OperatorContext, out: Output) -> None:
        self._context = context
        self._out = out
        if self._strategy.idle_after_us is not None:
            self._last_row_s = context.clock.monotonic_s()
            self._watch(self._last_row_s)

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        if batch.num_rows == 0:
            return
        times = self._time.native(batch)
        self._stir()
        self._out.emit(batch)
        watermark_us = self._time.to_us(int(times.max())) - self._strategy.delay_us - 1
        watermark_us = min(watermark_us, MAX_WATERMARK_US - 1)  # the very last one says that the stream has ended
        if watermark_us > self._watermark_us:
            self._watermark_us = watermark_us
            self._out.watermark(watermark_us)

    def end_input(self, port: int) -> None:
        self._ended = True
        self._unwatch()

    def close(self) -> None:
        self._ended = True
        self._unwatch()

    # ---- idleness ----

    def _stir(self) -> None:
        if self._strategy.idle_after_us is None:
            return
        self._last_row_s = self._context.clock.monotonic_s()
        if self._idle:
            self._idle = False
            self._out.idle(False)
            self._watch(self._last_row_s)

    def _watch(self, since_s: float) -> None:
        assert self._strategy.idle_after_us is not None
        clock = self._context.clock
        self._look_s = since_s + self._strategy.idle_after_us / 1e6
        delay_ms = max(1, ceil((self._look_s - clock.monotonic_s()) * 1000))
        self._timer = self._context.call_at(clock.now_ms() + delay_ms, self._check_idle)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_idle(self) -> None:
        """One timer runs at a time; it looks at the last row and goes to sleep again if there was one since."""
        assert self._strategy.idle_after_us is not None
        self._timer = None
        if self._ended or self._idle:
            return
        now_s, idle_after_s = self._context.clock.monotonic_s(), self._strategy.idle_after_us / 1e6
        if now_s < self._last_row_s + idle_after_s:
            self._watch(self._last_row_s)
            return
        if now_s > self._look_s + max(idle_after_s / 4, LATE_LOOK_S):
            # The task could not get here, for back-pressure: rows may wait that it could not take. They
            # would be late if event time went on without them.
            self._watch(now_s)
            return
        self._idle = True
        self._out.idle(True)
