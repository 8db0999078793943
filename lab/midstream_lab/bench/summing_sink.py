"""A sink that sums a vector per batch: exactly what a benchmark needs of its rows, exactly once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from midstream.api.keyed_streams import KeyedStream
from midstream.engine.operators.sink_api import Committer, CommitterContext, Sink, SinkWriter, WriterContext
from midstream.engine.operators.sink_operator import SinkOperator

Vector: TypeAlias = npt.NDArray[np.float64]
Measure: TypeAlias = Callable[[pa.RecordBatch], Vector]


class _Part(msgspec.Struct, frozen=True):
    """The sums of one writer between two checkpoints; `id` is unique."""

    id: str
    vector: bytes


class SummingSink(Sink):
    """Sums vectors. `measure(batch)` returns a float64 vector of `length`; `total` is the sum over all committed
    batches.

    Integers are exact up to 2**53. `measure` runs on the slots' loop thread and must pickle.
    """

    def __init__(self, measure: Measure, length: int) -> None:
        self._measure = measure
        self._length = length
        self._parts: dict[str, Vector] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parts": {}}  # results stay on the driver

    @property
    def total(self) -> Vector:
        """The total, on the driver, once the job has finished."""
        total: Vector = np.sum([np.zeros(self._length), *self._parts.values()], axis=0)
        return total

    def writer(self, context: WriterContext) -> SinkWriter:
        return _Adding(self._measure, self._length, f"{context.attempt}/{context.subtask}")

    def committer(self, context: CommitterContext) -> Committer:
        self._parts = {}
        return _Gathering(self._parts)


class _Adding(SinkWriter):
    def __init__(self, measure: Measure, length: int, id: str) -> None:
        self._measure = measure
        self._id = id
        self._sum = np.zeros(length)
        self._dirty = False

    def write(self, batch: pa.RecordBatch) -> None:
        self._sum += self._measure(batch)
        self._dirty = True

    def prepare(self, checkpoint_id: int) -> Callable[[], Sequence[bytes]] | None:
        if not self._dirty:
            return None
        part = _Part(f"{self._id}/{checkpoint_id}", self._sum.tobytes())
        self._sum = np.zeros_like(self._sum)
        self._dirty = False
        return lambda: (msgspec.msgpack.encode(part),)


class _Gathering(Committer):
    """Gathers parts; a part that is committed again replaces itself."""

    def __init__(self, parts: dict[str, Vector]) -> None:
        self._parts = parts

    def commit(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        for encoded in committables:
            part = msgspec.msgpack.decode(encoded, type=_Part)
            self._parts[part.id] = np.frombuffer(part.vector)


def keyed_sink(stream: KeyedStream, sink: Sink) -> None:
    """Add `sink` directly after the keyed exchange, which only a benchmark needs, so the API does not offer it."""
    core = stream.core
    core.program.add("sink", core.inputs(), lambda name: SinkOperator(name, sink, core.schema), sink=sink)


@dataclass(frozen=True, slots=True)
class Sums:
    """Counts rows, and sums each of `columns`."""

    columns: Sequence[str]

    def __call__(self, batch: pa.RecordBatch) -> Vector:
        return np.array([batch.num_rows, *(column_sum(batch, name) for name in self.columns)], dtype=np.float64)


def summing(*columns: str) -> SummingSink:
    """Return a sink whose total has the number of rows, then the sums."""
    return SummingSink(Sums(columns), 1 + len(columns))


def column_sum(batch: pa.RecordBatch, name: str) -> float:
    """Return the sum of a column: of numbers, of the lengths of texts in bytes, of times in their unit; 0 for no rows."""
    column: Any = batch.column(name)  # of one of several types
    if pa.types.is_large_string(column.type):
        column = pc.binary_length(column)
    elif pa.types.is_timestamp(column.type):
        column = column.view(pa.int64())
    return float(pc.sum(column).as_py() or 0)
