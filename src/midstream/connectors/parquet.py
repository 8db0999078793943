"""Parquet files: their columns, their row groups, and the rows of some of these.

Everything here blocks, and runs on an I/O pool (or on the driver, to infer a schema).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet

from midstream.connectors.formats import check_names, explained
from midstream.core.batches import canonical_type, conform
from midstream.core.casts import CastRefused, cast_exactly
from midstream.core.errors import SchemaError, StorageError

_BATCH_ROWS = 131_072


def parquet_row_groups(
    filesystem: pyarrow.fs.FileSystem, path: str, schema: pa.Schema, declared: bool
) -> list[tuple[int, int]]:
    """Rows and bytes of each row group, after checking the file's columns against `schema`."""
    with explained(path, "parquet"), ExitStack() as stack:
        file = open_parquet(filesystem, path, stack)
        check_parquet_schema(file.schema_arrow, schema, declared, path)
        groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
        return [(group.num_rows, group.total_byte_size) for group in groups]


def check_parquet_schema(found: pa.Schema, schema: pa.Schema, declared: bool, path: str) -> None:
    """Raises SchemaError naming file and column when a column is missing, unexpected, or of another kind."""
    check_names(found.names, schema, declared, path)
    for field in schema:
        kind = canonical_type(found.field(field.name).type)
        try:
            cast_exactly(pa.array([], kind), field.type)
        except CastRefused as refused:
            raise SchemaError(
                f"{path}: column {field.name!r} is {kind}, {'declared' if declared else 'in other files'} as "
                f"{field.type}: {refused}"
            ) from refused


def open_parquet(filesystem: pyarrow.fs.FileSystem, path: str, stack: ExitStack) -> pyarrow.parquet.ParquetFile:
    # INT96 is how Spark writes timestamps by default; they are microseconds
    return pyarrow.parquet.ParquetFile(
        stack.enter_context(filesystem.open_input_file(path)), coerce_int96_timestamp_unit="us"
    )


def read_parquet(
    filesystem: pyarrow.fs.FileSystem, path: str, schema: pa.Schema, groups: range, skip_rows: int, stack: ExitStack
) -> tuple[Iterator[pa.RecordBatch], int]:
    """Batches of these row groups, and how many of their first rows are still to be left out.

    Row groups that lie wholly within `skip_rows` are not read.
    """
    with explained(path, "parquet"):
        file = open_parquet(filesystem, path, stack)
        if groups.stop > file.metadata.num_row_groups:
            raise StorageError(
                f"{path}: has {file.metadata.num_row_groups} row groups, not {groups.stop}; it has changed"
            )
        while groups and skip_rows >= file.metadata.row_group(groups[0]).num_rows:
            skip_rows -= file.metadata.row_group(groups[0]).num_rows
            groups = groups[1:]
    return _parquet_batches(file, path, schema, groups), skip_rows


def _parquet_batches(
    file: pyarrow.parquet.ParquetFile, path: str, schema: pa.Schema, groups: range
) -> Iterator[pa.RecordBatch]:
    if not groups:
        return
    with explained(path, "parquet"):
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=list(groups), columns=schema.names):
            yield conform(batch, schema, path)
