"""When the entries of a process function's states expire: the times of its calls, and when all keys are swept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.operators.base import OperatorContext
from midstream.engine.state.expiring_states import ExpiringState
from midstream.engine.state.keyed_states import State


class StateExpiry:
    """Expires the entries of those of an operator's states that have a time to live."""

    def __init__(self, states: Iterable[State], context: OperatorContext) -> None:
        self._states = [state for state in states if isinstance(state, ExpiringState)]
        self._clock, self._slice_s = context.clock, context.slice_s
        self._event_time_us = MIN_WATERMARK_US if context.watermark_us == MAX_WATERMARK_US else context.watermark_us
        """The watermark, also that before a restore, but not that of the end: the end of the input makes nothing expire."""
        self._clock_us = MIN_WATERMARK_US

    def __bool__(self) -> bool:
        return bool(self._states)

    def restored(self) -> None:
        for state in self._states:
            state.restored()

    def read_clock(self) -> None:
        """Read the clock for the next calls; one that is set back does not give entries more time."""
        self._clock_us = max(self._clock_us, self._clock.now_ms() * 1000)

    def begin_call(self, event_time_us: int) -> None:
        """Remove what has expired of the current key before a call for its row or timer."""
        for state in self._states:
            state.begin_call(event_time_us if state.ttl.by == "event_time" else self._clock_us)

    def before_each(self, handler: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return a function's method for the rows of a batch, before each call of which entries expire."""
        self.read_clock()
        begin_call, watermark_us = self.begin_call, self._event_time_us

        def handle(row: Any, context: Any) -> Any:
            begin_call(watermark_us if context.time_us is None else max(watermark_us, context.time_us))
            return handler(row, context)

        return handle

    @property
    def event_time_us(self) -> int:
        return self._event_time_us

    def advance_watermark(self, watermark_us: int) -> bool:
        """Sweep, once the timers up to a watermark have fired. Returns False if the slice was used up first."""
        if watermark_us != MAX_WATERMARK_US:
            self._event_time_us = max(self._event_time_us, watermark_us)
        return self.sweep()

    def sweep(self) -> bool:
        """Remove what has expired of all keys. Returns False if the slice was used up first."""
        if not self._states:
            return True
        self.read_clock()
        end_s = self._clock.monotonic_s() + self._slice_s
        return all(
            state.sweep(
                self._event_time_us if state.ttl.by == "event_time" else self._clock_us,
                lambda: self._clock.monotonic_s() >= end_s,
            )
            for state in self._states
        )

    def next_sweep_us(self) -> int | None:
        """Return when the next sweep is due by the clock; None if there is none."""
        due_us = [state.next_sweep_us() for state in self._states if state.ttl.by == "clock"]
        return min((each for each in due_us if each is not None), default=None)
