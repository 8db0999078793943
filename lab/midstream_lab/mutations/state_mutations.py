"""Known bugs of state at rest, of timers, and of which subtask gets which state back: see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa

from midstream.engine.checkpoint import redistribute_state, state_files
from midstream.engine.operators.functions.process_operator import ProcessOperator
from midstream.engine.state import heap_snapshot, timers
from midstream.engine.state.changelog import GONE, Changelog
from midstream.engine.state.columnar import PartLog
from midstream.engine.state.expiring_states import UNKNOWN_US, ExpiringState
from midstream.engine.state.keyed_states import ListState, MapState, SingleState, State
from midstream.engine.state.state_parts import Chunk, Redistribute
from midstream.engine.state.table_runs import TableRun
from midstream.engine.state.table_state import TableState
from midstream.engine.state.timers import TimerQueue
from midstream.engine.worker.task_snapshots import TaskSnapshots
from midstream_lab.jobs.expiring import EXPIRING
from midstream_lab.mutations.mutation import Mutation, Replacements, named, of
from midstream_lab.scenarios import targeted
from midstream_lab.scenarios.scenario import Scenario, draw
from midstream_lab.scenarios.targeted_at_rest import dealt_anew

# ---- what a snapshot shares with the operator


def map_is_shared() -> Replacements:
    """The dict of a key is changed in place though a snapshot refers to it."""

    def snapshot(self: Any, *how: Any) -> Any:
        self._own_values = set()
        return self.log.snapshot(*how)

    return [(MapState, "snapshot", snapshot)]


def map_values_are_shared() -> Replacements:
    """A value that was fetched before a snapshot is changed in place after it."""
    return [(MapState, "snapshot", State.snapshot)]


def list_is_shared() -> Replacements:
    """The list that a snapshot refers to grows."""
    return [(ListState, "_copied", lambda state, values: values)]


def value_is_shared() -> Replacements:
    """A value that can change in place is handed out as it is in the snapshot."""

    def own_copy(self: Any, value: Any) -> Any:
        entries, key = self._here()
        entries[key] = value
        return value

    return [(SingleState, "_own_copy", own_copy)]


def removed_keys_stay() -> Replacements:
    """A chunk does not record which keys have no entry any more: those of older chunks stay."""

    def snapshot(self: Any, *how: Any) -> Any:
        frozen = original(self, *how)
        if frozen is None:
            return None
        return replace(frozen, entries={key: entry for key, entry in frozen.entries.items() if entry is not GONE})

    original = Changelog.snapshot
    return [(Changelog, "snapshot", snapshot)]


def cleared_keys_stay() -> Replacements:
    """No chunk records that the entry of a key was cleared."""

    def clear(self: Any) -> None:
        entries, key = self._here()
        entries.pop(key, None)
        self._own.discard(key)

    return [(State, "clear", clear)]


def unstored_entries_are_forgotten() -> Replacements:
    """What was in a checkpoint that failed, or that had it in the metadata, is not in the next one."""

    def older(self: Any, stored_bytes: Any) -> Any:
        self._chunks = [chunk for chunk in self._chunks if stored_bytes(chunk.chunk_id) is not None]
        return original(self, stored_bytes)

    original = Changelog._older
    return [(Changelog, "_older", older)]


def merged_entries_are_forgotten() -> Replacements:
    """When there are many chunks, the newest of them are left out."""

    def older(self: Any, stored_bytes: Any) -> Any:
        changed = dict(self.changed)
        kept = original(self, stored_bytes)
        if len(self._chunks) > len(kept) > 0 and all(stored_bytes(chunk.chunk_id) for chunk in self._chunks):
            self.changed = changed
        return kept

    original = Changelog._older
    return [(Changelog, "_older", older)]


def older_chunks_win() -> Replacements:
    """Chunks are referred to newest first."""

    def snapshot(self: Any, *how: Any) -> Any:
        frozen = original(self, *how)
        return frozen and replace(frozen, stored=frozen.stored[::-1])

    original = Changelog.snapshot
    return [(Changelog, "snapshot", snapshot)]


def restored_keys_are_forgotten() -> Replacements:
    """Of a chunk that was restored in part the contents are unknown: it is not stored again."""

    def older(self: Any, stored_bytes: Any) -> Any:
        self._chunks = [chunk for chunk in self._chunks if "/" not in chunk.chunk_id]
        return original(self, stored_bytes)

    original = Changelog._older
    return [(Changelog, "_older", older)]


def older_items_stay() -> Replacements:
    """The items that an older chunk has of a list or a map are restored as well as the newer ones."""
    return [(State, "forget", lambda self, keys: None)]


def any_snapshot_counts() -> Replacements:
    """What a snapshot has written counts as stored before its checkpoint has completed."""

    def stored_bytes(self: Any, chunk_id: str) -> int | None:
        places = [self._stored, *(taken.chunks for taken in self._unconfirmed.values())]
        return next((chunks[chunk_id].length for chunks in places if chunk_id in chunks), None)

    def store(self: Any, *arguments: Any, **more: Any) -> None:
        for taken in self._unconfirmed.values():
            self._stored = {**taken.chunks, **self._stored}
        original(self, *arguments, **more)

    original = TaskSnapshots.store
    return [(TaskSnapshots, "stored_bytes", stored_bytes), (TaskSnapshots, "store", store)]


def merged_chunk_is_known() -> Replacements:
    """A frame that several were merged into is stored under the id of the first of them."""

    def replace_frames(self: Any, frames: Any) -> None:
        chunk_id = self.runs[0].chunk_id if self.runs else None
        original(self, frames)
        if self.runs and self.runs[0].chunk_id is None:
            self.runs[0].chunk_id = chunk_id

    original = PartLog.replace
    return [(PartLog, "replace", replace_frames)]


# ---- tables


def table_of_before_rows() -> Replacements:
    """What was read of a table once is read again after rows were added."""

    def append(self: Any, frame: pl.DataFrame) -> None:
        whole = self._whole
        original(self, frame)
        self._whole = whole

    original = TableState.append
    return [(TableState, "append", append)]


def table_order_is_lost() -> Replacements:
    """Rows that are added come before those of the run that they are joined with."""

    def append(self: Any, frame: pl.DataFrame) -> None:
        runs = list(self._bound_runs())
        rows = self._conforming(frame)
        while runs and rows.height and runs[-1].frame.height <= 2 * rows.height:
            rows = pl.concat([rows, runs.pop().living.frame], rechunk=True)
        if rows.height:
            self._hold([*runs, TableRun(rows)])

    return [(TableState, "append", append)]


# ---- timers


def deleted_timers_come_back() -> Replacements:
    """A snapshot does not record that a timer was deleted."""

    def delete(self: Any, time_us: int, key: Any) -> None:
        is_new = (time_us, key) not in self.log.changed
        original(self, time_us, key)
        if is_new:
            self.log.changed.pop((time_us, key), None)

    original = TimerQueue.delete
    return [(TimerQueue, "delete", delete)]


def fired_timers_come_back() -> Replacements:
    """A snapshot does not record that a timer has fired."""

    def pop(self: Any, until_us: int) -> Any:
        timer = original(self, until_us)
        self.log.changed.pop(timer, None)
        return timer

    original = TimerQueue.pop
    return [(TimerQueue, "pop", pop)]


def one_timer_of_a_time() -> Replacements:
    """Of two keys with a timer for the same time one has none."""

    def add(self: Any, time_us: int, key: Any) -> None:
        if not any(time_us == time for time, _ in self._live):
            original(self, time_us, key)

    original = TimerQueue.add
    return [(TimerQueue, "add", add)]


def timer_waits_for_more() -> Replacements:
    """A timer that is due at the very watermark waits for the next one."""

    def fire(self: Any, until_us: int, *, event_time: bool) -> bool:
        return original(self, until_us - event_time, event_time=event_time)

    original = ProcessOperator._fire
    return [(ProcessOperator, "_fire", fire)]


def timers_wait_for_their_stretch() -> Replacements:
    """Timers that lie together fire when the last of their stretch of time is due."""

    def pop(self: Any, until_us: int) -> Any:
        is_open = self._sorted or self._heap
        if not is_open and self._stretches and self._stretches[0] + 1 << timers.STRETCH_BITS > until_us + 1:
            return None
        return original(self, until_us)

    original = TimerQueue.pop
    return [(TimerQueue, "pop", pop)]


def restored_timers_do_not_ring() -> Replacements:
    """After a restore timers of the wall clock wait until another one is set."""

    def restore(self: Any, parts: Any) -> None:
        arm = self._arm
        self._arm = lambda: None
        original(self, parts)
        self._arm = arm

    original = ProcessOperator.restore
    return [(ProcessOperator, "restore", restore)]


def clock_timers_are_not_dealt() -> Replacements:
    """If the parallelism has changed, no subtask gets the timers of the wall clock."""

    def assign_part(name: str, rule: Any, found: Any, own: Any, parallelism: int, *rest: Any) -> Any:
        if name == "timers:processing" and not own:
            return [[] for _ in range(parallelism)]
        return original(name, rule, found, own, parallelism, *rest)

    original = redistribute_state._assign_part
    return [(redistribute_state, "_assign_part", assign_part)]


# ---- which rows of a chunk


def one_group_more() -> Replacements:
    """The key group after the range is included."""
    return [(state_files, "_keyed_rows_of", _rows_up_to(1))]


def one_group_less() -> Replacements:
    """The last key group of the range is left out."""
    return [(state_files, "_keyed_rows_of", _rows_up_to(-1))]


def _rows_up_to(more: int) -> Callable[..., Chunk | None]:
    original = state_files._keyed_rows_of

    def rows_of(tables: Any, found: Any, chunk: Any, owned: Any, where: str) -> Chunk | None:
        if owned.key_groups is not None:
            owned = replace(owned, key_groups=range(owned.key_groups.start, owned.key_groups.stop + more))
        return original(tables, found, chunk, owned, where)

    return rows_of


def whole_up_to_the_next() -> Replacements:
    """A chunk that ends with the key group after the range counts as one that is all inside."""

    def keyed_rows(chunk: Any, key_groups: range) -> Any:
        whole = key_groups.start <= chunk.key_group_min and chunk.key_group_max <= key_groups.stop
        return state_files._ALL if whole else state_files._Owned(key_groups=key_groups)

    return [(state_files, "_keyed_rows", keyed_rows)]


def chunk_ends_too_soon() -> Replacements:
    """A chunk whose last key group is the first of the range is not read."""

    def intersects(chunk: Any, key_groups: range) -> bool:
        return bool(original(chunk, key_groups) and chunk.key_group_max > key_groups.start)

    original = state_files.intersects
    return [(state_files, "intersects", intersects)]


def last_reader_of_a_chunk() -> Replacements:
    """Of the subtasks that a chunk has rows for the last is left out."""

    def assign_part(name: str, rule: Any, found: Any, own: Any, parallelism: int, groups: int) -> Any:
        given = original(name, rule, found, own, parallelism, groups)
        if rule is not Redistribute.KEYED:
            return given

        def ends_before(chunk: Any, subtask: int) -> bool:
            first, last = (group * parallelism // groups for group in (chunk.key_group_min, chunk.key_group_max))
            return bool(first == last or last > subtask)

        return [
            [msgspec.structs.replace(part, chunks=tuple(c for c in part.chunks if ends_before(c, i))) for part in parts]
            for i, parts in enumerate(given)
        ]

    original = redistribute_state._assign_part
    return [(redistribute_state, "_assign_part", assign_part)]


def rest_of_a_list_is_lost() -> Replacements:
    """Of a list that is distributed, the remainder is lost."""

    def select(table: pa.Table, chunk: Any, owned: Any) -> Chunk | None:
        if owned.stride > 1:
            rows = np.arange(owned.index, table.num_rows // owned.stride * owned.stride, owned.stride)
            return Chunk(f"{chunk.id}/{owned.index}%{owned.stride}", table.take(pa.array(rows, pa.int64())))
        return original(table, chunk, owned)

    original = state_files._select
    return [(state_files, "_select", select)]


def union_of_its_own() -> Replacements:
    """As long as the parallelism stays, a subtask gets only its own part of union state."""

    def assign_part(name: str, rule: Any, found: Any, own: Any, parallelism: int, *rest: Any) -> Any:
        if rule is Redistribute.UNION and own:
            return [[own[i]] if i in own else [] for i in range(parallelism)]
        return original(name, rule, found, own, parallelism, *rest)

    original = redistribute_state._assign_part
    return [(redistribute_state, "_assign_part", assign_part)]


def no_broadcast_for_new_ones() -> Replacements:
    """Subtasks that there were not before begin without broadcast state."""

    def assign_part(name: str, rule: Any, found: Any, own: Any, parallelism: int, *rest: Any) -> Any:
        if rule is Redistribute.BROADCAST:
            return [[found[i][1]] if i < len(found) else [] for i in range(parallelism)]
        return original(name, rule, found, own, parallelism, *rest)

    original = redistribute_state._assign_part
    return [(redistribute_state, "_assign_part", assign_part)]


def expired_entries_are_seen() -> Replacements:
    """What has expired is there until a sweep comes to it."""

    def begin_call(self: Any, now_us: int) -> None:
        self._now_us = now_us

    return [(ExpiringState, "begin_call", begin_call)]


def restored_times_are_unknown() -> Replacements:
    """A restore renews the time to live of all entries."""
    return [(heap_snapshot, "_written_us", lambda table, state, where: [UNKNOWN_US] * table.num_rows)]


def sweeps_remove_what_lives() -> Replacements:
    """A sweep removes what has half of its time left."""

    def sweep_key(self: Any, now_us: int) -> None:
        original(self, now_us + self._ttl_us // 2)

    original = ExpiringState._sweep_key
    return [(ExpiringState, "_sweep_key", sweep_key)]


def late_rows_write_in_the_past() -> Replacements:
    """A row that is out of order writes at its own time, before what is in the list already."""
    return [(ExpiringState, "_stamp", lambda self, last_us: self._now_us)]


def partly_finished_is_empty() -> Replacements:
    """Of an operator some of whose subtasks had finished the others begin without state."""

    def assign_operator(old: Any, *rest: Any) -> Any:
        given = original(old, *rest)
        return [msgspec.structs.replace(of, parts=()) for of in given] if old.finished else given

    original = redistribute_state.assign_operator
    return [(redistribute_state, "assign_operator", assign_operator)]


def finished_by_number() -> Replacements:
    """A subtask counts as finished if the one with its number had, whatever the parallelism was then."""

    def had_ended(op: Any, vertex: Any, ref: Any) -> bool:
        return op is not None and ref.subtask in op.finished

    return [(redistribute_state, "_had_ended", had_ended)]


# ---- where they are searched


def _holding(topology: str) -> Callable[[int], Scenario]:
    """Of a seed: rows wait in state that is stored slowly, while slots die."""

    def scenario(seed: int) -> Scenario:
        drawn = draw(seed, topology=topology, parallelism=2, faults=("kill_slot",), rows=100)
        tempo = replace(drawn.tempo, io_us=10_000, clock_tick_us=0)
        return replace(drawn, tempo=tempo, interval_s=0.002, timeout_s=60.0, batch_rows=3, keys=10, splits=2)

    return scenario


def plain(topology: str) -> Callable[[int], Scenario]:
    """Of a seed: slots and functions fail."""
    return partial(draw, topology=topology, parallelism=2, rows=100, faults=("kill_slot", "user_error"))


_timers, _alarms, _tables = _holding("timers"), _holding("alarms"), _holding("tables")
_keyed, _dealt = dealt_anew("keyed", "tables", "timers"), dealt_anew("tally")

MUTATIONS: Final = named(
    Mutation("a map grows in the snapshot that refers to it", map_is_shared, _timers),
    Mutation("what was removed is in the next snapshot", removed_keys_stay, _timers),
    Mutation("a cleared entry is in the next snapshot", cleared_keys_stay, plain("typed")),
    Mutation("what a failed checkpoint had is not in the next one", unstored_entries_are_forgotten, plain("pickled")),
    Mutation(
        "when chunks are merged, one is left out", merged_entries_are_forgotten, targeted.in_pieces(plain("pickled"))
    ),
    Mutation("an older chunk takes the place of a newer one", older_chunks_win, plain("typed")),
    Mutation(
        "what was restored in part is not stored again", restored_keys_are_forgotten, dealt_anew("typed", "pickled")
    ),
    Mutation("items of older chunks are restored, too", older_items_stay, plain("pickled")),
    Mutation("a checkpoint that may fail counts as stored", any_snapshot_counts, of("typed")),
    Mutation("an entry that has expired is seen", expired_entries_are_seen, plain(EXPIRING)),
    Mutation("a restore renews all entries", restored_times_are_unknown, plain(EXPIRING)),
    Mutation("an entry is removed early", sweeps_remove_what_lives, plain(EXPIRING)),
    Mutation("a row that is out of order writes in the past", late_rows_write_in_the_past, plain(EXPIRING)),
    Mutation("timers that have fired are restored", fired_timers_come_back, _timers),
    Mutation("a table is read as before rows were added", table_of_before_rows, _tables),
    Mutation("timers that were deleted are restored", deleted_timers_come_back, of("clocks")),
    Mutation("of two timers for one time one is lost", one_timer_of_a_time, _timers),
    Mutation(
        "timers of the wall clock are lost when the parallelism changes",
        clock_timers_are_not_dealt,
        dealt_anew("alarms"),
    ),
    Mutation("state of one key group too many is restored", one_group_more, _keyed),
    Mutation("state of the last key group is not restored", one_group_less, _keyed),
    Mutation("a chunk that reaches into the next range is not filtered", whole_up_to_the_next, _keyed),
    Mutation("a chunk that ends where the range begins is not read", chunk_ends_too_soon, _keyed),
    Mutation("of several subtasks the last does not get its rows", last_reader_of_a_chunk, _keyed),
    Mutation("the remainder of a list is not distributed", rest_of_a_list_is_lost, _dealt),
    Mutation("a subtask has only its own part of union state", union_of_its_own, _holding("tally")),
    Mutation("new subtasks have no broadcast state", no_broadcast_for_new_ones, dealt_anew("broadcast")),
    Mutation(
        "state of operators that have finished in part is lost", partly_finished_is_empty, targeted.ending("broadcast")
    ),
    Mutation("what had finished at another parallelism is not run again", finished_by_number, targeted.ending_rescaled),
    Mutation("a value of a map changes in the snapshot", map_values_are_shared, plain("pickled")),
    Mutation("a list grows in the snapshot that refers to it", list_is_shared, plain("pickled")),
    Mutation("a value changes in the snapshot that refers to it", value_is_shared, plain("pickled")),
    Mutation(
        "a chunk is not stored again though it has grown",
        merged_chunk_is_known,
        targeted.in_pieces(plain("late_slide")),
    ),
    Mutation("rows of a table change places", table_order_is_lost, _tables),
    Mutation("a timer does not fire at the very watermark", timer_waits_for_more, _timers),
    Mutation("timers fire with the last of those they lie with", timers_wait_for_their_stretch, _timers),
    Mutation(
        "timers of the wall clock do not fire after a restore until another one is set",
        restored_timers_do_not_ring,
        _alarms,
    ),
)
