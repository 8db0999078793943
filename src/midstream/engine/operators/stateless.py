"""Operators without state: filter and projections by expressions; the base of those that call functions.

All are built on the driver, where their schemas and expressions are checked: a missing column is reported before the
job runs. `schema` is always the schema of what an operator emits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import polars as pl
import pyarrow as pa

from midstream.engine.core.batches import canonical_schema, conform, from_polars, invalid_value, single_batch, to_polars
from midstream.engine.core.errors import JobError, SchemaError
from midstream.engine.core.python_values import kind_of
from midstream.engine.operators.base import Operator, OperatorContext, Output
from midstream.engine.operators.elementwise import check_row_by_row
from midstream.engine.operators.expressions import (
    EXPRESSION_ERRORS,
    Evaluation,
    columns_read,
    infer_schema,
    infer_type,
    is_plain_column,
)
from midstream.engine.operators.row_conversion import user_error


class Stateless(Operator):
    """Base of the stateless operators. `name` is the operator's display name, which errors show."""

    keeps_splits = True

    def __init__(self, name: str, schema: pa.Schema) -> None:
        self.schema = canonical_schema(schema)
        self._where = f"operator {name!r}"
        self._out: Output

    def open(self, context: OperatorContext, out: Output) -> None:
        self._out = out


class FilterOperator(Stateless):
    """Keeps the rows for which `predicate` is true; a row for which it is null is dropped.

    `predicate`: a boolean polars expression over the columns.
    Raises SchemaError immediately for an unknown column or an expression that is not boolean.
    """

    keeps_rows = True

    def __init__(self, name: str, predicate: pl.Expr, schema: pa.Schema) -> None:
        super().__init__(name, schema)
        self._predicate = predicate
        check_row_by_row([predicate], self.schema, self._where)
        self._reads = columns_read([predicate], self.schema)
        self._evaluation = Evaluation([predicate])
        kind = infer_type(self.schema, predicate, self._where)
        if kind != pa.bool_():
            raise SchemaError(f"{self._where}: a filter must be boolean; this one is {kind}: {predicate}")

    def input_column(self, name: str) -> str | None:
        return name

    def columns_needed(self, wanted: frozenset[str]) -> frozenset[str]:
        return wanted.union(self._reads)

    def narrowed(self, columns: frozenset[str]) -> FilterOperator:
        made = copy(self)
        made.schema = pa.schema([field for field in self.schema if field.name in columns])
        return made

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        kept = self._kept(batch)
        if kept.num_rows:
            self._out.emit(kept)

    def _kept(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        predicate = self._predicate
        try:
            # with_columns, not select: it gives a literal as many rows as the batch has
            frame = self._evaluation.of(
                to_polars(batch.select(self._reads)), lambda rows: rows.with_columns(predicate.alias("__keep"))
            )
        except EXPRESSION_ERRORS as error:
            raise expression_error(self._where, "the expression", error, batch, self._reads, [predicate]) from error
        mask = frame.get_column("__keep")
        if mask.all(ignore_nulls=False):
            return batch
        return batch.filter(mask.to_arrow(compat_level=pl.CompatLevel.oldest()))


class ProjectOperator(Stateless):
    """Computes the columns `exprs`; with `keep`, after all input columns, or in place of one with the same name.

    Each expression computes each row on its own. `input_schema` is that of the input rows; `schema` follows from it.
    """

    keeps_rows = keeps_every_row = True

    def __init__(self, name: str, exprs: Sequence[pl.Expr], input_schema: pa.Schema, *, keep: bool) -> None:
        where = f"operator {name!r}"
        check_row_by_row(exprs, input_schema, where)
        super().__init__(name, infer_schema(input_schema, exprs, where, keep=keep))
        # an unchanged column does not pass through polars, which would copy its text twice
        self._exprs = tuple(expr for expr in exprs if not is_plain_column(expr))
        self._made = infer_schema(input_schema, self._exprs, where, keep=False)
        self._reads = columns_read(self._exprs, input_schema)
        self._evaluation = Evaluation(self._exprs)
        made = frozenset(self._made.names)
        self._sources = [(field.name, field.name in made) for field in self.schema]

    def input_column(self, name: str) -> str | None:
        return None if name in self._made.names else name

    def columns_needed(self, wanted: frozenset[str]) -> frozenset[str]:
        read = self._reads if self._made.names else ()
        return frozenset(read).union(name for name, is_made in self._sources if not is_made and name in wanted)

    def narrowed(self, columns: frozenset[str]) -> ProjectOperator:
        made = copy(self)
        made._sources = [(name, is_made) for name, is_made in self._sources if is_made or name in columns]
        made.schema = pa.schema([self.schema.field(name) for name, _ in made._sources])
        return made

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        made = batch
        if self._made.names:  # there are none of a selector that matches no column
            try:
                frame = self._evaluation.of(to_polars(batch.select(self._reads)), self._computed)
            except EXPRESSION_ERRORS as error:
                raise expression_error(self._where, "an expression", error, batch, self._reads, self._exprs) from error
            made = from_polars(frame, self._made, self._where)
        columns = [(made if is_made else batch).column(name) for name, is_made in self._sources]
        self._out.emit(pa.RecordBatch.from_arrays(columns, schema=self.schema))

    def _computed(self, rows: pl.DataFrame) -> pl.DataFrame:
        frame = rows.select_seq(*self._exprs)
        if frame.height == rows.height:
            return frame
        return rows.with_columns_seq(*self._exprs)[self._made.names]  # select turns literals into one row


class ColumnsOperator(Stateless):
    """Passes on the columns that `names` has as keys, each under its new name. Nothing passes through polars."""

    keeps_rows = keeps_every_row = True

    def __init__(self, name: str, names: Mapping[str, str], schema: pa.Schema) -> None:
        super().__init__(name, pa.schema([schema.field(old).with_name(new) for old, new in names.items()]))
        self._names = {new: old for old, new in names.items()}

    def input_column(self, name: str) -> str | None:
        return self._names[name]

    def columns_needed(self, wanted: frozenset[str]) -> frozenset[str]:
        return frozenset(old for new, old in self._names.items() if new in wanted)

    def narrowed(self, columns: frozenset[str]) -> ColumnsOperator:
        made = copy(self)
        made._names = {new: old for new, old in self._names.items() if old in columns}
        made.schema = pa.schema([self.schema.field(name) for name in made._names])
        return made

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        self._out.emit(
            pa.RecordBatch.from_arrays([batch.column(name) for name in self._names.values()], schema=self.schema)
        )


def expression_error(
    where: str, what: str, error: BaseException, batch: pa.RecordBatch, reads: Sequence[str], exprs: Sequence[pl.Expr]
) -> JobError:
    """Return the JobError for expressions that raised; they compute each row on its own, so the row is found by bisection."""
    frame = to_polars(batch.select(reads))
    first, rows = 0, batch.num_rows
    while rows > 1:
        half = rows // 2
        if _raises(frame.slice(first, half), exprs):
            rows = half
        else:
            first, rows = first + half, rows - half
    found = rows == 1 and _raises(frame.slice(first, 1), exprs)  # otherwise no single row raises it
    return user_error(where, what, error, (batch, first) if found else None)


def _raises(frame: pl.DataFrame, exprs: Sequence[pl.Expr]) -> bool:
    try:
        frame.with_columns(*exprs)
    except EXPRESSION_ERRORS:
        return True
    return False


def made_batch(made: Any, schema: pa.Schema, where: str, what: str) -> pa.RecordBatch:
    """Convert what the user's function `what` returned to a batch of `schema`.

    Raises JobError for anything but a frame, batch or table, and SchemaError naming the column that does not fit.
    """
    if isinstance(made, pl.DataFrame):
        return from_polars(made, schema, f"{where}: the result of {what}")
    if isinstance(made, (pa.Table, pa.RecordBatch)):
        batch = single_batch(made) if isinstance(made, pa.Table) else made
        wrong = invalid_value(batch)
        if wrong is not None:
            row, why = wrong
            raise JobError(f"{where}: row {row} of the result of {what}: {why}")
        return conform(batch, schema, f"{where}: the result of {what}")
    raise JobError(
        f"{where}: {what} returned {kind_of(made)}; return a polars DataFrame, an Arrow RecordBatch or Table, or, with "
        "form='pandas', a pandas DataFrame"
    )
