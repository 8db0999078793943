"""Avro: what is written is read again, by the schema of whoever reads; bytes that are not Avro are refused, never misread."""

from __future__ import annotations

import io
import json
from contextlib import suppress
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any, TypeAlias

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream.connectors.formats.avro import AvroDecoder, AvroEncoder
from midstream.connectors.formats.avro_types import AvroType, arrow_type, parse_schema
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import SchemaError

BEFORE = b"\x00\x00\x00\x00\x07"


def decoder(writer: Any, reader: Any = None) -> AvroDecoder:
    return AvroDecoder(
        parse_schema(json.dumps(writer), "written"), parse_schema(json.dumps(reader or writer), "read"), "r"
    )


def record(*fields: Any) -> dict[str, Any]:
    """Of (name, type) or (name, type, default)."""
    described = [
        {"name": each[0], "type": each[1], **({"default": each[2]} if len(each) > 2 else {})} for each in fields
    ]
    return {"type": "record", "name": "R", "fields": described}


def encoded(schema: Any, *rows: dict[str, Any]) -> list[bytes]:
    """By fastavro, which knows logical types of its own."""
    parsed = fastavro.parse_schema(schema)
    found = []
    for row in rows:
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, parsed, row)
        found.append(stream.getvalue())
    return found


# ---- there and back ----

Kind: TypeAlias = "tuple[pa.DataType, st.SearchStrategy[Any]]"
scalars: list[Kind] = [
    (pa.bool_(), st.booleans()),
    (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.large_string(), st.text()),
    (pa.large_binary(), st.binary()),
    (pa.date32(), st.dates()),
    (pa.time32("ms"), st.times().map(lambda at: at.replace(microsecond=at.microsecond // 1000 * 1000))),
    (pa.time64("us"), st.times()),
    (pa.timestamp("us"), st.datetimes()),
    (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(UTC))),
    (pa.timestamp("ms"), st.datetimes().map(lambda at: at.replace(microsecond=at.microsecond // 1000 * 1000))),
    (pa.decimal128(38, 10), st.decimals(-(10**27), 10**27, places=10)),
    (pa.decimal128(3, 3), st.decimals("-0.999", "0.999", places=3)),
]
kinds: st.SearchStrategy[Kind] = st.recursive(
    st.sampled_from(scalars),
    lambda inner: st.one_of(
        inner.map(lambda each: (pa.large_list(each[0]), st.lists(st.none() | each[1], max_size=3))),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda parts: (
                pa.struct([(f"p{i}", part[0]) for i, part in enumerate(parts)]),
                st.fixed_dictionaries({f"p{i}": st.none() | part[1] for i, part in enumerate(parts)}),
            )
        ),
    ),
    max_leaves=4,
)


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    columns = draw(st.lists(kinds, min_size=1, max_size=4))
    schema = schema_of([(f"c{i}", kind) for i, (kind, _) in enumerate(columns)])
    row = st.fixed_dictionaries({f"c{i}": st.none() | values for i, (_, values) in enumerate(columns)})
    return pa.RecordBatch.from_pylist(draw(st.lists(row, min_size=1, max_size=4)), schema)


@given(batches())
@settings(max_examples=examples(150))
def test_rows_that_are_written_are_read_again_and_others_read_them_too(batch):
    encoder = AvroEncoder(batch.schema, "a topic", "test")
    values = encoder.encode(batch.slice(1), BEFORE) if batch.num_rows > 1 else []
    values = encoder.encode(batch.slice(0, 1), BEFORE) + values
    found = decoder(encoder.avro_schema).decode(values, len(BEFORE))
    assert found.schema.equals(batch.schema)
    assert found.equals(batch)
    found.validate(full=True)
    parsed = fastavro.parse_schema(encoder.avro_schema)
    for value in values:
        stream = io.BytesIO(value)
        stream.seek(len(BEFORE))
        fastavro.schemaless_reader(stream, parsed)
        assert stream.tell() == len(value)


def test_rows_that_were_written_before_a_column_was_added_are_read_by_the_new_schema():
    place = pa.struct([("x", pa.large_list(pa.struct([("y", pa.int64())])))])
    old = pa.RecordBatch.from_pylist([{"b": {"x": [{"y": 1}]}}], pa.schema([("b", place)]))
    encoder = AvroEncoder(old.schema, "t", "test")
    new = AvroEncoder(pa.schema([("a", place), ("b", place)]), "t", "test")
    found = decoder(encoder.avro_schema, new.avro_schema).decode(encoder.encode(old, b""), 0)
    assert found.to_pylist() == [{"a": None, "b": {"x": [{"y": 1}]}}]
    fastavro.parse_schema(new.avro_schema)


# ---- what others write ----


def test_each_type_of_avro_is_a_column():
    schema = record(
        ("enum", {"type": "enum", "name": "E", "symbols": ["A", "B"]}),
        ("fixed", {"type": "fixed", "name": "F", "size": 2}),
        ("money", {"type": "fixed", "name": "M", "size": 4, "logicalType": "decimal", "precision": 6, "scale": 2}),
        ("map", {"type": "map", "values": ["null", "long"]}),
        ("list", {"type": "array", "items": {"type": "record", "name": "I", "fields": [{"name": "x", "type": "int"}]}}),
        ("again", ["I", "null"]),
        ("id", {"type": "string", "logicalType": "uuid"}),
        ("day", {"type": "int", "logicalType": "date"}),
        ("at", {"type": "long", "logicalType": "timestamp-millis"}),
        ("noon", {"type": "long", "logicalType": "time-micros"}),
        ("odd", {"type": "long", "logicalType": "timestamp-picos"}),
    )
    row = {
        "enum": "B",
        "fixed": b"\x00\xff",
        "money": Decimal("-1234.56"),
        "map": {"a": 1, "b": None},
        "list": [{"x": 1}, {"x": 2}],
        "again": None,
        "id": "not looked at",
        "day": date(2024, 2, 29),
        "at": datetime(2024, 1, 1, tzinfo=UTC),
        "noon": time(12),
        "odd": 5,
    }
    found = decoder(schema).decode(encoded(schema, {**row, "id": 5 * "x"}), 0).to_pylist()
    assert found == [{**row, "id": "xxxxx", "map": [{"key": "a", "value": 1}, {"key": "b", "value": None}]}]


def test_times_beyond_what_python_knows_are_kept():
    schema = record(("at", {"type": "long", "logicalType": "timestamp-micros"}))
    values = encoded(record(("at", "long")), {"at": 2**62}, {"at": -(2**63)})
    assert decoder(schema).decode(values, 0).column("at").cast(pa.int64()).to_pylist() == [2**62, -(2**63)]


# ---- by the schema of whoever reads ----

NEW = [
    (record(("n", "int")), record(("n", "long")), {"n": 5}, {"n": 5}),
    (record(("n", "int")), record(("n", "double")), {"n": 5}, {"n": 5.0}),
    (record(("n", "long")), record(("n", "float")), {"n": 2**62}, {"n": 2.0**62}),
    (record(("n", "float")), record(("n", "double")), {"n": 0.5}, {"n": 0.5}),
    (record(("t", "bytes")), record(("t", "string")), {"t": "é".encode()}, {"t": "é"}),
    (record(("t", "string")), record(("t", "bytes")), {"t": "é"}, {"t": "é".encode()}),
    (record(("n", "int")), record(("n", ["null", "int"])), {"n": 5}, {"n": 5}),
    (record(("n", ["null", "int"])), record(("n", "int")), {"n": 5}, {"n": 5}),
    (record(("n", "null")), record(("n", ["null", "int"])), {"n": None}, {"n": None}),
    (record(("a", "int"), ("n", "int")), record(("n", "int")), {"a": 1, "n": 5}, {"n": 5}),
    (record(("a", ["int", "string"]), ("n", "int")), record(("n", "int")), {"a": "x", "n": 5}, {"n": 5}),
    (record(("n", "int")), record(("n", "int"), ("a", "bytes", "\xff")), {"n": 5}, {"n": 5, "a": b"\xff"}),
    (
        record(("n", "int")),
        record(("n", "int"), ("a", ["null", "int"], None), ("l", {"type": "array", "items": "int"}, [1, 2])),
        {"n": 5},
        {"n": 5, "a": None, "l": [1, 2]},
    ),
    (
        record(("e", {"type": "enum", "name": "E", "symbols": ["A", "NEW"]})),
        record(("e", {"type": "enum", "name": "E", "symbols": ["OTHER", "A"], "default": "OTHER"})),
        {"e": "NEW"},
        {"e": "OTHER"},
    ),
    (
        record(("old", "int")),
        {"type": "record", "name": "R", "fields": [{"name": "n", "aliases": ["x", "old"], "type": "int"}]},
        {"old": 5},
        {"n": 5},
    ),
]


@pytest.mark.parametrize(("writer", "reader", "row", "expected"), NEW, ids=range(len(NEW)))
def test_a_schema_that_has_changed_is_read_by_that_of_the_reader(writer, reader, row, expected):
    assert decoder(writer, reader).decode(encoded(writer, row), 0).to_pylist() == [expected]
    assert decoder(writer, reader).decode([], 0).num_rows == 0


@pytest.mark.parametrize(
    ("wider", "exact", "rounded"),
    [("float", 2**24, 2**24 + 1), ("double", -(2**53), -(2**53) - 1), ("double", 2**62, 2**63 - 1)],
)
def test_a_number_that_a_wider_type_would_round_is_refused(wider, exact, rounded):
    writer, reader = record(("n", "long")), record(("n", wider))
    assert decoder(writer, reader).decode(encoded(writer, {"n": exact}), 0).to_pylist() == [{"n": float(exact)}]
    with pytest.raises(pa.ArrowInvalid, match=rf"r.n: {rounded} would be rounded to the {wider} .*; read it as a long"):
        decoder(writer, reader).decode(encoded(writer, {"n": rounded}), 0)


@pytest.mark.parametrize("reader", [record(("n", "long")), record(("m", "int", 0))])
def test_an_int_of_more_than_32_bits_is_refused_also_if_it_is_widened_or_not_read(reader):
    (value,) = encoded(record(("n", "long")), {"n": 2**31})
    with pytest.raises(pa.ArrowInvalid, match="an int of 2147483648, which has more than 32 bits"):
        decoder(record(("n", "int")), reader).decode([value], 0)


def decimal_of(scale: int) -> Any:
    return record(("n", {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": scale}))


def time_in(unit: str) -> Any:
    return record(("n", {"type": "long", "logicalType": f"timestamp-{unit}"}))


def logical(name: str, kind: str = "long") -> Any:
    return record(("n", {"type": kind, "logicalType": name}))


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (logical("timestamp-nanos"), record(("n", "long"))),
        (record(("n", "long")), logical("timestamp-nanos")),
        (logical("timestamp-nanos"), logical("timestamp-nanos")),
        (time_in("millis"), record(("n", "long"))),
    ],
)
def test_a_logical_type_that_one_side_does_not_know_is_a_number(writer, reader):
    assert decoder(writer, reader).decode([b"\x0a"], 0).to_pylist() == [{"n": 5}]


def test_a_number_without_a_logical_type_is_read_as_a_time():
    values = encoded(record(("n", "long")), {"n": 5})
    found = decoder(record(("n", "long")), time_in("millis")).decode(values, 0)
    assert found.column("n").cast(pa.int64()).to_pylist() == [5]


@pytest.mark.parametrize(
    ("writer", "reader", "message"),
    [
        (record(("a", "int")), record(("n", "int")), "r.n is not in the schema .* and has no default"),
        (record(("n", "long")), record(("n", "int")), "r.n was written as long, which is not read as int"),
        (record(("n", "string")), record(("n", "int")), "written as string, which is not read as int"),
        (record(("n", ["int", "string"])), record(("n", "int")), "is a union of int, string"),
        (decimal_of(2), decimal_of(3), r"written as decimal\(9, 2\), which is not read as decimal\(9, 3\)"),
        (time_in("millis"), time_in("micros"), "written as timestamp-millis, which is not read as timestamp-micros"),
        (
            record(("n", {"type": "fixed", "name": "F", "size": 2})),
            record(("n", {"type": "fixed", "name": "F", "size": 3})),
            "written with 2 bytes, and read as 3",
        ),
        (record(("n", "null")), record(("n", "int")), "written as null"),
        (
            logical("timestamp-nanos"),
            time_in("millis"),
            "written as timestamp-nanos, which is not read as timestamp-millis",
        ),
        (logical("local-timestamp-nanos"), time_in("micros"), "written as local-timestamp-nanos, which is not read as"),
        (logical("date"), time_in("millis"), "written as date, which is not read as timestamp-millis"),
        (time_in("micros"), logical("timestamp-nanos"), "timestamp-micros, which is not read as timestamp-nanos"),
        (logical("a", "bytes"), decimal_of(2), r"written as a, which is not read as decimal\(9, 2\)"),
        (record(("n", "string")), decimal_of(2), r"written as string, which is not read as decimal\(9, 2\)"),
        (decimal_of(2), record(("n", "string")), r"written as decimal\(9, 2\), which is not read as string"),
    ],
)
def test_schemas_that_do_not_go_together_are_refused(writer, reader, message):
    with pytest.raises(SchemaError, match=message):
        decoder(writer, reader)


def test_another_record_is_not_read_as_one_with_defaults():
    cancelled = {"type": "record", "name": "OrderCancelled", "fields": [{"name": "id", "type": "long"}]}
    order = {
        "type": "record",
        "name": "Order",
        "namespace": "shop",
        "fields": record(("id", "long"), ("n", "int", 0))["fields"],
    }
    with pytest.raises(
        SchemaError,
        match=r"r was written as the record OrderCancelled and is read as shop\.Order; if both are the same type, give that "
        r'of the reader "aliases": \["OrderCancelled"\]',
    ):
        decoder(cancelled, order)
    assert decoder(cancelled, {**order, "aliases": ["OrderCancelled"]}).decode([b"\x02"], 0).to_pylist() == [
        {"id": 1, "n": 0}
    ]


@pytest.mark.parametrize("aliases", ["Old", [7], None])
def test_aliases_are_a_list_of_names(aliases):
    with pytest.raises(SchemaError, match="here: aliases are a list of names"):
        parse_schema(json.dumps({**record(("n", "int")), "aliases": aliases}), "here")


NAMES = st.sampled_from(["A", "B", "s.A", "s.B", "t.A"])
FORMS: dict[str, Any] = {
    "record": {"fields": [{"name": "x", "type": "int"}]},
    "enum": {"symbols": ["X", "Y"]},
    "fixed": {"size": 1},
}
VALUES: dict[str, Any] = {"record": {"x": 1}, "enum": "Y", "fixed": b"z"}


@st.composite
def named_pairs(draw: st.DrawFn) -> tuple[Any, Any, dict[str, Any]]:
    """The record of a writer and that of a reader, and a row; their types are the same but for names and aliases."""
    top = [{"name": draw(NAMES), "aliases": draw(st.lists(NAMES, max_size=1))} for _ in range(2)]
    fields: list[list[Any]] = [[], []]
    row = {}
    for number in range(draw(st.integers(1, 2))):
        kind = draw(st.sampled_from([*FORMS]))
        wrap = draw(st.sampled_from(["", "array", "map"]))
        for side in range(2):
            name, aliases = (
                draw(NAMES) + (str(number) if draw(st.integers(0, 3)) else ""),
                draw(st.lists(NAMES, max_size=1)),
            )
            given: Any = {
                "type": kind, "name": name, "namespace": f"of{number}", "aliases": [f"{each}{number}" for each in aliases],
                **FORMS[kind],
            }  # fmt: skip
            if wrap:
                given = {"type": wrap, "items" if wrap == "array" else "values": given}
            if draw(st.booleans()):
                given = ["null", given] if draw(st.booleans()) else [given, "null"]
            fields[side].append({"name": f"f{number}", "type": given})
        value = VALUES[kind]
        row[f"f{number}"] = [value] if wrap == "array" else {"k": value} if wrap == "map" else value
    writer, reader = ({"type": "record", **top[side], "fields": fields[side]} for side in range(2))
    return writer, reader, row


@given(named_pairs())
@settings(max_examples=examples(400))
def test_types_of_other_names_are_read_where_another_parser_reads_them(pair):
    writer, reader, row = pair
    try:
        parsed = [fastavro.parse_schema(schema) for schema in (writer, reader)]
    except fastavro.schema.SchemaParseException:
        return  # a name that is used twice
    (value,) = encoded(writer, row)
    expected: Any = None
    with suppress(fastavro.read.SchemaResolutionError):
        expected = fastavro.schemaless_reader(io.BytesIO(value), parsed[0], parsed[1])
    try:
        (found,) = decoder(writer, reader).decode([value], 0).to_pylist()
    except SchemaError:
        assert expected is None
        return
    assert expected == row
    for name, each in row.items():
        assert found[name] == ([{"key": "k", "value": each["k"]}] if isinstance(each, dict) and "k" in each else each)


def nested(depth: int) -> Any:
    kind: Any = "int"
    for _ in range(depth):
        kind = {"type": "array", "items": kind}
    return record(("n", kind))


def doubled(times: int) -> Any:
    """Each record holds two of the one before: few words, and 2 ** times values."""
    fields: list[Any] = [("a0", {"type": "record", "name": "N0", "fields": [{"name": "x", "type": "int"}]})]
    for i in range(1, times):
        parts = [{"name": name, "type": f"N{i - 1}"} for name in "xy"]
        fields.append((f"a{i}", {"type": "record", "name": f"N{i}", "fields": parts}))
    return record(*fields)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("nonsense", "unknown Avro type"),
        ({"type": "nonsense"}, "unknown Avro type"),
        (7, "is not an Avro type"),
        ("string", "the schema is of type string; rows need a record"),
        (record(), "has no fields"),
        (record(("n", "Other")), "unknown Avro type 'Other'"),
        (record(("n", ["null", "R"])), "the type R contains itself"),
        (record(("n", {"type": "array", "items": "null"})), "items that take no bytes"),
        (record(("n", {"type": "array", "items": record()})), "items that take no bytes"),
        (record(("n", {"type": "fixed", "name": "F", "size": -1})), "has no size"),
        (record(("n", {"type": "enum", "name": "E", "symbols": []})), "has no symbols"),
        (record(("n", [])), "a union has at least one branch"),
        (record(("n", [["int"]])), "a union"),
        (record(("n", "int"), ("n", "int")), "two fields of one name"),
        ({"type": "record", "name": "R", "fields": [7]}, "a field has no name"),
        ({"type": "record", "fields": []}, "has no name"),
        (nested(60), "50 deep"),
        (nested(900), "50 deep"),
        (doubled(40), "over 10000 types"),
    ],
)
def test_schemas_that_are_none_or_have_no_end_are_refused(schema, message):
    with pytest.raises(SchemaError, match=message):
        parse_schema(json.dumps(schema), "here")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (["int", "string"], "is a union of int, string"),
        ("null", "always null"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 40}, "40 digits; columns have 38 at most"),
    ],
)
def test_types_that_no_column_has_are_refused_by_name(kind, message):
    with pytest.raises(SchemaError, match=f"r.n .*{message}"):
        arrow_type(parse_schema(json.dumps(record(("n", kind))), "here"), "r")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\ud800"])
def test_a_text_that_is_no_json_is_no_schema(text):
    with pytest.raises(SchemaError, match=r"not an Avro schema|deep"):
        parse_schema(text, "here")


@pytest.mark.parametrize(
    "kind", [pa.uint64(), pa.duration("us"), pa.timestamp("ns"), pa.struct([("a b", pa.int64())]), pa.decimal256(50, 2)]
)
def test_columns_without_a_form_in_avro_are_refused_by_name(kind):
    with pytest.raises(SchemaError, match="test: column 'c'"):
        AvroEncoder(pa.schema([("c", kind)]), "t", "test")
    with pytest.raises(SchemaError, match="test: column 'a-b': names in Avro"):
        AvroEncoder(pa.schema([("a-b", pa.int64())]), "t", "test")


# ---- bytes that are not what they should be ----

DAMAGED = record(
    ("flag", "boolean"),
    ("n", "long"),
    ("t", "string"),
    ("e", {"type": "enum", "name": "E", "symbols": ["A", "B", "C"]}),
    ("maybe", ["null", "int"]),
    ("list", {"type": "array", "items": "int"}),
    ("map", {"type": "map", "values": "bytes"}),
    ("money", {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}),
    ("noon", {"type": "int", "logicalType": "time-millis"}),
)


class Reference:
    """Reads by the words of Avro's specification, one value at a time. Raises ValueError."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        if not 0 <= count <= len(self.data) - self.at:
            raise ValueError("the end")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, bits: int = 64) -> int:
        found = shift = 0
        while True:
            (byte,) = self.take(1)
            found |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
            if shift >= 70:
                raise ValueError("too long")
        found = (found >> 1) ^ -(found & 1)
        if not -(2 ** (bits - 1)) <= found < 2 ** (bits - 1):
            raise ValueError("too large")
        return found

    def value(self, kind: AvroType) -> Any:
        match kind.kind:
            case "boolean":
                (byte,) = self.take(1)
                if byte > 1:
                    raise ValueError("no boolean")
                return byte == 1
            case "int":
                found: Any = self.number(32)
            case "long":
                found = self.number()
            case "string":
                return self.take(self.number()).decode()
            case "bytes":
                found = self.take(self.number())
            case "enum":
                index = self.number(32)
                if not 0 <= index < len(kind.symbols):
                    raise ValueError("no symbol")
                return kind.symbols[index]
            case "union":
                index = self.number(32)
                if not 0 <= index < len(kind.branches):
                    raise ValueError("no branch")
                return None if kind.branches[index].kind == "null" else self.value(kind.branches[index])
            case "record":
                return {field.name: self.value(field.type) for field in kind.fields}
            case _:
                pairs = self.items(kind)
                if kind.kind == "array":
                    return pairs
                return [{"key": key, "value": each} for key, each in dict(pairs).items()]
        if kind.logical == "decimal":
            unscaled = int.from_bytes(found, "big", signed=True)
            if not found or abs(unscaled) >= 10**kind.precision:
                raise ValueError("no decimal")
            return Decimal(unscaled).scaleb(-kind.scale)
        if kind.logical == "time-millis":
            if not 0 <= found < 86_400_000:
                raise ValueError("no time")
            return time(found // 3_600_000, found // 60_000 % 60, found // 1000 % 60, found % 1000 * 1000)
        return found

    def items(self, kind: AvroType) -> list[Any]:
        found = []
        while (count := self.number()) != 0:
            block_end = None
            if count < 0:
                count = -count
                size = self.number()
                block_end = self.at + size
            if count > len(self.data):
                raise ValueError("more items than bytes")
            for _ in range(count):
                key = self.take(self.number()).decode() if kind.kind == "map" else None
                each = self.value(kind.of())
                found.append((key, each) if kind.kind == "map" else each)
            if block_end is not None and block_end != self.at:
                raise ValueError("not its size")
        return found


rows_to_damage = st.fixed_dictionaries(
    {
        "flag": st.booleans(),
        "n": st.integers(-(2**63), 2**63 - 1),
        "t": st.text(max_size=4),
        "e": st.sampled_from("ABC"),
        "maybe": st.none() | st.integers(-(2**31), 2**31 - 1),
        "list": st.lists(st.integers(-9, 9), max_size=3),
        "map": st.dictionaries(st.text(max_size=2), st.binary(max_size=3), max_size=2),
        "money": st.decimals("-99.99", "99.99", places=2),
        "noon": st.times().map(lambda at: at.replace(microsecond=at.microsecond // 1000 * 1000)),
    }
)
HUGE = [b"\xff" * 9 + b"\x01", b"\xfe" + b"\xff" * 8 + b"\x01", b"\xff\xff\xff\xff\x0f", b"\x80" * 30, b"\xff" * 30]


@given(rows_to_damage, st.data())
@settings(max_examples=examples(600))
def test_damaged_bytes_are_refused_or_are_what_another_parser_makes_of_them(row, data):
    (value,) = encoded(DAMAGED, row)
    damaged = bytearray(value)
    at = data.draw(st.integers(0, len(value) - 1))
    match data.draw(st.sampled_from(["cut", "flip", "add", "huge", "noise"])):
        case "cut":
            del damaged[at:]
        case "flip":
            damaged[at] ^= 1 << data.draw(st.integers(0, 7))
        case "add":
            damaged += data.draw(st.binary(min_size=1, max_size=3))
        case "huge":
            damaged[at : at + 1] = data.draw(st.sampled_from(HUGE))
        case "noise":
            damaged[at:] = data.draw(st.binary(max_size=40))
    kind = parse_schema(json.dumps(DAMAGED), "here")
    reference = Reference(bytes(damaged))
    expected: Any = None
    with suppress(ValueError):
        expected = reference.value(kind)
    if reference.at < len(damaged):
        expected = None
    try:
        found = decoder(DAMAGED).decode([bytes(damaged)], 0).to_pylist()
    except pa.ArrowInvalid:
        assert expected is None
        return
    assert found == [expected]
