"""The families of Arrow types, as predicates that the type checker follows, and fixes for gaps in pyarrow's stubs.

A function takes `pa.DataType` where any type will do, and one of the families named here where it reads what only that
family has: `unit`, `tz`, `value_type`, `scale`. A predicate narrows `pa.DataType` to the family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import date
from typing import IO, TYPE_CHECKING, Any, Final, TypeAlias, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from pyarrow import lib
    from typing_extensions import TypeIs

ListType: TypeAlias = "pa.ListType[Any] | pa.LargeListType[Any] | pa.FixedSizeListType[Any, Any]"
MapType: TypeAlias = "pa.MapType[Any, Any, Any]"
TimestampType: TypeAlias = "pa.TimestampType[Any, Any]"
TimeType: TypeAlias = "pa.Time32Type[Any] | pa.Time64Type[Any]"
DecimalType: TypeAlias = "pa.Decimal32Type[Any, Any] | pa.Decimal64Type[Any, Any] | pa.Decimal128Type[Any, Any] | pa.Decimal256Type[Any, Any]"
ListArray: TypeAlias = "pa.ListArray[Any] | pa.LargeListArray[Any] | pa.FixedSizeListArray[Any, Any]"
MapArray: TypeAlias = "pa.MapArray[Any, Any]"
TextType: TypeAlias = "lib.StringType | lib.LargeStringType | lib.StringViewType"
BytesType: TypeAlias = "lib.BinaryType | lib.LargeBinaryType | lib.BinaryViewType | pa.FixedSizeBinaryType"
TICKS_PER_S: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_FIRST_DAY: Final = (date.min - date(1970, 1, 1)).days
_END_DAY: Final = (date.max - date(1970, 1, 1)).days + 1


def is_text(kind: pa.DataType) -> TypeIs[TextType]:
    """Whether values of this type are `str`."""
    types = pa.types
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def is_bytes(kind: pa.DataType) -> TypeIs[BytesType]:
    """Whether values of this type are `bytes`, of fixed or variable length."""
    types = pa.types
    return (
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    )


def is_list_of_any_length(kind: pa.DataType) -> TypeIs[pa.ListType[Any] | pa.LargeListType[Any]]:
    """Whether values of this type are `list` and may have any length."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def is_list(kind: pa.DataType) -> TypeIs[ListType]:
    """Whether values of this type are `list`. List views do not count: pyarrow supports few functions on them."""
    return is_list_of_any_length(kind) or pa.types.is_fixed_size_list(kind)


def is_list_array(column: pa.Array[Any]) -> TypeIs[ListArray]:
    """Whether the column holds lists. pyarrow's classes treat a map as a list; this predicate does not."""
    return is_list(column.type)


def is_map_array(column: pa.Array[Any]) -> TypeIs[MapArray]:
    """Whether the column holds maps."""
    return pa.types.is_map(column.type)


def is_struct_array(column: pa.Array[Any]) -> TypeIs[pa.StructArray]:
    """Whether the column holds structs."""
    return pa.types.is_struct(column.type)


def is_arrows_extension(kind: pa.DataType) -> TypeIs[lib.BaseExtensionType]:
    """Whether this is an extension type of Arrow itself, such as UUID or JSON, and not one that a program defines."""
    return isinstance(kind, pa.BaseExtensionType) and not isinstance(kind, pa.ExtensionType)


def maps_in(column: pa.Array[Any]) -> Iterator[MapArray]:
    """Yield all columns of maps that the column is or contains, the outer before the inner."""
    if is_map_array(column):
        yield column
        first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
        for entries in (column.keys, column.items):
            yield from maps_in(entries[first:last])
    elif is_struct_array(column):
        for part in column.flatten():
            yield from maps_in(part)
    elif is_list_array(column):
        yield from maps_in(column.flatten())


def key_twice(column: pa.Array[Any]) -> str | None:
    """Return the text of the first key that a map in the column has twice, if there is one."""
    return next((key for each in maps_in(column) if (key := _key_twice(each)) is not None), None)


def _key_twice(column: MapArray) -> str | None:
    ends = column.offsets.to_numpy()
    lengths = np.where(np.asarray(column.is_null()), 0, ends[1:] - ends[:-1])
    if not len(lengths) or lengths.max() < 2:
        return None
    numbers = np.repeat(np.arange(len(lengths)), lengths)
    at = np.arange(len(numbers)) + np.repeat(ends[:-1] - (lengths.cumsum() - lengths), lengths)
    keys = column.keys.take(pa.array(at))
    if pa.types.is_nested(keys.type):  # which pyarrow does not compare
        codes = np.unique([repr(key) for key in keys.to_pylist()], return_inverse=True)[1]
    else:
        codes = keys.dictionary_encode().indices.to_numpy()
    places = numbers * (codes.max() + 1) + codes
    _, firsts = np.unique(places, return_index=True)
    if len(firsts) == len(places):
        return None
    again = np.setdiff1d(np.arange(len(places)), firsts)[0]
    return repr(keys[int(again)].as_py())


def leaves(column: pa.Array[Any]) -> Iterator[pa.Array[Any]]:
    """Yield the column, or for a struct, list or map the columns inside it, without what belongs to nulls of lists."""
    if is_struct_array(column):
        for part in column.flatten():
            yield from leaves(part)
    elif is_map_array(column):
        first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
        for entries in (column.keys, column.items):
            yield from leaves(entries[first:last])
    elif is_list_array(column):
        yield from leaves(column.flatten())
    else:
        yield column


def outside_of_years(column: pa.Array[Any]) -> pa.Array[Any]:
    """Return which dates or timestamps, in UTC, are outside of the years 1 to 9999. (`pc.year` starts again after 65,536.)"""
    kind = column.type
    per_day = 1 if pa.types.is_date32(kind) else 86_400 * TICKS_PER_S[getattr(kind, "unit", "ms")]
    ticks = column.view(pa.int32() if per_day == 1 else pa.int64()).cast(pa.int64())
    first, last = max(_FIRST_DAY * per_day, -(2**63)), min(_END_DAY * per_day - 1, 2**63 - 1)
    return pc.or_(pc.less(ticks, pa.scalar(first, pa.int64())), pc.greater(ticks, pa.scalar(last, pa.int64())))


schema_of = cast("Callable[[Sequence[tuple[str, pa.DataType]]], pa.Schema]", pa.schema)
"""`pa.schema` of pairs of name and type. The stub allows it, but mypy infers no common type for the pairs."""

nulls = cast("Callable[[int, pa.DataType], pa.Array[Any]]", pa.nulls)
"""`pa.nulls` for a type known only at run time; its stub lists the types one by one."""

repeat = cast("Callable[[pa.Scalar[Any], int], pa.Array[Any]]", pa.repeat)
"""`pa.repeat` of a scalar whose type is known only at run time."""

chunked = cast("Callable[[Sequence[pa.Array[Any]], pa.DataType], pa.ChunkedArray[Any]]", pa.chunked_array)
"""`pa.chunked_array` of a type known only at run time; its stub lists the types one by one."""

from_buffers = cast("Callable[..., pa.Array[Any]]", pa.Array.from_buffers)
"""`pa.Array.from_buffers`; its stub takes no children."""

join_texts = cast("Callable[..., pa.Array[Any]]", pc.binary_join_element_wise)
"""`pc.binary_join_element_wise` of columns and single strings, the last one being the separator; its stub takes only
columns or only strings.
"""

map_of = cast("Callable[[pa.Field[Any], pa.Field[Any]], pa.DataType]", pa.map_)
"""`pa.map_` of two fields; its stub accepts only types."""

text_lengths = cast("Callable[[pa.Array[Any]], pa.Array[Any]]", pc.utf8_length)
"""`pc.utf8_length` of any string column, in characters; its stub requires one string type."""

byte_lengths = cast("Callable[[pa.Array[Any]], pa.Array[Any]]", pc.binary_length)
"""`pc.binary_length` of any string or binary column; its stub requires one type."""


list_lengths = cast("Callable[[pa.Array[Any]], pa.Array[Any]]", pc.list_value_length)
"""`pc.list_value_length`, null where the list is null; its stub does not accept `ListArray`."""


def large_lists(column: ListArray, items: pa.Array[Any]) -> pa.Array[Any]:
    """Return lists as long as those of `column`, with other `items`, which are concatenated as by `flatten()`."""
    lengths = list_lengths(column).fill_null(0).cast(pa.int64())
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(lengths)])
    mask = column.is_null() if column.null_count else None
    made: pa.Array[Any] = pa.LargeListArray.from_arrays(offsets, items, mask=mask)  # type: ignore[call-overload]  # its stub has no `mask`
    return made


def fixed_size_lists(
    values: pa.Array[Any], kind: pa.FixedSizeListType[Any, Any], mask: pa.BooleanArray | None
) -> pa.Array[Any]:
    """Build a column of `kind` from the concatenated items of its lists. `mask` marks the lists that are null."""
    made: pa.Array[Any] = pa.FixedSizeListArray.from_arrays(values, type=kind, mask=mask)  # type: ignore[call-overload]  # its stub has no `type`
    return made


def map_entries(column: MapArray) -> tuple[pa.Array[Any], pa.Array[Any], pa.Array[Any]]:
    """Return offsets, keys and items of the maps of a column, without what is below null ones."""
    ends = column.offsets.to_numpy()
    lengths = np.where(np.asarray(column.is_null()), 0, ends[1:] - ends[:-1])
    offsets = np.concatenate([[0], lengths.cumsum()])
    keys, items = column.keys[ends[0] : ends[-1]], column.items[ends[0] : ends[-1]]
    if len(keys) > offsets[-1]:  # not otherwise: pyarrow cannot take all types
        positions = pa.array(np.arange(offsets[-1]) + np.repeat(ends[:-1] - ends[0] - offsets[:-1], lengths))
        keys, items = keys.take(positions), items.take(positions)
    return pa.array(offsets, pa.int32()), keys, items


def maps(
    offsets: pa.Array[Any], keys: pa.Array[Any], items: pa.Array[Any], kind: MapType, mask: pa.BooleanArray | None
) -> pa.Array[Any]:
    """Build a column of `kind`. Map `i` has the keys and items from `offsets[i]` on; `mask` marks the maps that are
    null.
    """
    made: pa.Array[Any] = pa.MapArray.from_arrays(offsets, keys, items, type=kind, mask=mask)  # type: ignore[call-overload]  # its stub has no `type` there
    return made


buffer_reader = cast("Callable[[bytes | memoryview | pa.Buffer], IO[bytes]]", pa.BufferReader)
"""`pa.BufferReader`, typed as the file that pyarrow's CSV and JSON readers take; their stubs accept only Python files."""


def to_list(column: pa.Array[Any] | pa.ChunkedArray[Any]) -> list[Any]:
    """Return the values of a column without nulls. To the type checker, any value of `to_pylist()` may be None."""
    assert not column.null_count, f"{column.null_count} nulls in a column that has none"
    values: list[Any] = column.to_pylist()
    return values
