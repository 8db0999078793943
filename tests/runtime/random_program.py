"""A random program of a seed, whose output does not depend on how often it is interrupted, nor on its parallelism.

    python random_program.py SEED DIRECTORY PARALLELISM MASTER [undisturbed]

resumes what stands in the directory. Its last line is the state in which the job ended. MASTER: of Spark, or "processes" for
slots that are processes of their own. `undisturbed`: at full speed, with few checkpoints, to learn what the output has to
be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random
from typing import Any, Final, TypeAlias

import numpy as np
import polars as pl
import pyarrow as pa

from midstream import (
    BatchContext,
    CoProcessFunction,
    Count,
    DataStream,
    Environment,
    KeyedBatchFunction,
    KeyedProcessFunction,
    ListState,
    MapState,
    Max,
    Mean,
    Min,
    ProcessContext,
    Sum,
    TableState,
    Tuning,
    ValueState,
    WatermarkStrategy,
    fixed_restarts,
    session,
    sliding,
    tumbling,
)
from midstream.runtime.process.process_slots import ProcessSlots

START: Final = datetime(2024, 1, 1)
END: Final = datetime(2100, 1, 1)
"""Beyond all rows: what is emitted for a key at the end of its data."""
Row: TypeAlias = dict[str, Any]
ROWS: Final = {"key": str, "id": int, "at": datetime, "x": int}
PYTHON_ROWS_MAX: Final = 200_000
"""With more rows, no function is called for each row."""
JITTER_MAX_US: Final = 5_000
BEHIND: Final = WatermarkStrategy.bounded("100 d")
"""Event time of results that are in no order."""


# ---- functions. What they emit before the end of the data does not depend on the order of rows of different splits.


class CountedOnce(KeyedProcessFunction):
    """Emits each row, and at the end how many there were. `is_distinct`: no id of a key may come twice."""

    rows = ValueState(pa.int64(), default=0)
    total = ValueState(pa.int64(), default=0)
    seen = MapState(key=pa.int64(), value=pa.int64())

    def __init__(self, is_distinct: bool) -> None:
        self.is_distinct = is_distinct

    def process(self, row: Row, ctx: ProcessContext) -> Row | None:
        self.rows.value += 1
        self.total.value += row["x"]
        if self.is_distinct:
            assert row["id"] not in self.seen, f"twice: {row}"
            self.seen[row["id"]] = self.rows.value
        ctx.timers.event_time(END)
        return row

    def on_timer(self, time: datetime, ctx: ProcessContext) -> Row | None:
        x = self.rows.value * 1_000_003 + self.total.value + len(self.seen)
        return {"key": ctx.key, "id": -1, "at": END, "x": x}


class SummedByTimers(KeyedProcessFunction):
    """Emits a sum over each 100 ms, when event time is there."""

    sums = MapState(key=pa.timestamp("us"), value=pa.int64())
    ids = ListState(pa.int64())

    def process(self, row: Row, ctx: ProcessContext) -> None:
        at = row["at"].replace(microsecond=row["at"].microsecond // 100_000 * 100_000) + timedelta(milliseconds=100)
        self.sums[at] = self.sums.get(at, 0) + row["x"] * 31 + row["id"]
        self.ids.append(row["id"])
        ctx.timers.event_time(at)
        ctx.timers.event_time(END)

    def on_timer(self, time: datetime, ctx: ProcessContext) -> Row | None:
        if time == END:
            return {"key": ctx.key, "id": sum(self.ids), "at": time, "x": len(self.sums)}
        return {"key": ctx.key, "id": -2, "at": time, "x": self.sums.pop(time)}


class SummedOverBoth(CoProcessFunction):
    """Emits the rows of the first stream, and at the end a sum over both."""

    first = ValueState(pa.int64(), default=0)
    second = ValueState(pa.int64(), default=0)

    def process1(self, row: Row, ctx: ProcessContext) -> Row | None:
        self.first.value += row["x"] + row["id"]
        ctx.timers.event_time(END)
        return row

    def process2(self, row: Row, ctx: ProcessContext) -> None:
        self.second.value += row["x"] * 2 + row["id"]
        ctx.timers.event_time(END)

    def on_timer(self, time: datetime, ctx: ProcessContext) -> Row | None:
        return {"key": ctx.key, "id": -3, "at": END, "x": self.first.value * 7 + self.second.value}


class SummedInTable(KeyedBatchFunction):
    """Emits each row, and at the end the number of rows and a sum for each key."""

    sums = TableState({"key": str, "n": int, "s": int})

    def process(self, rows: pl.DataFrame, ctx: BatchContext) -> pl.DataFrame | None:
        new = rows.group_by("key", maintain_order=True).agg(
            n=pl.len().cast(pl.Int64), s=pl.col("x").sum() + pl.col("id").sum()
        )
        both = new.join(self.sums.lookup(new), on="key", how="left", suffix="_before", maintain_order="left")
        added = {name: pl.col(name) + pl.col(f"{name}_before").fill_null(0) for name in ("n", "s")}
        self.sums.upsert(both.select("key", **added))
        return rows

    def on_watermark(self, ctx: BatchContext) -> pl.DataFrame | None:
        if ctx.watermark != datetime.max:
            return None
        sums = self.sums.frame
        self.sums.frame = sums.clear()
        at = pl.lit(END, pl.Datetime("us"))
        return sums.select("key", id=pl.lit(-4, pl.Int64), at=at, x=pl.col("n") * 1_000_003 + pl.col("s"))


class HeldBack(KeyedBatchFunction):
    """Emits each row 40 ms later, at its new time."""

    held = TableState({**ROWS, "due": datetime})

    def process(self, rows: pl.DataFrame, ctx: BatchContext) -> None:
        self.held.append(rows.with_columns(due=pl.col("at").dt.offset_by("40ms")))

    def on_watermark(self, ctx: BatchContext) -> pl.DataFrame | None:
        return self.held.pop_until("due", ctx.watermark).select("key", "id", at="due", x="x")


# ---- programs


@dataclass
class Draft:
    """A program as far as it is drawn. The first part of `said` describes its source."""

    env: Environment
    seed: int
    random: Random
    seconds: float
    said: list[str]
    stream: DataStream
    source: DataStream
    is_distinct: bool = True
    """Whether no id of a key comes twice, nor a row that no source has made."""

    @property
    def uid(self) -> str:
        return f"step{len(self.said)}"

    def then(self, stream: DataStream, *, is_distinct: bool = False) -> None:
        self.stream = stream.uid(self.uid)
        self.is_distinct = self.is_distinct and is_distinct


def source(env: Environment, random: Random, uid: str, seed: int, seconds: float) -> tuple[DataStream, int]:
    """Rows over about `seconds` of time, and how many there are."""
    count = random.choice((2_000, 20_000, PYTHON_ROWS_MAX, 1_000_000))
    keys = random.choice((1, 3, 50, 5_000))
    jitter_us = random.choice((0, 0, JITTER_MAX_US))
    splits = random.choice((1, 2, 3, 8))
    long = "k" * random.choice((0, 0, 200))
    step_us = 1_000 if count <= 20_000 else 50

    def rows(index: Any) -> pl.DataFrame:
        mixed = (index * 2_654_435_761 + seed) % 2**32
        at = np.datetime64(START, "us") + (index * step_us + mixed % (jitter_us + 1)).astype("timedelta64[us]")
        key = pl.Series(mixed >> 8) % keys
        return pl.DataFrame({"key": long + key.cast(pl.String), "id": index, "at": at, "x": (mixed >> 4) % 1_000})

    strategy = WatermarkStrategy.bounded(f"{jitter_us} us")
    stream = env.generate(rows, count=count, splits=splits, rows_per_s=count / seconds).uid(uid)
    return stream.with_watermarks("at", strategy), count


def another_source(draft: Draft, seconds: float) -> DataStream:
    stream, count = source(draft.env, draft.random, f"{draft.uid}-second", draft.seed + 1, seconds)
    draft.said[-1] += f" with {count} rows"
    return stream


def twice_or_not(row: Row) -> Iterator[Row]:
    for _ in range(row["id"] % 3):
        yield row


def both(draft: Draft) -> None:
    second = another_source(draft, draft.seconds * draft.random.choice((0.2, 1, 1.3)))
    draft.then(draft.stream.key_by("key").connect(second.key_by("key")).process(SummedOverBoth(), ROWS))


def joined(draft: Draft) -> None:
    few = draft.stream.filter(pl.col("id") % 89 == 0)
    second = another_source(draft, draft.seconds).filter(pl.col("id") % 97 == 0)
    renamed = second.select("key", id2=pl.col("id"), at2=pl.col("at"), x2=pl.col("x"))
    timed = renamed.with_watermarks("at2", WatermarkStrategy.bounded(f"{2 * JITTER_MAX_US} us"))
    pairs = few.join(timed, on="key", within=("-200 ms", 0)).uid(f"{draft.uid}-pairs")
    draft.then(pairs.select("key", "id", "at", x=pl.col("x") * 3 + pl.col("x2") + pl.col("id2")))


def windowed(draft: Draft) -> None:
    size_ms = draft.random.choice((100, 1_000, 7_000))
    window = draft.random.choice(
        (tumbling(f"{size_ms} ms"), sliding(f"{size_ms} ms", f"{size_ms // 4} ms"), session(f"{size_ms // 50} ms"))
    )
    draft.said[-1] = f"{window}"
    made = draft.stream.key_by("key").window(window)
    counted = made.aggregate(n=Count(), x=Sum("x"), least=Min("x"), last=Max("id"), mean=Mean("x"))
    x = pl.col("x") * 3 + pl.col("least") + (pl.col("mean") * 1000).round().cast(pl.Int64)
    draft.then(
        counted.uid(f"{draft.uid}-windows").select(
            "key", id=pl.col("n") * 13 + pl.col("last"), at=pl.col("window_start"), x=x
        )
    )


ANY: Final[Mapping[str, Callable[[Draft], None]]] = {
    "filter": lambda d: d.then(d.stream.filter(pl.col("x") % 5 != 1), is_distinct=True),
    "map_batches": lambda d: d.then(
        d.stream.map_batches(lambda f: f.with_columns(pl.col("x") - 1), ROWS), is_distinct=True
    ),
    "rebalance": lambda d: d.then(d.stream.rebalance().filter(pl.col("x") % 7 != 2), is_distinct=True),
    "union": lambda d: d.then(
        d.stream.union(d.source.with_columns(pl.col("x") + 5).uid(f"{d.uid}-more")).filter(pl.col("x") % 11 != 3)
    ),
    "table": lambda d: d.then(d.stream.key_by("key").process_batches(SummedInTable(), ROWS)),
    "held back": lambda d: d.then(d.stream.key_by("key").process_batches(HeldBack(), ROWS), is_distinct=True),
    "join": joined,
    "window": windowed,
}
BY_ROW: Final[Mapping[str, Callable[[Draft], None]]] = {
    "map": lambda d: d.then(d.stream.map(lambda row: {**row, "x": row["x"] + 1}, ROWS), is_distinct=True),
    "flat_map": lambda d: d.then(d.stream.flat_map(twice_or_not, ROWS)),
    "counted": lambda d: d.then(d.stream.key_by("key").process(CountedOnce(d.is_distinct), ROWS)),
    "timers": lambda d: d.then(d.stream.key_by("key").process(SummedByTimers(), ROWS)),
    "both": both,
}


def program(env: Environment, seed: int, seconds: float) -> Draft:
    random = Random(f"program {seed}")
    stream, rows = source(env, random, "source", seed, seconds)
    draft = Draft(env, seed, random, seconds, [f"{rows} rows"], stream, stream)
    kinds = {**ANY, **(BY_ROW if rows <= PYTHON_ROWS_MAX else {})}
    for _ in range(random.randint(1, 4)):
        name = random.choice(sorted(kinds))
        if draft.stream.core.event_time is None:
            draft.stream = draft.stream.with_watermarks("at", BEHIND)
        draft.said.append(name)
        kinds[name](draft)
    return draft


def main(seed: int, directory: str, parallelism: int, master: str, *, undisturbed: bool) -> None:
    random = Random(f"settings {seed}")
    settings: dict[str, Any] = {
        "checkpoint_interval": random.choice(("50 ms", "200 ms", "1 s")),
        "aligned_timeout": random.choice(("0 s", "20 ms", "1 s", None)),
        "tuning": Tuning(
            batch_rows=random.choice((200, 5_000, 131_072, 131_072)),
            queue_time=random.choice((None, "10 ms")),
            buffer_size=random.choice(("4 KiB", "32 KiB")),
            pool_size=random.choice(("4 MiB", "128 MiB")),
            heartbeat_timeout="4 s",
        ),
        "max_parallelism": random.choice((7, 128)),
        "retained_checkpoints": random.choice((1, 3)),
    }
    seconds, sink = random.choice((3.0, 6.0, 10.0)), random.choice(("write_parquet", "write_jsonl"))
    drawn = f"{sink} within {seconds} s, {settings}"
    if undisturbed:
        seconds, settings = 0.2, {"tuning": Tuning(heartbeat_timeout="4 s")}
    env = Environment(
        "random",
        parallelism=parallelism,
        checkpoint_dir=f"{directory}/checkpoints",
        tolerable_failures=100,
        restart=fixed_restarts(1000, "100 ms"),
        **settings,
    )
    draft = program(env, seed, seconds)
    print(f"seed {seed}, parallelism {parallelism}: {', '.join(draft.said)}, {drawn}", flush=True)
    getattr(draft.stream, sink)(f"{directory}/out").uid("sink")
    where: dict[str, Any] = {"slots": ProcessSlots()} if master == "processes" else {"master": master}
    status = env.execute(**where, resume=True)
    late = sum(operator.late_rows for vertex in status.vertices for operator in vertex.operators)
    assert late == 0, f"{late} rows were late, so the output depends on their order"
    print(status.state, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], undisturbed=len(sys.argv) > 5)
