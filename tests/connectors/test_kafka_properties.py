"""Properties of Kafka's ends over hostile records, against a real broker: both ways of reading give what was written, and
what a sink writes is read back.
"""

from __future__ import annotations

import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_kafka_exactly_once import HEADERS, Staging
from test_kafka_sink import write
from test_kafka_source import read, source_of

from kafka_broker import Kafka
from midstream.connectors.kafka import fetch_probe
from midstream.connectors.kafka.kafka_sink import KafkaSink
from waiting import until

FEW = settings(
    max_examples=5,
    phases=[Phase.explicit, Phase.generate],  # each example needs a topic: shrinking one would need hundreds
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
METADATA = ("topic", "partition", "offset", "timestamp", "key")
PARTITIONS = 2
"""Of each topic."""

contents = st.none() | st.binary(max_size=16) | st.sampled_from([b"", b"\0" * 12, b"\xff" * 13, b"x" * 300_000])
names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5) | st.just("twice")
headers = st.lists(st.tuples(names, st.none() | st.binary(max_size=16)), max_size=4)
times = st.sampled_from([1, 999, 1_700_000_000_123, 253_402_300_799_999])
record = st.tuples(st.integers(0, PARTITIONS - 1), contents, contents, headers, times)
step = st.tuples(st.sampled_from(["plain", "commit", "commit", "abort"]), st.lists(record, max_size=12))
configs = st.fixed_dictionaries(
    {
        "message_timestamp_type": st.sampled_from(["CreateTime", "CreateTime", "LogAppendTime"]),
        "compression_type": st.sampled_from(["producer", "gzip", "lz4", "snappy", "zstd"]),
    }
)


def produce(kafka: Kafka, topic: str, steps: list[Any]) -> list[dict[str, Any]]:
    """Write plain records and transactions; return what a reader of committed records is to find."""
    servers = {"bootstrap.servers": kafka.servers, "linger.ms": 2}
    plain, transactional = Producer(servers), Producer({**servers, "transactional.id": topic})
    transactional.init_transactions(120)
    ends = [0] * PARTITIONS
    wanted = []
    for kind, records in steps:
        producer = plain if kind == "plain" else transactional
        if kind != "plain":
            transactional.begin_transaction()
        for partition, value, key, its_headers, ms in records:
            producer.produce(topic, value, key, partition, headers=its_headers, timestamp=ms)
            if kind != "abort":
                place = {"topic": topic, "partition": partition, "offset": ends[partition], "timestamp": ms}
                named = [{"name": name, "value": content} for name, content in its_headers]
                wanted.append({"value": value, "key": key, "headers": named, **place})
            ends[partition] += 1
        assert producer.flush(120) == 0
        if kind != "plain":
            (transactional.commit_transaction if kind == "commit" else transactional.abort_transaction)(120)
            for partition in {partition for partition, *_ in records}:
                ends[partition] += 1  # the control record
            # The broker answers before it writes the control records: a plain record could still get in between.
            until("the transaction is over", lambda: _ends(kafka, topic) == ends)
    assert _ends(kafka, topic) == ends
    return sorted(wanted, key=lambda row: (row["partition"], row["offset"]))


def _ends(kafka: Kafka, topic: str) -> list[int]:
    with closing(source_of(kafka, topic, format="bytes")) as source:
        places = [(topic, partition) for partition in range(PARTITIONS)]
        return [*source._cluster.offsets(places, -1).values()]


def both_ways(kafka: Kafka, topic: str, rows_max: int, **arguments: Any) -> list[list[dict[str, Any]]]:
    """What is read from memory, as Python objects, and as objects with headers; times in milliseconds."""
    found = []
    for way in ("memory", "objects", "headers"):
        metadata = [*METADATA, "headers"] if way == "headers" else METADATA
        with pytest.MonkeyPatch.context() as patch:
            if way == "objects":
                patch.setattr(fetch_probe, "probed_client", lambda: None)
            else:
                assert fetch_probe.probed_client() is not None
            source = source_of(kafka, topic, format="bytes", stop="latest", metadata=metadata, **arguments)
            found.append(read(source, rows_max=rows_max))
    for row in (row for rows in found for row in rows):
        row["timestamp"] = int(row["timestamp"].timestamp() * 1000 + 0.5)
    return found


def without_headers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "headers"} for row in rows]


@FEW
@given(
    steps=st.lists(step, min_size=1, max_size=5), config=configs, rows_max=st.sampled_from([1, 3, 1000]), data=st.data()
)
def test_both_ways_give_the_committed_records_as_they_were_written(kafka, steps, config, rows_max, data):
    topic = kafka.topic(uuid.uuid4().hex, partitions=PARTITIONS, message_timestamp_after_max_ms=2**63 - 1, **config)
    wanted = produce(kafka, topic, steps)
    from_memory, as_objects, with_headers = both_ways(kafka, topic, rows_max)
    assert from_memory == as_objects == without_headers(with_headers)
    if config["message_timestamp_type"] == "LogAppendTime":
        assert all(row["timestamp"] > 1_700_000_000_123 for row in from_memory)
        wanted = [{**row, "timestamp": found["timestamp"]} for row, found in zip(wanted, from_memory, strict=True)]
    assert with_headers == wanted
    ends = _ends(kafka, topic)
    start = {partition: data.draw(st.integers(0, end), f"start in {partition}") for partition, end in enumerate(ends)}
    later = [row for row in wanted if row["offset"] >= start[row["partition"]]]
    for rows in both_ways(kafka, topic, rows_max, start=start):
        assert without_headers(rows) == without_headers(later)


def test_both_ways_give_what_compaction_has_left(kafka):
    topic = kafka.topic(
        partitions=PARTITIONS,
        cleanup_policy="compact",
        segment_ms=1,
        min_cleanable_dirty_ratio=0,
        delete_retention_ms=0,
    )
    for n in range(30):
        kafka.produce(topic, [b"%d" % n], key=b"k%d" % (n % 3), partition=0)
    kafka.produce(topic, [b"last"], key=b"k0", partition=0)

    def compacted() -> list[list[dict[str, Any]]] | None:
        """What is read in all ways while the broker removes nothing, once it has removed most."""
        before, found, after = offsets(), both_ways(kafka, topic, 4), offsets()
        return found if before == after and len(before) < 15 else None

    def offsets() -> list[int]:
        return [message.offset() for message in kafka.read(topic)]

    from_memory, as_objects, with_headers = until("the broker has compacted the topic", compacted)
    assert from_memory == as_objects == without_headers(with_headers)
    assert {row["key"]: row["value"] for row in from_memory} == {b"k0": b"last", b"k1": b"28", b"k2": b"29"}


# ---- what a sink writes ----

row = st.fixed_dictionaries(
    {
        "value": contents,
        "key": contents,
        "headers": st.lists(
            st.fixed_dictionaries({"name": names, "value": st.none() | st.binary(max_size=16)}), max_size=3
        ),
        "partition": st.integers(0, PARTITIONS - 1),
    }
)
SCHEMA = pa.schema(
    [("value", pa.large_binary()), ("key", pa.large_binary()), ("headers", HEADERS), ("partition", pa.int32())]
)


def written_by(kafka: Kafka, batches: list[pa.RecordBatch], directory: Path | None, **arguments: Any) -> str:
    """The topic in which a sink has written: exactly once by way of a directory, at least once without."""
    topic = kafka.topic(uuid.uuid4().hex, partitions=PARTITIONS)
    if directory is None:
        write(KafkaSink(kafka.servers, topic, guarantee="at_least_once", **arguments), *batches)
        return topic
    staging = Staging(kafka.servers, topic, directory, **arguments)
    staging.sink.validate(batches[0].schema, restoring=False)
    staging.committer().commit(1, staging.prepared(staging.writer(batches[0].schema), 1, *batches))
    staging.close()
    return topic


@FEW
@given(
    rows=st.lists(row, min_size=1, max_size=15),
    cut=st.integers(0, 15),
    skipped=st.integers(0, 2),
    is_once=st.booleans(),
)
def test_what_a_sink_writes_is_read_back_equal(kafka, tmp_path_factory, rows, cut, skipped, is_once):
    whole = pa.RecordBatch.from_pylist([rows[0]] * skipped + rows, SCHEMA).slice(skipped)
    batches = [whole.slice(0, cut), whole.slice(cut)]
    directory = tmp_path_factory.mktemp("staged") if is_once else None
    topic = written_by(kafka, batches, directory, format="bytes", key="key", headers="headers", partition="partition")
    wanted = [each for partition in range(PARTITIONS) for each in rows if each["partition"] == partition]

    def visible() -> list[dict[str, Any]] | None:
        found = read(source_of(kafka, topic, format="bytes", stop="latest", metadata=["key", "headers", "partition"]))
        return found if len(found) >= len(wanted) else None

    # a commit is answered before each partition has the mark that makes its records visible
    assert until("the rows of all partitions", visible) == wanted


columns = st.fixed_dictionaries(
    {
        "i": st.none() | st.integers(-(2**63), 2**63 - 1),
        "u": st.none() | st.integers(0, 2**64 - 1),
        "f": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "t": st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        "b": st.none() | st.booleans(),
        "at": st.none() | st.datetimes().map(lambda at: at.replace(fold=0)),
        "l": st.none() | st.lists(st.none() | st.integers(-5, 5), max_size=3),
    }
)
types: dict[str, Any] = {
    "i": pa.int64(),
    "u": pa.uint64(),
    "f": pa.float64(),
    "t": pa.large_string(),
    "b": pa.bool_(),
    "at": pa.timestamp("us"),
    "l": pa.large_list(pa.int64()),
}
JSON_SCHEMA = pa.schema(types)


@FEW
@given(rows=st.lists(columns, min_size=1, max_size=15), is_once=st.booleans())
def test_rows_that_a_sink_writes_as_json_are_read_back_equal(kafka, tmp_path_factory, rows, is_once):
    batch = pa.RecordBatch.from_pylist(rows, JSON_SCHEMA)
    topic = written_by(kafka, [batch], tmp_path_factory.mktemp("staged") if is_once else None)
    found = read(source_of(kafka, topic, schema=JSON_SCHEMA, stop="latest"))
    in_any_order = [sorted(repr([row[name] for name in JSON_SCHEMA.names]) for row in each) for each in (found, rows)]
    assert in_any_order[0] == in_any_order[1]
