"""The exact number of distinct values. A part is a list of them, and their number."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

import polars as pl
import pyarrow as pa

from midstream.engine.core.errors import ConfigError, SchemaError
from midstream.engine.operators.windows.aggregates import Aggregate, Columns, Conditional, with_one_zero


class CountDistinct(Conditional):
    """The exact number of distinct values of a column as int64; nulls do not count.

    All NaN are one value, and -0.0 is 0.0. The values themselves are in state: a key or window with very many makes it
    large, and a running aggregate reads all those of a key for each batch with rows of it.

    `columns`: the name of the column, or several names: then distinct combinations are counted, of the rows in which none
    of them is null. Lists and structs raise SchemaError.
    `where`: an expression; rows for which it is not true do not count.

        >>> testing.check_aggregate(CountDistinct("x"), [{"x": 3}, {"x": None}, {"x": 5}, {"x": 3}])
        2
        >>> testing.check_aggregate(CountDistinct("x", "y"), [{"x": 3, "y": 1}, {"x": 3, "y": 2}, {"x": 3, "y": 1}])
        2
    """

    def __init__(self, *columns: str, where: pl.Expr | None = None) -> None:
        if not columns:
            raise ConfigError("CountDistinct: name the column whose values are counted, or several")
        self.columns = columns
        self._where = where
        self._floats: frozenset[str] = frozenset()

    def bind(self, schema: pa.Schema) -> Aggregate:
        for column in self.columns:
            kind = schema.field(column).type
            if pa.types.is_nested(kind) or pa.types.is_null(kind):
                raise SchemaError(
                    f"distinct values of column {column!r}, which is {kind}; count one of its fields, or its text"
                )
        bound = copy(self)
        bound._floats = frozenset(name for name in self.columns if pa.types.is_floating(schema.field(name).type))
        return bound

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        if len(self.columns) == 1:
            return _distinct(pl.col(self.columns[0]))
        parts = [with_one_zero(pl.col(name)) if name in self._floats else pl.col(name) for name in self.columns]
        there = pl.all_horizontal(part.is_not_null() for part in parts)
        return _distinct(pl.struct(part.alias(f"{number}") for number, part in enumerate(parts)).filter(there))

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        return _distinct(part("values").explode())

    def finish(self, part: Columns) -> pl.Expr:
        return part("n")


def _distinct(values: pl.Expr) -> Mapping[str, pl.Expr]:
    values = values.drop_nulls().unique(maintain_order=True)
    return {"values": values, "n": values.len().cast(pl.Int64)}
