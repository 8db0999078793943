"""How many rows at once, judged by how long they took lately."""

from __future__ import annotations

from typing import Final

RECENT: Final = 0.8
"""What weight each call leaves to those before it."""
ALIKE: Final = 0.25
"""Numbers of rows whose deviation is no more than this share do not tell what a row takes from what a call takes."""
ASK_AGAIN: Final = 16
"""After so many calls alike there are a few with half of the rows, to see what a call takes."""
GROWTH: Final = 2
"""One call may have been lucky."""
CALL_SHARE: Final = 0.05
"""Of the time, what calls themselves may take where the budget allows it."""
FEW_ROWS: Final = 256
"""Where the budget is enough for more than these, they are worked off in columns, and small batches cost those behind."""


class Pace:
    """As many rows as take `budget_s`; only `enough_s` if those are few, and calls with still fewer are no waste.

    What calls took is judged by the clock of a slot's own core. `budget_s` is of that clock, too; `enough_s` is for those
    that wait for the end of a call, and theirs is the common one.

    What the call itself takes, whatever its rows, is not saved by smaller calls, only paid more often: where it
    is more than half of the budget, the rows get as long as the call. (Else a call of 20 ms would get fewer and
    fewer rows, down to one.)
    """

    __slots__ = (
        "_alike",
        "_budget_s",
        "_call_s",
        "_calls",
        "_enough_s",
        "_largest",
        "_products",
        "_rows",
        "_seconds",
        "_squares",
    )

    def __init__(self, budget_s: float, enough_s: float | None = None) -> None:
        self._budget_s = budget_s
        self._enough_s = budget_s if enough_s is None else enough_s
        self._calls = self._rows = self._seconds = self._squares = self._products = 0.0
        self._largest = 0
        self._call_s = 0.0
        """What a call takes, as far as is known."""
        self._alike = 0
        """How many calls ago it was seen."""

    def took(self, rows: int, seconds: float) -> None:
        """One call, of at least one row."""
        self._calls = RECENT * self._calls + 1
        self._rows = RECENT * self._rows + rows
        self._seconds = RECENT * self._seconds + seconds
        self._squares = RECENT * self._squares + rows * rows
        self._products = RECENT * self._products + rows * seconds
        self._largest = max(rows, self._largest // 2)
        mean_rows, mean_s = self._rows / self._calls, self._seconds / self._calls
        variance = self._squares / self._calls - mean_rows * mean_rows
        self._alike += 1
        if variance > (ALIKE * mean_rows) ** 2:
            row_s = (self._products / self._calls - mean_rows * mean_s) / variance
            self._call_s = max(0.0, mean_s - max(0.0, row_s) * mean_rows)
            self._alike = 0
        elif self._enough_s == self._budget_s:
            self._call_s = 0.0  # with fewer rows it will show

    def rows(self, at_first: int, core_share: float = 1.0) -> int:
        """At least one; `at_first` while nothing is known. `core_share`: see `Clock`."""
        if not self._calls:
            return at_first
        rows, seconds = self._rows / self._calls, self._seconds / self._calls
        call_s = min(self._call_s, seconds)
        row_s = (seconds - call_s) / rows
        found = self._fitting(self._budget_s, call_s, row_s)
        if self._enough_s == self._budget_s or row_s * FEW_ROWS < self._budget_s:
            return found
        enough_s = self._enough_s * core_share
        if self._alike >= ASK_AGAIN and 2 * seconds > enough_s:
            found = min(found, self._largest // 2)
        return max(1, min(found, self._fitting(max(enough_s, call_s / CALL_SHARE), call_s, row_s)))

    def _fitting(self, aim_s: float, call_s: float, row_s: float) -> int:
        most = GROWTH * self._largest
        for_rows_s = max(aim_s - call_s, call_s)
        return most if row_s * most <= for_rows_s else max(1, int(for_rows_s / row_s))
