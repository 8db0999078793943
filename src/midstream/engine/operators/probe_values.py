"""Probe values: a few rows of each type, on which the behaviour of an expression shows.

They have nulls, ties, NaN, both zeros, empty and long lists, and texts in several formats. Two columns of one type have the same
values in other rows. Numbers are small and times close together where they may become a length, since an expression
may allocate that many values.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import polars as pl

ROWS: Final = 12
"""The number of probe rows."""

ROW: Final = "\0row"
"""A column with the numbers of the probe rows; no column of a stream has a NUL in its name."""

_INTEGERS: Final = [2, None, 0, 2, 40, 7, -3, None, 1, 3, 0, 5]
_FLOATS: Final = [2.0, None, float("nan"), 2.0, 0.5, -7.25, 0.0, float("nan"), float("inf"), -0.0, 1.0, 0.1]
_BOOLEANS: Final = [True, None, False, False, True, True, None, False, True, False, True, True]
_TEXTS: Final = [
    *("a,b", None, "", "a,b", "2024-01-31", "31/01/2024", "2024-01-31 12:30:00", "7", "1.5", "[1, 2]"),
    *("12:30:15", "True b"),
]
_DAYS: Final = [19_800, None, 19_801, 19_800, 0, 19_700, 19_830, None, 20_100, 19_789, 1, 19_802]
_LONG: Final = [5, 10, 11] * 50
"""Indexes of inner values without a null or NaN. There are enough for a sum of floats to depend on the order of addition."""
_LISTS: Final = [[0, 3], None, [], [0, 3], [4], _LONG, [], [1, 5], [9, 4, 4], [2, 10], [7], [11, 0]]
"""The rows of the inner values that each probe list has."""
_IN_DAY: Final = [3_600, None, 0, 3_600, 86_399, 45_015, 45_000, None, 60, 7_261, 1, 2]


def probe_frame(kinds: Mapping[str, pl.DataType], *, close_together: bool) -> pl.DataFrame:
    """Return ROWS rows of these columns; each column begins at another value.

    With `close_together`, times and durations are at most 40 of their units apart.
    """
    columns = [
        _shifted(probe(kind, close_together=close_together), 5 * index).alias(name)
        for index, (name, kind) in enumerate(kinds.items())
    ]
    return pl.DataFrame([pl.Series(ROW, range(ROWS)), *columns])


@lru_cache(maxsize=1024)
def probe(kind: pl.DataType, *, close_together: bool) -> pl.Series:
    """Return ROWS values of a type; nulls if polars cannot make others."""
    try:
        return _values(kind, close_together)
    except pl.exceptions.PolarsError:
        return _series([None] * ROWS, kind)


def _values(kind: pl.DataType, close_together: bool) -> pl.Series:
    if kind.is_nested():
        return _nested(kind, close_together)
    if kind.is_temporal() and not close_together:
        return _times(kind)
    if isinstance(kind, pl.Enum):
        texts: Sequence[str | None] = [*kind.categories.to_list()[:3], None]
        return _series([texts[index % len(texts)] for index in range(ROWS)], kind)
    if isinstance(kind, (pl.String, pl.Categorical)):
        return _series(_TEXTS, kind, pl.String())
    if isinstance(kind, pl.Binary):
        return _series([None if text is None else text.encode() for text in _TEXTS], kind)
    if kind.is_float():
        return _series(_FLOATS, kind, pl.Float64())
    if isinstance(kind, pl.Boolean):
        return _series(_BOOLEANS, kind)
    least = 0 if isinstance(kind, pl.Time) else min(filter(None, _INTEGERS))
    return _series([None if number is None else max(number, least) for number in _INTEGERS], kind, pl.Int64())


def _nested(kind: pl.DataType, close_together: bool) -> pl.Series:
    if isinstance(kind, pl.Struct):
        fields = probe_frame({f.name: _instance(f.dtype) for f in kind.fields}, close_together=close_together)
        structs = fields.drop(ROW).to_struct().gather([0 if row == 3 else row for row in range(ROWS)])
        has_value = _series([row != 1 for row in range(ROWS)], pl.Boolean())
        return pl.select(pl.when(has_value).then(structs)).to_series()
    if isinstance(kind, pl.Map):
        entry = pl.Struct({"key": kind.key, "value": kind.value})
        entries = probe(pl.List(entry), close_together=close_together).to_frame("entries")
        has_keys = pl.element().struct.field("key").is_not_null()  # of each key, only the first entry
        first = has_keys & pl.element().struct.field("key").is_first_distinct()
        return entries.select(pl.col("entries").list.filter(first).list.to_map().cast(kind)).to_series()
    inner = probe(_instance(kind.inner), close_together=close_together)  # type: ignore[attr-defined]
    if isinstance(kind, pl.Array):
        arrays = [[(row // 2 * 3 + index) % ROWS for index in range(kind.size)] for row in range(ROWS)]
        arrays[5] = [_LONG[index % len(_LONG)] for index in range(kind.size)]
        arrays[7] = [9] * kind.size
        lists = [None if row == 4 else inner.gather(rows) for row, rows in enumerate(arrays)]
        return _series(lists, pl.List(inner.dtype)).list.to_array(kind.size)
    return _series([None if rows is None else inner.gather(rows) for rows in _LISTS], kind)


def _times(kind: pl.DataType) -> pl.Series:
    if isinstance(kind, pl.Date):
        return _series(_DAYS, kind, pl.Int32())
    if isinstance(kind, pl.Time):
        return _series([None if second is None else second * 10**9 for second in _IN_DAY], kind, pl.Int64())
    # Datetimes and durations: days and seconds, in the unit of the type.
    since = [
        None if day is None or second is None else datetime.timedelta(days=day, seconds=second)
        for day, second in zip(_DAYS, _IN_DAY, strict=True)
    ]
    durations = _series(since, pl.Duration(kind.time_unit))  # type: ignore[attr-defined]
    return durations if isinstance(kind, pl.Duration) else _series(durations.to_physical(), kind, pl.Int64())


def _series(values: Sequence[Any] | pl.Series, kind: pl.DataType, built_as: pl.DataType | None = None) -> pl.Series:
    """Return values of a type, cast from another one; null where it does not have the value."""
    made: pl.Series = pl.Series(values, dtype=built_as or kind).cast(kind, strict=False)
    return made


def _shifted(values: pl.Series, by: int) -> pl.Series:
    return values.gather([(row + by) % ROWS for row in range(ROWS)])


def _instance(kind: Any) -> pl.DataType:
    made: pl.DataType = kind() if isinstance(kind, type) else kind
    return made


def map_leaves(kind: pl.DataType, function: Callable[[pl.DataType], pl.DataType]) -> pl.DataType:
    """Return a type with each type in it that has none in it replaced by what the function returns for it."""
    if isinstance(kind, pl.List):
        return pl.List(map_leaves(_instance(kind.inner), function))
    if isinstance(kind, pl.Array):
        return pl.Array(map_leaves(_instance(kind.inner), function), kind.size)
    if isinstance(kind, pl.Struct):
        return pl.Struct([pl.Field(f.name, map_leaves(_instance(f.dtype), function)) for f in kind.fields])
    if isinstance(kind, pl.Map):
        return pl.Map(map_leaves(_instance(kind.key), function), map_leaves(_instance(kind.value), function))
    return function(kind)
