"""Aggregates of all rows of a key so far, after each row, as a function on batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from midstream.engine.core.batches import frame_of, from_polars, index_of, selected, stacked
from midstream.engine.operators.base import OperatorContext, Output
from midstream.engine.operators.event_time_column import Int64s, TimeColumn
from midstream.engine.operators.functions.batch_functions import (
    BatchContext,
    KeyedBatchFunction,
)
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.functions.on_time_functions import OnTimeFunctionOperator
from midstream.engine.operators.windows.aggregates import AnyAggregate
from midstream.engine.operators.windows.prefix_scan import Prefixes, Scanned, Segments, folded_onto
from midstream.engine.operators.windows.window_aggregation import WindowAggregation
from midstream.engine.operators.windows.window_operator import native_units
from midstream.engine.operators.windows.window_specs import LATE
from midstream.engine.state.key_order import KeyOrder
from midstream.engine.state.ordered_tables import FoundRows, RowPerKey
from midstream.engine.state.table_runs import LAST_TICK, numbers_of, physical, typed

UNTIL: Final = "__until"
"""The column with the last time at which a row of the key still continues its aggregates."""


def running_aggregate_operator(
    name: str,
    *,
    keys: Sequence[str],
    event_time: str | TimeColumn | None,
    aggregates: Mapping[str, AnyAggregate],
    schema: pa.Schema,
    ttl_us: int | None = None,
) -> RunningAggregateOperator:
    """Return the operator that emits a row for each input row: its keys, its event time, the aggregates up to it.

    With `ttl_us`, a row that is more than that later than all rows of its key starts the aggregates again; late rows
    go to the side output LATE, since what they belong to may have left the state.

    Raises immediately what `window_operator` raises.
    """
    column = event_time.name if isinstance(event_time, TimeColumn) else event_time
    bounds = [] if column is None or column in keys else [column]
    aggregation = WindowAggregation(name, keys, event_time, aggregates, schema, bounds)
    aggregation.check_expressions()
    return RunningAggregateOperator(name, aggregation, event_time, ttl_us)


def until_of(times: Int64s, ttl: int) -> Int64s:
    """Return the last time that continues what was last at each of `times`; at most the last time that there is."""
    until: Int64s = np.minimum(times, LAST_TICK - ttl) + ttl
    return until


def ttl_of(ttl_us: int | None, aggregation: WindowAggregation) -> int | None:
    """Return a time to live in the unit of the event time."""
    if ttl_us is None:
        return None
    return min(native_units(ttl_us, aggregation.time, f"{aggregation.where}: ttl"), LAST_TICK)


def _function(aggregation: WindowAggregation, ttl: int | None) -> _RunningAggregate:
    added = [] if ttl is None else [pa.field(UNTIL, aggregation.time.kind)]

    class RunningAggregate(_RunningAggregate):
        parts = RowPerKey(pa.schema([*aggregation.part_schema, *added]))

    return RunningAggregate(aggregation, ttl)


class _RunningAggregate(KeyedBatchFunction):
    """`ttl` is in the unit of the event time."""

    parts: RowPerKey
    """The merged part of each key, and until when it is valid if there is a `ttl`."""

    def __init__(self, aggregation: WindowAggregation, ttl: int | None) -> None:
        self._aggregation = aggregation
        self._ttl = ttl

    def process(self, rows: pl.DataFrame, ctx: BatchContext) -> pl.DataFrame:
        aggregation = self._aggregation
        frame = aggregation.prepare(rows)
        keys = KeyOrder(selected(frame, aggregation.keys))
        known = self.parts.find(keys)
        parts = self._folded(keys, known, frame)
        return self._results(self._scanned(keys, known, frame) if parts is None else parts, rows)

    def _folded(self, keys: KeyOrder, known: FoundRows, frame: pl.DataFrame) -> pl.DataFrame | None:
        """Return what the keys have come to after each row, and keep what they have after the last one.

        Returns None if that takes more than folding columns of numbers.
        """
        folds = None if self._ttl is not None else self._aggregation.folds
        before = None if folds is None else known.columns()
        if folds is None or before is None:
            return None
        columns = {name: numbers_of(each.of_rows(frame)) for name, each in folds.items()}
        if any(column is None for column in columns.values()):
            return None
        segments = Segments(keys.is_first)
        firsts = segments.starts[known.numbers]
        kept, made = list[pl.Series](), list[pl.Series]()
        for part in known.empty:
            column = columns[part.name]
            assert column is not None
            after = folded_onto(folds[part.name].kind, before[part.name], firsts, column[keys.rows], segments)
            kept.append(typed(part, after[segments.last]))
            made.append(typed(part, keys.by_row(after)))
        self.parts.replace(keys, known, frame_of(kept))
        return frame_of(made)

    def _scanned(self, keys: KeyOrder, known: FoundRows, frame: pl.DataFrame) -> pl.DataFrame:
        """Do what `_folded` does, for all aggregates."""
        aggregation, before, row_parts = self._aggregation, known.rows, self._aggregation.row_parts(frame)
        layout = _Layout(np.diff(keys.starts, append=frame.height), known.numbers, keys.rows)
        parts = stacked([selected(before, row_parts.columns), row_parts])
        is_first, until = layout.is_first, list[Prefixes]()
        if self._ttl is not None:
            is_first, latest = self._lives(layout, before, frame)
            until = [Scanned([latest])]
        accumulated = self._accumulated(parts, layout, is_first, frame, keys.rows)
        prefixes = aggregation.prefixes(parts, layout.source, Segments(is_first), accumulated)
        self.parts.replace(keys, known, _after([*prefixes, *until], layout.last))
        return _after(prefixes, layout.row_positions)

    def _results(self, parts: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
        aggregation = self._aggregation
        computed = [name for name in aggregation.schema.names if name not in aggregation.bounds]
        made = aggregation.finish(frame_of([*map(rows.get_column, aggregation.keys), *parts]))
        return frame_of([*map(made.get_column, computed), *map(rows.get_column, aggregation.bounds)])

    def _lives(
        self, layout: _Layout, known: pl.DataFrame, frame: pl.DataFrame
    ) -> tuple[npt.NDArray[np.bool_], pl.Series]:
        """Return which rows start their key's aggregates again, and until when each row is continued."""
        assert self._ttl is not None
        time = self._aggregation.time
        times = frame.select(time.expr).to_series()
        ticks = physical(times).to_numpy()
        begun = physical(known.get_column(UNTIL)).to_numpy()
        until = np.concatenate([begun, until_of(ticks, self._ttl)])[layout.source]
        latest = Segments(layout.is_first).accumulate(np.maximum, until)
        is_first = layout.is_first.copy()
        rows = layout.row_positions
        follows = rows[~is_first[rows]]
        is_first[follows] = ticks[~is_first[rows]] > latest[follows - 1]
        return is_first, pl.Series(UNTIL, latest, pl.Int64).cast(times.dtype)

    def _accumulated(
        self, parts: pl.DataFrame, layout: _Layout, is_first: npt.NDArray[np.bool_], rows: pl.DataFrame, order: Int64s
    ) -> dict[str, pl.Series]:
        """Return what accumulators are after each row of the layout. `order`: the rows in its order."""
        found = {}
        for name, aggregate in self._aggregation.accumulators():
            begun = parts.get_column(name)[index_of(layout.source)].to_list()
            starts = np.flatnonzero(is_first)
            sizes = np.diff(starts, append=len(is_first)) - layout.is_known[starts]
            before = [begun[start] if layout.is_known[start] else None for start in starts.tolist()]
            values = {each: rows.get_column(each)[order] for each in aggregate.columns}
            made = aggregate.scan(before, values, sizes.tolist())
            for position, value in zip(np.flatnonzero(~layout.is_known).tolist(), made, strict=True):
                begun[position] = value
            found[name] = pl.Series(name, begun, pl.Binary)
        return found


def _after(prefixes: Sequence[Prefixes], rows: Int64s) -> pl.DataFrame:
    return frame_of([column for each in prefixes for column in each.at(rows)])


class _Layout:
    """Where the rows of a batch lie key by key: what is known of the key, if anything, then its rows in their order.

    `rows`: the number of rows of each key. `known`: the numbers of the keys that are known. `order`: the rows, key by key.
    """

    def __init__(self, rows: npt.NDArray[Any], known: npt.NDArray[Any], order: npt.NDArray[Any]) -> None:
        sizes = rows.astype(np.int64)
        sizes[known] += 1
        starts = np.cumsum(sizes) - sizes
        self.is_first = np.zeros(int(sizes.sum()), np.bool_)
        self.is_first[starts] = True
        self.is_known = np.zeros_like(self.is_first)
        self.is_known[starts[known]] = True
        self.last: Int64s = starts + sizes - 1
        """The position of the last row of each key."""
        self.source = np.empty(len(self.is_first), np.int64)
        """For each position the number of what lies there: those of known keys first, then those of rows."""
        self.source[starts[known]] = np.arange(len(known))
        self.source[~self.is_known] = len(known) + order.astype(np.int64)
        self.row_positions = np.empty(len(order), np.int64)
        """The position of each row."""
        self.row_positions[order] = np.flatnonzero(~self.is_known)


class RunningAggregateOperator(OnTimeFunctionOperator):
    """The operator of running aggregates. With a `ttl` late rows are not processed: their key's part may have left."""

    def __init__(
        self, name: str, aggregation: WindowAggregation, event_time: str | TimeColumn | None, ttl_us: int | None
    ) -> None:
        self._aggregation = aggregation
        self._ttl = ttl_of(ttl_us, aggregation)
        read = pa.schema([aggregation.input_schema.field(column) for column in aggregation.columns])
        port = Port("process", aggregation.keys, event_time, read)
        function, tags = _function(aggregation, self._ttl), () if ttl_us is None else (LATE,)
        super().__init__(name, function, [port], aggregation.schema, tags)
        self.side_outputs = dict.fromkeys(tags, aggregation.input_schema)

    def state_settings(self) -> Mapping[str, Mapping[str, str]]:
        settings = super().state_settings()
        return {**settings, "": {**settings[""], **self._aggregation.settings}}

    def open(self, context: OperatorContext, out: Output) -> None:
        self._aggregation.pickles_of(self.own)
        super().open(context, out)

    def _call(self, batch: pa.RecordBatch, port: int) -> None:
        if batch.num_rows:
            super()._call(batch.select(self._aggregation.columns), port)

    def _run(self, what: str, call: Callable[[], pl.DataFrame | None]) -> None:
        made = call()  # no function of the user's: errors name its place already
        if made is not None:
            self._out.emit(from_polars(made, self.schema, self._where))

    def advance_watermark(self, watermark_us: int) -> bool:
        super().advance_watermark(watermark_us)
        if self._ttl is not None:
            for state in self._states.values():
                state.pop_until(UNTIL, self._context.watermark)
        return True
