"""Kafka as a sink, against a real broker: what arrives, when a checkpoint is prepared, and what is refused."""

from __future__ import annotations

import os
import pickle
import re
import threading
from typing import Any

import pyarrow as pa
import pytest
from connector_worlds import Loop, open_writer, prepared
from hypothesis import given
from hypothesis import strategies as st

from kafka_broker import BACK_SOON, Broker
from machine import limit_s
from midstream import ConfigError, SchemaError, StorageError
from midstream.connectors.kafka.kafka_sink import Encoding, KafkaSink
from waiting import until

ONCE: dict[str, Any] = {"guarantee": "at_least_once"}
HEADERS = pa.large_list(pa.struct([("name", pa.large_string()), ("value", pa.large_binary())]))


def rows(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def text(*values: str | None) -> pa.Array:
    return pa.array(values, pa.large_string())


def write(sink: KafkaSink, *batches: pa.RecordBatch) -> None:
    """By one subtask, up to a checkpoint that is prepared."""
    loop = Loop()
    writer = open_writer(pickle.loads(pickle.dumps(sink)), batches[0].schema, loop)
    for batch in batches:
        writer.write(batch)
    loop.run()
    for failure in loop.failures:
        raise failure
    assert prepared(writer, 1) == [], "there is nothing to commit"
    writer.close()
    loop.run()


def test_what_is_written_is_there_when_the_checkpoint_is_prepared(kafka):
    topic = kafka.topic(partitions=3)
    batch = rows(k=text("a", "b", None), n=[1, 2, 3])
    sink = KafkaSink(kafka.servers, topic, key="k", **ONCE)
    sink.validate(batch.schema, restoring=False)
    write(sink, batch, rows(k=text("ä", "b", "b"), n=[4, 5, None]))
    found = sorted((message.value(), message.key()) for message in kafka.read(topic))
    assert found == sorted(
        [
            (b'{"k":"a","n":1}', b"a"),
            (b'{"k":"b","n":2}', b"b"),
            (b'{"k":null,"n":3}', None),
            ('{"k":"ä","n":4}'.encode(), "ä".encode()),
            (b'{"k":"b","n":5}', b"b"),
            (b'{"k":"b","n":null}', b"b"),
        ]
    )
    of_b = [message for message in kafka.read(topic) if message.key() == b"b"]
    assert len({message.partition() for message in of_b}) == 1
    assert [b'"n":%s}' % n in message.value() for n, message in zip((b"2", b"5", b"null"), of_b, strict=True)] == [
        True
    ] * 3


def test_keys_go_to_the_partitions_that_kafkas_own_clients_choose(kafka):
    topic = kafka.topic(partitions=7)
    write(KafkaSink(kafka.servers, topic, key="k", **ONCE), rows(k=text("21", "foobar", "a"), n=[1, 2, 3]))
    # positive murmur2 of the key, modulo partitions; hashes of org.apache.kafka.common.utils.UtilsTest and of "a"
    found = {message.key(): message.partition() for message in kafka.read(topic)}
    assert found[b"21"] == (-973932308 & 0x7FFFFFFF) % 7
    assert found[b"foobar"] == (-790332482 & 0x7FFFFFFF) % 7


def test_bytes_with_headers_and_partitions_of_columns(kafka):
    topic = kafka.topic(partitions=3)
    batch = rows(
        v=pa.array([b"\x00", None, b"z"], pa.large_binary()),
        k=pa.array([b"1", b"2", b"3"], pa.large_binary()),
        h=pa.array([[{"name": "a", "value": b"\xff"}, {"name": "a", "value": None}], [], None], HEADERS),
        p=pa.array([2, 1, 0], pa.int32()),
    )
    write(KafkaSink(kafka.servers, topic, format="bytes", key="k", headers="h", partition="p", **ONCE), batch)
    found = [(m.partition(), m.key(), m.value(), m.headers()) for m in kafka.read(topic)]
    assert found == [
        (0, b"3", b"z", None),
        (1, b"2", None, None),
        (2, b"1", b"\x00", [("a", b"\xff"), ("a", None)]),
    ]


def test_text_is_written_as_it_is(kafka):
    topic = kafka.topic()
    write(KafkaSink(kafka.servers, topic, format="text", **ONCE), rows(t=text("one\ntwo", "", None)))
    assert [message.value() for message in kafka.read(topic)] == [b"one\ntwo", b"", None]


def test_many_rows_are_sent_in_their_order_through_a_small_queue(kafka):
    topic = kafka.topic()
    sink = KafkaSink(kafka.servers, topic, options={"queue.buffering.max.messages": 100}, **ONCE)
    write(sink, *(rows(n=list(range(first, first + 500))) for first in range(0, 5000, 500)))
    assert [message.value() for message in kafka.read(topic)] == [b'{"n":%d}' % n for n in range(5000)]


def test_a_row_that_is_too_large_fails_the_job_for_good(kafka):
    topic = kafka.topic(max_message_bytes=2000)
    with pytest.raises(
        ConfigError, match=r"operator 'sink out': KafkaSink on .*: a row was not delivered: .*too large"
    ):
        write(KafkaSink(kafka.servers, topic, **ONCE), rows(t=text("x" * 5000)))


def test_a_partition_that_is_not_there_is_refused(kafka):
    topic = kafka.topic()
    sink = KafkaSink(kafka.servers, topic, format="text", partition="p", options={"message.timeout.ms": 2000}, **ONCE)
    with pytest.raises((ConfigError, StorageError), match="artition"):
        write(sink, rows(t=text("x"), p=[5]))
    with pytest.raises(SchemaError, match="has a number below 0"):
        write(sink, rows(t=text("x"), p=[-2]))


@pytest.mark.skipif("KAFKA_BOOTSTRAP" in os.environ, reason="KAFKA_BOOTSTRAP names a broker that tests may not stop")
def test_a_checkpoint_waits_for_a_broker_that_is_gone_and_loses_nothing(kafka, kafka_broker: Broker):
    topic = kafka.topic()
    loop = Loop()
    sink = KafkaSink(kafka.servers, topic, **ONCE, options=BACK_SOON)
    writer = open_writer(sink, rows(n=[1]).schema, loop)
    writer.write(rows(n=[1]))
    loop.run()
    kafka_broker.stop(crash=True)
    done: list[list[bytes]] = []
    try:
        writer.write(rows(n=[2, 3]))
        thread = threading.Thread(target=lambda: done.append(prepared(writer, 1)), daemon=True)
        thread.start()
        thread.join(2)
        assert not done
    finally:
        kafka_broker.start()
    until("the checkpoint is prepared", lambda: done, 90)
    assert [message.value() for message in kafka.read(topic)] == [b'{"n":%d}' % n for n in (1, 2, 3)]
    writer.close()
    loop.run()


def test_an_attempt_that_ends_does_not_wait_for_brokers():
    loop = Loop()
    writer = open_writer(KafkaSink("127.0.0.1:1", "t", **ONCE), rows(n=[1]).schema, loop)
    writer.write(rows(n=[1]))
    finish = writer.prepare(1)
    assert finish is not None
    writer.close()
    with pytest.raises(StorageError, match="the attempt ended before all rows were delivered"):
        finish()


# ---- what is refused ----------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "avro"}, "format='avro' needs registry="),
        ({"key": ["k"]}, "key=['k'] is not the name of a column"),
        ({"topic": ""}, "topic='' is not a name"),
        ({"options": {"acks": 1}}, "'acks' cannot be set"),
        ({"options": {"transactional.id": "x"}}, "'transactional.id' cannot be set"),
    ],
    ids=["format", "key", "topic", "acks", "transactional-id"],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        KafkaSink("127.0.0.1:1", **{"topic": "t", **ONCE, **arguments})


@pytest.mark.parametrize(
    ("columns", "arguments", "message"),
    [
        ({"n": pa.int64()}, {"key": "k"}, "'k'"),
        ({"n": pa.int64()}, {"key": "n"}, "a key must be a string or binary"),
        ({"n": pa.int64(), "h": pa.large_string()}, {"headers": "h"}, "headers are a list of structs"),
        ({"n": pa.int64(), "p": pa.large_string()}, {"partition": "p"}, "not int32 or int64"),
        ({"n": pa.large_binary()}, {}, "JSON has no form for"),
        ({"a": pa.large_string(), "b": pa.large_string()}, {"format": "text"}, "writes one column"),
        ({"a": pa.large_string()}, {"format": "text", "key": "a"}, "there are none"),
        ({"a": pa.int64()}, {"format": "bytes"}, "which is not bytes"),
    ],
    ids=["no-key", "key", "headers", "partition", "binary", "columns", "no-column", "bytes"],
)
def test_columns_that_have_no_form_there_are_refused(columns, arguments, message):
    sink = KafkaSink("127.0.0.1:1", "t", **ONCE, **arguments)
    with pytest.raises(SchemaError, match=re.escape(message)):
        sink.validate(pa.schema(columns), restoring=False)


header = st.fixed_dictionaries(
    {
        "name": st.none() | st.text(st.sampled_from("aé\0\U0001f600"), max_size=3),
        "value": st.none() | st.binary(max_size=3),
    }
)


@given(st.lists(st.none() | st.lists(st.none() | header, max_size=4), max_size=5), st.integers(0, 2), st.booleans())
def test_headers_are_sent_as_they_are_or_the_row_is_refused(headers, skipped, is_staged):
    column = pa.array([*[[None]] * skipped, *headers], HEADERS)
    batch = rows(t=text(*(f"row {at}" for at in range(len(column)))), h=column).slice(skipped)
    sink = KafkaSink("127.0.0.1:1", "t", format="text", headers="h", **ONCE)
    encoding = Encoding(sink, batch.schema, "sink out")

    def sent() -> list[Any]:
        if is_staged:
            return encoding.staged(batch).column("headers").to_pylist()
        return [record[3] for record in encoding.records(batch)]

    refused = [
        at
        for at, row in enumerate(headers)
        if any(one is None or one["name"] is None or "\0" in one["name"] for one in row or ())
    ]
    if refused:
        with pytest.raises(SchemaError, match=rf"sink out: in row .*'row {skipped + refused[0]}'.* column 'h'"):
            sent()
    elif is_staged:
        assert sent() == headers
    else:
        assert sent() == [[(one["name"], one["value"]) for one in row] if row else None for row in headers]


def test_a_topic_that_is_not_there_is_refused_and_not_made(kafka):
    with pytest.raises(ConfigError, match="there is no topic 'no-such-sink'"):
        KafkaSink(kafka.servers, "no-such-sink", **ONCE).validate(rows(n=[1]).schema, restoring=False)
    assert "no-such-sink" not in kafka.admin.list_topics(timeout=limit_s(10)).topics


def test_options_are_looked_at_and_a_cluster_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr("midstream.connectors.kafka.cluster.ANSWER_S", 1.0)
    schema = rows(n=[1]).schema
    with pytest.raises(ConfigError, match='No such configuration property: "linger"'):
        KafkaSink("127.0.0.1:1", "t", options={"linger": 1}, **ONCE).validate(schema, restoring=False)
    with pytest.raises(StorageError, match=r"no answer from 127\.0\.0\.1:1"):
        KafkaSink("127.0.0.1:1", "t", **ONCE).validate(schema, restoring=False)
