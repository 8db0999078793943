"""Slow functions behind a rebalance, on two slots: rows/s, and how long aligned checkpoints wait for them.

    .venv/bin/python benchmarks/slow_functions.py

One takes 100 us a row, one 20 ms a call and one 150 ms a call, however many rows; batches as they are by default.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import polars as pl

from midstream import CollectSink, DataStream, Environment, no_restart
from midstream_lab.bench.checkpoint import await_running, take
from midstream_lab.bench.measuring import start_on

SETTLED_S = 6.0
"""Sizes of batches and queues have found their place; a time, as it is what comes of them that is measured."""
MEASURED_S = 4.0
CHECKPOINTS = 5


def busy(row: dict[str, Any]) -> dict[str, Any]:
    end_s = time.perf_counter() + 1e-4
    while time.perf_counter() < end_s:
        pass
    return row


def dear(call_s: float) -> Callable[[pl.DataFrame], pl.DataFrame]:
    def work(frame: pl.DataFrame) -> pl.DataFrame:
        time.sleep(call_s)
        return frame

    return work


CASES: dict[str, Callable[[DataStream], DataStream]] = {
    "100 us a row": lambda rows: rows.map(busy),
    "20 ms a call": lambda rows: rows.map_batches(dear(0.02)),
    "150 ms a call": lambda rows: rows.map_batches(dear(0.15)),
}


def measure(name: str, slow: Callable[[DataStream], DataStream]) -> None:
    with tempfile.TemporaryDirectory(prefix="midstream-bench-") as directory:
        env = Environment(
            "slow-function",
            parallelism=2,
            checkpoint_dir=directory,
            checkpoint_interval=None,
            aligned_timeout=None,
            restart=no_restart(),
        )
        rows = env.generate(lambda i: {"n": i}, schema={"n": int}).rebalance()
        slow(rows).filter(pl.col("n") < 0).sink(CollectSink())
        job = start_on("process", env, 2)
        try:
            await_running(job)
            time.sleep(SETTLED_S)
            before = job.status()
            time.sleep(MEASURED_S)
            after = job.status()
            seconds = (after.now_ms - before.now_ms) / 1000
            read = after.vertices[1].operators[0].rows_in - before.vertices[1].operators[0].rows_in
            took_s = take(job, CHECKPOINTS)
        finally:
            job.cancel("measured")
    figures = {
        "function": name,
        "rows_per_s": round(read / seconds),
        "aligned_s_median": round(statistics.median(took_s), 3),
        "aligned_s_max": round(max(took_s), 3),
    }
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    for case, function in CASES.items():
        measure(case, function)
