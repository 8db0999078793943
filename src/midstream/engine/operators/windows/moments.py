"""Variance, standard deviation and covariance: parts are a count, means, and a sum of products of deviations from them.

Such parts are merged without loss (Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance"): a sum of
squares minus the square of a sum would lose all digits where values are large and close together.
"""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl
import pyarrow as pa

from midstream.engine.core.errors import ConfigError
from midstream.engine.operators.windows.aggregates import Aggregate, Columns, Conditional, numeric_kind


class _Moments(Conditional):
    """Base: the mean product of the deviations of two columns, which may be the same, from their means."""

    def __init__(self, first: str, second: str, ddof: int, where: pl.Expr | None) -> None:
        if isinstance(ddof, bool) or not isinstance(ddof, int) or ddof < 0:
            raise ConfigError(
                f"{type(self).__name__}: ddof is {ddof!r}; it is 1 for a sample, 0 for a whole population"
            )
        self.columns = (first,) if first == second else (first, second)
        self._ddof = ddof
        self._where = where

    def bind(self, schema: pa.Schema) -> Aggregate:
        for column in self.columns:
            numeric_kind(schema, column, type(self).__name__.lower(), durations=False)
        return self

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        columns = [pl.col(name).cast(pl.Float64) for name in self.columns]
        there = pl.all_horizontal(column.is_not_null() for column in columns)
        x, y = (pl.when(there).then(column) for column in (columns[0], columns[-1]))
        products = ((x - x.mean()) * (y - y.mean())).sum()
        return {"n": x.count().cast(pl.Int64), "x": x.mean(), "y": y.mean(), "products": products}

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        n = part("n")
        means = {name: _mean_of_means(part(name), n) for name in "xy"}
        dx, dy = (part(name).fill_null(0) - means[name].fill_null(0) for name in "xy")
        between = pl.when(n > 0).then(n * dx * dy).otherwise(0.0).sum()
        return {"n": n.sum(), **means, "products": part("products").sum() + between}

    def finish(self, part: Columns) -> pl.Expr:
        n = part("n")
        return pl.when(n > self._ddof).then(part("products") / (n - self._ddof))


def _mean_of_means(mean: pl.Expr, n: pl.Expr) -> pl.Expr:
    # as a distance from one of them: a single part stays as it is, and large means lose no digits
    origin = mean.drop_nulls().first()
    return origin + ((mean - origin) * n).sum() / n.sum()


class Variance(_Moments):
    """The variance of a numeric, boolean or decimal column as float64, ignoring nulls.

    Null if there are no more than `ddof` values. It keeps its digits where values are large and close together; the last
    ones may depend on how rows arrive.

    `column`: the name of the column.
    `ddof`: 1 for the variance of a sample, as in SQL and polars; 0 for that of a population.
    `where`: an expression; rows for which it is not true do not count.

        >>> testing.check_aggregate(Variance("x"), [{"x": 3}, {"x": None}, {"x": 5}, {"x": 7}])
        4.0
    """

    def __init__(self, column: str, *, ddof: int = 1, where: pl.Expr | None = None) -> None:
        super().__init__(column, column, ddof, where)


class StdDev(Variance):
    """The standard deviation of a column, which is the root of its `Variance`.

    `column`, `ddof`, `where`: as for `Variance`.

        >>> testing.check_aggregate(StdDev("x"), [{"x": 3}, {"x": None}, {"x": 5}, {"x": 7}])
        2.0
    """

    def finish(self, part: Columns) -> pl.Expr:
        return super().finish(part).sqrt()


class Covariance(_Moments):
    """The covariance of two numeric, boolean or decimal columns as float64, over the rows in which both have a value.

    Null if there are no more than `ddof` such rows.

    `first`, `second`: the names of the columns.
    `ddof`: 1 for the covariance of a sample, as in SQL and polars; 0 for that of a population.
    `where`: an expression; rows for which it is not true do not count.

        >>> testing.check_aggregate(Covariance("x", "y"), [{"x": 3, "y": 1}, {"x": 5, "y": 2}, {"x": 7, "y": 3}])
        2.0
    """

    def __init__(self, first: str, second: str, *, ddof: int = 1, where: pl.Expr | None = None) -> None:
        super().__init__(first, second, ddof, where)
