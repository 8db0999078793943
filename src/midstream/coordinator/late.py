"""Rows that operators have dropped as late: nobody may lose them without a word."""

from __future__ import annotations

import logging
from collections import Counter

from midstream.core.ids import TaskId
from midstream.graph.job_graph import JobGraph
from midstream.protocol.messages import TaskMetrics

_log = logging.getLogger(__name__)


class LateRows:
    """By operator uid, over all attempts of the job: what was read again after a failure counts again."""

    def __init__(self, graph: JobGraph) -> None:
        self._names = {spec.uid: spec.name for vertex in graph.vertices for spec in vertex.specs}
        self._before: Counter[str] = Counter()
        """In attempts that are over."""
        self._now: dict[TaskId, tuple[tuple[str, int], ...]] = {}
        self._logged: set[str] = set()

    def heard(self, metrics: TaskMetrics) -> None:
        """Totals of a task of the current attempt."""
        if not metrics.late:
            return
        self._now[metrics.task] = metrics.late
        for uid, _ in metrics.late:
            if uid not in self._logged:
                self._logged.add(uid)
                _log.warning("%s", self._warning(uid, self.rows()[uid]))

    def attempt_over(self) -> None:
        self._before = self.rows()
        self._now.clear()

    def rows(self) -> Counter[str]:
        found = Counter(self._before)
        for late in self._now.values():
            found.update(dict(late))
        return found

    def warnings(self) -> tuple[str, ...]:
        """One for each operator that has dropped any."""
        return tuple(self._warning(uid, rows) for uid, rows in sorted(self.rows().items()))

    def _warning(self, uid: str, rows: int) -> str:
        return (
            f"operator {self._names[uid]!r} has dropped {rows} rows that came late: event time had passed their windows. Give "
            "with_watermarks() a larger bound, the window an allowed_lateness(), or take them aside with side_output(LATE)"
        )
