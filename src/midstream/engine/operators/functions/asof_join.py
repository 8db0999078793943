"""The as-of join: each row of one stream with the newest row of the other that is not later.

Rows of both streams wait until event time has passed them; then it is certain which row is the newest. Of the rows that
no longer wait, the newest of each key is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import polars as pl

from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.operators.functions.event_time_join import EventTimeJoinOperator, JoinColumns
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.state.join_index import Int64s, JoinIndex
from midstream.engine.state.table_state import TableState

_WAITING: Final = ("left_waiting", "right_waiting")
_NEWEST: Final = "newest"


def asof_join_operator(
    name: str, ports: Sequence[Port], tolerance_us: int | None = None, suffix: str = "_right"
) -> AsofJoinOperator:
    """Return the operator that joins each row with the newest row of the second stream that has its key, is not later,
    and at most `tolerance_us` earlier.

    Times are compared in whole microseconds. Of rows at the same time, the one that came last counts.

    Raises SchemaError for columns that do not fit.
    """
    return AsofJoinOperator(name, ports, tolerance_us, JoinColumns.of(ports, suffix, f"operator {name!r}"))


class AsofJoinOperator(EventTimeJoinOperator):
    def __init__(self, name: str, ports: Sequence[Port], tolerance_us: int | None, columns: JoinColumns) -> None:
        self._columns = columns
        self._tolerance_us = tolerance_us
        self.result_time = columns.left_time
        left_us, right_us = (
            time.times(schema.field(time.name).type)
            for time, schema in ((columns.left_time, columns.left), (columns.right_time, columns.right))
        )
        self._times_us = left_us.dt.epoch("us"), right_us.dt.epoch("us")
        tables = {
            _WAITING[0]: JoinIndex(columns.left, columns.left_time.name, 0, left_us),
            _WAITING[1]: JoinIndex(columns.right, columns.right_time.name, 0, right_us),
            _NEWEST: TableState(columns.right),
        }
        super().__init__(name, tables, ports, columns.both)

    @property
    def _waiting(self) -> tuple[JoinIndex, JoinIndex]:
        left, right = (vars(self._function)[name] for name in _WAITING)
        return left, right

    def _joined(self, rows: pl.DataFrame, port: int) -> None:
        self._waiting[port].append(rows.rename(self._columns.names) if port else rows)

    def _completed(self, watermark_us: int) -> pl.DataFrame | None:
        left, right = (
            waiting.pop_expired(watermark_us).sort(time_us, maintain_order=True)
            for waiting, time_us in zip(self._waiting, self._times_us, strict=True)
        )
        newest: TableState = vars(self._function)[_NEWEST]
        made = None
        if left.height:
            known = pl.concat([newest.lookup(left), right])
            or_none = pl.concat([known, known.clear(1)])
            made = left.hstack(or_none[self._newest(left, known)].select(self._columns.added))
        newest.upsert(right.unique(self._columns.keys, keep="last", maintain_order=True))
        self._drop_old(newest, watermark_us)
        return made

    def _newest(self, left: pl.DataFrame, known: pl.DataFrame) -> Int64s:
        """Return, for each row of `left`, the position of its newest row in `known`; the one after the last for none."""
        keys = list(self._columns.keys)
        both = pl.concat([left.select(keys), known.select(keys)])
        number = "".join(keys) + "_"  # the name of no key column
        numbered = both.unique(keys).with_row_index(number)
        numbers = both.join(numbered, on=keys, how="left", maintain_order="left").get_column(number)
        times = [
            frame.select(time_us).to_series() for frame, time_us in zip((left, known), self._times_us, strict=True)
        ]
        all_times, ranks = np.unique(pl.concat(times).to_numpy(), return_inverse=True)
        codes: Int64s = numbers.to_numpy().astype(np.int64) * len(all_times) + ranks
        requested, held = codes[: left.height], codes[left.height :]
        order = held.argsort(kind="stable")
        at = held[order].searchsorted(requested, "right") - 1
        found = at >= 0
        positions = np.full(left.height, known.height, np.int64)
        positions[found] = order[at[found]]
        group_start = requested // len(all_times) * len(all_times)
        found[found] = held[positions[found]] >= group_start[found]
        if self._tolerance_us is not None:
            own, other = (series.to_numpy() for series in times)
            found[found] = own[found] - other[positions[found]] <= self._tolerance_us
        positions[~found] = known.height
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
        for waiting in self._waiting:
            waiting.drop(self._fired.of)
