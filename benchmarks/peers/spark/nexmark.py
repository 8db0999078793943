"""NEXMark q0 to q5, q7, q8, q11, q14, q17, q21, q22 on Spark Structured Streaming, in SQL expressions.

As in `windows`, the source counts blocks of events and Spark makes the events; columns that a query does not use
are not made, for Spark's optimizer sees that. Or events are read from Parquet files, and only the columns that a query
uses. Where a query waits for a watermark, an event of the year 2100 follows.

What Structured Streaming cannot express is done next to it:
- q4: the average per category would have to be updated behind an append-only aggregation; the sink adds up counts
  and sums per category instead. A highest price is emitted when no bid can be in time for any auction of that age,
  up to 334 ms of event time after it expires.
- q5, q7: there is no rank over a stream; a second aggregation per window takes the winners out of a list.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from definitions import require
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from session import BLOCK, Run, run_query

from midstream_lab.bench.nexmark.expected import EXPECTED
from midstream_lab.bench.nexmark.files import EVENTS_PER_FILE, written
from midstream_lab.bench.nexmark.generator import (
    AUCTION,
    BID,
    CITIES,
    EXTRAS,
    FIRST_ID,
    HOT_CHANNELS,
    LIFE_MS,
    NAMES,
    OTHER_CHANNELS,
    PERSON,
    PRICES,
    SCHEMA,
    STATES,
    channels,
    extras,
    urls,
)
from midstream_lab.bench.nexmark.queries import QUERIES as DEFINED

EXPIRES_MS = 2 * LIFE_MS
FAR_MS = 4_102_444_800_000
ORIGIN_MS = 86_400_000
"""Event time begins a day late: Spark's watermark begins at 0, and what is not after it counts as late."""
WINDOW = "10 seconds"
SLIDE = "2 seconds"


def run_nexmark(
    spark: SparkSession,
    n: int,
    batch: int,
    parallelism: int,
    max_seconds: float | None,
    *,
    query: str,
    in_files: bool = False,
) -> Run:
    """Raises TimeoutError when the time is up: a part of a query's result cannot be checked."""
    build, is_windowed = QUERIES[query]
    with (
        _in_files(spark, n, batch, is_windowed) if in_files else _made(spark, n, batch, parallelism, is_windowed) as (
            events,
            last_batch,
        )
    ):
        result, metrics = build(events)
        run = run_query(result, {f"m{i}": metric for i, metric in enumerate(metrics)}, last_batch, max_seconds)
    if run.is_bounded:
        raise TimeoutError(f"{query} had done {len(run.batches)} of {last_batch + 1} batches after {max_seconds:g} s")
    checked = ("rows", *DEFINED[query].checked)
    found = dict(zip(checked, run.totals, strict=True))
    require(
        dict(zip(checked, EXPECTED[query](n), strict=True)), found, relative=1e-9 if DEFINED[query].has_floats else 0.0
    )
    return replace(run, result_rows=int(found["rows"]))


@contextmanager
def _made(spark: SparkSession, n: int, batch: int, parallelism: int, is_windowed: bool) -> Iterator[tuple[Events, int]]:
    """The events as Spark makes them, and the number of the last batch."""
    if n % BLOCK:
        raise ValueError(f"the number of events must be a multiple of {BLOCK}, and is {n}")
    blocks, per_batch = n // BLOCK, max(2, batch // BLOCK)

    def events() -> DataFrame:
        source = (
            spark.readStream.format("rate-micro-batch")
            .option("rowsPerBatch", per_batch)
            .option("numPartitions", parallelism)
            .load()
        )
        end = f"value * {BLOCK} + if(value < {blocks}, {BLOCK - 1}, 0)"
        indices = source.where(f"value <= {blocks if is_windowed else blocks - 1}")
        made = indices.selectExpr(f"explode(sequence(value * {BLOCK}, {end})) n")
        return made.selectExpr(
            "n",
            "n div 50 person",
            "n % 50 off",
            f"n >= {n} is_end",
            f"timestamp_millis(if(n < {n}, {ORIGIN_MS} + n div 10, {FAR_MS})) time",
        )

    yield events, _last_batch(blocks, per_batch, is_windowed)


@contextmanager
def _in_files(spark: SparkSession, n: int, batch: int, is_windowed: bool) -> Iterator[tuple[Events, int]]:
    """The events of files, a file with the last one, and the number of the last batch."""
    directory, files, per_batch = written(n), -(-n // EVENTS_PER_FILE), max(1, batch // EVENTS_PER_FILE)
    types = {
        pa.int8(): "tinyint",
        pa.int64(): "bigint",
        pa.large_string(): "string",
        pa.timestamp("ms"): "timestamp_ntz",
    }
    schema = ", ".join(f"{field.name} {types[field.type]}" for field in SCHEMA)
    with tempfile.TemporaryDirectory(prefix="nexmark-end-", dir=directory.parent) as end:
        rows = [
            {"kind": PERSON, "time": FAR_MS, "person": -1},
            {"kind": AUCTION, "time": FAR_MS, "auction": -2, "seller": -3, "category": -1, "expires": FAR_MS},
            {"kind": BID, "time": FAR_MS, "bid_auction": -4, "bidder": -5, "price": 0},
        ]
        if is_windowed:
            path = Path(end, "end.parquet")
            pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path)
            os.utime(path, (files, files))  # Spark reads the oldest first

        def events() -> DataFrame:
            paths = f"{directory.parent}/{{{directory.name},{Path(end).name}}}/*.parquet"
            source = spark.readStream.schema(schema).option("maxFilesPerTrigger", per_batch).parquet(paths)
            return source.withColumn("time", F.expr(f"cast(time + interval {ORIGIN_MS} milliseconds as timestamp)"))

        yield events, _last_batch(files, per_batch, is_windowed)


def _last_batch(parts: int, per_batch: int, is_windowed: bool) -> int:
    """With the last event, and after it a batch without rows, if there are windows."""
    return parts // per_batch + 1 if is_windowed else -(-parts // per_batch) - 1


def drawn(events: DataFrame, **draws: tuple[int, int | str]) -> DataFrame:
    """With columns name=(salt, k): a number below k. One step per projection, for each uses the one before twice."""
    steps: list[Callable[[int, str, int | str], str]] = [
        lambda salt, name, k: f"n * 16 + {salt} + {_signed(0x9E3779B97F4A7C15)}",
        lambda salt, name, k: f"({name} ^ shiftrightunsigned({name}, 30)) * {_signed(0xBF58476D1CE4E5B9)}",
        lambda salt, name, k: f"({name} ^ shiftrightunsigned({name}, 27)) * {_signed(0x94D049BB133111EB)}",
        lambda salt, name, k: f"shiftrightunsigned({name} ^ shiftrightunsigned({name}, 31), 33) % ({k})",
    ]
    for step in steps:
        events = events.withColumns({name: F.expr(step(salt, name, k)) for name, (salt, k) in draws.items()})
    return events


def _signed(constant: int) -> str:
    return f"{constant - 2**64 if constant >= 2**63 else constant}L"


def persons(events: DataFrame) -> DataFrame:
    if "kind" in events.columns:
        return events.where(f"kind = {PERSON}").selectExpr("person id", "name", "city", "state", "time")
    made = drawn(events.where("off = 0 or is_end"), first=(0, 11), last=(1, 9), place=(2, 10), region=(3, 6))
    return made.select(
        F.expr(f"if(is_end, -1, {FIRST_ID} + person)").alias("id"),
        _of(NAMES.to_pylist(), "first * 9 + last").alias("name"),
        _of(CITIES.to_pylist(), "place").alias("city"),
        _of(STATES.to_pylist(), "region").alias("state"),
        "time",
    )


def auctions(events: DataFrame) -> DataFrame:
    if "kind" in events.columns:
        ends = f"cast(expires + interval {ORIGIN_MS} milliseconds as timestamp) expires"
        return events.where(f"kind = {AUCTION}").selectExpr("auction id", "seller", "category", "time", ends)
    made = drawn(
        events.where("(off >= 1 and off <= 3) or is_end"),
        is_hot=(0, 4),
        back=(1, "least(person, 999) + 1"),
        kind=(2, 5),
        lasts_ms=(4, EXPIRES_MS),
    )
    return made.selectExpr(
        f"if(is_end, -2, {FIRST_ID} + person * 3 + off - 1) id",
        f"if(is_end, -3, {FIRST_ID} + if(is_hot > 0, (person div 100) * 100, person - back)) seller",
        "10 + kind category",
        "time",
        "time + make_dt_interval(0, 0, 0, (1 + lasts_ms) / 1000) expires",
    )


def bids(events: DataFrame) -> DataFrame:
    if "kind" in events.columns:
        columns = ("bid_auction auction", "bidder", "price", "channel", "url", "extra", "time")
        return events.where(f"kind = {BID}").selectExpr(*columns)
    made = drawn(
        events.where("off >= 4 or is_end").withColumn("newest", F.expr("person * 3 + 2")),
        is_hot=(0, 2),
        back=(1, "least(newest, 99) + 1"),
        is_rich=(2, 4),
        past=(3, "least(person, 999) + 1"),
        step=(4, 4096),
        is_hot_channel=(5, 2),
        hot_channel=(6, len(HOT_CHANNELS)),
        other_channel=(7, OTHER_CHANNELS),
        text=(8, EXTRAS),
    )
    channel = f"if(is_hot_channel > 0, hot_channel, {len(HOT_CHANNELS)} + other_channel)"
    return made.select(
        F.expr(f"if(is_end, -4, {FIRST_ID} + if(is_hot > 0, (newest div 100) * 100, newest - back))").alias("auction"),
        F.expr(f"{FIRST_ID} + if(is_rich > 0, least((person div 100) * 100 + 1, person), person - past)").alias(
            "bidder"
        ),
        _of(PRICES.tolist(), "step").alias("price"),
        _of(channels().to_pylist(), channel).alias("channel"),
        _of(urls().to_pylist(), channel).alias("url"),
        _of(extras().to_pylist(), "text").alias("extra"),
        "time",
    )


def _of(values: Sequence[str] | Sequence[int], index: str) -> Column:
    quoted = ", ".join(f"'{value}'" if isinstance(value, str) else f"{value}L" for value in values)
    return F.expr(f"array({quoted})[cast({index} as int)]")


def _totals(rows: DataFrame, *columns: str) -> tuple[DataFrame, list[Column]]:
    return rows, [F.count(F.lit(1)), *(F.sum(F.expr(column)) for column in columns)]


Events = Callable[[], DataFrame]
Query = tuple[DataFrame, list[Column]]


def _q0(events: Events) -> Query:
    return _totals(bids(events()), "auction", "bidder", "price")


def _q1(events: Events) -> Query:
    converted = bids(events()).withColumn("price", F.expr("price * 0.908D"))
    return _totals(converted, "auction", "bidder", "price")


def _q2(events: Events) -> Query:
    return _totals(bids(events()).where("auction % 123 = 0").select("auction", "price"), "auction", "price")


def _q3(events: Events) -> Query:
    sold = auctions(events()).where("category = 10").selectExpr("id auction", "seller")
    near = persons(events()).where("state in ('OR', 'ID', 'CA')")
    joined = sold.join(near, F.expr("seller = id"))
    return _totals(joined.select("name", "city", "state", "auction"), "auction")


def _q4(events: Events) -> Query:
    sold = auctions(events()).withColumnRenamed("time", "opened").withWatermark("opened", "0 seconds")
    offered = bids(events()).select("auction", "price", "time").withWatermark("time", "0 seconds")
    in_time = F.expr(
        "auction = id and time >= opened and time <= expires "
        f"and time <= opened + interval '{EXPIRES_MS / 1000}' second"
    )
    final = sold.join(offered, in_time).groupBy("opened", "id", "category").agg(F.max("price").alias("price"))
    metrics = [
        F.coalesce(F.sum(F.expr(f"if(category = {category}, {what}, 0L)")), F.lit(0))
        for what in ("1L", "price")
        for category in range(10, 15)
    ]
    return final, [F.count(F.lit(1)), *metrics]


def _q5(events: Events) -> Query:
    offered = bids(events()).select("auction", "time").withWatermark("time", "0 seconds")
    counts = offered.groupBy(F.window("time", WINDOW, SLIDE), "auction").agg(F.count(F.lit(1)).alias("n"))
    lists = counts.groupBy("window").agg(
        F.max("n").alias("most"), F.collect_list(F.struct("auction", "n")).alias("all")
    )
    best = lists.selectExpr("window", "explode(filter(all, x -> x.n = most)) best").selectExpr("window", "best.*")
    return _totals(best, "n", "auction")


def _highest(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Of a batch what can be among the highest bids of its window."""
    for batch in batches:
        bid = pl.from_arrow(batch)
        assert isinstance(bid, pl.DataFrame)
        highest = pl.col("price") == pl.col("price").max().over(pl.col("time").dt.truncate("10s"))
        yield from bid.filter(highest).to_arrow().cast(batch.schema).to_batches()


def _q7(events: Events) -> Query:
    offered = bids(events()).mapInArrow(_highest, "auction long, bidder long, price long, time timestamp")
    same = (
        offered.withWatermark("time", "0 seconds")
        .groupBy(F.window("time", WINDOW), "price")
        .agg(F.collect_list(F.struct("auction", "bidder")).alias("same"))
    )
    highest = same.groupBy("window").agg(F.max("price").alias("price"), F.max_by("same", "price").alias("same"))
    best = highest.selectExpr("window", "price", "explode(same) bid").selectExpr("window", "price", "bid.*")
    return _totals(best, "price", "auction", "bidder")


def _q8(events: Events) -> Query:
    created = persons(events()).withWatermark("time", "0 seconds")
    created = created.select("id", "name", F.window("time", WINDOW).alias("window"))
    sold = auctions(events()).withWatermark("time", "0 seconds")
    sellers = sold.select("seller", F.window("time", WINDOW).alias("sold")).dropDuplicates(["seller", "sold"])
    joined = created.join(sellers, F.expr("id = seller and window = sold"))
    return _totals(joined.select("window", "id", "name"), "id")


def _q11(events: Events) -> Query:
    offered = bids(events()).select("bidder", "time").withWatermark("time", "0 seconds")
    sessions = offered.groupBy("bidder", F.session_window("time", WINDOW).alias("session"))
    found = sessions.agg(F.count(F.lit(1)).alias("n"))
    begin, end = (f"unix_millis(session.{edge}) - {ORIGIN_MS}" for edge in ("start", "end"))
    return _totals(found, "bidder", "n", begin, end)


def _q14(events: Events) -> Query:
    hour = "hour(time)"
    kind = f"case when {hour} between 8 and 18 then 'dayTime' when {hour} <= 6 or {hour} >= 20 then 'nightTime' else 'otherTime' end"
    dear = bids(events()).withColumn("price", F.expr("price * 0.908D")).where("price > 1000000 and price < 50000000")
    made = dear.selectExpr("*", f"{kind} kind", "length(extra) - length(replace(extra, 'c', '')) c_counts")
    return _totals(made, "auction", "bidder", "price", "length(kind)", "c_counts", "length(extra)")


def _q17(events: Events) -> Query:
    offered = bids(events()).select("auction", "price", "time").withWatermark("time", "0 seconds")
    ranks = ("price < 10000", "price >= 10000 and price < 1000000", "price >= 1000000")
    days = offered.groupBy(F.window("time", "1 day"), "auction").agg(
        F.count(F.lit(1)).alias("bids"),
        *(F.expr(f"count_if({rank})").alias(f"rank{k}") for k, rank in enumerate(ranks)),
        *(F.expr(f"{what}(price)").alias(what) for what in ("min", "max", "sum")),
    )
    columns = ("auction", "bids", "rank0", "rank1", "rank2", "min", "max", "sum div bids", "sum")
    return _totals(days, *columns)


def _q21(events: Events) -> Query:
    by_name = "case lower(channel) when 'apple' then '0' when 'google' then '1' when 'facebook' then '2' when 'baidu' then '3' end"
    in_url = "nullif(regexp_extract(url, '(&|^)channel_id=([^&]*)', 2), '')"
    found = bids(events()).withColumn("channel_id", F.expr(f"coalesce({by_name}, {in_url})"))
    return _totals(found.where("channel_id is not null"), "auction", "bidder", "price", "cast(channel_id as bigint)")


def _q22(events: Events) -> Query:
    parts = bids(events()).withColumn("parts", F.split("url", "/"))
    made = parts.selectExpr("*", *(f"parts[{3 + k}] dir{k}" for k in range(3)))
    return _totals(made, "auction", "bidder", "price", "length(channel)", *(f"ascii(dir{k})" for k in range(3)))


QUERIES: dict[str, tuple[Callable[[Events], Query], bool]] = {
    "q0": (_q0, False),
    "q1": (_q1, False),
    "q2": (_q2, False),
    "q3": (_q3, False),
    "q4": (_q4, True),
    "q5": (_q5, True),
    "q7": (_q7, True),
    "q8": (_q8, False),
    "q11": (_q11, True),
    "q14": (_q14, False),
    "q17": (_q17, True),
    "q21": (_q21, False),
    "q22": (_q22, False),
}
"""How to build a query, and whether its last rows wait for a watermark."""
