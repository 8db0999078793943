"""Data files that the committer itself writes for a snapshot, in place of others.

There may be several tries; what those that lost have written is deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.fs
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile, FileFormat
from pyiceberg.table import Table

from midstream.connectors.common.filesystem import delete_if_there
from midstream.connectors.common.table_columns import nullable
from midstream.connectors.files.field_ids import id_of, parquet_schema_of
from midstream.connectors.files.rolling_files import explained
from midstream.connectors.files.table_files import TableFile, open_table_file
from midstream.connectors.iceberg.iceberg_catalog import CatalogTable, IcebergFile
from midstream.connectors.iceberg.iceberg_commits import FoundFiles, SnapshotCommit, delete_manifests, entries_of
from midstream.connectors.iceberg.iceberg_files import (
    delete_files_of,
    deleted_rows,
    partition_constants,
    stored_columns,
)
from midstream.connectors.iceberg.iceberg_parts import IcebergPart
from midstream.connectors.iceberg.iceberg_tables import columns_of
from midstream.engine.core.errors import ConfigError

_BATCH_ROWS: Final = 65_536


class RewrittenFiles:
    def __init__(self, there: CatalogTable, where: str) -> None:
        self._there = there
        self._where = where
        self._tries: list[tuple[UUID, int, list[str]]] = []
        """Of tries with an unknown outcome: the table, the snapshot, and the new files."""

    def _send(
        self,
        table: Table,
        snapshot: SnapshotCommit,
        new: Sequence[IcebergFile],
        replaced: frozenset[str],
        properties: Mapping[str, str],
        summary: Mapping[str, str],
        others: Sequence[IcebergFile] = (),
        found: FoundFiles | None = None,
    ) -> None:
        """Commit a snapshot that adds new files and `others`, and removes those at the locations `replaced`, or those that
        were `found` and have the same rows.
        """
        filesystem, directory = self._there.data_directory(table)
        paths = [f"{directory}/{file.name}" for file in new]
        tried = [(table.metadata.table_uuid, snapshot.snapshot_id, paths)] if paths else []
        self._tries += tried
        try:
            added = self._there.data_files(table, [*new, *others], self._where)
            if found is not None:
                snapshot.rewrite(added, found, summary)
            elif replaced:
                snapshot.replace(added, lambda entry: entry.data_file.file_path in replaced, properties, summary)
            else:
                snapshot.append(added, properties, summary)
        except Exception as error:
            if not snapshot.is_sent or isinstance(error, CommitFailedException):
                self._tries = [each for each in self._tries if each not in tried]
                self._delete(filesystem, paths)
            raise

    def delete_lost(self, table: Table) -> None:
        """Delete the files of tries that have not become part of the table, which is as it was loaded after the last one:
        none of them can still succeed. Those of a table that was renamed or dropped since stay, as it may have them.
        """
        metadata = table.metadata
        lost = [
            path
            for table_id, id, paths in self._tries
            if table_id == metadata.table_uuid and metadata.snapshot_by_id(id) is None
            for path in paths
        ]
        if lost:  # a snapshot may have expired already
            live = {self._there.located(table, entry.data_file.file_path)[1] for entry in entries_of(table)}
            filesystem, _ = self._there.data_directory(table)
            self._delete(filesystem, [path for path in lost if path not in live])
        self._tries.clear()

    def _delete(self, filesystem: pyarrow.fs.FileSystem, paths: Sequence[str]) -> None:
        with explained(self._where):
            for path in paths:
                delete_if_there(filesystem, path)


class ReplacedFile:
    """A data file of the table as it was loaded, whose rows may be written again."""

    def __init__(self, there: CatalogTable, table: Table, file: DataFile, deletes: Sequence[str], where: str) -> None:
        if file.file_format != FileFormat.PARQUET:
            raise ConfigError(
                f"{where}: {file.file_path} is {file.file_format.value}; only Parquet files can be written again"
            )
        self.location = file.file_path
        self._filesystem, self._path = there.located(table, file.file_path)
        self._schema = schema_to_pyarrow(table.metadata.schema())
        mapping = table.metadata.name_mapping()
        self._mapping = [] if mapping is None else mapping.root
        columns = nullable(columns_of(table.metadata.schema()))
        by_id = {found: columns.field(field.name) for field in self._schema if (found := id_of(field)) is not None}
        constants = partition_constants(file, table.specs()[file.spec_id], by_id)
        self._file = TableFile(file.file_path, file.file_size_in_bytes, 0, constants)
        self._deletes = [there.located(table, each)[1] for each in deletes]

    @cached_property
    def _deleted(self) -> np.ndarray[Any, Any] | None:
        return deleted_rows(self._filesystem, self._deletes, self.location, self._path)

    def read(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the rows that are in the table, always in the same order."""
        wanted = pa.schema([self._schema.field(name) for name in schema.names])

        def stored() -> dict[str, pa.Field[Any]]:
            return stored_columns(parquet_schema_of(self._filesystem, self._path), wanted, self._mapping, self._path)

        reader = open_table_file(
            self._filesystem, self._path, self._file, schema, 0, stored=stored, deleted=lambda: self._deleted
        )
        try:
            while (found := reader.read(_BATCH_ROWS)) is not None:
                yield found[0]
        finally:
            reader.close()


def write_rows(part: IcebergPart, batch: pa.RecordBatch) -> None:
    if batch.num_rows:
        part.add(batch)
        part.drain()


def deletes_of(table: Table, where: str) -> dict[str, tuple[str, ...]]:
    """Return for data files the files of deletes that apply to them. Raises ConfigError for deletes by equality."""
    return delete_files_of(table, where) if delete_manifests(table) else {}
