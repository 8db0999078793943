"""One subtask: reads its gates or its source, runs its chain, emits to its partitions.

Everything happens in `step`, a slice of work that always completes: its output goes to the
subpartitions even where that overdraws the pool, and the next step waits until the pool is whole.
Between two steps nothing is half done, so that is when mails are handled: triggers, splits,
completed checkpoints, timers.

    CREATED -> RUNNING -> FINISHING -> FINISHED
       \\_________\\___________\\______-> CLOSED (cancelled or failed)

FINISHING: all data is processed and `EndOfData` is on its way; the task still takes part in
checkpoints, and waits until one that it joined after that point completes, all it has emitted
is with its consumers, and it has answered for every checkpoint that it has joined. Only then are
its channels closed: whoever commits for it (the sinks' committer) is sure to have everything, and
what is still in flight is in every checkpoint.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from enum import Enum

import msgspec
import pyarrow as pa

from midstream.checkpoint.barriers import BarrierEvent, CancelReceived, TriggerReceived
from midstream.checkpoint.state_files import state_file
from midstream.core.config import JobConfig
from midstream.core.elements import (
    MAX_WATERMARK_US,
    MIN_WATERMARK_US,
    CheckpointBarrier,
    EndOfData,
    EndOfPartition,
    Event,
    Watermark,
    WatermarkStatus,
)
from midstream.core.errors import InvariantError
from midstream.core.ids import TaskId
from midstream.core.keys import key_group_range
from midstream.core.seams import Clock, Done, Executor, Failed, Ids, Storage, Timer
from midstream.exchange.gate import Arrival, InputGate
from midstream.exchange.partition import ResultPartition
from midstream.graph.job_graph import JobGraph
from midstream.graph.origins import channel_origins
from midstream.operators.bad_records import BAD_RECORDS
from midstream.operators.base import Operator, OperatorContext, Snapshot, SnapshotResult, Splits
from midstream.protocol import messages as m
from midstream.protocol.live_rows import RowsShown, ShowRows
from midstream.protocol.task_metrics import TaskMetrics
from midstream.state.parts import StatePart
from midstream.worker.chain import NOWHERE, Chain, Edges
from midstream.worker.checkpoints import TaskCheckpoints
from midstream.worker.failures import place_of_failure, task_failed
from midstream.worker.inputs import SLICE_S, TaskInput
from midstream.worker.live_rows import show_next
from midstream.worker.recovery import GateRecovery
from midstream.worker.snapshots import TaskSnapshots
from midstream.worker.source import Progress, SourceDriver
from midstream.worker.task_metrics import task_metrics

_log = logging.getLogger(__name__)

MAILS_IN_A_ROW_MAX = 32
"""Mails go before rows, but checkpoints without a pause must not keep the rows from getting on."""


class TaskState(Enum):
    CREATED = "created"
    RUNNING = "running"
    FINISHING = "finishing"
    FINISHED = "finished"
    CLOSED = "closed"


_RUNNING, _FINISHING = TaskState.RUNNING, TaskState.FINISHING  # a member takes ten times as long as a global to look up


@dataclass(frozen=True, slots=True)
class TaskSeams:
    """What a task needs of its slot."""

    job_id: str
    attempt: int
    epoch: int
    clock: Clock
    executor: Executor
    ids: Ids
    storage: Storage | None
    overtakable: Set[int]  # edges, on which barriers may overtake rows
    inline_bytes_max: int
    """What is stored inline in a checkpoint's metadata, at most, of its state and of what is in flight."""
    send: Callable[[m.FromSlot], None]
    schedule: Callable[[Task], None]
    """Have `step` called soon."""


class _TaskEdges(Edges):
    """The task's partitions, by the side output they carry."""

    def __init__(self, partitions: list[ResultPartition]) -> None:
        self._all = partitions
        self._by_tag: dict[str | None, list[ResultPartition]] = {}
        for partition in partitions:
            self._by_tag.setdefault(partition.edge.tag, []).append(partition)

    def emit(self, batch: pa.RecordBatch, tag: str | None) -> None:
        for partition in self._by_tag.get(tag, ()):
            partition.emit(batch)

    def watermark(self, watermark_us: int) -> None:
        self.broadcast(Watermark(watermark_us))

    def idle(self, idle: bool) -> None:
        self.broadcast(WatermarkStatus(idle))

    def has_reader(self, tag: str) -> bool:
        return tag in self._by_tag

    def broadcast(self, event: Event) -> None:
        for partition in self._all:
            partition.broadcast(event)


class Task:
    def __init__(
        self,
        ref: TaskId,
        graph: JobGraph,
        config: JobConfig,
        seams: TaskSeams,
        gates: list[InputGate],
        partitions: list[ResultPartition],
    ) -> None:
        self.ref = ref
        self.vertex = vertex = graph.vertices[ref.vertex]
        self.state = TaskState.CREATED
        self.gates = gates
        self.partitions = partitions
        self._config = config
        self._seams = seams
        self.mails: deque[Callable[[], None]] = deque()  # steps that come first and take next to no time
        self._mails_in_a_row = 0
        self._due: deque[Callable[[], None]] = deque()
        """Operators' timers that have come due; they may emit, so they wait for the output."""
        self._due_was_last = False
        """They take turns with rows, or an operator that is always due would keep the rows from getting on."""
        self._timers: set[Timer] = set()
        self._edges = _TaskEdges(partitions)
        self._chain = Chain([spec.operator for spec in vertex.operators], self._edges, seams.clock)
        heard = channel_origins(graph, ref)
        self._input = TaskInput(ref, gates, heard, self._chain, seams.clock, self._on_barrier, config.batch_rows)
        self._snapshots = TaskSnapshots(
            seams.attempt, ref, seams.executor, self._answer, self.fail, self.wake, seams.inline_bytes_max, seams.clock
        )
        self._checkpoints = TaskCheckpoints(
            path=lambda checkpoint_id: (seams.epoch, seams.attempt, checkpoint_id, *ref),
            gates=gates,
            partitions=partitions,
            overtakable=seams.overtakable,
            snapshots=self._snapshots,
            take=self._snapshot,
            rests=self._input.rests,
            mail=self.mail,
            fail=self.fail,
            clock=seams.clock,
            executor=seams.executor,
            storage=seams.storage,
            buffer_bytes=config.buffer_bytes,
            inline_bytes_max=seams.inline_bytes_max,
        )
        self._uids = [spec.uid for spec in vertex.operators]
        self._may_be_busy = [op for op in self._chain.operators if type(op).ready is not Operator.ready]
        self._source: SourceDriver | None = None
        self._holds_for: int | None = None
        """The checkpoint that the job is to stop with: behind its barrier the source is not read."""
        self._final_checkpoint: int | None = None
        """The first checkpoint that this task joined after its data had ended."""
        self._is_final = False
        """That one, or a later one, has completed."""
        self.busy_s = 0.0
        self.backpressured_s = 0.0
        self._backpressured_since: float | None = None
        self._to_recover_bytes = 0
        self.failure: BaseException | None = None

    # ---- life --------------------------------------------------------------

    def open(
        self,
        restored: Mapping[str, Mapping[str, StatePart]],
        stored: Mapping[str, m.ChunkHandle],
        watermarks: Mapping[str, tuple[int, int]],
    ) -> None:
        """Open every operator and give it its state; nothing runs yet. Raises whatever an operator raises.

        `restored`: parts by operator uid; `stored`: which of their chunks are in files already;
        `watermarks`: the last one offered to each operator, and the last one that left it.
        """
        self._snapshots.restored(stored)
        config, vertex = self._config, self.vertex
        if vertex.source is not None:
            head = vertex.source
            self._source = SourceDriver(
                head.source,
                parallelism=vertex.parallelism,
                rows_max=config.batch_rows,
                clock=self._seams.clock,
                executor=self._seams.executor,
                emit=self._chain.links[0].emit,
                emit_bad=lambda rows: self._edges.emit(rows, BAD_RECORDS),
                request_split=lambda: self._seams.send(m.RequestSplit(self._seams.attempt, self.ref)),
                wake=self.wake,
                fail=self.fail,
            )
            if head.uid in restored:
                self._source.restore(restored[head.uid])
        splits: Splits | None = self._source
        for index, spec in enumerate(vertex.operators):
            context = OperatorContext(
                uid=spec.uid,
                name=spec.name,
                subtask=self.ref.subtask,
                parallelism=vertex.parallelism,
                max_parallelism=config.max_parallelism,
                key_groups=key_group_range(self.ref.subtask, vertex.parallelism, config.max_parallelism),
                slice_s=SLICE_S,
                clock=self._seams.clock,
                executor=self._seams.executor,
                ids=self._seams.ids,
                storage=self._seams.storage,
                call_at=self._call_at,
                fail=self.fail,
                job_id=self._seams.job_id,
                attempt=self._seams.attempt,
                stored_bytes=self._snapshots.stored_bytes,
                splits=splits,
            )
            if not spec.operator.keeps_splits:
                splits = None
            self._chain.at = index, -1
            spec.operator.open(context, self._chain.links[index + 1])
            if spec.uid in restored:
                spec.operator.restore(restored[spec.uid])
            self._chain.at = NOWHERE
        self._chain.restore({i: watermarks[uid] for i, uid in enumerate(self._uids) if uid in watermarks})
        if not self._uids and vertex.source is not None and vertex.source.uid in watermarks:
            self._chain.offered_us[0] = watermarks[vertex.source.uid][1]
        if self.gates:
            self._input.restore(self._chain.offered_us[0])

    def start(self) -> None:
        self._become(TaskState.RUNNING, TaskState.CREATED)
        self._seams.send(m.TaskRunning(self._seams.attempt, self.ref))
        if self._chain.watermark_us > MIN_WATERMARK_US:
            self._edges.watermark(self._chain.watermark_us)  # its consumers have heard of it, but do not remember
        for gate in self.gates:
            if isinstance(gate.recovered, GateRecovery):
                self._to_recover_bytes += gate.recovered.total_bytes
                gate.recovered.start()
        self.wake()

    def close(self) -> None:
        """Drop everything at once: the attempt is over, or the slot ends. Gives back every buffer."""
        if self.state not in (TaskState.FINISHED, TaskState.CLOSED):
            self.state = TaskState.CLOSED
            self._let_go()
        for gate in self.gates:
            gate.discard()
        for partition in self.partitions:
            partition.discard()

    def fail(self, error: BaseException, *, symptom: bool = False) -> None:
        """The task cannot go on. Says so once, with the cause; `symptom`: it is hardly the root of it.

        Its channels stay until the attempt is cancelled: peers that do not know yet still send with the
        credit they have, and work on what they have taken by reference.
        """
        if self.state is TaskState.FINISHED:
            _log.warning("%s (subtask %d): failed after its end", self.vertex.name, self.ref.subtask, exc_info=error)
        if self.state in (TaskState.FINISHED, TaskState.CLOSED):
            return
        self.state, self.failure = TaskState.CLOSED, error
        self._let_go()
        self._seams.send(
            task_failed(
                self._seams.attempt,
                self.ref,
                self.vertex.name,
                error,
                symptom,
                self.operator_at_work[1],
                place_of_failure(self._source, self._chain, error, self.vertex.name),
            )
        )

    @property
    def operator_at_work(self) -> tuple[str, str]:
        """Name and uid of the operator that runs now, or has failed; nothing between two steps."""
        index = min(self._chain.at[0], len(self.vertex.operators) - 1)
        if index >= 0:
            spec = self.vertex.operators[index]
            return spec.name, spec.uid
        source = self.vertex.source
        return ("", "") if source is None else (source.name, source.uid)

    def _stop_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._due.clear()

    def _let_go(self) -> None:
        self._stop_timers()
        self.mails.clear()
        self._snapshots.close()
        self._checkpoints.close()
        if self._source is not None:
            self._source.close()
        for spec in self.vertex.operators:
            try:
                spec.operator.close()
            except BaseException:  # noqa: BLE001 - the others must be closed too, and what came out of it stands
                _log.warning("%s: closing it failed", spec.name, exc_info=True)

    def _become(self, state: TaskState, *expected: TaskState) -> None:
        if self.state not in expected:
            raise InvariantError(f"task {self.ref} is {self.state.value}, cannot become {state.value}")
        self.state = state

    @property
    def rows_in(self) -> int:
        return self._input.rows_in

    @property
    def rows_max(self) -> int:
        return self._config.batch_rows

    @property
    def edge_ids(self) -> set[int]:
        return {gate.edge.id for gate in self.gates} | {partition.edge.id for partition in self.partitions}

    @property
    def is_live(self) -> bool:
        return self.state is _RUNNING or self.state is _FINISHING

    # ---- mails from the slot -------------------------------------------------

    def wake(self) -> None:
        self._seams.schedule(self)

    def mail(self, work: Callable[[], None]) -> None:
        """Run `work` between two steps, after the mails already there."""
        self.mails.append(work)
        self.wake()

    def trigger_checkpoint(self, barrier: CheckpointBarrier, *, holds: bool = False) -> None:
        """`holds`: a source holds still behind it, unless it is aborted: the job stops or moves with this checkpoint."""

        def trigger() -> None:
            self._checkpoints.handle(TriggerReceived(barrier))
            if holds:
                self._holds_for = barrier.checkpoint_id

        if self.state is TaskState.FINISHED:  # it finished while the trigger was on its way
            self._snapshots.decline(barrier.checkpoint_id, f"task {self.ref} has finished", counts=False)
        else:
            self.mail(trigger)

    def arrived(self, gate: int, channel: int, event: Arrival) -> None:
        """A barrier or an end waits in a channel."""
        if self.is_live:
            self._checkpoints.arrived(gate, channel, event)

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        self.mail(lambda: self._on_completed(checkpoint_id))

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        self.mail(lambda: self._on_aborted(checkpoint_id))

    def read_on(self, checkpoint_id: int) -> None:
        """The tasks run on although the sources have held still behind the checkpoint."""
        self.mail(lambda: self._go_on_behind(checkpoint_id))

    def add_split(self, split: bytes, is_last: bool) -> None:
        """As a mail, like a trigger: which of the two came first decides whether the checkpoint holds the split."""
        source = self._source
        if source is not None and self.is_live:
            self.mail(lambda: source.add_split(split, is_last=is_last))

    def splits_assigned(self) -> None:
        """In its place among the splits; before the start there are none."""
        if self._source is not None and self.state is TaskState.CREATED:
            self._source.splits_assigned()
        elif self._source is not None and self.is_live:
            self.mail(self._source.splits_assigned)

    def no_more_splits(self) -> None:
        if self._source is not None and self.is_live:
            self.mail(self._source.no_more_splits)

    def stop_source(self) -> None:
        if self._source is not None and self.is_live:
            self.mail(self._source.stop)

    def _call_at(self, time_ms: int, mail: Callable[[], None]) -> Timer:
        if self.state not in (TaskState.CREATED, _RUNNING):
            raise InvariantError(f"task {self.ref} is {self.state.value}, and is to be called at {time_ms} ms")
        delay_s = max(0.0, (time_ms - self._seams.clock.now_ms()) / 1000)
        timer: Timer

        def due() -> None:
            self._timers.discard(timer)
            self._due.append(mail)
            self.wake()

        timer = self._seams.executor.call_later(delay_s, due)
        self._timers.add(timer)
        return timer

    # ---- the step ------------------------------------------------------------

    def step(self, started_s: float) -> bool:
        """One slice of work, begun at `started_s`. True: there is more to do now; False: `wake` will be called."""
        if not self.is_live:
            self.mails.clear()
            return False
        if self._backpressured_since is not None:
            self.backpressured_s += started_s - self._backpressured_since
            self._backpressured_since = None
        try:
            return self._step(started_s) or bool(self.mails)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - the border to user code, where a panic is no Exception
            self.fail(error)
            return False

    def _step(self, started_s: float) -> bool:
        if self._is_final and self._snapshots.is_idle and self._is_sent():
            self._end()  # before the mails: with checkpoints that follow at once there is always another trigger
            return False
        if self.mails and self._mails_in_a_row < MAILS_IN_A_ROW_MAX:
            self._mails_in_a_row += 1
            self.mails.popleft()()  # needs no buffer: barriers and bookkeeping
            return self._may_go_on()
        self._mails_in_a_row = 0
        if not self._output_available():
            self._backpressured_since = started_s
            return False
        if self._due and not self._chain.is_firing and not self._due_was_last:
            self._due_was_last = True
            self._due.popleft()()
            return True
        self._due_was_last = False
        return self._work() or bool(self._due)

    def _work(self) -> bool:
        """Rows, or what follows from them."""
        if self._chain.is_firing:
            self._chain.pump()
            return True
        if self.state is _FINISHING:
            return self._input.work(self._checkpoints.awaited_gates) and self._may_go_on()
        if self._input.has_ended:
            self._finish()
            return True
        if self._source is not None:
            return self._read_source()
        return self._input.work(self._checkpoints.awaited_gates) and self._may_go_on()

    def _may_go_on(self) -> bool:
        """Whether another step may find something to do; if not, `wake` will be called."""
        if self._due or self._chain.is_firing or self._input.may_go_on or self._is_final:
            return True
        return self.state is _RUNNING and (self._source is not None or self._input.has_ended)

    def _output_available(self) -> bool:
        for partition in self.partitions:
            if not partition.is_available():
                partition.wake_when_available(self.wake)
                return False
        return all(operator.ready(self.wake) for operator in self._may_be_busy)

    # ---- source ----

    def _read_source(self) -> bool:
        assert self._source is not None
        if self._holds_for is not None:
            return False
        progress = self._source.step()
        if progress is Progress.ENDED:
            self._input.has_ended = True
            self._chain.end_input(0)
            self._chain.offer(0, MAX_WATERMARK_US)
        return progress is not Progress.WAITING

    # ---- the end -------------------------------------------------------------

    def _finish(self) -> None:
        """Emit what is left and say so; then wait for the checkpoint that makes it final."""
        if self._input.drains:
            self._chain.finish()
        self._stop_timers()  # what operators would emit from here on would be behind the end of their data
        self._edges.broadcast(EndOfData(self._input.drains))
        self._become(TaskState.FINISHING, TaskState.RUNNING)
        if self._seams.storage is None:
            snapshots = [operator.snapshot(0) for operator in self._chain.operators]
            self._collect(snapshots, self._finish_without_checkpoint)
        else:
            self._seams.send(m.TaskEndOfData(self._seams.attempt, self.ref))

    def _finish_without_checkpoint(self, results: list[SnapshotResult]) -> None:
        committables = tuple(
            (uid, result.committables) for uid, result in zip(self._uids, results, strict=True) if result.committables
        )
        self._end(committables)

    def _is_sent(self) -> bool:
        """Whether all that was emitted is with the consumers; if not, `wake` will be called."""
        for partition in self.partitions:
            if not partition.is_sent:
                partition.wake_when_sent(self.wake)
                return False
        return True

    def _end(self, committables: tuple[tuple[str, tuple[bytes, ...]], ...] = ()) -> None:
        self._edges.broadcast(EndOfPartition())
        self._become(TaskState.FINISHED, TaskState.FINISHING)
        self._let_go()
        for gate in self.gates:
            gate.discard()
        self._seams.send(m.TaskFinished(self._seams.attempt, self.ref, committables))

    # ---- checkpoints -----------------------------------------------------------

    def _answer(self, message: m.FromSlot) -> None:
        if isinstance(message, m.CheckpointAck):
            message = msgspec.structs.replace(message, metrics=self.metrics())
        self._seams.send(message)

    def _on_barrier(self, event: BarrierEvent) -> None:
        self._checkpoints.handle(event)

    def _snapshot(self, barrier: CheckpointBarrier, alignment_ms: float) -> None:
        """Every operator's state and event time, as of this point between two slices."""
        checkpoint_id, began_s = barrier.checkpoint_id, self._seams.clock.stopwatch_s()
        self._snapshots.completed(barrier.completed_id)
        finished = self.state is TaskState.FINISHING
        if finished and self._final_checkpoint is None:
            self._final_checkpoint = checkpoint_id
        storage = self._seams.storage
        assert storage is not None, f"task {self.ref}: checkpoint {checkpoint_id} of a job without checkpoint storage"
        offered_us = self._chain.offered_us
        snapshots: list[tuple[m.OperatorSnapshot, Snapshot]] = []
        if self._source is not None and self.vertex.source is not None:
            parts = self._source.snapshot(self._seams.ids.new_id)
            head = m.OperatorSnapshot(
                self.vertex.source.uid, watermark_in_us=offered_us[0], watermark_out_us=offered_us[0]
            )
            snapshots.append((head, Snapshot(SnapshotResult(parts=parts))))
        for index, operator in enumerate(self._chain.operators):
            head = m.OperatorSnapshot(
                self._uids[index], watermark_in_us=offered_us[index], watermark_out_us=offered_us[index + 1]
            )
            snapshots.append((head, operator.snapshot(checkpoint_id)))
        file = state_file(self._seams.epoch, self._seams.attempt, checkpoint_id, *self.ref)
        self._snapshots.take(
            checkpoint_id, snapshots, storage, file, alignment_ms=alignment_ms, began_s=began_s, finished=finished
        )

    def _collect(self, snapshots: list[Snapshot], then: Callable[[list[SnapshotResult]], None]) -> None:
        """Complete snapshots that go nowhere but to the coordinator."""

        def work() -> list[SnapshotResult]:
            return [snapshot.complete() for snapshot in snapshots]

        def done(outcome: Done[list[SnapshotResult]] | Failed) -> None:
            if not self.is_live:
                return
            if isinstance(outcome, Failed):
                self.fail(outcome.error)
            else:
                then(outcome.value)

        self._seams.executor.submit(work, done)

    def _on_completed(self, checkpoint_id: int) -> None:
        self._snapshots.completed(checkpoint_id)
        for operator in self._chain.operators:
            operator.checkpoint_completed(checkpoint_id)
        if (
            self.state is TaskState.FINISHING
            and self._final_checkpoint is not None
            and checkpoint_id >= self._final_checkpoint
        ):
            self._is_final = True

    def _on_aborted(self, checkpoint_id: int) -> None:
        self._checkpoints.handle(CancelReceived(checkpoint_id))
        self._checkpoints.drop(checkpoint_id)
        if self._final_checkpoint == checkpoint_id:
            self._final_checkpoint = None
        self._go_on_behind(checkpoint_id)
        for operator in self._chain.operators:
            operator.checkpoint_aborted(checkpoint_id)

    def _go_on_behind(self, checkpoint_id: int) -> None:
        if self._holds_for == checkpoint_id:
            self._holds_for = None

    # ---- to look at ------------------------------------------------------------

    def metrics(self) -> TaskMetrics:
        backpressured_s = self.backpressured_s
        if self._backpressured_since is not None:
            backpressured_s += self._seams.clock.monotonic_s() - self._backpressured_since
        return task_metrics(
            self.ref,
            self.vertex,
            chain=self._chain,
            read=self._input,
            source=self._source,
            gates=self.gates,
            partitions=self.partitions,
            busy_s=self.busy_s,
            backpressured_s=backpressured_s,
            to_recover_bytes=self._to_recover_bytes,
        )

    def show(self, asked: ShowRows, answer: Callable[[RowsShown], None]) -> None:
        """See `show_next`."""
        if self.is_live:
            show_next(asked, self.ref.subtask, self.vertex, self._chain, self._seams.executor, answer)

    def check(self) -> None:
        """Everything that must hold between two steps."""
        if self.is_live:  # what has failed stands where it did
            self._chain.check()
        self._checkpoints.check()
        for gate in self.gates:
            gate.check()
        for partition in self.partitions:
            partition.check()
