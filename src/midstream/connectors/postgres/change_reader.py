"""Reads one table's changes on a slot: the snapshot's files, then the stream of a replication slot.

The reader is at a `LogPosition`. If the connection is lost it connects again there. The server sends a transaction again
from its beginning until it was confirmed, in the same order, so the changes that were read are skipped. What a completed
checkpoint holds is confirmed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final

import msgspec
import pyarrow as pa

from midstream.connectors.common.batch_cursor import BatchCursor
from midstream.connectors.common.external_waits import ExternalWait
from midstream.connectors.common.row_operations import DELETE, INSERT, UPDATE
from midstream.connectors.postgres import replication_messages as m
from midstream.connectors.postgres.change_offsets import ChangeOffsets, LogPosition, is_exact
from midstream.connectors.postgres.change_values import arrow_type, from_bytes
from midstream.connectors.postgres.connections import connect
from midstream.connectors.postgres.postgres_tables import explained
from midstream.connectors.postgres.replicated_table import ReplicatedColumn, checked_slot
from midstream.connectors.postgres.replication_stream import ChangeStream, ReplicationConnection, SlotInUse
from midstream.connectors.postgres.table_snapshot import read_snapshot
from midstream.engine.core.batches import empty_batch
from midstream.engine.core.errors import ConfigError, DataError, SchemaError, StorageError, assert_never
from midstream.engine.operators.source_api import SplitReader

_EMPTY_S: Final = 0.2
"""How long a read waits for the first change."""
_BATCH_BYTES: Final = 8 * 2**20
_RETRY_S: Final = 0.5
_STATUS_S: Final = 10.0
_IN_USE_S: Final = 60.0
"""How long another connection may read the slot: that of a killed reader ends when the server notices it."""
_log = logging.getLogger(__name__)


class ChangesSplit(msgspec.Struct, frozen=True, array_like=True):
    """The payload of the one split."""

    slot: str
    publication: str
    system: str
    """The identifier of the server's database cluster."""
    table_oid: int
    base_lsn: int
    """Where changes begin."""
    directory: str
    """The snapshot's files."""
    files: tuple[int, ...]
    """The number of rows of each."""

    @property
    def offsets(self) -> ChangeOffsets:
        return ChangeOffsets(sum(self.files), self.base_lsn)


@dataclass(frozen=True)
class TableChanges:
    """What a reader needs to know in addition to the split."""

    dsn: str = field(repr=False)
    table: str
    columns: tuple[ReplicatedColumn, ...]
    key: tuple[str, ...]
    """With a replica identity FULL: the columns whose change is a delete and an insert; () for all."""
    schema: pa.Schema
    where: str


Cells = Sequence[m.Cell]
_Change = tuple[str, Cells]
"""A row and its operation."""


class _RowLayout:
    """How rows of a table, as it is in a part of the log, become rows of the stream."""

    def __init__(self, relation: m.Relation, changes: TableChanges, at: str) -> None:
        self._where, self._at = changes.where, at
        self._names = [column.name for column in relation.columns]
        found = {column.name: column for column in relation.columns}
        for wanted in changes.columns:
            column = found.get(wanted.name)
            cure = "choose others with columns=, or start again with --fresh"
            if column is None:
                raise SchemaError(f"{changes.where}: {at}: the table has no column {wanted.name!r}; {cure}")
            is_same = column.type_oid == wanted.type_oid and (
                column.modifier == wanted.modifier or arrow_type(wanted.base, column.modifier) == wanted.kind
            )
            if not is_same:
                raise SchemaError(
                    f"{changes.where}: {at}: column {wanted.name!r} is not {wanted.type}, as it was when the job started "
                    f"(type {column.type_oid}, modifier {column.modifier}); {cure}"
                )
        self._picked = [self._names.index(column.name) for column in changes.columns]
        self._pick = itemgetter(*self._picked) if len(self._picked) > 1 else None
        is_full = relation.identity == "f"
        key = [
            index
            for index, column in enumerate(relation.columns)
            if (column.name in (changes.key or self._names) if is_full else column.is_key)
        ]
        self._key = key
        identity = {self._names[index] for index in key}
        missing = [name for name in changes.key if name not in identity]
        if missing:  # an update of it would not say which row it had been
            raise SchemaError(
                f"{changes.where}: {at}: column {missing[0]!r} belongs to the key of the table, and not to its replica identity "
                f"({', '.join(sorted(identity))}): one of them was changed; start again with --fresh"
            )

    def insert(self, new: m.Row) -> tuple[_Change, ...]:
        return ((INSERT, self._cells(new)),)

    def delete(self, old: m.Row) -> tuple[_Change, ...]:
        return ((DELETE, self._cells(old)),)

    def update(self, change: m.Update) -> tuple[_Change, ...]:
        old, new = change.old, change.new
        self._check_width(new)
        if old is not None:
            self._check_width(old)
            if not change.old_is_key:
                new = [before if each is m.Unchanged.TOAST else each for each, before in zip(new, old, strict=True)]
        if old is not None and any(
            new[index] != old[index] and new[index] is not m.Unchanged.TOAST for index in self._key
        ):
            return (DELETE, self._cells(old)), (INSERT, self._cells(new))
        return ((UPDATE, self._cells(new)),)

    def _cells(self, row: m.Row) -> Cells:
        self._check_width(row)
        cells: Cells = self._pick(row) if self._pick is not None else [row[self._picked[0]]]
        if m.Unchanged.TOAST in cells:
            column = self._names[self._picked[list(cells).index(m.Unchanged.TOAST)]]
            raise DataError(
                f"{self._where}: {self._at}: an update does not have the value of column {column!r}, which is stored apart "
                f"(TOAST) and did not change. Run ALTER TABLE … REPLICA IDENTITY FULL and start again with --fresh, or leave "
                "the column out with columns="
            )
        return cells

    def _check_width(self, row: m.Row) -> None:
        if len(row) != len(self._names):
            raise DataError(f"{self._where}: {self._at}: a row has {len(row)} values for {len(self._names)} columns")


class ChangeReader(SplitReader):
    def __init__(self, changes: TableChanges, split: ChangesSplit, offset: int) -> None:
        self._changes, self._split = changes, split
        self._where = changes.where
        self._offsets = split.offsets
        self._rows_read = min(offset, self._offsets.snapshot_rows)
        self._position = self._offsets.decode(offset)
        """After the last batch that was returned."""
        self._is_checked = False
        rows = read_snapshot(split.directory, split.files, self._rows_read, changes.schema, self._where)
        self._snapshot = BatchCursor(rows, where=self._where, offset_rows=self._rows_read)
        self._stream: _Transactions | None = None
        self._wait = ExternalWait()
        self._in_use_since_s: float | None = None
        self._retry_at_s = 0.0
        self._completed = offset
        """The offset in the newest checkpoint that completed. Written by the task's thread."""
        self._confirmed = LogPosition(0)

    def checkpointed(self, offset: int) -> None:
        self._completed = max(offset, self._completed)

    def read(self, rows_max: int) -> tuple[pa.RecordBatch, int] | None:
        if not self._is_checked and not self._check_slot():
            return self._nothing()
        if self._rows_read < self._offsets.snapshot_rows:
            return self._read_snapshot(rows_max)
        try:
            if self._stream is None and not self._connect():
                return self._nothing()
            assert self._stream is not None
            self._confirm(self._stream)
            rows = self._stream.read(rows_max)
        except StorageError as error:
            self._disconnect(error)
            return self._nothing()
        self._position = self._stream.position
        return self._batch(rows), self._offsets.encode(self._position)

    def close(self) -> None:
        self._wait.end()
        self._snapshot.close()
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _nothing(self) -> tuple[pa.RecordBatch, int]:
        if self._rows_read < self._offsets.snapshot_rows:
            offset = self._rows_read
        else:
            offset = self._offsets.encode(self._position)
        return empty_batch(self._changes.schema), offset

    def _read_snapshot(self, rows_max: int) -> tuple[pa.RecordBatch, int]:
        found = self._snapshot.read(rows_max)
        if found is None:
            raise StorageError(
                f"{self._where}: the snapshot in {self._split.directory} has {self._rows_read} of "
                f"{self._offsets.snapshot_rows} rows"
            )
        _, self._rows_read = found
        return found

    def _check_slot(self) -> bool:
        """Check that the server still has all changes after the position. Returns False if it does not answer."""
        if time.monotonic() < self._retry_at_s:
            return False
        try:
            with connect(self._changes.dsn, self._where) as connection, explained(self._where):
                status = checked_slot(connection, self._split.slot, self._where)
        except StorageError as error:
            self._disconnect(error)
            return False
        if status.confirmed_lsn > self._position.lsn:
            raise ConfigError(
                f"{self._where}: the checkpoint is at the position {self._position} of the server's log, and the replication slot "
                f"{self._split.slot!r} no longer has changes before {m.lsn_text(status.confirmed_lsn)}: a later checkpoint had "
                "completed. Resume from the newest one, or start again with --fresh"
            )
        if status.log_end_lsn < self._position.lsn:
            raise ConfigError(
                f"{self._where}: the checkpoint is at the position {self._position} of the server's log, which now ends at "
                f"{m.lsn_text(status.log_end_lsn)}: the server was set back, for example to a backup, and changes that it makes again "
                "up to that position would be missing. Start again with --fresh"
            )
        self._is_checked = True
        self._retry_at_s = 0.0
        self._wait.end()
        return True

    def _connect(self) -> bool:
        if time.monotonic() < self._retry_at_s or not self._check_slot():
            return False
        connection = ReplicationConnection(self._changes.dsn, self._where)
        with ExitStack() as unfinished:
            unfinished.callback(connection.close)
            system = connection.system()
            if system != self._split.system:
                raise ConfigError(
                    f"{self._where}: the server has the system identifier {system}, and the checkpoint is of the server "
                    f"{self._split.system}; connect to that, or start again with --fresh"
                )
            split = self._split
            stream = ChangeStream(connection, split.slot, split.publication, self._position.lsn, self._where)
            unfinished.pop_all()
        self._stream = _Transactions(stream, self._changes, self._split, self._position)
        self._in_use_since_s = None
        return True

    def _disconnect(self, error: StorageError) -> None:
        """Connect again later. Raises an error that does not pass by itself."""
        if isinstance(error, DataError):
            raise error
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        now_s = time.monotonic()
        if isinstance(error, SlotInUse):
            self._in_use_since_s = now_s if self._in_use_since_s is None else self._in_use_since_s
            if now_s - self._in_use_since_s > _IN_USE_S:
                raise StorageError(
                    f"{error}: another job or program reads the replication slot; give each its own"
                ) from error
        elif stream is not None or not self._retry_at_s:
            _log.warning("%s; connecting again", error)
        self._is_checked = False
        self._retry_at_s = now_s + _RETRY_S
        self._wait.begin(f"PostgreSQL, for the changes of {self._changes.table}")

    def _confirm(self, stream: _Transactions) -> None:
        completed = self._offsets.decode(self._completed)
        is_due = completed.lsn > self._confirmed.lsn or stream.wants_status
        if is_due and self._completed >= self._offsets.snapshot_rows:
            stream.confirm(completed.lsn)
            self._confirmed = completed

    def _batch(self, rows: Sequence[_Change]) -> pa.RecordBatch:
        schema = self._changes.schema
        if not rows:
            return empty_batch(schema)
        columns = zip(*(cells for _, cells in rows), strict=True)
        arrays: list[pa.Array[Any]] = [
            from_bytes(list(values), each.kind, f"{self._where}: before {self._position}: column {each.name!r}")
            for values, each in zip(columns, self._changes.columns, strict=True)
        ]
        return pa.RecordBatch.from_arrays([*arrays, pa.array([op for op, _ in rows], pa.large_string())], schema=schema)


class _Transactions:
    """The rows of a stream, and the position after them."""

    def __init__(self, stream: ChangeStream, changes: TableChanges, split: ChangesSplit, start: LogPosition) -> None:
        self._stream = stream
        self._changes = changes
        self._table_oid = split.table_oid
        self._offsets = split.offsets
        self.position = start
        self._skipped_lsn = start.lsn if start.changes else 0
        """The transaction of which changes are to be skipped, and how many are left."""
        self._skip = start.changes
        self._transaction: int | None = None
        """Where the commit is of the transaction whose changes come now."""
        self._done = 0
        """Its changes so far."""
        self._layout: _RowLayout | None = None
        self._held: tuple[_Change, ...] = ()
        """The rows of a change that did not fit into the last batch."""
        self._received = start.lsn
        self._status_at_s = time.monotonic() + _STATUS_S
        self._wants_reply = False

    @property
    def wants_status(self) -> bool:
        return self._wants_reply or time.monotonic() >= self._status_at_s

    def confirm(self, lsn: int) -> None:
        self._stream.confirm(max(self._received, lsn), lsn)
        self._wants_reply = False
        self._status_at_s = time.monotonic() + _STATUS_S

    def close(self) -> None:
        self._stream.close()

    def read(self, rows_max: int) -> list[_Change]:
        """Return the next rows; none if no change comes within a moment."""
        rows: list[_Change] = []
        size = 0
        deadline_s = time.monotonic() + _EMPTY_S
        while True:
            if self._held:
                found, self._held = self._held, ()
            else:
                may_end = self._transaction is None or is_exact(self._done)
                if rows and may_end and (len(rows) >= rows_max or size >= _BATCH_BYTES):
                    return self._cut(rows)
                waits_s = max(0.0, deadline_s - time.monotonic()) if not rows else 0.0 if may_end else _EMPTY_S
                message = self._stream.next(waits_s)
                if message is None:
                    if may_end:
                        return self._cut(rows)
                    continue
                found = self._handle(message)
                if not found:
                    if not rows and (may_end or self._skip) and time.monotonic() >= deadline_s:
                        return self._cut(rows)
                    continue
                if rows and may_end and len(rows) + len(found) > rows_max:
                    self._held = found
                    return self._cut(rows)
            self._done += 1
            rows += found
            size += sum(len(cell) for _, cells in found for cell in cells if isinstance(cell, bytes))

    def _cut(self, rows: list[_Change]) -> list[_Change]:
        if self._transaction is not None and self._done and not self._skip:
            self.position = LogPosition(self._transaction, self._done)
        return rows

    def _handle(self, message: m.Message | m.Keepalive) -> tuple[_Change, ...]:
        """Return the rows of a change that has not been read."""
        match message:
            case m.Keepalive(wal_end, wants_reply):
                self._wants_reply |= wants_reply
                self._received = max(self._received, wal_end)
                if self._transaction is None and not self._skip:
                    self._move(self._offsets.aligned(wal_end))
            case m.TransactionBegin(commit_lsn):
                self._begin(commit_lsn)
            case m.TransactionCommit(_, end_lsn):
                if self._skip:
                    raise self._missing(f"has ended {self._skip} changes too early")
                self._received = max(self._received, end_lsn)
                self._transaction = None
                self._move(end_lsn)
            case m.Relation(oid) if oid == self._table_oid:
                self._layout = _RowLayout(message, self._changes, self._at)
            case m.Truncate(relations) if self._table_oid in relations:
                raise DataError(
                    f"{self._changes.where}: {self._at}: TRUNCATE has deleted all rows of the table, without saying which; "
                    "use DELETE, and start again with --fresh to go on"
                )
            case m.Insert(relation) | m.Update(relation) | m.Delete(relation) if relation == self._table_oid:
                if not self._skip:
                    return self._rows_of(message)
                self._skip -= 1
                self._done += 1
            case _:  # of another table, or nothing that concerns rows
                pass
        return ()

    def _begin(self, commit_lsn: int) -> None:
        if self._skip and commit_lsn != self._skipped_lsn:
            raise self._missing("is not sent again")
        self._transaction, self._done = commit_lsn, 0

    def _missing(self, what: str) -> DataError:
        return DataError(
            f"{self._changes.where}: the transaction that is committed at {m.lsn_text(self._skipped_lsn)}, of which a part was read, "
            f"{what}: the publication was changed, or the server has lost log; start again with --fresh"
        )

    def _rows_of(self, change: m.Insert | m.Update | m.Delete) -> tuple[_Change, ...]:
        if self._layout is None:
            raise DataError(f"{self._changes.where}: {self._at}: a change came before the table's columns")
        match change:
            case m.Insert(_, new):
                return self._layout.insert(new)
            case m.Update():
                return self._layout.update(change)
            case m.Delete(_, old):
                return self._layout.delete(old)
            case _:
                assert_never(change)

    def _move(self, lsn: int) -> None:
        if lsn > self.position.lsn:
            self.position = LogPosition(lsn)

    @property
    def _at(self) -> str:
        return f"the transaction that is committed at {m.lsn_text(self._transaction or 0)}"
