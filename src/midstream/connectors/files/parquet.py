"""Parquet files: their columns, their row groups, and the rows of some of these.

Everything here blocks, and runs on an I/O pool (or on the driver, to infer a schema).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet

from midstream.connectors.files.field_ids import id_of
from midstream.connectors.files.file_formats import MISSES_VALUE, WantedColumns, check_names, explained
from midstream.engine.core.arrow_types import (
    is_list_array,
    is_list_of_any_length,
    is_map_array,
    is_struct_array,
    large_lists,
    leaves,
    map_entries,
    maps,
    nulls,
)
from midstream.engine.core.batches import canonical_type, conform
from midstream.engine.core.casts import CastRefused, cast_exactly
from midstream.engine.core.errors import DataError, SchemaError
from midstream.engine.core.schemas import check_distinct
from midstream.engine.operators.event_time_column import FIRST_TIME_US, LAST_TIME_US

_BATCH_ROWS = 131_072
_NS_YEARS_US = 9_200_000_000_000_000
"""How far from 1970 times can be for nanoseconds in 64 bits; about 291 years."""


def checked_time_us(time_us: int | None) -> int | None:
    """Return a time of statistics, or None if no row can have it as its event time: such statistics are wrong."""
    return time_us if time_us is not None and FIRST_TIME_US <= time_us <= LAST_TIME_US else None


class RowGroup(NamedTuple):
    rows: int
    bytes: int
    min_time_us: int | None = None
    """The earliest time in a column, in microseconds since 1970; None if it is not known. The group may have no row."""


def parquet_row_groups(
    filesystem: pyarrow.fs.FileSystem, path: str, wanted: WantedColumns, time: pa.Field[Any] | None = None
) -> list[RowGroup]:
    """Return the row groups, after checking the file's columns against `wanted`. `time`: the column of `min_time_us`, by its
    id if it has one.
    """
    with explained(path, "parquet"), ExitStack() as stack:
        file = open_parquet(filesystem, path, stack)
        check_parquet_schema(_stored_schema(file, wanted), wanted, path)
        groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
        minima = _min_times_us(file, time) if time is not None else [None] * len(groups)
        return [
            RowGroup(group.num_rows, group.total_byte_size, min_us)
            for group, min_us in zip(groups, minima, strict=True)
        ]


def earliest_us(groups: Sequence[RowGroup]) -> int | None:
    """Return the earliest time in row groups; None if it is not known."""
    times = [group.min_time_us for group in groups if group.rows]
    return None if None in times else min((time for time in times if time is not None), default=None)


def _min_times_us(file: pyarrow.parquet.ParquetFile, time: pa.Field[Any]) -> list[int | None]:
    """Return the earliest time of each row group by its statistics, which INT96 has none of."""
    groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
    unknown: list[int | None] = [None] * len(groups)
    found = [field for field in file.schema_arrow if _is_same(field, time)]
    if len(found) != 1 or not pa.types.is_timestamp(found[0].type) or not pa.types.is_timestamp(time.type):
        return unknown
    paths = [file.schema.column(index).path for index in range(len(file.schema))]
    if paths.count(found[0].name) != 1 or (found[0].type.tz is None) is not (time.type.tz is None):
        return unknown
    to_us = {"ms": lambda value: value * 1000, "us": lambda value: value, "ns": lambda value: value // 1000}
    minima: list[int | None] = []
    for group in groups:
        column = group.column(paths.index(found[0].name))
        statistics = column.statistics if column.is_stats_set and column.physical_type == "INT64" else None
        if statistics is None or not statistics.has_min_max:
            minima.append(None)
        else:
            minima.append(checked_time_us(to_us[found[0].type.unit](statistics.min_raw)))
    return minima


def _is_same(field: pa.Field[Any], wanted: pa.Field[Any]) -> bool:
    wanted_id = id_of(wanted)
    return field.name == wanted.name if wanted_id is None else id_of(field) == wanted_id


def check_parquet_schema(found: pa.Schema, wanted: WantedColumns, path: str) -> None:
    """Raise SchemaError naming file and column if a column is missing, unexpected, or of another kind."""
    check_distinct(found.names, path)
    check_names(found.names, wanted, path)
    for field in wanted.schema:
        if field.name not in found.names:
            continue
        kind = canonical_type(found.field(field.name).type)
        try:
            empty = pa.array([], kind)
            cast_exactly(_with_fields(empty, field.type, wanted) if wanted.declared else empty, field.type)
        except CastRefused as refused:
            raise SchemaError(
                f"{path}: column {field.name!r} is {kind}, {'declared' if wanted.declared else 'in other files'} as "
                f"{field.type}: {refused}"
            ) from refused


def open_parquet(
    filesystem: pyarrow.fs.FileSystem, path: str, stack: ExitStack, int96_unit: str = "us"
) -> pyarrow.parquet.ParquetFile:
    """Open a file. `int96_unit`: that of INT96 timestamps, which hold nanoseconds. Spark writes whole microseconds as such
    by default, of years for which nanoseconds in 64 bits do not suffice.
    """
    return pyarrow.parquet.ParquetFile(
        stack.enter_context(filesystem.open_input_file(path)),
        coerce_int96_timestamp_unit=int96_unit,
        page_checksum_verification=True,
    )


def read_parquet(
    filesystem: pyarrow.fs.FileSystem,
    path: str,
    wanted: WantedColumns,
    first: int,
    last: int | None,
    skip_rows: int,
    *,
    columns: Sequence[str] | None = None,
    check: Callable[[], None],
    stack: ExitStack,
) -> tuple[Iterator[pa.RecordBatch], int]:
    """Return batches of the row groups from `first` up to `last` (exclusive; None: all), and how many rows are still to
    be skipped.

    `columns`: those of `wanted` that the batches have; None: all. The file's columns are checked against `wanted` anyway.
    Row groups that lie wholly within `skip_rows` are not read. `check` raises if the file has changed; it is called
    before the last batch is yielded.
    """
    with explained(path, "parquet"):
        file = open_parquet(filesystem, path, stack)
        stored = _stored_schema(file, wanted)
        check_parquet_schema(stored, wanted, path)
        wanted = wanted if columns is None else wanted.only(columns)
        count = file.metadata.num_row_groups
        groups = range(first, count if last is None else last)
        if groups.start < 0 or max(groups.start, groups.stop) > count:
            raise DataError(f"{path}: has {count} row groups, not {max(groups.start, groups.stop)}; it has changed")
        rows_before = sum(file.metadata.row_group(index).num_rows for index in range(first))
        while groups and skip_rows >= file.metadata.row_group(groups[0]).num_rows:
            skip_rows -= file.metadata.row_group(groups[0]).num_rows
            rows_before += file.metadata.row_group(groups[0]).num_rows
            groups = groups[1:]
        times = _int96_columns(file, wanted.schema.names)
        exact = open_parquet(filesystem, path, stack, "ns") if times else None
    batches = _checked_times(file, exact, path, stored, wanted, groups, times)
    made = _parquet_batches(batches, path, wanted, groups, rows_before, check)
    return made if columns is None else (batch.select(columns) for batch in made), skip_rows


def _int96_columns(file: pyarrow.parquet.ParquetFile, names: Sequence[str]) -> list[str]:
    """Return those of `names` whose columns are of INT96, or contain it."""
    columns = (file.schema.column(index) for index in range(len(file.schema)))
    paths = [column.path for column in columns if column.physical_type == "INT96"]
    return [name for name in names if any(path == name or path.startswith(f"{name}.") for path in paths)]


def _stored_schema(file: pyarrow.parquet.ParquetFile, wanted: WantedColumns) -> pa.Schema:
    """Return the file's schema. INT96 is an instant (Spark writes timestamps so) that cannot be marked as UTC: it has the
    zone that is wanted.
    """
    schema = file.schema_arrow
    for name in _int96_columns(file, wanted.schema.names):
        index = schema.get_field_index(name)
        if index >= 0:  # else there are several of this name, which is refused
            field = schema.field(index)
            schema = schema.set(index, field.with_type(_in_zone(field.type, wanted.schema.field(name).type)))
    return schema


def _in_zone(found: pa.DataType, kind: pa.DataType) -> pa.DataType:
    """Return the type `found` with the zones of `kind`, where it has none."""
    types = pa.types
    if types.is_timestamp(found) and types.is_timestamp(kind):
        return pa.timestamp(found.unit, found.tz or kind.tz)
    if is_list_of_any_length(found) and is_list_of_any_length(kind):
        value = found.value_field.with_type(_in_zone(found.value_type, kind.value_type))
        return pa.large_list(value) if types.is_large_list(found) else pa.list_(value)
    if types.is_map(found) and types.is_map(kind):
        return pa.map_(_in_zone(found.key_type, kind.key_type), _in_zone(found.item_type, kind.item_type))
    if types.is_struct(found) and types.is_struct(kind):
        wanted = {field.name: field.type for field in kind}
        return pa.struct([field.with_type(_in_zone(field.type, wanted.get(field.name, field.type))) for field in found])
    return found


def _check_whole_us(path: str, name: str, in_us: pa.Array[Any], in_ns: pa.Array[Any]) -> None:
    us, ns = in_us.cast(pa.int64()), in_ns.cast(pa.int64())
    has_ns = pc.less(pc.abs(us), pa.scalar(_NS_YEARS_US, pa.int64()))  # of other years the nanoseconds are wrong
    lost = pc.and_(has_ns, pc.not_equal(pc.multiply(pc.if_else(has_ns, us, pa.scalar(0, pa.int64())), 1000), ns))
    if pc.any(lost).as_py():
        value = in_ns.filter(lost)[0].value
        raise SchemaError(
            f"{path}: column {name!r} has the time {value} ns since 1970 as INT96, and only whole microseconds of INT96 can be "
            "read; write the file with 64-bit timestamps"
        )


def _checked_times(
    file: pyarrow.parquet.ParquetFile,
    exact: pyarrow.parquet.ParquetFile | None,
    path: str,
    stored: pa.Schema,
    wanted: WantedColumns,
    groups: range,
    times: list[str],
) -> Iterator[pa.RecordBatch]:
    """Yield batches of the columns of `wanted`. Raises SchemaError for a time with a part of a microsecond, which INT96 can
    hold and this file was opened without: `exact` is the same file with them, unless no column of `times` is INT96.
    `stored`: the file's schema.
    """
    there = [name for name in wanted.schema.names if name in file.schema_arrow.names]
    batches = file.iter_batches(_BATCH_ROWS, row_groups=list(groups), columns=there, use_threads=False)
    if exact is None:
        yield from (batch.select(there) for batch in batches)  # for "a.b", pyarrow returns the struct "a" too
        return
    for batch, fine in zip(
        batches,
        exact.iter_batches(_BATCH_ROWS, row_groups=list(groups), columns=times, use_threads=False),
        strict=True,
    ):
        for name in times:
            for in_us, in_ns in zip(leaves(batch.column(name)), leaves(fine.column(name)), strict=True):
                if in_us.type != in_ns.type:
                    _check_whole_us(path, name, in_us, in_ns)
            column = batch.column(name).cast(stored.field(name).type)
            batch = batch.set_column(batch.schema.get_field_index(name), stored.field(name), column)
        yield batch.select(there)


def _parquet_batches(
    batches: Iterator[pa.RecordBatch],
    path: str,
    wanted: WantedColumns,
    groups: range,
    rows_before: int,
    check: Callable[[], None],
) -> Iterator[pa.RecordBatch]:
    if not groups:
        return
    ready: pa.RecordBatch | None = None
    with explained(path, "parquet"):
        for batch in batches:
            for name in wanted.required:
                nulls = batch.column(name).is_null()
                if batch.column(name).null_count:
                    row = rows_before + nulls.index(True).as_py() + 1
                    raise SchemaError(f"{path}, row {row}: column {name!r} {MISSES_VALUE}")
            rows_before += batch.num_rows
            if ready is not None:
                yield ready
            ready = _conforming(_filled(batch, wanted), wanted, path)
    check()
    if ready is not None:
        yield ready


def _conforming(batch: pa.RecordBatch, wanted: WantedColumns, path: str) -> pa.RecordBatch:
    try:
        return conform(batch, wanted.schema, path)
    except SchemaError as error:
        if wanted.declared:
            raise
        message = str(error).replace(", declared as ", ", in other files as ")
        raise SchemaError(f"{message}; declare schema= with a type that holds all values") from error


def _filled(batch: pa.RecordBatch, wanted: WantedColumns) -> pa.RecordBatch:
    """Add the columns that the file lacks, filled with nulls, and give structs the fields that are declared."""
    for field in wanted.schema:
        index = batch.schema.get_field_index(field.name)
        if index < 0:
            batch = batch.append_column(field, pa.nulls(batch.num_rows, field.type))
        elif wanted.declared and pa.types.is_nested(field.type):
            batch = batch.set_column(index, field.name, _with_fields(batch.column(index), field.type, wanted))
    return batch


def _with_fields(column: pa.Array[Any], kind: pa.DataType, wanted: WantedColumns) -> pa.Array[Any]:
    """Treat the fields of structs like columns: ones that are not in `kind` are left out, and missing ones are null.

    A struct that has none of the fields stays as it is, and does not fit, unless `wanted.may_lack_all`.
    """
    if is_list_array(column) and is_list_of_any_length(column.type) and is_list_of_any_length(kind):
        return large_lists(column, _with_fields(column.flatten(), kind.value_type, wanted))
    if is_map_array(column) and pa.types.is_map(kind):
        offsets, keys, items = map_entries(column)
        keys, items = _with_fields(keys, kind.key_type, wanted), _with_fields(items, kind.item_type, wanted)
        mask = column.is_null() if column.null_count else None
        return maps(offsets, keys, items, pa.map_(keys.type, items.type), mask)
    if not (is_struct_array(column) and pa.types.is_struct(kind)):
        return column
    names = [field.name for field in column.type]
    there = [field.name for field in kind if names.count(field.name) == 1]
    may_lack_all = wanted.may_lack_all and kind.num_fields > 0
    if not (there or may_lack_all) or any(names.count(field.name) > 1 for field in kind):
        return column
    parts = dict(zip(names, column.flatten(), strict=True))
    columns = [
        _with_fields(parts[field.name], field.type, wanted) if field.name in parts else nulls(len(column), field.type)
        for field in kind
    ]
    mask = column.is_null() if column.null_count else None
    return pa.StructArray.from_arrays(columns, names=[field.name for field in kind], mask=mask)
