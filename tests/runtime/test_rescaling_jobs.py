"""Other parallelisms with rows in flight, on plain processes: while the job runs, and from a checkpoint."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backpressured import Backpressured, check_exact, rows_in_flight, rows_out, until_more_rows
from machine import limit_s
from midstream.api.restart_strategies import fixed_restarts
from midstream.engine.core.errors import JobError
from midstream.runtime.driver.job import Job
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import alive, until


def test_a_running_job_is_rescaled_up_and_down_without_losing_a_row_in_flight(
    running: list[Job], tmp_path: Path
) -> None:
    work = Backpressured(tmp_path / "state", None, row_us=400.0)
    job = work.start(2, ProcessSlots())
    running.append(job)
    until_more_rows(job, "slow")
    first, tls = job.status().slot_pids, job.status().tls
    path = job.rescale(3, 60)
    assert path is not None and rows_in_flight(path) > 100
    status = job.status()
    assert status.state == "running" and status.restarts == 0 and not status.failures and status.tls == tls
    assert {v.parallelism for v in status.vertices} == {3}
    assert set(first) < set(status.slot_pids)  # those that there were are kept
    until_more_rows(job, "slow")
    three = job.status().slot_pids
    path = job.rescale(1, 60)
    assert path is not None and rows_in_flight(path) > 100
    status = job.status()
    (kept,) = status.slot_pids
    assert kept in three
    until("the surplus slots to end", lambda: [*filter(alive, three)] == [kept])
    assert job.rescale(1, 60) is None
    work.drain(job)
    status = job.status()
    assert status.state == "finished" and status.restarts == 0
    assert rows_out(job, status.vertices[0].operators[0].uid) >= len(work.frame()), "totals continue through rescales"
    check_exact(work.rows, work.frame())


def test_a_rescale_that_cannot_be_leaves_the_job_as_it_is(running: list[Job], tmp_path: Path) -> None:
    work = Backpressured(tmp_path / "state", None, row_us=400.0, max_parallelism=8)
    job = work.start(2, ProcessSlots(slots_max=3))
    running.append(job)
    until_more_rows(job, "slow")
    before = job.status()
    for parallelism, reason in (
        (0, "parallelism 0 is not a positive whole number"),
        (9, "is above max_parallelism 8"),
        (4, "the job needs 4 slots, but there are 3"),
    ):
        with pytest.raises(JobError, match=f"the job continues at 2: .*{reason}"):
            job.rescale(parallelism, 60)
    after = job.status()
    assert after.state == "running" and after.attempt == before.attempt and after.slot_pids == before.slot_pids
    work.drain(job)
    assert job.status().restarts == 0
    check_exact(work.rows, work.frame())
    with pytest.raises(JobError, match="the job has ended: it finished"):
        job.rescale(3)


@pytest.mark.systems
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2), (4, 2)])
def test_rows_in_flight_go_on_from_a_checkpoint_at_another_parallelism(
    before: int, after: int, running: list[Job], tmp_path: Path
) -> None:
    first = Backpressured(tmp_path, None, row_us=400.0)
    job = first.start(before, ProcessSlots())
    running.append(job)
    until_more_rows(job, "slow")
    path = job.stop(timeout_s=limit_s(60))
    assert path is not None and rows_in_flight(path) > 100
    seen = first.frame()
    second = Backpressured(tmp_path, None, row_us=0.0, checkpoint_interval="200 ms")
    job = second.start(after, ProcessSlots(), restore_from=path)
    running.append(job)
    until_more_rows(job, "slow")
    second.drain(job)
    check_exact(first.rows, seen, second.frame())


@pytest.mark.systems
def test_a_job_killed_again_and_again_while_it_recovers_gets_ahead_each_time(
    running: list[Job], tmp_path: Path
) -> None:
    """What was in flight gets less from one failure to the next: checkpoints come during recovery, and no new rows."""
    restart = fixed_restarts(20, "10 ms")
    work = Backpressured(tmp_path / "state", None, row_us=400.0, retained_checkpoints=1000, restart=restart)
    job = work.start(2, ProcessSlots())
    running.append(job)
    until_more_rows(job, "slow")
    restored: list[int] = []
    path = job.checkpoint(60)
    for kills in range(1, 5):
        work.hold()  # nothing has been recovered before the next checkpoint is under way
        os.kill(job.status().slot_pids[kills % 2], signal.SIGKILL)
        until("the restart", lambda kills=kills: job.status().restarts == kills and job.status().state == "running")  # type: ignore[misc]  # mypy infers no lambda with defaults
        assert job.status().restored_from == path
        restored.append(rows_in_flight(path))
        with ThreadPoolExecutor(1) as thread:
            made = thread.submit(job.checkpoint, 60)
            until("it is under way", lambda: job.status().checkpoints[0].state == "in_progress")
            work.go_on()
            path = made.result()
        while rows_in_flight(path) >= restored[-1]:
            path = job.checkpoint(60)
    assert restored[-1] > 0, "it was to fail before it had recovered"
    assert restored == sorted(set(restored), reverse=True)
    work.drain(job)
    assert job.status().restarts == 4
    check_exact(work.rows, work.frame())
