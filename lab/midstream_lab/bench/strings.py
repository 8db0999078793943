"""Measures keyed tumbling windows of rows that are mostly text: string keys, and 100 characters that the window needs."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from midstream.api.environment import Environment
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.batches import to_polars
from midstream.engine.operators.watermarks import WatermarkStrategy
from midstream.engine.operators.windows.aggregates import Count, Max, Sum
from midstream.engine.operators.windows.window_factory import tumbling
from midstream_lab.bench.events import KEYS, WINDOW_MS, Events
from midstream_lab.bench.measuring import Measured, Slots, measure, require
from midstream_lab.bench.summing_sink import SummingSink, Vector, column_sum
from midstream_lab.bench.window import CHECKPOINT_INTERVAL_S, PARALLELISM, WARM_UP_PER_SUBTASK

EVENTS = 10_000_000
PAYLOADS: Final = 65_536
PAYLOAD_BYTES: Final = 100
DIGITS: Final = 4
SCHEMA = schema_of(
    [("ts", pa.timestamp("ms")), ("key", pa.large_string()), ("value", pa.float64()), ("payload", pa.large_string())]
)
_NAMES: Final = pa.array([f"user-{key:06d}" for key in range(KEYS)], pa.large_string())
_PAYLOADS: Final = pa.array(
    [f"{number:0{DIGITS}x}" * (PAYLOAD_BYTES // DIGITS) for number in range(PAYLOADS)], pa.large_string()
)


class StringsResult(Measured, frozen=True, kw_only=True):
    keys: int = KEYS
    payload_bytes: int = PAYLOAD_BYTES
    window_s: float = WINDOW_MS / 1000
    result_rows: int


class Texts(Events):
    """`Events` whose key is `user-000000` to `user-009999`; `payload` is `i % 65536` as 4 hex digits, 25 times."""

    def __call__(self, i: npt.NDArray[np.int64]) -> pa.RecordBatch:
        columns = super().__call__(i)
        texts = [
            _NAMES.take(columns.column("key")),
            columns.column("value"),
            _PAYLOADS.take(pa.array(i % PAYLOADS, pa.int64())),
        ]
        return pa.RecordBatch.from_arrays([columns.column("ts"), *texts], schema=SCHEMA)

    def numbers_sum(self) -> int:
        """Return the sum, over keys and windows, of the number that the largest payload repeats."""
        i = np.arange(self.count)
        frame = pl.DataFrame({"window": self.ms(i) // WINDOW_MS, "key": self.key(i), "number": i % PAYLOADS})
        return int(frame.group_by("window", "key").agg(pl.col("number").max())["number"].sum())


class Totals:
    """Counts rows, and in them events, values, characters of payload, and the numbers that payloads repeat."""

    def __call__(self, batch: pa.RecordBatch) -> Vector:
        payload = to_polars(batch.select(["last"]))["last"]
        numbers = payload.str.slice(0, DIGITS).str.to_integer(base=16).sum()
        characters = payload.str.len_bytes().sum()
        return np.array([batch.num_rows, column_sum(batch, "n"), column_sum(batch, "total"), characters, numbers])


def run(slots: Slots, *, events: int = EVENTS, parallelism: int = PARALLELISM) -> StringsResult:
    """Run the benchmark. Raises InvariantError for a wrong result."""
    workload = Texts(events, lanes=parallelism)
    sink = SummingSink(Totals(), 5)

    def build(env: Environment, workload: Texts) -> None:
        (
            env.source(GeneratorSource(workload, workload.count, schema=SCHEMA))
            .with_watermarks("ts", WatermarkStrategy.monotonous())
            .key_by("key")
            .window(tumbling(f"{WINDOW_MS} ms"))
            .aggregate(n=Count(), total=Sum("value"), last=Max("payload"))
            .sink(sink)
        )

    warm_up = Texts(WARM_UP_PER_SUBTASK * parallelism, lanes=parallelism)
    run = measure("strings", slots, parallelism, CHECKPOINT_INTERVAL_S, build, workload, warm_up)
    rows, counted, total, characters, numbers = sink.total.tolist()
    require("the number of rows", workload.pairs(), rows)
    require("the sum of all counts", events, counted)
    require("the sum of all sums", workload.value_sums[0], total)
    require("the length of all payloads", PAYLOAD_BYTES * rows, characters)
    require("the sum of all payloads", workload.numbers_sum(), numbers)
    return StringsResult(result_rows=int(rows), **run.figures("strings", slots, events, parallelism))
