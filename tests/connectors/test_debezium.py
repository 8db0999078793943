"""Debezium's envelopes, in JSON and in Avro: each change is a row with its operation, and what is no change is told apart."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kafka_records import Record

from effort import examples
from midstream.connectors.kafka import schema_registry
from midstream.connectors.kafka.fetched_records import ObjectRecords
from midstream.connectors.kafka.record_parser import RecordParser
from midstream.connectors.kafka.schema_registry import header
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import ConfigError, SchemaError
from schema_registry_stub import StubRegistry, running_registry

COLUMNS = schema_of([("id", pa.int64()), ("who", pa.large_string())])
NAMES = {"c": "insert", "r": "insert", "u": "update", "d": "delete"}
TOMBSTONE: dict[str, Any] = {}
ROWS = st.fixed_dictionaries({"id": st.integers(-(2**53), 2**53), "who": st.none() | st.text('aé"\\\n', max_size=3)})
ENVELOPES = st.builds(
    lambda op, before, after, extra: {"op": op, "before": before, "after": None if op == "d" else after, **extra},
    st.sampled_from(["c", "r", "u", "d"]),
    ROWS,
    ROWS,
    st.sampled_from([{}, {"source": {"lsn": 1, "table": "t"}, "ts_ms": 1}, {"transaction": None}]),
)


def parser(on_bad_record: str = "fail", schema: pa.Schema = COLUMNS, **more: Any) -> RecordParser:
    return RecordParser("debezium", schema, ["offset"], on_bad_record == "drop", "test", **more)


def parsed(values: list[bytes | None], made: RecordParser) -> tuple[list[dict[str, Any]], dict[int, str]]:
    records = ObjectRecords([Record(value, at) for at, value in enumerate(values)])  # type: ignore[misc]
    batch, bad = made.rows(records, "t")
    assert batch.schema.equals(made.schema)
    return batch.to_pylist(), {each.position: each.error for each in bad}


def row_of(envelope: dict[str, Any], offset: int) -> dict[str, Any]:
    row = envelope["before"] if envelope["op"] == "d" else envelope["after"]
    return {**row, "_op": NAMES[envelope["op"]], "offset": offset}


def in_json(envelope: dict[str, Any], has_schema: bool) -> bytes | None:
    if envelope is TOMBSTONE:
        return None
    return json.dumps({"schema": {"type": "struct"}, "payload": envelope} if has_schema else envelope).encode()


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(ENVELOPES | st.just(TOMBSTONE), st.booleans()), max_size=12))
def test_each_change_is_a_row_with_its_operation(sent: list[tuple[dict[str, Any], bool]]) -> None:
    values = [in_json(envelope, has_schema) for envelope, has_schema in sent]
    expected = [row_of(envelope, at) for at, (envelope, _) in enumerate(sent) if envelope is not TOMBSTONE]
    assert parsed(values, parser()) == (expected, {})
    one_by_one = [row for at, value in enumerate(values) for row in parsed([*[None] * at, value], parser())[0]]
    assert one_by_one == expected


BAD = [
    (b'{"id": 1, "who": "a"}', "not a Debezium envelope: it has no `op`"),
    (b"{}", "not a Debezium envelope: it has no `op`"),
    (b'{"payload": null}', "not a Debezium envelope: it has no `op`"),
    (b'{"op": "t", "before": null, "after": null}', "the operation 't' of a Debezium envelope is none of c, r, u, d"),
    (b'{"op": "", "after": {"id": 1}}', "the operation '' of a Debezium envelope is none of"),
    (b'{"op": "c", "before": {"id": 1}, "after": null}', "does not have the row after its change"),
    (b'{"op": "d", "before": null, "after": {"id": 1}}', "does not have the row before its change"),
    (b'{"payload": {"op": "d"}}', "does not have the row before its change"),
    (b'{"op": "c", "after": {"id": "x"}}', "value is not debezium of the declared columns"),
    (b'{"op": 1, "after": {"id": 1}}', "value is not debezium of the declared columns"),
    (b'{"op": "c", "after": [1]}', "value is not debezium of the declared columns"),
    (b"[]", "JSON parse error: not an object"),
    (b"", "JSON parse error: not an object"),
    (b"null", "JSON parse error: not an object"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "message"), BAD)
def test_what_is_no_envelope_is_refused_or_goes_where_bad_records_go(value: bytes, message: str) -> None:
    good = b'{"op": "c", "after": {"id": 7, "who": "g"}}'
    with pytest.raises(SchemaError, match=rf"offset 1: .*{message}"):
        parsed([good, value, good], parser())
    rows, bad = parsed([good, value, None, good], parser("drop"))
    assert [row["offset"] for row in rows] == [0, 3]
    assert list(bad) == [1]
    assert message in bad[1]


def test_a_database_may_record_no_more_than_the_key_of_a_deleted_row() -> None:
    schema = pa.schema([field.with_nullable(False) for field in COLUMNS])
    rows, _ = parsed([b'{"op": "d", "before": {"id": 7}}'], parser(schema=schema))
    assert rows == [{"id": 7, "who": None, "_op": "delete", "offset": 0}]
    with pytest.raises(SchemaError, match="column 'who' has no value, though it is declared with nullable=False"):
        parsed([b'{"op": "u", "after": {"id": 7}}'], parser(schema=schema))


PLACEHOLDER = "__debezium_unavailable_value"
IN_BASE64 = base64.b64encode(PLACEHOLDER.encode()).decode()


@pytest.mark.parametrize(
    ("kind", "placeholder", "value"),
    [
        (pa.large_string(), PLACEHOLDER, f"x{PLACEHOLDER}"),
        (pa.large_binary(), IN_BASE64, f"x{IN_BASE64}"),
        (pa.large_list(pa.large_string()), [PLACEHOLDER], [PLACEHOLDER, ""]),
        (pa.large_list(pa.large_binary()), [IN_BASE64], [None]),
        (pa.large_list(pa.int32()), list(PLACEHOLDER.encode()), [*PLACEHOLDER.encode()[:-1], 0]),
        (pa.large_list(pa.float64()), list(PLACEHOLDER.encode()), None),
    ],
)
def test_a_value_that_the_database_did_not_record_is_no_value(kind: pa.DataType, placeholder: Any, value: Any) -> None:
    """An update of PostgreSQL leaves out large values (TOAST) that it does not change; Debezium writes a placeholder."""
    schema = schema_of([("id", pa.int64()), ("who", kind)])
    update = json.dumps({"op": "u", "after": {"id": 7, "who": placeholder}}).encode()
    good = json.dumps({"op": "u", "after": {"id": 8, "who": value}}).encode()
    with pytest.raises(SchemaError, match=r"offset 1: .*column 'who' is __debezium_unavailable_value.*IDENTITY FULL"):
        parsed([good, update], parser(schema=schema))
    rows, bad = parsed([update, good, None], parser("drop", schema=schema))
    assert [row["id"] for row in rows] == [8]
    assert list(bad) == [0]


def test_columns_may_be_called_as_envelopes_call_theirs_but_not_as_the_operation() -> None:
    odd = schema_of([("before", pa.int64()), ("payload", pa.large_string()), ("op", pa.large_string())])
    rows, _ = parsed([b'{"op": "c", "after": {"before": 1, "payload": "p", "op": "x"}}'], parser(schema=odd))
    assert rows == [{"before": 1, "payload": "p", "op": "x", "_op": "insert", "offset": 0}]
    with pytest.raises(SchemaError, match="more than one column '_op'"):
        parser(schema=pa.schema([("_op", pa.large_string())]))
    with pytest.raises(ConfigError, match="format='debezium' needs schema="):
        RecordParser("debezium", None, (), False, "test")


# ---- Avro ----

VALUE = {
    "type": "record", "name": "Value", "namespace": "db.orders",
    "fields": [{"name": "id", "type": "long"}, {"name": "who", "type": ["null", "string"], "default": None}],
}  # fmt: skip
ENVELOPE = {
    "type": "record", "name": "Envelope", "namespace": "db.orders",
    "fields": [
        {"name": "before", "type": ["null", VALUE], "default": None},
        {"name": "after", "type": ["null", "Value"], "default": None},
        {"name": "source", "type": {"type": "record", "name": "Source", "fields": [{"name": "lsn", "type": "long"}]}},
        {"name": "op", "type": "string"},
        {"name": "ts_ms", "type": ["null", "long"], "default": None},
    ],
}  # fmt: skip


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubRegistry]:
    monkeypatch.setattr(schema_registry, "_AGAIN_S", 0.0)
    with running_registry() as found:
        yield found


def in_avro(envelopes: list[dict[str, Any]], schema_id: int) -> list[bytes | None]:
    values: list[bytes | None] = []
    for envelope in envelopes:
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, fastavro.parse_schema(ENVELOPE), {"source": {"lsn": 1}, **envelope})
        values.append(header(schema_id) + stream.getvalue())
    return values


def test_envelopes_in_avro_have_the_columns_of_their_rows(registry) -> None:
    schema_id = registry.register("orders-value", ENVELOPE)
    made = RecordParser(
        "debezium", None, ["offset"], True, "test", registry={"url": registry.url}, subject="orders-value"
    )
    assert made.schema.names == ["id", "who", "_op", "offset"]
    sent: list[dict[str, Any]] = [
        {"op": "c", "before": None, "after": {"id": 1, "who": "a"}},
        {"op": "u", "before": {"id": 1, "who": "a"}, "after": {"id": 1, "who": None}},
        {"op": "d", "before": {"id": 1, "who": None}, "after": None},
        {"op": "m", "before": None, "after": None},
    ]
    values = in_avro(sent, schema_id)
    rows, bad = parsed([*values[:3], None, values[3]], made)
    assert rows == [row_of(envelope, at) for at, envelope in enumerate(sent[:3])]
    assert list(bad) == [4]
    assert "the operation 'm' of a Debezium envelope is none of" in bad[4]


def test_a_schema_that_is_no_envelope_is_refused(registry) -> None:
    registry.register("plain-value", VALUE)
    with pytest.raises(SchemaError, match=r"is not that of a Debezium envelope.*it has id, who"):
        RecordParser("debezium", None, (), False, "test", registry={"url": registry.url}, subject="plain-value")
