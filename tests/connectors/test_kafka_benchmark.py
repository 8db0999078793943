"""`python -m midstream_lab bench kafka`: it reads what it has sent, and a result that is wrong has no figures."""

from __future__ import annotations

import json

import polars as pl
import pytest

from machine import limit_s
from midstream.engine.core.errors import ConfigError, InvariantError
from midstream_lab.bench import kafka as bench


def test_its_figures_are_of_a_run_whose_rows_are_right(kafka, monkeypatch):
    monkeypatch.setenv("KAFKA_BOOTSTRAP", kafka.servers)
    monkeypatch.setattr(bench, "WARM_UP_EVENTS", 2_000)
    monkeypatch.setattr(bench, "LATENCY_S", 2.0)
    monkeypatch.setattr(bench, "WARM_UP_S", 0.5)
    monkeypatch.setattr(bench, "SHORTFALL_MAX", 0.9)  # figures of a busy machine will do here
    before = set(kafka.admin.list_topics(timeout=limit_s(10)).topics)
    result = bench.run("process", events=40_000, rate=200)
    assert (result.correct, result.events, result.result_rows) == (True, 40_000, 10_000)
    assert result.latency_rows >= 50
    assert 0 < result.latency_p50_ms <= result.latency_p99_ms <= result.latency_max_ms
    assert result.checkpoints.completed >= 1
    made = {name for name in kafka.admin.list_topics(timeout=limit_s(10)).topics if name not in before}
    assert [name for name in made if name.startswith("bench-")] == []


def test_the_records_are_the_events_and_a_wrong_result_is_noticed(kafka):
    with bench.topics(kafka.servers, "in", "out") as (source, sink):
        workload = bench.fill(kafka.servers, source, 5_000)
        rows = pl.DataFrame([json.loads(message.value()) for message in kafka.read(source)])
        assert rows.columns == ["ts", "key", "value"] and len(rows) == 5_000
        assert rows["value"].sum() == workload.value_sums[0]
        for message in (kafka.read(source)[0], kafka.read(source)[-1]):
            assert json.loads(message.value())["ts"] == (0 if message.offset() == 0 else 49)
        per_key = rows.group_by("key").agg(n=pl.len(), total=pl.col("value").sum())
        right = [json.dumps(row).encode() for row in per_key.to_dicts()]
        kafka.produce(sink, right[1:])
        with pytest.raises(InvariantError, match="the number of rows"):
            bench.check(kafka.servers, sink, workload)
        kafka.produce(sink, right[:1])
        assert bench.check(kafka.servers, sink, workload) == len(right)
        kafka.transaction(sink, right[:1], commit=False)
        assert bench.check(kafka.servers, sink, workload) == len(right)


def test_without_brokers_it_says_where_to_have_some(monkeypatch):
    monkeypatch.delenv("KAFKA_BOOTSTRAP", raising=False)
    with pytest.raises(
        ConfigError,
        match=r"python tools/kafka_server\.py \.venv/bin/python -m midstream_lab bench kafka, which starts one",
    ):
        bench.run("process")
