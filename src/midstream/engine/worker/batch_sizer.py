"""Chooses the number of rows of the next call from the time that recent calls took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DECAY: Final = 0.8
"""The factor by which each further call reduces the weight of past calls."""
SIZE_SPREAD_MIN: Final = 0.25
"""Fixed and per-row cost are separable only if batch sizes vary: their standard deviation must be more than this share
of their mean."""
PROBE_INTERVAL_CALLS: Final = 16
"""After this many calls of similar size, halve the size (of single rows: double it) to re-measure the fixed cost of a
call."""
PROBE_INTERVAL_CALLS_MAX: Final = 1024
"""The upper bound of the probe interval, which doubles while the cost per row dominates."""
OUTLIER_FACTOR: Final = 4
"""A call this many times slower or faster than predicted discards the history."""
AGING_FACTOR: Final = 1.05
"""The factor by which the recorded time of the shortest call of a size grows with each further call of that size."""
REMEMBERED_CALLS: Final = 24
"""After this many calls the shortest one of a size is forgotten."""
GROWTH_MAX: Final = 2
"""A call gets at most this many times the rows of the largest recent call, which may have been fast by chance. If the
measurement is the mean of n > GROWTH_MAX calls, growth is limited to n instead."""
CALL_SHARE_MAX: Final = 0.2
"""The maximum share of the fixed cost in the time of a call, where the budget allows it."""
COLUMNAR_ROWS: Final = 256
"""If more rows than these fit the budget, rows are processed in columns. Then calls are not shortened: smaller batches
would cost more in the tasks downstream."""


@dataclass(slots=True)
class _ShortestCall:
    """The shortest recent call of a size."""

    rows: int
    seconds: float
    number: int
    """The number of the call, from 1."""


class BatchSizer:
    """Sizes calls so that each takes `budget_s`.

    If few rows fit that, and shorter calls cost little, a call gets only as many rows as take `short_budget_s`.

    Calls are timed by the clock of the slot's own core, and `budget_s` is a time of that clock. `short_budget_s` is a
    time of the common clock, because it is for tasks and barriers that wait for the end of a call.

    Smaller calls pay the fixed cost of a call more often. Where it is more than half of the budget, the rows get as
    much time as the fixed cost. Otherwise a fixed cost of 20 ms would shrink the calls to one row.

    Calls of equal size cannot separate fixed from per-row cost, so sizes are varied from time to time where that
    matters: otherwise a stream that begins with single rows would be processed row by row indefinitely.
    """

    def __init__(self, budget_s: float, short_budget_s: float | None = None) -> None:
        self._budget_s = budget_s
        self._short_budget_s = budget_s if short_budget_s is None else short_budget_s
        self._calls = self._rows = self._seconds = self._squares = 0.0
        self._largest_rows = self._rows_max = 0
        self._number = 0
        self._shortest: dict[int, _ShortestCall] = {}
        """The shortest recent call of each size, by the bits of its number of rows. Disturbances only add time, so
        these are the least disturbed ones."""
        self._call_s = 0.0
        """The fixed cost of a call, as measured last."""
        self._calls_since_probe = 0
        """The number of calls since then."""
        self._probe_interval_calls = PROBE_INTERVAL_CALLS
        """The number of calls of similar size after which it must be measured."""

    def record(self, rows: int, seconds: float, calls: int = 1) -> None:
        """Record a call with `rows` rows, at least one, that took `seconds`; of several `calls`, these are the
        means."""
        if self._calls and not self._fits_history(rows, seconds):
            self._calls = self._rows = self._seconds = self._squares = 0.0
            self._largest_rows = 0
            self._shortest.clear()
        self._calls = DECAY * self._calls + 1
        self._rows = DECAY * self._rows + rows
        self._seconds = DECAY * self._seconds + seconds
        self._squares = DECAY * self._squares + rows * rows
        self._largest_rows = max(rows, self._largest_rows // 2)
        self._rows_max = max(GROWTH_MAX, calls) * self._largest_rows
        self._number += 1
        self._keep_shortest(rows, seconds)
        mean_rows, mean_s = self._rows / self._calls, self._seconds / self._calls
        self._calls_since_probe += calls
        variance = self._squares / self._calls - mean_rows * mean_rows
        if (
            variance > (SIZE_SPREAD_MIN * mean_rows) ** 2 and 4 * mean_s > self._short_budget_s
        ):  # shorter ones get more rows anyway
            self._call_s = self._measured_call_s()
            if 4 * self._call_s > mean_s:
                self._probe_interval_calls = PROBE_INTERVAL_CALLS
            elif self._calls_since_probe >= self._probe_interval_calls:
                self._probe_interval_calls = min(2 * self._probe_interval_calls, PROBE_INTERVAL_CALLS_MAX)
            self._calls_since_probe = 0

    def _keep_shortest(self, rows: int, seconds: float) -> None:
        size = rows.bit_length()
        shortest = self._shortest.get(size)
        if shortest is not None and self._number - shortest.number <= REMEMBERED_CALLS:
            shortest.seconds *= AGING_FACTOR
            if shortest.seconds < seconds:
                return
        self._shortest[size] = _ShortestCall(rows, seconds, self._number)

    def _measured_call_s(self) -> float:
        """Return the fixed cost of a call, by a line through the shortest recent calls of each size.

        More rows do not take less time: where they did, the call of fewer rows was disturbed. Of the lines from the
        smallest size to each other one, the flattest counts, because the others end at disturbed calls.
        """
        points = [self._shortest[size] for size in sorted(self._shortest, reverse=True)]
        points = [each for each in points if self._number - each.number <= REMEMBERED_CALLS]
        lowest_s = points[0].seconds
        envelope = []
        for each in points:
            lowest_s = min(lowest_s, each.seconds)
            envelope.append((each.rows, lowest_s))
        few_rows, few_s = envelope.pop()
        row_s = min(((s - few_s) / (rows - few_rows) for rows, s in envelope), default=few_s / few_rows)
        return max(0.0, few_s - row_s * few_rows)

    def _fits_history(self, rows: int, seconds: float) -> bool:
        """Whether a call took about as long as predicted, or the difference does not matter. If not, the history does
        not predict the next calls: the function has changed, or one of the calls was disturbed.
        """
        call_s, row_s = self._costs()
        expected_s = call_s + row_s * rows
        shorter_s, longer_s = sorted((seconds, expected_s))
        return longer_s <= max(OUTLIER_FACTOR * shorter_s, self._budget_s)

    def _costs(self) -> tuple[float, float]:
        """Return the fixed cost of a call, and the cost of a row."""
        mean_s = self._seconds / self._calls
        call_s = min(self._call_s, mean_s)
        return call_s, (mean_s - call_s) * self._calls / self._rows

    def rows(self, first_rows: int, core_share: float = 1.0) -> int:
        """How many rows the next call should get: at least one, and `first_rows` before the first call.

        `core_share` is that of `Clock`.
        """
        if not self._calls:
            return first_rows
        call_s, row_s = self._costs()
        target_s, found = self._budget_s, self._rows_within(self._budget_s, call_s, row_s)
        if self._short_budget_s < self._budget_s <= row_s * COLUMNAR_ROWS:
            target_s = self._short_budget_s * core_share
            found = max(1, min(found, self._rows_within(max(target_s, call_s / CALL_SHARE_MAX), call_s, row_s)))
        if self._calls_since_probe >= self._probe_interval_calls and 2 * self._seconds / self._calls > target_s:
            usual = round(self._rows / self._calls)
            return min(found, usual // 2) if usual > 1 else 2
        return found

    def _rows_within(self, target_s: float, call_s: float, row_s: float) -> int:
        for_rows_s = max(target_s - call_s, call_s)
        return self._rows_max if row_s * self._rows_max <= for_rows_s else max(1, int(for_rows_s / row_s))
