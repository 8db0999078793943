"""Python values in Arrow types: each is kept as it is, or refused.

Every Arrow type has one Python form, the values that `to_python` gives: `int` for integers, `float` for floats,
`datetime` without a zone for a timestamp without one, `dict` for structs and maps, and so on (docs/guide/streams.md has the
table). A value that is given in that form, and fits, is kept. A value that equals one of that form is converted to it
immediately: an `int` for a float that holds it exactly, a numpy number, an aware `datetime` in another zone. Everything
else raises ValueMisfit: nothing is rounded, truncated, parsed, or filled in, so what is read back does not depend on
whether the job was restored in between.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import pyarrow as pa

from midstream.engine.core.arrow_types import (
    ListType,
    MapType,
    TimestampType,
    fixed_size_lists,
    is_bytes,
    is_list,
    is_text,
    map_of,
    maps,
)
from midstream.engine.core.errors import InvariantError, SchemaError
from midstream.engine.core.value_converters import (
    ARROW_ERRORS,
    BoolConverter,
    BytesConverter,
    DateConverter,
    DecimalConverter,
    DurationConverter,
    FloatConverter,
    IntConverter,
    NarrowFloatConverter,
    NullConverter,
    TextConverter,
    TimeConverter,
    TimestampConverter,
    ValueConverter,
    ValueMisfit,
    fits_datetime,
    is_fixed,
    is_nan,
    kind_of,
    shown,
    zone_of,
)

__all__ = [
    "ARROW_ERRORS",
    "ValueConverter",
    "ValueMisfit",
    "converter_of",
    "first_without_python",
    "is_fixed_zone",
    "is_nan",
    "kind_of",
    "shown",
    "to_array",
    "to_python",
    "zone_of",
]


_KEY_TWICE: Final = re.compile(r"duplicate key was (.*)\)", re.DOTALL)
"""The part of pyarrow's message that names the key."""


class _ListConverter(ValueConverter):
    """The converter of lists. It accepts only lists: a tuple or an array would be read back as a list."""

    kind: ListType

    def __init__(self, kind: ListType) -> None:
        super().__init__(kind)
        self._item = converter_of(kind.value_type)
        self._size = kind.list_size if pa.types.is_fixed_size_list(kind) else None
        if self._size is not None and (self._size == 0 or pa.types.is_null(kind.value_type)):
            raise SchemaError(f"{kind}: pyarrow ends the process on such lists; declare a list without a size")

    def _kept(self, value: Any) -> Any:
        if type(value) is not list:
            raise self.misfit(value, f"{kind_of(value)} is not a list; write list(x)")
        self._check_size(value)
        keep = self._item.keep
        for at, item in enumerate(value):
            try:
                kept = keep(item)
            except ValueMisfit as misfit:
                raise misfit.at(0, f"[{at}]") from None
            if kept is not item:
                value[at] = kept
        return value

    def _check_size(self, value: Sequence[Any]) -> None:
        if self._size not in (None, len(value)):
            raise self.misfit(value, f"it has {len(value)} values instead of {self._size}")

    def array(self, values: Sequence[Any]) -> pa.Array[Any]:
        lengths = np.zeros(len(values) + 1, np.int64)
        missing = np.zeros(len(values), bool)
        items: list[Any] = []
        for index, value in enumerate(values):
            if value is None:
                missing[index] = True
                if self._size is not None:
                    items.extend([None] * self._size)
                    lengths[index + 1] = self._size
                continue
            if not isinstance(value, list):
                raise ValueMisfit(value, self.kind, f"{kind_of(value)} is not a list; write list(x)", index)
            if self._size not in (None, len(value)):
                raise ValueMisfit(value, self.kind, f"it has {len(value)} values instead of {self._size}", index)
            items.extend(value)
            lengths[index + 1] = len(value)
        offsets = lengths.cumsum()
        child = _inner(
            self._item, items, offsets, lambda at: f"[{at - offsets[np.searchsorted(offsets, at, side='right') - 1]}]"
        )
        return _listed(self.kind, offsets, child, missing)


class _StructConverter(ValueConverter):
    """The converter of structs: a dict with exactly the type's fields."""

    kind: pa.StructType

    def __init__(self, kind: pa.StructType) -> None:
        super().__init__(kind)
        self._fields = {field.name: converter_of(field.type) for field in kind}
        if len(self._fields) != kind.num_fields:
            raise SchemaError(f"{kind} has two fields of one name, which no dict can have; rename one")

    def _kept(self, value: Any) -> Any:
        if type(value) is not dict:
            raise self.misfit(value, _not_a_dict(value))
        self._check_fields(value, 0)
        for name, converter in self._fields.items():
            item = value[name]
            try:
                kept = converter.keep(item)
            except ValueMisfit as misfit:
                raise misfit.at(0, f".{name}") from None
            if kept is not item:
                value[name] = kept
        return value

    def _check_fields(self, value: Mapping[Any, Any], index: int) -> None:
        if value.keys() != self._fields.keys():
            extra = [name for name in value if name not in self._fields]
            lacks = [name for name in self._fields if name not in value]
            reason = f"there is no field {extra[0]!r}" if extra else f"field {lacks[0]!r} is missing (None is a value)"
            raise ValueMisfit(value, self.kind, reason, index)

    def array(self, values: Sequence[Any]) -> pa.Array[Any]:
        for index, value in enumerate(values):
            if value is not None:
                if not isinstance(value, dict):
                    raise ValueMisfit(value, self.kind, _not_a_dict(value), index)
                self._check_fields(value, index)
        columns = []
        for name, converter in self._fields.items():
            try:
                columns.append(converter.array([None if value is None else value[name] for value in values]))
            except ValueMisfit as misfit:
                raise misfit.at(misfit.index, f".{name}") from None
        missing = np.fromiter((value is None for value in values), bool, len(values))
        if not columns:
            return pa.array(values, self.kind)
        return pa.StructArray.from_arrays(columns, fields=list(self.kind), mask=pa.array(missing))


class _MapConverter(ValueConverter):
    """The converter of maps: a dict, in the order of its keys."""

    kind: MapType

    def __init__(self, kind: MapType) -> None:
        super().__init__(kind)
        if pa.types.is_nested(kind.key_type):
            raise SchemaError(f"{kind}: the keys of a dict cannot be {kind.key_type}")
        if pa.types.is_timestamp(kind.key_type) and not is_fixed_zone(kind.key_type):
            raise SchemaError(
                f"{kind}: Python treats the repeated hour at the end of daylight saving time as one key; use keys of "
                f"{pa.timestamp(kind.key_type.unit, 'UTC')}"
            )
        self._key, self._item = converter_of(kind.key_type), converter_of(kind.item_type)

    def _kept(self, value: Any) -> Any:
        if type(value) is not dict:
            raise self.misfit(value, _not_a_dict(value))
        changed = False
        made = {}
        for key, item in value.items():
            try:
                kept = self._key.keep(_key_of_map(self, key))
                made[kept] = self._item.keep(item)
            except ValueMisfit as misfit:
                raise misfit.at(0, f"[{shown(key)}]") from None
            changed = changed or kept is not key or made[kept] is not item
        if changed:
            if len(made) != len(value):
                raise self.misfit(value, f"two of its keys become equal as {self.kind.key_type}")
            value.clear()
            value.update(made)
        return value

    def array(self, values: Sequence[Any]) -> pa.Array[Any]:
        lengths = np.zeros(len(values) + 1, np.int64)
        missing = np.zeros(len(values), bool)
        keys: list[Any] = []
        items: list[Any] = []
        for index, value in enumerate(values):
            if value is None:
                missing[index] = True
                continue
            if not isinstance(value, dict):
                raise ValueMisfit(value, self.kind, _not_a_dict(value), index)
            for key in value:
                try:
                    keys.append(_key_of_map(self, key))
                except ValueMisfit as misfit:
                    raise misfit.at(index, f"[{shown(key)}]") from None
            items.extend(value.values())
            lengths[index + 1] = len(value)
        offsets = lengths.cumsum()
        made_keys = _inner(self._key, keys, offsets, lambda at: f"[{shown(keys[at])}]")
        made = _inner(self._item, items, offsets, lambda at: f"[{shown(keys[at])}]")
        return maps(pa.array(offsets, pa.int32()), made_keys, made, self.kind, _mask(missing))


@lru_cache(maxsize=1024)
def converter_of(kind: pa.DataType) -> ValueConverter:
    """Return the converter of `kind`. Raises SchemaError for an Arrow type without one."""
    types = pa.types
    found = next((converter for is_kind, converter in _CONVERTERS if is_kind(kind)), None)
    if types.is_floating(kind):
        found = FloatConverter if kind == pa.float64() else NarrowFloatConverter
    if found is None:
        raise SchemaError(
            f"there are no Python values of the Arrow type {kind}; use a number, bool, string, binary, date, time, "
            "timestamp, duration or decimal, or a list, struct or map of those"
        )
    return found(kind)


_CONVERTERS: Final[tuple[tuple[Callable[[pa.DataType], bool], type[ValueConverter]], ...]] = (
    (pa.types.is_null, NullConverter),
    (pa.types.is_boolean, BoolConverter),
    (pa.types.is_integer, IntConverter),
    (pa.types.is_decimal, DecimalConverter),
    (is_text, TextConverter),
    (is_bytes, BytesConverter),
    (pa.types.is_date, DateConverter),
    (pa.types.is_time, TimeConverter),
    (pa.types.is_duration, DurationConverter),
    (pa.types.is_timestamp, TimestampConverter),
    (is_list, _ListConverter),
    (pa.types.is_struct, _StructConverter),
    (pa.types.is_map, _MapConverter),
)


def to_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array[Any]:
    """Convert `values` to a column of `kind`; `to_python` returns values equal to them. Raises ValueMisfit,
    SchemaError.
    """
    return converter_of(kind).array(values)


def to_python(column: pa.Array[Any] | pa.ChunkedArray[Any]) -> list[Any]:
    """Convert a column to Python values, in the form of its type.

    Raises ValueError for values that Python cannot hold: nanoseconds, years outside 1 to 9999, and a map with a
    duplicate key.
    """
    kind = column.type
    in_us = _in_microseconds(kind)
    if in_us != kind:
        try:
            column = column.cast(in_us)
        except pa.ArrowInvalid as error:
            raise ValueError(
                f"{kind} with nanoseconds, which Python does not have: cast it to microseconds first"
            ) from error
    if pa.types.is_timestamp(in_us) and in_us.tz is None and fits_datetime(column):
        listed: list[Any] = column.to_numpy(zero_copy_only=False).astype("M8[us]").tolist()  # thirty times faster
        return listed
    if not pa.types.is_nested(kind):
        values: list[Any] = column.to_pylist()
        return values
    try:
        values = column.to_pylist(maps_as_pydicts="strict")
    except KeyError as error:
        twice = _KEY_TWICE.search(str(error))
        raise ValueError(f"a map that has {twice[1] if twice else 'a key'} twice as a key, as no dict can") from error
    except TypeError as error:
        raise ValueError(f"a map whose keys are lists or structs, as no dict has: {error}") from error
    return values


def first_without_python(column: pa.Array[Any] | pa.ChunkedArray[Any]) -> tuple[int, str]:
    """Return the first row of a column that `to_python` refuses, and why it does."""
    for row in range(len(column)):
        try:
            to_python(column.slice(row, 1))
        except (ValueError, OverflowError) as error:
            if "zoneinfo" in str(error):  # pyarrow names the modules that it has searched
                return row, f"Python has no time zone of the name in {column.type}; use one such as UTC or Europe/Paris"
            return row, str(error)
    raise InvariantError(f"each value of a column of {column.type} has a Python form, but the column has none")


@lru_cache(maxsize=1024)
def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    """Return the same type with microseconds in place of nanoseconds, which datetime does not have.

    Nulls become nulls of another type: pyarrow's cast of a nested column (26.0) gives a list of nulls a wrong length.
    """
    if pa.types.is_null(kind):
        return pa.int8()
    if getattr(kind, "unit", None) == "ns":
        if pa.types.is_timestamp(kind):
            return pa.timestamp("us", kind.tz)
        return pa.duration("us") if pa.types.is_duration(kind) else pa.time64("us")
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_in_microseconds(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return map_of(
            kind.key_field.with_type(_in_microseconds(kind.key_type)),
            kind.item_field.with_type(_in_microseconds(kind.item_type)),
        )
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_in_microseconds(kind.value_type)))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_in_microseconds(kind.value_type)))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_in_microseconds(kind.value_type)), int(kind.list_size))
    return kind


def is_fixed_zone(kind: TimestampType) -> bool:
    """Whether each local time exists exactly once in the zone of a timestamp type; also true without a zone."""
    return kind.tz is None or is_fixed(zone_of(kind))


def _key_of_map(converter: ValueConverter, key: Any) -> Any:
    if key is None or is_nan(key):
        raise ValueMisfit(key, converter.kind, f"{shown(key)} cannot be the key of a map")
    return key


def _not_a_dict(value: object) -> str:
    return f"{kind_of(value)} is not a dict; write {'dataclasses.asdict' if is_dataclass(value) else 'dict'}(x)"


def _inner(
    converter: ValueConverter, items: list[Any], offsets: np.ndarray[Any, Any], path: Callable[[int], str]
) -> pa.Array[Any]:
    """Convert the items inside lists or maps to a column; a misfit is located by its outer value and its `path`."""
    try:
        return converter.array(items)
    except ValueMisfit as misfit:
        outer = int(np.searchsorted(offsets, misfit.index, side="right")) - 1
        raise misfit.at(outer, path(misfit.index)) from None


def _listed(
    kind: ListType, offsets: np.ndarray[Any, Any], items: pa.Array[Any], missing: np.ndarray[Any, Any]
) -> pa.Array[Any]:
    mask = _mask(missing)
    if pa.types.is_fixed_size_list(kind):
        return fixed_size_lists(items, kind, mask)
    if pa.types.is_large_list(kind):
        return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), items, type=kind, mask=mask)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), items, type=kind, mask=mask)


def _mask(missing: np.ndarray[Any, Any]) -> pa.BooleanArray | None:
    return pa.array(missing) if missing.any() else None
