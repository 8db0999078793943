"""polars divides a single value by a constant otherwise than many, and so it computes powers: results must not depend on
how many rows there are.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable
from typing import Any, Literal

import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from midstream import Aggregate, Count, DataStream, Environment, testing

CUTS: tuple[int | Literal["whole"], ...] = (1, 2, 5, "whole")
CONSTANTS = st.sampled_from([3, 7, 10, 60, 100, 365, 3600, 86400, 10**6, 0.1, 1.19, 1.8, 2.54, 1 / 3]) | st.floats(
    1e-3, 1e6
)
OPERATIONS = st.sampled_from([operator.truediv, operator.floordiv, operator.mod])


def stream(values: list[int], lists: list[list[float]] | None = None) -> DataStream:
    rows = [{"k": "a", "v": value, "l": lists[row] if lists else []} for row, value in enumerate(values)]
    return Environment().from_collection(rows, schema={"k": str, "v": int, "l": list[float]}, splits=1)


def bits(value: Any) -> object:
    if isinstance(value, list):
        return [bits(each) for each in value]
    return struct.pack("d", value) if isinstance(value, float) else value


def results(made: DataStream) -> list[list[object]]:
    """Return the values of the column x, bit by bit, for each cut."""
    return [[bits(row["x"]) for row in testing.run(made, cut=cut).rows] for cut in CUTS]


def check_every_cut(made: DataStream) -> None:
    first, *others = results(made)
    assert first, made
    for cut, other in zip(CUTS[1:], others, strict=True):
        assert other == first, cut


@settings(max_examples=6)
@given(st.lists(st.integers(-(10**6), 10**6), min_size=1, max_size=9), OPERATIONS, CONSTANTS)
def test_a_column_divided_by_a_constant(values: list[int], divide: Callable[..., pl.Expr], constant: float) -> None:
    quotient = divide(pl.col("v").cast(pl.Float64), constant)
    check_every_cut(stream(values).select(x=quotient))
    check_every_cut(stream(values).select(x=quotient.cast(pl.String)))
    kept = stream(values).with_columns(x=pl.col("v")).filter(quotient == quotient.round(2))
    assert len({repr(testing.run(kept, cut=cut).rows) for cut in CUTS}) == 1


@settings(max_examples=6)
@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=2), min_size=1, max_size=7), CONSTANTS)
def test_elements_of_lists_divided_by_a_constant(lists: list[list[float]], constant: float) -> None:
    made = stream([0] * len(lists), lists)
    check_every_cut(made.select(x=pl.col("l").list.eval(pl.element() / constant)))
    check_every_cut(made.select(x=pl.col("l") / constant))


@settings(max_examples=6)
@given(st.lists(st.integers(-8, 8), min_size=1, max_size=9), st.sampled_from([0.1, 0.7, 1.19, 3.3, 1e-3]))
@example([7], 0.1)
def test_powers(exponents: list[int], base: float) -> None:
    made = stream(exponents, [[base * exponent] for exponent in exponents])
    exponent = pl.col("v").cast(pl.Float64)
    check_every_cut(made.select(x=pl.lit(base) ** exponent))
    check_every_cut(made.select(x=(exponent / 7) ** exponent))
    check_every_cut(made.select(x=pl.col("l").list.eval(base ** pl.element().round())))


class Share(Aggregate):
    """Divides everywhere."""

    columns = ("v",)

    def __init__(self, constant: float) -> None:
        self.constant = constant

    def partial(self, event_time: pl.Expr) -> dict[str, pl.Expr]:
        return {"s": (pl.col("v") / self.constant).max() / self.constant}

    def merge(self, part: Callable[[str], pl.Expr]) -> dict[str, pl.Expr]:
        return {"s": part("s").max()}

    def finish(self, part: Callable[[str], pl.Expr]) -> pl.Expr:
        return part("s") / self.constant


@settings(max_examples=6)
@given(st.lists(st.integers(-(10**6), 10**6), min_size=1, max_size=9), CONSTANTS)
def test_aggregates_that_divide_by_a_constant(values: list[int], constant: float) -> None:
    keyed = stream(values).key_by("k")
    check_every_cut(keyed.aggregate(x=Share(constant)))
    condition = (pl.col("v") / constant) * constant == pl.col("v")
    check_every_cut(keyed.aggregate(x=Count(where=condition)))


@pytest.mark.parametrize("constant", [3, 5, 7, 9, 12, 24, 90, 360, 3600, 10_000, 1.5, 1.8, 2.54])
def test_an_everyday_quotient_is_accepted(constant: float) -> None:
    made = stream([8357, 40]).select(x=pl.col("v") / constant)
    assert [row["x"] for row in testing.run(made).rows] == pytest.approx([8357 / constant, 40 / constant])


def test_what_divides_and_depends_on_other_rows_is_refused() -> None:
    for expr in (pl.col("v") / pl.col("v").sum(), pl.col("v").cum_sum() / 3, pl.col("v") / pl.len()):
        with pytest.raises(Exception, match="does not compute each row on its own"):
            stream([1, 2]).select(x=expr)
