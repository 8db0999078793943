"""Rows that put and delete rows of a PostgreSQL table by key: what remains, and what is refused before the checkpoint."""

from __future__ import annotations

from typing import Any

import psycopg
import pyarrow as pa
import pytest
from connector_worlds import Loop, open_writer, prepared, written

from committers import committer_of
from midstream.connectors.common.row_operations import written_columns
from midstream.connectors.postgres.postgres_sink import PostgresSink
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import ConfigError, MidstreamError, SchemaError
from postgres_server import Server

USERS = schema_of([("id", pa.int64()), ("name", pa.large_string()), ("op", pa.large_string())])


def users(*rows: tuple[Any, ...]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([dict(zip(USERS.names, row, strict=True)) for row in rows], USERS)


def new_sink(database: str, columns: pa.Schema = USERS, **options: Any) -> PostgresSink:
    sink = PostgresSink(database, "users", **{"key": ["id"], "op": "op", **options})
    sink.validate(columns, restoring=False)
    return sink


def ask(database: str, query: str) -> list[Any]:
    with psycopg.connect(database, autocommit=True) as connection:
        cursor = connection.execute(query)
        return cursor.fetchall() if cursor.description else []


def found(database: str) -> list[Any]:
    return ask(database, "SELECT id, name FROM users ORDER BY id")


def failure_of(sink: PostgresSink, rows: pa.RecordBatch) -> MidstreamError:
    loop = Loop()
    writer = open_writer(sink, rows.schema, loop)
    writer.write(rows)
    loop.run()
    try:
        prepared(writer, 1)
    except MidstreamError as error:
        return error
    raise AssertionError("it was prepared")


def test_rows_are_put_and_deleted_by_key_and_the_last_operation_of_a_checkpoint_counts(database):
    sink = new_sink(database)
    committer = committer_of(sink, "job-a")
    first = users((1, "ann", "insert"), (2, "bob", "insert"), (3, "cy", "insert"), (3, None, "delete"))
    committer.commit(1, written(sink, first) + written(sink, users((4, "di", "update")), subtask=1))
    assert found(database) == [(1, "ann"), (2, "bob"), (4, "di")]
    second = users(
        *((1, "anna", "update"), (2, None, "delete"), (9, None, "delete"), (4, None, "delete"), (4, "dee", "insert")),
        *((1, "annie", "insert"), (5, "eve", "insert"), (5, None, "delete"), (5, "ev", "update")),
    )
    committables = written(sink, second, 2, subtask=2)
    for job in ("job-a", "job-a", "job-b"):
        committer_of(sink, job).commit(2, committables)
    assert found(database) == [(1, "annie"), (4, "dee"), (5, "ev")]
    assert [column for (column,) in ask(database, "SELECT attname FROM pg_attribute WHERE attrelid = 'users'::regclass AND attnum > 0")] == ["id", "name"]  # fmt: skip
    assert (
        ask(database, "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname ~ '^midstream_[0-9a-f]{16}'") == []
    )


def test_of_a_deleting_row_only_the_key_counts(database):
    ask(
        database,
        "CREATE TABLE users (name varchar(5) NOT NULL CHECK (name <> ''), id int8 PRIMARY KEY, n int4 NOT NULL,"
        " CHECK (n IS NOT NULL AND n > 0), CHECK (id > 0) NO INHERIT)",
    )
    schema = schema_of([*((name, USERS.field(name).type) for name in USERS.names), ("n", pa.int64())])

    def rows(*values: tuple[Any, ...]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([dict(zip(schema.names, each, strict=True)) for each in values], schema)

    sink = new_sink(database, schema)
    put = rows((1, "ann", "insert", 1), (2, "bob", "insert", 1), (3, "cy", "insert", 1))
    committer_of(sink, "job-a").commit(1, written(sink, put))
    deleted = rows((1, None, "delete", None), (2, "far too long", "delete", -(2**40)), (3, "", "delete", 0))
    committer_of(sink, "job-a").commit(2, written(sink, deleted, 2, subtask=1))
    assert found(database) == []
    for values, said in [
        ((1, None, "insert", 1), "row 0 since the last checkpoint: column 'name' must have a value, but it is null"),
        ((1, "ann", "update", None), "column 'n' must have a value"),
        ((1, "", "update", 1), "violates check constraint"),
        ((0, "ann", "insert", 1), "violates check constraint"),
        ((1, "far too long", "insert", 1), "'far too long'"),
    ]:
        error = failure_of(sink, rows(values))
        assert isinstance(error, SchemaError)
        assert said in str(error)


def test_a_unique_value_that_moves_to_another_key_within_a_checkpoint_is_no_conflict(database):
    ask(database, "CREATE TABLE users (id int8 PRIMARY KEY, name text UNIQUE)")
    sink = new_sink(database)
    committer_of(sink, "job-a").commit(1, written(sink, users((1, "ann", "insert"))))
    moved = users((2, "ann", "insert"), (1, None, "delete"))
    committer_of(sink, "job-a").commit(2, written(sink, moved, 2, subtask=1))
    assert found(database) == [(2, "ann")]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ((7, "x", "upsert"), "row 1 since the last checkpoint: operation column 'op' is 'upsert'; it must be 'insert', 'update' or 'delete'"),
        ((7, "x", "DELETE"), "operation column 'op' is 'DELETE'"),
        ((7, "x", None), "operation column 'op' is None"),
        ((None, "x", "delete"), "row 1 since the last checkpoint: key column 'id' is null"),
    ],
)  # fmt: skip
def test_a_row_without_a_key_or_with_an_unknown_operation_fails_before_the_checkpoint(database, row, said):
    sink = new_sink(database)
    error = failure_of(sink, users((1, "ann", "insert"), row))
    assert isinstance(error, SchemaError)
    assert said in str(error)
    assert str(error).startswith("operator 'sink out': PostgresSink on users: ")


def test_the_right_to_delete_any_row_is_checked_at_the_start(database, postgres_server: Server):
    name = database.split("dbname=")[1].split()[0]
    ask(database, "CREATE TABLE users (id int8 PRIMARY KEY, name text); CREATE SCHEMA desk")
    ask(database, "CREATE ROLE etl LOGIN PASSWORD 'x'; GRANT CREATE, USAGE ON SCHEMA desk TO etl")
    try:
        ask(database, "GRANT SELECT, INSERT, UPDATE ON users TO etl")
        as_etl = postgres_server.dsn(name, "etl", "x")
        new_sink(as_etl, written_columns(USERS, "op"), op=None, staging_schema="desk", schema="public")
        with pytest.raises(ConfigError, match="permission denied for table users"):
            new_sink(as_etl, staging_schema="desk", schema="public")
        ask(database, "GRANT DELETE ON users TO etl")
        new_sink(as_etl, staging_schema="desk", schema="public")
        ask(database, "ALTER TABLE users ENABLE ROW LEVEL SECURITY; CREATE POLICY own ON users USING (id > 1)")
        with pytest.raises(ConfigError, match="affected by row-level security"):
            new_sink(as_etl, staging_schema="desk", schema="public")
    finally:
        ask(database, "DROP OWNED BY etl; DROP ROLE etl")


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"key": []}, ConfigError, r"PostgresSink: op='op' needs the columns .*: give them as well, for example key=\['id'\]"),
        ({"key": ["op"]}, ConfigError, "'op' is the operation, and cannot be in the key"),
        ({"key": ["id", "id"]}, ConfigError, "names a column twice"),
        ({"key": "id"}, ConfigError, r"give a list of columns: key=\['id'\]"),
        ({"op": 3}, ConfigError, "op=3 is not the name of a column"),
        ({"op": "what"}, SchemaError, "operation column 'what' is not in the stream; it has id, name, op"),
        ({"op": "id", "key": ["name"]}, SchemaError, "operation column 'id' is int64; it must be text"),
        ({"key": ["who"]}, SchemaError, "key column 'who' is not in the stream; it has id, name, op"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(database, options, error, said):
    with pytest.raises(error, match=said):
        new_sink(database, **options)


@pytest.mark.parametrize("name", ["midstream_row", "midstream_deletes"])
def test_columns_that_only_staging_tables_have_are_refused(database, name):
    schema = schema_of([("id", pa.int64()), (name, pa.int64())])
    with pytest.raises(SchemaError, match=f"a column may not be called '{name}'"):
        new_sink(database, schema, op=None)
