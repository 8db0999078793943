"""Small files of a Delta table that the driver writes again as larger ones.

    table/<partition>/compacted-<id>-<n>.parquet    invisible to readers until the log names it

The files of a partition are read in batches, and written with the columns that the table has now. One version removes
the old files and adds the new ones, without a change of data: readers of what is new see nothing in it, and a rollback
passes over it. deltalake does not notice if another compaction has removed the same files, so the version must be the
one after that in which the files were found. If another one comes first, or has changed the files of a partition, the
new files are deleted, and the old ones are looked for again later.

Files with deletion vectors are left alone, as deltalake cannot remove them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote
from uuid import uuid4

import pyarrow as pa

from midstream.connectors.common.compaction import Compacted, Compactor, LiveFile, check_target, files_to_compact
from midstream.connectors.common.filesystem import below, delete_if_there
from midstream.connectors.common.table_columns import has_not_null, nan_columns, nullable
from midstream.connectors.delta.column_mapping import as_in_files, mapping_of
from midstream.connectors.delta.delta_files import make_folders_durable, partition_of
from midstream.connectors.delta.delta_log import deleted_rows, digest_of, log_path
from midstream.connectors.delta.delta_tables import check_features, delta_type, partition_folder, schema_of, statistics
from midstream.connectors.files.field_ids import parquet_schema_of
from midstream.connectors.files.rolling_files import OpenFile, RollingFiles, explained
from midstream.connectors.files.table_files import TableFile
from midstream.engine.core.errors import ConfigError, SchemaError, StorageError
from midstream.engine.operators.user_metrics import UserMetrics

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from midstream.connectors.delta.delta_sink import DeltaSink

_BATCH_ROWS: Final = 65_536
_SURELY_NAMED: Final = re.compile(r"(?:[\w.=/~-]|%25)+", re.ASCII)
"""Paths in the log that deltalake writes in the same way: it would silently not remove a file under another form."""


def check_compactable(sink: DeltaSink, table: DeltaTable) -> None:
    """Raise ConfigError or SchemaError if small files of the table cannot be compacted, StorageError if the driver cannot
    write files.
    """
    where = sink._where
    check_target(sink.roll_bytes, where)
    _check_columns(table, where)
    for name in mapping_of(table, where).stored_names(table.metadata().partition_columns):
        if not _SURELY_NAMED.fullmatch(name) or "/" in name or "=" in name:
            raise ConfigError(
                f"{where}: auto_compact cannot name files in folders of the partition column {name!r}; rename it, or leave "
                "auto_compact out"
            )
    try:
        probe = f"{sink.directory}/_compaction-{uuid4().hex}"
        sink.filesystem.open_output_stream(probe).close()
        sink.filesystem.delete_file(probe)
    except OSError as error:
        raise StorageError(f"{where}: auto_compact has the driver write files, and it cannot: {error}") from error


def _check_columns(table: DeltaTable, where: str) -> None:
    for field in schema_of(table):
        if has_not_null(field.type) or delta_type(field.type) != field.type:
            raise SchemaError(
                f"{where}: column {field.name!r} of the table is {field.type}, and would not stay as it is if its files were "
                "written again; leave auto_compact out"
            )


def changes_no_rows(actions: Sequence[dict[str, Any]]) -> bool:
    """Whether a version, by its actions in the log, has only rearranged rows, or nothing in it concerns them."""
    rearranging = [action.get("add") or action.get("remove") for action in actions]
    return {kind for action in actions for kind in action} <= {"txn", "commitInfo", "add", "remove"} and not any(
        file.get("dataChange", True) for file in rearranging if file is not None
    )


class NewestTable:
    """A table that is opened once, and brought up to date."""

    def __init__(self, sink: DeltaSink) -> None:
        self._sink = sink
        self.table: DeltaTable | None = None
        self._version: tuple[int, int | None] = (-1, None)
        """A version of it, and the digest of its commit."""

    def newest(self) -> DeltaTable:
        """Return the table as it is now: another one, if it was dropped and made again."""
        sink, (version, digest) = self._sink, self._version
        if self.table is not None and digest is not None:
            if digest_of(sink.filesystem, sink.directory, version) == digest:
                self.table.update_incremental()
                return self.table
        self.table = table = sink.opened()
        self._version = table.version(), digest_of(sink.filesystem, sink.directory, table.version())
        return table


class DeltaCompactor(Compactor):
    def __init__(
        self, sink: DeltaSink, make_log_durable: Callable[[DeltaSink, DeltaTable, int], None], metrics: UserMetrics
    ) -> None:
        super().__init__(sink._where, metrics)
        self._sink = sink
        self._table = NewestTable(sink)
        self._make_log_durable = make_log_durable

    def compact_once(self) -> Compacted | None:
        from deltalake.exceptions import DeltaError

        try:
            table = self._table.newest()
            check_features(table, self._where)
            _check_columns(table, self._where)
            groups = files_to_compact(live_files(table), self._sink.roll_bytes)
            if not groups:
                return None
            with ExitStack() as unsent:
                id, numbers, rewritten = uuid4().hex, count(), list[_CompactedFiles]()
                for group in groups:
                    rewritten.append(_CompactedFiles(self._sink, table, group, id, numbers, self.check_stopped))
                    unsent.callback(rewritten[-1].discard)
                return self._commit(table.schema().to_json(), id, rewritten, unsent)
        except DeltaError as error:
            raise StorageError(str(error)) from error

    def _commit(
        self, schema: str, id: str, rewritten: Sequence[_CompactedFiles], unsent: ExitStack
    ) -> Compacted | None:
        """Commit those files whose old ones are still there. `unsent`: deletes them all."""
        from deltalake import CommitProperties
        from deltalake.exceptions import CommitFailedError

        with self.turn:
            self.check_stopped()
            table = self._table.newest()
            live = set(live_files(table))
            current = [files for files in rewritten if files.old <= live]
            if table.schema().to_json() != schema or not current:
                return None
            version, partition_by = table.version(), table.metadata().partition_columns
            properties = CommitProperties({"midstream": {"compaction": id}}, max_commit_retries=0)
            actions = [action for files in current for action in files.actions()]
            sent = unsent.pop_all()
            try:
                table.create_write_transaction(
                    actions, "append", table.schema(), partition_by, commit_properties=properties
                )
            except CommitFailedError:
                # perhaps it has succeeded: if the answer is lost, deltalake tries again, and fails
                path = log_path(self._sink.directory, version + 1)
                with explained(self._where), self._sink.filesystem.open_input_stream(path) as log:
                    if id.encode() not in log.read():
                        sent.close()
                        return None
            self._make_log_durable(self._sink, table, version)
        for files in rewritten:
            if files not in current:
                files.discard()
        new = [file for files in current for file in files.written]
        return Compacted(sum(len(files.old) for files in current), len(new), sum(file.size for file in new))


def live_files(table: DeltaTable) -> list[LiveFile]:
    """Return those files of the table that can be removed from it."""
    actions = pa.table(table.get_add_actions())
    names = table.metadata().partition_columns
    stored_names = mapping_of(table, table.table_uri).stored_names(names)
    columns: list[list[Any]] = [
        actions.column(name).to_pylist() for name in ("path", "size_bytes", "modification_time")
    ]
    partitions: list[Any] = actions.column("partition").to_pylist() if names else [{}] * actions.num_rows
    vectors = {path for path, _ in deleted_rows(table, set(columns[0]), table.table_uri)}
    return [
        LiveFile(
            path, size, tuple(partition_of(stored_names, tuple(map(values.get, names))).items()), (written_ms, path)
        )
        for path, size, written_ms, values in zip(*columns, partitions, strict=True)
        if path not in vectors and _SURELY_NAMED.fullmatch(path) and not path.startswith("/")
    ]


class _CompactedFiles:
    """Files of a partition that are written in place of others, which have the same rows."""

    def __init__(
        self,
        sink: DeltaSink,
        table: DeltaTable,
        chosen: Sequence[LiveFile],
        id: str,
        numbers: Iterator[int],
        check_stopped: Callable[[], None],
    ) -> None:
        self.old = frozenset(chosen)
        self._sink = sink
        self._partition: dict[str, str | None] = dict(chosen[0].partition)
        self._mapping = mapping_of(table, sink._where)
        partition_by = table.metadata().partition_columns
        self._columns = nullable(pa.schema([each for each in schema_of(table) if each.name not in partition_by]))
        self._stored = self._mapping.stored(self._columns)
        self._unbounded: set[str] = set()
        folder = partition_folder(self._partition)  # those of other writers may say something else to some readers

        def next_file() -> OpenFile:
            name = f"{folder}compacted-{id}-{next(numbers):04d}.parquet"
            return OpenFile(sink.filesystem, sink.directory, name, "parquet", self._stored)

        files = RollingFiles(next_file, sink.roll_bytes)
        with ExitStack() as unfinished, explained(sink._where):
            unfinished.callback(files.discard)
            for file in chosen:
                self._copy(file, files, check_stopped)
            self.written = files.end()
            make_folders_durable(sink, [file.name for file in self.written])
            self._statistics = [self._described(file) for file in self.written]
            unfinished.pop_all()

    def _copy(self, file: LiveFile, to: RollingFiles, check_stopped: Callable[[], None]) -> None:
        name = unquote(file.path)
        path = below(self._sink.filesystem, self._sink.directory, name)
        there = parquet_schema_of(self._sink.filesystem, path).names
        unknown = set(there) - {*self._columns.names, *self._partition}
        if unknown and not self._mapping.is_mapped:  # with column mapping, it was dropped
            raise SchemaError(f"{path} has the column {min(unknown)!r}, which the table does not have")
        read = TableFile(name, file.size, 0)
        reader = self._mapping.open_file(self._sink.filesystem, path, read, self._columns, 0)
        try:
            while (found := reader.read(_BATCH_ROWS)) is not None:
                check_stopped()
                self._unbounded |= nan_columns(found[0])
                to.write(as_in_files(found[0], self._stored))
        finally:
            reader.close()

    def _described(self, file: OpenFile) -> str:
        unbounded = self._mapping.stored_names(self._unbounded)
        return statistics(self._sink.filesystem, f"{self._sink.directory}/{file.name}", self._stored, unbounded)

    def actions(self) -> list[Any]:
        from deltalake.transaction import AddAction, RemoveAction

        now_ms = int(time.time() * 1000)
        newest_ms = max(file.order[0] for file in self.old)  # readers of all files begin with the oldest
        added = [
            AddAction(file.name, file.size, self._partition, newest_ms, False, described)
            for file, described in zip(self.written, self._statistics, strict=True)
        ]
        removed = [RemoveAction(unquote(file.path), False, now_ms, file.size, self._partition) for file in self.old]
        return [*added, *removed]

    def discard(self) -> None:
        with explained(self._sink._where):
            for file in self.written:
                delete_if_there(self._sink.filesystem, below(self._sink.filesystem, self._sink.directory, file.name))
