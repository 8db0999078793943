"""Small real jobs for tests of the runtime: numbers, exchanged by key, counted at the sink."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa

from midstream.connectors.memory.collect_sink import CollectSink
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.coordinator.events import JobPlan
from midstream.engine.core.config import JobConfig
from midstream.engine.core.job_pickle import pickled
from midstream.engine.graph.job_graph import Edge, JobGraph, OperatorSpec, Partitioning, SourceSpec, Vertex
from midstream.engine.operators.base import Operator, OperatorContext, Output
from midstream.engine.operators.sink_operator import SinkOperator
from midstream.engine.operators.source_api import Discovery, DiscoveryContext, Source, Split, SplitReader

SCHEMA = pa.schema([("key", pa.int64()), ("n", pa.int64())])


class FailsAt(Operator):
    """Hands everything on, but for row `n`, at which it raises; in the first attempt only, unless `always`."""

    def __init__(self, n: int, always: bool) -> None:
        self._n = n
        self._always = always

    def open(self, context: OperatorContext, out: Output) -> None:
        self._armed = self._always or context.attempt == 0
        self._out = out

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        if self._armed and self._n in batch.column(1).to_pylist():
            raise ValueError(f"row {self._n} is bad")
        self._out.emit(batch)


class Sleeps(Operator):
    """Hands everything on; before the batch with row `n` it takes its time, once."""

    def __init__(self, n: int, seconds: float) -> None:
        self._n = n
        self._seconds = seconds

    def open(self, context: OperatorContext, out: Output) -> None:
        self._out = out

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        if self._n in batch.column(1).to_pylist():
            time.sleep(self._seconds)
        self._out.emit(batch)


class Witness(Operator):
    """Writes at once, into files whose names begin with `path`, what it has seen, and hands nothing on."""

    def __init__(self, path: str) -> None:
        self._path = path

    def open(self, context: OperatorContext, out: Output) -> None:
        self._file = open(f"{self._path}-{context.subtask}", "ab", buffering=0)  # noqa: SIM115 - closed with the task

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        self._file.write(batch.column(1).to_numpy().tobytes())

    def close(self) -> None:
        self._file.close()


class Held(Source):
    """A bounded source whose job cannot end too early: a split gives its `first` rows, the others once `until_there` is.

    Of a source whose offsets count rows.
    """

    def __init__(self, source: Source, until_there: Path, *, first: int) -> None:
        self.schema = source.schema
        self.rows_per_s = source.rows_per_s
        self._source = source
        self._until_there = until_there
        self._first = first

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        return self._source.discover(position, context)

    def readers_max(self, parallelism: int) -> int:
        return self._source.readers_max(parallelism)

    def open_split(self, split: Split) -> SplitReader:
        return _HeldReader(self._source.open_split(split), self._until_there, self._first, split.offset, self.schema)


class _HeldReader(SplitReader):
    def __init__(self, reader: SplitReader, until_there: Path, first: int, offset: int, schema: pa.Schema) -> None:
        self._reader = reader
        self._until_there = until_there
        self._first = first
        self._offset = offset
        self._none = pa.RecordBatch.from_pylist([], schema=schema)

    def read(self, rows_max: int) -> tuple[pa.RecordBatch, int] | None:
        if not self._until_there.exists():
            rows_max = min(rows_max, self._first - self._offset)
        if rows_max <= 0:
            return self._none, self._offset
        found = self._reader.read(rows_max)
        if found is not None:
            self._offset = found[1]
        return found

    def close(self) -> None:
        self._reader.close()


class NumbersJob:
    """`count` rows (None: endless) from source to sink over a keyed exchange."""

    def __init__(
        self,
        count: int | None,
        parallelism: int = 2,
        *,
        rows_per_s: float | None = None,
        fails_at: int | None = None,
        fails_always: bool = False,
        sleeps_at: tuple[int, float] | None = None,
        witness: Path | None = None,
        **config: Any,
    ) -> None:
        source = GeneratorSource(
            lambda index: {"key": index % 97, "n": index}, count, schema=SCHEMA, rows_per_s=rows_per_s
        )
        self.sink = CollectSink()
        self.sink.validate(SCHEMA, False)
        operators = []
        if fails_at is not None:
            operators.append(OperatorSpec("fails", "fails", FailsAt(fails_at, fails_always)))
        if sleeps_at is not None:
            operators.append(OperatorSpec("slow", "slow", Sleeps(*sleeps_at)))
        if witness is not None:
            operators.append(OperatorSpec("witness", "witness", Witness(str(witness))))
        operators.append(OperatorSpec("sink", "sink", SinkOperator("sink", self.sink, SCHEMA), self.sink))
        self.graph = JobGraph(
            (
                Vertex(0, parallelism, SourceSpec("numbers", "numbers", source), ()),
                Vertex(1, parallelism, None, tuple(operators)),
            ),
            (Edge(0, 0, 1, Partitioning.KEYED, SCHEMA, ("key",)),),
            128,
        )
        self.config = JobConfig(
            **{"name": "numbers", "parallelism": parallelism, "checkpoint_interval_s": 0.2, **config}
        ).check()

    def plan(self, restore: str | None = None) -> JobPlan:
        import jobs

        cloudpickle.register_pickle_by_value(jobs)  # slots of Spark do not find the tests
        return JobPlan(secrets.token_hex(4), self.graph, pickled(self.graph), self.config, restore)

    def numbers(self) -> list[int]:
        return [int(n) for n in np.sort(self.sink.table().column("n").to_numpy())]


def check_gapless(numbers: Iterable[int], streams: int = 16) -> None:
    """They are what a generator without an end has given: of each of its streams all from its start on, each once."""
    found = np.sort(np.fromiter(numbers, np.int64))
    assert len(found)
    for stream in range(streams):
        own = found[found % streams == stream]
        np.testing.assert_array_equal(own, stream + streams * np.arange(len(own)), f"of stream {stream}")
