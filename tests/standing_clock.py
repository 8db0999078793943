"""A clock in which time passes when the test says so."""

from __future__ import annotations


class StandingClock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def passes(self, seconds: float) -> None:
        self.now_s += seconds

    def now_ms(self) -> int:
        return round(self.now_s * 1000)

    def monotonic_s(self) -> float:
        return self.now_s

    own_core_s = stopwatch_s = processor_s = monotonic_s
    core_share = 1.0
