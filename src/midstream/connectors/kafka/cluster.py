"""Queries to a Kafka cluster: topics, the first and last offsets, the committed offsets of a group.

The driver sends them; readers request the id of their topic. Nothing here reads or writes records, and nothing creates a
topic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias, TypeVar

import msgspec
from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AclOperation, AdminClient, ConfigResource, OffsetSpec, TopicDescription  # type: ignore[attr-defined]  # its package exports nothing explicitly

from midstream.connectors.kafka.client import (
    ANSWER_S,
    BrokerSilence,
    ClientConfig,
    convert_errors,
    convert_option_errors,
    topic_error,
)
from midstream.engine.core.errors import ConfigError, StorageError

Names: TypeAlias = tuple[str, ...] | re.Pattern[str]
T = TypeVar("T")
PartitionId: TypeAlias = tuple[str, int]
"""A topic and the number of one of its partitions."""
EARLIEST: Final = -2
LATEST: Final = -1
"""EARLIEST and LATEST are used instead of a time: the first offset, and the one after the last record."""


class Topic(msgspec.Struct, frozen=True, array_like=True):
    id: str
    """The topic's id, which changes when a topic is deleted and recreated."""
    partitions: int


_NO_ID: Final = "A" * 22
"""The id of every topic of brokers before Kafka 2.8: 16 bytes of 0 in base64."""


def are_two_topics(before: str, now: str) -> bool:
    """Whether a name had the id `before` and has another one `now`; false if either is not known."""
    return before != now and _NO_ID not in (before, now)


class KafkaCluster:
    """Blocking queries of one caller, one call at a time. Raises ConfigError, and StorageError if no broker answers."""

    def __init__(self, connection: ClientConfig, where: str) -> None:
        self._connection = connection
        self._where = where
        self._silence = BrokerSilence(where, connection.servers)
        self._admin: AdminClient | None = None
        self._groups: dict[str, Consumer] = {}

    def close(self) -> None:
        self._admin = None
        while self._groups:
            self._groups.popitem()[1].close()

    def topics(self, names: Names, *, may_be_gone: bool = False) -> dict[str, Topic]:
        """Return topics by name. A pattern leaves out Kafka's internal topics. A name that is not a topic is left out if
        it `may_be_gone`, else it raises.
        """
        if isinstance(names, re.Pattern):
            there = self._answer(lambda: self._client().list_topics(timeout=ANSWER_S).topics)
            names = tuple(name for name in sorted(there) if names.fullmatch(name) and not name.startswith("__"))
        if not names:
            return {}

        return self._answer(
            lambda: {
                name: Topic(str(of.topic_id), len(of.partitions))
                for name, of in self._described(names, may_be_gone=may_be_gone).items()
            }
        )

    def topic_id(self, name: str, answer_s: float) -> str | None:
        """Return the id of the topic, for whose answer a broker has `answer_s`; None if there is no topic of this name."""
        found = self._answer(lambda: self._described([name], answer_s, may_be_gone=True))
        return str(found[name].topic_id) if found else None

    def check_writable(self, topic: str) -> None:
        """Raise ConfigError if the topic does not exist, or the user may not write to it."""
        found = self._answer(lambda: self._described([topic], include_authorized_operations=True))
        allowed = found[topic].authorized_operations
        if allowed is not None and AclOperation.WRITE not in allowed:
            raise ConfigError(
                f"{self._where}: topic {topic!r} is not permitted: the user has no right to write (Write) to it"
            )

    def record_bytes_max(self, topic: str) -> int | None:
        """Return the topic's limit on records; None if the user may not read it (DescribeConfigs)."""
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)

        def request() -> int | None:
            requested = self._client().describe_configs([resource], request_timeout=ANSWER_S)
            try:
                return int(requested[resource].result()["max.message.bytes"].value)
            except KafkaException as error:
                if error.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                    return None
                raise

        return self._answer(request)

    def offsets(
        self, partition_ids: list[PartitionId], when_ms: int, *, committed: bool = True
    ) -> dict[PartitionId, int]:
        """Return offsets of committed records: the first (EARLIEST), the one after the last (LATEST), or the first not
        before a time.

        For a time later than all records, that is the offset after the last one. `committed` false: also of records in
        open transactions.
        """
        if not partition_ids:
            return {}
        if when_ms == EARLIEST:
            spec = OffsetSpec.earliest()  # type: ignore[no-untyped-call]  # it has no annotations
        elif when_ms == LATEST:
            spec = OffsetSpec.latest()  # type: ignore[no-untyped-call]  # as above
        else:
            spec = OffsetSpec.for_timestamp(when_ms)

        def request() -> dict[PartitionId, int]:
            requested = self._client().list_offsets(
                {TopicPartition(*partition_id): spec for partition_id in partition_ids},
                isolation_level=IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED,
                request_timeout=ANSWER_S,
            )
            return {(at.topic, at.partition): answer.result().offset for at, answer in requested.items()}

        found = self._answer(request)
        later = [partition_id for partition_id, offset in found.items() if offset < 0]
        return {**found, **self.offsets(later, LATEST, committed=committed)} if later else found

    def committed(self, group: str, partition_ids: list[PartitionId]) -> dict[PartitionId, int]:
        """Return the offsets that the group has committed."""
        requested = [TopicPartition(*partition_id) for partition_id in partition_ids]
        found = self._answer(lambda: self._group_consumer(group).committed(requested, timeout=ANSWER_S))
        for each in found:
            if each.error is not None:
                raise StorageError(
                    f"{self._where}: the offset of topic {each.topic!r}, partition {each.partition} in group {group!r} cannot be "
                    f"read: {each.error.str()}"
                )
        return {(each.topic, each.partition): each.offset for each in found if each.offset >= 0}

    def commit(self, group: str, offsets: Mapping[PartitionId, int]) -> None:
        requested = [TopicPartition(*partition_id, offset) for partition_id, offset in offsets.items()]
        done = self._answer(lambda: self._group_consumer(group).commit(offsets=requested, asynchronous=False))
        for each in done or ():
            if each.error is not None:
                raise StorageError(
                    f"{self._where}: offsets of topic {each.topic!r}, partition {each.partition} cannot be committed to group "
                    f"{group!r}: {each.error.str()}"
                )

    def _described(
        self, names: Sequence[str], answer_s: float | None = None, *, may_be_gone: bool = False, **options: bool
    ) -> dict[str, TopicDescription]:
        """Return the metadata of topics from the brokers. One that does not exist is left out if it `may_be_gone`, else it raises."""
        requested = self._client().describe_topics(
            TopicCollection(list(names)), request_timeout=answer_s or ANSWER_S, **options
        )
        found = {}
        for name in names:
            try:
                found[name] = requested[name].result()
            except KafkaException as error:
                is_gone = error.args[0].code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)
                if not (is_gone and may_be_gone):
                    raise topic_error(error.args[0], name, self._where) from error
        return found

    def _client(self) -> AdminClient:
        if self._admin is None:
            config = self._connection.admin_config({"error_cb": self._silence.on_error})
            with convert_option_errors(self._where):
                self._admin = AdminClient(config)
        return self._admin

    def _group_consumer(self, group: str) -> Consumer:
        """Return a consumer that has the group's name only: without a subscription it joins nothing."""
        if group not in self._groups:
            ours = {"group.id": group, "enable.auto.commit": False, "error_cb": self._silence.on_error}
            with convert_option_errors(self._where):
                self._groups[group] = Consumer(self._connection.admin_config(ours))
        return self._groups[group]

    def _answer(self, request: Callable[[], T]) -> T:
        try:
            with convert_errors(self._where):
                return request()
        except StorageError as error:
            if self._admin is not None:
                self._admin.poll(0)  # the callback receives the reason
            self._silence.polled(False)
            why = f" ({self._silence.why})" if self._silence.why else ""
            raise StorageError(f"{error}; no answer from {self._connection.servers}{why}") from error
