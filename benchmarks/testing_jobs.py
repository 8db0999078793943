"""What a test of a job costs: processor time of `testing.run` with ten rows, medians of 30 runs.

python benchmarks/testing_jobs.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from datetime import datetime, timedelta

from midstream import (
    Count,
    DataStream,
    Environment,
    KeyedProcessFunction,
    ValueState,
    WatermarkStrategy,
    testing,
    tumbling,
)

START = datetime(2024, 1, 1)
ROWS = [{"at": START + timedelta(seconds=10 * i), "k": i % 3, "n": i} for i in range(10)]
RUNS = 30


class Counting(KeyedProcessFunction):
    seen = ValueState(default=0)

    def process(self, row: dict[str, object], ctx: object) -> dict[str, object]:
        self.seen.value += 1
        return {"k": row["k"], "seen": self.seen.value}


def timed() -> DataStream:
    return Environment().from_collection(ROWS).with_watermarks("at", WatermarkStrategy.bounded("5 s"))


def mapped() -> DataStream:
    return Environment().from_collection(ROWS).map(lambda row: {**row, "n": row["n"] * 2})


def processed() -> DataStream:
    return timed().key_by("k").process(Counting(), {"k": int, "seen": int})


def windowed() -> DataStream:
    return timed().filter(lambda row: row["n"] != 3).key_by("k").window(tumbling("30 s")).aggregate(n=Count())


def median_ms(make: Callable[[], DataStream]) -> float:
    took = []
    for _ in range(RUNS + 1):
        stream = make()
        began_s = time.process_time()
        testing.run(stream)
        took.append((time.process_time() - began_s) * 1000)
    return statistics.median(took[1:])


if __name__ == "__main__":
    for make in (mapped, processed, windowed):
        print(f"{make.__name__:<10} {median_ms(make):6.1f} ms")
