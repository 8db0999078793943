"""Avro schemas: parsed from JSON, checked, and mapped to Arrow types.

Schemas come from a registry, so they are checked like any other input: a type that contains itself, unlimited nesting,
and arrays of items that take no bytes (whose length a value may claim at will) are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import msgspec
import pyarrow as pa

from midstream.engine.core.errors import SchemaError

_PRIMITIVES: Final = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
_DEPTH_MAX: Final = 50
_TYPES_MAX: Final = 10_000
"""The largest number of types in a schema; a named type counts wherever it is referred to."""
_FIXED_BYTES_MAX: Final = 2**24
_LOGICAL_OF: Final = {
    "date": ("int",),
    "time-millis": ("int",),
    "time-micros": ("long",),
    "timestamp-millis": ("long",),
    "timestamp-micros": ("long",),
    "local-timestamp-millis": ("long",),
    "local-timestamp-micros": ("long",),
    "decimal": ("bytes", "fixed"),
    "uuid": ("string",),
}
"""The underlying types allowed for each logical type. Others are read as Avro requires: the value is that of the
underlying type.
"""
_ARROW: Final[Mapping[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.large_binary(),
    "string": pa.large_string(),
    "enum": pa.large_string(),
    "fixed": pa.large_binary(),
    "date": pa.date32(),
    "time-millis": pa.time32("ms"),
    "time-micros": pa.time64("us"),
    "timestamp-millis": pa.timestamp("ms", "UTC"),
    "timestamp-micros": pa.timestamp("us", "UTC"),
    "local-timestamp-millis": pa.timestamp("ms"),
    "local-timestamp-micros": pa.timestamp("us"),
}


@dataclass(frozen=True)
class Field:
    name: str
    type: AvroType
    aliases: tuple[str, ...] = ()
    has_default: bool = False
    default: Any = None


@dataclass(frozen=True)
class AvroType:
    """An Avro type. `kind`: a primitive, or record, enum, fixed, array, map, union; it determines which attributes are
    used.
    """

    kind: str
    logical: str = ""
    """The logical type that the values have; empty for one that is unknown or invalid, too."""
    meaning: str = ""
    """The logical type as declared, also if it is unknown or invalid: values of another one mean something else."""
    precision: int = 0
    scale: int = 0
    name: str = ""
    """The full name of a record, an enum or a fixed."""
    aliases: tuple[str, ...] = ()
    fields: tuple[Field, ...] = ()
    symbols: tuple[str, ...] = ()
    default_symbol: str | None = None
    size: int = 0
    items: AvroType | None = None
    """The items of an array, or the values of a map."""
    branches: tuple[AvroType, ...] = ()

    @cached_property
    def parts(self) -> tuple[AvroType, ...]:
        fields = tuple(field.type for field in self.fields)
        return (*fields, *self.branches, *(() if self.items is None else (self.items,)))

    @cached_property
    def types(self) -> int:
        return 1 + sum(part.types for part in self.parts)

    @cached_property
    def depth(self) -> int:
        return 1 + max((part.depth for part in self.parts), default=0)

    @cached_property
    def least_bytes(self) -> int:
        """The smallest number of bytes that a value takes."""
        if self.kind == "record":
            return sum(field.type.least_bytes for field in self.fields)
        return {"null": 0, "fixed": self.size}.get(self.kind, 1)

    @property
    def is_nullable(self) -> bool:
        return self.kind == "null" or any(branch.kind == "null" for branch in self.branches)

    def of(self) -> AvroType:
        """Return the type of the items of an array, or of the values of a map. Other types have neither."""
        assert self.items is not None, self.kind
        return self.items

    def without_null(self, where: str) -> AvroType:
        """Return the one type of the values that are not null. Raises SchemaError for a union of several."""
        if self.kind != "union":
            return self
        others = [branch for branch in self.branches if branch.kind != "null"]
        if len(others) > 1:
            kinds = ", ".join(branch.kind for branch in others)
            raise SchemaError(f"{where} is a union of {kinds}; a column has values of one type, and null")
        return others[0] if others else AvroType("null")


def parse_schema(text: str, where: str, known: Mapping[str, str] | None = None) -> AvroType:
    """Parse a schema. `known`: texts of the schemas that it refers to, each after those that it refers to itself.

    Raises SchemaError for invalid schemas, and for those that cannot be read as rows.
    """
    reading = _Reading(where)
    for name, other in (known or {}).items():
        reading.type(_decoded(other, f"{where}: schema {name!r}, to which it refers"), "", where, 0)
    found = reading.type(_decoded(text, where), "", where, 0)
    if found.kind != "record":
        raise SchemaError(
            f"{where}: the schema is of type {found.kind}; rows need a record, whose fields become the columns"
        )
    if not found.fields:
        raise SchemaError(f"{where}: the record {found.name} has no fields")
    return found


def _decoded(text: str, where: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        if text and text in _PRIMITIVES:
            return text
        raise SchemaError(f"{where}: the text is not an Avro schema: {error}") from error


class _Reading:
    def __init__(self, where: str) -> None:
        self._where = where
        self._named: dict[str, AvroType | None] = {}
        """The named types; None while the definition is being parsed, so that a reference to it is a recursion."""

    def type(self, given: Any, namespace: str, path: str, depth: int) -> AvroType:
        found = self._type(given, namespace, path, depth)
        if found.depth > _DEPTH_MAX or found.types > _TYPES_MAX:
            raise SchemaError(
                f"{self._where}: the schema is more than {_DEPTH_MAX} deep, or has over {_TYPES_MAX} types"
            )
        return found

    def _type(self, given: Any, namespace: str, path: str, depth: int) -> AvroType:
        if depth > 2 * _DEPTH_MAX:
            raise SchemaError(f"{self._where}: the schema is nested more than {_DEPTH_MAX} deep")
        if isinstance(given, str):
            return self._by_name(given, namespace, path)
        if isinstance(given, list):
            branches = tuple(self.type(branch, namespace, path, depth + 1) for branch in given)
            if not branches or any(branch.kind == "union" for branch in branches):
                raise SchemaError(f"{path}: a union has at least one branch, and none that is a union itself")
            return AvroType("union", branches=branches)
        if not isinstance(given, dict):
            raise SchemaError(f"{path}: {given!r:.100} is not an Avro type")
        kind = given.get("type")
        if isinstance(kind, (dict, list)):
            return self.type(kind, namespace, path, depth + 1)
        if kind in ("record", "error", "enum", "fixed"):
            return self._defined(given, "record" if kind == "error" else kind, namespace, path, depth)
        if kind == "array":
            items = self.type(given.get("items"), namespace, f"{path}[]", depth + 1)
            if not items.least_bytes:
                raise SchemaError(f"{path}: an array of items that take no bytes could claim any length")
            return AvroType("array", items=items)
        if kind == "map":
            return AvroType("map", items=self.type(given.get("values"), namespace, f"{path}{{}}", depth + 1))
        if not isinstance(kind, str):
            raise SchemaError(f"{path}: {kind!r:.100} is not an Avro type")
        return _with_logical(self._by_name(kind, namespace, path), given)

    def _by_name(self, name: str, namespace: str, path: str) -> AvroType:
        if name in _PRIMITIVES:
            return AvroType(name)
        full = name if "." in name or not namespace else f"{namespace}.{name}"
        full = full if full in self._named else name
        if full not in self._named:
            raise SchemaError(f"{path}: unknown Avro type {name!r:.100}")
        found = self._named[full]
        if found is None:
            raise SchemaError(f"{path}: the type {full} contains itself; a column has no form for that")
        return found

    def _defined(self, given: dict[str, Any], kind: str, namespace: str, path: str, depth: int) -> AvroType:
        name, own = given.get("name"), given.get("namespace", namespace)
        if not isinstance(name, str) or not name or not isinstance(own, str):
            raise SchemaError(f"{path}: a {kind} has no name")
        full = name if "." in name or not own else f"{own}.{name}"
        aliases = _aliases(given, path)
        own = full.rpartition(".")[0]
        self._named[full] = None
        if kind == "record":
            found = AvroType(
                "record", name=full, aliases=aliases, fields=self._fields(given.get("fields"), own, path, depth)
            )
        elif kind == "enum":
            symbols = given.get("symbols")
            if not isinstance(symbols, list) or not symbols or not all(isinstance(each, str) for each in symbols):
                raise SchemaError(f"{path}: the enum {full} has no symbols")
            default = given.get("default")
            found = AvroType("enum", name=full, aliases=aliases, symbols=tuple(symbols), default_symbol=default)
            if default is not None and default not in symbols:
                raise SchemaError(f"{path}: the default {default!r:.100} of the enum {full} is not one of its symbols")
        else:
            size = given.get("size")
            if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= _FIXED_BYTES_MAX:
                raise SchemaError(f"{path}: the fixed {full} has no size up to {_FIXED_BYTES_MAX}")
            found = _with_logical(AvroType("fixed", name=full, aliases=aliases, size=size), given)
        self._named[full] = found
        return found

    def _fields(self, given: Any, namespace: str, path: str, depth: int) -> tuple[Field, ...]:
        if not isinstance(given, list):
            raise SchemaError(f"{path}: a record has no fields")
        fields = []
        for each in given:
            name = each.get("name") if isinstance(each, dict) else None
            if not isinstance(name, str) or not name:
                raise SchemaError(f"{path}: a field has no name")
            aliases = _aliases(each, f"{path}.{name}")
            kind = self.type(each.get("type"), namespace, f"{path}.{name}", depth + 1)
            fields.append(Field(name, kind, aliases, "default" in each, each.get("default")))
        names = [field.name for field in fields]
        if len(set(names)) < len(names):
            raise SchemaError(f"{path}: two fields of one name: {', '.join(names)}")
        return tuple(fields)


def _aliases(given: dict[str, Any], where: str) -> tuple[str, ...]:
    found = given.get("aliases", [])
    if not isinstance(found, list) or not all(isinstance(alias, str) for alias in found):
        raise SchemaError(f"{where}: aliases are a list of names")
    return tuple(found)


def _with_logical(found: AvroType, given: dict[str, Any]) -> AvroType:
    """Add the logical type. Values have that of the underlying type if it is unknown or invalid, as Avro requires."""
    logical = given.get("logicalType")
    if not isinstance(logical, str):
        return found
    found = replace(found, meaning=found.meaning or logical)
    if found.kind not in _LOGICAL_OF.get(logical, ()):
        return found
    if logical != "decimal":
        return replace(found, logical=logical)
    precision, scale = given.get("precision"), given.get("scale", 0)
    numbers = all(isinstance(number, int) and not isinstance(number, bool) for number in (precision, scale))
    if not numbers or not precision > 0 or not 0 <= scale <= precision:  # type: ignore[operator]
        return found
    assert isinstance(precision, int) and isinstance(scale, int)
    meaning = f"decimal({precision}, {scale})"
    return replace(found, logical=logical, meaning=meaning, precision=precision, scale=scale)


def arrow_type(kind: AvroType, where: str) -> pa.DataType:
    """Return the Arrow type. Raises SchemaError for a type that a column cannot have."""
    kind = kind.without_null(where)
    if kind.logical == "decimal":
        if kind.precision > 38:
            raise SchemaError(f"{where} is a decimal of {kind.precision} digits; columns have 38 at most")
        return pa.decimal128(kind.precision, kind.scale)
    match kind.kind:
        case "null":
            raise SchemaError(
                f"{where} is always null, which is not a column type; leave it out of the reader's schema"
            )
        case "array":
            return pa.large_list(arrow_type(kind.of(), f"{where}[]"))
        case "map":
            return pa.large_list(
                pa.struct([("key", pa.large_string()), ("value", arrow_type(kind.of(), f"{where}{{}}"))])
            )
        case "record":
            if not kind.fields:
                raise SchemaError(f"{where} is a record without fields")
            return pa.struct(list(arrow_fields(kind, where)))
        case _:  # primitive types, named ones without fields, and logical types
            return _ARROW.get(kind.logical) or _ARROW[kind.kind]


def arrow_fields(record: AvroType, where: str) -> Iterator[pa.Field[Any]]:
    for field in record.fields:
        yield pa.field(field.name, arrow_type(field.type, f"{where}.{field.name}"))
