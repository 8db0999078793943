"""The workload `latency` on Spark Structured Streaming: rows pushed into a memory source, shuffled by key, timed.

The driver adds a block of 200 rows 100 times a second, stamped when it is added; Spark explodes it into rows. So the
source costs Spark next to nothing. A row's latency ends where the task of the sink takes it. Both clocks are the
system's monotonic one, which `System.nanoTime` and Python read alike on Linux.

`micro-batch`: a batch follows the last one at once; each is a checkpoint.
`real-time`: real-time mode with the streaming shuffle, a batch and so a checkpoint every second (Spark's own minimum
is 5 s), and buffers of the shuffle that wait for 1 ms at most. All its tasks run at once, so there are twice as many task slots as the parallelism.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from definitions import LATENCY_KEYS, LATENCY_RATE_PER_S, LATENCY_WARM_UP_SHARE, percentiles_ms, require, require_rate
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from session import session_memory_mb, wait_until

BLOCK = 200
WARM_UP_S = 8
STAMP = 10**10
"""A block is one number: its own, from 1 on, times this, plus microseconds since the beginning.

It never fits 32 bits, which Py4J would make a different type of.
"""
DRAIN_S_MAX = 60.0


VARIANTS = ("micro-batch", "real-time")


def settings(variant: str, parallelism: int) -> dict[str, Any]:
    """Of the session."""
    if variant == "micro-batch":
        return {}
    states = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    return {
        "slots": 2 * parallelism,
        "spark.sql.streaming.stateStore.providerClass": states,  # it insists, without any state
        "spark.shuffle.manager": "org.apache.spark.shuffle.streaming.MultiShuffleManager",
        "spark.sql.streaming.realTimeMode.minBatchDuration": "1000",
        "spark.sql.streaming.realTimeMode.allowlistCheck": "false",  # it knows no sink that only takes rows
        "spark.shuffle.streaming.networkBufferMaxWaitTimeMs": "1",
    }


@dataclass(frozen=True)
class LatencyRun:
    events: int
    seconds: float
    """In which the rows were added. Until all are read is no measure: to ask Spark for what it observed takes seconds."""
    figures: dict[str, Any]


def run_latency(spark: SparkSession, n: int, parallelism: int, variant: str) -> LatencyRun:
    if not sys.platform.startswith("linux"):
        raise OSError(
            "latencies compare System.nanoTime with Python's monotonic clock, which are one clock on Linux only"
        )
    _run(spark, WARM_UP_S * LATENCY_RATE_PER_S, parallelism, variant)
    run = _run(spark, n // BLOCK * BLOCK, parallelism, variant)
    require_rate(run.events, run.seconds)
    return run


def _run(spark: SparkSession, n: int, parallelism: int, variant: str) -> LatencyRun:
    is_real_time = variant == "real-time"
    jvm = spark._jvm
    package = "org.apache.spark.sql.execution.streaming"
    source = f"{package}.sources.LowLatency" if is_real_time else f"{package}.runtime."
    module = getattr(jvm, f"{source}MemoryStream$")
    stream = getattr(module, "MODULE$").apply(
        spark._jsparkSession, parallelism, jvm.org.apache.spark.sql.Encoders.LONG()
    )
    origin_us = time.monotonic_ns() // 1000
    rows = (
        DataFrame(stream.toDF(), spark)
        .selectExpr(
            f"explode(sequence((value div {STAMP} - 1) * {BLOCK}, value div {STAMP} * {BLOCK} - 1)) i",
            f"{origin_us} + value % {STAMP} created_us",
        )
        .withColumn("key", F.expr(f"i % {LATENCY_KEYS}"))
        .repartition(parallelism, "key")
        .withColumn("taken_us", F.expr("cast(reflect('java.lang.System', 'nanoTime') as bigint) div 1000"))
    )
    is_counted = F.col("i") >= int(n * LATENCY_WARM_UP_SHARE)
    observed = rows.observe(
        "totals",
        F.count(F.lit(1)).alias("n"),
        F.sum("i").alias("sum"),
        F.collect_list(F.when(is_counted, F.col("taken_us") - F.col("created_us"))).alias("took_us"),
    )
    directory = tempfile.mkdtemp(prefix="peer-spark-")
    try:
        writer = observed.writeStream.format("noop").option("checkpointLocation", directory)
        if is_real_time:
            writer = writer.outputMode("update").trigger(realTime="1 second")
        query = writer.start()
        try:
            began_s = time.monotonic()
            _add_blocks(jvm, stream, n // BLOCK, origin_us)
            seconds = time.monotonic() - began_s
            wait_until(query, lambda _: _rows_reported(query) >= n, DRAIN_S_MAX)
            memory_mb = session_memory_mb()
        finally:
            query.stop()
        batches = [p for p in query.recentProgress if p["numInputRows"]]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    found = [batch["observedMetrics"]["totals"] for batch in batches]
    require({"n": n, "sum": n * (n - 1) // 2}, {what: sum(one[what] for one in found) for what in ("n", "sum")})
    took_ms = [batch["durationMs"]["triggerExecution"] for batch in batches]
    figures = {
        **percentiles_ms([took / 1000 for one in found for took in one["took_us"]]),
        "checkpoints_completed": len(batches),
        "batch_ms_mean": round(sum(took_ms) / len(took_ms), 1),
        "memory_mb": memory_mb,
    }
    return LatencyRun(n, seconds, figures)


def _rows_reported(query: Any) -> int:
    return sum(p["observedMetrics"]["totals"]["n"] for p in query.recentProgress if p["numInputRows"])


def _add_blocks(jvm: Any, stream: Any, blocks: int, origin_us: int) -> None:
    """At the rate, from now on; late blocks are added at once, with the time at which that happens."""
    began_s = time.monotonic()
    for block in range(blocks):
        due_s = began_s + block * BLOCK / LATENCY_RATE_PER_S
        time.sleep(max(0.0, due_s - time.monotonic()))
        one = jvm.java.util.ArrayList()
        one.add((block + 1) * STAMP + time.monotonic_ns() // 1000 - origin_us)
        stream.addData(jvm.scala.jdk.javaapi.CollectionConverters.asScala(one))
