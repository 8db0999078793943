"""The partitions of a source share one consumer: neither reading nor closing one disturbs the others."""

from __future__ import annotations

import pickle
import threading

import pytest
from connector_worlds import all_splits, values
from test_kafka_source import Taker, as_json, source_of

from kafka_broker import Kafka
from midstream import StorageError
from midstream.connectors.kafka import fetch_probe
from midstream.connectors.kafka.kafka_source import KafkaSource, _KafkaPartitionReader
from midstream.engine.operators.source_api import Split
from waiting import until


class Sharer(Taker):
    """A reader of this very source, and not of a copy as a `Taker` is."""

    def __init__(self, source: KafkaSource, split: Split) -> None:
        super().__init__(source, split)
        self.reader.close()
        self.reader = source.open_split(split)


def reader_of(taker: Taker) -> _KafkaPartitionReader:
    assert isinstance(taker.reader, _KafkaPartitionReader)
    return taker.reader


def waking_threads() -> int:
    return sum(thread.name == "kafka-rows" for thread in threading.enumerate())


def test_partitions_share_a_consumer_which_closes_with_the_last_of_them(kafka: Kafka) -> None:
    topic = kafka.topic(partitions=3)
    for partition in range(3):
        kafka.produce(topic, as_json(partition), partition=partition)
    source = source_of(kafka, topic)
    takers = [Sharer(source, split) for split in all_splits(source)]
    consumers = {id(reader_of(taker)._consumer) for taker in takers}
    assert len(consumers) == 1
    assert sorted(n for taker in takers for n in values(taker.take(1))) == [0, 1, 2]
    takers[0].reader.close()
    for partition in range(3):
        kafka.produce(topic, as_json(10 + partition), partition=partition)
    found = sorted(n for taker in takers[1:] for n in values(taker.take(2)))
    assert len(found) == 4 and len({n % 10 for n in found}) == 2
    again = Sharer(source, all_splits(source)[0])  # a partition that was closed is read by the same consumer
    assert id(reader_of(again)._consumer) in consumers
    assert len(values(again.take(2))) == 2
    for taker in (*takers[1:], again):
        taker.reader.close()
    with pytest.raises(RuntimeError, match="closed"):
        reader_of(again)._consumer.consume(1, 0)
    last = Sharer(source, all_splits(source)[0])
    assert len(values(last.take(2))) == 2
    last.reader.close()


def test_a_reader_is_woken_by_records_of_its_partition_alone(kafka: Kafka) -> None:
    before = waking_threads()
    topic = kafka.topic(partitions=2)
    source = source_of(kafka, topic)
    takers = [Sharer(source, split) for split in all_splits(source)]
    woken = [threading.Event(), threading.Event()]
    for taker, event in zip(takers, woken, strict=True):
        assert taker.reader.on_rows(event.set)
    for n in range(20):
        for taker in takers:
            until("the end of the partition", lambda taker=taker: not taker.look())  # type: ignore[misc]
        for event in woken:
            event.clear()
        kafka.produce(topic, as_json(n), partition=n % 2)
        assert woken[n % 2].wait(60), "records have come"
        assert values(takers[n % 2].take(n // 2 + 1))[-1] == n
    assert waking_threads() == before + 1
    for taker in takers:
        taker.reader.close()
    until("the thread to end", lambda: waking_threads() == before)


def test_a_partition_is_read_once_at_a_time_and_a_copy_of_the_source_shares_nothing(kafka: Kafka) -> None:
    topic = kafka.topic()
    kafka.produce(topic, as_json(1))
    source = source_of(kafka, topic)
    first = Sharer(source, all_splits(source)[0])
    assert values(first.take(1)) == [1]
    copy = pickle.loads(pickle.dumps(source))
    other = Sharer(copy, all_splits(source)[0])
    assert values(other.take(1)) == [1]
    assert reader_of(other)._consumer is not reader_of(first)._consumer
    other.reader.close()
    with pytest.raises(StorageError, match="partition 0"):
        source.open_split(all_splits(source)[0])
    kafka.produce(topic, as_json(2))
    assert values(first.take(2)) == [1, 2], "the refused reader has not disturbed the first one"
    first.reader.close()


def test_readers_of_objects_have_a_consumer_each_and_report_nothing(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_probe, "probed_client", lambda: None)
    source = source_of(kafka, kafka.topic(partitions=2))
    readers = [reader_of(Sharer(source, split)) for split in all_splits(source)]
    assert len({id(reader._consumer) for reader in readers}) == 2
    assert not any(reader.on_rows(lambda: None) for reader in readers)
    for reader in readers:
        reader.close()
