"""PostgreSQL, Delta and Iceberg tables as ends of real jobs on processes: slots, drivers and servers die, every row is there once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psycopg
import pytest
from transactional_jobs import COMMITTERS, ROWS, Changes, Target, after, after_commit

from jobs import check_gapless
from machine import limit_s
from midstream import Environment, KeyedProcessFunction, ProcessContext, SchemaError, ValueState
from midstream.runtime.process.process_slots import ProcessSlots
from postgres_server import PASSWORD, Server
from waiting import until

pytestmark = pytest.mark.systems


class Running(KeyedProcessFunction):
    """Of each key the greatest number so far, and how many there were."""

    greatest = ValueState(default=-1)
    rows = ValueState(default=0)

    def process(self, row: dict[str, int], ctx: ProcessContext) -> dict[str, int]:
        self.rows.value += 1
        self.greatest.value = max(self.greatest.value, row["n"])
        return {"who": row["who"], "n": self.greatest.value, "rows": self.rows.value}


def is_once(rows: list[int]) -> bool:
    return len(rows) == len(set(rows))


@pytest.fixture(params=["postgres", "delta", "iceberg"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    if request.param != "postgres":
        return Target(request.param, str(tmp_path / "out"))
    return Target("postgres", request.getfixturevalue("database"))


def kill_a_slot(job: object) -> None:
    os.kill(next(pid for pid in job.status().slot_pids if pid), signal.SIGKILL)  # type: ignore[attr-defined]


def test_every_row_is_there_once_although_a_slot_is_killed(target, tmp_path):
    job = target.job(tmp_path / "checkpoints", count=None).start(slots=ProcessSlots())
    before = len(until("something is committed", target.rows))
    kill_a_slot(job)
    until("the restart", lambda: job.status().restarts)
    until("more is committed", lambda: len(target.rows()) > before + ROWS)
    job.stop(drain=True, timeout_s=limit_s(90))
    check_gapless(target.rows())
    if target.kind == "postgres":  # tables in lakehouses are cleaned up by VACUUM and its like
        assert target.pending() == []


def test_a_commit_of_which_no_word_arrives_is_repeated_and_changes_nothing(target, tmp_path, monkeypatch):
    failed: list[int] = []

    def fail_once(checkpoint_id: int) -> None:
        if failed.count(checkpoint_id) == 0:
            failed.append(checkpoint_id)
            raise OSError("the connection broke just then")

    monkeypatch.setattr(COMMITTERS[target.kind], "commit", after_commit(target.kind, fail_once))
    status = target.job(tmp_path / "checkpoints", rows_per_s=40_000).execute(slots=ProcessSlots())
    assert status.state == "finished" and status.restarts == 0
    assert failed
    assert target.rows() == list(range(ROWS))
    assert target.pending() == []


def test_a_driver_that_dies_between_a_commit_and_the_word_of_it_goes_on_without_a_doubled_row(target, tmp_path):
    import transactional_jobs

    checkpoints = tmp_path / "checkpoints"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, transactional_jobs.__file__, target.kind, target.place, str(checkpoints)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=limit_s(90), check=False)
    assert done.returncode == 9, done.stderr
    before = target.rows()
    assert is_once(before)
    assert 0 < len(before) < ROWS
    status = target.job(checkpoints).start(slots=ProcessSlots(), restore_from="latest").wait(limit_s(90))
    assert status.state == "finished"
    assert target.rows() == list(range(ROWS))
    if target.kind == "postgres":
        assert target.pending() == []


def test_a_drained_job_leaves_nothing_pending_and_a_stopped_one_goes_on(target, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    job = target.job(checkpoints, count=None).start(slots=ProcessSlots())
    until("something is committed", target.rows)
    job.stop(timeout_s=limit_s(60))
    stopped = target.rows()
    assert is_once(stopped)
    assert target.pending() == []
    job = target.job(checkpoints, count=None).start(slots=ProcessSlots(), restore_from="latest", parallelism=3)
    until("more is committed", lambda: len(target.rows()) > len(stopped))
    job.stop(drain=True, timeout_s=limit_s(60))
    assert job.status().state == "finished"
    drained = target.rows()
    assert is_once(drained) and set(stopped) < set(drained)
    assert target.pending() == []


# ---- tables that follow changes -----------------------------------------------


@pytest.fixture(params=["postgres", "delta", "iceberg"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Changes:
    place = request.getfixturevalue("database") if request.param == "postgres" else str(tmp_path / "out")
    return Changes(request.param, place)


def test_a_table_follows_changes_although_a_slot_is_killed(kept, tmp_path):
    job = kept.job(tmp_path / "checkpoints", count=60_000).start(slots=ProcessSlots())
    until("something is committed", kept.rows)
    kill_a_slot(job)
    until("the restart", lambda: job.status().restarts)
    assert job.wait(limit_s(90)).state == "finished"
    assert kept.rows() == after(60_000)
    assert kept.pending() == []


@pytest.mark.parametrize("what", ["changes", "files"])
def test_a_driver_that_dies_around_a_commit_of_changes_goes_on(kept, tmp_path, what):
    import transactional_jobs

    if what == "files" and kept.kind == "postgres":
        pytest.skip("PostgreSQL drops its staging tables in the same transaction")
    checkpoints = tmp_path / "checkpoints"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, transactional_jobs.__file__, kept.kind, kept.place, str(checkpoints), what]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=limit_s(90), check=False)
    assert done.returncode == 9, done.stderr
    assert kept.rows() not in ({}, after(ROWS))
    status = kept.job(checkpoints).start(slots=ProcessSlots(), restore_from="latest").wait(limit_s(90))
    assert status.state == "finished"
    assert kept.rows() == after(ROWS)
    assert kept.pending() == []


# ---- PostgreSQL ---------------------------------------------------------------


def test_a_server_that_crashes_in_mid_job_costs_no_row(database, postgres_server: Server, tmp_path):
    target = Target("postgres", database)
    job = target.job(tmp_path / "checkpoints", count=None).start(slots=ProcessSlots())
    before = len(until("something is committed", target.rows))
    postgres_server.stop("immediate")
    try:
        until("that is noticed", lambda: job.status().failures or job.status().restarts)
    finally:
        postgres_server.start()
    until("more is committed", lambda: len(target.rows()) > before + ROWS)
    job.stop(drain=True, timeout_s=limit_s(90))
    check_gapless(target.rows())
    assert target.pending() == []


def test_rows_replace_each_other_by_key_although_a_slot_is_killed(database, tmp_path):
    env = Environment("latest", parallelism=2, checkpoint_dir=tmp_path / "checkpoints", checkpoint_interval="200 ms")
    stream = env.generate(lambda i: {"who": i % 7, "n": i}, rows_per_s=10_000).uid("numbers")
    read = stream.collect()
    counted = stream.key_by("who").process(Running(), {"who": int, "n": int, "rows": int}).uid("count")
    counted.forward().write_postgres(database, "latest", key=["who"]).uid("out")
    job = env.start(slots=ProcessSlots())

    def found() -> list[tuple[int, int, int]]:
        with psycopg.connect(database) as connection:
            return connection.execute("SELECT who, n, rows FROM latest ORDER BY who").fetchall()

    def committed() -> int:
        return sum(rows for _, _, rows in found())

    until("something is committed", committed)
    kill_a_slot(job)
    until("the restart", lambda: job.status().restarts)
    before = committed()
    until("more is committed", lambda: committed() > before)
    job.stop(drain=True, timeout_s=limit_s(90))
    numbers = [row["n"] for row in read.rows()]
    check_gapless(numbers)
    of_each = {who: [n for n in numbers if n % 7 == who] for who in range(7)}
    assert found() == [(who, max(own), len(own)) for who, own in of_each.items()]


def test_a_commit_that_fails_for_good_fails_the_job_by_name_and_its_rows_are_kept(database, tmp_path):
    target, checkpoints = Target("postgres", database), tmp_path / "checkpoints"
    with psycopg.connect(database) as connection:
        connection.execute("CREATE TABLE numbers (n int8)")
        connection.execute("CREATE TABLE taken (n int8 PRIMARY KEY)")
        connection.execute("INSERT INTO taken SELECT generate_series(0, 5000)")
        connection.execute("ALTER TABLE numbers ADD FOREIGN KEY (n) REFERENCES taken")
    with pytest.raises(SchemaError) as failure:
        target.job(checkpoints).execute(slots=ProcessSlots())
    said = str(failure.value)
    assert "sink 'out': committing what it wrote up to checkpoint" in said
    assert 'violates foreign key constraint "numbers_n_fkey"' in said
    assert "kept" in said and "--from latest" in said
    rows = target.rows()
    assert is_once(rows)
    assert target.pending(), "what the checkpoint holds waits in its staging tables"
    with psycopg.connect(database) as connection:
        connection.execute("ALTER TABLE numbers DROP CONSTRAINT numbers_n_fkey")
    target.job(checkpoints).start(slots=ProcessSlots(), restore_from="latest").wait(limit_s(90))
    assert target.rows() == list(range(ROWS))
    assert target.pending() == []


def test_the_password_is_in_no_file_status_or_output(database, tmp_path, capfd, caplog):
    caplog.set_level("DEBUG")
    assert PASSWORD in database
    job = Target("postgres", database).job(tmp_path / "checkpoints", count=None).start(slots=ProcessSlots())
    until("something is committed", Target("postgres", database).rows)
    kill_a_slot(job)
    until("the restart", lambda: job.status().restarts)
    job.stop(drain=True, timeout_s=limit_s(90))
    status = job.status()
    assert status.failures
    assert PASSWORD not in msgspec.json.encode(status).decode()
    assert PASSWORD not in caplog.text
    assert PASSWORD not in "".join(capfd.readouterr())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if PASSWORD.encode() in path.read_bytes()]
