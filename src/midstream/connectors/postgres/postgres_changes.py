"""The changes of a PostgreSQL table as a source: its rows as they are, then what each transaction changes.

There is one split, since changes have an order. The first discovery, on the driver, creates a replication slot and copies
the table, as it is where the slot begins, to files below the checkpoint directory. So the snapshot can be read again. Before
that, it records that it will do so: a start after a failure in between drops the slot, and begins again.

The reader streams from the slot. The server keeps what it has not confirmed, and it confirms what a completed checkpoint
holds, so the slot is never at a position before the newest checkpoint, and older checkpoints cannot be resumed.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any, Final

import msgspec
import pyarrow as pa
from psycopg import Connection
from psycopg.sql import SQL, Identifier

from midstream.connectors.common.row_operations import OP
from midstream.connectors.postgres.change_reader import ChangeReader, ChangesSplit, TableChanges
from midstream.connectors.postgres.connections import checked_dsn, connect, dataset, lift_limits
from midstream.connectors.postgres.postgres_tables import explained
from midstream.connectors.postgres.replicated_table import (
    PublicationState,
    ReplicatedTable,
    check_publication,
    check_server,
    checked_slot,
    describe_table,
    ensure_publication,
    find_replicated_table,
    slot_status,
)
from midstream.connectors.postgres.replication_stream import ReplicationConnection
from midstream.connectors.postgres.table_snapshot import SlotRecords, copy_snapshot
from midstream.engine.core.errors import ConfigError, InvariantError, MidstreamError, SchemaError, StorageError
from midstream.engine.operators.source_api import (
    Discovery,
    DiscoveryContext,
    Source,
    Split,
    SplitReader,
    check_rate,
    decoded,
    rows_text,
)

_SLOT_NAME: Final = re.compile(r"[a-z0-9_]{1,63}")
_CHECK_S: Final = 30.0
"""How often the driver checks table, publication and slot."""
_COPY_WAIT_S: Final = 5.0
"""How long a discovery waits for the copy. The next one follows soon."""
_POLL_S: Final = 0.2
_DROP_S: Final = 60.0
"""How long the slot of an earlier start may still be in use: the connection of a killed reader ends when the server
notices it."""
_KEPT_BYTES: Final = 2**30
_WARN_S: Final = 3600.0
_log = logging.getLogger(__name__)


class _Begun(msgspec.Struct, frozen=True, array_like=True):
    """The position: the one split was found, of this slot and table."""

    slot: str
    table_oid: int
    publication: PublicationState | None = None
    """None in checkpoints of versions that did not note it."""


class PostgresChangesSource(Source):
    """Reads the changes of a PostgreSQL table (13 or later) by logical replication: first its rows, then each insert,
    update and delete, in the order of commits.

    `_op` is "insert", "update" or "delete". A delete has the columns of the key, and the others only with a replica
    identity FULL. An update that changes the key is a delete and an insert. A value that has no type here (json, uuid,
    enum, array, numeric without a precision) is text.

    The arguments are those of `Environment.read_postgres_changes`.

    Raises ConfigError for a table whose changes cannot be read, SchemaError for columns that do not exist, StorageError
    if the server cannot be reached. The job needs a checkpoint directory.

        source = PostgresChangesSource("host=db dbname=shop", "orders", slot="orders_stream")
        env.source(source).uid("orders")
    """

    bounded = False

    def __init__(
        self,
        dsn: str,
        table: str,
        *,
        slot: str,
        schema: str | None = None,
        publication: str | None = None,
        columns: Sequence[str] | None = None,
        snapshot: bool = True,
        rows_per_s: float | None = None,
    ) -> None:
        self._dsn = checked_dsn(dsn, "PostgresChangesSource")
        self._where = f"PostgresChangesSource of {schema + '.' if schema else ''}{table}"
        if not isinstance(slot, str) or not _SLOT_NAME.fullmatch(slot):
            raise ConfigError(
                f"{self._where}: slot={slot!r} is not a name of a replication slot: at most 63 lower-case letters, digits and _"
            )
        check_rate(rows_per_s, self._where)
        self.rows_per_s = rows_per_s
        self._slot, self._publication = slot, publication or slot
        self._table, self._table_schema, self._names = table, schema, columns
        self._has_snapshot = snapshot
        with explained(self._where), self._connected() as connection:
            found = find_replicated_table(connection, schema, table, self._where)
            chosen = found.chosen(columns, self._where)
        if any(column.name == OP for column in chosen):
            raise SchemaError(
                f"{self._where}: column {OP!r} has the name of that with the operation; leave it out with columns="
            )
        self.schema = pa.schema([*((column.name, column.kind) for column in chosen), (OP, pa.large_string())])
        self._changes = TableChanges(self._dsn, str(found), chosen, found.key, self.schema, self._where)
        self._dataset = dataset(self._dsn, f"{found.schema}.{found.name}")
        self.discovery_interval_s = _POLL_S
        self._directory: str | None = None
        self._copy: _Copy | None = None
        self._warned_s = float("-inf")
        self._has_files = True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_copy": None}

    def readers_max(self, parallelism: int) -> int:
        return 1

    # ---- on the driver ----

    def datasets(self) -> Sequence[str]:
        return [self._dataset]

    def prepare(self, uid: str, checkpoint_dir: str | None, restoring: bool) -> None:
        """Determine where the snapshot is kept, and check the server. Raises ConfigError without a checkpoint directory."""
        if checkpoint_dir is None:
            raise ConfigError(
                f"{self._where}: the job has no checkpoint directory, and the replication slot keeps the server's log until a "
                "checkpoint holds its changes; give Environment(checkpoint_dir=…)"
            )
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", uid)
        self._directory = f"{checkpoint_dir.rstrip('/')}/plans/{name}/{self._slot}"
        with explained(self._where), self._connected() as connection:
            check_server(connection, self._where)

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        if position is not None:
            begun = decoded(position, _Begun, self._where)
            if begun.slot != self._slot:
                raise ConfigError(
                    f"{self._where}: the checkpoint was made with slot={begun.slot!r}, which has the changes that follow; give "
                    f"that, or start with --fresh"
                )
            self._check(begun)
            self.discovery_interval_s = _CHECK_S
            return Discovery((), position, exhausted=False)
        if self._directory is None:
            raise InvariantError(f"{self._where}: splits were requested before it was prepared")
        if self._copy is not None and not self._copy.is_usable():
            self._copy.cancel()
            self._copy = None
        if self._copy is None:
            self._copy = _Copy(self._begin, self._is_unread)
        found = self._copy.result(_COPY_WAIT_S)
        if found is None:
            return Discovery((), None, exhausted=False)  # type: ignore[arg-type]  # none yet
        publication, split = found
        self.discovery_interval_s = _CHECK_S
        after = msgspec.msgpack.encode(_Begun(self._slot, split.table_oid, publication))
        return Discovery((Split(self._slot, msgspec.msgpack.encode(split)),), after, exhausted=False)

    def checkpoint_completed(self, position: bytes | None, unfinished: Sequence[Split] | None = None) -> None:
        """Delete the snapshot's files once a checkpoint is after them. The reader confirms what a checkpoint holds."""
        if not unfinished or not self._has_files or self._directory is None:
            return
        split = unfinished[0]
        offsets = decoded(split.payload, ChangesSplit, self._where).offsets
        if split.offset > offsets.snapshot_rows:
            SlotRecords(self._directory, self._where).delete_snapshots()
            self._has_files = False

    def close(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.cancel()

    def _connected(self) -> Connection[Any]:
        return connect(self._dsn, self._where)

    def _begin(self, cancellation: _Cancellation) -> tuple[PublicationState, ChangesSplit]:
        """Create the slot, and copy the table as it is where the slot begins."""
        with ExitStack() as stack:
            connection = stack.enter_context(self._connected())
            stack.enter_context(explained(self._where))
            connection.autocommit = True
            lift_limits(connection, in_transaction=False)
            cancellation.add(connection.cancel)
            table = find_replicated_table(connection, self._table_schema, self._table, self._where)
            self._warn_of_large_values(table)
            replication = ReplicationConnection(self._dsn, self._where)
            stack.callback(replication.close)
            cancellation.add(replication.cancel)
            system = replication.system()
            self._drop_own(connection, system)
            ensure_publication(connection, self._publication, table)
            publication = check_publication(connection, self._publication, table, self.schema.names[:-1], self._where)
            base_lsn, snapshot = replication.create_slot(self._slot)
            with ExitStack() as unfinished:
                unfinished.callback(self._drop_slot)
                directory, files = self._copied(connection, table, snapshot, cancellation)
                unfinished.pop_all()
        return publication, ChangesSplit(self._slot, self._publication, system, table.oid, base_lsn, directory, files)

    def _copied(
        self, connection: Connection[Any], table: ReplicatedTable, snapshot: str, cancellation: _Cancellation
    ) -> tuple[str, tuple[int, ...]]:
        """Copy the rows of the snapshot. Returns the directory, and the number of rows of each file."""
        directory = f"{self._directory}/{secrets.token_hex(8)}"
        files: list[int] = []
        if self._has_snapshot:
            columns = SQL(", ").join(Identifier(name) for name in self.schema.names[:-1])
            query = SQL("SELECT {} FROM ONLY {}").format(columns, Identifier(table.schema, table.name))
            for rows in copy_snapshot(connection, query, snapshot, self.schema, directory, self._where):
                files.append(rows)
                cancellation.check(self._where)
        return directory, tuple(files)

    def _drop_slot(self) -> None:
        """Drop the slot if that is possible at once. If not, the next start does."""
        try:
            with explained(self._where), self._connected() as connection:
                connection.execute("SELECT pg_drop_replication_slot(%s)", [self._slot])
        except MidstreamError as error:
            _log.warning("%s: the replication slot %r remains until the next start: %s", self._where, self._slot, error)

    def _drop_own(self, connection: Connection[Any], system: str) -> None:
        """Drop what an earlier start of this job has made. Raises ConfigError if the slot is another's."""
        assert self._directory is not None
        records = SlotRecords(self._directory, self._where)
        database = connection.info.dbname
        status = slot_status(connection, self._slot)
        if status is not None and not (status.database == database and records.has(system, database)):
            raise ConfigError(
                f"{self._where}: the replication slot {self._slot!r} exists, and was not made by this job; give another name, or "
                f"drop it if nothing needs it: SELECT pg_drop_replication_slot('{self._slot}')"
            )
        deadline_s = time.monotonic() + _DROP_S
        while status is not None:
            if status.active_pid is None:
                connection.execute("SELECT pg_drop_replication_slot(%s)", [self._slot])
                break
            if time.monotonic() > deadline_s:
                raise StorageError(
                    f"{self._where}: the replication slot {self._slot!r} of an earlier start is in use by the process {status.active_pid} of "
                    "the server; is another run of this job active?"
                )
            time.sleep(_POLL_S)  # the server does not notify of it
            status = slot_status(connection, self._slot)
        records.delete_snapshots()
        records.add(system, database)
        self._has_files = True

    def _is_unread(self, split: ChangesSplit) -> bool:
        """Whether the slot still has all changes after the snapshot, so that the split can be read from its beginning."""
        with explained(self._where), self._connected() as connection:
            status = slot_status(connection, self._slot)
            return status is not None and status.confirmed_lsn <= split.base_lsn and self._has_files

    def _warn_of_large_values(self, table: ReplicatedTable) -> None:
        if table.identity == "f":
            return
        apart = [each.name for each in self._changes.columns if each.is_stored_apart]
        if apart:
            _log.warning(
                "%s: an update that does not change a large value (above some 2 kB) does not have it, and ends the job; if %s can "
                "be that large, run ALTER TABLE %s REPLICA IDENTITY FULL",
                self._where,
                ", ".join(apart),
                table,
            )

    def _check(self, begun: _Begun) -> None:
        """Raise ConfigError if table, publication or slot no longer give the changes, and warn of a slot that keeps too much of the log."""
        try:
            with explained(self._where), self._connected() as connection:
                status = checked_slot(connection, self._slot, self._where)
                table = describe_table(connection, begun.table_oid, self._where)
                if table is None:
                    raise ConfigError(
                        f"{self._where}: the table was dropped; to read one that was made again, start with --fresh"
                    )
                names = self.schema.names[:-1]
                check_publication(connection, self._publication, table, names, self._where, begun.publication)
        except StorageError as error:
            # the reader waits for the server, and so does this
            _log.warning("%s: cannot be checked at present: %s", self._where, error)
            return
        now_s = time.monotonic()
        if status.kept_bytes > _KEPT_BYTES and now_s - self._warned_s > _WARN_S:
            self._warned_s = now_s
            _log.warning(
                "%s: the replication slot %r keeps %.1f GiB of the server's log: the job is behind, or its checkpoints do not complete",
                self._where,
                self._slot,
                status.kept_bytes / 2**30,
            )

    # ---- on the subtask ----

    def open_split(self, split: Split) -> SplitReader:
        return ChangeReader(self._changes, decoded(split.payload, ChangesSplit, self._where), split.offset)

    def place(self, split: Split, first: int, last: int) -> str:
        offsets = decoded(split.payload, ChangesSplit, self._where).offsets
        if split.offset < offsets.snapshot_rows:
            return f"{self._changes.table}, {rows_text(split.offset + first, split.offset + last)} of the snapshot"
        return f"{self._changes.table}, {rows_text(first, last)} after the position {offsets.decode(split.offset)}"


class _Cancellation:
    """Ends what a thread waits for, from another thread."""

    def __init__(self) -> None:
        self._is_cancelled = False
        self._calls: list[Callable[[], None]] = []

    def add(self, cancel: Callable[[], None]) -> None:
        self._calls.append(cancel)

    def cancel(self) -> None:
        self._is_cancelled = True
        for call in self._calls:
            with suppress(Exception):  # what is over, or whose server is gone, cannot be cancelled
                call()

    def check(self, where: str) -> None:
        if self._is_cancelled:
            raise StorageError(f"{where}: the job has ended while the table was copied")


class _Copy:
    """The preparation of the split, on a thread of its own: a large table takes longer than a discovery may."""

    def __init__(
        self,
        work: Callable[[_Cancellation], tuple[PublicationState, ChangesSplit]],
        is_unread: Callable[[ChangesSplit], bool],
    ) -> None:
        self._cancellation = _Cancellation()
        self._is_unread = is_unread
        self._thread = ThreadPoolExecutor(1, "midstream-postgres-copy")
        self._future: Future[tuple[PublicationState, ChangesSplit]] = self._thread.submit(work, self._cancellation)

    def result(self, timeout_s: float) -> tuple[PublicationState, ChangesSplit] | None:
        """Return the split; None if it is not ready within this time."""
        with suppress(TimeoutError):
            return self._future.result(timeout_s)
        return None

    def is_usable(self) -> bool:
        """Whether its split is, or will be, as good as one that is made now."""
        if not self._future.done():
            return True
        if self._future.exception() is not None:
            return False
        return self._is_unread(self._future.result()[1])

    def cancel(self) -> None:
        self._cancellation.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)
