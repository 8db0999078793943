"""Rows per second, from successive statuses of one job."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from midstream.engine.protocol.job_status import JobStatus, OperatorStatus

WINDOW_MS = 3000
"""The time over which rates are averaged: short enough to show a stall, long enough to be steady."""


class _Sample(NamedTuple):
    at_ms: int
    rows: dict[str, int]


def rows_handled(operator: OperatorStatus) -> int:
    """Return what an operator's speed is measured in: rows received or, for a source, rows emitted."""
    return operator.rows_in or operator.rows_out


class Rates:
    """Computes rows per second by operator uid from every status that it is given."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()

    def add(self, status: JobStatus) -> None:
        rows = {op.uid: rows_handled(op) for vertex in status.vertices for op in vertex.operators}
        self._samples.append(_Sample(status.now_ms, rows))
        while len(self._samples) > 2 and self._samples[1].at_ms <= status.now_ms - WINDOW_MS:
            self._samples.popleft()

    def rows_per_s(self, uid: str) -> float | None:
        """Return the rate; None until there are two samples."""
        if len(self._samples) < 2:
            return None
        first, last = self._samples[0], self._samples[-1]
        passed_s = (last.at_ms - first.at_ms) / 1e3
        if passed_s <= 0:
            return None
        return max(0, last.rows.get(uid, 0) - first.rows.get(uid, 0)) / passed_s
