"""What operators have dropped: late rows, rows for which a function failed, timers set after the end of input, and bad
records. Each loss is reported.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from midstream.engine.core.ids import TaskId
from midstream.engine.graph.job_graph import JobGraph

_log = logging.getLogger(__name__)


class DroppedRows:
    """Counts one kind of loss by operator, over all attempts: what is dropped again after a failure counts again.

    `warning` makes the text for users, from the name of an operator and the count.
    """

    def __init__(self, graph: JobGraph, warning: Callable[[str, int], str]) -> None:
        self._names = {spec.uid: spec.name for vertex in graph.vertices for spec in vertex.specs}
        self._warning = warning
        self._before: Counter[str] = Counter()
        """The counts of earlier attempts, by uid."""
        self._now: dict[TaskId, tuple[tuple[str, int], ...]] = {}
        self._logged: set[str] = set()

    def record(self, task: TaskId, counts: tuple[tuple[str, int], ...]) -> None:
        """A task of the current attempt has reported its totals: uid, count."""
        if not counts:
            return
        self._now[task] = counts
        for uid, _ in counts:
            if uid not in self._logged:
                self._logged.add(uid)
                _log.warning("%s", self._warning(self._names[uid], self.counts()[uid]))

    def attempt_over(self) -> None:
        self._before = self.counts()
        self._now.clear()

    def counts(self) -> Counter[str]:
        found = Counter(self._before)
        for counts in self._now.values():
            found.update(dict(counts))
        return found

    def warnings(self) -> tuple[str, ...]:
        """Return a warning for each operator that has dropped something."""
        return tuple(self._warning(self._names[uid], count) for uid, count in sorted(self.counts().items()))


def late_rows(name: str, count: int) -> str:
    return (
        f"operator {name!r} has dropped {count} rows that came late: event time had passed them or their windows. Give "
        "with_watermarks() a larger bound, a window an allowed_lateness(), or take them aside with side_output(LATE) (those of "
        "a join's right stream: LATE_RIGHT)"
    )


def failed_rows(name: str, count: int) -> str:
    return (
        f"operator {name!r} has taken aside {count} rows for which its function failed: the slots' logs name the first ones, and "
        "with on_error='side_output' side_output(FAILED) has each with its error"
    )


def late_timers(name: str, count: int) -> str:
    return (
        f"operator {name!r} has dropped {count} processing-time timers that on_timer set after its input had ended: pending "
        "timers fire then, later ones cannot"
    )


def bad_records(name: str, count: int) -> str:
    return (
        f"source {name!r} has skipped {count} records that it could not read: the slots' logs name the first ones, and "
        "side_output(BAD_RECORDS) has each with its bytes and the error"
    )
