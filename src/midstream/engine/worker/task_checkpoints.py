"""Takes the checkpoints of one task: barriers arrive and are forwarded, operators give snapshots, rows are captured.

A task takes a checkpoint in one step on the loop:

1. The barrier is forwarded, after the rows that are queued for the consumers or ahead of all of them.
2. Every operator gives its snapshot.
3. The batches that the barrier has overtaken are held until they are stored.

Until the last channel has announced its barrier, the batches that arrive before the barriers are added; so are those in
outputs whose barrier overtakes only after its timeout. When the batches are complete, the batches are encoded and
written on the I/O pool, and acknowledged together with the operators' state.

Batches are held (`engine.exchange.batch_lease`), and charged to the pool, until they are written. If barriers are
slow to arrive, the batches captured so far are written from time to time, to free their buffers: a producer on whose
input edge barriers cannot overtake may need them to process the rows before its barrier.

Every batch in flight is stored by exactly one owner: a batch that has arrived is stored by its consumer, a batch that
has not left, or has left in part, by its producer, and a recovered batch by the gate that recovers it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from midstream.engine.checkpoint.barrier_handler import (
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
from midstream.engine.checkpoint.channel_state import Captured, store_channels
from midstream.engine.checkpoint.state_files import channel_file
from midstream.engine.core.elements import CancelCheckpointMarker, CheckpointBarrier
from midstream.engine.core.errors import InvariantError, StorageError, assert_never
from midstream.engine.core.ids import ChannelId
from midstream.engine.core.interfaces import Done, Failed, Timer
from midstream.engine.exchange.batch_lease import LeasedBatch, release
from midstream.engine.exchange.listeners import BarrierOrEnd
from midstream.engine.worker.gate_recovery import GateRecovery
from midstream.engine.worker.interfaces import TaskServices
from midstream.engine.worker.task_snapshots import StoredInFlight, TaskSnapshots

if TYPE_CHECKING:
    from midstream.engine.worker.task import Task

SEGMENT_BUFFERS = 16
"""The size of a segment of channel state in buffers. A recovering gate reads a whole segment in one call."""
FLUSH_S = 0.1
"""How long captured batches keep their buffers while barriers are still missing."""


@dataclass(slots=True, eq=False)
class _InFlightState:
    """The batches that the barrier of one checkpoint has overtaken in this task, until they are written."""

    barrier: CheckpointBarrier
    inputs: list[tuple[Captured, list[LeasedBatch]]] = field(default_factory=list)
    """The batches captured in the gates, in the order in which they must be read again. The lists grow until every
    channel has announced its barrier."""
    outputs: list[tuple[ChannelId, list[LeasedBatch]]] = field(default_factory=list)
    capturing: bool = False
    stored: StoredInFlight = field(default_factory=StoredInFlight)
    """The parts that have been written."""
    parts: int = 0
    """The number of files that have been begun."""
    writing: list[LeasedBatch] | None = None
    """The batches that are held for the write in progress; None without one."""
    flush: Timer | None = None
    dropped: bool = False

    def drain(self) -> tuple[list[Captured], list[LeasedBatch]]:
        """Remove all batches from here. Returns what to write, and what to release afterwards."""
        captured: list[Captured] = []
        items: list[LeasedBatch] = []
        outputs = [(Captured(*channel, True), found) for channel, found in self.outputs]
        for where, found in (*self.inputs, *outputs):
            if found or where.stored:
                layouts = tuple([item.layout for item in found])
                batches = tuple([item.batch for item in found])
                captured.append(replace(where, batches=batches, layouts=layouts if any(layouts) else ()))
            items += found
            found.clear()  # in place: the queue adds the batches that still arrive to the same list
        self.inputs = [(replace(where, stored=()) if where.stored else where, found) for where, found in self.inputs]
        self.outputs = []
        return captured, items

    def close(self) -> None:
        """Release all batches: nothing more will be written."""
        if self.flush is not None:
            self.flush.cancel()
        release(self.drain()[1])


class TaskCheckpoints:
    """The checkpoints of one task. The task passes on the barriers that it is notified of as a `TaskListener`."""

    def __init__(self, task: Task, services: TaskServices, snapshots: TaskSnapshots) -> None:
        self._task = task
        self._services = services
        self._snapshots = snapshots
        self._gates = task.gates
        self._partitions = task.partitions
        self._channels = [(gate, index) for gate in task.gates for index in range(len(gate.channels))]
        """The gate of each channel, and the channel's index in the gate. Their order gives the channels' numbers."""
        capturable = [
            number for number, (gate, _) in enumerate(self._channels) if gate.edge.id in services.unaligned_edges
        ]
        self._handler = BarrierHandler(len(self._channels), capturable)
        self.priority_gates: tuple[int, ...] = ()
        """The gates for whose barriers a checkpoint waits, and whose rows cannot be captured for it."""
        self._in_flight: dict[int, _InFlightState] = {}
        """The captured batches of each checkpoint, until they are written or the checkpoint is abandoned."""
        self._writing: set[_InFlightState] = set()
        self._timers: dict[int, Timer] = {}
        self._first_barrier_s: tuple[int, float] = (-1, 0.0)
        """The newest checkpoint, and when its first barrier arrived."""
        self._closed = False

    def close(self) -> None:
        """Cancel everything: this task takes no more checkpoints."""
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

    # ---- events ----

    def on_arrival(self, channel: int, event: BarrierOrEnd) -> None:
        """Announce a barrier that may overtake, or the end of the partition, to the barrier handler, by a mail."""
        if self._closed:
            return
        gate, index = self._channels[channel]
        if not isinstance(event, CheckpointBarrier):
            self._task.mail(lambda: self.handle(EndAnnounced(channel, gate.is_clear(index, event))))
        elif event.timeout_ms is not None:
            self._task.mail(lambda: self.handle(BarrierAnnounced(channel, event, gate.is_clear(index, event))))

    def handle(self, event: BarrierEvent) -> None:
        """Pass one event to the barrier handler, and carry out its instructions."""
        for instruction in self._handler.handle(event):
            match instruction:
                case Block(channel):
                    gate, index = self._channels[channel]
                    gate.block(index)
                case Resume(channels):
                    for channel in channels:
                        gate, index = self._channels[channel]
                        gate.resume(index)
                case TakeSnapshot():
                    self._snapshot(instruction)
                case CaptureComplete(checkpoint_id):
                    if checkpoint_id in self._in_flight:  # it has been dropped if a write has failed
                        self._in_flight[checkpoint_id].capturing = False
                        self._store_if_complete(checkpoint_id)
                case AbortCheckpoint(checkpoint_id, reason):
                    for partition in self._partitions:
                        partition.broadcast(CancelCheckpointMarker(checkpoint_id))
                    self.drop(checkpoint_id)
                    self._snapshots.decline(checkpoint_id, reason, counts=False)
                case _:
                    assert_never(instruction)
        priority = {self._channels[channel][0] for channel in self._handler.priority_channels}
        self.priority_gates = tuple(number for number, gate in enumerate(self._gates) if gate in priority)
        pending = self._handler.pending
        if pending is not None:
            self._note_first_barrier(pending)

    def _note_first_barrier(self, barrier: CheckpointBarrier) -> None:
        """Note when this barrier first arrived, from which alignment is measured, and start its timeout.

        The timeout runs from the creation of the barrier.
        """
        checkpoint_id = barrier.checkpoint_id
        if self._first_barrier_s[0] == checkpoint_id:
            return
        self._first_barrier_s = checkpoint_id, self._services.clock.monotonic_s()
        if barrier.timeout_ms and checkpoint_id not in self._timers:
            # The coordinator's wall clock may differ from this one: the delay is never longer than the timeout itself.
            left_ms = barrier.created_ms + barrier.timeout_ms - self._services.clock.now_ms()
            delay_s = min(max(0, left_ms), barrier.timeout_ms) / 1000
            self._timers[checkpoint_id] = self._services.executor.call_later(
                delay_s, lambda: self._task.mail(lambda: self._timed_out(barrier))
            )

    def _timed_out(self, barrier: CheckpointBarrier) -> None:
        self._timers.pop(barrier.checkpoint_id, None)
        self.handle(TimedOut(barrier.checkpoint_id))
        state = self._in_flight.get(barrier.checkpoint_id)
        if state is not None:
            for partition in self._partitions:
                if partition.edge.id in self._services.unaligned_edges:
                    state.outputs += partition.overtake_queued(barrier)
            self._store_if_complete(barrier.checkpoint_id)

    def on_barrier_sent(self, checkpoint_id: int) -> None:
        """Write the batches of this checkpoint if they are complete. The barrier is still being sent, so that is a
        mail."""
        if checkpoint_id in self._in_flight:
            self._task.mail(lambda: self._store_if_complete(checkpoint_id))

    def drop(self, checkpoint_id: int) -> None:
        """Release the batches that were captured for the checkpoint: it will not complete."""
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
        """End the writing for this checkpoint. What was written is reported, after the write in progress."""
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

    # ---- the snapshot ----

    def _snapshot(self, taken: TakeSnapshot) -> None:
        barrier = taken.barrier
        self._note_first_barrier(barrier)
        state = _InFlightState(barrier)
        for partition in self._partitions:
            if taken.overtaking and partition.edge.id in self._services.unaligned_edges:
                state.outputs += partition.overtake(barrier)
            else:
                partition.broadcast(barrier)
        self._task.take_snapshot(barrier, (self._services.clock.monotonic_s() - self._first_barrier_s[1]) * 1000)
        if taken.capture:
            self._capture(state, taken.capture)
        state.capturing = bool(taken.capture)
        self._in_flight[barrier.checkpoint_id] = state
        if state.capturing:
            self._flush_later(state)
        self._store_if_complete(barrier.checkpoint_id)

    def _capture(self, state: _InFlightState, channels: tuple[int, ...]) -> None:
        """Capture, gate by gate, the rest of the current batch, the rows still to be recovered, and the queued rows."""
        rests = self._task.input.rests()
        for number, gate in enumerate(self._gates):
            mine = [index for of, index in (self._channels[channel] for channel in channels) if of is gate]
            if not mine:
                continue
            if number in rests:
                current_batch, next_row = rests.pop(number)
                where = Captured(gate.edge.id, gate.consumer, gate.consumer, False)
                state.inputs.append((where, [current_batch.rest(next_row)]))
            if isinstance(gate.recovered, GateRecovery):
                remaining = gate.recovered.remaining()
                state.inputs.append((Captured(gate.edge.id, 0, gate.consumer, False, stored=remaining), []))
            for index in mine:
                where = Captured(gate.edge.id, gate.channels[index].id.producer, gate.consumer, False)
                state.inputs.append((where, gate.capture(index, state.barrier.checkpoint_id)))
        # A gate of which nothing is captured has no rest: all its rows before the barrier have been processed.
        if rests:
            raise InvariantError(
                f"{state.barrier} would lose the rest of the current batch of the gates {sorted(rests)}"
            )

    def _store_if_complete(self, checkpoint_id: int) -> None:
        """Write the captured batches once nothing can be added to them.

        That is when every channel has announced its barrier, and every barrier that was emitted has left its queue or
        has overtaken it.
        """
        state = self._in_flight.get(checkpoint_id)
        if state is None or state.capturing or state.writing is not None:
            return
        if state.barrier.timeout_ms is not None and any(
            partition.edge.id in self._services.unaligned_edges and partition.has_queued_barrier(checkpoint_id)
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

        state.flush = self._services.executor.call_later(FLUSH_S, lambda: self._task.mail(flush))

    def _write(self, state: _InFlightState) -> bool:
        """Begin to write the batches captured so far. Returns whether there were any."""
        captured, items = state.drain()
        if not captured:
            release(items)
            return False
        state.writing = items
        self._writing.add(state)
        services, storage, checkpoint_id = self._services, self._services.storage, state.barrier.checkpoint_id
        assert storage is not None
        segment_bytes = SEGMENT_BUFFERS * services.config.buffer_bytes
        file = channel_file(services.epoch, services.attempt, checkpoint_id, *self._task.ref, state.parts)
        state.parts += 1
        inline_bytes_max = services.inline_bytes_max - state.stored.inline_bytes
        assert inline_bytes_max >= 0, (services.inline_bytes_max, state.stored.inline_bytes)

        def work() -> StoredInFlight:
            try:
                states, written = store_channels(storage, captured, file, segment_bytes, inline_bytes_max)
            except (StorageError, OSError) as error:
                return StoredInFlight(files=(file,), error=error)  # the file may exist nevertheless
            inline_bytes = sum(len(segment.inline) for state in states for segment in state.segments)
            return StoredInFlight(states, written.files, written.stored_bytes, inline_bytes)

        def done(outcome: Done[StoredInFlight] | Failed) -> None:
            if self._closed:
                return  # `close` has released the batches
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

        self._services.executor.submit(work, done)
        return True

    def check(self) -> None:
        self._handler.check()
        pending = self._handler.pending_id
        for checkpoint_id, state in self._in_flight.items():
            assert not state.capturing or checkpoint_id == pending, (checkpoint_id, pending)
            found = [item for _, items in (*state.inputs, *state.outputs) for item in items]
            for item in (*found, *(state.writing or ())):
                item.check()
