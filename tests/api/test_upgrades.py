"""A job stops with a savepoint and another program resumes from it: nothing lost, nothing doubled, no surprise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import Held
from machine import limit_s
from midstream import (
    CollectSink,
    ConfigError,
    CoProcessFunction,
    Count,
    Environment,
    JobError,
    KeyedProcessFunction,
    Source,
    StorageError,
    ValueState,
    WatermarkStrategy,
    tumbling,
)
from midstream.cli.commands.inspect_checkpoint import read_report
from midstream.cli.main import main
from midstream.connectors.files.file_source import FileSource
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.coordinator.requests import savepoints
from midstream.engine.core.errors import MidstreamError
from midstream.runtime.driver.job import Job
from midstream.runtime.process.process_slots import ProcessSlots
from permissions import unprivileged
from waiting import until

pytestmark = pytest.mark.systems

KEYS = 7
SLOWLY = 4_000
"""Rows per second of a job that is to be stopped."""
ROWS = 40_000


def numbers(columns: Callable[[Any], dict[str, Any]], rows_per_s: float | None, rest: Path) -> Source:
    """All rows. At a rate, so that the job can be stopped, it has half of them until `rest` is there."""
    source = GeneratorSource(columns, ROWS, rows_per_s=rows_per_s)
    return source if rows_per_s is None else Held(source, rest, first=ROWS // 4)


class Counts(KeyedProcessFunction):
    """Numbers the rows of each key."""

    seen = ValueState(pa.int64(), default=0)

    def process(self, row, ctx):
        self.seen.value += 1
        return {"k": row["k"], "nth": self.seen.value}


class CountsAsText(KeyedProcessFunction):
    seen = ValueState(pa.string())

    def process(self, row, ctx):
        raise AssertionError("it is never deployed")


class CountsInText(KeyedProcessFunction):
    """The number is text now, under another name."""

    text = ValueState(str, default="0", was="seen", migrate=lambda seen: f"{seen}")

    def process(self, row, ctx):
        self.text.value = str(int(self.text.value) + 1)
        return {"k": row["k"], "nth": int(self.text.value)}


class CountsInNoText(CountsInText):
    text = ValueState(str, was="seen", migrate=lambda seen: seen)


class Program:
    """Rows by key, numbered in state, collected. What a test changes about it comes as arguments."""

    def __init__(
        self,
        directory: Path,
        *,
        parallelism: int = 2,
        function: KeyedProcessFunction | None = None,
        uid: str = "counts",
        second: bool = False,
        rows_per_s: float | None = None,
        **settings: Any,
    ) -> None:
        self.env = Environment(
            "numbers", parallelism=parallelism, checkpoint_dir=directory, checkpoint_interval=None, **settings
        )
        source = numbers(lambda i: {"k": i % KEYS, "n": i}, rows_per_s, directory.parent / "rest")
        rows = self.env.source(source).uid("rows")
        counted = rows.key_by("k").process(function or Counts(), {"k": int, "nth": int}).uid(uid)
        self.sink = CollectSink()
        counted.rebalance().sink(self.sink).uid("out")
        self.copies = CollectSink()
        if second:
            totals = rows.key_by("k").process(Counts(), {"k": int, "nth": int}).uid("totals")
            totals.sink(self.copies).uid("copies")

    def start(self, running: list[Job], restore: str | None = None, **settings: Any) -> Job:
        job = self.env.start(slots=ProcessSlots(), restore_from=restore, **settings)
        running.append(job)
        return job

    @property
    def rows(self) -> list[tuple[int, int]]:
        return sorted((row["k"], row["nth"]) for row in self.sink.rows())


ALL_ROWS = sorted((k, nth) for k in range(KEYS) for nth in range(1, len(range(k, ROWS, KEYS)) + 1))


def ran_for_a_while(job: Job, rows: int = 2_000) -> None:
    until(
        "some rows",
        lambda: any(o.rows_in >= rows for v in job.status().vertices for o in v.operators if o.uid == "counts"),
    )


def stopped(program: Program, running: list[Job], savepoint: Path) -> None:
    job = program.start(running)
    ran_for_a_while(job)
    assert job.stop(savepoint=savepoint, timeout_s=limit_s(60)) == str(savepoint)
    assert job.status().state == "stopped"
    assert 0 < len(program.rows) < len(ALL_ROWS)


def test_a_changed_program_goes_on_exactly_where_a_savepoint_was_made(running: list[Job], tmp_path: Path) -> None:
    """At another parallelism, with an operator more, in another directory, and the savepoint moved to another place."""
    before = Program(tmp_path / "before", rows_per_s=SLOWLY)
    stopped(before, running, tmp_path / "saved")
    shutil.rmtree(tmp_path / "before")
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "saved", tmp_path / "elsewhere" / "moved")
    after = Program(tmp_path / "after", parallelism=3, second=True)
    after.start(running, str(tmp_path / "elsewhere" / "moved")).wait(limit_s(60))
    assert sorted(before.rows + after.rows) == ALL_ROWS
    fresh = sorted((row["k"], row["nth"]) for row in after.copies.rows())
    assert {k: max(nth for key, nth in fresh if key == k) for k in range(KEYS)} == {
        k: sum(key == k for key, _ in after.rows) for k in range(KEYS)
    }


def test_state_that_a_program_has_no_use_for_is_named_with_its_size_and_dropped_only_if_allowed(
    running: list[Job], tmp_path: Path
) -> None:
    before = Program(tmp_path / "state", second=True, rows_per_s=SLOWLY)
    stopped(before, running, tmp_path / "saved")
    after = Program(tmp_path / "state")
    with pytest.raises(
        ConfigError, match=r"state of 'totals' \(process: [\d,]+ bytes, 7 rows\), which the job no longer"
    ):
        after.start(running, str(tmp_path / "saved")).wait(limit_s(60))
    renamed = Program(tmp_path / "state", uid="count", second=True)
    with pytest.raises(ConfigError, match=r"'counts' .*was it renamed to 'count'\?"):
        renamed.start(running, str(tmp_path / "saved")).wait(limit_s(60))
    after = Program(tmp_path / "state")
    after.start(running, str(tmp_path / "saved"), allow_dropped_state=True).wait(limit_s(60))
    assert sorted(before.rows + after.rows) == ALL_ROWS


def test_state_that_a_program_would_read_wrongly_is_refused_before_anything_runs(
    running: list[Job], tmp_path: Path
) -> None:
    stopped(Program(tmp_path / "state", rows_per_s=SLOWLY), running, tmp_path / "saved")
    saved = str(tmp_path / "saved")
    with pytest.raises(
        ConfigError, match=r"operator 'process' \(uid 'counts'\).* value state 'seen' was int64, now it is"
    ):
        Program(tmp_path / "state", function=CountsAsText()).start(running, saved).wait(limit_s(60))
    with pytest.raises(ConfigError, match="max_parallelism 128, but the job has 64"):
        Program(tmp_path / "state", max_parallelism=64).start(running, saved).wait(limit_s(60))
    assert sorted(path.name for path in (tmp_path / "state").glob("chk-*")) == ["chk-1"]


def hours(directory: Path, size: str) -> tuple[Environment, CollectSink]:
    """Six hours of rows, one for each second; of each three, one and a half come first, and the others when `rest` is there."""
    env = Environment("windows", parallelism=2, checkpoint_dir=directory, checkpoint_interval=None)
    sink = CollectSink()
    seconds = GeneratorSource(
        lambda i: {"k": i % 3, "at": (i * 1_000_000).astype("datetime64[us]")}, 21_600, rows_per_s=10_000
    )
    (
        env.source(Held(seconds, directory / "rest", first=5_400))
        .uid("rows")
        .with_watermarks("at", WatermarkStrategy.monotonous())
        .key_by("k")
        .window(tumbling(size))
        .aggregate(rows=Count())
        .uid("hourly")
        .sink(sink)
        .uid("out")
    )
    return env, sink


def test_windows_of_another_size_do_not_take_over_the_state_of_those_before(running: list[Job], tmp_path: Path) -> None:
    env, sink = hours(tmp_path, "1 h")
    job = env.start(slots=ProcessSlots())
    running.append(job)
    until("a window", lambda: job.checkpoint() and sink.rows())
    job.stop(timeout_s=limit_s(60))
    env, _ = hours(tmp_path, "2 h")
    with pytest.raises(ConfigError, match="the window was tumbling windows of 1 h, now it is tumbling windows of 2 h"):
        env.execute(slots=ProcessSlots(), restore_from="latest")
    (tmp_path / "rest").touch()
    env, later = hours(tmp_path, "1 h")
    job = env.start(slots=ProcessSlots(), restore_from="latest")
    running.append(job)
    job.wait(limit_s(60))
    windows = {(row["k"], row["window_start"]): row["rows"] for row in [*sink.rows(), *later.rows()]}
    assert len(windows) == len(sink.rows()) + len(later.rows()) == 3 * 6
    assert set(windows.values()) == {1200}


def by_column(directory: Path, column: str, second: str | None) -> Environment:
    env = Environment("keyed", parallelism=2, checkpoint_dir=directory, checkpoint_interval=None)
    source = numbers(lambda i: {"k": i % KEYS, "other": i % 3}, SLOWLY, directory.parent / "rest")
    rows = env.source(source).uid("rows")
    keyed = rows.key_by(column)
    if second is None:
        counted = keyed.process(Counts(), {"k": int, "nth": int})
    else:
        counted = keyed.connect(rows.key_by(second)).process(CountsBoth(), {"k": int, "nth": int})
    counted.uid("counts").sink(CollectSink()).uid("out")
    return env


class CountsBoth(CoProcessFunction):
    seen = ValueState(pa.int64(), default=0)

    def process1(self, row, ctx):
        self.seen.value += 1
        return {"k": ctx.key, "nth": self.seen.value}

    process2 = process1


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        (("k", None), ("other", None), "the key was k int64, now it is other int64"),
        (("k", "k"), ("k", "other"), "the key of the second stream was k int64, now it is other int64"),
    ],
)
def test_state_is_not_given_to_the_keys_of_another_column(
    running: list[Job], tmp_path: Path, before: tuple[str, str | None], after: tuple[str, str | None], what: str
) -> None:
    job = by_column(tmp_path / "state", *before).start(slots=ProcessSlots())
    running.append(job)
    ran_for_a_while(job, 100)
    job.stop(savepoint=tmp_path / "saved", timeout_s=limit_s(60))
    for restore in ("latest", str(tmp_path / "saved")):
        with pytest.raises(ConfigError, match=f"{what}; .* rename it back before key_by"):
            by_column(tmp_path / "state", *after).execute(slots=ProcessSlots(), restore_from=restore)


def test_state_that_is_migrated_goes_on_exactly_and_a_migration_that_fails_ends_the_job(
    running: list[Job], tmp_path: Path
) -> None:
    before = Program(tmp_path / "before", rows_per_s=SLOWLY)
    stopped(before, running, tmp_path / "saved")
    saved = str(tmp_path / "saved")
    job = Program(tmp_path / "failed", function=CountsInNoText()).start(running, saved)
    with pytest.raises(JobError, match=r"state 'text': migrate\(\d+\) of key \d returned \d+, which does not fit"):
        job.wait(limit_s(60))
    assert job.status().restarts == 0
    after = Program(tmp_path / "after", function=CountsInText(), parallelism=3, rows_per_s=SLOWLY)
    job = after.start(running, saved)
    ran_for_a_while(job)
    assert job.checkpoint() is not None
    job.rescale(2)
    (tmp_path / "rest").touch()
    job.wait(limit_s(60))
    assert sorted(before.rows + after.rows) == ALL_ROWS


# ---- finished operators ----------------------------------------------------


def with_lookup(
    directory: Path,
    files: Path,
    *,
    new_source: bool = False,
    sum_too: bool = False,
    rows_per_s: float | None = None,
) -> tuple[Environment, tuple[CollectSink, CollectSink]]:
    """A bounded side that is read to its end while the other goes on, both into one keyed function's stream."""
    env = Environment("lookup", parallelism=2, checkpoint_dir=directory, checkpoint_interval="200 ms")
    small = env.read_files(files, format="parquet").uid("new-small" if new_source else "small")
    sink, lookups = CollectSink(), CollectSink()
    kept = small.key_by("k").process(Counts(), {"k": int, "nth": int}).uid("kept")
    kept.sink(lookups).uid("lookups")
    if sum_too:
        env.from_collection([{"k": 1}]).uid("more").key_by("k").process(Counts(), {"k": int, "nth": int}).uid(
            "more-counts"
        ).sink(CollectSink()).uid("more-out")
    source = numbers(lambda i: {"k": i % KEYS, "n": i}, rows_per_s, directory.parent / "rest")
    big = env.source(source).uid("big")
    big.key_by("k").process(Counts(), {"k": int, "nth": int}).uid("counts").sink(sink).uid("out")
    return env, (sink, lookups)


@pytest.fixture
def half_finished(running: list[Job], tmp_path: Path) -> Callable[[], list[int]]:
    """Stopped once the bounded side had finished; returns how many rows it had emitted."""
    pq.write_table(pa.table({"k": pa.array([1, 2, 1], pa.int64())}), tmp_path / "small.parquet")
    env, (sink, lookups) = with_lookup(tmp_path / "state", tmp_path / "small.parquet", rows_per_s=SLOWLY)
    job = env.start(slots=ProcessSlots())
    running.append(job)
    until("the bounded side has finished", lambda: any(v.states.get("finished") == 2 for v in job.status().vertices))
    job.stop(savepoint=tmp_path / "saved", timeout_s=limit_s(60))
    assert len(lookups.rows()) == 3
    return lambda: [row["nth"] for row in sink.rows()]


def test_what_has_finished_is_not_run_again_by_a_changed_program(
    running: list[Job], tmp_path: Path, half_finished: Callable[[], list[int]]
) -> None:
    env, (sink, lookups) = with_lookup(tmp_path / "next", tmp_path / "small.parquet", sum_too=True)
    job = env.start(slots=ProcessSlots(), restore_from=str(tmp_path / "saved"), parallelism=3)
    running.append(job)
    assert job.wait(limit_s(60)).state == "finished"
    assert lookups.rows() == []
    assert len(half_finished()) + len(sink.rows()) == ROWS


def test_a_new_source_in_front_of_a_finished_operator_is_refused_naming_both(
    running: list[Job], tmp_path: Path, half_finished: Callable[[], list[int]]
) -> None:
    env, _ = with_lookup(tmp_path / "next", tmp_path / "small.parquet", new_source=True)
    with pytest.raises(
        ConfigError, match=r"operator 'kept' had fully finished .*'new-small', which feeds it now, had not"
    ):
        env.execute(slots=ProcessSlots(), restore_from=str(tmp_path / "saved"), allow_dropped_state=True)


def lopsided(directory: Path, files: Path, parallelism: int) -> tuple[Environment, CollectSink]:
    env = Environment("lopsided", parallelism=parallelism, checkpoint_dir=directory, checkpoint_interval="100 ms")
    sink = CollectSink()
    source = FileSource(files, format="parquet", rows_per_s=4_000)
    rows = env.source(Held(source, directory.parent / "rest", first=4_500)).uid("rows")
    rows.key_by("k").process(Counts(), {"k": int, "nth": int}).uid("counts").sink(sink).uid("out")
    return env, sink


@pytest.mark.parametrize("parallelism", [2, 3])
def test_a_source_of_which_one_subtask_had_finished_goes_on_with_the_rest(
    running: list[Job], tmp_path: Path, parallelism: int
) -> None:
    (tmp_path / "in").mkdir()
    for name, count in (("short", 7), ("long", 9_000)):
        keys = pa.array([i % KEYS for i in range(count)], pa.int64())
        pq.write_table(pa.table({"k": keys}), tmp_path / "in" / f"{name}.parquet")
    env, before = lopsided(tmp_path / "state", tmp_path / "in", 2)
    job = env.start(slots=ProcessSlots())
    running.append(job)
    until("one has finished", lambda: job.status().vertices[0].states.get("finished") == 1)
    job.stop(savepoint=tmp_path / "saved", timeout_s=limit_s(60))
    report = read_report(str(tmp_path / "saved"))
    assert [operator.finished_subtasks for operator in report.operators if operator.uid == "rows"] == [1]
    (tmp_path / "rest").touch()
    env, after = lopsided(tmp_path / "next", tmp_path / "in", parallelism)
    env.execute(slots=ProcessSlots(), restore_from=str(tmp_path / "saved"))
    found = sorted((row["k"], row["nth"]) for row in [*before.rows(), *after.rows()])
    assert found == sorted((k, nth) for k in range(KEYS) for nth in range(1, len(range(k, 9_000, KEYS)) + 2))


# ---- what goes wrong -------------------------------------------------------


def test_a_place_that_cannot_be_had_leaves_the_job_running(running: list[Job], tmp_path: Path, open_path: Path) -> None:
    program = Program(tmp_path / "state", rows_per_s=2 * SLOWLY)
    job = program.start(running)
    ran_for_a_while(job, 1)
    with pytest.raises(JobError, match=r"this is in the job's checkpoint directory"):
        job.stop(savepoint=tmp_path / "state")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "something").touch()
    with pytest.raises(JobError, match=r"the place is taken \(it has something\)"):
        job.stop(savepoint=tmp_path / "taken")
    open_path.chmod(0o555)
    for make in (job.savepoint, lambda place: job.stop(savepoint=place)):
        with unprivileged(), pytest.raises(JobError, match=r"no savepoint was made: .*permission denied"):
            make(open_path / "here")
    with pytest.raises(ConfigError, match="an empty path"):
        job.savepoint("")
    assert job.status().state == "running"
    (tmp_path / "rest").touch()
    assert job.wait(limit_s(60)).restarts == 0
    assert program.rows == ALL_ROWS


def test_a_savepoint_that_fails_half_way_leaves_the_job_running_and_its_sources_reading(
    running: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StorageError("cannot write chk-1/_metadata: the disk is full")

    program = Program(tmp_path / "state", rows_per_s=2 * SLOWLY)
    job = program.start(running)
    ran_for_a_while(job, 1)
    monkeypatch.setattr(savepoints, "write_savepoint", full)
    with pytest.raises(JobError, match=r"no savepoint was made: .*disk is full; the job continues"):
        job.stop(savepoint=tmp_path / "saved", timeout_s=limit_s(60))
    assert list((tmp_path / "saved").iterdir()) == []
    monkeypatch.undo()
    assert Path(job.savepoint(timeout_s=limit_s(60))) == tmp_path / "state" / "savepoints" / "1"
    (tmp_path / "rest").touch()
    assert job.wait(limit_s(60)).restarts == 0
    assert program.rows == ALL_ROWS


def test_the_command_line_makes_one_shows_it_and_stops_with_one(
    running: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Program(tmp_path / "state", rows_per_s=SLOWLY).start(running)
    ran_for_a_while(job, 1)
    monkeypatch.chdir(tmp_path)

    def said(*arguments: str, status: int = 0) -> Any:
        assert main([*arguments, "--json"]) == status
        return json.loads(capsys.readouterr().out)

    assert said("savepoint", job.job_id, "saved") == {
        "format_version": 1,
        "job_id": job.job_id,
        "savepoint": str(tmp_path / "saved"),
    }
    assert "the place is taken (it has _savepoint)" in said("savepoint", job.job_id, "saved", status=1)["error"]
    shown = said("inspect", "saved")
    assert shown["savepoint"] is True and shown["problems"] == []
    (counts,) = (op for op in shown["operators"] if op["uid"] == "counts")
    assert counts["settings"] == ["value state 'seen' int64", "the key k int64"]
    assert "give only one" in said("stop", job.job_id, "--drain", "--savepoint", "more", status=2)["error"]
    assert said("stop", job.job_id, "--savepoint", "more")["savepoint"] == str(tmp_path / "more")
    job.wait(limit_s(60))
    assert "no running job" in said("stop", job.job_id, status=2)["error"]
    assert said("inspect", "more")["savepoint"] is True


def test_a_savepoint_is_not_taken_for_a_checkpoint_directory(running: list[Job], tmp_path: Path) -> None:
    stopped(Program(tmp_path / "state", rows_per_s=SLOWLY), running, tmp_path / "saved")
    with pytest.raises(MidstreamError, match="holds a savepoint, which a job must not change"):
        Program(tmp_path / "saved").start(running, "latest").wait(limit_s(60))
    with pytest.raises(MidstreamError, match="there is no such directory, or nothing is in it"):
        Program(tmp_path / "state").start(running, str(tmp_path / "sived")).wait(limit_s(60))


def test_a_checkpoint_that_cannot_be_restored_is_reported_before_spark_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "midstream.api.submit._spark_slots", lambda master, slots: pytest.fail("Spark was to be started")
    )
    env = Environment("visits", checkpoint_dir=tmp_path / "state")
    env.generate(lambda i: {"n": i}, count=5).print()
    for restore, reason in (
        ("17", "checkpoint 17 is not in the checkpoint directory, which has: none"),
        (tmp_path / "nowhere", "nowhere: there is no such directory, or nothing is in it"),
        (tmp_path / "state" / "chk-3", "checkpoint 3 is not in the checkpoint directory"),
    ):
        with pytest.raises(StorageError, match=reason):
            env.start(restore_from=str(restore))
    assert not (tmp_path / "state").exists()
