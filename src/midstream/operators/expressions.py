"""Polars expressions as parts of a job: checked on the driver against the schema they will meet."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import polars as pl
import pyarrow as pa

from midstream.core.batches import canonical_schema, empty_batch, frame_schema, to_polars
from midstream.core.errors import JobError, SchemaError

EXPRESSION_ERRORS: Final = (Exception, pl.exceptions.PanicException)
"""What evaluating an expression can raise: a panic of polars is no Exception, and would pass for a shutdown."""


def empty_frame(schema: pa.Schema) -> pl.DataFrame:
    return to_polars(empty_batch(canonical_schema(schema)))


def infer_schema(schema: pa.Schema, exprs: Sequence[pl.Expr], where: str, *, keep: bool) -> pa.Schema:
    """The schema of `exprs` over rows of `schema`, after all its own columns if `keep`.

    Raises SchemaError naming `where` for a column that does not exist or types that do not go together.
    """
    frame = empty_frame(schema)
    try:
        made = frame.with_columns(*exprs) if keep else frame.select(*exprs)
    except pl.exceptions.ColumnNotFoundError as error:
        first = str(error).splitlines()[0]
        quoted = re.search(r'"([^"]+)"', first)  # unable to find column "x"; …
        name = quoted.group(1) if quoted else first
        raise SchemaError(
            f"{where}: column {name!r} is not in the stream's schema ({', '.join(schema.names) or 'no columns'})"
        ) from error
    except pl.exceptions.PolarsError as error:
        raise SchemaError(f"{where}: {str(error).splitlines()[0]}") from error
    return frame_schema(made)


def infer_type(schema: pa.Schema, expr: pl.Expr, where: str) -> pa.DataType:
    made = infer_schema(schema, [expr], where, keep=False)
    if len(made) != 1:
        raise SchemaError(f"{where}: the expression gives {len(made)} columns, one is needed: {expr}")
    return made.field(0).type


def columns_read(exprs: Sequence[pl.Expr], schema: pa.Schema) -> list[str]:
    """The columns that a frame needs for `exprs`: one at least, for else it would not know how many rows it has."""
    if any(expr.meta.has_multiple_outputs() for expr in exprs):  # a selector, whose meaning depends on what there is
        return list(schema.names)
    names = {name for expr in exprs for name in expr.meta.root_names()}
    return [name for name in schema.names if name in names] or schema.names[:1]


def check_row_by_row(exprs: Sequence[pl.Expr], schema: pa.Schema, where: str) -> None:
    """Raises JobError for an expression whose result for a row of `schema` depends on other rows of the batch.

    Where batches are cut is the engine's business, so such a result would be arbitrary.
    """
    for expr in exprs:
        if not isinstance(expr, pl.Expr):
            raise JobError(f"{where}: {expr!r} is not a polars expression; write for example pl.col('x') + 1")
        if not _is_row_by_row(expr, schema):
            raise JobError(
                f"{where}: {expr} does not work row by row (it aggregates, shifts, or sorts); "
                "use a window's aggregate() for sums over many rows, or map_batches() if this is meant"
            )


def _is_row_by_row(expr: pl.Expr, schema: pa.Schema) -> bool:
    """What polars says itself, where it can, and what comes out for a few rows, together and one by one."""
    if expr.meta.is_literal():
        return True
    try:
        if not expr.meta.is_row_separable():
            return False
    except EXPRESSION_ERRORS:
        pass  # a selector or a function in it: polars cannot tell before it knows the columns
    rows = pl.DataFrame([_probe(name, kind) for name, kind in empty_frame(schema).schema.items()])
    try:
        apart = pl.concat([rows[index : index + 1].with_columns(expr) for index in range(rows.height)])
        return rows.with_columns(expr).equals(apart)
    except EXPRESSION_ERRORS:
        return True  # not for these values; its schema is inferred next, and says what is wrong with it


def _probe(name: str, kind: pl.DataType) -> pl.Series:
    """Values of which each differs from its neighbours, the smallest, the sum and so on."""
    try:
        return pl.Series(name, [2, None, 0, 2]).cast(kind, strict=False)
    except pl.exceptions.PolarsError:
        return pl.Series(name, [None] * 4, kind)
