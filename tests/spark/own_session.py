"""Run as a program, on a Spark session of its own.

With a checkpoint directory: a whole job, one of whose slots is killed, and on executors one whose nodes are drained.
Then a job that only waits for its end.
"""

from __future__ import annotations

import os
import signal
import sys

import psutil
from pyspark.sql import SparkSession

from jobs import NumbersJob, check_gapless
from machine import limit_s
from midstream.runtime.driver.driver import Driver
from midstream.runtime.driver.job import Job, start_job
from midstream.spark.session import get_session
from midstream.spark.spark_slots import SparkSlots
from scripted_coordinator import Scripted, plan
from waiting import alive, until


def numbers_with_a_killed_slot(session: SparkSession, directory: str) -> None:
    numbers = NumbersJob(None, rows_per_s=100_000, checkpoint_dir=directory)
    job = start_job(numbers.plan(), SparkSlots(session))
    until("a checkpoint", lambda: job.status().checkpoints_completed >= 1, 60)
    sibling, killed = job.status().slot_pids
    os.kill(killed, signal.SIGKILL)
    until("the restart", lambda: job.status().restarts == 1 and job.status().state == "running", 30)
    assert sibling in job.status().slot_pids and alive(sibling)
    before = len(numbers.numbers())
    until("more rows", lambda: len(numbers.numbers()) > before)
    job.stop(drain=True, timeout_s=limit_s(60))
    assert job.status().restarts == 1
    check_gapless(numbers.numbers())


def numbers_off_a_drained_node(session: SparkSession, directory: str) -> None:
    """Its executor ends as soon as the slot has left it, and no row was read twice."""
    numbers = NumbersJob(None, rows_per_s=50_000, checkpoint_dir=directory)
    job = start_job(numbers.plan(), SparkSlots(session))
    until("a checkpoint", lambda: job.status().checkpoints_completed >= 1, 60)
    before = set(job.status().slot_pids)
    leaving = min(before)
    executor = next(
        p for p in psutil.Process(leaving).parents() if "--executor-id" in p.cmdline() and "java" in p.name()
    )
    executor.send_signal(signal.SIGPWR)  # as the platform does that drains a node: Spark's own signal for it
    until(
        "the move",
        lambda: leaving not in job.status().slot_pids and job.status().state == "running",
        60,
        found=job.status,
    )
    executor.wait(limit_s(60))
    job.stop(timeout_s=limit_s(60))
    ended = job.status()
    assert (ended.restarts, ended.failures) == (0, ()), ended.failures
    assert any("is being vacated: Spark ends its executor" in warning for warning in ended.warnings), ended.warnings
    rows = numbers.numbers()
    assert len(rows) == len(set(rows)) == ended.vertices[0].operators[0].rows_out
    check_gapless(rows)


def main(master: str, directory: str | None) -> None:
    session = get_session(master, slots=2)
    if directory is not None:
        numbers_with_a_killed_slot(session, f"{directory}/killed")
    if directory is not None and not master.startswith("local["):
        numbers_off_a_drained_node(session, f"{directory}/drained")
    made: list[Scripted] = []

    def make(plan: object, now_ms: int) -> Scripted:
        made.append(Scripted(plan, now_ms))  # type: ignore[arg-type]
        return made[0]

    driver = Driver(plan(2), SparkSlots(session), make)
    driver.start()
    coordinator = made[0]
    until("two slots", lambda: len(coordinator.slots) == 2, 60)
    print("ready", *coordinator.slots.values(), flush=True)
    Job(driver).wait(limit_s(60))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
