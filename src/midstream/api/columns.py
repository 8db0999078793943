"""The columns and expressions that calls such as `select` and `filter` take, written as polars takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any, Final, TypeAlias

import polars as pl
import polars.selectors as cs
import pyarrow as pa

from midstream.api.arguments import columns_text, require_column
from midstream.core.errors import JobError

Columns: TypeAlias = "str | pl.Expr | Iterable[str | pl.Expr]"
"""A name, an expression or a selector, or several of them in a list."""
Literal: TypeAlias = "str | bool | int | float | bytes | Decimal | date | time | timedelta | None"
"""A constant; `date` includes `datetime`."""

_EXAMPLES: Final = {
    "filter": "write for example filter(pl.col('x') > 0) or filter(lambda row: …)",
    "select": "write for example pl.col('x'), and select(name=1) for a constant",
    "with_columns": "write for example pl.col('x'), and with_columns(name=1) for a constant",
    "drop": "give the names of columns",
}
_LITERALS: Final = (bool, int, float, bytes, Decimal, date, time, timedelta)


def expressions(method: str, columns: Iterable[Columns], named: Mapping[str, pl.Expr | Literal]) -> list[pl.Expr]:
    """Return an expression per argument. As in polars, text is the name of a column, also after a keyword.

    Raises JobError for other arguments, and if there is none.
    """
    exprs = [pl.col(column) if isinstance(column, str) else column for column in _flat(method, columns)]
    for name, value in named.items():
        exprs.append(_expression(method, name, value).alias(name))
    if not exprs:
        raise JobError(f"{method}: name at least one column or expression")
    return exprs


def all_of(schema: pa.Schema, predicates: Iterable[Columns], equal: Mapping[str, Literal]) -> pl.Expr:
    """Return the expression that is true where all predicates are true and the columns in `equal` have these values.

    Raises JobError for a predicate that is not an expression or the name of a column, and if there is none.
    """
    found = []
    for one in _flat("filter", predicates):
        if isinstance(one, str) and one not in schema.names:
            raise JobError(
                f"filter: {one!r} is not a column ({columns_text(schema)}); a condition is a polars expression, such as "
                f"pl.col('x') > 0, also from SQL: pl.sql_expr({one!r})"
            )
        found.append(pl.col(one) if isinstance(one, str) else one)
    for name, value in equal.items():
        if not isinstance(value, (str, *_LITERALS)):
            instead = f"pl.col({name!r}).is_null()" if value is None else f"pl.col({name!r}) == …"
            raise JobError(f"filter: {name}={value!r} is not a value that a column equals; write filter({instead})")
        found.append(pl.col(name) == value)
    if not found:
        raise JobError("filter: name at least one condition, for example filter(pl.col('x') > 0)")
    condition, *others = found
    for other in others:
        condition = condition & other
    return condition


def without(schema: pa.Schema, dropped: Iterable[Columns]) -> list[pl.Expr]:
    """Return the columns that are left. Raises SchemaError for an unknown column, JobError if none is named or left."""
    names: list[str] = []
    for column in _flat("drop", dropped):
        if isinstance(column, pl.Expr):
            if not cs.is_selector(column):
                raise JobError(f"drop: {column} is an expression; give names of columns, or a selector")
            frame = pl.from_arrow(schema.empty_table())
            assert isinstance(frame, pl.DataFrame)
            names += cs.expand_selector(frame, column)
        else:
            require_column(schema, column, "drop", "column", "Name columns of the stream.")
            names.append(column)
    left = [pl.col(name) for name in schema.names if name not in names]
    if not names or not left:
        raise JobError("drop: " + ("name at least one column" if not names else "no column is left"))
    return left


def renamed(schema: pa.Schema, mapping: object) -> dict[str, str]:
    """Return the new name of every column, in order. Raises JobError and SchemaError for another mapping."""
    if not isinstance(mapping, Mapping) or not mapping:
        raise JobError(f"rename: {mapping!r} is not a dict of new names; write rename({{'old': 'new'}})")
    for old, new in mapping.items():
        require_column(schema, old, "rename", "column", "Name columns of the stream.")
        if not isinstance(new, str) or not new:
            raise JobError(f"rename: {new!r} is not a column name, as that of column {old!r}")
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


def _expression(method: str, name: str, value: object) -> pl.Expr:
    if isinstance(value, pl.Expr):
        return value
    if isinstance(value, str):
        return pl.col(value)
    if value is None or isinstance(value, _LITERALS):
        return pl.lit(value)
    raise JobError(f"{method}: {name}={value!r} is not a polars expression; write for example pl.col('x') or pl.lit(1)")
