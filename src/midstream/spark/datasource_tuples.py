"""Rows that a Python Data Source reads, as record batches: a value is stored unchanged, or refused."""

from __future__ import annotations

import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain, islice
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import ArrayType, DataType, MapType, Row, StructField, StructType, TimestampType

from midstream.engine.core.batches import conform
from midstream.engine.core.errors import JobError, SchemaError
from midstream.engine.core.python_values import ValueMisfit, shown, to_array

_CHUNK_ROWS: Final = 8192


def batches_of(rows: Iterable[Any], struct: StructType, schema: pa.Schema, where: str) -> Iterator[pa.RecordBatch]:
    """Convert what `read` of a data source returns, record batches or tuples, to batches of `schema`.

    Raises SchemaError or JobError if it returns anything else.
    """
    iterator = iter(rows)
    first = list(islice(iterator, 1))  # empty at the end only: None may be an item, and is refused below
    if first and isinstance(first[0], pa.RecordBatch):
        yield from _conforming(chain(first, iterator), schema, where)
    else:
        yield from _of_tuples(chain(first, iterator), struct, schema, where)


def _conforming(batches: Iterable[Any], schema: pa.Schema, where: str) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if not isinstance(batch, pa.RecordBatch):
            raise JobError(
                f"{where}: read() returned {type(batch).__name__} after record batches; it must not mix them"
            )
        yield conform(batch, schema, where)


def _of_tuples(rows: Iterator[Any], struct: StructType, schema: pa.Schema, where: str) -> Iterator[pa.RecordBatch]:
    before = 0
    while chunk := list(islice(rows, _CHUNK_ROWS)):
        tuples = [_as_tuple(row, struct.names, before + at, where) for at, row in enumerate(chunk)]
        columns = [
            _column([row[at] for row in tuples], field, schema.field(at).type, before, where)
            for at, field in enumerate(struct.fields)
        ]
        before += len(chunk)
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _as_tuple(row: Any, names: list[str], number: int, where: str) -> tuple[Any, ...]:
    if not isinstance(row, (tuple, list)):
        raise JobError(
            f"{where}: row {number} is {type(row).__name__}; read() must return tuples, Rows or record batches"
        )
    if isinstance(row, Row) and hasattr(row, "__fields__"):
        if set(row.__fields__) != set(names):
            raise SchemaError(
                f"{where}: row {number} has {', '.join(row.__fields__)}, but the schema has {', '.join(names)}"
            )
        return tuple(row[name] for name in names)
    if len(row) != len(names):
        raise SchemaError(f"{where}: row {number} has {len(row)} values, but the schema has {len(names)} columns")
    return tuple(row)


def _column(values: Sequence[Any], field: StructField, kind: pa.DataType, before: int, where: str) -> pa.Array[Any]:
    """Convert one column; `values` are those of the rows from `before` on."""
    plain: Sequence[Any] = values
    if not (field.nullable and _is_plain(field.dataType)):
        plain = [_plain_in_row(value, field, before + index, where) for index, value in enumerate(values)]
    try:
        return to_array(plain, kind)
    except ValueMisfit as error:
        raise SchemaError(f"{_in_row(where, before + error.index, field)}, and {error}") from error
    except SchemaError as error:
        raise SchemaError(f"{where}: column {field.name!r}: {error}") from error


def _plain_in_row(value: Any, field: StructField, number: int, where: str) -> object:
    try:
        return _plain(value, field.dataType, field.nullable, field.name)
    except ValueError as error:
        raise SchemaError(f"{_in_row(where, number, field)}, and {shown(value)}: {error}") from error


def _in_row(where: str, number: int, field: StructField) -> str:
    return f"{where}: row {number}: column {field.name!r} is {field.dataType.simpleString()}"


def _is_plain(kind: DataType) -> bool:
    """Whether Arrow accepts values of `kind` as Spark has them."""
    return not isinstance(kind, (StructType, ArrayType, MapType, TimestampType))


def _plain(value: Any, kind: DataType, nullable: bool, path: str) -> object:
    """Convert a value of Spark for Arrow: structs are dicts, lists are lists, instants are in UTC. Raises ValueError."""
    if value is None:
        if not nullable:
            raise ValueError(f"{path} must have a value (NOT NULL)")
        return None
    if isinstance(kind, StructType):
        found = _by_name(value, kind.names, path)
        return {
            field.name: _plain(found[field.name], field.dataType, field.nullable, f"{path}.{field.name}")
            for field in kind.fields
        }
    if isinstance(kind, ArrayType):
        if not isinstance(value, (list, tuple, array.array)):
            raise ValueError(f"{path} is {type(value).__name__}, not a list")
        if kind.containsNull and _is_plain(kind.elementType):
            return list(value)
        return [_plain(each, kind.elementType, kind.containsNull, f"{path}.element") for each in value]
    if isinstance(kind, MapType):
        if not isinstance(value, dict):
            raise ValueError(f"{path} is {type(value).__name__}, not a dict")
        if isinstance(kind.keyType, (StructType, ArrayType, MapType)):
            raise ValueError(f"a dict cannot have keys of type {kind.keyType.simpleString()}; return record batches")
        made = {
            _plain(key, kind.keyType, False, f"{path}.key"): _plain(
                each, kind.valueType, kind.valueContainsNull, f"{path}.value"
            )
            for key, each in value.items()
        }
        if len(made) != len(value):
            raise ValueError(f"{path} has two keys that are equal as {kind.keyType.simpleString()}")
        return made
    if isinstance(kind, TimestampType) and isinstance(value, datetime):
        try:
            # Without a zone it is local time, as everywhere in PySpark; with one it is converted where it is checked.
            return value.astimezone(UTC) if value.tzinfo is None else value
        except (OverflowError, ValueError, OSError) as error:
            raise ValueError(f"{path} has no form in UTC: {error}") from error
    return value


def _by_name(value: Any, names: list[str], path: str) -> Mapping[str, Any]:
    if isinstance(value, Row) and hasattr(value, "__fields__"):
        value = value.asDict()
    if isinstance(value, dict):
        if set(value) != set(names):
            raise ValueError(f"{path} has {', '.join(map(str, value)) or 'no fields'}, not {', '.join(names)}")
        return value
    if not isinstance(value, (tuple, list)):
        raise ValueError(f"{path} is {type(value).__name__}, not a tuple, a Row or a dict")
    if len(value) != len(names):
        raise ValueError(f"{path} has {len(value)} values, not {len(names)}")
    return dict(zip(names, value, strict=True))
