"""Rows in flight on real Spark slots: through a killed slot, a rescale, and a restart at another parallelism."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from backpressured import Backpressured, check_exact, rows_in_flight, rows_still_to_recover, until_more_rows
from machine import limit_s
from midstream.runtime.driver.job import Job
from midstream.spark.spark_slots import SparkSlots
from waiting import alive, until

pytestmark = pytest.mark.spark


WIDE_EVERY = 400


@pytest.fixture
def start(spark: Any) -> Iterator[Callable[..., Job]]:
    """Start a job on Spark. At the end of the test none is left."""
    jobs: list[Job] = []

    def start(work: Backpressured, parallelism: int, **arguments: Any) -> Job:
        jobs.append(work.start(parallelism, SparkSlots(spark), **arguments))
        return jobs[-1]

    yield start
    for job in jobs:
        job.cancel("the test is over", 30)
    until("Spark to be free", lambda: spark.sparkContext.statusTracker().getActiveJobsIds() == [])


def die_with_rows_in_flight(job: Job, *, in_recovery: bool = False) -> str:
    """Its checkpoint; then a slot is killed, and there is nobody to start the job again. `in_recovery`: while rows that were
    in flight are recovered.
    """
    if in_recovery:
        until("all tasks to run", lambda: job.status().state == "running")
    else:
        until_more_rows(job, "slow")
    path = job.checkpoint(60)
    assert rows_in_flight(path) > 100
    os.kill(job.status().slot_pids[-1], signal.SIGKILL)
    job.cancel("the test has killed it", 60)
    return path


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2), (4, 2)])
def test_a_killed_job_is_restored_with_its_rows_in_flight(
    start: Callable[..., Job], tmp_path: Path, before: int, after: int
) -> None:
    first, second = (
        Backpressured(tmp_path / "chk", None, row_us=row_us, out=tmp_path / "out") for row_us in (400.0, 5.0)
    )
    path = die_with_rows_in_flight(start(first, before))
    job = start(second, after, restore_from=path)
    until_more_rows(job, "slow")
    second.drain(job)
    check_exact(first.rows, second.frame())


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_again_while_it_recovers_at_random_parallelism_with_wide_rows(
    start: Callable[..., Job], tmp_path: Path, seed: int
) -> None:
    """Checkpoint; restore, checkpoint during recovery and die; the same again; restore. Now and then a row fills eight buffers."""
    choice = Random(seed).choice
    path = None
    for phase in range(4):
        row_us = 2000.0 if phase else 400.0
        work = Backpressured(
            tmp_path / "chk", None, row_us=row_us, out=tmp_path / "out", wide_every=WIDE_EVERY, batch_rows=500
        )
        job = start(work, choice((1, 2, 3, 4)), restore_from=path)
        if phase < 3:
            path = die_with_rows_in_flight(job, in_recovery=phase > 0)
            assert bool(rows_still_to_recover(path)) == (phase > 0), "taken during recovery"
    until_more_rows(job, "slow")
    work.drain(job)
    check_exact(work.rows, work.frame(), wide_every=WIDE_EVERY)


def test_rows_in_flight_survive_a_killed_slot_a_rescale_and_a_restart(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    first = Backpressured(tmp_path, None, row_us=400.0)
    job = start(first, 2)
    until_more_rows(job, "slow")
    path = job.checkpoint(60)
    assert rows_in_flight(path) > 100
    before = job.status().slot_pids
    os.kill(before[1], signal.SIGKILL)
    until("the restart", lambda: job.status().restarts == 1 and job.status().state == "running")
    assert job.status().restored_from == path
    until_more_rows(job, "slow")
    moved = job.rescale(3, 60)
    assert moved is not None
    path = moved
    assert path is not None and rows_in_flight(path) > 100
    status = job.status()
    assert status.slots == 3 and status.restarts == 1 and before[0] in status.slot_pids
    until_more_rows(job, "slow")
    stopped = job.stop(timeout_s=limit_s(60))
    assert stopped is not None
    path = stopped
    assert path is not None and rows_in_flight(path) > 100
    seen = first.frame()
    assert len(seen) > 0
    second = Backpressured(tmp_path, None, row_us=5.0, checkpoint_interval="200 ms")
    job = start(second, 1, restore_from="latest")
    until_more_rows(job, "slow")
    second.drain(job)
    check_exact(first.rows, seen, second.frame())
    until("the killed process to be gone", lambda: not alive(before[1]))
