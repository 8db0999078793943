"""A cluster of three brokers of which one is killed while a job reads from it and writes to it exactly once.

KAFKA_KILLS says how many times, one broker after the other: `make nightly` kills nine.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest
from kafka_job import WHO, assert_counted_once, counting

from kafka_broker import Broker, Kafka, find_jars, quiet, running_brokers
from machine import limit_s
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until

PARTITIONS = 3
PER_CALL = 100
KILLS = int(os.environ.get("KAFKA_KILLS", "0"))
"""Each broker leads a partition of each topic, so one has all roles but that of a coordinator."""
LIMIT_S = 150.0
pytestmark = [
    pytest.mark.systems,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not KILLS, reason="three brokers take their time: KAFKA_KILLS=1 to run it, make nightly kills nine"
    ),
]


@pytest.fixture(scope="module")
def brokers() -> Iterator[list[Broker]]:
    jars = find_jars()
    if isinstance(jars, str):
        pytest.skip(jars)
    with running_brokers(jars, 3) as brokers:
        yield brokers


@pytest.fixture
def ending() -> Iterator[ExitStack]:
    """What is to be done at the end of the test, however it ends."""
    with ExitStack() as stack:
        yield stack


class Feeding:
    """Sends records until it is told to stop, each once: what an idempotent producer sends again is not there twice."""

    def __init__(self, servers: str, topic: str) -> None:
        from confluent_kafka import Producer

        self._producer = Producer({**quiet(servers), "enable.idempotence": True})
        self._topic = topic
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._feed, daemon=True)
        self.sent = 0
        self._thread.start()

    def _feed(self) -> None:
        for partition in itertools.cycle(range(PARTITIONS)):
            for n in range(self.sent, self.sent + PER_CALL):
                self._producer.produce(self._topic, json.dumps({"n": n, "who": n % WHO}), partition=partition)
            self.sent += PER_CALL
            self._producer.poll(0)
            if self._stop.wait(0.1):
                return

    def end(self) -> None:
        """Send nothing more."""
        self._stop.set()
        self._thread.join(LIMIT_S)

    def stop(self) -> int:
        """How many records there are."""
        self.end()
        assert self._producer.flush(LIMIT_S) == 0
        return self.sent


def leader_of(kafka: Kafka, topic: str, partition: int = 0) -> int:
    """The broker's number; 0 if there is none at the moment."""
    found = kafka.admin.list_topics(topic, timeout=limit_s(10)).topics[topic].partitions[partition]
    return max(found.leader, 0)


def knows(broker: Kafka, topics: set[str]) -> bool:
    """Whether it has heard of them."""
    return topics <= set(broker.admin.list_topics(timeout=limit_s(10)).topics)


def has_come_to(kafka: Kafka, topic: str, n: int) -> bool:
    """Whether a record above `n` is committed there."""
    return any(json.loads(message.value())["n"] > n for message in kafka.read(topic, settled=False))


def is_whole(kafka: Kafka, brokers: list[Broker]) -> bool:
    """Whether every partition is in sync on all brokers: then any of them may go."""
    topics = kafka.admin.list_topics(timeout=limit_s(10)).topics.values()
    return all(len(part.isrs) == len(brokers) for topic in topics for part in topic.partitions.values())


def test_brokers_that_die_one_after_the_other_cost_no_record_and_double_none(brokers, tmp_path, running, ending):
    servers = ",".join(broker.servers for broker in brokers)
    kafka = Kafka(servers)
    source, sink = kafka.topic("in", partitions=PARTITIONS), kafka.topic("out", partitions=PARTITIONS)
    for broker in brokers:  # which of them is asked is chance
        of_one = Kafka(broker.servers)
        until("the topics are known", partial(knows, of_one, {source, sink}))
    feeding = Feeding(servers, source)
    ending.callback(feeding.end)
    job = counting(servers, source, sink, tmp_path, parallelism=2, stop=None).start(slots=ProcessSlots())
    running.append(job)
    until("rows are committed", lambda: kafka.read(sink, settled=False), LIMIT_S)
    killed = []
    # What coordinates the transactions and keeps the offsets, and what the job reads from and writes to.
    for topic in itertools.islice(itertools.cycle(["__transaction_state", source, sink]), KILLS):
        if killed:
            brokers[killed[-1] - 1].start()
        until("every broker has all that there is", lambda: is_whole(kafka, brokers), LIMIT_S)
        victim = brokers[until(f"{topic} has a leader", partial(leader_of, kafka, topic), LIMIT_S) - 1]
        sent = feeding.sent
        victim.stop(crash=True)
        killed.append(victim.number)
        until(
            f"what came after the death of broker {victim.number} is committed",
            partial(has_come_to, kafka, sink, sent + 10 * PER_CALL),
            LIMIT_S,
        )
    records = feeding.stop()
    # A drain ends sources where they are, and not where their topics end.
    until("all records are counted", lambda: len(kafka.read(sink, settled=False)) >= records, LIMIT_S)
    job.stop(drain=True, timeout_s=LIMIT_S)
    print(f"{records:,} records; killed the brokers {killed}; {job.status().restarts} restarts")
    assert_counted_once(kafka.read(sink), records)
