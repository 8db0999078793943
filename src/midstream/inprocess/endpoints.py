"""In-memory ends of a job: sources and event time that are fed from outside, and a sink that keeps its rows."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa

from midstream.engine.core.elements import MIN_WATERMARK_US
from midstream.engine.core.errors import InvariantError
from midstream.engine.operators.base import Operator, OperatorContext, Output
from midstream.engine.operators.sink_api import Sink, SinkWriter, WriterContext
from midstream.engine.operators.source_api import (
    Discovery,
    DiscoveryContext,
    Source,
    Split,
    SplitReader,
    decoded,
    rows_text,
)


class Fed(msgspec.Struct, frozen=True, array_like=True):
    """A split: one batch, by its number, and the position of its first row in the source."""

    number: int
    first_row: int


class FedSource(Source):
    """A source in which each batch fed is a split of its own, and is emitted as it is, without being cut.

    `of`: the source that it replaces. A bounded one without event time holds back that of other inputs until it ends.
    """

    blocking = False

    def __init__(self, name: str, of: Source) -> None:
        self.schema = of.schema
        self.bounded = of.bounded
        self._name = name
        self.fed: dict[int, pa.RecordBatch] = {}
        """The batches that have not been read, by number. Set by the engine when the source is opened."""

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        raise InvariantError(f"the source {self._name!r} is fed, and received a request for its splits")

    def open_split(self, split: Split) -> SplitReader:
        number = decoded(split.payload, Fed, self._name).number
        return _FedReader(None if split.offset else self.fed.pop(number))  # a batch is read as a whole

    def place(self, split: Split, first: int, last: int) -> str:
        begin = decoded(split.payload, Fed, self._name).first_row
        return f"{rows_text(begin + first, begin + last)} of the input {self._name!r}, counted from 0"


class _FedReader(SplitReader):
    def __init__(self, batch: pa.RecordBatch | None) -> None:
        self._batch = batch

    def read(self, rows_max: int) -> tuple[pa.RecordBatch, int] | None:
        batch, self._batch = self._batch, None
        return None if batch is None else (batch, batch.num_rows)


class MarksOperator(Operator):
    """Event time that only the engine advances."""

    makes_watermarks = True
    keeps_splits = True
    keeps_rows = True

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._watermark_us = MIN_WATERMARK_US
        self._out: Output

    def open(self, context: OperatorContext, out: Output) -> None:
        self._out = out

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        self._out.emit(batch)

    def advance_to(self, watermark_us: int) -> None:
        if watermark_us > self._watermark_us:
            self._watermark_us = watermark_us
            self._out.watermark(watermark_us)


class TakingSink(Sink):
    """Keeps the rows of one output, in order of arrival."""

    def __init__(self, output: str) -> None:
        self.output = output
        self.taken: list[pa.RecordBatch] = []
        """One list for all subtasks. Set by the engine when the sink is opened."""

    def __getstate__(self) -> dict[str, Any]:
        return {"output": self.output, "taken": []}

    def writer(self, context: WriterContext) -> SinkWriter:
        return _TakingWriter(self.taken)


class _TakingWriter(SinkWriter):
    def __init__(self, taken: list[pa.RecordBatch]) -> None:
        self._taken = taken

    def write(self, batch: pa.RecordBatch) -> None:
        self._taken.append(batch)
