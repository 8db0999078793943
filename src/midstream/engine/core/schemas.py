"""Schemas as users declare them, converted to canonical Arrow types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import MISSING, asdict, fields, is_dataclass
from datetime import date, datetime, time, timedelta
from types import NoneType, UnionType
from typing import (
    Any,
    Final,
    NamedTuple,
    TypeAlias,
    TypeGuard,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import polars as pl
import pyarrow as pa

from midstream.engine.core.batches import canonical_schema, canonical_type, check_column_name, to_arrow
from midstream.engine.core.errors import SchemaError, text_of
from midstream.engine.core.python_values import ValueMisfit, converter_of

TypeLike: TypeAlias = Any
"""A type of values: of Arrow or polars, or of Python: bool, int, float, str, bytes, datetime, date, time, timedelta,
`list[T]`, `dict[K, V]`, `T | None`, or a dataclass or TypedDict of such types for a struct, whose values are dicts.
"""
SchemaLike: TypeAlias = "pa.Schema | pl.Schema | Mapping[str, TypeLike] | type"
"""An Arrow or polars schema, column names with their types, or a dataclass or TypedDict whose fields are the columns."""

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
    """Return the same as `as_schema`, for sources, which also use what was declared with `nullable=False`, or in seconds."""
    if isinstance(spec, pa.Schema):
        schema = spec
    elif _is_record(spec):
        return as_declared(_fields_of(spec, where), where)
    elif isinstance(spec, Mapping) and spec:
        schema = pa.schema(
            [
                pa.field(checked_name(name, where), _declared_type(kind, f"{where}: column {name!r}"))
                for name, kind in spec.items()
            ]
        )
    else:
        raise SchemaError(
            f"{where}: {spec!r} is not a schema; write for example schema={{'word': str, 'n': int}}, or give a pyarrow.Schema"
        )
    check_schema(schema, where)
    return pa.schema(
        [pa.field(field.name, canonical_type(field.type, keeps_seconds=True), field.nullable) for field in schema]
    )


def check_schema(schema: pa.Schema, where: str) -> None:
    """Check the columns of rows that enter a job: as declared or found, of a source, or of what an operator emits.

    Raises SchemaError naming `where` if there is no column, if a name is empty, occurs twice, or contains a NUL, at
    which libraries written in C cut it, or if a column is nested too deep or contains a dictionary with an order or
    lists of size 0.
    """
    check_distinct(schema.names, where)
    for field in schema:
        if not field.name:
            raise SchemaError(f"{where}: a column has an empty name; give it one, or leave the column out")
        check_column_name(field.name, f"{where}: column")
        pending = [(field.type, 1)]
        while pending:
            kind, depth = pending.pop()
            if depth > DEPTH_MAX:
                raise SchemaError(f"{where}: column {field.name!r} is nested more than {DEPTH_MAX} deep")
            _check_is_kept(kind, f"{where}: column {field.name!r}")
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
            pending += [(each.type, depth + 1) for each in inner]


def _check_is_kept(kind: pa.DataType, what: str) -> None:
    """Raise SchemaError for a dictionary whose values have an order of their own, since rows of a job hold its texts only,
    and for lists of exactly no values, on which pyarrow and polars end the process or panic.
    """
    if pa.types.is_fixed_size_list(kind) and not kind.list_size:
        raise SchemaError(
            f"{what} is {kind}, lists that never have a value; declare a list without a size, or leave it out"
        )
    if pa.types.is_dictionary(kind) and kind.ordered:
        raise SchemaError(
            f"{what} is an ordered dictionary, such as a polars Enum, whose order rows of a job cannot hold; cast the data to "
            "text, or to numbers with that order (.cast(pl.String) or .to_physical() in polars), or declare text in the "
            "source's schema"
        )


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


def as_type(kind: TypeLike, where: str) -> pa.DataType:
    """Return the canonical Arrow type of what the user declared. Raises SchemaError, beginning with `where`, for anything else."""
    return canonical_type(_declared_type(kind, where))


def _declared_type(kind: TypeLike, where: str, within: tuple[type, ...] = ()) -> pa.DataType:
    """Return the same as `as_type`, but seconds as declared. `within`: the dataclasses and TypedDicts of which it is part."""
    if isinstance(kind, pa.DataType):
        return _kept_type(kind, where)
    if isinstance(kind, type) and kind in _PYTHON_TYPES:
        return _PYTHON_TYPES[kind]
    if isinstance(kind, pl.DataType) or (isinstance(kind, type) and issubclass(kind, pl.DataType)):
        if kind in (pl.Object, pl.Unknown):
            raise SchemaError(f"{where}: the polars type {kind} has no Arrow form")
        try:
            return _kept_type(to_arrow(pl.DataFrame(schema={"value": kind})).schema.types[0], where)
        except (pl.exceptions.PolarsError, TypeError, ValueError) as error:
            raise SchemaError(f"{where}: the polars type {kind} has no Arrow form: {error}") from error
    if _is_record(kind):
        if kind in within:
            raise SchemaError(
                f"{where}: {kind.__name__} contains itself, and rows are nested to a fixed depth; refer to it by an id"
            )
        fields = _fields_of(kind, where).items()
        return pa.struct([(name, _declared_type(of, where, (*within, kind))) for name, of in fields])
    origin: Any = get_origin(kind)
    of = get_args(kind)
    if origin in (Union, UnionType):
        some = [one for one in of if one is not NoneType]
        if len(some) == 1:  # each column may be null
            return _declared_type(some[0], where, within)
    elif origin is list and len(of) == 1:
        return pa.large_list(_declared_type(of[0], where, within))
    elif origin is dict and len(of) == 2:
        key, item = (canonical_type(_declared_type(each, where, within)) for each in of)
        return pa.map_(key, item)
    known = ", ".join(python.__name__ for python in _PYTHON_TYPES)
    advice = "; declare what it contains, for example list[int]" if kind in (list, dict) else ""
    raise SchemaError(
        f"{where}: {kind!r} is not a type{advice}; use a pyarrow type, a polars type, one of {known}, or list[…], dict[…, …] or "
        "a dataclass of these"
    )


def _kept_type(kind: pa.DataType, where: str) -> pa.DataType:
    """Return the type that a declared Arrow type means. Raises SchemaError for one that rows cannot keep."""
    pending = [kind]
    while pending:
        each = pending.pop()
        _check_is_kept(each, where)
        pending += [each.field(index).type for index in range(each.num_fields)]
    return canonical_type(kind, keeps_seconds=True)


def _is_record(kind: object) -> TypeGuard[type]:
    return isinstance(kind, type) and (is_dataclass(kind) or is_typeddict(kind))


def _fields_of(kind: type, where: str) -> dict[str, TypeLike]:
    """Return the fields of a dataclass or TypedDict with their types. Raises SchemaError for one that names no type."""
    try:
        hints = get_type_hints(kind)
    except Exception as error:  # of any kind: texts in the user's class are evaluated
        raise SchemaError(f"{where}: the fields of {kind.__name__}: {error}; import the type in that module") from error
    return {field.name: hints[field.name] for field in fields(kind)} if is_dataclass(kind) else hints


ITEM: Final = "[]"
"""In the path to a field: what a list contains, or the values of a map."""
Path: TypeAlias = tuple[str, ...]


class Default(NamedTuple):
    """The default of a field, in the Python form of its type."""

    value: Any
    problem: str = ""
    """Why the field has no such value, although its class declares one."""


def field_defaults(kind: TypeLike) -> dict[Path, Default]:
    """Return the defaults that the dataclasses in a declared type or schema have, by the path to each field.

    They are made here, once, so that what declares a type does not refer to its classes.
    """
    if _is_record(kind):
        found: dict[Path, Default] = {}
        own = {field.name: field for field in fields(kind)} if is_dataclass(kind) else {}
        for name, of in _fields_of(kind, kind.__name__).items():
            if name in own and (own[name].default is not MISSING or own[name].default_factory is not MISSING):
                found[(name,)] = _default_of(own[name], of)
            found |= {(name, *path): default for path, default in field_defaults(of).items()}
        return found
    if isinstance(kind, Mapping):
        return {(name, *path): default for name, each in kind.items() for path, default in field_defaults(each).items()}
    origin: Any = get_origin(kind)
    of = [each for each in get_args(kind) if each is not NoneType]
    if origin in (Union, UnionType) and len(of) == 1:
        return field_defaults(of[0])
    if origin in (list, dict) and of:
        return {(ITEM, *path): default for path, default in field_defaults(of[-1]).items()}
    return {}


def _default_of(field: Any, kind: TypeLike) -> Default:
    try:
        value = deepcopy(field.default) if field.default_factory is MISSING else field.default_factory()
        if is_dataclass(value) and not isinstance(value, type):
            value = asdict(value)
        return Default(converter_of(as_type(kind, field.name)).keep(value))
    except (ValueMisfit, SchemaError) as error:
        return Default(None, str(error))
    except Exception as error:  # noqa: BLE001 - of the factory, which is the user's code
        return Default(None, f"{type(error).__name__}: {text_of(error)}")
