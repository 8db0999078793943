"""Known bugs around data in flight, to be put back on purpose: see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from typing import Any, Final
from unittest.mock import patch

import msgspec

from midstream.engine.checkpoint import channel_state_references, redistribute_channel_state, state_files
from midstream.engine.coordinator.checkpoints import checkpoint_coordinator, metadata_builder
from midstream.engine.core.elements import CheckpointBarrier
from midstream.engine.exchange.batch_lease import LeasedBatch, release
from midstream.engine.exchange.element_queue import ElementQueue
from midstream.engine.exchange.input_gate import InputGate
from midstream.engine.exchange.result_partition import ResultPartition
from midstream.engine.exchange.subpartition import Subpartition
from midstream.engine.worker import gate_recovery as recovery
from midstream.engine.worker.gate_recovery import GateRecovery
from midstream.engine.worker.task_checkpoints import TaskCheckpoints
from midstream_lab.mutations.mutation import Mutation, Replacements, named, nothing
from midstream_lab.scenarios import targeted


def forget_rest() -> Replacements:
    """Return the rows of the batch in process that are not processed yet."""
    original = TaskCheckpoints._capture

    def capture(self: Any, state: Any, channels: Any) -> None:
        with patch.object(self._task, "rests", dict):
            original(self, state, channels)

    return [(TaskCheckpoints, "_capture", capture)]


def forget_partly_sent() -> Replacements:
    original = Subpartition.overtake

    def overtake(self: Any, barrier: Any) -> Any:
        sending, self.sending = self.sending, None
        captured = original(self, barrier)
        self.sending = sending
        return captured

    return [(Subpartition, "overtake", overtake)]


class _Nowhere(list[LeasedBatch]):
    def append(self, item: LeasedBatch) -> None:
        item.release()


def forget_arrivals() -> Replacements:
    """Only what is there at the snapshot is captured."""
    original = ElementQueue.capture

    def capture(self: Any, checkpoint_id: int) -> Any:
        captured = original(self, checkpoint_id)
        if self._capture is not None:
            self._capture = _Nowhere()
        return captured

    return [(ElementQueue, "capture", capture)]


def forget_output() -> Replacements:
    original = ResultPartition.overtake

    def overtake(self: Any, barrier: Any) -> Any:
        for _, items in original(self, barrier):
            release(items)
        return []

    return [(ResultPartition, "overtake", overtake)]


def no_filter() -> Replacements:
    return [(recovery, "rows_of", lambda batch, *_: batch)]


def forget_recovered() -> Replacements:
    """A checkpoint during recovery holds nothing of what was not consumed."""
    return [(GateRecovery, "remaining", lambda self: ())]


def ignore_skip() -> Replacements:
    original = GateRecovery.__init__

    def init(self: Any, edge: Any, states: Any, **more: Any) -> None:
        original(self, edge, [msgspec.structs.replace(state, skip=0) for state in states], **more)

    return [(GateRecovery, "__init__", init)]


def live_before_recovered() -> Replacements:
    """Live data is read while recovered data is still being fetched."""
    original = InputGate.poll

    def poll(self: Any, rows_max: int) -> Any:
        recovered = self.recovered
        if recovered is None or recovered.is_over or recovered._queue:
            return original(self, rows_max)
        self.recovered = None
        polled = original(self, rows_max)
        self.recovered = recovered
        return polled

    return [(InputGate, "poll", poll)]


def output_before_input() -> Replacements:
    """What had not left its producer is read before what had arrived."""

    def in_order(states: Any) -> Any:
        return sorted(states, key=lambda state: (state.consumer, not state.is_output))

    return [(redistribute_channel_state, "_in_order", in_order)]


def old_ranges() -> Replacements:
    """Rows are distributed by the key groups of the subtasks before the rescale."""
    original = redistribute_channel_state._by_key

    def by_key(states: Any, old: Any, edge: Any, had: int, parallelism: int, max_parallelism: int) -> Any:
        for state in original(states, old, edge, had, had, max_parallelism):
            yield msgspec.structs.replace(state, consumer=state.consumer % parallelism)

    return [(redistribute_channel_state, "_by_key", by_key)]


def as_far_as_the_first() -> Replacements:
    """What consumers share counts as gone for all of them once it is for one."""

    def merge_shares(states: Any, whole: Any) -> Any:
        state, pieces = channel_state_references.merge_shares(states, whole)
        furthest = max(skip for _, _, skip in pieces)
        return state, [(first, behind, furthest) for first, behind, _ in pieces]

    return [(redistribute_channel_state, "merge_shares", merge_shares)]


def joined_over_gaps() -> Replacements:
    """Key groups between those that consumers still share come back, though their rows are gone."""

    def merge_shares(states: Any, whole: Any) -> Any:
        state, pieces = channel_state_references.merge_shares(states, whole)
        return state, [(pieces[0][0], pieces[-1][1], min(skip for _, _, skip in pieces))]

    return [(redistribute_channel_state, "merge_shares", merge_shares)]


def ahead_counts_from_the_start() -> Replacements:
    """What is gone for some key groups is counted from a segment that is not referred to any more."""
    original = channel_state_references.without_first

    def without_first(state: Any, segments: int, batches: int) -> Any:
        return msgspec.structs.replace(original(state, segments, batches), ahead=state.ahead)

    return [(recovery, "without_first", without_first)]


def unannounced_barrier() -> Replacements:
    """A barrier overtakes what waits for credit, and the link is not woken: the barrier is sent with the next rows."""
    original = Subpartition.overtake

    def overtake(self: Any, barrier: Any) -> Any:
        with patch.object(self.queue, "_listener", None):
            return original(self, barrier)

    return [(Subpartition, "overtake", overtake)]


def missing_barrier() -> Replacements:
    """One of several consumers is forgotten when a barrier overtakes."""
    original = ResultPartition.overtake

    def overtake(self: Any, barrier: Any) -> Any:
        with patch.object(self, "subpartitions", self.subpartitions[:-1] or self.subpartitions):
            return original(self, barrier)

    return [(ResultPartition, "overtake", overtake)]


def barrier_later() -> Replacements:
    """Operators are captured now, and rows in flight only after other mails have been processed."""
    original = TaskCheckpoints._snapshot

    def snapshot(self: Any, taken: Any) -> None:
        self._note_first_barrier(taken.barrier)
        self._task.take_snapshot(taken.barrier, 0.0)

        def rest() -> None:
            if not self._closed:
                with patch.object(self._task, "take_snapshot", nothing):
                    original(self, taken)

        self._services.executor.post(rest)

    return [(TaskCheckpoints, "_snapshot", snapshot)]


def position_late() -> Replacements:
    """The batch in process counts as still to be recovered until it is processed."""
    originals = GateRecovery.take, GateRecovery.remaining, InputGate.processed

    def take(self: Any) -> Any:
        self.at = self._queue[0][0] if self._queue else None
        return originals[0](self)

    def done(self: Any) -> None:
        originals[2](self)
        if self.recovered is not None:
            self.recovered.at = None

    def remaining(self: Any) -> Any:
        if getattr(self, "at", None) is None:
            return originals[1](self)
        head = msgspec.structs.replace(self._states[self.at.state], skip=self.at.index)
        return (head, *self._states[self.at.state + 1 :])

    return [(GateRecovery, "take", take), (GateRecovery, "remaining", remaining), (InputGate, "processed", done)]


def forgotten_channel_files() -> Replacements:
    """A checkpoint does not keep the files of the rows in flight that it refers to."""
    original = metadata_builder.build_metadata

    def build_metadata(*arguments: Any, **named: Any) -> Any:
        metadata = original(*arguments, **named)
        return msgspec.structs.replace(metadata, files=tuple(f for f in metadata.files if not f.endswith(".channels")))

    return [(checkpoint_coordinator, "build_metadata", build_metadata)]


def recovery_waits_for_pool() -> Replacements:
    """Recovered rows are read only while the shared pool has room."""
    original = GateRecovery._read_next

    def read_next(self: Any) -> None:
        if self._quota.pool.shared_free > 0 or self._closed:
            original(self)
        else:
            self._quota.pool.wake_when_available(self._quota, lambda: self._executor.post(lambda: read_next(self)))

    return [(GateRecovery, "_read_next", read_next)]


def swallow_read_error() -> Replacements:
    """Recovered rows that cannot be read are dropped without an error."""
    original = GateRecovery.__init__

    def init(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **{**named, "fail": lambda error: None})

    return [(GateRecovery, "__init__", init)]


def output_aside() -> Replacements:
    """What is emitted while the pool is empty is kept outside the queue, and put there with what comes next."""
    emit, broadcast = ResultPartition.emit, ResultPartition.broadcast

    def flush(self: Any) -> None:
        aside, self.aside = getattr(self, "aside", ()), ()
        for batch in aside:
            emit(self, batch)

    def emit_or_keep(self: Any, batch: Any) -> None:
        if self._quota.available() <= 0:
            self.aside = (*getattr(self, "aside", ()), batch)
        else:
            flush(self)
            emit(self, batch)

    def flush_and_broadcast(self: Any, event: Any) -> None:
        if not isinstance(event, CheckpointBarrier):
            flush(self)
        broadcast(self, event)

    return [(ResultPartition, "emit", emit_or_keep), (ResultPartition, "broadcast", flush_and_broadcast)]


def old_parallelism() -> Replacements:
    return [(state_files, "_keyed_rows", lambda chunk, key_groups: state_files._ALL)]


def remaining_behind_the_queue() -> Replacements:
    """A checkpoint during recovery forgets what has been read and not consumed."""
    original = GateRecovery.remaining

    def remaining(self: Any) -> Any:
        with patch.object(self, "_queue", ()):
            return original(self)

    return [(GateRecovery, "remaining", remaining)]


MUTATIONS: Final = named(
    Mutation("keyed state is not filtered", old_parallelism, targeted.backpressured),
    Mutation("recovered data is stored from where it has been read to", remaining_behind_the_queue),
    Mutation("the rest of a sliced batch is not captured", forget_rest, targeted.backpressured),
    Mutation("a batch that is partly sent is not captured", forget_partly_sent, targeted.backpressured),
    Mutation("what arrives before its barrier is not captured", forget_arrivals, targeted.backpressured),
    Mutation("queued output is not captured", forget_output, targeted.backpressured),
    Mutation("rows in flight are not filtered by key group", no_filter, targeted.backpressured),
    Mutation("a checkpoint during recovery forgets what is not consumed", forget_recovered, targeted.backpressured),
    Mutation("what was consumed before a checkpoint is recovered again", ignore_skip, targeted.backpressured),
    Mutation("live data is read before recovered data", live_before_recovered, targeted.backpressured),
    Mutation("what had arrived is read after what had not", output_before_input, targeted.backpressured),
    Mutation("rows in flight are distributed by the key groups of before", old_ranges, targeted.backpressured),
    Mutation("what consumers share is gone for all once it is for one", as_far_as_the_first, targeted.rejoined),
    Mutation("shared key groups are joined over gaps", joined_over_gaps, targeted.rejoined),
    Mutation(
        "what is gone for some key groups is counted from a segment that is gone",
        ahead_counts_from_the_start,
        targeted.rejoined,
    ),
    Mutation(
        "a barrier that overtakes what waits for credit is not announced", unannounced_barrier, targeted.far_behind
    ),
    Mutation(
        "the place in recovered data moves when a batch is processed, not when it is taken",
        position_late,
        targeted.sliced,
    ),
    Mutation("what is in flight is captured one mail after the operators", barrier_later, targeted.backpressured),
    Mutation("one channel gets no barrier", missing_barrier, targeted.backpressured),
    Mutation(
        "files of rows in flight are not kept with their checkpoint", forgotten_channel_files, targeted.backpressured
    ),
    Mutation("recovered rows wait for room in the pool", recovery_waits_for_pool, targeted.tight_pool),
    Mutation("an error in recovering rows is swallowed", swallow_read_error, targeted.recovering),
    Mutation("output is kept outside the queues while the pool is empty", output_aside, targeted.tight_pool),
)
