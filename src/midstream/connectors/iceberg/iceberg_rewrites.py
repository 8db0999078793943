"""Data files that the committer itself writes for a snapshot, possibly in several tries; those of tries that lost are deleted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow.fs

from midstream.connectors.common.filesystem import delete_if_there
from midstream.connectors.files.rolling_files import explained
from midstream.connectors.iceberg.iceberg_catalog import CatalogTable, IcebergFile
from midstream.connectors.iceberg.iceberg_commits import SnapshotCommit, entries_of

if TYPE_CHECKING:
    from pyiceberg.table import Table


class RewrittenFiles:
    def __init__(self, there: CatalogTable, where: str) -> None:
        self._there = there
        self._where = where
        self._tries: list[tuple[int, list[str]]] = []
        """Of tries with an unknown outcome: the snapshot, and the new files."""

    def _send(
        self,
        table: Table,
        snapshot: SnapshotCommit,
        new: Sequence[IcebergFile],
        replaced: frozenset[str],
        properties: Mapping[str, str],
        summary: Mapping[str, str],
        others: Sequence[IcebergFile] = (),
    ) -> None:
        """Commit a snapshot that adds new files and `others`, and removes those at the locations `replaced`."""
        from pyiceberg.exceptions import CommitFailedException

        filesystem, directory = self._there.data_directory(table)
        paths = [f"{directory}/{file.name}" for file in new]
        tried = [(snapshot.snapshot_id, paths)] if paths else []
        self._tries += tried
        try:
            added = self._there.data_files(table, [*new, *others], self._where)
            if replaced:
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
        none of them can still succeed.
        """
        metadata = table.metadata
        lost = [path for id, paths in self._tries if metadata.snapshot_by_id(id) is None for path in paths]
        if lost:  # a snapshot may have expired already
            live = {self._there.located(table, entry.data_file.file_path)[1] for entry in entries_of(table)}
            filesystem, _ = self._there.data_directory(table)
            self._delete(filesystem, [path for path in lost if path not in live])
        self._tries.clear()

    def _delete(self, filesystem: pyarrow.fs.FileSystem, paths: Sequence[str]) -> None:
        with explained(self._where):
            for path in paths:
                delete_if_there(filesystem, path)
