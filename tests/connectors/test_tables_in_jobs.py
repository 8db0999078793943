"""Tables as streams in real jobs: slots are killed, jobs stopped and restored, and each row arrives once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import polars as pl
import pytest
from table_worlds import WORLDS, TableWorld

from machine import limit_s
from midstream import DataError, Environment
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> TableWorld:
    found = WORLDS[request.param](tmp_path)
    found.create()
    return found


def copying(world: TableWorld, *, rows_per_s: float | None = None, start: str | None = None) -> Environment:
    env = Environment("copy", parallelism=2, checkpoint_dir=world.path / "chk", checkpoint_interval="200 ms")
    source = world.source(watch=True, interval="100 ms", rows_per_s=rows_per_s, start=start)
    env.source(source).uid("in").write_parquet(world.path / "out").uid("out")
    return env


def committed(world: TableWorld) -> list[int]:
    return sorted(n for path in (world.path / "out").glob("*.parquet") for n in pl.read_parquet(path)["n"].to_list())


@pytest.mark.systems
def test_a_table_is_followed_exactly_once_although_slots_are_killed_and_the_job_is_restored(world):
    for part in range(4):
        world.append(*range(part * 5000, part * 5000 + 5000))
    job = copying(world, rows_per_s=10_000).start(slots=ProcessSlots())
    until("something committed", lambda: len(committed(world)) > 0)
    os.kill(next(pid for pid in job.status().slot_pids if pid), signal.SIGKILL)
    world.append(*range(20_000, 21_000))
    world.compact()
    until("the restart", lambda: job.status().restarts)
    job.stop(timeout_s=limit_s(60))
    before = committed(world)
    assert before == sorted(set(before))
    world.append(*range(21_000, 22_000))
    job = copying(world).start(slots=ProcessSlots(), restore_from="latest")
    until("everything committed", lambda: len(committed(world)) >= 22_000)
    world.append(*range(22_000, 22_010))
    until("the last version", lambda: len(committed(world)) >= 22_010)
    job.stop(drain=True, timeout_s=limit_s(60))
    assert committed(world) == list(range(22_010))


@pytest.mark.systems
def test_a_version_that_deletes_rows_ends_the_job_at_once_and_says_why(world):
    world.append(1, 2)
    job = copying(world).start(slots=ProcessSlots())
    until("the rows", lambda: committed(world) == [1, 2])
    world.delete(1)
    with pytest.raises(DataError, match=r"deletes or changes rows, which may have been read; .*on_change='skip'"):
        job.wait(limit_s(60))
    assert job.status().restarts == 0
