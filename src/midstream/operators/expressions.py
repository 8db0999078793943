"""Polars expressions as parts of a job, checked on the driver against the schema of their input."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import polars as pl
import pyarrow as pa

from midstream.core.batches import (
    canonical_schema,
    check_held_by_polars,
    empty_batch,
    frame_schema,
    is_held_by_polars,
    to_polars,
)
from midstream.core.errors import JobError, SchemaError
from midstream.operators.rows import USER_ERRORS

EXPRESSION_ERRORS: Final = (*USER_ERRORS, pl.exceptions.PanicException)
"""The exceptions that evaluating an expression can raise; a polars panic is not an Exception, and would be mistaken for
a shutdown.
"""


def empty_frame(schema: pa.Schema, where: str) -> pl.DataFrame:
    """Return a frame without rows. Raises SchemaError naming a column that polars cannot hold."""
    schema = canonical_schema(schema)
    check_held_by_polars(schema, where)
    return to_polars(empty_batch(schema))


def infer_schema(schema: pa.Schema, exprs: Sequence[pl.Expr], where: str, *, keep: bool) -> pa.Schema:
    """Return the schema of `exprs` over rows of `schema`; with `keep`, all columns of `schema` come first.

    A column that no expression computes keeps its type: it does not pass through polars. Raises SchemaError naming
    `where` for a column that does not exist or types that do not match.
    """
    schema = canonical_schema(schema)
    frame = _read_by(exprs, schema, where)
    try:
        made = frame_schema(frame.select(*exprs))
    except pl.exceptions.ColumnNotFoundError as error:
        first = str(error).splitlines()[0]
        quoted = re.search(r'"([^"]+)"', first)  # unable to find column "x"; …
        name = quoted.group(1) if quoted else first
        raise SchemaError(
            f"{where}: column {name!r} is not in the stream's schema ({', '.join(schema.names) or 'no columns'})"
        ) from error
    except pl.exceptions.PolarsError as error:
        raise SchemaError(f"{where}: {str(error).splitlines()[0]}") from error
    for expr in exprs:
        if is_plain_column(expr):
            index = made.get_field_index(expr.meta.output_name())
            made = made.set(index, schema.field(made.names[index]))
    if not keep:
        return made
    new, old = set(made.names), set(schema.names)
    own = [made.field(field.name) if field.name in new else field for field in schema]
    return pa.schema([*own, *(field for field in made if field.name not in old)])


def is_plain_column(expr: pl.Expr) -> bool:
    """Whether the expression is one column of the stream, unchanged."""
    return bool(expr.meta.is_column() and not expr.meta.has_multiple_outputs())


def _read_by(exprs: Sequence[pl.Expr], schema: pa.Schema, where: str) -> pl.DataFrame:
    """Return a frame without rows: the columns that `exprs` compute with, and nulls for those that they only pass on."""
    handed_on = {expr.meta.output_name() for expr in exprs if is_plain_column(expr)}
    computing = [expr for expr in exprs if not is_plain_column(expr)]
    read = columns_read(computing, schema) if computing else []
    frame = empty_frame(pa.schema([schema.field(name) for name in read]), where) if read else pl.DataFrame()
    return frame.with_columns(
        pl.lit(None).alias(name) for name in schema.names if name in handed_on and name not in read
    )


def infer_type(schema: pa.Schema, expr: pl.Expr, where: str) -> pa.DataType:
    made = infer_schema(schema, [expr], where, keep=False)
    if len(made) != 1:
        raise SchemaError(f"{where}: the expression gives {len(made)} columns; it must give one: {expr}")
    return made.types[0]


def columns_read(exprs: Sequence[pl.Expr], schema: pa.Schema) -> list[str]:
    """Return the columns that a frame needs for `exprs`: at least one, since a frame without columns has no row count."""
    if any(
        expr.meta.has_multiple_outputs() for expr in exprs
    ):  # the meaning of a selector depends on the columns of the frame
        return list(schema.names)
    names = {name for expr in exprs for name in expr.meta.root_names()}
    return [name for name in schema.names if name in names] or [_any_held(schema)]


def _any_held(schema: pa.Schema) -> str:
    """Return the first column that polars can hold, or just the first column if it can hold none."""
    held = [field.name for field in schema if is_held_by_polars(field.type)]
    names: list[str] = held or schema.names
    return names[0]


def check_row_by_row(exprs: Sequence[pl.Expr], schema: pa.Schema, where: str) -> None:
    """Raise JobError for an expression whose result for a row of `schema` depends on other rows of the batch.

    The engine decides where batches are cut, so such a result would be arbitrary.
    """
    for expr in exprs:
        if not isinstance(expr, pl.Expr):
            raise JobError(f"{where}: {expr!r} is not a polars expression; write for example pl.col('x') + 1")
        if not _is_row_by_row(expr, schema, where):
            raise JobError(
                f"{where}: {expr} does not work row by row (it aggregates, shifts, or sorts); "
                "use a window's aggregate() for sums over many rows, or map_batches() if this is meant"
            )


def _is_row_by_row(expr: pl.Expr, schema: pa.Schema, where: str) -> bool:
    """Whether the expression works row by row: polars says so or, where it cannot tell, a few rows give the same
    results together and one by one.
    """
    if expr.meta.is_literal() or is_plain_column(expr):
        return True
    if not all(map(_may_be_row_by_row, _parts(expr))):
        return False
    frame = empty_frame(pa.schema([schema.field(name) for name in columns_read([expr], schema)]), where)
    rows = pl.DataFrame([_probe(name, kind) for name, kind in frame.schema.items()])
    try:
        apart = pl.concat([rows[index : index + 1].with_columns(expr) for index in range(rows.height)])
        return rows.with_columns(expr).equals(apart)
    except EXPRESSION_ERRORS:
        return True  # it fails for these values; the error follows when its schema is inferred next


def _parts(expr: pl.Expr) -> Iterator[pl.Expr]:
    """Yield the expression and all those in it: what polars says of one of them says nothing about those in it."""
    try:
        waiting = [_of_one_column(expr)]
    except EXPRESSION_ERRORS:
        return  # polars cannot write down all expressions, for example some with functions in them
    while waiting:
        part = waiting.pop()
        if "element()" in str(part) and not part.meta.root_names():
            continue  # what list.eval computes within one row
        yield part
        waiting += part.meta.pop()


def _may_be_row_by_row(part: pl.Expr) -> bool:
    """Whether polars says that this expression works row by row, or cannot tell, as when it has a function in it."""
    try:
        return part.meta.is_literal() or part.meta.is_row_separable()
    except EXPRESSION_ERRORS:
        return True


def _of_one_column(expr: pl.Expr) -> pl.Expr:
    """Return the expression with a column in place of each selector: with a selector polars does not tell whether it works
    row by row, although that does not depend on which columns are selected.
    """
    if not expr.meta.has_multiple_outputs():
        return expr
    tree = _without_selectors(msgspec.json.decode(expr.meta.serialize(format="json")))
    return pl.Expr.deserialize(io.BytesIO(msgspec.json.encode(tree)), format="json")


def _without_selectors(node: object) -> object:
    if isinstance(node, list):
        return [_without_selectors(each) for each in node]
    if not isinstance(node, dict):
        return node
    return {"Column": "column"} if node.keys() == {"Selector"} else {k: _without_selectors(v) for k, v in node.items()}


def _probe(name: str, kind: pl.DataType) -> pl.Series:
    """Return values each of which differs from its neighbours, the smallest one, the sum, and so on."""
    try:
        probe: pl.Series = pl.Series(name, [2, None, 0, 2, 1000]).cast(kind, strict=False)
        return probe
    except pl.exceptions.PolarsError:
        return pl.Series(name, [None] * 5, kind)
