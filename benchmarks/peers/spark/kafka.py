"""The workload `kafka` on Spark Structured Streaming: JSON from Kafka, count and sum per key and 10 s, JSON to Kafka.

Topics, records and the check of the result are those of `python -m midstream_lab bench kafka`, and so is how the latency of a row
at a fixed rate is measured. Spark's sink is at least once: a batch that is repeated after a failure is written again.
Behind the last record of each partition comes one of the year 2100: its watermark makes Spark fire all other windows,
and its own never fires. There is one in each partition, so that both are equally long: a micro-batch takes of each in
proportion to its length, and what one partition is ahead of the other would be late without a delay of the watermark.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from confluent_kafka import Producer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import DataStreamWriter
from session import WARM_UP_BATCHES, WARM_UP_S_MAX, Run, run_until, wait_until, watermark_ms
from windows import FAR_MS

from midstream_lab.bench import kafka as bench
from midstream_lab.bench import latency_kafka
from midstream_lab.bench.latency_kafka import STAMP_BYTES

EVENTS = bench.EVENTS
JARS = Path(__file__).resolve().parents[3] / ".peers" / "spark" / "jars"


def settings() -> dict[str, Any]:
    """Of the session."""
    if not JARS.exists():
        raise SystemExit("error: Spark's Kafka connector is not here; bring it with:  tools/peers_spark.sh")
    return {"spark.driver.extraClassPath": f"{JARS}/*"}


def run_kafka(spark: SparkSession, n: int, batch: int, parallelism: int, max_seconds: float | None) -> Run:
    if max_seconds is not None:
        raise SystemExit("error: a part of the result cannot be checked; --events takes fewer records")
    servers = os.environ.get("KAFKA_BOOTSTRAP")
    if not servers:
        raise SystemExit("error: it needs brokers: tools/kafka_server.py starts one, or KAFKA_BOOTSTRAP=host:9092")
    with bench.topics(servers, "warm-out", "in", "out") as (warm_out, source, sink):
        workload = bench.fill(servers, source, n)
        _add_last_records(servers, source)
        counted = _counted(_values(spark, servers, source, "ts long, key long, value double", batch))
        warm_up = _writing(counted, servers, warm_out)
        run_until(warm_up, lambda p: p["batchId"] >= WARM_UP_BATCHES - 1 or _has_fired_all(p), WARM_UP_S_MAX)
        run = run_until(_writing(counted, servers, sink), _has_fired_all, None)
        run = replace(run, result_rows=bench.check(servers, sink, workload))
    return replace(run, more=_latency(spark, servers, parallelism))


def _add_last_records(servers: str, topic: str) -> None:
    producer = Producer({"bootstrap.servers": servers})
    for partition in range(bench.PARTITIONS):
        producer.produce(topic, b'{"ts":%d,"key":0,"value":0.0}' % FAR_MS, partition=partition)
    if producer.flush(bench.ANSWER_S):
        raise TimeoutError(f"the broker has not taken the last records within {bench.ANSWER_S:g} s")


def _values(spark: SparkSession, servers: str, topic: str, schema: str, batch: int | None = None) -> DataFrame:
    records = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", servers)
        .option("kafka.isolation.level", "read_committed")
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
    )
    if batch is not None:
        records = records.option("maxOffsetsPerTrigger", batch)
    return records.load().select(F.from_json(F.col("value").cast("string"), schema).alias("row")).select("row.*")


def _counted(values: DataFrame) -> DataFrame:
    events = values.withColumn("at", F.timestamp_millis("ts")).withWatermark("at", "0 seconds")
    counted = events.groupBy(F.window("at", "10 seconds"), "key").agg(
        F.count(F.lit(1)).alias("n"), F.sum("value").alias("total")
    )
    return counted.select("key", F.unix_millis("window.start").alias("window_start"), "n", "total")


def _writing(rows: DataFrame, servers: str, topic: str) -> DataStreamWriter:
    values = rows.select(F.to_json(F.struct("*")).alias("value"))
    writer = values.writeStream.format("kafka").outputMode("append")
    return writer.option("kafka.bootstrap.servers", servers).option("topic", topic)


def _has_fired_all(progress: Any) -> bool:
    """Whether that was the batch behind the last records, whose watermark is theirs."""
    return "addBatch" in progress["durationMs"] and watermark_ms(progress) >= FAR_MS


def run_latency_kafka(spark: SparkSession, query: str, variant: str, parallelism: int) -> dict[str, Any]:
    """A query of `python -m midstream_lab bench latency_kafka`, at least once: `stateless` or `join`; a count has a row
    for each key and batch here, and not for each record. `variant`: micro-batches, one after the other, or real-time mode
    with its shortest batch.
    """
    servers = os.environ.get("KAFKA_BOOTSTRAP")
    if not servers:
        raise SystemExit("error: it needs brokers: tools/kafka_server.py starts one, or KAFKA_BOOTSTRAP=host:9092")
    stamp, user = F.substring("value", 1, STAMP_BYTES), F.substring("value", STAMP_BYTES + 1, 8)
    directory = tempfile.mkdtemp(prefix="peer-spark-")
    try:
        with bench.topics(servers, "in", "out", partitions=latency_kafka.PARTITIONS) as (source, sink):
            rows = (
                spark.readStream.format("kafka")
                .option("kafka.bootstrap.servers", servers)
                .option("subscribe", source)
                .option("startingOffsets", "earliest")
                .load()
                .select(F.col("value").cast("string").alias("value"))
            )
            if query == "stateless":
                made = rows.select(F.base64("value").alias("value"))
            else:
                users = range(latency_kafka.USERS)
                table = spark.createDataFrame([(f"{n:08d}", 2 * n) for n in users], "user string, twice long")
                joined = rows.select(stamp.alias("stamp"), user.alias("user")).join(F.broadcast(table), "user")
                made = joined.select(F.concat("stamp", "user", F.lit(" "), "twice").alias("value"))
            writer = made.writeStream.format("kafka")
            writer = writer.option("kafka.bootstrap.servers", servers).option("topic", sink)
            writer = writer.option("kafka.linger.ms", "0").option("checkpointLocation", directory)
            if variant == "real-time":
                writer = writer.outputMode("update").trigger(realTime="5 seconds")
            running = writer.start()
            try:
                if variant != "real-time":
                    wait_until(running, lambda _: True, None)  # its first trigger, which finds no records
                took_ms = latency_kafka.latencies_at_rate(servers, source, sink, query, latency_kafka.RATE_PER_S)
            finally:
                running.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return {"at_least_once": latency_kafka.figures(took_ms)}


def _latency(spark: SparkSession, servers: str, parallelism: int) -> dict[str, float]:
    """Of rows that pass through an exchange, a micro-batch after the other."""
    directory = tempfile.mkdtemp(prefix="peer-spark-")
    try:
        with bench.topics(servers, "latency-in", "latency-out") as (source, sink):
            rows = _values(spark, servers, source, "i long, made_us long").repartition(parallelism)
            query = _writing(rows, servers, sink).option("checkpointLocation", directory).start()
            try:
                wait_until(query, lambda _: True, None)  # its first trigger, which finds no records
                took_ms = bench.latencies_at_rate(servers, source, sink, bench.RATE_PER_S)
            finally:
                query.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return {
        "rate_per_s": bench.RATE_PER_S,
        "latency_rows": len(took_ms),
        "latency_p50_ms": round(float(np.percentile(took_ms, 50)), 1),
        "latency_p99_ms": round(float(np.percentile(took_ms, 99)), 1),
        "latency_max_ms": round(float(took_ms.max()), 1),
    }
