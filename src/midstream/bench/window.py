"""Keyed tumbling windows: sum and count per key and 10 s, behind a real exchange."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import pyarrow as pa

from midstream.api.environment import Environment
from midstream.bench.events import KEYS, WINDOW_MS, Events
from midstream.bench.measuring import CheckpointFigures, Slots, measure, require
from midstream.bench.summing_sink import SummingSink, Vector, column_sum
from midstream.connectors.generator import GeneratorSource
from midstream.operators.aggregates import Count, Sum
from midstream.operators.watermarks import WatermarkStrategy
from midstream.operators.windows import tumbling

EVENTS = 20_000_000
PARALLELISM = 2
WARM_UP_EVENTS = 400_000
CHECKPOINT_INTERVAL_S = 1.0


class WindowResult(msgspec.Struct, frozen=True, kw_only=True):
    benchmark: str = "window"
    events: int
    parallelism: int
    slots: str
    keys: int = KEYS
    window_s: float = WINDOW_MS / 1000
    result_rows: int
    seconds: float
    """From all tasks running to the job's end, the last checkpoint and commit included."""
    events_per_s: int
    job_start_s: float
    """From the start call, on a warm session, to all tasks running."""
    slot_memory_mb: float
    """The largest resident size of a slot's process, at its peak."""
    checkpoints: CheckpointFigures
    correct: bool = True
    """The sums over all windows were compared with the closed form; a wrong result is an error, not a figure."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Rows, events and values in the results."""

    def __call__(self, batch: pa.RecordBatch) -> Vector:
        return np.array([batch.num_rows, column_sum(batch, "n"), column_sum(batch, "total")])


def run(events: int | None, slots: Slots) -> WindowResult:
    """`events`: an even number. Raises InvariantError when the result is wrong."""
    workload = Events(EVENTS if events is None else events)
    sink = SummingSink(Totals(), 3)

    def build(env: Environment, workload: Events) -> None:
        (
            env.source(GeneratorSource(workload, workload.count))
            .with_watermarks("ts", WatermarkStrategy.monotonous())
            .key_by("key")
            .window(tumbling(f"{WINDOW_MS} ms"))
            .aggregate(n=Count(), total=Sum("value"))
            .sink(sink)
        )

    run = measure("window", slots, PARALLELISM, CHECKPOINT_INTERVAL_S, build, workload, Events(WARM_UP_EVENTS))
    rows, counted, value_sum = sink.total.tolist()
    require("the sum of all counts", workload.count, counted)
    require("the sum of all sums", workload.value_sum, value_sum)
    return WindowResult(
        events=workload.count,
        parallelism=PARALLELISM,
        slots=slots,
        result_rows=int(rows),
        seconds=round(run.run_s, 3),
        events_per_s=round(workload.count / run.run_s),
        job_start_s=round(run.start_s, 3),
        slot_memory_mb=run.slot_memory_mb,
        checkpoints=run.checkpoints,
    )
