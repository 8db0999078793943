"""Metrics of functions in harnesses, simulated jobs and real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from midstream import (
    BroadcastProcessFunction,
    Environment,
    JobError,
    KeyedBatchFunction,
    KeyedProcessFunction,
    Sink,
    SinkWriter,
    testing,
)
from midstream.runtime.process.process_slots import ProcessSlots

ROW = {"k": str, "n": int}


class Counted(KeyedProcessFunction):
    def open(self, context: Any) -> None:
        self.rows = context.metrics.counter("rows")

    def process(self, row: Any, ctx: Any) -> Any:
        self.rows.inc()
        ctx.metrics.gauge("last").set(row["n"])
        ctx.metrics.counter("sum").inc(row["n"])
        return row


class Batches(KeyedBatchFunction):
    def process(self, rows: Any, ctx: Any) -> pl.DataFrame:
        ctx.metrics.counter("batches").inc()
        ctx.metrics.counter("rows").inc(rows.height)
        return rows


class Rules(BroadcastProcessFunction):
    def process(self, row: Any, ctx: Any) -> Any:
        ctx.metrics.counter("rows").inc()

    def process_broadcast(self, row: Any, ctx: Any) -> Any:
        ctx.metrics.counter("rules").inc()


class Counting(Sink):
    def writer(self, context: Any) -> SinkWriter:
        return _Counting(context.metrics)


class _Counting(SinkWriter):
    def __init__(self, metrics: Any) -> None:
        self.written = metrics.counter("written")

    def write(self, batch: Any) -> None:
        self.written.inc(batch.num_rows)


def test_a_harness_shows_the_metrics_of_its_function_and_they_start_again_with_a_restore():
    one = testing.harness(Counted(), ROW, ROW, key="k", parallelism=2)
    assert one.metrics == {"rows": 0}
    one.process([{"k": "a", "n": 3}, {"k": "b", "n": 4}])
    assert one.metrics == {"rows": 2, "sum": 7, "last": one.metrics["last"]}
    one.snapshot_and_restore()
    assert one.metrics == {"rows": 0}


def test_functions_on_batches_and_with_rules_have_them_too():
    batches = testing.harness(Batches(), ROW, ROW, key="k")
    batches.process([{"k": "a", "n": 3}, {"k": "b", "n": 4}])
    assert batches.metrics == {"batches": 1, "rows": 2}
    rules = testing.harness(Rules(), ROW, ROW, second=ROW)
    rules.process_broadcast({"k": "a", "n": 1})
    rules.process({"k": "a", "n": 1})
    assert rules.metrics == {"rules": 1, "rows": 1}


def test_a_mistake_names_the_function_and_the_value():
    class Wrong(KeyedProcessFunction):
        def process(self, row: Any, ctx: Any) -> Any:
            ctx.metrics.counter("sum").inc(row["n"])

    function = testing.harness(Wrong(), ROW, ROW, key="k")
    with pytest.raises(JobError, match=r"(?s)'Wrong'.*counter 'sum': inc\(-1\): a counter only grows"):
        function.process({"k": "a", "n": -1})


def test_a_job_reports_them_by_operator_the_last_ones_too():
    env = Environment("metrics", parallelism=2)
    rows = [{"k": "abc"[i % 3], "n": i} for i in range(30)]
    (
        env.from_collection(rows)
        .key_by("k")
        .process(Counted(), ROW)
        .uid("counted")
        .key_by("k")
        .process_batches(Batches(), ROW)
        .uid("batches")
        .sink(Counting())
        .uid("sink")
    )
    status = env.execute(slots=ProcessSlots())
    found = {op.uid: op for vertex in status.vertices for op in vertex.operators}
    assert found["counted"].counters == {"rows": 30, "sum": 435}
    assert 0 <= found["counted"].gauges["last"].max <= 29  # rows of several splits come in any order
    assert found["batches"].counters["rows"] == 30
    assert found["sink"].counters == {"written": 30}


def test_a_sink_that_commits_with_checkpoints_shows_the_rows_of_the_last_one(tmp_path: Path) -> None:
    env = Environment("metrics", parallelism=2)
    env.generate(lambda i: {"n": i}, count=30).write_parquet(tmp_path / "out").uid("out")
    env.generate(lambda i: {"n": i}, count=3).print().uid("printed")
    found = {op.uid: op for vertex in env.execute(slots=ProcessSlots()).vertices for op in vertex.operators}
    assert found["out"].gauges["rows_of_last_checkpoint"].sum == 30
    assert found["printed"].gauges == {}
