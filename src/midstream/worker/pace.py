"""How many rows at once, judged by how long they took lately."""

from __future__ import annotations

from typing import Final

RECENT: Final = 0.8
"""What weight each call leaves to those before it."""
ALIKE: Final = 0.1
"""Calls whose numbers of rows differ by no more than this share do not tell what a row takes from what a call takes."""
GROWTH: Final = 2
"""One call may have been lucky."""


class Pace:
    """As many rows as take `budget_s`, of which a part may go to the call itself, whatever its rows.

    That part is not saved by smaller calls, only paid more often: where it is more than half of the budget,
    the rows get as long as the call. (Else a call of 20 ms would get fewer and fewer rows, down to one.)
    """

    __slots__ = ("_budget_s", "_calls", "_largest", "_products", "_rows", "_seconds", "_squares")

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s
        self._calls = self._rows = self._seconds = self._squares = self._products = 0.0
        self._largest = 0

    def took(self, rows: int, seconds: float) -> None:
        """One call, of at least one row."""
        self._calls = RECENT * self._calls + 1
        self._rows = RECENT * self._rows + rows
        self._seconds = RECENT * self._seconds + seconds
        self._squares = RECENT * self._squares + rows * rows
        self._products = RECENT * self._products + rows * seconds
        self._largest = max(rows, self._largest // 2)

    def rows(self, at_first: int) -> int:
        """At least one; `at_first` while nothing is known."""
        if not self._calls:
            return at_first
        rows, seconds = self._rows / self._calls, self._seconds / self._calls
        call_s = 0.0
        variance = self._squares / self._calls - rows * rows
        if variance > (ALIKE * rows) ** 2:
            row_s = (self._products / self._calls - rows * seconds) / variance
            call_s = min(max(0.0, seconds - row_s * rows), seconds)
        most = GROWTH * self._largest
        row_s = (seconds - call_s) / rows
        for_rows_s = max(self._budget_s - call_s, call_s)
        return most if row_s * most <= for_rows_s else max(1, int(for_rows_s / row_s))
