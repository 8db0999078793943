"""A function on batches in a simulated job: its tables are told row by row, as the states of others are."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import polars as pl

from midstream.operators.base import OperatorContext
from midstream.operators.batch_functions import BatchContext, BatchFunctionOperator, CoBatchFunction
from midstream.operators.function_operator import two_ports
from midstream.sim.rows import SCHEMA, Outside
from midstream.sim.timed import DELAY_US
from midstream.state.table import TableState

HELD: Final = "table:rows"
"""The state that holds rows until event time has passed them."""
COUNTED: Final = "table:keys"
"""The state that has the number of rows of each key, and the sum of their ids."""


class Hold(CoBatchFunction):
    """Counts the rows of each key over both ports, and holds every row until event time has passed it by a while."""

    rows = TableState(SCHEMA)
    keys = TableState({"key": int, "count": int, "sum": int})

    def __init__(self, outside: Outside) -> None:
        self._outside = outside

    def open(self, context: OperatorContext) -> None:
        self._outside.check_open(context)

    def process1(self, rows: pl.DataFrame, ctx: BatchContext) -> None:
        self._outside.work(rows.height)
        if self._outside.poison:
            self._outside.check_poison(rows["id"].to_list())
        self.rows.append(rows)
        each = rows.select("key", count=pl.lit(1, pl.Int64), sum="id")
        # in an order that does not depend on threads: a run is the same each time
        self.keys.frame = pl.concat([self.keys.frame, each]).group_by("key", maintain_order=True).sum()

    process2 = process1

    def on_watermark(self, ctx: BatchContext) -> pl.DataFrame:
        held = self.rows.frame
        is_due = held["ts"] + timedelta(microseconds=DELAY_US) <= ctx.watermark
        if is_due.any():
            self.rows.frame = held.filter(~is_due)
        return held.filter(is_due)


def hold(uid: str, outside: Outside) -> BatchFunctionOperator:
    ports = two_ports((["key"], ["key"]), ("ts", "ts"), (SCHEMA, SCHEMA))
    return BatchFunctionOperator(uid, Hold(outside), ports, SCHEMA)
