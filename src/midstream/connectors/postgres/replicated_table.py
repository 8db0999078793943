"""A table whose changes are read, as the server describes it; its publication and its replication slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, LiteralString, NamedTuple

import pyarrow as pa
from psycopg import Connection
from psycopg.sql import SQL, Identifier

from midstream.connectors.postgres.change_values import arrow_type
from midstream.connectors.postgres.replication_messages import LSN_MAX, parse_lsn
from midstream.engine.core.errors import ConfigError, SchemaError

PLUGIN: Final = "pgoutput"
VERSION_MIN: Final = 13
_FIND: LiteralString = """
    SELECT c.oid::int8, n.nspname, c.relname, c.relkind::text, c.relpersistence::text, c.relreplident::text,
           (SELECT min(a.attname::text) FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid
            WHERE i.indrelid = c.oid AND CASE c.relreplident WHEN 'i' THEN i.indisreplident ELSE i.indisprimary END
            AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]) AND a.attgenerated <> '')
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %s"""
_COLUMNS: LiteralString = """
    WITH RECURSIVE key AS (  -- without columns that an index only includes
        SELECT i.indisprimary, i.indimmediate, i.indisreplident, n.attnum
        FROM pg_index i, unnest((i.indkey::int2[])[0:i.indnkeyatts - 1]) n (attnum) WHERE i.indrelid = %(table)s),
    base AS (
        SELECT attnum, atttypid AS type, atttypmod AS modifier FROM pg_attribute
        WHERE attrelid = %(table)s AND attnum > 0 AND NOT attisdropped AND attgenerated = ''
        UNION ALL
        SELECT b.attnum, t.typbasetype, t.typtypmod FROM base b JOIN pg_type t ON t.oid = b.type WHERE t.typtype = 'd')
    SELECT a.attname, a.atttypid::int8, a.atttypmod, format_type(a.atttypid, a.atttypmod),
           CASE WHEN n.nspname = 'pg_catalog' THEN t.typname ELSE '' END, b.modifier,
           a.attstorage IN ('x', 'e') AND t.typname NOT IN ('numeric'),
           EXISTS (SELECT FROM key k WHERE k.attnum = a.attnum AND k.indisprimary AND k.indimmediate),
           EXISTS (SELECT FROM key k WHERE k.attnum = a.attnum AND k.indisreplident)
    FROM pg_attribute a JOIN base b ON b.attnum = a.attnum JOIN pg_type t ON t.oid = b.type AND t.typtype <> 'd'
    JOIN pg_namespace n ON n.oid = t.typnamespace
    WHERE a.attrelid = %(table)s ORDER BY a.attnum"""
_SLOT: LiteralString = """
    SELECT plugin, database, active_pid, to_jsonb(s)->>'wal_status', confirmed_flush_lsn::text,
           CASE WHEN pg_is_in_recovery() THEN 0 ELSE pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn) END::int8,
           CASE WHEN NOT pg_is_in_recovery() THEN pg_current_wal_flush_lsn()::text END
    FROM pg_replication_slots s WHERE slot_name = %s"""
_PUBLICATION: LiteralString = """
    SELECT p.oid::int8, p.pubowner::int8, p.xmin::text::int8,
           coalesce((SELECT r.oid::int8 FROM pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid = %s), 0),
           pubinsert AND pubupdate AND pubdelete AND pubtruncate,
           EXISTS (SELECT FROM pg_publication_tables t WHERE t.pubname = p.pubname AND t.schemaname = %s AND t.tablename = %s),
           (SELECT to_jsonb(r)->>'prqual' FROM pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid = %s),
           (SELECT to_jsonb(t)->'attnames' FROM pg_publication_tables t
            WHERE t.pubname = p.pubname AND t.schemaname = %s AND t.tablename = %s)
    FROM pg_publication p WHERE p.pubname = %s"""


@dataclass(frozen=True, slots=True)
class ReplicatedColumn:
    name: str
    type_oid: int
    """As in messages of the replication; for a domain, its own."""
    modifier: int
    type: str
    """The type, as SQL writes it."""
    base: str
    """The name of the type in pg_catalog, seen through domains; "" for others."""
    base_modifier: int
    is_stored_apart: bool
    """Whether large values are (TOAST)."""
    is_primary: bool
    is_identity: bool
    """Whether it belongs to the index of the replica identity."""

    @property
    def kind(self) -> pa.DataType:
        return arrow_type(self.base, self.base_modifier)


@dataclass(frozen=True, slots=True)
class ReplicatedTable:
    oid: int
    schema: str
    name: str
    identity: str
    """pg_class.relreplident: d, i, f or n."""
    columns: tuple[ReplicatedColumn, ...]

    def __str__(self) -> str:
        return f'"{self.schema}"."{self.name}"'

    @property
    def key(self) -> tuple[str, ...]:
        """The columns that identify a row; () if only all of them do."""
        by_index = self.identity == "i"
        return tuple(each.name for each in self.columns if (each.is_identity if by_index else each.is_primary))

    def chosen(self, names: Sequence[str] | None, where: str) -> tuple[ReplicatedColumn, ...]:
        """Return the columns to read. Raises SchemaError for one that does not exist, or if the key is missing."""
        if names is None:
            return self.columns
        by_name = {column.name: column for column in self.columns}
        missing = [name for name in names if name not in by_name]
        if missing:
            raise SchemaError(
                f"{where}: {self} has no column {missing[0]!r} whose changes are sent; it has {', '.join(by_name)}"
            )
        left_out = [name for name in self.key if name not in names]
        if left_out:
            raise SchemaError(
                f"{where}: columns= leaves out {left_out[0]!r}, which belongs to the key of {self}; a delete has no other columns"
            )
        return tuple(by_name[name] for name in names)


class PublicationState(NamedTuple):
    """What shows whether a publication is still the one that was checked, and has had all changes in between."""

    oid: int
    owner_oid: int
    altered_by: int
    """The transaction that altered it last."""
    entry_oid: int
    """Of the table's entry in it; 0 if it has the table without one."""

    def is_unaltered(self, then: PublicationState) -> bool:
        """Whether nothing, or no more than the owner, has changed since."""
        same = (self.oid, self.entry_oid) == (then.oid, then.entry_oid)
        return same and (self.altered_by == then.altered_by or self.owner_oid != then.owner_oid)


@dataclass(frozen=True, slots=True)
class ReplicationSlot:
    plugin: str | None
    database: str | None
    active_pid: int | None
    wal_status: str
    confirmed_lsn: int
    kept_bytes: int
    """How much of the log the server keeps for it."""
    log_end_lsn: int
    """Where the log ends that is safe from a crash."""


def find_replicated_table(connection: Connection[Any], schema: str | None, name: str, where: str) -> ReplicatedTable:
    """Raises ConfigError if there is no such table, or if its changes cannot be read."""
    if connection.info.server_version < VERSION_MIN * 10_000:
        raise ConfigError(f"{where}: needs PostgreSQL {VERSION_MIN} or later")
    names = (schema, name) if schema else (name,)
    name_sql = Identifier(*names).as_string(connection)
    [(oid,)] = connection.execute("SELECT to_regclass(%s)::oid::int8", [name_sql]).fetchall()
    table = None if oid is None else describe_table(connection, oid, where)
    if table is None:
        raise ConfigError(
            f"{where}: there is no such table; with schema= it is looked for there, else in the search_path"
        )
    return table


def describe_table(connection: Connection[Any], oid: int, where: str) -> ReplicatedTable | None:
    """Return the table; None if it does not exist. Raises ConfigError if its changes cannot be read."""
    found = connection.execute(_FIND, [oid]).fetchone()
    if found is None:
        return None
    _, schema_name, table_name, kind, persistence, identity, generated = found
    if kind != "r" or persistence != "p":
        raise ConfigError(
            f"{where}: it is not an ordinary table (pg_class.relkind {kind!r}, relpersistence {persistence!r}); of a "
            "partitioned table, read each partition"
        )
    columns = tuple(ReplicatedColumn(*row) for row in connection.execute(_COLUMNS, {"table": oid}))
    table = ReplicatedTable(oid, schema_name, table_name, identity, columns)
    if generated is not None:
        raise ConfigError(
            f"{where}: column {generated!r} of its key is generated, and changes do not have it; let a unique index of other "
            f"columns identify rows: ALTER TABLE {table} REPLICA IDENTITY USING INDEX …"
        )
    if identity == "n" or (identity != "f" and not table.key):
        raise ConfigError(
            f"{where}: it has no {'replica identity' if identity == 'n' else 'primary key that is not deferrable'}, so updates and deletes do not "
            f"say which row they change; add a primary key, or run ALTER TABLE {table} REPLICA IDENTITY FULL"
        )
    return table


def check_server(connection: Connection[Any], where: str) -> None:
    """Raise ConfigError if the server decodes no changes."""
    [(level, standby)] = connection.execute("SELECT current_setting('wal_level'), pg_is_in_recovery()").fetchall()
    if level != "logical":
        raise ConfigError(
            f"{where}: the server has wal_level={level}, and changes need logical: ALTER SYSTEM SET wal_level = logical, and "
            "restart it"
        )
    if standby:
        raise ConfigError(f"{where}: the server is a standby; connect to the primary")


def check_publication(
    connection: Connection[Any],
    name: str,
    table: ReplicatedTable,
    names: Sequence[str],
    where: str,
    then: PublicationState | None = None,
) -> PublicationState:
    """Raise ConfigError unless the publication has all changes of the table, and has had them since `then`."""
    place = [table.schema, table.name]
    found = connection.execute(_PUBLICATION, [table.oid, *place, table.oid, *place, name]).fetchone()
    if found is None:
        raise ConfigError(
            f'{where}: the publication {name!r} no longer exists; create it: CREATE PUBLICATION "{name}" FOR TABLE '
            f"ONLY {table}. Changes made without it are missing from what follows, so start again with --fresh"
        )
    *state, has_all, has_table, condition, columns = found
    now = PublicationState(*state)
    cure = f'ALTER PUBLICATION "{name}"'
    if not has_table:
        raise ConfigError(f"{where}: the publication {name!r} does not have the table: {cure} ADD TABLE ONLY {table}")
    if not has_all:
        raise ConfigError(
            f"{where}: the publication {name!r} leaves out some operations: {cure} SET (publish = 'insert, update, delete, truncate')"
        )
    if condition is not None:
        raise ConfigError(
            f"{where}: the publication {name!r} has a WHERE clause for the table; use another publication"
        )
    missing = [] if columns is None else [each for each in names if each not in columns]
    if missing:
        raise ConfigError(
            f"{where}: the publication {name!r} leaves out column {missing[0]!r}; name others with columns=, or use another publication"
        )
    if then is not None and not now.is_unaltered(then):
        raise ConfigError(
            f"{where}: the publication {name!r} was altered, or the table was taken out of it and added again, since this job "
            "began to read it: changes made in between may be missing; start again with --fresh"
        )
    return now


def ensure_publication(connection: Connection[Any], name: str, table: ReplicatedTable) -> None:
    """Create the publication if there is none of that name."""
    if connection.execute("SELECT FROM pg_publication WHERE pubname = %s", [name]).fetchone() is None:
        target = SQL("CREATE PUBLICATION {} FOR TABLE ONLY {}").format(
            Identifier(name), Identifier(table.schema, table.name)
        )
        connection.execute(target)


def slot_status(connection: Connection[Any], slot: str) -> ReplicationSlot | None:
    """Return the state of a replication slot; None if it does not exist."""
    found = connection.execute(_SLOT, [slot]).fetchone()
    if found is None:
        return None
    plugin, database, active_pid, wal_status, confirmed, kept, end = found
    log_end_lsn = LSN_MAX if end is None else parse_lsn(end)
    confirmed_lsn = parse_lsn(confirmed or "0/0")
    return ReplicationSlot(plugin, database, active_pid, wal_status or "", confirmed_lsn, kept or 0, log_end_lsn)


def checked_slot(connection: Connection[Any], slot: str, where: str) -> ReplicationSlot:
    """Return the state of the slot that a job has made. Raises ConfigError if it does not have the changes."""
    status = slot_status(connection, slot)
    missing = "so changes are missing; to read the table again, start with --fresh"
    if status is None:
        raise ConfigError(f"{where}: the replication slot {slot!r} no longer exists, {missing}")
    if status.plugin != PLUGIN or status.database != connection.info.dbname:
        raise ConfigError(
            f"{where}: the replication slot {slot!r} is of the plugin {status.plugin} in database {status.database!r}, not of "
            f"{PLUGIN} in {connection.info.dbname!r}: another program dropped it and created it again, {missing}"
        )
    if status.wal_status == "lost":
        raise ConfigError(
            f"{where}: the server has deleted log that the replication slot {slot!r} needs (max_slot_wal_keep_size), {missing}"
        )
    return status
