"""The columns of a stream and of a lakehouse table: which types the table holds, and whether the stream fits it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from midstream.engine.core.arrow_types import is_list_array, is_list_of_any_length, is_struct_array, large_lists
from midstream.engine.core.batches import conform, first_null
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


def fitted(
    stream: pa.Schema, stored: pa.Schema, table: pa.Schema, where: str, *, is_keyed: bool, evolves: bool
) -> pa.Schema:
    """Return the stream's columns in the table's types. Raises SchemaError for the first that does not fit.

    `stored`: the stream's columns in the types of a table that would be made for it.
    `is_keyed`: rows replace others, whose structs have no fields that the stream lacks.
    `evolves`: columns that the table lacks were added, as far as that is possible.
    """
    fields = []
    for field in stored:
        index = table.get_field_index(field.name)
        if index < 0:
            raise SchemaError(
                f"{where}: the table has no column {field.name!r}; it has {', '.join(table.names)}. "
                f"Add it there{'' if evolves else ' (evolve=True does)'}, or leave it out with select()"
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
        lacking = _lacking(field.type, there.type, field.name) if is_keyed else None
        if lacking is not None:
            raise SchemaError(
                f"{where}: column {field.name!r} of the table has the field {lacking!r}, which the stream lacks, and rows "
                "that replace others by their key would delete its values; add the field to the stream's column"
            )
        fields.append(there)
    for there in table:
        if not there.nullable and there.name not in stream.names:
            raise SchemaError(
                f"{where}: column {there.name!r} of the table must have a value, but the stream does not have the column"
            )
    return pa.schema(fields)


def _fits(kind: pa.DataType, there: pa.DataType) -> bool:
    """Whether values of `kind` can be cast to `there`; integers that are too large fail when they arrive.

    A struct fits if all of its fields do: those that it lacks become null, see `as_stored`.
    """
    types = pa.types
    if types.is_struct(kind) and types.is_struct(there):
        inner = {field.name: field.type for field in there}
        return all(field.name in inner and _fits(field.type, inner[field.name]) for field in kind)
    if types.is_large_list(kind) and types.is_large_list(there):
        return _fits(kind.value_type, there.value_type)
    if types.is_decimal(kind) and types.is_decimal(there):
        return bool(kind.scale == there.scale and kind.precision <= there.precision)
    if types.is_integer(kind) and types.is_integer(there):
        return True
    return bool(kind == there or (types.is_floating(kind) and there == pa.float64()))


def _lacking(kind: pa.DataType, there: pa.DataType, path: str) -> str | None:
    """Return the first field of a struct in `there` that `kind` lacks."""
    while pa.types.is_large_list(kind) and pa.types.is_large_list(there):
        kind, there = kind.value_type, there.value_type
    if not (pa.types.is_struct(kind) and pa.types.is_struct(there)):
        return None
    own = {field.name: field.type for field in kind}
    for field in there:
        at = f"{path}.{field.name}"
        found = _lacking(own[field.name], field.type, at) if field.name in own else at
        if found is not None:
            return found
    return None


def as_stored(batch: pa.RecordBatch, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """Return `batch` with exactly the columns and types of `schema`, as `conform` does; fields of structs that it lacks are
    null.
    """
    if batch.schema.equals(schema):
        return batch
    columns = [
        _completed(column, schema.field(name).type) if name in schema.names else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return conform(pa.RecordBatch.from_arrays(columns, names=batch.schema.names), schema, where)


def _completed(column: pa.Array[Any], kind: pa.DataType) -> pa.Array[Any]:
    """Return a column whose structs have all fields of `kind`."""
    if column.type == kind:
        return column
    if is_list_array(column) and is_list_of_any_length(kind):
        return large_lists(column, _completed(column.flatten(), kind.value_type))
    if not (is_struct_array(column) and pa.types.is_struct(kind)):
        return column
    parts = dict(zip([field.name for field in column.type], column.flatten(), strict=True))
    for field in kind:
        part = parts.get(field.name)
        parts[field.name] = pa.nulls(len(column), field.type) if part is None else _completed(part, field.type)
    mask = column.is_null() if column.null_count else None
    return pa.StructArray.from_arrays(list(parts.values()), names=list(parts), mask=mask)


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
