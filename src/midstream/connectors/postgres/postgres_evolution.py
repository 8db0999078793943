"""Columns that are added to a PostgreSQL table, in the transaction that needs them. Types of columns are never altered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from psycopg import Connection
from psycopg.sql import SQL, Identifier

from midstream.connectors.postgres.postgres_tables import Table, TableColumn, find_table, new_column, verbatim
from midstream.engine.core.errors import InvariantError, SchemaError


def missing_columns(table: Table, stream: pa.Schema, key: Sequence[str], where: str) -> tuple[TableColumn, ...]:
    """Return the columns that the stream has and the table lacks, as they would be added.

    Raises SchemaError for one that cannot be added.
    """
    names = {column.name for column in table.columns}
    missing = [field for field in stream if field.name not in names]
    check_addable(table, [field.name for field in missing], key, where)
    return tuple(new_column(field, where) for field in missing)


def check_addable(table: Table, names: Sequence[str], key: Sequence[str], where: str) -> None:
    """Raise SchemaError for a column of the key, and for one whose name differs from that of another only by its case: SQL
    takes both for the same unless they are quoted.
    """
    ignoring_case = {column.name.lower(): column.name for column in table.columns}
    for name in names:
        similar = ignoring_case.setdefault(name.lower(), name)
        if similar != name:
            raise SchemaError(
                f"{where}: column {name!r} differs from {similar!r} only by upper and lower case, which SQL ignores in {table}; "
                "rename one of them"
            )
        if name in key:
            raise SchemaError(
                f"{where}: {table} has no column {name!r}, and a column of the key is never added; it has "
                f"{', '.join(column.name for column in table.columns)}. Add it there, with values for the rows that it has"
            )


def add_columns(connection: Connection[Any], table: Table, columns: Sequence[TableColumn]) -> Table:
    """Add columns that may be null, unless another transaction was first. Return the table as it is then."""
    if not columns:
        return table
    parts = [
        SQL("ADD COLUMN IF NOT EXISTS {} {}").format(Identifier(each.name), SQL(verbatim(each.type + each.collation)))
        for each in columns
    ]
    connection.execute(SQL("ALTER TABLE {} {}").format(table.sql(), SQL(", ").join(parts)))
    return _found(connection, table.schema, table.name)


def locked(connection: Connection[Any], table: Table) -> Table:
    """Return the table as it is, and remains until this transaction ends."""
    connection.execute(SQL("LOCK TABLE {} IN ROW EXCLUSIVE MODE").format(table.sql()))
    return _found(connection, table.schema, table.name)


def as_staged(columns: Sequence[TableColumn], staged: Table, added: Sequence[TableColumn]) -> tuple[TableColumn, ...]:
    """Return columns of which the server describes those that are `added`, as the staging table has them."""
    there = {column.name: column.kept for column in staged.columns}
    new = {column.name for column in added}
    return tuple(replace(column, kept=there[column.name]) if column.name in new else column for column in columns)


def _found(connection: Connection[Any], schema: str, name: str) -> Table:
    table = find_table(connection, schema, name)
    if table is None:
        raise InvariantError(f"table {schema}.{name} does not exist, although this transaction has locked it")
    return table
