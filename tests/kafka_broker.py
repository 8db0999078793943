"""What tests do to Kafka brokers of their own, which `tools/kafka_server.py` starts."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from kafka_server import PASSWORD, USER, Broker, find_jars, quiet, running_brokers

from machine import limit_s
from waiting import until

__all__ = ["BACK_SOON", "PASSWORD", "USER", "Broker", "Kafka", "find_jars", "quiet", "running_brokers"]

BACK_SOON = {"reconnect.backoff.max.ms": 500}
"""Options of clients whose broker a test stops: by default they look up to 10 s later whether it is back."""


class Kafka:
    """What tests do to a broker beside the job; topics of a test have names of their own."""

    def __init__(self, servers: str) -> None:
        from confluent_kafka.admin import AdminClient

        self.servers = servers
        self.admin = AdminClient(quiet(servers))
        self._prefix = f"t{os.getpid()}-{uuid.uuid4().hex[:8]}"

    def topic(self, name: str = "in", partitions: int = 1, **config: Any) -> str:
        from confluent_kafka.admin import NewTopic

        topic = f"{self._prefix}-{name}"
        config = {"retention_ms": -1, **config}  # records of tests have times of long ago
        settings = {key.replace("_", "."): str(value) for key, value in config.items()}
        new = NewTopic(
            topic, num_partitions=partitions, config=settings
        )  # on as many brokers as the cluster's default says
        self.admin.create_topics([new])[topic].result(limit_s(30))
        until(f"{topic} is known", lambda: self._partitions(topic) == partitions)
        return topic

    def delete(self, topic: str) -> None:
        self.admin.delete_topics([topic])[topic].result(limit_s(30))
        until(f"{topic} is gone", lambda: topic not in self.admin.list_topics(timeout=limit_s(10)).topics)

    def allow(self, name: str, *operations: str, kind: str = "topic") -> None:
        """To USER; `name` is that of a topic, or what those of another kind (group, transactional_id) begin with."""
        from confluent_kafka.admin import (
            AclBinding,
            AclOperation,
            AclPermissionType,
            ResourcePatternType,
            ResourceType,
        )

        bindings = [
            AclBinding(
                ResourceType[kind.upper()],
                name,
                ResourcePatternType.LITERAL if kind == "topic" else ResourcePatternType.PREFIXED,
                f"User:{USER}",
                "*",
                AclOperation[operation],
                AclPermissionType.ALLOW,
            )
            for operation in operations
        ]
        for done in self.admin.create_acls(bindings).values():
            done.result(limit_s(30))

    def grow(self, topic: str, partitions: int) -> None:
        from confluent_kafka.admin import NewPartitions

        self.admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(limit_s(30))
        until(f"{topic} has {partitions} partitions", lambda: self._partitions(topic) == partitions)

    def _partitions(self, topic: str) -> int:
        found = self.admin.list_topics(topic, timeout=limit_s(10)).topics[topic].partitions.values()
        return sum(partition.leader >= 0 for partition in found)

    def forget(self, topic: str, before: int, partition: int = 0) -> None:
        """As retention does: records before this offset are gone."""
        from confluent_kafka import TopicPartition

        at = TopicPartition(topic, partition, before)
        self.admin.delete_records([at])[at].result(limit_s(30))

    def produce(self, topic: str, values: Sequence[bytes | None], **more: Any) -> None:
        """`more`: what `Producer.produce` takes, or `config`."""
        from confluent_kafka import Producer

        config: Mapping[str, Any] = more.pop("config", {})
        producer = Producer({"bootstrap.servers": self.servers, "linger.ms": 0, **config})
        self._send(producer, topic, values, more)
        assert producer.flush(30) == 0

    def transaction(self, topic: str, values: Sequence[bytes | None], *, commit: bool, **more: Any) -> None:
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.servers, "transactional.id": uuid.uuid4().hex})
        producer.init_transactions(30)
        producer.begin_transaction()
        self._send(producer, topic, values, more)
        assert producer.flush(30) == 0
        if commit:
            producer.commit_transaction(30)
        else:
            producer.abort_transaction(30)
        # It is answered before the partitions show it.
        until("the transaction is over", lambda: self._end(topic, stable=True) == self._end(topic, stable=False))

    def _end(self, topic: str, *, stable: bool) -> list[int]:
        """Of each partition: behind the last record, or (stable) what is before any open transaction."""
        from confluent_kafka import IsolationLevel, TopicPartition
        from confluent_kafka.admin import OffsetSpec

        level = IsolationLevel.READ_COMMITTED if stable else IsolationLevel.READ_UNCOMMITTED
        places = [TopicPartition(topic, partition) for partition in range(self._partitions(topic))]
        asked = self.admin.list_offsets(dict.fromkeys(places, OffsetSpec.latest()), isolation_level=level)
        return [asked[place].result().offset for place in places]

    @staticmethod
    def _send(producer: Any, topic: str, values: Sequence[bytes | None], more: Mapping[str, Any]) -> None:
        failed: list[Any] = []
        for value in values:
            while True:
                try:
                    producer.produce(topic, value, on_delivery=lambda error, _: error and failed.append(error), **more)
                    break
                except BufferError:
                    producer.poll(1)
        producer.flush(30)
        assert failed == []

    def read(self, topic: str, *, settled: bool = True) -> list[Any]:
        """All messages that a reader of committed ones can have when it is called, partition after partition.

        `settled`: once the transactions are over that were open when it was called. A broker answers a commit before it has told all partitions of it.
        """
        from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

        options = {
            "bootstrap.servers": self.servers,
            "group.id": "tests",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,  # the broker's word that there is no more comes after so long
        }

        def ends_for(isolation: str) -> dict[int, tuple[int, int]]:
            asking = Consumer({**options, "isolation.level": isolation})  # anew: one keeps asking a broker that is gone
            try:
                partitions = self.admin.list_topics(topic, timeout=limit_s(10)).topics[topic].partitions
                return {each: asking.get_watermark_offsets(TopicPartition(topic, each), 5) for each in partitions}
            except KafkaException:  # as while a partition has no leader
                return {}
            finally:
                asking.close()

        def bounds() -> dict[int, tuple[int, int]]:
            """Of each partition, its first offset and the one behind what is committed; nothing if that is not known."""
            written = ends_for("read_uncommitted") if settled else {}
            committed = ends_for("read_committed")
            return (
                committed if all(end <= committed.get(each, (0, -1))[1] for each, (_, end) in written.items()) else {}
            )

        # The end is that of now: where a writer commits all the time, a reader never hears that there is no more.
        found = until(f"the bounds of {topic} are known", bounds)
        ends = {partition: end for partition, (first, end) in found.items() if end > first}
        left = set(ends)
        consumer = Consumer(options)
        messages: list[Any] = []

        def read_on() -> bool:
            while left and (got := consumer.consume(10_000, 0)):
                for message in got:
                    error, partition = message.error(), message.partition()
                    if error is None and message.offset() < ends[partition]:
                        messages.append(message)
                    assert error is None or error.code() == KafkaError._PARTITION_EOF, error
                    # The last offsets before the end may be without a record: then it is the next one that tells.
                    if error is not None or message.offset() >= ends[partition] - 1:
                        left.discard(partition)
            return not left

        try:
            consumer.assign([TopicPartition(topic, partition, found[partition][0]) for partition in left])
            until(f"what {topic} has is read", read_on)
        finally:
            consumer.close()
        return sorted(messages, key=lambda message: (message.partition(), message.offset()))
