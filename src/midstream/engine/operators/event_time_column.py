"""The event-time column of a stream, read without copying, in its own unit.

Watermarks and timers are int64 microseconds. A column of milliseconds or nanoseconds is not converted row by row; only
its extremes and its window bounds are. Where rows are compared with rows of another stream, whose unit may differ,
nanoseconds are kept apart from microseconds: neither unit has room for all times of the other.

Times must be in the years 1 to 9999, the range of watermarks and timers. A time far outside stands for something else,
such as a missing value, and int64 would wrap around as soon as a window is added.

The result of a window has the last time of the window: one unit before its end, which is not part of it. So the result
of the last minute of an hour belongs to that hour. A session has its end: a row at that time would still continue it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from midstream.engine.core.arrow_types import is_text
from midstream.engine.core.batches import first_null
from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.core.errors import JobError, SchemaError
from midstream.engine.operators.row_conversion import null_error, require_columns, row_error
from midstream.engine.state.table_runs import physical

Int64s = npt.NDArray[np.int64]

_EPOCH: Final = datetime(1970, 1, 1)
_MICROSECOND: Final = timedelta(microseconds=1)
FIRST_TIME_US: Final = (datetime.min - _EPOCH) // _MICROSECOND
LAST_TIME_US: Final = (datetime.max - _EPOCH) // _MICROSECOND
_NAMES: Final = {"ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}


@dataclass(frozen=True, slots=True)
class TimeColumn:
    """The column that is a stream's event time. `is_end`: it has the ends of windows, and a row's time is one unit before."""

    name: str
    is_end: bool = False

    def times(self, kind: Any) -> pl.Expr:
        """Return the expression of the rows' times; `kind` is the column's timestamp type."""
        column = pl.col(self.name)
        return column.dt.offset_by(f"-1{kind.unit}") if self.is_end else column


class EventTime:
    """The event-time column `column` of `schema`; `kind` is its timestamp type, with unit and time zone."""

    def __init__(self, column: str | TimeColumn, schema: pa.Schema, where: str) -> None:
        marked = TimeColumn(column) if isinstance(column, str) else column
        column = marked.name
        require_columns(schema, [column], where, "event-time column")
        kind = schema.field(column).type
        if not pa.types.is_timestamp(kind):
            convert = "str.to_datetime('%Y-%m-%d %H:%M:%S')" if is_text(kind) else "cast(pl.Datetime('us'))"
            raise SchemaError(
                f"{where}: event-time column {column!r} is {kind}, not a timestamp; convert it first, for example with "
                f"with_columns(pl.col({column!r}).{convert})"
            )
        self.column = column
        self.kind = kind
        self.has_ns = kind.unit == "ns"
        self.expr = marked.times(kind)
        """The rows' times, as an expression."""
        self._is_end = marked.is_end
        self._where = where

    @property
    def last(self) -> int:
        """The last time of the year 9999, in the column's own unit; for nanoseconds the last one that there is."""
        return self.from_us(LAST_TIME_US)

    def native(self, batch: pa.RecordBatch, room: int = 0) -> Int64s:
        """Return the times of the rows as int64 in the column's own unit; adding or subtracting `room` does not
        overflow.

        Raises JobError naming a row without a time, or with one outside the years 1 to 9999.
        """
        column = batch.column(self.column)
        row = first_null(column)
        if row is not None:
            cure = "filter out or fill rows without a time first"
            raise null_error(f"{self._where}: event-time column {self.column!r}", batch, row, cure)
        times: Int64s = column.view(pa.int64()).to_numpy(zero_copy_only=True)
        if len(times):
            first = max(self.from_us(FIRST_TIME_US), MIN_WATERMARK_US + room) + self._is_end
            last = min(self.last, MAX_WATERMARK_US - max(room, 1)) + self._is_end  # the end comes after all
            if not (first <= times.min() and times.max() <= last):
                raise self._outside(batch, times, first, last)
        return times - 1 if self._is_end else times

    def _outside(self, batch: pa.RecordBatch, times: Int64s, first: int, last: int) -> JobError:
        row = int(np.flatnonzero((times < first) | (times > last))[0])
        bounds = [(_EPOCH + self.to_us(bound) * _MICROSECOND).isoformat() for bound in (first, last)]
        return row_error(
            f"{self._where}: event-time column {self.column!r} is {times[row]} {_NAMES[self.kind.unit]} since 1970",
            batch,
            row,
            f"times from {bounds[0]} to {bounds[1]} can be processed here; filter out or replace the others first",
        )

    def us(self, batch: pa.RecordBatch, room: int = 0) -> Int64s:
        """Return the times of the rows in microseconds. Raises what `native` raises."""
        return self._in_us(self.native(batch, room))

    def native_of(self, rows: pl.DataFrame) -> Int64s:
        """Return the times of rows, which `native` or `us` has accepted before, in the column's own unit."""
        times: Int64s = physical(rows.get_column(self.column)).to_numpy()
        return times - 1 if self._is_end else times

    def us_of(self, rows: pl.DataFrame) -> Int64s:
        """Return the times of rows, which `native` or `us` has accepted before, in microseconds."""
        return self._in_us(self.native_of(rows))

    def us_and_ns_of(self, rows: pl.DataFrame) -> tuple[Int64s, Int64s]:
        """Return the times of such rows in microseconds, and the nanoseconds by which they are later, below 1000."""
        times = self.native_of(rows)
        us = self._in_us(times)
        return us, times - us * 1000 if self.has_ns else np.zeros_like(us)

    def _in_us(self, times: Int64s) -> Int64s:
        if self.kind.unit == "us":
            return times
        return times * 1000 if self.kind.unit == "ms" else times // 1000

    def due(self, watermark_us: int) -> int:
        """Return the largest value of the column, in its own unit, that event time has passed at this watermark."""
        return min(self.from_us(watermark_us) + self._is_end, MAX_WATERMARK_US)

    def to_us(self, native: int) -> int:
        """Convert a time to microseconds, rounded down."""
        if self.kind.unit == "us":
            return native
        return native * 1000 if self.kind.unit == "ms" else native // 1000

    def from_us(self, time_us: int) -> int:
        """Convert a time to the column's unit, rounded down; the ends of time stay the ends of time."""
        if time_us in (MIN_WATERMARK_US, MAX_WATERMARK_US):
            return time_us
        if self.kind.unit == "us":
            return time_us
        if self.kind.unit == "ms":
            return time_us // 1000
        return max(MIN_WATERMARK_US, min(MAX_WATERMARK_US, time_us * 1000 + 999))
