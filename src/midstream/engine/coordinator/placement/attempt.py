"""One attempt to run the job: which slot runs which task, and how far each task is.

A task is DEPLOYING, RUNNING, FINISHING (it has processed all its data and waits for a checkpoint: `Task.is_finishing`)
or FINISHED; TASK_PHASE_TABLE says what leads from one to the next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from midstream.engine.core.errors import InvariantError
from midstream.engine.core.ids import TaskId
from midstream.engine.core.state_machine import Transition, TransitionTable
from midstream.engine.graph.job_graph import JobGraph
from midstream.engine.protocol.messages import TaskEndOfData, TaskFinished, TaskRunning


class TaskPhase(Enum):
    DEPLOYING = "deploying"
    RUNNING = "running"
    FINISHING = "finishing"
    FINISHED = "finished"


_FINISHING, _FINISHED = TaskPhase.FINISHING, TaskPhase.FINISHED

TaskReport: TypeAlias = TaskRunning | TaskEndOfData | TaskFinished

TASK_PHASE_TABLE: Final[TransitionTable[TaskPhase, type[TaskReport]]] = TransitionTable(
    "task, to the coordinator",
    (
        Transition(TaskPhase.DEPLOYING, TaskRunning, (TaskPhase.RUNNING,), "once all tasks run, checkpoints begin"),
        Transition(
            TaskPhase.RUNNING,
            TaskEndOfData,
            (_FINISHING,),
            "once all unfinished tasks are FINISHING, a final checkpoint is made",
        ),
        Transition(
            TaskPhase.RUNNING,
            TaskFinished,
            (_FINISHED,),
            "a checkpoint records it as finished, or the job makes none: it need not wait for one",
        ),
        Transition(
            _FINISHING, TaskFinished, (_FINISHED,), "once all tasks are, their output is committed, and the job ends"
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The tasks that are triggered for a checkpoint, those that must acknowledge it, and those that have finished."""

    trigger: tuple[TaskId, ...]
    expected: frozenset[TaskId]
    finished: frozenset[TaskId]


class Attempt:
    """The tasks of one attempt. `slots[i]` runs subtask i of every vertex. `finished`: tasks deployed as finished."""

    def __init__(self, number: int, graph: JobGraph, slots: tuple[int, ...], finished: Collection[TaskId]) -> None:
        self.number = number
        self.slots = slots
        self._graph = graph
        self.phases = dict.fromkeys(tasks_of(graph), TaskPhase.DEPLOYING)
        self._count_by_phase = dict.fromkeys(TaskPhase, 0)
        """The number of tasks in each phase: there may be thousands, and it is needed for every event."""
        self._count_by_phase[TaskPhase.DEPLOYING] = len(self.phases)
        self._awaiting_final_checkpoint: set[TaskId] = set()
        """The tasks that are FINISHING and not in `recorded_finished`."""
        self.unanswered = set(slots)
        """The slots that have still to answer `Deployed`, or later `Cancelled`."""
        self.finished_on_restore = set(finished)
        """The tasks deployed as finished that have not ended yet. They end immediately, and no checkpoint is triggered
        until then: their end would abort it.
        """
        self.recorded_finished: set[TaskId] = set()
        """The tasks that a completed checkpoint records as finished: they end once their consumers have their rows."""
        self.has_checkpoint = False

    def slot_of(self, ref: TaskId) -> int:
        return self.slots[ref.subtask]

    def tasks_by_slot(self) -> dict[int, list[TaskId]]:
        """Return the tasks of each slot, in the order of `slots`."""
        tasks: dict[int, list[TaskId]] = {slot: [] for slot in self.slots}
        for ref in self.phases:
            tasks[self.slot_of(ref)].append(ref)
        return tasks

    def check_owner(self, slot: int, ref: TaskId) -> None:
        """Raise InvariantError if `slot` does not run the task about which it has sent a message."""
        if ref not in self.phases or self.slot_of(ref) != slot:
            raise InvariantError(f"slot {slot} sent a message about task {ref}, which it does not run")

    def checkpoint_completed(self, finished: Iterable[TaskId]) -> None:
        self.has_checkpoint = True
        self.recorded_finished.update(finished)
        self._awaiting_final_checkpoint -= self.recorded_finished

    def advance(self, ref: TaskId, report: type[TaskReport]) -> None:
        """Record a task's message. Raises InvariantError if it cannot come in the phase of the task."""
        before = self.phases[ref]
        phase = TASK_PHASE_TABLE.next(before, report)
        self.phases[ref] = phase
        self._count_by_phase[before] -= 1
        self._count_by_phase[phase] += 1
        if phase is _FINISHED:
            self.finished_on_restore.discard(ref)
            self._awaiting_final_checkpoint.discard(ref)
        elif phase is _FINISHING and ref not in self.recorded_finished:
            self._awaiting_final_checkpoint.add(ref)

    @property
    def all_started(self) -> bool:
        return not self._count_by_phase[TaskPhase.DEPLOYING]

    @property
    def all_finished(self) -> bool:
        return self._count_by_phase[_FINISHED] == len(self.phases)

    @property
    def at_end_of_data(self) -> bool:
        """Whether some tasks have not finished, and all of these have processed all their data."""
        return 0 < self._count_by_phase[_FINISHING] == len(self.phases) - self._count_by_phase[_FINISHED]

    @property
    def awaits_checkpoint(self) -> bool:
        """Whether `at_end_of_data`, and some task cannot finish without one more checkpoint."""
        return bool(self._awaiting_final_checkpoint) and self.at_end_of_data

    def plan_checkpoint(self) -> CheckpointPlan:
        """Plan a checkpoint: tasks whose producers have all finished are triggered, and every unfinished task takes
        part.
        """
        live = {ref for ref, phase in self.phases.items() if phase is not _FINISHED}
        vertices = {ref.vertex for ref in live}

        def is_fed(ref: TaskId) -> bool:
            """Whether a producer of the task has not finished."""
            return any(
                edge.source in vertices if edge.partitioning.all_to_all else TaskId(edge.source, ref.subtask) in live
                for edge in self._graph.inputs(ref.vertex)
            )

        trigger = tuple(ref for ref in self.phases if ref in live and not is_fed(ref))
        return CheckpointPlan(trigger, frozenset(live), frozenset(self.phases) - live)


def tasks_of(graph: JobGraph) -> tuple[TaskId, ...]:
    """Return every task, vertex by vertex."""
    return tuple(TaskId(vertex.id, i) for vertex in graph.vertices for i in range(vertex.parallelism))
