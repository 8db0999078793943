"""Protobuf values as columns and back: every type, what is not set, and what is no such message."""

from __future__ import annotations

import math
import pickle
import re
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, OneofDescriptorProto
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream.connectors.formats.protobuf import ProtobufDecoder, ProtobufEncoder
from midstream.connectors.formats.protobuf_types import MessageType, mismatch
from midstream.engine.core.errors import ConfigError, SchemaError
from protobuf_samples import SCALARS, Order, message_class, new_file

RANGES = {
    "int64": (-(2**63), 2**63 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "uint64": (0, 2**64 - 1),
    "uint32": (0, 2**32 - 1),
}
RANGES |= {"sint64": RANGES["int64"], "sfixed64": RANGES["int64"], "fixed64": RANGES["uint64"]}
RANGES |= {"sint32": RANGES["int32"], "sfixed32": RANGES["int32"], "fixed32": RANGES["uint32"]}
SIMPLE: dict[str, st.SearchStrategy[Any]] = {
    **{kind: st.integers(*limits) for kind, limits in RANGES.items()},
    "double": st.floats(allow_nan=False),
    "float": st.floats(allow_nan=False, width=32),
    "bool": st.booleans(),
    "string": st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    "bytes": st.binary(max_size=5),
}
EVERY = new_file(
    "every.proto",
    {
        "Every": [
            *(f"{kind} plain_{kind} = {at}" for at, kind in enumerate(SCALARS, 1)),
            *(f"optional {kind} maybe_{kind} = {at}" for at, kind in enumerate(SCALARS, 101)),
            *(f"repeated {kind} many_{kind} = {at}" for at, kind in enumerate(SCALARS, 201)),
            *(
                f"map<{key},{key}> map_{key} = {at}"
                for at, key in enumerate(["int32", "uint64", "bool", "string"], 301)
            ),
        ]
    },
)
Every = message_class("Every", EVERY)


def rows_of(message: Any, values: list[Any]) -> list[dict[str, Any]]:
    batch = ProtobufDecoder(MessageType(message, "test")).decode([each.SerializeToString() for each in values])
    batch.validate(full=True)
    return batch.to_pylist()


def encoded(message: Any, columns: dict[str, tuple[pa.DataType, list[Any]]]) -> list[Any]:
    """Messages of these columns."""
    batch = pa.RecordBatch.from_pydict({name: pa.array(values, kind) for name, (kind, values) in columns.items()})
    encoder = ProtobufEncoder(batch.schema, MessageType(message, "test"), "test")
    return [message.FromString(value) for value in encoder.encode(batch, b"")]


@st.composite
def every_row(draw: st.DrawFn) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for kind in SCALARS:
        row[f"plain_{kind}"] = draw(SIMPLE[kind])
        row[f"maybe_{kind}"] = draw(st.none() | SIMPLE[kind])
        row[f"many_{kind}"] = draw(st.lists(SIMPLE[kind], max_size=3))
    for kind in ("int32", "uint64", "bool", "string"):
        row[f"map_{kind}"] = draw(st.dictionaries(SIMPLE[kind], SIMPLE[kind], max_size=3))
    return row


@given(st.lists(every_row(), min_size=1, max_size=3))
@settings(max_examples=examples(60))
def test_every_value_of_every_type_comes_out_as_it_was_and_goes_back_as_it_came(rows):
    messages = [Every(**{name: value for name, value in row.items() if value is not None}) for row in rows]
    found = rows_of(Every, messages)
    for row, given_row in zip(found, rows, strict=True):
        for name, value in given_row.items():
            expected = [{"key": key, "value": value[key]} for key in sorted(value)] if name.startswith("map") else value
            assert row[name] == expected, name
            if isinstance(value, float):
                assert math.copysign(1, row[name]) == math.copysign(1, value), name
    kind = MessageType(Every, "test")
    batch = pa.RecordBatch.from_pylist(found, kind.schema)
    back = ProtobufEncoder(batch.schema, kind, "test").encode(batch, b"x")
    assert [Every.FromString(value[1:]) for value in back] == messages


def test_what_is_not_set_is_null_where_that_can_be_told_and_its_default_where_it_cannot():
    assert rows_of(Order, [Order()]) == [
        {
            "id": 0,
            "note": None,
            "at": None,
            "took": None,
            "big": None,
            "state": "NEW",
            "lines": [],
            "by_name": [],
            "numbers": [],
            "first": None,
            "raw": b"",
            "weights": [],
        }
    ]
    (row,) = rows_of(Order, [Order(note="", big={"value": 0}, first={}, by_name={"b": {"item": "x"}, "a": {}})])
    assert (row["note"], row["big"], row["first"]) == ("", 0, {"item": "", "count": None})
    assert [each["key"] for each in row["by_name"]] == ["a", "b"], "in an order that does not depend on the process"


def test_defaults_of_the_older_syntax_are_values_and_required_fields_are_required():
    file = new_file(
        "old.proto", {"Old": ["optional int32 n = 1", "optional int32 d = 2", "required string r = 3"]}, syntax="proto2"
    )
    file.message_type[0].field[1].default_value = "7"
    old = message_class("Old", file)
    assert rows_of(old, [old(r="x")]) == [{"n": None, "d": 7, "r": "x"}]
    with pytest.raises(pa.ArrowInvalid, match="required fields are missing: r"):
        ProtobufDecoder(MessageType(old, "test")).decode([b""])
    with pytest.raises(SchemaError, match="requires r, and there is no such column"):
        encoded(old, {"n": (pa.int32(), [1])})
    with pytest.raises(SchemaError, match=r"'r' is null in a row, and the field shop\.Old\.r is required"):
        encoded(old, {"r": (pa.large_string(), [None])})


@pytest.mark.parametrize(
    ("seconds", "nanos", "what"),
    [
        (0, 999_999_999, None),
        (-1, 1, None),
        (9_223_372_036, 854_775_807, None),
        (9_223_372_036, 854_775_808, "more than a column of nanoseconds can hold"),
        (253_402_300_799, 0, "more than a column of nanoseconds can hold"),
        (0, -1, "0 seconds and -1 nanos"),
        (0, 1_000_000_000, "1000000000 nanos"),
    ],
)
def test_instants_keep_their_nanoseconds_or_are_refused(seconds, nanos, what):
    message = Order(at={"seconds": seconds, "nanos": nanos})
    decoder = ProtobufDecoder(MessageType(Order, "test"))
    if what:
        with pytest.raises(pa.ArrowInvalid, match=rf"Order\.at has .*{what}"):
            decoder.decode([message.SerializeToString()])
        return
    batch = decoder.decode([message.SerializeToString()])
    assert batch.column("at").cast(pa.int64()).to_pylist() == [seconds * 10**9 + nanos]
    kept = ProtobufEncoder(pa.schema([batch.schema.field("at")]), MessageType(Order, "test"), "test")
    assert Order.FromString(kept.encode(batch.select(["at"]), b"")[0]) == message


@pytest.mark.parametrize("ns", [0, 1, -1, 10**9, -(10**9), -(10**9) - 1, 2**63 - 1, -(2**63) + 1])
def test_durations_have_the_sign_in_both_their_parts(ns):
    (found,) = encoded(Order, {"took": (pa.duration("ns"), [ns])})
    assert found.took.ToNanoseconds() == ns
    assert found.took.seconds * found.took.nanos >= 0
    batch = ProtobufDecoder(MessageType(Order, "test")).decode([found.SerializeToString()])
    assert batch.column("took").cast(pa.int64()).to_pylist() == [ns]
    assert encoded(Order, {"took": (pa.duration("ms"), [-1500])})[0].took.ToMilliseconds() == -1500


def test_enums_are_their_names_and_a_number_without_one_is_refused():
    assert rows_of(Order, [Order(state="PAID")])[0]["state"] == "PAID"
    with pytest.raises(pa.ArrowInvalid, match=r"Order\.state is 7, which the enum shop\.State does not have"):
        rows_of(Order, [Order(state=7)])
    with pytest.raises(SchemaError, match=r"'state' is 'GONE', which the enum shop\.State does not have"):
        encoded(Order, {"state": (pa.large_string(), ["GONE"])})


def test_of_two_names_for_a_number_the_first_is_read_and_either_is_written():
    file = new_file("a.proto", {"A": ["enum:Size s = 1"]}, {"Size": {"NONE": 0, "BIG": 1, "LARGE": 1}})
    file.enum_type[0].options.allow_alias = True
    aliased = message_class("A", file)
    assert rows_of(aliased, [aliased(s=1)]) == [{"s": "BIG"}]
    assert [each.s for each in encoded(aliased, {"s": (pa.large_string(), ["BIG", "LARGE"])})] == [1, 1]
    plain = new_file("a.proto", {"A": ["enum:Size s = 1"]}, {"Size": {"NONE": 0, "BIG": 1}})
    both = aliased.DESCRIPTOR, message_class("A", plain).DESCRIPTOR
    assert mismatch(*both) == mismatch(*both[::-1]) == ""


@pytest.mark.parametrize("data", [b"\x08", b"\x12\x05ab", b"\x12\x01\xff", b"\x3a\x02\x08", b"\xff" * 11])
def test_bytes_that_are_no_message_are_refused(data):
    with pytest.raises(pa.ArrowInvalid, match=r"the bytes are not a shop\.Order"):
        ProtobufDecoder(MessageType(Order, "test")).decode([data])


def test_text_of_the_older_syntax_that_is_not_utf8_is_refused():
    old = message_class("Old", new_file("old.proto", {"Old": ["optional string t = 1"]}, syntax="proto2"))
    with pytest.raises(pa.ArrowInvalid, match=r"the bytes are a shop\.Old that a row cannot hold"):
        ProtobufDecoder(MessageType(old, "test")).decode([b"\x0a\x01\xff"])


def test_a_message_type_travels_without_the_module_that_it_came_from():
    kind = MessageType(Order, "test")
    found = pickle.loads(pickle.dumps(kind))
    assert found == kind and found.schema.equals(kind.schema)
    assert ProtobufDecoder(found).decode([Order(id=3).SerializeToString()]).column("id").to_pylist() == [3]
    other = new_file("orders.proto", {"Order": ["string id = 1"]})
    assert found != MessageType(message_class("Order", other), "test"), (
        "a file of the same name that says something else"
    )


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (Order(), "is not a Protobuf message class; give one that protoc has generated"),
        ("orders_pb2.Order", "'orders_pb2.Order' is not a Protobuf message class"),
        (int, "is not a Protobuf message class"),
        (FileDescriptorProto, r"FileDescriptorProto\..* the message contains itself"),
        (message_class("Empty", new_file("e.proto", {"Empty": []})), "shop.Empty has no fields"),
        (
            message_class("Outer", new_file("e.proto", {"Empty": [], "Outer": ["Empty e = 1"]})),
            r"Outer\.e is the message shop\.Empty, which has no fields",
        ),
    ],
)
def test_what_is_no_row_is_refused_when_the_job_is_defined(message, error):
    with pytest.raises((ConfigError, SchemaError), match=error):
        MessageType(message, "test")


TEXT, LINES = pa.large_string(), pa.large_list(pa.struct([("item", pa.large_string()), ("count", pa.int32())]))
PAIRS = pa.large_list(pa.struct([("key", pa.int32()), ("value", pa.float64())]))


@pytest.mark.parametrize(
    ("name", "kind", "value", "error"),
    [
        ("idd", pa.int64(), 1, "'idd': the message shop.Order has no such field; it has id, note,"),
        ("id", TEXT, "1", "'id' is large_string, and the field shop.Order.id holds int64; cast it"),
        ("id", pa.float64(), 1.0, "'id' is double"),
        ("id", pa.uint64(), 2**63, "'id' has a value that the field shop.Order.id cannot hold"),
        ("id", pa.int64(), None, "'id' is null in a row, and the field shop.Order.id has no presence"),
        ("numbers", pa.large_list(pa.int64()), [2**31], r"'numbers'\[\] has a value that the field"),
        (
            "numbers",
            pa.large_list(pa.int32()),
            None,
            "'numbers' is null in a row, and Protobuf cannot distinguish a null list",
        ),
        ("numbers", pa.large_list(pa.int32()), [1, None], "'numbers' has a null in a list"),
        ("at", pa.timestamp("us"), datetime(2026, 1, 1), "'at' is timestamp.us., and the field shop.Order.at holds"),
        ("lines", LINES, [{"item": None, "count": 1}], r"'lines'\[\].'item' is null in a row"),
        ("weights", PAIRS, [(2, 0.0), (1, 1.0), (1, 2.0)], "'weights' has the key 1 twice in one map"),
        ("weights", PAIRS, [(1, None)], "'weights' has a null in a map"),
        ("weights", pa.large_list(pa.int32()), [1], "'weights' is large_list"),
        ("first", TEXT, "x", "'first' is large_string"),
        ("raw", TEXT, "x", "'raw' is large_string"),
        ("first", pa.struct([]), {}, "'first' is struct<>"),
        (
            "at",
            pa.timestamp("s", "UTC"),
            253_402_300_800,
            "'at' is 253402300800 seconds in a row, beyond what Protobuf has",
        ),
        ("took", pa.duration("s"), -315_576_000_001, "'took' is -315576000001 seconds in a row"),
    ],
)
def test_a_value_that_the_message_cannot_hold_is_refused_by_name(name, kind, value, error):
    if kind is PAIRS and value is not None:
        value = [{"key": key, "value": each} for key, each in value]
    with pytest.raises(SchemaError, match=f"test: column {error}"):
        encoded(Order, {name: (kind, [value])})


def test_columns_are_widened_and_structs_that_are_null_are_not_set():
    first = pa.struct([("item", TEXT)])
    found = encoded(
        Order,
        {
            "id": (pa.int8(), [1, 2]),
            "at": (
                pa.timestamp("ms", "Europe/Paris"),
                [datetime(1969, 12, 31, 23, 59, 59, 999000, UTC), None],
            ),
            "first": (first, [None, {"item": "x"}]),
            "big": (pa.int32(), [None, 5]),
        },
    )
    assert [message.HasField("first") for message in found] == [False, True]
    assert [message.HasField("big") for message in found] == [False, True]
    assert (found[0].at.seconds, found[0].at.nanos, found[1].HasField("at")) == (-1, 999_000_000, False)


def test_of_a_oneof_one_column_has_a_value():
    file = new_file("o.proto", {"O": ["int64 a = 1", "string b = 2", "int64 from = 3"], "P": ["O o = 1"]})
    file.message_type[0].oneof_decl.add(name="kind")
    for field in file.message_type[0].field[:2]:
        field.oneof_index = 0
    one, outer = message_class("O", file), message_class("P", file)
    assert rows_of(one, [one(a=0), one(b="x"), one(**{"from": 3})]) == [
        {"a": 0, "b": None, "from": 0},
        {"a": None, "b": "x", "from": 0},
        {"a": None, "b": None, "from": 3},
    ]
    columns: dict[str, tuple[pa.DataType, list[Any]]] = {
        "a": (pa.int64(), [0, None, None]),
        "b": (TEXT, [None, "", None]),
        "from": (pa.int64(), [1, 2, 3]),
    }
    assert [each.WhichOneof("kind") for each in encoded(one, columns)] == ["a", "b", None]
    both = {"a": 1, "b": "x"}
    with pytest.raises(
        SchemaError, match="column 'a' and 'b' both have a value in a row, but oneof 'kind' holds only one"
    ):
        encoded(one, {"a": (pa.int64(), [1]), "b": (TEXT, ["x"])})
    with pytest.raises(SchemaError, match=r"'o'\.'a' and 'b' both have a value"):
        encoded(outer, {"o": (pa.struct([("a", pa.int64()), ("b", TEXT)]), [both])})


def test_a_part_of_a_batch_is_written_as_it_is():
    messages = [Order(id=n, lines=[{"item": str(n)}] * n, by_name={str(n): {}}, first={"item": "f"}) for n in range(5)]
    batch = ProtobufDecoder(MessageType(Order, "test")).decode([each.SerializeToString() for each in messages])
    encoder = ProtobufEncoder(batch.schema, MessageType(Order, "test"), "test")
    assert [Order.FromString(value) for value in encoder.encode(batch.slice(2, 2), b"")] == messages[2:4]


READER = ["int64 a = 1", "repeated int32 b = 2", "Inner c = 3", "enum:State d = 4"]
ENUM = {"State": {"NEW": 0, "PAID": 1}}


def kind_of(fields: list[str], inner: list[str], enum: dict[str, dict[str, int]], **more: Any) -> Any:
    file = new_file("m.proto", {"Inner": inner, "M": fields}, enum, **more)
    return message_class("M", file).DESCRIPTOR


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, ""),
        ({"a": "int32 a = 1"}, ""),
        ({"a": "uint32 renamed = 1"}, ""),
        ({"a": "bool a = 1"}, ""),
        ({"a": "enum:State a = 1"}, ""),
        ({"a": ""}, ""),
        ({"a": "uint64 a = 1"}, "M.a, number 1, was written as uint64 and is read as int64"),
        ({"a": "sint64 a = 1"}, "was written as sint64 and is read as int64"),
        ({"a": "string a = 1"}, "was written as string"),
        ({"a": "repeated int64 a = 1"}, "M.a, number 1, was written as a list and is read as one value"),
        ({"b": "int32 b = 2"}, "M.b, number 2, was written as one value and is read as a list"),
        ({"b": "repeated int64 b = 2"}, "M.b, number 2, was written as int64 and is read as int32"),
        ({"inner": "bytes x = 1"}, "M.c.x, number 1, was written as bytes and is read as string"),
        (
            {"enum": {"State": {"NEW": 0, "GONE": 1}}},
            "was written with GONE for 1, which the reader's enum shop.State calls PAID",
        ),
        ({"enum": {"State": {"NEW": 0, "LATER": 9}}}, ""),
    ],
)
def test_a_writer_whose_values_would_change_is_told_apart(changed, why):
    fields = [changed.get(name, text) for name, text in zip("abcd", READER, strict=True)]
    writer = kind_of(
        [text for text in fields if text], [changed.get("inner", "string x = 1")], changed.get("enum", ENUM)
    )
    found = mismatch(writer, kind_of(READER, ["string x = 1"], ENUM))
    assert why in found and bool(found) == bool(why), found


def test_a_value_that_a_closed_enum_does_not_have_is_found_before_a_parser_hides_it():
    reader = kind_of(["optional enum:State d = 4"], ["optional string x = 1"], ENUM, syntax="proto2")
    writer = kind_of(["optional enum:State d = 4"], [], {"State": {"NEW": 0, "LATER": 9}}, syntax="proto2")
    assert "may be LATER (9), which the reader's enum shop.State does not have" in mismatch(writer, reader)


# ---- what a writer's schema may change ----


def evolving(
    *fields: str, oneof: str = "", extra: dict[str, list[str]] | None = None, default: str = "", syntax: str = "proto3"
) -> Any:
    """The message M with these fields; `oneof`: the names of those within one oneof; `default`: that of the first."""
    file = new_file("m.proto", {**(extra or {}), "M": list(fields)}, ENUM, syntax=syntax)
    message = file.message_type[-1]
    if oneof:
        message.oneof_decl.insert(0, OneofDescriptorProto(name="only"))  # those of optional fields come last
    for field in message.field:
        if oneof and field.name in oneof.split():
            field.oneof_index = 0
        elif oneof and field.proto3_optional:
            field.oneof_index += 1
    if default:
        message.field[0].default_value = default
    return message_class("M", file)


def old(*fields: str, default: str = "", **more: Any) -> Any:
    return evolving(*fields, default=default, syntax="proto2", **more)


AB, NEXT = ("string a = 1", "string b = 2"), ("optional string a = 1", "optional string b = 2")
ENTRY = {"E": ["string key = 1", "int32 value = 2"]}
MONEY = {"Money": ["int64 units = 1", "int32 nanos = 2"]}
INSTANT, SPAN = "google.protobuf.Timestamp t = 1", "google.protobuf.Duration t = 1"
SAME = [
    (AB, AB),
    (("string x = 1", "string b = 2"), AB),
    (("string b = 2", "string c = 3"), AB),
    (("string b = 2", "int64 c = 3"), ("int64 c = 3", "string d = 4")),
    (("int32 n = 1",), ("int64 n = 1",)),
    (("optional int32 n = 1",), ("optional int64 n = 1",)),
    (("string t = 1",), ("bytes t = 1",)),
    (("bool n = 1",), ("int32 n = 1",)),
    (("enum:State n = 1",), ("int64 n = 1",)),
    (("repeated int32 n = 1",), ("repeated int64 n = 1",)),
    (("map<string,int32> n = 1",), ("map<string,int64> n = 1",)),
    (("map<string,int32> old = 1",), ("map<string,int32> new = 1",)),
    ((INSTANT,), (INSTANT.replace(" t ", " at "),)),
    (("string a = 1", "int64 price = 2"), ("string a = 1", "int64 price = 5")),
]


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        *[(evolving(*writer), evolving(*reader)) for writer, reader in SAME],
        (evolving(*AB, oneof="a b"), evolving(*AB, oneof="a b")),
        (evolving(*AB, "string c = 3", oneof="a b c"), evolving(*AB, oneof="a b")),
        (evolving(*AB, oneof="a b"), evolving(*AB, "string c = 3", oneof="a b c")),
        (evolving(AB[0], oneof="a"), evolving(*AB, oneof="a b")),
        (evolving(*AB, oneof="a b"), evolving(*NEXT)),
        (evolving(AB[0], oneof="a"), evolving(NEXT[0])),
        (evolving(NEXT[0]), evolving(AB[0], oneof="a")),
        (evolving("Money t = 1", extra=MONEY), evolving("Cash t = 1", extra={"Cash": MONEY["Money"]})),
        (old("optional int32 n = 1"), evolving("optional int64 n = 1")),
        (old("optional int32 n = 1", default="0"), evolving("int64 n = 1")),
        (old("optional int32 n = 1", default="7"), old("optional int64 n = 1", default="7")),
        (old("optional string n = 1", default="x"), old("optional bytes n = 1", default="x")),
        (old("optional double n = 1", default="nan"), old("optional double n = 1", default="nan")),
        (old("required int32 n = 1"), evolving("int32 n = 1")),
        (old("required int32 n = 1"), old("optional int32 n = 1", default="7")),
        (old("optional int32 n = 1"), old("required int32 n = 1")),
        (old("map<string,int32> m = 1"), evolving("map<string,int32> m = 1")),
        (old("repeated int32 m = 1"), evolving("repeated int32 m = 1")),
    ],
)
def test_a_schema_that_has_only_grown_is_read(writer, reader):
    assert mismatch(writer.DESCRIPTOR, reader.DESCRIPTOR) == ""


UNSET = "M.n, number 1, where it is not set, "
OWN = "a type of Protobuf itself is only read as itself"


@pytest.mark.parametrize(
    ("writer", "reader", "why"),
    [
        (
            evolving(*NEXT),
            evolving(*AB, oneof="a b"),
            "M.a and M.b, numbers 1 and 2, may both have been written, and are read as the oneof 'only', which holds one value",
        ),
        (evolving(*AB), evolving(*AB, oneof="a b"), "M.a and M.b, numbers 1 and 2, may both have been written"),
        (
            evolving(*AB, "string c = 3", oneof="b c"),
            evolving(NEXT[0], "string b = 2", "string c = 3", oneof="b c"),
            "M.a, number 1, where it is not set, was written as '' and is read as null",
        ),
        (evolving(*NEXT, "string c = 3", oneof="c"), evolving(*AB, oneof="a b"), "M.a and M.b, numbers 1 and 2"),
        (
            evolving(*AB, "optional string c = 3", oneof="a b"),
            evolving(*AB, "string c = 3", oneof="a b c"),
            "M.a and M.c, numbers 1 and 3",
        ),
        (evolving("int64 n = 1"), evolving("optional int64 n = 1"), f"{UNSET}was written as 0 and is read as null"),
        (evolving("optional int64 n = 1"), evolving("int64 n = 1"), f"{UNSET}was written as null and is read as 0"),
        (evolving("int64 n = 1"), evolving("int64 n = 1", oneof="n"), f"{UNSET}was written as 0 and is read as null"),
        (old("optional int32 n = 1"), evolving("int32 n = 1"), f"{UNSET}was written as null and is read as 0"),
        (
            old("optional int32 n = 1", default="7"),
            old("optional int32 n = 1", default="8"),
            f"{UNSET}was written as 7 and is read as 8",
        ),
        (
            old("optional double n = 1", default="-0"),
            evolving("double n = 1"),
            f"{UNSET}was written as -0.0 and is read as 0.0",
        ),
        (
            old("optional enum:State n = 1", default="PAID"),
            evolving("enum:State n = 1"),
            f"{UNSET}was written as 1 and is read as 0",
        ),
        (
            evolving(INSTANT),
            evolving(SPAN),
            f"M.t, number 1, was written as google.protobuf.Timestamp and is read as google.protobuf.Duration; {OWN}",
        ),
        (
            evolving(SPAN),
            evolving(INSTANT),
            f"as google.protobuf.Duration and is read as google.protobuf.Timestamp; {OWN}",
        ),
        (
            evolving("Money t = 1", extra=MONEY),
            evolving(INSTANT),
            f"was written as shop.Money and is read as .*; {OWN}",
        ),
        (evolving(INSTANT), evolving("Money t = 1", extra=MONEY), f"is read as shop.Money; {OWN}"),
        (
            evolving("google.protobuf.UInt32Value n = 1"),
            evolving("google.protobuf.Int64Value n = 1"),
            f"was written as google.protobuf.UInt32Value and is read as google.protobuf.Int64Value; {OWN}",
        ),
        (evolving(f"repeated {INSTANT}"), evolving(f"repeated {SPAN}"), OWN),
        (
            evolving("map<string,google.protobuf.Timestamp> t = 1"),
            evolving("map<string,google.protobuf.Duration> t = 1"),
            f"M.t.value, number 2, .*{OWN}",
        ),
        (
            evolving("repeated E m = 1", extra=ENTRY),
            evolving("map<string,int32> m = 1"),
            "M.m, number 1, was written as a list and is read as a map",
        ),
        (
            evolving("map<string,int32> m = 1"),
            evolving("repeated E m = 1", extra=ENTRY),
            "as a map and is read as a list",
        ),
        (evolving("map<string,int32> m = 1"), evolving("E m = 1", extra=ENTRY), "as a map and is read as one value"),
        (
            evolving("int64 price = 1", "int64 amount = 2"),
            evolving("int64 amount = 1", "int64 price = 2"),
            "M.amount, number 1, was written with the name 'price', which the reader has for number 2",
        ),
        (
            evolving("int64 a = 1"),
            evolving("int64 new = 1", "int64 a = 2"),
            "M.new, number 1, was written with the name 'a', which the reader has for number 2",
        ),
        (
            evolving("int64 a = 1", "int64 b = 2"),
            evolving("int64 b = 1"),
            "M.b, number 1, was written with the name 'a', and 'b' was number 2",
        ),
        (
            evolving("Money t = 1", extra=MONEY),
            evolving("Money t = 1", extra={"Money": ["int64 nanos = 1", "int32 units = 2"]}),
            "M.t.nanos, number 1, was written with the name 'units'",
        ),
    ],
)
def test_a_schema_whose_values_would_be_read_as_others_is_refused(writer, reader, why):
    assert re.search(why, mismatch(writer.DESCRIPTOR, reader.DESCRIPTOR))


PLAIN = ("int32", "int64", "uint32", "bool", "string", "bytes", "double")


@st.composite
def messages_of_any_form(draw: st.DrawFn) -> Any:
    names = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True))
    numbers = draw(st.permutations([1, 2, 3]))
    is_old = draw(st.booleans())
    labels = ["optional ", "repeated "] if is_old else ["", "", "optional ", "repeated "]
    kinds = st.sampled_from(PLAIN[:2] if draw(st.booleans()) else PLAIN)
    fields = [
        f"{draw(st.sampled_from(labels))}{draw(kinds)} {name} = {number}"
        for name, number in zip(names, numbers, strict=False)
    ]
    within = [text.split()[-3] for text in fields if text.split()[0] in PLAIN or (is_old and "optional" in text)]
    oneof = " ".join(name for name in within if draw(st.booleans()))
    default = ""
    if is_old and "repeated" not in fields[0] and draw(st.booleans()):
        default = draw(st.sampled_from(["0", "1"])) if "bool" not in fields[0] else "true"
    return evolving(*fields, oneof=oneof, default=default, syntax="proto2" if is_old else "proto3")


@given(messages_of_any_form(), messages_of_any_form(), st.data())
@settings(max_examples=examples(400))
def test_a_schema_that_is_accepted_is_read_as_it_was_written(writer, reader, data):
    assert mismatch(writer.DESCRIPTOR, writer.DESCRIPTOR) == ""
    if mismatch(writer.DESCRIPTOR, reader.DESCRIPTOR):
        return
    message = writer()
    for field in data.draw(st.permutations(list(writer.DESCRIPTOR.fields))):
        kind = next(name for name in PLAIN if field.type == getattr(field, f"TYPE_{name.upper()}"))
        if data.draw(st.booleans()):
            if field.is_repeated:
                getattr(message, field.name).extend(data.draw(st.lists(SIMPLE[kind], max_size=2)))
            else:
                setattr(
                    message, field.name, data.draw(SIMPLE[kind] | st.just({"string": "", "bytes": b""}.get(kind, 0)))
                )
    (written,) = rows_of(writer, [message])
    (read,) = ProtobufDecoder(MessageType(reader, "test")).decode([message.SerializeToString()]).to_pylist()
    for number, field in reader.DESCRIPTOR.fields_by_number.items():
        if number in writer.DESCRIPTOR.fields_by_number:
            expected = written[writer.DESCRIPTOR.fields_by_number[number].name]
            assert [*map(as_bytes, each(read[field.name]))] == [*map(as_bytes, each(expected))]
            if field.name in written:
                assert written[field.name] is expected, "by name it is the same field"


def each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def as_bytes(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value
