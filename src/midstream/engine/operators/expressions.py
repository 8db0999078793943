"""Polars expressions as parts of a job, checked on the driver against the schema of their input."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import polars as pl
import pyarrow as pa

from midstream.engine.core.batches import (
    canonical_schema,
    check_held_by_polars,
    empty_batch,
    frame_schema,
    is_held_by_polars,
    to_polars,
)
from midstream.engine.core.errors import SchemaError
from midstream.engine.operators.row_conversion import USER_ERRORS, user_error

EXPRESSION_ERRORS: Final = (*USER_ERRORS, pl.exceptions.PanicException)
"""The exceptions that evaluating an expression can raise; a polars panic is not an Exception, and would be mistaken for
a shutdown.
"""

_DIVIDES: Final = re.compile(r" (/|//|%) |\.pow\(")
_OF_ELEMENTS: Final = re.compile(r"\.(list|arr)\.(eval|agg)\(")


class Evaluation:
    """Evaluates expressions such that the result of a row does not depend on how many rows there are.

    polars divides a single value by a constant, but multiplies several values by its reciprocal, which is rounded
    otherwise: 8357 / 100 is 83.57, or 83.57000000000001. It also multiplies for a single whole exponent, where it calls
    a function of floats for several exponents. So if an expression divides or has a power, a row alone is evaluated as
    two of it, and so are all rows if it computes elements of lists, of which there may be one in many rows.
    """

    def __init__(self, exprs: Sequence[pl.Expr]) -> None:
        texts = [str(expr) for expr in exprs]
        self.divides = any(map(_DIVIDES.search, texts))
        self._of_elements = any(map(_OF_ELEMENTS.search, texts))

    def of(self, frame: pl.DataFrame, evaluate: Callable[[pl.DataFrame], pl.DataFrame]) -> pl.DataFrame:
        """Return the result for the rows of `frame`. `evaluate` returns one row for each row that it gets."""
        rows = frame.height
        if not (self.divides and (rows == 1 or (rows and self._of_elements))):
            return evaluate(frame)
        return evaluate(twice(frame)).head(rows)


def twice(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the rows followed by the same rows, in columns of one chunk: polars evaluates each chunk on its own, and keeps
    a column of one row as a scalar.
    """
    return pl.DataFrame([pl.concat([each, each], rechunk=True) for each in frame.iter_columns()])


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
        made = computed_schema(_without_values(frame, exprs), where)
    except pl.exceptions.ColumnNotFoundError as error:
        first = _first_line(error)
        quoted = re.search(r'"([^"]+)"', first)  # unable to find column "x"; …
        if quoted is None:  # cannot get the 7-th column
            raise SchemaError(f"{where}: {first}") from error
        name = quoted.group(1)
        raise SchemaError(
            f"{where}: column {name!r} is not in the stream's schema ({', '.join(schema.names) or 'no columns'})"
        ) from error
    except pl.exceptions.PolarsError as error:
        raise SchemaError(f"{where}: {_first_line(error)}") from error
    except pl.exceptions.PanicException as error:
        text = ", ".join(map(str, exprs))
        raise SchemaError(f"{where}: polars panics when it evaluates {text}: {_first_line(error)}") from error
    except SchemaError:  # of a type that rows cannot have
        raise
    except USER_ERRORS as error:
        raise user_error(where, "a function in an expression, called without rows for its type,", error) from error
    for expr in exprs:
        if is_plain_column(expr):
            index = made.get_field_index(expr.meta.output_name())
            made = made.set(index, schema.field(made.names[index]))
    if not keep:
        return made
    new, old = set(made.names), set(schema.names)
    own = [made.field(field.name) if field.name in new else field for field in schema]
    return pa.schema([*own, *(field for field in made if field.name not in old)])


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type: of a field with the empty name, polars gives that name only."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _without_values(frame: pl.DataFrame, exprs: Sequence[pl.Expr]) -> pl.DataFrame:
    """Evaluate the expressions for their types only. Some panic without rows, such as those that read a first value."""
    try:
        return frame.select(*exprs)
    except pl.exceptions.PanicException:
        return frame.clear(1).select(*exprs)  # a row of nulls


def computed_schema(frame: pl.DataFrame, where: str) -> pa.Schema:
    """Return the canonical Arrow schema of columns that expressions have computed.

    Raises SchemaError naming `where` for a column whose type Arrow does not have, and for an Enum or a Categorical:
    batches hold texts only, so that the same expression would have another result in the next operator.
    """
    for name, dtype in frame.schema.items():
        kind = _enumeration(dtype)
        if kind is not None:
            order = " or .to_physical() for the order" if isinstance(kind, pl.Enum) else ""
            holder = "is" if kind is dtype else f"is a {dtype.base_type()} with"
            raise SchemaError(
                f"{where}: column {name!r} {holder} {'an Enum' if order else 'a Categorical'}, which rows between operators "
                f"cannot hold; use it within one expression, and end that with .cast(pl.String) for the text{order}"
            )
    try:
        return frame_schema(frame)
    except SchemaError as error:
        raise SchemaError(f"{where}: {error}") from error


def _enumeration(dtype: Any) -> pl.DataType | None:
    """Return the Enum or Categorical that a type is or contains, if there is one."""
    if isinstance(dtype, (pl.Enum, pl.Categorical)):
        return dtype
    within = [getattr(dtype, name) for name in ("inner", "key", "value") if hasattr(dtype, name)]
    within += [field.dtype for field in getattr(dtype, "fields", ())]
    return next((found for each in within if (found := _enumeration(each)) is not None), None)


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
