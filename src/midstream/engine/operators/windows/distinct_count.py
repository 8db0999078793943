"""The exact number of distinct values. A part is a list of them, and their number."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl
import pyarrow as pa

from midstream.engine.core.errors import SchemaError
from midstream.engine.operators.windows.aggregates import Aggregate, Columns, Conditional


class CountDistinct(Conditional):
    """The exact number of distinct values of a column as int64; nulls do not count.

    All NaN are one value, and -0.0 is 0.0. The values themselves are in state: a key or window with very many makes it
    large, and a running aggregate reads all those of a key for each batch with rows of it.

    `column`: the name of the column; lists and structs raise SchemaError.
    `where`: an expression; rows for which it is not true do not count.

        >>> testing.check_aggregate(CountDistinct("x"), [{"x": 3}, {"x": None}, {"x": 5}, {"x": 3}])
        2
    """

    def __init__(self, column: str, *, where: pl.Expr | None = None) -> None:
        self.columns = (column,)
        self._where = where

    def bind(self, schema: pa.Schema) -> Aggregate:
        kind = schema.field(self.columns[0]).type
        if pa.types.is_nested(kind) or pa.types.is_null(kind):
            raise SchemaError(
                f"distinct values of column {self.columns[0]!r}, which is {kind}; count one of its fields, or its text"
            )
        return self

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        return _distinct(pl.col(self.columns[0]))

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        return _distinct(part("values").explode())

    def finish(self, part: Columns) -> pl.Expr:
        return part("n")


def _distinct(values: pl.Expr) -> Mapping[str, pl.Expr]:
    values = values.drop_nulls().unique(maintain_order=True)
    return {"values": values, "n": values.len().cast(pl.Int64)}
