"""Operators that show how a simulated job ends: one holds rows for the wall clock, one emits a sum at its end."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

import polars as pl

from midstream.engine.operators.base import OperatorContext
from midstream.engine.operators.functions.batch_functions import BatchContext, BatchFunctionOperator, KeyedBatchFunction
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.functions.process_functions import KeyedProcessFunction, ProcessContext
from midstream.engine.operators.functions.process_operator import ProcessOperator
from midstream.engine.operators.row_conversion import Row
from midstream.engine.state.keyed_states import MapState
from midstream.engine.state.table_state import TableState
from midstream_lab.jobs.clocks import Punctual
from midstream_lab.jobs.recorded_rows import SCHEMA, Outside

_SUBTASKS: Final = 1000
_STEP: Final = timedelta(milliseconds=1)
_FAR: Final = timedelta(hours=1)
"""A time longer than any run: rows that wait for so long wait for the end."""


def decode_count(row: int) -> tuple[int, int]:
    """Return which subtask of a `Total` has emitted a row, and how many rows it has counted."""
    return (-row - 1) % _SUBTASKS, (-row - 1) // _SUBTASKS


class Total(KeyedBatchFunction):
    """Emits one row at the end: how many rows this subtask has received. Its id is negative, see `decode_count`."""

    counts = TableState({"key": int, "count": int})

    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self._subtask = 0

    def open(self, context: OperatorContext) -> None:
        self._outside.check_open(context)
        self._subtask = context.subtask

    def process(self, rows: pl.DataFrame, ctx: BatchContext) -> None:
        self._outside.work(rows.height)
        if self._outside.poison:
            self._outside.check_poison(rows["id"].to_list())
        each = rows.select("key", count=pl.lit(1, pl.Int64))
        self.counts.frame = pl.concat([self.counts.frame, each]).group_by("key", maintain_order=True).sum()

    def on_watermark(self, ctx: BatchContext) -> pl.DataFrame | None:
        if ctx.watermark != datetime.max:
            return None
        counted = int(self.counts.frame["count"].sum())
        self.counts.frame = self.counts.frame.clear()
        row = {"id": -1 - self._subtask - counted * _SUBTASKS, "key": 0, "sequence": 0, "ts": datetime(1970, 1, 1)}
        return pl.DataFrame([{**row, "n": 0, "text": ""}], schema=dict(pl.DataFrame(SCHEMA.empty_table()).schema))


def total(uid: str, outside: Outside) -> BatchFunctionOperator:
    return BatchFunctionOperator(uid, Total(outside), [Port("process", ("key",), None, SCHEMA)], SCHEMA)


class Alarm(KeyedProcessFunction):
    """Holds every row until the wall clock has reached a time; for some rows, this is after the end of the input."""

    waiting: MapState[datetime, list[Row]] = MapState()

    def __init__(self, outside: Outside) -> None:
        self._outside = outside

    def open(self, context: OperatorContext) -> None:
        self._outside.check_open(context)

    def process(self, row: Row, ctx: ProcessContext) -> None:
        self._outside.work(1)
        self._outside.check_poison([row["id"]])
        at = ctx.now + _STEP * (row["id"] % 7) + (_FAR if row["id"] % 4 == 0 else timedelta())
        self.waiting[at] = [*self.waiting.get(at, []), row]
        ctx.timers.processing_time(at)

    def on_timer(self, time: datetime, ctx: ProcessContext) -> Iterator[Row]:
        self._outside.work(1)
        if time not in self.waiting:
            self._outside.world.bug(f"a timer of key {ctx.key} fires at {time}, where nothing waits")
            return
        if ctx.now < time and ctx.watermark != datetime.max:
            self._outside.world.bug(f"a timer of {time} fires at {ctx.now}, before the end")
        yield from self.waiting.pop(time)


def alarm(uid: str, outside: Outside) -> ProcessOperator:
    return Punctual(uid, Alarm(outside), [Port("process", ("key",), None, SCHEMA)], SCHEMA, {})
