"""Decomposable aggregates: what windows compute.

An aggregate is three steps, so that rows can be reduced batch by batch and the parts put together
later: `partial` reduces rows to a few columns, `merge` reduces such parts to one, `finish` makes
the value of them. All three are polars expressions. What Python code alone can say is an
`Accumulator`.

    window.aggregate(n=Count(), total=Sum("value"), longest=Max("delay"))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Generic, TypeAlias, TypeVar

import polars as pl
import pyarrow as pa

Columns: TypeAlias = Callable[[str], pl.Expr]
"""Gives the expression of a partial column by the name that `partial` gave it."""

A = TypeVar("A")


class Aggregate(ABC):
    """Subclass this for an aggregate of your own; it must pickle.

    Order: within `partial`, rows come as they arrived; within `merge`, parts in the order they
    were made. `event_time` is the expression of the stream's event-time column.
    """

    columns: tuple[str, ...] = ()
    """Input columns that it reads; a missing one is reported before anything runs."""

    @abstractmethod
    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        """Named columns, each an expression that reduces a group of input rows to one value."""

    @abstractmethod
    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        """For each name of `partial`, an expression that reduces a group of parts to one, of the same type."""

    @abstractmethod
    def finish(self, part: Columns) -> pl.Expr:
        """The result, row by row, from a merged part."""


class Count(Aggregate):
    """How many rows, or, with a column, in how many of them it is not null. int64."""

    def __init__(self, column: str | None = None) -> None:
        self.columns = () if column is None else (column,)

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        count = pl.col(self.columns[0]).count() if self.columns else pl.len()
        return {"n": count.cast(pl.Int64)}

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        return {"n": part("n").sum()}

    def finish(self, part: Columns) -> pl.Expr:
        return part("n")


class Sum(Aggregate):
    """The sum of a numeric, boolean, or duration column; nulls count as nothing.

    Integers and booleans give int64 (uint64 for unsigned ones), floats float64.
    """

    def __init__(self, column: str) -> None:
        self.columns = (column,)

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        return {"sum": _widened(pl.col(self.columns[0])).sum()}

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        return {"sum": part("sum").sum()}

    def finish(self, part: Columns) -> pl.Expr:
        return part("sum")


class Min(Aggregate):
    """The smallest value of a column, nulls aside; null when there is none."""

    def __init__(self, column: str) -> None:
        self.columns = (column,)

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        return {"min": pl.col(self.columns[0]).min()}

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        return {"min": part("min").min()}

    def finish(self, part: Columns) -> pl.Expr:
        return part("min")


class Max(Aggregate):
    """The largest value of a column, nulls aside; null when there is none."""

    def __init__(self, column: str) -> None:
        self.columns = (column,)

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        return {"max": pl.col(self.columns[0]).max()}

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        return {"max": part("max").max()}

    def finish(self, part: Columns) -> pl.Expr:
        return part("max")


class Mean(Aggregate):
    """The mean of a numeric column, nulls aside, as float64; null when there is none."""

    def __init__(self, column: str) -> None:
        self.columns = (column,)

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        column = pl.col(self.columns[0])
        return {"sum": column.cast(pl.Float64).sum(), "n": column.count().cast(pl.Int64)}

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        return {"sum": part("sum").sum(), "n": part("n").sum()}

    def finish(self, part: Columns) -> pl.Expr:
        return pl.when(part("n") > 0).then(part("sum") / part("n"))


class First(Aggregate):
    """The value, possibly null, of the row with the smallest event time; of several, the one that arrived first."""

    def __init__(self, column: str) -> None:
        self.columns = (column,)

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        return _of_first(pl.col(self.columns[0]), event_time)

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        return _of_first(part("value"), part("at"))

    def finish(self, part: Columns) -> pl.Expr:
        return part("value")


class Last(Aggregate):
    """The value, possibly null, of the row with the largest event time; of several, the one that arrived last."""

    def __init__(self, column: str) -> None:
        self.columns = (column,)

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        return _of_last(pl.col(self.columns[0]), event_time)

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        return _of_last(part("value"), part("at"))

    def finish(self, part: Columns) -> pl.Expr:
        return part("value")


class Accumulator(ABC, Generic[A]):
    """An aggregate in plain Python, for what expressions cannot say; one to two hundred times slower.

    The accumulator is anything that pickles. `add` and `merge` may change and return their first
    argument. `columns`: the input columns it reads; `type`: the Arrow type of its result.
    """

    columns: tuple[str, ...] = ()
    type: pa.DataType

    @abstractmethod
    def init(self) -> A:
        """A new, empty accumulator."""

    @abstractmethod
    def add(self, accumulator: A, row: dict[str, object]) -> A:
        """`row` holds just `columns`."""

    @abstractmethod
    def merge(self, first: A, second: A) -> A:
        """Both together; `first` is the one made earlier."""

    @abstractmethod
    def result(self, accumulator: A) -> object: ...


AnyAggregate: TypeAlias = "Aggregate | Accumulator[object]"
