"""Whether a broker answers is queried without a wait: the other partitions of a slot are read by the same call."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from midstream.connectors.kafka.broker_query import BrokerQuery
from waiting import until


class Client:
    """Its queries take until a test lets them return."""

    def __init__(self) -> None:
        self.queries = 0
        self.may_answer = threading.Event()
        self.found: Any = (0, 7)

    def get_watermark_offsets(self, partition: Any, timeout: float) -> Any:
        self.queries += 1
        assert (partition.topic, partition.partition) == ("orders", 3)
        assert self.may_answer.wait(60)
        if isinstance(self.found, BaseException):
            raise self.found
        return self.found


def queried() -> tuple[Client, BrokerQuery]:
    client = Client()
    return client, BrokerQuery(client, ("orders", 3))  # type: ignore[arg-type]  # has the one call that is needed


def test_a_query_that_hangs_does_not_delay_reads_and_is_not_repeated() -> None:
    client, query = queried()
    for now_s in range(100):
        assert not query.has_answered(now_s, 5)
    client.may_answer.set()
    until("the answer", lambda: query.has_answered(0, 5))
    query.close()
    assert client.queries == 1


def test_an_answer_counts_once_and_the_next_query_waits_for_the_interval() -> None:
    client, query = queried()
    client.may_answer.set()
    until("the answer", lambda: query.has_answered(10, 5))
    assert not query.has_answered(14, 5) and client.queries == 1
    assert not query.has_answered(15, 5)
    query.close()
    assert client.queries == 2 and query.has_answered(15, 5)


@pytest.mark.parametrize("found", [None, KafkaException(KafkaError(KafkaError._TIMED_OUT))])
def test_no_answer_and_an_error_mean_that_it_is_silent(found: Any) -> None:
    client, query = queried()
    client.found = found
    client.may_answer.set()
    assert not query.has_answered(0, 5)
    query.close()
    assert not query.has_answered(1, 5) and client.queries == 1


def test_closing_waits_for_the_query_since_the_client_is_closed_next() -> None:
    client, query = queried()
    query.close()  # of none
    query.has_answered(0, 5)
    closing = threading.Thread(target=query.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    client.may_answer.set()
    closing.join(60)
    assert not closing.is_alive()
