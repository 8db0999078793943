"""One job in one slot, driven step by step: rows, event time, processing time, snapshots, the end.

Each call returns when there is nothing left to do, so that everything that follows from it has happened.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec
import pyarrow as pa

from midstream.engine.checkpoint.metadata import CheckpointMetadata, layout_of
from midstream.engine.checkpoint.redistribute_state import assign_state
from midstream.engine.coordinator.checkpoints.metadata_builder import channels_of, operator_states
from midstream.engine.coordinator.events import JobPlan
from midstream.engine.coordinator.placement.attempt import tasks_of
from midstream.engine.core.config import JobConfig
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.errors import InvariantError, JobError, MidstreamError
from midstream.engine.core.ids import TaskId
from midstream.engine.core.interfaces import ConnectionEnd, DataConnection
from midstream.engine.core.job_pickle import ApartUnpickler, pickled
from midstream.engine.core.tracebacks import raised_by_users_code
from midstream.engine.graph.graph_builder import build_job_graph
from midstream.engine.graph.job_graph import JobGraph, OperatorSpec
from midstream.engine.graph.logical_graph import LogicalGraph
from midstream.engine.operators.base import Operator
from midstream.engine.operators.source_api import Split
from midstream.engine.operators.watermarks import TimestampsOperator
from midstream.engine.protocol import messages as m
from midstream.engine.state.job_code import own_code
from midstream.engine.worker.interfaces import SlotServices
from midstream.engine.worker.slot_machine import SlotMachine
from midstream.engine.worker.task import Task
from midstream.inprocess.endpoints import Fed, FedSource, MarksOperator, TakingSink
from midstream.inprocess.own_modules import by_value, own_modules
from midstream.inprocess.virtual_loop import MemoryStorage, VirtualLoop
from midstream.runtime.calls_in_turn import CallsInTurn

STORAGE: Final = "memory"
POOL_BYTES: Final = 64 * 2**20
CALL_S_MAX: Final = 60.0
"""The limit on a call's processor time; a breakpoint in a debugger does not count."""
_OF_EVENT_TIME: Final = (TimestampsOperator, MarksOperator)
_encode: Final = msgspec.msgpack.Encoder().encode


class InProcessFailure(Exception):
    """A task has failed.

    `error`: what was raised in it, in the program's classes; `summary`: where, and in which row.
    """

    def __init__(self, summary: str, error: BaseException, originals: Mapping[type, type]) -> None:
        super().__init__(summary)
        self.summary = summary
        self.error = error
        raised: BaseException | None = error
        while raised is not None:
            if type(raised) in originals:
                raised.__class__ = originals[type(raised)]
            raised = raised.__cause__ or raised.__context__


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """The state and event time of a job between two rows. Any number of runs can be started from it.

    For example:

        >>> with testing.job(orders) as job:
        ...     snapshot = job.snapshot()
        >>> len(testing.run(orders, restore=snapshot).rows)
        3
    """

    metadata: CheckpointMetadata = field(repr=False)
    storage: MemoryStorage = field(repr=False)
    now_us: int
    unread: Mapping[int, pa.RecordBatch] = field(default_factory=dict, repr=False)
    """The batches that were fed and not read, by number: an operator that awaits its work takes no rows."""
    first_id: int = 0
    """The number of the first id that a job may use which is started from it."""


class InProcessJob:
    """Runs a job. `logical` has sources that are fed (`FedSource`) or the job's own, and sinks that keep their rows.

    `on_split_request` is called when a subtask of one of the job's own sources requests a split, `copied` with each subtask's copy
    of the graph. `passed_s`: see `VirtualLoop`.
    """

    def __init__(
        self,
        logical: LogicalGraph,
        config: JobConfig,
        now_us: int,
        restore: JobSnapshot | None = None,
        on_split_request: Callable[[m.RequestSplit], None] = lambda request: None,
        copied: Callable[[JobGraph], None] = lambda graph: None,
        passed_s: Callable[[], float] = lambda: 0.0,
        allow_dropped_state: bool = False,
    ) -> None:
        self._allow_dropped_state = allow_dropped_state
        # Chunks are known by their ids, so those that this job makes follow those that it restores.
        self.loop = VirtualLoop(now_us, passed_s, 0 if restore is None else restore.first_id)
        self.storage = MemoryStorage() if restore is None else copy(restore.storage)
        self._logical = logical
        self.on_split_request = on_split_request
        self._prepare = copied
        self.attempt = -1 if restore is None else restore.metadata.attempt
        self._checkpoint_id = 0 if restore is None else restore.metadata.checkpoint_id
        self._acks: dict[TaskId, m.CheckpointAck] = {}
        self._failed: m.TaskFailed | m.DeployFailed | None = None
        self._declined = ""
        self._closed = False
        self._broken = ""
        """The failure of a task, after which every call is refused."""
        self._fed: dict[int, pa.RecordBatch] = {} if restore is None else dict(restore.unread)
        self._batches = max(self._fed, default=-1) + 1
        self._rows: dict[str, int] = {}
        """The number of rows fed to each source, by uid."""
        self._turn: dict[str, int] = {}
        """The subtask that gets a source's next batch, by uid."""
        self._ended: set[str] = set()
        self.taken: dict[str, list[pa.RecordBatch]] = {}
        """The rows of each output so far, by its id."""
        self.originals: dict[type, type] = {}
        """Maps a subtask's own copy of a class to the program's class."""
        self._own_modules = own_modules(logical)
        self._config = config
        self._copies: list[JobGraph] = []
        self._slot = SlotMachine(
            SlotServices(
                clock=self.loop,
                executor=self.loop,
                ids=self.loop,
                transport=_NoPeers(),
                open_storage=lambda root: self.storage,
                send=self._handle,
                unpickle=lambda data: self._copies.pop(0),
                make_signal=threading.Event,
                open_calls=partial(CallsInTurn, self.loop),
            )
        )
        self._slot.slot_id = 0
        self._deploy(config.parallelism, None if restore is None else restore.metadata)

    # ---- the life of an attempt ----

    def _deploy(self, parallelism: int, metadata: CheckpointMetadata | None) -> None:
        self._config = msgspec.structs.replace(
            self._config, parallelism=parallelism, checkpoint_dir=STORAGE, pool_bytes=POOL_BYTES
        )
        self.graph = graph = build_job_graph(self._logical, self._config)
        self.attempt += 1
        with by_value(self._own_modules):
            graph.set_own_code(own_code(graph, (), self._config.trusted_packages))
            self.graph_bytes = pickled(graph)
        self.plan = JobPlan("in-process", graph, self.graph_bytes, self._config)
        tasks = tasks_of(graph)
        self._copies = self._copied(tasks)
        restored = b""
        if metadata is not None:
            state = assign_state(metadata, graph, self._allow_dropped_state)
            restored = _encode(m.Restored(tuple(state.tasks.items()), tuple(state.channels.items())))
        self._slot.handle(
            m.Deploy(
                job_id=self.plan.job_id,
                attempt=self.attempt,
                config=_encode(self._config),
                graph=self.graph_bytes,
                slots=(0,) * graph.slots,
                tasks=tasks,
                restore=restored,
                checkpoint_root=STORAGE,
            )
        )
        self._settle()
        for vertex in graph.vertices:
            if vertex.source is not None and isinstance(vertex.source.source, FedSource):
                for ref in self._subtasks(vertex.id):
                    self._slot.handle(m.SplitsAssigned(self.attempt, ref))
        self._slot.handle(m.Start(self.attempt, ()))
        for vertex in graph.vertices:  # there is no coordinator that keeps sources in step: no split is held back
            self._slot.handle(m.DriftCeiling(self.attempt, vertex.id, MAX_WATERMARK_US))
        self._settle()

    def _copied(self, tasks: Sequence[TaskId]) -> list[JobGraph]:
        """Unpickle the graph for each task. Tasks of one subtask may share a copy, since each uses another vertex."""
        copies: dict[int, JobGraph] = {}
        for ref in tasks:
            if ref.subtask not in copies:
                unpickler = ApartUnpickler(self.graph_bytes)
                graph = copies[ref.subtask] = unpickler.load()
                self.originals |= unpickler.originals
                self._prepare(graph)
                for vertex in graph.vertices:
                    if vertex.source is not None and isinstance(vertex.source.source, FedSource):
                        vertex.source.source.fed = self._fed
                    for spec in vertex.operators:
                        if isinstance(spec.sink, TakingSink):
                            spec.sink.taken = self.taken.setdefault(spec.sink.output, [])
        return [copies[ref.subtask] for ref in tasks]

    def close(self) -> None:
        """Close every operator. Exceptions of a function's `close` are ignored, as in a real job."""
        self._slot.close()
        self._closed = True

    # ---- what the slot reports ----

    def _handle(self, message: m.FromSlot) -> None:
        match message:
            case m.TaskFailed() | m.DeployFailed():
                self._failed = self._failed or message
            case m.CheckpointAck():
                self._acks[message.task] = message
            case m.CheckpointDecline():
                self._declined = message.reason
            case m.RequestSplit():
                source = self.graph.vertices[message.task.vertex].source
                if source is not None and isinstance(source.source, FedSource):
                    none_waits = m.SplitsAssigned(message.attempt, message.task, none_waits=True)
                    self.loop.post(partial(self._slot.handle, none_waits))
                self.on_split_request(message)
            case _:  # only a coordinator of several slots needs the others
                pass

    def _settle(self, enough: Callable[[], bool] = lambda: False) -> None:
        """Run everything that is due now. Raises InProcessFailure if a task has failed."""
        self._check_not_broken()
        self.loop.run(self._until(enough))
        self._raise_failure()

    def _until(self, enough: Callable[[], bool]) -> Callable[[], bool]:
        """Return a function that decides when to stop. It raises JobError if a call does not end, for example because a
        timer sets itself again and again.
        """
        began_s = time.process_time()

        def is_over() -> bool:
            if time.process_time() - began_s > CALL_S_MAX:
                self._broken = f"one call took more than {CALL_S_MAX:g} s of processor time"
                raise JobError(
                    f"{self._broken}, and seems endless: a timer may set itself again for a time that has passed. At "
                    "the end of the input the watermark is datetime.max, so every time has passed"
                )
            return self._failed is not None or enough()

        return is_over

    def _raise_failure(self) -> None:
        failed = self._failed
        if failed is None:
            return
        error = self._slot.failure if isinstance(failed, m.DeployFailed) else self._slot.tasks[failed.task].failure
        assert error is not None, failed.summary
        self._failed, self._broken = None, failed.summary
        raise InProcessFailure(failed.summary, error, self.originals) from error

    def _check_not_broken(self) -> None:
        if self._closed:
            raise JobError("the job is closed: its block has ended")
        if self._broken:
            raise JobError(f"the job has failed: {self._broken}; start another one, from a snapshot if there is one")

    # ---- sources ----

    @property
    def sources(self) -> dict[str, pa.Schema]:
        """The schemas of the sources, by uid."""
        return {v.source.uid: v.source.source.schema for v in self.graph.vertices if v.source is not None}

    def feed(self, uid: str, batch: pa.RecordBatch) -> None:
        """Feed rows to one source as one batch, to its subtasks in turn."""
        self._check_not_broken()
        vertex = self._vertex(uid)
        subtask = self._turn.get(uid, 0) % self.graph.vertices[vertex].parallelism
        self._turn[uid] = subtask + 1
        number, self._batches = self._batches, self._batches + 1
        self._fed[number] = batch
        first = self._rows.get(uid, 0)
        self._rows[uid] = first + batch.num_rows
        split = Split(f"batch {number}", _encode(Fed(number, first)))
        self._slot.handle(m.AssignSplit(self.attempt, TaskId(vertex, subtask), _encode(split)))
        self._settle()

    def has_ended(self, uid: str) -> bool:
        return uid in self._ended

    def end(self, uid: str) -> None:
        """End a source. Once all have ended, all timers and windows fire."""
        self._check_not_broken()
        self._ended.add(uid)
        for ref in self._subtasks(self._vertex(uid)):
            self._slot.handle(m.NoMoreSplits(self.attempt, ref))
        self._settle()
        while self._ended >= self.sources.keys() and any(task.awaits_work for task in self._slot.tasks.values()):
            due_us = self.loop.next_timer_us  # a call that has failed is repeated later
            assert due_us is not None, "work that is under way outside of the loop has no outcome"
            self.advance_processing_time(due_us)

    def stop_sources(self, enough: Callable[[], bool]) -> None:
        """End the job's own sources where they are, as if there were no more."""
        self._slot.handle(m.StopSources(self.attempt))
        self._settle(enough)

    def pass_on(self, message: m.ToSlot) -> None:
        """Pass an answer to the job's own sources."""
        self._slot.handle(message)

    @property
    def has_finished(self) -> bool:
        """Whether all tasks have processed all their rows."""
        return all(task.is_finishing for task in self._slot.tasks.values())

    def rows_read(self) -> dict[str, int]:
        """Return the number of rows read by each source that has not ended or has had rows, by uid."""
        heads = {vertex.source.uid for vertex in self.graph.vertices if vertex.source is not None}
        found: dict[str, int] = {}
        for task in self._slot.tasks.values():
            uid, _, rows = task.metrics().operators[0]
            if uid in heads and (rows or not task.is_finishing):
                found[uid] = found.get(uid, 0) + rows
        return found

    def _vertex(self, uid: str) -> int:
        return next(v.id for v in self.graph.vertices if v.source is not None and v.source.uid == uid)

    def _subtasks(self, vertex: int) -> list[TaskId]:
        return [TaskId(vertex, i) for i in range(self.graph.vertices[vertex].parallelism)]

    # ---- time ----

    def advance_processing_time(self, until_us: int, enough: Callable[[], bool] = lambda: False) -> None:
        self._check_not_broken()
        self.loop.advance(until_us, self._until(enough))
        self._raise_failure()

    def advance_to(self, watermark_us: int, uids: Sequence[str] | None = None) -> None:
        """Advance event time to `watermark_us` at every with_watermarks(), or only at `uids`.

        Raises JobError if the job has none.
        """
        self._check_not_broken()
        found = False
        for task, spec in self._operators():
            operator = spec.operator
            if isinstance(operator, _OF_EVENT_TIME) and (uids is None or spec.uid in uids):
                found = True
                task.mail(_advance(operator, watermark_us))
        if not found:
            raise JobError("advance_to: the job has no event time; call with_watermarks(column, strategy) in it")
        self._settle()

    def event_times(self) -> dict[str, list[str]]:
        """Return, for each source by uid, the uids of the with_watermarks() that its rows pass first."""
        found: dict[str, list[str]] = {}
        for node in self._logical.nodes:
            if node.source is not None:
                assert node.uid is not None
                found[node.uid] = list(self._first_event_times(node.id))
        return found

    def _first_event_times(self, node_id: int) -> Iterator[str]:
        for node in self._logical.nodes:
            if any(origin.node == node_id for origin in node.inputs):
                if isinstance(node.operator, _OF_EVENT_TIME):
                    assert node.uid is not None
                    yield node.uid
                else:
                    yield from self._first_event_times(node.id)

    # ---- state ----

    def operators(self, uid: str) -> list[Operator]:
        """Return the running operators with this uid, one per subtask."""
        return [spec.operator for _, spec in self._operators() if spec.uid == uid]

    @property
    def operator_names(self) -> dict[str, str]:
        """The names of the program's operators, by uid."""
        specs = (spec for vertex in self.graph.vertices for spec in vertex.operators)
        return {spec.uid: spec.name for spec in specs if not isinstance(spec.sink, TakingSink)}

    def _operators(self) -> Iterator[tuple[Task, OperatorSpec]]:
        for task in self._slot.tasks.values():
            for spec in task.vertex.operators:
                yield task, spec

    def snapshot(self) -> JobSnapshot:
        """Take a checkpoint of everything, as the job would, and complete it."""
        self._check_not_broken()
        if self._ended:
            raise JobError(f"source {min(self._ended)!r} has ended: take the snapshot before that")
        self._checkpoint_id += 1
        checkpoint_id, self._acks, self._declined = self._checkpoint_id, {}, ""
        sources = [ref for ref in tasks_of(self.graph) if self.graph.vertices[ref.vertex].source is not None]
        now_ms = self.loop.now_ms()
        # Barriers overtake rows immediately: time stands still, and an operator may take none before time has passed.
        self._slot.handle(m.TriggerCheckpoint(self.attempt, checkpoint_id, now_ms, tuple(sources), timeout_ms=0))
        self._settle()
        if self._declined:
            raise InvariantError(f"the snapshot was not completed: {self._declined}")
        missing = set(tasks_of(self.graph)) - set(self._acks)
        if missing:
            self._slot.handle(m.CheckpointAborted(self.attempt, checkpoint_id))
            self._settle()
            names = sorted({self.graph.vertices[ref.vertex].name for ref in missing})
            raise JobError(
                f"snapshot: rows wait for {names[0]!r}, which takes none while its calls are under way, and a snapshot cannot "
                "overtake them there. Let time pass first, with advance_processing_time(), so that the calls complete"
            )
        self._slot.handle(m.CheckpointCompleted(self.attempt, checkpoint_id))
        self._settle()
        vertices, edges = layout_of(self.graph)
        metadata = CheckpointMetadata(
            job_name=self._config.name,
            job_id=self.plan.job_id,
            checkpoint_id=checkpoint_id,
            epoch=0,
            attempt=self.attempt,
            created_ms=now_ms,
            completed_ms=now_ms,
            max_parallelism=self.graph.max_parallelism,
            vertices=vertices,
            edges=edges,
            operators=operator_states(self.plan, self._acks, frozenset(), None),
            sources=(),
            committables=(),
            state_bytes=0,
            files=(),
            channels=channels_of(self._acks),
        )
        return JobSnapshot(metadata, self.storage, self.loop.now_us, dict(self._fed), self.loop.next_id_number())

    def restore(self, snapshot: JobSnapshot, parallelism: int) -> None:
        """Begin a new attempt with the state of `snapshot`; rows taken so far remain."""
        self._slot.handle(m.Cancel(self.attempt))
        self._settle()
        self._fed.clear()
        self._fed.update(snapshot.unread)
        self._turn.clear()
        self._deploy(parallelism, snapshot.metadata)


def _advance(operator: TimestampsOperator | MarksOperator, watermark_us: int) -> Callable[[], None]:
    return lambda: operator.advance_to(watermark_us)


class _NoPeers:
    """An engine.core.interfaces.Transport without peers, as there is only one slot."""

    def open(self, slot: int, host: str, port: int, attempt: int, end: ConnectionEnd) -> DataConnection:
        raise InvariantError(f"a connection to slot {slot}, of which there is none")


def surfaced(failure: InProcessFailure) -> BaseException:
    """Return what a test should see: the exception of the user's own function, if there is one, with a note on its
    location.
    """
    error = failure.error
    cause = error.__cause__
    if isinstance(error, MidstreamError) and isinstance(cause, Exception) and raised_by_users_code(cause):
        noted(cause, failure.summary)
        return cause
    if not isinstance(error, Exception):  # an exit, or a panic of a library, would end more than the test
        wrapped = JobError(failure.summary)
        wrapped.__cause__ = error
        return wrapped
    if isinstance(cause, SystemExit):
        noted(error, failure.summary)
    return error


def noted(error: BaseException, note: str) -> None:
    """Make tracebacks show `note` with the exception."""
    error.add_note(note)
