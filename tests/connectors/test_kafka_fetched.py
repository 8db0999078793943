"""Records come out of the client's memory as they come out of its Python objects, and are given back."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from connector_worlds import all_splits, values
from hypothesis import given
from hypothesis import strategies as st
from kafka_on_mock import CASES
from test_kafka_source import Taker, as_json, read, source_of

from kafka_broker import Kafka
from machine import limit_s
from midstream import SchemaError
from midstream.connectors.kafka import fetch_probe, fetched_records
from midstream.connectors.kafka.kafka_source import _KafkaPartitionReader
from midstream.connectors.kafka.schema_registry import RegistrySilent
from waiting import until

WAYS = {"memory": fetched_records.MemoryFetcher, "objects": fetched_records.ObjectFetcher}
SIZES = [0, 1, 3, 4, 5, 11, 12, 13, 63, 64, 1000, 65_536, 900_000]
ODD: list[bytes | None] = [None, *(bytes(at % 251 for at in range(size)) for size in SIZES), None, b"\n", b"{}\r\n"]
METADATA = ("topic", "partition", "offset", "timestamp", "key")


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "objects":
        monkeypatch.setattr(fetch_probe, "probed_client", lambda: None)
    name: str = request.param
    return name


def taker_of(source: Any) -> tuple[Taker, _KafkaPartitionReader]:
    """Of a topic with one partition."""
    taker = Taker(source, all_splits(source)[0])
    assert isinstance(taker.reader, _KafkaPartitionReader)
    return taker, taker.reader


# ---- copying out of memory; no broker is needed for that ----


@given(st.lists(st.none() | st.binary(max_size=40), max_size=30), st.integers(0, 20), st.data())
def test_bytes_are_copied_from_wherever_they_are(wanted, gap, data):
    order = data.draw(st.permutations(range(len(wanted))))
    memory = bytearray()
    places = {}
    for at in order:
        memory += b"\xaa" * gap
        places[at] = len(memory)
        memory += wanted[at] or b""
    buffer = (ctypes.c_char * (len(memory) + 1)).from_buffer(bytearray(memory + b"\x00"))
    base = ctypes.addressof(buffer)
    starts = np.array([0 if each is None else base + places[at] for at, each in enumerate(wanted)], np.int64)
    sizes = np.array([len(each or b"") for each in wanted], np.int64)
    for window_bits in (30, 7, 3):  # nothing is so far apart, or much, or nearly all
        found = fetched_records.copied(starts, sizes, window_bits=window_bits)
        found.validate(full=True)
        assert found.type == pa.large_binary() and found.to_pylist() == wanted


# ---- with a cluster inside the client ----


@pytest.mark.systems
@pytest.mark.parametrize("case", CASES)
def test_it_goes_as_well_as_with_objects(way, case):
    """In a process of its own: what goes wrong with memory ends it, or hangs it for ever."""
    command = [sys.executable, str(Path(__file__).with_name("kafka_on_mock.py")), case, way]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=limit_s(60))
    assert done.returncode == 0 and done.stdout.endswith("over\n"), done.stderr[-3000:]
    assert "ignored" not in done.stderr and "Traceback" not in done.stderr, done.stderr[-3000:]


# ---- with a broker ----


@pytest.mark.parametrize("codec", ["none", "gzip", "lz4", "snappy", "zstd"])
def test_records_of_odd_sizes_come_with_their_keys_places_and_times(kafka: Kafka, way, codec):
    topic = kafka.topic()
    keys = [None, b"", b"k", b"twelve bytes", b"more than twelve"]
    for at, value in enumerate(ODD):
        config = {"compression.codec": codec, "linger.ms": 50}
        kafka.produce(topic, [value], key=keys[at % 5], timestamp=1_700_000_000_000 + at, config=config)
    kafka.produce(topic, ODD, timestamp=1_700_000_000_000, config=config)
    source = source_of(kafka, topic, format="bytes", stop="latest", metadata=METADATA)
    for rows_max in (1, 7, 1000):
        rows = read(source, rows_max=rows_max)
        assert [row["value"] for row in rows] == ODD + ODD
        assert [row["key"] for row in rows] == [keys[at % 5] for at in range(len(ODD))] + [None] * len(ODD)
        assert [row["offset"] for row in rows] == list(range(2 * len(ODD)))
        assert {(row["topic"], row["partition"]) for row in rows} == {(topic, 0)}
        ms = [round(row["timestamp"].timestamp() * 1000) - 1_700_000_000_000 for row in rows]
        assert ms == [*range(len(ODD)), *[0] * len(ODD)]


def test_that_is_how_they_come(kafka: Kafka, way):
    topic = kafka.topic()
    kafka.produce(topic, as_json(1))
    taker, reader = taker_of(source_of(kafka, topic))
    assert type(reader._fetcher) is WAYS[way]
    assert values(taker.take(1)) == [1]
    reader.close()
    taker, reader = taker_of(source_of(kafka, topic, metadata=["headers"]))
    assert type(reader._fetcher) is fetched_records.ObjectFetcher, "only these have headers"
    reader.close()


def test_a_handle_that_belongs_to_another_object_is_not_taken(kafka: Kafka):
    from confluent_kafka import Consumer

    client = fetch_probe.probed_client()
    assert client is not None
    consumer = Consumer({"bootstrap.servers": kafka.servers, "group.id": "g"})
    handle = client.handle_at(id(consumer))
    assert handle is not None
    words = (ctypes.c_void_p * 4)()
    for impostor in (None, handle, handle + 1):
        words[object.__basicsize__ // 8] = impostor
        assert client.handle_at(ctypes.addressof(words)) is None
    consumer.close()


def test_bad_records_have_their_bytes_keys_and_times_and_the_good_ones_their_places(kafka: Kafka, way):
    topic = kafka.topic()
    there = [b'{"n": 1}', b"no", b'{"n":\n 3}', b"", None, b'{"n": 6}{"n": 7}', b'{"n": 8}']
    for at, value in enumerate(there):
        kafka.produce(topic, [value], key=b"k%d" % at, timestamp=1_700_000_000_000 + at)
    strict = pa.schema([pa.field("n", pa.int64(), nullable=False)])
    arguments: dict[str, Any] = {"schema": strict, "metadata": ["offset", "key", "timestamp"]}
    taker, reader = taker_of(source_of(kafka, topic, on_bad_record="drop", **arguments))
    taker.take(3)
    assert [(row["n"], row["offset"], row["key"]) for row in taker.rows] == [
        (1, 0, b"k0"),
        (3, 2, b"k2"),
        (8, 6, b"k6"),
    ]
    found = [(row["position"], row["bytes"], row["key"]) for row in taker.bad]
    assert found == [(at, there[at], b"k%d" % at) for at in (1, 3, 4, 5)]
    assert {row["timestamp"].microsecond for row in taker.bad} == {1000, 3000, 4000, 5000}
    assert {(row["source"], row["partition"]) for row in taker.bad} == {(topic, 0)}
    reader.close()
    failing, reader = taker_of(source_of(kafka, topic, **arguments))
    with pytest.raises(SchemaError, match="partition 0, offset 1: "):
        failing.take(2)
    reader.close()


def test_reading_ends_at_its_offset_and_goes_on_behind_gaps_and_transactions(kafka: Kafka, way):
    topic = kafka.topic()
    kafka.transaction(topic, as_json(*range(5)), commit=True)
    kafka.transaction(topic, as_json(-1, -2), commit=False)
    kafka.transaction(topic, as_json(5, 6), commit=True)
    source = source_of(kafka, topic, stop="latest")
    (split,) = all_splits(source)
    kafka.produce(topic, as_json(7, 8))
    assert values(read(source, split)) == [*range(7)], "what came later is left out, also of the same look"
    kafka.forget(topic, before=3)
    taker, reader = taker_of(source_of(kafka, topic, start={0: 1}, on_gap="skip"))
    assert values(taker.take(6)) == [3, 4, 5, 6, 7, 8]
    kafka.produce(topic, as_json(9))
    assert values(taker.take(7))[-1] == 9
    reader.close()


def test_what_was_fetched_waits_for_the_registry_and_may_never_be_read(kafka: Kafka, way, monkeypatch):
    topic = kafka.topic()
    kafka.produce(topic, as_json(*range(100)))
    taker, reader = taker_of(source_of(kafka, topic))
    parser = reader._source._parser
    with monkeypatch.context() as patch:

        def silent(records: Any, where: str) -> Any:
            if len(records):
                raise RegistrySilent("it sleeps")
            return parser.no_rows, []

        patch.setattr(parser, "rows", silent)
        until("records are kept", lambda: taker.look() or reader._kept is not None)
    assert values(taker.take(100)) == [*range(100)]
    monkeypatch.setattr(parser, "rows", silent)
    kafka.produce(topic, as_json(100))
    until("records are kept", lambda: taker.look() or reader._kept is not None)
    reader.close()


def test_what_was_read_takes_no_memory(kafka: Kafka, way):
    topic = kafka.topic()
    for _ in range(15):
        kafka.produce(topic, [b'{"n": 1, "t": "%s"}' % (b"x" * 2000)] * 10_000, config={"linger.ms": 20})
    _, reader = taker_of(source_of(kafka, topic))
    rows = 0

    def read_until(count: int) -> int:
        """How much memory the process has then."""

        def enough() -> bool:
            nonlocal rows
            got = reader.read(1000)
            assert got is not None
            rows += got[0].num_rows
            return rows >= count

        until(f"{count} rows", enough)
        return psutil.Process().memory_info().rss

    before = read_until(50_000)
    assert read_until(150_000) - before < 100e6, "twice that was read in between"
    reader.close()
