"""The event-time column of a stream: read without copying, in the unit it comes in.

Inside the engine times are int64 microseconds. A column of milliseconds or nanoseconds is not
converted row by row; only its extremes and its window bounds are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.core.batches import first_null
from midstream.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.core.errors import SchemaError
from midstream.operators.rows import null_error, require_columns

Int64s = npt.NDArray[np.int64]


class EventTime:
    """Column `column` of `schema`; `kind` is its timestamp type, with unit and time zone."""

    def __init__(self, column: str, schema: pa.Schema, where: str) -> None:
        require_columns(schema, [column], where, "event-time column")
        kind = schema.field(column).type
        if not pa.types.is_timestamp(kind):
            raise SchemaError(
                f"{where}: event-time column {column!r} is {kind}, not a timestamp; cast it first, for example with "
                f"with_columns(pl.col({column!r}).cast(pl.Datetime('us')))"
            )
        self.column = column
        self.kind = kind
        self._where = where

    def native(self, batch: pa.RecordBatch) -> Int64s:
        """The times of the rows as int64 in the column's own unit. Raises JobError naming a row that has none."""
        column = batch.column(self.column)
        row = first_null(column)
        if row is not None:
            cure = "filter out or fill rows without a time first"
            raise null_error(f"{self._where}: event-time column {self.column!r}", batch, row, cure)
        times: Int64s = column.view(pa.int64()).to_numpy(zero_copy_only=True)
        return times

    def us(self, batch: pa.RecordBatch) -> Int64s:
        """The times of the rows in microseconds."""
        times = self.native(batch)
        if self.kind.unit == "us":
            return times
        return times * 1000 if self.kind.unit == "ms" else times // 1000

    def to_us(self, native: int) -> int:
        """Microseconds at or below that time."""
        if self.kind.unit == "us":
            return native
        return native * 1000 if self.kind.unit == "ms" else native // 1000

    def from_us(self, time_us: int) -> int:
        """In the column's unit, at or below that time; the ends of time stay the ends of time."""
        if time_us in (MIN_WATERMARK_US, MAX_WATERMARK_US):
            return time_us
        if self.kind.unit == "us":
            return time_us
        if self.kind.unit == "ms":
            return time_us // 1000
        return max(MIN_WATERMARK_US, min(MAX_WATERMARK_US, time_us * 1000 + 999))
