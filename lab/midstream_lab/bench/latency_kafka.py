"""Measures how soon a record of one Kafka topic shows in another, at a fixed rate, in three queries: stateless, a count
per key, and a join with a static table.

The queries are those of the public latency suite for Spark's real-time mode: 10,000 records/s of 1.2 KB, without keys, so
a producer sends those of a moment to one partition. The suite has 40 partitions on three brokers of eight cores; one
broker on two cores that it shares answers too few requests for that, also without any engine, so there are eight. The
broker is that of KAFKA_BOOTSTRAP, as in the benchmark `kafka`. A record's text begins with its number and the time at which it was handed to the producer, and so does
the text that a query makes of it: the latency is the time until a reader of committed records has it.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from base64 import b64decode
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from midstream.api.data_stream import DataStream
from midstream.api.environment import Environment
from midstream.api.restart_strategies import no_restart
from midstream.connectors.common.optional_packages import require as require_extra
from midstream.connectors.kafka.kafka_sink import Guarantee
from midstream.engine.core.errors import ConfigError, InvariantError
from midstream.engine.operators.windows.aggregates import Count, Last
from midstream_lab.bench import kafka
from midstream_lab.bench.measuring import Slots, require, start_on

Query = Literal["stateless", "count", "join"]
QUERIES: Final[tuple[Query, ...]] = ("stateless", "count", "join")
PARTITIONS: Final = 8
RATE_PER_S: Final = 10_000
RECORD_BYTES: Final = 1_200
STAMP_BYTES: Final = 28
"""A number of 10 digits, a time in µs of 16, and a space after each."""
USERS: Final = 10_000
SECONDS: Final = 20.0
WARM_UP_S: Final = 8.0
"""The first rows, which are not counted."""
STICKY_S: Final = 0.005
"""How long a producer keeps to a partition."""
PARALLELISM: Final = 2
INTERVALS_MS: Final[Mapping[Guarantee, int]] = {"at_least_once": 1_000, "exactly_once": 100}
"""The checkpoint interval. With "exactly_once", records appear with their checkpoint."""


class LatencyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The latencies of the records after the warm-up."""

    records: int
    checkpoint_interval_ms: int = 0
    checkpoints_per_s: float = 0.0
    p50_ms: float
    p99_ms: float
    max_ms: float


class KafkaLatencyResult(msgspec.Struct, frozen=True, kw_only=True):
    benchmark: str = "latency_kafka"
    query: str
    slots: str
    parallelism: int = PARALLELISM
    partitions: int = PARTITIONS
    rate_per_s: int
    topic_alone: LatencyFigures
    """From the producer to a reader of the same topic."""
    at_least_once: LatencyFigures
    exactly_once: LatencyFigures
    correct: bool = True


def run(slots: Slots, *, query: str = "stateless", rate: int = RATE_PER_S) -> KafkaLatencyResult:
    """Run one query, at least once and exactly once.

    Raises InvariantError if a record is missing, wrong or twice, or if the rate is missed.
    """
    require_extra("confluent_kafka", "kafka", "python -m midstream_lab bench latency_kafka")
    servers = os.environ.get("KAFKA_BOOTSTRAP")
    if not servers:
        raise ConfigError("the benchmark needs a broker: python tools/kafka_server.py COMMAND starts one for a command")
    if query not in QUERIES:
        raise ConfigError(f"--query: {query!r} is not one of {', '.join(QUERIES)}")
    return KafkaLatencyResult(
        query=query,
        slots=slots,
        rate_per_s=rate,
        topic_alone=_topic_alone(servers, rate),
        at_least_once=_run(slots, servers, query, rate, "at_least_once"),
        exactly_once=_run(slots, servers, query, rate, "exactly_once"),
    )


def _topic_alone(servers: str, rate: int) -> LatencyFigures:
    with kafka.topics(servers, "alone", partitions=PARTITIONS) as (topic,):
        return LatencyFigures(**figures(latencies_at_rate(servers, topic, topic, "", rate)))


def _run(slots: Slots, servers: str, query: str, rate: int, guarantee: Guarantee) -> LatencyFigures:
    with (
        kafka.topics(servers, "in", "out", partitions=PARTITIONS) as (source, sink),
        tempfile.TemporaryDirectory(prefix="midstream-bench-") as directory,
    ):
        env = Environment(
            "bench-latency-kafka",
            parallelism=PARALLELISM,
            checkpoint_dir=directory,
            checkpoint_interval=INTERVALS_MS[guarantee] / 1000,
            restart=no_restart(),
        )
        rows = env.read_kafka(servers, source, format="text")
        built(rows, query).write_kafka(servers, sink, format="text", guarantee=guarantee)
        job = start_on(slots, env, PARALLELISM)
        try:
            while job.status().state in ("created", "deploying"):
                time.sleep(0.05)
            before, began_s = job.status().checkpoints_completed, time.monotonic()
            latencies_ms = latencies_at_rate(servers, source, sink, query, rate)
            completed, took_s = job.status().checkpoints_completed - before, time.monotonic() - began_s
        finally:
            job.cancel("the benchmark is over")
    return LatencyFigures(
        checkpoint_interval_ms=INTERVALS_MS[guarantee],
        checkpoints_per_s=round(completed / took_s, 1),
        **figures(latencies_ms),
    )


def built(rows: DataStream, query: str) -> DataStream:
    """Build a query of rows with the column `value`, which the result has as well."""
    if query == "stateless":
        return rows.select(value=pl.col("value").str.encode("base64"))
    users = rows.select(stamp=pl.col("value").str.head(STAMP_BYTES), user=pl.col("value").str.slice(STAMP_BYTES, 8))
    if query == "count":
        counted = users.key_by("user").aggregate(n=Count(), stamp=Last("stamp"))
        return counted.select(value=pl.format("{}{} {}", "stamp", "user", "n"))
    table = pl.DataFrame({"user": [f"{n:08d}" for n in range(USERS)], "twice": [2 * n for n in range(USERS)]})
    return users.join_table(table, on="user").select(value=pl.format("{}{} {}", "stamp", "user", "twice"))


def figures(latencies_ms: npt.NDArray[np.float64]) -> dict[str, Any]:
    return {
        "records": len(latencies_ms),
        "p50_ms": round(float(np.percentile(latencies_ms, 50)), 2),
        "p99_ms": round(float(np.percentile(latencies_ms, 99)), 2),
        "max_ms": round(float(latencies_ms.max()), 2),
    }


def latencies_at_rate(servers: str, source: str, sink: str, query: str, rate: int) -> npt.NDArray[np.float64]:
    """Send records to the topic `source`, read what `query` ("": nothing) makes of them in `sink`, and return the milliseconds of each after the warm-up.

    Raises InvariantError if the rate is missed, or the records in `sink` are not those that the query makes.
    """
    reader = Reader(servers, sink)
    try:
        sent = send(servers, source, rate)
        if sent < rate * SECONDS * (1 - kafka.SHORTFALL_MAX):
            raise InvariantError(f"only {sent / SECONDS:,.0f} of {rate:,} records/s were sent: the machine is too busy")
        reader.wait_for(sent)
    finally:
        reader.stop()
    return reader.checked(sent, query)[int(rate * WARM_UP_S) :]


def send(servers: str, topic: str, rate: int) -> int:
    """Send records every millisecond; return how many."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": servers, "linger.ms": 1, "acks": 1})
    rest = b"x" * (RECORD_BYTES - STAMP_BYTES - 8)
    ends = [b"%08d" % user + rest for user in range(USERS)]
    began_s = time.monotonic()
    sent = 0
    while (passed_s := time.monotonic() - began_s) < SECONDS:
        now_us, partition = time.time_ns() // 1000, int(passed_s / STICKY_S) % PARTITIONS
        for i in range(sent, int(passed_s * rate)):
            producer.produce(topic, b"%010d %016d " % (i, now_us) + ends[i % USERS], partition=partition)
        sent = max(sent, int(passed_s * rate))
        producer.poll(0.001)
    if producer.flush(kafka.ANSWER_S):
        raise InvariantError(f"the broker has not taken the records within {kafka.ANSWER_S:g} s")
    return sent


class Reader:
    """Reads committed records on a thread of its own, and records the time of each."""

    def __init__(self, servers: str, topic: str) -> None:
        self._taken: list[tuple[int, list[bytes]]] = []
        self._count = 0
        self._consumer = kafka.reader(servers)
        self._topic = topic
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._take, name="bench-reader", daemon=True)
        self._thread.start()

    def wait_for(self, count: int) -> None:
        deadline_s = time.monotonic() + kafka.ANSWER_S
        while self._count < count and time.monotonic() < deadline_s:
            time.sleep(0.05)

    def stop(self) -> None:
        self._over.set()
        self._thread.join(kafka.ANSWER_S)
        self._consumer.close()

    def checked(self, sent: int, query: str) -> npt.NDArray[np.float64]:
        """Return the latency of each record in milliseconds, by its number."""
        found = np.full(sent, np.nan)
        values: dict[int, bytes] = {}
        for taken_us, texts in self._taken:
            for text in texts:
                text = b64decode(text) if query == "stateless" else text
                number, made_us = map(int, text[:STAMP_BYTES].split())
                if number in values:
                    raise InvariantError(f"record {number} has arrived twice")
                values[number] = text[STAMP_BYTES:]
                found[number] = (taken_us - made_us) / 1000
        require("the number of records that arrived", sent, len(values))
        wrong = [n for n, value in values.items() if not _is_right(query, n, value)]
        require("the number of wrong values", 0, len(wrong))
        if query == "count":  # records of a user may overtake each other on their way through several partitions
            counts = sorted((text[:8], int(text[9:])) for text in values.values())
            wanted = [(b"%08d" % user, n + 1) for user in range(USERS) for n in range((sent - user - 1) // USERS + 1)]
            require("the number of wrong counts", 0, len(set(counts) ^ set(wanted)))
        return found

    def _take(self) -> None:
        from confluent_kafka import TopicPartition

        self._consumer.assign([TopicPartition(self._topic, partition, 0) for partition in range(PARTITIONS)])
        while not self._over.is_set():
            # values, not messages: the garbage collector would visit those again and again, and take 100 ms each time
            values = [m.value() for m in self._consumer.consume(1000, 0.002) if m.error() is None]
            if values:
                self._taken.append((time.time_ns() // 1000, values))
                self._count += len(values)


def _is_right(query: str, number: int, value: bytes) -> bool:
    user = number % USERS
    if query in ("stateless", ""):
        return len(value) == RECORD_BYTES - STAMP_BYTES and value.startswith(b"%08d" % user)
    return value.startswith(b"%08d " % user) if query == "count" else value == b"%08d %d" % (user, 2 * user)
