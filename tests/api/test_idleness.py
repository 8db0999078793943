"""Idleness in real jobs: what ends is never idle, what is silent is soon, and what has no event time holds none back."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from midstream import (
    LATE,
    BroadcastProcessFunction,
    BroadcastState,
    Count,
    Environment,
    Tuning,
    WatermarkStrategy,
    testing,
    tumbling,
)
from midstream.engine.operators.source_api import Discovery, DiscoveryContext, Source, Split, SplitReader
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until

START = datetime(2026, 1, 1)
DAY_ROWS = 24


class Days(Source):
    """A split for each day, with a row for each hour. The first read of day 0 returns once day 1 has been read to its end."""

    schema = pa.schema({"at": pa.timestamp("us"), "n": pa.int64()})

    def __init__(self, days: int, marks: Path) -> None:
        self.days = days
        self.marks = marks

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        days = range(self.days) if position is None else ()
        return Discovery(tuple(Split(str(day), b"") for day in days), b"all", exhausted=True)

    def open_split(self, split: Split) -> SplitReader:
        return Day(self, int(split.id), split.offset)


class Day(SplitReader):
    def __init__(self, source: Days, day: int, hour: int) -> None:
        self.source, self.day, self.hour = source, day, hour

    def read(self, rows_max: int) -> tuple[pa.RecordBatch, int] | None:
        if self.day == 0 and self.hour == 0:
            others = [self.source.marks / str(day) for day in range(1, self.source.days)]
            until("the other days", lambda: all(mark.exists() for mark in others))
        if self.hour == DAY_ROWS:
            (self.source.marks / str(self.day)).touch()
            return None
        hours = range(self.hour, min(self.hour + rows_max, DAY_ROWS))
        self.hour = hours.stop
        times = [START + timedelta(days=self.day, hours=hour) for hour in hours]
        return pa.record_batch({"at": times, "n": list(hours)}, schema=self.source.schema), self.hour


def test_a_split_whose_first_read_takes_until_all_others_have_ended_loses_no_row(tmp_path: Path) -> None:
    env = Environment(parallelism=2, tuning=Tuning(batch_rows=4))
    counts = (
        env.source(Days(4, tmp_path))
        .with_watermarks("at", WatermarkStrategy.bounded("1 h", idle_after="100 ms"))
        .window_all(tumbling("1 h"))
        .aggregate(n=Count())
    )
    late = counts.side_output(LATE).collect()
    collected = counts.collect()
    env.execute(slots=ProcessSlots())
    assert late.rows() == []
    assert sum(row["n"] for row in collected.rows()) == 4 * DAY_ROWS


def t(second: float) -> datetime:
    return START + timedelta(seconds=second)


SCHEMA = {"k": str, "at": datetime}


@pytest.mark.parametrize("rows", [[], [{"k": "y", "at": t(41)}]], ids=["empty", "filtered"])
@pytest.mark.parametrize("parallelism", [1, 2])
def test_splits_of_which_no_row_arrives_do_not_keep_a_stream_from_being_idle(
    rows: list[dict[str, object]], parallelism: int
) -> None:
    env = Environment(parallelism=parallelism)
    idle = WatermarkStrategy.bounded("0 s", idle_after="10 s")
    quiet = env.generate(lambda i: {}, schema=SCHEMA).uid("quiet").filter(pl.col("k") == "never")
    busy = env.generate(lambda i: {}, schema=SCHEMA).uid("busy").with_watermarks("at", idle)
    counts = quiet.with_watermarks("at", idle).union(busy).key_by("k").window(tumbling("10 s")).aggregate(n=Count())
    with testing.job([counts]) as job:
        for second in range(1, 21):
            job.feed("quiet", pl.DataFrame(rows, schema={"k": pl.String, "at": pl.Datetime("us")}).to_arrow())
            job.feed("busy", [{"k": "x", "at": t(second)}] * parallelism)
            job.advance_processing_time("1 s")
            fired = job.take()
            assert bool(fired) == (second == 10), (second, fired)
            if fired:
                break
        assert [row["n"] for row in fired] == [9 * parallelism]


def test_a_stream_that_is_idle_when_it_is_rescaled_or_restored_holds_event_time_until_it_is_idle_again() -> None:
    env = Environment(parallelism=2)
    idle = WatermarkStrategy.bounded("0 s", idle_after="10 s")
    quiet = env.generate(lambda i: {}, schema=SCHEMA).uid("quiet").with_watermarks("at", idle)
    busy = env.generate(lambda i: {}, schema=SCHEMA).uid("busy").with_watermarks("at", idle)
    counts = quiet.union(busy).key_by("k").window(tumbling("10 s")).aggregate(n=Count())
    with testing.job([counts]) as job:
        job.advance_processing_time("10 s")
        job.feed("busy", [{"k": "x", "at": t(1)}] * 2)
        assert job.take() == []
        job.snapshot_and_restore(parallelism=3)
        job.feed("busy", [{"k": "x", "at": t(12)}] * 3)
        assert job.take() == [], "whether the other stream has rows is not known yet"
        job.feed("quiet", {"k": "x", "at": t(2)})
        job.advance_processing_time("5 s")
        job.feed("busy", [{"k": "x", "at": t(13)}] * 3)
        job.advance_processing_time("6 s")
        assert [row["n"] for row in job.take()] == [3], "the row that came first after the restart is in time"


class Passes(BroadcastProcessFunction):
    limits = BroadcastState()

    def process_broadcast(self, row, ctx):
        self.limits["least"] = row["n"]

    def process(self, row, ctx):
        return row


def test_a_broadcast_table_without_event_time_and_end_does_not_hold_back_the_windows(tmp_path: Path) -> None:
    env = Environment(parallelism=2, checkpoint_dir=tmp_path, checkpoint_interval="100 ms")
    rules = env.generate(lambda i: {"n": i}, rows_per_s=10)
    facts = (
        env.generate(lambda i: {"ms": i * 100}, rows_per_s=1000)
        .select(at=pl.col("ms").cast(pl.Datetime("ms")).cast(pl.Datetime("us")))
        .with_watermarks("at", WatermarkStrategy.monotonous())
    )
    passed = facts.connect(rules.broadcast()).process(Passes(), facts.schema)
    counts = passed.with_columns(k=pl.lit(1)).key_by("k").window(tumbling("1 s")).aggregate(n=Count()).collect()
    job = env.start(slots=ProcessSlots())
    try:
        first = until("a window", counts.rows)
    finally:
        job.cancel()
    assert first[0]["n"] == 10


def test_a_broadcast_table_that_ends_is_complete_when_the_first_window_fires() -> None:
    env = Environment(parallelism=2)
    rules = env.from_collection([{"n": 5}, {"n": 7}]).uid("rules")
    facts = env.from_collection([{"at": t(second)} for second in range(30)]).uid("facts")
    timed = facts.with_watermarks("at", WatermarkStrategy.bounded("0 s", idle_after="1 ms"))
    passed = timed.connect(rules.broadcast()).process(Passes(), timed.schema)
    counts = passed.with_columns(k=pl.lit(1)).key_by("k").window(tumbling("10 s")).aggregate(n=Count())
    late, collected = counts.side_output(LATE).collect(), counts.collect()
    env.execute(slots=ProcessSlots())
    assert late.rows() == [] and [row["n"] for row in collected.rows()] == [10, 10, 10]
