"""How many rows the next batch of a source has, and when its rate allows it."""

from __future__ import annotations

from midstream.worker.pace import Pace

FIRST_ROWS = 256
"""Of the first batches, while it is not known how long the chain takes for a row."""
PACE_S = 0.001
"""Of a source with a rate a batch holds the rows of so much time: what is in it waited no longer than that."""
PACED_ROWS = 8
PACE_S_MAX = 0.05
"""Fewer rows than that are not worth a batch: it holds those of up to so much time."""
SLICE_S = 0.02
"""How long the chain should have to work on one batch: mails and other tasks wait for it."""
MADE_UP_S = 1.0
"""A source with a rate makes up for so much time in which it could not emit: on a busy machine it gets no core for a while."""
BATCH_S = 0.1
"""A batch holds no more rows than those downstream take in so long: barriers wait behind whole batches."""


class SourcePace:
    """As many rows as the chain processes in SLICE_S and those downstream take in BATCH_S.

    `rows_per_s` is the rate of this subtask, None if the source has none.
    """

    def __init__(self, rows_max: int, rows_per_s: float | None) -> None:
        self._chain = Pace(SLICE_S)
        self._taken = Pace(BATCH_S)
        self._last: tuple[int, float] | None = None
        """How many rows were emitted last, and when; None: the source had no more for a while."""
        self._rows_per_s = rows_per_s or 0.0
        self.has_rate = bool(rows_per_s)
        self._limit = self._batch_rows = rows_max
        if rows_per_s:
            few = min(PACED_ROWS, round(rows_per_s * PACE_S_MAX))
            self._paced_rows = max(1, few, int(rows_per_s * PACE_S))
            self._limit = min(rows_max, self._paced_rows)
        self.rows_max = min(self._limit, FIRST_ROWS)
        """Of the next batch."""
        self.next_emit_s = float("-inf")
        """Of a source with a rate; before its first rows nothing is late."""

    def keep_rate(self, rows: int, now_s: float) -> None:
        """What comes late is made up for, up to MADE_UP_S; in larger batches, else it would come later and later."""
        start_s = max(self.next_emit_s, now_s - MADE_UP_S) if self.next_emit_s > float("-inf") else now_s
        self._limit = min(self._batch_rows, max(self._paced_rows, int((now_s - start_s) * self._rows_per_s)))
        self.next_emit_s = start_s + rows / self._rows_per_s

    def emitted(self, rows: int, started_s: float, ended_s: float) -> None:
        """By the clock of a slot's own core."""
        self._chain.took(rows, ended_s - started_s)
        if self._last is not None:
            self._taken.took(self._last[0], started_s - self._last[1])
        self._last = rows, started_s
        fitting = min(self._chain.rows(1), self._taken.rows(self._limit))
        # At most by a factor of two at a time: one batch may have been slow for reasons of its own.
        self.rows_max = max(1, min(self._limit, max(self.rows_max // 2, min(fitting, self.rows_max * 2))))

    def pause(self) -> None:
        """There are no more rows for a while: what follows is not told from how fast they are taken."""
        self._last = None
