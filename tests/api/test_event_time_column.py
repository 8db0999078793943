"""Which calls keep the event time of a stream, and which end it: watermarks follow the column as it was."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

import polars as pl
import polars.selectors as cs
import pytest

from midstream import (
    FAILED,
    BroadcastProcessFunction,
    CoProcessFunction,
    Count,
    DataStream,
    Environment,
    JobError,
    KeyedBatchFunction,
    KeyedProcessFunction,
    WatermarkStrategy,
    testing,
    tumbling,
)
from midstream.engine.graph.graph_builder import build_job_graph, warnings_of

START = datetime(2024, 1, 1)
ROWS = [{"k": 1, "at": START + timedelta(seconds=7 * i), "other": START} for i in range(20)]
IN_ORDER = WatermarkStrategy.monotonous()
Change = Callable[[DataStream], DataStream]

KEPT: dict[str, Change] = {
    "the column itself": lambda s: s.with_columns(at=pl.col("at")),
    "its name": lambda s: s.with_columns(at="at"),
    "its own name as an alias": lambda s: s.select("k", pl.col("at").alias("at")),
    "all columns": lambda s: s.select(pl.all()),
    "a selector": lambda s: s.select(cs.all()),
    "several columns": lambda s: s.select(pl.col("at", "k")),
    "a pattern": lambda s: s.select(pl.col("^(at|k)$")),
    "all others": lambda s: s.with_columns(pl.all().exclude("at").name.keep()),
    "another column": lambda s: s.with_columns(other=pl.col("at").dt.truncate("1m"), k=pl.col("k") + 1),
    "another column of its own": lambda s: s.with_columns(minute=pl.col("at").dt.truncate("1m")),
    "a name taken over from it": lambda s: s.rename({"at": "other_at", "other": "at"}),
    "again": lambda s: s.with_columns(at="other").with_watermarks("at", WatermarkStrategy.bounded("1 d")),
}
OVERWRITTEN: dict[str, Change] = {
    "earlier": lambda s: s.with_columns(at=pl.col("at").dt.truncate("1m")),
    "later": lambda s: s.with_columns(pl.col("at") + timedelta(hours=1)),
    "by a selector": lambda s: s.with_columns(cs.temporal().dt.truncate("1m")),
    "by all": lambda s: s.select("k", pl.col(pl.Datetime).dt.offset_by("1s")),
    "another column": lambda s: s.with_columns(at="other"),
    "an alias": lambda s: s.select("k", pl.col("other").alias("at")),
    "swapped": lambda s: s.select("k", at="other", other="at"),
    "a constant": lambda s: s.with_columns(at=START),
    "another unit": lambda s: s.with_columns(at=pl.col("at").cast(pl.Datetime("ms"))),
    "text": lambda s: s.with_columns(at=pl.col("at").dt.to_string()),
    "before others": lambda s: s.with_columns(at="other").filter(k=1).map(lambda row: row).select("k", "at"),
    "then renamed": lambda s: s.with_columns(at="other").rename({"at": "minute"}),
    "in a union": lambda s: s.with_columns(at="other").union(s.with_columns(at="other")),
}


def stream() -> DataStream:
    return Environment("column").from_collection(ROWS, splits=1).with_watermarks("at", IN_ORDER)


@pytest.mark.parametrize("change", KEPT.values(), ids=KEPT.keys())
def test_what_keeps_event_time_makes_no_row_late(change: Change) -> None:
    counts = change(stream()).window_all(tumbling("30 s")).aggregate(n=Count())
    found = testing.run(counts, ROWS)
    assert sum(row["n"] for row in found.rows) == len(ROWS)
    assert not any(found.late.values())


class Each(KeyedProcessFunction):
    def process(self, row, ctx):
        return row


class EachBatch(KeyedBatchFunction):
    def process(self, row, ctx):
        return row


class Both(CoProcessFunction):
    def process1(self, row, ctx):
        return row

    process2 = process1


class Ruled(BroadcastProcessFunction):
    def process(self, row, ctx):
        return row

    process_broadcast = process


USES: dict[str, Callable[[DataStream], object]] = {
    "window": lambda s: s.key_by("k").window(tumbling("1 min")),
    "window_all": lambda s: s.window_all(tumbling("1 min")),
    "process": lambda s: s.key_by("k").process(Each(), {"k": int}),
    "process_batches": lambda s: s.key_by("k").process_batches(EachBatch(), {"k": int}),
    "connect": lambda s: s.connect(s).process(Both(), {"k": int}),
    "join": lambda s: s.join(s, on="k", within=(0, 1)),
    "broadcast": lambda s: s.connect(s.broadcast()).process(Ruled(), {"k": int}),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
@pytest.mark.parametrize("change", OVERWRITTEN.values(), ids=OVERWRITTEN.keys())
def test_a_column_that_is_computed_again_is_no_event_time(change: Change, use: Callable[[DataStream], object]) -> None:
    changed = change(stream())
    assert changed.event_time is None
    with pytest.raises(
        JobError, match=r"computes the event-time column 'at' again.* another name, or call with_watermarks"
    ):
        use(changed)


@pytest.mark.parametrize("change", OVERWRITTEN.values(), ids=OVERWRITTEN.keys())
def test_rows_without_event_time_can_still_be_written(change: Change) -> None:
    assert len(testing.run(change(stream()), ROWS).rows) in (len(ROWS), 2 * len(ROWS))


def test_a_column_that_is_left_out_ends_event_time() -> None:
    for changed in (stream().drop("at"), stream().select("k", "other")):
        with pytest.raises(JobError, match="the stream has no event time; call with_watermarks"):
            changed.window_all(tumbling("1 min"))


def test_event_time_that_does_not_see_splits_because_of_another_consumer_is_warned_of():
    def warned(*, reads_failed: bool, marks_first: bool) -> list[str]:
        env = Environment("doc", parallelism=2)
        rows = env.from_collection(ROWS, splits=2)
        rows = rows.with_watermarks("at", IN_ORDER) if marks_first else rows
        kept = rows.map(lambda row: row, on_error="side_output")
        if reads_failed:
            kept.side_output(FAILED).collect()
        kept = kept if marks_first else kept.with_watermarks("at", IN_ORDER)
        kept.window_all(tumbling("1 min")).aggregate(n=Count()).collect()
        return list(warnings_of(build_job_graph(env.program.graph, env.program.config)))

    assert warned(reads_failed=False, marks_first=False) == warned(reads_failed=True, marks_first=True) == []
    [warning] = warned(reads_failed=True, marks_first=False)
    assert "does not see the splits of collection one by one" in warning
    assert "another consumer (collect)" in warning
