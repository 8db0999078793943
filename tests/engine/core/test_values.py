"""Python values in Arrow types: what is taken comes back equal and of its type, all else is refused."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream.engine.core.arrow_types import is_list
from midstream.engine.core.errors import SchemaError
from midstream.engine.core.python_values import ValueMisfit, converter_of, first_without_python, to_array, to_python

PARIS, TOKYO = ZoneInfo("Europe/Paris"), ZoneInfo("Asia/Tokyo")
Point = namedtuple("Point", "x y")


class Colour(str, Enum):  # noqa: UP042 - users have such enums
    RED = "red"


class Size(IntEnum):
    LARGE = 3


class Whole(int):
    pass


SCALARS = [
    pa.null(), pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(),
    pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.string(), pa.large_string(), pa.binary(),
    pa.large_binary(), pa.binary(3), pa.date32(), pa.date64(), pa.time32("s"), pa.time32("ms"), pa.time64("us"),
    pa.time64("ns"), pa.duration("s"), pa.duration("ms"), pa.duration("us"), pa.duration("ns"),
    *(pa.timestamp(unit, zone) for unit in ("s", "ms", "us", "ns") for zone in (None, "UTC", "Europe/Paris", "+02:00")),
    pa.decimal128(5, 2), pa.decimal128(38, 0), pa.decimal128(38, 38), pa.decimal128(5, -2), pa.decimal256(50, 3),
]  # fmt: skip

SCALAR_KEYS = [
    kind
    for kind in SCALARS
    if not pa.types.is_null(kind) and not (pa.types.is_timestamp(kind) and kind.tz == "Europe/Paris")
]


def nested(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    return st.one_of(
        inner.map(pa.list_),
        inner.map(pa.large_list),
        inner.filter(lambda kind: not pa.types.is_null(kind)).map(lambda kind: pa.list_(kind, 2)),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(lambda fields: pa.struct(list(fields.items()))),
        st.tuples(st.sampled_from(SCALAR_KEYS), inner).map(lambda kinds: pa.map_(*kinds)),
    )


KINDS = st.recursive(st.sampled_from(SCALARS), nested, max_leaves=3)

ODD = [
    None, True, False, 0, 1, -1, 2, 127, 128, 255, 2**24 + 1, 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**40,
    0.0, -0.0, 1.0, 1.5, 0.1, 1e300, 5e-324, math.inf, -math.inf, math.nan, 65504.0, 3.4028234663852886e38,
    Decimal(0), Decimal(1), Decimal("1.5"), Decimal("1.50"), Decimal("1.234"), Decimal("NaN"), Decimal("sNaN"), Decimal("-Infinity"),
    Decimal("-0"), Decimal("1E+2"), Decimal("1E-38"), Decimal(10) ** 39, Decimal("999.99"), Decimal("999.995"),
    Fraction(1, 2), 1 + 0j,
    "", "a", "red", "1", "1.5", "2020-01-01", "é", "a\0b", "\ud800", "\U0001f600", b"", b"a", b"abc", b"\xff", b"abc\0",
    bytearray(b"abc"), memoryview(b"abc"),
    Colour.RED, Size.LARGE, Whole(7),
    np.bool_(True), np.int8(5), np.int64(7), np.int64(2**53 + 1), np.int64(2**63 - 1), np.uint64(2**64 - 1), np.uint64(2**63), np.float16(1.5), np.float32(0.1), np.float64(0.1), np.float64("nan"),
    np.longdouble("0.1"), np.str_("a"), np.bytes_(b"abc"), np.datetime64("2020-01-01"), np.timedelta64(1, "s"), np.array([1, 2]),
    date(2020, 1, 1), date(1, 1, 1), date(9999, 12, 31),
    datetime(2020, 1, 1), datetime(2020, 1, 1, 12), datetime(1, 1, 1), datetime.max, datetime(2020, 1, 1, 0, 0, 0, 1),
    datetime(2020, 1, 1, 0, 0, 0, 1000), datetime(2024, 10, 27, 2, 30, fold=1), datetime(1600, 1, 1), datetime(2300, 1, 1),
    datetime(2020, 1, 1, tzinfo=UTC), datetime(2020, 1, 1, tzinfo=PARIS), datetime(2020, 7, 1, 1, 2, 3, 4, tzinfo=TOKYO),
    datetime(2024, 3, 31, 2, 30, tzinfo=PARIS), datetime(2024, 10, 27, 2, 30, tzinfo=PARIS), datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=PARIS),
    datetime(1, 1, 1, tzinfo=TOKYO), datetime.max.replace(tzinfo=UTC), datetime(1, 1, 1, tzinfo=UTC), datetime(1890, 1, 1, tzinfo=PARIS),
    time(1, 2, 3), time(1, 2, 3, 4), time(1, 2, 3, 4000), time(1, 2, 3, tzinfo=UTC), time.max, time(2, 30, fold=1),
    timedelta(0), timedelta(microseconds=1), timedelta(milliseconds=-1), timedelta(seconds=5), timedelta.max, timedelta.min, timedelta(days=200_000),
    pd.Timestamp("2020-01-01"), pd.Timestamp("2020-01-01 00:00:00.000000001"), pd.Timestamp("2020-01-01", tz="UTC"), pd.NaT, pd.NA,
    pd.Timedelta("1s"), pd.Timedelta("1ns"),
    (), (1, 2), Point(1, 2), {1}, object(), int, range(2), lambda: 1,
]  # fmt: skip


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.dictionaries(st.sampled_from([value for value in ODD if _is_hashable(value)]), inner, max_size=2),
        st.dictionaries(st.sampled_from("ab"), inner, max_size=2).map(lambda it: defaultdict(int, it)),
        st.lists(inner, max_size=2).map(tuple),
    )


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def scalars_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Mostly such that fit."""
    types = pa.types
    if types.is_integer(kind):
        return st.integers(-300, 300) | st.integers()
    if types.is_floating(kind):
        return st.floats() | st.floats(width=16) | st.integers(-5, 5)
    if types.is_decimal(kind):
        return st.decimals(places=max(0, kind.scale), min_value=-999, max_value=999) | st.decimals()
    if types.is_string(kind) or types.is_large_string(kind):
        return st.text()
    if types.is_timestamp(kind):
        zones = st.sampled_from([UTC, PARIS, TOKYO, ZoneInfo("UTC"), timezone(timedelta(hours=2))])
        return st.datetimes(timezones=st.none() if kind.tz is None else zones)
    if types.is_time(kind):
        return st.times()
    if types.is_duration(kind):
        return st.timedeltas() | st.integers(-10, 10).map(lambda s: timedelta(seconds=s))
    if types.is_date(kind):
        return st.dates()
    return st.binary(max_size=4) | st.booleans()


@st.composite
def fitting(draw: st.DrawFn, kind: pa.DataType) -> Any:
    types = pa.types
    if draw(st.integers(0, 9)) == 0:
        return None
    if types.is_struct(kind):
        return {field.name: draw(fitting(field.type)) for field in kind}
    if types.is_map(kind):
        keys = draw(st.lists(scalars_of(kind.key_type).filter(_is_hashable), max_size=2))
        return {key: draw(fitting(kind.item_type)) for key in keys}
    if is_list(kind):
        size = kind.list_size if types.is_fixed_size_list(kind) else draw(st.integers(0, 3))
        return [draw(fitting(kind.value_type)) for _ in range(size)]
    return draw(scalars_of(kind))


VALUES = st.recursive(st.sampled_from(ODD), containers, max_leaves=4)


def same(a: Any, b: Any) -> bool:
    """Equal, and what Python can distinguish otherwise is alike too."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, datetime):
        return a == b and a.tzinfo == b.tzinfo and a.utcoffset() == b.utcoffset()
    if isinstance(a, Decimal):
        return a == b and str(a).lstrip("-") == str(b).lstrip("-")  # there is no decimal -0 in Arrow
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        # those of a struct come back in its order, as an equal dict
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def equals(kept: Any, given: Any) -> bool:
    """Whether what is kept is what was given, whatever class it had."""
    if isinstance(given, float) and math.isnan(given):
        return math.isnan(kept)
    if isinstance(given, datetime):
        # by the clock of one zone, since to Python no time in the hour that is there twice equals one elsewhere
        return (
            isinstance(kept, datetime) and (kept.tzinfo is None) == (given.tzinfo is None) and _apart(kept, given) == 0
        )
    if isinstance(given, list):
        return isinstance(kept, list) and len(kept) == len(given) and all(map(equals, kept, given))
    if isinstance(given, dict):
        pairs = zip(kept.items(), given.items(), strict=True)
        return all(equals(a, b) and equals(x, y) for (a, x), (b, y) in pairs)
    if isinstance(given, np.integer):
        given = int(given)  # a Decimal cannot be compared with numpy's
    return bool(kept == given) and isinstance(kept, bool) == isinstance(given, (bool, np.bool_))


def _apart(a: datetime, b: datetime) -> float:
    """Two instants, near the ends of the years too, where one cannot be converted to UTC."""
    offset = (a.utcoffset() or timedelta()) - (b.utcoffset() or timedelta())
    return (a.replace(tzinfo=None) - b.replace(tzinfo=None) - offset) / timedelta(microseconds=1)


def copied(value: Any) -> Any:
    if type(value) in (list, dict, defaultdict):
        items = [copied(item) for item in value] if type(value) is list else None
        return items if items is not None else {key: copied(item) for key, item in value.items()}
    return value


def kept_or_refused(value: Any, kind: pa.DataType) -> None:
    converter = converter_of(kind)
    given, is_loose = copied(value), _loose(value)
    try:
        kept = converter.keep(value)
    except ValueMisfit:
        if not is_loose:
            with pytest.raises(ValueMisfit):
                to_array([None, given], kind)
        return
    assert equals(kept, given), (kept, given)
    assert type(value) not in (list, dict) or kept is value
    for column in (to_array([given, None, kept], kind), to_array([kept, None, kept], kind)):
        assert column.type == kind
        column.validate(full=True)
        first, none, second = to_python(column)
        assert none is None
        assert same(first, kept), (first, kept)
        assert same(second, kept), (second, kept)
        assert same(converter.keep(copied(first)), kept)
    if converter.plain is not None and type(value) is converter.plain:
        assert kept is value


def _loose(value: Any) -> bool:
    """Whether a subclass of dict is in it: a column has no object to be the same as, and takes its content."""
    if isinstance(value, dict):
        return type(value) is not dict or any(map(_loose, value.values()))
    return isinstance(value, list) and any(map(_loose, value))


@settings(max_examples=examples(600))
@given(kind=KINDS, value=VALUES)
def test_any_value_in_any_type_comes_back_as_it_is_or_is_refused(kind: pa.DataType, value: Any) -> None:
    kept_or_refused(value, kind)


@settings(max_examples=examples(600))
@given(data=st.data(), kind=KINDS)
def test_values_that_nearly_fit_come_back_as_they_are_or_are_refused(data: st.DataObject, kind: pa.DataType) -> None:
    kept_or_refused(data.draw(fitting(kind)), kind)


def test_every_odd_value_in_every_type_without_parts() -> None:
    for kind in SCALARS:
        for value in ODD:
            kept_or_refused(value, kind)
            kept_or_refused([value], pa.list_(kind))
            kept_or_refused({"a": value}, pa.struct([("a", kind)]))
            kept_or_refused({"a": value}, pa.map_(pa.string(), kind))
            if _is_hashable(value) and kind in SCALAR_KEYS:
                kept_or_refused({value: 1}, pa.map_(kind, pa.int64()))


@settings(max_examples=examples(300))
@given(data=st.data(), kind=KINDS)
def test_a_column_is_what_its_values_are_one_by_one(data: st.DataObject, kind: pa.DataType) -> None:
    values = data.draw(st.lists(fitting(kind) | st.sampled_from(ODD), max_size=6))
    converter = converter_of(kind)
    one_by_one: list[Any] = []
    refused: int | None = None
    for index, value in enumerate(values):
        try:
            one_by_one.append(converter.keep(copied(value)))
        except ValueMisfit:
            refused = index
            break
    if refused is not None:
        with pytest.raises(ValueMisfit) as caught:
            to_array(values, kind)
        assert caught.value.index == refused or pa.types.is_nested(kind)
        return
    assert same(to_python(to_array(values, kind)), one_by_one)


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (1.5, pa.int64(), "1.5, declared as int64: a float is not an integer; round it, or declare a float"),
        (2.0, pa.int64(), "a float is not an integer"),
        (True, pa.int64(), "a bool is not an integer; write int(x)"),
        (Decimal("1.9"), pa.int64(), "a Decimal is not an integer; declare a decimal"),
        (300, pa.uint8(), "300, declared as uint8: it is beyond 0 to 255"),
        (0.1, pa.float32(), "holds 0.10000000149011612 instead; declare float64, or give numpy.float32(x)"),
        (2**53 + 1, pa.float64(), "a float holds 9007199254740992.0 instead"),
        (0.15, pa.decimal128(3, 1), "a float is not a Decimal; write Decimal(str(x))"),
        (Decimal("9.99999999999999999E-22"), pa.decimal128(38, 0), "more than 0 decimal places"),  # pyarrow: 0
        (Decimal("1E-240"), pa.decimal128(38, 2), "more than 2 decimal places"),
        (Decimal("0.15"), pa.decimal128(3, 1), "more than 3 digits, or more than 1 decimal places"),
        (b"a", pa.string(), r"b'a', declared as string: a bytes is not a str; write x.decode()"),
        ("a", pa.binary(), "a str is not bytes; write x.encode()"),
        (datetime(2020, 1, 1), pa.date32(), "a datetime is not a date; write x.date()"),
        (datetime(2020, 1, 1, tzinfo=UTC), pa.timestamp("us"), "it has the zone UTC, and the type has none"),
        (datetime(2020, 1, 1), pa.timestamp("us", "UTC"), "it has no zone, and the type has UTC"),
        (datetime(2020, 1, 1, 0, 0, 0, 1), pa.timestamp("ms"), "it is finer than ms; round it"),
        (datetime(2024, 3, 31, 2, 30, tzinfo=PARIS), pa.timestamp("us", "UTC"), "this local time does not exist in Europe/Paris"),
        ((1, 2), pa.list_(pa.int64()), "a tuple is not a list; write list(x)"),
        ({"a": 1, "b": 2}, pa.struct([("a", pa.int64())]), "there is no field 'b'"),
        ({}, pa.struct([("a", pa.int64())]), "field 'a' is missing"),
        ({"a": {"b": [1, 2.5]}}, pa.struct([("a", pa.struct([("b", pa.list_(pa.int8()))]))]), "at a.b[1]: 2.5, declared as int8"),
        ([("a", 1)], pa.map_(pa.string(), pa.int64()), "a list is not a dict"),
        ({"a": 1.5}, pa.map_(pa.string(), pa.int64()), "at ['a']: 1.5, declared as int64"),
        (defaultdict(int, a=1), pa.map_(pa.string(), pa.int64()), "a defaultdict is not a dict; write dict(x)"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_value_the_type_and_the_way_out(value: Any, kind: pa.DataType, message: str) -> None:
    with pytest.raises(ValueMisfit) as caught:
        converter_of(kind).keep(value)
    assert message in str(caught.value)


def test_a_number_that_fits_is_converted_immediately() -> None:
    assert same(converter_of(pa.float64()).keep(1), 1.0)
    assert same(converter_of(pa.int64()).keep(np.int32(5)), 5)
    assert same(converter_of(pa.string()).keep(Colour.RED), "red")
    assert same(converter_of(pa.decimal128(5, 2)).keep(Decimal("1.5")), Decimal("1.50"))
    assert same(
        to_python(to_array([Counter("aab"), OrderedDict(b=1)], pa.map_(pa.string(), pa.int64())))[0], {"a": 2, "b": 1}
    )


def test_a_list_keeps_its_identity_and_its_numbers_become_floats() -> None:
    values = [1, 2.5, {"n": 1}]
    converter = converter_of(pa.list_(pa.float64()))
    numbers = values[:2]
    assert converter.keep(numbers) is numbers
    assert same(numbers, [1.0, 2.5])


def test_what_no_python_value_can_hold_is_not_cut() -> None:
    with pytest.raises(ValueError, match="with nanoseconds, which Python does not have"):
        to_python(pa.array([1], pa.timestamp("ns")))
    with pytest.raises(ValueError, match="with nanoseconds"):
        to_python(pa.array([{"a": [1]}], pa.struct([("a", pa.list_(pa.duration("ns")))])))
    with pytest.raises((ValueError, OverflowError)):
        to_python(pa.array([2**62], pa.timestamp("us")))
    with pytest.raises(ValueError, match="a map that has 'a' twice as a key"):
        to_python(pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64())))
    twice = pa.array([None, [("b\n", 1)], [("b\n", 1), ("b\n", 2)]], pa.map_(pa.string(), pa.int64()))
    assert first_without_python(twice) == (2, r"a map that has 'b\n' twice as a key, as no dict can")
    assert to_python(pa.array([1_000], pa.timestamp("ns"))) == [datetime(1970, 1, 1, 0, 0, 0, 1)]


def test_types_without_python_values_are_refused() -> None:
    for kind in (
        pa.month_day_nano_interval(),
        pa.dense_union([pa.field("a", pa.int8())]),
        pa.run_end_encoded(pa.int32(), pa.int8()),
    ):
        with pytest.raises(SchemaError, match="no Python values of the Arrow type"):
            converter_of(kind)
    with pytest.raises(SchemaError, match="repeated hour at the end of daylight saving time"):
        converter_of(pa.map_(pa.timestamp("us", "Europe/Paris"), pa.int8()))
    with pytest.raises(SchemaError, match="declare a list without a size"):
        converter_of(pa.list_(pa.int8(), 0))
    with pytest.raises(SchemaError, match="unknown time zone"):
        converter_of(pa.timestamp("us", "Nowhere/X"))
    with pytest.raises(SchemaError, match="no Python values of the Arrow type dictionary"):
        converter_of(pa.dictionary(pa.int8(), pa.string()))
    with pytest.raises(SchemaError, match="two fields of one name"):
        converter_of(pa.struct([("a", pa.int8()), ("a", pa.int8())]))
    with pytest.raises(SchemaError, match="the keys of a dict cannot be"):
        converter_of(pa.map_(pa.list_(pa.int8()), pa.int8()))


def test_a_map_whose_keys_no_dict_can_have_is_named() -> None:
    for keys in (pa.array([[1]]), pa.StructArray.from_arrays([pa.array([1])], ["a"])):
        column: Any = pa.array([None, [(keys[0].as_py(), 1)]], pa.map_(keys.type, pa.int64()))
        with pytest.raises(ValueError, match="a map whose keys are lists or structs, as no dict has"):
            to_python(column)
        row, why = first_without_python(column)
        assert row == 1 and "as no dict has" in why


@pytest.mark.parametrize("zone", ["utc", "Z", "Mars/Olympus"])
def test_a_zone_that_python_does_not_have_is_named(zone: str) -> None:
    column = pa.array([None, 1], pa.timestamp("us", zone))
    for each in (column, pa.array([None, [1]], pa.list_(column.type))):
        row, why = first_without_python(each)
        assert row == 1 and "Python has no time zone of the name in " in why and zone in why
