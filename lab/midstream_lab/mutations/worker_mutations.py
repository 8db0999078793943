"""Known bugs of tasks and sources, to be put back on purpose: see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from typing import Any, Final
from unittest.mock import patch

import msgspec

from midstream.engine.core.elements import MIN_WATERMARK_US, CheckpointBarrier, EndOfPartition, Watermark
from midstream.engine.exchange.batch_lease import LeasedBatch
from midstream.engine.exchange.element_queue import ElementQueue
from midstream.engine.exchange.subpartition import Subpartition
from midstream.engine.graph.idleness import IdleOrigin
from midstream.engine.operators import key_group_watermarks
from midstream.engine.state.state_parts import StatePart
from midstream.engine.worker import operator_chain as chain
from midstream.engine.worker import task, task_snapshots
from midstream.engine.worker import watermark_valve as valve
from midstream.engine.worker.source_reader import SourceReader
from midstream.engine.worker.watermark_valve import WatermarkValve
from midstream_lab.mutations.mutation import Mutation, Replacements, named, nothing
from midstream_lab.mutations.state_mutations import plain
from midstream_lab.scenarios import targeted
from midstream_lab.scenarios.targeted_at_rest import ending_with_generators
from midstream_lab.scenarios.targeted_ends import ending_without_another


def partition_ends_early() -> Replacements:
    original = task.Task._finish

    def finish(self: Any) -> None:
        original(self)
        if self.is_finishing:
            outputs = self.operators.outputs
            outputs.broadcast(EndOfPartition())
            self._end = lambda *_: task.Task._end(self)
            outputs.broadcast = lambda event: None

    return [(task.Task, "_finish", finish)]


def failure_discards() -> Replacements:
    """A failed task drops its channels while its peers still use them."""
    original = task.Task.fail

    def fail(self: Any, error: BaseException, **symptom: bool) -> None:
        was_live = self.is_live
        original(self, error, **symptom)
        if was_live:
            self.close()

    return [(task.Task, "fail", fail)]


def early_split() -> Replacements:
    def add_split(self: Any, split: bytes, waiting_from_us: int, assigned: int) -> None:
        source = self.operators.source
        if source is not None and self.is_live:
            source.add_split(split, waiting_from_us=waiting_from_us, assigned=self._split_counts(assigned))

    return [(task.Task, "add_split", add_split)]


def offset_before_emit() -> Replacements:
    """What was read ahead counts as emitted."""
    original = SourceReader.snapshot

    def snapshot(self: Any, new_id: Any) -> Any:
        before = [current.split for current in self._splits]
        for current in self._splits:
            if current.prefetched is not None:
                current.split = msgspec.structs.replace(current.split, offset=current.prefetched.offset)
        parts = original(self, new_id)
        for current, split in zip(self._splits, before, strict=True):
            current.split = split
        return parts

    return [(SourceReader, "snapshot", snapshot)]


# ---- snapshots


def snapshot_after_the_next_rows() -> Replacements:
    """A task continues to process rows between the barrier and its snapshot."""
    original = task.Task.take_snapshot

    def snapshot(self: Any, barrier: Any, alignment_ms: float) -> None:
        if self.gates and self.state is task.TaskState.RUNNING and not self.operators.chain.is_firing:
            self.input.work()
        original(self, barrier, alignment_ms)

    return [(task.Task, "take_snapshot", snapshot)]


def source_ahead_of_its_barrier() -> Replacements:
    """A source emits one more batch after the barrier, and its position is that after the batch."""
    original = task.Task.take_snapshot

    def snapshot(self: Any, barrier: Any, alignment_ms: float) -> None:
        if self.operators.source is not None and self.state is task.TaskState.RUNNING:
            self._read_source()
        original(self, barrier, alignment_ms)

    return [(task.Task, "take_snapshot", snapshot)]


def barrier_before_the_last_batch() -> Replacements:
    """What was emitted last goes out after the barrier."""
    original = Subpartition.add

    def add(self: Any, element: Any) -> None:
        items = self.queue._items
        if not isinstance(element, CheckpointBarrier) or not items or not isinstance(items[-1], LeasedBatch):
            original(self, element)
            return
        last = items.pop()
        original(self, element)
        items.append(last)

    return [(Subpartition, "add", add)]


# ---- the end


def final_by_any_checkpoint() -> Replacements:
    """A task is done when any checkpoint completes, one from before the end of its data, too."""
    original = task.Task._on_completed

    def on_completed(self: Any, checkpoint_id: int) -> None:
        original(self, checkpoint_id)
        if self.state is task.TaskState.AWAITS_CHECKPOINT:
            self._transition(task.TaskState.AWAITS_SENT, task.TaskEvent.COMPLETED)

    return [(task.Task, "_on_completed", on_completed)]


def aborted_final_is_forgotten() -> Replacements:
    """A task whose final checkpoint is aborted waits for one that it joins afterwards, though it has joined a later one."""
    original = task.Task._on_aborted

    def on_aborted(self: Any, checkpoint_id: int) -> None:
        original(self, checkpoint_id)
        if self._final_checkpoint == checkpoint_id:
            self._final_checkpoint = None

    return [(task.Task, "_on_aborted", on_aborted)]


def only_the_first_is_final() -> Replacements:
    """A task ends only with the very first checkpoint that it has joined since its data ended."""
    original = task.Task._on_completed

    def on_completed(self: Any, checkpoint_id: int) -> None:
        if self._final_checkpoint == checkpoint_id or self.state is not task.TaskState.AWAITS_CHECKPOINT:
            original(self, checkpoint_id)

    return [(task.Task, "_on_completed", on_completed)]


def runs_while_it_waits_for_consumers() -> Replacements:
    """A task whose final checkpoint has completed is in later ones as running."""
    original = task.Task.take_snapshot

    def snapshot(self: Any, barrier: Any, alignment_ms: float) -> None:
        with patch.object(task, "_ALL_EMITTED", (task.TaskState.AWAITS_CHECKPOINT, task.TaskState.AWAITS_SINKS)):
            original(self, barrier, alignment_ms)

    return [(task.Task, "take_snapshot", snapshot)]


def last_watermark_replaces() -> Replacements:
    """The end of event time replaces the watermark that waits before it, as any other watermark does."""
    original = ElementQueue.append

    def append(self: Any, item: Any) -> None:
        if isinstance(item, Watermark) and self._items and isinstance(self._items[-1], Watermark):
            self._items.pop()
        original(self, item)

    return [(ElementQueue, "append", append)]


def ends_before_all_is_sent() -> Replacements:
    """A task ends while what it has emitted is not sent yet."""
    return [(task.Task, "_is_sent", lambda self: True)]


def ends_before_it_has_answered() -> Replacements:
    """A task ends while it owes an answer for a checkpoint that it has joined."""
    return [(task_snapshots.TaskSnapshots, "is_idle", True)]


# ---- event time


def silent_channel_is_forgotten() -> Replacements:
    """After a restore a channel that has sent no watermark yet is not waited for."""
    original = WatermarkValve._merged

    def merged(self: Any) -> Any:
        if self.watermark_us == MIN_WATERMARK_US:
            return original(self)
        idle, count = self._idle, self._idle_count
        self._idle = [was or mark == MIN_WATERMARK_US for was, mark in zip(idle, self.watermarks, strict=True)]
        self._idle_count = sum(self._idle)
        try:
            return original(self)
        finally:
            self._idle, self._idle_count = idle, count

    return [(WatermarkValve, "_merged", merged)]


def idle_channel_holds() -> Replacements:
    """A channel that is idle is waited for."""
    return [(WatermarkValve, "set_idle", lambda self, channel, idle, assigned: None)]


def idle_channel_does_not_come_back() -> Replacements:
    """A channel that was idle once is never waited for again."""
    original = WatermarkValve.set_idle

    def set_idle(self: Any, channel: int, idle: bool, assigned: Any) -> Any:
        return original(self, channel, True, assigned)

    return [(WatermarkValve, "set_idle", set_idle)]


def idle_subtask_is_passed() -> Replacements:
    """A subtask that reports itself as idle is not waited for, although another one that reads the same is active."""
    original = WatermarkValve.__init__

    def init(self: Any, origins: Any) -> None:
        original(self, [IdleOrigin(one=frozenset((0,)), subtask=channel) for channel in range(len(origins))])

    return [(WatermarkValve, "__init__", init)]


def idle_way_is_passed() -> Replacements:
    """An idle operator is not waited for, although its source, which is read alongside it, is active again."""
    original = valve._families

    def families(origins: Any) -> Any:
        found = original(origins)
        for number, family in enumerate(found):
            family.within_all = [other for other in family.within_all if other == number]
        return found

    return [(valve, "_families", families)]


def idle_ways_together_are_passed() -> Replacements:
    """Nor are all idle subtasks of a source, though an operator that reads all of them is active, and is read alongside them."""
    original = valve._families

    def families(origins: Any) -> Any:
        found = original(origins)
        for family in found:
            family.within_together = []
        return found

    return [(valve, "_families", families)]


def end_stays_before_a_generator() -> Replacements:
    """The end of event time, which the operator before a generator had received, is no longer offered to the generator."""
    original = chain.OperatorChain.restore

    def restore(self: Any, marks: Any) -> None:
        original(self, marks)
        for index in [index for index in self._pending if self.operators[index].makes_watermarks]:
            del self._pending[index]

    return [(chain.OperatorChain, "restore", restore)]


def event_time_begins_again() -> Replacements:
    """After a restore event time is where it was at the beginning."""
    return [(chain.OperatorChain, "restore", lambda self, marks: None)]


def pending_firing_not_resumed() -> Replacements:
    """A watermark that had not fired to its end does not continue after a restore."""
    original = chain.OperatorChain.restore

    def restore(self: Any, marks: Any) -> None:
        original(self, marks)
        self._pending.clear()

    return [(chain.OperatorChain, "restore", restore)]


def fired_watermark_stays() -> Replacements:
    """A watermark that took several slices to fire is not passed on."""

    def pump(self: Any) -> None:
        index = max(self._pending)
        if self._fire(index, self._pending[index]):
            del self._pending[index]

    return [(chain.OperatorChain, "pump", pump)]


def watermark_not_said_again() -> Replacements:
    """Consumers do not get again the watermark that they had before a restore."""
    original = task.Task.start

    def start(self: Any) -> None:
        outputs = self.operators.outputs
        before, outputs.broadcast = outputs.broadcast, nothing
        original(self)
        outputs.broadcast = before

    return [(task.Task, "start", start)]


def watermark_of_one_slice_more() -> Replacements:
    """A snapshot has the watermark that fires as one that has left the operator."""
    original = task.Task.take_snapshot

    def snapshot(self: Any, barrier: Any, alignment_ms: float) -> None:
        chain = self.operators.chain
        offered = chain.offered_us
        chain.offered_us = [offered[0], *(max(offered[: i + 1]) for i in range(1, len(offered)))]
        original(self, barrier, alignment_ms)
        chain.offered_us = offered

    return [(task.Task, "take_snapshot", snapshot)]


def progress_of_the_slowest() -> Replacements:
    """After a restore all key groups have come as far as the one furthest behind."""
    original = key_group_watermarks.KeyGroupWatermarks.restore

    def restore(self: Any, part: StatePart) -> None:
        original(self, part)
        self._marks[:] = self.lowest
        self.is_even = True

    return [(key_group_watermarks.KeyGroupWatermarks, "restore", restore)]


MUTATIONS: Final = named(
    Mutation("EndOfPartition before the final checkpoint", partition_ends_early),
    Mutation("a failed task drops channels that peers still use", failure_discards),
    Mutation("a split that comes after the trigger is in the snapshot", early_split),
    Mutation("rows that were read ahead count as emitted", offset_before_emit),
    Mutation("a snapshot is taken after the next rows", snapshot_after_the_next_rows),
    Mutation("a source continues between its barrier and its snapshot", source_ahead_of_its_barrier),
    Mutation("what was emitted last goes out after the barrier", barrier_before_the_last_batch),
    Mutation("a task ends with a checkpoint from before its end", final_by_any_checkpoint, targeted.ending("keyed")),
    Mutation(
        "a final checkpoint that is aborted is forgotten, and with it the next one, which the task has joined",
        aborted_final_is_forgotten,
        ending_without_another,
    ),
    Mutation(
        "only the first checkpoint that a task has joined since its end is final",
        only_the_first_is_final,
        ending_without_another,
    ),
    Mutation(
        "a task that waits for its consumers is in checkpoints as running",
        runs_while_it_waits_for_consumers,
        targeted.writing_at_the_end,
    ),
    Mutation("the last watermark of a channel replaces the one before it", last_watermark_replaces),
    Mutation("a task ends before all it has emitted is sent", ends_before_all_is_sent, targeted.sent_at_the_end),
    Mutation("a task ends while it owes an answer", ends_before_it_has_answered, targeted.writing_at_the_end),
    Mutation("a silent channel is not waited for after a restore", silent_channel_is_forgotten, targeted.timely),
    Mutation("an idle channel is waited for", idle_channel_holds),
    Mutation("a channel that was idle is never waited for again", idle_channel_does_not_come_back),
    Mutation(
        "an idle subtask is not waited for while another one that reads the same is active",
        idle_subtask_is_passed,
        targeted.quiet("quiet"),
    ),
    Mutation(
        "an idle operator is not waited for while its source is active alongside it",
        idle_way_is_passed,
        targeted.quiet("quiet_twice"),
    ),
    Mutation(
        "all subtasks of an idle source are not waited for while an operator downstream is active alongside them",
        idle_ways_together_are_passed,
        targeted.quiet("quiet_twice"),
    ),
    Mutation(
        "the end of event time does not pass a generator that is new",
        end_stays_before_a_generator,
        ending_with_generators,
    ),
    Mutation("event time begins again after a restore", event_time_begins_again, targeted.timely),
    Mutation(
        "a watermark that was firing is forgotten by a restore",
        pending_firing_not_resumed,
        targeted.in_pieces(plain("timers")),
    ),
    Mutation("a watermark that fires in slices is not passed on", fired_watermark_stays, targeted.firing),
    Mutation("the watermark is not sent again after a restore", watermark_not_said_again, targeted.unheard),
    Mutation(
        "a watermark that is firing is stored as one that has fired", watermark_of_one_slice_more, targeted.firing
    ),
    Mutation(
        "key groups have come as far as the last after a rescale", progress_of_the_slowest, targeted.fired_unevenly
    ),
)
