"""What becomes of stored values when their type has changed: a conversion without loss, or a refusal.

`conversion` decides from the two types alone, before any value is read. So it works for every value of the old type, or
it is refused:

    numbers      to those that hold each of them: int32 to int64, uint8 to int16, float32 to float64, int32 to float64
    decimals     to more digits, on both sides of the point
    structs      by the names of their fields: a new one gets its default, one that is gone is dropped, each may change
    lists, maps  item by item
    text, bytes  from one layout to another

Everything else is refused: a date is not a moment, and not every int64 is a float.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from midstream.engine.core.arrow_types import (
    chunked,
    from_buffers,
    is_bytes,
    is_list,
    is_list_array,
    is_list_of_any_length,
    is_map_array,
    is_struct_array,
    is_text,
    maps,
    nulls,
)
from midstream.engine.core.python_values import to_array
from midstream.engine.core.schemas import ITEM, Default, Path
from midstream.engine.core.value_converters import shown

Column: TypeAlias = "pa.Array[Any]"
Step: TypeAlias = Callable[[Column], Column]
Defaults: TypeAlias = Mapping[Path, Default]

_KEYS: Final = "[keys]"
_EXACT_BITS: Final = {16: 11, 32: 24, 64: 53}
"""The bits of the integers that a float of this many bits holds exactly."""


@dataclass(frozen=True, slots=True)
class NoConversion:
    """There is no conversion, because of `reason`, which names the types and the place in them."""

    reason: str


@dataclass(frozen=True, slots=True)
class Conversion:
    """Converts columns of one type to another."""

    changes: tuple[str, ...]
    """What changes, such as "field x added (default 0)", without the following."""
    losses: tuple[str, ...]
    """What is lost, such as "field y dropped"."""
    step: Step
    """Converts a column."""

    def of(self, column: pa.ChunkedArray[Any], kind: pa.DataType) -> pa.ChunkedArray[Any]:
        """Return a column of the old type as one of the new type, `kind`."""
        return chunked([self.step(chunk) for chunk in column.chunks], kind)


def conversion(
    old: pa.DataType, new: pa.DataType, defaults: Defaults, what: str = "field"
) -> Conversion | NoConversion:
    """Decide how values of the type `old` become values of `new`.

    `defaults`: those of the fields of `new`. `what`: what its outermost fields are called.
    """
    plan = _ConversionPlan(defaults, what)
    try:
        step = plan.step(old, new, ())
    except _CannotConvert as refused:
        return NoConversion(str(refused))
    return Conversion(tuple(plan.changes), tuple(plan.losses), step)


class _CannotConvert(Exception):
    """Why there is no conversion."""


class _ConversionPlan:
    def __init__(self, defaults: Defaults, what: str) -> None:
        self.changes: list[str] = []
        self.losses: list[str] = []
        self._defaults = defaults
        self._what = what

    def step(self, old: pa.DataType, new: pa.DataType, path: Path) -> Step:
        """Return the conversion of the values at `path`. Raises _CannotConvert."""
        if old == new:
            return _unchanged
        if pa.types.is_struct(old) and pa.types.is_struct(new):
            return self._struct_step(old, new, path)
        if pa.types.is_map(old) and pa.types.is_map(new):
            self._check_nulls(old.item_field, new.item_field, (*path, ITEM))
            keys = self.step(old.key_type, new.key_type, (*path, _KEYS))
            return _map_step(new, keys, self.step(old.item_type, new.item_type, (*path, ITEM)))
        if is_list(old) and is_list(new) and _has_same_lengths(old, new):
            self._check_nulls(old.value_field, new.value_field, (*path, ITEM))
            return _list_step(new, self.step(old.value_type, new.value_type, (*path, ITEM)))
        if not _is_wider(old, new):
            raise _CannotConvert(f"{self._at(path)}{old} cannot be converted to {new} {_why_not(old, new)}")
        self.changes.append(f"{self._at(path)}widened {old} → {new}")
        return lambda column: column.cast(new)

    def _struct_step(self, old: pa.StructType, new: pa.StructType, path: Path) -> Step:
        parts: list[tuple[int | None, Step]] = []
        for field in new:
            at = old.get_field_index(field.name)
            place = (*path, field.name)
            if at < 0:
                parts.append((None, self._added(field, place)))
            else:
                self._check_nulls(old.field(at), field, place)
                parts.append((at, self.step(old.field(at).type, field.type, place)))
        self.losses += [
            f"{self._at((*path, field.name))}dropped" for field in old if new.get_field_index(field.name) < 0
        ]
        return _struct_step(new, parts)

    def _added(self, field: pa.Field[Any], path: Path) -> Step:
        """Return the step that makes a new field, of as many values as the column that it is given."""
        default = self._defaults.get(path, Default(None))
        at, kind = self._at(path).rstrip(), field.type
        if default.problem:
            raise _CannotConvert(f"{at} is new, and its default cannot be used: {default.problem}")
        if default.value is None and not field.nullable:
            raise _CannotConvert(f"{at} is new, cannot be null, and has no default; declare it with a default")
        self.changes.append(f"{at} added ({'null' if default.value is None else f'default {shown(default.value)}'})")
        if default.value is None:
            return lambda column: nulls(len(column), kind)
        one = to_array([default.value], kind)
        return lambda column: one.take(pa.array([0] * len(column), pa.int64()))

    def _check_nulls(self, old: pa.Field[Any], new: pa.Field[Any], path: Path) -> None:
        if old.nullable and not new.nullable:
            raise _CannotConvert(f"{self._at(path)}may be null, and must not be null now")

    def _at(self, path: Path) -> str:
        """Describe a place in the type, with the space that follows it; "" for the type itself."""
        if len(path) == 1 and path[0] in (ITEM, _KEYS):
            return "items " if path[0] == ITEM else "keys "
        text = "".join(name if name in (ITEM, _KEYS) else f".{name}" for name in path).removeprefix(".")
        return f"{self._what} {text} " if path else ""


def _is_wider(old: pa.DataType, new: pa.DataType) -> bool:
    """Whether each value of a type that contains no other is one of the other type too."""
    types = pa.types
    if types.is_integer(old) and types.is_integer(new):
        is_signed = types.is_signed_integer(new)
        return old.bit_width < new.bit_width and (is_signed or types.is_unsigned_integer(old))
    if types.is_floating(old) and types.is_floating(new):
        return old.bit_width < new.bit_width
    if types.is_integer(old) and types.is_floating(new):
        return old.bit_width - types.is_signed_integer(old) <= _EXACT_BITS[new.bit_width]
    if types.is_decimal(old) and types.is_decimal(new):
        return bool(old.scale <= new.scale and old.precision - old.scale <= new.precision - new.scale)
    is_fixed = types.is_fixed_size_binary(old) or types.is_fixed_size_binary(new)
    return bool((is_text(old) and is_text(new)) or (is_bytes(old) and is_bytes(new) and not is_fixed))


def _why_not(old: pa.DataType, new: pa.DataType) -> str:
    if pa.types.is_date(old) and pa.types.is_timestamp(new):
        return "by itself: a date does not say which moment of the day is meant"
    return "without loss"


def _has_same_lengths(old: pa.DataType, new: pa.DataType) -> bool:
    """Whether the lists of one type may be as long as those of the other."""
    if is_list_of_any_length(old) or is_list_of_any_length(new):
        return is_list_of_any_length(old) and is_list_of_any_length(new)
    return bool(old.list_size == new.list_size)  # type: ignore[attr-defined]


def _unchanged(column: Column) -> Column:
    return column


def _struct_step(new: pa.StructType, parts: Sequence[tuple[int | None, Step]]) -> Step:
    """`parts`: for each field of `new`, the index of the old field, if there is one, and its step."""

    def convert(column: Column) -> Column:
        assert is_struct_array(column), column.type
        mask = column.is_null() if column.null_count else None
        if not parts:
            return pa.array([{} if there else None for there in column.is_valid().to_pylist()], new)
        flat = column.flatten()  # without what lies under a null, as the fields alone would have it

        def old(at: int, field: pa.Field[Any]) -> Column:
            return flat[at] if field.nullable else column.field(at)

        made = [step(column if at is None else old(at, field)) for (at, step), field in zip(parts, new, strict=True)]
        return pa.StructArray.from_arrays(made, fields=list(new), mask=mask)

    return convert


def _list_step(new: pa.DataType, items: Step) -> Step:
    def convert(column: Column) -> Column:
        assert is_list_array(column), column.type
        if not isinstance(column, pa.FixedSizeListArray) and pa.types.is_large_list(new) != pa.types.is_large_list(
            column.type
        ):
            mask = column.is_null() if column.null_count else None
            offsets, made = np.array(column.offsets), items(column.values)
            if pa.types.is_large_list(new):
                return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), made, type=new, mask=mask)
            return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), made, type=new, mask=mask)
        own = column.buffers()[: 1 if pa.types.is_fixed_size_list(new) else 2]
        return from_buffers(new, len(column), own, column.null_count, column.offset, [items(column.values)])

    return convert


def _map_step(new: Any, keys: Step, items: Step) -> Step:
    def convert(column: Column) -> Column:
        assert is_map_array(column), column.type
        mask = column.is_null() if column.null_count else None
        return maps(_copied(column.offsets), keys(column.keys), items(column.items), new, mask)

    return convert


def _copied(offsets: Column) -> Column:
    """Return offsets that begin where their memory does, which Arrow requires of those that come with a mask."""
    return pa.array(np.array(offsets), pa.int32())
