"""The windowed workloads on Spark Structured Streaming: `window`, `strings`, `sliding` and `udf`.

Events are made by Spark expressions. The source `rate-micro-batch` counts blocks of events, and a block is
exploded into its indices: some twice as fast as taking one row per event from the source, which is row by row.
Partition p of the source has the blocks of half p. Behind the last block comes one event of the year 2100: its
watermark makes Spark fire all other windows, and its own never fires.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pandas as pd
import pyarrow as pa
from definitions import (
    KEYS,
    MANY_KEYS,
    MULTIPLIER,
    PAYLOADS,
    expected,
    halves,
    label,
    require,
)
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from session import BLOCK, Run, run_query

FAR_MS = 4_102_444_800_000
LABELLED = "ts long, name string, score double"


def indices(spark: SparkSession, n: int, batch: int, parallelism: int) -> tuple[DataFrame, int]:
    """A stream of `i`, and the number of the micro-batch in which the last windows fire. The last `i` is n."""
    half, blocks = n // 2, -(-(n // 2) // BLOCK)
    per_batch = max(2, batch // BLOCK // 2 * 2)
    source = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", per_batch)
        .option("numPartitions", parallelism)
        .load()
    )
    first = f"(value % 2) * {half} + (value div 2) * {BLOCK}"
    last = f"(value % 2) * {half} + least((value div 2 + 1) * {BLOCK}, {half}) - 1"
    i = F.expr(
        f"explode(if(value < {2 * blocks}, sequence({first}, {last}), sequence(cast({n} as bigint), cast({n} as bigint))))"
    )
    stream = source.where(f"value <= {2 * blocks}").select(i.alias("i"))
    return stream, 2 * blocks // per_batch + 1


def ts_ms(n: int) -> str:
    return f"if(i < {n}, (i % {n // 2}) div 50, {FAR_MS})"


def key(keys: int) -> str:
    return f"((i * {MULTIPLIER}) & 4294967295) % {keys}"


def with_time(events: DataFrame) -> DataFrame:
    return events.withWatermark("ts", "0 seconds")


def run_window(spark: SparkSession, n: int, batch: int, parallelism: int, max_seconds: float | None) -> Run:
    i, last = indices(spark, n, batch, parallelism)
    events = i.selectExpr(f"timestamp_millis({ts_ms(n)}) ts", f"{key(KEYS)} key", "(i % 1000) * 0.5D value")
    result = with_time(events).groupBy(F.window("ts", "10 seconds"), "key").agg(*_count_and_sum("value"))
    return _checked("window", result, n, last, max_seconds)


def run_sliding(spark: SparkSession, n: int, batch: int, parallelism: int, max_seconds: float | None) -> Run:
    i, last = indices(spark, n, batch, parallelism)
    events = i.selectExpr(f"timestamp_millis({ts_ms(n)}) ts", f"{key(MANY_KEYS)} key", "(i % 1000) * 0.5D value")
    result = with_time(events).groupBy(F.window("ts", "10 seconds", "2 seconds"), "key").agg(*_count_and_sum("value"))
    return _checked("sliding", result, n, last, max_seconds)


def run_strings(spark: SparkSession, n: int, batch: int, parallelism: int, max_seconds: float | None) -> Run:
    """Spark aggregates before the exchange; as it cannot hash-aggregate a maximum of strings, it sorts for that."""
    i, last = indices(spark, n, batch, parallelism)
    events = i.selectExpr(
        f"timestamp_millis({ts_ms(n)}) ts",
        f"concat('user-', lpad(cast({key(KEYS)} as string), 6, '0')) key",
        "(i % 1000) * 0.5D value",
        f"repeat(lpad(lower(hex(i % {PAYLOADS})), 4, '0'), 25) payload",
    )
    largest = F.max("payload").alias("payload")
    result = with_time(events).groupBy(F.window("ts", "10 seconds"), "key").agg(*_count_and_sum("value"), largest)
    number = F.conv(F.substring("payload", 1, 4), 16, 10).cast("long")
    return _checked("strings", result, n, last, max_seconds, payloads=F.sum(number))


def run_udf(
    spark: SparkSession, n: int, batch: int, parallelism: int, max_seconds: float | None, *, variant: str
) -> Run:
    i, last = indices(spark, n, batch, parallelism)
    events = i.selectExpr(f"{ts_ms(n)} ts", f"{key(KEYS)} key", "(i % 1000) * 0.5D value")
    labelled = UDF_VARIANTS[variant](events).selectExpr("timestamp_millis(ts) ts", "name", "score")
    result = with_time(labelled).groupBy(F.window("ts", "10 seconds"), "name").agg(*_count_and_sum("score"))
    return _checked("udf", result, n, last, max_seconds)


def _checked(workload: str, result: DataFrame, n: int, last: int, max_seconds: float | None, **more: Column) -> Run:
    metrics = {"rows": F.count(F.lit(1)), "n": F.sum("n"), "total": F.sum("total"), **more}
    run = run_query(result, metrics, last, max_seconds)
    wanted = expected(workload, halves(n), float("inf") if run.watermark_ms is None else run.watermark_ms)
    found = dict(zip(metrics, run.totals, strict=True))
    require(wanted, found, relative=1e-6 if workload == "udf" else 0.0)
    return replace(run, result_rows=int(found["rows"]))


def _count_and_sum(column: str) -> list[Column]:
    return [F.count(F.lit(1)).alias("n"), F.sum(column).alias("total")]


def _as_udf(events: DataFrame, *, use_arrow: bool) -> DataFrame:
    function = F.udf(label, LABELLED, useArrow=use_arrow)
    return events.select(function(F.struct("ts", "key", "value")).alias("row")).select("row.*")


def _as_pandas_udf(events: DataFrame) -> DataFrame:
    def labels(ts: pd.Series, key: pd.Series, value: pd.Series) -> pd.DataFrame:
        rows = zip(ts.tolist(), key.tolist(), value.tolist(), strict=True)
        return pd.DataFrame([label({"ts": t, "key": k, "value": v}) for t, k, v in rows])

    function = F.pandas_udf(labels, LABELLED)  # type: ignore[call-overload]
    return events.select(function("ts", "key", "value").alias("row")).select("row.*")


def _as_map_in_pandas(events: DataFrame) -> DataFrame:
    def labels(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for frame in frames:
            rows = zip(frame["ts"].tolist(), frame["key"].tolist(), frame["value"].tolist(), strict=True)
            yield pd.DataFrame([label({"ts": t, "key": k, "value": v}) for t, k, v in rows])

    return events.mapInPandas(labels, LABELLED)


def _as_map_in_arrow(events: DataFrame) -> DataFrame:
    schema = pa.schema([("ts", pa.int64()), ("name", pa.string()), ("score", pa.float64())])

    def labels(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = zip(*(batch.column(name).to_numpy().tolist() for name in ("ts", "key", "value")), strict=True)
            yield pa.RecordBatch.from_pylist([label({"ts": t, "key": k, "value": v}) for t, k, v in rows], schema)

    return events.mapInArrow(labels, LABELLED)


UDF_VARIANTS: dict[str, Callable[[DataFrame], DataFrame]] = {
    "udf": lambda events: _as_udf(events, use_arrow=False),
    "arrow-udf": lambda events: _as_udf(events, use_arrow=True),
    "pandas-udf": _as_pandas_udf,
    "map-in-pandas": _as_map_in_pandas,
    "map-in-arrow": _as_map_in_arrow,
}
