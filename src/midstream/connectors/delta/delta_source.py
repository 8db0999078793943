"""A Delta table as a source. Its log says which files each version added, and is trusted as the data is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs

from midstream.connectors.common.dataset_uris import file_uri
from midstream.connectors.common.filesystem import below, is_local, resolve
from midstream.connectors.common.optional_packages import require
from midstream.connectors.common.row_operations import OP, check_columns, check_key_types, checked_key
from midstream.connectors.delta.column_mapping import ColumnMapping, mapping_of
from midstream.connectors.delta.delta_changes import DeltaChangesReader, DeltaChangesSplit, packed_files
from midstream.connectors.delta.delta_log import (
    Metadata,
    TableVersion,
    commit_times,
    constants_of,
    deleted_rows,
    digest_of,
    has_version,
    metadata_of,
    read_version,
    table_columns,
    unsupported_in,
)
from midstream.connectors.files.parquet import checked_time_us
from midstream.connectors.files.table_files import (
    TableFile,
    constant_text,
    deleted_rows_of,
    packed,
)
from midstream.connectors.files.table_source import OnChange, TableSource, TableStart, other_column
from midstream.engine.core.config import Duration
from midstream.engine.core.errors import ConfigError, SchemaError, StorageError
from midstream.engine.operators.source_api import Discovery, DiscoveryContext, Split, SplitReader, decoded, rows_text

if TYPE_CHECKING:
    import os

    from deltalake import DeltaTable

_REPLACED: Final = "the table was replaced by another one; to read that from the beginning, start with --fresh"


_CHECK_S_MAX: Final = 60.0
"""How often a reader of changes checks for a new version at least."""


class _DeltaPosition(msgspec.Struct, frozen=True, array_like=True, tag="delta"):
    table_id: str
    version: int
    digest: int | None
    """That of the version, see `digest_of`."""
    changes: bool | None = None
    """Whether changes are read, which are one split; None: of a version that did not note it."""
    names: tuple[str, ...] = ()
    """Those of the columns that are read in the table's files, if it has column mapping."""
    columns: tuple[str, ...] = ()
    """What these columns were called; empty: of a version that did not note it."""


class DeltaSource(TableSource):
    """Reads a Delta table: its rows, and with `watch` those that later versions add.

    A version that only rearranges rows (OPTIMIZE) adds none. Of files with deletion vectors, the deleted rows are left
    out.

    The arguments are those of `Environment.read_delta`.

    Raises ConfigError if there is no such table, or if it uses a feature that cannot be read, SchemaError for columns
    that do not exist, StorageError if it cannot be read.

        >>> from midstream.connectors import DeltaSource
        >>> pl.DataFrame({"n": [1, 2]}).write_delta("counts")
        >>> DeltaSource("counts").schema.names
        ['n']
    """

    def __init__(
        self,
        table: str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        watch: bool = False,
        start: TableStart | None = None,
        on_change: OnChange = "fail",
        changes: bool = False,
        key: Sequence[str] = (),
        interval: Duration = "1 s",
        storage_options: Mapping[str, str] | None = None,
        filesystem: pyarrow.fs.FileSystem | None = None,
        rows_per_s: float | None = None,
    ) -> None:
        require("deltalake", "delta", "DeltaSource")
        self.filesystem, self.directory = resolve(table, filesystem, "DeltaSource")
        super().__init__(
            f"DeltaSource of {self.directory}",
            columns=columns,
            watch=watch,
            start=start,
            on_change=on_change,
            interval=interval,
            rows_per_s=rows_per_s,
        )
        self._uri = self.directory if is_local(self.filesystem) else str(table)
        self._storage_options = dict(storage_options) if storage_options else None
        opened = self._opened()
        self._made_at = opened.version()
        """The version of the table whose columns this source has."""
        self._table_id = str(opened.metadata().id)
        self._set_schema(self._chosen(opened))
        self._read = self.schema
        """The columns of the table that are read."""
        self._reads_changes = changes
        self.supports_projection = not changes
        self._key = checked_key(key, None, "DeltaSource")
        if self._key and not changes:
            raise ConfigError(f"DeltaSource: key={list(key)!r} has no meaning without changes=True; leave it out")
        check_columns(self._read, self._key, None, self._where)
        check_key_types(self._read, self._key, self._where)
        if changes:
            if on_change != "fail":
                raise ConfigError(
                    "DeltaSource: on_change='skip' has no meaning with changes=True, which reads them; leave it out"
                )
            self.splits_end = self.bounded
            self._set_schema(pa.schema([*self._read, pa.field(OP, pa.large_string())]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_storage_options": None}  # only the driver uses them

    # ---- on the driver ----

    def datasets(self) -> Sequence[str]:
        return [file_uri(self._uri, self.filesystem, self.directory)]

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        if not self._reads_changes:
            return super().discover(position, context)
        if position is not None:
            self.check_resume(position)
            return Discovery((), position, exhausted=self.bounded)
        files, position = self._begin(None)
        known = decoded(position, _DeltaPosition, "DeltaSource")
        stop = self._opened().version() if self.bounded else None
        at = known.table_id, known.version, known.digest
        part = DeltaChangesSplit(*at, packed_files(files), stop, self._key, self._stored_names)
        return Discovery((Split("changes", msgspec.msgpack.encode(part)),), position, exhausted=self.bounded)

    def readers_max(self, parallelism: int) -> int:
        return 1 if self._reads_changes else parallelism

    def _begin(self, event_time: str | None) -> tuple[Sequence[TableFile], bytes]:
        opened = self._opened()
        newest, metadata = opened.version(), metadata_of(opened)
        if metadata.id != self._table_id:
            raise ConfigError(f"{self._where}: {_REPLACED}")
        self._check_columns(metadata, f"{self._where}: version {newest}")
        with self._delta_errors():
            files = [*self._snapshot(opened, self._stored_name(event_time))] if self._start is None else []
        read = newest if self._start is None else self._first_version(opened) - 1
        return files, self._position(metadata.id, read)

    def _find_start(self) -> None:
        self._first_version(self._opened())

    def check_resume(self, position: bytes) -> None:
        """Raise ConfigError for a position of another source, in another table, or of changes in place of rows."""
        known = decoded(position, _DeltaPosition, "DeltaSource")
        if known.table_id != self._table_id:
            raise ConfigError(f"{self._where}: version {known.version} was read, and {_REPLACED}")
        if known.changes not in (None, self._reads_changes):
            raise ConfigError(
                f"{self._where}: the checkpoint is of a job with changes={known.changes}; resume with that, or start over "
                "with --fresh"
            )
        if not self._reads_changes:  # their reader may be past this version
            self._check_names(known.names, known.version)
        before = dict(zip(known.columns, known.names, strict=False))
        for name, stored in zip(self._read.names, self._stored_names, strict=False):
            if before.get(name, stored) != stored:
                raise other_column(self._where, name, self._mapping.names.get(before[name]))

    def _after(self, position: bytes, event_time: str | None) -> Iterator[tuple[Sequence[TableFile], bytes]]:
        known = decoded(position, _DeltaPosition, "DeltaSource")
        number = known.version
        while has_version(self.filesystem, self.directory, number, self._where):
            if number == known.version:
                self._check_same(known)
            version = read_version(self.filesystem, self.directory, number + 1, self._stored_name(event_time))
            added = self._added_by(version, known.table_id)
            number = version.number
            yield added, self._position(known.table_id, number)

    def _stored_field(self, name: str) -> pa.Field[Any] | None:
        field = self._mapping.fields.get(name)
        return field if field is None or self._mapping.mode == "id" else field.remove_metadata()

    def _stored_name(self, event_time: str | None) -> str | None:
        found = None if event_time is None else self._mapping.fields.get(event_time)
        return None if found is None else found.name

    def _position(self, table_id: str, version: int) -> bytes:
        digest = digest_of(self.filesystem, self.directory, version) if version >= 0 else None
        stored = self._stored_names
        read = tuple(self._read.names) if stored else ()
        return msgspec.msgpack.encode(_DeltaPosition(table_id, version, digest, self._reads_changes, stored, read))

    @property
    def _stored_names(self) -> tuple[str, ...]:
        return tuple(self._mapping.stored_names(self._read.names)) if self._mapping.is_mapped else ()

    def _check_same(self, known: _DeltaPosition) -> None:
        """Raise ConfigError if the table was replaced by another one since a version of it was read."""
        digest = digest_of(self.filesystem, self.directory, known.version) if known.version >= 0 else None
        if digest is None or known.digest is None:
            is_same = str(self._opened().metadata().id) == known.table_id
        else:
            is_same = digest == known.digest
        if not is_same:
            raise ConfigError(f"{self._where}: version {known.version} was read, and {_REPLACED}")

    def _snapshot(self, table: DeltaTable, event_time: str | None) -> Iterator[TableFile]:
        """Yield the table's files, the oldest first. `event_time`: as its statistics have it."""
        actions = pa.table(table.get_add_actions()).sort_by([("modification_time", "ascending"), ("path", "ascending")])
        has_partitions = "partition" in actions.column_names
        partitions = actions.column("partition").combine_chunks() if has_partitions else None
        names = [] if partitions is None else [field.name for field in partitions.type]
        mapping = mapping_of(table, self._where)
        stored_names = dict(zip(names, mapping.stored_names(names), strict=True))
        paths = list(map(str, actions.column("path").to_pylist()))
        sizes = map(int, actions.column("size_bytes").to_numpy())
        deleted = {path: packed(rows) for path, rows in deleted_rows(table, set(paths), self._where)}
        times = _min_times_us(actions, event_time)
        for row, (path, size, time_us) in enumerate(zip(paths, sizes, times, strict=True)):
            values = (
                {stored: partitions[row][name] for name, stored in stored_names.items()}
                if partitions is not None
                else {}
            )
            constants = constants_of({name: constant_text(value) for name, value in values.items()})
            yield TableFile(
                unquote(path), size, table.version(), constants, deleted.get(path, b""), min_time_us=time_us
            )

    def _added_by(self, version: TableVersion, table_id: str) -> Sequence[TableFile]:
        self._check_version(version, table_id)
        if version.removes_rows:
            self._skipped(f"{self._where}: version {version.number} ({version.operation})")
            return ()
        return version.added

    def _check_version(self, version: TableVersion, table_id: str) -> None:
        where = f"{self._where}: version {version.number} ({version.operation})"
        unsupported = [] if version.protocol is None else version.protocol.unsupported()
        if unsupported:
            raise ConfigError(f"{where} requires {', '.join(unsupported)}, which this source does not know")
        if version.metadata is not None:
            if version.metadata.id != table_id:
                raise ConfigError(f"{where}: {_REPLACED}")
            if version.number > self._made_at:
                self._check_columns(version.metadata, where)
            else:
                self._check_names(self._names_in_files(version.metadata, where), version.number)

    def _check_columns(self, metadata: Metadata, where: str) -> None:
        """Raise SchemaError if the columns have changed since the source was made. With column mapping, they may have been
        renamed.
        """
        now = ColumnMapping.of(metadata.schema_string, metadata.configuration, where)
        names = now.names
        read = self._mapping.stored(self._read)
        self._check_supported(metadata, [names[field.name] for field in read if field.name in names], where)
        for field, stored in zip(self._read, read, strict=True):
            if stored.name not in names:
                raise SchemaError(
                    f"{where}: column {field.name!r} was dropped; start again to read the table without it"
                )
            kind = now.fields[names[stored.name]].type
            if kind != stored.type:
                raise SchemaError(
                    f"{where}: column {field.name!r} was {stored.type} and is now {kind}; start again to read it as it is now"
                )
        new = [name for stored, name in names.items() if stored not in read.names]
        if new and self._columns is None:
            raise self._added(new[0], where)

    def _check_names_from(self, version: int) -> None:
        """Check the names of columns in the files that a version and later ones added, as `_check_names` does."""
        try:
            then = metadata_of(self._opened(version))
        except (ConfigError, StorageError) as error:
            raise ConfigError(
                f"{self._where}: start={self._start}: how the table was at version {version} can no longer be found out ({error}); "
                "start with a later version"
            ) from error
        self._check_names(self._names_in_files(then, f"{self._where}: version {version}"), version)

    def _names_in_files(self, metadata: Metadata, where: str) -> Sequence[str]:
        """Return the names that columns had in files, if the table had column mapping."""
        then = ColumnMapping.of(metadata.schema_string, metadata.configuration, where)
        return then.stored_names(set(self._read.names) & then.fields.keys()) if then.is_mapped else ()

    def _check_names(self, then: Sequence[str], version: int) -> None:
        """Raise ConfigError if column mapping was removed after a version, in whose files columns have the names `then`: all
        files were written again, and older ones would be read as if they had none of the columns.
        """
        if self._mapping.names.keys() >= set(then) or not has_version(
            self.filesystem, self.directory, version, self._where
        ):
            return
        for number in range(version + 1, self._made_at + 1):
            metadata, where = read_version(self.filesystem, self.directory, number).metadata, f"version {number}"
            if metadata is not None:
                if not ColumnMapping.of(metadata.schema_string, metadata.configuration, where).is_mapped:
                    raise ConfigError(
                        f"{self._where}: version {version} is to be read on from, and version {number} has removed column "
                        "mapping, without which older files cannot be read; to read the table as it is now, start with --fresh"
                    )

    def _check_supported(self, metadata: Metadata, names: Sequence[str], where: str) -> None:
        unsupported = unsupported_in(metadata, frozenset(names))
        if unsupported is not None:
            raise ConfigError(f"{where}: the table has {unsupported}, which this source cannot read")

    def _chosen(self, table: DeltaTable) -> pa.Schema:
        """Return the columns to read. Raises SchemaError or ConfigError if the table does not have them, or they cannot be
        read.
        """
        metadata = metadata_of(table)
        chosen = self._columns_to_read([field["name"] for field in metadata.fields])
        self._check_supported(metadata, chosen, self._where)
        self._mapping = mapping_of(table, self._where)
        found = table_columns(metadata.schema_string, chosen)
        self._partition_by = frozenset(metadata.partition_columns) & frozenset(chosen)
        for name in metadata.partition_columns:
            if name in chosen and pa.types.is_large_binary(found.field(name).type):
                raise SchemaError(
                    f"{self._where}: partition column {name!r} is binary, which cannot be read; leave it out"
                )
        return found

    def _first_version(self, table: DeltaTable) -> int:
        """Return the first version to read, which may not exist yet. Raises ConfigError if it can no longer be read."""
        newest = table.version()
        if isinstance(self._start, datetime):
            first = self._version_at(self._start, newest)
        else:
            first = newest + 1 if self._start == "latest" else int(self._start or 0)
        if first > newest + 1:
            raise ConfigError(f"{self._where}: start={first}, and the newest version is {newest}")
        if first <= newest:
            has_version(self.filesystem, self.directory, first - 1, self._where)
            self._check_names_from(first)
        return first

    def _version_at(self, start: datetime, newest: int) -> int:
        start_ms = start.timestamp() * 1000
        commits = [each for each in commit_times(self.filesystem, self.directory) if each[0] <= newest]
        first = commits[0][0] if commits else newest + 1
        if first > 0 and (not commits or commits[0][1] >= start_ms):
            raise ConfigError(
                f"{self._where}: start={start.isoformat()}, and the table's log begins later, with version {first}; "
                "read from that version on, or the whole table without start="
            )
        return next((version for version, at_ms in commits if at_ms >= start_ms), newest + 1)

    def _opened(self, version: int | None = None) -> DeltaTable:
        """Return the table, as it is now or as it was at a version."""
        from deltalake import DeltaTable

        with self._delta_errors():
            return DeltaTable(self._uri, version=version, storage_options=self._storage_options)

    @contextmanager
    def _delta_errors(self) -> Iterator[None]:
        from deltalake.exceptions import DeltaError, TableNotFoundError

        try:
            yield
        except TableNotFoundError as error:
            raise ConfigError(f"{self._where}: there is no Delta table") from error
        except (DeltaError, OSError) as error:
            what = str(error).partition("\n   0: ")[0]  # from there on, a list of functions of deltalake
            raise StorageError(f"{self._where}: cannot be read: {what}") from error

    # ---- on the subtasks ----

    def begin_split(self, split: Split) -> Split:
        """Return the split of changes with the end of this job, which may be another one than the split was found by."""
        if not self._reads_changes:
            return split
        part = decoded(split.payload, DeltaChangesSplit, "DeltaSource")
        ends_at = self._made_at if part.stop is None else part.stop
        part = msgspec.structs.replace(part, stop=ends_at if self.bounded else None)
        return msgspec.structs.replace(split, payload=msgspec.msgpack.encode(part))

    def open_split(self, split: Split) -> SplitReader:
        if self._reads_changes:
            part = decoded(split.payload, DeltaChangesSplit, "DeltaSource")
            if part.key != self._key:
                raise ConfigError(
                    f"{self._where}: the checkpoint was made with key={list(part.key)!r}; give that, or start with --fresh"
                )
            reader = DeltaChangesReader(
                self.filesystem,
                self.directory,
                self._read,
                part,
                split.offset,
                where=self._where,
                check=lambda version: self._check_version(version, part.table_id),
                located=lambda file: self._located(file)[1],
                mapping=self._mapping,
                partition_by=self._partition_by,
                interval_s=min(self.discovery_interval_s, _CHECK_S_MAX),
            )
            self._check_names(part.names, reader.version)
            return reader
        return self.open_projected(split, self.schema)

    def open_projected(self, split: Split, columns: pa.Schema) -> SplitReader:
        file = decoded(split.payload, TableFile, "DeltaSource")
        _, path = self._located(file)
        deleted = partial(deleted_rows_of, self.filesystem, path, file)
        return self._mapping.open_file(self.filesystem, path, file, columns, split.offset, deleted)

    def place(self, split: Split, first: int, last: int) -> str:
        if not self._reads_changes:
            return super().place(split, first, last)
        return f"{self._where}: {rows_text(first, last)} after offset {split.offset} of its changes"

    def _located(self, file: TableFile) -> tuple[pyarrow.fs.FileSystem, str]:
        if "://" in file.path or file.path.startswith("/"):
            raise ConfigError(
                f"{self._where}: its file {file.path} belongs to another table, of which this one is a shallow clone; such "
                "tables cannot be read"
            )
        return self.filesystem, below(self.filesystem, self.directory, file.path)


def _min_times_us(actions: pa.Table, event_time: str | None) -> list[int | None]:
    """Return the earliest event time of each file, see `Split`. Of other columns, the statistics may have values that
    Python cannot hold, such as a date after the year 9999.
    """
    unknown: list[int | None] = [None] * actions.num_rows
    if event_time is None or "min" not in actions.column_names:
        return unknown
    minima = actions.column("min")
    index = minima.type.get_field_index(event_time)
    if index < 0 or not pa.types.is_timestamp(minima.type.field(index).type):
        return unknown
    found = pc.struct_field(minima, [index])
    return [checked_time_us(time_us) for time_us in found.cast(pa.int64()).to_pylist()]
