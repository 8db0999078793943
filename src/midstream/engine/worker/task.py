"""Runs one subtask: it reads its gates or its source, runs its operators, and emits to its partitions.

Everything happens in `step`, a slice of work that always completes: its output goes to the subpartitions even if that
overdraws the pool, and the next step waits until the pool is no longer overdrawn. Between two steps nothing is half
done. That is why a mail (a trigger, a split, a completed checkpoint) is a step of its own.

TASK_TABLE has the states of a task and the events that lead from one to the next. Only `Task.next_step` chooses what a
task does next, and `Step` lists the choices.

A task whose data has ended still takes part in checkpoints. It ends when three conditions are met: a checkpoint that it
joined after the end of its data has completed, its consumers have received all that it has emitted, and it has
acknowledged or declined every checkpoint that it has joined. Only then are its channels closed. So the sinks'
committers have everything that the task's sinks have prepared, and rows still in flight are in every checkpoint.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Final

from midstream.engine.checkpoint.barrier_handler import CancelReceived, TriggerReceived
from midstream.engine.checkpoint.held_chunks import HeldChunk, HeldChunks
from midstream.engine.core.elements import (
    MAX_WATERMARK_US,
    MIN_WATERMARK_US,
    Assigned,
    CheckpointBarrier,
    EndOfData,
    EndOfPartition,
    Watermark,
)
from midstream.engine.core.ids import TaskId
from midstream.engine.core.interfaces import Done, Failed
from midstream.engine.core.state_machine import Transition, TransitionHistory, TransitionTable, new_history
from midstream.engine.exchange.input_gate import InputGate
from midstream.engine.exchange.listeners import BarrierOrEnd
from midstream.engine.exchange.result_partition import ResultPartition
from midstream.engine.graph.idleness import channel_origins, is_bounded
from midstream.engine.graph.job_graph import JobGraph
from midstream.engine.operators.base import SnapshotResult
from midstream.engine.protocol import messages as m
from midstream.engine.protocol.live_rows import RowSample, SampleRows
from midstream.engine.protocol.task_metrics import TaskMetrics
from midstream.engine.worker.failure_reports import position_of_failure, task_failed
from midstream.engine.worker.interfaces import TaskServices
from midstream.engine.worker.live_row_sample import sample_next_batch
from midstream.engine.worker.source_reader import ReadProgress, SourceReader
from midstream.engine.worker.task_checkpoints import TaskCheckpoints
from midstream.engine.worker.task_input import TaskInput
from midstream.engine.worker.task_metrics import has_dropped, task_metrics
from midstream.engine.worker.task_operators import RestoredOperators, TaskOperators
from midstream.engine.worker.task_snapshots import TaskSnapshots

_log = logging.getLogger(__name__)

MAILS_IN_A_ROW_MAX = 32
"""The maximum number of mails handled in a row. Mails go before rows, but continuous checkpoints must not starve the
rows."""


class TaskState(Enum):
    CREATED = "created"
    RUNNING = "running"
    PAUSED = "paused"
    """The job stops or moves with a checkpoint: after its barrier the source is not read."""
    EMITTING_LAST = "emits its last results"
    """The input has ended. The last results are still to be emitted."""
    AWAITS_CHECKPOINT = "awaits its final checkpoint"
    """`EndOfData` is sent. Each checkpoint that the task joins from now on has everything that it has emitted."""
    AWAITS_SINKS = "awaits its sinks"
    """`EndOfData` is sent, in a job without checkpoints. What the sinks have prepared is committed when all tasks have
    ended."""
    AWAITS_SENT = "awaits that all is sent"
    """The final checkpoint has completed. The task ends once its consumers have received everything, and it has
    acknowledged or declined every checkpoint."""
    FINISHED = "finished"
    CLOSED = "closed"
    """The task was cancelled, or has failed."""


class TaskEvent(Enum):
    """The events that change the state of a task."""

    START = "start"
    PAUSE = "pause"
    RESUME = "resume"
    INPUT_ENDED = "input ended"
    ALL_EMITTED = "all emitted"
    COMPLETED = "final checkpoint completed"
    FINISH = "finish"
    FAIL = "fail"
    CLOSE = "close"


_CREATED, _RUNNING, _PAUSED, _EMITTING_LAST, _AWAITS_CHECKPOINT, _AWAITS_SINKS, _AWAITS_SENT, _FINISHED, _CLOSED = (
    TaskState
)
_ALL_EMITTED: Final = (_AWAITS_CHECKPOINT, _AWAITS_SINKS, _AWAITS_SENT)
LIVE: Final = (_RUNNING, _PAUSED, _EMITTING_LAST, *_ALL_EMITTED)

TASK_TABLE: Final[TransitionTable[TaskState, TaskEvent]] = TransitionTable(
    "task",
    (
        Transition(_CREATED, TaskEvent.START, (_RUNNING,), "consumers get the restored watermark; recovery begins"),
        Transition(_RUNNING, TaskEvent.PAUSE, (_PAUSED,), "the source is not read"),
        Transition(_PAUSED, TaskEvent.PAUSE, (_PAUSED,), "the job retries with another checkpoint"),
        Transition(
            _PAUSED, TaskEvent.RESUME, (_RUNNING,), "the checkpoint is aborted, or the job continues nevertheless"
        ),
        Transition(_RUNNING, TaskEvent.INPUT_ENDED, (_EMITTING_LAST,), "watermarks fire"),
        Transition(_EMITTING_LAST, TaskEvent.ALL_EMITTED, (_AWAITS_CHECKPOINT, _AWAITS_SINKS), "`EndOfData` is sent"),
        Transition(
            _AWAITS_CHECKPOINT, TaskEvent.COMPLETED, (_AWAITS_SENT,), "nothing of the task can be lost any more"
        ),
        *(
            Transition(state, TaskEvent.FINISH, (_FINISHED,), "channels are closed")
            for state in (_AWAITS_SINKS, _AWAITS_SENT)
        ),
        *(Transition(state, TaskEvent.FAIL, (_CLOSED,), "the failure is reported") for state in (_CREATED, *LIVE)),
        *(Transition(state, TaskEvent.CLOSE, (_CLOSED,), "everything is dropped") for state in (_CREATED, *LIVE)),
    ),
)


class Step(Enum):
    """The steps of a task. `Task.next_step` chooses the next one."""

    FINISH = "finish"
    """Everything is committed, sent and acknowledged."""
    MAIL = "handle a mail"
    """A mail handles barriers and bookkeeping, and needs no buffer."""
    WAIT = "wait for room in the output"
    FIRE = "fire a slice of a watermark"
    TIMER = "call a timer that is due, or the completion of work"
    READ_GATES = "read from the gates"
    """Read rows, or after the end of the data the remaining barriers and ends."""
    READ_SOURCE = "read from the source"
    PAUSE = "wait while the source is paused"
    FLUSH = "emit the rest"


# Reading an enum member takes ten times as long as reading a global.
_FINISH, _MAIL, _WAIT, _FIRE, _TIMER, _READ_GATES, _READ_SOURCE, _PAUSE, _FLUSH = Step


class Task:
    """One subtask of a vertex. It implements `engine.exchange.listeners.TaskListener`."""

    def __init__(
        self,
        ref: TaskId,
        graph: JobGraph,
        services: TaskServices,
        gates: list[InputGate],
        partitions: list[ResultPartition],
    ) -> None:
        self.ref = ref
        self.vertex = graph.vertices[ref.vertex]
        self.state = TaskState.CREATED
        self._history: TransitionHistory[TaskState] = new_history()
        self.gates = gates
        self.partitions = partitions
        self._services = services
        self.mails: deque[Callable[[], None]] = deque()
        self._mails_in_a_row = 0
        self._last = Step.READ_GATES
        """The last step that could emit. Timers take turns with rows: an operator whose timers are always due would
        starve the rows. Kept apart from TaskState because it applies in every state."""
        self.operators = operators = TaskOperators(
            ref, self.vertex, is_bounded(graph, ref.vertex), services, partitions, self.wake, self.fail
        )
        self._snapshots = TaskSnapshots(ref, services, self.metrics, self.fail, self.wake)
        self._checkpoints = TaskCheckpoints(self, services, self._snapshots)
        self.input = TaskInput(
            ref,
            gates,
            channel_origins(graph, ref),
            operators.chain,
            services.clock,
            self._checkpoints.handle,
            self._input_ended,
            services.config.batch_rows,
        )
        self._paused_after: int | None = None
        """The checkpoint after whose barrier the source is not read, while the task is PAUSED."""
        self._final_checkpoint: int | None = None
        """The first checkpoint that the task has joined since its data ended. Whichever completes first, this one or a
        later one, has everything that the task has emitted. If this one is aborted, the later ones remain valid: they
        may have been joined before the abort arrived."""
        self.busy_s = 0.0
        self.backpressured_s = 0.0
        self._waits_since: float | None = None
        self._waits_for_work_of: int | None = None
        """The operator whose own work, outside of the loop, the task waits for: that is no backpressure, but work."""

        self.failure: BaseException | None = None
        channels = 0
        for gate in gates:
            gate.listen(self, first_channel=channels)
            channels += len(gate.channels)
        for partition in partitions:
            partition.listen(self)

    # ---- life --------------------------------------------------------------

    def open(self, restored: RestoredOperators) -> None:
        """Open every operator and give it its state. Nothing runs yet. Raises any exception that an operator raises."""
        self._snapshots.restored(restored.known)
        self.operators.open(restored, self._snapshots.stored_bytes)
        if self.gates:
            self.input.restore(self.operators.chain.offered_us[0])

    def start(self) -> None:
        self._transition(TaskState.RUNNING, TaskEvent.START)
        self._services.send(m.TaskRunning(self._services.attempt, self.ref))
        watermark_us = self.operators.chain.watermark_us
        if watermark_us > MIN_WATERMARK_US:
            # Consumers do not store the watermarks of their channels.
            self.operators.outputs.broadcast(Watermark(watermark_us))
        self.input.recover()
        self.wake()

    def hold_chunks(self, held: HeldChunks) -> None:
        """Add what another attempt may take of the state. The task has ended, or will be closed next."""
        for operator in self.operators.chain.operators:
            for run, made in operator.stored_runs():
                assert run.chunk_id is not None
                held.add(self._snapshots.handles_of(run.chunk_id), HeldChunk(run, made))

    def close(self) -> None:
        """Drop everything and release every buffer: the attempt is over, or the slot ends."""
        if self.state not in (TaskState.FINISHED, TaskState.CLOSED):
            self._transition(TaskState.CLOSED, TaskEvent.CLOSE)
            self._release()
        for gate in self.gates:
            gate.discard()
        for partition in self.partitions:
            partition.discard()

    def fail(self, error: BaseException, *, symptom: bool = False) -> None:
        """End the task with this failure, and report it once.

        `symptom`: the failure is probably a consequence of another one. The task's channels stay until the attempt is
        cancelled: peers that have not been notified still send with the credit that they have, and process batches that
        they have by reference.
        """
        if self.state is TaskState.FINISHED:
            _log.warning("%s (subtask %d): failed after its end", self.vertex.name, self.ref.subtask, exc_info=error)
        if self.state in (TaskState.FINISHED, TaskState.CLOSED):
            return
        self._transition(TaskState.CLOSED, TaskEvent.FAIL)
        self.failure = error
        self._release()
        operators, name = self.operators, self.vertex.name
        position = position_of_failure(operators.source, operators.chain, error, name)
        self._services.send(
            task_failed(self._services.attempt, self.ref, name, error, symptom, operators.current_operator[1], position)
        )

    def _release(self) -> None:
        self.operators.stop_timers()
        self.mails.clear()
        self._snapshots.close()
        self._checkpoints.close()
        self.operators.close()

    def _transition(self, state: TaskState, event: TaskEvent) -> None:
        """Change the state. Raises InvariantError, with the task's history, if TASK_TABLE has no such transition."""
        before, self.state = self.state, TASK_TABLE.check(self.state, event, state, self._history)
        self._history.append((before, event))

    @property
    def is_live(self) -> bool:
        """Whether the task has a next step."""
        return self.state in LIVE

    @property
    def is_finishing(self) -> bool:
        """Whether the task is FINISHING, as the coordinator names it: it has processed all its data, and waits until that is
        committed.
        """
        return self.state in _ALL_EMITTED

    @property
    def awaits_work(self) -> bool:
        """Whether an operator will emit rows when work that is under way outside of the loop completes."""
        return self.is_live and self.operators.chain.awaits_work

    # ---- from gates and partitions -------------------------------------------

    def wake(self) -> None:
        self._services.schedule(self)

    def on_arrival(self, channel: int, event: BarrierOrEnd) -> None:
        self._checkpoints.on_arrival(channel, event)

    def on_barrier_sent(self, checkpoint_id: int) -> None:
        self._checkpoints.on_barrier_sent(checkpoint_id)

    # ---- mails from the slot -------------------------------------------------

    def mail(self, work: Callable[[], None]) -> None:
        """Run `work` as a step of its own, after the mails that were posted before."""
        self.mails.append(work)
        self.wake()

    def trigger_checkpoint(self, barrier: CheckpointBarrier) -> None:
        """Begin this checkpoint, in a task that reads a source or whose producers have all finished."""
        checkpoint_id = barrier.checkpoint_id

        def trigger() -> None:
            self._history.append((self.state, f"trigger of checkpoint {checkpoint_id}"))
            self._checkpoints.handle(TriggerReceived(barrier))
            if barrier.pauses_sources and self.operators.source is not None and self.state in (_RUNNING, _PAUSED):
                self._transition(TaskState.PAUSED, TaskEvent.PAUSE)
                self._paused_after = checkpoint_id

        if self.state is TaskState.FINISHED:  # it finished while the trigger was in transit
            self._snapshots.decline(checkpoint_id, f"task {self.ref} has finished", counts=False)
        else:
            self.mail(trigger)

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        self.mail(lambda: self._on_completed(checkpoint_id))

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        self.mail(lambda: self._on_aborted(checkpoint_id))

    def resume_source(self, checkpoint_id: int) -> None:
        """Resume the source if it is PAUSED after the barrier of this checkpoint: the task continues."""
        self.mail(lambda: self._resume_source(checkpoint_id))

    def add_split(self, split: bytes, waiting_from_us: int, assigned: int) -> None:
        """Assign a split. It is a mail, like a trigger: a split that arrived before the trigger is in the
        checkpoint."""
        counts = self._split_counts(assigned)
        self._mail_source(lambda source: source.add_split(split, waiting_from_us=waiting_from_us, assigned=counts))

    def splits_assigned(self, none_waits: bool, assigned: int) -> None:
        """Every split found so far is assigned; `none_waits`: this is the answer to the last request.

        It is a mail, so that it keeps its position among the splits. Before the start there are no splits and no mails.
        """
        counts = self._split_counts(assigned)
        if self.operators.source is not None and self.state is TaskState.CREATED:
            self.operators.source.splits_assigned(none_waits, counts)
        else:
            self._mail_source(lambda source: source.splits_assigned(none_waits, counts))

    def _split_counts(self, assigned: int) -> Assigned:
        return ((self.ref.vertex, assigned),) if assigned else ()

    def set_ceiling(self, ceiling_us: int) -> None:
        self._mail_source(lambda source: source.set_ceiling(ceiling_us))

    def no_more_splits(self) -> None:
        self._mail_source(lambda source: source.no_more_splits())

    def stop_source(self) -> None:
        self._mail_source(lambda source: source.stop())

    def _mail_source(self, call: Callable[[SourceReader], None]) -> None:
        source = self.operators.source
        if source is not None and self.is_live:
            self.mail(lambda: call(source))

    # ---- the step ------------------------------------------------------------

    def step(self, started_s: float) -> bool:
        """Do one slice of work, begun at `started_s`. Returns False if the next one has to wait for `wake`."""
        if not self.is_live:
            self.mails.clear()
            return False
        if self._waits_since is not None:
            self._count_wait(started_s)
            self._waits_since = None
        try:
            return self._step(started_s) or bool(self.mails)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - the border to user code, where a panic is no Exception
            self.fail(error)
            return False

    def next_step(self) -> Step:
        """The next step of a live task. If it is WAIT, `wake` will be called. The call changes nothing else."""
        state, operators = self.state, self.operators
        if state is _AWAITS_SENT and self._snapshots.is_idle and self._is_sent():
            return _FINISH  # before the mails: with continuous checkpoints there is always another trigger
        if self.mails and self._mails_in_a_row < MAILS_IN_A_ROW_MAX:
            return _MAIL
        if not self._output_available():
            return _WAIT
        if operators.chain.is_firing and operators.are_ready(operators.chain.firing):
            return _FIRE
        may_call = operators.next_due() is not None
        if may_call and self._last is not _TIMER:
            return _TIMER
        if operators.chain.is_firing or not operators.are_ready(-1):
            return _TIMER if may_call else _WAIT
        if state is _RUNNING:
            return _READ_GATES if operators.source is None else _READ_SOURCE
        if state is _PAUSED:
            return _PAUSE
        return _FLUSH if state is _EMITTING_LAST and not operators.chain.awaits_work else _READ_GATES

    def _step(self, started_s: float) -> bool:
        """Do the next step. Returns whether another one may have something to do. If not, `wake` will be called."""
        step = self.next_step()
        if step is _MAIL:
            self._mails_in_a_row += 1
            self.mails.popleft()()
            return self._may_have_work()
        self._mails_in_a_row = 0
        if step is _WAIT:
            self._waits_since = started_s
            self._waits_for_work_of = self.operators.at_work() if self._output_available() else None
            return False
        self._last = step
        if step is _READ_GATES:
            has_more = self.input.work(self._checkpoints.priority_gates) and self._may_have_work()
        elif step is _READ_SOURCE:
            has_more = self._read_source()
        elif step is _FIRE:
            self.operators.chain.pump()
            return True
        elif step is _TIMER:
            due = self.operators.next_due()
            assert due is not None, "a timer step, and nothing can be called"
            self.operators.call_due(due)
            self.operators.chain.completed_work()
            return True
        elif step is _FLUSH:
            self._finish()
            return True
        elif step is _FINISH:
            self._end()
            return False
        else:
            assert step is _PAUSE, step
            has_more = False
        return has_more or bool(self.operators.due)

    def _may_have_work(self) -> bool:
        operators, state = self.operators, self.state
        if operators.due or operators.chain.is_firing or self.input.may_have_data:
            return True
        if state is _RUNNING or state is _PAUSED:
            return operators.source is not None
        return state is _AWAITS_SENT or (state is _EMITTING_LAST and not operators.chain.awaits_work)

    def _output_available(self) -> bool:
        for partition in self.partitions:
            if not partition.is_available():
                partition.wake_when_available()
                return False
        return True

    def _read_source(self) -> bool:
        source, chain = self.operators.source, self.operators.chain
        assert source is not None
        progress = source.step()
        if progress is ReadProgress.ENDED:
            self._input_ended()
            chain.end_input(0)
            chain.offer(0, MAX_WATERMARK_US)
        return progress is not ReadProgress.WAITING

    # ---- the end -------------------------------------------------------------

    def _input_ended(self) -> None:
        self._transition(TaskState.EMITTING_LAST, TaskEvent.INPUT_ENDED)

    def _finish(self) -> None:
        """Emit the last results and `EndOfData`. Then the task waits for its final checkpoint."""
        operators = self.operators
        operators.chain.finish()
        operators.stop_timers()  # a timer would emit rows after the end of the data
        operators.outputs.broadcast(EndOfData())
        if self._services.storage is None:
            self._transition(TaskState.AWAITS_SINKS, TaskEvent.ALL_EMITTED)
            self._prepare_sinks()
        else:
            self._transition(TaskState.AWAITS_CHECKPOINT, TaskEvent.ALL_EMITTED)
            self._services.send(m.TaskEndOfData(self._services.attempt, self.ref))

    def _prepare_sinks(self) -> None:
        """Send what the sinks prepare to the coordinator. Nothing is stored, because the job has no checkpoints."""
        operators = self.operators
        snapshots = [operator.snapshot(0) for operator in operators.chain.operators]

        def work() -> list[SnapshotResult]:
            return [snapshot.complete() for snapshot in snapshots]

        def done(outcome: Done[list[SnapshotResult]] | Failed) -> None:
            if not self.is_live:
                return
            if isinstance(outcome, Failed):
                self.fail(outcome.error)
                return
            prepared = zip(operators.uids, outcome.value, strict=True)
            self._end(tuple((uid, result.committables) for uid, result in prepared if result.committables))

        self._services.executor.submit(work, done)

    def _is_sent(self) -> bool:
        """Whether the consumers have received everything that was emitted. If not, `wake` will be called."""
        for partition in self.partitions:
            if not partition.is_sent:
                partition.wake_when_sent()
                return False
        return True

    def _end(self, committables: tuple[tuple[str, tuple[bytes, ...]], ...] = ()) -> None:
        self.operators.outputs.broadcast(EndOfPartition())
        metrics = self.metrics()
        self._transition(TaskState.FINISHED, TaskEvent.FINISH)
        self._release()
        for gate in self.gates:
            gate.discard()
        self._services.send(m.TaskFinished(self._services.attempt, self.ref, committables, metrics))

    # ---- checkpoints -----------------------------------------------------------

    def take_snapshot(self, barrier: CheckpointBarrier, alignment_ms: float) -> None:
        """Take a snapshot of every operator's state and event time, as they are between two slices."""
        checkpoint_id, began_s = barrier.checkpoint_id, self._services.clock.stopwatch_s()
        self._snapshots.completed(barrier.completed_id)
        finished = self.state in _ALL_EMITTED
        if finished and self._final_checkpoint is None:
            self._final_checkpoint = checkpoint_id
        snapshots = self.operators.snapshot(checkpoint_id)
        self._snapshots.store(
            checkpoint_id,
            snapshots,
            alignment_ms=alignment_ms,
            began_s=began_s,
            finished=finished,
            with_metrics=finished or barrier.pauses_sources or has_dropped(self),
        )

    def _on_completed(self, checkpoint_id: int) -> None:
        self._history.append((self.state, f"checkpoint {checkpoint_id} completed"))
        self._snapshots.completed(checkpoint_id)
        if self.operators.source is not None:
            self.operators.source.checkpoint_completed(checkpoint_id)
        for operator in self.operators.chain.operators:
            operator.checkpoint_completed(checkpoint_id)
        final = self._final_checkpoint
        if self.state is _AWAITS_CHECKPOINT and final is not None and checkpoint_id >= final:
            self._transition(TaskState.AWAITS_SENT, TaskEvent.COMPLETED)

    def _on_aborted(self, checkpoint_id: int) -> None:
        self._history.append((self.state, f"checkpoint {checkpoint_id} aborted"))
        self._checkpoints.handle(CancelReceived(checkpoint_id))
        self._checkpoints.drop(checkpoint_id)
        self._resume_source(checkpoint_id)
        if self.operators.source is not None:
            self.operators.source.checkpoint_aborted(checkpoint_id)
        for operator in self.operators.chain.operators:
            operator.checkpoint_aborted(checkpoint_id)

    def _resume_source(self, checkpoint_id: int) -> None:
        """Resume the source if it is PAUSED after the barrier of this checkpoint."""
        if self.state is _PAUSED and self._paused_after == checkpoint_id:
            self._transition(TaskState.RUNNING, TaskEvent.RESUME)
            self._paused_after = None

    # ---- metrics and checks ----------------------------------------------------

    def metrics(self) -> TaskMetrics:
        if self._waits_since is not None:
            now_s = self._services.clock.monotonic_s()
            self._count_wait(now_s)
            self._waits_since = now_s
        return task_metrics(self)

    def _count_wait(self, until_s: float) -> None:
        """Count the wait so far: as backpressure, or as work of the operator that is at work."""
        assert self._waits_since is not None
        waited_s, index = until_s - self._waits_since, self._waits_for_work_of
        if index is None:
            self.backpressured_s += waited_s
        else:
            self.busy_s += waited_s
            self.operators.chain.worked_s[index] += waited_s

    def show(self, request: SampleRows, reply: Callable[[RowSample], None]) -> None:
        """Show the next rows of an operator, as `sample_next_batch` does."""
        if self.is_live:
            sample_next_batch(
                request, self.ref.subtask, self.vertex, self.operators.chain, self._services.executor, reply
            )

    def check(self) -> None:
        """Check everything that must hold between two steps."""
        if self.is_live:  # a failure interrupts the chain within its work
            self.operators.chain.check()
            self.input.check()
            if self.operators.source is not None:
                self.operators.source.check()
        self._checkpoints.check()
        for gate in self.gates:
            gate.check()
        for partition in self.partitions:
            partition.check()
