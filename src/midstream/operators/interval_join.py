"""The inner join by time of two keyed streams, as a function on batches."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
import pyarrow as pa

from midstream.core.errors import JobError
from midstream.operators.batch_functions import BatchContext, BatchFunctionOperator, CoBatchFunction
from midstream.operators.function_operator import Port
from midstream.state.table import TableState


def interval_join_operator(name: str, ports: Sequence[Port], lower_us: int, upper_us: int) -> BatchFunctionOperator:
    """Pairs of rows with equal keys of which the second's event time is `lower_us` to `upper_us` after the first's.

    A pair has the columns of the first, then those of the second but its keys. It is emitted when the later of its
    rows comes; a row is kept until event time says that none will come that it goes with, but late ones. Times are
    compared in whole microseconds.
    """
    first, second = ports
    keys, names = list(first.keys), dict(zip(second.keys, first.keys, strict=True))
    renamed = pa.schema([field.with_name(names.get(field.name, field.name)) for field in second.schema])
    twice = [field.name for field in second.schema if field.name not in names and field.name in first.schema.names]
    if twice:
        raise JobError(
            f"operator {name!r}: both streams have a column {twice[0]!r}; give it another name in one of them, with select() "
            "(an event-time column before with_watermarks())"
        )
    added = [field for field in renamed if field.name not in keys]
    schema = pa.schema([*first.schema, *added])
    assert first.event_time is not None and second.event_time is not None
    time1 = pl.col(first.event_time).dt.epoch("us")
    time2 = pl.col(names.get(second.event_time, second.event_time)).dt.epoch("us")
    interval = max(schema.names, key=len) + "_"  # the name of no column
    length_us = upper_us - lower_us + 1

    def pairs(left: pl.DataFrame, right: pl.DataFrame) -> pl.DataFrame | None:
        """A key may have very many rows: only those of about the same time are put side by side."""
        if left.is_empty() or right.is_empty():
            return None
        first1, last1 = _extremes(left, time1)
        right = right.filter(time2.is_between(first1 + lower_us, last1 + upper_us))
        if right.is_empty():
            return None
        first2, last2 = _extremes(right, time2)
        left = left.filter(time1.is_between(first2 - upper_us, last2 - lower_us))
        on = keys
        if min(last1 - first1, last2 - first2) > length_us:
            # Time is cut into pieces of that length: what a row of the first goes with is in one or two of them.
            left = left.with_columns(((time1 + lower_us) // length_us).alias(interval))
            reaches_next = (time1 + upper_us) // length_us > pl.col(interval)
            left = pl.concat([left, left.filter(reaches_next).with_columns(pl.col(interval) + 1)])
            right = right.with_columns((time2 // length_us).alias(interval))
            on = [*keys, interval]
        joined = left.join(right, on=on)
        return joined.filter((time2 - time1).is_between(lower_us, upper_us)).select(schema.names)

    class IntervalJoin(CoBatchFunction):
        left = TableState(first.schema)
        right = TableState(renamed)

        def process1(self, rows: pl.DataFrame, ctx: BatchContext) -> pl.DataFrame | None:
            self.left.append(rows)
            return pairs(rows, self.right.frame)

        def process2(self, rows: pl.DataFrame, ctx: BatchContext) -> pl.DataFrame | None:
            rows = rows.rename(names)
            self.right.append(rows)
            return pairs(self.left.frame, rows)

        def on_watermark(self, ctx: BatchContext) -> None:
            now = pl.lit(ctx.watermark).dt.epoch("us")
            for table, last in (self.left, time1 + upper_us), (self.right, time2 - lower_us):
                rows = table.frame
                kept = rows.filter(last > now)
                if kept.height < rows.height:
                    table.frame = kept

    return BatchFunctionOperator(name, IntervalJoin(), ports, schema)


def _extremes(rows: pl.DataFrame, time_us: pl.Expr) -> tuple[int, int]:
    """The first and the last time of some rows."""
    first, last = rows.select(first=time_us.min(), last=time_us.max()).row(0)
    return first, last
