"""Whole jobs in processes whose state lies on the local disk."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from machine import limit_s
from midstream import Environment
from midstream.runtime.driver.job import Job
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until

KEYS = 300_000


def start(running: list[Job], tmp_path: Path, rows: int, rows_per_s: float | None = None) -> Job:
    """Each key comes twice, the second time after all have come once."""
    env = Environment(
        "distinct", state_memory="1 MiB", checkpoint_dir=str(tmp_path / "checkpoints"), checkpoint_interval="500 ms"
    )
    numbers = env.generate(lambda i: {"k": (i % KEYS) * 7919, "n": i}, count=rows, splits=1, rows_per_s=rows_per_s)
    numbers.uid("numbers").drop_duplicates("k").uid("distinct").write_parquet(tmp_path / "out").uid("out")
    job = env.start(slots=ProcessSlots())
    running.append(job)
    return job


def check(tmp_path: Path) -> None:
    found = pl.read_parquet(tmp_path / "out" / "**" / "*.parquet").sort("n")
    assert np.array_equal(found["n"].to_numpy(), np.arange(KEYS)), "each key once, the first time that it came"


@pytest.mark.systems
def test_state_on_disk_survives_a_kill_and_leaves_nothing_behind(
    running: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "local"
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(local))
    job = start(running, tmp_path, 2 * KEYS, rows_per_s=KEYS / 3)
    until("state is on disk", lambda: any(job.status().slot_state_disk_bytes), 60)
    until("a checkpoint has it", lambda: job.status().checkpoints_completed >= 2, 60)
    os.kill(job.status().slot_pids[0], signal.SIGKILL)
    until("the restart", lambda: job.status().restarts == 1 and job.status().state == "running", 60)
    until("state is on disk again", lambda: any(job.status().slot_state_disk_bytes), 60)
    assert list(local.iterdir()) == []
    assert job.wait(limit_s(120)).state == "finished"
    assert list(local.iterdir()) == []
    check(tmp_path)


@pytest.mark.systems
def test_a_disk_that_fails_is_in_the_status_and_costs_no_row(
    running: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path / "file" / "below"))
    job = start(running, tmp_path, 2 * KEYS, rows_per_s=KEYS / 2)
    until("a warning", lambda: bool(job.status().warnings), 60)
    (warning,) = job.status().warnings
    assert "state above state_memory cannot be written to" in warning and "file/below" in warning
    status = job.wait(limit_s(120))
    assert status.state == "finished" and status.restarts == 0 and not any(status.slot_state_disk_bytes)
    check(tmp_path)
