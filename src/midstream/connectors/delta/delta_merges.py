"""Rows that are merged into a Delta table by key: subtasks write them to files apart, and the committer merges them.

The files have names that no reader and no VACUUM heeds (`keyed_files`), and columns as the table's own files have them,
which may be renamed before the merge (`column_mapping`). The committer has deltalake merge the last row of
each key in one transaction.

Keys are compared by `=`, from which deltalake derives which files of the table it need not read; or, where the log's
least and greatest values may be inexact, by `IS NOT DISTINCT FROM`, from which it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs

from midstream.connectors.common.filesystem import is_local, make_durable
from midstream.connectors.common.table_columns import as_stored, nullable
from midstream.connectors.delta.column_mapping import as_in_files, mapping_of
from midstream.connectors.delta.delta_files import WrittenFile, check_dates, check_partition
from midstream.connectors.delta.delta_tables import is_fit_for_folders, schema_of
from midstream.connectors.files.keyed_files import (
    DELETES,
    FOLDER,
    KeyedPart,
    check_key_columns,
    in_order,
    last_rows_of,
    merged_columns,
    several_rows,
)
from midstream.connectors.files.rolling_files import OpenFile
from midstream.engine.core.errors import ConfigError, SchemaError
from midstream.engine.operators.sink_api import WriterContext

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable

    from midstream.connectors.delta.delta_sink import DeltaSink


# ---- on the subtasks


class MergedPart(KeyedPart):
    def __init__(
        self, sink: DeltaSink, context: WriterContext, schema: pa.Schema, next_name: Callable[[], str]
    ) -> None:
        where = f"operator {context.name!r}: {sink._where}"
        stored = sink.mapping.stored(nullable(schema))
        super().__init__(schema, stored, sink.key, sink.op, self._new_file, sink.roll_bytes, where)
        self._sink = sink
        self._context = context
        self._next_name = next_name

    def _checked(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        rows = self._with_partitions(rows)
        check_dates(rows, rows.schema.names, "column", self._rows, self._where)
        return rows

    def _with_partitions(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows with null in place of empty text in partition columns, which have no other form of it."""
        for name in self._sink.partition_by:
            column = rows.column(name)
            if pa.types.is_large_string(column.type):
                empty = pc.equal(column, pa.scalar("", column.type))
                row = int(pc.index(empty, pa.scalar(True)).as_py())
                if row >= 0 and name in self._sink.key:
                    raise SchemaError(
                        f"{self._where}: row {self._rows + row} since the last checkpoint: key column {name!r} is '', "
                        "which Delta does not distinguish from null in a partition column; filter such rows out"
                    )
                column = pc.if_else(empty, pa.scalar(None, column.type), column)
                rows = rows.set_column(rows.schema.get_field_index(name), name, column)
            for value in column.unique().to_pylist():
                check_partition(rows, [name], (value,), self._rows, self._where)
        return rows

    def _as_in_files(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        return as_in_files(rows, self._file_columns)

    def _new_file(self, columns: pa.Schema) -> OpenFile:
        sink = self._sink
        return OpenFile(sink.filesystem, sink.directory, f"{FOLDER}{self._next_name()}", "parquet", columns)

    def _directory(self) -> tuple[pyarrow.fs.FileSystem, str]:
        return self._sink.filesystem, self._sink.directory

    def _committable(self, file: OpenFile) -> bytes:
        sink, context = self._sink, self._context
        file_of = (context.job_id, context.uid, file.name)
        key = tuple(sink.mapping.stored_names(sink.key))
        written = WrittenFile(*file_of, file.size, file.rows, {}, "", sink.location, key, sink.table_id)
        return msgspec.msgpack.encode(written)


# ---- on the driver


def check_keys(table: DeltaTable, schema: pa.Schema, key: Sequence[str], where: str) -> None:
    """Raise SchemaError or ConfigError if the table, once it has the columns of `schema`, takes no rows by this key."""
    check_key_columns(schema, key, where)
    metadata = table.metadata()
    if metadata.configuration.get("delta.appendOnly") == "true":
        raise ConfigError(
            f"{where}: the table is append-only (delta.appendOnly), and rows with a key replace others; set that to "
            "false, or leave key out"
        )
    for name in metadata.partition_columns:
        if not is_fit_for_folders(name):
            raise SchemaError(
                f"{where}: partition column {name!r} has a character in its name that folders cannot have, and rows with "
                "a key cannot be merged into such partitions; rename it, or partition by another"
            )


def check_mergeable(table: DeltaTable, schema: pa.Schema, key: Sequence[str], where: str) -> None:
    """Raise ConfigError if deltalake cannot merge rows of `schema` into the table by this key."""
    from deltalake import CommitProperties
    from deltalake.exceptions import DeltaError

    try:
        _merge(table, (), schema, key, CommitProperties(max_commit_retries=0), unless="false")
    except DeltaError as error:
        raise ConfigError(f"{where}: deltalake cannot merge rows into this table: {error}") from error


def merge_files(
    sink: DeltaSink, table: DeltaTable, files: Sequence[WrittenFile], properties: CommitProperties
) -> str | None:
    """Merge the last row of each key. Return what is wrong with the table if the merge has shown that.

    There is no new version if nothing has changed. `table` is at the new one afterwards.
    """
    mapping, there = mapping_of(table, sink._where), schema_of(table)
    paths = [f"{sink.directory}/{name}" for name in in_order([file.name for file in files])]
    # not while deltalake merges, which has them all in memory anyway: an error would end it in a panic
    schema, rows = last_rows_of(sink.filesystem, paths, files[0].key)
    put = sum(batch.num_rows - (pc.sum(batch.column(DELETES)).as_py() or 0) for batch in rows)
    version = table.version()
    key = [mapping.names[name] for name in files[0].key]
    columns = pa.schema([there.field(mapping.names[name]) for name in merged_columns(schema).names])
    now = nullable(mapping.stored(columns))
    if not now.equals(merged_columns(schema)):  # structs may have got fields since
        stored = now.append(schema.field(DELETES))
        rows = [as_stored(batch, stored, sink._where) for batch in rows]
    columns = nullable(columns)
    rows = [as_in_files(batch, columns.append(schema.field(DELETES))) for batch in rows]
    metrics = _merge(table, rows, columns, key, properties)
    _make_files_durable(sink, version, table.version())
    again = metrics["num_target_rows_updated"] - (put - metrics["num_target_rows_inserted"])
    return several_rows(key, again) if again > 0 else None


def check_restorable(sink: DeltaSink, newest: DeltaTable, older: DeltaTable) -> None:
    """Raise ConfigError if files of an older version, which merges have removed, were deleted."""
    now, before = (
        {str(path) for path in pa.table(table.get_add_actions(flatten=True))["path"].to_pylist()}
        for table in (newest, older)
    )
    removed = [f"{sink.directory}/{unquote(path)}" for path in sorted(before - now)]
    for info in sink.filesystem.get_file_info(removed):
        if info.type != pyarrow.fs.FileType.File:
            raise ConfigError(
                f"{sink._where}: version {older.version()} of the table can no longer be restored: {info.path} was "
                "deleted, for example by VACUUM"
            )


def _merge(
    table: DeltaTable,
    rows: Sequence[pa.RecordBatch],
    schema: pa.Schema,
    key: Sequence[str],
    properties: CommitProperties,
    unless: str = "",
) -> dict[str, Any]:
    """Merge rows, whose last column tells which of them delete; `unless`: a condition for all matches."""
    source = [f"c{i}" for i in range(len(schema))]
    renamed = pa.schema([*map(pa.field, source, schema.types), pa.field("deletes", pa.bool_())])
    batches = [pa.RecordBatch.from_arrays(batch.columns, schema=renamed) for batch in rows]
    exact = set(table.metadata().partition_columns)
    conditions = [unless] if unless else []
    for name in key:
        kind = schema.field(name).type
        same = "=" if name in exact or _has_exact_bounds(kind) else "IS NOT DISTINCT FROM"
        conditions.append(f"{_quoted(name)} {same} s.{source[schema.get_field_index(name)]}")
    values = {_quoted(name): f"s.{column}" for name, column in zip(schema.names, source, strict=True)}
    others = {_quoted(name): values[_quoted(name)] for name in schema.names if name not in key}
    merger = table.merge(
        pa.RecordBatchReader.from_batches(renamed, batches),
        " AND ".join(f"({condition})" for condition in conditions),
        source_alias="s",
        target_alias="t",
        streamed_exec=False,  # with it, deltalake reads the whole table each time
        commit_properties=properties,
    ).when_matched_delete("s.deletes")
    if others:
        merger = merger.when_matched_update(others)
    return merger.when_not_matched_insert(values, "NOT s.deletes").execute()


def _has_exact_bounds(kind: pa.DataType) -> bool:
    """Whether the log holds least and greatest values of this type as they are: decimals are rounded there, and other
    writers cut times to milliseconds.
    """
    return (
        pa.types.is_integer(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_date(kind)
        or pa.types.is_large_string(kind)
    )


def _quoted(name: str) -> str:
    return "t.`" + name.replace("`", "``") + "`"


def _make_files_durable(sink: DeltaSink, before: int, after: int) -> None:
    """Sync a local table's new files to disk, which deltalake leaves to the operating system."""
    if not is_local(sink.filesystem):
        return
    for version in range(before + 1, after + 1):
        path = f"{sink.directory}/_delta_log/{version:020d}.json"
        with sink.filesystem.open_input_stream(path) as stream:
            actions = [msgspec.json.decode(line) for line in stream.read().splitlines() if line.strip()]
        names = [unquote(action["add"]["path"]) for action in actions if "add" in action]
        for name in {*names, *(name.rpartition("/")[0] for name in names)}:
            make_durable(sink.filesystem, f"{sink.directory}/{name}")
