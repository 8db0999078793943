"""A reference for window operators: the same results, computed row by row in a few lines of plain Python.

It tracks the rows that arrived, which of them belong to a window, and how far event time has come for each key group.
So it can determine which rows must be late, which windows must be emitted by a watermark or by late rows, with which
rows in them, and up to which time a snapshot may record that windows have fired.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream_lab.jobs.days import DAYS
from midstream_lab.jobs.recorded_rows import time_ms
from midstream_lab.jobs.timed import GAP_MS, SIZE_MS, SLIDE_MS, TUMBLING_MS, due_us

SAMPLES: Final = 3
_BOUNDS_US: Final = {"window": (1000 * TUMBLING_MS, 1000 * TUMBLING_MS), "slide": (1000 * SIZE_MS, 1000 * SLIDE_MS)}
"""The size and the slide of windows of fixed size."""
_GAP_US: Final = 1000 * GAP_MS
Emission: TypeAlias = tuple[int, int, int, tuple[int, ...]]
"""The key, the start and the end in microseconds, and the sorted ids of the rows in the window."""
FiredWindows: TypeAlias = tuple[int, int, dict[int, bool]]
"""For a key: its key group, how far that had come, and whether each window that is due later was emitted, by when it
is due."""
Row: TypeAlias = tuple[int, int, int]
"""The id, the key and the key group of a row."""


class WindowReference:
    """The reference for one subtask. `kind`: "window", "slide", "session" or one of `DAYS`. `allowed_us`: the allowed lateness. `gap_us`: the
    gap of the session of each row.
    """

    def __init__(
        self, kind: str, allowed_us: int, key_groups: range, gap_us: Callable[[int], int] = lambda _: _GAP_US
    ) -> None:
        self._gap_us = gap_us
        self._kind = kind
        self._allowed_us = allowed_us
        self._marks = dict.fromkeys(key_groups, MIN_WATERMARK_US)
        self._held: dict[tuple[int, int], list[_Part]] = {}
        """The rows or sessions that can still change, by key group and key."""

    @property
    def lowest_us(self) -> int:
        """The lowest event time of all key groups."""
        return min(self._marks.values(), default=MIN_WATERMARK_US)

    # ---- rows

    def restore(self, marks_us: Mapping[int, int], parts: Iterable[tuple[int, int, int, int, list[int]]]) -> None:
        """Restore state. `parts`: key group, key, start and end in microseconds (arbitrary for panes), and ids."""
        self._marks.update(marks_us)
        for group, key, start_us, end_us, ids in parts:
            held = self._held.setdefault((group, key), [])
            if self._kind != "session":
                for row in ids:
                    held.append(_Part(time_ms(row) * 1000, 0, Counter((row,))))
            elif end_us + self._allowed_us > self._marks[group]:
                _put(held, _Part(start_us, end_us, Counter(ids)))

    def take(self, rows: Iterable[Row]) -> tuple[Counter[int], Counter[Emission]]:
        """Process a batch, and return the ids of late rows and the windows that must be emitted immediately."""
        return self.take_combined(((row,), key, group) for row, key, group in rows)

    def take_combined(
        self, combined: Iterable[tuple[Sequence[int], int, int]]
    ) -> tuple[Counter[int], Counter[Emission]]:
        """Do the same for a combined batch, each row of which has the ids of the rows that it stands for.

        These are in one pane, and so they are late together; or in one session, and then any of them in time is enough.
        """
        late: Counter[int] = Counter()
        emitted: dict[Emission, None] = {}
        touched: dict[tuple[int, int], list[_Part]] = {}
        for ids, key, group in combined:
            held = self._held.setdefault((group, key), [])
            times_us = [time_ms(row) * 1000 for row in ids]
            ends_us = (time_us + self._gap_us(row) for row, time_us in zip(ids, times_us, strict=True))
            part = _Part(min(times_us), max(ends_us), Counter(ids))
            if self._is_late(part, held, self._marks[group]):
                late.update(ids)
                continue
            if self._kind == "session":
                _put(held, part)
            else:
                held.append(part)
            touched.setdefault((group, key), []).append(part)
        for (group, key), parts in touched.items():
            mark_us = self._marks[group]
            still_us = range(
                mark_us - self._allowed_us + 1, mark_us + 1
            )  # windows that have fired and still accept rows
            for start_us, end_us, ids in self._windows(self._held[group, key], still_us):
                if any(start_us <= part.start_us < end_us for part in parts):
                    emitted[key, start_us, end_us, ids] = None
        return late, Counter(emitted.keys())

    def _is_late(self, part: _Part, held: Iterable[_Part], mark_us: int) -> bool:
        """Whether a row is late: no window accepts it any more or, for sessions, its whole session would be late."""
        if self._kind == "session":
            end_us = max([part.end_us, *(other.end_us for other in held if other.touches(part))])
        else:
            end_us = self._end_us(part)
        return due_us(self._kind, end_us) + self._allowed_us <= mark_us

    # ---- event time

    def due(self, watermark_us: int) -> Counter[Emission]:
        """Return the windows that must be emitted by this watermark and were not emitted before."""
        return Counter(
            (key, start_us, end_us, ids)
            for (group, key), held in self._held.items()
            for start_us, end_us, ids in self._windows(held, range(self._marks[group] + 1, watermark_us + 1))
        )

    def reach(self, watermark_us: int) -> None:
        """Advance event time, and drop everything that cannot change any more."""
        for group, mark_us in self._marks.items():
            self._marks[group] = max(mark_us, watermark_us)
        for place in list(self._held):
            over_us = self._marks[place[0]] - self._allowed_us
            left = [part for part in self._held[place] if due_us(self._kind, self._end_us(part)) > over_us]
            if left:
                self._held[place] = left
            else:
                del self._held[place]

    def fired(self, emitted: Counter[Emission]) -> list[FiredWindows]:
        """Return for each key how far its key group had come, and which of its later windows have been emitted.

        `emitted`: the windows emitted since the last watermark for which everything had fired.
        """
        found = []
        for (group, key), held in self._held.items():
            before_us = self._marks[group]
            later_us = range(before_us + 1, MAX_WATERMARK_US)
            windows = {window: (key, *window) in emitted for window in self._windows(held, later_us)}
            found.append((group, before_us, {due_us(self._kind, w[1]): fired for w, fired in windows.items()}))
        return found

    def _end_us(self, part: _Part) -> int:
        """Return the end of the last window of a part."""
        if self._kind == "session":
            return part.end_us
        return self._windows_at(part.start_us)[-1][1]

    def _windows_at(self, time_us: int) -> list[tuple[int, int]]:
        """Return the start and the end of each window of fixed size to which a time belongs, ascending."""
        if self._kind in DAYS:
            return DAYS[self._kind].windows(time_us)
        size_us, slide_us = _BOUNDS_US[self._kind]
        last_us = time_us // slide_us * slide_us
        starts_us = range(last_us - size_us + slide_us, last_us + 1, slide_us)
        return [(start_us, start_us + size_us) for start_us in starts_us]

    def _windows(self, held: Iterable[_Part], at_us: range) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Yield the start, the end and the rows of each window of one key that is due at one of `at_us`."""
        if self._kind == "session":
            for part in held:
                if due_us(self._kind, part.end_us) in at_us:
                    yield part.start_us, part.end_us, tuple(sorted(part.ids.elements()))
            return
        if not at_us:
            return
        ids: dict[tuple[int, int], list[int]] = {}
        for part in held:
            for bounds in self._windows_at(part.start_us):
                if due_us(self._kind, bounds[1]) in at_us:
                    ids.setdefault(bounds, []).extend(part.ids.elements())
        for (start_us, end_us), rows in ids.items():
            yield start_us, end_us, tuple(sorted(rows))


class _Part:
    """A row, or a session."""

    __slots__ = ("end_us", "ids", "start_us")

    def __init__(self, start_us: int, end_us: int, ids: Counter[int]) -> None:
        self.start_us = start_us
        self.end_us = end_us
        self.ids = ids

    def touches(self, other: _Part) -> bool:
        return self.start_us <= other.end_us and self.end_us >= other.start_us


def _put(sessions: list[_Part], part: _Part) -> None:
    """Add a session to those of a key, and merge it with those that it touches."""
    joined = [other for other in sessions if other.touches(part)]
    merged = _Part(
        min([part.start_us, *(other.start_us for other in joined)]),
        max([part.end_us, *(other.end_us for other in joined)]),
        sum((other.ids for other in joined), part.ids.copy()),
    )
    sessions[:] = [other for other in sessions if other not in joined]
    sessions.append(merged)


def wrong_marks(fired_windows: Iterable[FiredWindows], marks_us: Mapping[int, int]) -> Iterator[str]:
    """Yield complaints about the progress of each key group in a snapshot."""
    for group, before_us, windows in fired_windows:
        mark_us = marks_us.get(group, MIN_WATERMARK_US)
        if mark_us < before_us:
            yield f"key group {group} is at {mark_us}, and had come to {before_us}"
        for at_us, has_fired in windows.items():
            if has_fired != (at_us <= mark_us):
                has = "has" if has_fired else "has not"
                yield f"key group {group} is at {mark_us}, and its window that is due at {at_us} {has} fired"


def difference(found: Counter[Emission], due: Counter[Emission]) -> str:
    """Describe how the emitted windows differ from those that are due; "" if they do not."""
    if found == due:
        return ""
    lacking, surplus = sorted((due - found).elements()), sorted((found - due).elements())
    return f"emits {surplus[:SAMPLES]} ({len(surplus)}) instead of {lacking[:SAMPLES]} ({len(lacking)}) (key, start, end, ids)"
