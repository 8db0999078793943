"""Whole jobs on real Spark slots."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from jobs import NumbersJob, check_gapless
from machine import limit_s
from midstream.runtime.driver.job import start_job
from midstream.spark.spark_slots import SparkSlots
from waiting import alive, until, until_spark_is_idle

pytestmark = pytest.mark.spark


@pytest.mark.smoke
def test_a_slot_killed_in_mid_stream_costs_no_row_and_doubles_none(spark: Any, tmp_path: Path) -> None:
    numbers = NumbersJob(None, parallelism=3, rows_per_s=150_000, checkpoint_dir=str(tmp_path))
    job = start_job(numbers.plan(), SparkSlots(spark))
    try:
        until("two checkpoints", lambda: job.status().checkpoints_completed >= 2, 60)
        before = job.status().slot_pids
        os.kill(before[1], signal.SIGKILL)
        until("the restart", lambda: job.status().restarts == 1 and job.status().state == "running", 30)
        after = job.status().slot_pids
        assert {before[0], before[2]} < set(after) and before[1] not in after
        seen = len(numbers.numbers())
        until("more rows", lambda: len(numbers.numbers()) > seen)
        job.stop(drain=True, timeout_s=limit_s(60))
        status = job.status()
        assert status.state == "finished" and status.restarts == 1
        check_gapless(numbers.numbers())
    finally:
        job.cancel("the test is over", 30)
    until("the killed slot is gone", lambda: not alive(before[1]))
    until_spark_is_idle(spark)


def test_a_stopped_slot_is_given_up_and_the_job_goes_on(spark: Any, tmp_path: Path) -> None:
    numbers = NumbersJob(None, parallelism=2, rows_per_s=75_000, checkpoint_dir=str(tmp_path), heartbeat_timeout_s=1.5)
    job = start_job(numbers.plan(), SparkSlots(spark))
    try:
        until("a checkpoint", lambda: job.status().checkpoints_completed >= 1, 60)
        zombie = job.status().slot_pids[0]
        os.kill(zombie, signal.SIGSTOP)
        until("the restart", lambda: job.status().restarts >= 1 and job.status().state == "running")
        seen = len(numbers.numbers())
        until("more rows", lambda: len(numbers.numbers()) > seen)
        job.stop(drain=True, timeout_s=limit_s(60))
        assert job.status().state == "finished"
        check_gapless(numbers.numbers())
    finally:
        job.cancel("the test is over", 30)
    until("the stopped slot is gone", lambda: not alive(zombie), 30)  # Spark ends it when its job is cancelled
