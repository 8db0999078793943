"""Rows into a PostgreSQL table, exactly once: staged by the subtasks, moved by the committer.

    midstream_<sink>_<attempt>_<subtask>_<n>   what one subtask wrote between two checkpoints
    midstream_commits                          per job and sink: the newest checkpoint and attempt committed

A subtask creates its staging table and copies into it in one transaction, which ends when the checkpoint is prepared: a
crash before that leaves nothing. The committer moves the rows and drops the table in one transaction, so nothing can be
moved a second time. Types and constraints of single rows are those of the target, so that a row that does not fit fails
before the checkpoint completes; values that the server would silently round, truncate or pad are refused before they
are sent.

A committable names the table to which its rows belong, and is committed there even if the sink now writes to another
table of the database. It comes from a checkpoint, so it is not trusted: it can only name tables to move from, or to
drop, that such a sink has made.

`midstream_commits` distinguishes a table that was moved from one that was lost. It also fences: staging and committing
lock the row of their job, which shows whether a newer attempt, or another job that resumed from this one's checkpoint,
has committed. Tables of older attempts are dropped in the first commit of rows that a newer one has staged itself.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import psycopg
import pyarrow as pa
from psycopg import Connection, Copy
from psycopg.sql import SQL, Identifier, Literal

from midstream.connectors.common.async_writer import AsyncPart, AsyncWriter
from midstream.connectors.common.row_operations import (
    check_columns,
    check_put,
    checked_key,
    key_and_operations,
    written_columns,
)
from midstream.connectors.postgres.connections import checked_dsn, connect, dataset, lift_limits
from midstream.connectors.postgres.copy_rows import encode
from midstream.connectors.postgres.postgres_evolution import (
    add_columns,
    as_staged,
    check_addable,
    locked,
    missing_columns,
)
from midstream.connectors.postgres.postgres_tables import (
    DELETES,
    DELETING,
    NAME_BYTES_MAX,
    NUMBERING,
    ROW_NUMBER,
    STAGING_COLUMNS,
    Table,
    check_key,
    check_key_of_subtasks,
    check_names,
    check_unchanged,
    create_table,
    explained,
    find_table,
    is_conflict,
)
from midstream.connectors.postgres.postgres_types import first_other_uuid
from midstream.connectors.postgres.staged_rows import (
    COMMITS,
    SUPERSEDED,
    StagedRows,
    StagingLocation,
    commit_of,
    drop_staged,
    grouped_rows,
    last_commit,
    missing_rows,
    sweep_staged,
    token_of,
)
from midstream.engine.core.errors import ConfigError, InvariantError, SchemaError, StorageError
from midstream.engine.core.python_values import shown
from midstream.engine.operators.sink_api import (
    CommittedOutput,
    Committer,
    CommitterContext,
    Sink,
    SinkWriter,
    WriterContext,
)

if TYPE_CHECKING:
    from midstream.engine.core.interfaces import Signal

_PATIENCE_S: Final = 10.0
"""How long a running job tries to connect before it fails; a restart would cost more and not find the server sooner."""
_CONFLICTS_S: Final = 60.0
"""How long a commit is repeated that deadlocks, or cannot be serialized, with transactions of other programs."""
_PAUSE_MIN_S: Final = 0.05
_PAUSE_MAX_S: Final = 1.0
"""The longest pause between two tries."""

_CONNECTIONS: Final = """
    SELECT n, what FROM (
        SELECT rolconnlimit, 'CONNECTION LIMIT of role ' || rolname, rolsuper FROM pg_roles WHERE rolname = session_user
        UNION ALL
        SELECT datconnlimit, 'CONNECTION LIMIT of database ' || datname, r.rolsuper
        FROM pg_database, pg_roles r WHERE datname = current_database() AND r.rolname = session_user
        UNION ALL
        SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
            - coalesce(current_setting('reserved_connections', true)::int, 0), 'max_connections less those reserved', false
    ) AS limits (n, what, is_waived)
    WHERE n >= 0 AND NOT is_waived"""
"""A query: how many connections this user may have, and which setting limits them.

A superuser has more than the setting allows, and should not be needed.
"""


class PostgresSink(Sink):
    """Writes every row once to a table of a PostgreSQL database (12 or later).

    Rows appear when the checkpoint that covers them completes. Columns of the stream go to columns of the same name.
    Each subtask has one connection and one open transaction from its first row to the checkpoint, and for a moment a
    second one, when the next rows come while it is prepared; each commit has one connection.

    The arguments are those of `DataStream.write_postgres`, which also brings the rows of a key to one subtask, so that the
    last of several rows remains.

    Raises ConfigError for invalid arguments; the table and the rights are checked when the job starts.

        orders.sink(PostgresSink("host=db dbname=shop user=etl", "orders", key=["id"])).uid("orders-table")
    """

    def __init__(
        self,
        dsn: str,
        table: str,
        *,
        schema: str | None = None,
        key: Sequence[str] = (),
        op: str | None = None,
        append: bool = False,
        evolve: bool = False,
        staging_schema: str | None = None,
    ) -> None:
        for what, name in (("table", table), ("schema", schema), ("staging_schema", staging_schema)):
            if name is not None and not (isinstance(name, str) and name and "\0" not in name):
                raise ConfigError(f"PostgresSink: {what}={name!r} is not a name")
            if name is not None and len(name.encode()) > NAME_BYTES_MAX:
                raise ConfigError(
                    f"PostgresSink: {what}={name!r} has {len(name.encode())} bytes, but names in PostgreSQL have at "
                    f"most {NAME_BYTES_MAX}; give a shorter one"
                )
        self._dsn = checked_dsn(dsn, "PostgresSink")
        self.table = table
        self.schema = schema
        self.key = checked_key(key, op, "PostgresSink")
        self.op = op
        self.append = append
        self.evolve = evolve
        self._names: tuple[str, ...] = ()
        """The columns of the stream that go to the table. Set by `validate`."""
        self.staging_schema = staging_schema
        self._where = f"PostgresSink on {schema}.{table}" if schema else f"PostgresSink on {table}"

    def validate(self, schema: pa.Schema, restoring: bool) -> None:
        """Check the stream against the table, which is created if it does not exist, and have the server check the
        move.

        Raises SchemaError for columns that do not fit, ConfigError for missing rights and for a table that has rows,
        StorageError if the server cannot be reached.
        """
        check_columns(schema, self.key, self.op, self._where)
        schema = written_columns(schema, self.op)
        check_names(schema.names, self._where)
        self._check_columns(schema)
        self._names = tuple(schema.names)
        with self._connected(self._where) as connection:
            connection.execute(
                "SELECT pg_advisory_xact_lock(hashtext('midstream'))"
            )  # two jobs may start at the same time
            table = find_table(connection, self.schema, self.table)
            if table is None:
                create_table(connection, self.schema, self.table, schema, self.key, self._where)
                table = self._find(connection)
            if self.evolve:
                table = add_columns(connection, table, missing_columns(table, schema, self.key, self._where))
            columns = table.matched(schema, self._where)
            if self.key:
                check_key(connection, table, self.key, self._where)
            elif not (restoring or self.append):
                self._check_empty(connection, table)
            self._make_commits(connection, table)
            with connection.transaction(force_rollback=True):
                location = self._location(table)
                staged = location.staged(token_of("", "") + "_check")
                connection.execute(table.staging_sql(staged, columns, self.key, self.op is not None))
                connection.execute(table.move_sql(staged, schema.names, self.key, self.op is not None))
                last_commit(connection, location, "", "", alone=True)

    def datasets(self) -> Sequence[str]:
        with connect(self._dsn, self._where) as connection:
            table = find_table(connection, self.schema, self.table)
        return [] if table is None else [dataset(self._dsn, f"{table.schema}.{table.name}")]

    def check_parallelism(self, subtasks: int, beside: Sequence[tuple[Sink, int]] = ()) -> None:
        """Raise ConfigError if the server allows this user fewer connections than the job may need concurrently, or if
        several subtasks may get the rows of a key.
        """
        sharing = [n for sink, n in beside if isinstance(sink, PostgresSink) and sink._dsn == self._dsn]
        needed = 2 * (subtasks + sum(sharing)) + 1
        others = f" and {sum(sharing)} of other sinks" if sharing else ""
        with self._connected(self._where, _PATIENCE_S) as connection:
            limits = connection.execute(_CONNECTIONS).fetchall()
            if self.key and subtasks > 1:
                check_key_of_subtasks(connection, self._find(connection), self.key, self._where)
        for limit, what in limits:
            if limit < needed:
                raise ConfigError(
                    f"{self._where}: {subtasks} subtasks{others} need up to {needed} connections, two each and one to "
                    f"commit, but {what} allows {limit}; raise it, or write with fewer subtasks: "
                    f"parallelism({max((limit - 1) // 2 // (len(sharing) + 1), 1)})"
                )

    def check_committables(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        """Raise StorageError if rows of these are neither staged nor committed in the database that `dsn` names."""
        where = f"{self._where}: cannot commit checkpoint {checkpoint_id}"
        groups = grouped_rows(committables)
        with self._connected(where) as connection:
            for (job_id, uid, location), group in groups.items():
                self._table_of(connection, location)  # raises if there is none
                commits = find_table(connection, location.staging, COMMITS)
                if commits is None or commit_of(connection, location, job_id, uid)[1] < checkpoint_id:
                    for part in group:
                        if find_table(connection, location.staging, part.table) is None:
                            raise missing_rows(location, part, where)

    def writer(self, context: WriterContext) -> SinkWriter:
        numbers = count()
        return AsyncWriter(context, lambda: _StagedPart(self, context, next(numbers)))

    def committer(self, context: CommitterContext) -> Committer:
        return _PostgresCommitter(self, context.job_id, context.stopped)

    def newest_committed(self, output: CommittedOutput) -> int:
        with self._connected(self._where) as connection:
            location = self._location(self._find(connection))
            select = SQL("SELECT max(checkpoint) FROM {} WHERE job = ANY(%s) AND sink = %s")
            found = connection.execute(
                select.format(location.staged(COMMITS)), [sorted(output.jobs), location.sink_of(output.uid)]
            ).fetchone()
            newest = found[0] or 0 if found is not None else 0
            for checkpoint_id, committable in output.held:
                for (_, _, at), (part,) in grouped_rows([committable]).items():
                    if find_table(connection, at.staging, part.table) is None:
                        newest = max(newest, checkpoint_id)  # committed, here or at an earlier target
        return max(0, newest)

    def check_rollback(self, output: CommittedOutput, after: int) -> None:
        raise ConfigError(
            f"{self._where}: rows in a table do not show which commit wrote them, and replaced rows are lost; "
            "midstream_commits shows when each checkpoint was committed, if you want to restore a backup of the table"
        )

    # ---- for this module

    @contextmanager
    def _connected(self, where: str, patience_s: float = 0.0) -> Iterator[Connection[Any]]:
        """Open a transaction on a separate connection: committed at the end, rolled back after an error."""
        with explained(where), self._connect(where, patience_s) as connection:
            yield connection

    def _connect(self, where: str, patience_s: float) -> Connection[Any]:
        """Connect, retrying for `patience_s`, since all connections may be in use, or the server may be restarting. The
        call blocks.
        """
        deadline_s, pause_s = time.monotonic() + patience_s, _PAUSE_MIN_S
        while True:
            try:
                return self._connect_now(where)
            except StorageError:
                if time.monotonic() + pause_s > deadline_s:
                    raise
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    def _connect_now(self, where: str) -> Connection[Any]:
        connection = connect(self._dsn, where)
        connection.isolation_level = (
            psycopg.IsolationLevel.READ_COMMITTED
        )  # other transactions commit while rows are staged
        with explained(where):
            # Acknowledged rows must survive a crash of the server, and staging may take as long as a checkpoint.
            lift_limits(connection, in_transaction=True)
            connection.execute(
                "SELECT set_config('array_nulls', 'on', true),"  # off: a null in a list becomes the text "NULL"
                " CASE current_setting('synchronous_commit') WHEN 'off' THEN set_config('synchronous_commit', 'on', true) END"
            )
            if self.op is not None:  # a policy would hide rows from deletes; now the server refuses these
                connection.execute("SELECT set_config('row_security', 'off', true)")
        return connection

    def _find(self, connection: Connection[Any]) -> Table:
        table = find_table(connection, self.schema, self.table)
        if table is None:
            raise ConfigError(f"{self._where}: the table does not exist any more")
        return table

    def _location(self, table: Table) -> StagingLocation:
        return StagingLocation(self.staging_schema or table.schema, table.schema, table.name, self.key)

    def _table_of(self, connection: Connection[Any], location: StagingLocation) -> Table:
        """Return the table to which rows of `location` go; the sink's own if that is missing, perhaps renamed."""
        return find_table(connection, location.schema, location.table) or self._find(connection)

    def _check_columns(self, schema: pa.Schema) -> None:
        if len(schema) == 0:
            raise SchemaError(f"{self._where}: the stream has no columns to write")
        for name in STAGING_COLUMNS if self.key else ():
            if name in schema.names:
                raise SchemaError(f"{self._where}: a column may not be called {name!r}; rename it")

    def _check_empty(self, connection: Connection[Any], table: Table) -> None:
        if connection.execute(SQL("SELECT 1 FROM {} LIMIT 1").format(table.sql())).fetchone():
            raise ConfigError(
                f"{self._where}: {table} is not empty; resume from a checkpoint, name another table, add to it with "
                "append=True, or replace rows by a key"
            )

    def _make_commits(self, connection: Connection[Any], table: Table) -> None:
        location = self._location(table)
        if find_table(connection, location.staging, COMMITS) is None:
            connection.execute(
                SQL(
                    "CREATE TABLE {} (job text, sink text, attempt integer NOT NULL DEFAULT 0,"
                    " checkpoint bigint NOT NULL DEFAULT -1, committed timestamptz, PRIMARY KEY (job, sink))"
                ).format(location.staged(COMMITS))
            )


class _StagedPart(AsyncPart):
    """One staging table, in a transaction that is open until `_finish`."""

    def __init__(self, sink: PostgresSink, context: WriterContext, number: int) -> None:
        super().__init__()
        self._sink = sink
        self._context = context
        self._where = f"operator {context.name!r}: {sink._where}"
        self._name = f"{token_of(context.job_id, context.uid)}_{context.attempt}_{context.subtask}_{number}"
        self._connection: Connection[Any] | None = None
        self._copy: Copy | None = None
        self._copying = ExitStack()
        self._rows = 0

    def _write(self, batch: pa.RecordBatch) -> None:
        if self._copy is None:
            self._begin()
        assert self._copy is not None
        if self._sink.key:
            batch = self._numbered(batch)
        encoded = encode(batch, self._columns, self._rows, self._where)
        with explained(self._where):
            self._copy.write(encoded)
        self._rows += batch.num_rows

    def _numbered(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Check keys and operations, and add the columns that only the staging table has."""
        sink, numbers = self._sink, pa.array(np.arange(self._rows, self._rows + batch.num_rows))
        batch, deletes = key_and_operations(batch, sink.key, sink.op, self._rows, self._where)
        for column in self._columns:
            if column.name in sink.key and column.kept.base == "uuid":
                self._check_uuids(batch.column(column.name), column.name)
        columns, names = [*batch.columns, numbers], [*batch.schema.names, ROW_NUMBER]
        if sink.op is not None:  # otherwise the server refuses nulls
            required = [
                column.name for column in self._columns if column.is_required and column.name in batch.schema.names
            ]
            check_put(batch, required, deletes, self._rows, self._where)
            columns, names = [*columns, deletes], [*names, DELETES]
        return pa.RecordBatch.from_arrays(columns, names=names)

    def _check_uuids(self, values: pa.Array[Any], name: str) -> None:
        """Raise SchemaError for a key in another form, whose rows may be in another subtask."""
        row = first_other_uuid(values)
        if row >= 0:
            raise SchemaError(
                f"{self._where}: row {self._rows + row} since the last checkpoint: key column {name!r} is "
                f"{shown(values[row].as_py())}; a uuid in a key must be in lower case, with hyphens, as PostgreSQL writes it"
            )

    def _begin(self) -> None:
        sink, schema = self._sink, written_columns(self._context.schema, self._sink.op)
        names = list(schema.names)
        connection = self._connection = sink._connect(self._where, _PATIENCE_S)
        with explained(self._where):
            self._table = sink._find(connection)
            added = missing_columns(self._table, schema, sink.key, self._where) if sink.evolve else ()
            self._columns = self._table.matched(schema, self._where, added)
            self._location = sink._location(self._table)
            staged = self._location.staged(self._name)
            connection.execute(self._table.staging_sql(staged, self._columns, sink.key, sink.op is not None))
            if added:  # somebody has dropped them: the commit adds them again
                made = find_table(connection, self._location.staging, self._name)
                assert made is not None, "this transaction has created it"
                self._columns = as_staged(self._columns, made, added)
            if sink.key:
                names.append(ROW_NUMBER)
                self._columns = (*self._columns, NUMBERING)
            if sink.op is not None:
                names.append(DELETES)
                self._columns = (*self._columns, DELETING)
            copy = SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(staged, SQL(", ").join(map(Identifier, names)))
            self._cursor = connection.cursor()
            self._copy = self._copying.enter_context(self._cursor.copy(copy))

    def _finish(self, checkpoint_id: int) -> Sequence[bytes]:
        connection, context = self._connection, self._context
        assert connection is not None, "a part has rows"
        with explained(self._where):
            self._copying.close()
            if self._cursor.rowcount != self._rows:
                raise InvariantError(
                    f"{self._where}: sent {self._rows} rows, but the server has {self._cursor.rowcount}"
                )
            # A newer attempt's commit drops what older ones have staged; after it they must not stage anything.
            committed, _ = last_commit(connection, self._location, context.job_id, context.uid, alone=False)
            if committed > context.attempt:
                raise StorageError(f"{self._where}: a newer attempt than {context.attempt} has committed already")
            connection.commit()
        connection.close()
        staged = StagedRows(context.job_id, context.uid, context.attempt, self._name, self._rows, self._location)
        return [msgspec.msgpack.encode(staged)]

    def _discard(self) -> None:
        """Close the connection; the server rolls back what it leaves unfinished."""
        if self._connection is not None:
            self._connection.close()
            with suppress(Exception):  # the copy only notices that its connection is closed
                self._copying.close()


class _PostgresCommitter(Committer):
    def __init__(self, sink: PostgresSink, job_id: str, stopped: Signal) -> None:
        self._sink = sink
        self._job_id = job_id
        self._stopped = stopped
        self._predecessors: set[tuple[str, str, StagingLocation]] = set()
        """Jobs, each with the uid and location of this sink in it, whose last checkpoints this one has committed."""

    def commit(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        self._repeated(lambda: self._commit(checkpoint_id, committables))

    def abort(self, committables: Sequence[bytes]) -> None:
        self._repeated(lambda: self._abort(committables))

    def _repeated(self, transact: Callable[[], None]) -> None:
        """Repeat a transaction that others prevent: a restart of the job would not prevent them either."""
        deadline_s, pause_s = time.monotonic() + _CONFLICTS_S, _PAUSE_MIN_S
        while True:
            try:
                transact()
                return
            except StorageError as error:
                wait_s = pause_s * (1 + random.random())  # two committers must not meet again and again
                if not is_conflict(error) or time.monotonic() + wait_s > deadline_s or self._stopped.wait(wait_s):
                    raise
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    def _commit(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        where = f"{self._sink._where}: cannot commit checkpoint {checkpoint_id}"
        groups = grouped_rows(committables)
        with self._sink._connected(where, _PATIENCE_S) as connection:
            for (job_id, uid, location), group in groups.items():
                table = self._sink._table_of(connection, location)
                if self._sink.evolve and table.oid == self._sink._find(connection).oid:
                    table = self._complete(connection, location, locked(connection, table), group, where)
                self._move(connection, location, table, job_id, uid, checkpoint_id, group, where)
        if any(job_id == self._job_id for job_id, _, _ in groups):
            self._predecessors.clear()  # `_move` has swept them

    def _abort(self, committables: Sequence[bytes]) -> None:
        groups = grouped_rows(committables)
        with self._sink._connected(f"{self._sink._where}: cannot clean up", _PATIENCE_S) as connection:
            for (_, _, location), group in groups.items():
                for staged in group:
                    drop_staged(connection, location, staged.table)

    def _complete(
        self,
        connection: Connection[Any],
        location: StagingLocation,
        table: Table,
        staged: Sequence[StagedRows],
        where: str,
    ) -> Table:
        """Add columns of the stream that the table has no longer."""
        for part in staged:
            found = find_table(connection, location.staging, part.table)
            names = {column.name for column in table.columns} | ({*STAGING_COLUMNS} if location.key else set())
            columns = () if found is None else found.columns
            gone = [each for each in columns if each.name in self._sink._names and each.name not in names]
            check_addable(table, [each.name for each in gone], location.key, where)
            table = add_columns(connection, table, gone)
        return table

    def _move(
        self,
        connection: Connection[Any],
        location: StagingLocation,
        table: Table,
        job_id: str,
        uid: str,
        checkpoint_id: int,
        staged: Sequence[StagedRows],
        where: str,
    ) -> None:
        attempt, newest = last_commit(connection, location, job_id, uid, alone=True)
        if attempt == SUPERSEDED and job_id == self._job_id and newest < checkpoint_id:
            raise ConfigError(
                f"{where}: another job has resumed from checkpoint {newest} of this one in the meantime; it writes the rows "
                "after that checkpoint, so this job must not be started again"
            )
        for part in staged:
            found = find_table(connection, location.staging, part.table)
            if found is not None:
                own = STAGING_COLUMNS if location.key else ()
                names = [column.name for column in found.columns if column.name not in own]
                deletes = bool(location.key) and any(column.name == DELETES for column in found.columns)
                check_unchanged(connection, table, found, names, where)
                connection.execute(table.move_sql(found.sql(), names, location.key, deletes))
                drop_staged(connection, location, part.table)
            elif newest < checkpoint_id:
                raise missing_rows(location, part, where)
        if job_id == self._job_id:
            newer = max(part.attempt for part in staged)
            if newer > attempt or self._predecessors:
                for of_job, of_uid, of_location in self._predecessors:
                    sweep_staged(connection, of_location, of_job, of_uid, SUPERSEDED)
                sweep_staged(connection, location, job_id, uid, newer)
        else:
            newer = SUPERSEDED
            self._predecessors.add((job_id, uid, location))
        update = SQL(
            "UPDATE {} SET attempt = greatest(attempt, {}), checkpoint = greatest(checkpoint, {}), committed = now()"
            " WHERE job = {} AND sink = {}"
        )
        values = (newer, checkpoint_id, job_id, location.sink_of(uid))
        connection.execute(update.format(location.staged(COMMITS), *map(Literal, values)))
