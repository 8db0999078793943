"""Rows in flight on real Spark slots: through a killed slot, a rescale, and a restart at another parallelism."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from backpressured import Backpressured, check_exact, rows_in_flight, rows_out
from midstream.runtime.job import Job
from midstream.spark.slots import SparkSlots
from waiting import alive, until

pytestmark = pytest.mark.spark


def test_rows_in_flight_survive_a_killed_slot_a_rescale_and_a_restart(spark: Any, tmp_path: Path) -> None:
    first = Backpressured(tmp_path, 30_000, row_us=400.0)
    jobs: list[Job] = []
    try:
        job = first.start(2, SparkSlots(spark))
        jobs.append(job)
        until("rows", lambda: rows_out(job, "slow") > 0)
        path = job.checkpoint(60)
        assert rows_in_flight(path) > 100
        before = job.status().slot_pids
        os.kill(before[1], signal.SIGKILL)
        until("the restart", lambda: job.status().restarts == 1 and job.status().state == "running")
        assert job.status().restored_from == path
        until("rows", lambda: rows_out(job, "slow") > 0)
        path = job.rescale(3, 60)
        assert path is not None and rows_in_flight(path) > 100
        status = job.status()
        assert status.slots == 3 and status.restarts == 1 and before[0] in status.slot_pids
        until("rows", lambda: rows_out(job, "slow") > 0)
        path = job.stop(timeout_s=60)
        assert path is not None and rows_in_flight(path) > 100
        seen = first.frame()
        assert 0 < len(seen) < first.rows
        second = Backpressured(tmp_path, 30_000, row_us=5.0)
        jobs.append(second.start(1, SparkSlots(spark), restore_from="latest"))
        assert jobs[1].status().state != "failed"
        jobs[1].wait(120)
        check_exact(first.rows, seen, second.frame())
    finally:
        for job in jobs:
            job.cancel("the test is over", 30)
    assert not alive(before[1])
    until("Spark to be free", lambda: spark.sparkContext.statusTracker().getActiveJobsIds() == [])
