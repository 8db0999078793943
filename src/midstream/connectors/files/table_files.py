"""The data files of a lakehouse table: what a split has of one, and the reader of its rows.

Other than a plain file, one of a table lacks columns that were added later, and may lack those that are the same in all
of its rows. Its rows may have been deleted by a list of their positions. It never changes, so only its size is checked.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime, time, timedelta
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet

from midstream.connectors.common.batch_cursor import BatchCursor
from midstream.connectors.common.filesystem import file_info
from midstream.connectors.files.file_formats import WantedColumns, explained
from midstream.connectors.files.parquet import read_parquet
from midstream.engine.core.arrow_types import (
    is_list_array,
    is_list_of_any_length,
    is_map_array,
    is_struct_array,
    large_lists,
    map_entries,
    maps,
)
from midstream.engine.core.errors import DataError, StorageError
from midstream.engine.operators.source_api import SplitReader

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
UNKNOWN_SIZE = -1
"""The size of a file of which the table's metadata has none."""


class TableFile(msgspec.Struct, frozen=True, array_like=True):
    """The payload of a split.

    `path`: relative to the table's directory, or as its metadata has it.
    `since`: the version or snapshot that added the file.
    `constants`: the columns that the file does not contain, and their value as text; None for null.
    `deleted`: which rows are no longer part of the table, see `packed`.
    `deletes`: files with the positions of further such rows.
    `first`, `last`: row groups, up to, not including, `last`; -1 for all.
    `min_time_us`: that of the split, see `Split`.
    """

    path: str
    size: int
    since: int
    constants: dict[str, str | None] = {}
    deleted: bytes = b""
    deletes: tuple[str, ...] = ()
    first: int = 0
    last: int = -1
    min_time_us: int | None = None


def time_us_of(value: object) -> int | None:
    """Return a time that statistics have as text, in microseconds since 1970; None for anything else.

    Without a time zone it is in UTC, as everywhere in the engine.
    """
    if not isinstance(value, str):
        return None
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        return None
    return ((found if found.tzinfo is not None else found.replace(tzinfo=UTC)) - _EPOCH) // timedelta(microseconds=1)


def packed(deleted: np.ndarray[Any, Any]) -> bytes:
    """Return a boolean array, one value for each row of a file, in few bytes."""
    return zlib.compress(np.packbits(deleted).tobytes()) if deleted.any() else b""


def unpacked(deleted: bytes, row_count: int, path: str) -> np.ndarray[Any, Any]:
    """Return what `packed` was given, for a file with `row_count` rows. Raises StorageError for other bytes."""
    length = -(-row_count // 8)
    try:
        found = zlib.decompressobj().decompress(deleted, length + 1)
        if len(found) > length:
            raise ValueError(f"more than {row_count} rows")
    except (zlib.error, ValueError) as error:
        raise StorageError(f"{path}: the checkpoint is damaged where it has the deleted rows of the file") from error
    return np.unpackbits(np.frombuffer(found, np.uint8), count=min(row_count, 8 * len(found))).astype(np.bool_)


def deleted_rows_of(filesystem: pyarrow.fs.FileSystem, path: str, file: TableFile) -> np.ndarray[Any, Any] | None:
    """Return whether each row of a file was deleted, as the split says; None if none was."""
    return unpacked(file.deleted, row_count_of(filesystem, path), path) if file.deleted else None


def row_count_of(filesystem: pyarrow.fs.FileSystem, path: str) -> int:
    """Return how many rows a file has, deleted or not."""
    with explained(path, "parquet"):
        return int(pyarrow.parquet.read_metadata(path, filesystem=filesystem).num_rows)


def constant_text(value: pa.Scalar[Any]) -> str | None:
    """Return a value as `constant_of` reads it."""
    if not value.is_valid:
        return None
    if pa.types.is_large_binary(value.type) or pa.types.is_binary(value.type):
        return bytes(value.as_py()).hex()
    return str(value.cast(pa.large_string()).as_py())


def constant_of(text: str | None, kind: pa.DataType, where: str) -> pa.Scalar[Any]:
    """Return the value of a column that is the same in all rows of a file. Raises DataError if `text` is no such value."""
    if text is None:
        return pa.scalar(None, kind)
    try:
        if pa.types.is_large_binary(kind):
            return pa.scalar(bytes.fromhex(text), kind)
        if pa.types.is_timestamp(kind) and kind.tz is not None and not text.endswith("Z"):
            text = f"{text}Z"  # tables record moments in UTC, with or without saying so
        if pa.types.is_time(kind):
            return pa.scalar(time.fromisoformat(text), kind)
        return pa.scalar(text, pa.large_string()).cast(kind)
    except (pa.ArrowException, ValueError) as error:
        raise DataError(f"{where}: has {text!r} as the value of a column that is {kind}: {error}") from error


def open_table_file(
    filesystem: pyarrow.fs.FileSystem,
    path: str,
    file: TableFile,
    schema: pa.Schema,
    offset_rows: int,
    *,
    stored: Callable[[], Mapping[str, pa.Field[Any]]] | None = None,
    deleted: Callable[[], np.ndarray[Any, Any] | None] | None = None,
) -> SplitReader:
    """Open a reader of a file's rows that are still part of the table, from the `offset_rows`th of these on.

    `path`: where the file is in `filesystem`. `schema`: the columns to read. `stored`: returns those that the file has,
    under the names that they have there; by default all that are not constant. `deleted`: returns whether each row of the
    file was deleted; only for a split of the whole file.
    """
    check = partial(_check_unchanged, filesystem, path, file)
    check()
    if stored is None:
        columns: Mapping[str, pa.Field[Any]] = {
            field.name: field for field in schema if field.name not in file.constants
        }
    else:
        columns = {name: field for name, field in stored().items() if name in schema.names}
    constants = {
        field.name: constant_of(file.constants.get(field.name), field.type, path)
        for field in schema
        if field.name not in columns
    }
    wanted = WantedColumns(pa.schema(list(columns.values())), declared=True, may_lack_all=True)
    last = file.last if file.last >= 0 else None
    with ExitStack() as stack:
        gone = None if deleted is None else deleted()
        skipped = offset_rows if gone is None else 0
        batches, skip_rows = read_parquet(filesystem, path, wanted, file.first, last, skipped, check=check, stack=stack)
        close = stack.pop_all().close
    if gone is not None:
        batches, skip_rows = _kept(batches, gone), offset_rows
    if not wanted.schema.equals(schema):
        batches = _as_in_table(batches, schema, columns, constants)
    return BatchCursor(batches, where=path, offset_rows=offset_rows, skip_rows=skip_rows, on_close=close)


def _kept(batches: Iterator[pa.RecordBatch], deleted: np.ndarray[Any, Any]) -> Iterator[pa.RecordBatch]:
    row = 0
    for batch in batches:
        gone = deleted[row : row + batch.num_rows]
        row += batch.num_rows
        if gone.any():
            kept = np.ones(batch.num_rows, np.bool_)
            kept[: len(gone)] = ~gone  # there may be fewer: no row after them was deleted
            batch = batch.filter(pa.array(kept))
        if batch.num_rows:
            yield batch


def _as_in_table(
    batches: Iterator[pa.RecordBatch],
    schema: pa.Schema,
    stored: Mapping[str, pa.Field[Any]],
    constants: Mapping[str, pa.Scalar[Any]],
) -> Iterator[pa.RecordBatch]:
    """Yield the columns of the table: those of the file with the table's names, and constant ones."""
    for batch in batches:
        columns: list[pa.Array[Any]] = []
        for field in schema:
            value: Any = constants.get(field.name)
            if value is not None:
                columns.append(pa.repeat(value, batch.num_rows))
            else:
                columns.append(renamed(batch.column(stored[field.name].name), field.type))
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def renamed(column: pa.Array[Any], kind: pa.DataType) -> pa.Array[Any]:
    """Return a column with the names of fields of `kind`, which is of the same form."""
    if column.type == kind:
        return column
    if is_list_array(column) and is_list_of_any_length(kind):
        return large_lists(column, renamed(column.flatten(), kind.value_type))
    mask = column.is_null() if column.null_count else None
    if is_map_array(column) and pa.types.is_map(kind):
        offsets, keys, items = map_entries(column)
        return maps(offsets, renamed(keys, kind.key_type), renamed(items, kind.item_type), kind, mask)
    assert is_struct_array(column) and pa.types.is_struct(kind), (column.type, kind)
    parts = [renamed(part, field.type) for part, field in zip(column.flatten(), kind, strict=True)]
    return pa.StructArray.from_arrays(parts, names=[field.name for field in kind], mask=mask)


def _check_unchanged(filesystem: pyarrow.fs.FileSystem, path: str, file: TableFile) -> None:
    info = file_info(filesystem, path)
    if info.type != pyarrow.fs.FileType.File:
        raise StorageError(
            f"{path}: the file no longer exists; version {file.since} of the table added it. Keep what was vacuumed or "
            "expired for longer than a job may be behind; to begin again with the table as it is now, start with --fresh"
        )
    if file.size not in (info.size, UNKNOWN_SIZE):
        raise DataError(
            f"{path}: has {info.size} bytes, and {file.size} in the table's metadata; files of a table must never change"
        )
