"""Known bugs of keeping sources in step; to be put back on purpose, see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from random import Random
from typing import Any, Final

from midstream.engine.coordinator.placement import source_drift
from midstream.engine.coordinator.placement.source_drift import SourceDrift
from midstream.engine.coordinator.placement.split_assignment import SplitAssignment
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.ids import TaskId
from midstream.engine.graph.drift_groups import drift_groups
from midstream.engine.worker.drift_limit import DriftLimit
from midstream.engine.worker.source_reader import SourceReader, SplitRequestState
from midstream.engine.worker.split_reads import SplitReads
from midstream.simulation.faults import Fault
from midstream_lab.mutations.mutation import Mutation, Replacements
from midstream_lab.scenarios.scenario import Scenario
from midstream_lab.scenarios.targeted_drift import in_step, in_step_with_lulls

# ---- in the coordinator


def each_source_alone() -> Replacements:
    """A source is kept in step with itself only."""
    return [(source_drift, "drift_groups", lambda graph: tuple((s,) for group in drift_groups(graph) for s in group))]


def fastest_subtask_counts() -> Replacements:
    """The ceiling follows from the subtask of a source that is furthest ahead."""

    def lowest_us(self: Any, source: Any) -> int:
        refs = [TaskId(source.vertex, subtask) for subtask in range(source.parallelism)]
        reported = [self._reported_us(ref) for ref in refs if ref not in self._finished]
        return max([mark for mark in reported if mark != MAX_WATERMARK_US], default=MAX_WATERMARK_US)

    return [(SourceDrift, "_lowest_us", lowest_us)]


def finished_subtask_counts() -> Replacements:
    """The reports of subtasks that had finished in the checkpoint are waited for."""
    original = SourceDrift.deployed

    def deployed(self: Any, attempt: Any) -> None:
        original(self, attempt)
        self._finished = frozenset()

    return [(SourceDrift, "deployed", deployed)]


def ceilings_of_the_last_attempt() -> Replacements:
    """A ceiling is only sent if it differs from that of the attempt before."""

    def deployed(self: Any, attempt: Any) -> None:
        self._attempt = attempt
        self._finished = frozenset(attempt.finished_on_restore)
        self._reports.clear()

    return [(SourceDrift, "deployed", deployed)]


def reports_of_the_last_attempt() -> Replacements:
    """Subtasks are where they were in the attempt before, until they report."""

    def deployed(self: Any, attempt: Any) -> None:
        self._attempt = attempt
        self._finished = frozenset(attempt.finished_on_restore)
        self._ceilings_us.clear()

    return [(SourceDrift, "deployed", deployed)]


def backlog_is_in_step() -> Replacements:
    """A source with splits that wait to be assigned is kept in step with others."""
    return [(SplitAssignment, "has_backlog", lambda self, vertex: False)]


def undiscovered_source_counts_not() -> Replacements:
    """A source whose splits are not known yet is not waited for."""
    return [(SplitAssignment, "has_discovered", lambda self, vertex: True)]


def ceiling_never_falls() -> Replacements:
    """A split that is behind all others does not lower the ceiling."""

    def is_moved(before_us: int, now_us: int, step_us: int) -> bool:
        return now_us - before_us >= step_us

    return [(source_drift, "is_moved", is_moved)]


# ---- in the reader


def nothing_is_held_back() -> Replacements:
    """Every split is read, however far ahead it is."""
    return [(DriftLimit, "holds", lambda self, split: False)]


def empty_split_counts() -> Replacements:
    """A split without rows at present is waited for."""

    def waited_for(self: Any) -> Iterable[int]:
        return [each.number for each in self._splits if self._request_state is not SplitRequestState.STOPPED]

    return [(SourceReader, "_waited_for", property(waited_for))]


def empty_split_is_not_reported() -> Replacements:
    """That a split has no rows is not reported before the next batch."""
    original = SplitReads._let_rest

    def let_rest(self: Any, open_split: Any, offset: int) -> None:
        has_none, self._has_none = self._has_none, lambda _: None
        original(self, open_split, offset)
        self._has_none = has_none

    return [(SplitReads, "_let_rest", let_rest)]


def slower_split_is_not_reported() -> Replacements:
    """A subtask reports nothing if a split is behind all that it has reported."""
    original = DriftLimit.update

    def update(self: Any, splits: Iterable[int]) -> None:
        known, times = list(splits), self._times
        lowest_us = min(map(times.progress_us, known), default=MAX_WATERMARK_US) if times is not None else 0
        if times is None or self._reported is None or self._reported[0] <= lowest_us:
            original(self, known)

    return [(DriftLimit, "update", update), (DriftLimit, "check", lambda self, splits: None)]


# ---- where they are searched


def _ending(seed: int) -> Scenario:
    """One source ends long before the other, and slots die after that."""
    random = Random(f"ending in step {seed}")
    drawn = in_step(2 * seed)
    short = (drawn.shape[0], replace(drawn.shape[1], rows_share=0.05), *drawn.shape[2:])
    faults = tuple(Fault(step, "kill_slot", step) for step in sorted(random.sample(range(200, 900), 4)))
    return replace(drawn, shape=short, faults=faults, interval_s=0.002, min_pause_s=0.0, rounds=1, has_checkpoints=True)


MUTATIONS: Final[Mapping[str, Mutation]] = {
    "each_source_alone": Mutation("a source is in step with itself only", each_source_alone, in_step),
    "fastest_subtask_counts": Mutation("the fastest subtask sets the ceiling", fastest_subtask_counts, in_step),
    "finished_subtask_counts": Mutation("subtasks that have ended are waited for", finished_subtask_counts, _ending),
    "ceilings_of_the_last_attempt": Mutation(
        "a ceiling is not sent again to the next attempt", ceilings_of_the_last_attempt, in_step
    ),
    "reports_of_the_last_attempt": Mutation(
        "reports of the attempt before count", reports_of_the_last_attempt, in_step
    ),
    "backlog_is_in_step": Mutation("a backlog of splits is held back", backlog_is_in_step, in_step),
    "undiscovered_source_counts_not": Mutation(
        "a source whose splits are not known is not waited for", undiscovered_source_counts_not, in_step
    ),
    "ceiling_never_falls": Mutation(
        "a slower split does not lower the ceiling", ceiling_never_falls, in_step_with_lulls
    ),
    "nothing_is_held_back": Mutation("no split is held back", nothing_is_held_back, in_step),
    "empty_split_counts": Mutation("a split without rows is waited for", empty_split_counts, in_step_with_lulls),
    "empty_split_is_not_reported": Mutation(
        "a split without rows is reported late", empty_split_is_not_reported, in_step_with_lulls
    ),
    "slower_split_is_not_reported": Mutation(
        "a split that is behind all others is not reported", slower_split_is_not_reported, in_step_with_lulls
    ),
}
