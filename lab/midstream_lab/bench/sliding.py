"""Measures keyed sliding windows over very many keys: the cost of a key in each of its windows, in time and memory."""

from __future__ import annotations

from typing import Final

from midstream.api.environment import Environment
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.operators.watermarks import WatermarkStrategy
from midstream.engine.operators.windows.aggregates import Count, Sum
from midstream.engine.operators.windows.window_factory import sliding
from midstream_lab.bench.events import Events
from midstream_lab.bench.measuring import Measured, Slots, measure, require
from midstream_lab.bench.summing_sink import summing
from midstream_lab.bench.window import CHECKPOINT_INTERVAL_S, PARALLELISM, WARM_UP_PER_SUBTASK

EVENTS = 10_000_000
KEYS = 1_000_000
SIZE_MS: Final = 10_000
SLIDE_MS: Final = 2_000
WINDOWS: Final = SIZE_MS // SLIDE_MS
"""The number of windows that contain each event."""


class SlidingResult(Measured, frozen=True, kw_only=True):
    keys: int
    window_s: float = SIZE_MS / 1000
    slide_s: float = SLIDE_MS / 1000
    result_rows: int
    base_memory_mb: float
    """`memory_mb` of the same job with one key."""
    bytes_per_key_and_window: float
    """The additional memory of the slots, divided by `keys` and by the windows that a key is in at a time."""


def run(slots: Slots, *, events: int = EVENTS, parallelism: int = PARALLELISM, keys: int = KEYS) -> SlidingResult:
    """Run the benchmark. Raises InvariantError for a wrong result."""
    workload = Events(events, lanes=parallelism, keys=keys)
    sink = summing("n", "total")

    def build(env: Environment, workload: Events) -> None:
        (
            env.source(GeneratorSource(workload, workload.count, schema=workload.schema))
            .with_watermarks("ts", WatermarkStrategy.monotonous())
            .key_by("key")
            .window(sliding(f"{SIZE_MS} ms", f"{SLIDE_MS} ms"))
            .aggregate(n=Count(), total=Sum("value"))
            .sink(sink)
        )

    warm_up = Events(WARM_UP_PER_SUBTASK * parallelism, lanes=parallelism, keys=1)
    one_key = Events(events, lanes=parallelism, keys=1)
    # in this order: a process that is used again keeps the peak of what it did before
    base = measure("sliding", slots, parallelism, CHECKPOINT_INTERVAL_S, build, one_key, warm_up)
    run = measure("sliding", slots, parallelism, CHECKPOINT_INTERVAL_S, build, workload, warm_up)
    rows, counted, total = sink.total.tolist()
    require("the number of rows", workload.pairs(slide_ms=SLIDE_MS), rows)
    require("the sum of all counts", WINDOWS * events, counted)
    require("the sum of all sums", WINDOWS * workload.value_sums[0], total)
    beyond = max(0, sum(run.peak_bytes) - sum(base.peak_bytes))
    return SlidingResult(
        keys=keys,
        result_rows=int(rows),
        base_memory_mb=base.memory_mb,
        bytes_per_key_and_window=round(beyond / (keys * WINDOWS), 1),
        **run.figures("sliding", slots, events, parallelism),
    )
