"""Known bugs of running aggregates, to be put back on purpose: see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from midstream.engine.operators.functions import running_aggregate
from midstream.engine.operators.functions.periodic_aggregate import PeriodicAggregateOperator
from midstream.engine.operators.windows.prefix_scan import Segments, folded_onto
from midstream.engine.operators.windows.top_rows import TopAggregation
from midstream.engine.operators.windows.window_operator import WindowOperator
from midstream.engine.state.key_order import KeyOrder
from midstream.engine.state.ordered_tables import RowPerKey
from midstream.engine.state.table_runs import TableRun
from midstream.engine.state.tombstones import TombstonedRun
from midstream_lab.mutations.mutation import Mutation, Replacements, named, of
from midstream_lab.scenarios import targeted


def each_batch_begins_again() -> Replacements:
    """The rows of a batch are aggregated without what their keys had before."""

    def without_before(kind: str, before: Any, firsts: Any, values: Any, segments: Segments) -> Any:
        return folded_onto(kind, before[:0], firsts[:0], values, segments)

    return [(running_aggregate, "folded_onto", without_before)]


def first_row_is_kept() -> Replacements:
    """What a key has after the first of its rows in a batch is kept, not after the last."""
    return [(Segments, "last", property(lambda self: self.starts))]


def rows_by_key() -> Replacements:
    """Aggregates leave in the order of the keys, and not in that of the rows."""
    return [(KeyOrder, "by_row", lambda self, values: values)]


def totals_stay() -> Replacements:
    """What a key had before its newest rows stays in state."""
    original = RowPerKey.replace
    return [
        (RowPerKey, "replace", lambda self, order, found, rows: original(self, order, found._replace(places=()), rows))
    ]


def overwritten_rows_are_stored() -> Replacements:
    """A snapshot has what keys have when it is written, not when it was taken."""
    return [(TableRun, "living", TombstonedRun.living)]


def multiples_begin_again() -> Replacements:
    """After a restore the aggregates at multiples are those of the rows since, and of those not yet emitted."""
    original = WindowOperator.restore

    def restore(self: Any, parts: Mapping[str, Any]) -> None:
        original(self, {name: part for name, part in parts.items() if name != self._totals.part_name})

    return [(PeriodicAggregateOperator, "restore", restore)]


def first_rows_are_the_newest() -> Replacements:
    """The first rows of a key are those since the last multiple alone."""
    original = TopAggregation.update

    def update(self: Any, known: Any, more: Any) -> Any:
        return original(self, known.clear(), more)

    return [(TopAggregation, "update", update)]


def only_ranks_that_are_new() -> Replacements:
    """A key is emitted with its new rows, without those that are still among its first rows."""

    def update(self: Any, known: Any, more: Any) -> Any:
        return self.merge([known, more]), self.merge([more])

    return [(TopAggregation, "update", update)]


MUTATIONS: Final = named(
    Mutation("running aggregates begin again with each batch", each_batch_begins_again, targeted.in_running),
    Mutation("running aggregates keep the first row of a batch", first_row_is_kept, targeted.in_running),
    Mutation("running aggregates leave in another order", rows_by_key, targeted.in_running),
    Mutation("the first rows of a key are forgotten", first_rows_are_the_newest, of("first_rows")),
    Mutation("a key is emitted without some of its first rows", only_ranks_that_are_new, of("first_rows")),
    Mutation("aggregates at multiples begin again with a restore", multiples_begin_again, targeted.at_multiples),
    Mutation(
        "a snapshot has later totals than those of its checkpoint", overwritten_rows_are_stored, targeted.in_running
    ),
    Mutation("what running aggregates replace stays in state", totals_stay, targeted.in_running),
)
