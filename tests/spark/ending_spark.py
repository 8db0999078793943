"""Run as a program, on a Spark session of its own: jobs whose Spark ends under them.

The first has its session stopped by the program. Then one on a new session says `ready`, the JVM's
process and those of its slots, and waits for its end.
"""

from __future__ import annotations

import sys

from jobs import NumbersJob
from machine import limit_s
from midstream.engine.core.errors import ClusterError
from midstream.runtime.driver.job import Job, start_job
from midstream.spark.session import get_session
from midstream.spark.spark_slots import SparkSlots
from waiting import until


def begin(master: str, directory: str) -> Job:
    numbers = NumbersJob(None, rows_per_s=20_000, checkpoint_dir=directory)
    job = start_job(numbers.plan(), SparkSlots(get_session(master)))
    until("a checkpoint", lambda: job.status().checkpoints_completed >= 1, 60)
    return job


def say_how_it_ended(job: Job) -> None:
    try:
        job.wait(limit_s(30))
    except ClusterError as error:
        print("error:", error, flush=True)


def main(master: str, directory: str) -> None:
    stopped = begin(master, f"{directory}/stopped")
    get_session(master).stop()
    say_how_it_ended(stopped)
    job = begin(master, f"{directory}/killed")
    print("ready", get_session(master).sparkContext._gateway.proc.pid, *job.status().slot_pids, flush=True)  # type: ignore[union-attr]  # there is a gateway
    say_how_it_ended(job)
    try:
        get_session(master)
    except ClusterError as error:
        print("error:", error, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
