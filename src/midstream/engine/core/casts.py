"""Casts between Arrow types that succeed only if every value stays the same.

A cast is between types of one kind: integers, floats (integers fit into floats that hold them exactly), decimals,
strings, bytes, dates, times of day, durations, timestamps that both have a zone or both have none, and lists, structs
and maps of those. An extension type of Arrow itself counts as the type in which it is stored. Within a kind each value
is checked. Nothing is parsed, rounded, cut, or mistaken for another kind; the fields of a struct must be the same, in
any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream.engine.core.arrow_types import (
    DecimalType,
    ListArray,
    ListType,
    MapArray,
    MapType,
    fixed_size_lists,
    is_arrows_extension,
    is_bytes,
    is_list,
    is_list_array,
    is_map_array,
    is_struct_array,
    is_text,
    list_lengths,
    map_entries,
    maps,
    nulls,
)
from midstream.engine.core.python_values import ValueMisfit, to_array


class CastRefused(Exception):
    """A cast would change a value. The message names the part of the column that does not fit, and why."""


def cast_exactly(column: pa.Array[Any], kind: pa.DataType) -> pa.Array[Any]:
    """Cast `column` to `kind` if all values stay equal. Raises CastRefused otherwise."""
    return _cast(column, kind, "")


def _cast(column: pa.Array[Any], kind: pa.DataType, path: str) -> pa.Array[Any]:  # noqa: PLR0912 - one arm for each kind of type
    given = column.type
    if given == kind:
        return column
    if isinstance(column, pa.DictionaryArray):
        return _cast(column.dictionary_decode(), kind, path)
    if isinstance(column, pa.ExtensionArray) and is_arrows_extension(given):
        return _cast(column.storage, kind, path)
    if pa.types.is_null(given):
        return nulls(len(column), kind)
    if is_struct_array(column) and pa.types.is_struct(kind):
        return _cast_struct(column, kind, path)
    if is_map_array(column) and pa.types.is_map(kind):
        return _cast_map(column, kind, path)
    if is_list_array(column) and is_list(kind):
        return _cast_list(column, kind, path)
    families = [family for family in _FAMILIES if family(given)]
    if not any(family(kind) for family in families) and not (pa.types.is_integer(given) and _takes_integers(kind)):
        parse = "to_datetime" if pa.types.is_timestamp(kind) else "to_date"
        is_time = is_text(given) and (pa.types.is_timestamp(kind) or pa.types.is_date(kind))
        cure = f"text is not parsed; convert it before, in polars with .str.{parse}()" if is_time else ""
        raise CastRefused(_refusal(given, kind, path, cure))
    if pa.types.is_timestamp(kind) and (given.tz is None) != (kind.tz is None):
        has, lacks = (given, kind) if given.tz else (kind, given)
        raise CastRefused(
            _refusal(given, kind, path) + f": {has} has a time zone and {lacks} has none; state which zone is meant"
        )
    try:
        if pa.types.is_integer(given) and pa.types.is_decimal(kind):
            column = column.cast(pa.decimal128(20, 0))  # pyarrow would demand digits for every possible integer
        if pa.types.is_decimal(column.type) and pa.types.is_decimal(kind) and _must_be_one_by_one(column.type, kind):
            return _cast_one_by_one(column, kind, path)
        made = column.cast(kind)
    except pa.ArrowException as error:
        raise CastRefused(_refusal(given, kind, path, str(error))) from error
    # float16 fits into every float type; casts to floats with fewer bits lose digits without an error
    may_change = pa.types.is_floating(kind) and not pa.types.is_float16(given)
    if may_change or (pa.types.is_decimal(column.type) and pa.types.is_decimal(kind)):
        changed = _changed(column, made)
        if changed is not None:
            raise CastRefused(_refusal(given, kind, path, f"{changed} would become another value"))
    return made


def _cast_struct(column: pa.StructArray, kind: pa.StructType, path: str) -> pa.Array[Any]:
    given = column.type
    had, expected = [field.name for field in given], [field.name for field in kind]
    for name in expected:
        if had.count(name) != 1:
            raise CastRefused(_refusal(given, kind, path, f"it has no field {name!r}"))
    extra = [name for name in had if name not in expected]
    if extra:
        raise CastRefused(_refusal(given, kind, path, f"field {extra[0]!r} would be lost"))
    if not expected:
        return column.cast(kind)
    parts = dict(zip(had, column.flatten(), strict=True))
    columns = [_cast(parts[field.name], field.type, f"{path}.{field.name}") for field in kind]
    return pa.StructArray.from_arrays(columns, fields=list(kind), mask=_mask(column))


def _cast_list(column: ListArray, kind: ListType, path: str) -> pa.Array[Any]:
    lengths = list_lengths(column).fill_null(0).to_numpy(zero_copy_only=False)
    is_there = column.is_valid().to_numpy(zero_copy_only=False)
    if pa.types.is_fixed_size_list(kind):
        wrong = np.flatnonzero(is_there & (lengths != kind.list_size))
        if len(wrong):
            why = f"a list has {lengths[wrong[0]]} items instead of {kind.list_size}"
            raise CastRefused(_refusal(column.type, kind, path, why))
    values = _cast(column.flatten(), kind.value_type, f"{path}[]")  # without what is below null lists
    if pa.types.is_fixed_size_list(kind):
        # pyarrow's own cast to such lists reads beyond its memory, and leaves uninitialised memory below null lists
        if not is_there.all():
            is_item = np.repeat(is_there, kind.list_size)
            values = values.take(pa.array(np.cumsum(is_item) - 1, mask=~is_item))
        return fixed_size_lists(values, kind, _mask(column))
    offsets = np.concatenate([[0], lengths.cumsum(dtype=np.int64)])
    if pa.types.is_large_list(kind):
        return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values, type=kind, mask=_mask(column))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=kind, mask=_mask(column))


def _cast_map(column: MapArray, kind: MapType, path: str) -> pa.Array[Any]:
    offsets, keys, items = map_entries(column)
    return maps(
        offsets,
        _cast(keys, kind.key_type, f"{path}[keys]"),
        _cast(items, kind.item_type, f"{path}[values]"),
        kind,
        _mask(column),
    )


def _must_be_one_by_one(given: DecimalType, kind: DecimalType) -> bool:
    """Whether pyarrow cannot compare these decimals (a negative scale) or would convert them to other values.

    It converts wrongly when the point moves further than its largest power of ten.
    """
    powers = {32: 9, 64: 18, 128: 38, 256: 76}
    return bool(given.scale < 0 or abs(given.scale - kind.scale) > powers[min(given.bit_width, kind.bit_width)])


def _cast_one_by_one(column: pa.Array[Any], kind: pa.DataType, path: str) -> pa.Array[Any]:
    try:
        return to_array(column.to_pylist(), kind)
    except ValueMisfit as misfit:
        raise CastRefused(_refusal(column.type, kind, path, str(misfit))) from misfit


def _mask(column: pa.Array[Any]) -> pa.BooleanArray | None:
    return column.is_null() if column.null_count else None


def _changed(column: pa.Array[Any], made: pa.Array[Any]) -> object | None:
    """Return the first value that differs in `made`, which holds floats or decimals: pyarrow rounds and truncates."""
    back = made.cast(column.type, safe=False)
    is_same = pc.equal(back, column)
    if pa.types.is_floating(column.type):
        is_same = pc.or_(is_same, pc.is_nan(column))
    at = pc.index(is_same, pa.scalar(False)).as_py()
    return None if at < 0 else column[at].as_py()


def _takes_integers(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_decimal(kind))


_FAMILIES: Final[tuple[Callable[[pa.DataType], bool], ...]] = (
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal,
    is_text,
    is_bytes,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_duration,
    pa.types.is_timestamp,
)


def _refusal(given: pa.DataType, kind: pa.DataType, path: str, why: str = "") -> str:
    at = f" in {path.lstrip('.')}" if path else ""
    return f"{given} does not fit {kind}{at}{': ' + why if why else ''}"
