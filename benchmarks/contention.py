"""What the default `queue_time` costs where cores are scarce: rows/s beside those of full queues, and the checkpoints.

    .venv/bin/python benchmarks/contention.py                     # every case, three rounds: about 20 minutes
    .venv/bin/python benchmarks/contention.py --parallelism 2,16 --beside hogs --rounds 5

An endless generator, a Python function on batches, `key_by` and tumbling windows on slots that are plain processes, with
the default `queue_time` and with None (full queues), alternately in each round. `beside`: nothing; four processes that
compute without end (`hogs`); or a CPU `quota` of half of the cores for all slots (Linux control groups v1, as root).
Checkpoints are aligned and wait for all that is in flight (`aligned_timeout=None`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl
import psutil

from midstream import CollectSink, Count, Environment, Sum, Tuning, WatermarkStrategy, no_restart, tumbling
from midstream_lab.bench.checkpoint import await_running, take
from midstream_lab.bench.measuring import start_on

PARALLELISMS = (2, 4, 8, 16)
QUEUE_TIMES = ("default", "none")
BESIDE = ("nothing", "hogs", "quota")
ROUNDS = 3
HOGS = 4
HOG = "while True: pass"
CPU_GROUPS = Path("/sys/fs/cgroup/cpu")
SETTLED_S = 5.0
SETTLED_PER_SUBTASK_S = 1.0
"""Modules are imported, sizes of batches and queues have found their place; times, as it is what comes of them that is
measured."""
MEASURED_S = 5.0
CHECKPOINTS = 3

Figures: TypeAlias = dict[str, Any]


def event(i: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.generic]]:
    return {"ts": (i // 100).astype("datetime64[ms]"), "key": i * 2654435761 % 10_000, "value": i % 1000 * 0.5}


def priced(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(value=pl.col("value") * 1.07)


@contextlib.contextmanager
def hogs(count: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", HOG]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@contextlib.contextmanager
def quota(pids: Sequence[int]) -> Iterator[None]:
    """All of them together get half of the cores. Raises OSError where this user may not set that."""
    if not pids:
        yield
        return
    group = CPU_GROUPS / f"midstream-contention-{os.getpid()}"
    group.mkdir()
    try:
        period_us = int((group / "cpu.cfs_period_us").read_text())
        (group / "cpu.cfs_quota_us").write_text(str(period_us * (os.cpu_count() or 1) // 2))
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for pid in pids:
            (CPU_GROUPS / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def cpu_s(pids: Sequence[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def build(parallelism: int, directory: str, *, full_queues: bool, rows_per_s: float | None) -> Environment:
    env = Environment(
        "contention",
        parallelism=parallelism,
        checkpoint_dir=directory,
        checkpoint_interval=None,
        aligned_timeout=None,
        restart=no_restart(),
        tuning=Tuning(queue_time=None) if full_queues else None,
    )
    (
        env.generate(event, rows_per_s=rows_per_s)
        .map_batches(priced)
        .with_watermarks("ts", WatermarkStrategy.bounded("1 s"))
        .key_by("key")
        .window(tumbling("10 s"))
        .aggregate(n=Count(), total=Sum("value"))
        .filter(pl.col("n") < 0)
        .sink(CollectSink())
    )
    return env


def measure(parallelism: int, queue_time: str, beside: str, rows_per_s: float | None) -> Figures:
    with tempfile.TemporaryDirectory(prefix="midstream-bench-") as directory:
        env = build(parallelism, directory, full_queues=queue_time == "none", rows_per_s=rows_per_s)
        job = start_on("process", env, parallelism)
        try:
            await_running(job)
            pids = job.status().slot_pids
            with hogs(HOGS if beside == "hogs" else 0), quota(pids if beside == "quota" else ()):
                time.sleep(SETTLED_S + parallelism * SETTLED_PER_SUBTASK_S)
                before, before_cpu_s = job.status(), cpu_s(pids)
                time.sleep(MEASURED_S)
                after, after_cpu_s = job.status(), cpu_s(pids)
                took_s = take(job, CHECKPOINTS)
        finally:
            job.cancel("measured")
    rows = after.vertices[1].operators[0].rows_in - before.vertices[1].operators[0].rows_in
    return {
        "parallelism": parallelism,
        "queue_time": queue_time,
        "beside": beside,
        "rows_per_s": round(rows / ((after.now_ms - before.now_ms) / 1000)),
        "cpu_us_per_row": round((after_cpu_s - before_cpu_s) / max(1, rows) * 1e6, 3),
        "aligned_ms_median": round(statistics.median(took_s) * 1000),
        "aligned_ms_max": round(max(took_s) * 1000),
        "load": round(os.getloadavg()[0], 1),
    }


def run(arguments: argparse.Namespace) -> None:
    for parallelism in arguments.parallelism:
        for beside in arguments.beside:
            found: dict[str, list[Figures]] = {queue_time: [] for queue_time in arguments.queue_time}
            for _ in range(arguments.rounds):
                for queue_time, figures in found.items():
                    figures.append(measure(parallelism, queue_time, beside, arguments.rows_per_s))
                    print(json.dumps(figures[-1]), flush=True)


def listed(kind: type) -> Any:
    return lambda text: [kind(part) for part in text.split(",")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parallelism", type=listed(int), default=list(PARALLELISMS))
    parser.add_argument("--queue-time", type=listed(str), default=list(QUEUE_TIMES))
    parser.add_argument("--beside", type=listed(str), default=list(BESIDE))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--rows-per-s", type=float, default=None)
    run(parser.parse_args())
