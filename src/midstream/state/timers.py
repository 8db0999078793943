"""Timers per key: each (time, key) once, due in order of time, and of those by when they were set."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any, TypeAlias

TimerRow: TypeAlias = tuple[int, Any]
"""Time in microseconds, key."""


class TimerQueue:
    """Deleting is lazy: an entry of the heap counts only while `_live` has its number."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Any]] = []
        self._live: dict[TimerRow, int] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, timer: TimerRow) -> bool:
        return timer in self._live

    def add(self, time_us: int, key: Any) -> None:
        """Setting what is set already changes nothing."""
        if (time_us, key) in self._live:
            return
        self._numbers += 1
        self._live[time_us, key] = self._numbers
        heapq.heappush(self._heap, (time_us, self._numbers, key))

    def delete(self, time_us: int, key: Any) -> None:
        """Deleting what is not set changes nothing."""
        self._live.pop((time_us, key), None)
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [(time, number, key) for (time, key), number in self._live.items()]
            heapq.heapify(self._heap)

    def next_us(self) -> int | None:
        """When the next timer is due."""
        while self._heap:
            time_us, number, key = self._heap[0]
            if self._live.get((time_us, key)) == number:
                return time_us
            heapq.heappop(self._heap)
        return None

    def pop(self) -> TimerRow:
        """The timer of `next_us`, which is not None."""
        time_us, _, key = heapq.heappop(self._heap)
        del self._live[time_us, key]
        return time_us, key

    def freeze(self) -> list[TimerRow]:
        """All timers as they are now, in the order in which they were set."""
        return list(self._live)

    def thaw(self, rows: Iterable[TimerRow]) -> None:
        for time_us, key in rows:
            self.add(time_us, key)
