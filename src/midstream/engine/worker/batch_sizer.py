"""Decides how many rows a call should get, judged by how long recent calls took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DECAY: Final = 0.8
"""The weight of past calls is multiplied by this with each further call."""
SIZE_SPREAD_MIN: Final = 0.25
"""The time of a row and the time of a call can be told apart only if the calls' numbers of rows differ: their standard
deviation must be more than this share of their mean."""
PROBE_INTERVAL_CALLS: Final = 16
"""After so many calls with about as many rows each, the next ones get half as many, to measure what a call takes; calls
of single rows get two."""
PROBE_INTERVAL_CALLS_MAX: Final = 1024
"""While it is the rows that take the time, this is asked ever less often, but after so many calls at the latest."""
OUTLIER_FACTOR: Final = 4
"""A call that takes so many times longer, or shorter, than those before would have makes these worthless."""
AGING_FACTOR: Final = 1.05
"""The shortest recent call of a size counts as so many times longer with each further call of that size."""
REMEMBERED_CALLS: Final = 24
"""After so many calls the shortest one of a size is forgotten."""
GROWTH_MAX: Final = 2
"""A call gets at most so many times the rows of the largest recent call: one call may have been fast by chance. After a
mean of more calls than these it may be as many times the rows as there were calls."""
CALL_SHARE_MAX: Final = 0.2
"""The share of the time that calls themselves may take where the budget allows it."""
COLUMNAR_ROWS: Final = 256
"""If the budget is enough for more rows than these, rows are fast because they are processed in columns. Then calls are
not shortened: smaller batches would cost more in the tasks downstream."""


@dataclass(slots=True)
class _ShortestCall:
    """The shortest recent call of a size."""

    rows: int
    seconds: float
    number: int
    """How many calls there had been, this one included."""


class BatchSizer:
    """The pace of calls: a call gets as many rows as take `budget_s`.

    If these are few, and shorter calls cost little, a call gets only as many rows as take `short_budget_s`.

    Calls are timed by the clock of the slot's own core, and `budget_s` is a time of that clock. `short_budget_s` is a time of
    the common clock, because it is for tasks and barriers that wait for the end of a call.

    The time that a call takes whatever its rows is not saved by smaller calls, but paid more often. Where it is more
    than half of the budget, the rows get as much time as the call. Otherwise a call of 20 ms would get fewer and fewer
    rows, down to one.

    Calls with about as many rows each do not tell what of their time is the call's. So they are not left alike for long
    where that matters: otherwise a stream that begins with single rows would be processed row by row for ever.
    """

    def __init__(self, budget_s: float, short_budget_s: float | None = None) -> None:
        self._budget_s = budget_s
        self._short_budget_s = budget_s if short_budget_s is None else short_budget_s
        self._calls = self._rows = self._seconds = self._squares = 0.0
        self._largest_rows = self._rows_max = 0
        self._number = 0
        self._shortest: dict[int, _ShortestCall] = {}
        """The shortest recent call of each size, by the bits of its number of rows. What disturbs a measurement only
        adds time, so these have been disturbed least."""
        self._call_s = 0.0
        """The time that a call takes whatever its rows, as measured last."""
        self._calls_since_probe = 0
        """How many calls ago that time was measured."""
        self._probe_interval_calls = PROBE_INTERVAL_CALLS
        """After how many calls that are alike it has to be measured."""

    def record(self, rows: int, seconds: float, calls: int = 1) -> None:
        """A call with `rows` rows, at least one, took `seconds`; of several `calls`, these are the means."""
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
        """Return the time of a call whatever its rows, by a line through the shortest recent calls of each size.

        More rows do not take less time: where they did, the call of fewer rows was disturbed. Of the lines from the
        fewest rows to each other number, the flattest one counts, because the others end at disturbed calls.
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
        """Whether a call took about as long as it would have before, or the difference does not matter. If not, the calls
        before it say nothing about the next ones: the function has changed, or one of the calls was disturbed.
        """
        call_s, row_s = self._costs()
        expected_s = call_s + row_s * rows
        shorter_s, longer_s = sorted((seconds, expected_s))
        return longer_s <= max(OUTLIER_FACTOR * shorter_s, self._budget_s)

    def _costs(self) -> tuple[float, float]:
        """Return the time of a call, and of a row."""
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
