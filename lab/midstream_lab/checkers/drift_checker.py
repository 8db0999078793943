"""Checks that sources are kept in step: that no split is read too far ahead, and that none is held back without need.

Messages take their time, so a split may be read beyond the slowest one as long as nothing about that one can have been
known. What can have been known is followed through the messages, which keep their order: which splits each report is
about, and which reports the coordinator had when it computed each ceiling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from unittest.mock import patch

from midstream.engine.coordinator.placement import source_drift
from midstream.engine.coordinator.placement.attempt import TaskPhase
from midstream.engine.coordinator.placement.source_drift import SourceDrift
from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.core.ids import TaskId
from midstream.engine.graph.drift_groups import drift_groups
from midstream.engine.protocol.messages import DriftCeiling, SourceProgress
from midstream.engine.worker.drift_limit import STEPS
from midstream.engine.worker.source_reader import SourceReader, SplitRequestState
from midstream.engine.worker.split_reads import EMPTY_REST_S, SplitReads
from midstream.engine.worker.task_operators import TaskOperators
from midstream.simulation.world import World
from midstream_lab.mutations.mutation import owner_of

_AttemptId: TypeAlias = tuple[str, int, int]
"""The job, the epoch of its coordinator, and the attempt."""
_NO_MORE: Final = (SplitRequestState.STOPPED, SplitRequestState.CLOSED)


@dataclass(frozen=True, slots=True)
class _Known:
    """What the coordinator knew when it computed a ceiling."""

    reports: Counter[TaskId]
    """How many reports it had of each subtask."""
    group: frozenset[int]
    """The vertices of the sources that are kept in step with the one that gets the ceiling."""
    backlogs: frozenset[int]
    """Those with splits that wait to be assigned, which are not kept in step."""


@dataclass(slots=True, eq=False)
class _Reader:
    """A source subtask whose drift is limited."""

    attempt: _AttemptId
    ref: TaskId
    source: Any
    reports: int = 0
    first_report: dict[int, int] = field(default_factory=dict)
    """The number of the first report that is about each split that others have waited for since."""
    ceilings: int = 0
    """The number of ceilings that have arrived."""
    known: _Known | None = None
    """What the last one was computed from."""

    @property
    def waited_for(self) -> list[int]:
        """The splits that may have rows, as the source has it itself."""
        if self.source._request_state in _NO_MORE:
            return []
        return [each.number for each in self.source._splits if each.rest_s < EMPTY_REST_S]

    def progress_us(self, split: int) -> int:
        progress: int = self.source._limit._times.progress_us(split)
        return progress


class DriftChecker:
    """The rules for one run. `drift_us`: the drift of all its sources; `grace_us`: how long a split may be held back that
    could be read, or None if that is not known, because messages may be delayed.
    """

    def __init__(self, world: World, drift_us: int, grace_us: int | None) -> None:
        self._world = world
        self._drift_us = drift_us
        self._grace_us = grace_us
        self._readers: dict[SourceReader, _Reader] = {}
        self._sent: dict[tuple[_AttemptId, int], list[_Known]] = {}
        """What each of the ceilings was computed from that the subtasks of a source were sent."""
        self._drifts: dict[_AttemptId, SourceDrift] = {}
        self._received: dict[SourceDrift, Counter[TaskId]] = {}
        self._now: SourceDrift | None = None
        """The part of a coordinator that computes ceilings."""
        self._held_since_us: dict[tuple[SourceReader, int], int] = {}
        """Since when splits are held back that could be read."""
        self.held = 0
        """How often a split was found to be held back."""

    # ---- in the slots ----

    def opened(self, operators: TaskOperators, *_: object) -> None:
        source = operators.source
        if source is None or source._limit._times is None:
            return
        services = operators._services
        reader = self._readers[source] = _Reader(
            (services.job_id, services.epoch, services.attempt), operators._ref, source
        )
        report = source._limit._report

        def counted(lowest_us: int, splits: int) -> None:
            reader.reports += 1
            for split in reader.waited_for:
                reader.first_report.setdefault(split, reader.reports)
            report(lowest_us, splits)

        source._limit._report = counted

    def closed(self, operators: TaskOperators) -> None:
        if operators.source is not None:
            self._readers.pop(operators.source, None)

    def arrives(self, source: SourceReader, *_: object) -> None:
        """Find what the ceiling that arrives was computed from: ceilings arrive in the order of sending."""
        reader = self._readers.get(source)
        if reader is not None:
            reader.known = self._sent[reader.attempt, reader.ref.vertex][reader.ceilings]
            reader.ceilings += 1
            self.check_held()

    def rests(self, reads: SplitReads, split: int) -> None:
        """Note that a source has found no rows of the split, so that others may no longer have to wait for it."""
        reader = next((each for source, each in self._readers.items() if source._reads is reads), None)
        if reader is not None and split not in reader.waited_for:
            reader.first_report.pop(split, None)

    def emits(self, source: SourceReader, split: int) -> None:
        """Check that a split that is read now is not too far ahead of any other of which the coordinator knew."""
        reader = self._readers.get(source)
        if reader is None:
            return
        progress_us, known = reader.progress_us(split), reader.known
        where = f"{reader.ref} reads split {split} at {progress_us}"
        if known is None:
            if progress_us > MIN_WATERMARK_US:
                self._world.bug(f"{where}, and has no ceiling yet")
            return
        if reader.ref.vertex in known.backlogs:
            return
        for other in self._others(reader, known):
            still_open = set(other.waited_for)
            for number, first in other.first_report.items():
                if number in still_open and first <= known.reports[other.ref]:
                    other_us = other.progress_us(number)
                    if progress_us > other_us + self._drift_us:
                        self._world.bug(f"{where}; split {number} of {other.ref} is known to be at {other_us} at most")
                        return

    def _others(self, reader: _Reader, known: _Known) -> Iterator[_Reader]:
        """Yield the readers that are kept in step with this one, and itself."""
        for other in self._readers.values():
            is_counted = other.ref.vertex in known.group - known.backlogs
            if is_counted and other.attempt == reader.attempt:
                yield other

    def check_held(self) -> None:
        """Check that no split is held back for long that is not far ahead of all splits which may have rows."""
        now_us = self._world.now_us
        could_be_read = set()
        for source, reader in self._readers.items():
            limit, known, least_us = source._limit, reader.known, MAX_WATERMARK_US
            if source._request_state in _NO_MORE or known is None:
                continue
            backlogs = _backlogs(self._drifts[reader.attempt], known.group)
            for other in self._readers.values():
                is_counted = other.attempt == reader.attempt and other.ref.vertex in known.group - backlogs
                if is_counted and reader.ref.vertex not in backlogs:
                    least_us = min([least_us, *map(other.progress_us, other.waited_for)])
            for each in source._splits:
                progress_us = reader.progress_us(each.number)
                if progress_us > limit.ceiling_us:
                    self.held += 1
                    if progress_us <= least_us + self._drift_us - 2 * (self._drift_us // STEPS):
                        could_be_read.add((source, each.number))
        for key in self._held_since_us.keys() - could_be_read:
            del self._held_since_us[key]
        for key in could_be_read:
            held_us = now_us - self._held_since_us.setdefault(key, now_us)
            if self._grace_us is not None and held_us > self._grace_us:
                reader = self._readers[key[0]]
                self._world.bug(f"{reader.ref}: split {key[1]} has been held back for {held_us} µs, and could be read")

    # ---- in the coordinator ----

    def received(self, drift: SourceDrift, report: SourceProgress) -> None:
        self._received.setdefault(drift, Counter())[report.task] += 1

    def deployed(self, drift: SourceDrift, *_: object) -> None:
        self._received[drift] = Counter()

    @contextmanager
    def computing(self, drift: SourceDrift) -> Iterator[None]:
        self._now = drift
        yield
        self._now = None

    def ceiling(self, attempt: int, vertex: int, ceiling_us: int) -> DriftCeiling:
        """Make the message with a ceiling."""
        drift = self._now
        assert drift is not None
        coordinator, attempt_id = owner_of(drift), _attempt_id(drift, attempt)
        self._drifts[attempt_id] = drift
        [group] = [g for g in drift_groups(coordinator.plan.graph) if any(source.vertex == vertex for source in g)]
        vertices = frozenset(source.vertex for source in group)
        splits = coordinator.sources
        states = {each: splits._by_vertex[each] for each in vertices}
        backlogs = _backlogs(drift, vertices)
        known = _Known(Counter(self._received.get(drift, ())), vertices, backlogs)
        for each in vertices - backlogs if ceiling_us != MIN_WATERMARK_US and vertex not in backlogs else ():
            if states[each].position is None and splits._discovers and not states[each].exhausted:
                self._world.bug(f"a ceiling is {ceiling_us}, and the splits of vertex {each} are not known")
            for ref, phase in coordinator.attempt.phases.items():
                has_finished = phase is TaskPhase.FINISHED or ref in coordinator.attempt.finished_on_restore
                if ref.vertex == each and not has_finished and not known.reports[ref]:
                    self._world.bug(f"a ceiling is {ceiling_us}, and {ref} has not reported how far it is")
        self._sent.setdefault((attempt_id, vertex), []).append(known)
        return DriftCeiling(attempt, vertex, ceiling_us)


def _attempt_id(drift: SourceDrift, attempt: int) -> _AttemptId:
    coordinator = owner_of(drift)
    return coordinator.plan.job_id, coordinator.checkpoints.epoch, attempt


def _backlogs(drift: SourceDrift, vertices: frozenset[int]) -> frozenset[int]:
    """Return the sources that have splits which wait to be assigned."""
    splits = owner_of(drift).sources
    return frozenset(
        each for each in vertices if splits._discovers and splits._by_vertex[each].waiting_from_us < MAX_WATERMARK_US
    )


@contextmanager
def drift_is_checked(checker: DriftChecker) -> Iterator[None]:
    """Apply the rules within the block."""
    report, advance = SourceDrift.report, SourceDrift.advance
    rest, emit = SplitReads._let_rest, SourceReader._emit_timed

    def reported(self: SourceDrift, message: SourceProgress) -> None:
        checker.received(self, message)
        report(self, message)

    def computed(self: SourceDrift) -> None:
        with checker.computing(self):
            advance(self)

    def rested(self: SplitReads, open_split: Any, offset: int) -> None:
        rest(self, open_split, offset)
        checker.rests(self, open_split.number)
        checker.check_held()

    def emitted(self: SourceReader, open_splits: Any, batches: Any) -> None:
        for open_split in open_splits:
            checker.emits(self, open_split.number)
        emit(self, open_splits, batches)
        checker.check_held()

    with ExitStack() as stack:
        for each in (
            _followed(TaskOperators, "open", checker.opened),
            _followed(TaskOperators, "close", checker.closed),
            _followed(SourceReader, "set_ceiling", checker.arrives),
            _followed(SourceDrift, "deployed", checker.deployed),
            patch.object(SplitReads, "_let_rest", rested),
            patch.object(SourceReader, "_emit_timed", emitted),
            patch.object(SourceDrift, "report", reported),
            patch.object(SourceDrift, "advance", computed),
            patch.object(source_drift, "DriftCeiling", checker.ceiling),
        ):
            stack.enter_context(each)
        yield


def _followed(owner: type, name: str, then: Callable[..., None]) -> Any:
    """Return a patch that calls `then` with the same arguments after each call of a method."""
    original = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        result = original(*arguments)
        then(*arguments)
        return result

    return patch.object(owner, name, call)
