"""Delta tables: which Arrow types they hold, whether a stream fits one, and what the log records about a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet

from midstream.core.batches import canonical_type
from midstream.core.errors import ConfigError, SchemaError

if TYPE_CHECKING:
    from deltalake import DeltaTable

_HARMLESS: Final = frozenset(
    ("appendOnly", "invariants", "timestampNtz", "deletionVectors", "v2Checkpoint", "vacuumProtocolCheck")
    + ("changeDataFeed", "checkConstraints", "generatedColumns", "columnMapping", "identityColumns", "domainMetadata")
)
"""Table features that require nothing of a writer that appends files, unless `_in_use` finds them in use."""
_NULL_FOLDER: Final = "__HIVE_DEFAULT_PARTITION__"
_STATS_TEXT_MAX: Final = 32
FOLDER_BYTES_MAX: Final = 255
"""The limit on the length of a name in a path on nearly all filesystems."""
_SIGNED: Final[dict[pa.DataType, pa.DataType]] = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
}
_PARTITIONING: Final = "text, integers, booleans and dates"


def delta_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the canonical Arrow type in which Delta stores `kind`; None if it cannot."""
    types = pa.types
    if kind in _SIGNED:
        return _SIGNED[kind]
    if types.is_float16(kind):
        return pa.float32()
    if types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if types.is_date(kind):
        return pa.date32()
    if types.is_large_string(kind) or types.is_string(kind):
        return pa.large_string()
    if types.is_large_binary(kind) or types.is_binary(kind) or types.is_fixed_size_binary(kind):
        return pa.large_binary()
    if types.is_decimal(kind):
        return pa.decimal128(kind.precision, kind.scale) if kind.precision <= 38 and kind.scale >= 0 else None
    if types.is_large_list(kind) or types.is_list(kind):
        inner = delta_type(kind.value_type)
        return None if inner is None else pa.large_list(inner)
    if types.is_struct(kind):
        fields = []
        for field in kind:
            inner = delta_type(field.type)
            if inner is None:
                return None
            fields.append(pa.field(field.name, inner))
        return pa.struct(fields)
    return kind if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) else None


def delta_schema(schema: pa.Schema, where: str) -> pa.Schema:
    """Return the schema of a table for this stream. Raises SchemaError naming the first column that Delta cannot hold."""
    fields = []
    for field in schema:
        kind = delta_type(field.type)
        if kind is None:
            raise SchemaError(
                f"{where}: column {field.name!r} is {field.type}, which Delta cannot hold; cast it, or leave it out"
            )
        fields.append(pa.field(field.name, kind))
    return pa.schema(fields)


def schema_of(table: DeltaTable) -> pa.Schema:
    """Return the table's schema in canonical types; NOT NULL columns are not nullable."""
    found = pa.schema(table.schema().to_arrow())  # type: ignore[arg-type]  # its stub knows no other library's schema
    return pa.schema([pa.field(field.name, canonical_type(field.type), field.nullable) for field in found])


def parquet_schema(filesystem: pyarrow.fs.FileSystem, path: str) -> pa.Schema:
    """Return the schema of a file in canonical types. Nulls were checked when it was written."""
    found = pyarrow.parquet.read_schema(path, filesystem=filesystem)
    return pa.schema([pa.field(field.name, canonical_type(field.type), nullable=False) for field in found])


def fitted(stream: pa.Schema, table: pa.Schema, where: str) -> pa.Schema:
    """Return the stream's columns in the table's types. Raises SchemaError for the first that does not fit."""
    wanted = delta_schema(stream, where)
    fields = []
    for field in wanted:
        index = table.get_field_index(field.name)
        if index < 0:
            raise SchemaError(
                f"{where}: the table has no column {field.name!r}; it has {', '.join(table.names)}. "
                "Add it there, or leave it out with select()"
            )
        there = table.field(index)
        if not _fits(field.type, there.type):
            raise SchemaError(
                f"{where}: column {field.name!r} is {stream.field(field.name).type} in the stream and {there.type} "
                "in the table; cast it"
            )
        fields.append(there)
    for there in table:
        if not there.nullable and there.name not in stream.names:
            raise SchemaError(
                f"{where}: column {there.name!r} of the table must have a value, but the stream does not have the column"
            )
    return pa.schema(fields)


def check_unchanged(files: pa.Schema, table: pa.Schema, where: str) -> None:
    """Raise SchemaError if `table` has changed and could no longer be read with files of the schema `files` in it."""
    for field in files:
        index = table.get_field_index(field.name)
        now = table.field(index) if index >= 0 else None
        if now is None or now.type != field.type or (field.nullable and not now.nullable):
            kind = "no longer exists" if now is None else f"is now {now.type}{'' if now.nullable else ' NOT NULL'}"
            raise SchemaError(
                f"{where}: column {field.name!r} was {field.type} in the table when files for it were written, and "
                f"{kind}; change it back until they are committed"
            )
    for there in table:
        if not there.nullable and there.name not in files.names:
            raise SchemaError(
                f"{where}: column {there.name!r} of the table must have a value now, and files written for it have none"
            )


def _fits(kind: pa.DataType, there: pa.DataType) -> bool:
    """Whether values of `kind` can be cast to `there`; integers that are too large fail when they arrive."""
    if pa.types.is_integer(kind) and pa.types.is_integer(there):
        return True
    return bool(kind == there or (pa.types.is_floating(kind) and there == pa.float64()))


def check_partitioning(columns: Sequence[str], schema: pa.Schema, where: str) -> None:
    """Raise ConfigError or SchemaError if rows cannot be partitioned by these columns."""
    for name in columns:
        if name not in schema.names:
            raise SchemaError(
                f"{where}: partition column {name!r} is not in the stream; it has {', '.join(schema.names)}"
            )
        kind = schema.field(name).type
        if not (
            pa.types.is_large_string(kind)
            or pa.types.is_integer(kind)
            or pa.types.is_boolean(kind)
            or pa.types.is_date(kind)
        ):
            raise SchemaError(f"{where}: partition column {name!r} is {kind}; supported types are {_PARTITIONING}")
    if columns and len(columns) == len(schema):
        raise ConfigError(f"{where}: all columns are partition columns; at least one must be written")


def check_features(table: DeltaTable, where: str) -> None:
    """Raise ConfigError for a table that requires more of its writers than adding files."""
    used = _in_use(table) | (set(table.protocol().writer_features or ()) - _HARMLESS)
    if used:
        raise ConfigError(
            f"{where}: the table uses {', '.join(sorted(used))}, which this sink does not support; write to a table "
            "without it"
        )


def _in_use(table: DeltaTable) -> set[str]:
    configuration = table.metadata().configuration
    found = {"check constraints" for name in configuration if name.startswith("delta.constraints.")}
    if configuration.get("delta.columnMapping.mode", "none") != "none":
        found.add("column mapping")
    if configuration.get("delta.enableRowTracking") == "true":
        found.add("row tracking")
    for field in json.loads(table.schema().to_json())["fields"]:
        names = field.get("metadata", {})
        found |= {"generated columns" for name in names if name == "delta.generationExpression"}
        found |= {"identity columns" for name in names if name.startswith("delta.identity.")}
        found |= {"invariants" for name in names if name == "delta.invariants"}
    return found


def partition_text(value: object) -> str | None:
    """Format a partition value as the log does."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return None if value is None or value == "" else str(value)


def first_too_long(partition: Mapping[str, str | None]) -> str | None:
    """Return the column whose value makes a folder name too long for file systems, if there is one."""
    folders = zip(partition, partition_folder(partition).split("/"), strict=False)
    return next((name for name, folder in folders if len(folder) > FOLDER_BYTES_MAX), None)


def partition_folder(partition: Mapping[str, str | None]) -> str:
    """Return the folder of files of this partition, with a trailing slash. Some readers take the values from it."""
    pieces = [
        f"{quote(name, safe='')}={_NULL_FOLDER if value is None else quote(value, safe='')}/"
        for name, value in partition.items()
    ]
    return "".join(pieces)


def statistics(filesystem: pyarrow.fs.FileSystem, path: str) -> str:
    """Return JSON for the log: rows, nulls and, where Parquet has them, least and greatest values, for data skipping."""
    metadata = pyarrow.parquet.read_metadata(path, filesystem=filesystem)
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    for i in range(metadata.num_columns):
        column = metadata.schema.column(i)
        if column.max_repetition_level or column.path != column.name:
            continue  # nested
        found = [each for group in groups if (each := group.column(i).statistics) is not None]
        if len(found) < len(groups):
            continue
        null_counts = [each.null_count for each in found if each.null_count is not None]
        if len(null_counts) < len(groups):
            continue
        nulls[column.name] = sum(null_counts)
        bounded = [each for each in found if each.has_min_max]
        if len(bounded) == sum(each.num_values > 0 for each in found) > 0:
            try:
                lows: list[Any] = [each.min for each in bounded]
                highs: list[Any] = [each.max for each in bounded]
            except (OverflowError, ValueError):
                continue  # times outside of the years 1 to 9999, for which the log has no form
            low, high = min(lows), max(highs)
            if _comparable(low) and _comparable(high):
                least[column.name], most[column.name] = _json_value(low), _json_value(high)
    counted = {"numRecords": metadata.num_rows, "minValues": least, "maxValues": most, "nullCount": nulls}
    return json.dumps(counted)


def _comparable(value: object) -> bool:
    """Whether the value can be a bound.

    Floats cannot: Parquet ignores NaN, which readers consider the greatest. Nor can long strings: the log would grow.
    """
    if isinstance(value, str):
        return len(value) <= _STATS_TEXT_MAX
    return isinstance(value, (int, date)) and not isinstance(value, bool)


def _json_value(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.replace(tzinfo=None).isoformat(timespec="microseconds") + ("Z" if value.tzinfo else "")
    return value.isoformat() if isinstance(value, date) else value
