"""A query of PostgreSQL whose rows are a table of `join_table`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import psycopg
import pyarrow as pa
from psycopg import Column, Connection

from midstream.connectors.postgres.connections import checked_dsn, connect
from midstream.connectors.postgres.postgres_tables import explained
from midstream.engine.core.errors import SchemaError
from midstream.engine.core.python_values import ValueMisfit, to_array

_WHERE: Final = "PostgresQuery"
_TEXT: Final = pa.large_string()
TYPES: Final[dict[str, pa.DataType]] = {
    "bool": pa.bool_(),
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
    "text": _TEXT,
    "varchar": _TEXT,
    "bpchar": _TEXT,
    "name": _TEXT,
    "bytea": pa.large_binary(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "interval": pa.duration("us"),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
}
"""The Arrow type of each type of PostgreSQL that is read. A numeric with a declared scale is a decimal."""


@dataclass(frozen=True)
class PostgresQuery:
    """The rows of a query, as a table for `join_table`; needs `pip install 'midstream[postgres]'`.

    `dsn`: a connection string; a password comes from PGPASSWORD, a password file or a service file of the process that
    connects, which is that of the call, and each slot.
    `sql`: the query. It is run in a transaction that only reads. A numeric column needs a precision, as in
    `price::numeric(10, 2)`; columns of other types than numbers, text, bytes, booleans, dates and times are cast:
    `id::text`.

        orders.join_table(PostgresQuery("host=db dbname=shop", "SELECT id, name FROM users"), on="id", refresh="5 min")
    """

    dsn: str = field(repr=False)
    sql: str

    def __post_init__(self) -> None:
        checked_dsn(self.dsn, _WHERE)
        if not isinstance(self.sql, str) or not self.sql.strip():
            raise SchemaError(
                f"{_WHERE}: sql={self.sql!r} is not a query; write for example 'SELECT id, name FROM users'"
            )

    @property
    def text(self) -> str:
        """The query, for messages."""
        return self.sql

    def load(self) -> pa.Table:
        """Run the query.

        Returns its rows. Raises SchemaError for a column of a type that is not read, ConfigError for a query that the
        server refuses, StorageError if it cannot be reached.

            users = PostgresQuery("host=db dbname=shop", "SELECT id, name FROM users").load()
        """
        with explained(_WHERE), connect(self.dsn, _WHERE) as connection:
            schema, rows = _selected(connection, self.sql, with_rows=True)
        columns = []
        values: list[Any] = list(zip(*rows, strict=True)) or [()] * len(schema)
        for each, column in zip(schema, values, strict=True):
            try:
                is_narrow = each.type == pa.float32()  # its text has fewer digits than the float64 of Python
                columns.append(pa.array(column, each.type) if is_narrow else to_array(list(column), each.type))
            except (ValueMisfit, pa.ArrowException) as error:
                raise SchemaError(f"{_WHERE}: column {each.name!r}: {error}; cast it in the query") from error
        return pa.Table.from_arrays(columns, schema=schema)

    def schema(self) -> pa.Schema:
        """Run the query, but fetch no rows.

        Returns its columns. Raises as `load` does.

            columns = PostgresQuery("host=db dbname=shop", "SELECT id, name FROM users").schema()
        """
        with explained(_WHERE), connect(self.dsn, _WHERE) as connection:
            return _selected(connection, self.sql, with_rows=False)[0]


def _selected(connection: Connection[Any], query: str, *, with_rows: bool) -> tuple[pa.Schema, list[Any]]:
    connection.read_only = True
    with connection.cursor(name="midstream") as cursor:  # the server sends no row before it is fetched
        cursor.execute(query.strip().rstrip(";").encode())
        described = cursor.description or []
        if not described:
            raise SchemaError(f"{_WHERE}: the query returns no columns")
        schema = pa.schema([(column.name, _type_of(column)) for column in described])
        return schema, cursor.fetchall() if with_rows else []


def _type_of(column: Column) -> pa.DataType:
    info = psycopg.postgres.types.get(column.type_code)
    name = info.name if info is not None and info.oid == column.type_code else f"of the type {column.type_code}"
    if name == "numeric" and column.precision is not None:
        return pa.decimal128(column.precision, column.scale or 0)
    if name not in TYPES:
        way = "numeric(20, 4)" if name == "numeric" else "text"
        raise SchemaError(
            f"{_WHERE}: column {column.name!r} is {name}, which has no type here; cast it in the query: "
            f"{column.name}::{way}"
        )
    return TYPES[name]
