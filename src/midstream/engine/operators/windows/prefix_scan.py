"""Prefix scans: for each row of a segment, the merge of its part and of all parts before it in the segment.

A segment has the parts of one key, in their order. Sums of floats are added one by one, so that they do not depend on
where batches are cut. What has no scan of its own is merged in log2(n) rounds, each over twice the distance of the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import polars as pl

from midstream.engine.core.batches import index_of
from midstream.engine.operators.windows.aggregates import Aggregate, Pick, folds_of, pick_of
from midstream.engine.operators.windows.dense_groupby import DenseGroupBy
from midstream.engine.operators.windows.distinct_count import CountDistinct
from midstream.engine.state.table_runs import physical, typed

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]
Values = npt.NDArray[Any]

ROUNDS: Final = 32
"""A segment with more rows than this is accumulated alone; shorter ones are accumulated together, a row of each at a time."""
_AT: Final = "__at"
_INT64: Final = np.iinfo(np.int64)
_UFUNCS: Final[Mapping[str, tuple[np.ufunc, np.ufunc]]] = {
    "count": (np.add, np.add),
    "sum": (np.add, np.add),
    "min": (np.minimum, np.fmin),
    "max": (np.maximum, np.fmax),
}
"""For integers, and for floats: a minimum or maximum is NaN only if there is nothing else."""


class Segments:
    """Consecutive rows in segments; `is_first` marks the first row of each."""

    def __init__(self, is_first: Bools) -> None:
        assert is_first[0]
        self.starts = np.flatnonzero(is_first)
        self.lengths = np.diff(self.starts, append=len(is_first))
        self.is_first = is_first
        self._long: list[slice] = []
        """The segments that are accumulated alone."""
        self._rounds: list[Int64s] = []
        """The second rows of all others that have one, their third rows, and so on."""
        self._divide()

    def _divide(self) -> None:
        starts, lengths = self.starts, self.lengths
        is_long = lengths > ROUNDS
        if is_long.any():
            ends = starts + lengths
            self._long = list(map(slice, starts[is_long].tolist(), ends[is_long].tolist()))
            starts, lengths = starts[~is_long], lengths[~is_long]
        for step in range(1, ROUNDS):
            left = np.flatnonzero(lengths > step)
            if not len(left):
                break
            starts, lengths = starts[left], lengths[left]
            self._rounds.append(starts + step)

    @cached_property
    def last(self) -> Int64s:
        """The last row of each segment."""
        last: Int64s = self.starts + self.lengths - 1
        return last

    def accumulate(self, ufunc: np.ufunc, values: Values) -> Values:
        """Return the left fold of each row's segment up to that row."""
        with np.errstate(over="ignore", invalid="ignore"):  # as in any sum of floats: inf, and NaN for inf - inf
            return self._accumulate(ufunc, values)

    def _accumulate(self, ufunc: np.ufunc, values: Values) -> Values:
        found = values.copy()
        for rows in self._long:
            found[rows] = ufunc.accumulate(values[rows])
        for at in self._rounds:
            found[at] = ufunc(found[at - 1], found[at])
        return found

    def latest(self, marked: Bools) -> Int64s:
        """Return for each row the position of the last marked row of its segment up to it, or else of the first row."""
        positions = np.where(marked | self.is_first, np.arange(len(marked)), 0)
        found: Int64s = np.maximum.accumulate(positions)
        return found

    def merged(self, frame: pl.DataFrame, merge: Sequence[pl.Expr]) -> pl.DataFrame:
        """Return the prefixes of an associative `merge`, in rounds."""
        positions = np.arange(frame.height) - np.repeat(self.starts, self.lengths)
        step = 1
        while len(later := np.flatnonzero(positions >= step)):
            ends = later if len(later) > 1 else np.repeat(later, 2)  # a pair alone as two, see `Evaluation`
            pairs = pl.concat([frame[ends - step], frame[ends]])
            numbered = pairs.with_columns(pl.Series(_AT, np.tile(np.arange(len(ends)), 2)))
            made = numbered.group_by(_AT, maintain_order=True).agg(merge).head(len(later))
            source = np.arange(frame.height)
            source[later] = frame.height + np.arange(len(later))
            frame = pl.concat([frame, made.select(frame.columns)])[source]
            step *= 2
        return frame


class Prefixes(Protocol):
    """The columns of a part after each row of the segments."""

    def at(self, rows: Int64s) -> Sequence[pl.Series]:
        """Return the columns after these rows."""
        ...


@dataclass(frozen=True, slots=True)
class Scanned:
    """Columns with a value for each row of the segments."""

    columns: Sequence[pl.Series]

    def at(self, rows: Int64s) -> Sequence[pl.Series]:
        index = index_of(rows)
        return [column[index] for column in self.columns]


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The values of `column` for each row of the segments, as numbers."""

    column: pl.Series
    values: Values

    def at(self, rows: Int64s) -> Sequence[pl.Series]:
        return [typed(self.column, self.values[rows])]


@dataclass(frozen=True, slots=True)
class _Chosen:
    """`position`: for each row of the segments, the position in `columns` of the values that are chosen."""

    columns: Sequence[pl.Series]
    position: Int64s

    def at(self, rows: Int64s) -> Sequence[pl.Series]:
        index = index_of(self.position[rows])
        return [column[index] for column in self.columns]


def scan(
    aggregate: Aggregate, columns: Sequence[pl.Series], source: Int64s, segments: Segments, merge: Sequence[pl.Expr]
) -> list[Prefixes]:
    """Return the prefixes of the columns of the part of `aggregate`.

    `source`: for each row of the segments, its position in the columns.
    """
    folds = folds_of(aggregate).values()
    if folds and all(_is_numeric(column) for column in columns):
        return [_folded(each, column, source, segments) for each, column in zip(folds, columns, strict=True)]
    pick = pick_of(aggregate, pl.lit(0))
    if pick is not None:
        by = dict(zip(pick.of_row, columns, strict=True))[pick.by]
        return [_Chosen(columns, source[_chosen(by[index_of(source)], segments, pick)])]
    ordered = Scanned(columns).at(source)
    if isinstance(aggregate, CountDistinct):
        return [Scanned(_distinct(ordered[0], ordered[1], segments))]
    return [Scanned(segments.merged(pl.DataFrame(ordered), merge).get_columns())] if columns else []


def folded_onto(kind: str, before: Values, firsts: Int64s, values: Values, segments: Segments) -> Values:
    """Return the prefixes of `values`, where `before` comes before these first rows of segments. Changes `values`."""
    ufunc = _UFUNCS[kind][values.dtype.kind == "f"]
    with np.errstate(over="ignore", invalid="ignore"):
        values[firsts] = ufunc(before, values[firsts])
    return segments.accumulate(ufunc, values)


def _distinct(values: pl.Series, counts: pl.Series, segments: Segments) -> tuple[pl.Series, pl.Series]:
    """Return lists of the distinct values up to the last row of each segment, empty in other rows, and numbers for all."""
    numbers = np.repeat(np.arange(len(segments.starts)), segments.lengths)
    flat = pl.DataFrame({"segment": numbers, "row": np.arange(len(values)), "value": values})
    flat = flat.explode("value").filter(pl.col("value").is_not_null())
    new = flat.filter(pl.struct("segment", "value").is_first_distinct())
    added = np.bincount(new.get_column("row").to_numpy(), minlength=len(values))
    found = pl.Series(counts.name, segments.accumulate(np.add, added.astype(np.int64)), counts.dtype)
    lists = new.group_by("segment").agg("value")
    last = pl.DataFrame({"segment": np.arange(len(segments.starts)), "row": segments.last})
    placed = pl.DataFrame({"row": np.arange(len(values))}).join(
        last.join(lists, on="segment"), on="row", how="left", maintain_order="left"
    )
    return placed.get_column("value").cast(values.dtype).fill_null([]).alias(values.name), found


def _is_numeric(column: pl.Series) -> bool:
    return column.dtype.is_integer() or column.dtype.is_float() or column.dtype.is_temporal()


def _folded(each: DenseGroupBy, column: pl.Series, source: Int64s, segments: Segments) -> Prefixes:
    whole = physical(column)
    is_float = whole.dtype.is_float()
    ufunc = _UFUNCS[each.kind][is_float]
    if not column.null_count():
        return _Numbers(column, segments.accumulate(ufunc, whole.to_numpy()[source]))
    # Only an extreme has nulls, at rows that do not count: each has the extreme of the values before it.
    there = column.is_not_null().to_numpy()
    neutral = np.nan if is_float else _neutral(each.kind, whole.dtype)
    values = segments.accumulate(ufunc, whole.fill_null(neutral).to_numpy()[source])
    any_there = segments.accumulate(np.logical_or, there[source])
    # before the cast: the neutral value is no time of day
    found = pl.select(pl.when(pl.Series(any_there)).then(pl.Series(values))).to_series()
    return Scanned([found.cast(column.dtype).alias(column.name)])


def _neutral(kind: str, dtype: Any) -> int:
    bound = dtype.max() if kind == "min" else dtype.min()
    return int(pl.select(bound).item())


def _chosen(by: pl.Series, segments: Segments, pick: Pick) -> Int64s:
    """Return for each row the position of the row that is chosen among those up to it; one without `by` never is."""
    whole = by if by.dtype.is_decimal() else physical(by)
    if not whole.dtype.is_integer() or whole.dtype == pl.UInt64:
        whole = whole.rank("dense").cast(pl.Int64)
    whole, there = whole.cast(pl.Int64), np.ones(len(by), np.bool_)
    if by.null_count():
        there = by.is_not_null().to_numpy()
        whole = whole.fill_null(_INT64.min if pick.takes_largest else _INT64.max)
    values = whole.to_numpy()
    best = segments.accumulate(np.maximum if pick.takes_largest else np.minimum, values)
    if pick.takes_last:
        return segments.latest(there & (values == best))
    before = np.empty_like(best)
    before[1:] = best[:-1]
    had_any = segments.accumulate(np.logical_or, there)
    had_before = np.zeros(len(there), np.bool_)
    had_before[1:] = had_any[:-1] & ~segments.is_first[1:]
    is_better = values > before if pick.takes_largest else values < before
    return segments.latest(there & (is_better | ~had_before))
