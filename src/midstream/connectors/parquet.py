"""Parquet files: their columns, their row groups, and the rows of some of these.

Everything here blocks, and runs on an I/O pool (or on the driver, to infer a schema).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet

from midstream.connectors.formats import MISSES_VALUE, Wanted, check_columns, check_names, explained
from midstream.core.batches import canonical_type, conform
from midstream.core.casts import CastRefused, cast_exactly
from midstream.core.errors import SchemaError, StorageError

_BATCH_ROWS = 131_072


def parquet_row_groups(filesystem: pyarrow.fs.FileSystem, path: str, wanted: Wanted) -> list[tuple[int, int]]:
    """Return rows and bytes of each row group, after checking the file's columns against `wanted`."""
    with explained(path, "parquet"), ExitStack() as stack:
        file = open_parquet(filesystem, path, stack)
        check_parquet_schema(file.schema_arrow, wanted, path)
        groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
        return [(group.num_rows, group.total_byte_size) for group in groups]


def check_parquet_schema(found: pa.Schema, wanted: Wanted, path: str) -> None:
    """Raise SchemaError naming file and column if a column is missing, unexpected, or of another kind."""
    check_columns(found, path)
    check_names(found.names, wanted, path)
    for field in wanted.schema:
        if field.name not in found.names:
            continue
        kind = canonical_type(found.field(field.name).type)
        try:
            cast_exactly(pa.array([], kind), field.type)
        except CastRefused as refused:
            raise SchemaError(
                f"{path}: column {field.name!r} is {kind}, {'declared' if wanted.declared else 'in other files'} as "
                f"{field.type}: {refused}"
            ) from refused


def open_parquet(filesystem: pyarrow.fs.FileSystem, path: str, stack: ExitStack) -> pyarrow.parquet.ParquetFile:
    # INT96 is how Spark writes timestamps by default; they are microseconds
    return pyarrow.parquet.ParquetFile(
        stack.enter_context(filesystem.open_input_file(path)), coerce_int96_timestamp_unit="us"
    )


def read_parquet(
    filesystem: pyarrow.fs.FileSystem,
    path: str,
    wanted: Wanted,
    first: int,
    last: int | None,
    skip_rows: int,
    *,
    check: Callable[[], None],
    stack: ExitStack,
) -> tuple[Iterator[pa.RecordBatch], int]:
    """Return batches of the row groups from `first` up to `last` (exclusive; None: all), and how many rows are still to
    be skipped.

    Row groups that lie wholly within `skip_rows` are not read. `check` raises if the file has changed; it is called
    before the last batch is yielded.
    """
    with explained(path, "parquet"):
        file = open_parquet(filesystem, path, stack)
        check_parquet_schema(file.schema_arrow, wanted, path)
        count = file.metadata.num_row_groups
        groups = range(first, count if last is None else last)
        if groups.stop > count:
            raise StorageError(f"{path}: has {count} row groups, not {groups.stop}; it has changed")
        rows_before = sum(file.metadata.row_group(index).num_rows for index in range(first))
        while groups and skip_rows >= file.metadata.row_group(groups[0]).num_rows:
            skip_rows -= file.metadata.row_group(groups[0]).num_rows
            rows_before += file.metadata.row_group(groups[0]).num_rows
            groups = groups[1:]
    return _parquet_batches(file, path, wanted, groups, rows_before, check), skip_rows


def _parquet_batches(
    file: pyarrow.parquet.ParquetFile,
    path: str,
    wanted: Wanted,
    groups: range,
    rows_before: int,
    check: Callable[[], None],
) -> Iterator[pa.RecordBatch]:
    if not groups:
        return
    there = [name for name in wanted.schema.names if name in file.schema_arrow.names]
    ready: pa.RecordBatch | None = None
    with explained(path, "parquet"):
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=list(groups), columns=there):
            for name in wanted.required:
                nulls = batch.column(name).is_null()
                if batch.column(name).null_count:
                    row = rows_before + nulls.index(True).as_py() + 1
                    raise SchemaError(f"{path}, row {row}: column {name!r} {MISSES_VALUE}")
            rows_before += batch.num_rows
            if ready is not None:
                yield ready
            ready = conform(_filled(batch, wanted.schema), wanted.schema, path)
    check()
    if ready is not None:
        yield ready


def _filled(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Add the columns that the file lacks, filled with nulls."""
    for field in schema:
        if batch.schema.get_field_index(field.name) < 0:
            batch = batch.append_column(field, pa.nulls(batch.num_rows, field.type))
    return batch
