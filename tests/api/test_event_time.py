"""Event time in whole jobs on plain processes: concurrent splits lose nothing, and late rows are reported."""

from __future__ import annotations

import logging
from collections import Counter as Counts
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from midstream import (
    LATE,
    ConfigError,
    Count,
    Environment,
    First,
    Last,
    Tuning,
    WatermarkStrategy,
    count,
    session,
    sliding,
    tumbling,
)
from midstream.connectors.files import file_source
from midstream.engine.protocol.job_status import JobStatus
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until

START = datetime(2024, 1, 1)
MINUTE_US = 60_000_000
TIMED = pa.schema([("key", pa.int64()), ("at", pa.timestamp("us"))])


def late_rows(status: JobStatus) -> int:
    return sum(operator.late_rows for vertex in status.vertices for operator in vertex.operators)


def rows_out(status: JobStatus, name: str) -> int:
    return sum(op.rows_out for vertex in status.vertices for op in vertex.operators if op.name == name)


def per_minute(events: Any) -> Any:
    return (
        events.with_watermarks("at", WatermarkStrategy.monotonous())
        .key_by("key")
        .window(tumbling("1 min"))
        .aggregate(rows=Count())
        .name("per minute")
    )


def counted(sink: Any) -> Counts[datetime]:
    counts: Counts[datetime] = Counts()
    for row in sink.rows():
        counts[row["window_start"]] += row["rows"]
    return counts


@pytest.mark.parametrize("parallelism", [1, 2])
def test_splits_that_cover_the_same_time_lose_nothing_though_read_one_after_the_other(parallelism: int) -> None:
    each, splits = 6_000, 5

    def rows(index: Any) -> dict[str, Any]:
        split, offset = index // each, index % each
        at_us = offset * (1 + split) * 100_000  # in order within a split, each at a speed of its own
        return {"key": index % 7, "at": (np.datetime64(START, "us") + at_us).astype("datetime64[us]")}

    env = Environment("backfill", parallelism=parallelism, tuning=Tuning(batch_rows=500))
    sink = per_minute(env.generate(rows, count=each * splits, splits=splits)).collect()
    status = env.execute(slots=ProcessSlots())
    assert late_rows(status) == 0
    assert status.warnings == ()
    minutes = Counts(offset * (1 + split) * 100_000 // MINUTE_US for split in range(splits) for offset in range(each))
    assert counted(sink) == {START + timedelta(minutes=minute): n for minute, n in minutes.items()}


def test_files_of_the_same_hours_lose_nothing(tmp_path: Any) -> None:
    for name in "abc":
        times = [START + timedelta(seconds=s) for s in range(0, 7200, 2)]
        pl.DataFrame({"key": [1] * len(times), "at": times}).write_parquet(tmp_path / f"{name}.parquet")
    env = Environment("files", parallelism=1, tuning=Tuning(batch_rows=100))
    only = env.read_files(tmp_path).filter(pl.col("key") == 1)  # row by row: splits stay apart
    sink = per_minute(only).collect()
    assert late_rows(env.execute(slots=ProcessSlots())) == 0
    assert counted(sink) == {START + timedelta(minutes=m): 90 for m in range(120)}


@pytest.mark.parametrize("parallelism", [1, 2])
def test_files_of_the_same_hours_that_are_read_in_parts_lose_nothing(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, parallelism: int
) -> None:
    monkeypatch.setattr(file_source, "_TEXT_SPLIT_BYTES", 16_000)
    for name in "abc":
        times = [START + timedelta(seconds=s) for s in range(0, 7200, 2)]
        pl.DataFrame({"key": [1] * len(times), "at": times}).write_ndjson(tmp_path / f"{name}.jsonl")
    env = Environment("files in parts", parallelism=parallelism, tuning=Tuning(batch_rows=100))
    sink = per_minute(env.read_files(tmp_path, schema=TIMED)).collect()
    assert late_rows(env.execute(slots=ProcessSlots())) == 0
    assert counted(sink) == {START + timedelta(minutes=m): 90 for m in range(120)}


def test_an_endless_generator_loses_nothing_and_its_windows_fire() -> None:
    def rows(index: Any) -> dict[str, Any]:
        return {"key": index % 7, "at": (np.datetime64(START, "us") + index * 10_000).astype("datetime64[us]")}

    env = Environment("endless", parallelism=2)
    per_minute(env.generate(rows)).filter(pl.col("rows") < 0).print()
    job = env.start(slots=ProcessSlots())
    try:
        until("windows fire", lambda: rows_out(job.status(), "per minute") > 2_000)
        assert late_rows(job.status()) == 0
    finally:
        job.cancel()


def test_rows_dropped_as_late_are_counted_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"key": 1, "at": START + timedelta(minutes=minute)} for minute in (1, 2, 30, 3, 4, 31)]
    env = Environment("late", tuning=Tuning(batch_rows=1))
    events = env.from_collection(rows, splits=1)
    sink = per_minute(events).collect()
    with caplog.at_level(logging.WARNING, "midstream.engine.coordinator"):
        status = env.execute(slots=ProcessSlots())
    assert sum(counted(sink).values()) == 4
    assert [op.late_rows for vertex in status.vertices for op in vertex.operators if op.name == "per minute"] == [2]
    assert late_rows(status) == 2
    (warning,) = status.warnings
    assert "operator 'per minute' has dropped 2 rows that came late" in warning
    assert "with_watermarks() a larger bound" in warning
    assert sum("came late" in record.message for record in caplog.records) == 1


def test_rows_taken_aside_are_not_dropped() -> None:
    rows = [{"key": 1, "at": START + timedelta(minutes=minute)} for minute in (1, 2, 30, 3, 4, 31)]
    env = Environment("aside", tuning=Tuning(batch_rows=1))
    windows = per_minute(env.from_collection(rows, splits=1))
    sink, aside = windows.collect(), windows.side_output(LATE).collect()
    status = env.execute(slots=ProcessSlots())
    assert (len(sink.rows()), len(aside.rows())) == (4, 2)
    assert late_rows(status) == 0
    assert status.warnings == ()


def test_the_order_of_arrival_is_refused_where_rows_are_reduced_by_event_time_first():
    rows = Environment().from_collection([{"k": 1, "at": START}])
    keyed = rows.with_watermarks("at", WatermarkStrategy.monotonous()).key_by("k")
    for aggregate in (First("k", order="arrival"), Last("k", order="arrival")):
        with pytest.raises(ConfigError, match=r"sliding windows .* do not keep the order in which rows arrived"):
            keyed.window(sliding("1 min", "10 s")).aggregate(v=aggregate)
        with pytest.raises(ConfigError, match=r"every= .* do not keep the order in which rows arrived"):
            keyed.aggregate(v=aggregate, every="10 s")
        for window in (tumbling("1 min"), session("1 min"), count(2)):
            keyed.window(window).aggregate(v=aggregate)
        keyed.aggregate(v=aggregate)
