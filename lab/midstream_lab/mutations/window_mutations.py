"""Known bugs of windows and joins in event time, to be put back on purpose: see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from midstream.engine.coordinator.coordinator import Coordinator
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.operators.key_group_watermarks import KeyGroupWatermarks
from midstream.engine.operators.windows import session_windows
from midstream.engine.operators.windows.pane_windows import PaneWindowOperator
from midstream.engine.operators.windows.session_windows import SessionWindowOperator
from midstream.engine.operators.windows.window_operator import PROGRESS, Piece, WindowOperator, clamp
from midstream.engine.operators.windows.window_specs import END, START
from midstream.engine.protocol.messages import FromSlot, TaskFinished
from midstream.engine.state.columnar import by_group
from midstream.engine.state.join_index import JoinIndex
from midstream.engine.state.session_index import IndexedRun, SessionIndex
from midstream.engine.state.state_parts import StatePart
from midstream.engine.worker import task
from midstream_lab.mutations.mutation import Mutation, Replacements, named
from midstream_lab.scenarios.scenario import Scenario, draw
from midstream_lab.scenarios.targeted_at_rest import behind_closely, dropping_late, firing_slowly, uneven, windowed


def _nothing(*_: Any) -> None:
    pass


# ---- when windows fire


def window_waits_for_more() -> Replacements:
    """A window does not fire when event time is at its very end; for rows that come then it is closed."""

    def next_firing(self: Any, watermark: int) -> Any:
        return original(self, watermark - 1)

    original = PaneWindowOperator._next_firing
    return [(PaneWindowOperator, "_next_firing", next_firing)]


def window_fires_early() -> Replacements:
    """A window fires a millisecond before event time has reached its end."""

    def next_firing(self: Any, watermark: int) -> Any:
        return original(self, clamp(watermark + 1000))

    original = PaneWindowOperator._next_firing
    return [(PaneWindowOperator, "_next_firing", next_firing)]


def session_fires_early() -> Replacements:
    """A session fires a millisecond before event time has reached its end."""

    def next_firing(self: Any, watermark: int) -> Any:
        return original(self, clamp(watermark + 1000))

    original = SessionWindowOperator._next_firing
    return [(SessionWindowOperator, "_next_firing", next_firing)]


def session_fires_before_a_row_at_its_end() -> Replacements:
    """A session fires, and is forgotten, when a row exactly at its end may still follow."""

    def watched(original: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        return lambda self, watermark: original(self, clamp(watermark + 1))

    return [
        (SessionWindowOperator, name, watched(getattr(SessionWindowOperator, name)))
        for name in ("_next_firing", "_expired")
    ]


def fired_for_all() -> Replacements:
    """What has fired for some key groups when a firing is interrupted counts as fired for all."""

    def reach_up_to(self: Any, key_group: int, watermark: int) -> None:
        self.reach(watermark)

    return [(KeyGroupWatermarks, "reach_up_to", reach_up_to)]


# ---- rows that come late


def late_rows_are_taken() -> Replacements:
    """A row whose windows have all fired goes into the last of them, which is closed."""

    def late_before(self: Any, watermark: int) -> int:
        return clamp(original(self, watermark) - self._slide)

    original = PaneWindowOperator._late_before
    return [(PaneWindowOperator, "_late_before", late_before)]


def drops_wait_for_a_heartbeat() -> Replacements:
    """Checkpoints complete after dropped rows, and those who dropped them are lost before they report it."""
    return [(task, "has_dropped", lambda _: False)]


def last_drops_are_not_reported() -> Replacements:
    """A task finishes without its metrics: what it has dropped since the last heartbeat is never reported."""

    def handle_message(self: Any, slot: int, message: FromSlot) -> None:
        if isinstance(message, TaskFinished):
            message = msgspec.structs.replace(message, metrics=None)
        original(self, slot, message)

    original = Coordinator._handle_message
    return [(Coordinator, "_handle_message", handle_message)]


def late_in_all_windows() -> Replacements:
    """A row is late as soon as its first window has fired, though others still take it."""

    def late_before(self: Any, watermark: int) -> int:
        return max(int(original(self, watermark)), int(self._fired_before(watermark)))

    original = PaneWindowOperator._late_before
    return [(PaneWindowOperator, "_late_before", late_before)]


def late_for_its_session() -> Replacements:
    """A row that is late by itself is late, though the session that it belongs to is not."""

    def not_late(self: Any, frame: pl.DataFrame, watermark: int) -> npt.NDArray[np.bool_]:
        keep: npt.NDArray[np.bool_] = frame.get_column(END).to_numpy() > watermark - self._lateness
        return keep

    return [(SessionWindowOperator, "_not_late", not_late)]


def forgotten_too_soon() -> Replacements:
    """Windows that have fired are forgotten though they still take rows."""

    def without_lateness(forget: Callable[[Any], None]) -> Callable[[Any], None]:
        def forgetting(self: Any) -> None:
            lateness, self._lateness = self._lateness, 0
            forget(self)
            self._lateness = lateness

        return forgetting

    return [(kind, "_forget", without_lateness(kind._forget)) for kind in (PaneWindowOperator, SessionWindowOperator)]


def not_fired_again() -> Replacements:
    """Rows that come within the allowed lateness are in the window, which is not emitted again."""
    return [
        (PaneWindowOperator, "_fired_ends", lambda *_: range(0)),
        (SessionWindowOperator, "_emit_updated", _nothing),
    ]


# ---- state of windows


def windows_are_kept() -> Replacements:
    """Windows that nothing can change any more stay in state."""
    return [(PaneWindowOperator, "_forget", _nothing)]


def sessions_are_kept() -> Replacements:
    """Sessions that nothing can change any more stay in state."""
    return [(SessionWindowOperator, "_forget", _nothing)]


def progress_is_forgotten() -> Replacements:
    """After a restore nothing has fired yet."""

    def restore(self: Any, parts: Any) -> None:
        original(self, {name: part for name, part in parts.items() if name != PROGRESS})

    original = WindowOperator.restore
    return [(WindowOperator, "restore", restore)]


def progress_of_the_fastest() -> Replacements:
    """After a restore all key groups are where the furthest was."""

    def restore(self: Any, part: StatePart) -> None:
        marks = part.table().column("watermark").to_numpy()
        self._set(np.full_like(self._marks, marks.max()))

    return [(KeyGroupWatermarks, "restore", restore)]


def panes_are_restored_twice() -> Replacements:
    """Of the chunks of a pane each one brings back those before it once more."""

    def restore(self: Any, parts: Any) -> None:
        self._restored_rows = []
        original(self, parts)

    def restore_table(self: Any, table: pa.Table) -> None:
        self._restored_rows.append(table)
        for each in self._restored_rows:
            original_table(self, each)

    original, original_table = PaneWindowOperator.restore, PaneWindowOperator._restore_table
    return [(PaneWindowOperator, "restore", restore), (PaneWindowOperator, "_restore_table", restore_table)]


def panes_of_the_first_chunk() -> Replacements:
    """A pane that is there already is not restored from another chunk."""

    def restore(self: Any, table: pa.Table) -> None:
        before = dict(self._logs)
        runs = {pane: list(log.runs) for pane, log in before.items()}
        original(self, table)
        for pane, log in before.items():
            log.replace([run.frame for run in runs[pane]])

    original = PaneWindowOperator._restore_table
    return [(PaneWindowOperator, "_restore_table", restore)]


def last_pane_is_lost() -> Replacements:
    """The last pane of a batch with rows of several is forgotten."""

    def parts(self: Any, batch: pa.RecordBatch, times: Any) -> Iterator[tuple[int, pl.DataFrame]]:
        found = sorted(original(self, batch, times), key=lambda part: part[0])
        yield from found[:-1] or found

    original = PaneWindowOperator._parts
    return [(PaneWindowOperator, "_parts", parts)]


# ---- sessions


def touching_stay_apart() -> Replacements:
    """Two sessions of which one begins where the other ends are two."""

    def numbers(frame: pl.DataFrame, by: Sequence[str]) -> Any:
        return original(frame.with_columns(pl.col(END) - 1), by)

    original = session_windows.session_numbers
    return [(session_windows, "session_numbers", numbers)]


def long_sessions_are_cut() -> Replacements:
    """A session ends where the part of it ends that began last."""

    def numbers(frame: pl.DataFrame, by: Sequence[str]) -> Any:
        if not frame.height:
            return original(frame, by)
        ends = frame.get_column(END).to_numpy()
        order, codes = session_windows._by_key_and_time(
            session_windows._key_codes(frame, by), frame.get_column(START).to_numpy()
        )
        starts, ends = frame.get_column(START).to_numpy()[order], ends[order]
        breaks = np.ones(len(order), np.bool_)
        breaks[1:] = (codes[1:] != codes[:-1]) | (starts[1:] > ends[:-1])
        found = np.empty(len(order), np.int64)
        found[order] = np.cumsum(breaks)
        return found

    original = session_windows.session_numbers
    return [(session_windows, "session_numbers", numbers)]


def sessions_fire_by_key_group() -> Replacements:
    """Sessions that are due leave by key group: what is made of the first ones passes some that follow."""

    def by_end(self: Any, due: pl.DataFrame, watermark: int) -> Iterator[Piece]:
        for (part,), last_group in self._cut_by_group([by_group(due, self._layout.groups(due))]):
            yield Piece(part, last_group, watermark)

    return [(SessionWindowOperator, "_by_end", by_end)]


def third_part_is_lost() -> Replacements:
    """Of a key with three parts or more, two are merged, and the others are gone."""

    def take(self: Any, keys: pl.DataFrame) -> Any:
        parts = original(self, keys)
        if parts is None:
            return None
        return parts.filter(pl.int_range(pl.len()).over(self._keys) < 2)

    original = SessionIndex.take
    return [(SessionIndex, "take", take)]


def restored_sessions_never_end() -> Replacements:
    """After a restore sessions wait until a row comes that ends before them."""

    def restore(self: Any, table: pa.Table) -> None:
        original(self, table)
        for run in self._parts.runs:
            run.first_end = MAX_WATERMARK_US

    original = SessionWindowOperator._restore_table
    return [(SessionWindowOperator, "_restore_table", restore)]


def parts_that_went_are_stored() -> Replacements:
    """A snapshot holds parts of sessions that were merged into others since they were stored."""
    return [(IndexedRun, "living", property(lambda run: run))]


def parts_of_old_runs_are_missed() -> Replacements:
    """Of a session only the parts that have come last are found when it is due."""

    def take(self: Any, keys: pl.DataFrame) -> Any:
        runs, self.runs = self.runs, self.runs[-1:]
        try:
            return original(self, keys)
        finally:
            self.runs = [*(run for run in runs[:-1] if run.rows), *self.runs]

    original = SessionIndex.take
    return [(SessionIndex, "take", take)]


# ---- joins


def join_without_its_bound() -> Replacements:
    """Rows that are just as far apart as they may be are not joined."""

    original = JoinIndex.matches
    return [(JoinIndex, "matches", lambda self, rows, low, high: original(self, rows, low, high - 1))]


# ---- where they are searched


def _on_time(seed: int) -> Scenario:
    """No row may be late."""
    drawn = windowed("splits")(seed)
    return replace(drawn, rounds=1, splits=3)


def _late(seed: int) -> Scenario:
    """Many splits are found when event time has passed the first rows of theirs."""
    drawn = windowed("sliding", "window")(seed)
    return replace(drawn, rows=400, splits=7, rounds=7, faults=(), batch_rows=10, row_us=0)


_panes, _sessions = windowed("sliding", "window"), windowed("session")
_due_sessions = behind_closely(_sessions)
_joined = partial(draw, topology="join", parallelism=2, rows=100, faults=("kill_slot", "user_error"))
_updated = partial(draw, topology="late_window", parallelism=2, rows=100, faults=("kill_slot", "user_error"))

MUTATIONS: Final = named(
    Mutation("a window does not fire exactly at its end", window_waits_for_more, _panes),
    Mutation("late rows go into a window that is closed", late_rows_are_taken, _late),
    Mutation("dropped rows are reported only if their slot lives on", drops_wait_for_a_heartbeat, dropping_late),
    Mutation("what is dropped last is not reported", last_drops_are_not_reported, dropping_late),
    Mutation("a row that missed one window is in none", late_in_all_windows, _panes),
    Mutation("windows that had fired fire again", progress_is_forgotten, _panes),
    Mutation("all key groups have come as far as the furthest", progress_of_the_fastest, uneven),
    Mutation("parts of windows are restored twice", panes_are_restored_twice, _panes),
    Mutation("of two chunks with parts of a window one counts", panes_of_the_first_chunk, _panes),
    Mutation("rows at the end of a batch are in no window", last_pane_is_lost, _panes),
    Mutation("of three parts of a session one is lost", third_part_is_lost, _sessions),
    Mutation("a window fires a millisecond too soon", window_fires_early, _on_time),
    Mutation("a session fires a millisecond too soon", session_fires_early, _due_sessions),
    Mutation("rows exactly a gap apart are two sessions", session_fires_before_a_row_at_its_end, _due_sessions),
    Mutation("an interrupted firing counts for all key groups", fired_for_all, firing_slowly),
    Mutation("a late row is not put in its session", late_for_its_session, _due_sessions),
    Mutation("windows that still take rows are forgotten", forgotten_too_soon, _updated),
    Mutation("a window that got rows later is not emitted again", not_fired_again, _updated),
    Mutation("windows that can no longer change stay in state", windows_are_kept, _panes),
    Mutation("sessions that can no longer change stay in state", sessions_are_kept, _sessions),
    Mutation("sessions leave a firing by key group, not by their ends", sessions_fire_by_key_group, _due_sessions),
    Mutation("sessions that touch are not merged", touching_stay_apart, _sessions),
    Mutation("a session is cut after a short part of it", long_sessions_are_cut, _sessions),
    Mutation("restored sessions do not fire", restored_sessions_never_end, _due_sessions),
    Mutation("parts of sessions that are gone are stored", parts_that_went_are_stored, _sessions),
    Mutation("older parts of a session are not found", parts_of_old_runs_are_missed, _due_sessions),
    Mutation("a join leaves out what is at its bound", join_without_its_bound, _joined),
)
