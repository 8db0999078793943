"""Aggregates and the first rows of all rows of a key so far, at each multiple of an interval that event time passes.

Rows are reduced as in tumbling windows. When such a window fires, it is merged into what the key had before, and the
merged value is emitted instead of the window's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Final

import numpy as np
import polars as pl
import pyarrow as pa

from midstream.engine.core.batches import from_polars
from midstream.engine.core.config import duration_text
from midstream.engine.core.errors import ConfigError
from midstream.engine.operators.base import OperatorContext, Output, Snapshot, SnapshotResult
from midstream.engine.operators.event_time_column import TimeColumn
from midstream.engine.operators.functions.process_context import Calendar
from midstream.engine.operators.functions.running_aggregate import UNTIL, ttl_of, until_of
from midstream.engine.operators.windows.aggregates import AnyAggregate
from midstream.engine.operators.windows.pane_windows import PaneWindowOperator
from midstream.engine.operators.windows.top_rows import TopAggregation
from midstream.engine.operators.windows.window_aggregation import WindowAggregation
from midstream.engine.operators.windows.window_operator import native_units
from midstream.engine.operators.windows.window_specs import END, Sliding
from midstream.engine.state.columnar import FrameRun
from midstream.engine.state.state_parts import Redistribute, StatePart
from midstream.engine.state.table_state import TableState

_TOTALS: Final = "totals"


def periodic_aggregate_operator(
    name: str,
    *,
    keys: Sequence[str],
    event_time: TimeColumn,
    aggregates: Mapping[str, AnyAggregate],
    schema: pa.Schema,
    every_us: int,
    ttl_us: int | None = None,
) -> PeriodicAggregateOperator:
    """Return the operator that emits, at each multiple of `every_us`, a row for each key that had rows since the last one.

    A row has the keys, the multiple in the event-time column, and the aggregates of all rows of the key before it. Late
    rows go to the side output LATE. With `ttl_us`, a key that had no row between multiples that are further apart starts
    again.

    Raises immediately what `window_operator` raises.
    """
    _check_time(name, event_time, keys)
    aggregation = WindowAggregation(name, keys, event_time, aggregates, schema, [event_time.name])
    aggregation.check_expressions()
    return PeriodicAggregateOperator(aggregation, every_us, ttl_us)


def periodic_top_operator(
    name: str,
    *,
    keys: Sequence[str],
    event_time: TimeColumn,
    count: int,
    by: Sequence[str],
    descending: bool,
    schema: pa.Schema,
    every_us: int,
    ttl_us: int | None = None,
) -> PeriodicAggregateOperator:
    """Return the operator that emits, at each multiple of `every_us`, the first `count` rows of each key, in the order of the
    columns `by`, if they are not those that it emitted last.

    A row has the keys, the multiple in the event-time column, its rank, and the other columns of the row. All else is as in
    `periodic_aggregate_operator`.
    """
    _check_time(name, event_time, keys)
    aggregation = TopAggregation(name, keys, event_time, count, by, descending, schema, [event_time.name])
    return PeriodicAggregateOperator(aggregation, every_us, ttl_us)


def _check_time(name: str, event_time: TimeColumn, keys: Sequence[str]) -> None:
    if event_time.name in keys:
        raise ConfigError(
            f"operator {name!r}: with every, the event-time column {event_time.name!r} has the time of the result, so it "
            "cannot be a key; copy it first, with with_columns()"
        )


class PeriodicAggregateOperator(PaneWindowOperator):
    """Tumbling windows that are merged into the totals of their keys when they fire."""

    def __init__(self, aggregation: WindowAggregation, every_us: int, ttl_us: int | None) -> None:
        native_units(every_us, aggregation.time, f"{aggregation.where}: every")
        super().__init__(aggregation, Sliding(every_us, every_us), 0)
        self._every = duration_text(every_us)
        self._ttl = ttl_of(ttl_us, aggregation)
        added = [] if ttl_us is None else [pa.field(UNTIL, aggregation.time.kind)]
        self._declared = TableState(pa.schema([*aggregation.part_schema, *added]))
        self._calendar = Calendar(aware=aggregation.time.kind.tz is not None)
        self._totals: TableState
        """The merged part of each key, and the last multiple that continues it if there is a `ttl`."""

    def state_settings(self) -> Mapping[str, Mapping[str, str]]:
        declared = self._declared
        totals = {f"{declared.kind} state {_TOTALS!r}": declared.type_text()}
        every = {"the window": f"all rows so far, every {self._every}"}
        return {"": {**super().state_settings()[""], **every}, f"{declared.kind}:{_TOTALS}": totals}

    def open(self, context: OperatorContext, out: Output) -> None:
        super().open(context, out)
        keys = self._aggregation.keys
        self._totals = self._declared.bound(_TOTALS, keys, context.key_groups, context.max_parallelism)

    def _emit(self, merged: pl.DataFrame, *, is_early: bool = False) -> None:
        if not merged.height:
            return
        aggregation, names = self._aggregation, self._aggregation.part_schema.names
        end = int(merged.item(0, END))
        known = self._totals.pop(merged)
        if self._ttl is not None:
            known = known.filter(known.get_column(UNTIL).to_physical() >= end)
        total, changed = aggregation.update(known.select(names), merged.select(names))
        if self._ttl is None:
            self._totals.append(total)
        else:
            until = pl.Series(UNTIL, until_of(np.full(total.height, end), self._ttl)).cast(known.schema[UNTIL])
            self._totals.append(total.with_columns(until))
        if not changed.height:
            return
        time = self._aggregation.time
        values = pa.schema([field for field in self.schema if field.name != time.column])
        batch = from_polars(aggregation.finish(changed)[values.names], values, aggregation.where)
        at = pa.array(np.full(batch.num_rows, end)).view(time.kind)
        columns = [at if name == time.column else batch.column(name) for name in self.schema.names]
        self._out.emit(pa.RecordBatch.from_arrays(columns, schema=self.schema))

    def advance_watermark(self, watermark_us: int) -> bool:
        has_fired = super().advance_watermark(watermark_us)
        if has_fired and self._ttl is not None:
            self._totals.pop_until(UNTIL, self._calendar.datetime(watermark_us))
        return has_fired

    def state_runs(self) -> Iterable[FrameRun]:
        return chain(super().state_runs(), self._totals.held_runs())

    def stored_runs(self) -> Iterable[tuple[FrameRun, Callable[[], pa.Table]]]:
        return self._totals.stored_runs()

    # ---- snapshot ----

    def snapshot(self, checkpoint_id: int) -> Snapshot:
        windows, totals = (
            super().snapshot(checkpoint_id),
            self._totals.snapshot(self._context.ids, self._aggregation.where, self._context.stored_bytes),
        )
        if totals is None:
            return windows

        def later() -> SnapshotResult:
            part = StatePart(Redistribute.KEYED, totals())
            return SnapshotResult({**windows.complete().parts, self._totals.part_name: part})

        return Snapshot(later=later)

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        own = self._totals.part_name
        super().restore({name: part for name, part in parts.items() if name != own})
        if own in parts:
            self._totals.restore(parts[own].chunks, self._aggregation.where)
            self._aggregation.check_restored(self._totals.frame)
