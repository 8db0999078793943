"""The keyed exchange alone: split by key, queue, serialise, send, receive, and nothing done with the rows."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import pyarrow as pa

from midstream.api.environment import Environment
from midstream.bench.events import KEYS, Events
from midstream.bench.measuring import Slots, measure, require
from midstream.bench.summing_sink import SummingSink, Vector, keyed_sink
from midstream.connectors.generator import GeneratorSource

EVENTS = 20_000_000
PARALLELISM = 2
WARM_UP_EVENTS = 400_000


class ExchangeResult(msgspec.Struct, frozen=True, kw_only=True):
    benchmark: str = "exchange"
    events: int
    parallelism: int
    slots: str
    keys: int = KEYS
    row_bytes: float
    """As Arrow, in memory."""
    seconds: float
    events_per_s: int
    mb_per_s: float
    job_start_s: float
    slot_memory_mb: float
    correct: bool = True
    """Every event arrived once: their number was compared."""


@dataclass(frozen=True, slots=True)
class RowsAndBytes:
    """How much arrived."""

    def __call__(self, batch: pa.RecordBatch) -> Vector:
        return np.array([float(batch.num_rows), float(batch.nbytes)])


def run(events: int | None, slots: Slots) -> ExchangeResult:
    """`events`: an even number. Raises InvariantError when rows are missing or came twice."""
    workload = Events(EVENTS if events is None else events)
    sink = SummingSink(RowsAndBytes(), 2)

    def build(env: Environment, workload: Events) -> None:
        keyed_sink(env.source(GeneratorSource(workload, workload.count)).key_by("key"), sink)

    run = measure("exchange", slots, PARALLELISM, None, build, workload, Events(WARM_UP_EVENTS))
    rows, size_bytes = sink.total.tolist()
    require("the number of rows that arrived", workload.count, rows)
    return ExchangeResult(
        events=workload.count,
        parallelism=PARALLELISM,
        slots=slots,
        row_bytes=round(size_bytes / rows, 1),
        seconds=round(run.run_s, 3),
        events_per_s=round(workload.count / run.run_s),
        mb_per_s=round(size_bytes / run.run_s / 1e6, 1),
        job_start_s=round(run.start_s, 3),
        slot_memory_mb=run.slot_memory_mb,
    )
