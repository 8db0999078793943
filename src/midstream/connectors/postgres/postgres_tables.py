"""The target table as the server describes it: found, created, checked; and the SQL around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, LiteralString

import psycopg
import pyarrow as pa
from psycopg import Connection, Error
from psycopg.sql import SQL, Composable, Composed, Identifier

from midstream.connectors.postgres.postgres_types import Kept, created_type, why_not
from midstream.engine.core.errors import ConfigError, MidstreamError, SchemaError, StorageError

ROW_NUMBER: Final = "midstream_row"
"""The column with the order of staged rows that will be upserted, so that the last one of a key wins."""

NAME_BYTES_MAX: Final = 63
DELETES: Final = "midstream_deletes"
"""The column that tells which staged rows delete the row of their key, if rows have operations."""
STAGING_COLUMNS: Final = (ROW_NUMBER, DELETES)
_SYSTEM_COLUMNS: Final = ("tableoid", "xmin", "cmin", "xmax", "cmax", "ctid")
_KIN: Final = (frozenset(("int2", "int4", "int8", "numeric")), frozenset(("text", "varchar", "bpchar")))
"""Types between which a column may be altered while rows of it are staged."""
_TABLES = ("r", "p")
"""pg_class.relkind: tables, also partitioned ones."""

_FIND: LiteralString = """
    SELECT c.oid::int8, n.nspname, c.relname, c.relkind::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = to_regclass(%s)"""
_COLUMNS: LiteralString = """
    WITH RECURSIVE seen(attnum, type, modifier, dimensions) AS (
        SELECT attnum, atttypid, atttypmod, 0 FROM pg_attribute WHERE attrelid = %(table)s AND attnum > 0 AND NOT attisdropped
        UNION ALL
        SELECT s.attnum, CASE t.typtype WHEN 'd' THEN t.typbasetype ELSE t.typelem END,
               CASE t.typtype WHEN 'd' THEN t.typtypmod ELSE s.modifier END,
               s.dimensions + CASE t.typtype WHEN 'd' THEN 0 ELSE 1 END
        FROM seen s JOIN pg_type t ON t.oid = s.type
        WHERE t.typtype = 'd' OR t.typcategory = 'A' AND t.typelem <> 0)
    SELECT a.attname, format_type(a.atttypid, a.atttypmod), coalesce((
               SELECT ' COLLATE ' || quote_ident(n.nspname) || '.' || quote_ident(c.collname)
               FROM pg_collation c JOIN pg_namespace n ON n.oid = c.collnamespace
               WHERE c.oid = a.attcollation AND a.attcollation <> t.typcollation), ''),
           a.attnotnull, a.atthasdef OR a.attidentity <> '' OR a.attgenerated <> '',
           a.attgenerated <> '' OR a.attidentity = 'a', b.typname, s.modifier, s.dimensions, b.typtype = 'e'
    FROM pg_attribute a
    JOIN pg_type t ON t.oid = a.atttypid
    JOIN seen s ON s.attnum = a.attnum
    JOIN pg_type b ON b.oid = s.type AND b.typtype <> 'd' AND NOT (b.typcategory = 'A' AND b.typelem <> 0)
    WHERE a.attrelid = %(table)s ORDER BY a.attnum"""
_CHECKS: LiteralString = """
    SELECT pg_get_constraintdef(k.oid), pg_get_expr(k.conbin, k.conrelid), array(
        SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = k.conrelid AND a.attnum = ANY (k.conkey))
    FROM pg_constraint k WHERE k.conrelid = %s AND k.contype = 'c' ORDER BY k.conname"""
_UNIQUE_KEYS: LiteralString = """
    SELECT array(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = i.indrelid
        AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]))
    FROM pg_index i
    WHERE i.indrelid = %s AND i.indisunique AND i.indisvalid AND i.indimmediate AND i.indpred IS NULL AND i.indexprs IS NULL"""

_NOT_BYTEWISE: LiteralString = """
    SELECT a.attname FROM pg_attribute a JOIN pg_collation c ON c.oid = a.attcollation
    WHERE a.attrelid = %s AND NOT c.collisdeterministic"""
_OTHER_FORMS: Final = ("citext", "inet", "cidr", "jsonb")
"""Types of which values of several forms are equal."""


@dataclass(frozen=True, slots=True)
class TableColumn:
    name: str
    type: str
    """The type, as SQL writes it."""
    collation: str
    """What SQL writes after the type for a collation other than the type's own."""
    is_required: bool
    has_default: bool
    is_computed: bool
    """Only the server may set its values."""
    kept: Kept


@dataclass(frozen=True, slots=True)
class Table:
    oid: int
    schema: str
    name: str
    columns: tuple[TableColumn, ...]
    checks: tuple[tuple[str, str, frozenset[str]], ...]
    """CHECK constraints: the text of each, its condition alone, and the columns that it refers to."""

    def __str__(self) -> str:
        return f"table {self.schema}.{self.name}"

    def sql(self) -> Composable:
        return identifier(self.schema, self.name)

    def matched(self, schema: pa.Schema, where: str, added: Sequence[TableColumn] = ()) -> tuple[TableColumn, ...]:
        """Return the columns that correspond to the stream's, in its order. Raises SchemaError for the first that does
        not fit.

        `added`: columns made for the stream, which the table will have.
        """
        columns = {column.name: column for column in (*self.columns, *added)}
        new = {column.name for column in added}
        for field in schema:
            if field.name in new:
                continue
            column = columns.get(field.name)
            if column is None:
                raise SchemaError(
                    f"{where}: {self} has no column {field.name!r}; it has {', '.join(columns)}. "
                    "Add it there (evolve=True does), or leave it out with select()"
                )
            if column.is_computed:
                raise SchemaError(
                    f"{where}: column {column.name!r} of {self} is generated by the server; leave it out with select()"
                )
            reason = why_not(field.type, column.kept)
            if reason is not None:
                raise SchemaError(
                    f"{where}: column {field.name!r} is {field.type} in the stream and {column.type} in {self}; {reason}"
                )
        for column in self.columns:
            if column.is_required and not column.has_default and column.name not in schema.names:
                raise SchemaError(
                    f"{where}: column {column.name!r} of {self} must have a value (NOT NULL), but the stream has no "
                    f"such column; it has {', '.join(schema.names)}"
                )
        return tuple(columns[name] for name in schema.names)

    def staging_sql(
        self, staged: Composable, columns: Sequence[TableColumn], key: Sequence[str], deletes: bool = False
    ) -> Composed:
        """Return SQL for a staging table with the same types and constraints, so that misfits fail before they are
        prepared.

        `deletes`: some rows delete the row of their key; for these only the constraints of the key hold.
        """
        parts: list[Composable] = [
            SQL("{} {}{}").format(
                Identifier(column.name),
                SQL(verbatim(column.type + column.collation)),
                SQL(" NOT NULL") if column.name in key or (column.is_required and not deletes) else SQL(""),
            )
            for column in columns
        ]
        if key:
            parts.append(SQL("{} bigint NOT NULL").format(Identifier(ROW_NUMBER)))
        if deletes:
            parts.append(SQL("{} boolean NOT NULL").format(Identifier(DELETES)))
        names = {column.name for column in columns}
        for text, condition, about in self.checks:
            if about <= names:
                suffix = text.removeprefix(f"CHECK ({condition})")  # such as NO INHERIT
                unless = f"CHECK ({DELETES} OR ({condition})){suffix}"
                parts.append(SQL(verbatim(unless if deletes else text)))
        return SQL("CREATE TABLE {} ({})").format(staged, SQL(", ").join(parts))

    def move_sql(
        self, staged: Composable, columns: Sequence[str], key: Sequence[str], deletes: bool = False
    ) -> Composed:
        """Return SQL that inserts the staged rows; with `key`, the last row of each key replaces the row with that key.

        `deletes`: if the last row deletes, the row with its key is deleted instead.
        """
        names = SQL(", ").join(map(Identifier, columns))
        if not key:
            return SQL("INSERT INTO {} ({}) SELECT {} FROM {}").format(self.sql(), names, names, staged)
        keys = SQL(", ").join(map(Identifier, key))
        others = [
            SQL("{} = EXCLUDED.{}").format(Identifier(name), Identifier(name)) for name in columns if name not in key
        ]
        action = SQL("UPDATE SET {}").format(SQL(", ").join(others)) if others else SQL("NOTHING")
        row, deleting = Identifier(ROW_NUMBER), Identifier(DELETES)
        last = SQL("SELECT DISTINCT ON ({keys}) {names}{deleting} FROM {staged} ORDER BY {keys}, {row} DESC").format(
            keys=keys,
            names=names,
            deleting=SQL(", {}").format(deleting) if deletes else SQL(""),
            staged=staged,
            row=row,
        )
        insert = SQL("INSERT INTO {} ({}) {} ON CONFLICT ({}) DO {}")
        if not deletes:
            return insert.format(self.sql(), names, last, keys, action)
        same = [SQL("kept.{} = moved.{}").format(Identifier(name), Identifier(name)) for name in key]
        delete = SQL("DELETE FROM {} AS kept USING ({}) AS moved WHERE moved.{} AND {}")
        put = SQL("SELECT {} FROM ({}) AS moved WHERE NOT {}").format(names, last, deleting)
        return SQL("{}; {}").format(
            delete.format(self.sql(), last, deleting, SQL(" AND ").join(same)),
            insert.format(self.sql(), names, put, keys, action),
        )


NUMBERING: Final = TableColumn(ROW_NUMBER, "bigint", "", True, False, False, Kept("int8", -1))
DELETING: Final = TableColumn(DELETES, "boolean", "", True, False, False, Kept("bool", -1))


def check_names(names: Sequence[str], where: str) -> None:
    """Raise SchemaError for a name that no column can have; the server would truncate it, or mistake it for another."""
    for name in names:
        wrong = None
        if not name:
            wrong = "a column must have a name"
        elif "\0" in name:
            wrong = "a name has no NUL"
        elif len(name.encode()) > NAME_BYTES_MAX:
            wrong = f"it has {len(name.encode())} bytes, but names in PostgreSQL have at most {NAME_BYTES_MAX}"
        elif name in _SYSTEM_COLUMNS:
            wrong = "PostgreSQL has a system column of that name in every table"
        if wrong is not None:
            raise SchemaError(f"{where}: column {name!r}: {wrong}; rename it")


def check_unchanged(connection: Connection[Any], table: Table, staged: Table, names: Sequence[str], where: str) -> None:
    """Raise SchemaError if columns of `table` were altered since `staged` was made, and would change its values."""
    now = {column.name: column for column in table.columns}
    for column in staged.columns:
        target = now.get(column.name)
        if column.name not in names or target is None or target.type == column.type:
            continue
        is_kin = column.kept.dimensions == target.kept.dimensions and any(
            {column.kept.base, target.kept.base} <= kin for kin in ({column.kept.base}, *_KIN)
        )
        value, back = Identifier(column.name), SQL(verbatim(column.type))
        changed = (
            is_kin
            and connection.execute(
                SQL("SELECT 1 FROM {} WHERE format('%s', {}::{}::{}) <> format('%s', {}) LIMIT 1").format(
                    staged.sql(), value, SQL(verbatim(target.type)), back, value
                )
            ).fetchone()
        )
        if not is_kin or changed:
            raise SchemaError(
                f"{where}: column {column.name!r} of {table} was {column.type} when rows were staged, and is now "
                f"{target.type}, which would change them; change it back until they are committed"
            )


def identifier(*names: str) -> Composable:
    return Identifier(*names)


def verbatim(text: str) -> LiteralString:
    """Mark SQL text as safe that comes from the server (a type, a constraint) or from this package."""
    return text


def find_table(connection: Connection[Any], schema: str | None, name: str) -> Table | None:
    """Return the table; None if there is none of that name. Raises ConfigError if the name is not that of a table."""
    names = (schema, name) if schema else (name,)
    found = connection.execute(_FIND, [identifier(*names).as_string(connection)]).fetchone()
    if found is None:
        return None
    oid, schema_name, table_name, kind = found
    if kind not in _TABLES:
        raise ConfigError(f"{schema_name}.{table_name} is not a table (pg_class.relkind {kind!r}); name a table")
    columns = tuple(
        TableColumn(name, kind, collation, required, default, computed, Kept(*kept))
        for name, kind, collation, required, default, computed, *kept in connection.execute(_COLUMNS, {"table": oid})
    )
    checks = tuple((text, condition, frozenset(about)) for text, condition, about in connection.execute(_CHECKS, [oid]))
    return Table(oid, schema_name, table_name, columns, checks)


def new_column(field: pa.Field[Any], where: str) -> TableColumn:
    """Return a column to create for a field. What the server makes of its type is not known yet."""
    made = created_type(field.type)
    if made is None:
        raise SchemaError(
            f"{where}: column {field.name!r} is {field.type}, for which this sink has no PostgreSQL type; cast it "
            "(a struct to JSON text: pl.col(…).struct.json_encode()), or leave it out"
        )
    return TableColumn(field.name, made, "", False, False, False, Kept("", -1))


def create_table(
    connection: Connection[Any], schema: str | None, name: str, rows: pa.Schema, key: Sequence[str], where: str
) -> None:
    """Create a table for these rows, with `key` as its primary key."""
    columns = [new_column(field, where) for field in rows]
    parts: list[Composable] = [SQL("{} {}").format(Identifier(each.name), SQL(verbatim(each.type))) for each in columns]
    if key:
        parts.append(SQL("PRIMARY KEY ({})").format(SQL(", ").join(map(Identifier, key))))
    target = identifier(schema, name) if schema else identifier(name)
    connection.execute(SQL("CREATE TABLE {} ({})").format(target, SQL(", ").join(parts)))


def check_key(connection: Connection[Any], table: Table, key: Sequence[str], where: str) -> None:
    """Raise SchemaError unless exactly these columns are unique together in the table."""
    found = [frozenset(columns) for (columns,) in connection.execute(_UNIQUE_KEYS, [table.oid])]
    if frozenset(key) not in found:
        listed = ", ".join(f'"{name}"' for name in key)
        raise SchemaError(
            f"{where}: rows replace those with the same ({', '.join(key)}), but {table} has no primary key or unique "
            f'constraint on exactly these columns; add one: ALTER TABLE "{table.schema}"."{table.name}" ADD UNIQUE ({listed})'
        )


def check_key_of_subtasks(connection: Connection[Any], table: Table, key: Sequence[str], where: str) -> None:
    """Raise ConfigError if texts that differ are one key to the server: rows of these come to several subtasks, and the
    order between them would be lost. Those of a uuid are checked row by row (`first_other_uuid`).
    """
    found = {name for (name,) in connection.execute(_NOT_BYTEWISE, [table.oid])}
    for column in table.columns:
        if column.name in key and (column.name in found or column.kept.base in _OTHER_FORMS):
            raise ConfigError(
                f"{where}: key column {column.name!r} of {table} is {column.type}{column.collation}, to which different texts "
                "can be the same, so the rows of a key could come to several subtasks, in no order: write with "
                "parallelism(1), or make the column text"
            )


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Convert the server's errors, by kind: those for which a retry can help, and those for which it cannot."""
    try:
        yield
    except psycopg.Error as error:
        raise _error_of(error)(f"{what}: {_text_of(error)}") from error


def is_conflict(error: MidstreamError) -> bool:
    """Whether the server has ended a transaction because of others: a deadlock, no serialization, no lock in time."""
    sqlstate = getattr(error.__cause__, "sqlstate", None) or ""
    return sqlstate.startswith("40") or sqlstate == "55P03"


def _error_of(error: Error) -> type[MidstreamError]:
    category = (error.sqlstate or "")[:2]
    if category in ("22", "23", "44", "54"):  # values, constraints, limits of the server
        return SchemaError
    if category in ("28", "3D", "3F", "42"):  # permissions, and objects that do not exist
        return ConfigError
    return StorageError


def _text_of(error: Error) -> str:
    diag = error.diag
    if not diag.message_primary:
        return " ".join(str(error).split())
    extras = [text for text in (diag.message_detail, diag.message_hint, diag.context) if text]
    return " ".join([diag.message_primary, *(f"({' '.join(text.split())})" for text in extras)])
