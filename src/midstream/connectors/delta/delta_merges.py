"""Rows that are merged into a Delta table by key: subtasks write them to files apart, and the committer merges them.

    table/_midstream/part-<attempt>-<subtask>-<n>-<token>.parquet    a name that no reader and no VACUUM heeds

The rows are in the order in which the subtask had them, with a column that tells which of them delete. The committer
takes the last row of each key, and has deltalake merge these in one transaction. Then it deletes the files. Those that
killed attempts have left are deleted with the first commit of a newer one.

Keys are compared by `=`, from which deltalake derives which files of the table it need not read; or, where the log's
least and greatest values may be inexact, by `IS NOT DISTINCT FROM`, from which it does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet
import xxhash

from midstream.connectors.common.async_writer import AsyncPart
from midstream.connectors.common.filesystem import delete_if_there, is_local, make_durable, names_in
from midstream.connectors.common.row_operations import check_put, key_and_operations
from midstream.connectors.common.table_columns import nullable
from midstream.connectors.delta.delta_files import WrittenFile, check_dates, check_lengths
from midstream.connectors.delta.delta_tables import is_fit_for_folders
from midstream.connectors.files.rolling_files import OpenFile, RollingFiles, explained
from midstream.engine.core.batches import conform, to_polars
from midstream.engine.core.errors import ConfigError, SchemaError, StorageError
from midstream.engine.operators.sink_api import WriterContext

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable

    from midstream.connectors.delta.delta_sink import DeltaSink

FOLDER: Final = "_midstream/"
_DELETES: Final = "midstream_deletes"
"""The last column of the files."""
_NAME: Final = re.compile(r"part-(\d+)-(\d+)-(\d+)-([0-9a-f]{16})\.parquet")
_BATCH_ROWS: Final = 65_536


def file_token(job_id: str, uid: str) -> str:
    """Return the part of a file's name that identifies its job and sink."""
    return xxhash.xxh3_64_hexdigest(f"{job_id}/{uid}".encode())


# ---- on the subtasks


class MergedPart(AsyncPart):
    """The files of one subtask between two checkpoints."""

    def __init__(
        self, sink: DeltaSink, context: WriterContext, schema: pa.Schema, next_name: Callable[[], str]
    ) -> None:
        super().__init__()
        self._sink = sink
        self._context = context
        self._next_name = next_name
        self._schema = schema
        self._nullable = nullable(schema)
        self._written = self._nullable.append(pa.field(_DELETES, pa.bool_()))
        self._where = f"operator {context.name!r}: {sink._where}"
        self._files = RollingFiles(self._new_file, sink.roll_bytes)
        self._rows = 0

    def _write(self, batch: pa.RecordBatch) -> None:
        rows, deletes = key_and_operations(batch, self._sink.key, self._sink.op, self._rows, self._where)
        rows = self._with_partitions(conform(rows, self._nullable, self._where))
        required = [field.name for field in self._schema if not field.nullable]
        check_put(rows, required, deletes, self._rows, self._where)
        check_dates(rows, self._schema.names, "column", self._rows, self._where)
        rows = pa.RecordBatch.from_arrays([*rows.columns, deletes], schema=self._written)
        with explained(f"{self._where}: cannot write"):
            self._files.write(rows.take(pa.array(_last_rows(to_polars(rows.select(list(self._sink.key)))))))
        self._rows += batch.num_rows

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
                check_lengths(rows, [name], (value,), self._rows, self._where)
        return rows

    def _new_file(self) -> OpenFile:
        sink = self._sink
        return OpenFile(sink.filesystem, sink.directory, f"{FOLDER}{self._next_name()}", "parquet", self._written)

    def _finish(self, checkpoint_id: int) -> Sequence[bytes]:
        sink, context = self._sink, self._context
        with explained(f"{self._where}: cannot write"):
            files = self._files.end()
            make_durable(sink.filesystem, sink.directory)
        return [
            msgspec.msgpack.encode(
                WrittenFile(
                    context.job_id, context.uid, file.name, file.size, file.rows, {}, "", sink.location, sink.key
                )
            )
            for file in files
        ]

    def _discard(self) -> None:
        self._files.discard()


# ---- on the driver


def check_mergeable(table: DeltaTable, schema: pa.Schema, key: Sequence[str], where: str) -> None:
    """Raise SchemaError or ConfigError if rows of `schema` cannot be merged into the table by this key."""
    from deltalake import CommitProperties
    from deltalake.exceptions import DeltaError

    if _DELETES in schema.names:
        raise SchemaError(f"{where}: a column may not be called {_DELETES!r}; rename it")
    for name in key:
        kind = schema.field(name).type
        if pa.types.is_floating(kind) or pa.types.is_nested(kind):
            raise SchemaError(
                f"{where}: key column {name!r} is {kind}, of which equal values cannot be found; cast it to an integer, a "
                "decimal or text"
            )
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
    key = files[0].key
    ordered = sorted(files, key=lambda file: _order(file.name))
    paths = [f"{sink.directory}/{file.name}" for file in ordered]
    schema = pyarrow.parquet.read_schema(paths[0], filesystem=sink.filesystem)
    if not {*key, _DELETES} <= set(schema.names):
        raise StorageError(f"{paths[0]}: has no columns {', '.join(key)}; the checkpoint is corrupt or forged")
    rows = _read(sink.filesystem, paths, _are_last(sink.filesystem, paths, key))
    put = sum(batch.num_rows - (pc.sum(batch.column(_DELETES)).as_py() or 0) for batch in rows)
    version = table.version()
    metrics = _merge(table, rows, merged_columns(schema), key, properties)
    _make_files_durable(sink, version, table.version())
    again = metrics["num_target_rows_updated"] - (put - metrics["num_target_rows_inserted"])
    if again <= 0:
        return None
    return (
        f"the table had several rows with the same ({', '.join(key)}): {again} more than there should be were updated as "
        "well, and remain; delete them, and start with --from latest"
    )


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
                f"{sink._where}: version {older.version()} of the table cannot be restored any more: {info.path} was "
                "deleted, for example by VACUUM"
            )


def delete_files(sink: DeltaSink, files: Sequence[WrittenFile]) -> None:
    """Delete merged files. One that cannot be deleted now is left to the next attempt."""
    for file in files:
        with suppress(OSError):
            delete_if_there(sink.filesystem, f"{sink.directory}/{file.name}")


def sweep(sink: DeltaSink, job_id: str, uid: str, before: int | None) -> None:
    """Delete what attempts of a job before this one have left; None for all of its attempts.

    Tasks are deployed only after everything in the restored checkpoint is committed: once something of the new attempt,
    or of the job that has resumed, is committed, nothing needs the earlier files.
    """
    token = file_token(job_id, uid)
    with suppress(OSError):
        for name in names_in(sink.filesystem, f"{sink.directory}/{FOLDER.rstrip('/')}"):
            found = _NAME.fullmatch(name)
            if found and found[4] == token and (before is None or int(found[1]) < before):
                delete_if_there(sink.filesystem, f"{sink.directory}/{FOLDER}{name}")


def attempt_of(file: WrittenFile) -> int:
    return _order(file.name)[0]


def merged_columns(schema: pa.Schema) -> pa.Schema:
    """Return the columns of a file that go to the table."""
    return pa.schema([field for field in schema if field.name != _DELETES])


def _order(name: str) -> tuple[int, int, int]:
    found = _NAME.fullmatch(name.removeprefix(FOLDER))
    assert found is not None, "names were checked"
    return int(found[1]), int(found[2]), int(found[3])


def _are_last(filesystem: pyarrow.fs.FileSystem, paths: Sequence[str], key: Sequence[str]) -> Any:
    """Return, for each row of these files, whether it is the last one of its key."""
    read = [pyarrow.parquet.read_table(path, columns=list(key), filesystem=filesystem) for path in paths]
    keys = pl.from_arrow(pa.concat_tables(read).select(list(key)))
    assert isinstance(keys, pl.DataFrame)
    are_last = np.zeros(len(keys), bool)
    are_last[_last_rows(keys)] = True
    return are_last


def _last_rows(keys: pl.DataFrame) -> Any:
    """Return the positions of the last row of each key, ascending."""
    names = [f"k{i}" for i in range(keys.width)]
    last = keys.rename(dict(zip(keys.columns, names, strict=True))).with_row_index("row").unique(names, keep="last")
    return np.sort(last.get_column("row").to_numpy())


def _read(filesystem: pyarrow.fs.FileSystem, paths: Sequence[str], kept: Any) -> list[pa.RecordBatch]:
    """Read the rows of these files that are kept.

    Not while deltalake merges, which has them all in memory anyway: an error would end it in a panic.
    """
    found, start = [], 0
    for path in paths:
        with filesystem.open_input_file(path) as stream:
            for batch in pyarrow.parquet.ParquetFile(stream).iter_batches(_BATCH_ROWS):
                found.append(batch.filter(pa.array(kept[start : start + batch.num_rows])))
                start += batch.num_rows
    return found


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
