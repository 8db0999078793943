"""Queries whether the broker of a partition answers, on a thread: reads of other partitions wait for a read that waits."""

from __future__ import annotations

import threading
from typing import Final

from confluent_kafka import Consumer, KafkaException, TopicPartition

from midstream.connectors.kafka.cluster import PartitionId

_ANSWER_WAIT_S: Final = 0.5
"""The time for which a query waits for the answer."""


class BrokerQuery:
    """The queries of one partition's reader; one at a time."""

    def __init__(self, consumer: Consumer, at: PartitionId) -> None:
        self._consumer = consumer
        self._at = at
        self._thread: threading.Thread | None = None
        self._has_answered = False
        self._next_s = 0.0

    def has_answered(self, now_s: float, interval_s: float) -> bool:
        """Whether the broker has answered since the last call. Begins a query, unless one began less than `interval_s` ago."""
        answered, self._has_answered = self._has_answered, False
        if not answered and now_s >= self._next_s and not self._is_under_way:
            self._next_s = now_s + interval_s
            self._thread = threading.Thread(target=self._query, name="kafka-query", daemon=True)
            self._thread.start()
        return answered

    def close(self) -> None:
        """Wait for the query that is under way. To be called before the consumer is closed."""
        if self._thread is not None:
            self._thread.join()

    @property
    def _is_under_way(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _query(self) -> None:
        try:
            found = self._consumer.get_watermark_offsets(TopicPartition(*self._at), timeout=_ANSWER_WAIT_S)
        except KafkaException:  # nothing is concluded from it but that the broker is still silent
            return
        self._has_answered = found is not None
