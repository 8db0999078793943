"""Aggregates that are lists of values. A part is the list, and the list of what the values are ordered by."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from copy import copy

import polars as pl
import pyarrow as pa

from midstream.engine.core.config import is_whole
from midstream.engine.core.errors import ConfigError, SchemaError
from midstream.engine.operators.windows.aggregates import Aggregate, Columns, Conditional, with_one_zero


class _Listed(Conditional):
    """Base of lists of the values of one column, in the order of `by`, then of the values themselves."""

    _limit: int | None
    _descending = False
    _has_floats = False
    _is_nested = False

    def bind(self, schema: pa.Schema) -> Aggregate:
        bound = copy(self)
        kind = schema.field(self.columns[0]).type
        bound._has_floats, bound._is_nested = pa.types.is_floating(kind), pa.types.is_nested(kind)
        return bound

    @abstractmethod
    def _by(self, event_time: pl.Expr) -> pl.Expr:
        """Return what rows are ordered by; a row in which it is null is not in the list."""

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        value, by = pl.col(self.columns[0]), self._by(event_time)
        if self._has_floats:
            value = with_one_zero(value)
        counts = value.is_not_null() & by.is_not_null()
        return self._ordered(value.filter(counts), by.filter(counts))

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        # no value is null, but an empty list becomes one
        return self._ordered(*(part(name).explode().drop_nulls() for name in ("values", "by")))

    def _ordered(self, values: pl.Expr, by: pl.Expr) -> Mapping[str, pl.Expr]:
        order = [by] if self._is_nested else [by, values]
        descending = [self._descending, False][: len(order)]
        found = {
            name: each.sort_by(order, descending=descending, maintain_order=True)
            for name, each in (("values", values), ("by", by))
        }
        return {name: each if self._limit is None else each.head(self._limit) for name, each in found.items()}

    def finish(self, part: Columns) -> pl.Expr:
        return part("values")


class Collect(_Listed):
    """The list of the values of a column, in the order of event time; nulls are left out.

    Values of one event time are in ascending order, so that the list does not depend on arrival; only lists and structs
    are in the order of arrival then.

    `column`: the name of the column, of any type.
    `limit`: the list has no more than the first values; without it, all of them are in state.
    `where`: an expression; rows for which it is not true do not count.

        >>> testing.check_aggregate(Collect("x"), [{"x": 3}, {"x": None}, {"x": 5}])
        [3, 5]
    """

    def __init__(self, column: str, *, limit: int | None = None, where: pl.Expr | None = None) -> None:
        if limit is not None and not is_whole(limit, 1):
            raise ConfigError(f"Collect: limit {limit!r} is not a positive whole number")
        self.columns = (column,)
        self._limit = limit
        self._where = where

    def _parameters(self) -> Mapping[str, object]:
        return {"limit": self._limit}

    def _by(self, event_time: pl.Expr) -> pl.Expr:
        return event_time


class TopN(_Listed):
    """The list of the values of the rows with the largest, or smallest, values of a column, in that order.

    Rows in which one of the two columns is null, or the second is NaN, do not count. Rows that are equal in `by` are
    ordered by the value, ascending; only lists and structs are in the order of arrival then. For whole rows see `top` of
    windows.

    `column`: the name of the column of the values, of any type.
    `count`: how many values at most.
    `by`: the name of the column that decides; without it, the values themselves do. Lists and structs raise SchemaError.
    `descending`: whether the largest come first.
    `where`: an expression; rows for which it is not true do not count.

        >>> prices = [{"shop": "a", "price": 3}, {"shop": "b", "price": 9}, {"shop": "c", "price": 5}]
        >>> testing.check_aggregate(TopN("shop", 2, by="price"), prices)
        ['b', 'c']
    """

    def __init__(
        self,
        column: str,
        count: int,
        *,
        by: str | None = None,
        descending: bool = True,
        where: pl.Expr | None = None,
    ) -> None:
        if not is_whole(count, 1):
            raise ConfigError(f"TopN: count {count!r} is not a positive whole number")
        self.columns = (column, column if by is None else by)
        self._limit = count
        self._descending = descending
        self._where = where
        self._by_floats = False

    def _parameters(self) -> Mapping[str, object]:
        return {"count": self._limit, "descending": self._descending}

    def bind(self, schema: pa.Schema) -> Aggregate:
        by = self.columns[1]
        kind = schema.field(by).type
        if pa.types.is_nested(kind) or pa.types.is_null(kind):
            raise SchemaError(f"TopN by column {by!r}, which is {kind}: such values have no order")
        bound = super().bind(schema)
        assert isinstance(bound, TopN)
        bound._by_floats = pa.types.is_floating(kind)
        return bound

    @property
    def _depends_on_arrival(self) -> bool:
        return self._is_nested

    def _by(self, event_time: pl.Expr) -> pl.Expr:
        by = pl.col(self.columns[1])
        return with_one_zero(by.fill_nan(None)) if self._by_floats else by
