"""Delta tables: which Arrow types they hold, whether a stream fits one, and what the log records about a file."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from math import isinf
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet

from midstream.connectors.common.table_columns import has_not_null, stored_leaf, stored_schema, stored_type
from midstream.connectors.delta.column_mapping import arrow_schema
from midstream.connectors.files.folder_columns import NULL_FOLDER
from midstream.engine.core.arrow_types import outside_of_years
from midstream.engine.core.batches import canonical_type
from midstream.engine.core.errors import ConfigError, SchemaError

if TYPE_CHECKING:
    from deltalake import DeltaTable

_HARMLESS: Final = frozenset(
    ("appendOnly", "invariants", "timestampNtz", "deletionVectors", "v2Checkpoint", "vacuumProtocolCheck")
    + ("variantType", "variantType-preview", "variantShredding", "variantShredding-preview")
    + ("typeWidening", "typeWidening-preview", "inCommitTimestamp")
    + ("changeDataFeed", "checkConstraints", "generatedColumns", "columnMapping", "identityColumns", "domainMetadata")
)
"""Table features that require nothing of a writer that appends files, unless `_in_use` finds them in use."""
_UNFIT_FOR_FOLDERS: Final = re.compile(r"[/=\\\x00-\x1f\x7f]")
_STATS_TEXT_MAX: Final = 32
"""The length of text in the log. Longer text is cut, so that the log does not grow."""
_LAST_CHARACTER: Final = "\U0010ffff"
FOLDER_BYTES_MAX: Final = 255
"""The limit on the length of a name in a path on nearly all filesystems."""
_PARTITIONING: Final = "text, integers, booleans and dates"


def delta_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the canonical Arrow type in which Delta stores `kind`; None if it cannot."""
    return stored_type(kind, stored_leaf)


def delta_schema(schema: pa.Schema, where: str) -> pa.Schema:
    """Return the schema of a table for this stream. Raises SchemaError naming the first column that Delta cannot hold."""
    return stored_schema(schema, delta_type, "Delta", where)


def schema_of(table: DeltaTable) -> pa.Schema:
    """Return the table's schema in canonical types; NOT NULL columns are not nullable.

    A nested type with a NOT NULL field keeps that mark, so that no column of a stream has the same type: the sink does not
    check for nulls inside of a column.
    """
    fields = []
    for field in arrow_schema(table.schema().to_json()):
        kind = field.type if has_not_null(field.type) else canonical_type(field.type)
        fields.append(pa.field(field.name, kind, field.nullable))
    return pa.schema(fields)


def parquet_schema(filesystem: pyarrow.fs.FileSystem, path: str) -> pa.Schema:
    """Return the schema of a file in canonical types. Nulls were checked when it was written."""
    found = pyarrow.parquet.read_schema(path, filesystem=filesystem)
    return pa.schema([pa.field(field.name, canonical_type(field.type), nullable=False) for field in found])


def check_unchanged(files: pa.Schema, table: pa.Schema, names: Mapping[str, str], where: str) -> None:
    """Raise SchemaError if `table` has changed and could no longer be read with files of the schema `files` in it.

    `names`: those of columns by their names in files, if they differ.
    """
    for field in files:
        index = table.get_field_index(field.name)
        now = table.field(index) if index >= 0 else None
        if now is None or not _is_read_as(field.type, now.type) or (field.nullable and not now.nullable):
            kind = "no longer exists" if now is None else f"is now {now.type}{'' if now.nullable else ' NOT NULL'}"
            raise SchemaError(
                f"{where}: column {names.get(field.name, field.name)!r} was {field.type} in the table when files for it were written, and "
                f"{kind}; change it back until they are committed"
            )
    for there in table:
        if not there.nullable and there.name not in files.names:
            raise SchemaError(
                f"{where}: column {names.get(there.name, there.name)!r} of the table must have a value now, and files written for it have none"
            )


def _is_read_as(kind: pa.DataType, now: pa.DataType) -> bool:
    """Whether readers find values of `kind` in a file as `now`: the same, but for fields of structs that it lacks."""
    if pa.types.is_struct(kind) and pa.types.is_struct(now) and not has_not_null(now):
        inner = {field.name: field.type for field in now}
        return all(field.name in inner and _is_read_as(field.type, inner[field.name]) for field in kind)
    if pa.types.is_large_list(kind) and pa.types.is_large_list(now):
        return _is_read_as(kind.value_type, now.value_type)
    return kind == now


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
    if configuration.get("delta.enableRowTracking") == "true":
        found.add("row tracking")
    if configuration.get("delta.enableInCommitTimestamps") == "true":
        found.add("in-commit timestamps")
    described = table.schema().to_json()
    if re.search(r'"type":\s*"variant"|"(?:elementType|keyType|valueType)":\s*"variant"', described):
        found.add("columns of the type variant")
    if '"delta.typeChanges"' in described:
        found.add("columns whose type was widened")
    for field in json.loads(described)["fields"]:
        names = field.get("metadata", {})
        found |= {"generated columns" for name in names if name == "delta.generationExpression"}
        found |= {"identity columns" for name in names if name.startswith("delta.identity.")}
        found |= {"invariants" for name in names if name == "delta.invariants"}
    return found


def first_beyond_years(column: pa.Array[Any]) -> int | None:
    """Return the first row of a date column whose year is not one of 1 to 9999, or None if there is none."""
    index = int(pc.index(outside_of_years(column), pa.scalar(True)).as_py())
    return None if index < 0 else index


def partition_text(value: object) -> str | None:
    """Format a partition value as the log does."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return None if value is None or value == "" else str(value)


def first_too_long(partition: Mapping[str, str | None]) -> str | None:
    """Return the column whose value makes a folder name too long for file systems, if there is one."""
    folders = zip(partition, partition_folder(partition).split("/"), strict=False)
    return next((name for name, folder in folders if len(folder.encode()) > FOLDER_BYTES_MAX), None)


def is_fit_for_folders(name: str) -> bool:
    """Whether a partition column's name is in the name of its folders as it is, as deltalake writes it."""
    return _UNFIT_FOR_FOLDERS.search(name) is None


def partition_folder(partition: Mapping[str, str | None]) -> str:
    """Return the folder of files of this partition, with a trailing slash. Some readers take the values from it.

    Polars wants the column's name as it is, as deltalake writes it, and the value encoded.
    """
    pieces = [
        f"{_UNFIT_FOR_FOLDERS.sub(lambda found: quote(found[0], safe=''), name)}="
        f"{NULL_FOLDER if value is None else quote(value, safe='')}/"
        for name, value in partition.items()
    ]
    return "".join(pieces)


def statistics(filesystem: pyarrow.fs.FileSystem, path: str, schema: pa.Schema, unbounded: Collection[str]) -> str:
    """Return JSON for the log: rows, nulls, and least and greatest values, for data skipping.

    `schema`: the table's columns without its partition columns; those that the file lacks are null in all its rows.
    `unbounded`: columns for which Parquet's least and greatest values do not hold.

    deltalake takes a missing bound for NULL, as soon as there are bounds of another column, and no row is found by a
    comparison with that. So a file has bounds for all of its columns, or none at all. Of structs and of columns that
    are all null it expects none, but an entry for the struct.
    """
    metadata = pyarrow.parquet.read_metadata(path, filesystem=filesystem)
    columns = [metadata.schema.column(i) for i in range(metadata.num_columns)]
    leaves = {column.name: i for i, column in enumerate(columns) if column.path == column.name}
    bounds: dict[str, tuple[Any, Any] | None] = {}
    nulls: dict[str, int] = {}
    for field in schema:
        if pa.types.is_struct(field.type):
            bounds[field.name] = ({}, {})
        elif field.name not in leaves:
            if not pa.types.is_nested(field.type):
                nulls[field.name] = metadata.num_rows
        else:
            index = leaves[field.name]
            chunks = [_statistics_of(metadata.row_group(i).column(index)) for i in range(metadata.num_row_groups)]
            nulls[field.name] = metadata.num_rows - sum(chunk.num_values for chunk in chunks)
            if nulls[field.name] < metadata.num_rows and not pa.types.is_large_binary(field.type):
                bounds[field.name] = None if field.name in unbounded else _bounds(chunks)
    counted = {"numRecords": metadata.num_rows, "nullCount": nulls}
    found = {name: pair for name, pair in bounds.items() if pair is not None}
    if len(found) == len(bounds):
        counted["minValues"] = {name: low for name, (low, _) in found.items()}
        counted["maxValues"] = {name: high for name, (_, high) in found.items()}
    return msgspec.json.encode(counted).decode()


def _statistics_of(chunk: pyarrow.parquet.ColumnChunkMetaData) -> pyarrow.parquet.Statistics:
    found = chunk.statistics
    assert found is not None, "the sink's files have statistics of all columns"
    return found


def _bounds(chunks: Sequence[pyarrow.parquet.Statistics]) -> tuple[Any, Any] | None:
    """Return a lower and an upper bound as JSON; None if Parquet has none, or JSON has no form for them."""
    filled = [chunk for chunk in chunks if chunk.num_values > 0]
    if not all(chunk.has_min_max for chunk in filled):
        return None  # for example if they are long
    try:
        lows: list[Any] = [chunk.min for chunk in filled]
        highs: list[Any] = [chunk.max for chunk in filled]
    except (OverflowError, ValueError):
        return None  # times outside of the years 1 to 9999
    low, high = min(lows), max(highs)
    if isinstance(high, str):
        most = high
        low, high = low[:_STATS_TEXT_MAX], most[:_STATS_TEXT_MAX]
        while high < most:
            high += _LAST_CHARACTER
    return _json_value(low), _json_value(high)


def _json_value(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.replace(tzinfo=None).isoformat(timespec="microseconds") + ("Z" if value.tzinfo else "")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return msgspec.Raw(f"{value:f}".encode())  # a number, with all its digits
    if isinstance(value, float) and isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value
