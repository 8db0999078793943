"""Cases of a reader on the mock cluster inside librdkafka, each in a process of its own: an abort ends that one only.

`python kafka_on_mock.py <case> <way>` exits with 0 if all is as it should be. Ways: `memory`, `objects`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from confluent_kafka import Consumer, KafkaError, Producer, cimpl

from midstream.connectors.kafka import fetch_probe, fetched_records
from midstream.connectors.kafka.cluster import _NO_ID, KafkaCluster
from midstream.connectors.kafka.kafka_source import KafkaSource, _KafkaPartitionReader, _Partition
from midstream.connectors.kafka.schema_registry import RegistrySilent
from midstream.connectors.kafka.shared_consumer import SharedConsumers
from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.errors import ConfigError, InvariantError, SchemaError, StorageError
from midstream.engine.operators.source_api import Split

TOPIC = "in"
RECORDS = 1000
OPTIONS: dict[str, Any] = {
    "topic.metadata.propagation.max.ms": 200,  # a topic that is not there is gone, and not new
    "topic.metadata.refresh.interval.ms": 300,
    "fetch.wait.max.ms": 20,
    "reconnect.backoff.ms": 20,
}
REFUSED = 29  # TOPIC_AUTHORIZATION_FAILED
FETCH = 1
_END_S = 20.0


def until(what: str, is_so: Callable[[], object]) -> None:
    end_s = time.monotonic() + _END_S
    while not is_so():
        assert time.monotonic() < end_s, f"in vain: {what}"
        time.sleep(0.005)


def _call(name: str, returns: Any, *takes: Any) -> Any:
    call = getattr(ctypes.CDLL(cimpl.__file__), name)
    call.restype, call.argtypes = returns, takes
    return call


class Mock:
    """A cluster of one broker, with TOPIC of two partitions and RECORDS in each."""

    def __init__(self) -> None:
        self.producer = Producer({"bootstrap.servers": "x", "test.mock.num.brokers": 1, "linger.ms": 5, "log_level": 3})
        handle = ctypes.c_void_p.from_address(id(self.producer) + object.__basicsize__).value
        self._cluster = _call("rd_kafka_handle_mock_cluster", ctypes.c_void_p, ctypes.c_void_p)(handle)
        self.servers: str = _call("rd_kafka_mock_cluster_bootstraps", ctypes.c_char_p, ctypes.c_void_p)(
            self._cluster
        ).decode()
        patch.object(KafkaCluster, "topic_id", return_value=_NO_ID).start()  # the mock does not describe topics
        self.create(2)
        self.produce(0, RECORDS)
        self.produce(1, RECORDS)

    def create(self, partitions: int) -> None:
        text, number = ctypes.c_char_p, ctypes.c_int
        create = _call("rd_kafka_mock_topic_create", number, ctypes.c_void_p, text, number, number)
        assert create(self._cluster, TOPIC.encode(), partitions, 1) == 0

    def delete(self) -> None:
        delete = _call("rd_kafka_mock_topic_delete", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
        assert delete(self._cluster, TOPIC.encode()) == 0

    def refuse_topic(self) -> None:
        refuse = _call("rd_kafka_mock_topic_set_error", None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int)
        refuse(self._cluster, TOPIC.encode(), REFUSED)

    def refuse_fetch(self) -> None:
        kinds = (ctypes.c_int * 3)(*[REFUSED] * 3)
        push = _call(
            "rd_kafka_mock_push_request_errors_array",
            *(None, ctypes.c_void_p, ctypes.c_int16, ctypes.c_size_t, ctypes.c_void_p),
        )
        push(self._cluster, FETCH, len(kinds), ctypes.addressof(kinds))

    def produce(self, partition: int, count: int, first: int = 0) -> None:
        for n in range(first, first + count):
            self.producer.produce(TOPIC, b"%d" % n, partition=partition)
        assert self.producer.flush(20) == 0

    def produce_with_headers(self, value: bytes, headers: list[tuple[bytes, bytes | None]]) -> None:
        """To partition 1. The names are bytes, which the Python client would refuse."""
        pointer, text, number, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_ssize_t
        add = _call("rd_kafka_header_add", number, pointer, text, size, text, size)
        made = _call("rd_kafka_headers_new", pointer, ctypes.c_size_t)(len(headers))
        for name, content in headers:
            assert add(made, name, len(name), content, len(content or b"")) == 0
        handle = ctypes.c_void_p.from_address(id(self.producer) + object.__basicsize__).value
        of_topic, of_partition, of_value, of_flags, of_headers, copies = 1, 3, 4, 7, 10, 2
        send = _call("rd_kafka_producev", number, pointer)
        tagged = [number(of_topic), text(TOPIC.encode()), number(of_partition), ctypes.c_int32(1)]
        tagged += [number(of_value), text(value), ctypes.c_size_t(len(value)), number(of_flags), number(copies)]
        assert send(pointer(handle), *tagged, number(of_headers), pointer(made), number(0)) == 0
        assert self.producer.flush(20) == 0

    def reader(self, partition: int = 1, topic: str = TOPIC, **arguments: Any) -> _KafkaPartitionReader:
        source = KafkaSource(self.servers, topic, format="bytes", options=OPTIONS, **arguments)
        payload = msgspec.msgpack.encode(_Partition(topic, partition, 0, None, False, _NO_ID))
        reader = source.open_split(Split(f"{topic}:{partition}", payload))
        assert isinstance(reader, _KafkaPartitionReader)
        return reader


def taken(reader: _KafkaPartitionReader, count: int) -> list[int]:
    rows: list[Any] = []

    def enough() -> bool:
        got = reader.read(700)
        assert got is not None
        rows.extend(map(int, to_list(got[0].column(0))))
        return len(rows) >= count

    until(f"{count} rows", enough)
    return rows


def hears(reader: _KafkaPartitionReader, text: str) -> None:
    """And continues to look for a while, as it does while it waits for brokers."""

    def has_heard() -> bool:
        reader.read(700)
        return text in reader._silence.why

    until(f"{text!r} is heard, and not {reader._silence.why!r}", has_heard)
    for _ in range(100):
        reader.read(700)
        time.sleep(0.005)


def at_the_end(reader: _KafkaPartitionReader) -> None:
    """Handle every report up to that of the end.

    The client may have fetched at the old offset from the new topic. Its report of that gap comes before the records of the
    new assignment or with them. A reader that handles it after the topic was deleted finds that the topic is gone.
    """

    def is_reported() -> bool:
        if any(error.code() == KafkaError._PARTITION_EOF for error, _ in reader._reports):
            return True
        reader.read(700)
        return False

    until("the end is reported", is_reported)
    reader.read(700)


def with_records_out(reader: _KafkaPartitionReader) -> fetched_records.Fetched:
    """Beside them the partition's queue has others."""
    found: list[fetched_records.Fetched] = []

    def some() -> bool:
        found[:] = [reader._fetcher.take(10)[0]]
        return len(found[0]) == 10

    until("records", some)
    return found[0]


def queued(reader: _KafkaPartitionReader) -> int:
    """How many records, and reports beside them, wait in the client for the reader of partition 1. None is taken."""
    handle = ctypes.c_void_p.from_address(id(reader._consumer) + object.__basicsize__).value
    pointer = ctypes.c_void_p
    queue_of = _call("rd_kafka_queue_get_partition", pointer, pointer, ctypes.c_char_p, ctypes.c_int32)
    queue = queue_of(handle, TOPIC.encode(), 1)
    length: int = _call("rd_kafka_queue_length", ctypes.c_size_t, pointer)(queue)
    _call("rd_kafka_queue_destroy", None, pointer)(queue)
    return length


# ---- cases ----


def topic_deleted(mock: Mock) -> None:
    reader = mock.reader()
    assert taken(reader, RECORDS) == [*range(RECORDS)]
    mock.delete()
    hears(reader, "topic does not exist")
    reader.close()


def topic_deleted_with_records_unread(mock: Mock) -> None:
    reader = mock.reader()
    records = with_records_out(reader)
    until("the other records have come, and the report of their end", lambda: queued(reader) > RECORDS - 10)
    before = queued(reader)
    mock.delete()
    until("the client knows of it, and reports it behind the records", lambda: queued(reader) > before)
    assert len(records) == 10 and records.values().to_pylist() == [b"%d" % n for n in range(10)]
    records.close()
    hears(reader, "topic does not exist")
    reader.close()


def topic_refused(mock: Mock) -> None:
    reader = mock.reader()
    taken(reader, RECORDS)
    mock.refuse_topic()
    hears(reader, "Topic authorization failed")
    reader.close()


def fetch_refused(mock: Mock) -> None:
    reader = mock.reader()
    taken(reader, RECORDS)
    mock.refuse_fetch()
    with pytest.raises(ConfigError, match="cannot be read"):
        until("it is refused", lambda: reader.read(700) is None)
    reader.close()


def fewer_partitions(mock: Mock) -> None:
    reader = mock.reader()
    taken(reader, RECORDS)
    mock.delete()
    mock.create(1)
    hears(reader, "partition")
    reader.close()


def partition_not_known(mock: Mock) -> None:
    reader = mock.reader(partition=2)
    hears(reader, "partition")
    reader.close()


def topic_recreated_and_assigned_again(mock: Mock) -> None:
    reader = mock.reader()
    taken(reader, RECORDS)
    for round_ in range(3):
        mock.delete()
        hears(reader, "topic does not exist")
        mock.create(2)
        mock.produce(1, 50, first=round_ * 100)
        reader._reports.clear()
        reader._next = 0
        reader._assign(0)
        assert taken(reader, 50) == [round_ * 100 + n for n in range(50)]
        at_the_end(reader)
        reader._silence.why = ""
    reader.close()


def queue_not_cut_off(mock: Mock) -> None:
    """What is found when the partition has got another queue behind the fetcher's back."""
    reader = mock.reader()
    fetcher: Any = reader._fetcher
    taken(reader, RECORDS)
    if isinstance(fetcher, fetched_records.MemoryFetcher):
        client = fetcher._client
        queue_of = _call("rd_kafka_queue_get_consumer", ctypes.c_void_p, ctypes.c_void_p)
        client.forward(fetcher._queue, queue_of(client.handle_at(id(reader._consumer))))
    mock.produce(1, 300, first=RECORDS)
    assert taken(reader, 300) == [*range(RECORDS, RECORDS + 300)]
    mock.produce(1, 300, first=RECORDS + 300)
    assert taken(reader, 300) == [*range(RECORDS + 300, RECORDS + 600)]
    reader.close()


def closed_with_records_out(mock: Mock) -> None:
    reader = mock.reader()
    with_records_out(reader)
    reader.close()


def taken_over_records_that_are_out(mock: Mock) -> None:
    reader = mock.reader()
    with_records_out(reader)
    with_records_out(reader)
    reader.close()


def failing_with_records_out(mock: Mock) -> None:
    """Between the client's call and whoever wants its records."""
    reader = mock.reader()
    until("records have come", lambda: queued(reader) >= RECORDS)
    patched = "_followed" if isinstance(reader._fetcher, fetched_records.MemoryFetcher) else "ObjectRecords"
    original = getattr(fetched_records, patched)

    def fails(*_: Any) -> Any:
        raise MemoryError("on purpose")

    setattr(fetched_records, patched, fails)
    with contextlib.suppress(MemoryError):
        until("it fails", lambda: reader.read(10) is None)
    setattr(fetched_records, patched, original)
    reader.close()


def collected_with_records_out(mock: Mock) -> None:
    reader = mock.reader()
    with_records_out(reader)
    del reader
    gc.collect()


def collected_in_a_cycle(mock: Mock) -> None:
    reader: Any = mock.reader()
    reader.itself, reader.records = reader, with_records_out(reader)
    del reader
    gc.collect()


kept: Any = None


def exit_with_records_out(mock: Mock) -> None:
    global kept
    reader = mock.reader()
    kept = reader, with_records_out(reader)


def kept_and_then_bad(mock: Mock) -> None:
    """Records that have waited for the registry, and then fail: nobody reads them again when they are given back."""
    reader = mock.reader()
    parser: Any = reader._source._parser
    rows = parser.rows
    fails: type[Exception] = RegistrySilent

    def failing(records: Any, where: str) -> Any:
        if len(records):
            raise fails("on purpose")
        return rows(records, where)

    parser.rows = failing
    until("they are kept", lambda: reader.read(10) and reader._kept is not None)
    fails = StorageError
    with pytest.raises(StorageError):
        reader.read(10)
    assert reader._kept is None
    reader.close()


def header_names_that_are_not_text(mock: Mock) -> None:
    """Such a record is a bad record only for a job that reads headers."""
    reader = mock.reader(metadata=["headers"], on_bad_record="drop")
    taken(reader, RECORDS)
    hostile: list[list[tuple[bytes, bytes | None]]] = [
        [(b"na\xffme", b"1")],
        [],
        [(b"a", b"\xff\x00"), (b"a", None), (b"", b"")],
        [(b"ok", b"1"), (b"\xed\xa0\x80", None)],
        [(b"n%d" % n, b"x") for n in range(1_000)],
        [(b"\xc3", b"2")],
    ]
    for n, headers in enumerate(hostile, RECORDS):
        mock.produce_with_headers(b"%d" % n, headers)
    rows: list[Any] = []
    bad: list[Any] = []

    def read_all() -> bool:
        got = reader.read(700)
        assert got is not None
        rows.extend(got[0].to_pylist())
        report = reader.bad_records()
        if report is not None:
            bad.extend(report.rows.to_pylist())
        return len(rows) + len(bad) == len(hostile)

    until("all of them", read_all)
    assert [int(row["value"]) - RECORDS for row in rows] == [1, 2, 4]
    for row in rows:
        wanted = [{"name": name.decode(), "value": value} for name, value in hostile[int(row["value"]) - RECORDS]]
        assert row["headers"] == wanted
    assert [(one["source"], one["partition"], one["position"] - RECORDS) for one in bad] == [
        (TOPIC, 1, at) for at in (0, 3, 5)
    ]
    assert [one["bytes"] for one in bad] == [b"%d" % (RECORDS + at) for at in (0, 3, 5)]
    assert all("name of a header of the record is not UTF-8" in one["error"] for one in bad)
    reader.close()
    reader = mock.reader()
    assert taken(reader, RECORDS + len(hostile)) == [*range(RECORDS + len(hostile))]
    reader.close()
    failing = mock.reader(metadata=["headers"])
    with pytest.raises(SchemaError, match=rf"topic '{TOPIC}', partition 1, offset {RECORDS}: the name of a header"):
        until("it fails", lambda: failing.read(700) is None)
    failing.close()


def long_topic_name(mock: Mock) -> None:
    for length in (249, 512):
        reader = mock.reader(topic="a" * length)
        reader.read(10)
        reader.close()
    with pytest.raises(StorageError, match="aaa"):
        mock.reader(topic="a" * 513)
    reader = mock.reader()
    fetcher: Any = reader._fetcher
    if isinstance(fetcher, fetched_records.MemoryFetcher):
        fetcher._place = "a" * 513, 0
        with pytest.raises(StorageError, match="no queue"):
            fetcher.assign(0)
    reader.close()


def used_after_close(mock: Mock) -> None:
    reader = mock.reader()
    with_records_out(reader)
    reader.close()
    for use in (lambda: reader._fetcher.take(10), lambda: reader._fetcher.assign(0), lambda: reader.read(10)):
        with pytest.raises((InvariantError, RuntimeError)):
            use()
    reader._fetcher.close()
    reader.close()
    reader = mock.reader()
    reader._fetcher.close()
    if isinstance(reader._fetcher, fetched_records.MemoryFetcher):
        with pytest.raises(InvariantError):
            reader._fetcher.take(10)
    reader.close()


def heard_raises(mock: Mock) -> None:
    """What is raised where an error is heard comes out of a `take`."""

    def heard(error: KafkaError) -> None:
        raise StorageError(f"heard: {error.str()}")

    def new_consumer(on_error: Any) -> Consumer:
        return Consumer({"bootstrap.servers": mock.servers, "group.id": "g", "error_cb": on_error, **OPTIONS})

    fetcher = fetch_probe.new_fetcher(SharedConsumers(), new_consumer, TOPIC, 1, (), heard)
    fetcher.assign(0)
    mock.delete()
    with pytest.raises(StorageError, match=r"topic does not exist|partition is no longer available"):
        until("it raises", lambda: fetcher.take(10) is None)
    fetcher.close()


CASES = {
    case.__name__: case
    for case in (
        topic_deleted,
        topic_deleted_with_records_unread,
        topic_refused,
        fetch_refused,
        fewer_partitions,
        partition_not_known,
        topic_recreated_and_assigned_again,
        queue_not_cut_off,
        closed_with_records_out,
        taken_over_records_that_are_out,
        failing_with_records_out,
        collected_with_records_out,
        collected_in_a_cycle,
        exit_with_records_out,
        kept_and_then_bad,
        header_names_that_are_not_text,
        long_topic_name,
        used_after_close,
        heard_raises,
    )
}

if __name__ == "__main__":
    faulthandler.enable()
    read_by = None if sys.argv[2] == "objects" else fetched_records.FetchClient(cimpl.__file__)
    fetch_probe.probed_client = lambda: read_by
    cluster = Mock()
    CASES[sys.argv[1]](cluster)
    print("over", flush=True)
