"""Schemas as users declare them, converted to canonical Arrow types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime, time, timedelta
from typing import Any, Final, TypeAlias

import polars as pl
import pyarrow as pa

from midstream.core.batches import canonical_schema, canonical_type, check_column_name, frame_schema
from midstream.core.errors import SchemaError

SchemaLike: TypeAlias = "pa.Schema | pl.Schema | Mapping[str, Any]"
"""An Arrow or polars schema, or column names with Arrow types, polars types or Python types (int, str, datetime …)."""

DEPTH_MAX: Final = 50
"""How deep a column may be nested; libraries end the process, or raise a RecursionError, at some unknown depth."""
_PYTHON_TYPES: dict[type, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.large_string(),
    bytes: pa.large_binary(),
    datetime: pa.timestamp("us"),
    date: pa.date32(),
    time: pa.time64("us"),
    timedelta: pa.duration("us"),
}


def as_schema(spec: SchemaLike, where: str) -> pa.Schema:
    """Return the canonical Arrow schema of what the user declared.

    Raises SchemaError naming `where` and the column without a usable type.
    """
    return canonical_schema(as_declared(spec, where))


def as_declared(spec: SchemaLike, where: str) -> pa.Schema:
    """Return the same as `as_schema`, for sources, which also keep what was declared with `nullable=False`."""
    if isinstance(spec, pa.Schema):
        schema = spec
    elif isinstance(spec, Mapping) and spec:
        schema = pa.schema(
            [pa.field(checked_name(name, where), _arrow_type(name, kind, where)) for name, kind in spec.items()]
        )
    else:
        raise SchemaError(
            f"{where}: {spec!r} is not a schema; write for example schema={{'word': str, 'n': int}}, or give a pyarrow.Schema"
        )
    check_schema(schema, where)
    return pa.schema([pa.field(field.name, canonical_type(field.type), field.nullable) for field in schema])


def check_schema(schema: pa.Schema, where: str) -> None:
    """Check the columns of rows that enter a job: as declared or found, of a source, or of what an operator emits.

    Raises SchemaError naming `where` if there is no column, if a name is empty, occurs twice, or contains a NUL, at
    which libraries written in C cut it, or if a column is nested too deep.
    """
    check_distinct(schema.names, where)
    for field in schema:
        if not field.name:
            raise SchemaError(f"{where}: a column has an empty name; give it one, or leave the column out")
        check_column_name(field.name, f"{where}: column")
        waiting = [(field.type, 1)]
        while waiting:
            kind, depth = waiting.pop()
            if depth > DEPTH_MAX:
                raise SchemaError(f"{where}: column {field.name!r} is nested more than {DEPTH_MAX} deep")
            inner = [kind.field(index) for index in range(kind.num_fields)]
            if pa.types.is_struct(kind):
                names = [each.name for each in inner]
                twice = first_repeated(names)
                if twice is not None:
                    raise SchemaError(
                        f"{where}: column {field.name!r} has a struct with more than one field {twice!r}; rename one"
                    )
                for name in names:
                    check_column_name(name, f"{where}: column {field.name!r}, field")
            waiting += [(each.type, depth + 1) for each in inner]


def check_distinct(names: Sequence[str], where: str) -> None:
    """Raise SchemaError if there are no columns, or two of one name."""
    if not names:
        raise SchemaError(f"{where}: the schema has no columns; rows have at least one")
    twice = first_repeated(names)
    if twice is not None:
        raise SchemaError(f"{where}: has more than one column {twice!r}; rename one")


def first_repeated(names: Sequence[str]) -> str | None:
    """Return the first name that occurs a second time, in linear time: there may be thousands."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def checked_name(name: object, where: str) -> str:
    """Return the name of a column. Raises SchemaError if it cannot be one."""
    if not isinstance(name, str) or not name:
        raise SchemaError(f"{where}: {name!r} is not a column name")
    check_column_name(name, f"{where}: column")
    return name


def _arrow_type(name: str, kind: Any, where: str) -> pa.DataType:
    if isinstance(kind, pa.DataType):
        return canonical_type(kind)
    if isinstance(kind, type) and kind in _PYTHON_TYPES:
        return _PYTHON_TYPES[kind]
    if isinstance(kind, pl.DataType) or (isinstance(kind, type) and issubclass(kind, pl.DataType)):
        if kind in (pl.Object, pl.Unknown):
            raise SchemaError(f"{where}: column {name!r}: the polars type {kind} has no Arrow form")
        try:
            return frame_schema(pl.DataFrame(schema={name: kind})).types[0]
        except (pl.exceptions.PolarsError, TypeError, ValueError) as error:
            raise SchemaError(f"{where}: column {name!r}: the polars type {kind} has no Arrow form: {error}") from error
    known = ", ".join(python.__name__ for python in _PYTHON_TYPES)
    raise SchemaError(
        f"{where}: column {name!r}: {kind!r} is not a type; use a pyarrow type, a polars type, or one of {known}"
    )
