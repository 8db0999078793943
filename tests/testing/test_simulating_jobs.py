"""What `simulate` takes, what it refuses, what it does in several processes, and what a run is repeated with."""

from __future__ import annotations

import calendar
import importlib
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet
import pytest

from midstream import Environment, KeyedProcessFunction, Source, ValueState
from midstream.engine.core.errors import ConfigError, JobError, SchemaError
from midstream.engine.operators.source_api import Discovery, DiscoveryContext, Split, SplitReader
from midstream.simulation.faults import Fault
from midstream.testing import run, simulate
from midstream.testing.simulate import campaign_of
from midstream.testing.simulation.campaign import Campaign
from midstream.testing.simulation.job_scenario import FAULTS, REFERENCE, WORDS, Cuts, Failures, Outer, Width, only
from midstream.testing.simulation.simulated_run import run_job
from midstream.testing.simulation.verdict import LONG, judge

ROWS = [{"id": i, "key": i % 3} for i in range(30)]


class Count(KeyedProcessFunction):
    count = ValueState(pa.int64(), 0)

    def process(self, row: dict[str, Any], ctx: Any) -> dict[str, Any]:
        self.count.value += 1
        return {"id": row["id"], "n": self.count.value}


def counting() -> Environment:
    env = Environment("counting")
    rows = env.from_collection(ROWS, splits=1).uid("rows")
    rows.key_by("key").process(Count(), {"id": int, "n": int}).uid("count").print().uid("out")
    return env


def campaign(env: Environment, **options: Any) -> Campaign:
    return campaign_of(env, {}, latest={}, ignore={}, **options)


def output(env: Environment, inputs: Any = None) -> list[dict[str, Any]]:
    """Of the run without failures."""
    made = campaign_of(env, inputs or {}, latest={}, ignore={})
    ran = run_job(made.job, REFERENCE)
    assert not ran.error
    return [row for table in ran.output.values() for row in table.to_pylist()]


def test_a_job_is_what_it_is_without_the_simulator() -> None:
    assert sorted(row["id"] for row in output(counting())) == list(range(30))
    assert max(row["n"] for row in output(counting())) == 10


@pytest.mark.parametrize("form", ["dicts", "table", "batch", "frame", "parquet", "csv", "jsonl"])
def test_rows_are_given_in_any_form(form: str, tmp_path: Path) -> None:
    frame = pl.DataFrame({"key": [7, 8], "id": [1, 2], "more": ["x", "y"]})
    frame.write_parquet(tmp_path / "rows.parquet")
    frame.write_csv(tmp_path / "rows.csv")
    frame.write_ndjson(tmp_path / "rows.jsonl")
    forms = {
        "dicts": frame.drop("more").to_dicts(),
        "table": frame.to_arrow(),
        "batch": frame.to_arrow().to_batches()[0],
        "frame": frame,
    }
    rows = forms.get(form, tmp_path / f"rows.{form}")
    assert sorted(row["id"] for row in output(counting(), {"rows": rows})) == [1, 2]


def test_dicts_are_read_as_those_of_a_run_in_a_test_are() -> None:
    env = Environment("times")
    env.from_collection([], schema={"at": datetime, "x": int}).uid("rows").print().uid("out")
    rows: list[dict[str, Any]] = [{"at": "2024-01-01 12:00"}, {"x": 1}]
    expected = [{"at": datetime(2024, 1, 1, 12), "x": None}, {"at": None, "x": 1}]
    assert run(env, {"rows": rows}).rows == expected
    assert output(env, {"rows": rows}) == expected
    assert simulate(env, {"rows": rows}, seeds=range(2)).ok


RUNS: dict[int, int] = {}


class CountInAGlobal(KeyedProcessFunction):
    def process(self, row: dict[str, Any], ctx: Any) -> dict[str, Any]:
        RUNS[ctx.key] = RUNS.get(ctx.key, 0) + 1
        return {"n": RUNS[ctx.key]}


def test_each_task_of_each_run_has_classes_and_global_variables_of_its_own() -> None:
    env = Environment("one row")
    rows = env.from_collection([{"key": 0}]).uid("rows")
    rows.key_by("key").process(CountInAGlobal(), {"n": int}).print().uid("out")
    made = campaign(env)
    before = CountInAGlobal.process
    for seed in range(10):
        wide = replace(only(made.scenario(seed), "cuts", "order"), width=Width(3, 3))
        for scenario in (REFERENCE, wide):
            assert [table.to_pylist() for table in run_job(made.job, scenario).output.values()] == [[{"n": 1}]]
    assert RUNS == {}
    assert CountInAGlobal.process is before


class Parity(Enum):
    EVEN = 0
    ODD = 1


@dataclass(frozen=True, slots=True)
class Counted:
    n: int
    parity: Parity


class CountInClasses(KeyedProcessFunction):
    counted = ValueState()

    def process(self, row: dict[str, Any], ctx: Any) -> dict[str, Any]:
        before = self.counted.value or Counted(0, Parity.EVEN)
        assert isinstance(before, Counted)
        assert before.parity is (Parity.ODD if before.n % 2 else Parity.EVEN)
        n = before.n + 1
        self.counted.value = Counted(n, Parity.ODD if n % 2 else Parity.EVEN)
        return {"id": row["id"], "n": n}


def test_state_that_holds_the_jobs_classes_is_restored_as_those_of_the_task() -> None:
    env = Environment("classes")
    rows = env.from_collection(ROWS, splits=1).uid("rows")
    rows.key_by("key").process(CountInClasses(), {"id": int, "n": int}).print().uid("out")
    assert simulate(env, seeds=range(40)).ok


def test_a_stream_is_simulated_without_a_sink() -> None:
    env = Environment("half a job")
    stream = env.from_collection(ROWS, splits=1).filter(pl.col("id") > 3)
    env.from_collection([{"other": 1}])  # what is not needed is left alone
    assert simulate(stream, seeds=range(3)).ok


def test_the_same_seed_is_the_same_run() -> None:
    made = campaign(counting())
    first, second = (run_job(made.job, made.scenario(7), keep_trace=True) for _ in range(2))
    assert first.trace is not None
    assert second.trace is not None
    assert first.steps == second.steps
    assert list(first.trace.lines()) == list(second.trace.lines())


def test_every_kind_of_fault_is_drawn_strikes_and_has_words() -> None:
    made = campaign(counting())
    assert WORDS.keys() == {*FAULTS, "drain"}
    struck: set[str] = set()
    for seed in range(400):
        struck.update(run_job(made.job, made.scenario(seed)).struck)
        if struck >= WORDS.keys():
            return
    assert WORDS.keys() - struck == set()


def test_a_source_that_cannot_be_read_once_fails_its_task_and_loses_nothing() -> None:
    made = campaign(counting())
    scenario = replace(REFERENCE, cuts=Cuts(5), failures=Failures((Fault(20, "read_fails", 0),)))
    ran = run_job(made.job, scenario, keep_trace=True)
    assert ran.trace is not None
    assert list(ran.trace.lines("cannot read split 0"))
    assert not judge(made.job, run_job(made.job, REFERENCE), ran, made.contracts).kind


@pytest.mark.systems
def test_two_processes_find_what_one_finds() -> None:
    env = Environment("wrong")
    env.from_collection(ROWS, splits=1).filter(lambda row: random.random() < 0.5).print()
    with pytest.raises(AssertionError, match="random numbers"):
        simulate(env, seeds=range(20), jobs=2)
    report = simulate(counting(), seeds=range(7), jobs=2)
    assert (report.ok, report.seeds) == (True, 7)


def test_time_is_up_before_all_seeds_are() -> None:
    report = simulate(counting(), seeds=range(1_000_000), seconds=0.3)
    assert report.ok
    assert 0 < report.seeds < 10_000


def test_the_world_is_what_it_was_after_a_run() -> None:
    clocks = time.time, time.monotonic, time.sleep, time.localtime, time.strftime
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.rand()
    random.seed(5)
    np.random.seed(5)
    env = Environment("clocks")
    asleep = env.from_collection(ROWS, splits=1).filter(lambda row: time.sleep(100) is None)
    asleep.print()
    began_s = time.monotonic()
    simulate(env, seeds=range(3))
    assert time.monotonic() - began_s < 100, "nobody really sleeps"
    assert (time.time, time.monotonic, time.sleep, time.localtime, time.strftime) == clocks
    assert (random.random(), np.random.rand()) == expected


def test_a_clock_that_is_only_read_is_no_mistake() -> None:
    env = Environment("clocks")
    env.from_collection(ROWS, splits=1).filter(lambda row: datetime.now() > datetime(2000, 1, 1)).print()
    assert simulate(env, seeds=range(5)).ok


def test_all_clocks_of_a_run_agree() -> None:
    class Clocks(KeyedProcessFunction):
        def process(self, row: dict[str, Any], ctx: Any) -> dict[str, Any]:
            at_s = time.time()
            others = [
                ctx.now.timestamp(),
                datetime.now(UTC).timestamp(),
                time.mktime(time.localtime()),
                calendar.timegm(time.gmtime()),
                time.mktime(time.strptime(time.ctime())),
                time.mktime(time.strptime(time.asctime())),
                time.mktime(time.strptime(time.strftime("%Y-%m-%d %H:%M:%S"), "%Y-%m-%d %H:%M:%S")),
            ]
            return {"at": at_s, "apart": max(abs(at_s - other) for other in others)}

    env = Environment("clocks")
    env.from_collection([{"id": 1}]).key_by("id").process(Clocks(), {"at": float, "apart": float}).print()
    made = campaign(env)
    seen = []
    for clock_s in (0.0, 1e6):
        ran = run_job(made.job, replace(REFERENCE, outer=Outer(clock_s=clock_s)))
        (row,) = next(iter(ran.output.values())).to_pylist()
        assert row["apart"] < 2
        seen.append(row["at"])
    assert 1e6 - 2 < seen[1] - seen[0] < 1e6 + 2


def test_a_clock_that_cannot_be_simulated_is_warned_of() -> None:
    env = Environment("clocks")
    env.from_collection(ROWS, splits=1).filter(lambda row: np.datetime64("now") > np.datetime64("2000")).print()
    (warning,) = simulate(env, seeds=range(2)).warnings
    assert "test_simulating_jobs.py:" in warning
    assert "reads the clock in a way that cannot be simulated" in warning


def test_a_function_that_only_searches_a_set_is_no_mistake() -> None:
    env = Environment("sets")
    wanted = {"id 3", "id 5"}
    env.from_collection(ROWS, splits=1).filter(lambda row: f"id {row['id']}" in wanted | set()).print()
    assert simulate(env, seeds=range(3)).ok


# ---- what is refused


class FromSpark(Source):
    schema = pa.schema([("id", pa.int64())])

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        raise AssertionError("Spark would be started")

    def open_split(self, split: Split) -> SplitReader:
        raise AssertionError("Spark would be started")


FromSpark.__module__ = "midstream.spark.dataframe"


def test_a_source_of_spark_needs_recorded_rows() -> None:
    env = Environment("spark")
    env.source(FromSpark()).uid("frame").print()
    with pytest.raises(JobError, match=r"'frame'.*uses Spark.*--rows frame=sample.parquet"):
        simulate(env, seeds=range(1))
    assert simulate(env, {"frame": [{"id": 1}]}, seeds=range(1)).ok


class Unreadable(FromSpark):
    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        raise JobError("the server does not answer")


def test_a_source_that_cannot_be_read_is_named() -> None:
    env = Environment("unreadable")
    env.source(Unreadable()).uid("server").print()
    with pytest.raises(JobError, match=r"'server'.*the server does not answer.*--rows server="):
        simulate(env)


def refused() -> Iterator[Any]:
    yield pytest.param({"inputs": {"row": ROWS}}, JobError, "'row'; the sources of this job are 'rows'", id="uid")
    yield pytest.param({"inputs": {"rows": pl.DataFrame({"id": [1]})}}, SchemaError, "no column 'key'", id="column")
    yield pytest.param({"inputs": {"rows": [{"idd": 1}]}}, SchemaError, "'rows'.*'idd'", id="unknown-column")
    yield pytest.param({"inputs": {"rows": [{"id": "a", "key": 1}]}}, SchemaError, "'rows'.*'id'", id="type")
    yield pytest.param({"inputs": {"rows": []}}, JobError, "has no rows", id="nothing")
    yield pytest.param({"inputs": {"rows": pl.DataFrame(ROWS).clear()}}, JobError, "has no rows", id="empty")
    yield pytest.param({"inputs": {"rows": 5}}, JobError, "are a int", id="kind")
    yield pytest.param({"inputs": {"rows": "nowhere.parquet"}}, ConfigError, "cannot be read", id="file")
    yield pytest.param({"inputs": {"rows": "rows.txt"}}, ConfigError, "ends with .txt", id="format")
    yield pytest.param({"rows_max": 0}, ConfigError, "--rows-max: 0", id="rows-max")
    yield pytest.param({"latest": {"sink": ["id"]}}, ConfigError, "'sink' is not a sink.* 'out'", id="sink")
    yield pytest.param({"ignore": {"out": ["at"]}}, ConfigError, "no column 'at'; it has id, n", id="ignore")
    yield pytest.param({"parallelism": 1000}, JobError, "none of the parallelisms", id="parallelism")
    yield pytest.param({"parallelism": ()}, ConfigError, "parallelism", id="no-parallelism")
    yield pytest.param({"jobs": 0}, ConfigError, "jobs: 0", id="jobs")
    yield pytest.param({"seeds": ()}, ConfigError, "no seeds", id="seeds")


@pytest.mark.parametrize(("arguments", "kind", "says"), list(refused()))
def test_what_cannot_be_is_refused(arguments: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        simulate(counting(), **arguments)


def test_what_is_no_job_is_refused() -> None:
    with pytest.raises(JobError, match="neither an Environment nor a stream"):
        simulate("job.py")  # type: ignore[arg-type]
    with pytest.raises(JobError, match="no streams"):
        simulate(Environment("empty"))


def test_a_job_that_never_ends_by_itself_is_over_with_its_recorded_rows() -> None:
    env = Environment("endless")
    env.generate(lambda i: {"n": i}).print()
    report = simulate(env, seeds=range(3), rows_max=40)
    assert report.rows == 40


def imported(directory: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    (directory / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(directory))
    return importlib.import_module(name)


def test_a_module_with_a_lock_is_imported_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
import threading

LOCK = threading.Lock()

def kept(row):
    with LOCK:
        return row["id"] > 3
"""
    module = imported(tmp_path, "simulated_with_a_lock", text, monkeypatch)
    env = Environment("lock")
    env.from_collection(ROWS, splits=1).filter(module.kept).print()
    assert simulate(env, seeds=range(3)).ok


def test_state_in_a_module_next_to_the_job_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
counts = {}

def nth(row):
    return {"id": row["id"], "n": counted(row["key"])}

def counted(key):
    counts[key] = counts.get(key, 0) + 1
    return counts[key]
"""
    module = imported(tmp_path, "simulated_helper", text, monkeypatch)
    env = Environment("helper")
    env.from_collection(ROWS, splits=1).map(module.nth, {"id": int, "n": int}).print()
    with pytest.raises(AssertionError, match=r"simulated_helper.py:8: keeps state in a global variable: counts"):
        simulate(env, seeds=range(200))
    assert module.counts == {}


def test_rows_larger_than_a_buffer_get_through() -> None:
    env = Environment("large")
    large = env.from_collection([{"id": i, "text": str(i) * 200_000} for i in range(6)], splits=1)
    large.key_by("id").process(Count(), {"id": int, "n": int}).print()
    assert simulate(env, seeds=range(6)).ok


def test_a_job_that_does_not_end_is_reported() -> None:
    made = campaign(counting())
    made.job.config = msgspec.structs.replace(made.job.config, max_parallelism=8)
    ran = run_job(made.job, replace(REFERENCE, steps_max=10))
    assert not ran.is_over
    assert judge(made.job, ran, ran, {}).kind == LONG


def test_files_are_read_once_and_sinks_never_opened(tmp_path: Path) -> None:
    pa.parquet.write_table(pa.table({"id": list(range(500))}), tmp_path / "in.parquet")
    env = Environment("files", checkpoint_dir=tmp_path / "state")
    env.read_files(tmp_path / "in.parquet").write_parquet(tmp_path / "out")
    assert simulate(env, seeds=range(3)).rows == 200
    assert sorted(os.listdir(tmp_path)) == ["in.parquet"]


def test_a_stream_is_simulated_with_the_settings_of_its_environment():
    stream = Environment("narrow", max_parallelism=2).from_collection([{"n": 1}]).map(lambda row: row)
    campaign = campaign_of(stream, {}, latest={}, ignore={})
    assert (campaign.name, campaign.job.config.max_parallelism, campaign.parallelisms) == ("narrow", 2, (1, 2))


def test_an_operator_that_fails_is_named_by_its_uid():
    def inverted(row):
        return {"n": 1 // row["n"]}

    numbers = Environment().from_collection([{"n": 1}, {"n": 0}])
    with pytest.raises(AssertionError, match="uid 'inverted'"):
        simulate(numbers.map(lambda row: row).map(inverted, {"n": int}).uid("inverted"), seeds=range(2))


def test_rows_that_were_not_read_are_reported():
    env = counting()
    assert "Not tried" not in simulate(env, seeds=range(1), rows_max=30).text
    report = simulate(env, seeds=range(1), rows_max=29)
    assert "Not tried: what comes after the first 29 rows of 'rows' (--rows-max N reads more" in report.text
