"""Measures a function per row, dict to dict, before keyed windows: the cost of plain Python."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa

from midstream.api.environment import Environment
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.operators.watermarks import WatermarkStrategy
from midstream.engine.operators.windows.aggregates import Count, Sum
from midstream.engine.operators.windows.window_factory import tumbling
from midstream_lab.bench.events import VALUES, WINDOW_MS, Events
from midstream_lab.bench.measuring import Measured, Slots, measure, require
from midstream_lab.bench.summing_sink import summing
from midstream_lab.bench.window import CHECKPOINT_INTERVAL_S, PARALLELISM

EVENTS = 4_000_000
WARM_UP_PER_SUBTASK = 20_000
TOLERANCE: Final = 1e-6
NAMES: Final = 1000
LENGTHS: Final = (6, 7, 8)
CHUNK: Final = 1_000_000
SCHEMA = schema_of([("ts", pa.timestamp("ms")), ("name", pa.large_string()), ("score", pa.float64())])


class UdfResult(Measured, frozen=True, kw_only=True):
    names: int = NAMES
    """The number of keys after the function."""
    window_s: float = WINDOW_MS / 1000
    result_rows: int


def label(row: dict[str, Any]) -> dict[str, Any]:
    name = f"user-{row['key'] % NAMES}"
    return {"ts": row["ts"], "name": name, "score": round(row["value"] * 1.07 + len(name), 2)}


def score_sum(workload: Events) -> float:
    """Return the sum of all scores, from how often each pair of value and name length occurs."""
    pairs = np.zeros(VALUES * len(LENGTHS), np.int64)
    for start in range(0, workload.count, CHUNK):
        i = np.arange(start, min(start + CHUNK, workload.count))
        number = workload.key(i) % NAMES
        longer = (number >= 10).astype(np.int64) + (number >= 100)
        pairs += np.bincount(longer * VALUES + i % VALUES, minlength=len(pairs))
    # half of these are ties but for the last bit, which numpy's round() ignores
    scores = [round(n * 0.5 * 1.07 + length, 2) for length in LENGTHS for n in range(VALUES)]
    return float(pairs @ np.array(scores))


def run(slots: Slots, *, events: int = EVENTS, parallelism: int = PARALLELISM) -> UdfResult:
    """Run the benchmark. Raises InvariantError for a wrong result."""
    workload = Events(events, lanes=parallelism)
    sink = summing("n", "total")

    def build(env: Environment, workload: Events) -> None:
        (
            env.source(GeneratorSource(workload, workload.count, schema=workload.schema))
            .with_watermarks("ts", WatermarkStrategy.monotonous())
            .map(label, schema=SCHEMA)
            .key_by("name")
            .window(tumbling(f"{WINDOW_MS} ms"))
            .aggregate(n=Count(), total=Sum("score"))
            .sink(sink)
        )

    warm_up = Events(WARM_UP_PER_SUBTASK * parallelism, lanes=parallelism)
    run = measure("udf", slots, parallelism, CHECKPOINT_INTERVAL_S, build, workload, warm_up)
    rows, counted, total = sink.total.tolist()
    require("the number of rows", workload.pairs(keys=NAMES), rows)
    require("the sum of all counts", events, counted)
    require("the sum of all scores", score_sum(workload), total, TOLERANCE)
    return UdfResult(result_rows=int(rows), **run.figures("udf", slots, events, parallelism))
