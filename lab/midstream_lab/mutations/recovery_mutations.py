"""Known bugs of restoring rows in flight and of rescaling, to be put back on purpose: see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final
from unittest.mock import patch

import msgspec

from midstream.engine.checkpoint import (
    channel_state,
    channel_state_references,
    extents,
    redistribute_channel_state,
    redistribute_state,
    state_files,
)
from midstream.engine.checkpoint.stored_in_flight import RowsInFlight
from midstream.engine.coordinator import coordinator as machine
from midstream.engine.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from midstream.engine.coordinator.restore import distribute
from midstream.engine.core.interfaces import Failed
from midstream.engine.core.key_groups import key_group_range
from midstream.engine.worker import gate_recovery as recovery
from midstream.engine.worker.gate_recovery import GateRecovery
from midstream.engine.worker.task_checkpoints import TaskCheckpoints
from midstream.engine.worker.task_snapshots import StoredInFlight
from midstream_lab.mutations.mutation import Mutation, Replacements, named
from midstream_lab.scenarios import targeted
from midstream_lab.scenarios.targeted_at_rest import rejoined_with_gaps

AGAIN_S: Final = 0.035
"""What could not be read is read again."""

# ---- whose key groups


def _with_range(change: Callable[[int, int], tuple[int, int]]) -> Replacements:
    original = channel_state.rows_of

    def rows_of(batches: Any, keys: Any, layouts: Any, state: Any, first: int, max_parallelism: int) -> Any:
        if state.key_groups is not None:
            state = msgspec.structs.replace(state, key_groups=change(*state.key_groups))
        return original(batches, keys, layouts, state, first, max_parallelism)

    return [(recovery, "rows_of", rows_of)]


def range_one_too_long() -> Replacements:
    """A consumer also gets the rows in flight of the key group after its own."""
    return _with_range(lambda low, high: (low, high + 1))


def range_one_too_short() -> Replacements:
    return _with_range(lambda low, high: (low, high - 1))


def _shown_with(**changes: Any) -> Replacements:
    original = RowsInFlight._batches

    def batches(self: Any, storage: Any, channel: Any, *others: Any) -> Any:
        return original(self, storage, msgspec.structs.replace(channel, **changes), *others)

    return [(RowsInFlight, "_batches", batches)]


def consumed_rows_shown() -> Replacements:
    """A reader of a checkpoint also sees rows in flight that were processed after they had been stored."""
    return _shown_with(skip=0, ahead=())


def shared_rows_shown_to_all() -> Replacements:
    """A reader of a checkpoint sees shared rows in flight once for each subtask that shares them."""
    return _shown_with(key_groups=None)


def range_of_a_range_too_short() -> Replacements:
    """What was distributed before loses its last key group when it is distributed again."""
    original = channel_state_references.pieces_of

    def pieces_of(state: Any, whole: Any) -> Any:
        pieces = original(state, whole)
        if state.key_groups is None:
            return pieces
        first, end, skip = pieces[-1]
        return [*pieces[:-1], (first, end - 1, skip)]

    return [(redistribute_channel_state, "pieces_of", pieces_of), (channel_state_references, "pieces_of", pieces_of)]


def shared_border_off_by_one() -> Replacements:
    """Of two consumers that share a segment and have read different parts, the first has one key group of the other."""

    def merge_shares(states: Any, whole: Any) -> Any:
        state, pieces = channel_state_references.merge_shares(states, whole)
        moved = [list(piece) for piece in pieces]
        for before, after in pairwise(moved):
            if before[1] == after[0] and before[2] != after[2] and after[1] - after[0] > 1:
                before[1] += 1
                after[0] += 1
        return state, [(first, end, skip) for first, end, skip in moved]

    return [(redistribute_channel_state, "merge_shares", merge_shares)]


def merged_over_gaps() -> Replacements:
    """Key groups of which the same batches are gone are merged, and so are those between them, which another has."""
    original = channel_state_references.left_of

    def left_of(state: Any, pieces: Any) -> Any:
        merged: list[tuple[int, int, int]] = []
        for first, end, skip in pieces:
            if merged and merged[-1][2] == skip:
                merged[-1] = merged[-1][0], end, skip
            else:
                merged.append((first, end, skip))
        return original(state, merged)

    return [(redistribute_channel_state, "left_of", left_of)]


def state_range_one_too_long() -> Replacements:
    """A keyed operator gets the state of one key group of its neighbour, too."""
    original = state_files._keyed_chunks

    def keyed_chunks(handle: Any, key_groups: range) -> Any:
        return original(handle, range(key_groups.start, key_groups.stop + 1))

    return [(state_files, "_keyed_chunks", keyed_chunks)]


def chunk_without_its_last_group() -> Replacements:
    """A chunk of state is distributed to the owners of its key groups but the last."""
    original = redistribute_state._assign_part

    def assign_part(name: Any, rule: Any, found: Any, own: Any, parallelism: int, max_parallelism: int) -> Any:
        dealt = original(name, rule, found, own, parallelism, max_parallelism)
        if rule.value != "keyed":
            return dealt
        for subtask, handles in enumerate(dealt):
            first = key_group_range(subtask, parallelism, max_parallelism).start
            for index, handle in enumerate(handles):
                kept = tuple(c for c in handle.chunks if not c.key_group_min < c.key_group_max == first)
                handles[index] = msgspec.structs.replace(handle, chunks=kept)
        return dealt

    return [(redistribute_state, "_assign_part", assign_part)]


# ---- where it was, and what is gone of it


def output_of_a_neighbour() -> Replacements:
    """What had not been sent to one consumer is stored as the next one's."""
    original = TaskCheckpoints._snapshot

    def snapshot(self: Any, taken: Any) -> None:
        def moved(partition: Any, take: Any) -> Any:
            def overtake(barrier: Any) -> Any:
                found = take(barrier)
                places = [place for place, _ in found]
                return list(zip(places[1:] + places[:1], [items for _, items in found], strict=True))

            return patch.object(partition, "overtake", overtake)

        patches = [moved(partition, partition.overtake) for partition in self._partitions]
        for each in patches:
            each.start()
        try:
            original(self, taken)
        finally:
            for each in patches:
                each.stop()

    return [(TaskCheckpoints, "_snapshot", snapshot)]


def _captured_in(order: Callable[[list[Any]], list[Any]]) -> Replacements:
    original = TaskCheckpoints._capture

    def capture(self: Any, state: Any, channels: Any) -> None:
        original(self, state, channels)
        state.inputs = order(state.inputs)

    return [(TaskCheckpoints, "_capture", capture)]


def rest_behind_recovered() -> Replacements:
    """In a checkpoint during recovery, the batch in process comes after what is still to be recovered."""
    return _captured_in(lambda inputs: sorted(inputs, key=lambda entry: not entry[0].stored))


def skip_counted_twice() -> Replacements:
    """What had been skipped before is skipped once more in the next checkpoint."""
    original = channel_state_references.without_first

    def without_first(state: Any, segments: int, batches: int) -> Any:
        left = original(state, segments, batches)
        first = left.segments[0].batches
        return msgspec.structs.replace(left, skip=min(first - 1, left.skip + (state.skip if not segments else 0)))

    return [(recovery, "without_first", without_first)]


def skip_of_the_last_segment() -> Replacements:
    """What is gone is counted as if segments that are gone were still there."""
    original = channel_state_references.without_first

    def without_first(state: Any, segments: int, batches: int) -> Any:
        left = original(state, segments, batches)
        gone = sum(segment.batches for segment in state.segments[:segments])
        return msgspec.structs.replace(left, skip=min(left.skip + gone, channel_state_references.batches_of(left) - 1))

    return [(recovery, "without_first", without_first)]


def segment_read_twice() -> Replacements:
    """A segment that could not be read is read later, twice."""
    original = GateRecovery._read_next

    def read_next(self: Any) -> None:
        executor = self._executor

        class Again:
            @staticmethod
            def submit(work: Any, done: Any) -> None:
                def tried(outcome: Any) -> None:
                    if not isinstance(outcome, Failed) or self._closed:
                        done(outcome)
                        return
                    for _ in range(2):
                        executor.call_later(AGAIN_S, lambda: executor.submit(work, done))

                executor.submit(work, tried)

        self._executor = Again
        original(self)
        self._executor = executor

    return [(GateRecovery, "_read_next", read_next)]


def read_ahead_by_file() -> Replacements:
    """What has been read already is known by its file only, of which it may be another segment."""
    original = GateRecovery._read_next

    def read_next(self: Any) -> None:
        at = self._next
        if not self._reading and not self._closed and at is not None:
            file = self._states[at.state].segments[at.segment].file
            mine = [place for place in self._read_ahead if place[0] == file]
            if mine:
                segment = self._states[at.state].segments[at.segment]
                self._read_ahead[file, segment.offset] = self._read_ahead[mine[-1]]
        original(self)

    return [(GateRecovery, "_read_next", read_next)]


def moved_segments_swapped() -> Replacements:
    """What moves from the metadata into a file is given the place of its neighbour there."""
    original = extents.write_extents

    def write_extents(storage: Any, file: str, encoded: Any, inline_bytes_max: int) -> Any:
        written = original(storage, file, encoded, inline_bytes_max)
        if not written.files:
            return written
        return replace(written, extents=(*written.extents[1:], *written.extents[:1]))

    return [(channel_state, "write_extents", write_extents)]


def earlier_flush_forgotten() -> Replacements:
    """Of what was stored in several files, because barriers were slow to come, the last is acknowledged."""

    def with_more(self: Any, more: Any) -> Any:
        return replace(more, files=self.files + more.files)

    return [(StoredInFlight, "with_more", with_more)]


def files_of_an_earlier_flush() -> Replacements:
    """Of the files in which rows in flight were stored one after the other, the last is named."""
    original = StoredInFlight.with_more

    def with_more(self: Any, more: Any) -> Any:
        return replace(original(self, more), files=more.files)

    return [(StoredInFlight, "with_more", with_more)]


def recovered_at_once() -> Replacements:
    """Rows that are recovered are not charged to the pool."""
    original = GateRecovery.__init__

    def init(self: Any, *arguments: Any, **named: Any) -> None:
        class Free:
            in_use = 0
            charge = free = staticmethod(lambda buffers: None)

        original(self, *arguments, **{**named, "quota": Free})

    return [(GateRecovery, "__init__", init)]


# ---- to another parallelism


def removed_consumers_dropped() -> Replacements:
    """Rows in flight to subtasks that no longer exist are distributed to no subtask."""
    original = redistribute_channel_state._distribute

    def deal(states: Any, old: Any, edge: Any, had: int, graph: Any) -> Any:
        there = graph.vertices[edge.target].parallelism
        return original([state for state in states if state.consumer < there], old, edge, had, graph)

    return [(redistribute_channel_state, "_distribute", deal)]


def dealt_to_the_next() -> Replacements:
    """Rows in flight go to the subtask after their own, when there are other subtasks than before."""
    original = redistribute_channel_state._by_key

    def by_key(states: Any, old: Any, edge: Any, had: int, parallelism: int, max_parallelism: int) -> Any:
        for state in original(states, old, edge, had, parallelism, max_parallelism):
            moved = (state.consumer + (had != parallelism)) % parallelism
            yield msgspec.structs.replace(state, consumer=moved)

    return [(redistribute_channel_state, "_by_key", by_key)]


def dealt_state_by_state() -> Replacements:
    """Where any subtask may have them, the rows of one old subtask are distributed one by one, not in their order."""
    original = redistribute_channel_state._in_order

    def in_order(states: Any) -> Any:
        return original(states)[::-1]

    return [(redistribute_channel_state, "_in_order", in_order)]


def rescaled_from_the_one_before() -> Replacements:
    """A rescale resumes from the checkpoint before the one that was made for it."""
    published, go_on_with = CheckpointCoordinator._published, machine.Coordinator.switch_to

    def keep(self: Any, *arguments: Any) -> None:
        before = self.newest
        published(self, *arguments)
        if self.newest is not before:
            self.before = before

    def switch(self: Any, plan: Any) -> None:
        go_on_with(self, plan)
        before = getattr(self.checkpoints, "before", None)
        if before is not None:
            self.checkpoints.newest = before

    return [(CheckpointCoordinator, "_published", keep), (machine.Coordinator, "switch_to", switch)]


def state_of_the_restore_before() -> Replacements:
    """Operators get their state from the checkpoint that the attempt before began with; sources and rows in flight do not."""
    original, real = distribute.StateDistribution.distribute, distribute.distribute

    def distribute_state(self: Any, metadata: Any, plan: Any, done: Any) -> None:
        before, self.before = getattr(self, "before", None), metadata
        mixed = metadata
        if before is not None and [op.uid for op in before.operators] == [op.uid for op in metadata.operators]:
            sources = {position.uid for position in metadata.sources}
            operators = tuple(
                now if now.uid in sources or now.finished or then.finished else then
                for then, now in zip(before.operators, metadata.operators, strict=True)
            )
            files = tuple({*before.files, *metadata.files})
            mixed = msgspec.structs.replace(metadata, operators=operators, files=files)
        with patch.object(distribute, "distribute", lambda _, plan: real(mixed, plan)):
            original(self, metadata, plan, done)

    return [(distribute.StateDistribution, "distribute", distribute_state)]


MUTATIONS: Final = named(
    Mutation("rows in flight of one key group more are recovered", range_one_too_long, targeted.backpressured),
    Mutation("rows in flight of the last key group are not recovered", range_one_too_short, targeted.backpressured),
    Mutation("rows in flight that were processed are read", consumed_rows_shown, targeted.backpressured),
    Mutation("rows in flight are read for each subtask", shared_rows_shown_to_all, targeted.backpressured),
    Mutation("rows that are distributed again lose a key group", range_of_a_range_too_short, targeted.rejoined),
    Mutation("a key group that consumers share counts with the wrong one", shared_border_off_by_one, targeted.rejoined),
    Mutation("key groups of which as much is gone are merged over gaps", merged_over_gaps, rejoined_with_gaps),
    Mutation("keyed state of one key group more is restored", state_range_one_too_long, targeted.backpressured),
    Mutation(
        "a chunk of state is not distributed to the owner of its last key group",
        chunk_without_its_last_group,
        targeted.dealt_by_groups,
    ),
    Mutation(
        "output that waits for one consumer is stored as the next one's", output_of_a_neighbour, targeted.backpressured
    ),
    Mutation("the batch in process is stored after what is to be recovered", rest_behind_recovered, targeted.rejoined),
    Mutation("batches that are gone are skipped twice", skip_counted_twice, targeted.rejoined),
    Mutation("batches of segments that are gone are skipped again", skip_of_the_last_segment, targeted.segmented),
    Mutation("a segment that could not be read is read twice", segment_read_twice, targeted.unreadable),
    Mutation(
        "rows that were read ahead are those of another segment of their file",
        read_ahead_by_file,
        targeted.backpressured,
    ),
    Mutation("segments have the places of their neighbours", moved_segments_swapped, targeted.backpressured),
    Mutation(
        "of rows in flight in several files the last is acknowledged", earlier_flush_forgotten, targeted.ending_rescaled
    ),
    Mutation(
        "of several files of rows in flight the last is named", files_of_an_earlier_flush, targeted.ending_rescaled
    ),
    Mutation("recovered rows are not charged to the pool", recovered_at_once, targeted.backpressured),
    Mutation(
        "rows in flight to subtasks that no longer exist are dropped", removed_consumers_dropped, targeted.backpressured
    ),
    Mutation(
        "rows in flight are distributed to the subtask after their own", dealt_to_the_next, targeted.backpressured
    ),
    Mutation("rows in flight are distributed in the wrong order", dealt_state_by_state, targeted.backpressured),
    Mutation("a rescale resumes from the checkpoint before its own", rescaled_from_the_one_before, targeted.rescaled),
    Mutation("operators get the state of the restore before", state_of_the_restore_before, targeted.poisoned),
)
