"""A query of a real PostgreSQL server as the table of a join: its types, what it does at the server, what is refused."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from midstream import ConfigError, Environment, MidstreamError, SchemaError, testing
from midstream.connectors import PostgresQuery
from midstream.engine.core.arrow_types import schema_of
from postgres_server import PASSWORD


def run(database: str, query: str) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(query.encode())


VALUES: list[tuple[str, pa.DataType, Any]] = [
    ("true", pa.bool_(), True),
    ("1::int2", pa.int16(), 1),
    ("-2::int4", pa.int32(), -2),
    ("9223372036854775807::int8", pa.int64(), 2**63 - 1),
    ("0.1::float4", pa.float32(), pytest.approx(0.1)),
    ("'NaN'::float8", pa.float64(), pytest.approx(float("nan"), nan_ok=True)),
    ("'é%s'::text", pa.large_string(), "é%s"),
    ("'ab'::varchar(3)", pa.large_string(), "ab"),
    ("'\\x00ff'::bytea", pa.large_binary(), b"\x00\xff"),
    ("'2024-02-29'::date", pa.date32(), date(2024, 2, 29)),
    ("'23:59:59.5'::time", pa.time64("us"), time(23, 59, 59, 500_000)),
    ("'36 hours'::interval", pa.duration("us"), timedelta(hours=36)),
    ("'2024-01-01 12:00'::timestamp", pa.timestamp("us"), datetime(2024, 1, 1, 12)),
    ("'2024-01-01 12:00+02'::timestamptz", pa.timestamp("us", "UTC"), datetime(2024, 1, 1, 10, tzinfo=UTC)),
    ("1.50::numeric(10, 2)", pa.decimal128(10, 2), Decimal("1.50")),
    ("NULL::text", pa.large_string(), None),
]


def test_values_keep_their_types(database):
    query = PostgresQuery(
        database, "SELECT " + ", ".join(f"{value} AS c{n}" for n, (value, _, _) in enumerate(VALUES)) + ";"
    )
    schema = pa.schema([(f"c{n}", kind) for n, (_, kind, _) in enumerate(VALUES)])
    assert query.schema() == schema
    table = query.load()
    assert table.schema == schema
    assert list(table.to_pylist()[0].values()) == [value for _, _, value in VALUES]


def test_a_stream_is_joined_with_the_rows_of_a_query(database):
    run(database, "CREATE TABLE users (id int8, name text); INSERT INTO users VALUES (1, 'ann'), (2, 'bob')")
    stream = Environment("shop").from_collection([{"id": 2}, {"id": 3}]).uid("rows")
    joined = stream.join_table(PostgresQuery(database, "SELECT * FROM users"), on="id", how="left", refresh="10 s")
    assert testing.run(joined).rows == [{"id": 2, "name": "bob"}, {"id": 3, "name": None}]
    with testing.job(joined) as job:
        assert job.feed({"id": 3}).take() == [{"id": 3, "name": None}]
        run(database, "INSERT INTO users VALUES (3, 'eve')")
        job.advance_processing_time("11 s")
        assert job.feed({"id": 3}).take() == [{"id": 3, "name": "eve"}]
        run(database, "DROP TABLE users")
        job.advance_processing_time("11 s")
        assert job.feed({"id": 3}).take() == [{"id": 3, "name": "eve"}]
    with pytest.raises(
        ConfigError, match=r"test_postgres_query.py:\d+: PostgresQuery: relation \"users\" does not exist"
    ):
        stream.join_table(PostgresQuery(database, "SELECT * FROM users"), on="id")


def test_an_empty_result_has_its_columns(database):
    table = PostgresQuery(database, "SELECT 1 AS id, 'a'::text AS name WHERE false").load()
    assert table.num_rows == 0
    assert table.schema == schema_of([("id", pa.int32()), ("name", pa.large_string())])


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("SELECT 1.5 AS x", "column 'x' is numeric, which has no type here; cast it in the query: x::numeric"),
        ("SELECT '{}'::json AS x", "column 'x' is json, which has no type here; cast it in the query: x::text"),
        ("SELECT '{1}'::int4[] AS x", "column 'x' is of the type 1007"),
        ("SELECT 'infinity'::timestamp AS x", "timestamp"),
        ("CREATE TABLE t (n int)", "syntax error"),
        ("DELETE FROM pg_class", "syntax error"),
        ("SELECT set_config('a.b', 'c', false), nextval('s') AS x", "does not exist"),
    ],
)
def test_what_a_query_cannot_return_is_refused(database, sql, why):
    with pytest.raises(MidstreamError) as caught:
        PostgresQuery(database, sql).load()
    assert why in str(caught.value)
    assert PASSWORD not in str(caught.value)


def test_what_is_no_query_is_refused(database):
    with pytest.raises(SchemaError, match="sql='' is not a query"):
        PostgresQuery(database, "")
    with pytest.raises(ConfigError, match="PostgresQuery: dsn= is not a connection string"):
        PostgresQuery("no connection string", "SELECT 1")
    assert PASSWORD not in repr(PostgresQuery(database, "SELECT 1"))
