"""Small jobs with state of every kind, whose checkpoints are mutated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import polars as pl
import pyarrow as pa

from midstream import (
    Accumulator,
    BroadcastProcessFunction,
    BroadcastState,
    Count,
    DataStream,
    Environment,
    First,
    KeyedBatchFunction,
    KeyedProcessFunction,
    ListState,
    MapState,
    Max,
    Mean,
    ReducingState,
    Sum,
    TableState,
    ValueState,
    WatermarkStrategy,
    count,
    session,
    sliding,
    tumbling,
)

START = datetime(2024, 1, 1)
ROWS = [{"k": n % 3, "name": f"n{n % 5}", "at": START + timedelta(seconds=7 * n), "x": n} for n in range(12)]
MORE = [{"k": n % 4, "name": f"n{n % 5}", "at": START + timedelta(seconds=7 * n), "x": n} for n in range(12, 20)]


@dataclass
class Box:
    content: Any


class Last(Accumulator[Any]):
    type = pa.string()
    columns = ("name",)

    def init(self) -> Any:
        return []

    def add(self, accumulator: Any, row: Any) -> Any:
        return [*accumulator, Box(row["name"])]

    def merge(self, first: Any, second: Any) -> Any:
        return first + second

    def result(self, accumulator: Any) -> str:
        return f"{len(accumulator)} {accumulator[-1].content}"


def _larger(one: Any, other: Any) -> Any:
    return max(one, other)


class Everything(KeyedProcessFunction):
    number = ValueState(pa.int64(), default=0)
    thing = ValueState()
    items = ListState(pa.string())
    things = ListState()
    typed = MapState(key=pa.string(), value=pa.decimal128(12, 2))
    untyped = MapState()
    most = ReducingState(_larger)
    nested = ValueState(pa.struct([("a", pa.list_(pa.int32())), ("b", pa.timestamp("us"))]))

    def process(self, row: Any, ctx: Any) -> Any:
        self.number.value += 1
        self.thing.value = Box({"x": row["x"], "all": [1.5, None, b"b"]})
        self.items.append(row["name"])
        self.things.append((row["x"], Decimal("1.5"), frozenset((1, 2))))
        self.typed[row["name"]] = Decimal(row["x"])
        self.untyped[row["x"], "y"] = [row["at"]]
        self.most.add(row["x"])
        self.nested.value = {"a": [1, row["x"]], "b": row["at"]}
        ctx.timers.event_time(row["at"] + timedelta(minutes=1))
        ctx.timers.processing_time(ctx.now + timedelta(hours=1))
        return {"k": ctx.key[0], "n": self.number.value}

    def on_timer(self, time: Any, ctx: Any) -> Any:
        lengths = len(list(self.items)), len(list(self.things)), len(list(self.typed.items()))
        seen = (self.thing.value, list(self.untyped.items()), self.most.value, self.nested.value, lengths)
        return {"k": ctx.key[0], "n": len(seen)}


class Totals(KeyedBatchFunction):
    totals = TableState({"k": int, "total": int})
    waiting = TableState({"k": int, "name": str, "at": datetime})

    def process(self, rows: Any, ctx: Any) -> Any:
        before = rows.join(self.totals.lookup(rows), on="k", how="left", maintain_order="left")
        made = before.with_columns(total=pl.col("total").fill_null(0) + pl.col("x").cum_sum().over("k"))
        self.totals.upsert(made.select("k", "total").unique("k", keep="last"))
        self.waiting.append(rows.select("k", "name", "at"))
        return made.select("k", "total")

    def on_watermark(self, ctx: Any) -> Any:
        return self.waiting.pop_until("at", ctx.watermark).select("k", total=pl.lit(-1, pl.Int64))


class Allowed(BroadcastProcessFunction):
    allowed = BroadcastState()
    seen = ValueState(default=0)

    def process(self, row: Any, ctx: Any) -> Any:
        self.seen.value += 1
        return {"k": row["k"], "n": self.seen.value, "allowed": row["k"] in self.allowed}

    def process_broadcast(self, row: Any, ctx: Any) -> Any:
        self.allowed[row["k"]] = Box(row["name"])


def _rows(env: Environment, uid: str) -> DataStream:
    rows = env.from_collection(ROWS, splits=1).uid(uid)
    return rows.with_watermarks("at", WatermarkStrategy.bounded("20 s"))


def windows(env: Environment) -> None:
    keyed = _rows(env, "rows").key_by("k")
    keyed.window(tumbling("30 s")).allowed_lateness("1 min").aggregate(
        n=Count(), s=Sum("x"), f=First("name"), m=Mean("x"), l=Last()
    ).uid("tumbling").collect()
    keyed.window(sliding("1 min", "20 s")).aggregate(n=Count(), m=Max("x")).uid("sliding").collect()
    keyed.window(session("15 s")).aggregate(n=Count(), f=First("name")).uid("sessions").collect()


def aggregates(env: Environment) -> None:
    keyed = _rows(env, "rows").key_by("k")
    keyed.aggregate(n=Count(), s=Sum("x"), f=First("name"), m=Mean("x"), ttl="1 min").uid("running").collect()
    keyed.top(2, by="x", every="20 s").uid("first").collect()
    keyed.window(tumbling("30 s")).top(2, by="x").uid("first_of_windows").collect()
    keyed.window(count(3)).aggregate(n=Count(), s=Sum("x"), f=First("name")).uid("counted").collect()


def functions(env: Environment) -> None:
    _rows(env, "rows").key_by("k", "name").process(Everything(), {"k": int, "n": int}).uid("everything").collect()


def tables(env: Environment) -> None:
    _rows(env, "rows").key_by("k").process_batches(Totals(), {"k": int, "total": int}).uid("totals").collect()


def joins(env: Environment) -> None:
    strategy = WatermarkStrategy.bounded("20 s")
    left = env.from_collection(ROWS, splits=1).uid("left").with_watermarks("at", strategy)
    right = env.from_collection(ROWS, splits=1).uid("right")
    right = right.select("k", began=pl.col("at"), other=pl.col("name"))
    right = right.with_watermarks("began", strategy)
    left.join(right, on="k", within=("-30 s", "10 s")).uid("joined").collect()


def broadcasts(env: Environment) -> None:
    left, right = _rows(env, "left"), _rows(env, "right")
    checked = left.key_by("k").connect(right.broadcast())
    checked.process(Allowed(), {"k": int, "n": int, "allowed": bool}).uid("allowed").collect()


JOBS: dict[str, Callable[[Environment], None]] = {
    each.__name__: each for each in (windows, aggregates, functions, tables, joins, broadcasts)
}
