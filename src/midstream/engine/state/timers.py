"""Timers per key: each (time, key) is set once; timers are due in order of time, then in the order they were set."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import islice
from operator import itemgetter
from typing import Any, Final, TypeAlias

from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.state.changelog import GONE, Changelog

TimerRow: TypeAlias = tuple[int, Any]
"""The time in microseconds, and the key."""

_Entry: TypeAlias = tuple[int, int, Any]
"""The time, the number and the key; timers of the same time are due in the order of their numbers."""
_TIME: Final = itemgetter(0)

STRETCH_BITS: Final = 22
"""Timers of 2^22 µs, some four seconds, form a stretch, which is unordered until the first of them is due."""


LAST_STRETCH: Final = MAX_WATERMARK_US >> STRETCH_BITS
"""Its timers are never spilled: the end of time marks removed rows."""
NEVER_US: Final = 1 << 63
"""Later than any timer."""


class TimerQueue:
    """The timers of one kind, except those that are spilled; a timer that is set again may be here too. Deletion is lazy: a
    deleted timer stays in its list until it would be next, or until its stretch is cleaned, as half of it may be deleted.
    """

    def __init__(self) -> None:
        self._live: dict[TimerRow, int] = {}
        """The number of each timer that is set, in their order. One that is set again after it was deleted has another."""
        self._numbers = 0
        self.log = Changelog(self._live)
        self._opened = (MIN_WATERMARK_US >> STRETCH_BITS) - 1
        self._sorted: list[TimerRow] = []
        """The timers of the stretch `_opened` when it was opened, those that are due first at the end."""
        self._sorted_number = 0
        """Timers with larger numbers were set after the stretch was opened."""
        self._heap: list[_Entry] = []
        """The entries of those timers, and of timers of earlier stretches."""
        self._closed: dict[int, list[TimerRow]] = {}
        """The timers of later stretches, some twice. Most timers are here, so they have no entries, which would take memory."""
        self._stretches: list[int] = []
        """A heap of the keys of `_closed`, and of some that it no longer has."""
        self._dead: dict[int, int] = {}
        """An upper bound for the number of invalid timers, by stretch; the key `_opened` covers the heap too."""
        self.first_spilled_us = NEVER_US
        """When the first of the spilled timers is due."""
        self.load: Callable[[int], None]
        """Restores spilled timers that are due by a time, some of the first ones at least."""
        self.deleted: set[TimerRow] = set()
        """Timers that have been deleted and may be spilled, until their rows are removed."""
        self.refused: list[TimerRow] = []
        """Attempts to set timers after the end that are not objects and may be spilled, until they are looked up."""
        self.dropped = 0
        """The number of other attempts after the end."""

    def __len__(self) -> int:
        return len(self._live)

    def add(self, time_us: int, key: Any) -> None:
        """Set a timer. Setting one that is already set changes nothing."""
        timer = time_us, key
        number = self._numbers + 1
        if self._live.setdefault(timer, number) != number:
            return
        self._numbers = self.log.changed[timer] = number
        stretch = time_us >> STRETCH_BITS
        if stretch <= self._opened:
            heapq.heappush(self._heap, (time_us, number, key))
        elif stretch in self._closed:
            self._closed[stretch].append(timer)
        else:
            self._closed[stretch] = [timer]
            heapq.heappush(self._stretches, stretch)

    def delete(self, time_us: int, key: Any) -> None:
        """Delete a timer. Deleting one that is not set changes nothing."""
        timer = time_us, key
        if time_us >= self.first_spilled_us:
            self.deleted.add(timer)
        if self._live.pop(timer, None) is None:
            return
        self.log.changed[timer] = GONE
        stretch = max(time_us >> STRETCH_BITS, self._opened)
        is_opened = stretch == self._opened
        held = len(self._sorted) + len(self._heap) if is_opened else len(self._closed[stretch])
        dead = self._dead[stretch] = self._dead.get(stretch, 0) + 1
        if 2 * dead > held:
            self._clean(stretch)

    def drop(self, time_us: int, key: Any) -> None:
        """Count an attempt to set a timer after the end, unless it is set already."""
        timer = time_us, key
        if timer in self._live:
            return
        if time_us < self.first_spilled_us or timer in self.deleted:
            self.dropped += 1
        else:
            self.refused.append(timer)

    def _clean(self, stretch: int) -> None:
        del self._dead[stretch]
        live = self._live
        if stretch == self._opened:
            self._sorted = [timer for timer in self._sorted if live.get(timer, NEVER_US) <= self._sorted_number]
            self._heap = [entry for entry in self._heap if live.get((entry[0], entry[2])) == entry[1]]
            heapq.heapify(self._heap)
            return
        left = self._closed[stretch] = self._valid(self._closed[stretch])  # in its place among the others
        if not left:
            del self._closed[stretch]
            if len(self._stretches) > 2 * len(self._closed) + 64:
                self._stretches = sorted(self._closed)

    def _valid(self, timers: list[TimerRow]) -> list[TimerRow]:
        """Return the timers of a closed stretch that are set, each where it was set last."""
        return [timer for timer in dict.fromkeys(reversed(timers)) if timer in self._live][::-1]

    def _open(self, until_us: int) -> bool:
        """Open the first closed stretch; return False if there is none that begins by `until_us`."""
        while self._stretches and self._stretches[0] << STRETCH_BITS <= until_us:
            stretch = heapq.heappop(self._stretches)
            if stretch in self._closed:
                self._dead.pop(self._opened, None)
                timers = self._closed.pop(stretch)
                if self._dead.pop(stretch, 0):
                    timers = self._valid(timers)
                timers.sort(key=_TIME)
                timers.reverse()
                self._opened, self._sorted, self._sorted_number = stretch, timers, self._numbers
                return True
        return False

    def _first(self, until_us: int) -> TimerRow | None:
        """Return the next timer here; None if no stretch that begins by `until_us` has one."""
        while True:
            if self._sorted and (not self._heap or self._sorted[-1][0] <= self._heap[0][0]):
                timer = self._sorted[-1]
                if self._live.get(timer, NEVER_US) <= self._sorted_number:
                    return timer
                self._sorted.pop()
            elif self._heap:
                time_us, number, key = self._heap[0]
                timer = time_us, key
                if self._live.get(timer) == number:
                    return timer
                heapq.heappop(self._heap)
            elif not self._open(until_us):
                return None

    def next_us(self) -> int | None:
        """Return when the next timer is due; None if none is set."""
        timer = self._first(MAX_WATERMARK_US)
        first_us = self.first_spilled_us if timer is None else min(timer[0], self.first_spilled_us)
        return None if first_us == NEVER_US else first_us

    def soonest_keys(self, number: int) -> list[Any]:
        """Return up to `number` keys, in any order: most of them have the timers that are due next."""
        return [key for *_, key in (*self._sorted[-number:], *self._heap[:number])][:number]

    def pop(self, until_us: int) -> TimerRow | None:
        """Remove and return the next timer if it is due by then."""
        while True:
            timer = self._first(until_us)
            if self.first_spilled_us <= (until_us if timer is None else min(until_us, timer[0])):
                self._load_first()
                continue
            if timer is None or timer[0] > until_us:
                return None
            if self._sorted and self._sorted[-1] is timer:
                self._sorted.pop()
            else:
                heapq.heappop(self._heap)
            del self._live[timer]
            self.log.changed[timer] = GONE
            return timer

    def _load_first(self) -> None:
        """Restore the first of the spilled timers, if there are not too many all of their stretch."""
        self.load(((self.first_spilled_us >> STRETCH_BITS) + 1 << STRETCH_BITS) - 1)

    @property
    def closed_timers(self) -> int:
        """About how many timers `pop_late` could remove."""
        return max(0, len(self._live) - len(self._sorted) - len(self._heap))

    def pop_late(self, number: int) -> list[TimerRow]:
        """Remove and return up to about `number` timers of the newest stretches, which as a rule are due last. Timers that
        may be due now stay.
        """
        popped: list[TimerRow] = []
        for stretch in list(islice(reversed(self._closed), number)):
            if len(popped) >= number:
                break
            if stretch == LAST_STRETCH:
                continue
            timers = self._closed[stretch]
            late = timers[-(number - len(popped)) :]
            popped += self._valid(late)
            del timers[-len(late) :]
            if not timers:
                del self._closed[stretch]
                self._dead.pop(stretch, None)
        for timer in popped:
            del self._live[timer]
            self.log.changed[timer] = GONE
        return popped

    def timers(self) -> list[TimerRow]:
        """Return all timers that are set, in the order in which they were set."""
        return list(self._live)

    def restore(self, rows: Iterable[TimerRow]) -> None:
        for time_us, key in rows:
            self.add(time_us, key)

    def forget(self, timers: Iterable[TimerRow]) -> None:
        """Remove these timers, before newer rows of them are restored, or because they were deleted."""
        if self._live:
            for time_us, key in timers:
                self.delete(time_us, key)
