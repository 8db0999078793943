"""Whole jobs in plain processes: coordinator, slots, exchange, checkpoints, failures, and the way back."""

from __future__ import annotations

import gc
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs import NumbersJob, check_gapless
from machine import limit_s
from midstream import Environment, KeyedProcessFunction, ValueState, fixed_restarts
from midstream.engine.core.config import RestartStrategy
from midstream.engine.core.errors import JobError, StorageError
from midstream.engine.worker.task import Task
from midstream.runtime.driver import job_registry
from midstream.runtime.driver.job import Job, start_job
from midstream.runtime.network.tls import JobKeys
from midstream.runtime.process.process_slots import ProcessSlots
from midstream.runtime.process.slot_provider import SlotLaunch
from waiting import alive, until


def start(running: list[Job], numbers: NumbersJob, restore: str | None = None) -> Job:
    job = start_job(numbers.plan(restore), ProcessSlots())
    running.append(job)
    return job


def test_every_row_of_a_bounded_job_arrives_once(running: list[Job]) -> None:
    numbers = NumbersJob(300_000)
    status = start(running, numbers).wait(limit_s(60))
    assert status.state == "finished" and status.restarts == 0
    assert numbers.numbers() == list(range(300_000))


def test_a_slot_killed_in_mid_stream_costs_no_row_and_doubles_none(running: list[Job], tmp_path: Path) -> None:
    numbers = NumbersJob(None, rows_per_s=100_000, checkpoint_dir=str(tmp_path))
    job = start(running, numbers)
    until("two checkpoints", lambda: job.status().checkpoints_completed >= 2, 60)
    before = job.status().slot_pids
    os.kill(before[1], signal.SIGKILL)
    until("the restart", lambda: job.status().restarts == 1 and job.status().state == "running")
    assert before[0] in job.status().slot_pids
    seen = len(numbers.numbers())
    until("more rows", lambda: len(numbers.numbers()) > seen)
    job.stop(drain=True, timeout_s=limit_s(60))
    status = job.status()
    assert status.state == "finished" and status.restarts == 1
    assert "is lost" in status.failures[0].summary
    check_gapless(numbers.numbers())
    assert not any(map(alive, before))


def test_a_users_exception_ends_the_job_with_its_traceback(running: list[Job]) -> None:
    numbers = NumbersJob(100_000, fails_at=77_777, fails_always=True, restart=RestartStrategy(kind="none"))
    with pytest.raises(JobError) as caught:
        start(running, numbers).wait(limit_s(60))
    text = str(caught.value)
    assert "ValueError: row 77777 is bad" in text and 'raise ValueError(f"row {self._n} is bad")' in text
    assert "fails" in text


@pytest.mark.systems
def test_after_a_users_exception_the_job_goes_on_from_its_checkpoint(running: list[Job], tmp_path: Path) -> None:
    numbers = NumbersJob(200_000, rows_per_s=100_000, fails_at=150_000, checkpoint_dir=str(tmp_path))
    status = start(running, numbers).wait(limit_s(60))
    assert status.state == "finished" and status.restarts == 1
    assert numbers.numbers() == list(range(200_000))


@pytest.mark.systems
def test_a_slot_keeps_nothing_of_older_attempts(tmp_path: Path) -> None:
    """Tasks and their state refer to each other: left to Python's collector they stay for dozens of restarts."""

    class Fails(KeyedProcessFunction):
        held = ValueState(default=0)

        def open(self, context: Any) -> None:
            attempts = {task._services.attempt for task in gc.get_objects() if type(task) is Task}
            with (tmp_path / "attempts").open("a") as file:
                file.write(f"{sorted(attempts)}\n")

        def process(self, row: dict[str, Any], ctx: Any) -> None:
            self.held.value = row["n"]
            if row["n"] == 100:
                raise ValueError("always")

    env = Environment("failing", parallelism=1, checkpoint_dir=tmp_path / "state", restart=fixed_restarts(5, "10 ms"))
    env.generate(lambda i: {"n": i}, count=200).key_by("n").process(Fails(), {"n": int}).print()
    with pytest.raises(JobError, match="always"):
        env.execute(slots=ProcessSlots())
    attempts = [json.loads(line) for line in (tmp_path / "attempts").read_text().splitlines()]
    assert attempts == [[0], [1], [2], [3], [4], [5]]


def test_a_stopped_job_goes_on_where_it_stopped(running: list[Job], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rows_per_s": 100_000, "checkpoint_dir": str(tmp_path)}
    first = NumbersJob(None, **settings)
    job = start(running, first)
    assert job.checkpoint(30).endswith("chk-1")
    until("some rows", first.numbers)
    path = job.stop(timeout_s=limit_s(30))
    assert path is not None and Path(path).is_dir() and job.status().state == "stopped"
    seen = first.numbers()
    second = NumbersJob(None, **settings)
    job = start(running, second, restore="latest")
    until("more rows", second.numbers)
    job.stop(drain=True, timeout_s=limit_s(30))
    check_gapless([*seen, *second.numbers()])


@pytest.mark.systems
def test_a_stopped_job_has_done_nothing_that_it_does_again(running: list[Job], tmp_path: Path) -> None:
    """Its sources hold still behind the barrier, so that what has effects of its own sees no row twice."""
    settings: dict[str, Any] = {"checkpoint_dir": str(tmp_path / "checkpoints"), "witness": tmp_path / "seen"}
    for restore in (None, "latest"):
        job = start(running, NumbersJob(None, rows_per_s=1_000_000, **settings), restore)
        until("a checkpoint", lambda job=job: job.status().checkpoints_completed, 60)  # type: ignore[misc]  # mypy infers no lambda with defaults
        job.stop(timeout_s=limit_s(30))
        assert job.status().state == "stopped"
    seen = np.concatenate([np.fromfile(path, np.int64) for path in tmp_path.glob("seen-*")])
    assert 0 < len(seen) == len(np.unique(seen))


def test_a_drained_job_has_finished_all_it_read(running: list[Job]) -> None:
    numbers = NumbersJob(None, rows_per_s=50_000)
    job = start(running, numbers)
    until("some rows", lambda: any(o.rows_in for v in job.status().vertices for o in v.operators), 60)
    assert job.stop(drain=True, timeout_s=limit_s(30)) is None
    assert job.status().state == "finished"
    rows = numbers.numbers()
    assert len(rows) == len(set(rows)) > 0


@pytest.mark.systems
def test_a_function_that_takes_longer_than_the_heartbeat_timeout_costs_no_slot(
    running: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.engine.coordinator.requests.pending_waits.SHOWN_S", 1.0)
    numbers = NumbersJob(2_000, sleeps_at=(0, 4.0), heartbeat_timeout_s=1.0)
    job = start(running, numbers)
    calls = until("the call", lambda: [wait for wait in job.status().waiting if "'slow'" in wait.what], 60)
    assert calls[0].what.startswith("operator 'slow' (subtask ") and calls[0].is_call
    assert "jobs.py" in calls[0].what and calls[0].what.endswith("in process)")
    status = job.wait(limit_s(60))
    assert status.state == "finished" and status.restarts == 0 and status.warnings == ()
    assert numbers.numbers() == list(range(2_000))


@pytest.mark.systems
def test_the_last_counts_of_a_stopped_job_are_those_of_what_it_has_committed(
    running: list[Job], tmp_path: Path
) -> None:
    numbers = NumbersJob(None, rows_per_s=20_000, checkpoint_dir=str(tmp_path), aligned_timeout_s=None)
    job = start(running, numbers)
    until("a checkpoint", lambda: job.status().checkpoints_completed, 60)
    job.stop()
    counts = {operator.uid: operator for vertex in job.status().vertices for operator in vertex.operators}
    committed = len(numbers.numbers())
    assert counts["numbers"].rows_out == committed == counts["sink"].rows_in


def test_a_slot_whose_driver_has_gone_tells_the_driver_alone(capfd: pytest.CaptureFixture[str]) -> None:
    """It may have been on its way when the job ended: nobody wants to read of it then."""
    ended: list[tuple[str, str]] = []
    slots = ProcessSlots()
    slots.request(
        SlotLaunch("127.0.0.1", 1, JobKeys(b"s" * 32), "job", "0"),
        lambda reason, crash="", last_lines="": ended.append((reason, crash)),
        lambda reason: None,
    )
    until("the slot has ended", lambda: bool(ended), 60)
    slots.close()
    ((reason, crash),) = ended
    assert "ended with status 1: ClusterError: a slot on " in reason and "cannot reach its driver" in reason
    assert crash == "", "that is an outage"
    assert capfd.readouterr().err == ""


def test_a_job_that_cannot_be_announced_runs_all_the_same_and_says_so(
    running: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "file" / "home"))
    numbers = NumbersJob(1000)
    job = start(running, numbers)
    shown = repr(job)
    assert shown.startswith(f"<midstream job {job.name!r} {job.job_id}: ")
    assert shown.endswith(tuple(f": {each}>" for each in ("created", "deploying", "running", "finished", "busy")))
    status = job.wait(limit_s(60))
    assert numbers.numbers() == list(range(1000))
    said = caplog.text
    assert "cannot announce the job" in said and "set MIDSTREAM_HOME" in said and "the job runs nevertheless" in said
    assert repr(job) == f"<midstream job {job.name!r} {job.job_id}: finished>"
    assert repr(status) == (
        f"<JobStatus of {job.name!r} {job.job_id}: finished, rows_read=1000, checkpoints_completed=0, restarts=0>"
    )


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MIDSTREAM_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(StorageError, match=r"there is no home directory .*; set MIDSTREAM_HOME"):
        job_registry.list_jobs()
