"""Known bugs of alignment and of snapshots on their way to the coordinator, to be put back on purpose: see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from typing import Any, Final

from midstream.engine.checkpoint import barrier_handler
from midstream.engine.core.elements import CheckpointBarrier
from midstream.engine.exchange.batch_lease import LeasedBatch, release
from midstream.engine.exchange.element_queue import ElementQueue
from midstream.engine.exchange.input_gate import InputGate
from midstream.engine.exchange.result_partition import ResultPartition
from midstream.engine.graph.job_graph import JobGraph
from midstream.engine.worker import slot_machine, task_snapshots
from midstream.engine.worker.task_checkpoints import TaskCheckpoints
from midstream_lab.mutations.mutation import Mutation, Replacements, named, nothing
from midstream_lab.scenarios import targeted
from midstream_lab.scenarios.targeted_at_rest import learning_late


def skip_alignment() -> Replacements:
    original = barrier_handler.BarrierHandler.handle

    def handle(self: Any, event: Any) -> list[Any]:
        if not isinstance(event, barrier_handler.BarrierReceived):
            return original(self, event)
        if event.barrier.checkpoint_id <= self._last_id:
            return []
        self._last_id = event.barrier.checkpoint_id
        return [barrier_handler.TakeSnapshot(event.barrier)]

    return [(barrier_handler.BarrierHandler, "handle", handle)]


def end_is_no_barrier() -> Replacements:
    original = barrier_handler.BarrierHandler.handle

    def handle(self: Any, event: Any) -> list[Any]:
        if not isinstance(event, barrier_handler.ChannelEnded):
            return original(self, event)
        self._open.discard(event.channel)
        return []

    return [(barrier_handler.BarrierHandler, "handle", handle)]


def ack_before_write() -> Replacements:
    class Lazy:
        def write(self, path: str, parts: Any) -> None:
            for _ in parts:  # its handles are known only then
                pass

    def store_snapshot(storage: Any, *arguments: Any) -> Any:
        return original(Lazy(), *arguments)  # type: ignore[arg-type]

    original = task_snapshots.store_snapshot
    return [(task_snapshots, "store_snapshot", store_snapshot)]


def forget_earlier_committables() -> Replacements:
    def completed(self: Any, checkpoint_id: int) -> None:
        self._unconfirmed.clear()

    original = task_snapshots.TaskSnapshots._acknowledge

    def acknowledge(self: Any, *arguments: Any) -> None:
        self._unconfirmed.clear()
        original(self, *arguments)

    return [
        (task_snapshots.TaskSnapshots, "_acknowledge", acknowledge),
        (task_snapshots.TaskSnapshots, "completed", completed),
    ]


# ---- what a barrier has overtaken


def captured_channel_forgotten() -> Replacements:
    """Of the channels that a barrier has overtaken, the last one's rows are not stored."""
    original = InputGate.capture

    def capture(self: Any, channel: int, checkpoint_id: int) -> Any:
        captured = original(self, channel, checkpoint_id)
        if channel and channel == len(self.channels) - 1:
            release(captured)
            captured.clear()
        return captured

    return [(InputGate, "capture", capture)]


def captured_row_doubled() -> Replacements:
    """What is first in the last channel that a barrier has overtaken is stored twice."""
    original = InputGate.capture

    def capture(self: Any, channel: int, checkpoint_id: int) -> Any:
        captured = original(self, channel, checkpoint_id)
        if captured and channel == len(self.channels) - 1:
            captured.insert(0, captured[0].hold())
        return captured

    return [(InputGate, "capture", capture)]


def announcement_lost() -> Replacements:
    """A barrier that arrives while rows are captured for it is ignored."""
    original = TaskCheckpoints.on_arrival

    def on_arrival(self: Any, channel: int, event: Any) -> None:
        capturing = any(state.capturing for state in self._in_flight.values())
        if not (capturing and isinstance(event, CheckpointBarrier)):
            original(self, channel, event)

    return [(TaskCheckpoints, "on_arrival", on_arrival)]


def overtakes_again() -> Replacements:
    """When its timeout has passed, a barrier overtakes also in outputs that it has left already."""
    return [(ResultPartition, "overtake_queued", ResultPartition.overtake)]


def overtakes_without_rows() -> Replacements:
    """What a barrier overtakes because its timeout has passed is not stored."""
    original = ResultPartition.overtake_queued

    def overtake_queued(self: Any, barrier: Any) -> Any:
        for _, items in original(self, barrier):
            release(items)
        return []

    return [(ResultPartition, "overtake_queued", overtake_queued)]


def overtakes_what_is_shared() -> Replacements:
    """A barrier overtakes rows that cannot be given to any subtask later."""

    def init(self: Any, channels: int, capturable: Any = ()) -> None:
        original(self, channels, range(channels))

    original = barrier_handler.BarrierHandler.__init__
    return [(barrier_handler.BarrierHandler, "__init__", init)]


def clear_while_recovering() -> Replacements:
    """A channel counts as read up to its barrier while rows that come before it are still to be recovered."""

    def is_clear(self: Any, channel: int, event: Any) -> bool:
        return channel not in self.read_from and self.channels[channel].queue.is_clear(event)

    return [(InputGate, "is_clear", is_clear)]


def clear_while_working() -> Replacements:
    """A channel counts as read up to its barrier while its last batch is still being processed."""

    def is_clear(self: Any, channel: int, event: Any) -> bool:
        return self.recovered is None and self.channels[channel].queue.is_clear(event)

    return [(InputGate, "is_clear", is_clear)]


def capture_goes_on() -> Replacements:
    """What arrives is still held for a checkpoint that has been given up."""
    return [(InputGate, "stop_capture", nothing)]


def captured_up_to_the_next_barrier() -> Replacements:
    """Rows after the barrier are held for its checkpoint, too, when it has arrived before they are captured."""
    original = ElementQueue.capture

    def capture(self: Any, checkpoint_id: int) -> Any:
        behind = False
        more = []
        for item in self._items:
            if isinstance(item, CheckpointBarrier) and item.checkpoint_id == checkpoint_id:
                behind = True
            elif behind and isinstance(item, LeasedBatch):
                more.append(item.hold())
        return original(self, checkpoint_id) + more

    return [(ElementQueue, "capture", capture)]


# ---- alignment


def end_completes_alignment() -> Replacements:
    """A channel that ends while others are aligned completes the alignment."""
    original = barrier_handler.BarrierHandler.handle

    def handle(self: Any, event: Any) -> Any:
        pending = self._pending
        out = original(self, event)
        is_an_end = isinstance(event, barrier_handler.ChannelEnded)
        if not is_an_end or pending is None or pending.capturing or self._pending is not pending:
            return out
        self._pending = None
        blocked = tuple(sorted(pending.received))
        return [
            *out,
            barrier_handler.TakeSnapshot(pending.barrier),
            *([barrier_handler.Resume(blocked)] if blocked else []),
        ]

    return [(barrier_handler.BarrierHandler, "handle", handle)]


def end_does_not_complete_capture() -> Replacements:
    """Rows are captured until the end of a channel has been read, not until it has arrived."""

    def complete_capture(self: Any, pending: Any) -> Any:
        if self._open - pending.announced:
            return []
        self._pending = None
        return [barrier_handler.CaptureComplete(pending.barrier.checkpoint_id)]

    return [(barrier_handler.BarrierHandler, "_complete_capture", complete_capture)]


def older_cancel_is_for_us() -> Replacements:
    """That an older checkpoint was cancelled ends the alignment for the one that is pending."""
    original = barrier_handler.BarrierHandler.handle

    def handle(self: Any, event: Any) -> Any:
        if isinstance(event, barrier_handler.CancelReceived):
            event = barrier_handler.CancelReceived(max(event.checkpoint_id, self.pending_id or 0))
        return original(self, event)

    return [(barrier_handler.BarrierHandler, "handle", handle)]


def given_up_and_blocked() -> Replacements:
    """Channels stay blocked when the checkpoint that they wait for is given up."""
    original = barrier_handler.BarrierHandler._give_up

    def give_up(self: Any, reason: str) -> Any:
        return [each for each in original(self, reason) if not isinstance(each, barrier_handler.Resume)]

    return [(barrier_handler.BarrierHandler, "_give_up", give_up)]


def failed_capture_goes_on() -> Replacements:
    """What was captured could not be written, and the barriers that are still to come count as overtaken."""
    original = barrier_handler.BarrierHandler.handle

    def handle(
        self: barrier_handler.BarrierHandler, event: barrier_handler.BarrierEvent
    ) -> list[barrier_handler.BarrierInstruction]:
        return [] if isinstance(event, barrier_handler.CaptureFailed) else original(self, event)

    return [(barrier_handler.BarrierHandler, "handle", handle)]


def overtakes_in_cycles() -> Replacements:
    """Barriers overtake wherever rows can be moved, also where a task would then wait for itself."""

    def unaligned_edges(graph: JobGraph) -> frozenset[int]:
        return frozenset(edge.id for edge in graph.edges if edge.partitioning.redistributable)

    return [(slot_machine, "unaligned_edges", unaligned_edges)]


def obsolete_barrier_taken() -> Replacements:
    """A barrier of a checkpoint that has been settled here begins it again."""
    original = barrier_handler.BarrierHandler._kind_of

    def kind_of(self: Any, event: Any) -> Any:
        barrier = getattr(event, "barrier", None)
        if self._pending is None and barrier is not None and getattr(event, "channel", None) in (None, *self._open):
            self._last_id = min(self._last_id, barrier.checkpoint_id - 1)
        return original(self, event)

    return [(barrier_handler.BarrierHandler, "_kind_of", kind_of)]


def second_port_not_blocked() -> Replacements:
    """Of a task with two inputs only the first is held back during an alignment."""
    block, resume = InputGate.block, InputGate.resume

    def block_first(self: Any, channel: int) -> None:
        if not self.edge.port:
            block(self, channel)

    def resume_first(self: Any, channel: int) -> None:
        if not self.edge.port:
            resume(self, channel)

    return [(InputGate, "block", block_first), (InputGate, "resume", resume_first)]


def end_of_port_is_forgotten() -> Replacements:
    """That the end of a channel has arrived counts as a barrier of a checkpoint that is being captured only."""
    original = barrier_handler.BarrierHandler.handle

    def handle(self: Any, event: Any) -> Any:
        if isinstance(event, barrier_handler.EndAnnounced) and self._pending is None:
            return []
        return original(self, event)

    return [(barrier_handler.BarrierHandler, "handle", handle)]


# ---- acknowledgements


def failed_write_forgets_committables() -> Replacements:
    """What was prepared for a checkpoint whose state could not be written is not reported with the next one."""
    original = task_snapshots.TaskSnapshots._acknowledge

    def acknowledge(self: Any, checkpoint_id: int, taken: Any, stored: Any, in_flight: Any) -> None:
        original(self, checkpoint_id, taken, stored, in_flight)
        if stored.error or in_flight.error:
            del self._unconfirmed[checkpoint_id]

    return [(task_snapshots.TaskSnapshots, "_acknowledge", acknowledge)]


def chunks_of_an_aborted_checkpoint() -> Replacements:
    """Chunks count as stored when their checkpoint is acknowledged, not when it has completed."""
    original = task_snapshots.TaskSnapshots._acknowledge

    def acknowledge(self: Any, checkpoint_id: int, taken: Any, stored: Any, in_flight: Any) -> None:
        original(self, checkpoint_id, taken, stored, in_flight)
        if not stored.error:
            self._stored = stored.chunks

    return [(task_snapshots.TaskSnapshots, "_acknowledge", acknowledge)]


def barrier_says_nothing_of_completed_ones() -> Replacements:
    """Tasks are notified only by the coordinator that a checkpoint has completed, even if the next barrier comes first."""

    def silent(
        checkpoint_id: int, created_ms: int, timeout_ms: int | None, _: int, pauses_sources: bool
    ) -> CheckpointBarrier:
        return CheckpointBarrier(checkpoint_id, created_ms, timeout_ms, 0, pauses_sources)

    return [(slot_machine, "CheckpointBarrier", silent)]


def acknowledged_out_of_order() -> Replacements:
    """A snapshot that is stored is acknowledged although an older one is not."""

    def acknowledge_at_once(self: Any) -> None:
        ready = [
            key for key, one in self._unacknowledged.items() if one.stored is not None and one.in_flight is not None
        ]
        for checkpoint_id in ready:
            taken = self._unacknowledged.pop(checkpoint_id)
            self._acknowledge(checkpoint_id, taken, taken.stored, taken.in_flight)
        if ready and not self._unacknowledged:
            self._on_idle()

    return [(task_snapshots.TaskSnapshots, "_acknowledge_in_order", acknowledge_at_once)]


MUTATIONS: Final = named(
    Mutation("snapshot at the first barrier", skip_alignment),
    Mutation("the end of a channel does not complete an alignment", end_is_no_barrier),
    Mutation("acknowledge without a file", ack_before_write),
    Mutation("forget what was prepared for a checkpoint that failed", forget_earlier_committables),
    Mutation("overtaken rows of one channel are not stored", captured_channel_forgotten, targeted.backpressured),
    Mutation("overtaken rows of one channel are stored twice", captured_row_doubled, targeted.backpressured),
    Mutation("a barrier that arrives while rows are captured is ignored", announcement_lost, targeted.backpressured),
    Mutation("a barrier overtakes where it has left already", overtakes_again, targeted.timed_out),
    Mutation("rows that a barrier overtakes late are not stored", overtakes_without_rows, targeted.timed_out),
    Mutation("a barrier overtakes rows of a broadcast", overtakes_what_is_shared, targeted.backpressured),
    Mutation(
        "recovered rows are not waited for where none may be in flight",
        clear_while_recovering,
        targeted.held_and_changed,
    ),
    Mutation(
        "the batch in process is not waited for where none may be in flight", clear_while_working, targeted.shared
    ),
    Mutation("rows are held for a checkpoint that was given up", capture_goes_on, targeted.on_time),
    Mutation("rows after a barrier are stored with it", captured_up_to_the_next_barrier, targeted.backpressured),
    Mutation("the end of one channel completes an alignment", end_completes_alignment),
    Mutation(
        "the end of a channel completes a capture when it is read",
        end_does_not_complete_capture,
        targeted.backpressured,
    ),
    Mutation("an older cancellation ends an alignment", older_cancel_is_for_us, targeted.stalled),
    Mutation("channels stay blocked when a checkpoint is given up", given_up_and_blocked, targeted.failing_alone),
    Mutation(
        "barriers of a capture that could not be written count as overtaken",
        failed_capture_goes_on,
        targeted.captured_in_vain,
    ),
    Mutation("barriers overtake where a task then waits for itself", overtakes_in_cycles, targeted.held),
    Mutation("an obsolete barrier counts as a new one", obsolete_barrier_taken),
    Mutation("the second input is not held back during an alignment", second_port_not_blocked),
    Mutation("an end that has arrived before a barrier is forgotten", end_of_port_is_forgotten, targeted.far_behind),
    Mutation(
        "what was prepared for a checkpoint that could not be written is forgotten",
        failed_write_forgets_committables,
        targeted.unwritable,
    ),
    Mutation("chunks of a checkpoint that did not complete are referred to", chunks_of_an_aborted_checkpoint),
    Mutation(
        "a snapshot refers to what an older checkpoint has, though a newer one has completed",
        barrier_says_nothing_of_completed_ones,
        learning_late,
    ),
    Mutation("checkpoints are acknowledged out of order", acknowledged_out_of_order, targeted.stalled),
)
