"""Known bugs of windows whose state is their rows, to be put back on purpose: see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import polars as pl

from midstream.engine.operators.functions.window_functions import RowsOfWindows
from midstream.engine.operators.windows.window_aggregation import WindowAggregation
from midstream_lab.mutations.mutation import Mutation, Replacements
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


MUTATIONS: Final[Mapping[str, Mutation]] = {
    "rows_of_a_batch_are_one": Mutation(
        "of the rows of a window that share a batch one is kept",
        rows_of_a_batch_are_one,
        partial(draw, topology="rows_slide"),
    ),
    "rows_keep_their_own_bounds": Mutation(
        "the rows of a session keep bounds of their own",
        rows_keep_their_own_bounds,
        partial(draw, topology="rows_session"),
    ),
    "merged_rows_are_one": Mutation(
        "of the rows of a window that are merged one is kept", merged_rows_are_one, partial(draw, topology="rows_slide")
    ),
}
