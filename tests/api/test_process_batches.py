"""Functions on batches through the API: the graph they make, what is refused, and whole jobs with their state."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from machine import limit_s
from midstream import (
    CoBatchFunction,
    CollectSink,
    ConfigError,
    DataStream,
    Environment,
    JobError,
    KeyedBatchFunction,
    SchemaError,
    TableState,
    WatermarkStrategy,
    no_restart,
)
from midstream.cli.commands.inspect_checkpoint import read_report
from midstream.engine.graph.graph_builder import build_job_graph
from midstream.runtime.driver.job import Job
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until

START = datetime(2024, 1, 1)
MS = pa.timestamp("ms")
KEYS = 7


class Totals(KeyedBatchFunction):
    """The sum of each key so far, row by row."""

    totals = TableState({"k": int, "total": int})

    def process(self, rows, ctx):
        before = rows.join(self.totals.frame, on="k", how="left", maintain_order="left")
        made = before.with_columns(total=pl.col("total").fill_null(0) + pl.col("n").cum_sum().over("k"))
        totals = made.group_by("k").agg(pl.col("total").last())
        self.totals.frame = self.totals.frame.update(totals, on="k", how="full")
        return made.select("k", "n", "total")


class OfText(Totals):
    totals = TableState({"k": int, "total": str})


class Nearby(CoBatchFunction):
    """Clicks with the views of the same user in the second before."""

    views = TableState({"user": int, "seen": MS, "page": int})
    clicks = TableState({"user": int, "at": MS})

    def process1(self, rows, ctx):
        self.views.append(rows)

    def process2(self, rows, ctx):
        self.clicks.append(rows.select(user="who", at="at"))

    def on_watermark(self, ctx):
        views, clicks = self.views.frame, self.clicks.frame
        is_due = pl.col("at") <= ctx.watermark
        self.clicks.frame = clicks.filter(~is_due)
        self.views.frame = views.filter(pl.col("seen").dt.offset_by("1s") >= ctx.watermark)
        both = clicks.filter(is_due).join(views, on="user")
        return both.filter(pl.col("seen").is_between(pl.col("at").dt.offset_by("-1s"), "at"))


NEARBY = {"user": int, "at": MS, "seen": MS, "page": int}


def numbers(env: Environment) -> DataStream:
    return env.from_collection([{"k": n % KEYS, "n": n} for n in range(100)])


def test_the_graph_has_the_keys_of_each_input_and_the_schema_is_as_declared() -> None:
    env = Environment("test", parallelism=2)
    one = numbers(env)
    other = env.from_collection([{"key": 1, "m": 2}])
    made = one.key_by("k").process_batches(Totals(), {"k": int, "n": int, "total": int})
    assert made.schema == pa.schema({"k": pa.int64(), "n": pa.int64(), "total": pa.int64()})
    made.print()

    class Both(CoBatchFunction):
        seen = TableState({"k": int})

        def process1(self, rows, ctx): ...

        def process2(self, rows, ctx): ...

    one.key_by("k").connect(other.key_by("key")).process_batches(Both(), {"k": int}).print()
    graph = build_job_graph(env.program.graph, env.program.config)
    edges = {v.name: [(e.port, e.partitioning.value, e.keys) for e in graph.inputs(v.id)] for v in graph.vertices}
    assert edges["process_batches → print"] == [(0, "keyed", ("k",))]
    assert edges["co_process_batches → print"] == [(0, "keyed", ("k",)), (1, "keyed", ("key",))]


def test_event_time_lives_on_in_a_column_of_its_name() -> None:
    rows = Environment("test").from_collection([{"k": 1, "n": 1, "t": START}])
    timed = rows.with_watermarks("t", WatermarkStrategy.monotonous()).key_by("k")
    assert timed.process_batches(Totals(), {"k": int, "t": datetime}).event_time == "t"
    assert timed.process_batches(Totals(), {"k": int, "at": datetime}).event_time is None


class NoHandler(KeyedBatchFunction):
    def proces(self, rows, ctx): ...


class OnTheObject(Totals):
    def __init__(self):
        self.more = TableState({"k": int})


def test_what_cannot_work_is_refused_by_the_call() -> None:
    env = Environment("test")
    keyed = numbers(env).key_by("k")
    with pytest.raises(JobError, match=r"process_batches: Totals is a class; give an instance: Totals\("):
        keyed.process_batches(Totals, {"k": int})  # type: ignore[arg-type]
    with pytest.raises(JobError, match="is not a KeyedBatchFunction"):
        keyed.process_batches(Nearby(), {"k": int})  # type: ignore[arg-type]
    with pytest.raises(JobError, match=r"NoHandler has no method process\(\)"):
        keyed.process_batches(NoHandler(), {"k": int})
    with pytest.raises(JobError, match=r"state 'more' of OnTheObject is set on the object.*more = TableState\("):
        keyed.process_batches(OnTheObject(), {"k": int})
    with pytest.raises(JobError, match=r"process_batches: tables are of keyed streams; connect a\.key_by"):
        numbers(env).connect(numbers(env)).process_batches(Nearby(), NEARBY)
    with pytest.raises(SchemaError, match=r"test_process_batches.py:\d+: .*TableState 'totals' has no column 'n'"):
        numbers(env).key_by("n").process_batches(Totals(), {"k": int})


def values(sink: CollectSink, *columns: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(row[column] for column in columns) for row in sink.rows())


def test_two_streams_are_joined_by_time() -> None:
    views: list[dict[str, Any]] = [
        {"user": i % 5, "seen": START + timedelta(milliseconds=137 * i), "page": i} for i in range(300)
    ]
    clicks: list[dict[str, Any]] = [
        {"at": START + timedelta(milliseconds=911 * i), "who": i % 6, "x": 0.5} for i in range(45)
    ]
    env = Environment("nearby", parallelism=2)
    schema = {"user": int, "seen": MS, "page": int}
    left = env.from_collection(views, schema=schema).with_watermarks("seen", WatermarkStrategy.bounded("2 s"))
    right = env.from_collection(clicks, schema={"at": MS, "who": int, "x": float})
    right = right.with_watermarks("at", WatermarkStrategy.bounded("2 s"))
    sink = left.key_by("user").connect(right.key_by("who")).process_batches(Nearby(), NEARBY).collect()
    status = env.execute(slots=ProcessSlots())
    assert status.state == "finished"
    second = timedelta(seconds=1)
    expected = sorted(
        (click["who"], click["at"], view["page"])
        for click in clicks
        for view in views
        if view["user"] == click["who"] and click["at"] - second <= view["seen"] <= click["at"]
    )
    assert len(expected) > 30
    assert values(sink, "user", "at", "page") == expected


@pytest.fixture
def running() -> Iterator[list[Job]]:
    jobs: list[Job] = []
    yield jobs
    for job in jobs:
        if job.status().state not in ("finished", "failed", "cancelled", "stopped"):
            job.cancel()


COUNT = 40_000


def totals_of(directory: Path, parallelism: int, function: Totals, rows_per_s: float | None) -> tuple[Any, CollectSink]:
    env = Environment("totals", parallelism=parallelism, checkpoint_dir=directory, checkpoint_interval="200 ms")
    rows = env.generate(lambda i: {"k": i % KEYS, "n": i}, count=COUNT, splits=1, rows_per_s=rows_per_s).uid("rows")
    made = rows.key_by("k").process_batches(function, {"k": int, "n": int, "total": int}).uid("totals")
    return env, made.collect()


@pytest.mark.systems
def test_a_table_goes_on_from_a_savepoint_at_another_parallelism_and_inspect_shows_it(
    running: list[Job], tmp_path: Path
) -> None:
    env, before = totals_of(tmp_path / "state", 2, Totals(), 4_000)
    job = env.start(slots=ProcessSlots())
    running.append(job)
    until("some rows", lambda: len(before.rows()) > 1_000)
    assert job.stop(savepoint=tmp_path / "saved", timeout_s=limit_s(60)) == str(tmp_path / "saved")

    report = read_report(str(tmp_path / "saved"))
    (operator,) = [operator for operator in report.operators if operator.uid == "totals"]
    assert [(part.name, part.redistribute, part.rows) for part in operator.parts] == [("table:totals", "keyed", KEYS)]
    assert operator.settings == ("table state 'totals' k int64, total int64", "the key k int64")

    changed, _ = totals_of(tmp_path / "other", 3, OfText(), None)
    was = r"table state 'totals' was k int64, total int64, now it is k int64, total large_string"
    with pytest.raises(ConfigError, match=was):
        changed.start(slots=ProcessSlots(), restore_from=str(tmp_path / "saved")).wait(limit_s(60))

    env, after = totals_of(tmp_path / "other", 3, Totals(), None)
    job = env.start(slots=ProcessSlots(), restore_from=str(tmp_path / "saved"))
    running.append(job)
    job.wait(limit_s(60))
    n = np.arange(COUNT)
    expected = sorted((k, total) for k in range(KEYS) for total in np.cumsum(n[n % KEYS == k]).tolist())
    assert sorted(values(before, "k", "total") + values(after, "k", "total")) == expected


class Everybodys(Totals):
    """Keeps rows under keys that it was not given."""

    def process(self, rows, ctx):
        self.totals.frame = pl.DataFrame({"k": range(KEYS), "total": [0] * KEYS})
        return rows.select("k", "n", total="n")


def test_a_row_under_a_foreign_key_fails_the_job_with_its_key(tmp_path: Path) -> None:
    env = Environment(
        "foreign", parallelism=2, checkpoint_dir=tmp_path, checkpoint_interval="100 ms", restart=no_restart()
    )
    rows = env.generate(lambda i: {"k": i % KEYS, "n": i}, rows_per_s=1_000)
    rows.key_by("k").process_batches(Everybodys(), {"k": int, "n": int, "total": int}).name("totals").collect()
    with pytest.raises(
        JobError, match=r"operator 'totals': state 'totals' holds \d rows of keys that .* first with k="
    ):
        env.execute(slots=ProcessSlots())
