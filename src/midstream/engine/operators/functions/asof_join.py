"""The as-of join: each row of one stream with the newest row of the other that is not later.

Rows of both streams wait until event time has passed them; then it is certain which row is the newest. Of the rows that
no longer wait, the newest of each key is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import polars as pl

from midstream.engine.core.batches import empty_batch, from_polars, rows_at, rows_where, selected, stacked, to_polars
from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.operators.event_time_column import EventTime, Int64s
from midstream.engine.operators.functions.event_time_join import EventTimeJoinOperator, JoinColumns
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.state.key_order import KeyOrder
from midstream.engine.state.table_state import TableState

_WAITING: Final = ("left_waiting", "right_waiting")
_NEWEST: Final = "newest"


def asof_join_operator(
    name: str, ports: Sequence[Port], tolerance_us: int | None = None, suffix: str = "_right"
) -> AsofJoinOperator:
    """Return the operator that joins each row with the newest row of the second stream that has its key, is not later,
    and at most `tolerance_us` earlier.

    Of rows at the same time, the one that came last counts.

    Raises SchemaError for columns that do not fit.
    """
    return AsofJoinOperator(name, ports, tolerance_us, JoinColumns.of(ports, suffix, f"operator {name!r}"))


class AsofJoinOperator(EventTimeJoinOperator):
    def __init__(self, name: str, ports: Sequence[Port], tolerance_us: int | None, columns: JoinColumns) -> None:
        self._columns = columns
        self._tolerance_us = tolerance_us
        self.result_time = columns.left_time
        self._none = to_polars(empty_batch(columns.right)).clear(1)
        """A row of nulls, for those that have no partner."""
        self._own_times = tuple(
            EventTime(time, schema, f"operator {name!r}")
            for time, schema in ((columns.left_time, columns.left), (columns.right_time, columns.right))
        )
        tables = [TableState(columns.left), TableState(columns.right), TableState(columns.right)]
        super().__init__(name, dict(zip((*_WAITING, _NEWEST), tables, strict=True)), ports, columns.both)

    @property
    def _waiting(self) -> tuple[TableState, TableState]:
        left, right = (vars(self._function)[name] for name in _WAITING)
        return left, right

    def _joined(self, rows: pl.DataFrame, port: int) -> None:
        self._waiting[port].append(rows.rename(self._columns.names) if port else rows)

    def _completed(self, watermark_us: int) -> pl.DataFrame | None:
        left, right = (
            _by_time(waiting.pop_until_tick(time.column, time.due(watermark_us)), time)
            for waiting, time in zip(self._waiting, self._own_times, strict=True)
        )
        newest: TableState = vars(self._function)[_NEWEST]
        made = None
        if left.height:
            before = newest.lookup(left)
            known = stacked([before, right])
            rows = rows_at(stacked([known, self._none]), self._newest(left, known))
            made = left.hstack([rows.get_column(name) for name in self._columns.added])
        newest.upsert(right.unique(self._columns.keys, keep="last", maintain_order=True))
        self._drop_old(newest, watermark_us)
        return made

    def _newest(self, left: pl.DataFrame, known: pl.DataFrame) -> Int64s:
        """Return, for each row of `left`, the position of its newest row in `known`; the one after the last for none."""
        keys, held = list(self._columns.keys), known.height
        left_time, right_time = self._own_times
        us, ns = map(np.concatenate, zip(right_time.us_and_ns_of(known), left_time.us_and_ns_of(left), strict=True))
        both = stacked([selected(known, keys), selected(left, keys)])
        # of rows at the same time, the known ones come first
        has_ns = left_time.has_ns or right_time.has_ns
        order = KeyOrder(both, np.lexsort((ns, us)) if has_ns else us.argsort(kind="stable"))
        is_known = order.rows < held
        places = np.where(is_known | order.is_first, np.arange(len(us)), 0)
        newest = order.rows[np.maximum.accumulate(places)[~is_known]]
        own = order.rows[~is_known]
        found = newest < held
        if self._tolerance_us is not None:
            distance_us = us[own] - us[newest]
            found &= (distance_us < self._tolerance_us) | (
                (distance_us == self._tolerance_us) & (ns[own] <= ns[newest])
            )
        positions = np.full(left.height, held, np.int64)
        positions[own[found] - held] = newest[found]
        return positions

    def _drop_old(self, newest: TableState, watermark_us: int) -> None:
        """Drop rows that are too old for every row that may still come."""
        if watermark_us == MAX_WATERMARK_US:
            until_us = watermark_us
        elif self._tolerance_us is not None and watermark_us > MIN_WATERMARK_US + self._tolerance_us:
            until_us = watermark_us - self._tolerance_us
        else:
            return
        newest.pop_until(self._columns.right_time.name, self._calendar.datetime(until_us))

    def _drop_completed(self) -> None:
        for waiting, time in zip(self._waiting, self._own_times, strict=True):
            rows = waiting.frame
            marks = self._reached(from_polars(rows, waiting.schema, self._where), self._columns.keys)
            waiting.frame = rows_where(rows, time.us_of(rows) > marks)


def _by_time(rows: pl.DataFrame, time: EventTime) -> pl.DataFrame:
    """Return rows in the order of their times, those of one time in their order."""
    times = time.native_of(rows)
    return rows if (times[1:] >= times[:-1]).all() else rows_at(rows, times.argsort(kind="stable"))
