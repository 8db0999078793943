"""The columns of a stream and of a lakehouse table: which types the table holds, and whether the stream fits it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from midstream.engine.core.batches import first_null
from midstream.engine.core.errors import SchemaError

_SIGNED: Final[dict[pa.DataType, pa.DataType]] = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
}


def stored_leaf(kind: pa.DataType) -> pa.DataType | None:
    """Return the canonical type in which tables store a type without inner types; None if they cannot."""
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
    return kind if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) else None


def stored_type(kind: pa.DataType, leaf: Callable[[pa.DataType], pa.DataType | None]) -> pa.DataType | None:
    """Return the canonical type in which a table stores `kind`; None if it cannot. `leaf`: of types without inner ones."""
    if pa.types.is_large_list(kind) or pa.types.is_list(kind):
        inner = stored_type(kind.value_type, leaf)
        return None if inner is None else pa.large_list(inner)
    if pa.types.is_struct(kind):
        fields = []
        for field in kind:
            inner = stored_type(field.type, leaf)
            if inner is None:
                return None
            fields.append(pa.field(field.name, inner))
        return pa.struct(fields) if fields else None
    return leaf(kind)


def stored_schema(
    schema: pa.Schema, stored: Callable[[pa.DataType], pa.DataType | None], system: str, where: str
) -> pa.Schema:
    """Return the schema of a table for this stream. Raises SchemaError naming the first column that `system` cannot
    hold, or that it takes for the same as another.
    """
    fields = []
    for field in schema:
        kind = stored(field.type)
        if kind is None:
            raise SchemaError(
                f"{where}: column {field.name!r} is {field.type}, which {system} cannot hold; cast it, or leave it out"
            )
        fields.append(pa.field(field.name, kind))
    _check_names(fields, system, where)
    return pa.schema(fields)


def _check_names(fields: Iterable[pa.Field[Any]], system: str, where: str, inside: str = "") -> None:
    """Raise SchemaError for two columns, or fields of a struct, that differ only by upper and lower case."""
    seen: dict[str, str] = {}
    for field in fields:
        same, name = seen.get(field.name.lower()), f"{inside}{field.name}"
        if same is not None:
            raise SchemaError(
                f"{where}: columns {same!r} and {name!r} are the same to {system}, which ignores upper and lower case; "
                "rename one of them, or leave it out with select()"
            )
        seen[field.name.lower()] = name
        kind = field.type
        while pa.types.is_large_list(kind):
            kind = kind.value_type
        if pa.types.is_struct(kind):
            _check_names(kind, system, where, f"{name}.")


def has_not_null(kind: pa.DataType) -> bool:
    """Whether a field within a nested type must have a value."""
    inner = [kind.field(i) for i in range(kind.num_fields)]
    return any(not field.nullable or has_not_null(field.type) for field in inner)


def fitted(stream: pa.Schema, stored: pa.Schema, table: pa.Schema, where: str) -> pa.Schema:
    """Return the stream's columns in the table's types. Raises SchemaError for the first that does not fit.

    `stored`: the stream's columns in the types of a table that would be made for it.
    """
    fields = []
    for field in stored:
        index = table.get_field_index(field.name)
        if index < 0:
            raise SchemaError(
                f"{where}: the table has no column {field.name!r}; it has {', '.join(table.names)}. "
                "Add it there, or leave it out with select()"
            )
        there = table.field(index)
        if has_not_null(there.type):
            raise SchemaError(
                f"{where}: column {field.name!r} is {there.type} in the table, and this sink does not check for nulls "
                "inside of a column; make its fields nullable there, or leave it out with select()"
            )
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


def _fits(kind: pa.DataType, there: pa.DataType) -> bool:
    """Whether values of `kind` can be cast to `there`; integers that are too large fail when they arrive."""
    if pa.types.is_integer(kind) and pa.types.is_integer(there):
        return True
    return bool(kind == there or (pa.types.is_floating(kind) and there == pa.float64()))


def nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(field.name, field.type) for field in schema])


def check_required(batch: pa.RecordBatch, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """Return `batch`. Raises SchemaError if a column that must have values has a null."""
    for field, column in zip(schema, batch.columns, strict=True):
        if not field.nullable and first_null(column) is not None:
            raise SchemaError(f"{where}: column {field.name!r} must have a value, but it is null in a row")
    return batch


def nan_columns(batch: pa.RecordBatch) -> set[str]:
    """Return the columns with a NaN, which Parquet's least and greatest values ignore."""
    floats = [field.name for field in batch.schema if pa.types.is_floating(field.type)]
    return {name for name in floats if pc.any(pc.is_nan(batch.column(name))).as_py()}
