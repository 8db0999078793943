"""Measures the keyed exchange alone: split by key, queue, serialise, send, receive, and nothing done with the rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from midstream.api.environment import Environment
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream_lab.bench.events import KEYS, Events
from midstream_lab.bench.measuring import Measured, Slots, measure, require
from midstream_lab.bench.summing_sink import SummingSink, Vector, keyed_sink

EVENTS = 20_000_000
PARALLELISM = 2
WARM_UP_PER_SUBTASK = 200_000


class ExchangeResult(Measured, frozen=True, kw_only=True):
    keys: int = KEYS
    row_bytes: float
    """The size of a row in Arrow, in memory."""
    mb_per_s: float


@dataclass(frozen=True, slots=True)
class RowsAndBytes:
    """Counts rows and bytes on arrival."""

    def __call__(self, batch: pa.RecordBatch) -> Vector:
        return np.array([float(batch.num_rows), float(batch.nbytes)])


def run(slots: Slots, *, events: int = EVENTS, parallelism: int = PARALLELISM) -> ExchangeResult:
    """Run the benchmark. Raises InvariantError if rows are missing or duplicated."""
    workload = Events(events, lanes=parallelism)
    sink = SummingSink(RowsAndBytes(), 2)

    def build(env: Environment, workload: Events) -> None:
        source = GeneratorSource(workload, workload.count, schema=workload.schema)
        keyed_sink(env.source(source).key_by("key"), sink)

    warm_up = Events(WARM_UP_PER_SUBTASK * parallelism, lanes=parallelism)
    run = measure("exchange", slots, parallelism, None, build, workload, warm_up)
    rows, size_bytes = sink.total.tolist()
    require("the number of rows that arrived", events, rows)
    return ExchangeResult(
        row_bytes=round(size_bytes / rows, 1),
        mb_per_s=round(size_bytes / run.run_s / 1e6, 1),
        **run.figures("exchange", slots, events, parallelism),
    )
