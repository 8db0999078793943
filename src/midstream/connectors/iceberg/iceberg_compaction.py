"""Small files of an Iceberg table that the driver writes again as larger ones.

    <table>/data/compacted-<id>-<n>.parquet    a data file that replaces others

The files of a partition are read in batches, and written with the columns that the table has now. A snapshot of the
operation `replace` removes the old files and adds the new ones: to readers of what is new there is nothing in it. If
another commit comes first, or has changed the files of a partition, the new files are deleted, and the old ones are
looked for again later.

Files with deleted rows, of an older partitioning, in an order of their own, or that the table has twice are left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from itertools import count
from typing import Final
from uuid import uuid4

import msgspec
from pyiceberg.manifest import DataFile, FileFormat, ManifestEntry
from pyiceberg.table import Table

from midstream.connectors.common.compaction import (
    Compacted,
    Compactor,
    LiveFile,
    check_target,
    files_to_compact,
    is_small,
)
from midstream.connectors.common.filesystem import make_directory
from midstream.connectors.common.table_columns import nullable
from midstream.connectors.iceberg.iceberg_catalog import JOB, SINK, CatalogTable, IcebergFile
from midstream.connectors.iceberg.iceberg_commits import (
    CommitUnknownError,
    FoundFiles,
    LostRaceError,
    SnapshotCommit,
    catalog_errors,
    data_entries,
    delete_manifests,
)
from midstream.connectors.iceberg.iceberg_parts import IcebergPart, target_of
from midstream.connectors.iceberg.iceberg_rewrites import ReplacedFile, RewrittenFiles, deletes_of, write_rows
from midstream.connectors.iceberg.iceberg_tables import check_rewritable, check_supported, columns_of
from midstream.engine.core.errors import StorageError
from midstream.engine.operators.user_metrics import UserMetrics

_OPTION: Final = "auto_compact"


def check_compactable(there: CatalogTable, table: Table, roll_bytes: int) -> None:
    """Raise ConfigError if small files of the table cannot be compacted, StorageError if the driver cannot write files."""
    check_target(roll_bytes, there.where)
    check_rewritable(table, _OPTION, there.where)
    with catalog_errors(f"{there.where}: its files cannot be listed"):
        deletes_of(table, there.where)
    filesystem, directory = there.data_directory(table)
    probe = f"{directory}/_compaction-{uuid4().hex}"
    try:
        make_directory(filesystem, directory)
        filesystem.open_output_stream(probe).close()
        filesystem.delete_file(probe)
    except OSError as error:
        raise StorageError(f"{there.where}: auto_compact has the driver write files, and it cannot: {error}") from error


class IcebergCompactor(Compactor):
    def __init__(self, there: CatalogTable, job_id: str, uid: str, roll_bytes: int, metrics: UserMetrics) -> None:
        super().__init__(there.where, metrics)
        self._there = there
        self._job_id = job_id
        self._uid = uid
        self._roll_bytes = roll_bytes
        self._unknown: tuple[_CompactedDataFiles, int | None] | None = None
        """Files whose commit has an unknown outcome, and the snapshot for which it was made."""

    def compact_once(self) -> Compacted | None:
        with catalog_errors(self._where):
            table = self._opened()
            if not self._is_decided(table):
                return None
            check_supported(table, self._where)
            check_rewritable(table, _OPTION, self._where)
            plan = _plan(table, self._roll_bytes, self._where)
            if plan is None:
                return None
            rewritten = _CompactedDataFiles(
                self._there, table, plan[0], self._new_part(table), self.check_stopped, self._where
            )
            return self._commit(table, plan[1], rewritten)

    def _new_part(self, table: Table) -> Callable[[], IcebergPart]:
        target = target_of(self._there, table, columns_of(table.metadata.schema()))
        numbers, id = count(), uuid4().hex

        def next_name() -> str:
            return f"compacted-{id}-{next(numbers):04d}.parquet"

        return lambda: IcebergPart(target, self._job_id, self._uid, self._roll_bytes, next_name, self._where)

    def _opened(self) -> Table:
        with self.turn:  # a client of a catalog need not be safe for several threads
            return self._there.opened()

    def _is_decided(self, table: Table) -> bool:
        """Whether no earlier commit may still succeed. Files of one that has not are deleted."""
        if self._unknown is not None:
            rewritten, made_for = self._unknown
            if table.metadata.current_snapshot_id == made_for:
                return False
            rewritten.delete_lost(table)
            self._unknown = None
        return True

    def _commit(self, before: Table, found: FoundFiles, rewritten: _CompactedDataFiles) -> Compacted | None:
        with ExitStack() as unsent, self.turn:
            unsent.callback(rewritten.delete, before)
            self.check_stopped()
            table = self._there.opened()
            now, then = table.metadata, before.metadata
            same = (now.table_uuid, now.current_schema_id, now.default_spec_id)
            if same != (then.table_uuid, then.current_schema_id, then.default_spec_id):
                return None
            with catalog_errors(self._where):
                entries = _entries_now(table, found)
            rewritten.delete_changed(
                table, {entry.data_file.file_path for listed in entries.values() for entry in listed}
            )
            if not rewritten.groups:
                return None
            unsent.pop_all()
            old = FoundFiles(rewritten.old, entries, found.deletes)
            try:
                with catalog_errors(self._where):
                    rewritten.send(table, old, {JOB: self._job_id, SINK: self._uid})
            except LostRaceError:
                return None
            except CommitUnknownError as error:
                self._unknown = rewritten, now.current_snapshot_id
                raise StorageError(str(error)) from error
        return Compacted(len(rewritten.old), len(rewritten.new), sum(file.size for file in rewritten.new))


class _CompactedDataFiles(RewrittenFiles):
    """Files that are written in place of others, which have the same rows."""

    def __init__(
        self,
        there: CatalogTable,
        table: Table,
        groups: Sequence[Sequence[DataFile]],
        new_part: Callable[[], IcebergPart],
        check_stopped: Callable[[], None],
        where: str,
    ) -> None:
        super().__init__(there, where)
        self.groups: list[tuple[frozenset[str], list[IcebergFile]]] = []
        """By partition: the locations of the old files, and the new files."""
        columns = nullable(columns_of(table.metadata.schema()))
        with ExitStack() as unfinished:
            unfinished.callback(self.delete, table)
            for group in groups:
                part = new_part()
                unfinished.callback(part.discard)
                for file in group:
                    for batch in ReplacedFile(there, table, file, (), where).read(columns):
                        check_stopped()
                        write_rows(part, batch)
                new = [msgspec.msgpack.decode(each, type=IcebergFile) for each in part.finish(0)]
                self.groups.append((frozenset(file.file_path for file in group), new))
            unfinished.pop_all()

    @property
    def old(self) -> frozenset[str]:
        return frozenset(path for old, _ in self.groups for path in old)

    @property
    def new(self) -> list[IcebergFile]:
        return [file for _, new in self.groups for file in new]

    def send(self, table: Table, old: FoundFiles, summary: Mapping[str, str]) -> None:
        """Commit. Raises what `SnapshotCommit` raises; the files are deleted if that has failed for certain."""
        self._send(table, SnapshotCommit(table), self.new, frozenset(), {}, summary, found=old)

    def delete(self, table: Table) -> None:
        self.delete_changed(table, frozenset())

    def delete_changed(self, table: Table, live: Set[str]) -> None:
        """Delete the new files of partitions whose old ones are not all `live`."""
        filesystem, directory = self._there.data_directory(table)
        lost = [new for old, new in self.groups if not old <= live]
        self.groups = [group for group in self.groups if group[0] <= live]
        self._delete(filesystem, [f"{directory}/{file.name}" for new in lost for file in new])


def _plan(table: Table, target_bytes: int, where: str) -> tuple[list[list[DataFile]], FoundFiles] | None:
    """Return groups of files that should become one, and where they were found; None if there are too few."""
    newest = table.metadata.current_snapshot()
    deletes, listed_times = deletes_of(table, where), Counter[str]()
    found: dict[LiveFile, DataFile] = {}
    entries: dict[str, list[ManifestEntry]] = {}
    for manifest in () if newest is None else newest.manifests(table.io):
        listed = data_entries(table, manifest)
        listed_times.update(entry.data_file.file_path for entry in listed)
        small = {
            file: entry.data_file
            for entry in listed
            if _is_plain(table, entry.data_file) and not deletes.get(entry.data_file.file_path)
            if is_small((file := _live_file(table, entry)).size, target_bytes)
        }
        found |= small
        entries[manifest.manifest_path] = listed if small else []
    groups = files_to_compact((file for file in found if listed_times[file.path] == 1), target_bytes)
    if not groups:
        return None
    old = FoundFiles(frozenset(file.path for group in groups for file in group), entries, delete_manifests(table))
    return [[found[file] for file in group] for group in groups], old


def _entries_now(table: Table, found: FoundFiles) -> dict[str, Sequence[ManifestEntry]]:
    """Return the entries of manifests as in `FoundFiles`, of those that the table has now."""
    newest, entries = table.metadata.current_snapshot(), dict[str, Sequence[ManifestEntry]]()
    for manifest in () if newest is None else newest.manifests(table.io):
        known = found.entries.get(manifest.manifest_path)
        entries[manifest.manifest_path] = data_entries(table, manifest) if known is None else known
    return entries


def _is_plain(table: Table, file: DataFile) -> bool:
    """Whether the rows of a file can be in any other file of the same partition, which is sorted as new files are."""
    is_as_new = file.sort_order_id in (None, 0, table.metadata.default_sort_order_id)
    return file.spec_id == table.metadata.default_spec_id and file.file_format == FileFormat.PARQUET and is_as_new


def _live_file(table: Table, entry: ManifestEntry) -> LiveFile:
    file = entry.data_file
    values = tuple(file.partition[index] for index in range(len(table.metadata.spec().fields)))
    return LiveFile(file.file_path, file.file_size_in_bytes, values, (entry.sequence_number or 0, file.file_path))
