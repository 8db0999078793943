"""One attempt to run the job: which slot runs which task, and how far each task is.

A task is DEPLOYING, RUNNING, FINISHING (all data is processed; it waits for a checkpoint), FINISHED, as ATTEMPT_TABLE says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from midstream.core.errors import InvariantError
from midstream.core.ids import TaskId
from midstream.core.transitions import Row, Table
from midstream.graph.job_graph import JobGraph
from midstream.protocol.messages import TaskEndOfData, TaskFinished, TaskRunning


class TaskPhase(Enum):
    DEPLOYING = "deploying"
    RUNNING = "running"
    FINISHING = "finishing"
    FINISHED = "finished"


_FINISHING, _FINISHED = TaskPhase.FINISHING, TaskPhase.FINISHED

Said: TypeAlias = TaskRunning | TaskEndOfData | TaskFinished

ATTEMPT_TABLE: Final[Table[TaskPhase, type[Said]]] = Table(
    "task, to the coordinator",
    (
        Row(TaskPhase.DEPLOYING, TaskRunning, (TaskPhase.RUNNING,), "once all tasks run, checkpoints begin"),
        Row(TaskPhase.RUNNING, TaskEndOfData, (_FINISHING,), "once all are here, a last checkpoint is made"),
        Row(
            TaskPhase.RUNNING,
            TaskFinished,
            (_FINISHED,),
            "a checkpoint has it as finished, or the job makes none: it need not wait for one",
        ),
        Row(
            _FINISHING, TaskFinished, (_FINISHED,), "once all are here, what they wrote is committed, and the job ends"
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """Who begins a checkpoint, who must acknowledge it, and who has nothing to add."""

    trigger: tuple[TaskId, ...]
    expected: frozenset[TaskId]
    finished: frozenset[TaskId]


class Attempt:
    """`slots[i]` runs subtask i of every vertex. `finished`: tasks that are deployed as finished."""

    def __init__(self, number: int, graph: JobGraph, slots: tuple[int, ...], finished: Collection[TaskId]) -> None:
        self.number = number
        self.slots = slots
        self._graph = graph
        self.phases = dict.fromkeys(tasks_of(graph), TaskPhase.DEPLOYING)
        self._in = dict.fromkeys(TaskPhase, 0)
        """How many are in which phase: it is looked at with every event, and there may be thousands."""
        self._in[TaskPhase.DEPLOYING] = len(self.phases)
        self._not_final: set[TaskId] = set()
        """FINISHING, and not in `final`."""
        self.awaited = set(slots)
        """Slots that have to answer `Deployed`, later `Cancelled`."""
        self.ending = set(finished)
        """Deployed as finished: they end by themselves, at once. A checkpoint would only meet that race."""
        self.final: set[TaskId] = set()
        """A completed checkpoint has them as finished: they end as soon as their rows are with their consumers."""
        self.has_checkpoint = False

    def slot_of(self, ref: TaskId) -> int:
        return self.slots[ref.subtask]

    def tasks_by_slot(self) -> dict[int, list[TaskId]]:
        """In the order of the slots."""
        tasks: dict[int, list[TaskId]] = {slot: [] for slot in self.slots}
        for ref in self.phases:
            tasks[self.slot_of(ref)].append(ref)
        return tasks

    def check_owner(self, slot: int, ref: TaskId) -> None:
        """Raises InvariantError when `slot` has no business to speak for the task."""
        if ref not in self.phases or self.slot_of(ref) != slot:
            raise InvariantError(f"slot {slot} speaks for task {ref}, which it does not run")

    def checkpoint_completed(self, finished: Iterable[TaskId]) -> None:
        self.has_checkpoint = True
        self.final.update(finished)
        self._not_final -= self.final

    def advance(self, ref: TaskId, said: type[Said]) -> None:
        """Raises InvariantError when that cannot be said now."""
        before = self.phases[ref]
        phase = ATTEMPT_TABLE.next(before, said)
        self.phases[ref] = phase
        self._in[before] -= 1
        self._in[phase] += 1
        if phase is _FINISHED:
            self.ending.discard(ref)
            self._not_final.discard(ref)
        elif phase is _FINISHING and ref not in self.final:
            self._not_final.add(ref)

    @property
    def all_started(self) -> bool:
        return not self._in[TaskPhase.DEPLOYING]

    @property
    def all_finished(self) -> bool:
        return self._in[_FINISHED] == len(self.phases)

    @property
    def at_end_of_data(self) -> bool:
        """Some tasks live, and all of those have processed all their data."""
        return 0 < self._in[_FINISHING] == len(self.phases) - self._in[_FINISHED]

    @property
    def awaits_checkpoint(self) -> bool:
        """All tasks that live are at the end of their data, and some cannot end without one more checkpoint."""
        return bool(self._not_final) and self.at_end_of_data

    def plan_checkpoint(self) -> CheckpointPlan:
        """Tasks none of whose producers lives begin it; every task that lives takes part."""
        live = {ref for ref, phase in self.phases.items() if phase is not _FINISHED}
        vertices = {ref.vertex for ref in live}

        def is_fed(ref: TaskId) -> bool:
            """By every subtask of some vertex, or by the one with its number."""
            return any(
                edge.source in vertices if edge.partitioning.all_to_all else TaskId(edge.source, ref.subtask) in live
                for edge in self._graph.inputs(ref.vertex)
            )

        trigger = tuple(ref for ref in self.phases if ref in live and not is_fed(ref))
        return CheckpointPlan(trigger, frozenset(live), frozenset(self.phases) - live)


def tasks_of(graph: JobGraph) -> tuple[TaskId, ...]:
    """Every task, vertex by vertex."""
    return tuple(TaskId(vertex.id, i) for vertex in graph.vertices for i in range(vertex.parallelism))
