"""How the results of an expression for rows together differ from those for each row alone, on probe rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import polars as pl

from midstream.engine.core.batches import frame_schema, from_polars, selected
from midstream.engine.core.errors import SchemaError
from midstream.engine.operators.expressions import EXPRESSION_ERRORS, Evaluation
from midstream.engine.operators.probe_values import ROW, ROWS, map_leaves, probe_frame

_ANY_ROWS: Final = "use flat_map() to make any number of rows from one, or filter() to drop rows"
OTHER_ROWS: Final = (
    "use a window's aggregate() for a value of many rows, a process function with state for one of earlier rows, "
    "or map_batches() if a result that depends on where the engine cuts batches is intended"
)
USE_MAP: Final = "use map() instead"
_TYPE: Final = "state the type, with return_dtype= or a cast"
_ONE_TYPE: Final = "cast its parts to one type, or use map_elements() with return_dtype="
_HAS_BRANCHES: Final = (".when(", '"Ternary"')
_NO_CAST: Final = (
    "cast to another type first, or use a function for it, such as str.to_date(format), dt.to_string() or to_physical()"
)
_HAS_NO_CAST: Final = re.compile(
    r"\w+: (casting from .* not supported|cannot cast |must specify one field in the struct|Map entries must be)"
)
"""What polars reports of a cast between types that it cannot cast, whatever the value."""


@dataclass(frozen=True)
class ExpressionFault:
    """Why an expression does not compute each row on its own, and what to write instead."""

    reason: str
    remedy: str
    is_of_types: bool = False
    """Whether it computes no row instead, since a type does not fit."""

    def of(self, part: str) -> ExpressionFault:
        return replace(self, reason=f"{part} {self.reason}")


def probes_of(kinds: Mapping[str, pl.DataType], text: str) -> pl.DataFrame:
    return _arrangements(tuple(kinds.items()), _is_range(text)).all


def _is_range(text: str) -> bool:
    return "range" in text.lower()


@dataclass(frozen=True)
class _Arrangements:
    """Probe rows as they are evaluated: all, each alone, and in several orders."""

    all: pl.DataFrame
    alone: list[pl.DataFrame]
    in_orders: list[tuple[list[int], pl.DataFrame]]


@lru_cache(maxsize=256)
def _arrangements(kinds: tuple[tuple[str, pl.DataType], ...], close_together: bool) -> _Arrangements:
    rows = probe_frame(dict(kinds), close_together=close_together)
    as_they_are, *others = _orders(ROWS)
    alone = [rows.slice(row, 1) for row in range(ROWS)]
    return _Arrangements(rows, alone, [(as_they_are, rows), *((order, rows[order]) for order in others)])


@lru_cache(maxsize=256)
def _rows_of_values(kinds: tuple[tuple[str, pl.DataType], ...], close_together: bool) -> list[int]:
    """Return the probe rows without nulls and empty lists, also within lists and structs."""
    texts = map(str, _arrangements(kinds, close_together).all.rows())
    return [row for row, text in enumerate(texts) if "None" not in text and "[]" not in text]


def _orders(rows: int) -> list[list[int]]:
    """Return the positions of rows as they are, reversed, in halves, and with more rows than there were."""
    positions = list(range(rows))
    half = rows // 2
    return [
        positions,
        positions[::-1],
        positions[:half],
        positions[half:],
        positions[1::2] + positions[::2] + positions,
    ]


def _in_orders(rows: _Arrangements, chosen: list[int]) -> Iterable[tuple[list[int], pl.DataFrame]]:
    """Return those rows in several orders, each with its positions among them."""
    if len(chosen) == ROWS:
        return rows.in_orders
    found = rows.all[chosen]
    return ((order, found[order]) for order in _orders(len(chosen)))


def difference(exprs: Sequence[pl.Expr], schema: Mapping[str, pl.DataType], text: str) -> ExpressionFault | int:
    """Return how results of rows together differ from those of each row alone; else how many rows have a result."""
    probed = tuple(schema.items()), _is_range(text)
    rows = _arrangements(*probed)
    alone = [outcome_of(exprs, row) for row in rows.alone]
    together = outcome_of(exprs, rows.all)
    for found in (*alone, together, _missing_cast(alone, *probed)):
        if isinstance(found, ExpressionFault):
            return found
    results = {row: outcome for row, outcome in enumerate(alone) if isinstance(outcome, pl.DataFrame)}
    if len(results) < ROWS and isinstance(together, pl.DataFrame):
        error = next(_first_line(outcome) for outcome in alone if isinstance(outcome, BaseException))
        return ExpressionFault(f"has a result for rows together although one of them fails alone: {error}", USE_MAP)
    if not results:
        return 0
    expected = [*results.values()]
    kinds = dict(expected[0].schema)
    fault = next(filter(None, (_add_types(kinds, result.schema) for result in expected)), None)
    if fault is not None:
        return fault
    if any(isinstance(kind, pl.Object) for kind in kinds.values()):
        return 0  # polars cannot compare them, and a column cannot have them
    whole = pl.concat([_cast(result, kinds) for result in expected])
    fault = _planned_otherwise(outcome_of(exprs, rows.all.clear()), whole)
    if fault is not None:
        return fault
    for order, arranged in _in_orders(rows, list(results)):
        outcome = together if arranged is rows.all else outcome_of(exprs, arranged)
        if isinstance(outcome, ExpressionFault):
            return outcome
        if not isinstance(outcome, pl.DataFrame):
            error = _first_line(outcome)
            return ExpressionFault(f"fails for rows together, each of which has a result alone: {error}", USE_MAP)
        fault = _add_types(dict(kinds), outcome.schema)
        if fault is not None:
            return fault
        outcome = _cast(outcome, kinds)
        if not are_same(outcome, whole[order]) and not _is_by_divisor(exprs, rows, list(results)):
            return _values(arranged, whole[order], outcome)
    return _type_of_a_branch(exprs, rows, results, kinds, text) or len(results)


def _type_of_a_branch(
    exprs: Sequence[pl.Expr],
    rows: _Arrangements,
    results: Iterable[int],
    kinds: Mapping[str, pl.DataType],
    text: str,
) -> ExpressionFault | None:
    """Return a fault if several rows that all take one branch of a `when` have its type, and not that of the expression.

    polars then returns the branch as it is. A literal without a type, next to a time, gives the expression a type to which
    no cast was planned.
    """
    if not any(sign in text for sign in _HAS_BRANCHES):
        return None
    doubled = (outcome_of(exprs, rows.all[[row, row]]) for row in results)
    made = (outcome.schema for outcome in doubled if isinstance(outcome, pl.DataFrame))
    return next(filter(None, (_add_types(dict(kinds), schema) for schema in made)), None)


def _is_by_divisor(exprs: Sequence[pl.Expr], rows: _Arrangements, chosen: list[int]) -> bool:
    """Whether rows have the same results alone and together as operators evaluate them (see `Evaluation`)."""
    evaluation = Evaluation(exprs)
    if not evaluation.divides:
        return False

    def evaluated(frame: pl.DataFrame) -> pl.DataFrame:
        return evaluation.of(frame, lambda each: each.with_columns(*exprs))

    try:
        whole = pl.concat([evaluated(rows.alone[row]) for row in chosen])
        return all(are_same(evaluated(arranged), whole[order]) for order, arranged in _in_orders(rows, chosen))
    except EXPRESSION_ERRORS:  # of types or lengths that differ
        return False


def missing_cast(exprs: Sequence[pl.Expr], schema: Mapping[str, pl.DataType], text: str) -> ExpressionFault | None:
    """Return a fault if no row without nulls has a result, since polars lacks a cast from one type to another."""
    probed = tuple(schema.items()), _is_range(text)
    return _missing_cast([outcome_of(exprs, row) for row in _arrangements(*probed).alone], *probed)


def _missing_cast(
    alone: Sequence[pl.DataFrame | BaseException | ExpressionFault],
    kinds: tuple[tuple[str, pl.DataType], ...],
    close_together: bool,
) -> ExpressionFault | None:
    if not any(isinstance(outcome, BaseException) for outcome in alone):
        return None
    outcomes = [alone[row] for row in _rows_of_values(kinds, close_together)]  # nulls have every cast
    errors = [_first_line(outcome) for outcome in outcomes if isinstance(outcome, BaseException)]
    if errors and len(errors) == len(outcomes) and all(map(_HAS_NO_CAST.match, errors)):
        return ExpressionFault(f"fails for every value: {errors[0]}", _NO_CAST, is_of_types=True)
    return None


def outcome_of(exprs: Sequence[pl.Expr], rows: pl.DataFrame) -> pl.DataFrame | BaseException | ExpressionFault:
    try:
        return rows.with_columns(*exprs)
    except (pl.exceptions.ShapeError, pl.exceptions.InvalidOperationError) as error:  # or a type does not fit
        try:
            height = rows.select(*exprs).height
        except EXPRESSION_ERRORS:
            return error
        return (
            error
            if height == rows.height
            else ExpressionFault(f"returned {_count(height)} for {rows.height}", _ANY_ROWS)
        )
    except EXPRESSION_ERRORS as error:
        return error


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _count(rows: int) -> str:
    return f"{rows} row{'s' if rows != 1 else ''}"


def _add_types(kinds: dict[str, pl.DataType], others: Mapping[str, pl.DataType]) -> ExpressionFault | None:
    """Add what `others` have for the columns' types. A fault, if values have several types; nulls may have any."""
    for name, other in others.items():
        kind = kinds.setdefault(name, other)
        if kind == other:
            continue
        if _is_of(kind, other):
            kinds[name] = other
        elif not _is_of(other, kind):
            return ExpressionFault(f"returned {kind} for some rows and {other} for others", _TYPE)
    return None


def _planned_otherwise(
    planned: pl.DataFrame | BaseException | ExpressionFault, computed: pl.DataFrame
) -> ExpressionFault | None:
    """Return a fault if values do not fit the type that polars plans for their column, which is the one declared."""
    if isinstance(planned, pl.DataFrame):
        kinds = computed.schema  # polars builds the schema at each access
        for name, kind in planned.schema.items():
            if kind != kinds[name]:
                try:
                    from_polars(selected(computed, [name]), frame_schema(selected(planned, [name])), "")
                except SchemaError:
                    return ExpressionFault(
                        f"has the planned type {kind}, but values of {kinds[name]}",
                        _ONE_TYPE,
                        is_of_types=True,
                    )
    return None


def _cast(frame: pl.DataFrame, kinds: Mapping[str, pl.DataType]) -> pl.DataFrame:
    """Return the columns with these types. `DataFrame.cast` would read the name of a column such as `*` as a pattern."""
    if frame.schema == kinds:
        return frame
    return pl.DataFrame([column.cast(kinds[column.name]) for column in frame.iter_columns()])


def _is_of(kind: pl.DataType, other: pl.DataType) -> bool:
    """Whether all values of one type are null, or within lists of them, where the other type has values."""
    if isinstance(kind, (pl.List, pl.Array)) and type(kind) is type(other):
        return _is_of(kind.inner, other.inner)  # type: ignore[arg-type]
    if isinstance(kind, pl.Struct) and isinstance(other, pl.Struct) and len(kind.fields) == len(other.fields):
        pairs = zip(kind.fields, other.fields, strict=True)
        return all(one.name == two.name and _is_of(one.dtype, two.dtype) for one, two in pairs)  # type: ignore[arg-type]
    return kind == other or isinstance(kind, pl.Null)


def are_same(one: pl.DataFrame, other: pl.DataFrame) -> bool:
    """Whether all values are the same, which 0.0 and -0.0 are not: their quotients are not."""
    return one.equals(other) and _with_signs(one).equals(_with_signs(other))


def _with_signs(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the rows with texts in place of floats, in which zeros have their sign."""
    kinds = {
        name: map_leaves(kind, lambda leaf: pl.String() if leaf.is_float() else leaf)
        for name, kind in frame.schema.items()
    }
    return _cast(frame, kinds)


def _values(rows: pl.DataFrame, alone: pl.DataFrame, together: pl.DataFrame) -> ExpressionFault:
    name = next(name for name in alone.columns if not are_same(selected(alone, [name]), selected(together, [name])))
    row = next(
        row
        for row in range(rows.height)
        if not are_same(*(selected(frame, [name])[row : row + 1] for frame in (alone, together)))
    )
    one, other = alone.get_column(name), together.get_column(name)
    values = ", ".join(_text(column, row) for column in rows.drop(ROW).iter_columns())
    of = f" of {values}" if values else ""
    return ExpressionFault(
        f"returned {_text(one, row)} for a row{of} alone, and {_text(other, row)} among others", OTHER_ROWS
    )


def _text(column: pl.Series, row: int) -> str:
    try:
        value = column[row]
    except EXPRESSION_ERRORS:  # such as a date that Python cannot represent
        return f"a {column.dtype}"
    text = repr(value.to_list() if isinstance(value, pl.Series) else value)
    return text if len(text) <= 40 else f"{text[:39]}…"
