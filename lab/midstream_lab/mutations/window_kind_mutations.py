"""Known bugs of windows whose state is their rows, of gaps from a column, of windows by count, and of early results, to be put back on purpose: see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import polars as pl
import pyarrow as pa

from midstream.engine.operators.functions.batch_functions import BatchFunctionOperator
from midstream.engine.operators.functions.count_windows import CountWindowOperator
from midstream.engine.operators.functions.window_functions import RowsOfWindows
from midstream.engine.operators.windows import session_windows
from midstream.engine.operators.windows.early_results import EarlyResults
from midstream.engine.operators.windows.pane_windows import PaneWindowOperator
from midstream.engine.operators.windows.session_windows import Gap
from midstream.engine.operators.windows.window_aggregation import WindowAggregation
from midstream.engine.operators.windows.window_specs import END, START
from midstream.engine.state.table_state import TableState
from midstream_lab.mutations.mutation import Mutation, Replacements, named, of
from midstream_lab.scenarios.scenario import draw


def rows_of_a_batch_are_one() -> Replacements:
    """Of the rows of a key that share a batch and a pane, the last one is kept."""
    original = RowsOfWindows.reduce

    def reduce(self: Any, frame: pl.DataFrame, also_by: Sequence[str] = (), *also: Any) -> pl.DataFrame:
        return original(self, frame, also_by, *also).unique([*also_by, *self.by], keep="last", maintain_order=True)

    return [(RowsOfWindows, "reduce", reduce)]


def rows_keep_their_own_bounds() -> Replacements:
    """The rows of a session have bounds of their own, not those of the session."""

    def with_bounds(self: Any, frame: pl.DataFrame, also_by: Any, also: Mapping[str, Any]) -> pl.DataFrame:
        return frame

    return [(RowsOfWindows, "_with_bounds", with_bounds)]


def merged_rows_are_one() -> Replacements:
    """What merges parts keeps one of each key, as if parts were aggregates."""

    def merge(self: Any, *arguments: Any) -> pl.DataFrame:
        return WindowAggregation.merge(self, *arguments)

    return [(RowsOfWindows, "merge", merge)]


def all_gaps_are_the_first() -> Replacements:
    """All rows of a batch have the gap of its first row."""
    original = Gap.ends

    def ends(self: Any, times: Any, batch: pa.RecordBatch) -> Any:
        found = original(self, times, batch)
        return times + (found[0] - times[0])

    return [(Gap, "ends", ends)]


def neighbours_decide() -> Replacements:
    """A row continues the session of the row before it, and not one that an earlier row with a longer gap holds open."""
    original = session_windows.session_numbers

    def session_numbers(frame: pl.DataFrame, by: Sequence[str]) -> Any:
        return original(frame.with_columns(pl.min_horizontal(END, pl.col(START) + 4_000).alias(END)), by)

    return [(session_windows, "session_numbers", session_numbers)]


def begun_windows_are_forgotten() -> Replacements:
    """What a restore has of windows by count that were begun is not used: each key begins again."""
    original = BatchFunctionOperator.restore

    def restore(self: Any, parts: Mapping[str, Any]) -> None:
        original(self, {} if isinstance(self, CountWindowOperator) else parts)

    return [(CountWindowOperator, "restore", restore)]


def parts_of_one_row_are_lost() -> Replacements:
    """A part of a window by count that is one row is not kept."""
    original = TableState.append

    def append(self: Any, frame: pl.DataFrame) -> None:
        original(self, frame.filter(pl.col("__count") > 1) if "__count" in frame.columns else frame)

    return [(TableState, "append", append)]


def restored_windows_have_not_changed() -> Replacements:
    """After a restore, what changed before it has no early result until it changes again."""
    original = PaneWindowOperator._restore_table

    def restore_table(self: Any, table: pa.Table) -> None:
        early, self._early = self._early, None
        original(self, table)
        self._early = early

    return [(PaneWindowOperator, "_restore_table", restore_table)]


def changes_during_a_round_are_lost() -> Replacements:
    """Keys that change while a round of early results is under way are not emitted by the next one."""
    original = EarlyResults._continue

    def proceed(self: Any) -> None:
        continues = self._round is not None
        original(self)
        if continues and self._round is None:
            self._changed.clear()

    return [(EarlyResults, "_continue", proceed)]


def all_keys_are_emitted_early() -> Replacements:
    """A round has all keys of the panes that have changed."""
    original = PaneWindowOperator._early_results

    def early_results(self: Any, changed: Mapping[int, pl.DataFrame]) -> Any:
        by = self._aggregation.by
        return original(self, {pane: self._logs[pane].merged().select(by) for pane in changed})

    return [(PaneWindowOperator, "_early_results", early_results)]


MUTATIONS: Final = named(
    Mutation(
        "early results do not follow a restore",
        restored_windows_have_not_changed,
        partial(draw, topology="early_slide", faults=("kill_slot",)),
    ),
    Mutation(
        "keys that change while early results are emitted are forgotten",
        changes_during_a_round_are_lost,
        partial(draw, topology="early_slide", rows=200),
    ),
    Mutation("early results have keys that have not changed", all_keys_are_emitted_early, of("early_window")),
    Mutation("of the rows of a window that share a batch one is kept", rows_of_a_batch_are_one, of("rows_slide")),
    Mutation("the rows of a session keep bounds of their own", rows_keep_their_own_bounds, of("rows_session")),
    Mutation("all rows of a batch have the gap of the first", all_gaps_are_the_first, of("gap_session")),
    Mutation("a row before the last does not hold a session open", neighbours_decide, of("gap_session")),
    Mutation(
        "windows by count begin again with a restore",
        begun_windows_are_forgotten,
        partial(draw, topology="counted", faults=("kill_slot",), rows=100),
    ),
    Mutation("the first row of a window by count is lost", parts_of_one_row_are_lost, of("counted")),
    Mutation("of the rows of a window that are merged one is kept", merged_rows_are_one, of("rows_slide")),
)
