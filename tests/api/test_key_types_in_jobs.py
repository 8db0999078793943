"""Keys that polars or Python hold otherwise than the stream: whole jobs, at another parallelism and through a failure."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from jobs import Held
from key_samples import FOLD_S, key_samples
from machine import limit_s
from midstream import (
    Count,
    Environment,
    KeyedBatchFunction,
    KeyedProcessFunction,
    Sum,
    TableState,
    ValueState,
    WatermarkStrategy,
    session,
    sliding,
    tumbling,
)
from midstream.api.keyed_streams import KeyedStream
from midstream.connectors.memory.collection_source import CollectionSource
from midstream.engine.core.arrow_types import to_list
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until

pytestmark = pytest.mark.systems

KINDS = ["time64[us]", "time32[ms]", "duration[s]", "timestamp[us, tz=America/New_York]", "date64[ms]"]


@pytest.mark.parametrize("name", ["time64[us]", pytest.param("duration[s]", marks=pytest.mark.nightly)])
def test_a_window_of_very_many_keys_is_whole_at_parallelism_2(name: str) -> None:
    keys = key_samples(300_000)[name]
    rows = pa.table({"k": keys, "t": pa.array(np.zeros(len(keys), np.int64), pa.timestamp("us"))})
    env = Environment("many", parallelism=2)
    stream = env.from_collection(rows).with_watermarks("t", WatermarkStrategy.monotonous())
    counts = stream.key_by("k").window(tumbling("1 h")).aggregate(n=Count()).collect()
    assert env.execute(slots=ProcessSlots()).state == "finished"
    made = counts.table()
    assert made.num_rows == len(keys) == len(made.column("k").unique())
    assert set(made.column("n").unique().to_pylist()) == {1}


class Counted(KeyedProcessFunction):
    seen = ValueState[int](pa.int64(), default=0)

    def process(self, row: dict[str, Any], ctx: Any) -> None:
        self.seen.value += 1
        ctx.timers.event_time(2**60)

    def on_timer(self, time: Any, ctx: Any) -> dict[str, Any]:
        return {"k": ctx.key, "n": self.seen.value}


def by_windows(window: Any) -> Any:
    return lambda keyed, kind: keyed.window(window).aggregate(n=Sum("one"))


def by_function(keyed: KeyedStream, kind: pa.DataType) -> Any:
    return keyed.process(Counted(), {"k": kind, "n": pa.int64()})


def by_batches(keyed: KeyedStream, kind: pa.DataType) -> Any:
    class Held(KeyedBatchFunction):
        rows = TableState({"k": kind, "one": pa.int64()})

        def process(self, rows: pl.DataFrame, ctx: Any) -> None:
            self.rows.append(rows.select("k", "one"))

        def on_watermark(self, ctx: Any) -> pl.DataFrame | None:
            if ctx.watermark.year < 9999:
                return None
            return self.rows.frame.group_by("k").agg(n=pl.col("one").sum())

    return keyed.process_batches(Held(), {"k": kind, "n": pa.int64()})


FAMILIES = {
    "tumbling": by_windows(tumbling("1 h")),
    "sliding": by_windows(sliding("2 h", "1 h")),
    "session": by_windows(session("1 h")),
    "process": by_function,
    "process_batches": by_batches,
}


@pytest.mark.parametrize(("family", "name"), list(zip(FAMILIES, KINDS, strict=True)))
def test_counts_are_those_of_an_uninterrupted_run(family: str, name: str, tmp_path: Path) -> None:
    """The job is stopped in the middle and continues at another parallelism; there it fails once more."""
    keys = key_samples(200)[name]
    count = 6_000
    column = keys.take(pa.array(np.arange(count) % len(keys), pa.int64()))
    rows = pa.table(
        {
            "k": column,
            "t": pa.array(np.full(count, 1_000_000), pa.timestamp("us")),
            "one": pa.array(np.ones(count, np.int64)),
        }
    )
    fault, rest = tmp_path / "fault", tmp_path / "rest"

    def failing(row: dict[str, Any]) -> bool:
        if fault.exists():
            fault.unlink(missing_ok=True)
            raise ValueError("as it was told to")
        return True

    def job_at(parallelism: int, **settings: Any) -> tuple[Any, Any]:
        env = Environment(
            "counts", parallelism=parallelism, checkpoint_dir=str(tmp_path / "state"), checkpoint_interval="100 ms"
        )
        numbers = CollectionSource(rows, rows_per_s=2_000)
        stream = env.source(Held(numbers, rest, first=count // 2)).filter(failing)
        keyed = stream.with_watermarks("t", WatermarkStrategy.monotonous()).key_by("k")
        kind = keyed.schema.field("k").type
        sink = FAMILIES[family](keyed, kind).collect()
        return env.start(slots=ProcessSlots(), **settings), sink

    job, _ = job_at(1)
    until("a checkpoint with rows in it", lambda: job.status().checkpoints_completed >= 3, 60)
    job.stop(timeout_s=limit_s(60))
    job, sink = job_at(2, restore_from="latest")
    done = job.status().checkpoints_completed
    until("another checkpoint", lambda: job.status().checkpoints_completed > done, 60)
    fault.touch()
    rest.touch()
    status = job.wait(limit_s(60))
    assert status.state == "finished" and status.restarts == 1
    times = 2 if family == "sliding" else 1
    made = sink.table()
    assert made.num_rows == len(keys) * times
    expected = Counter(rows.column("k").cast(made.schema.field("k").type).to_numpy().tolist())
    counted = Counter(made.column("k").to_numpy().tolist())
    assert counted == Counter(dict.fromkeys(expected, times))
    assert made.column("n").to_pylist() == [expected[key] for key in made.column("k").to_numpy().tolist()]


def test_both_hours_at_the_end_of_summer_time_are_counted_at_any_parallelism() -> None:
    kind = pa.timestamp("us", "America/New_York")
    hours = [(FOLD_S + 3600 * hour) * 10**6 for hour in range(-2, 3)]
    rows = pa.table({"k": pa.array(hours * 10, pa.int64()).cast(kind), "t": pa.array([0] * 50, pa.timestamp("us"))})
    for parallelism in (1, 2, 4):
        env = Environment("hours", parallelism=parallelism)
        stream = env.from_collection(rows).with_watermarks("t", WatermarkStrategy.monotonous())
        counts = stream.key_by("k").process(Counted(), {"k": kind, "n": pa.int64()}).collect()
        assert env.execute(slots=ProcessSlots()).state == "finished"
        made = counts.table()
        assert sorted(to_list(made.column("k").cast(pa.int64()))) == hours
        assert set(made.column("n").to_pylist()) == {10}
