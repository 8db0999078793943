"""Sorting the rows of a keyed stream by event time."""

from __future__ import annotations

import polars as pl

from midstream.engine.operators.event_time_column import EventTime
from midstream.engine.operators.functions.batch_functions import BatchContext, KeyedBatchFunction
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.functions.on_time_functions import OnTimeFunctionOperator
from midstream.engine.operators.functions.process_context import TimeContext
from midstream.engine.state.table_state import TableState


def sort_by_time_operator(name: str, port: Port) -> OnTimeFunctionOperator:
    """Return the operator that holds rows until event time has passed them, and then emits them in the order of their times.

    Rows of one time are ordered by the other columns, so that the order does not depend on arrival; only those that
    differ in nothing but lists and structs are in the order of arrival.
    """
    assert port.event_time is not None
    time = EventTime(port.event_time, port.schema, f"operator {name!r}")

    class SortByTime(KeyedBatchFunction):
        waiting = TableState(port.schema)

        def process(self, rows: pl.DataFrame, ctx: BatchContext) -> None:
            self.waiting.append(rows)

        def on_watermark(self, ctx: BatchContext) -> pl.DataFrame:
            assert isinstance(ctx, TimeContext)
            due = self.waiting.pop_until_tick(time.column, time.due(ctx.watermark_us))
            by = [time.column, *(name for name, kind in due.schema.items() if not kind.is_nested())]
            return due.sort(list(dict.fromkeys(by)), maintain_order=True)

    return OnTimeFunctionOperator(name, SortByTime(), [port], port.schema)
