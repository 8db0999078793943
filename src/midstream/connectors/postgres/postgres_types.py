"""Arrow types and PostgreSQL types: the type to create for each, and the values that a column stores unchanged.

The server silently rounds digits, truncates blanks and pads strings. So a column accepts the Arrow types whose values
it stores unchanged; where that depends on the value, each one is checked before it is sent. What the server refuses by
itself (numbers out of range, strings that are too long, invalid UUIDs) is left to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from midstream.engine.core.arrow_types import (
    is_list_array,
    is_list_of_any_length,
    is_text,
    outside_of_years,
    text_lengths,
)

_INTEGERS: Final = ("int2", "int4", "int8", "numeric")
_TEXTS: Final = ("text", "varchar", "bpchar", "json", "jsonb", "uuid", "inet", "cidr", "citext")
_ELEMENTS: Final = ("bool", "int2", "int4", "int8", "numeric", "float4", "float8", "text", "varchar")
_SECONDS: Final = ("time", "timestamp", "timestamptz", "interval")
"""Types whose modifier limits the digits of a second."""
_SECOND_FIELD: Final = 1 << 12
"""The bit in an interval's modifier for fields down to seconds; intervals without it lose time."""
_UUID: Final = r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"
_ANY_FIELDS: Final = 0x7FFF
"""Outside of these years, the text form of a date varies, and no client reads it back."""

Predicate = Callable[[pa.DataType], bool]


@dataclass(frozen=True, slots=True)
class Kept:
    """The type of what a column holds, seen through domains and arrays."""

    base: str
    """The pg_type.typname; for arrays, that of the elements."""
    modifier: int
    """The modifier, as in pg_attribute.atttypmod; -1 means none."""
    dimensions: int = 0
    is_enum: bool = False

    @property
    def scale(self) -> int | None:
        """The scale of a numeric that declares one: eleven bits with a sign."""
        if self.base != "numeric" or self.modifier < 4:
            return None
        return ((self.modifier - 4 & 2047) ^ 1024) - 1024

    @property
    def length(self) -> int | None:
        """The length of varchar(n) and char(n), in characters."""
        return self.modifier - 4 if self.base in ("varchar", "bpchar") and self.modifier >= 4 else None

    @property
    def second_digits(self) -> int:
        if self.base not in _SECONDS or self.modifier < 0:
            return 6
        return min(self.modifier & 0xFFFF, 6)

    @property
    def keeps_seconds(self) -> bool:
        """Whether seconds are stored; False for `interval day` and others that store only some fields."""
        fields = self.modifier >> 16 & _ANY_FIELDS
        return self.base != "interval" or self.modifier < 0 or fields == _ANY_FIELDS or bool(fields & _SECOND_FIELD)


@dataclass(frozen=True, slots=True)
class _Mapping:
    """Arrow types for which `of` is true: created as `made`, and accepted by columns of types `taken`."""

    of: Predicate
    made: str
    taken: tuple[str, ...]


def _is(*kinds: pa.DataType) -> Predicate:
    return lambda kind: kind in kinds


_MAPPINGS: Final = (
    _Mapping(pa.types.is_boolean, "boolean", ("bool",)),
    _Mapping(_is(pa.int8(), pa.int16(), pa.uint8()), "smallint", _INTEGERS),
    _Mapping(_is(pa.int32(), pa.uint16()), "integer", _INTEGERS),
    _Mapping(_is(pa.int64(), pa.uint32()), "bigint", _INTEGERS),
    _Mapping(_is(pa.uint64()), "numeric(20,0)", ("numeric", *_INTEGERS)),
    _Mapping(_is(pa.float16(), pa.float32()), "real", ("float4", "float8")),
    _Mapping(_is(pa.float64()), "double precision", ("float8",)),
    _Mapping(pa.types.is_decimal, "numeric", ("numeric",)),
    _Mapping(is_text, "text", _TEXTS),
    _Mapping(lambda kind: pa.types.is_large_binary(kind) or pa.types.is_binary(kind), "bytea", ("bytea",)),
    _Mapping(pa.types.is_fixed_size_binary, "bytea", ("bytea",)),
    _Mapping(pa.types.is_date, "date", ("date",)),
    _Mapping(pa.types.is_time, "time", ("time",)),
    _Mapping(pa.types.is_duration, "interval", ("interval",)),
    _Mapping(lambda kind: pa.types.is_timestamp(kind) and kind.tz is None, "timestamp", ("timestamp",)),
    _Mapping(lambda kind: pa.types.is_timestamp(kind) and kind.tz is not None, "timestamptz", ("timestamptz",)),
)


def _mapping_of(kind: pa.DataType) -> _Mapping | None:
    return next((mapping for mapping in _MAPPINGS if mapping.of(kind)), None)


def created_type(kind: pa.DataType) -> str | None:
    """Return the SQL type of a column to create for `kind`; None if there is none."""
    if is_list_of_any_length(kind):
        mapping = _mapping_of(kind.value_type)
        return f"{mapping.made}[]" if mapping is not None and mapping.taken[0] in _ELEMENTS else None
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})" if kind.scale >= 0 else "numeric"
    mapping = _mapping_of(kind)
    return mapping.made if mapping is not None else None


def why_not(kind: pa.DataType, kept: Kept) -> str | None:
    """Return why a column would change values of `kind`, and what to do; None if it would not."""
    if pa.types.is_null(kind):
        return None
    if not _is_read(kind, kept):
        made = created_type(kind)
        return "cast one of them" + (f" ({kind} fits {made})" if made else "")
    element = kind.value_type if is_list_of_any_length(kind) else kind
    scale = kept.scale
    if scale is not None and (element.scale if pa.types.is_decimal(element) else 0) > scale:
        return "the table's column would round digits; cast the stream's column, or widen the table's"
    if not kept.keeps_seconds:
        return "the table's column would drop what is smaller than its fields; make it interval"
    return None


def _is_read(kind: pa.DataType, kept: Kept) -> bool:
    if is_list_of_any_length(kind):
        mapping = _mapping_of(kind.value_type)
        is_readable = mapping is not None and kept.base in mapping.taken and kept.base in _ELEMENTS
        return is_readable and kept.dimensions == 1
    mapping = _mapping_of(kind)
    if kept.dimensions or mapping is None:
        return False
    return kept.base in mapping.taken or (kept.is_enum and mapping.made == "text")


def first_misfit(column: pa.Array[Any], kept: Kept) -> tuple[int, object, str] | None:
    """Return the first row with a value that the server would change, the value, and why; None if there is none."""
    if is_list_array(column):
        found = _first_misfit(column.flatten(), kept)
        if found is None:
            return None
        parents = pc.list_parent_indices(column)
        return parents[found[0]].as_py(), found[1], found[2]
    return _first_misfit(column, kept)


def first_other_uuid(column: pa.Array[Any]) -> int:
    """Return the first row with a text that the server would not write so, for example in upper case; -1 for none."""
    return int(pc.index(pc.match_substring_regex(column, _UUID), pa.scalar(False)).as_py())


def _first_misfit(column: pa.Array[Any], kept: Kept) -> tuple[int, object, str] | None:
    for is_wrong, why in _checks(column, kept):
        index = pc.index(is_wrong, pa.scalar(True)).as_py()
        if index >= 0:
            value = column.slice(index, 1)
            return index, value[0].as_py() if is_text(column.type) else str(value.cast(pa.string())[0]), why
    return None


def _checks(column: pa.Array[Any], kept: Kept) -> Iterable[tuple[pa.Array[Any], str]]:
    """Yield, for each check, which rows fail it (null counts as no), and why."""
    kind = column.type
    if is_text(kind):
        yield pc.match_substring(column, "\0"), "strings in PostgreSQL cannot contain NUL; remove it with replace_all()"
        if kept.length is not None:
            length = text_lengths(column)
            if kept.base == "bpchar":
                yield (
                    pc.not_equal(length, pa.scalar(kept.length)),
                    f"it must have exactly {kept.length} characters, or it would be padded with blanks",
                )
            else:
                yield pc.greater(length, pa.scalar(kept.length)), f"value too long for {kept.length} characters"
        if kept.base == "cidr":
            is_short = pc.match_substring_regex(column, r"^\s*[0-9]+(\.[0-9]+){0,2}\s*(/|$)")
            yield is_short, "the server would complete it by rules of its own; write all four numbers"
        if kept.base == "jsonb":
            repeats = pa.array(
                [text is not None and _may_repeat_a_key(text) for text in column.to_pylist()], pa.bool_()
            )
            yield (
                repeats,
                "jsonb keeps one of several equal keys, or it is nested too deeply to check; make the column json",
            )
    elif pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        yield outside_of_years(column), "it is beyond the years 1 to 9999"
    if kept.second_digits < 6 and (pa.types.is_temporal(kind) and not pa.types.is_date(kind)):
        step = pa.scalar(10 ** (6 - kept.second_digits), pa.int64())
        micros = _microseconds(column)
        rest = pc.subtract(micros, pc.multiply(pc.divide(micros, step), step))
        yield (
            pc.not_equal(rest, pa.scalar(0)),
            f"{kept.second_digits} digits of a second are kept; round it, or widen the table's",
        )


def _microseconds(column: pa.Array[Any]) -> pa.Array[Any]:
    kind = column.type
    if pa.types.is_time(kind):
        return column.cast(pa.time64("us")).cast(pa.int64())
    return column.cast(pa.duration("us") if pa.types.is_duration(kind) else pa.timestamp("us", kind.tz)).cast(
        pa.int64()
    )


class _Repeated(Exception):
    """A key occurs twice."""


def _may_repeat_a_key(text: str) -> bool:
    try:
        json.loads(text, object_pairs_hook=_check_pairs, parse_int=str)  # Python refuses integers of many digits
    except (_Repeated, RecursionError):
        return True
    except ValueError:  # the server reports what is wrong
        return False
    return False


def _check_pairs(pairs: list[tuple[str, Any]]) -> None:
    if len({name for name, _ in pairs}) < len(pairs):
        raise _Repeated
