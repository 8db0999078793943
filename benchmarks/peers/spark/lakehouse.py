"""The workload `lakehouse` on Spark Structured Streaming: JSON from Kafka into a Delta or an Iceberg table.

usage: .venv/bin/python benchmarks/peers/spark/lakehouse.py QUERY [--events N] [--batch N]

Runs on the newest Spark for which Delta and Iceberg have connectors, which tools/peers_spark.sh puts into .peers/spark.
Topics, records, the check of the table and how delays are measured are those of
`python -m midstream_lab bench lakehouse`. Changes are merged as Delta's and Iceberg's documentation show it: `foreachBatch` with a MERGE of
the newest change of each key.
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parents[3] / ".peers" / "spark"
sys.path[:0] = [str(HOME / "pyspark"), str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import pyspark
from definitions import arguments, print_result
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import DataStreamWriter
from session import WARM_UP_S_MAX, Run, open_session, run_until, wait_until

from midstream_lab.bench import kafka, lakehouse

BATCH = 1_000_000
"""Records in a micro-batch, which then takes a second or two."""
SCHEMAS = {"append": "ts long, key long, value double", "changes": "op string, key long, value long"}


def main() -> None:
    args = arguments(__doc__, list(lakehouse.JOBS), batch=BATCH)
    servers = os.environ.get("KAFKA_BOOTSTRAP")
    if not servers:
        sys.exit("error: it needs brokers: tools/kafka_server.py starts one, or KAFKA_BOOTSTRAP=host:9092")
    if not (HOME / "lakehouse-jars").exists():
        sys.exit("error: Spark's connectors are not here; bring them with:  tools/peers_spark.sh")
    events = args.events or lakehouse.events_of(args.workload)
    directory = tempfile.mkdtemp(prefix="peer-spark-lake-")
    spark = open_session(args.parallelism, slots=None, **settings(directory))
    try:
        run = measure(spark, args.workload, servers, directory, events, args.batch)
    finally:
        spark.stop()
        shutil.rmtree(directory, ignore_errors=True)
    print_result(
        engine="spark",
        version=pyspark.__version__,
        workload="lakehouse",
        variant=args.workload,
        events=events,
        parallelism=args.parallelism,
        seconds=run.seconds,
        **run.figures,
    )


def settings(directory: str) -> dict[str, Any]:
    extensions = (
        "io.delta.sql.DeltaSparkSessionExtension",
        "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    )
    settings = {
        "spark.driver.extraClassPath": f"{HOME / 'lakehouse-jars'}/*",
        "spark.sql.extensions": ",".join(extensions),
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    }
    for name in ("warm", "run", "delay"):
        settings |= {
            f"spark.sql.catalog.{name}": "org.apache.iceberg.spark.SparkCatalog",
            f"spark.sql.catalog.{name}.type": "hadoop",
            f"spark.sql.catalog.{name}.warehouse": f"file://{directory}/{name}",
        }
    return settings


def measure(spark: SparkSession, query: str, servers: str, directory: str, events: int, batch: int) -> Run:
    is_changes = query.endswith("changes")
    schema = SCHEMAS["changes" if is_changes else "append"]
    with kafka.topics(servers, "warm-in", "in", "delay-in") as (warm_in, source, delay_in):
        fill = lakehouse.fill_changes if is_changes else kafka.fill
        fill(servers, source, events)
        fill(servers, warm_in, kafka.WARM_UP_EVENTS)
        for name, topic, count in (("warm", warm_in, kafka.WARM_UP_EVENTS), ("run", source, events)):
            rows = records(spark, servers, topic, schema, batch)
            writer = (
                merging(spark, rows, query, directory, name) if is_changes else adding(rows, query, directory, name)
            )
            most_s = WARM_UP_S_MAX if name == "warm" else None
            run = run_until(writer, has_read(count), most_s)
        found = lakehouse.check(query, f"{directory}/run", events)
        run = replace(run, result_rows=found)
        if is_changes:
            return run
        rows = records(spark, servers, delay_in, "i long, made_us long", batch)
        with tempfile.TemporaryDirectory(prefix="peer-spark-") as checkpoints:
            writer = adding(rows, query, directory, "delay").option("checkpointLocation", checkpoints)
            started = writer.start()
            try:
                wait_until(started, lambda _: True, None)  # its first trigger, which finds no records
                rate = lakehouse.RATE_PER_S
                delays = lakehouse.delays_at_rate(query, servers, delay_in, f"{directory}/delay", rate)
            finally:
                started.stop()
        return replace(run, more={"rate_per_s": rate, **delays})


def records(spark: SparkSession, servers: str, topic: str, schema: str, batch: int) -> DataFrame:
    found = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", servers)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", batch)
        .load()
    )
    value = F.from_json(F.col("value").cast("string"), schema).alias("row")
    return found.select(value, "offset").select("row.*", "offset")


def has_read(count: int) -> Callable[[Any], bool]:
    def is_last(progress: Any) -> bool:
        offsets = progress["sources"][0]["endOffset"]
        found = offsets if isinstance(offsets, dict) else ast.literal_eval(offsets or "{}")
        return sum(sum(partitions.values()) for partitions in found.values()) >= count

    return is_last


def adding(rows: DataFrame, query: str, directory: str, name: str) -> DataStreamWriter:
    rows = rows.drop("offset")
    if query == "delta":
        table = lakehouse.table_in(f"{directory}/{name}")
        return rows.writeStream.format("delta").outputMode("append").option("path", table)
    _create(rows, name)
    writer = rows.writeStream.format("iceberg").outputMode("append")
    return writer.option("path", f"{name}.lake.rows")


def _create(rows: DataFrame, name: str) -> None:
    columns = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in rows.schema)
    rows.sparkSession.sql(f"CREATE TABLE {name}.lake.rows ({columns}) USING iceberg")


def merging(spark: SparkSession, rows: DataFrame, query: str, directory: str, name: str) -> DataStreamWriter:
    if query == "delta_changes":
        table = lakehouse.table_in(f"{directory}/{name}")
        spark.sql(f"CREATE TABLE delta.`{table}` (key bigint, value bigint) USING delta")
        target = f"delta.`{table}`"
    else:
        target = f"{name}.lake.rows"
        spark.sql(
            f"CREATE TABLE {target} (key bigint, value bigint) USING iceberg TBLPROPERTIES ('format-version'='2')"
        )

    def merge(batch: DataFrame, _: int) -> None:
        newest = batch.groupBy("key").agg(F.max_by(F.struct("op", "value"), "offset").alias("last"))
        newest.select("key", "last.*").createOrReplaceTempView("changes")
        batch.sparkSession.sql(
            f"MERGE INTO {target} t USING changes c ON t.key = c.key"
            " WHEN MATCHED AND c.op = 'delete' THEN DELETE"
            " WHEN MATCHED THEN UPDATE SET value = c.value"
            " WHEN NOT MATCHED AND c.op <> 'delete' THEN INSERT (key, value) VALUES (c.key, c.value)"
        )

    return rows.writeStream.foreachBatch(merge)


if __name__ == "__main__":
    main()
