"""Types that change: what is converted equals what plain Python makes of it, and what would lose a value is refused."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream.engine.core.arrow_types import chunked, map_of
from midstream.engine.core.python_values import ValueMisfit, converter_of, to_array, to_python
from midstream.engine.core.schemas import ITEM, Default
from midstream.engine.state.type_evolution import Conversion, Defaults, NoConversion, conversion

INTEGERS: list[pa.DataType] = [
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.uint8(),
    pa.uint16(),
    pa.uint32(),
    pa.uint64(),
]
FLOATS: list[pa.DataType] = [pa.float16(), pa.float32(), pa.float64()]


class Change(NamedTuple):
    """A change of a type that is allowed."""

    old: pa.DataType
    new: pa.DataType
    values: st.SearchStrategy[Any]
    """Of the old type."""
    convert: Callable[[Any], Any]
    """What each becomes, in plain Python."""
    defaults: Defaults
    drops: bool = False


def same(kind: pa.DataType, values: st.SearchStrategy[Any]) -> Change:
    return Change(kind, kind, values, lambda value: value, {})


def whole(kind: pa.DataType) -> st.SearchStrategy[int]:
    bits = kind.bit_width
    return (
        st.integers(0, 2**bits - 1)
        if str(kind).startswith("u")
        else st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    )


def numbers(old: pa.DataType, new: pa.DataType) -> Change:
    is_float = pa.types.is_floating(new)
    values = st.floats(width=old.bit_width, allow_nan=False) if pa.types.is_floating(old) else whole(old)  # type: ignore[arg-type]
    return Change(old, new, values, float if is_float else int, {})


def decimals(digits: int, scale: int, more: int, more_scale: int) -> Change:
    old, new = pa.decimal128(digits, scale), pa.decimal128(digits + more + more_scale, scale + more_scale)
    values = st.integers(-(10**digits) + 1, 10**digits - 1).map(lambda n: Decimal(n).scaleb(-scale))
    return Change(old, new, values, lambda value: value, {})


LEAVES = st.one_of(
    st.sampled_from([pair for pair in product(INTEGERS, INTEGERS) if pair[0].bit_width < pair[1].bit_width])
    .filter(lambda pair: str(pair[0]).startswith("u") or not str(pair[1]).startswith("u"))
    .map(lambda pair: numbers(*pair)),
    st.sampled_from([(pa.int32(), pa.float64()), (pa.int16(), pa.float32()), (pa.uint8(), pa.float16())]).map(
        lambda pair: numbers(*pair)
    ),
    st.sampled_from([(pa.float16(), pa.float32()), (pa.float32(), pa.float64())]).map(lambda pair: numbers(*pair)),
    st.builds(decimals, st.integers(5, 9), st.integers(0, 5), st.integers(0, 9), st.integers(0, 9)),
    st.just(same(pa.large_string(), st.text(max_size=3))),
    st.just(same(pa.bool_(), st.booleans())),
    st.just(same(pa.date32(), st.dates())),
)


def lists(inner: Change, size: int | None) -> Change:
    def of(kind: pa.DataType) -> pa.DataType:
        return pa.large_list(kind) if size is None else pa.list_(kind, size)

    values = st.lists(st.none() | inner.values, min_size=size or 0, max_size=3 if size is None else size)
    return Change(
        of(inner.old),
        of(inner.new),
        values,
        lambda value: [None if item is None else inner.convert(item) for item in value],
        {(ITEM, *path): default for path, default in inner.defaults.items()},
        inner.drops,
    )


def map_to(inner: Change, keys: tuple[pa.DataType, pa.DataType]) -> Change:
    return Change(
        map_of(pa.field("key", keys[0], nullable=False), pa.field("value", inner.old)),
        map_of(pa.field("key", keys[1], nullable=False), pa.field("value", inner.new)),
        st.dictionaries(whole(keys[0]), st.none() | inner.values, max_size=3),
        lambda value: {key: None if item is None else inner.convert(item) for key, item in value.items()},
        {(ITEM, *path): default for path, default in inner.defaults.items()},
        inner.drops,
    )


@st.composite
def structs(draw: st.DrawFn, inner: st.SearchStrategy[Change]) -> Change:
    kept = {f"k{i}": change for i, change in enumerate(draw(st.lists(inner, max_size=3)))}
    gone = {f"g{i}": change for i, change in enumerate(draw(st.lists(inner, max_size=1 if kept else 0)))}
    added = {f"a{i}": change for i, change in enumerate(draw(st.lists(inner, min_size=0 if kept else 1, max_size=2)))}
    with_default = {name: draw(st.none() | change.values.map(change.convert)) for name, change in added.items()}
    old = draw(st.permutations([(name, change.old) for name, change in (kept | gone).items()]))
    new = draw(st.permutations([(name, change.new) for name, change in (kept | added).items()]))
    defaults = {(name, *path): default for name, change in kept.items() for path, default in change.defaults.items()}
    defaults |= {(name,): Default(value) for name, value in with_default.items() if value is not None}

    def convert(value: Any) -> Any:
        made = {name: None if value[name] is None else change.convert(value[name]) for name, change in kept.items()}
        made |= with_default
        return {name: made[name] for name, _ in new}

    values = st.fixed_dictionaries({name: st.none() | change.values for name, change in (kept | gone).items()})
    drops = bool(gone) or any(change.drops for change in kept.values())
    return Change(pa.struct(old), pa.struct(new), values, convert, defaults, drops)


CHANGES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lists, inner, st.sampled_from([None, None, 2])),
        st.builds(map_to, inner, st.sampled_from([(pa.int8(), pa.int8()), (pa.int8(), pa.int32())])),
        structs(inner),
    ),
    max_leaves=6,
)


def converted(change: Change, column: pa.Array[Any]) -> list[Any]:
    found = conversion(change.old, change.new, change.defaults)
    assert isinstance(found, Conversion), found
    made = found.of(chunked([column], change.old), change.new)
    made.validate(full=True)
    assert made.type == change.new
    return to_python(made)


@settings(max_examples=examples(300))
@given(st.data())
def test_a_column_is_converted_as_plain_python_would(data: st.DataObject) -> None:
    change = data.draw(CHANGES)
    values = data.draw(st.lists(st.none() | change.values, max_size=6))
    first = data.draw(st.integers(0, len(values)))
    column = to_array(values, change.old).slice(first)
    expected = [None if value is None else change.convert(value) for value in to_python(column)]
    assert converted(change, column) == expected
    found = conversion(change.old, change.new, change.defaults)
    assert isinstance(found, Conversion) and bool(found.losses) is change.drops


def extremes(kind: pa.DataType) -> list[Any]:
    dtype: Any = kind.to_pandas_dtype()
    if pa.types.is_floating(kind):
        largest = float(np.finfo(dtype).max)
        return [largest, -largest, float(np.finfo(dtype).smallest_subnormal), 0.5]
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    return [low, high, high // 2 + 2]


@pytest.mark.parametrize("old", INTEGERS + FLOATS, ids=str)
def test_numbers_are_converted_if_the_new_type_has_each_of_them(old: pa.DataType) -> None:
    def fits(value: Any, new: pa.DataType) -> bool:
        try:
            return bool(converter_of(new).keep(value) == value)
        except ValueMisfit:
            return False

    for new in INTEGERS + FLOATS:
        is_allowed = isinstance(conversion(old, new, {}), Conversion)
        assert is_allowed is all(fits(value, new) for value in extremes(old)), new


REFUSED: list[tuple[pa.DataType, pa.DataType]] = [
    (pa.int64(), pa.int32()),
    (pa.int64(), pa.float64()),
    (pa.float64(), pa.int64()),
    (pa.int64(), pa.large_string()),
    (pa.bool_(), pa.int64()),
    (pa.date32(), pa.timestamp("us")),
    (pa.timestamp("us"), pa.timestamp("us", "UTC")),
    (pa.timestamp("us"), pa.timestamp("ms")),
    (pa.decimal128(9, 2), pa.decimal128(10, 4)),
    (pa.decimal128(9, 4), pa.decimal128(12, 2)),
    (pa.large_binary(), pa.large_string()),
    (pa.large_list(pa.int8()), pa.list_(pa.int8(), 2)),
    (pa.list_(pa.int8(), 2), pa.list_(pa.int8(), 3)),
    (pa.int64(), pa.large_list(pa.int64())),
    (pa.struct([("a", pa.int8())]), pa.map_(pa.large_string(), pa.int8())),
]


@pytest.mark.parametrize("place", ["", "field x ", "items ", "field x[].y ", "field x[keys] "])
def test_what_could_lose_a_value_is_refused_wherever_it_is(place: str) -> None:
    def at(kind: pa.DataType) -> pa.DataType:
        match place:
            case "field x ":
                return pa.struct([("a", pa.int8()), ("x", kind)])
            case "items ":
                return pa.large_list(kind)
            case "field x[].y ":
                return pa.struct([("x", pa.large_list(pa.struct([("y", kind)])))])
            case "field x[keys] ":
                return pa.struct([("x", map_of(pa.field("key", kind, nullable=False), pa.field("value", pa.int8())))])
        return kind

    for old, new in REFUSED:
        found = conversion(at(old), at(new), {})
        assert isinstance(found, NoConversion) and found.reason.startswith(f"{place}{old} cannot be converted to {new}")


def test_a_new_field_needs_a_value() -> None:
    old = pa.struct([("a", pa.int8())])
    inner = pa.struct([("a", pa.int8()), pa.field("b", pa.int64(), nullable=False)])
    found = conversion(pa.map_(pa.int8(), old), pa.map_(pa.int8(), inner), {})
    assert found == NoConversion("field [].b is new, cannot be null, and has no default; declare it with a default")
    found = conversion(old, inner, {("b",): Default(None, "'x' is a str")})
    assert found == NoConversion("field b is new, and its default cannot be used: 'x' is a str")
    given = conversion(old, inner, {("b",): Default(3)})
    assert isinstance(given, Conversion)
    assert given.step(pa.array([{"a": 1}, None], old)).to_pylist() == [{"a": 1, "b": 3}, None]
    now_null = conversion(pa.struct([pa.field("a", pa.int8(), nullable=False)]), old, {})
    assert isinstance(now_null, Conversion)
    found = conversion(old, pa.struct([pa.field("a", pa.int8(), nullable=False)]), {})
    assert found == NoConversion("field a may be null, and must not be null now")


def test_what_lies_under_a_null_does_not_show_and_does_no_harm() -> None:
    inner = pa.array([Decimal("1.5"), Decimal("2.5"), Decimal("3.5")], pa.decimal128(5, 1))
    hidden = pa.StructArray.from_arrays([inner], names=["d"], mask=pa.array([False, True, False]))
    change = Change(
        hidden.type, pa.struct([("d", pa.decimal128(9, 2)), ("n", pa.int8())]), st.none(), dict, {("n",): Default(1)}
    )
    first, none, last = converted(change, hidden)
    assert (first, none, last) == ({"d": Decimal("1.5"), "n": 1}, None, {"d": Decimal("3.5"), "n": 1})


def test_changes_are_described() -> None:
    old = pa.struct([("a", pa.int32()), ("b", pa.large_list(pa.struct([("x", pa.int8())]))), ("c", pa.date32())])
    new = pa.struct([("b", pa.large_list(pa.struct([("x", pa.int16()), ("y", pa.bool_())]))), ("a", pa.int64())])
    found = conversion(old, new, {("b", ITEM, "y"): Default(True)})
    assert isinstance(found, Conversion)
    assert found.changes == (
        "field b[].x widened int8 → int16",
        "field b[].y added (default True)",
        "field a widened int32 → int64",
    )
    assert found.losses == ("field c dropped",)
    moved = conversion(
        pa.struct([("a", pa.int8()), ("c", pa.date32())]), pa.struct([("c", pa.date32()), ("a", pa.int8())]), {}
    )
    assert isinstance(moved, Conversion) and not moved.changes and not moved.losses


def test_times_are_converted_in_a_struct_as_they_are() -> None:
    times = {"at": datetime(2024, 1, 1), "for": timedelta(seconds=1), "day": date(2024, 1, 1)}
    old = pa.struct([("at", pa.timestamp("us")), ("for", pa.duration("us")), ("day", pa.date32()), ("n", pa.int8())])
    new = pa.struct([("day", pa.date32()), ("n", pa.int16()), ("at", pa.timestamp("us")), ("for", pa.duration("us"))])
    change = Change(old, new, st.none(), dict, {})
    assert converted(change, pa.array([{**times, "n": 1}], old)) == [{**times, "n": 1}]


def test_nulls_of_no_type_in_lists_that_become_large_keep_their_number() -> None:
    """pyarrow's own cast from one layout to the other makes invalid lists of them."""
    nulls = pa.list_(pa.null())
    old, new = pa.list_(nulls), pa.large_list(pa.large_list(pa.null()))
    values = [[[None, None], [None]], None, [[None] * 3, None]]
    converted = conversion(old, new, {})
    assert isinstance(converted, Conversion)
    made = converted.of(pa.chunked_array([pa.array(values, old), pa.array(values, old)[1:]]), new)
    made.validate(full=True)
    assert made.to_pylist() == values + values[1:]
