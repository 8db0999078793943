"""The log of a Delta table, version by version: the files that each one added, and what else it changed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.fs
import xxhash

from midstream.connectors.common.filesystem import file_info
from midstream.connectors.delta.column_mapping import arrow_schema
from midstream.connectors.delta.deletion_vectors import VectorDescriptor
from midstream.connectors.files.table_files import UNKNOWN_SIZE, TableFile, time_us_of
from midstream.engine.core.batches import canonical_type
from midstream.engine.core.errors import UNDECODABLE, ConfigError, StorageError

if TYPE_CHECKING:
    from deltalake import DeltaTable

_COMMIT: Final = re.compile(r"(\d{20})\.json")
_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint\..*")
_COMMITS_AT_ONCE: Final = 16
_SUPPORTED: Final = frozenset(
    ("deletionVectors", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck", "columnMapping")
    + ("variantType", "variantType-preview", "variantShredding", "variantShredding-preview")
    + ("typeWidening", "typeWidening-preview")
)
"""Features of tables that require nothing of a reader, unless it finds them in use."""


class _Add(msgspec.Struct, rename="camel"):
    path: str
    size: int
    partition_values: dict[str, str | None] = {}
    data_change: bool = True
    deletion_vector: VectorDescriptor | None = None
    stats: str | None = None


class _Remove(msgspec.Struct, rename="camel"):
    path: str
    data_change: bool = True
    size: int | None = None
    partition_values: dict[str, str | None] | None = None
    deletion_vector: VectorDescriptor | None = None


class _Cdc(msgspec.Struct, rename="camel"):
    path: str
    size: int
    partition_values: dict[str, str | None] = {}


class Metadata(msgspec.Struct, rename="camel"):
    id: str
    schema_string: str
    partition_columns: list[str] = []
    configuration: dict[str, str | None] = {}

    @property
    def fields(self) -> list[dict[str, Any]]:
        return list(json.loads(self.schema_string)["fields"])


class Protocol(msgspec.Struct, rename="camel"):
    min_reader_version: int
    reader_features: list[str] | None = None

    def unsupported(self) -> list[str]:
        """Return the features that a reader must know to read the table, and that this one does not."""
        if self.min_reader_version > 3:
            return [f"reader version {self.min_reader_version}"]
        return sorted(set(self.reader_features or ()) - _SUPPORTED)


class _Statistics(msgspec.Struct):
    minValues: dict[str, Any] = {}


class _CommitInfo(msgspec.Struct, rename="camel"):
    operation: str | None = None
    timestamp: int | None = None
    in_commit_timestamp: int | None = None


class _LogAction(msgspec.Struct):
    add: _Add | None = None
    remove: _Remove | None = None
    cdc: _Cdc | None = None
    metaData: Metadata | None = None
    protocol: Protocol | None = None
    commitInfo: _CommitInfo | None = None


class _WhenCommitted(msgspec.Struct):
    commitInfo: _CommitInfo | None = None


_decode_action = msgspec.json.Decoder(_LogAction).decode
_decode_stats = msgspec.json.Decoder(_Statistics).decode
_decode_when = msgspec.json.Decoder(_WhenCommitted).decode


class TableVersion(msgspec.Struct, frozen=True):
    """What a version did to the table.

    `added`: new data files. A version that only rearranges rows has none.
    `removes_rows`: it removed or changed rows, which may have been read.
    `removed`: the data files whose rows it removed. `changes`: files with the rows that it changed, if the table has them.
    `vectors_before`, `vectors_after`: the deletion vectors of removed and of added files, by path.
    """

    number: int
    operation: str
    added: tuple[TableFile, ...]
    removes_rows: bool
    metadata: Metadata | None
    protocol: Protocol | None
    removed: tuple[TableFile, ...]
    changes: tuple[TableFile, ...]
    vectors_before: Mapping[str, VectorDescriptor]
    vectors_after: Mapping[str, VectorDescriptor]


def digest_of(filesystem: pyarrow.fs.FileSystem, directory: str, version: int) -> int | None:
    """Return a number that tells a version from one with the same number of another table; None if the log no longer has
    it.
    """
    path = log_path(directory, version)
    if file_info(filesystem, path).type != pyarrow.fs.FileType.File:
        return None
    try:
        with filesystem.open_input_stream(path) as stream:
            return xxhash.xxh3_64_intdigest(stream.read())
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error}") from error


def log_path(directory: str, version: int) -> str:
    return f"{directory}/_delta_log/{version:020d}.json"


def read_version(
    filesystem: pyarrow.fs.FileSystem, directory: str, version: int, event_time: str | None = None
) -> TableVersion:
    """Read a version's commit. Raises StorageError if it cannot be read. `event_time`: that in `DiscoveryContext`, as files
    have it (`ColumnMapping`), like all names in what is returned.
    """
    path = log_path(directory, version)
    added: dict[str, TableFile] = {}
    removed: list[TableFile] = []
    changes: list[TableFile] = []
    before: dict[str, VectorDescriptor] = {}
    after: dict[str, VectorDescriptor] = {}
    operation = "a commit"
    metadata: Metadata | None = None
    protocol: Protocol | None = None
    try:
        for action in map(_decode_action, _lines(filesystem, path)):
            if action.commitInfo is not None:
                operation = action.commitInfo.operation or operation
            metadata, protocol = action.metaData or metadata, action.protocol or protocol
            if action.add is not None and action.add.data_change:
                added[action.add.path] = _file_of(action.add, version, event_time)
                if action.add.deletion_vector is not None:
                    after[unquote(action.add.path)] = action.add.deletion_vector
            if action.remove is not None and action.remove.data_change:
                removed.append(_removed_file(action.remove, version))
                if action.remove.deletion_vector is not None:
                    before[unquote(action.remove.path)] = action.remove.deletion_vector
            if action.cdc is not None:
                cdc = action.cdc
                changes.append(TableFile(unquote(cdc.path), cdc.size, version, constants_of(cdc.partition_values)))
    except (OSError, *UNDECODABLE) as error:
        raise StorageError(f"{path}: cannot be read: {error}") from error
    removes_rows = bool(removed) or bool(after)
    files = (tuple(added.values()), removes_rows, metadata, protocol, tuple(removed), tuple(changes))
    return TableVersion(version, operation, *files, before, after)


def _lines(filesystem: pyarrow.fs.FileSystem, path: str) -> list[bytes]:
    with filesystem.open_input_stream(path) as stream:
        return [line for line in stream.read().splitlines() if line.strip()]


def commit_times(filesystem: pyarrow.fs.FileSystem, directory: str) -> list[tuple[int, float]]:
    """Return each version in the log, the oldest first, and when it was committed, in milliseconds since 1970: as the
    commit says, or else when its file was written. A version is later than the one before, whatever its clock said.
    """
    infos = _log_files(filesystem, directory)
    found = sorted((int(match[1]), info) for info in infos if (match := _COMMIT.fullmatch(info.base_name)))
    with ThreadPoolExecutor(_COMMITS_AT_ONCE, "delta-log") as pool:
        said = pool.map(lambda each: _commit_time(filesystem, each[1]), found)
        times = accumulate(said, lambda before, at_ms: max(before + 1, at_ms))
        return [(version, at_ms) for (version, _), at_ms in zip(found, times, strict=True)]


def _commit_time(filesystem: pyarrow.fs.FileSystem, info: pyarrow.fs.FileInfo) -> float:
    try:
        for line in _lines(filesystem, info.path):
            if b"commitInfo" in line and (found := _decode_when(line).commitInfo) is not None:
                at_ms = found.timestamp if found.in_commit_timestamp is None else found.in_commit_timestamp
                if at_ms is not None:
                    return at_ms
    except (OSError, *UNDECODABLE) as error:
        raise StorageError(f"{info.path}: cannot be read: {error}") from error
    return info.mtime_ns / 1e6 if info.mtime_ns is not None else 0


def _file_of(add: _Add, version: int, event_time: str | None) -> TableFile:
    constants = constants_of(add.partition_values)
    return TableFile(unquote(add.path), add.size, version, constants, min_time_us=_min_time_us(add.stats, event_time))


def _min_time_us(stats: str | None, event_time: str | None) -> int | None:
    """Return the earliest event time that the statistics of a file name; they are optional, and so is everything in them."""
    if event_time is None or not stats:
        return None
    try:
        minima = _decode_stats(stats).minValues
    except UNDECODABLE:
        return None
    return time_us_of(minima.get(event_time))


def _removed_file(remove: _Remove, version: int) -> TableFile:
    size = UNKNOWN_SIZE if remove.size is None else remove.size
    return TableFile(unquote(remove.path), size, version, constants_of(remove.partition_values or {}))


def constants_of(partition: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the values of partition columns. To Delta, empty text is null."""
    return {name: text or None for name, text in partition.items()}


def has_version(filesystem: pyarrow.fs.FileSystem, directory: str, after: int, where: str) -> bool:
    """Whether there is a version after this one. Raises ConfigError if it can no longer be read, as the log was cleaned
    up, or if the table was dropped, or replaced by one with fewer versions.
    """
    if file_info(filesystem, log_path(directory, after + 1)).type == pyarrow.fs.FileType.File:
        return True
    if after >= 0 and file_info(filesystem, log_path(directory, after)).type == pyarrow.fs.FileType.File:
        return False
    first, newest = versions_in(filesystem, directory)
    if newest < 0:
        raise ConfigError(f"{where}: the table no longer exists")
    if newest < after:
        raise ConfigError(
            f"{where}: version {after} was read, and version {newest} is now the newest: the table was replaced or set "
            "back; to read it from the beginning, start with --fresh"
        )
    if newest > after:
        raise ConfigError(
            f"{where}: version {after + 1} is to be read next, and is no longer in the table's log, which now begins with "
            f"version {first}: it was cleaned up. Keep it for longer than a job may be behind "
            "(delta.logRetentionDuration); to read the table as it is now, start with --fresh"
        )
    return False


def versions_in(filesystem: pyarrow.fs.FileSystem, directory: str) -> tuple[int, int]:
    """Return the oldest version in the log, and the newest one that there is: of that the log may only have a checkpoint.
    If the log is empty, (0, -1).
    """
    names = [info.base_name for info in _log_files(filesystem, directory)]
    found = [int(match[1]) for name in names if (match := _COMMIT.fullmatch(name))]
    checkpoints = [int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name))]
    newest = max([*found, *checkpoints], default=-1)
    return min(found, default=newest + 1), newest


def _log_files(filesystem: pyarrow.fs.FileSystem, directory: str) -> list[pyarrow.fs.FileInfo]:
    selector = pyarrow.fs.FileSelector(f"{directory}/_delta_log", allow_not_found=True)
    try:
        return filesystem.get_file_info(selector)
    except OSError as error:
        raise StorageError(f"{directory}/_delta_log: cannot be listed: {error}") from error


def metadata_of(table: DeltaTable) -> Metadata:
    found = table.metadata()
    return Metadata(str(found.id), table.schema().to_json(), found.partition_columns, dict(found.configuration))


def deleted_rows(table: DeltaTable, paths: Set[str], where: str) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield each file that has a deletion vector, and which of its rows are deleted. deltalake has them by URL, which ends
    with the path.
    """
    if "deletionVectors" not in (table.protocol().reader_features or ()):
        return
    root = unquote(table.table_uri).rstrip("/")
    written = {unquote(path): path for path in paths}  # writers encode different characters in paths
    for batch in map(pa.record_batch, table.deletion_vectors()):
        for url, kept in zip(batch.column(0).to_pylist(), batch.column(1), strict=True):
            segments = unquote(str(url)).removeprefix(f"{root}/").split("/")
            ends = ("/".join(segments[index:]) for index in range(len(segments)))
            path = next((written[end] for end in ends if end in written), None)
            if path is None:
                raise StorageError(f"{where}: rows of {url} were deleted, which is no file of the table")
            yield path, ~kept.values.to_numpy(zero_copy_only=False)


def table_columns(schema: str, names: Sequence[str]) -> pa.Schema:
    """Return columns of the JSON of a table's schema, in canonical types."""
    wanted = [field for field in json.loads(schema)["fields"] if field["name"] in names]
    found = arrow_schema(json.dumps({"type": "struct", "fields": wanted}))
    return pa.schema([pa.field(name, canonical_type(found.field(name).type)) for name in names if name in found.names])


def unsupported_in(metadata: Metadata, names: frozenset[str]) -> str | None:
    """Return what a table has in these columns that cannot be read."""
    for field in metadata.fields:
        if field["name"] in names and _has_variant(field["type"]):
            return f"column {field['name']!r}, which is a variant"
    return None


def _has_variant(kind: object) -> bool:
    if isinstance(kind, dict):
        return any(map(_has_variant, kind.values()))
    if isinstance(kind, list):
        return any(map(_has_variant, kind))
    return kind == "variant"
