"""Windows in plain Python, a row at a time, as Flink's WindowOperator does it; late windows fire once per batch.

Unlike in Flink, a session is due when the watermark has reached its end, since a row exactly there still belongs to it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

MIN = -(2**63)

Row = tuple[Any, int, Any]
"""Key, event time, value."""


@dataclass
class Window:
    start: int
    end: int
    rows: list[tuple[int, Row]] = field(default_factory=list)
    """Each with the number of its arrival."""


class Oracle:
    """`watermarks` per key: keys of different subtasks may be at different ones. All times in one unit. `result`: what a
    window emits."""

    takes_its_end = False
    """Whether a row exactly at the end of a window still belongs to it."""

    def __init__(self, lateness: int) -> None:
        self.lateness = lateness
        self.result = aggregates_of
        self.watermarks: dict[Any, int] = defaultdict(lambda: MIN)
        self.windows: dict[Any, list[Window]] = defaultdict(list)
        self.out: list[tuple[Any, ...]] = []
        self.late: list[Row] = []
        self._arrivals = 0

    def process(self, rows: list[Row]) -> None:
        fire: dict[int, tuple[Any, Window]] = {}
        for row in rows:
            self._arrivals += 1
            touched = self.assign(row)
            if not touched:
                self.late.append(row)
            for window in touched:
                window.rows.append((self._arrivals, row))
                fire[id(window)] = (row[0], window)
        for key, window in fire.values():
            alive = any(window is other for other in self.windows[key])
            if alive and self.due(window.end) <= self.watermarks[key]:
                self.out.append(self.result(key, window))

    def assign(self, row: Row) -> list[Window]:
        raise NotImplementedError

    def due(self, end: int) -> int:
        """Return the watermark at which a window that ends at `end` fires: no row of it can follow."""
        return end if self.takes_its_end else end - 1

    def is_late(self, key: Any, end: int) -> bool:
        return self.due(end) + self.lateness <= self.watermarks[key]

    def advance(self, key: Any, watermark: int) -> None:
        before = self.watermarks[key]
        if watermark <= before:
            return
        self.watermarks[key] = watermark
        for window in self.windows[key]:
            if before < self.due(window.end) <= watermark:
                self.out.append(self.result(key, window))
        self.windows[key] = [window for window in self.windows[key] if not self.is_late(key, window.end)]


class SlidingOracle(Oracle):
    def __init__(self, size: int, slide: int, offset: int, lateness: int) -> None:
        super().__init__(lateness)
        self.size, self.slide, self.offset = size, slide, offset

    def assign(self, row: Row) -> list[Window]:
        key, time, _ = row
        start = time - (time - self.offset) % self.slide
        found = []
        while start > time - self.size:
            if not self.is_late(key, start + self.size):
                window = next((w for w in self.windows[key] if w.start == start), None)
                if window is None:
                    window = Window(start, start + self.size)
                    self.windows[key].append(window)
                found.append(window)
            start -= self.slide
        return found


class SessionOracle(Oracle):
    takes_its_end = True

    def __init__(self, gap: int, lateness: int) -> None:
        super().__init__(lateness)
        self.gap = gap

    def assign(self, row: Row) -> list[Window]:
        key, time, _ = row
        touching = [w for w in self.windows[key] if w.start <= time + self.gap and w.end >= time]
        start, end = min([time, *(w.start for w in touching)]), max([time + self.gap, *(w.end for w in touching)])
        if self.is_late(key, end):
            return []
        merged = Window(start, end, [row for w in touching for row in w.rows])
        self.windows[key] = [w for w in self.windows[key] if w not in touching] + [merged]
        return [merged]


def aggregates_of(key: Any, window: Window) -> tuple[Any, ...]:
    """key, start, end, count, sum, min, max, mean, first, last"""
    rows = [row for _, row in sorted(window.rows, key=lambda numbered: numbered[0])]
    values = [value for _, _, value in rows if value is not None]
    first = min(rows, key=lambda row: row[1])[2]
    last = max(reversed(rows), key=lambda row: row[1])[2]
    return (
        key,
        window.start,
        window.end,
        len(rows),
        sum(values),
        min(values, default=None),
        max(values, default=None),
        sum(values) / len(values) if values else None,
        first,
        last,
    )
