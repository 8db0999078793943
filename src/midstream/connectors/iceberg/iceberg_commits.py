"""Snapshots of an Iceberg table that add or remove data files: each is one commit of the catalog, tried once.

A commit requires that the table's schema and its newest snapshot are those that it was made for, and every commit that changes what is
in the table makes a snapshot, with an id of its own. So of two such commits that were made for one snapshot only one
succeeds, even if the table has been set back in between. pyiceberg's transactions repeat a commit that lost such a race, without looking at what the
other one did; therefore this module does not use them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast
from uuid import uuid4

import pyarrow.fs
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException, NoSuchTableError
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import (
    DataFile,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    write_manifest,
    write_manifest_list,
)
from pyiceberg.table import Table, TableProperties
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRefType
from pyiceberg.table.snapshots import Operation, Snapshot, SnapshotSummaryCollector, Summary, update_snapshot_summaries
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertCurrentSchemaId,
    AssertRefSnapshotId,
    AssertTableUUID,
    SetPropertiesUpdate,
    SetSnapshotRefUpdate,
    TableUpdate,
)
from pyiceberg.table.update.schema import UpdateSchema

from midstream.connectors.common.filesystem import make_durable
from midstream.connectors.iceberg.iceberg_tables import written_schema
from midstream.engine.core.errors import ConfigError, MidstreamError, StorageError

T = TypeVar("T")

ANSWER_S: float = 60
"""The time within which a catalog has to answer."""
SMALL_MANIFESTS_MAX: Final = 100
"""The number of small manifests that are merged into one: a reader opens them all, and each commit adds one."""
_SMALL_BYTES: Final = 8 * 2**20


class LostRaceError(Exception):
    """Another commit came first. The table is as that one left it."""


class CommitUnknownError(Exception):
    """The outcome of a call of the catalog is unknown. A commit may still succeed, unless another one comes first."""


@contextmanager
def catalog_errors(where: str) -> Iterator[None]:
    """Turn what a catalog raises into StorageError; a table that does not exist into ConfigError."""
    try:
        yield
    except (MidstreamError, LostRaceError, CommitUnknownError):
        raise
    except CommitFailedException as error:
        raise LostRaceError(str(error)) from error
    except CommitStateUnknownException as error:
        raise CommitUnknownError(str(error)) from error
    except NoSuchTableError as error:
        raise ConfigError(f"{where}: the table does not exist in the catalog") from error
    except Exception as error:  # each catalog raises the errors of its own client library
        raise StorageError(f"{where}: {type(error).__name__}: {error}") from error


def answered(work: Callable[[], T]) -> T:
    """Return what a call of the catalog returns. Raises CommitUnknownError if it does not answer: clients of catalogs wait
    without a limit.
    """
    outcome: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def call() -> None:
        try:
            outcome.put((work(), None))
        except BaseException as error:  # noqa: BLE001 - whatever ends the call, the waiting thread raises it
            outcome.put((None, error))

    threading.Thread(target=call, name="iceberg-catalog", daemon=True).start()
    try:
        found, error = outcome.get(timeout=ANSWER_S)
    except Empty:
        raise CommitUnknownError(f"the catalog has not answered for {ANSWER_S:g} s") from None
    if error is not None:
        raise error
    return cast("T", found)


class FoundFiles(NamedTuple):
    """Data files that are written again with the same rows, as they were found.

    `locations`: of the files. `entries`: those of manifests, by location; none of a manifest without such a file.
    `deletes`: the manifests of deleted rows, by location.
    """

    locations: frozenset[str]
    entries: Mapping[str, Sequence[ManifestEntry]]
    deletes: frozenset[str]


class SnapshotCommit:
    """A snapshot that is being made for a table as it was loaded."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._metadata = table.metadata
        self.snapshot_id = table.metadata.new_snapshot_id()
        self._commit_id = uuid4()
        self._numbers = count()
        self._written: list[str] = []
        self.is_sent = False
        """Whether the catalog may know of the files that were written."""

    def append(self, files: Sequence[DataFile], properties: Mapping[str, str], summary: Mapping[str, str]) -> None:
        """Add data files, perhaps none, and set properties of the table.

        Raises LostRaceError, CommitUnknownError, or what the catalog raises.
        """
        with self._no_leftovers():
            manifests = [*self._all_added(files), *self._merged(self._live())]
            self._commit(Operation.APPEND, manifests, files, (), properties, summary)

    def replace(
        self,
        files: Sequence[DataFile],
        is_removed: Callable[[ManifestEntry], bool],
        properties: Mapping[str, str],
        summary: Mapping[str, str],
    ) -> None:
        """Remove data files, add others, and set properties of the table. Raises as `append` does."""
        with self._no_leftovers():
            manifests, untouched, removed = self._without(is_removed, {})
            manifests += [*self._all_added(files), *self._merged(untouched)]
            self._commit(Operation.OVERWRITE, manifests, files, removed, properties, summary)

    def rewrite(self, files: Sequence[DataFile], old: FoundFiles, summary: Mapping[str, str]) -> None:
        """Put data files in the place of others with the same rows. Raises as `append` does."""
        with self._no_leftovers():
            if old.deletes != delete_manifests(self._table):
                raise LostRaceError("rows were deleted")
            manifests, untouched, removed = self._without(
                lambda entry: entry.data_file.file_path in old.locations, old.entries
            )
            if len(removed) != len(old.locations):
                raise LostRaceError("files were removed")
            manifests += [*self._all_added(files), *untouched]
            self._commit(Operation.REPLACE, manifests, files, removed, {}, summary)

    def _without(
        self, is_removed: Callable[[ManifestEntry], bool], known: Mapping[str, Sequence[ManifestEntry]]
    ) -> tuple[list[ManifestFile], list[ManifestFile], list[DataFile]]:
        """Remove data files. Return manifests in place of those that had some, the others, and what was removed.

        `known`: entries of manifests, by their locations.
        """
        rewritten, untouched, removed = [], [], []
        small: dict[int, tuple[list[ManifestEntry], list[ManifestEntry]]] = {}
        for manifest in self._live():
            entries = known.get(manifest.manifest_path)
            entries = data_entries(self._table, manifest) if entries is None else entries
            gone = [entry for entry in entries if is_removed(entry)]
            removed += [entry.data_file for entry in gone]
            if not gone:
                untouched.append(manifest)
            elif manifest.manifest_length < _SMALL_BYTES:
                together = small.setdefault(manifest.partition_spec_id, ([], []))
                together[0].extend(entries)
                together[1].extend(gone)
            else:
                rewritten.append(self._rewritten(manifest.partition_spec_id, entries, gone))
        rewritten += [self._rewritten(spec_id, *together) for spec_id, together in small.items()]
        return rewritten, untouched, removed

    def set_back(self, parent: Snapshot | None, properties: Mapping[str, str], summary: Mapping[str, str]) -> None:
        """Set the table back to an older snapshot; None: to the time before the first. Set properties of the table.

        The new snapshot comes after the older one, not after the newest: files that were removed since are in use again,
        and the expiration of a snapshot deletes the files that those after it have removed. Raises as `append` does.
        """
        with self._no_leftovers():
            manifests = [] if parent is None else parent.manifests(self._table.io)
            self._commit(Operation.APPEND, manifests, (), (), properties, summary, parent)

    def note(self, properties: Mapping[str, str]) -> None:
        """Set properties of the table, without a snapshot, if the newest one is still the same. Raises as `append` does.

        It does not keep another commit for the same snapshot from success.
        """
        newest = self._metadata.current_snapshot()
        with self._no_leftovers():
            self._send(None if newest is None else newest.snapshot_id, (SetPropertiesUpdate(updates=dict(properties)),))

    @contextmanager
    def _no_leftovers(self) -> Iterator[None]:
        """Delete what was written if the commit fails for certain, and not if it may still succeed."""
        try:
            yield
        except Exception as error:
            if not self.is_sent or isinstance(error, CommitFailedException):
                for each in self._written:
                    with suppress(OSError):
                        self._table.io.delete(each)
            raise

    def _live(self) -> list[ManifestFile]:
        """Return the manifests of the newest snapshot that list files it has."""
        newest = self._metadata.current_snapshot()
        found = [] if newest is None else newest.manifests(self._table.io)
        return [manifest for manifest in found if manifest.has_added_files() or manifest.has_existing_files()]

    def _all_added(self, files: Sequence[DataFile]) -> list[ManifestFile]:
        specs = sorted({file.spec_id for file in files})
        return [self._added([file for file in files if file.spec_id == spec_id]) for spec_id in specs]

    def _added(self, files: Sequence[DataFile]) -> ManifestFile:
        return self._manifest(
            files[0].spec_id,
            [
                ManifestEntry.from_args(
                    status=ManifestEntryStatus.ADDED,
                    snapshot_id=self.snapshot_id,
                    sequence_number=None,
                    file_sequence_number=None,
                    data_file=file,
                )
                for file in files
            ],
        )

    def _rewritten(
        self, spec_id: int, entries: Sequence[ManifestEntry], gone: Sequence[ManifestEntry] = ()
    ) -> ManifestFile:
        removed = {id(entry) for entry in gone}
        return self._manifest(
            spec_id,
            [
                ManifestEntry.from_args(
                    status=ManifestEntryStatus.DELETED if id(entry) in removed else ManifestEntryStatus.EXISTING,
                    snapshot_id=self.snapshot_id if id(entry) in removed else entry.snapshot_id,
                    sequence_number=entry.sequence_number,
                    file_sequence_number=entry.file_sequence_number,
                    data_file=entry.data_file,
                )
                for entry in entries
            ],
        )

    def _merged(self, manifests: Sequence[ManifestFile]) -> list[ManifestFile]:
        """Merge small manifests of data files, once there are many of one partitioning."""
        small: dict[int, list[ManifestFile]] = {}
        others = []
        for manifest in manifests:
            if manifest.content == ManifestContent.DATA and manifest.manifest_length < _SMALL_BYTES:
                small.setdefault(manifest.partition_spec_id, []).append(manifest)
            else:
                others.append(manifest)
        for spec_id, each in small.items():
            if len(each) < SMALL_MANIFESTS_MAX:
                others += each
            else:
                entries = [entry for manifest in each for entry in data_entries(self._table, manifest)]
                others.append(self._rewritten(spec_id, entries))
        return others

    def _manifest(self, spec_id: int, entries: Sequence[ManifestEntry]) -> ManifestFile:
        path = self._new_path(f"{self._commit_id}-m{next(self._numbers)}.avro")
        spec = self._metadata.specs()[spec_id]
        with write_manifest(
            format_version=self._metadata.format_version,
            spec=spec,
            schema=written_schema(self._metadata, spec) or self._metadata.schema(),
            output_file=self._table.io.new_output(path),
            snapshot_id=self.snapshot_id,
            avro_compression="deflate",
        ) as writer:
            for entry in entries:
                writer.add_entry(entry)
        return writer.to_manifest_file()

    def _new_path(self, name: str) -> str:
        path = self._table.location_provider().new_metadata_location(name)
        self._written.append(path)
        return path

    def _commit(
        self,
        operation: Operation,
        manifests: Sequence[ManifestFile],
        added: Sequence[DataFile],
        removed: Sequence[DataFile],
        properties: Mapping[str, str],
        summary: Mapping[str, str],
        parent: Snapshot | Literal["newest"] | None = "newest",
    ) -> None:
        metadata, newest = self._metadata, self._metadata.current_snapshot()
        parent = newest if parent == "newest" else parent
        parent_id = None if parent is None else parent.snapshot_id
        number = metadata.next_sequence_number()
        path = self._new_path(f"snap-{self.snapshot_id}-0-{self._commit_id}.avro")
        with write_manifest_list(
            format_version=metadata.format_version,
            output_file=self._table.io.new_output(path),
            snapshot_id=self.snapshot_id,
            parent_snapshot_id=parent_id,
            sequence_number=number,
            avro_compression="deflate",
        ) as writer:
            writer.add_manifests(list(manifests))
        for each in self._written:
            _make_durable(each)
        snapshot = Snapshot.model_validate(
            {
                "snapshot-id": self.snapshot_id,
                "parent-snapshot-id": parent_id,
                "sequence-number": number,
                "manifest-list": path,
                "summary": self._summary(operation, added, removed, summary, parent),
                "schema-id": metadata.current_schema_id,
            }
        )
        self._replace_newest(None if newest is None else newest.snapshot_id, snapshot, properties)

    def _replace_newest(self, newest_id: int | None, snapshot: Snapshot, properties: Mapping[str, str]) -> None:
        """Commit, if `newest_id` is still the newest snapshot."""
        branch = self._metadata.refs.get(MAIN_BRANCH)
        retention = {} if branch is None else branch.model_dump(by_alias=True, exclude_none=True)
        head = {**retention, "ref-name": MAIN_BRANCH, "snapshot-id": self.snapshot_id, "type": SnapshotRefType.BRANCH}
        updates = (AddSnapshotUpdate(snapshot=snapshot), SetSnapshotRefUpdate.model_validate(head))
        noted = (SetPropertiesUpdate(updates=dict(properties)),) if properties else ()
        self._send(newest_id, (*updates, *noted))

    def _send(self, newest_id: int | None, updates: tuple[TableUpdate, ...]) -> None:
        required = (
            AssertTableUUID(uuid=self._metadata.table_uuid),
            AssertCurrentSchemaId.model_validate({"current-schema-id": self._metadata.current_schema_id}),
            AssertRefSnapshotId.model_validate({"ref": MAIN_BRANCH, "snapshot-id": newest_id}),
        )
        self.is_sent = True
        done = answered(lambda: self._table.catalog.commit_table(self._table, required, updates))
        _make_durable(done.metadata_location)
        self._delete_old_metadata(done.metadata)

    def _delete_old_metadata(self, now: TableMetadata) -> None:
        """Delete the table's metadata files that its log has just dropped, if its properties say so."""
        enabled = now.properties.get(TableProperties.METADATA_DELETE_AFTER_COMMIT_ENABLED, "")
        if enabled.lower() == "true":
            kept = {entry.metadata_file for entry in now.metadata_log}
            for entry in self._metadata.metadata_log:
                if entry.metadata_file not in kept:
                    with suppress(OSError):
                        self._table.io.delete(entry.metadata_file)

    def _summary(
        self,
        operation: Operation,
        added: Sequence[DataFile],
        removed: Sequence[DataFile],
        summary: Mapping[str, str],
        parent: Snapshot | None,
    ) -> Any:
        metadata, collector = self._metadata, SnapshotSummaryCollector()
        schema, specs = metadata.schema(), metadata.specs()
        for file in added:
            collector.add_file(file, schema, specs[file.spec_id])
        for file in removed:
            collector.remove_file(file, schema, specs[file.spec_id])
        before = None if parent is None else parent.summary
        # pyiceberg adds up the totals of this operation, and refuses that of a rewrite, which has the same
        counted = Operation.OVERWRITE if operation == Operation.REPLACE else operation
        found = update_snapshot_summaries(Summary(operation=counted, **collector.build(), **summary), before)
        return Summary(operation=operation, **found.additional_properties)


def change_schema(table: Table, change: Callable[[UpdateSchema], None]) -> None:
    """Commit a change of the table's schema, if it is still the one with which the table was loaded.

    Raises LostRaceError, CommitUnknownError, or what the catalog raises; ValueError for a change that Iceberg does not
    allow.
    """
    update = table.update_schema()
    change(update)
    answered(update.commit)
    _make_durable(table.metadata_location)


def _make_durable(location: str) -> None:
    """Sync a local file to disk, which pyiceberg leaves to the operating system."""
    scheme, _, path = PyArrowFileIO.parse_location(location)
    if scheme == "file":
        make_durable(pyarrow.fs.LocalFileSystem(), path)
        make_durable(pyarrow.fs.LocalFileSystem(), path.rpartition("/")[0])


def data_entries(table: Table, manifest: ManifestFile) -> list[ManifestEntry]:
    """Return the entries of data files that a manifest has, without those that are removed."""
    if manifest.content != ManifestContent.DATA:
        return []
    return list(manifest.fetch_manifest_entry(table.io, discard_deleted=True))


def delete_manifests(table: Table) -> frozenset[str]:
    """Return the locations of the manifests of deleted rows."""
    newest = table.metadata.current_snapshot()
    manifests = [] if newest is None else newest.manifests(table.io)
    return frozenset(each.manifest_path for each in manifests if each.content == ManifestContent.DELETES)


def entries_of(table: Table) -> Iterator[ManifestEntry]:
    """Yield the entries of all data files of the table."""
    newest = table.metadata.current_snapshot()
    for manifest in () if newest is None else newest.manifests(table.io):
        yield from data_entries(table, manifest)


def is_first(table: Table, snapshot: Snapshot) -> bool:
    """Whether no snapshot with rows came before this one: when those expire, it is left without a parent.

    The sequence number alone does not show that, since those of format version 1 have none.
    """
    if snapshot.parent_snapshot_id is not None or (snapshot.sequence_number or 0) > 1:
        return False
    if snapshot.summary is not None and "deleted-data-files" in snapshot.summary.additional_properties:
        return False
    return all(manifest.added_snapshot_id == snapshot.snapshot_id for manifest in snapshot.manifests(table.io))
