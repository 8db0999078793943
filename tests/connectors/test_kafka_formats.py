"""Kafka's values in CSV, and in Avro and Protobuf with a registry: bad records and a registry that is silent are told apart."""

from __future__ import annotations

import base64
import itertools
import json
import pickle
import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kafka_records import Record

from effort import examples
from midstream.connectors.files.text_parsers import CsvOptions
from midstream.connectors.formats.avro import AvroEncoder
from midstream.connectors.kafka import schema_registry
from midstream.connectors.kafka.avro_values import AvroWriting
from midstream.connectors.kafka.fetched_records import ObjectRecords
from midstream.connectors.kafka.kafka_sink import KafkaSink
from midstream.connectors.kafka.protobuf_values import ProtobufValues, ProtobufWriting, index_bytes, message_index
from midstream.connectors.kafka.record_parser import RecordParser
from midstream.connectors.kafka.schema_registry import RegistrySilent, header
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import ConfigError, SchemaError, StorageError
from protobuf_samples import ORDERS, Order, message_class, new_file
from schema_registry_stub import StubRegistry, running_registry

SCHEMA = schema_of([("n", pa.int64()), ("t", pa.large_string())])
N = {"type": "record", "name": "R", "fields": [{"name": "n", "type": ["null", "long"], "default": None}]}
BOTH = {**N, "fields": [*N["fields"], {"name": "t", "type": ["null", "string"], "default": None}]}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubRegistry]:
    monkeypatch.setattr(schema_registry, "_AGAIN_S", 0.0)
    with running_registry() as found:
        yield found


def split(parser: RecordParser, values: list[bytes | None]) -> tuple[list[Any], dict[int, str]]:
    """Rows, and the bad ones: offset and error."""
    records = ObjectRecords([Record(value, at) for at, value in enumerate(values)])  # type: ignore[misc]
    batch, bad = parser.rows(records, "t")
    assert batch.schema.equals(parser.schema)
    assert batch.num_rows + len(bad) == len(values)
    return batch.to_pylist(), {each.position: each.error for each in bad}


# ---- CSV ----

CSV_VALUES = [b"1,a", b",", b'2,"x,y"', b'3,"a\nb"', b"4,\xc3\xa9", None]
CSV_ODD = [
    b"",
    b"1",
    b"1,a,b",
    b"x,a",
    b"1,\xff",
    b'1,"',
    b'",a',
    b"1,a\n2,b",
    b"1,a\n",
    b"\n",
    b'1,"a\n',
    b"\x00,",
    b"1,a\r",
]


@given(st.lists(st.sampled_from(CSV_VALUES + CSV_ODD), min_size=1, max_size=8))
@settings(max_examples=examples(200))
def test_csv_of_a_batch_comes_out_as_each_would_alone(values):
    parser = RecordParser("csv", SCHEMA, (), True, "test")
    rows, bad = split(parser, values)
    alone = [split(parser, [value]) for value in values]
    assert rows == [row for found, _ in alone for row in found]
    assert sorted(bad) == [at for at, (found, _) in enumerate(alone) if not found]


def test_csv_values_are_what_they_say():
    parser = RecordParser("csv", SCHEMA, (), True, "test")
    expected = [(1, "a"), (None, None), (2, "x,y"), (3, "a\nb"), (4, "é"), (None, None)]
    assert split(parser, CSV_VALUES) == ([{"n": n, "t": t} for n, t in expected], {})
    for value in CSV_ODD:
        is_ended_line = value in (b"1,a\n", b"1,a\r")
        assert split(parser, [value])[0] == ([{"n": 1, "t": "a"}] if is_ended_line else []), value
    semicolons = RecordParser("csv", SCHEMA, (), True, "test", csv=CsvOptions(delimiter=";"))
    assert split(semicolons, [b"1;a,b"]) == ([{"n": 1, "t": "a,b"}], {})


# ---- Avro ----


def avro(registry: StubRegistry, schema: Any = BOTH, **more: Any) -> RecordParser:
    text = schema if schema is None else json.dumps(schema)
    return RecordParser("avro", text, (), True, "test", registry={"url": registry.url}, **more)


def values_of(*rows: dict[str, Any], schema_id: int) -> list[bytes | None]:
    batch = pa.RecordBatch.from_pylist(list(rows), pa.schema([SCHEMA.field(name) for name in rows[0]]))
    return [*AvroEncoder(batch.schema, "R", "test").encode(batch, header(schema_id))]


def test_each_value_is_read_by_the_schema_that_it_was_written_with(registry):
    old, new = registry.register("t-value", N), registry.register("t-value", BOTH)
    first, second = values_of({"n": 1}, {"n": 2}, schema_id=old), values_of({"n": 3, "t": "x"}, schema_id=new)
    parser = pickle.loads(pickle.dumps(avro(registry)))
    values = [first[0], second[0], None, first[1]]
    expected = [{"n": 1, "t": None}, {"n": 3, "t": "x"}, {"n": None, "t": None}, {"n": 2, "t": None}]
    assert split(parser, values) == (expected, {})
    assert split(parser, values) == (expected, {})
    assert len([each for each in registry.requests if "schemas/ids" in each]) == 2, "asked for once each"
    assert avro(registry, None, subject="t-value").schema.equals(SCHEMA), "the newest"


def test_what_is_wrong_with_a_value_is_said_and_the_others_are_rows(registry):
    good, union = (
        registry.register("t-value", BOTH),
        registry.register("u-value", {**N, "fields": [{"name": "n", "type": ["int", "string"]}]}),
    )
    protobuf = registry.register("p-value", "no schema at all")
    (value,) = values_of({"n": 1, "t": "x"}, schema_id=good)
    assert value is not None
    bad = {
        b"": "fewer than the 5 before a value",
        b"\x00\x00\x00": "it has 3 bytes",
        b'{"n": 1}': "it begins with the byte 123, not with 0",
        header(77) + value[5:]: "schema 77: the schema registry does not have it: Schema not found",
        header(2**32 - 1) + value[5:]: "schema 4294967295: ",
        header(union) + value[5:]: f"schema {union}: .*is a union of int, string",
        header(protobuf) + value[5:]: f"schema {protobuf}: its schema: the text is not an Avro schema",
        value[:-1]: f"schema {good}: the bytes end within the record",
        value + b"\x00": "1 bytes are left after the record",
        header(good) + b"\x07": f"schema {good}: the bytes are not of the schema: branch -4 of a union that has 2",
    }
    parser = avro(registry)
    mixed = [each for one in bad for each in (value, one)]
    rows, found = split(parser, [*mixed])
    assert rows == [{"n": 1, "t": "x"}] * len(bad)
    for at, text in enumerate(bad.values()):
        assert re.search(text, found[2 * at + 1]), (text, found[2 * at + 1])
    asked = len(registry.requests)
    split(parser, [*mixed])
    assert len(registry.requests) == asked, "an id that is unknown is not asked for again at once"
    failing = RecordParser("avro", json.dumps(BOTH), (), False, "test", registry={"url": registry.url})
    with pytest.raises(SchemaError, match=r"t, offset 1: .*schema 77: .*on_bad_record='drop'"):
        split(failing, [value, header(77) + value[5:]])


@pytest.mark.parametrize("fault", [500, 503, 429, "garbage", "gone"])
def test_a_registry_that_is_silent_is_no_bad_record(registry, fault):
    schema_id = registry.register("t-value", BOTH)
    values = values_of({"n": 1, "t": "x"}, schema_id=schema_id)
    parser = avro(registry)
    if fault == "gone":
        registry.stop()
    else:
        registry.fault = fault
    for _ in range(2):
        with pytest.raises(RegistrySilent, match=r"test: the schema registry (answers|does not answer)"):
            split(parser, [*values, b"bad"])
    registry.fault = None
    if fault == "gone":
        registry.start()
    rows, bad = split(parser, [*values, b"bad"])
    assert rows == [{"n": 1, "t": "x"}] and list(bad) == [1]


def test_a_registry_that_refuses_the_user_is_named_without_the_password(registry, monkeypatch):
    monkeypatch.setenv("REGISTRY_LOGIN", "me:secret-word")
    parser = RecordParser(
        "avro",
        json.dumps(N),
        (),
        True,
        "test",
        registry={"url": registry.url, "basic.auth.user.info": "env:REGISTRY_LOGIN"},
    )
    parser.check()
    registry.fault = 401
    with pytest.raises(ConfigError, match="test: the schema registry refuses the user") as error:
        parser.check()
    assert "secret-word" not in str(error.value) + repr(parser) + repr(pickle.dumps(parser))
    monkeypatch.delenv("REGISTRY_LOGIN")
    with pytest.raises(ConfigError, match=r"registry option 'basic.auth.user.info' refers to the environment"):
        pickle.loads(pickle.dumps(parser)).check()


def test_a_schema_may_refer_to_others(registry):
    money = {"type": "record", "name": "Money", "namespace": "shop", "fields": [{"name": "cents", "type": "long"}]}
    registry.register("money", money)
    order = {"type": "record", "name": "Order", "namespace": "shop", "fields": [{"name": "price", "type": "Money"}]}
    found = registry.register("t-value", order, [{"name": "shop.Money", "subject": "money", "version": 1}])
    parser = avro(registry, None, subject="t-value")
    assert split(parser, [header(found) + b"\x0a"]) == ([{"price": {"cents": 5}}], {})


# ---- Protobuf ----


def protobuf(registry: StubRegistry | None, message: Any = Order) -> RecordParser:
    where = None if registry is None else {"url": registry.url}
    return RecordParser("protobuf", None, (), True, "test", registry=where, message=message)


def register(registry: StubRegistry, file: FileDescriptorProto, *references: tuple[str, str]) -> int:
    """As a program does: its text is a descriptor, with the names and subjects that it refers to."""
    text = base64.b64encode(file.SerializeToString()).decode()
    named = [{"name": name, "subject": subject, "version": 1} for name, subject in references]
    return registry.register(f"{file.name}-value", text, named, "PROTOBUF")


def test_messages_without_a_registry_are_rows_and_what_is_none_is_a_bad_record():
    values = [Order(id=1).SerializeToString(), b"\x08", None, b"", Order(id=2, state=9).SerializeToString()]
    rows, bad = split(pickle.loads(pickle.dumps(protobuf(None))), values)
    assert [row["id"] for row in rows] == [1, None, 0]
    assert list(bad) == [1, 4]
    assert "the record's value is not protobuf of the declared columns: the bytes are not a shop.Order" in bad[1]
    assert "Order.state is 9, which the enum shop.State does not have" in bad[4]


def test_each_message_is_looked_up_by_its_schema_and_its_place_there(registry):
    older = new_file(
        "older.proto", {"Other": ["int64 id = 1"], "Order": ["int32 id = 1"], "Order.Deep": ["int64 id = 1"]}
    )
    old, new = register(registry, older), register(registry, ORDERS)
    old_order = message_class("Order", older)(id=1).SerializeToString()
    values: list[bytes | None] = [
        header(new) + b"\x02\x02" + Order(id=2, note="x").SerializeToString(),
        header(old) + b"\x02\x02" + old_order,
        header(old) + b"\x00" + old_order,
        header(old) + b"\x04\x02\x00" + old_order,
        header(old) + b"\x02\x06" + old_order,
        header(old) + b"\x02",
        header(old) + b"\x01\x00",
        header(old) + b"\xff\xff\xff\xff",
        header(77) + b"\x00" + old_order,
        old_order,
    ]
    parser = pickle.loads(pickle.dumps(protobuf(registry)))
    for _ in range(2):
        rows, bad = split(parser, values)
        assert [(row["id"], row["note"]) for row in rows] == [(2, "x"), (1, None)]
        reasons = {
            2: f"schema {old}: it is a shop.Other, not a shop.Order",
            3: f"schema {old}: it is a shop.Order.Deep, not a shop.Order",
            4: f"schema {old}: it has no message at [3]",
            5: "it ends within the place of its message in the schema",
            6: "the place of its message in the schema has the number -1",
            7: "the place of its message in the schema is not a number",
            8: "schema 77: the schema registry does not have it: Schema not found",
            9: "fewer than the 5 before a value",
        }
        assert list(bad) == list(reasons)
        assert all(reasons[at] in bad[at] for at in bad), bad
    assert len([each for each in registry.requests if "schemas/ids" in each]) == 3, "asked for once each"


@pytest.mark.parametrize(
    ("schema", "kind", "why"),
    [
        (json.dumps(N), "AVRO", "it is AVRO, not PROTOBUF"),
        ('syntax = "proto3";', "PROTOBUF", r"it does not return Protobuf schemas as descriptors \(format=serialized\)"),
        (base64.b64encode(b"\xff\xff").decode(), "PROTOBUF", "its descriptors cannot be read"),
        (
            new_file("a", {"Order": []}, None, "gone.proto"),
            "",
            "it imports 'gone.proto', which the schema registry does not",
        ),
        (
            new_file("a", {"Order": []}, None, "google/protobuf/no.proto"),
            "",
            "'google/protobuf/no.proto', which is not part",
        ),
        (new_file("a", {"Order": ["Gone g = 1"]}), "", "cannot be used"),
        (
            new_file("a", {"Order": ["string id = 1"]}),
            "",
            r"Order\.id, number 1, was written as string and is read as int64",
        ),
    ],
)
def test_a_schema_that_says_nothing_of_the_message_or_something_else_is_a_bad_record(registry, schema, kind, why):
    if isinstance(schema, str):
        found = registry.register("s", schema, None, kind)
    else:
        found = register(registry, schema)
    rows, bad = split(protobuf(registry), [header(found) + b"\x00" + Order(id=1).SerializeToString()])
    assert rows == [] and re.search(f"schema {found}: .*{why}", bad[0]), bad


def test_messages_of_several_files_are_registered_with_all_of_them_and_read_again(registry):
    money = new_file("shop/money.proto", {"Money": ["int64 cents = 1"]})
    parts = new_file("shop/parts.proto", {"Part": ["Money price = 1"]}, None, "shop/money.proto")
    bill = new_file(
        "bill.proto",
        {"Other": ["int32 n = 1"], "Bill": ["repeated Part parts = 1", "google.protobuf.Timestamp at = 2"]},
        None,
        "shop/parts.proto",
        "shop/money.proto",
    )
    kind = message_class("Bill", money, parts, bill)
    writing = ProtobufWriting({"url": registry.url}, kind, "t", "test")
    schema = pa.schema([("parts", protobuf(registry, kind).schema.field("parts").type)])
    bound = writing.bound(schema)
    batch = pa.RecordBatch.from_pylist([{"parts": [{"price": {"cents": 5}}, {"price": None}]}, {"parts": []}], schema)
    with pytest.raises(AssertionError, match="is not registered"):
        bound.values(batch)
    bound.register()
    assert set(registry.subjects) == {"t-value", "shop/money.proto", "shop/parts.proto"}
    bound.register()
    assert all(len(versions) == 1 for versions in registry.subjects.values()), "the same again is no new version"
    requests = len(registry.requests)
    values = pickle.loads(pickle.dumps(writing)).bound(schema).values(batch)
    assert len(registry.requests) == requests, "slots need no registry to write"
    rows, bad = split(protobuf(registry, kind), values)
    assert not bad and [row["parts"] for row in rows] == batch.column("parts").to_pylist()


@pytest.mark.parametrize("place", ["Order", "Bill.Deep"])
def test_what_confluents_own_serializer_writes_is_read_and_what_is_written_it_reads(registry, place):
    from confluent_kafka.schema_registry import SchemaRegistryClient
    from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
    from confluent_kafka.serialization import MessageField, SerializationContext

    money = new_file("shop/money.proto", {"Money": ["int64 cents = 1"]})
    bill = new_file(
        "bill.proto",
        {"Other": ["int32 n = 1"], "Bill": ["int64 id = 1"], "Bill.Deep": ["repeated Money parts = 1"]},
        None,
        "shop/money.proto",
    )
    kind = Order if place == "Order" else message_class(place, money, bill)
    message = Order(id=5, at={"seconds": 3}) if place == "Order" else kind(parts=[{"cents": 4}])
    client = SchemaRegistryClient({"url": registry.url})
    settings = {"use.deprecated.format": False}
    theirs = ProtobufSerializer(kind, client, settings)(message, SerializationContext("t", MessageField.VALUE))
    batch = ProtobufValues({"url": registry.url}, kind, "test").parse([theirs])
    bound = ProtobufWriting({"url": registry.url}, kind, "u", "test").bound(batch.schema)
    bound.register()
    (ours,) = bound.values(batch)
    assert ours == theirs
    deserializer = ProtobufDeserializer(kind, settings, client)
    assert deserializer(ours, SerializationContext("u", MessageField.VALUE)) == message


@given(st.lists(st.integers(0, 100), min_size=1, max_size=5))
def test_the_place_of_a_message_is_read_as_it_is_written(index):
    data = header(1) + index_bytes(index)
    assert message_index(data + b"rest") == (tuple(index), len(data))


def test_a_registry_that_is_silent_is_no_bad_record_of_protobuf_either(registry):
    found = register(registry, ORDERS)
    value = header(found) + b"\x02\x02" + Order(id=1).SerializeToString()
    registry.fault = 503
    parser = protobuf(registry)
    with pytest.raises(RegistrySilent):
        split(parser, [value, b"bad"])
    registry.fault = None
    rows, bad = split(parser, [value, b"bad"])
    assert len(rows) == 1 and list(bad) == [1]


@pytest.mark.parametrize(
    ("fault", "kind"), [(409, ConfigError), (422, ConfigError), (503, StorageError), (403, ConfigError)]
)
def test_descriptors_that_the_registry_does_not_take_are_an_error_before_the_job_starts(registry, fault, kind):
    bound = ProtobufWriting({"url": registry.url}, Order, "t", "test").bound(pa.schema([("id", pa.int64())]))
    registry.fault = fault
    with pytest.raises(kind, match=r"test: the schema registry .*a fault"):
        bound.register()


@pytest.mark.parametrize(
    ("format", "schema", "more", "message"),
    [
        ("avro", None, {}, "needs registry="),
        ("avro", SCHEMA, {"registry": {"url": "http://x"}}, "is the text of the Avro schema"),
        ("avro", None, {"registry": {"url": "http://x"}}, "of several topics needs schema="),
        ("avro", "{}", {"registry": {}}, "has no 'url'"),
        ("avro", "{}", {"registry": {"url": "http://x"}}, "is not an Avro type"),
        ("avro", json.dumps(N), {"registry": {"url": "http://x"}, "csv": CsvOptions()}, "csv= requires format='csv'"),
        (
            "json",
            SCHEMA,
            {"registry": {"url": "http://x"}},
            "registry= requires format='avro', 'protobuf' or 'debezium'",
        ),
        ("json", SCHEMA, {"message": Order}, "message= requires format='protobuf'"),
        ("json", json.dumps(N), {}, "schema= as a string is only for Avro"),
        ("csv", None, {}, "format='csv' needs schema="),
        ("protobuf", None, {}, "format='protobuf' needs message=, a message class"),
        ("protobuf", SCHEMA, {"message": Order}, "schema= does not apply to format='protobuf'"),
        ("protobuf", None, {"message": Order, "registry": {}}, "has no 'url'"),
        ("xml", None, {}, "format 'xml' is not one of json, csv, avro, protobuf, debezium, bytes, text"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(format, schema, more, message):
    with pytest.raises((ConfigError, SchemaError), match=f"test.*{message}"):
        RecordParser(format, schema, (), True, "test", **more)


def test_an_option_that_the_registry_client_does_not_know_is_named(registry):
    parser = RecordParser("avro", json.dumps(N), (), True, "test", registry={"url": registry.url, "tiemout": 5})
    with pytest.raises(ConfigError, match="Unrecognized properties: tiemout"):
        parser.check()


def test_a_subject_that_is_not_there_and_a_registry_that_is_gone_are_named_when_the_job_is_defined(registry):
    with pytest.raises(ConfigError, match=r"has no subject 't-value'.*give schema="):
        avro(registry, None, subject="t-value")
    registry.stop()
    with pytest.raises(StorageError, match="the schema registry does not answer"):
        avro(registry, None, subject="t-value")


# ---- writing ----


def test_what_is_written_has_the_id_of_its_schema_and_is_read_again(registry):
    writing = AvroWriting({"url": registry.url}, "t", "test")
    bound = writing.bound(SCHEMA)
    with pytest.raises(AssertionError, match="is not registered"):
        bound.values(pa.RecordBatch.from_pylist([], SCHEMA))
    bound.register()
    requests = len(registry.requests)
    shipped = pickle.loads(pickle.dumps(writing))
    rows = [{"n": n, "t": text} for n, text in itertools.product([None, 1, -(2**63)], [None, "", "é" * 100])]
    values = shipped.bound(SCHEMA).values(pa.RecordBatch.from_pylist(rows, SCHEMA))
    assert len(registry.requests) == requests, "slots need no registry to write"
    assert split(avro(registry, None, subject="t-value"), values) == (rows, {})


@pytest.mark.parametrize(
    ("fault", "kind"), [(409, ConfigError), (422, ConfigError), (503, StorageError), (403, ConfigError)]
)
def test_a_schema_that_the_registry_does_not_take_is_an_error_before_the_job_starts(registry, fault, kind):
    writing = AvroWriting({"url": registry.url}, "t", "test")
    registry.fault = fault
    with pytest.raises(kind, match=f"test: the schema registry .*{'a fault'}"):
        writing.bound(SCHEMA).register()


@pytest.mark.parametrize("format", ["csv", "xml"])
def test_formats_that_are_not_written_are_refused(format):
    with pytest.raises(ConfigError, match=f"format '{format}' is not one of json, avro, protobuf, bytes, text"):
        KafkaSink("here:1", "t", guarantee="at_least_once", format=format)
