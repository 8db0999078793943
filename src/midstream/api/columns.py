"""The columns and expressions that calls such as `select` and `filter` take, written as polars takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any, Final, TypeAlias

import numpy as np
import polars as pl
import polars.selectors as cs
import pyarrow as pa

from midstream.api.argument_checks import columns_text, require_column
from midstream.engine.core.batches import check_column_name
from midstream.engine.core.errors import JobError, SchemaError
from midstream.engine.operators.expressions import EXPRESSION_ERRORS, empty_frame, infer_schema

Columns: TypeAlias = "str | pl.Expr | Iterable[str | pl.Expr]"
"""A name, an expression or a selector, or several of them in a list."""
Literal: TypeAlias = "str | bool | int | float | bytes | Decimal | date | time | timedelta | np.generic | None"
"""A constant; `date` includes `datetime`."""

_EXAMPLES: Final = {
    "filter": "write for example filter(pl.col('x') > 0) or filter(lambda row: …)",
    "expect": "write for example expect(pl.col('x') >= 0)",
    "select": "write for example pl.col('x'), and select(name=1) for a constant",
    "with_columns": "write for example pl.col('x'), and with_columns(name=1) for a constant",
    "drop": "give the names of columns",
}
_LITERALS: Final = (bool, int, float, bytes, Decimal, date, time, timedelta, np.generic)


def expressions(method: str, columns: Iterable[Columns], named: Mapping[str, pl.Expr | Literal]) -> list[pl.Expr]:
    """Return an expression per argument. As in polars, text is the name of a column, also after a keyword.

    Raises JobError for other arguments, and if there is none.
    """
    exprs = [_column(method, one) if isinstance(one, str) else one for one in _flat(method, columns)]
    for name, value in named.items():
        check_column_name(name, f"{method}: column")
        exprs.append(_expression(method, name, value).alias(name))
    if not exprs:
        raise JobError(f"{method}: name at least one column or expression")
    return exprs


def computes(column: str, exprs: Iterable[pl.Expr], schema: pa.Schema) -> bool:
    """Whether one of the expressions makes this column of anything but the column itself."""

    def made_by(some: Sequence[pl.Expr]) -> list[str]:
        return infer_schema(schema, some, "the expression", keep=False).names

    others = [expr for expr in exprs if not expr.meta.is_column_selection()]  # a selection gives no column another name
    if column not in made_by(
        others
    ):  # together first: each call reads the whole schema, which may have 1,000s of columns
        return False
    for expr in others:
        is_unchanged = expr.meta.is_column_selection(allow_aliasing=True) and expr.meta.root_names() == [column]
        if not is_unchanged and column in made_by([expr]):
            return True
    return False


def all_of(schema: pa.Schema, predicates: Iterable[Columns], equal: Mapping[str, Literal]) -> pl.Expr:
    """Return the expression that is true where all predicates are true and the columns in `equal` have these values.

    Raises JobError for a predicate that is not an expression or the name of a column, and if there is none.
    """
    found = conditions("filter", schema, predicates)
    for name, value in equal.items():
        require_column(schema, name, "filter", "column", "Name columns of the stream.")
        constant = _constant(value) if isinstance(value, (str, *_LITERALS)) else None
        if constant is None:
            instead = f"pl.col({name!r}).is_null()" if value is None else f"pl.col({name!r}) == …"
            raise JobError(f"filter: {name}={value!r} is not a value that a column equals; write filter({instead})")
        found.append(_exactly(name) == constant)
    if not found:
        raise JobError("filter: name at least one condition, for example filter(pl.col('x') > 0)")
    condition, *others = found
    for other in others:
        condition = condition & other
    return condition


def conditions(method: str, schema: pa.Schema, predicates: Iterable[Columns]) -> list[pl.Expr]:
    """Return each of these as an expression. Raises JobError for what is neither one nor the name of a column."""
    found = []
    for one in _flat(method, predicates):
        if isinstance(one, str) and one not in schema.names:
            raise JobError(
                f"{method}: {one!r} is not a column ({columns_text(schema)}); a condition is a polars expression, such as "
                f"pl.col('x') > 0, also from SQL: pl.sql_expr({one!r})"
            )
        found.append(_exactly(one) if isinstance(one, str) else one)
    return found


def without(schema: pa.Schema, dropped: Iterable[Columns]) -> dict[str, str]:
    """Return the name of each column that is left, by its name, in order.

    Raises SchemaError for an unknown column, JobError for what selects no columns, and if none is named or left.
    """
    columns = _flat("drop", dropped)
    names: set[str] = set()
    for column in columns:
        if isinstance(column, pl.Expr):
            frame = empty_frame(schema, "drop")
            try:
                names.update(set(schema.names).difference(frame.drop(column).columns))  # type: ignore[arg-type]  # the stub omits pl.col
            except EXPRESSION_ERRORS as error:
                kind = SchemaError if isinstance(error, pl.exceptions.ColumnNotFoundError) else JobError
                raise kind(
                    f"drop: {column}: {str(error).splitlines()[0]} ({columns_text(schema)}); give names of columns, or "
                    "a selector"
                ) from error
        else:
            require_column(schema, column, "drop", "column", "Name columns of the stream.")
            names.add(column)
    left = [name for name in schema.names if name not in names]
    if not columns or not left:
        raise JobError("drop: " + ("name at least one column" if not columns else "no column is left"))
    return {name: name for name in left}


def renamed(schema: pa.Schema, mapping: object) -> dict[str, str]:
    """Return the new name of every column, in order. Raises JobError and SchemaError for another mapping."""
    if not isinstance(mapping, Mapping) or not mapping:
        raise JobError(f"rename: {mapping!r} is not a dict of new names; write rename({{'old': 'new'}})")
    for old, new in mapping.items():
        require_column(schema, old, "rename", "column", "Name columns of the stream.")
        if not isinstance(new, str) or not new:
            raise JobError(f"rename: {new!r} is not a column name, as that of column {old!r}")
        check_column_name(new, "rename: column")
    return {name: mapping.get(name, name) for name in schema.names}


def _flat(method: str, columns: Iterable[Any]) -> list[str | pl.Expr]:
    flat: list[str | pl.Expr] = []
    for column in columns:
        if isinstance(column, (str, pl.Expr)):
            flat.append(column)
        elif isinstance(column, Iterable) and not isinstance(column, (bytes, Mapping, pl.Series, pl.DataFrame)):
            flat += _flat(method, column)
        else:
            raise JobError(f"{method}: {column!r} is not a column or a polars expression; {_EXAMPLES[method]}")
    return flat


def _column(method: str, name: str) -> pl.Expr:
    check_column_name(name, f"{method}: column")
    return pl.col(name)


def _exactly(name: str) -> pl.Expr:
    """Return the column of that name, also if polars reads that name as a pattern."""
    column = pl.col(name)
    return cs.by_name(name) if column.meta.has_multiple_outputs() else column


def _expression(method: str, name: str, value: object) -> pl.Expr:
    if isinstance(value, pl.Expr):
        return value
    if isinstance(value, str):
        return _column(method, value)
    constant = _constant(value) if value is None or isinstance(value, _LITERALS) else None
    if constant is None:
        raise JobError(
            f"{method}: {name}={value!r} is not a polars expression; write for example pl.col('x') or pl.lit(1)"
        )
    return constant


def _constant(value: object) -> pl.Expr | None:
    """Return the constant as an expression; None if polars has none: for a decimal that is NaN, for example."""
    try:
        constant = pl.lit(value)
        pl.select(constant)
    except EXPRESSION_ERRORS:
        return None
    return constant
