"""Measures Kafka to Kafka: JSON in, a keyed window of 10 s, JSON out exactly once; and the latency of a row at a fixed
rate.

The brokers are those of KAFKA_BOOTSTRAP; `tools/kafka_server.py` starts one on this machine for the command that
follows it.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from midstream.api.environment import Environment
from midstream.api.restart_strategies import no_restart
from midstream.connectors.common.optional_packages import require as require_extra
from midstream.engine.core.errors import ConfigError, InvariantError
from midstream.engine.operators.watermarks import WatermarkStrategy
from midstream.engine.operators.windows.aggregates import Count, Sum
from midstream.engine.operators.windows.window_factory import tumbling
from midstream_lab.bench.events import WINDOW_MS, Events
from midstream_lab.bench.measuring import Measured, Slots, measure, require, start_on

if TYPE_CHECKING:
    from confluent_kafka import Message

EVENTS = 5_000_000
"""Enough that a run has several checkpoints: a million is read in less than the time between two."""
PARALLELISM = 2
PARTITIONS = 2
WARM_UP_EVENTS = 100_000
CHECKPOINT_INTERVAL_S = 1.0
RATE_PER_S = 5_000
LATENCY_S = 15.0
WARM_UP_S = 3.0
"""The first rows at a fixed rate, which are not counted."""
TURN_S = 0.01
"""The interval at which rows are sent at a fixed rate."""
ANSWER_S = 60.0
SHORTFALL_MAX = 0.1
"""If the rate is missed by more than this, latencies are those of an overloaded machine."""
_CHUNK_ROWS: Final = 100_000


class KafkaResult(Measured, frozen=True, kw_only=True):
    result_rows: int
    window_s: float = WINDOW_MS / 1000
    rate_per_s: int
    latency_rows: int
    latency_p50_ms: float
    """The latency from when a row was made for its producer until a reader of committed records had it."""
    latency_p99_ms: float
    latency_max_ms: float


class Result(msgspec.Struct):
    """A row of the output topic."""

    n: int
    total: float


class Stamped(msgspec.Struct):
    i: int
    made_us: int


@dataclass(frozen=True, slots=True)
class Load:
    servers: str
    source: str
    sink: str


def run(slots: Slots, *, events: int = EVENTS, parallelism: int = PARALLELISM, rate: int = RATE_PER_S) -> KafkaResult:
    """Run the benchmark. `rate`: rows per second when measuring latency. Raises InvariantError for a wrong result."""
    require_extra("confluent_kafka", "kafka", "python -m midstream_lab bench kafka")
    servers = os.environ.get("KAFKA_BOOTSTRAP")
    if not servers:
        raise ConfigError(
            "the benchmark needs a broker on this machine: KAFKA_BOOTSTRAP=host:9092 python -m midstream_lab bench kafka, or in a clone "
            "python tools/kafka_server.py .venv/bin/python -m midstream_lab bench kafka, which starts one"
        )
    with topics(servers, "warm-in", "warm-out", "in", "out") as (warm_in, warm_out, source, sink):
        workload = fill(servers, source, events)
        fill(servers, warm_in, WARM_UP_EVENTS)
        load, warm_up = Load(servers, source, sink), Load(servers, warm_in, warm_out)
        run = measure("kafka", slots, parallelism, CHECKPOINT_INTERVAL_S, counting, load, warm_up)
        rows = check(servers, sink, workload)
    latencies_ms = latency(slots, servers, parallelism, rate)
    return KafkaResult(
        result_rows=rows,
        rate_per_s=rate,
        latency_rows=len(latencies_ms),
        latency_p50_ms=round(float(np.percentile(latencies_ms, 50)), 1),
        latency_p99_ms=round(float(np.percentile(latencies_ms, 99)), 1),
        latency_max_ms=round(float(latencies_ms.max()), 1),
        **run.figures("kafka", slots, events, parallelism),
    )


def counting(env: Environment, load: Load) -> None:
    """Compute count and sum for each key and window."""
    schema = {"ts": int, "key": int, "value": float}
    (
        env.read_kafka(load.servers, load.source, schema=schema, stop="latest")
        .with_columns(at=pl.from_epoch("ts", "ms"))
        .with_watermarks("at", WatermarkStrategy.monotonous())
        .key_by("key")
        .window(tumbling(f"{WINDOW_MS} ms"))
        .aggregate(n=Count(), total=Sum("value"))
        .write_kafka(load.servers, load.sink)
    )


# ---- what is in the topics ----


@contextmanager
def topics(servers: str, *names: str, partitions: int = PARTITIONS) -> Iterator[list[str]]:
    """Create topics, which are deleted at the end."""
    from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its package exports nothing explicitly
        AdminClient,
        NewTopic,
    )

    token = uuid.uuid4().hex[:8]
    made = [f"bench-{token}-{name}" for name in names]
    admin = AdminClient({"bootstrap.servers": servers})
    config = {"retention.ms": "-1"}  # Flink's records have the time of their window, which is long ago
    for done in admin.create_topics([NewTopic(name, partitions, config=config) for name in made]).values():
        done.result(ANSWER_S)
    deadline_s = time.monotonic() + ANSWER_S
    while not _are_there(admin.list_topics(timeout=ANSWER_S).topics, made):  # brokers learn of them a moment later
        if time.monotonic() > deadline_s:
            raise InvariantError(f"the brokers do not list their new topics after {ANSWER_S:g} s")
        time.sleep(0.05)
    try:
        yield made
    finally:
        for done in admin.delete_topics(made).values():
            done.result(ANSWER_S)


def _are_there(known: dict[str, Any], names: Sequence[str]) -> bool:
    found = [known[name].partitions.values() for name in names if name in known]
    return len(found) == len(names) and all(part.leader >= 0 for parts in found for part in parts)


def fill(servers: str, topic: str, count: int) -> Events:
    """Fill the topic: each partition has a lane of the events, in order of time, as objects
    `{"ts":1234,"key":17,"value":0.5}`; `ts` in ms.
    """
    from confluent_kafka import Producer

    events = Events(count, lanes=PARTITIONS)
    lane = count // PARTITIONS
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 20, "queue.buffering.max.messages": 1_000_000})
    for first in range(0, lane, _CHUNK_ROWS):
        for partition in range(PARTITIONS):
            i = np.arange(first, min(first + _CHUNK_ROWS, lane)) + partition * lane
            batch = events(i)
            rows = pl.DataFrame({"ts": events.ms(i), "key": events.key(i), "value": batch.column("value").to_numpy()})
            for line in rows.write_ndjson().encode().splitlines():
                while True:
                    try:
                        producer.produce(topic, line, partition=partition)
                        break
                    except BufferError:
                        producer.poll(0.1)
    if producer.flush(ANSWER_S):
        raise InvariantError(f"the broker has not taken {count:,} records within {ANSWER_S:g} s")
    return events


def check(servers: str, sink: str, workload: Events) -> int:
    """Check that the topic has the right rows, and return their number. Raises InvariantError otherwise."""
    found = [msgspec.json.decode(message.value() or b"", type=Result) for message in committed(servers, sink)]
    require("the number of rows", workload.pairs(), len(found))
    require("the sum of all counts", workload.count, sum(row.n for row in found))
    require("the sum of all sums", workload.value_sums[0], sum(row.total for row in found))
    return len(found)


def committed(servers: str, topic: str) -> Iterator[Message]:
    """Yield all records of a topic that are committed now."""
    from confluent_kafka import KafkaError, KafkaException, TopicPartition

    consumer = reader(servers)
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
    left = PARTITIONS
    try:
        while left:
            for message in consumer.consume(10_000, 0.1):
                error = message.error()
                if error is None:
                    yield message
                elif error.code() == KafkaError._PARTITION_EOF:
                    left -= 1
                else:
                    raise KafkaException(error)
    finally:
        consumer.close()


def reader(servers: str) -> Any:
    from confluent_kafka import Consumer

    return Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "midstream-bench",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,
        }
    )


# ---- how long a row takes ----


def latency(slots: Slots, servers: str, parallelism: int, rate: int) -> npt.NDArray[np.float64]:
    """Return the milliseconds of each row that counts, at `rate` rows per second; through an exchange, exactly once."""
    with (
        topics(servers, "latency-in", "latency-out") as (source, sink),
        tempfile.TemporaryDirectory(prefix="midstream-bench-") as directory,
    ):
        env = Environment(
            "bench-kafka-latency",
            parallelism=parallelism,
            checkpoint_dir=directory,
            checkpoint_interval=CHECKPOINT_INTERVAL_S,
            restart=no_restart(),
        )
        stream = env.read_kafka(servers, source, schema={"i": int, "made_us": int})
        stream.rebalance().write_kafka(servers, sink)
        job = start_on(slots, env, parallelism)
        try:
            while job.status().state in ("created", "deploying"):
                time.sleep(0.05)
            return latencies_at_rate(servers, source, sink, rate)
        finally:
            job.cancel("the benchmark is over")


def latencies_at_rate(servers: str, source: str, sink: str, rate: int) -> npt.NDArray[np.float64]:
    """Send rows to the topic `source` and read them in `sink`; return the milliseconds of each row that counts.

    Raises InvariantError if the rate is missed, or rows are not in `sink` exactly once.
    """
    taken = Taking(servers, sink)
    try:
        sent, took_s = send(servers, source, rate)
        if sent < rate * took_s * (1 - SHORTFALL_MAX):
            raise InvariantError(f"only {sent / took_s:,.0f} of {rate:,} rows/s were sent: the machine is too busy")
        taken.wait_for(sent)
    finally:
        taken.stop()
    require("the number of rows that arrived", sent, len(set(taken.rows)))
    require("the number of records that arrived", sent, len(taken.rows))
    found = np.array(taken.latencies_ms)
    return found[np.array(taken.rows) >= rate * WARM_UP_S]


def send(servers: str, topic: str, rate: int) -> tuple[int, float]:
    """Send rows; return how many, and the seconds that it took."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": servers, "linger.ms": 1})
    began_s = time.monotonic()
    sent = 0
    while (passed_s := time.monotonic() - began_s) < LATENCY_S:
        made_us = time.time_ns() // 1000
        for i in range(sent, int(passed_s * rate)):
            producer.produce(topic, b'{"i":%d,"made_us":%d}' % (i, made_us), partition=i % PARTITIONS)
        sent = max(sent, int(passed_s * rate))
        producer.poll(0)
        time.sleep(TURN_S)
    producer.flush(ANSWER_S)
    return sent, passed_s


class Taking:
    """Reads committed records on a thread of its own, and records the time of each."""

    def __init__(self, servers: str, topic: str) -> None:
        self.rows: list[int] = []
        self.latencies_ms: list[float] = []
        self._consumer = reader(servers)
        self._topic = topic
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._take, name="bench-reader", daemon=True)
        self._thread.start()

    def wait_for(self, rows: int) -> None:
        deadline_s = time.monotonic() + ANSWER_S
        while len(self.rows) < rows and time.monotonic() < deadline_s and self._error is None:
            time.sleep(0.05)

    def stop(self) -> None:
        self._over.set()
        self._thread.join(ANSWER_S)
        self._consumer.close()
        if self._error is not None:
            raise self._error

    def _take(self) -> None:
        from confluent_kafka import TopicPartition

        decoder = msgspec.json.Decoder(Stamped)
        self._consumer.assign([TopicPartition(self._topic, partition, 0) for partition in range(PARTITIONS)])
        try:
            while not self._over.is_set():
                messages = self._consumer.consume(1000, 0.005)
                now_us = time.time_ns() // 1000
                values = [message.value() for message in messages if message.error() is None]
                for row, taken_us in zip(map(decoder.decode, values), repeat(now_us), strict=False):
                    self.rows.append(row.i)
                    self.latencies_ms.append((taken_us - row.made_us) / 1000)
        except msgspec.DecodeError as error:
            self._error = error
