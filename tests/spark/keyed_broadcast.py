"""Run as a program, with a directory and a number: so often, a keyed stream beside a broadcast one goes from 7 to 2.

Each time on real slots of a Spark session with 8 cores: stopped with rows in flight, started again at the other
parallelism, checkpointed during recovery, struck by a killed slot every other time, and accounted for row by row.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
from pyspark.sql import SparkSession

import backpressured
from backpressured import KEYS, PADDING, check_exact, rows_in_flight
from machine import limit_s
from midstream import BroadcastProcessFunction, BroadcastState, CollectSink, Environment, Tuning, ValueState
from midstream.runtime.driver.job import Job
from midstream.spark.session import get_session
from midstream.spark.spark_slots import SparkSlots
from waiting import until

ROWS = 20_000
RULES = 300
PILED_UP_BYTES = 2**17
"""In flight in a checkpoint, so that hundreds of rows are in the next one too."""


class Ruled(BroadcastProcessFunction):
    """Which one of its key a row is. Slow at first, so that rows pile up before it."""

    rules = BroadcastState()
    count = ValueState(default=0)

    def __init__(self, row_s: float) -> None:
        self.row_s = row_s

    def process(self, row: Any, ctx: Any) -> Any:
        time.sleep(self.row_s)
        self.count.value += 1
        return {**row, "nth": self.count.value}

    def process_broadcast(self, row: Any, ctx: Any) -> Any:
        self.rules[row["rule"]] = row["rule"]


def job_of(directory: Path, row_s: float) -> tuple[Environment, CollectSink]:
    env = Environment(
        "keyed-broadcast",
        checkpoint_dir=directory,
        checkpoint_interval="200 ms",
        aligned_timeout=0,
        tuning=Tuning(queue_time=None, buffer_size=4096, batch_rows=25),
        retained_checkpoints=3,
    )
    sink = CollectSink()
    rules = env.generate(lambda i: {"rule": i}, count=RULES, rows_per_s=100).uid("rules")
    numbers = env.generate(
        lambda i: {"n": i, "key": i % KEYS, "text": np.full(len(i), PADDING)}, count=ROWS, splits=7
    ).uid("numbers")
    ruled = numbers.key_by("key").connect(rules.broadcast())
    counted = ruled.process(Ruled(row_s), schema={"n": int, "key": int, "nth": int, "text": str}).uid("ruled")
    counted.sink(sink).uid("sink")
    return env, sink


def go(session: SparkSession, directory: Path, is_struck: bool) -> None:
    jobs: list[Job] = []
    try:
        env, first = job_of(directory, 0.003)
        job = env.start(parallelism=7, slots=SparkSlots(session))
        jobs.append(job)
        until(
            "rows to pile up before the slow function",
            lambda: any(taken.in_flight_bytes > PILED_UP_BYTES for taken in job.status().checkpoints),
            60,
        )
        path = job.stop(timeout_s=limit_s(60))
        assert path is not None and rows_in_flight(path) > 100, path
        env, second = job_of(directory, 0.0002)
        job = env.start(parallelism=2, slots=SparkSlots(session), restore_from="latest")
        jobs.append(job)
        until("the job to run", lambda: job.status().state == "running", 60)
        during = job.checkpoint(60)
        assert rows_in_flight(during) > 0, "it was to be taken during recovery"
        if is_struck:
            os.kill(job.status().slot_pids[0], signal.SIGKILL)
        status = job.wait(limit_s(120))
        assert status.restarts == int(is_struck)
        check_exact(ROWS, first.frame(), second.frame())
    finally:
        for job in jobs:
            job.cancel("it is over", 30)


def main(directory: str, times: int) -> None:
    cloudpickle.register_pickle_by_value(backpressured)  # slots of Spark do not find the tests
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    session = get_session("local[8]")
    for index in range(times):
        began_s = time.monotonic()
        go(session, Path(directory, str(index)), is_struck=bool(index % 2))
        print(f"{index + 1} of {times}: {time.monotonic() - began_s:.1f} s", flush=True)
    session.stop()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
