"""Measures a function with state and timers per key: a running total that is cleared after an hour of event time."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.api.environment import Environment
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.operators.functions.process_functions import KeyedProcessFunction, ProcessContext
from midstream.engine.operators.watermarks import WatermarkStrategy
from midstream.engine.state.keyed_states import ValueState
from midstream_lab.bench.events import Events
from midstream_lab.bench.measuring import Measured, Slots, measure, require
from midstream_lab.bench.summing_sink import summing
from midstream_lab.bench.window import CHECKPOINT_INTERVAL_S, PARALLELISM

EVENTS = 4_000_000
KEYS: Final = 1_000_000
STRETCH: Final = 360
"""How much faster event time passes than in the other workloads: four million events are four hours."""
KEPT: Final = timedelta(hours=1)
WARM_UP_PER_SUBTASK = 20_000
SCHEMA = schema_of([("key", pa.int64()), ("total", pa.float64())])


class KeyedProcessResult(Measured, frozen=True, kw_only=True):
    keys: int
    result_rows: int


class Hours(Events):
    """Events that span hours."""

    def ms(self, i: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return super().ms(i) * STRETCH


class Totals(KeyedProcessFunction):
    """The sum of a key's values within an hour of its first one."""

    total: ValueState[float | None] = ValueState(pa.float64())

    def process(self, row: dict[str, Any], ctx: ProcessContext) -> None:
        total = self.total.value
        if total is None:
            total = 0.0
            ctx.timers.event_time(row["ts"] + KEPT)
        self.total.value = total + row["value"]

    def on_timer(self, time: datetime, ctx: ProcessContext) -> Iterator[dict[str, Any]]:
        yield {"key": ctx.key, "total": self.total.value}
        self.total.clear()


def run(slots: Slots, *, events: int = EVENTS, parallelism: int = PARALLELISM, keys: int = KEYS) -> KeyedProcessResult:
    """Run the benchmark. Raises InvariantError for a wrong result."""
    workload = Hours(events, lanes=parallelism, keys=keys)
    sink = summing("total")

    def build(env: Environment, workload: Events) -> None:
        (
            env.source(GeneratorSource(workload, workload.count, schema=workload.schema))
            .with_watermarks("ts", WatermarkStrategy.monotonous())
            .key_by("key")
            .process(Totals(), schema=SCHEMA)
            .sink(sink)
        )

    warm_up = Hours(WARM_UP_PER_SUBTASK * parallelism, lanes=parallelism, keys=keys)
    run = measure("keyed_process", slots, parallelism, CHECKPOINT_INTERVAL_S, build, workload, warm_up)
    rows, total = sink.total.tolist()
    require("the sum of all totals", workload.value_sums[0], total)
    figures = run.figures("keyed_process", slots, events, parallelism)
    return KeyedProcessResult(keys=keys, result_rows=int(rows), **figures)
