"""The options of the client's consumers that read partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from confluent_kafka import Consumer, KafkaError

from midstream.connectors.kafka.client import ClientConfig

OURS: Final = {
    "enable.auto.commit": "offsets are in the job's checkpoints, and are committed to the group of 'group.id' after them",
    "enable.auto.offset.store": "offsets are in the job's checkpoints",
    "auto.offset.reset": "use start= and on_gap=",
    "enable.partition.eof": "the source needs it",
    "isolation.level": "only committed records are read",
    "group.instance.id": "partitions are assigned by the job, not by a group",
    "group.protocol": "partitions are assigned by the job, not by a group",
    "partition.assignment.strategy": "partitions are assigned by the job, not by a group",
    "error_cb": "the source needs it",
}
_NO_GROUP: Final = "midstream"
"""librdkafka requires a group name; without commits and joins the broker has no such group."""
_PREFETCH: Final = {
    "queued.max.messages.kbytes": 16_384,
    "fetch.message.max.bytes": 4 * 2**20,  # with 1 MB, the default, brokers work twice as long for the same records
    "fetch.wait.max.ms": 100,
    "check.crcs": True,
    "topic.metadata.refresh.interval.ms": 30_000,  # by default 5 min, in which a deleted topic may only appear silent
    "fetch.queue.backoff.ms": 10,  # by default a second, after each time that the queue was full
}
"""Prefetch limits per partition, unless the user sets others."""


def new_consumer(connection: ClientConfig, on_error: Callable[[KafkaError], None]) -> Consumer:
    """Return a consumer that is assigned its partitions. Raises what confluent-kafka raises for options."""
    ours = {
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "enable.partition.eof": True,
        "isolation.level": "read_committed",
        "error_cb": on_error,
    }
    return Consumer({"group.id": _NO_GROUP, **_PREFETCH, **connection.config(ours)})
