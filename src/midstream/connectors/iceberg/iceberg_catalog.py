"""A table in an Iceberg catalog, and what its sink needs of it: the checkpoints it has, and what would be added or removed.

For the driver only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.fs
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import NamespaceAlreadyExistsError, NoSuchTableError, TableAlreadyExistsError
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Snapshot
from pyiceberg.typedef import Record

from midstream.connectors.common.filesystem import below
from midstream.connectors.files.rolling_files import explained
from midstream.connectors.iceberg.iceberg_commits import (
    CommitUnknownError,
    answered,
    catalog_errors,
    entries_of,
    is_first,
)
from midstream.connectors.iceberg.iceberg_tables import (
    ColumnMetrics,
    check_partitioning,
    decoded_partition,
    new_schema,
    new_spec,
    written_schema,
)
from midstream.engine.core.errors import ConfigError, SchemaError, StorageError
from midstream.engine.operators.sink_api import CommittedOutput

T = TypeVar("T")

# Keys in the summary of a snapshot.
JOB: Final = "midstream.job"
SINK: Final = "midstream.sink"
CHECKPOINT: Final = "midstream.checkpoint"
PREVIOUS: Final = "midstream.previous-checkpoint"
"""The checkpoint before that has changed the table, of the same job and sink; 0 if there is none. Only snapshots that
change what is in the table have it.
"""
ROLLED_BACK: Final = "midstream.rolled-back-to"

_MARK: Final = re.compile(r"(\d+)(?: changed (\d+))?( superseded)?")


class IcebergFile(msgspec.Struct, frozen=True, array_like=True):
    """A committable.

    `name`: relative to `directory`, the location of the table's data.
    `partition`: the values of the partition fields of the spec, each in the form that Iceberg gives to single values.
    `filled`: the columns, by the ids of their fields, that have a value in each row.
    `key`: the columns by which its rows are merged into the table; without them the file is added as it is.
    `sort_order_id`: the sort order of the table that its rows have; 0 for none.
    """

    job_id: str
    uid: str
    table: tuple[str, ...]
    table_uuid: str
    directory: str
    name: str
    size: int
    rows: int
    spec_id: int
    partition: list[bytes | None]
    metrics: ColumnMetrics
    filled: list[int]
    key: tuple[str, ...] = ()
    sort_order_id: int = 0


class Mark(NamedTuple):
    """The newest checkpoint of a job and sink in a table."""

    checkpoint: int
    is_superseded: bool
    """Whether another job has resumed from it, so that this one can commit nothing more."""
    changed: int
    """The newest that has changed the table; 0 if none has."""

    def text(self) -> str:
        changed = "" if self.changed == self.checkpoint else f" changed {self.changed}"
        return f"{self.checkpoint}{changed}{' superseded' if self.is_superseded else ''}"


class Rollback(NamedTuple):
    """What it takes to go back to a checkpoint."""

    newer: frozenset[int]
    """The ids of the snapshots of newer checkpoints."""
    ended: dict[str, Mark]
    """The marks that the applications get."""
    has_replaced: bool
    """Whether newer checkpoints have replaced rows, or their files were compacted since, so that it is not enough to remove
    the files that they have added.
    """
    before: Snapshot | None
    """If they have: the snapshot before them; None if the table had none."""


def checked_catalog(catalog: object, where: str) -> str | Mapping[str, str] | Catalog:
    """Return what a user gave as a catalog. Raises ConfigError if it is none."""
    if isinstance(catalog, str | Mapping | Catalog):
        return catalog
    raise ConfigError(
        f"{where}: catalog={catalog!r} is no catalog; give the name of one that pyiceberg is configured with, its "
        "properties, or a pyiceberg Catalog"
    )


def checked_identifier(table: object, where: str) -> tuple[str, ...]:
    """Return the parts of a table's identifier. Raises ConfigError if it is none."""
    if not isinstance(table, str) or len(table.split(".")) < 2 or not all(table.split(".")):
        raise ConfigError(f"{where}: {table!r} is not the identifier of a table, such as 'lake.orders'")
    return tuple(table.split("."))


class CatalogTable:
    """A table by its identifier. Each call loads it again, since others change it.

    `filesystem`: the one that files are written with, if it is not that of the table's location.
    """

    def __init__(
        self,
        catalog: str | Mapping[str, str] | Catalog,
        identifier: tuple[str, ...],
        filesystem: pyarrow.fs.FileSystem | None,
        where: str,
    ) -> None:
        self.identifier = identifier
        self.where = where
        self._catalog = catalog
        self._filesystem = filesystem

    def opened(self) -> Table:
        """Raises ConfigError if there is no such table, StorageError if the catalog does not answer."""
        catalog = self._connected()
        with catalog_errors(f"{self.where}: cannot be opened"):
            return self._answered(lambda: catalog.load_table(self.identifier))

    def opened_or_made(self, columns: pa.Schema, partition_by: Sequence[str]) -> Table:
        """Return the table. If it does not exist, make it with these columns, and its namespace.

        Raises ConfigError if Iceberg cannot have such a table.
        """
        catalog, namespace = self._connected(), self.identifier[:-1]
        with catalog_errors(f"{self.where}: cannot be opened or made"):
            with suppress(NoSuchTableError):
                return self._answered(lambda: catalog.load_table(self.identifier))
            try:
                schema = new_schema(columns)
                spec = new_spec(partition_by, schema, self.where)
                check_partitioning(spec, schema, self.where)
                if not self._answered(lambda: catalog.namespace_exists(namespace)):
                    with suppress(NamespaceAlreadyExistsError):
                        self._answered(lambda: catalog.create_namespace(namespace))
                with suppress(TableAlreadyExistsError):  # another job that starts now was first
                    return self._answered(lambda: catalog.create_table(self.identifier, schema, partition_spec=spec))
            except ValueError as error:
                raise ConfigError(
                    f"{self.where}: the table cannot be made: {error}; rename the column, or make the table yourself"
                ) from error
            return self._answered(lambda: catalog.load_table(self.identifier))

    def at(self, identifier: tuple[str, ...], uuid: str) -> CatalogTable:
        """Return the table with this UUID: this one, which may have been renamed since, or another one of the catalog.

        Raises ConfigError if there is no such table.
        """
        if str(self.opened().metadata.table_uuid) == uuid:
            return self
        where = f"IcebergSink on {'.'.join(identifier)}"
        found = CatalogTable(self._connected(), identifier, self._filesystem, where)
        if str(found.opened().metadata.table_uuid) != uuid:
            raise ConfigError(
                f"{found.where}: the table was dropped and made again since rows were written for it; they can be "
                "committed only to the table that they were written for"
            )
        return found

    def data_directory(self, table: Table) -> tuple[pyarrow.fs.FileSystem, str]:
        """Return where the table's data is: the filesystem, and the path in it."""
        return self.located(table, data_location(table))

    def located(self, table: Table, location: str) -> tuple[pyarrow.fs.FileSystem, str]:
        """Return where something of the table is: the filesystem, and the path in it."""
        io = table.io if isinstance(table.io, PyArrowFileIO) else PyArrowFileIO(table.io.properties)
        scheme, host, path = io.parse_location(location, io.properties)
        if self._filesystem is not None:
            return self._filesystem, path
        with catalog_errors(f"{self.where}: {location} cannot be reached"):
            return io.fs_by_scheme(scheme, host), path

    def paths(self, table: Table, files: Sequence[IcebergFile], where: str) -> list[str]:
        """Return the paths of files. Raises StorageError for one outside of the table's data."""
        filesystem, directory = self.data_directory(table)
        allowed = data_location(table)
        for file in files:
            if file.directory != allowed:
                raise StorageError(
                    f"{where}: the data of the table is in {allowed}, and {file.name} was written to {file.directory}; set "
                    "the table's property write.data.path back until it is committed"
                )
        return [below(filesystem, directory, file.name) for file in files]

    def existing(self, table: Table, files: Sequence[IcebergFile], where: str) -> list[str]:
        """Return the paths of files. Raises StorageError if one does not exist, or is outside of the table's data."""
        paths = self.paths(table, files, where)
        filesystem, _ = self.data_directory(table)
        with explained(where):
            infos = filesystem.get_file_info(paths)
        for file, info in zip(files, infos, strict=True):
            if info.type != pyarrow.fs.FileType.File:
                raise StorageError(
                    f"{where}: {info.path} with {file.rows} rows is missing; only a job may delete it before it is "
                    "committed: restore the file, or start from another checkpoint"
                )
        return paths

    def data_files(self, table: Table, files: Sequence[IcebergFile], where: str) -> list[DataFile]:
        """Return what a manifest has of these files. Raises StorageError if one does not exist, SchemaError if the table
        now requires values that it does not have.
        """
        paths, metadata = self.existing(table, files, where), table.metadata
        found = []
        for file, path in zip(files, paths, strict=True):
            _check_required(metadata.schema(), file, where)
            values = _partition_values(metadata, file)
            if values is None:
                raise StorageError(
                    f"{where}: {path} has a partition that the table does not have; the checkpoint is corrupt or forged"
                )
            is_known = metadata.sort_order_by_id(file.sort_order_id) is not None
            found.append(_data_file(file, values, file.sort_order_id or None if is_known else None))
        return found

    def marks(self, table: Table, output: CommittedOutput) -> dict[str, Mark]:
        """Return the mark of each application of `output` that has committed something, or has been superseded."""
        found = {app: self.mark(table, app) for app in applications(output)}
        return {app: mark for app, mark in found.items() if mark is not None}

    def mark(self, table: Table, app: str) -> Mark | None:
        text = table.metadata.properties.get(app)
        if text is None:
            return None
        found = _MARK.fullmatch(text)
        if found is None:
            raise StorageError(
                f"{self.where}: the table's property {app!r} is {text!r}, which no Iceberg sink writes; set it to the "
                "number of the newest checkpoint that the job has committed"
            )
        return Mark(int(found[1]), found[3] is not None, int(found[2] or found[1]))

    def rollback(self, table: Table, output: CommittedOutput, after: int) -> Rollback:
        """Return what it takes to undo newer checkpoints.

        Raises ConfigError if their snapshots have expired, or if they have replaced rows or their files were rewritten, and
        others have changed the table since.
        """
        snapshots = {}
        for snapshot in table.metadata.snapshots:
            summary = _summary_of(snapshot)
            if PREVIOUS in summary:
                snapshots[application(summary[JOB], summary[SINK]), int(summary[CHECKPOINT])] = snapshot
        newer, ended = {}, {}
        marks = self.marks(table, output)
        for app in applications(output):  # including one without commits: its first commit may be in progress
            mark = marks.get(app, Mark(0, False, 0))
            checkpoint = mark.changed
            while checkpoint > after:
                found = snapshots.get((app, checkpoint))
                if found is None:
                    raise ConfigError(
                        f"{self.where}: the table's history no longer goes back to checkpoint {after}: the snapshot of "
                        f"checkpoint {checkpoint} has expired"
                    )
                newer[found.snapshot_id] = found
                checkpoint = int(_summary_of(found)[PREVIOUS])
            ended[app] = Mark(min(mark.checkpoint, after), True, checkpoint)
        ids = frozenset(newer)
        if any("deleted-data-files" in _summary_of(each) for each in newer.values()) or not self._are_live(
            table, newer
        ):
            return Rollback(ids, ended, True, self._before(table, ids, output, after))
        return Rollback(ids, ended, False, None)

    def _before(self, table: Table, newer: frozenset[int], output: CommittedOutput, after: int) -> Snapshot | None:
        """Return the snapshot before those of newer checkpoints; None if there is none."""
        left, snapshot = set(newer), table.metadata.current_snapshot()
        while left and snapshot is not None:
            left.discard(snapshot.snapshot_id)
            if snapshot.snapshot_id not in newer and not _may_be_undone(snapshot, output, after):
                name = "of an unknown kind" if snapshot.summary is None else snapshot.summary.operation.value
                raise ConfigError(
                    f"{self.where}: other writers have changed the table since checkpoint {after}: snapshot "
                    f"{snapshot.snapshot_id} is {name}; where rows were replaced by key, or files compacted or rewritten, only "
                    "the newest snapshots can be rolled back"
                )
            parent_id, child = snapshot.parent_snapshot_id, snapshot
            snapshot = None if parent_id is None else table.metadata.snapshot_by_id(parent_id)
            with catalog_errors(f"{self.where}: its files cannot be listed"):
                is_expired = snapshot is None and not is_first(table, child)
            if is_expired:
                raise ConfigError(
                    f"{self.where}: the table's history no longer goes back to checkpoint {after}: the snapshot before "
                    f"{child.snapshot_id} has expired"
                )
        if left:
            raise ConfigError(
                f"{self.where}: the table was set back since checkpoint {after}, and no longer has snapshot {min(left)}, "
                "which is newer; such a table cannot be rolled back"
            )
        return snapshot

    def _are_live(self, table: Table, newer: Mapping[int, Snapshot]) -> bool:
        """Whether all files that these snapshots have added are in the table as they were written."""
        if not newer:
            return True
        with catalog_errors(f"{self.where}: its files cannot be listed"):
            live = Counter(entry.snapshot_id for entry in entries_of(table))
        return all(live[id] == int(_summary_of(snapshot)["added-data-files"]) for id, snapshot in newer.items())

    def _connected(self) -> Catalog:
        if not isinstance(self._catalog, Catalog):
            with catalog_errors(f"{self.where}: the catalog cannot be opened"):
                given = {"name": self._catalog} if isinstance(self._catalog, str) else self._catalog
                properties = {"name": "midstream", **given}
                self._catalog = self._answered(lambda: load_catalog(**properties))
        return self._catalog

    def _answered(self, work: Callable[[], T]) -> T:
        """Return what a call returns that changes nothing, or may be repeated. Raises StorageError if it is not answered."""
        try:
            return answered(work)
        except CommitUnknownError as error:
            raise StorageError(f"{self.where}: {error}") from error


def data_location(table: Table) -> str:
    """Return the URL of the directory with the table's data files."""
    found = table.metadata.properties.get("write.data.path") or f"{table.location().rstrip('/')}/data"
    return found.rstrip("/")


def has_files(table: Table) -> bool:
    return next(entries_of(table), None) is not None


def applications(output: CommittedOutput) -> list[str]:
    return [application(job, output.uid) for job in sorted(output.jobs)]


def application(job_id: str, uid: str) -> str:
    """Return the property of a table that has the mark of this job and sink."""
    return f"midstream/{job_id}/{uid}"


def _summary_of(snapshot: Snapshot) -> Mapping[str, str]:
    return {} if snapshot.summary is None else snapshot.summary.additional_properties


def _may_be_undone(snapshot: Snapshot, output: CommittedOutput, after: int) -> bool:
    """Whether a snapshot has changed nothing, or only what these jobs did after a checkpoint."""
    summary = _summary_of(snapshot)
    if snapshot.summary is not None and snapshot.summary.operation == Operation.REPLACE:
        return True
    is_append = snapshot.summary is not None and snapshot.summary.operation == Operation.APPEND
    if is_append and not any(name.startswith(("added-", "deleted-", "removed-")) for name in summary):
        return True
    if summary.get(SINK) != output.uid:
        return False
    return ROLLED_BACK in summary or (summary.get(JOB) in output.jobs and int(summary.get(CHECKPOINT, "0")) > after)


def _check_required(schema: Schema, file: IcebergFile, where: str) -> None:
    """Raise SchemaError if the table now requires values that a file does not have."""
    for field in schema.fields:
        if field.required and field.field_id not in file.filled:
            raise SchemaError(
                f"{where}: column {field.name!r} of the table must have a value now, and files written for it have none "
                "in a row; change it back until they are committed"
            )


def _partition_values(metadata: TableMetadata, file: IcebergFile) -> list[Any] | None:
    spec = metadata.specs().get(file.spec_id)
    schema = None if spec is None else written_schema(metadata, spec)
    if spec is None or schema is None:
        return None
    try:
        return decoded_partition(spec, schema, file.partition)
    except ValueError:
        return None


def _data_file(file: IcebergFile, partition: Sequence[Any], sort_order_id: int | None) -> DataFile:
    metrics = file.metrics
    found = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=f"{file.directory}/{file.name}",
        file_format=FileFormat.PARQUET,
        partition=Record(*partition),
        record_count=file.rows,
        file_size_in_bytes=file.size,
        column_sizes=metrics.sizes,
        value_counts=metrics.values,
        null_value_counts=metrics.nulls,
        nan_value_counts={},
        lower_bounds=metrics.lower,
        upper_bounds=metrics.upper,
        key_metadata=None,
        split_offsets=metrics.offsets,
        equality_ids=None,
        sort_order_id=sort_order_id,
    )
    found.spec_id = file.spec_id
    return found
