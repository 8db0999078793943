"""Arrow columns in other Arrow types: only where each value stays what it is.

A cast is between types of one kind: integers, floats (integers fit into floats that hold them exactly),
decimals, strings, bytes, dates, times of day, durations, timestamps that both have a zone or both have
none, and lists, structs and maps of those. Within a kind it is checked value by value. Nothing is parsed,
rounded, cut, or taken for another kind; the fields of a struct must be the same, in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream.core.values import ValueMisfit, to_array


class CastRefused(Exception):
    """Says which part of the column does not fit, and why."""


def cast_exactly(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """`column` as `kind`, with equal values. Raises CastRefused."""
    return _cast(column, kind, "")


def _cast(column: pa.Array, kind: pa.DataType, path: str) -> pa.Array:
    given = column.type
    if given == kind:
        return column
    if pa.types.is_dictionary(given):
        return _cast(column.dictionary_decode(), kind, path)
    if pa.types.is_null(given):
        return pa.nulls(len(column), kind)
    if pa.types.is_struct(given) and pa.types.is_struct(kind):
        return _cast_struct(column, kind, path)
    if pa.types.is_map(given) and pa.types.is_map(kind):
        return _cast_map(column, kind, path)
    if _is_list(given) and _is_list(kind):
        return _cast_list(column, kind, path)
    families = [family for family in _FAMILIES if family(given)]
    if not any(family(kind) for family in families) and not (pa.types.is_integer(given) and _takes_integers(kind)):
        raise CastRefused(_refusal(given, kind, path))
    if pa.types.is_timestamp(kind) and (given.tz is None) != (kind.tz is None):
        has, lacks = (given, kind) if given.tz else (kind, given)
        raise CastRefused(
            _refusal(given, kind, path) + f": {has} has a time zone and {lacks} has none; say which zone is meant"
        )
    try:
        if pa.types.is_integer(given) and pa.types.is_decimal(kind):
            column = column.cast(pa.decimal128(20, 0))  # pyarrow asks for room for all integers, not for these
        if pa.types.is_decimal(column.type) and pa.types.is_decimal(kind) and _must_be_one_by_one(column.type, kind):
            return _cast_one_by_one(column, kind, path)
        made = column.cast(kind)
    except pa.ArrowException as error:
        raise CastRefused(_refusal(given, kind, path, str(error))) from error
    # float16 fits into all floats; into fewer bits pyarrow cuts decimals off
    may_change = pa.types.is_floating(kind) and not pa.types.is_float16(given)
    if may_change or (pa.types.is_decimal(column.type) and pa.types.is_decimal(kind)):
        changed = _changed(column, made)
        if changed is not None:
            raise CastRefused(_refusal(given, kind, path, f"{changed} would become another value"))
    return made


def _cast_struct(column: pa.Array, kind: pa.DataType, path: str) -> pa.Array:
    given = column.type
    had, wanted = [field.name for field in given], [field.name for field in kind]
    for name in wanted:
        if had.count(name) != 1:
            raise CastRefused(_refusal(given, kind, path, f"it has no field {name!r}"))
    extra = [name for name in had if name not in wanted]
    if extra:
        raise CastRefused(_refusal(given, kind, path, f"field {extra[0]!r} would be lost"))
    if not wanted:
        return column.cast(kind)
    parts = dict(zip(had, column.flatten(), strict=True))
    columns = [_cast(parts[field.name], field.type, f"{path}.{field.name}") for field in kind]
    return pa.StructArray.from_arrays(columns, fields=list(kind), mask=_mask(column))


def _cast_list(column: pa.Array, kind: pa.DataType, path: str) -> pa.Array:
    if pa.types.is_fixed_size_list(column.type) or pa.types.is_fixed_size_list(kind):
        # their items also lie where a list is null, so they are cut to those that count
        between = column.cast(pa.large_list(column.type.value_type))
        items = pa.large_list(kind.value_type)
        try:
            made = _cast(between, items, path).cast(kind) if column.type != items else between.cast(kind)
        except pa.ArrowException as error:
            raise CastRefused(_refusal(column.type, kind, path, str(error))) from error
        return _without_garbage(made) if pa.types.is_fixed_size_list(kind) and made.null_count else made
    items = _cast(column.flatten(), kind.value_type, f"{path}[]")
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], lengths.cumsum(dtype=np.int64)])
    is_large = pa.types.is_large_list(kind)
    listed = pa.LargeListArray if is_large else pa.ListArray
    width = pa.int64() if is_large else pa.int32()
    return listed.from_arrays(pa.array(offsets, width), items, type=kind, mask=_mask(column))


def _without_garbage(lists: pa.FixedSizeListArray) -> pa.FixedSizeListArray:
    """The same with nulls below its nulls, where pyarrow's cast leaves whatever was in memory."""
    is_there = np.repeat(lists.is_valid().to_numpy(zero_copy_only=False), lists.type.list_size)
    places = pa.array(np.cumsum(is_there) - 1, mask=~is_there)
    return pa.FixedSizeListArray.from_arrays(lists.flatten().take(places), type=lists.type, mask=lists.is_null())


def _cast_map(column: pa.Array, kind: pa.DataType, path: str) -> pa.Array:
    lists = column.cast(pa.list_(pa.struct([column.type.key_field, column.type.item_field])))
    keys, items = lists.flatten().flatten()
    offsets = np.concatenate(
        [[0], pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).cumsum()]
    )
    return pa.MapArray.from_arrays(
        pa.array(offsets, pa.int32()),
        _cast(keys, kind.key_type, f"{path}[keys]"),
        _cast(items, kind.item_type, f"{path}[values]"),
        type=kind,
        mask=_mask(column),
    )


def _must_be_one_by_one(given: pa.DataType, kind: pa.DataType) -> bool:
    """Whether pyarrow cannot compare these decimals (a negative scale), or makes other values of them.

    It does where the point moves further than the largest power of ten that it knows.
    """
    powers = {32: 9, 64: 18, 128: 38, 256: 76}
    return bool(given.scale < 0 or abs(given.scale - kind.scale) > powers[min(given.bit_width, kind.bit_width)])


def _cast_one_by_one(column: pa.Array, kind: pa.DataType, path: str) -> pa.Array:
    try:
        return to_array(column.to_pylist(), kind)
    except ValueMisfit as misfit:
        raise CastRefused(_refusal(column.type, kind, path, str(misfit))) from misfit


def _mask(column: pa.Array) -> pa.Array | None:
    return column.is_null() if column.null_count else None


def _changed(column: pa.Array, made: pa.Array) -> object | None:
    """The first value that is another one in `made`, which holds floats or decimals: pyarrow rounds and cuts."""
    back = made.cast(column.type, safe=False)
    is_same = pc.equal(back, column)
    if pa.types.is_floating(column.type):
        is_same = pc.or_(is_same, pc.is_nan(column))
    at = pc.index(is_same, pa.scalar(False)).as_py()
    return None if at < 0 else column[at].as_py()


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    )


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _takes_integers(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_decimal(kind))


_FAMILIES: Final[tuple[Callable[[pa.DataType], bool], ...]] = (
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal,
    _is_text,
    _is_bytes,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_duration,
    pa.types.is_timestamp,
)


def _refusal(given: pa.DataType, kind: pa.DataType, path: str, why: str = "") -> str:
    at = f" in {path.lstrip('.')}" if path else ""
    return f"{given} does not fit {kind}{at}{': ' + why if why else ''}"
