"""The part of one task that takes checkpoints: barriers in, barriers out, snapshots and what is in flight.

A checkpoint in a task is one step on the loop: the barrier goes on (behind what is queued for the
consumers, or before all of it), every operator gives its snapshot, and what the barrier has
overtaken is held for storing. What happens later only adds to it: batches that were on their way
(until the last channel has announced its barrier), and outputs that a barrier overtakes when its
time has come. When nothing can be added any more it is encoded and written, off the loop, and
acknowledged together with the operators' state.

Batches are held (`exchange.lease`), and charged to the pool, until they are written. Should the barriers be slow to come,
what is there is written every now and then: a producer that still has to work its way to the
barrier, over an edge that cannot be overtaken, may need those buffers for it.

Every batch in flight is stored by exactly one owner: what has arrived by its consumer, what has
not left (or has left in part) by its producer, recovered data by the gate that recovers it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from midstream.checkpoint.barriers import (
    AbortCheckpoint,
    BarrierAnnounced,
    BarrierEvent,
    BarrierHandler,
    Block,
    CaptureComplete,
    CaptureFailed,
    EndAnnounced,
    Resume,
    TakeSnapshot,
    TimedOut,
)
from midstream.checkpoint.channel_state import Captured, store_channels
from midstream.checkpoint.state_files import channel_file
from midstream.core.elements import CancelCheckpointMarker, CheckpointBarrier
from midstream.core.errors import StorageError, assert_never
from midstream.core.ids import ChannelId, TaskId
from midstream.core.seams import Done, Failed, Timer
from midstream.exchange.gate import Arrival, InputGate
from midstream.exchange.lease import LeasedBatch, release
from midstream.exchange.partition import ResultPartition
from midstream.worker.recovery import GateRecovery
from midstream.worker.seams import TaskSeams
from midstream.worker.snapshots import StoredInFlight, TaskSnapshots

SEGMENT_BUFFERS = 16
"""Size of a segment of channel state: what a recovering gate reads at once."""
FLUSH_S = 0.1
"""How long captured batches keep their buffers while barriers are still to come."""


@dataclass(slots=True, eq=False)
class _InFlightState:
    """What one checkpoint of this task has overtaken, and not written yet."""

    barrier: CheckpointBarrier
    inputs: list[tuple[Captured, list[LeasedBatch]]] = field(default_factory=list)
    """In the order in which they are to be read again; the lists grow until all barriers are announced."""
    outputs: list[tuple[ChannelId, list[LeasedBatch]]] = field(default_factory=list)
    capturing: bool = False
    stored: StoredInFlight = field(default_factory=StoredInFlight)
    """What has been written."""
    parts: int = 0
    """How many files have been begun."""
    writing: list[LeasedBatch] | None = None
    """Held for the write that is going on."""
    flush: Timer | None = None
    dropped: bool = False

    def drain(self) -> tuple[list[Captured], list[LeasedBatch]]:
        """All that is to be written, and what has to be released afterwards; it is no longer here."""
        captured: list[Captured] = []
        items: list[LeasedBatch] = []
        outputs = [(Captured(*channel, True), found) for channel, found in self.outputs]
        for where, found in (*self.inputs, *outputs):
            batches = tuple(item.batch for item in found)
            if batches or where.stored:
                captured.append(replace(where, batches=batches))
            items += found
            found.clear()  # in place: what is still to come goes into the same list
        self.inputs = [(replace(where, stored=()), found) for where, found in self.inputs]
        self.outputs = []
        return captured, items

    def close(self) -> None:
        """Nothing more will come of it."""
        if self.flush is not None:
            self.flush.cancel()
        release(self.drain()[1])


class Checkpointed(Protocol):
    """What the checkpoints of a task need of it: `Task` has it. `rests`: see `TaskInput.rests`."""

    def take_snapshot(self, barrier: CheckpointBarrier, alignment_ms: float) -> None: ...

    def rests(self) -> dict[int, tuple[LeasedBatch, int]]: ...

    def mail(self, work: Callable[[], None]) -> None: ...

    def fail(self, error: BaseException) -> None: ...


class TaskCheckpoints:
    """Hears by itself of barriers that arrive in the gates' channels, and of those that leave the partitions."""

    def __init__(
        self,
        ref: TaskId,
        seams: TaskSeams,
        gates: Sequence[InputGate],
        partitions: Sequence[ResultPartition],
        snapshots: TaskSnapshots,
        task: Checkpointed,
    ) -> None:
        self._ref = ref
        self._seams = seams
        self._gates = gates
        self._partitions = partitions
        self._snapshots = snapshots
        self._task = task
        self._channels = [(gate, index) for gate, of in enumerate(gates) for index in range(len(of.channels))]
        """By number: the gate, and the channel's place in it."""
        capturable = [
            number for number, (gate, _) in enumerate(self._channels) if gates[gate].edge.id in seams.overtakable
        ]
        self._handler = BarrierHandler(len(self._channels), capturable)
        self.awaited_gates: tuple[int, ...] = ()
        """Those whose rows cannot be in flight in a checkpoint that only waits for their barriers."""
        self._in_flight: dict[int, _InFlightState] = {}
        """By checkpoint, until it is written or given up."""
        self._writing: set[_InFlightState] = set()
        self._timers: dict[int, Timer] = {}
        self._seen_s: tuple[int, float] = (-1, 0.0)
        """The newest checkpoint, and when its first barrier was seen."""
        for number, (gate, index) in enumerate(self._channels):
            gates[gate].channels[index].queue.on_event = partial(self.arrived, number)
        for partition in partitions:
            partition.on_barrier_sent = self._barrier_sent
        self._closed = False

    def close(self) -> None:
        """Nothing of this task will be checkpointed any more."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for state in self._in_flight.values():
            state.close()
        self._in_flight.clear()
        for state in self._writing:
            assert state.writing is not None
            release(state.writing)
        self._writing.clear()

    # ---- what happens ----

    def arrived(self, channel: int, event: Arrival) -> None:
        """A barrier, or the end, has arrived; it waits its turn in the channel."""
        if self._closed:
            return
        gate, index = self._locate(channel)
        if not isinstance(event, CheckpointBarrier):
            self._task.mail(lambda: self.handle(EndAnnounced(channel, gate.is_clear(index, event))))
        elif event.timeout_ms is not None:
            self._task.mail(lambda: self.handle(BarrierAnnounced(channel, event, gate.is_clear(index, event))))

    def handle(self, event: BarrierEvent) -> None:
        """One event of the barrier handler, and what it leads to."""
        for instruction in self._handler.handle(event):
            match instruction:
                case Block(channel):
                    gate, index = self._locate(channel)
                    gate.block(index)
                case Resume(channels):
                    for channel in channels:
                        gate, index = self._locate(channel)
                        gate.resume(index)
                case TakeSnapshot():
                    self._snapshot(instruction)
                case CaptureComplete(checkpoint_id):
                    if checkpoint_id in self._in_flight:  # else it could not be written
                        self._in_flight[checkpoint_id].capturing = False
                        self._store_if_complete(checkpoint_id)
                case AbortCheckpoint(checkpoint_id, reason):
                    for partition in self._partitions:
                        partition.broadcast(CancelCheckpointMarker(checkpoint_id))
                    self.drop(checkpoint_id)
                    self._snapshots.decline(checkpoint_id, reason, counts=False)
                case _:
                    assert_never(instruction)
        awaited = self._handler.awaited
        self.awaited_gates = tuple(sorted({self._channels[channel][0] for channel in awaited})) if awaited else ()
        pending = self._handler.pending
        if pending is not None:
            self._see(pending)

    def _see(self, barrier: CheckpointBarrier) -> None:
        """Alignment is measured from here; the timeout runs from the barrier's creation."""
        checkpoint_id = barrier.checkpoint_id
        if self._seen_s[0] == checkpoint_id:
            return
        self._seen_s = checkpoint_id, self._seams.clock.monotonic_s()
        if barrier.timeout_ms and checkpoint_id not in self._timers:
            # The coordinator's wall clock and this one may differ: never more than the timeout itself.
            left_ms = barrier.created_ms + barrier.timeout_ms - self._seams.clock.now_ms()
            delay_s = min(max(0, left_ms), barrier.timeout_ms) / 1000
            self._timers[checkpoint_id] = self._seams.executor.call_later(
                delay_s, lambda: self._task.mail(lambda: self._timed_out(barrier))
            )

    def _timed_out(self, barrier: CheckpointBarrier) -> None:
        self._timers.pop(barrier.checkpoint_id, None)
        self.handle(TimedOut(barrier.checkpoint_id))
        state = self._in_flight.get(barrier.checkpoint_id)
        if state is not None:
            for partition in self._partitions:
                if partition.edge.id in self._seams.overtakable:
                    state.outputs += partition.overtake_waiting(barrier)
            self._store_if_complete(barrier.checkpoint_id)

    def _barrier_sent(self, checkpoint_id: int) -> None:
        """Called from the middle of sending."""
        if checkpoint_id in self._in_flight:
            self._task.mail(lambda: self._store_if_complete(checkpoint_id))

    def drop(self, checkpoint_id: int) -> None:
        """The checkpoint will not complete: forget what was captured for it."""
        state = self._in_flight.get(checkpoint_id)
        if state is None:
            self._cancel_timer(checkpoint_id)
            return
        if state.capturing:
            for gate in self._gates:
                gate.stop_capture()
        state.dropped = True
        self._end(state)

    def _end(self, state: _InFlightState) -> None:
        """Nothing more will be written for it: say what has been, now or when that is known."""
        checkpoint_id = state.barrier.checkpoint_id
        self._cancel_timer(checkpoint_id)
        del self._in_flight[checkpoint_id]
        state.close()
        if state.writing is None:
            self._snapshots.in_flight_stored(checkpoint_id, state.stored)

    def _cancel_timer(self, checkpoint_id: int) -> None:
        timer = self._timers.pop(checkpoint_id, None)
        if timer is not None:
            timer.cancel()

    def _locate(self, channel: int) -> tuple[InputGate, int]:
        gate, index = self._channels[channel]
        return self._gates[gate], index

    # ---- the snapshot ----

    def _snapshot(self, taken: TakeSnapshot) -> None:
        barrier = taken.barrier
        self._see(barrier)
        state = _InFlightState(barrier)
        for partition in self._partitions:
            if taken.overtaking and partition.edge.id in self._seams.overtakable:
                state.outputs += partition.overtake(barrier)
            else:
                partition.broadcast(barrier)
        self._task.take_snapshot(barrier, (self._seams.clock.monotonic_s() - self._seen_s[1]) * 1000)
        if taken.capture:
            self._capture(state, taken.capture)
        state.capturing = bool(taken.capture)
        self._in_flight[barrier.checkpoint_id] = state
        if state.capturing:
            self._flush_later(state)
        self._store_if_complete(barrier.checkpoint_id)

    def _capture(self, state: _InFlightState, channels: tuple[int, ...]) -> None:
        """Gate by gate: the rest of the batch at work, what is still to be recovered, what has arrived since."""
        rests = self._task.rests()
        for number, gate in enumerate(self._gates):
            mine = [index for of, index in (self._channels[channel] for channel in channels) if of == number]
            if not mine:
                continue
            if number in rests:
                at_work, next_row = rests.pop(number)
                where = Captured(gate.edge.id, gate.consumer, gate.consumer, False)
                state.inputs.append((where, [at_work.rest(next_row)]))
            if isinstance(gate.recovered, GateRecovery):
                remaining = gate.recovered.remaining()
                state.inputs.append((Captured(gate.edge.id, 0, gate.consumer, False, stored=remaining), []))
            for index in mine:
                where = Captured(gate.edge.id, gate.channels[index].id.producer, gate.consumer, False)
                state.inputs.append((where, gate.capture(index, state.barrier.checkpoint_id)))
        assert not rests, (state.barrier, rests.keys())  # where nothing is captured, all before the barrier is done

    def _store_if_complete(self, checkpoint_id: int) -> None:
        """Write it once nothing can be added: every barrier has come, and every one sent has left or overtaken."""
        state = self._in_flight.get(checkpoint_id)
        if state is None or state.capturing or state.writing is not None:
            return
        if state.barrier.timeout_ms is not None and any(
            partition.edge.id in self._seams.overtakable and partition.is_waiting(checkpoint_id)
            for partition in self._partitions
        ):
            return
        if not self._write(state):
            self._end(state)

    def _flush_later(self, state: _InFlightState) -> None:
        def flush() -> None:
            if not state.capturing or state.dropped:
                return
            if state.writing is None:
                self._write(state)
            self._flush_later(state)

        state.flush = self._seams.executor.call_later(FLUSH_S, lambda: self._task.mail(flush))

    def _write(self, state: _InFlightState) -> bool:
        """Whether there was something to write."""
        captured, items = state.drain()
        if not captured:
            release(items)
            return False
        state.writing = items
        self._writing.add(state)
        seams, storage, checkpoint_id = self._seams, self._seams.storage, state.barrier.checkpoint_id
        assert storage is not None
        segment_bytes = SEGMENT_BUFFERS * seams.config.buffer_bytes
        file = channel_file(seams.epoch, seams.attempt, checkpoint_id, *self._ref, state.parts)
        state.parts += 1
        inline_bytes_max = seams.inline_bytes_max - state.stored.inline_bytes
        assert inline_bytes_max >= 0, (seams.inline_bytes_max, state.stored.inline_bytes)

        def work() -> StoredInFlight:
            try:
                states, written = store_channels(storage, captured, file, segment_bytes, inline_bytes_max)
            except (StorageError, OSError) as error:
                return StoredInFlight(files=(file,), error=error)  # it may be there all the same
            inline_bytes = sum(len(segment.inline) for state in states for segment in state.segments)
            return StoredInFlight(states, written.files, written.stored_bytes, inline_bytes)

        def done(outcome: Done[StoredInFlight] | Failed) -> None:
            if self._closed:
                return  # nothing is held any more
            self._writing.remove(state)
            state.writing = None
            release(items)
            if isinstance(outcome, Failed):
                self._task.fail(outcome.error)
                return
            state.stored = state.stored.with_more(outcome.value)
            if state.dropped:
                self._snapshots.in_flight_stored(checkpoint_id, state.stored)
            elif state.stored.error is not None:
                self.drop(checkpoint_id)
                self.handle(CaptureFailed(checkpoint_id))
            else:
                self._store_if_complete(checkpoint_id)

        self._seams.executor.submit(work, done)
        return True

    def check(self) -> None:
        self._handler.check()
        pending = self._handler.pending_id
        for checkpoint_id, state in self._in_flight.items():
            assert not state.capturing or checkpoint_id == pending, (checkpoint_id, pending)
            found = [item for _, items in (*state.inputs, *state.outputs) for item in items]
            for item in (*found, *(state.writing or ())):
                item.check()
