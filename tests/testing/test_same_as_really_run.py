"""A dozen streams of all kinds of columns, on real processes and in process: the same rows, in the same types."""

from __future__ import annotations

from collections import Counter
from datetime import date, datetime, time, timedelta
from decimal import Decimal

import polars as pl
import pyarrow as pa

from midstream import (
    LATE,
    BroadcastProcessFunction,
    BroadcastState,
    CoProcessFunction,
    Count,
    Environment,
    KeyedBatchFunction,
    KeyedProcessFunction,
    ListState,
    Mean,
    Sum,
    TableState,
    ValueState,
    WatermarkStrategy,
    session,
    testing,
    tumbling,
)
from midstream.runtime.process.process_slots import ProcessSlots

NOON = datetime(2024, 1, 1, 12)
ROWS = 40


def table() -> pa.Table:
    def some(values, kind):
        """With a null in every fifth row."""
        return pa.array([None if i % 5 == 4 else values(i) for i in range(ROWS)], kind)

    return pa.table(
        {
            "key": pa.array([f"k{i % 3}" for i in range(ROWS)]),
            "at": pa.array([NOON + timedelta(seconds=10 * i) for i in range(ROWS)], pa.timestamp("s")),
            "small": some(lambda i: i - 20, pa.int8()),
            "large": some(lambda i: 2**63 + i, pa.uint64()),
            "real": some(lambda i: float("nan") if i == 3 else i / 7, pa.float32()),
            "price": some(lambda i: Decimal(i) / 4, pa.decimal128(10, 2)),
            "zoned": some(lambda i: NOON + timedelta(hours=i), pa.timestamp("ms", "Europe/Berlin")),
            "day": some(lambda i: date(2024, 1, 1 + i % 28), pa.date64()),
            "clock": some(lambda i: time(i % 24, 30), pa.time32("s")),
            "length": some(lambda i: timedelta(minutes=i), pa.duration("s")),
            "bytes": some(lambda i: bytes([i]), pa.binary()),
            "kind": some(lambda i: "ab"[i % 2], pa.dictionary(pa.int8(), pa.string())),
            "list": some(lambda i: [i, None], pa.list_(pa.int16())),
            "struct": some(lambda i: {"x": i, "y": None}, pa.struct([("x", pa.int32()), ("y", pa.string())])),
            "nothing": pa.nulls(ROWS, pa.string()),
        }
    )


class Lists(KeyedProcessFunction):
    seen = ListState()

    def process(self, row, ctx):
        self.seen.append(row["price"])
        ctx.timers.event_time(row["at"] + timedelta(seconds=25))
        if row["small"] is None:
            ctx.side_output("null", {"key": row["key"], "zoned": row["zoned"]})
        return {"key": row["key"], "prices": list(self.seen), "struct": row["struct"], "at": ctx.timestamp}

    def on_timer(self, at, ctx):
        return {"key": ctx.key, "prices": [], "struct": None, "at": at}


class Rules(BroadcastProcessFunction):
    rules = BroadcastState()

    def process(self, row, ctx):
        return {"key": row["key"], "large": row["large"]}

    def process_broadcast(self, row, ctx):
        self.rules[row["rule"]] = True


class Named(CoProcessFunction):
    name = ValueState(str)

    def process1(self, row, ctx):
        ctx.timers.event_time(row["at"])

    def process2(self, row, ctx):
        self.name.value = row["name"]

    def on_timer(self, at, ctx):
        return {"at": at, "name": self.name.value}


class Totals(KeyedBatchFunction):
    rows = TableState({"key": str, "price": pl.Decimal(10, 2)})

    def process(self, rows, ctx):
        self.rows.append(rows.select("key", "price"))

    def on_watermark(self, ctx):
        if ctx.watermark == datetime.max:
            return self.rows.frame.group_by("key").agg(pl.col("price").sum())
        return None


def job() -> tuple[Environment, dict]:
    env = Environment("same")
    rows = env.from_collection(table(), splits=1).uid("rows")
    timed = rows.with_watermarks("at", WatermarkStrategy.bounded("30 s"))
    keyed = timed.key_by("key")
    lists = keyed.process(
        Lists(),
        {
            "key": str,
            "prices": pa.list_(pa.decimal128(10, 2)),
            "struct": table().schema.field("struct").type,
            "at": datetime,
        },
        side_outputs={"null": {"key": str, "zoned": pa.timestamp("ms", "Europe/Berlin")}},
    )
    windows = keyed.window(tumbling("1 min")).aggregate(
        n=Count(), total=Sum("price"), mean=Mean("real"), sum=Sum("small")
    )
    rules = env.from_collection([{"rule": "one"}]).uid("rules")
    names = env.from_collection([{"key": f"k{i % 3}", "name": f"name {i}"} for i in range(60)], splits=1).uid("names")
    shifted = rows.with_columns(
        small=pl.col("small").cast(pl.Int64) * 1000, text=pl.col("kind").cast(pl.String) + "!", half=pl.col("real") / 2
    )
    streams = {
        "as it is": rows,
        "filter": rows.filter(pl.col("small") > -10),
        "filter by function": rows.filter(lambda row: row["list"]),
        "columns": shifted,
        "map": rows.map(lambda row: row),
        "map to others": rows.map(lambda row: {"n": row["small"], "t": str(row["clock"])}, {"n": pa.int32(), "t": str}),
        "flat map": rows.flat_map(lambda row: [{"x": value} for value in row["list"] or ()], {"x": pa.int64()}),
        "map batches": rows.map_batches(
            lambda frame: frame.select(pl.col("price") + 1, "zoned"),
            {"price": pa.decimal128(11, 2), "zoned": pa.timestamp("ms", "Europe/Berlin")},
        ),
        "process": lists,
        "side output": lists.side_output("null"),
        "tumbling": windows,
        "late": windows.side_output(LATE),
        "session": keyed.window(session("25 s")).aggregate(n=Count()),
        "join": timed.join(again(env), on="key", how="left", within=(0, "20 s")),
        "as-of join": timed.join_asof(again(env), on="key"),
        "broadcast": keyed.connect(rules.broadcast()).process(Rules(), {"key": str, "large": pa.uint64()}),
        "complete table": keyed.connect(names.key_by("key")).process(Named(), {"at": datetime, "name": str}),
        "tables": keyed.process_batches(Totals(), {"key": str, "price": pl.Decimal(38, 2)}),
    }
    return env, {name: stream.collect() for name, stream in streams.items()}


def again(env: Environment):
    other = env.from_collection(
        [{"key": f"k{i % 3}", "when": NOON + timedelta(seconds=7 * i), "n": i} for i in range(9)]
    )
    return other.with_watermarks("when", WatermarkStrategy.bounded("1 h"))


def contents(found: pa.Table) -> Counter:
    return Counter(repr(row) for row in found.to_pylist())


def test_a_job_gives_the_same_rows_in_the_same_types_in_process_and_on_processes():
    env, sinks = job()
    result = testing.run(env, cut=8)
    assert env.execute(slots=ProcessSlots()).state == "finished"
    for name, sink in sinks.items():
        assert result.table(sink).schema.equals(sink.table().schema), name
        assert contents(result.table(sink)) == contents(sink.table()), name
    assert all(sink.table().num_rows for name, sink in sinks.items() if name != "late")
    assert contents(testing.run(env, parallelism=3).table(sinks["tables"])) == contents(sinks["tables"].table())
