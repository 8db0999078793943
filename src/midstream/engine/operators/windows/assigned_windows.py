"""The tumbling or sliding windows of each row, in microseconds."""

from __future__ import annotations

import numpy as np

from midstream.engine.operators.event_time_column import Int64s
from midstream.engine.operators.windows.local_days import LocalDays
from midstream.engine.operators.windows.window_specs import Sliding


class AssignedWindows:
    """Assigns windows to rows by their times. Windows in a time zone are laid out by position, as in `LocalDays`."""

    def __init__(self, window: Sliding) -> None:
        self._size, self._slide, self._offset = window.size_us, window.slide_us, window.offset_us
        self._days = None if window.zone is None else LocalDays(window.zone, "us")
        self.of_a_row = -(-self._size // self._slide)
        """The number of windows of a row, at most."""

    def last_ends(self, times: Int64s) -> Int64s:
        """Return the end of the last window of each row."""
        return self._instants(self._last_starts(self._positions(times)) + self._size)

    def of(self, times: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return a number of a row, a start and an end for each window of each row: rows in their order, and the windows of
        a row in theirs."""
        positions = self._positions(times)
        back = np.arange(self.of_a_row - 1, -1, -1) * self._slide
        starts = self._last_starts(positions)[:, None] - back
        is_in = starts + self._size > positions[:, None]
        rows, at = np.nonzero(is_in)
        found = starts[rows, at]
        return rows, self._instants(found), self._instants(found + self._size)

    def _positions(self, times: Int64s) -> Int64s:
        return times if self._days is None or not len(times) else self._days.positions(times)

    def _last_starts(self, positions: Int64s) -> Int64s:
        starts: Int64s = (positions - self._offset) // self._slide * self._slide + self._offset
        return starts

    def _instants(self, positions: Int64s) -> Int64s:
        if self._days is None:
            return positions
        distinct, numbers = np.unique(positions, return_inverse=True)
        return np.array([self._days.instant(position) for position in distinct.tolist()], np.int64)[numbers]
