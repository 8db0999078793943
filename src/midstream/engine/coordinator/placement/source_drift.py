"""Keeps sources in step: no split is read further ahead of the slowest than the drift that the program allows.

Each subtask reports the event time of the slowest of its splits that may have rows (`worker.drift_limit`). The lowest
report of a group of sources (`graph.drift_groups`), plus the drift of a source, is the ceiling for all its subtasks.

Who counts:
- A subtask that has not reported yet in this attempt, or not since it was assigned a split while it had none to wait
  for, and a source whose splits are not discovered yet: all wait for its first rows.
- Not a subtask that reports that none of its splits may have rows, as it does at the end of its data, nor one that had
  finished in the checkpoint from which the attempt began.
- Not a source with splits that wait to be assigned. Its event time stands still until the last one is assigned, and they
  are only assigned when others have been read. So that source is not held back either.

The slowest split is never held back, as the ceiling is above it by nearly the drift. So some split of the group is always
read, whatever the others wait for. Everything is of one attempt, and begins again with the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from midstream.engine.coordinator.effects import Effects
from midstream.engine.coordinator.placement.attempt import Attempt
from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.core.ids import TaskId
from midstream.engine.graph.drift_groups import LimitedSource, drift_groups
from midstream.engine.graph.job_graph import JobGraph
from midstream.engine.protocol.messages import DriftCeiling, SourceProgress
from midstream.engine.worker.drift_limit import STEPS, is_moved

if TYPE_CHECKING:
    from midstream.engine.coordinator.placement.split_assignment import SplitAssignment


class SourceDrift:
    def __init__(self, effects: Effects, sources: SplitAssignment, graph: JobGraph) -> None:
        self._effects = effects
        self._sources = sources
        self._groups = drift_groups(graph)
        self._attempt: Attempt | None = None
        """The attempt whose tasks run."""
        self._finished: frozenset[TaskId] = frozenset()
        """The tasks that had finished when it began, and run nothing."""
        self._reports: dict[TaskId, SourceProgress] = {}
        """The last report of each subtask."""
        self._ceilings_us: dict[int, int] = {}
        """The ceiling that the subtasks of each source were sent last."""

    def rescale(self, graph: JobGraph) -> None:
        """Continue with the same sources in another graph of the same job. This is called between two attempts."""
        self._groups = drift_groups(graph)

    def deployed(self, attempt: Attempt) -> None:
        """The tasks of the attempt are started next."""
        self._attempt = attempt
        self._finished = frozenset(attempt.finished_on_restore)
        self._reports.clear()
        self._ceilings_us.clear()

    def attempt_over(self) -> None:
        self._attempt = None

    def report(self, report: SourceProgress) -> None:
        self._reports[report.task] = report
        self.advance()

    def advance(self) -> None:
        """Send the ceilings that have moved, after a report, or when other splits are assigned or wait."""
        attempt = self._attempt
        if attempt is None or not self._groups:
            return
        for source, ceiling_us in self._due():
            before_us = self._ceilings_us.get(source.vertex, MIN_WATERMARK_US)
            if is_moved(before_us, ceiling_us, max(1, source.drift_us // STEPS)):
                self._ceilings_us[source.vertex] = ceiling_us
                ceiling = DriftCeiling(attempt.number, source.vertex, ceiling_us)
                for slot in attempt.slots[: source.parallelism]:
                    self._effects.send(slot, ceiling)

    def _due(self) -> Iterator[tuple[LimitedSource, int]]:
        """Yield each source with the ceiling that follows from the reports."""
        for group in self._groups:
            lowest_us = min(
                (self._lowest_us(source) for source in group if not self._sources.has_backlog(source.vertex)),
                default=MAX_WATERMARK_US,
            )
            for source in group:
                if lowest_us == MAX_WATERMARK_US or self._sources.has_backlog(source.vertex):
                    yield source, MAX_WATERMARK_US
                else:
                    yield source, MIN_WATERMARK_US if lowest_us == MIN_WATERMARK_US else lowest_us + source.drift_us

    def _lowest_us(self, source: LimitedSource) -> int:
        """Return the event time of the slowest split of a source, as far as it counts."""
        if not self._sources.has_discovered(source.vertex):
            return MIN_WATERMARK_US
        refs = (TaskId(source.vertex, subtask) for subtask in range(source.parallelism))
        return min((self._reported_us(ref) for ref in refs if ref not in self._finished), default=MAX_WATERMARK_US)

    def _reported_us(self, ref: TaskId) -> int:
        report = self._reports.get(ref)
        if report is None:
            return MIN_WATERMARK_US
        is_outdated = report.splits < self._sources.assigned_to(ref)
        return MIN_WATERMARK_US if is_outdated and report.lowest_us == MAX_WATERMARK_US else report.lowest_us

    def check(self) -> None:
        """Assert that no ceiling is above the one that follows from the reports."""
        if self._attempt is not None:
            for source, ceiling_us in self._due():
                assert self._ceilings_us.get(source.vertex, MIN_WATERMARK_US) <= ceiling_us, (source, ceiling_us)
