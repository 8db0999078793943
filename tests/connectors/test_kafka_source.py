"""Kafka as a source, against a real broker: what is read, from where to where, and what is said when it cannot be."""

from __future__ import annotations

import os
import pickle
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from confluent_kafka import Producer, Uuid
from connector_worlds import all_splits, values

from kafka_broker import BACK_SOON, PASSWORD, USER, Broker, Kafka
from machine import limit_s
from midstream import ConfigError, SchemaError, StorageError
from midstream.connectors.kafka.cluster import Topic, are_two_topics
from midstream.connectors.kafka.kafka_source import KafkaSource
from midstream.engine.operators.source_api import Discovery, DiscoveryContext, Split, SplitReader
from waiting import until

SCHEMA = pa.schema([("n", pa.int64())])


def as_json(*numbers: int) -> list[bytes | None]:
    return [b'{"n": %d}' % n for n in numbers]


def source_of(kafka: Kafka, topics: Any, **arguments: Any) -> KafkaSource:
    arguments.setdefault("schema", SCHEMA if arguments.get("format", "json") == "json" else None)
    return KafkaSource(kafka.servers, topics, **arguments)


def find(source: KafkaSource, position: bytes | None = None) -> Discovery:
    return source.discover(position, DiscoveryContext(uid="in", parallelism=1, storage=None))


class Taker:
    """Reads one split, as a subtask does: whoever has no rows for now is asked again."""

    def __init__(self, source: KafkaSource, split: Split) -> None:
        self.reader: SplitReader = pickle.loads(pickle.dumps(source)).open_split(split)
        self.offset = split.offset
        self.rows: list[dict[str, Any]] = []
        self.bad: list[dict[str, Any]] = []
        self.has_ended = False

    def look(self, rows_max: int = 1000) -> bool:
        got = self.reader.read(rows_max)
        if got is None:
            self.has_ended = True
        else:
            batch, self.offset = got
            self.rows += batch.to_pylist()
            bad = self.reader.bad_records()
            self.bad += [] if bad is None else bad.rows.to_pylist()
        return self.has_ended

    def take(self, count: int) -> list[dict[str, Any]]:
        def enough() -> bool:
            return len(self.rows) >= count or self.look()

        until(f"{count} rows", enough)
        return self.rows


def read(source: KafkaSource, split: Split | None = None, **more: Any) -> list[dict[str, Any]]:
    """All rows of a bounded source, or of one split of it."""
    rows: list[dict[str, Any]] = []
    for each in all_splits(source) if split is None else [split]:
        taker = Taker(source, each)
        until("the end of the split", lambda taker=taker: taker.look(**more))  # type: ignore[misc]  # mypy infers no lambda with defaults
        taker.reader.close()
        rows += taker.rows
    source.close()
    return rows


def test_all_records_of_all_partitions_are_read_once_in_their_order(kafka):
    topic = kafka.topic(partitions=3)
    for partition in range(3):
        kafka.produce(topic, as_json(*range(1000)), partition=partition)
    rows = read(source_of(kafka, topic, stop="latest", metadata=["partition", "offset"]), rows_max=77)
    assert [(row["partition"], row["offset"], row["n"]) for row in rows] == [
        (p, n, n) for p in range(3) for n in range(1000)
    ]


def test_metadata_says_where_when_and_how_a_record_came(kafka):
    topic = kafka.topic()
    headers = [("trace", b"\x00\xff"), ("empty", None)]
    kafka.produce(topic, [b"v"], key=b"k", headers=headers, timestamp=1_700_000_000_123)
    kafka.produce(topic, [None])
    wanted = {"topic": "t", "partition": "p", "offset": "o", "timestamp": "at", "key": "k", "headers": "h"}
    first, second = read(source_of(kafka, topic, format="bytes", stop="latest", metadata=wanted))
    assert first["at"] == datetime(2023, 11, 14, 22, 13, 20, 123000, tzinfo=UTC)
    del first["at"], second["at"]
    named = [{"name": "trace", "value": b"\x00\xff"}, {"name": "empty", "value": None}]
    assert first == {"value": b"v", "t": topic, "p": 0, "o": 0, "k": b"k", "h": named}
    assert second == {"value": None, "t": topic, "p": 0, "o": 1, "k": None, "h": []}


def test_a_record_without_a_value_is_a_row_of_nulls_unless_a_column_must_have_a_value(kafka):
    topic = kafka.topic()
    kafka.produce(topic, [b'{"n": 1}', None, b"{}"])
    assert values(read(source_of(kafka, topic, stop="latest"))) == [1, None, None]
    strict = pa.schema([pa.field("n", pa.int64(), nullable=False)])
    with pytest.raises(SchemaError, match=r"partition 0, offset 1: .*column 'n' has no value"):
        read(source_of(kafka, topic, stop="latest", schema=strict))
    assert values(read(source_of(kafka, topic, stop="latest", schema=strict, on_bad_record="drop"))) == [1]


def test_only_committed_records_are_read_and_offsets_without_a_record_hold_nothing_up(kafka):
    topic = kafka.topic()
    kafka.transaction(topic, as_json(1, 2), commit=True)
    kafka.transaction(topic, as_json(3, 4), commit=False)
    source = source_of(kafka, topic, stop="latest")
    (split,) = all_splits(source)
    taker = Taker(source, split)
    until("the end, which is an aborted transaction", taker.look)
    assert values(taker.rows) == [1, 2]
    taker.reader.close()
    endless = source_of(kafka, topic)
    taker = Taker(endless, all_splits(endless)[0])
    until("it stands behind the aborted transaction", lambda: taker.look() or taker.offset == 6)
    kafka.produce(topic, as_json(5))
    assert values(taker.take(3)) == [1, 2, 5]
    taker.reader.close()


def test_reading_goes_on_at_the_offset_of_a_checkpoint(kafka):
    topic = kafka.topic()
    kafka.produce(topic, as_json(*range(20)))
    source = source_of(kafka, topic)
    taker = Taker(source, all_splits(source)[0])
    until("seven rows", lambda: taker.look(rows_max=7) or taker.rows)
    taker.reader.close()
    split = Split("x", all_splits(source)[0].payload, taker.offset)
    kafka.forget(topic, before=taker.offset)  # what was read may go
    again = Taker(source, split)
    assert values(again.take(20 - len(taker.rows))) == list(range(len(taker.rows), 20))
    again.reader.close()
    source.close()


def test_where_it_starts_and_where_it_stops(kafka):
    topic = kafka.topic(partitions=2)
    noon = datetime(2024, 5, 1, 12, tzinfo=UTC)
    for n in range(6):
        at_ms = int((noon + timedelta(minutes=n)).timestamp() * 1000)
        kafka.produce(topic, as_json(n), partition=0, timestamp=at_ms)
        kafka.produce(topic, as_json(10 + n), partition=1, timestamp=at_ms)

    def numbers(**arguments: Any) -> list[int]:
        return values(read(source_of(kafka, topic, **{"stop": "latest", **arguments})))

    minute = timedelta(minutes=1)
    assert numbers(start={0: 4, 1: 5}) == [4, 5, 15]
    assert numbers(start="latest") == []
    assert numbers(start=noon + 4 * minute) == [4, 5, 14, 15]
    assert numbers(start=noon + 3.5 * minute, stop=noon + 5 * minute) == [4, 14]
    assert numbers(start=noon + 60 * minute) == []
    group = {"group.id": f"{topic}-group"}
    source = source_of(kafka, topic, options=group)
    position = find(source).position
    payloads = {split.id: split.payload for split in all_splits(source)}
    unfinished = [Split(f"{topic}:0", payloads[f"{topic}:0"], 3)]
    source.checkpoint_completed(position, unfinished)
    source.close()
    assert numbers(start="group", options=group) == [3, 4, 5, 10, 11, 12, 13, 14, 15]


def test_records_that_come_while_it_reads_are_read_and_latest_is_remembered(kafka):
    topic = kafka.topic()
    kafka.produce(topic, as_json(0))
    source = source_of(kafka, topic, start="latest")
    (split,) = until(
        "the partition is discovered", lambda: all_splits(source)
    )  # a loaded broker may not answer at first
    kafka.produce(topic, as_json(1))
    again = until("the partition is discovered", lambda: all_splits(source))
    assert again == [split], "asked again, after a restart, it is the same"
    taker = Taker(source, split)
    assert values(taker.take(1)) == [1]
    kafka.produce(topic, as_json(2))
    assert values(taker.take(2)) == [1, 2]
    taker.reader.close()
    source.close()


def test_new_partitions_and_topics_of_a_pattern_are_found_and_read_from_their_beginning(kafka):
    topic = kafka.topic("pattern-a")
    source = source_of(kafka, re.compile(re.escape(topic[:-1]) + "[ab]"), start="latest")
    first = find(source)
    assert [split.id for split in first.splits] == [f"{topic}:0"] and not first.exhausted
    assert find(source, first.position).splits == ()
    kafka.grow(topic, 3)
    other = kafka.topic("pattern-b")
    kafka.topic("pattern-c")
    kafka.produce(topic, as_json(7), partition=2)
    second = find(source, first.position)
    assert sorted(split.id for split in second.splits) == [f"{topic}:1", f"{topic}:2", f"{other}:0"]
    again = find(source_of(kafka, re.compile(re.escape(topic[:-1]) + "[ab]"), start="latest"), first.position)
    assert again == second, "another driver finds the same from there"
    taker = Taker(source, next(split for split in second.splits if split.id.endswith(":2")))
    assert values(taker.take(1)) == [7]
    taker.reader.close()
    source.close()


def test_an_offset_that_is_gone_fails_and_names_the_option_that_goes_on_without(kafka):
    topic = kafka.topic()
    kafka.produce(topic, as_json(*range(10)))
    source = source_of(kafka, topic, start={0: 2})
    (split,) = all_splits(source)
    kafka.forget(topic, before=6)
    failing = Taker(source, split)
    expected = (
        rf"topic '{topic}', partition 0: reading must resume at offset 2, and the broker has 6 to 9: 4 offsets .*"
        r"on_gap='skip'"
    )
    with pytest.raises(ConfigError, match=expected):
        failing.take(1)
    failing.reader.close()
    skipping = Taker(source_of(kafka, topic, on_gap="skip"), split)
    assert values(skipping.take(4)) == [6, 7, 8, 9]
    skipping.reader.close()
    beyond = Taker(source_of(kafka, topic, on_gap="skip"), Split(split.id, split.payload, 1000))
    with pytest.raises(ConfigError, match="at offset 1000, and the broker has 6 to 9; the topic was recreated"):
        beyond.take(1)
    beyond.reader.close()
    source.close()


def test_a_topic_that_is_deleted_is_named_at_the_next_look(kafka):
    topic = kafka.topic()
    for topics in (topic, re.compile(topic)):
        source = source_of(kafka, topics)
        position = find(source).position
        kafka.delete(topic)
        with pytest.raises(ConfigError, match=f"topic '{topic}' has disappeared since the job began to read it"):
            find(source, position)
        source.close()
        kafka.topic()


def test_a_topic_that_is_made_anew_is_not_taken_for_the_old_one(kafka):
    topic = kafka.topic()
    source = source_of(kafka, topic)
    found = find(source)
    kafka.delete(topic)
    kafka.topic()
    with pytest.raises(ConfigError, match=f"topic '{topic}' was deleted and recreated"):
        find(source_of(kafka, topic), found.position)
    source.close()


def test_ids_that_brokers_do_not_give_tell_no_topics_apart():
    none = str(Uuid(0, 0))
    assert are_two_topics("cUlLlJfVQpK4uiyhoCUpYg", "lVJfVQpK4uiyhoCUpYgcUl")
    for before, now in (("x", "x"), (none, none), (none, "x"), ("x", none)):
        assert not are_two_topics(before, now), (before, now)


def resumed(source: KafkaSource) -> KafkaSource:
    """As on the slots of a job that resumes."""
    source.prepare("in", None, restoring=True)
    return source


def test_a_live_job_that_resumes_with_a_stop_ends_there(kafka):
    topic = kafka.topic(partitions=2)
    noon = datetime(2024, 5, 1, 12, tzinfo=UTC)
    noon_ms = int(noon.timestamp() * 1000)
    for n in range(6):
        kafka.produce(topic, as_json(n), partition=0, timestamp=noon_ms + n)
    live = find(source_of(kafka, topic))
    first, second = live.splits
    kafka.grow(topic, 3)
    kafka.produce(topic, as_json(20, 21), partition=2, timestamp=noon_ms)
    for stop, ends, new in (("latest", 6, [20, 21]), (noon + timedelta(milliseconds=4), 4, [20, 21]), (noon, 0, [])):
        source = resumed(source_of(kafka, topic, stop=stop))
        found = find(source, live.position)
        assert found.exhausted
        assert [value for split in found.splits for value in values(read(source, split))] == new
        for offset in (2, 5):  # 5 is after one of the stops
            begun = source.begin_split(msgspec.structs.replace(first, offset=offset))
            assert values(read(source, begun)) == [*range(offset, ends)]
        assert read(source, source.begin_split(second)) == [], "it has no records, and ends"
    source = resumed(source_of(kafka, topic, stop="latest"))
    kafka.produce(topic, as_json(99), partition=0)
    kafka.grow(topic, 4)
    kafka.produce(topic, as_json(99), partition=3)
    assert [split.id for split in find(source, live.position).splits] == [f"{topic}:2"]
    begun = source.begin_split(first)
    assert values(read(source, begun)) == [*range(6)], "what came after the resume is not read"
    again = resumed(source_of(kafka, topic, stop="latest"))
    assert again.begin_split(begun) == begun
    assert values(read(again, begun)) == [*range(6)], "a later resume keeps the end of the first one"
    live_again = resumed(source_of(kafka, topic))
    with pytest.raises(ConfigError, match="the checkpoint is of a job with stop="):
        live_again.open_split(live_again.begin_split(begun))
    live_again.close()


def test_a_job_that_had_a_stop_keeps_it_and_does_not_resume_without_one(kafka):
    topic = kafka.topic()
    kafka.produce(topic, as_json(0, 1, 2))
    (split,) = find(source_of(kafka, topic, stop="latest")).splits
    kafka.produce(topic, as_json(3, 4))
    begun = msgspec.structs.replace(split, offset=1)
    assert values(read(resumed(source_of(kafka, topic, stop="latest")), begun)) == [1, 2]
    source = resumed(source_of(kafka, topic))
    with pytest.raises(
        ConfigError, match=rf"with stop=, which ends topic '{topic}', partition 0 at offset 3 .* --fresh"
    ):
        source.open_split(begun)
    source.close()


def test_a_start_after_the_end_is_refused_where_it_would_leave_nothing_to_read(kafka):
    topic = kafka.topic(partitions=2)
    kafka.produce(topic, as_json(0, 1), partition=1)
    wrong = refusal(source_of(kafka, topic, start={0: 0, 1: 3}, stop="latest"))
    assert "start= has offset 3 for partition 1, whose committed records end before offset 2" in wrong
    source = source_of(kafka, topic, start={0: 0, 1: 2}, stop="latest")
    source.prepare("in", None, restoring=False)
    assert read(source) == []


@pytest.mark.parametrize(
    "stop", [None, "latest", datetime(2024, 5, 1, 12, tzinfo=UTC)], ids=["never", "latest", "time"]
)
def test_an_offset_after_the_end_is_refused_whatever_it_comes_from(kafka, stop):
    topic = kafka.topic(partitions=2)
    kafka.produce(topic, as_json(0, 1), partition=1)
    refused = refusal(source_of(kafka, topic, start={0: 0, 1: 3}, stop=stop))
    assert "start= has offset 3 for partition 1, whose" in refused and "records end before offset 2" in refused
    group = {"group.id": f"{topic}-group"}
    behind = source_of(kafka, topic, start="group", stop=stop, options=group)
    for offset, is_there in ((1, True), (2, True), (3, False), (2**40, False)):
        behind._cluster.commit(group["group.id"], {(topic, 1): offset})
        if is_there:
            behind.prepare("in", None, restoring=False)
            continue
        refused = refusal(behind)
        assert f"group '{topic}-group' has committed offset {offset} of topic '{topic}', partition 1" in refused
        assert "which ends before offset 2: " in refused and "Reset the group's offsets" in refused
        behind.prepare("in", None, restoring=True)  # a checkpoint has offsets of its own
    behind.close()


def test_a_group_may_have_read_records_that_are_not_committed_yet(kafka):
    topic = kafka.topic()
    producer = Producer({"bootstrap.servers": kafka.servers, "transactional.id": topic})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"{}")
    assert producer.flush(30) == 0
    group = {"group.id": f"{topic}-group"}
    source = source_of(kafka, topic, start="group", stop="latest", options=group)
    source._cluster.commit(group["group.id"], {(topic, 0): 1})
    source.prepare("in", None, restoring=False)
    assert read(source) == []
    producer.abort_transaction(30)


BAD = {
    "not JSON": (b"nonsense", "not an object"),
    "nothing": (b"", "not an object"),
    "a list": (b"[1]", "not an object"),
    "two objects": (b'{"n": 1}{"n": 2}', "more than one value"),
    "half of an object": (b'{"n": 1', "not an object"),
    "an object that ends too late": (b'{"n": {"x": 1}', "offset 1: .*parse error|offset 1: .*JSON"),
    "a text": (b'{"n": "one"}', "n"),
    "a fraction": (b'{"n": 1.5}', "n"),
    "a line end within text": (b'{"n": 1, "t": "a\nb}"}', "JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_fails_with_its_place_or_is_left_out(kafka, name):
    record, text = BAD[name]
    topic = kafka.topic()
    kafka.produce(topic, [b'{"n": 1}', record, b' {"n":\r\n 3}\n', record, b'{"n": 4}'])
    with pytest.raises(SchemaError, match=rf"topic '{topic}', partition 0, offset 1: .*on_bad_record='drop'") as error:
        read(source_of(kafka, topic, stop="latest"))
    assert re.search(text, str(error.value))
    dropping = source_of(kafka, topic, stop="latest", on_bad_record="drop", metadata=["offset"])
    assert read(dropping) == [{"n": 1, "offset": 0}, {"n": 3, "offset": 2}, {"n": 4, "offset": 4}]
    (split,) = all_splits(dropping)
    taker = Taker(dropping, split)
    taker.take(3)
    found = [row for row in taker.bad if (row["source"], row["partition"]) == (topic, 0)]
    assert [(row["position"], row["bytes"]) for row in found] == [(1, record), (3, record)]
    assert all(re.search(text.split("|")[-1].removeprefix("offset 1: .*"), row["error"]) for row in found)
    taker.reader.close()
    dropping.close()


def test_neighbours_that_are_bad_in_opposite_ways_do_not_make_up_for_each_other(kafka):
    """Together they would be as many values as there are records."""
    topic = kafka.topic()
    kafka.produce(topic, [b'{"n": 1}{"n": 2}', b" ", b'{"n": 3', b'}{"n": 4}{"n": 5}', b'{"n": 6}'])
    assert values(read(source_of(kafka, topic, stop="latest", on_bad_record="drop"))) == [6]


def test_text_must_be_utf_8(kafka):
    topic = kafka.topic()
    kafka.produce(topic, ["é".encode(), b"\xff", None])
    assert values(read(source_of(kafka, topic, format="bytes", stop="latest")), "value") == [
        "é".encode(),
        b"\xff",
        None,
    ]
    with pytest.raises(SchemaError, match="offset 1: the record's value is not text"):
        read(source_of(kafka, topic, format="text", stop="latest"))
    dropping = source_of(kafka, topic, format="text", stop="latest", on_bad_record="drop")
    assert values(read(dropping), "value") == ["é", None]


# ---- what is refused ----------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schema": None}, "format='json' needs schema="),
        ({"format": "bytes", "schema": SCHEMA}, "schema= requires json, csv, avro or debezium"),
        ({"format": "xml"}, "format 'xml' is not one of json, csv, avro, protobuf, debezium, bytes, text"),
        ({"bad_records_max": (1, 10)}, "bad_records_max= requires on_bad_record='drop'"),
        ({"start": "beginning"}, "start 'beginning' is not 'earliest'"),
        ({"start": datetime(2024, 1, 1)}, "a datetime with a time zone"),
        ({"start": "group"}, "needs the group: options="),
        ({"start": {0: -1}}, "not a dict of partitions to offsets"),
        ({"stop": "earliest"}, "stop 'earliest' is not 'latest'"),
        ({"metadata": ["size"]}, "metadata 'size' is not one of topic, partition"),
        ({"metadata": {"offset": "n"}}, "more than one column 'n'"),
        ({"metadata": "offset"}, "give a list"),
        ({"on_gap": "ignore"}, "on_gap 'ignore'"),
        ({"on_bad_record": "ignore"}, "on_bad_record 'ignore'"),
        ({"options": {"enable.auto.commit": True}}, "'enable.auto.commit' cannot be set: offsets are in"),
        ({"options": {"auto.offset.reset": "earliest"}}, "'auto.offset.reset' cannot be set: use start="),
        (
            {"options": {"bootstrap.servers": "x"}},
            "'bootstrap.servers' cannot be set: give it as servers=",
        ),
        ({"options": {"stats_cb": print}}, "'stats_cb' is a builtin_function_or_method"),
        ({"rows_per_s": 0}, "rows_per_s 0 is not a positive number"),
    ],
    ids=lambda value: None if isinstance(value, dict) else re.sub(r"\W+", "-", value)[:40],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises((ConfigError, SchemaError), match=re.escape(message)):
        KafkaSource("127.0.0.1:1", "t", **{"schema": SCHEMA, **arguments})


def test_topics_must_be_names(kafka):
    for topics in ("", [], ["a", "a"], [1]):
        with pytest.raises(ConfigError, match="topics="):
            KafkaSource(kafka.servers, topics, schema=SCHEMA)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(ConfigError, match="is for a single topic"):
        KafkaSource(kafka.servers, ["a", "b"], schema=SCHEMA, start={0: 1})


def refusal(source: KafkaSource) -> str:
    try:
        with pytest.raises((ConfigError, StorageError)) as error:
            source.prepare("in", None, restoring=False)
        return str(error.value)
    finally:
        source.close()


def test_what_the_cluster_has_not_is_said_when_the_job_starts(kafka):
    assert "there is no topic 'no-such-topic'" in refusal(source_of(kafka, "no-such-topic"))
    assert "'a b' is not a valid topic name" in refusal(source_of(kafka, "a b"))
    assert "no topic matches" in refusal(source_of(kafka, re.compile("nothing.*"), stop="latest"))
    topic = kafka.topic(partitions=2)
    assert "offsets for the partitions 0" in refusal(source_of(kafka, topic, start={0: 1}))
    assert 'No such configuration property: "compresion"' in refusal(
        source_of(kafka, topic, options={"compresion": "x"})
    )
    assert "no-such-topic" not in kafka.admin.list_topics(timeout=limit_s(10)).topics, "asking makes none"


def test_a_cluster_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr("midstream.connectors.kafka.cluster.ANSWER_S", 1.0)
    message = refusal(KafkaSource("127.0.0.1:1", "t", schema=SCHEMA))
    assert "no answer from 127.0.0.1:1" in message


# ---- secrets ------------------------------------------------------------------


def test_secrets_are_looked_up_where_it_connects_and_shown_nowhere(monkeypatch, tmp_path):
    (tmp_path / "password").write_text("from-file\n")
    options = {
        "sasl.username": "env:KAFKA_USER",
        "sasl.password": f"file:{tmp_path / 'password'}",
        "ssl.key.password": "literal-secret",
    }
    source = KafkaSource("127.0.0.1:1", "t", schema=SCHEMA, options=options)
    with pytest.raises(ConfigError, match=r"'sasl.username' refers to the environment variable 'KAFKA_USER'"):
        source._connection.config({})
    monkeypatch.setenv("KAFKA_USER", "from-env")
    config = source._connection.config({})
    assert (config["sasl.username"], config["sasl.password"]) == ("from-env", "from-file")
    assert b"from-env" not in pickle.dumps(source) and b"from-file" not in pickle.dumps(source)
    assert "secret" not in f"{source._connection!r}"
    position = msgspec_of(source)
    assert b"secret" not in position and b"sasl" not in position
    os.remove(tmp_path / "password")
    with pytest.raises(ConfigError, match=r"'sasl.password' refers to the file"):
        source._connection.config({})


def msgspec_of(source: KafkaSource) -> bytes:
    """All that a checkpoint has of a source: the position, and splits."""
    source._first = ({"t": Topic("x", 1)}, [])
    found = find(source)
    return found.position


def secured(password: str) -> dict[str, str]:
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": USER,
        "sasl.password": password,
    }


def test_a_wrong_password_is_said_to_be_one(kafka_broker: Broker, monkeypatch):
    monkeypatch.setattr("midstream.connectors.kafka.cluster.ANSWER_S", 3.0)
    options = secured("not-the-password")
    message = refusal(KafkaSource(kafka_broker.secured, "t", schema=SCHEMA, options=options))
    assert f"{kafka_broker.secured} refuses the user" in message and "uthentication" in message
    assert "not-the-password" not in message


def test_rights_that_are_missing_are_named_and_those_of_a_group_are_not_needed(kafka_broker: Broker):
    kafka = Kafka(kafka_broker.servers)
    topic, other = kafka.topic("mine"), kafka.topic("others")
    kafka.allow(topic, "DESCRIBE")
    kafka.produce(topic, as_json(1))

    def source(*topics: str) -> KafkaSource:
        return KafkaSource(kafka_broker.secured, topics, schema=SCHEMA, options=secured(PASSWORD), stop="latest")

    def rows() -> list[int] | None:
        try:
            return values(read(source(topic)))
        except ConfigError:
            return None

    # a broker knows of new rights a moment later
    until("the right to describe", lambda: f"topic '{other}' is not permitted: " in refusal(source(topic, other)))
    with pytest.raises(ConfigError, match=f"topic '{topic}', partition 0: cannot be read"):
        read(source(topic))
    kafka.allow(topic, "READ")
    assert until("the right to read", rows) == [1]


# ---- brokers that go away -----------------------------------------------------


@pytest.mark.skipif("KAFKA_BOOTSTRAP" in os.environ, reason="KAFKA_BOOTSTRAP names a broker that tests may not stop")
def test_a_broker_that_is_gone_for_a_while_is_waited_for_with_a_word(kafka, kafka_broker: Broker, caplog, monkeypatch):
    monkeypatch.setattr("midstream.connectors.kafka.client._SILENCE_S", 0.5)
    monkeypatch.setattr("midstream.connectors.kafka.kafka_source._POLL_INTERVAL_S", 0.5)
    topic = kafka.topic()
    kafka.produce(topic, as_json(1))
    source = source_of(kafka, topic, options=BACK_SOON)
    found = find(source)
    taker = Taker(source, found.splits[0])
    assert values(taker.take(1)) == [1]
    kafka_broker.stop(crash=True)
    try:
        monkeypatch.setattr("midstream.connectors.kafka.cluster.ANSWER_S", 1.0)

        def says(text: str) -> bool:
            taker.look()
            return any(text in record.getMessage() for record in caplog.records)

        until("it says so", lambda: says(f"{kafka.servers} does not answer; waiting"))
        noise = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
        assert len(noise) == 1, "each connection that fails is not worth a line"
        assert find(source, found.position) == Discovery((), found.position, exhausted=False)
    finally:
        kafka_broker.start()
    kafka.produce(topic, as_json(2))
    assert values(taker.take(2)) == [1, 2]
    until("it says that it continues", lambda: says("answers again"))
    taker.reader.close()
    source.close()
