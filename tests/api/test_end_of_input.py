"""How operators end: what had finished runs nothing again, and no timer is lost or fires after the end."""

from __future__ import annotations

import os
import signal
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from jobs import Held
from machine import limit_s
from midstream import (
    Environment,
    KeyedBatchFunction,
    KeyedProcessFunction,
    ListState,
    Sink,
    TableState,
    Tuning,
    no_restart,
)
from midstream.cli.commands.inspect_checkpoint import read_report
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.operators.sink_api import SinkWriter
from midstream.runtime.driver.job import Job
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until

KEYS = 8


class Sums(KeyedBatchFunction):
    """At the end, the sum of what came to this subtask. Each of its calls but `process` leaves a line in `log`."""

    seen = TableState({"k": int, "n": int})

    def __init__(self, log: Path) -> None:
        self.log = log

    def _line(self, what: str) -> None:
        with self.log.open("a") as log:
            log.write(f"{what}\n")

    def open(self, context: Any) -> None:
        self._line(f"open {context.subtask}")

    def process(self, rows: pl.DataFrame, ctx: Any) -> None:
        self.seen.append(rows)

    def on_watermark(self, ctx: Any) -> pl.DataFrame | None:
        if ctx.watermark != datetime.max:
            return None
        self._line("end")
        return pl.DataFrame({"sum": [int(self.seen.frame["n"].sum())]})

    def close(self) -> None:
        self._line("close")


def finished_subtasks(state: Path, uid: str) -> int:
    return next(op.finished_subtasks for op in read_report(str(state)).operators if op.uid == uid)


def kill_a_slot(job: Job, restarts: int) -> None:
    os.kill(job.status().slot_pids[0], signal.SIGKILL)
    until("the job runs again", lambda: job.status().restarts == restarts and job.status().state == "running")


@pytest.mark.systems
def test_an_operator_that_had_finished_runs_nothing_after_failures(tmp_path: Path, running: list[Job]) -> None:
    state, rest, log = tmp_path / "state", tmp_path / "rest", tmp_path / "log"
    env = Environment(
        "ends", parallelism=2, checkpoint_dir=state, checkpoint_interval="100 ms", tuning=Tuning(batch_rows=50)
    )
    short = env.generate(lambda i: {"k": i % KEYS, "n": i}, count=100).uid("short")
    sums = short.key_by("k").process_batches(Sums(log), {"sum": int}).uid("sums")
    negative = GeneratorSource(lambda i: {"sum": 0 * i - 1}, 3_000)
    long = env.source(Held(negative, rest, first=1_000)).uid("long")
    out = sums.union(long).collect()
    job = env.start(slots=ProcessSlots())
    running.append(job)
    until(
        "the sums in a checkpoint", lambda: job.status().checkpoints_completed and finished_subtasks(state, "sums") == 2
    )
    lines = log.read_text().splitlines()
    assert lines.count("end") == 2
    kill_a_slot(job, 1)
    kill_a_slot(job, 2)
    rest.touch()
    assert job.wait(limit_s(60)).state == "finished"
    found = [row["sum"] for row in out.rows() if row["sum"] >= 0]
    assert len(found) == 2 and sum(found) == sum(range(100))
    assert out.frame()["sum"].to_list().count(-1) == 3_000
    assert sorted(set(log.read_text().splitlines())) == ["close", "end", "open 0", "open 1"]
    assert [line for line in log.read_text().splitlines() if line != "close"] == [
        line for line in lines if line != "close"
    ]


@pytest.mark.systems
def test_a_subtask_that_had_finished_runs_nothing_after_a_failure_while_others_still_run(
    tmp_path: Path, running: list[Job]
) -> None:
    """One split for two subtasks: one of them ends immediately, and only forward edges follow it."""
    state, rest, log = tmp_path / "state", tmp_path / "rest", tmp_path / "log"
    env = Environment(
        "ends", parallelism=2, checkpoint_dir=state, checkpoint_interval="100 ms", tuning=Tuning(batch_rows=50)
    )
    numbers = GeneratorSource(lambda i: {"n": i}, 2_000, splits=1)
    rows = env.source(Held(numbers, rest, first=1_000)).uid("rows")
    rows.sink(Opened(log)).uid("logged")
    out = rows.collect()
    job = env.start(slots=ProcessSlots())
    running.append(job)
    until("one in a checkpoint", lambda: job.status().checkpoints_completed and finished_subtasks(state, "logged") == 1)
    kill_a_slot(job, 1)
    rest.touch()
    assert job.wait(limit_s(60)).state == "finished"
    assert sorted(row["n"] for row in out.rows()) == list(range(2_000))
    assert sorted(log.read_text().splitlines().count(f"writer {i}") for i in range(2)) == [1, 2]


class Opened(Sink):
    """Says when a writer is made."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def writer(self, context: Any) -> SinkWriter:
        with self.log.open("a") as log:
            log.write(f"writer {context.subtask}\n")
        return Nowhere()


class Nowhere(SinkWriter):
    def write(self, batch: pa.RecordBatch) -> None:
        pass


def test_a_job_that_had_finished_reports_it_when_it_is_started_again_and_runs_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def start(restore: str | None) -> Any:
        env = Environment("ends", parallelism=2, checkpoint_dir=tmp_path / "state")
        rows = env.generate(lambda i: {"k": i % KEYS, "n": i}, count=100).uid("rows")
        rows.key_by("k").process_batches(Sums(log), {"sum": int}).uid("sums").sink(Opened(log)).uid("out")
        return env.execute(slots=ProcessSlots(), restore_from=restore)

    assert start(None).state == "finished"
    before = log.read_text()
    again = start("latest")
    assert again.state == "finished"
    assert log.read_text() == before
    assert again.had_finished
    assert again.slots_needed == 0
    assert {tuple(vertex.states) for vertex in again.vertices} == {("finished",)}
    assert any("had finished" in warning and "nothing is run" in warning for warning in again.warnings)


# ---- timers ----


class Later(KeyedProcessFunction):
    """Holds each row for a while of the wall clock."""

    held: ListState[Any] = ListState()

    def __init__(self, wait: timedelta, again: bool = False) -> None:
        self.wait = wait
        self.again = again

    def process(self, row: Any, ctx: Any) -> None:
        self.held.append(row["n"])
        ctx.timers.processing_time(ctx.now + self.wait)

    def on_timer(self, time: datetime, ctx: Any) -> Any:
        if self.again:
            ctx.timers.processing_time(ctx.now + self.wait)
        rows = [{"n": n} for n in self.held]
        self.held.clear()
        return rows


def slowly(frame: pl.DataFrame) -> pl.DataFrame:
    time.sleep(0.005)
    return frame


@pytest.mark.parametrize("wait_ms", [1, 4, 3_600_000])
def test_rows_that_wait_for_the_clock_come_out_before_the_end_however_slow_those_after_them_are(wait_ms: int) -> None:
    env = Environment("late", parallelism=2, restart=no_restart(), tuning=Tuning(batch_rows=20))
    rows = env.generate(lambda i: {"k": i % 50, "n": i}, count=1_000)
    held = rows.key_by("k").process(Later(timedelta(milliseconds=wait_ms)), {"n": int})
    out = held.rebalance().map_batches(slowly).collect()
    status = env.execute(slots=ProcessSlots())
    assert sorted(row["n"] for row in out.rows()) == list(range(1_000))
    assert status.warnings == ()


def test_a_timer_that_sets_itself_again_ends_with_the_input_and_is_reported() -> None:
    env = Environment("anew", parallelism=2, restart=no_restart())
    rows = env.generate(lambda i: {"k": i % 50, "n": i}, count=1_000)
    out = rows.key_by("k").process(Later(timedelta(hours=1), again=True), {"n": int}).name("anew").collect()
    status = env.execute(slots=ProcessSlots())
    assert sorted(row["n"] for row in out.rows()) == list(range(1_000))
    (warning,) = status.warnings
    assert "operator 'anew' has dropped" in warning and "processing-time timers" in warning


def test_a_drain_has_pending_timers_fire_and_a_stop_keeps_them(tmp_path: Path, running: list[Job]) -> None:
    def start(restore: str | None) -> tuple[Job, Any]:
        env = Environment("held", parallelism=2, checkpoint_dir=tmp_path / "state", restart=no_restart())
        rows = env.generate(lambda i: {"k": i % 50, "n": i}, count=1_000_000, rows_per_s=2_000).uid("rows")
        out = rows.key_by("k").process(Later(timedelta(hours=1)), {"n": int}).uid("held").collect()
        job = env.start(slots=ProcessSlots(), restore_from=restore)
        running.append(job)
        return job, out

    def taken(job: Job) -> int:
        return next(op.rows_in for v in job.status().vertices for op in v.operators if op.uid == "held")

    job, out = start(None)
    until("some rows", lambda: taken(job) > 300)
    job.stop()
    assert out.rows() == []
    job, out = start("latest")
    until("some more rows", lambda: taken(job) > 300)
    job.stop(drain=True)
    found = sorted(row["n"] for row in out.rows())
    assert len(found) > 600
    assert len(set(found)) == len(found)
    assert job.status().restarts == 0
