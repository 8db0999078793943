"""One subtask: reads its gates or its source, runs its operators, emits to its partitions.

Everything happens in `step`, a slice of work that always completes: its output goes to the
subpartitions even where that overdraws the pool, and the next step waits until the pool is whole.
Between two steps nothing is half done. So a mail is a step of its own: a trigger, a split, a
completed checkpoint.

TASK_TABLE says which states there are and what leads from one to the next; `Task.next_step` is the
one place where it is decided what a task does next, and its members say what that can be.

A task whose data has ended still takes part in checkpoints, and waits until one that it joined after
that point completes, all it has emitted is with its consumers, and it has answered for every
checkpoint that it has joined. Only then are its channels closed: whoever commits for it (the sinks'
committer) is sure to have everything, and what is still in flight is in every checkpoint.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Final

import msgspec

from midstream.checkpoint.barriers import CancelReceived, TriggerReceived
from midstream.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US, CheckpointBarrier, EndOfData, EndOfPartition
from midstream.core.ids import TaskId
from midstream.core.seams import Done, Failed
from midstream.core.transitions import Row, Story, Table, new_story
from midstream.exchange.gate import InputGate
from midstream.exchange.lease import LeasedBatch
from midstream.exchange.partition import ResultPartition
from midstream.graph.job_graph import JobGraph
from midstream.graph.origins import channel_origins
from midstream.operators.base import SnapshotResult
from midstream.protocol import messages as m
from midstream.protocol.live_rows import RowsShown, ShowRows
from midstream.protocol.task_metrics import TaskMetrics
from midstream.worker.checkpoints import TaskCheckpoints
from midstream.worker.failures import place_of_failure, task_failed
from midstream.worker.inputs import TaskInput
from midstream.worker.live_rows import show_next
from midstream.worker.operators import RestoredOperators, TaskOperators
from midstream.worker.recovery import GateRecovery
from midstream.worker.seams import TaskSeams
from midstream.worker.snapshots import TaskSnapshots
from midstream.worker.source import Progress, SourceDriver
from midstream.worker.task_metrics import task_metrics

_log = logging.getLogger(__name__)

MAILS_IN_A_ROW_MAX = 32
"""Mails go before rows, but checkpoints without a pause must not keep the rows from getting on."""


class TaskState(Enum):
    CREATED = "created"
    RUNNING = "running"
    HELD = "held"
    """The job stops or moves with a checkpoint: behind its barrier the source is not read."""
    ENDING = "ending"
    """The input has ended; what follows from it is still to be emitted."""
    AWAITS_CHECKPOINT = "awaits its final checkpoint"
    """`EndOfData` is on its way; a checkpoint that is joined from here on has all that the task has made."""
    AWAITS_SINKS = "awaits its sinks"
    """Likewise, in a job without checkpoints: what its sinks have prepared is committed when all tasks have ended."""
    AWAITS_SENT = "awaits that all is sent"
    """Its final checkpoint has completed."""
    FINISHED = "finished"
    CLOSED = "closed"
    """Cancelled or failed."""


class TaskEvent(Enum):
    """What changes the state of a task."""

    START = "start"
    HOLD = "hold"
    READ_ON = "read on"
    INPUT_ENDED = "input ended"
    ALL_EMITTED = "all emitted"
    COMPLETED = "final checkpoint completed"
    END = "end"
    FAIL = "fail"
    CLOSE = "close"


_CREATED, _RUNNING, _HELD, _ENDING, _AWAITS_CHECKPOINT, _AWAITS_SINKS, _AWAITS_SENT, _FINISHED, _CLOSED = TaskState
_FINISHING: Final = (_AWAITS_CHECKPOINT, _AWAITS_SINKS, _AWAITS_SENT)
LIVE: Final = (_RUNNING, _HELD, _ENDING, *_FINISHING)

TASK_TABLE: Final[Table[TaskState, TaskEvent]] = Table(
    "task",
    (
        Row(_CREATED, TaskEvent.START, (_RUNNING,), "consumers hear how far event time had come; recovery begins"),
        Row(_RUNNING, TaskEvent.HOLD, (_HELD,), "the source is not read"),
        Row(_HELD, TaskEvent.HOLD, (_HELD,), "the job tries again, with another checkpoint"),
        Row(_HELD, TaskEvent.READ_ON, (_RUNNING,), "the checkpoint is aborted, or the job goes on all the same"),
        Row(_RUNNING, TaskEvent.INPUT_ENDED, (_ENDING,), "watermarks fire"),
        Row(_ENDING, TaskEvent.ALL_EMITTED, (_AWAITS_CHECKPOINT, _AWAITS_SINKS), "`EndOfData` goes out"),
        Row(_AWAITS_CHECKPOINT, TaskEvent.COMPLETED, (_AWAITS_SENT,), "nothing of the task can be lost any more"),
        *(Row(state, TaskEvent.END, (_FINISHED,), "channels are closed") for state in (_AWAITS_SINKS, _AWAITS_SENT)),
        *(Row(state, TaskEvent.FAIL, (_CLOSED,), "the coordinator is told why") for state in (_CREATED, *LIVE)),
        *(Row(state, TaskEvent.CLOSE, (_CLOSED,), "everything is dropped") for state in (_CREATED, *LIVE)),
    ),
)


class Step(Enum):
    """What a task does next: one of these, chosen by `Task.next_step`."""

    END = "end"
    """All is committed, sent and answered."""
    MAIL = "handle a mail"
    """Barriers and bookkeeping: needs no buffer."""
    WAIT = "wait for room in the output"
    FIRE = "go on with a watermark"
    TIMER = "call a timer that is due"
    READ_GATES = "read from the gates"
    """Rows, or once the data has ended barriers and ends."""
    READ_SOURCE = "read from the source"
    HOLD = "hold the source still"
    FINISH = "emit what is left"


# A member takes ten times as long as a global to look up.
_END, _MAIL, _WAIT, _FIRE, _TIMER, _READ_GATES, _READ_SOURCE, _HOLD, _FINISH = Step


class Task:
    def __init__(
        self, ref: TaskId, graph: JobGraph, seams: TaskSeams, gates: list[InputGate], partitions: list[ResultPartition]
    ) -> None:
        self.ref = ref
        self.vertex = graph.vertices[ref.vertex]
        self.state = TaskState.CREATED
        self._story: Story[TaskState] = new_story()
        self.gates = gates
        self.partitions = partitions
        self._seams = seams
        self.mails: deque[Callable[[], None]] = deque()
        self._mails_in_a_row = 0
        self._last = Step.READ_GATES
        """The last step that could emit: timers take turns with rows, or an operator that is always due would keep the
        rows from getting on. No state: it says whose turn it is in any of them."""
        self.operators = operators = TaskOperators(ref, self.vertex, seams, partitions, self.wake, self.fail)
        self._snapshots = TaskSnapshots(ref, seams, self._answer, self.fail, self.wake)
        self._checkpoints = TaskCheckpoints(ref, seams, gates, partitions, self._snapshots, self)
        heard, handle, rows_max = channel_origins(graph, ref), self._checkpoints.handle, seams.config.batch_rows
        self._input = TaskInput(
            ref, gates, heard, operators.chain, seams.clock, handle, self._input_ended, rows_max=rows_max
        )
        self._awaited: int | None = None
        """HELD: the checkpoint behind whose barrier it holds. AWAITS_CHECKPOINT: the first one that it has joined since
        its data ended; None: none yet."""
        self.busy_s = 0.0
        self.backpressured_s = 0.0
        self._backpressured_since: float | None = None
        self._to_recover_bytes = 0
        self.failure: BaseException | None = None

    # ---- life --------------------------------------------------------------

    def open(self, restored: RestoredOperators) -> None:
        """Open every operator and give it its state; nothing runs yet. Raises whatever an operator raises."""
        self._snapshots.restored(restored.known)
        self.operators.open(restored, self._snapshots.stored_bytes)
        if self.gates:
            self._input.restore(self.operators.chain.offered_us[0])

    def start(self) -> None:
        self._become(TaskState.RUNNING, TaskEvent.START)
        self._seams.send(m.TaskRunning(self._seams.attempt, self.ref))
        watermark_us = self.operators.chain.watermark_us
        if watermark_us > MIN_WATERMARK_US:
            self.operators.edges.watermark(watermark_us)  # its consumers have heard of it, but do not remember
        for gate in self.gates:
            if isinstance(gate.recovered, GateRecovery):
                self._to_recover_bytes += gate.recovered.total_bytes
                gate.recovered.start()
        self.wake()

    def close(self) -> None:
        """Drop everything at once: the attempt is over, or the slot ends. Gives back every buffer."""
        if self.state not in (TaskState.FINISHED, TaskState.CLOSED):
            self._become(TaskState.CLOSED, TaskEvent.CLOSE)
            self._let_go()
        for gate in self.gates:
            gate.discard()
        for partition in self.partitions:
            partition.discard()

    def fail(self, error: BaseException, *, symptom: bool = False) -> None:
        """The task cannot go on. Says so once, with the cause; `symptom`: it is probably a consequence of another failure.

        Its channels stay until the attempt is cancelled: peers that do not know yet still send with the
        credit they have, and work on what they have taken by reference.
        """
        if self.state is TaskState.FINISHED:
            _log.warning("%s (subtask %d): failed after its end", self.vertex.name, self.ref.subtask, exc_info=error)
        if self.state in (TaskState.FINISHED, TaskState.CLOSED):
            return
        self._become(TaskState.CLOSED, TaskEvent.FAIL)
        self.failure = error
        self._let_go()
        operators, name = self.operators, self.vertex.name
        place = place_of_failure(operators.source, operators.chain, error, name)
        self._seams.send(task_failed(self._seams.attempt, self.ref, name, error, symptom, operators.at_work[1], place))

    def _let_go(self) -> None:
        self.operators.stop_timers()
        self.mails.clear()
        self._snapshots.close()
        self._checkpoints.close()
        self.operators.close()

    def _become(self, state: TaskState, event: TaskEvent) -> None:
        """Raises InvariantError, with what happened before, if TASK_TABLE does not say so."""
        before, self.state = self.state, TASK_TABLE.check(self.state, event, state, self._story)
        self._story.append((before, event))

    @property
    def is_live(self) -> bool:
        """Whether there is a next step."""
        return self.state in LIVE

    @property
    def is_finishing(self) -> bool:
        """Whether all its data is processed, and it waits until that is final."""
        return self.state in _FINISHING

    @property
    def rows_in(self) -> int:
        return self._input.rows_in

    # ---- mails from the slot -------------------------------------------------

    def wake(self) -> None:
        self._seams.schedule(self)

    def mail(self, work: Callable[[], None]) -> None:
        """Run `work` as a step of its own, after the mails already there."""
        self.mails.append(work)
        self.wake()

    def trigger_checkpoint(self, barrier: CheckpointBarrier, *, holds: bool = False) -> None:
        """`holds`: a source holds still behind it, unless it is aborted: the job stops or moves with this checkpoint."""
        checkpoint_id = barrier.checkpoint_id

        def trigger() -> None:
            self._story.append((self.state, f"trigger of checkpoint {checkpoint_id}"))
            self._checkpoints.handle(TriggerReceived(barrier))
            if holds and self.operators.source is not None and self.state in (TaskState.RUNNING, TaskState.HELD):
                self._become(TaskState.HELD, TaskEvent.HOLD)
                self._awaited = checkpoint_id

        if self.state is TaskState.FINISHED:  # it finished while the trigger was on its way
            self._snapshots.decline(checkpoint_id, f"task {self.ref} has finished", counts=False)
        else:
            self.mail(trigger)

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        self.mail(lambda: self._on_completed(checkpoint_id))

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        self.mail(lambda: self._on_aborted(checkpoint_id))

    def read_on(self, checkpoint_id: int) -> None:
        """The tasks run on although the sources have held still behind the checkpoint."""
        self.mail(lambda: self._read_on(checkpoint_id))

    def add_split(self, split: bytes, is_last: bool) -> None:
        """As a mail, like a trigger: which of the two came first decides whether the checkpoint holds the split."""
        self._tell_source(lambda source: source.add_split(split, is_last=is_last))

    def splits_assigned(self) -> None:
        """In its place among the splits; before the start there are none."""
        if self.operators.source is not None and self.state is TaskState.CREATED:
            self.operators.source.splits_assigned()
        else:
            self._tell_source(lambda source: source.splits_assigned())

    def no_more_splits(self) -> None:
        self._tell_source(lambda source: source.no_more_splits())

    def stop_source(self) -> None:
        self._tell_source(lambda source: source.stop())

    def _tell_source(self, tell: Callable[[SourceDriver], None]) -> None:
        source = self.operators.source
        if source is not None and self.is_live:
            self.mail(lambda: tell(source))

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

    def next_step(self) -> Step:
        """What a live task does next. What it waits for will call `wake`; to look at this changes nothing else."""
        state, operators = self.state, self.operators
        if state is _AWAITS_SENT and self._snapshots.is_idle and self._is_sent():
            return _END  # before the mails: with checkpoints that follow at once there is always another trigger
        if self.mails and self._mails_in_a_row < MAILS_IN_A_ROW_MAX:
            return _MAIL
        if not self._output_available():
            return _WAIT
        if operators.chain.is_firing:
            return _FIRE
        if operators.due and self._last is not _TIMER:
            return _TIMER
        if state is _RUNNING:
            return _READ_GATES if operators.source is None else _READ_SOURCE
        if state is _HELD:
            return _HOLD
        return _FINISH if state is _ENDING else _READ_GATES

    def _step(self, started_s: float) -> bool:
        """Whether another step may find something to do; if not, `wake` will be called."""
        step = self.next_step()
        if step is _MAIL:
            self._mails_in_a_row += 1
            self.mails.popleft()()
            return self._may_go_on()
        self._mails_in_a_row = 0
        if step is _WAIT:
            self._backpressured_since = started_s
            return False
        self._last = step
        if step is _READ_GATES:
            goes_on = self._input.work(self._checkpoints.awaited_gates) and self._may_go_on()
        elif step is _READ_SOURCE:
            goes_on = self._read_source()
        elif step is _FIRE:
            self.operators.chain.pump()
            return True
        elif step is _TIMER:
            self.operators.due.popleft()()
            return True
        elif step is _FINISH:
            self._finish()
            return True
        elif step is _END:
            self._end()
            return False
        else:
            assert step is _HOLD, step
            goes_on = False
        return goes_on or bool(self.operators.due)

    def _may_go_on(self) -> bool:
        operators, state = self.operators, self.state
        if operators.due or operators.chain.is_firing or self._input.may_go_on:
            return True
        if state is _RUNNING or state is _HELD:
            return operators.source is not None
        return state is _ENDING or state is _AWAITS_SENT

    def _output_available(self) -> bool:
        for partition in self.partitions:
            if not partition.is_available():
                partition.wake_when_available(self.wake)
                return False
        may_be_busy = self.operators.may_be_busy
        return not may_be_busy or all(operator.ready(self.wake) for operator in may_be_busy)

    def _read_source(self) -> bool:
        source, chain = self.operators.source, self.operators.chain
        assert source is not None
        progress = source.step()
        if progress is Progress.ENDED:
            self._input_ended()
            chain.end_input(0)
            chain.offer(0, MAX_WATERMARK_US)
        return progress is not Progress.WAITING

    # ---- the end -------------------------------------------------------------

    def _input_ended(self) -> None:
        self._become(TaskState.ENDING, TaskEvent.INPUT_ENDED)

    def _finish(self) -> None:
        """Emit what is left and say so; then wait for the checkpoint that makes it final."""
        operators, drains = self.operators, self._input.drains
        if drains:
            operators.chain.finish()
        operators.stop_timers()  # what operators would emit from here on would be behind the end of their data
        operators.edges.broadcast(EndOfData(drains))
        if self._seams.storage is None:
            self._become(TaskState.AWAITS_SINKS, TaskEvent.ALL_EMITTED)
            self._prepare_sinks()
        else:
            self._become(TaskState.AWAITS_CHECKPOINT, TaskEvent.ALL_EMITTED)
            self._seams.send(m.TaskEndOfData(self._seams.attempt, self.ref))

    def _prepare_sinks(self) -> None:
        """There are no checkpoints: what sinks prepare goes to the coordinator, nothing else is stored."""
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

        self._seams.executor.submit(work, done)

    def _is_sent(self) -> bool:
        """Whether all that was emitted is with the consumers; if not, `wake` will be called."""
        for partition in self.partitions:
            if not partition.is_sent:
                partition.wake_when_sent(self.wake)
                return False
        return True

    def _end(self, committables: tuple[tuple[str, tuple[bytes, ...]], ...] = ()) -> None:
        self.operators.edges.broadcast(EndOfPartition())
        self._become(TaskState.FINISHED, TaskEvent.END)
        self._let_go()
        for gate in self.gates:
            gate.discard()
        self._seams.send(m.TaskFinished(self._seams.attempt, self.ref, committables))

    # ---- checkpoints -----------------------------------------------------------

    def _answer(self, message: m.FromSlot) -> None:
        if isinstance(message, m.CheckpointAck):
            message = msgspec.structs.replace(message, metrics=self.metrics())
        self._seams.send(message)

    def rests(self) -> dict[int, tuple[LeasedBatch, int]]:
        """See `TaskInput.rests`."""
        return self._input.rests()

    def take_snapshot(self, barrier: CheckpointBarrier, alignment_ms: float) -> None:
        """Every operator's state and event time, as of this point between two slices."""
        checkpoint_id, began_s = barrier.checkpoint_id, self._seams.clock.stopwatch_s()
        self._snapshots.completed(barrier.completed_id)
        finished = self.state in _FINISHING
        if finished and self._awaited is None:
            self._awaited = checkpoint_id
        snapshots = self.operators.snapshot(checkpoint_id)
        self._snapshots.take(checkpoint_id, snapshots, alignment_ms=alignment_ms, began_s=began_s, finished=finished)

    def _on_completed(self, checkpoint_id: int) -> None:
        self._story.append((self.state, f"checkpoint {checkpoint_id} completed"))
        self._snapshots.completed(checkpoint_id)
        for operator in self.operators.chain.operators:
            operator.checkpoint_completed(checkpoint_id)
        if self.state is _AWAITS_CHECKPOINT and self._awaited is not None and checkpoint_id >= self._awaited:
            self._become(TaskState.AWAITS_SENT, TaskEvent.COMPLETED)

    def _on_aborted(self, checkpoint_id: int) -> None:
        self._story.append((self.state, f"checkpoint {checkpoint_id} aborted"))
        self._checkpoints.handle(CancelReceived(checkpoint_id))
        self._checkpoints.drop(checkpoint_id)
        self._read_on(checkpoint_id)
        if self._awaited == checkpoint_id:
            self._awaited = None
        for operator in self.operators.chain.operators:
            operator.checkpoint_aborted(checkpoint_id)

    def _read_on(self, checkpoint_id: int) -> None:
        """If it holds behind this one."""
        if self.state is _HELD and self._awaited == checkpoint_id:
            self._become(TaskState.RUNNING, TaskEvent.READ_ON)
            self._awaited = None

    # ---- to look at ------------------------------------------------------------

    def metrics(self) -> TaskMetrics:
        backpressured_s = self.backpressured_s
        if self._backpressured_since is not None:
            backpressured_s += self._seams.clock.monotonic_s() - self._backpressured_since
        return task_metrics(
            self.ref,
            self.vertex,
            operators=self.operators,
            read=self._input,
            gates=self.gates,
            partitions=self.partitions,
            busy_s=self.busy_s,
            backpressured_s=backpressured_s,
            to_recover_bytes=self._to_recover_bytes,
        )

    def show(self, asked: ShowRows, answer: Callable[[RowsShown], None]) -> None:
        """See `show_next`."""
        if self.is_live:
            show_next(asked, self.ref.subtask, self.vertex, self.operators.chain, self._seams.executor, answer)

    def check(self) -> None:
        """Everything that must hold between two steps."""
        if self.is_live:  # what has failed stands where it did
            self.operators.chain.check()
        self._checkpoints.check()
        for gate in self.gates:
            gate.check()
        for partition in self.partitions:
            partition.check()
