"""Correct jobs of many kinds, the examples and the NEXMark queries: whatever is done to them, none is blamed.

SIMULATED_SEEDS=50 runs each over so many seeds; by default few, to be quick.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from midstream import (
    LATE,
    Accumulator,
    BroadcastProcessFunction,
    BroadcastState,
    CoProcessFunction,
    Count,
    Environment,
    First,
    KeyedBatchFunction,
    KeyedProcessFunction,
    Last,
    ListState,
    MapState,
    Max,
    Mean,
    Min,
    ReducingState,
    Sum,
    TableState,
    ValueState,
    WatermarkStrategy,
    session,
    sliding,
    tumbling,
)
from midstream.api.data_stream import DataStream
from midstream.api.job_file import load_job
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.testing import simulate
from midstream_lab.bench.nexmark.generator import Events
from midstream_lab.bench.nexmark.queries import QUERIES

SEEDS = range(int(os.environ.get("SIMULATED_SEEDS", "4")))
BEGIN = datetime(2024, 5, 1)
ROWS = [
    {"id": i, "key": i * 7 % 5, "name": f"name {i % 7}", "value": i * 31 % 17 / 3, "at": BEGIN + timedelta(seconds=i)}
    for i in range(90)
]
SCHEMA = {"id": int, "key": int, "name": str, "value": float, "at": datetime, "half": float}
Row = dict[str, Any]
JOBS: dict[str, Callable[[DataStream], DataStream]] = {}


def job(build: Callable[[DataStream], DataStream]) -> Callable[[DataStream], DataStream]:
    JOBS[build.__name__] = build
    return build


def timed(rows: DataStream) -> DataStream:
    return rows.with_watermarks("at", WatermarkStrategy.monotonous())


@job
def expressions(rows: DataStream) -> DataStream:
    return rows.filter(pl.col("id") % 3 > 0).with_columns(twice=pl.col("value") * 2).select("id", "twice")


@job
def functions(rows: DataStream) -> DataStream:
    split = rows.flat_map(lambda row: [{"word": word} for word in row["name"].split()], {"word": str})
    return split.map(lambda row: {"word": row["word"].upper()}, {"word": str}).filter(lambda row: row["word"] != "NAME")


@job
def row_by_row_batches(rows: DataStream) -> DataStream:
    return rows.rebalance().map_batches(lambda frame: frame.with_columns(half=pl.col("id") / 2), SCHEMA)


@job
def tumbling_windows(rows: DataStream) -> DataStream:
    made = timed(rows).key_by("key").window(tumbling("10 s"))
    return made.aggregate(n=Count(), mean=Mean("value"), sum=Sum("value"), low=Min("id"), high=Max("id"))


@job
def sliding_windows(rows: DataStream) -> DataStream:
    return (
        timed(rows)
        .key_by("name")
        .window(sliding("20 s", "5 s"))
        .aggregate(n=Count(), first=First("id"), last=Last("id"))
    )


@job
def session_windows(rows: DataStream) -> DataStream:
    some = timed(rows).filter(pl.col("id") % 13 < 6)
    return some.key_by("key").window(session("3 s")).aggregate(n=Count(), total=Sum("value"))


@job
def windows_over_all(rows: DataStream) -> DataStream:
    return timed(rows).window_all(tumbling("30 s")).aggregate(n=Count())


@job
def rows_within_their_bound(rows: DataStream) -> DataStream:
    late = rows.with_watermarks("at", WatermarkStrategy.bounded("20 s"))
    return late.key_by("key").window(tumbling("10 s")).aggregate(n=Count())


class Numbered(KeyedProcessFunction):
    count = ValueState(default=0)

    def process(self, row: Row, ctx: Any) -> Row:
        self.count.value += 1
        return {"id": row["id"], "n": self.count.value}


@job
def values(rows: DataStream) -> DataStream:
    return rows.key_by("key").process(Numbered(), {"id": int, "n": int})


class Largest(KeyedProcessFunction):
    largest = ReducingState(max, pa.float64())
    ids = ListState(pa.int64())
    names = MapState(key=pa.string(), value=pa.int64())

    def process(self, row: Row, ctx: Any) -> Row:
        self.largest.add(row["value"])
        self.ids.append(row["id"])
        self.names[row["name"]] = row["id"]
        return {"key": row["key"], "largest": self.largest.value, "ids": len(self.ids), "names": len(self.names)}


@job
def states_of_all_kinds(rows: DataStream) -> DataStream:
    return rows.key_by("key").process(Largest(), {"key": int, "largest": float, "ids": int, "names": int})


class Basket:
    def __init__(self) -> None:
        self.ids: list[int] = []


class Baskets(KeyedProcessFunction):
    basket = ValueState()

    def process(self, row: Row, ctx: Any) -> Row:
        basket = self.basket.value or Basket()
        basket.ids.append(row["id"])
        self.basket.value = basket
        return {"id": row["id"], "sum": sum(basket.ids)}


@job
def objects_in_state(rows: DataStream) -> DataStream:
    return rows.key_by("key").process(Baskets(), {"id": int, "sum": int})


class AtTheEndOfTheMinute(KeyedProcessFunction):
    count = ValueState(pa.int64(), 0)

    def process(self, row: Row, ctx: Any) -> None:
        self.count.value += 1
        ctx.timers.event_time(datetime(2024, 5, 2))

    def on_timer(self, time: datetime, ctx: Any) -> Row:
        return {"key": ctx.key, "n": self.count.value}


@job
def timers(rows: DataStream) -> DataStream:
    return timed(rows).key_by("key").process(AtTheEndOfTheMinute(), {"key": int, "n": int})


class Totals(KeyedBatchFunction):
    totals = TableState({"key": int, "total": int})

    def process(self, frame: pl.DataFrame, ctx: Any) -> pl.DataFrame:
        before = frame.join(self.totals.frame, on="key", how="left", maintain_order="left")
        made = before.with_columns(total=pl.col("total").fill_null(0) + pl.col("id").cum_sum().over("key"))
        both = pl.concat([self.totals.frame, made.select("key", "total")])
        self.totals.frame = both.unique("key", keep="last")
        return made.select("id", "total")


@job
def tables(rows: DataStream) -> DataStream:
    return rows.key_by("key").process_batches(Totals(), {"id": int, "total": int})


@job
def union(rows: DataStream) -> DataStream:
    return rows.filter(pl.col("id") % 2 == 0).union(rows.filter(pl.col("id") % 2 == 1)).select("id")


@job
def join(rows: DataStream) -> DataStream:
    left, right = (
        rows.select("key", pl.col("at").alias(f"{name}_at"), pl.col("id").alias(name)).with_watermarks(
            f"{name}_at", WatermarkStrategy.monotonous()
        )
        for name in ("left", "right")
    )
    joined = left.join(right, on="key", how="full", within=("-5 s", "5 s"))
    return joined.select("left", "right")


@job
def join_asof(rows: DataStream) -> DataStream:
    monotonous = WatermarkStrategy.monotonous()
    timed = rows.with_watermarks("at", monotonous)
    versions = rows.select("key", since="at", version="id").with_watermarks("since", monotonous)
    return timed.join_asof(versions, on="key", tolerance="1 min").select("id", "version")


class Matched(CoProcessFunction):
    """Whatever comes first waits."""

    left = ListState(pa.int64())
    right = ListState(pa.int64())

    def process1(self, row: Row, ctx: Any) -> Any:
        self.left.append(row["id"])
        return [{"left": row["id"], "right": other} for other in self.right]

    def process2(self, row: Row, ctx: Any) -> Any:
        self.right.append(row["id"])
        return [{"left": other, "right": row["id"]} for other in self.left]


@job
def connected_streams(rows: DataStream) -> DataStream:
    odd, even = rows.filter(pl.col("id") % 2 == 1), rows.filter(pl.col("id") % 2 == 0)
    return odd.key_by("key").connect(even.key_by("key")).process(Matched(), {"left": int, "right": int})


class Named(BroadcastProcessFunction):
    """Rows wait for their name until all have come."""

    names = BroadcastState()
    waiting = ListState()

    def process(self, row: Row, ctx: Any) -> Any:
        if row["key"] in self.names:
            return {"id": row["id"], "label": self.names[row["key"]]}
        self.waiting.append(row["id"])
        ctx.timers.event_time(row["at"])
        return None

    def process_broadcast(self, row: Row, ctx: Any) -> None:
        self.names[row["key"]] = row["label"]

    def on_timer(self, time: datetime, ctx: Any) -> Any:
        for number in self.waiting:
            yield {"id": number, "label": self.names.get(ctx.key, "nobody")}
        self.waiting.clear()


@job
def broadcast(rows: DataStream) -> DataStream:
    labels = rows.filter(pl.col("id") < 3).select("key", label=pl.format("label {}", "id"))
    return timed(rows).key_by("key").connect(labels.broadcast()).process(Named(), {"id": int, "label": str})


class Even(KeyedProcessFunction):
    def process(self, row: Row, ctx: Any) -> Any:
        if row["id"] % 2:
            ctx.side_output("odd", {"id": row["id"]})
            return None
        return {"id": row["id"]}


@job
def side_outputs(rows: DataStream) -> DataStream:
    made = rows.key_by("key").process(Even(), {"id": int}, side_outputs={"odd": {"id": int}})
    return made.select(id=-pl.col("id")).union(made.side_output("odd"))


class Distinct(Accumulator[set[str]]):
    columns = ("name",)
    type = pa.int64()

    def init(self) -> set[str]:
        return set()

    def add(self, accumulator: set[str], row: Row) -> set[str]:
        return accumulator | {row["name"]}

    def merge(self, first: set[str], second: set[str]) -> set[str]:
        return first | second

    def result(self, accumulator: set[str]) -> int:
        return len(accumulator)


@job
def accumulators(rows: DataStream) -> DataStream:
    return timed(rows).key_by("key").window(tumbling("20 s")).aggregate(names=Distinct())


@job
def windows_of_windows(rows: DataStream) -> DataStream:
    fine = timed(rows).key_by("key").window(tumbling("5 s")).aggregate(n=Count())
    coarse = fine.with_watermarks("window_start", WatermarkStrategy.bounded("5 s")).window_all(tumbling("20 s"))
    return coarse.aggregate(n=Sum("n"))


def seeded(row: Row) -> Row:
    return {"id": row["id"], "noise": random.Random(row["id"]).random()}


@job
def random_numbers_of_the_row(rows: DataStream) -> DataStream:
    return rows.map(seeded, {"id": int, "noise": float})


@job
def sets_in_order(rows: DataStream) -> DataStream:
    return rows.map(lambda row: {"words": " ".join(sorted(set(row["name"])))}, {"words": str})


@job
def other_parallelism(rows: DataStream) -> DataStream:
    return (
        rows.rebalance().select("id", "key").parallelism(3).key_by("key").process(Numbers(), {"key": int, "sum": int})
    )


class Numbers(KeyedProcessFunction):
    total = ValueState(pa.int64(), 0)

    def process(self, row: Row, ctx: Any) -> Row:
        self.total.value += 1
        return {"key": row["key"], "sum": self.total.value}


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", JOBS)
def test_a_correct_job_is_not_blamed(name: str) -> None:
    env = Environment(name)
    JOBS[name](env.from_collection(ROWS, splits=1).uid("rows")).print().uid("result")
    report = simulate(env, seeds=SEEDS)
    assert report.seeds == len(SEEDS)
    assert report.long == 0
    assert not report.warnings


def test_a_job_over_several_splits_is_not_blamed() -> None:
    env = Environment("splits", parallelism=3)
    tumbling_windows(env.from_collection(ROWS).uid("rows")).print()
    assert simulate(env, seeds=SEEDS).ok


def test_rows_that_are_late_by_themselves_are_no_matter_when_they_are_read_too() -> None:
    env = Environment("late")
    counts = timed(env.from_collection(ROWS, splits=1)).key_by("key").window(tumbling("10 s")).aggregate(n=Count())
    counts.print()
    counts.side_output(LATE).print()
    assert simulate(env, seeds=SEEDS).ok


@pytest.mark.parametrize("name", ["hello", "quickstart", "visits"])
def test_an_example_is_not_blamed(name: str) -> None:
    report = simulate(load_job(Path(__file__).parents[2] / f"examples/{name}.py"), seeds=SEEDS)
    assert report.rows >= 180


def test_the_example_of_the_flights_is_not_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = Path(__file__).parents[2] / "examples/flights.py"
    monkeypatch.chdir(tmp_path)
    assert simulate(load_job(example), seeds=SEEDS[: len(SEEDS) // 2], rows_max=100).rows > 200


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", [name for name in QUERIES if name != "q12"])  # which depends on the clock
def test_a_query_of_nexmark_is_not_blamed(name: str) -> None:
    query = QUERIES[name]
    env = Environment(name, parallelism=2)
    workload = Events(100_000, lanes=1, columns=query.reads)
    events = env.source(GeneratorSource(workload, workload.count, schema=workload.schema)).uid("events")
    query.build(events.with_watermarks("time", WatermarkStrategy.monotonous())).print().uid("result")
    # the average so far in a category is an update with each auction: the last one counts, whichever auction brings it
    updates: Any = {"latest": {"result": ["category"]}, "ignore": {"result": ["price"]}} if name == "q4" else {}
    assert simulate(env, seeds=SEEDS, rows_max=300, **updates).ok
