"""A function on batches in a simulated job, whose tables are checked row by row, like the states of other functions."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

import polars as pl

from midstream.engine.operators.base import OperatorContext
from midstream.engine.operators.functions.batch_functions import BatchContext, BatchFunctionOperator, CoBatchFunction
from midstream.engine.operators.functions.function_operator import two_ports
from midstream.engine.state.table_state import TableState
from midstream_lab.jobs.recorded_rows import SCHEMA, Outside
from midstream_lab.jobs.timed import DELAY_US

HELD: Final = "table:rows"
"""The state with the rows that wait until event time has passed them."""
COUNTED: Final = "table:keys"
"""The state with the number of rows of each key, and the sum of their ids."""


class Hold(CoBatchFunction):
    """Counts the rows of each key over both ports, and holds every row until event time is `DELAY_US` past it."""

    rows = TableState(SCHEMA)
    keys = TableState({"key": int, "count": int, "sum": int})

    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self._turn = 0
        """The calls so far: every way to change a table has its turn."""
        self._added: list[int] = []
        """The ids of the rows that were added since this subtask began and are still held, in their order."""

    def open(self, context: OperatorContext) -> None:
        self._outside.check_open(context)

    def process1(self, rows: pl.DataFrame, ctx: BatchContext) -> None:
        self._outside.work(rows.height)
        if self._outside.poison:
            self._outside.check_poison(rows["id"].to_list())
        self.rows.append(rows)
        self._added += rows["id"].to_list()
        # in an order that does not depend on threads, so that every run is the same
        each = rows.group_by("key", maintain_order=True).agg(count=pl.len().cast(pl.Int64), sum=pl.col("id").sum())
        self._turn += 1
        way = self._turn % 3
        if way == 0:
            self.keys.frame = self._added_up(self.keys.frame, each)
        elif way == 1:
            self.keys.upsert(self._added_up(self._known(rows), each))
        else:
            known = self._known(rows)
            self._check_same("removed of some keys", self.keys.pop(rows), known)
            self.keys.append(self._added_up(known, each))

    process2 = process1

    @staticmethod
    def _added_up(known: pl.DataFrame, each: pl.DataFrame) -> pl.DataFrame:
        return pl.concat([known, each]).group_by("key", maintain_order=True).sum()

    def _known(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the counts of the keys of `rows`."""
        known = self.keys.lookup(rows)
        self._check_same(
            "found of some keys", known, self.keys.frame.join(rows, on="key", how="semi", maintain_order="left")
        )
        return known

    def on_watermark(self, ctx: BatchContext) -> pl.DataFrame:
        held = self.rows.frame
        self._check_order(held)
        is_due = held["ts"] + timedelta(microseconds=DELAY_US) <= ctx.watermark
        due = held.filter(is_due)
        self._turn += 1
        if self._turn % 8 and ctx.watermark > datetime.min:
            until = ctx.watermark - timedelta(microseconds=DELAY_US)
            self._check_same("due", self.rows.pop_until("ts", until), due)
        elif due.height:
            self.rows.frame = held.filter(~is_due)
        if due.height:
            stays = (~is_due).to_list()[-len(self._added) :]
            self._added = [row for row, there in zip(self._added, stays, strict=True) if there] if self._added else []
        return due

    def _check_same(self, what: str, found: pl.DataFrame, expected: pl.DataFrame) -> None:
        if not found.equals(expected):
            self._outside.world.bug(f"a table has {found.rows()} {what} instead of {expected.rows()}")

    def _check_order(self, held: pl.DataFrame) -> None:
        """Check that the rows of a table are in the order in which they were added."""
        found = held["id"].to_list()
        if self._added and found[-len(self._added) :] != self._added:
            self._outside.world.bug(f"a table has the rows {found}, of which these were put in last: {self._added}")


def hold(uid: str, outside: Outside) -> BatchFunctionOperator:
    ports = two_ports((["key"], ["key"]), ("ts", "ts"), (SCHEMA, SCHEMA))
    return BatchFunctionOperator(uid, Hold(outside), ports, SCHEMA)
