"""Removing duplicates: of the rows of a key, the first is kept, or each that no kept row is near by event time."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from midstream.engine.core.batches import rows_at, rows_where, selected
from midstream.engine.core.elements import MIN_WATERMARK_US
from midstream.engine.operators.base import KEY
from midstream.engine.operators.event_time_column import EventTime, Int64s
from midstream.engine.operators.functions.batch_functions import BatchContext, BatchFunctionOperator, KeyedBatchFunction
from midstream.engine.operators.functions.function_operator import FunctionOperator, Port
from midstream.engine.operators.functions.on_time_functions import OnTimeFunctionOperator
from midstream.engine.operators.functions.process_context import TimeContext
from midstream.engine.operators.row_conversion import fields_text
from midstream.engine.state.key_order import KeyOrder
from midstream.engine.state.ordered_tables import OrderedTable
from midstream.engine.state.table_runs import physical

Bools = npt.NDArray[np.bool_]

_FURTHEST_US: Final = 2**62
"""No two event times are further apart."""
_FURTHEST: Final = 2**64 - 1
"""A limit within uint64, in nanoseconds too."""


class _FirstOfKeyOperator(BatchFunctionOperator):
    runs_users_function = False


class _OfWholeRows(FunctionOperator):
    """The keys are bytes of whole rows, which are those of other rows if the rows have other columns."""

    def _key_settings(self) -> dict[str, str]:
        return {KEY: f"whole rows of {fields_text(self.schema)}"}


class _FirstOfRowsOperator(_OfWholeRows, _FirstOfKeyOperator):
    pass


class _FirstOfRowsWithinOperator(_OfWholeRows, OnTimeFunctionOperator):
    pass


def drop_duplicates_operator(
    name: str, port: Port, within_us: int | None, *, hides_keys: bool = False
) -> BatchFunctionOperator:
    """Return the operator that keeps the first row of each key, in the order of arrival.

    With `within_us`, a row is a duplicate only if its key has a kept row that is at most so far away by event time,
    before or after it. Kept rows are remembered until only late rows could be that near. `hides_keys`: the keys are not
    columns of what it emits.
    """
    keys = list(port.keys)
    hidden = keys if hides_keys else []
    schema = pa.schema([field for field in port.schema if field.name not in hidden])
    key_fields = [port.schema.field(key) for key in keys]
    if within_us is None:
        of_key = _FirstOfRowsOperator if hides_keys else _FirstOfKeyOperator
        return of_key(name, _first_of_key(keys, pa.schema(key_fields), schema.names), [port], schema)
    assert port.event_time is not None
    time = EventTime(port.event_time, port.schema, f"operator {name!r}")
    function = _first_within(keys, key_fields, time, min(within_us, _FURTHEST_US), schema.names)
    within = _FirstOfRowsWithinOperator if hides_keys else OnTimeFunctionOperator
    return within(name, function, [port], schema, hidden=hidden)


def _first_of_key(keys: list[str], schema: pa.Schema, emitted: list[str]) -> KeyedBatchFunction:
    class FirstOfKey(KeyedBatchFunction):
        kept = OrderedTable(schema)

        def process(self, rows: pl.DataFrame, ctx: BatchContext) -> pl.DataFrame:
            order = KeyOrder(selected(rows, keys))
            is_new = np.ones(len(order.codes), np.bool_)
            for _, _, numbers in self.kept.located(order, once=True):
                is_new[numbers] = False
            new = np.flatnonzero(is_new)
            self.kept.append_of(order, new, [])
            return rows_at(selected(rows, emitted), np.sort(order.rows[order.starts[new]]))

    return FirstOfKey()


def _first_within(
    keys: list[str], key_fields: list[pa.Field[pa.DataType]], event_time: EventTime, within_us: int, emitted: list[str]
) -> KeyedBatchFunction:
    column = "time"
    while column in keys:
        column += "_"
    unit: Literal["us", "ns"] = "ns" if event_time.has_ns else "us"
    per_us = 1000 if event_time.has_ns else 1
    within = min(within_us * per_us, _FURTHEST)

    class FirstWithin(KeyedBatchFunction):
        kept = OrderedTable(pa.schema([*key_fields, pa.field(column, pa.timestamp(unit))]))

        def process(self, rows: pl.DataFrame, ctx: BatchContext) -> pl.DataFrame:
            times = event_time.native_of(rows) if event_time.has_ns else event_time.us_of(rows)
            order = KeyOrder(selected(rows, keys))
            numbers, places = order.of_rows(), self.kept.located(order)
            known = np.concatenate([numbers[:0], *(each for _, _, each in places)])
            kept = [physical(run.rows_at(at, [column]).to_series()).to_numpy() for run, at, _ in places]
            is_kept = kept_rows(numbers, times, known, np.concatenate([times[:0], *kept]), within)
            added = order.rows[is_kept[order.rows]]
            when = pl.Series(column, times[added]).cast(pl.Datetime(unit))
            self.kept.append_of(order, numbers[added], [when])
            made = selected(rows, emitted)
            return made if is_kept.all() else rows_where(made, is_kept)

        def on_watermark(self, ctx: BatchContext) -> None:
            assert isinstance(ctx, TimeContext)
            last_apart = (ctx.watermark_us + 1 - within_us) * per_us - 1
            self.kept.pop_until_tick(column, max(last_apart, MIN_WATERMARK_US))

    return FirstWithin()


def kept_rows(numbers: Int64s, times: Int64s, known: Int64s, known_times: Int64s, within: int) -> Bools:
    """Return which rows are kept, as if they came one by one.

    `numbers`: those of the rows' keys. `known`: those of the rows that were kept before, with their times.
    """
    time_of, is_known = np.zeros(numbers.max(initial=-1) + 1, np.int64), np.zeros(numbers.max(initial=-1) + 1, np.bool_)
    time_of[known], is_known[known] = known_times, True
    if is_known.sum() == len(known):  # one row of each key
        may_stay = ~is_known[numbers] | (_distance(times, time_of[numbers]) > within)
    else:
        may_stay = ~_near_known(
            np.concatenate([known, numbers]), np.concatenate([known_times, times]), len(known), within
        )
    candidates = np.flatnonzero(may_stay)
    first = np.empty_like(time_of)
    first[numbers[candidates][::-1]] = candidates[::-1]  # the first row of each key is written last
    firsts = first[numbers[candidates]]
    is_first = firsts == candidates
    is_apart = _distance(times[candidates], times[firsts]) > within
    kept = np.zeros(len(times), np.bool_)
    kept[candidates[is_first]] = True
    if is_apart.any():
        _keep_one_by_one(kept, candidates[is_apart], numbers, times, first, within)
    return kept


def _near_known(numbers: Int64s, times: Int64s, known: int, within: int) -> Bools:
    """Return which rows after the first `known` ones are near one of these."""
    order = np.lexsort((times, numbers))
    numbers, times, is_known = numbers[order], times[order], order < known
    places = np.arange(len(order))
    earlier = np.maximum.accumulate(np.where(is_known, places, 0))
    later = np.minimum.accumulate(np.where(is_known, places, len(order) - 1)[::-1])[::-1]
    is_near = np.zeros(len(order), np.bool_)
    for neighbour in (earlier, later):
        fits = is_known[neighbour] & (numbers[neighbour] == numbers)
        is_near |= fits & (_distance(times[neighbour], times) <= within)
    found = np.empty(len(order), np.bool_)
    found[order] = is_near
    return found[known:]


def _distance(times: Int64s, others: Int64s) -> npt.NDArray[np.uint64]:
    """Return how far times are apart, which int64 has no room for."""
    return np.maximum(times, others).view(np.uint64) - np.minimum(times, others).view(np.uint64)


def _keep_one_by_one(kept: Bools, rows: Int64s, numbers: Int64s, times: Int64s, first: Int64s, within: int) -> None:
    """Decide about the rows that are not near the first row of their key, in their order."""
    times_of: dict[int, list[int]] = {}
    for row, number, time in zip(rows.tolist(), numbers[rows].tolist(), times[rows].tolist(), strict=True):
        near = times_of.setdefault(number, [])
        if not near:
            near.append(int(times[first[number]]))
        place = bisect_left(near, time - within)
        if place == len(near) or near[place] > time + within:
            insort(near, time)
            kept[row] = True
