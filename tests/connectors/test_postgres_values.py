"""What a column of PostgreSQL gives back is what was written, or nothing was written: types of the server × values."""

from __future__ import annotations

import ipaddress
import json
import math
import re
import uuid
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import psycopg
import pyarrow as pa
import pytest
from connector_worlds import Loop, open_writer, prepared

from committers import committer_of
from midstream.connectors.postgres.postgres_sink import PostgresSink
from midstream.connectors.postgres.postgres_tables import find_table
from midstream.engine.core.errors import SchemaError

DOMAINS = """
    CREATE TYPE mood AS ENUM ('glad', 'abc');
    CREATE DOMAIN cents AS numeric(10,2); CREATE DOMAIN price AS cents CHECK (VALUE < 1000);
    CREATE DOMAIN at_seconds AS timestamp(0); CREATE DOMAIN code AS varchar(3); CREATE DOMAIN codes AS code;
    CREATE DOMAIN prices AS numeric(10,2)[]; CREATE DOMAIN fixed AS char(3); CREATE DOMAIN days AS interval day;
"""
KEPT = (
    "bool", "int2", "int4", "int8", "numeric", "numeric(10,2)", "numeric(3,5)", "numeric(4)", "real", "float8",
    "text", "varchar", "varchar(3)", "char(3)", "bpchar", "json", "jsonb", "uuid", "inet", "cidr", "mood", "bytea",
    "date", "time", "time(0)", "time(3)", "timestamp", "timestamp(0)", "timestamp(3)", "timestamptz", "timestamptz(0)",
    "interval", "interval(0)", "interval(3)", "interval day to second", "interval minute to second(2)", "interval second",
    "cents", "price", "at_seconds", "code", "codes", "prices", "fixed",
    "bool[]", "int4[]", "int8[]", "numeric[]", "numeric(10,2)[]", "cents[]", "price[]", "real[]", "float8[]", "text[]",
    "varchar(3)[]", "code[]",
)  # fmt: skip
"""Types that keep some of the values below."""
REFUSED = (
    '"char"', "name", "xml", "money", "bit(3)", "bit varying(3)", "timetz", "interval day", "interval hour to minute",
    "interval month", "interval year to month", "interval hour", "days", "point", "char(3)[]", "timestamp(0)[]", "oid",
)  # fmt: skip
"""Types that keep none."""
ELEMENTS_OF = {"cents[]": "numeric[]", "price[]": "numeric[]", "code[]": "varchar[]"}
"""What psycopg would read as text."""
MOMENT = datetime(2024, 2, 29, 12, 0, 0, 600001)
BERLIN = ZoneInfo("Europe/Berlin")
VALUES: dict[pa.DataType, list[Any]] = {
    pa.bool_(): [True, False, None],
    pa.int64(): [0, -1, 127, 1234, 32768, 2**31, 10**12, 2**63 - 1],
    pa.uint64(): [7, 2**64 - 1],
    pa.float64(): [0.1, -0.0, 5e-324, 1.7976931348623157e308, 1e22, 16777217.0, math.nan, -math.inf],
    pa.float32(): [0.5, 0.10000000149011612, 3.4028234663852886e38, 1.1754943508222875e-38, math.nan],
    pa.decimal128(10, 3): [Decimal("1.239"), Decimal("1.250"), Decimal("-9999999.999")],
    pa.decimal128(6, 2): [Decimal("1.25"), Decimal("999.99"), Decimal("-9999.99")],
    pa.decimal128(5, 0): [Decimal(1200), Decimal(1234), Decimal(99999)],
    pa.decimal128(5, 5): [Decimal("0.00123"), Decimal("0.12345")],
    pa.large_string(): ["", "a", "ab ", "abc", "abc ", " ab", "é日本", "\\N", "NULL", 'x"y,\n', "x" * 100, "a\0b"],
    pa.large_binary(): [b"", b"\x00\xff\\,"],
    pa.date32(): [date(1, 1, 1), date(1582, 10, 10), date(9999, 12, 31), -2_000_000, 3_000_000],
    pa.time64("us"): [time(0), time(23, 59, 59, 999999), time(12, 0, 0, 600001), time(12, 0, 0, 500000), time(12, 0, 1)],
    pa.duration("us"): [timedelta(hours=47, minutes=59), timedelta(microseconds=1), timedelta(0), timedelta(days=400_000),
        timedelta(days=-1, microseconds=7), timedelta(milliseconds=-1500), timedelta(days=2)],
    pa.timestamp("us"): [MOMENT, MOMENT.replace(microsecond=500000), MOMENT.replace(microsecond=0), datetime(1, 1, 1),
        datetime(1582, 10, 10), datetime(9999, 12, 31, 23, 59, 59, 999999), 253402300800000000, -62135596800000001],
    pa.timestamp("us", "Europe/Berlin"): [datetime(1880, 1, 1, 12, 0, 0, 7, tzinfo=BERLIN), MOMENT.replace(tzinfo=BERLIN),
        datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=BERLIN), datetime(1969, 12, 31, 23, 59, 59, 999000, UTC)],
    pa.large_list(pa.large_string()): [[], [None, "NULL", 'a"b', ""], ["abc"], ["abcd"], ["ab", "abc  "], ["a\0"]],
    pa.large_list(pa.int64()): [[1, None, -3], [2**40]],
    pa.large_list(pa.bool_()): [[True, None, False]],
    pa.large_list(pa.float64()): [[0.1, 1e22, 5e-324, math.inf, None], [math.nan]],
    pa.large_list(pa.float32()): [[0.10000000149011612, 3.4028234663852886e38]],
    pa.large_list(pa.decimal128(6, 2)): [[Decimal("1.25"), None], [Decimal("9999.99")]],
    pa.large_list(pa.decimal128(6, 3)): [[Decimal("1.239")]],
    pa.large_list(pa.timestamp("us")): [[MOMENT]],
}  # fmt: skip
OTHER_TEXTS = {
    "json": ['{"a":1,"a":2}', '{"b" :1}', "NaN"],
    "jsonb": ['{"a":1,"a":2}', '[{"b":1}, {"c":1, "c":1}]', '{"b":1, "a": [1e2, 0.1, -0.0, 12345678901234567890123]}',
        '"\\u0000"', '"\\u00e9 "', "[" * 20_000],
    "uuid": ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11", "a"],
    "inet": ["10.0.0.1", "10.0.0.1/8", "::1", "12", "10.0"], "cidr": ["10.0.0.0/8", "10.0.0.1/8", "::1", "12", "10/8", "10.1.2"],
    "mood": ["glad", "abc", "sad"], "xml": ["<a/>"], "bit(3)": ["101"], "bit varying(3)": ["1"], "money": ["12"],
}  # fmt: skip
"""Instead of the texts above, for types that take few of them."""


def reading(kind: pa.DataType, ddl: str, value: Any) -> Any:
    """What psycopg gives for a column of `ddl` that has kept `value`."""
    if value is not None and kind == pa.large_string():
        if ddl in ("json", "jsonb"):
            return json.loads(value)
        if ddl == "uuid":
            return uuid.UUID(value)
        if ddl == "inet":
            return ipaddress.ip_interface(value) if "/" in value else ipaddress.ip_address(value)
        if ddl == "cidr":
            return ipaddress.ip_network(value)
    return value


def same(left: Any, right: Any) -> bool:
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, datetime) and left.tzinfo and isinstance(right, datetime) and right.tzinfo:
        return left.astimezone(UTC) == right.astimezone(UTC)  # folds do not compare
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    return bool(left == right)


def column(kind: pa.DataType, values: list[Any]) -> pa.Array[Any]:
    if pa.types.is_temporal(kind):  # some of them are none that Python has
        whole = pa.int32() if pa.types.is_date32(kind) else pa.int64()
        raw = [v if isinstance(v, int) else pa.array([v], kind).cast(whole)[0].as_py() for v in values]
        return pa.array(raw, whole).cast(kind)
    return pa.array(values, kind)


def accepted(sink: PostgresSink, kind: pa.DataType, values: list[Any], numbers: list[int]) -> list[bytes]:
    """What is staged of these values: what is refused is written again in halves, down to the one that is refused."""
    taken = [values[number] for number in numbers]
    rows = pa.RecordBatch.from_arrays([pa.array(numbers), column(kind, taken)], names=["n", "v"])
    loop = Loop()
    writer = open_writer(sink, rows.schema, loop, subtask=1000 * numbers[0] + len(numbers))
    writer.write(rows)
    loop.run()
    refusal: SchemaError | None = None
    try:
        return prepared(writer, 1)
    except SchemaError as error:
        refusal = error
    if len(numbers) == 1:
        assert "operator 'sink out': PostgresSink on t: " in str(refusal)
        assert re.search("column '?v|type json", str(refusal)), refusal
        return []
    half = len(numbers) // 2
    return [
        *accepted(sink, kind, values, numbers[:half]),
        *accepted(sink, kind, values, numbers[half:]),
    ]


def kept_of(database: str, ddl: str) -> list[Any]:
    """Writes the values into a table with a column of this type; checks what is there; gives it."""
    kept: list[Any] = []
    of_elements = ELEMENTS_OF.get(ddl)
    query = f"SELECT n, v{f'::{of_elements}' if of_elements else ''} FROM t"
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE t (n int8, v {ddl})")
        table = find_table(connection, None, "t")
        assert table is not None
        for kind, values_of_kind in VALUES.items():
            values = OTHER_TEXTS.get(ddl, values_of_kind) if kind == pa.large_string() else values_of_kind
            schema, refusal = pa.schema([("n", pa.int64()), ("v", kind)]), None
            try:
                table.matched(schema, "the sink")
            except SchemaError as error:
                refusal = str(error)
            if refusal is not None:
                assert re.search(r"the sink: column 'v' is .* in the stream and .* in table public.t; ", refusal), (
                    refusal
                )
                continue
            connection.execute("TRUNCATE t")
            sink = PostgresSink(database, "t")
            sink.validate(schema, restoring=False)
            committer_of(sink, "job-a").commit(1, accepted(sink, kind, values, list(range(len(values)))))
            for number, back in connection.execute(query, binary=ddl.startswith("real")):
                assert same(back, reading(kind, ddl, values[number])), (ddl, kind, values[number], back)
                kept.append(back)
    return kept


@pytest.fixture
def types(database: str) -> str:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(DOMAINS)
    return database


@pytest.mark.parametrize("ddl", KEPT)
def test_what_is_read_back_is_what_was_written(types, ddl):
    assert kept_of(types, ddl), "it keeps something"


@pytest.mark.parametrize("ddl", REFUSED)
def test_types_that_change_most_values_are_refused(types, ddl):
    assert kept_of(types, ddl) == []


def test_a_numeric_of_hundreds_is_told_from_one_of_hundredths(types):
    with psycopg.connect(types) as connection:
        if connection.info.server_version < 150000:
            pytest.skip("a scale below zero is new in PostgreSQL 15")
    assert kept_of(types, "numeric(5,-2)") == []
