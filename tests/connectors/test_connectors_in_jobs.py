"""Files in, files out, in real jobs on plain processes: killed, stopped, restored, and every row there once."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import polars as pl
import pytest

from jobs import Held
from machine import limit_s
from midstream import ConfigError, Environment, JobError, StorageError
from midstream.connectors.files import directory_watch
from midstream.connectors.files.file_source import FileSource
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def add_file(inputs: Path, name: str, numbers: range) -> None:
    half_written = inputs / f".{name}"
    pl.DataFrame({"n": list(numbers)}, schema={"n": pl.Int64}).write_parquet(half_written, row_group_size=500)
    half_written.rename(inputs / name)


def committed(out: Path) -> list[int]:
    return sorted(pl.read_parquet(out)["n"].to_list()) if out.exists() and any(out.iterdir()) else []


def pending(out: Path) -> list[Path]:
    return [p for p in (out.parent / f".{out.name}.midstream").rglob("*") if p.is_file() and p.name != "committed"]


def copying(tmp_path: Path, inputs: Path, *, watch: bool, rows_per_s: float | None = None) -> Environment:
    env = Environment("copy", parallelism=2, checkpoint_dir=tmp_path / "checkpoints", checkpoint_interval="200 ms")
    stream = env.source(FileSource(inputs, watch=watch, interval="50 ms", rows_per_s=rows_per_s)).uid("in")
    stream.write_parquet(tmp_path / "out").uid("out")
    return env


@pytest.mark.systems
def test_files_are_copied_exactly_once_although_a_slot_is_killed(tmp_path, inputs):
    for part in range(4):
        add_file(inputs, f"{part}.parquet", range(part * 5000, part * 5000 + 5000))
    job = copying(tmp_path, inputs, watch=True, rows_per_s=10_000).start(slots=ProcessSlots())
    out = tmp_path / "out"
    until("something committed", lambda: len(committed(out)) > 0)
    os.kill(next(pid for pid in job.status().slot_pids if pid), signal.SIGKILL)
    until("the restart", lambda: job.status().restarts)
    until("everything committed", lambda: len(committed(out)) >= 20_000)
    job.stop(drain=True, timeout_s=limit_s(60))
    assert committed(out) == list(range(20_000))
    assert pending(out) == []


@pytest.mark.systems
def test_a_watched_directory_goes_on_after_stop_and_restore_with_files_that_came_meanwhile(
    tmp_path, inputs, monkeypatch
):
    monkeypatch.setattr(directory_watch, "REST_S", 0.0)
    out = tmp_path / "out"
    add_file(inputs, "5.parquet", range(5000))
    job = copying(tmp_path, inputs, watch=True, rows_per_s=20_000).start(slots=ProcessSlots())
    until("something committed", lambda: len(committed(out)) > 0)
    job.stop(timeout_s=limit_s(60))
    first = committed(out)
    assert first == sorted(set(first))
    assert pending(out) == []
    add_file(inputs, "1.parquet", range(5000, 6000))
    os.utime(inputs / "1.parquet", (0, 0))
    with pytest.raises(ConfigError, match="has checkpoints of this job, the newest is"):
        copying(tmp_path, inputs, watch=True).start(slots=ProcessSlots())
    with pytest.raises(ConfigError, match="is not empty"):
        copying(tmp_path, inputs, watch=True).start(slots=ProcessSlots(), fresh=True)
    job = copying(tmp_path, inputs, watch=True).start(slots=ProcessSlots(), restore_from="latest", parallelism=2)
    until("all files read", lambda: len(committed(out)) >= 6000)
    add_file(inputs, "9.parquet", range(6000, 6500))
    until("the last file read", lambda: len(committed(out)) >= 6500)
    job.stop(drain=True, timeout_s=limit_s(60))
    assert committed(out) == list(range(6500))
    assert pending(out) == []


@pytest.mark.systems
def test_after_a_plain_stop_the_output_may_go_to_another_directory(tmp_path):
    def writing_to(name: str) -> Environment:
        env = Environment("moved", checkpoint_dir=tmp_path / "checkpoints", checkpoint_interval=None)
        numbers = GeneratorSource(lambda i: {"n": i}, 20_000, rows_per_s=10_000)
        rows = env.source(Held(numbers, tmp_path / "rest", first=10_000)).uid("in")
        rows.write_parquet(tmp_path / name).uid("out")
        return env

    job = writing_to("v1").start(slots=ProcessSlots())
    until("rows", lambda: job.status().vertices[0].operators[0].rows_out)
    job.stop(timeout_s=limit_s(60))  # its checkpoint, the only one, holds all that is in v1
    first = committed(tmp_path / "v1")
    (tmp_path / "rest").touch()
    assert writing_to("v2").execute(slots=ProcessSlots(), restore_from="latest").restarts == 0
    assert committed(tmp_path / "v1") == first
    assert sorted(first + committed(tmp_path / "v2")) == list(range(20_000))
    assert pending(tmp_path / "v1") + pending(tmp_path / "v2") == []
    shutil.rmtree(tmp_path / "v2")
    shutil.rmtree(tmp_path / ".v2.midstream")
    with pytest.raises(StorageError, match=r"sink 'parquet': checkpoint 2: .*\.v2\.midstream/.* and it is missing"):
        writing_to("v3").start(slots=ProcessSlots(), restore_from="latest")


def test_a_damaged_file_fails_the_job_with_its_name_and_nothing_of_it_is_committed(tmp_path, inputs):
    (inputs / "1.csv").write_text("n\n1\n2\n")
    (inputs / "2.csv").write_text("n\n3\nx\n")
    env = Environment("damaged", checkpoint_dir=tmp_path / "checkpoints")
    env.read_files(inputs).write_jsonl(tmp_path / "out")
    with pytest.raises(JobError, match=r"2\.csv, line 3: column 'n': CSV conversion error to int64: invalid value 'x'"):
        env.execute(slots=ProcessSlots())
    assert list((tmp_path / "out").iterdir()) == []
    assert pending(tmp_path / "out") == []


def test_the_print_sink_needs_no_checkpoints_and_json_lines_are_read_back(tmp_path, inputs):
    add_file(inputs, "1.parquet", range(100))
    env = Environment("through", parallelism=2)
    env.read_files(inputs).write_jsonl(tmp_path / "out")
    assert env.execute(slots=ProcessSlots()).state == "finished"
    again = Environment("back")
    stream = again.read_files(tmp_path / "out")
    stream.print(limit=2)
    rows = stream.collect()
    assert again.execute(slots=ProcessSlots()).state == "finished"
    assert sorted(row["n"] for row in rows.rows()) == list(range(100))
