"""A topic that is deleted and created again under the same name is not read on at an offset of the old one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from connector_worlds import all_splits, values
from test_kafka_source import Taker, as_json, source_of

from kafka_broker import Kafka
from midstream import ConfigError, StorageError
from midstream.connectors.kafka import fetch_probe
from midstream.connectors.kafka import kafka_source as kafka_module
from midstream.connectors.kafka.cluster import KafkaCluster
from midstream.connectors.kafka.kafka_source import _Partition
from midstream.engine.operators.source_api import Split
from waiting import until

RECREATED = "was deleted and recreated since the job began to read it; .* start with --fresh"


@pytest.fixture(params=["memory", "objects"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "objects":
        monkeypatch.setattr(fetch_probe, "probed_client", lambda: None)
    else:
        assert fetch_probe.probed_client() is not None


def recreate(kafka: Kafka, topic: str, records: list[bytes | None]) -> None:
    kafka.delete(topic)
    assert kafka.topic() == topic
    kafka.produce(topic, records)


def at(split: Split, offset: int) -> Split:
    """As a checkpoint has it."""
    return msgspec.structs.replace(split, offset=offset)


def stopping_at(split: Split, stop: int) -> Split:
    part = msgspec.structs.replace(msgspec.msgpack.decode(split.payload, type=_Partition), stop=stop)
    return msgspec.structs.replace(split, payload=msgspec.msgpack.encode(part))


@pytest.mark.parametrize("arguments", [{}, {"stop": "latest"}], ids=["for ever", "to an end"])
def test_a_job_that_resumes_gets_no_row_of_the_new_topic(kafka, arguments):
    topic = kafka.topic()
    kafka.produce(topic, as_json(*range(20)))
    source = source_of(kafka, topic, **arguments)
    (split,) = all_splits(source)
    resumed = Taker(source, at(split, 10))
    assert values(resumed.take(10)) == [*range(10, 20)], "its own topic is read on"
    resumed.reader.close()
    recreate(kafka, topic, as_json(*range(100, 130)))
    resumed = Taker(source, at(split, 10))
    with pytest.raises(ConfigError, match=RECREATED):
        resumed.take(1)
    assert resumed.rows == []
    resumed.reader.close()
    source.close()


def test_a_job_that_has_not_begun_at_its_start_gets_no_row_of_the_new_topic(kafka):
    topic = kafka.topic()
    kafka.produce(topic, as_json(*range(10)))
    source = source_of(kafka, topic, start="latest")
    (split,) = all_splits(source)
    recreate(kafka, topic, as_json(*range(100, 120)))
    taker = Taker(source, split)
    with pytest.raises(ConfigError, match=RECREATED):
        taker.take(1)
    taker.reader.close()
    source.close()


def test_a_partition_of_the_new_topic_is_not_the_end_of_the_old_one(kafka):
    """While it is read, the client continues at the old offset and says nothing."""
    topic = kafka.topic()
    kafka.produce(topic, as_json(*range(10)))
    source = source_of(kafka, topic, stop="latest")
    (split,) = all_splits(source)
    taker = Taker(source, stopping_at(split, 20))
    assert values(taker.take(10)) == [*range(10)]
    recreate(kafka, topic, as_json(*range(100, 120)))
    with pytest.raises(ConfigError, match=RECREATED):
        until("the end of the split", taker.look)
    assert not taker.has_ended
    taker.reader.close()
    source.close()


def test_a_new_topic_that_does_not_have_the_offset_is_named(kafka):
    topic = kafka.topic()
    kafka.produce(topic, as_json(*range(10)))
    source = source_of(kafka, topic, on_gap="skip")
    taker = Taker(source, *all_splits(source))
    assert values(taker.take(10)) == [*range(10)]
    recreate(kafka, topic, as_json(*range(100, 103)))
    with pytest.raises(ConfigError, match=RECREATED):
        taker.take(11)
    taker.reader.close()
    source.close()


def test_a_topic_that_is_deleted_once_all_of_it_is_read_has_been_read(kafka):
    topic = kafka.topic()
    kafka.produce(topic, as_json(*range(10)))
    source = source_of(kafka, topic, stop="latest")
    taker = Taker(source, *all_splits(source))
    assert values(taker.take(10)) == [*range(10)]
    kafka.delete(topic)
    until("the end of the split", taker.look)
    taker.reader.close()
    source.close()


def test_a_partition_is_not_at_its_end_while_no_broker_names_the_topic(kafka, monkeypatch):
    topic = kafka.topic()
    kafka.produce(topic, as_json(*range(10)))
    source = source_of(kafka, topic, stop="latest")
    taker = Taker(source, *all_splits(source))
    monkeypatch.setattr(kafka_module, "_POLL_INTERVAL_S", 0.0)
    asked = []

    def silent(*_: Any) -> str:
        asked.append(1)
        raise StorageError("no answer, on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(KafkaCluster, "topic_id", silent)
        until("it has asked twice", lambda: taker.look() or len(asked) >= 2)
        assert values(taker.rows) == [*range(10)] and not taker.has_ended
    until("the end of the split", taker.look)
    assert values(taker.rows) == [*range(10)]
    taker.reader.close()
    source.close()
