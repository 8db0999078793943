"""The state machine of one slot, which deploys, runs and cancels the tasks of one attempt at a time.

SLOT_TABLE has the messages that are valid in each state. `deployment` builds the tasks of an attempt, and
`task_scheduler` chooses which of them runs next. Messages and completions of an attempt that is over, or is not the
current one, are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from functools import partial
from typing import Final

import msgspec

from midstream.engine.checkpoint.extents import inline_bytes_max
from midstream.engine.checkpoint.held_chunks import HeldChunks
from midstream.engine.core.config import JobConfig
from midstream.engine.core.elements import CheckpointBarrier
from midstream.engine.core.errors import InvariantError, assert_never
from midstream.engine.core.ids import TaskId
from midstream.engine.core.interfaces import Done, Failed
from midstream.engine.core.state_machine import Transition, TransitionHistory, TransitionTable, new_history
from midstream.engine.exchange.buffer_pool import BufferPool
from midstream.engine.graph.unaligned_edges import unaligned_edges
from midstream.engine.protocol import messages as m
from midstream.engine.protocol.live_rows import RowSample, SampleRows
from midstream.engine.state.columnar import FrameRun
from midstream.engine.worker.deployment import Deployment, Loaded, load
from midstream.engine.worker.failure_reports import deploy_failed
from midstream.engine.worker.interfaces import SlotServices, TaskServices
from midstream.engine.worker.slot_committers import SlotCommitters
from midstream.engine.worker.source_reads import SourceReads
from midstream.engine.worker.state_memory import RestoredTables, StateMemory, state_bytes_max
from midstream.engine.worker.task import Task
from midstream.engine.worker.task_scheduler import TaskScheduler


class SlotState(Enum):
    IDLE = auto()
    """No attempt runs here: none has been deployed, or the last one is over."""
    DEPLOYING = auto()
    """State is read on the I/O pool."""
    DEPLOYED = auto()
    """Tasks are built and open. Other slots may still be deploying."""
    RUNNING = auto()


class SlotEvent(Enum):
    """The events that are not messages."""

    OPENED = auto()
    NOT_OPENED = auto()


_IDLE, _DEPLOYING, _DEPLOYED, _RUNNING = SlotState
_FOR_TASKS_THAT_RUN: Final = (
    m.TriggerCheckpoint,
    m.CheckpointCompleted,
    m.CheckpointAborted,
    m.AssignSplit,
    m.DriftCeiling,
    m.NoMoreSplits,
    m.StopSources,
)
_OF_AN_ATTEMPT: Final = (m.Start, m.SplitsAssigned, m.ResumeSources, *_FOR_TASKS_THAT_RUN)


def _transitions(
    states: Iterable[SlotState], message: object, what: str, then: SlotState | None = None
) -> Iterator[Transition[SlotState, object]]:
    return (Transition(state, message, (then or state,), what) for state in states)


SLOT_TABLE: Final[TransitionTable[SlotState, object]] = TransitionTable(
    "slot",
    (
        Transition(_IDLE, m.Welcome, (_IDLE,), "the slot gets its number"),
        *_transitions(SlotState, m.Deploy, "running tasks are closed, state is read", _DEPLOYING),
        Transition(_DEPLOYING, SlotEvent.OPENED, (_DEPLOYED,), "reported to the coordinator"),
        Transition(_DEPLOYING, SlotEvent.NOT_OPENED, (_IDLE,), "everything is closed, the failure is reported"),
        Transition(_DEPLOYED, m.Start, (_RUNNING,), "links to other slots are opened, tasks run"),
        *_transitions((_DEPLOYED, _RUNNING), m.SplitsAssigned, "a mail for a source"),
        *_transitions((_DEPLOYING, _DEPLOYED, _RUNNING), m.ResumeSources, "a mail for tasks"),
        *(row for message in _FOR_TASKS_THAT_RUN for row in _transitions((_RUNNING,), message, "a mail for tasks")),
        *_transitions(SlotState, m.Cancel, "everything is closed", _IDLE),
        *_transitions(SlotState, m.Release, "everything is closed", _IDLE),
        *_transitions(SlotState, m.CommitSinks, "sinks are loaded"),
        *_transitions(SlotState, m.Commit, "a lane commits or aborts"),
        *_transitions(SlotState, m.Heartbeat, "the driver is alive"),
    ),
)
"""The events are classes of messages and members of `SlotEvent`."""


class SlotMachine:
    """One slot, which handles the coordinator's messages, and runs the tasks of the current attempt."""

    def __init__(self, services: SlotServices) -> None:
        self._services = services
        self._commits = SlotCommitters(services)
        self._source_reads = SourceReads(services.executor)
        self.slot_id = -1
        self.state = SlotState.IDLE
        self._history: TransitionHistory[SlotState] = new_history()
        self.attempt = -1
        """The number of the current attempt, or while IDLE of the last one."""
        self._graph = b""
        """The pickled JobGraph, as it was sent last."""
        self.failure: BaseException | None = None
        """The exception with which the last deployment failed."""
        self._deployment: Deployment | None = None
        """The deployment of the current attempt, once it is built."""
        self.tasks: dict[TaskId, Task] = {}
        """The tasks of the deployment that run. Its other tasks had finished in the checkpoint."""
        self.pool: BufferPool | None = None
        self._scheduler = TaskScheduler(services.clock, services.executor)
        """The scheduler of the current attempt, or of the next one. Each attempt has its own."""
        self._opening: Task | None = None
        """The task whose operators are being opened."""
        self._config: JobConfig
        """The settings of the current attempt."""
        self._entry_operators = 0
        """How many operators of the current attempt hold state as Python objects."""
        self._sharing = 1
        """How many of the job's slots share the memory of this machine: all, until it is known where they are."""
        self._held = HeldChunks()
        """The chunks of the last attempt that was opened and has ended, until the next one is opened."""
        self._held_bytes = 0
        """The memory that all state in columns of that attempt took, as far as it was measured."""
        self._state_memory: StateMemory | None = None
        """The memory of the state of the current attempt, once it runs."""

    # ---- messages --------------------------------------------------------------

    def handle(self, message: m.ToSlot) -> None:  # noqa: PLR0912 - one arm for each message
        """Handle one message of the coordinator. They arrive in the order of sending.

        Failures of the job do not raise here: they are reported.
        """
        if isinstance(message, _OF_AN_ATTEMPT) and (message.attempt != self.attempt or self.state is SlotState.IDLE):
            return
        if isinstance(message, m.Cancel) and message.attempt != self.attempt:
            self._services.send(m.Cancelled(message.attempt))
            return
        before = self.state
        self._transition(type(message))
        match message:
            case m.Welcome(slot=slot):
                self.slot_id = slot
            case m.Heartbeat():
                pass
            case m.CommitSinks():
                self._commits.load(msgspec.structs.replace(message, graph=self._graph_of(message)))
            case m.Commit():
                self._commits.commit(message)
            case m.Deploy():
                if before is not SlotState.IDLE:
                    self._end_attempt()
                self._deploy(message)
            case m.Cancel(attempt):
                self._end_attempt()
                self._services.send(m.Cancelled(attempt))
            case m.Release():
                self._end_attempt()
                self._held = HeldChunks()
            case m.Start(_, peers):
                self._start(peers)
            case m.TriggerCheckpoint(_, checkpoint_id, created_ms, tasks, timeout_ms, pauses_sources, completed_id):
                barrier = CheckpointBarrier(checkpoint_id, created_ms, timeout_ms, completed_id, pauses_sources)
                for ref in tasks:
                    self._task(ref).trigger_checkpoint(barrier)
            case m.CheckpointCompleted(_, checkpoint_id):
                for task in self.tasks.values():
                    task.checkpoint_completed(checkpoint_id)
            case m.CheckpointAborted(_, checkpoint_id):
                for task in self.tasks.values():
                    task.checkpoint_aborted(checkpoint_id)
            case m.ResumeSources(_, checkpoint_id):
                for task in self.tasks.values():
                    task.resume_source(checkpoint_id)
            case m.AssignSplit(_, ref, split, waiting_from_us, assigned):
                self._task(ref).add_split(split, waiting_from_us, assigned)
            case m.SplitsAssigned(_, ref, none_waits, assigned):
                if self._deployment is not None and ref not in self._deployment.finished:
                    self._task(ref).splits_assigned(none_waits, assigned)
            case m.DriftCeiling(_, vertex, ceiling_us):
                for ref, task in self.tasks.items():
                    if ref.vertex == vertex:
                        task.set_ceiling(ceiling_us)
            case m.NoMoreSplits(_, ref):
                self._task(ref).no_more_splits()
            case m.StopSources():
                for task in self.tasks.values():
                    task.stop_source()
            case _:
                assert_never(message)

    def close(self) -> None:
        """End everything that runs here, as if the slot were released."""
        self.handle(m.Release())

    def status(self) -> m.SlotStatus:
        """The slot's status for the heartbeat. The process adds its memory metrics."""
        tasks = self._deployment.all_tasks if self._deployment is not None else ()
        memory = self._state_memory
        return m.SlotStatus(
            attempt=self.attempt,
            tasks=tuple(task.metrics() for task in tasks),
            warnings=() if memory is None else memory.warnings,
            state_memory_bytes=0 if memory is None else memory.bytes_in_memory,
            state_disk_bytes=0 if memory is None else memory.bytes_on_disk,
        )

    def sample_rows(self, request: SampleRows, reply: Callable[[RowSample], None]) -> None:
        """Show rows to users. `reply` is called at most once per task, and not if the operator does not run here."""
        for task in self.tasks.values():
            task.show(request, reply)

    def current_operator(self) -> tuple[str, str, int]:
        """The name, uid and subtask of the operator that runs now, or ("", "", -1) between two steps."""
        task = self._opening or self._scheduler.current_task
        return ("", "", -1) if task is None else (*task.operators.current_operator, task.ref.subtask)

    def check(self) -> None:
        """Check every invariant that must hold between two mails."""
        if self._deployment is not None:
            self._deployment.check()

    def _transition(self, event: object) -> None:
        """Change the state by SLOT_TABLE. Raises InvariantError for an event that is not valid in the current state."""
        self.state, before = SLOT_TABLE.next(self.state, event, self._history), self.state
        self._history.append((before, event))

    def _task(self, ref: TaskId) -> Task:
        task = self.tasks.get(ref)
        if task is None:
            raise InvariantError(f"slot {self.slot_id} has no task {ref}")
        return task

    def _graph_of(self, message: m.Deploy | m.CommitSinks) -> bytes:
        self._graph = message.graph or self._graph
        if not self._graph:
            raise InvariantError(f"slot {self.slot_id} must use the job's graph, and was never sent one")
        return self._graph

    # ---- the life of an attempt ----------------------------------------------------

    def _deploy(self, deploy: m.Deploy) -> None:
        """Read the state on the I/O pool, then build the tasks and open their operators."""
        self.attempt = deploy.attempt
        self.failure = None  # its traceback refers to everything that the previous attempt had restored
        config = msgspec.msgpack.decode(deploy.config, type=JobConfig)
        unpickle = partial(self._services.unpickle, self._graph_of(deploy))

        def done(outcome: Done[Loaded] | Failed) -> None:
            if self.attempt != deploy.attempt or self.state is not SlotState.DEPLOYING:
                return
            if isinstance(outcome, Failed):
                self._not_opened(outcome.error)
                return
            try:
                self._open(deploy, config, outcome.value)
            except BaseException as error:  # noqa: BLE001 - opening runs user code: any failure is the job's
                self._not_opened(error)
                return
            self._held = HeldChunks()
            self._transition(SlotEvent.OPENED)
            self._services.send(m.Deployed(deploy.attempt))

        services, tables = self._services, None
        if services.local_disk is not None:
            # which of the slots share a machine is not known yet
            limit_bytes = state_bytes_max(config, services.memory_limit_bytes, len({*deploy.slots}))
            tables = RestoredTables(limit_bytes, services.local_disk, self._held_bytes)
        work = partial(load, deploy, config, services.open_storage, unpickle, tables, self._held)
        services.executor.submit(work, done)

    def _open(self, deploy: m.Deploy, config: JobConfig, loaded: Loaded) -> None:
        self._config = config
        vertices = [graph.vertices[ref.vertex] for ref, graph in loaded.graphs.items()]
        self._entry_operators = sum(spec.operator.holds_entries for vertex in vertices for spec in vertex.operators)
        self._sharing = len({*deploy.slots})  # which of them share a machine is not known yet
        any_graph = next(iter(loaded.graphs.values()))
        subtasks = sum(vertex.parallelism for vertex in any_graph.vertices)
        services = TaskServices(
            job_id=deploy.job_id,
            attempt=deploy.attempt,
            epoch=deploy.epoch,
            config=config,
            clock=self._services.clock,
            executor=self._services.executor,
            ids=self._services.ids,
            storage=loaded.storage,
            unaligned_edges=unaligned_edges(any_graph),
            inline_bytes_max=inline_bytes_max(config.inline_bytes, subtasks),
            send=self._services.send,
            open_calls=self._services.open_calls,
            source_reads=self._source_reads,
            schedule=self._scheduler.schedule,
            resources=self._services.resources,
            entry_bytes=self._entry_bytes,
        )
        self._deployment = Deployment(self.slot_id, deploy, loaded, services)
        self.tasks, self.pool = self._deployment.tasks, self._deployment.pool
        for ref, task in self.tasks.items():
            self._opening = task
            task.open(loaded.restored[ref])
        self._opening = None

    def _state_bytes(self) -> tuple[int | None, int | None]:
        """Return the bytes that state may take in columns, and those that each operator's Python objects may take.

        If there are such operators, they share half of the state's memory.
        """
        services = self._services
        limit_bytes = state_bytes_max(self._config, services.memory_limit_bytes, self._sharing)
        if limit_bytes is None or services.local_disk is None:
            return None, None
        if not self._entry_operators:
            return limit_bytes, None
        return limit_bytes // 2, limit_bytes // 2 // self._entry_operators

    def _entry_bytes(self) -> int | None:
        return self._state_bytes()[1]

    def _not_opened(self, error: BaseException) -> None:
        self.failure = error
        task = self._opening
        opening = None if task is None else (task.ref, *task.operators.current_operator)
        self._transition(SlotEvent.NOT_OPENED)
        self._end_attempt()
        self._services.send(deploy_failed(self.attempt, error, opening))

    def _start(self, peers: tuple[m.Peer, ...]) -> None:
        """Open the links to other slots, and start all tasks. All slots are deployed by now."""
        assert self._deployment is not None
        self._scheduler.start()
        self._limit_state(peers)
        self._deployment.connect(peers, self._services.transport)
        for task in self._deployment.all_tasks:
            task.start()

    def _limit_state(self, peers: tuple[m.Peer, ...]) -> None:
        services = self._services
        if services.local_disk is None:
            return
        own = [peer.host for peer in peers if peer.slot == self.slot_id]
        self._sharing = sum(peer.host in own for peer in peers) or 1
        limit_bytes, _ = self._state_bytes()
        self._state_memory = StateMemory(
            self._state_runs, limit_bytes, services.local_disk, services.clock, services.executor
        )
        self._state_memory.poll()

    def _state_runs(self) -> Iterator[FrameRun]:
        """Yield the runs of all state in columns."""
        for task in self.tasks.values():
            if task.is_live:
                for operator in task.operators.chain.operators:
                    yield from operator.state_runs()

    def _end_attempt(self) -> None:
        """Close everything that runs here."""
        self._commits.end_attempt()
        if self._state_memory is not None:
            self._held_bytes = self._state_memory.bytes_in_memory
            self._state_memory.close()
            self._state_memory = None
        if self.tasks and self._opening is None:
            self._held = HeldChunks(self._services.on_taken)
            for task in self.tasks.values():
                task.hold_chunks(self._held)
        if self._deployment is not None:
            self._deployment.close()
        self._scheduler.stop()
        self._scheduler = TaskScheduler(self._services.clock, self._services.executor)
        self._deployment = self.pool = self._opening = None
        self.tasks = {}
