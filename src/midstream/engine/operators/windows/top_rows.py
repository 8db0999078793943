"""The first rows of each key, in a window or so far, in the order of some columns, as an aggregation whose parts are lists
of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import polars as pl
import pyarrow as pa

from midstream.engine.core.batches import canonical_schema, check_held_by_polars
from midstream.engine.core.errors import ConfigError, SchemaError, StorageError
from midstream.engine.operators.event_time_column import TimeColumn
from midstream.engine.operators.row_conversion import require_columns
from midstream.engine.operators.windows.aggregates import Aggregate, Columns
from midstream.engine.operators.windows.dense_groupby import NO_FOLDS, DenseGroupBy
from midstream.engine.operators.windows.window_aggregation import WindowAggregation
from midstream.engine.operators.windows.window_specs import WINDOW_END, WINDOW_START

RANK: Final = "rank"
_ROWS: Final = "__rows"
"""The column with the list of a window's rows."""
_IS_NEW: Final = "__is_new"


class _Order:
    """An order of rows with `columns`: by some of them, then by all others that have an order, ascending.

    Nulls and NaN come last, whatever the direction; where only these and zeros differ, the first column decides in which
    they do.
    """

    def __init__(self, by: Sequence[str], descending: bool, columns: Mapping[str, pa.DataType]) -> None:
        rest = [name for name, kind in columns.items() if name not in by and _is_ordered(kind)]
        self._names = (*by, *rest)
        # not a set: its order differs between processes
        self._floats = tuple(name for name, kind in columns.items() if pa.types.is_floating(kind))
        self._descending = [descending] * len(by) + [False] * len(rest)

    def sorted(self, frame: pl.DataFrame, prefix: str = "") -> pl.DataFrame:
        """Return the rows in this order. `prefix`: that of the names of the columns."""
        by = [
            pl.col(prefix + name).fill_nan(None) if name in self._floats else pl.col(prefix + name)
            for name in self._names
        ]
        last = [expr for name in self._floats for expr in _as_equal(prefix + name, frame)]
        descending = [*self._descending, *(False for _ in last)]
        return frame.sort(*by, *last, descending=descending, nulls_last=True, maintain_order=True)


def _as_equal(name: str, frame: pl.DataFrame) -> list[pl.Expr]:
    """Return what orders values that are equal by the order: NaN before null, 0.0 before -0.0, if there are any."""
    value = pl.col(name)
    keys = [value.is_null(), pl.lit(1.0) / value < 0]
    odd = [value.is_nan().any(), ((value == 0) & keys[1]).any()]
    return [key for key, there in zip(keys, frame.select(a=odd[0], b=odd[1]).row(0), strict=True) if there]


def _is_ordered(kind: pa.DataType) -> bool:
    return not pa.types.is_nested(kind) and not pa.types.is_null(kind)


class _FirstRows(Aggregate):
    """Lists of the first `count` values of each column. Rows, and values of parts, come in their order."""

    def __init__(self, count: int, columns: Sequence[str]) -> None:
        self.columns = tuple(columns)
        self._count = count

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        return {column: pl.col(column).head(self._count) for column in self.columns}

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        return {column: part(column).explode().head(self._count) for column in self.columns}

    def finish(self, part: Columns) -> pl.Expr:
        return part(self.columns[0]).list.len()


class TopAggregation(WindowAggregation):
    """The first `count` rows of each key in the order of the columns `by`.

    A result is several rows: the keys, the `bounds`, `rank` (from 1), and the other columns of the row, except those
    that are called like one of these.
    """

    def __init__(
        self,
        name: str,
        keys: Sequence[str],
        event_time: str | TimeColumn,
        count: int,
        by: Sequence[str],
        descending: bool,
        schema: pa.Schema,
        bounds: Sequence[str] = (WINDOW_START, WINDOW_END),
    ) -> None:
        where = f"operator {name!r}"
        schema = canonical_schema(schema)
        check_held_by_polars(schema, where)
        columns = {field.name: field.type for field in schema if field.name not in keys}
        require_columns(schema, by, where, "column")
        for column in by:
            if column in keys:
                raise ConfigError(f"{where}: by={column!r} is a key, of which all rows of a window have the same value")
            if not _is_ordered(columns[column]):
                raise SchemaError(f"{where}: by={column!r} is {columns[column]}: such values have no order")
        if RANK in keys:
            raise ConfigError(f"{where}: the key column must not be called {RANK!r}; rename it first")
        self._order = _Order(by, descending, columns)
        self._count = count
        super().__init__(name, keys, event_time, {_ROWS: _FirstRows(count, tuple(columns))}, schema, bounds)
        self.settings = {
            "the rows of a window": f"the {count} {'largest' if descending else 'smallest'} by {', '.join(by)}"
        }
        self._lists = {f"{_ROWS}:{column}": column for column in columns}
        self._own_arguments = (name, tuple(keys), event_time, count, tuple(by), descending, schema, tuple(bounds))
        self._replaced = [name for name in (*bounds, RANK) if name in columns]
        self.schema = pa.schema(
            [
                *(schema.field(key) for key in keys),
                *(self.schema.field(bound) for bound in bounds),
                pa.field(RANK, pa.int64()),
                *(pa.field(column, kind) for column, kind in columns.items() if column not in self._replaced),
            ]
        )

    def __reduce__(self) -> tuple[type[WindowAggregation], tuple[object, ...]]:
        return TopAggregation, self._own_arguments

    def _reduce(
        self, frame: pl.DataFrame, also_by: Sequence[str] = (), also: Mapping[str, DenseGroupBy] = NO_FOLDS
    ) -> pl.DataFrame:
        return super()._reduce(self._order.sorted(frame), also_by, also)

    def merge(
        self, parts: Sequence[pl.DataFrame], also_by: Sequence[str] = (), also: Mapping[str, DenseGroupBy] = NO_FOLDS
    ) -> pl.DataFrame:
        frame = parts[0] if len(parts) == 1 else pl.concat(parts, rechunk=True)
        by, lists = (*also_by, *self.by), list(self._lists)
        # not with expressions in agg(): there, polars 2.1 returns wrong values for lists of structs that are sorted
        rows = self._order.sorted(frame.select(*by, *lists).explode(lists), f"{_ROWS}:")
        merged = rows.group_by(by, maintain_order=True).agg(pl.col(lists).head(self._count))
        if not also:
            return merged
        others = frame.group_by(by).agg(each.expression.alias(name) for name, each in also.items())
        return merged.join(others, on=by, how="left", maintain_order="left").select(*by, *also, *lists)

    def update(self, known: pl.DataFrame, more: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        first, lists = next(iter(self._lists)), list(self._lists)
        marked = [
            part.select(*self.by, *lists, pl.lit(is_new).repeat_by(pl.col(first).list.len()).alias(_IS_NEW))
            for part, is_new in ((known, False), (more, True))
        ]
        # of equal rows, those that are known come first
        rows = self._order.sorted(pl.concat(marked).explode(*lists, _IS_NEW), f"{_ROWS}:")
        total = rows.group_by(self.by, maintain_order=True).agg(pl.col(*lists, _IS_NEW).head(self._count))
        is_changed = total.get_column(_IS_NEW).list.any()
        total = total.drop(_IS_NEW)
        return total, total.filter(is_changed)

    def check_restored(self, parts: pl.DataFrame) -> None:
        lengths = parts.select(pl.col(*self._lists).list.len().fill_null(0))
        first = lengths.get_column(lengths.columns[0])
        if (first == 0).any() or any(not (lengths.get_column(name) == first).all() for name in lengths.columns[1:]):
            raise StorageError(
                f"{self.where}: the state in the checkpoint has rows of which some columns are missing: it is damaged, or "
                "midstream has not written it. To go back to an older checkpoint, name it with --from"
            )

    def finish(self, merged: pl.DataFrame) -> pl.DataFrame:
        ranks = pl.int_ranges(1, pl.col(next(iter(self._lists))).list.len() + 1).alias(RANK)
        kept = {part: column for part, column in self._lists.items() if column not in self._replaced}
        ranked = merged.with_columns(ranks).drop(part for part in self._lists if part not in kept)
        return ranked.explode(*kept, RANK).rename(kept)
