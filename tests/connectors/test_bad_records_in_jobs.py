"""Bad records in real jobs: aside once each although slots die, counted, one too many ends the job."""

from __future__ import annotations

import os
import signal
from datetime import datetime, timedelta
from pathlib import Path

import polars as pl
import pytest

from machine import limit_s
from midstream import BAD_RECORDS, Count, Environment, JobError, Tuning, WatermarkStrategy, tumbling
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until

ROWS = 20_000


def is_bad(n: int) -> bool:
    return n % 11 == 3


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for part in range(4):
        numbers = range(part * ROWS // 4, (part + 1) * ROWS // 4)
        lines = [f'{{"n": "{n} is bad"}}' if is_bad(n) else f'{{"n": {n}}}' for n in numbers]
        (tmp_path / "in" / f"{part}.jsonl").write_text("\n".join(lines))
    return tmp_path / "in"


def committed(out: Path, column: str) -> list[object]:
    return sorted(pl.read_parquet(out)[column].to_list()) if out.exists() and any(out.iterdir()) else []


@pytest.mark.systems
def test_good_and_bad_lines_are_each_written_once_although_a_slot_is_killed(tmp_path, inputs):
    env = Environment("bad", parallelism=2, checkpoint_dir=tmp_path / "checkpoints", checkpoint_interval="200 ms")
    stream = env.read_files(
        inputs, schema={"n": int}, watch=True, on_bad_record="drop", bad_records_max=(200, 1_000), rows_per_s=10_000
    ).uid("in")
    stream.write_parquet(tmp_path / "good").uid("good")
    stream.side_output(BAD_RECORDS).write_parquet(tmp_path / "bad").uid("bad")
    job = env.start(slots=ProcessSlots())
    until("bad records committed", lambda: len(committed(tmp_path / "bad", "position")) > 100)
    os.kill(next(pid for pid in job.status().slot_pids if pid), signal.SIGKILL)
    until("the restart", lambda: job.status().restarts)
    good = [n for n in range(ROWS) if not is_bad(n)]
    until("every good one is committed", lambda: len(committed(tmp_path / "good", "n")) >= len(good))
    job.stop(drain=True, timeout_s=limit_s(60))
    status = job.status()
    assert committed(tmp_path / "good", "n") == good
    found = pl.read_parquet(tmp_path / "bad")
    assert sorted(found["bytes"].to_list()) == sorted(b'{"n": "%d is bad"}' % n for n in range(ROWS) if is_bad(n))
    for row in found.sample(20, seed=0).to_dicts():
        assert Path(row["source"]).read_bytes()[row["position"] :].startswith(row["bytes"])
        assert "Column" in row["error"] or "JSON" in row["error"], row["error"]
    operators = {operator.uid: operator for vertex in status.vertices for operator in vertex.operators}
    assert operators["in"].bad_records >= sum(map(is_bad, range(ROWS)))
    assert any("has skipped" in warning and "BAD_RECORDS" in warning for warning in status.warnings)


@pytest.mark.systems
def test_dropped_lines_are_counted_although_nobody_takes_them(inputs):
    env = Environment("bad", parallelism=1)
    rows = env.read_files(inputs, schema={"n": int}, on_bad_record="drop").collect()
    status = env.execute(slots=ProcessSlots())
    assert [row["n"] for row in rows.rows()] == [n for n in range(ROWS) if not is_bad(n)]
    assert [op.bad_records for vertex in status.vertices for op in vertex.operators] == [1_818, 0]


def test_one_too_many_ends_the_job_at_once_and_names_it(tmp_path, inputs):
    env = Environment("bad", parallelism=1, checkpoint_dir=tmp_path / "checkpoints")
    stream = env.read_files(inputs, schema={"n": int}, on_bad_record="drop", bad_records_max=(90, 1_000))
    stream.side_output(BAD_RECORDS).collect()
    stream.collect()
    with pytest.raises(JobError, match=r"0\.jsonl, byte \d+: .*; 91 of the last 994 records .*allows 90 of 1000"):
        env.execute(slots=ProcessSlots())


@pytest.mark.systems
def test_taking_bad_records_aside_leaves_event_time_to_each_split(tmp_path):
    """Watermarks are made in the task of the source, where splits are known, whoever takes bad records aside."""
    (tmp_path / "in").mkdir()
    start = datetime(2024, 1, 1)
    for file in range(4):
        times = [start + timedelta(minutes=3 - file, seconds=2 * second) for second in range(30)]
        lines = [f'{{"at": "{at.isoformat()}"}}' for at in times]
        (tmp_path / "in" / f"{file}.jsonl").write_text("\n".join([*lines, "oh dear"]))
    env = Environment("bad", parallelism=4, tuning=Tuning(batch_rows=1))
    stream = env.read_files(tmp_path / "in", schema={"at": datetime}, on_bad_record="drop")
    counts = (
        stream.with_watermarks("at", WatermarkStrategy.monotonous())
        .window_all(tumbling("1 min"))
        .aggregate(rows=Count())
    )
    rows, bad = counts.collect(), stream.side_output(BAD_RECORDS).collect()
    assert "files → watermarks" in env.explain(), "or splits would not be told apart"
    status = env.execute(slots=ProcessSlots())
    assert [row["rows"] for row in rows.rows()] == [30] * 4
    assert [row["bytes"] for row in bad.rows()] == [b"oh dear"] * 4
    assert sum(op.late_rows for vertex in status.vertices for op in vertex.operators) == 0


def test_bad_records_of_a_stream_that_has_none_are_refused_with_the_way_to_have_them(inputs):
    stream = Environment("bad").read_files(inputs, schema={"n": int})
    with pytest.raises(JobError, match="of which on_bad_record='drop' takes them aside"):
        stream.side_output(BAD_RECORDS)
