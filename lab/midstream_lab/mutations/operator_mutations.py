"""Known bugs of users' functions and their state, of joins, allowed lateness and keys, to be put back on purpose.

See `midstream_lab.mutations.catalog`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa

from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.core.key_groups import key_groups
from midstream.engine.core.python_values import to_python
from midstream.engine.operators.functions.asof_join import AsofJoinOperator
from midstream.engine.operators.functions.event_time_join import EventTimeJoinOperator
from midstream.engine.operators.functions.interval_join import IntervalJoinOperator
from midstream.engine.operators.functions.on_time_functions import PROGRESS
from midstream.engine.operators.functions.process_operator import ProcessOperator
from midstream.engine.operators.functions.window_join import WindowJoinOperator
from midstream.engine.operators.windows import window_operator
from midstream.engine.operators.windows.assigned_windows import AssignedWindows
from midstream.engine.operators.windows.pane_windows import PaneWindowOperator
from midstream.engine.state import columnar, heap_snapshot
from midstream.engine.state import keyed_states as keyed
from midstream.engine.state import table_state as table
from midstream.engine.state.join_index import JoinIndex
from midstream.engine.state.keyed_states import ListState, MapState, ReducingState
from midstream.engine.state.state_parts import Redistribute, StatePart
from midstream.engine.state.table_state import TableState
from midstream.engine.state.timers import TimerQueue
from midstream.engine.worker.operator_chain import OperatorChain
from midstream_lab.mutations.mutation import Mutation, Replacements, named, of
from midstream_lab.scenarios.scenario import draw
from midstream_lab.scenarios.targeted import in_pieces
from midstream_lab.scenarios.targeted_at_rest import dealt_anew, waiting_in_runs

# ---- states of a key


def reduced_in_place() -> Replacements:
    """The value of a reduction is changed in place though a snapshot refers to it."""

    def add(self: Any, value: Any) -> None:
        entries, key = self._here()
        entries[key] = self._reduce(entries[key], value) if key in entries else value

    return [(ReducingState, "add", add)]


def durations_in_milliseconds() -> Replacements:
    """Durations come out of a checkpoint without their microseconds."""

    def cut(column: Any) -> list[Any]:
        values = to_python(column)
        if not pa.types.is_duration(column.type):
            return values
        return [value - value % timedelta(milliseconds=1) for value in values]

    return [(heap_snapshot, "to_python", cut)]


def map_of_the_last() -> Replacements:
    """Of the maps of several old subtasks only the last is restored."""
    original = ProcessOperator.restore

    def restore(self: Any, parts: Mapping[str, StatePart]) -> None:
        kept = {
            name: StatePart(part.redistribute, part.chunks[-1:]) if name.startswith("map:") else part
            for name, part in parts.items()
        }
        original(self, kept)

    return [(ProcessOperator, "restore", restore)]


def lists_are_restored_backwards() -> Replacements:
    def restore(self: Any, rows: Any) -> None:
        for key, _, value in rows:
            self._entries.setdefault(key, []).insert(0, value)

    return [(ListState, "restore", restore)]


# ---- broadcast state


def broadcast_to_the_first() -> Replacements:
    """After a restore only subtask 0 has the broadcast state."""
    original = ProcessOperator.restore

    def restore(self: Any, parts: Mapping[str, StatePart]) -> None:
        is_first = self._runtime.subtask == 0
        kept = {n: p for n, p in parts.items() if is_first or p.redistribute is not Redistribute.BROADCAST}
        original(self, kept)

    return [(ProcessOperator, "restore", restore)]


def broadcast_is_handed_out() -> Replacements:
    """A function that may only read broadcast state gets the object itself, not a copy."""

    def get(self: Any, name: Any) -> Any:
        value = self._read()[self._named(name)]
        at = (self._scope.key, name)
        if type(value) not in keyed.IMMUTABLE_TYPES and self._scope.writable and at not in self._own_values:
            value = copy.deepcopy(value)
            self._write()[name] = value
            self._own_values.add(at)
        return value

    return [(MapState, "__getitem__", get)]


# ---- timers


def deleted_for_good() -> Replacements:
    """A timer that has been deleted cannot be set again."""
    add, delete = TimerQueue.add, TimerQueue.delete

    def deleting(self: Any, time_us: int, key: Any) -> None:
        vars(self).setdefault("gone", set()).add((time_us, key))
        delete(self, time_us, key)

    def adding(self: Any, time_us: int, key: Any) -> None:
        if (time_us, key) not in vars(self).get("gone", ()):
            add(self, time_us, key)

    return [(TimerQueue, "delete", deleting), (TimerQueue, "add", adding)]


def clock_timers_as_event_timers() -> Replacements:
    """Timers of the wall clock are restored as timers of event time."""
    original = ProcessOperator.restore

    def restore(self: Any, parts: Mapping[str, StatePart]) -> None:
        clock = parts.get("timers:processing")
        original(self, {name: part for name, part in parts.items() if part is not clock})
        for chunk in () if clock is None else clock.chunks:
            named, timers = heap_snapshot.timer_rows(chunk.table, self._encoding)
            self._timers.event.forget(named)
            self._timers.event.restore(timers)

    return [(ProcessOperator, "restore", restore)]


# ---- joins


def tables_are_restored_twice() -> Replacements:
    original = TableState._restored_frames
    return [(TableState, "_restored_frames", lambda self, chunks, where: original(self, [*chunks, *chunks[:1]], where))]


def forgotten_before_their_time() -> Replacements:
    """Joins get a watermark that is higher than event time."""
    original = IntervalJoinOperator.advance_watermark

    def advance_watermark(self: Any, watermark_us: int) -> bool:
        return original(self, min(watermark_us + 5_000, MAX_WATERMARK_US))

    return [(IntervalJoinOperator, "advance_watermark", advance_watermark)]


def half_dead_runs_are_dropped() -> Replacements:
    """Of rows that lie together all are forgotten once half of them can be."""
    original = JoinIndex.advance

    def advance(self: Any, watermark_us: int) -> None:
        half = {id(run) for run in self._timed() if run.middle <= watermark_us - self._held_us}
        self._hold([run for run in self._timed() if id(run) not in half])
        original(self, watermark_us)

    return [(JoinIndex, "advance", advance)]


def oldest_run_is_not_looked_at() -> Replacements:
    """Of the rows that are held, those are not found that lie together for the longest."""
    original = JoinIndex.matches

    def matches(self: Any, *arguments: Any) -> Any:
        runs, whole = self._runs, self._whole
        self._runs, self._whole = runs[min(1, len(runs) - 1) :] if runs else runs, None
        try:
            return original(self, *arguments)
        finally:
            self._runs, self._whole = runs, whole

    return [(JoinIndex, "matches", matches)]


def merged_run_keeps_its_id() -> Replacements:
    """Rows that are put together with others count as stored, as some of them are."""
    original = JoinIndex.put

    def put(self: Any, run: Any) -> None:
        known = [each for each in self._timed() if each.chunk_id]
        original(self, run)
        gone = [each.chunk_id for each in known if all(each is not kept for kept in self._timed())]
        if gone:
            self._timed()[-1].chunk_id = gone[0]

    return [(JoinIndex, "put", put)]


def watermarks_leave_joins_undelayed() -> Replacements:
    """A watermark leaves a join as it came, though the join will still emit earlier rows."""
    return [(OperatorChain, "_leaving", lambda self, index, watermark_us: watermark_us)]


def partners_do_not_count() -> Replacements:
    """A row that has found a partner still counts as one that has none."""

    def take(self: Any, positions: Any) -> Any:
        return self._whole[np.unique(positions)]

    return [(JoinIndex, "take", take)]


def joins_restore_no_progress() -> Replacements:
    """After a restore, a join does not know how far event time had come."""
    original = EventTimeJoinOperator.restore

    def restore(self: Any, parts: Mapping[str, StatePart]) -> None:
        original(self, {name: part for name, part in parts.items() if name != PROGRESS})

    return [(EventTimeJoinOperator, "restore", restore)]


def windows_of_a_row_are_only_the_last() -> Replacements:
    """A row is joined in the last of its windows alone."""
    original = AssignedWindows.of

    def of(self: Any, times: Any) -> Any:
        rows, starts, ends = original(self, times)
        is_last = np.append(rows[1:] != rows[:-1], [True])
        return rows[is_last], starts[is_last], ends[is_last]

    return [(AssignedWindows, "of", of)]


def ended_windows_take_rows() -> Replacements:
    """A row is joined in all its windows if one of them has not ended."""
    return [(WindowJoinOperator, "_reached", lambda self, batch, keys: np.full(batch.num_rows, MIN_WATERMARK_US))]


def versions_are_not_waited_for() -> Replacements:
    """An as-of join emits rows before event time has passed them: their versions may still come."""
    original = AsofJoinOperator.advance_watermark

    def advance_watermark(self: Any, watermark_us: int) -> bool:
        return original(self, min(watermark_us + 5_000, MAX_WATERMARK_US))

    return [(AsofJoinOperator, "advance_watermark", advance_watermark)]


def newest_versions_are_forgotten() -> Replacements:
    """An as-of join forgets the newest version of a key once it has joined it."""
    original = AsofJoinOperator._completed

    def completed(self: Any, watermark_us: int) -> Any:
        made = original(self, watermark_us)
        if made is not None:
            self._states["table:newest"].pop(made)
        return made

    return [(AsofJoinOperator, "_completed", completed)]


# ---- side outputs


def one_side_output_at_a_time() -> Replacements:
    """Of the side outputs that a batch has rows for, one gets them."""
    original = ProcessOperator._flush

    def flush(self: Any, given: Any = None) -> None:
        self._side_rows = dict(list(self._side_rows.items())[:1])
        original(self, given)

    return [(ProcessOperator, "_flush", flush)]


def side_rows_are_kept() -> Replacements:
    """Rows of side outputs are emitted with the next batch once more."""
    original = ProcessOperator._flush

    def flush(self: Any, given: Any = None) -> None:
        sides = {tag: list(rows[-1:]) for tag, rows in self._side_rows.items()}
        original(self, given)
        self._side_rows = sides if given is not None else {}

    return [(ProcessOperator, "_flush", flush)]


# ---- allowed lateness


def lateness_is_forgotten() -> Replacements:
    """Rows are late as soon as their last window has fired."""
    original = PaneWindowOperator._late_before

    def late_before(self: Any, watermark: int) -> int:
        lateness, self._lateness = self._lateness, 0
        try:
            return original(self, watermark)
        finally:
            self._lateness = lateness

    return [(PaneWindowOperator, "_late_before", late_before)]


def updates_without_what_was_said() -> Replacements:
    """A window that is emitted again has only what has come since."""
    original = PaneWindowOperator._window

    def window(self: Any, end: int, keys: Any = None) -> Any:
        if keys is None:
            return original(self, end)
        frames = [log.frames()[-1].join(keys, on=self._aggregation.by, how="semi") for log in self._logs_of(end)]
        return self._merged([frame for frame in frames if frame.height] or frames[:1], end)

    return [(PaneWindowOperator, "_window", window)]


# ---- keys


def keys_by_the_wall_clock() -> Replacements:
    """Times of the hour that is repeated at the end of daylight saving time are the same key."""
    return [(heap_snapshot, "is_instant", lambda kind: False)]


def state_by_the_first_key() -> Replacements:
    """If there are several key columns, state is stored by the first."""
    return [(heap_snapshot, "key_groups", lambda batch, names, count: key_groups(batch, names[:1], count))]


# ---- chunks


def shared_chunk_keeps_its_id() -> Replacements:
    """What small frames share counts as stored though it has changed."""
    original = columnar.snapshot_runs

    class Same:
        """Each chunk of a state has the same id."""

        def __init__(self, encoding: Any, ids: Any) -> None:
            self._encoding, self._ids = encoding, ids

        def new_id(self) -> str:
            found: str = vars(self._encoding).setdefault("_id", self._ids.new_id())
            return found

    def snapshot(logs: Any, encoding: Any, ids: Any) -> Any:
        runs = [run for _, each in logs for run in each]
        are_small = all(run.frame.height < columnar.OWN_CHUNK_ROWS for run in runs)
        return original(logs, encoding, Same(encoding, ids) if are_small else ids)

    return [(table, "snapshot_runs", snapshot)]


def last_piece_is_dropped() -> Replacements:
    """Of windows that are emitted in pieces the last one is missing."""
    original = window_operator.WindowOperator._cut_by_group

    def cut_by_group(self: Any, frames: Any) -> Any:
        pieces = list(original(self, frames))
        return iter(pieces[: max(1, len(pieces) - 1)])

    return [(window_operator.WindowOperator, "_cut_by_group", cut_by_group)]


MUTATIONS: Final = named(
    Mutation("a reduction changes what a snapshot refers to", reduced_in_place, of("pickled")),
    Mutation("restored durations lack their microseconds", durations_in_milliseconds, of("typed")),
    Mutation("of the maps of several subtasks one is restored", map_of_the_last, dealt_anew("typed")),
    Mutation("lists are restored backwards", lists_are_restored_backwards, of("typed")),
    Mutation("broadcast state is restored to subtask 0 only", broadcast_to_the_first, of("rules")),
    Mutation("a reader of broadcast state can change it", broadcast_is_handed_out, of("rules")),
    Mutation("a timer that was deleted cannot be set again", deleted_for_good, of("clocks")),
    Mutation(
        "timers of the wall clock are restored as those of event time", clock_timers_as_event_timers, of("clocks")
    ),
    Mutation("restored rows of a join are there twice", tables_are_restored_twice, of("join")),
    Mutation("a join forgets rows too soon", forgotten_before_their_time, of("join")),
    Mutation("a join forgets rows among which are dead ones", half_dead_runs_are_dropped, of("join")),
    Mutation("a join does not search all that it holds", oldest_run_is_not_looked_at, of("join")),
    Mutation(
        "a join does not hold back event time for the rows that it still holds",
        watermarks_leave_joins_undelayed,
        of("full_join"),
    ),
    Mutation("rows with a partner are emitted as rows without one too", partners_do_not_count, of("anti_join")),
    Mutation("rows without a partner are emitted again after a restore", joins_restore_no_progress, of("full_join")),
    Mutation("a join by sliding windows lacks pairs", windows_of_a_row_are_only_the_last, of("window_join")),
    Mutation("a window of a join that has ended gets further rows", ended_windows_take_rows, of("window_join")),
    Mutation("an as-of join does not wait for versions", versions_are_not_waited_for, of("asof_join")),
    Mutation("an as-of join forgets a version that later rows need", newest_versions_are_forgotten, of("asof_join")),
    Mutation("a chunk outlives its rows", merged_run_keeps_its_id, waiting_in_runs),
    Mutation("of several side outputs one gets its rows", one_side_output_at_a_time, of("tags")),
    Mutation("rows of side outputs are emitted twice", side_rows_are_kept, of("tags")),
    Mutation("rows are late though lateness is allowed", lateness_is_forgotten, of("late_window")),
    Mutation("a window that is emitted again has only what is new", updates_without_what_was_said, of("late_slide")),
    Mutation("two hours of the wall clock are one key", keys_by_the_wall_clock, of("by_zone")),
    Mutation("state is stored by the first of two key columns", state_by_the_first_key, of("by_two")),
    Mutation("a chunk that has changed counts as stored", shared_chunk_keeps_its_id, of("join")),
    Mutation(
        "of windows in pieces the last is missing",
        last_piece_is_dropped,
        in_pieces(partial(draw, topology="late_window", rows=100)),
    ),
)
