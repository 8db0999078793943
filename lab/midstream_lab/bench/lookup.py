"""Measures `map_async`: a lookup that takes 50 ms for each row, with 1,000 rows of a subtask in flight."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from midstream.api.environment import Environment
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.operators.watermarks import WatermarkStrategy
from midstream_lab.bench.events import Events
from midstream_lab.bench.measuring import Measured, Slots, measure, require
from midstream_lab.bench.summing_sink import summing
from midstream_lab.bench.window import CHECKPOINT_INTERVAL_S, PARALLELISM

EVENTS = 400_000
WARM_UP_PER_SUBTASK = 2_000
CALL_S: Final = 0.05
CAPACITY: Final = 1_000


class LookupResult(Measured, frozen=True, kw_only=True):
    call_ms: float = CALL_S * 1000
    capacity: int = CAPACITY
    """Rows in flight in each subtask. At most this many times 1,000 / call_ms rows per second."""


async def looked_up(row: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(CALL_S)
    return row


def run(slots: Slots, *, events: int = EVENTS, parallelism: int = PARALLELISM) -> LookupResult:
    """Run the benchmark. Raises InvariantError for a wrong result."""
    workload = Events(events, lanes=parallelism)
    sink = summing("key")

    def build(env: Environment, workload: Events) -> None:
        (
            env.source(GeneratorSource(workload, workload.count, schema=workload.schema))
            .with_watermarks("ts", WatermarkStrategy.monotonous())
            .map_async(looked_up, capacity=CAPACITY)
            .sink(sink)
        )

    warm_up = Events(WARM_UP_PER_SUBTASK * parallelism, lanes=parallelism)
    run = measure("lookup", slots, parallelism, CHECKPOINT_INTERVAL_S, build, workload, warm_up)
    rows, _ = sink.total.tolist()
    require("the number of rows", events, rows)
    return LookupResult(**run.figures("lookup", slots, events, parallelism))
