"""Windows by count: as many rows of a key as a window has, in the order of arrival."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import polars as pl
import pyarrow as pa

from midstream.engine.core.batches import from_polars
from midstream.engine.core.errors import StorageError
from midstream.engine.operators.base import OperatorContext, Output
from midstream.engine.operators.event_time_column import TimeColumn
from midstream.engine.operators.functions.batch_functions import (
    BatchContext,
    BatchFunctionOperator,
    KeyedBatchFunction,
)
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.windows.aggregates import AnyAggregate
from midstream.engine.operators.windows.dense_groupby import DenseGroupBy
from midstream.engine.operators.windows.window_aggregation import WindowAggregation
from midstream.engine.operators.windows.window_specs import END, START, WINDOW_END, WINDOW_START, CountWindow
from midstream.engine.state.state_parts import Chunk
from midstream.engine.state.table_state import TableState

COUNT: Final = "__count"
"""The column with the number of rows of a part."""
_WINDOW: Final = "__window"
"""The number of a row's window, from 0 for the one that was begun before the batch."""
_LAST: Final = "__last"
"""The number of the last row of a window in the batch; -1 if it has none there."""
_COUNTED: Final[Mapping[str, DenseGroupBy]] = {
    COUNT: DenseGroupBy("sum", COUNT),
    _LAST: DenseGroupBy("max", _LAST),
    START: DenseGroupBy("min", START),
    END: DenseGroupBy("max", END),
}


def count_window_operator(
    name: str,
    *,
    window: CountWindow,
    keys: Sequence[str],
    event_time: TimeColumn | None,
    aggregates: Mapping[str, AnyAggregate],
    schema: pa.Schema,
) -> CountWindowOperator:
    """Return the operator that emits a row for each complete window of a key, when its last row arrives.

    It emits the keys; if there is an event time, `window_start` and `window_end`, the smallest and the largest one of the
    rows; and a column per aggregate. What is incomplete at the end is dropped.

    Raises immediately what `window_operator` raises.
    """
    bounds = () if event_time is None else (WINDOW_START, WINDOW_END)
    aggregation = WindowAggregation(name, keys, event_time, aggregates, schema, bounds)
    aggregation.check_expressions()
    return CountWindowOperator(name, aggregation, event_time, window)


class _OpenWindows(TableState):
    """A row for each key: what it has of its window, which is not complete."""

    def __init__(self, schema: pa.Schema, rows: int) -> None:
        super().__init__(schema)
        self._rows = rows

    def restore(self, chunks: Sequence[Chunk], where: str) -> None:
        super().restore(chunks, where)
        held = self.frame.select(*self._layout.keys, COUNT)
        counts = held.get_column(COUNT)
        if held.drop(COUNT).is_duplicated().any() or not counts.is_between(1, self._rows - 1).all():
            raise StorageError(
                f"{where}: the state in the checkpoint has several windows of a key, or one of which {counts.min()!r} to "
                f"{counts.max()!r} of {self._rows} rows have come: it is damaged, or midstream has not written it. To go back "
                "to an older checkpoint, name it with --from"
            )


class _CountWindows(KeyedBatchFunction):
    parts: TableState
    """What each key has of its window that is not complete."""

    def __init__(self, aggregation: WindowAggregation, rows: int) -> None:
        self._aggregation = aggregation
        self._rows = rows

    def process(self, rows: pl.DataFrame, ctx: BatchContext) -> pl.DataFrame:
        aggregation, by = self._aggregation, self._aggregation.keys
        times = aggregation.time.expr.to_physical() if aggregation.bounds else pl.lit(0, pl.Int64)
        frame = aggregation.prepare(rows).with_columns(
            pl.int_range(pl.len()).alias(_LAST),
            times.alias(START),
            times.alias(END),
            pl.lit(1, pl.Int64).alias(COUNT),
        )
        known = self.parts.pop(frame.select(by).unique())
        begun = frame.select(by).join(known.select(*by, COUNT), on=by, how="left", maintain_order="left")
        earlier = begun.get_column(COUNT).fill_null(0)
        position = frame.select(pl.int_range(pl.len()).over(by)).to_series()
        frame = frame.with_columns(((earlier + position) // self._rows).alias(_WINDOW))
        found = aggregation.reduce(frame, (_WINDOW,), _COUNTED)
        begun = known.with_columns(pl.lit(0, pl.Int64).alias(_WINDOW), pl.lit(-1, pl.Int64).alias(_LAST))
        merged = aggregation.merge([begun.select(found.columns), found], (_WINDOW,), _COUNTED)
        self.parts.append(merged.filter(pl.col(COUNT) < self._rows).select(known.columns))
        complete = merged.filter(pl.col(COUNT) == self._rows).sort(_LAST)
        finished = aggregation.finish(complete)
        if not aggregation.bounds:
            return finished[aggregation.schema.names]
        kind = rows.schema[aggregation.time.column]
        bounds = [pl.col(START).cast(kind).alias(WINDOW_START), pl.col(END).cast(kind).alias(WINDOW_END)]
        return finished.with_columns(bounds)[aggregation.schema.names]


def _function(aggregation: WindowAggregation, rows: int) -> _CountWindows:
    added = [pa.field(name, pa.int64()) for name in (COUNT, START, END)]

    class CountWindows(_CountWindows):
        parts = _OpenWindows(pa.schema([*aggregation.part_schema, *added]), rows)

    return CountWindows(aggregation, rows)


class CountWindowOperator(BatchFunctionOperator):
    runs_users_function = False

    def __init__(
        self, name: str, aggregation: WindowAggregation, event_time: TimeColumn | None, window: CountWindow
    ) -> None:
        self._aggregation = aggregation
        self._window = window
        read = pa.schema([aggregation.input_schema.field(column) for column in aggregation.columns])
        port = Port("process", aggregation.keys, event_time, read)
        super().__init__(name, _function(aggregation, window.rows), [port], aggregation.schema)

    def state_settings(self) -> Mapping[str, Mapping[str, str]]:
        settings = super().state_settings()
        return {**settings, "": {**settings[""], "the window": str(self._window), **self._aggregation.settings}}

    def open(self, context: OperatorContext, out: Output) -> None:
        self._aggregation.pickles_of(self.own)
        super().open(context, out)

    def _call(self, batch: pa.RecordBatch, port: int) -> None:
        if batch.num_rows:
            super()._call(batch.select(self._aggregation.columns), port)

    def _run(self, what: str, call: Callable[[], pl.DataFrame | None]) -> None:
        made = call()  # no function of the user's: errors name its place already
        if made is not None and made.height:
            self._out.emit(from_polars(made, self.schema, self._where))
