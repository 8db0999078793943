"""Measures the time from a row's creation, through a keyed exchange, to its sink, at a fixed rate."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.api.environment import Environment
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.core.errors import InvariantError
from midstream_lab.bench.measuring import Measured, Slots, measure, require
from midstream_lab.bench.summing_sink import SummingSink, Vector, keyed_sink

RATE_PER_S = 20_000
SECONDS = 20
WARM_UP_SHARE = 0.1
"""The share of rows at the beginning that are not counted."""
PARALLELISM = 2
WARM_UP_EVENTS = 2_000
CHECKPOINT_INTERVAL_S = 1.0
BUCKETS = 1024
GROWTH = 1.02
"""The histogram's resolution: bucket b holds latencies from GROWTH**b to GROWTH**(b + 1) µs, exact to 2 %, up to 10
min.
"""
SHORTFALL_MAX = 0.1
"""If the rate is missed by more than this, latencies are those of an overloaded job."""

SCHEMA = pa.schema([("i", pa.int64()), ("key", pa.int64()), ("created_us", pa.int64())])


class LatencyResult(Measured, frozen=True, kw_only=True):
    events_counted: int
    rate_per_s: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class Stamped:
    """`count` rows with the time of their creation."""

    count: int

    def __call__(self, i: npt.NDArray[np.int64]) -> pa.RecordBatch:
        made_us = np.full(len(i), time.time_ns() // 1000)
        return pa.RecordBatch.from_arrays([pa.array(i), pa.array(i % 1000), pa.array(made_us)], schema=SCHEMA)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Latencies in buckets of 2 %, for rows after the warm-up of their split; the last place counts all rows."""

    count: int

    def __call__(self, batch: pa.RecordBatch) -> Vector:
        taken_us = time.time_ns() // 1000 - batch.column("created_us").to_numpy()
        split_rows = -(-self.count // PARALLELISM)
        warm = batch.column("i").to_numpy() % split_rows >= WARM_UP_SHARE * split_rows
        bucket = np.log(np.maximum(taken_us[warm], 1)) / np.log(GROWTH)
        counts = np.zeros(BUCKETS + 1)
        counts[:BUCKETS] = np.bincount(np.minimum(bucket.astype(np.int64), BUCKETS - 1), minlength=BUCKETS)
        counts[BUCKETS] = batch.num_rows
        return counts


def run(slots: Slots, *, events: int | None = None, rate: int = RATE_PER_S) -> LatencyResult:
    """Run the benchmark at `rate` rows/s, for 20 s by default.

    Raises InvariantError if rows are missing or the rate is not reached.
    """
    workload = Stamped(SECONDS * rate if events is None else events)
    sink = SummingSink(Histogram(workload.count), BUCKETS + 1)

    def build(env: Environment, workload: Stamped) -> None:
        source = GeneratorSource(workload, workload.count, schema=SCHEMA, rows_per_s=rate)
        keyed_sink(env.source(source).key_by("key"), sink)

    run = measure("latency", slots, PARALLELISM, CHECKPOINT_INTERVAL_S, build, workload, Stamped(WARM_UP_EVENTS))
    counts, arrived = sink.total[:BUCKETS], float(sink.total[BUCKETS])
    require("the number of rows that arrived", workload.count, arrived)
    reached_per_s = workload.count / run.run_s
    if reached_per_s < rate * (1 - SHORTFALL_MAX) and events is None:
        raise InvariantError(f"only {reached_per_s:,.0f} of {rate:,} rows/s were reached: the machine is too busy")
    return LatencyResult(
        events_counted=int(counts.sum()),
        rate_per_s=rate,
        p50_ms=percentile_ms(counts, 0.5),
        p90_ms=percentile_ms(counts, 0.9),
        p99_ms=percentile_ms(counts, 0.99),
        p999_ms=percentile_ms(counts, 0.999),
        max_ms=percentile_ms(counts, 1.0),
        **run.figures("latency", slots, workload.count, PARALLELISM),
    )


def percentile_ms(counts: Vector, share: float) -> float:
    """Return the upper bound of the bucket that the `share` of all counted rows reaches."""
    bucket = int(np.searchsorted(np.cumsum(counts), share * counts.sum()))
    return round(float(GROWTH ** (bucket + 1)) / 1000, 2)
