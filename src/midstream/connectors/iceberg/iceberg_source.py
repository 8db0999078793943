"""An Iceberg table as a source. Its metadata says which files each snapshot added, and is trusted as the data is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.fs
from pyiceberg.catalog import Catalog
from pyiceberg.io.pyarrow import PyArrowFileIO, schema_to_pyarrow
from pyiceberg.manifest import DataFile, FileFormat, ManifestContent, ManifestEntry, ManifestEntryStatus
from pyiceberg.table import Table
from pyiceberg.table.name_mapping import MappedField, NameMapping
from pyiceberg.table.snapshots import Operation, Snapshot

from midstream.connectors.common.dataset_uris import location_uri
from midstream.connectors.files.field_ids import id_of, parquet_schema_of
from midstream.connectors.files.table_files import TableFile, open_table_file
from midstream.connectors.files.table_source import OnChange, TableSource, TableStart, other_column
from midstream.connectors.iceberg.iceberg_catalog import CatalogTable, checked_catalog, checked_identifier
from midstream.connectors.iceberg.iceberg_commits import catalog_errors, data_entries, is_first
from midstream.connectors.iceberg.iceberg_files import (
    delete_files_of,
    deleted_rows,
    min_time_us,
    partition_constants,
    stored_columns,
)
from midstream.connectors.iceberg.iceberg_tables import FORMAT_VERSION_MAX, columns_of
from midstream.engine.core.config import Duration
from midstream.engine.core.errors import ConfigError, InvariantError, SchemaError
from midstream.engine.operators.source_api import Split, SplitReader, decoded

if TYPE_CHECKING:
    import numpy as np

_OF_STORAGE: Final = ("s3.", "gcs.", "adls.", "hdfs.", "hf.", "oss.", "client.")
"""How the names of properties begin with which storage is read; slots get no others, such as passwords of the catalog."""


class _IcebergPosition(msgspec.Struct, frozen=True, array_like=True, tag="iceberg"):
    table_uuid: str
    snapshot_id: int | None
    """The newest snapshot that was read; None: the table had none."""
    fields: Mapping[str, int] = {}
    """The ids of the columns that are read; empty: of a version that did not note them."""


@dataclass(frozen=True)
class _TableAccess:
    """What a slot needs of the table to read its files."""

    properties: Mapping[str, str]
    """Those of the storage, for pyiceberg's FileIO."""
    filesystem: pyarrow.fs.FileSystem | None
    columns: pa.Schema
    """The columns to read, with the ids of fields."""
    mapping: str | None
    """The table's name mapping, as JSON."""

    @property
    def ids(self) -> dict[int, str]:
        """The names of the columns to read, by the ids of their fields."""
        return {found: field.name for field in self.columns if (found := id_of(field)) is not None}

    def mapped(self) -> list[MappedField]:
        return [] if self.mapping is None else NameMapping.model_validate_json(self.mapping).root

    @cached_property
    def _io(self) -> Any:
        return PyArrowFileIO(dict(self.properties))

    def located(self, location: str) -> tuple[pyarrow.fs.FileSystem, str]:
        with catalog_errors(f"{location!r} cannot be read"):
            scheme, host, path = self._io.parse_location(location, self._io.properties)
            if "\0" in path:
                raise ValueError("it has a null character")
            return self._io.fs_by_scheme(scheme, host) if self.filesystem is None else self.filesystem, path

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_io"}


class IcebergSource(TableSource):
    """Reads an Iceberg table: its rows, and with `watch` those that later snapshots add.

    A snapshot that only rearranges rows (compaction) adds none. Rows that position delete files name are left out.

    The arguments are those of `Environment.read_iceberg`.

    Raises ConfigError if there is no such table, or if it uses a feature that cannot be read, SchemaError for columns
    that do not exist, StorageError if catalog or table cannot be reached.

        env.source(IcebergSource("lake.orders", catalog="prod", watch=True)).uid("orders")
    """

    def __init__(
        self,
        table: str,
        *,
        catalog: str | Mapping[str, str] | Catalog,
        columns: Sequence[str] | None = None,
        watch: bool = False,
        start: TableStart | None = None,
        on_change: OnChange = "fail",
        interval: Duration = "1 s",
        filesystem: pyarrow.fs.FileSystem | None = None,
        rows_per_s: float | None = None,
    ) -> None:
        identifier = checked_identifier(table, "IcebergSource")
        super().__init__(
            f"IcebergSource of {table}",
            columns=columns,
            watch=watch,
            start=start,
            on_change=on_change,
            interval=interval,
            rows_per_s=rows_per_s,
        )
        checked = checked_catalog(catalog, "IcebergSource")
        self._table: CatalogTable | None = CatalogTable(checked, identifier, filesystem, self._where)
        """None on the slots."""
        opened = self._opened()
        found = columns_of(opened.schema())
        chosen = self._columns_to_read(found.names)
        self._set_schema(pa.schema([found.field(name) for name in chosen]))
        self._files = self._files_of(opened, chosen, filesystem)
        self._ids = {field.name: field.field_id for field in opened.schema().fields if field.name in chosen}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None}

    def datasets(self) -> Sequence[str]:
        return [location_uri(self._opened().location())]

    def _files_of(self, table: Table, chosen: Sequence[str], filesystem: pyarrow.fs.FileSystem | None) -> _TableAccess:
        with_ids = schema_to_pyarrow(table.schema())
        mapping = table.metadata.name_mapping()
        return _TableAccess(
            {name: value for name, value in table.io.properties.items() if name.startswith(_OF_STORAGE)},
            filesystem,
            pa.schema([with_ids.field(name) for name in chosen]),
            None if mapping is None else mapping.model_dump_json(),
        )

    # ---- on the driver ----

    def _begin(self, event_time: str | None) -> tuple[Sequence[TableFile], bytes]:
        table = self._opened()
        self._check_columns(table)
        metadata, uuid = table.metadata, str(table.metadata.table_uuid)
        if self._start is not None:
            return (), self._position(uuid, self._before_start(table))
        newest = metadata.current_snapshot()
        if newest is None:
            return (), self._position(uuid, None)
        with catalog_errors(f"{self._where}: the files of snapshot {newest.snapshot_id} cannot be listed"):
            files = self._snapshot(table, newest, event_time)
        return files, self._position(uuid, newest.snapshot_id)

    def _find_start(self) -> None:
        self._before_start(self._opened())

    def check_resume(self, position: bytes) -> None:
        """Raise ConfigError for a position of another source, in another table, or of other columns of the same names."""
        known, table = decoded(position, _IcebergPosition, "IcebergSource"), self._opened()
        self._check_same(known, table)
        for name, number in self._ids.items():
            before = known.fields.get(name, number)
            if before != number:
                raise other_column(self._where, name, table.schema().find_column_name(before))

    def _position(self, uuid: str, snapshot_id: int | None) -> bytes:
        return msgspec.msgpack.encode(_IcebergPosition(uuid, snapshot_id, self._ids))

    def _check_same(self, known: _IcebergPosition, table: Table) -> None:
        if str(table.metadata.table_uuid) != known.table_uuid:
            raise ConfigError(
                f"{self._where}: the table was dropped and made again; to read it from the beginning, start with --fresh"
            )

    def _after(self, position: bytes, event_time: str | None) -> Iterator[tuple[Sequence[TableFile], bytes]]:
        known = decoded(position, _IcebergPosition, "IcebergSource")
        table = self._opened()
        self._check_same(known, table)
        later = self._later(table, known.snapshot_id)
        if later:
            self._check_columns(table)
        for snapshot in later:
            with catalog_errors(f"{self._where}: the files of snapshot {snapshot.snapshot_id} cannot be listed"):
                added = self._added_by(table, snapshot, event_time)
            yield added, self._position(known.table_uuid, snapshot.snapshot_id)

    def _later(self, table: Table, known: int | None) -> list[Snapshot]:
        """Return the snapshots after this one, the oldest first. Raises ConfigError if they are no longer known."""
        metadata = table.metadata
        found: list[Snapshot] = []
        next_id = metadata.current_snapshot_id
        while next_id is not None and next_id != known:
            snapshot = metadata.snapshot_by_id(next_id)
            if snapshot is None:
                break
            found.append(snapshot)
            next_id = snapshot.parent_snapshot_id
        if next_id == known:
            if known is None and found:
                self._check_first(table, found[-1])
            return found[::-1]
        if known is not None and metadata.snapshot_by_id(known) is not None:
            raise ConfigError(
                f"{self._where}: snapshot {known} was read, and the table as it is now does not follow from it: it was rolled back "
                "to an older one since, or the snapshots in between have expired; to read it from the beginning, start with "
                "--fresh"
            )
        raise self._expired(known)

    def _check_first(self, table: Table, snapshot: Snapshot) -> None:
        """Raise ConfigError if others came before this snapshot: when they expire, it is left without a parent."""
        if snapshot.snapshot_id != self._start and not self._is_first(table, snapshot):
            raise self._expired(None)

    def _is_first(self, table: Table, snapshot: Snapshot) -> bool:
        """Whether no snapshot came before this one, as far as the table's metadata shows."""
        with catalog_errors(f"{self._where}: the files of snapshot {snapshot.snapshot_id} cannot be listed"):
            return is_first(table, snapshot)

    def _expired(self, known: int | None) -> ConfigError:
        return ConfigError(
            f"{self._where}: {'nothing' if known is None else f'snapshot {known}'} was read, and what came next has expired. "
            "Keep snapshots for longer than a job may be behind; to read the table as it is now, start with --fresh"
        )

    def _added_by(self, table: Table, snapshot: Snapshot, event_time: str | None) -> list[TableFile]:
        operation = None if snapshot.summary is None else snapshot.summary.operation
        if operation == Operation.REPLACE:
            return []
        if operation != Operation.APPEND:
            name = "of an unknown kind" if operation is None else operation.value
            self._skipped(f"{self._where}: snapshot {snapshot.snapshot_id} ({name})")
            return []
        added: list[ManifestEntry] = []
        for manifest in snapshot.manifests(table.io):
            if manifest.added_snapshot_id == snapshot.snapshot_id:
                entries = data_entries(table, manifest)
                added += [entry for entry in entries if entry.status == ManifestEntryStatus.ADDED]
        return [self._file(table, entry.data_file, snapshot.snapshot_id, event_time) for entry in added]

    def _snapshot(self, table: Table, snapshot: Snapshot, event_time: str | None) -> list[TableFile]:
        """Return the table's files, the oldest first."""
        entries: list[ManifestEntry] = []
        has_deletes = False
        for manifest in snapshot.manifests(table.io):
            has_deletes |= manifest.content == ManifestContent.DELETES
            entries += data_entries(table, manifest)
        entries.sort(key=lambda entry: (entry.sequence_number or 0, entry.data_file.file_path))
        deletes = delete_files_of(table, self._where, snapshot.snapshot_id) if has_deletes else {}
        return [
            self._file(table, each, snapshot.snapshot_id, event_time, deletes.get(each.file_path, ()))
            for each in (entry.data_file for entry in entries)
        ]

    def _file(
        self, table: Table, file: DataFile, since: int, event_time: str | None, deletes: Sequence[str] = ()
    ) -> TableFile:
        if file.file_format != FileFormat.PARQUET:
            raise ConfigError(f"{self._where}: {file.file_path} is {file.file_format.value}; only Parquet can be read")
        columns = {field_id: self.schema.field(name) for field_id, name in self._files.ids.items()}
        constants = partition_constants(file, table.specs()[file.spec_id], columns)
        field_id = next((found for found, name in self._files.ids.items() if name == event_time), None)
        time_us = (
            None if field_id is None else min_time_us(file, field_id, self.schema.field(self._files.ids[field_id]))
        )
        return TableFile(
            file.file_path, file.file_size_in_bytes, since, constants, deletes=tuple(deletes), min_time_us=time_us
        )

    def _stored_field(self, name: str) -> pa.Field[Any] | None:
        return next((field for field in self._files.columns if field.name == name), None)

    def _before_start(self, table: Table) -> int | None:
        """Return the snapshot before the first one to read; None if there is none."""
        newest = table.metadata.current_snapshot()
        newest_id = None if newest is None else newest.snapshot_id
        if self._start == "latest":
            return newest_id
        line: list[Snapshot] = []
        while newest is not None:
            line.append(newest)
            parent_id = newest.parent_snapshot_id
            newest = None if parent_id is None else table.metadata.snapshot_by_id(parent_id)
        if isinstance(self._start, datetime):
            start_ms = self._start.timestamp() * 1000
            since = [snapshot for snapshot in line if snapshot.timestamp_ms >= start_ms]
            if since and since[-1] is line[-1] and not self._is_first(table, line[-1]):
                raise ConfigError(
                    f"{self._where}: start={self._start.isoformat()}, and the oldest snapshot that has not expired is newer: "
                    f"{line[-1].snapshot_id}; start with that one, or read the whole table without start="
                )
            return since[-1].parent_snapshot_id if since else newest_id
        for snapshot in line:
            if snapshot.snapshot_id == self._start:
                return snapshot.parent_snapshot_id
        raise ConfigError(
            f"{self._where}: start={self._start} is no snapshot of the table as it is now; these are "
            f"{', '.join(str(snapshot.snapshot_id) for snapshot in line[:5]) or 'none'}{', …' if line[5:] else ''}"
        )

    def _check_columns(self, table: Table) -> None:
        """Raise SchemaError if the columns have changed since the source was made. They may have been renamed."""
        schema, where = table.schema(), f"{self._where}: schema {table.schema().schema_id}"
        now = {field.field_id: found for field, found in zip(schema.fields, columns_of(schema), strict=True)}
        for field_id, name in self._files.ids.items():
            kind = self.schema.field(name).type
            if field_id not in now:
                raise SchemaError(f"{where}: column {name!r} was dropped; start again to read the table without it")
            if now[field_id].type != kind:
                raise SchemaError(
                    f"{where}: column {name!r} was {kind} and is now {now[field_id].type}; start again to read it as it is now"
                )
        new = [field.name for field_id, field in now.items() if field_id not in self._files.ids]
        if new and self._columns is None:
            raise self._added(new[0], where)

    def _opened(self) -> Table:
        if self._table is None:
            raise InvariantError(f"{self._where}: is read on a slot, and only the driver has the catalog")
        table = self._table.opened()
        if table.metadata.format_version > FORMAT_VERSION_MAX:
            raise ConfigError(
                f"{self._where}: the table has format version {table.metadata.format_version}, and up to "
                f"{FORMAT_VERSION_MAX} can be read"
            )
        return table

    # ---- on the subtasks ----

    supports_projection = True

    def open_split(self, split: Split) -> SplitReader:
        return self.open_projected(split, self.schema)

    def open_projected(self, split: Split, columns: pa.Schema) -> SplitReader:
        file = decoded(split.payload, TableFile, "IcebergSource")
        filesystem, path = self._located(file)

        def stored() -> dict[str, pa.Field[Any]]:
            return stored_columns(parquet_schema_of(filesystem, path), self._files.columns, self._files.mapped(), path)

        def deleted() -> np.ndarray[Any, Any] | None:
            deletes = [self._files.located(each)[1] for each in file.deletes]
            return deleted_rows(filesystem, deletes, file.path, path)

        return open_table_file(filesystem, path, file, columns, split.offset, stored=stored, deleted=deleted)

    def _located(self, file: TableFile) -> tuple[pyarrow.fs.FileSystem, str]:
        return self._files.located(file.path)
