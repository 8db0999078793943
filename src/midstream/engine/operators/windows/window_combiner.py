"""What reduces rows to parts of windows before they are sent to the window operator.

A combined batch has one row per key and pane (or small session) of the batch that it stands for: the number of its
rows, where it lies in time, and the columns of a part. The window operator keeps such parts as it keeps its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Final

import polars as pl
import pyarrow as pa

from midstream.engine.core.batches import from_polars, to_polars
from midstream.engine.operators.event_time_column import Int64s
from midstream.engine.operators.row_conversion import check_keys
from midstream.engine.operators.windows.dense_groupby import DenseGroupBy
from midstream.engine.operators.windows.window_aggregation import WindowAggregation

ROWS: Final = "__rows"
"""The column with the number of rows that a part stands for."""


class WindowCombiner(ABC):
    """Base of the combiners of window operators. `room`: see `EventTime.native`."""

    bounds: ClassVar[tuple[str, ...]]
    """The columns with the position of a part, int64 in the event time's unit; the first one is its start."""

    def __init__(self, aggregation: WindowAggregation, room: int) -> None:
        self._aggregation = aggregation
        self._room = room
        bounds = [pa.field(name, pa.int64()) for name in (ROWS, *self.bounds)]
        self.schema = pa.schema([*bounds, *aggregation.part_schema])

    def combine(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        aggregation = self._aggregation
        check_keys(batch, aggregation.keys, aggregation.where)
        times = aggregation.time.native(batch, self._room)
        parts = self._parts(aggregation.prepare(to_polars(batch.select(aggregation.columns))), times, batch)
        return from_polars(parts.select(self.schema.names), self.schema, aggregation.where)

    @abstractmethod
    def _parts(self, frame: pl.DataFrame, times: Int64s, batch: pa.RecordBatch) -> pl.DataFrame:
        """Reduce prepared rows to parts with the columns of `schema`. `batch`: the same rows with all columns."""


COUNT: Final[Mapping[str, DenseGroupBy]] = {ROWS: DenseGroupBy("count")}
"""What makes `ROWS`."""
