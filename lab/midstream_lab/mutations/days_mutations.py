"""Known bugs of windows of local days and of the aggregates in them, to be put back on purpose: see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Final

import polars as pl

from midstream.engine.operators.windows.aggregates import Columns, First
from midstream.engine.operators.windows.distinct_count import CountDistinct
from midstream.engine.operators.windows.local_days import LocalDays
from midstream.engine.operators.windows.moments import _Moments
from midstream.engine.operators.windows.pane_windows import PaneWindowOperator
from midstream.engine.operators.windows.sketches import Quantile
from midstream.engine.operators.windows.value_lists import Collect, _Listed
from midstream.engine.operators.windows.window_operator import WindowOperator
from midstream_lab.mutations.mutation import Mutation, Replacements, named, of


def zone_is_lost() -> Replacements:
    """After a restore, days are those of UTC."""
    original = WindowOperator.restore

    def restore(self: Any, parts: Mapping[str, Any]) -> None:
        self._days = None
        original(self, parts)

    return [(PaneWindowOperator, "restore", restore)]


def clock_never_changes() -> Replacements:
    """All days begin as many hours after that of UTC as the first one."""
    original = LocalDays._begin

    def begin(self: Any, number: int) -> int:
        first = next(iter(self._begins), number)
        return original(self, first) + (number - first) * int(self.ticks)

    return [(LocalDays, "_begin", begin)]


def limit_ends_with_the_part() -> Replacements:
    """A list of merged parts has all values of these."""

    def merge(self: Any, part: Columns) -> Mapping[str, pl.Expr]:
        whole = copy(self)
        whole._limit = None
        return _Listed.merge(whole, part)

    return [(Collect, "merge", merge)]


def values_of_parts_are_added() -> Replacements:
    """Of values that several parts have, each counts as another."""

    def merge(self: Any, part: Columns) -> Mapping[str, pl.Expr]:
        return {"values": part("values").explode(), "n": part("n").sum()}

    return [(CountDistinct, "merge", merge)]


def deviations_between_parts_are_lost() -> Replacements:
    """The variance of merged parts is that within each of them."""
    original = _Moments.merge

    def merge(self: Any, part: Columns) -> Mapping[str, pl.Expr]:
        return {**original(self, part), "products": part("products").sum()}

    return [(_Moments, "merge", merge)]


def histogram_is_the_last() -> Replacements:
    """Of the histograms of parts, the last one stays."""

    def union(self: Any, parts: Sequence[bytes]) -> bytes:
        return parts[-1] if parts else b""

    return [(Quantile, "_union", union)]


def arrival_is_by_time() -> Replacements:
    """The first row by arrival is the first by event time."""

    def time(self: Any, event_time: pl.Expr) -> pl.Expr:
        return event_time

    return [(First, "_time", time)]


_in_days: Final = of("days")
MUTATIONS: Final = named(
    Mutation("the time zone of windows is lost by a restore", zone_is_lost, _in_days),
    Mutation("all local days have 24 hours", clock_never_changes, _in_days),
    Mutation("merged lists have no limit", limit_ends_with_the_part, _in_days),
    Mutation("distinct values count once a part", values_of_parts_are_added, _in_days),
    Mutation("a variance is that within batches", deviations_between_parts_are_lost, _in_days),
    Mutation("a quantile is that of the last batch", histogram_is_the_last, _in_days),
    Mutation("arrival is the order of event time", arrival_is_by_time, _in_days),
)
