"""Known bugs of rows that are combined before they are sent, to be put back on purpose: see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Final

import polars as pl
import pyarrow as pa

from midstream.engine.checkpoint import channel_state
from midstream.engine.core.batch_framing import prefix
from midstream.engine.core.elements import Batch
from midstream.engine.exchange import element_queue, peer_link
from midstream.engine.exchange.batch_lease import LeasedBatch, concat_leased
from midstream.engine.operators.windows.aggregates import Max
from midstream.engine.operators.windows.pane_windows import PaneCombiner
from midstream.engine.operators.windows.session_windows import SessionCombiner
from midstream.engine.operators.windows.window_combiner import ROWS
from midstream.engine.operators.windows.window_operator import WindowOperator
from midstream.engine.operators.windows.window_specs import LATE
from midstream.engine.state.columnar import PartLog
from midstream.engine.worker import gate_recovery, task_checkpoints
from midstream_lab.mutations.mutation import Mutation, Replacements, named
from midstream_lab.scenarios.targeted_combining import (
    combined_behind,
    combining_behind,
    combining_joined,
    combining_windowed,
    rejoined_in_both_forms,
)


def late_parts_are_counted() -> Replacements:
    """Of a combined batch that is late, the parts are counted instead of the rows that they stand for."""

    def emit_late(self: Any, batch: Batch) -> None:
        if ROWS in batch.schema.names and batch.num_rows:
            self._out.emit(pa.RecordBatch.from_arrays([pa.nulls(batch.num_rows)], [ROWS]), LATE)
        else:
            original(self, batch)

    original = WindowOperator._emit_late
    return [(WindowOperator, "_emit_late", emit_late)]


def highest_of_the_first_part() -> Replacements:
    """Of several parts, the highest value is that of the first one."""
    return [(Max, "merge", lambda self, part: {"max": part("max").first()})]


def combined_of_other_groups_is_kept() -> Replacements:
    """At another parallelism, a consumer also gets combined rows of other key groups than its own."""
    original = channel_state.rows_of

    def rows_of(batches: Sequence[Batch], *rest: Any) -> Sequence[Batch]:
        found = original(batches, *rest)
        pairs = zip(batches, found, strict=True)
        return [before if ROWS in before.schema.names else after for before, after in pairs]

    return [(gate_recovery, "rows_of", rows_of)]


def batches_of_each_form_are_counted_anew() -> Replacements:
    """Which batches of a stored channel are gone is decided by their number among those of one layout in a row."""
    original = channel_state._rows_of

    def rows_of(batches: Sequence[Batch], edge: Any, state: Any, first: int, max_parallelism: int) -> Sequence[Batch]:
        return original(batches, edge, state, state.skip, max_parallelism)

    return [(channel_state, "_rows_of", rows_of)]


def form_is_not_stored() -> Replacements:
    """In channel state, combined batches are stored as rows."""
    original = channel_state.store_channels

    def store_channels(storage: Any, captured: Any, *rest: Any) -> Any:
        return original(storage, [replace(each, layouts=()) for each in captured], *rest)

    return [(task_checkpoints, "store_channels", store_channels)]


def form_of_the_rest_is_lost() -> Replacements:
    """The rest of a combined batch that is being processed is stored as rows."""
    original = LeasedBatch.rest

    def rest(self: Any, first_row: int) -> LeasedBatch:
        found = original(self, first_row)
        found.layout = 0
        return found

    return [(LeasedBatch, "rest", rest)]


def form_is_not_sent() -> Replacements:
    """Between slots, combined batches are sent as rows."""
    return [(peer_link, "prefix", lambda length, layout: prefix(length, 0))]


def combined_over_panes() -> Replacements:
    """Rows of two panes are combined."""
    original = PaneCombiner.__init__

    def init(self: Any, aggregation: Any, room: int, pane: int, offset: int, days: Any) -> None:
        original(self, aggregation, room, 2 * pane, offset, days)

    return [(PaneCombiner, "__init__", init)]


def combined_over_gaps() -> Replacements:
    """Rows of two sessions of a key are combined if the gap between them is less than twice as long as it has to be."""

    def parts(self: Any, frame: pl.DataFrame, times: Any, batch: Any) -> pl.DataFrame:
        gap = self._gap
        self._gap = copy(gap)
        self._gap.least = 2 * gap.least
        found = original(self, frame, times, batch)
        self._gap = gap
        return found.with_columns(pl.col("__end") - gap.least)

    original = SessionCombiner._parts
    return [(SessionCombiner, "_parts", parts)]


def forms_are_joined() -> Replacements:
    """Several combined batches that are joined in a queue count as rows."""

    def joined_as_rows(parts: Sequence[LeasedBatch]) -> LeasedBatch:
        found = concat_leased(parts)
        if len(parts) > 1:
            found.layout = 0
        return found

    return [(element_queue, "concat_leased", joined_as_rows)]


def joined_parts_count_as_merged() -> Replacements:
    """Several parts of a key that were joined on their way are kept as if they were one."""
    original = PartLog.append

    def append(self: Any, frame: pl.DataFrame, *, is_merged: bool = True) -> None:
        original(self, frame)

    return [(PartLog, "append", append)]


_sessions = combined_behind("combined_session", "combined_late_session")

MUTATIONS: Final = named(
    Mutation("of combined rows that are late, the parts are counted", late_parts_are_counted, combining_windowed),
    Mutation("the highest value is that of the first part", highest_of_the_first_part, combining_windowed),
    Mutation("combined rows of other key groups are restored", combined_of_other_groups_is_kept, combining_behind),
    Mutation(
        "batches that are gone are counted layout by layout",
        batches_of_each_form_are_counted_anew,
        rejoined_in_both_forms,
    ),
    Mutation("combined batches are stored as rows", form_is_not_stored, combining_behind),
    Mutation("the rest of a combined batch is stored as rows", form_of_the_rest_is_lost, combining_behind),
    Mutation("combined batches are sent as rows", form_is_not_sent, combining_windowed),
    Mutation("joined combined batches count as rows", forms_are_joined, combining_joined),
    Mutation("rows of two panes are combined", combined_over_panes, combining_windowed),
    Mutation("joined parts of a key are emitted one by one", joined_parts_count_as_merged, combining_joined),
    Mutation("rows of two sessions are combined", combined_over_gaps, _sessions),
)
