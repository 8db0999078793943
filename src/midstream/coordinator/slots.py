"""The slots of the job: asked for, connected, lost."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from midstream.coordinator.effects import Effects
from midstream.protocol.messages import Peer, Register, SlotStatus, TaskMetrics, TaskRef

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(slots=True)
class Rate:
    """Totals of one task at two heartbeats, to tell what it does now."""

    at_ms: int
    metrics: TaskMetrics
    busy: float = 0.0
    backpressured: float = 0.0
    """Shares of the time between the last two heartbeats, 0 to 1."""


@dataclass(slots=True)
class Slot:
    id: int
    register: Register
    status: SlotStatus | None = None


class Slots:
    """Never more requests and slots together than the job needs."""

    def __init__(self, effects: Effects, needed: int) -> None:
        self.needed = needed
        self.live: dict[int, Slot] = {}
        self.rates: dict[TaskRef, Rate] = {}
        """Of the tasks of the current attempt."""
        self._effects = effects
        self._open: set[str] = set()
        self._requests = 0

    @property
    def complete(self) -> bool:
        return len(self.live) == self.needed

    def request_missing(self) -> None:
        while len(self.live) + len(self._open) < self.needed:
            request = f"slot-{self._requests}"
            self._requests += 1
            self._open.add(request)
            self._effects.request_slot(request)

    def request_failed(self, request: str) -> bool:
        """False: nobody waits for it."""
        if request not in self._open:
            return False
        self._open.discard(request)
        return True

    def connected(self, slot: int, register: Register) -> bool:
        """False: it was not asked for (any more)."""
        if register.request not in self._open or slot in self.live:
            return False
        self._open.discard(register.request)
        self.live[slot] = Slot(slot, register)
        return True

    def forget_requests(self) -> None:
        """Whoever still comes is not needed."""
        self._open.clear()

    def lost(self, slot: int) -> bool:
        return self.live.pop(slot, None) is not None

    def ids(self) -> tuple[int, ...]:
        """Slot ids; the i-th of them runs subtask i of every vertex."""
        return tuple(sorted(self.live))

    def peers(self) -> tuple[Peer, ...]:
        return tuple(Peer(s, self.live[s].register.host, self.live[s].register.port) for s in self.ids())

    def heard(self, slot: int, status: SlotStatus, attempt: int, now_ms: int) -> None:
        """A heartbeat. Totals of an older attempt are not mixed with those of this one."""
        if slot not in self.live:
            return
        self.live[slot].status = status
        if status.attempt != attempt:
            return
        for metrics in status.tasks:
            before = self.rates.get(metrics.task)
            rate = Rate(now_ms, metrics)
            if before is not None:
                span_ms = now_ms - before.at_ms
                if span_ms > 0:
                    rate.busy = _share(metrics.busy_ms - before.metrics.busy_ms, span_ms)
                    rate.backpressured = _share(metrics.backpressured_ms - before.metrics.backpressured_ms, span_ms)
                else:
                    rate.busy, rate.backpressured = before.busy, before.backpressured
            self.rates[metrics.task] = rate

    def check(self) -> None:
        assert len(self.live) + len(self._open) <= self.needed, (self.live, self._open, self.needed)


def _share(part_ms: int, whole_ms: int) -> float:
    return min(1.0, max(0.0, part_ms / whole_ms))
