"""Measures keyed tumbling windows: sum and count per key and 10 s, after a real exchange."""

from __future__ import annotations

from midstream.api.environment import Environment
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.operators.watermarks import WatermarkStrategy
from midstream.engine.operators.windows.aggregates import AnyAggregate, Count, Sum
from midstream.engine.operators.windows.window_factory import tumbling
from midstream_lab.bench.events import KEYS, WINDOW_MS, Events
from midstream_lab.bench.measuring import Measured, Slots, measure, require
from midstream_lab.bench.summing_sink import summing

EVENTS = 20_000_000
PARALLELISM = 2
WARM_UP_PER_SUBTASK = 200_000
CHECKPOINT_INTERVAL_S = 1.0


class WindowResult(Measured, frozen=True, kw_only=True):
    keys: int
    columns: int
    window_s: float = WINDOW_MS / 1000
    result_rows: int


def run(
    slots: Slots, *, events: int = EVENTS, parallelism: int = PARALLELISM, keys: int = KEYS, columns: int = 1
) -> WindowResult:
    """Run the benchmark. `columns`: the number of columns summed. Raises InvariantError for a wrong result."""
    workload = Events(events, lanes=parallelism, keys=keys, columns=columns)
    warm_up = Events(WARM_UP_PER_SUBTASK * parallelism, lanes=parallelism, keys=keys, columns=columns)
    sink = summing("n", *workload.values)

    def build(env: Environment, workload: Events) -> None:
        sums: dict[str, AnyAggregate] = {name: Sum(name) for name in workload.values}
        (
            env.source(GeneratorSource(workload, workload.count, schema=workload.schema))
            .with_watermarks("ts", WatermarkStrategy.monotonous())
            .key_by("key")
            .window(tumbling(f"{WINDOW_MS} ms"))
            .aggregate(n=Count(), **sums)
            .sink(sink)
        )

    run = measure("window", slots, parallelism, CHECKPOINT_INTERVAL_S, build, workload, warm_up)
    rows, counted, *sums = sink.total.tolist()
    require("the number of rows", workload.pairs(), rows)
    require("the sum of all counts", events, counted)
    for name, expected, got in zip(workload.values, workload.value_sums, sums, strict=True):
        require(f"the sum of all sums of {name}", expected, got)
    return WindowResult(
        keys=keys, columns=columns, result_rows=int(rows), **run.figures("window", slots, events, parallelism)
    )
