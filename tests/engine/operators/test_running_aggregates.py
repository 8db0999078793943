"""Running aggregates: after each row what plain Python computes of all rows of its key, whatever the cuts and restores."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from fractions import Fraction
from functools import cache
from typing import Any
from unittest.mock import patch

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import World, restored

from effort import examples
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.errors import ConfigError
from midstream.engine.core.key_groups import key_groups, subtask_of
from midstream.engine.operators.event_time_column import TimeColumn
from midstream.engine.operators.functions.periodic_aggregate import periodic_aggregate_operator
from midstream.engine.operators.functions.running_aggregate import RunningAggregateOperator, running_aggregate_operator
from midstream.engine.operators.windows import prefix_scan
from midstream.engine.operators.windows import window_operator as window_base
from midstream.engine.operators.windows.aggregates import (
    Accumulator,
    Aggregate,
    AnyAggregate,
    ArgMax,
    ArgMin,
    Count,
    First,
    Last,
    Max,
    Mean,
    Min,
    Sum,
)
from midstream.engine.operators.windows.distinct_count import CountDistinct
from midstream.engine.operators.windows.moments import Covariance, StdDev, Variance
from midstream.engine.operators.windows.window_specs import LATE

MAX_PARALLELISM = 8
TYPES: dict[str, pa.DataType] = {
    "k": pa.large_string(),
    "t": pa.timestamp("ms"),
    "number": pa.int64(),
    "i": pa.int32(),
    "f": pa.float64(),
    "s": pa.large_string(),
}
SCHEMA = pa.schema(TYPES)

Row = dict[str, Any]


class Spread(Aggregate):
    """A user's aggregate, which has no scan of its own."""

    columns = ("i",)

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        return {"low": pl.col("i").min(), "high": pl.col("i").max()}

    def merge(self, part: Any) -> Mapping[str, pl.Expr]:
        return {"low": part("low").min(), "high": part("high").max()}

    def finish(self, part: Any) -> pl.Expr:
        return part("high") - part("low")


class Constant(Aggregate):
    """A user's aggregate that needs no parts."""

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        return {}

    def merge(self, part: Any) -> Mapping[str, pl.Expr]:
        return {}

    def finish(self, part: Any) -> pl.Expr:
        return pl.lit(7)


class Joined(Accumulator[list[str]]):
    columns = ("s",)
    type = str

    def init(self) -> list[str]:
        return []

    def add(self, accumulator: list[str], row: dict[str, Any]) -> list[str]:
        accumulator.append(row["s"] or "-")
        return accumulator

    def merge(self, first: list[str], second: list[str]) -> list[str]:
        return first + second

    def result(self, accumulator: list[str]) -> str:
        return "".join(accumulator)


def _numbers(rows: Sequence[Row], column: str) -> list[Any]:
    return [row[column] for row in rows if row[column] is not None]


def _extreme(rows: Sequence[Row], column: str, best: Any) -> Any:
    values = _numbers(rows, column)
    plain = [value for value in values if not (isinstance(value, float) and math.isnan(value))]
    return best(plain or values or [None])


def _total(rows: Sequence[Row], column: str) -> Any:
    total = 0.0 if column == "f" else 0
    for value in _numbers(rows, column):
        total += value
    return total


def _mean(rows: Sequence[Row]) -> float | None:
    values = _numbers(rows, "f")
    return _total(rows, "f") / len(values) if values else None


def _one(value: float) -> Any:
    """Return equal values for those that are the same."""
    return "NaN" if math.isnan(value) else value + 0.0


def _covariance(rows: Sequence[Row], other: str, ddof: int) -> float | None:
    pairs = [(row["i"], row[other]) for row in rows if row["i"] is not None and row[other] is not None]
    if len(pairs) <= ddof:
        return None
    means = [Fraction(sum(values), len(pairs)) for values in zip(*pairs, strict=True)]
    return float(sum((x - means[0]) * (y - means[1]) for x, y in pairs) / (len(pairs) - ddof))


def _root(value: float | None) -> float | None:
    return None if value is None else math.sqrt(value)


def _of_extreme(rows: Sequence[Row], by: str, best: Any, value: str = "number") -> Any:
    left = [row for row in rows if row[by] is not None and not (by == "f" and math.isnan(row[by]))]
    return best(left, key=lambda row: row[by])[value] if left else None


def _where(of: Any) -> Any:
    """Return what an aggregate is of the rows with a positive `i`."""

    def of_some(rows: Sequence[Row]) -> Any:
        return of([row for row in rows if (row["i"] or 0) > 0])

    return of_some


AGGREGATES: dict[str, tuple[AnyAggregate, Any]] = {
    "n": (Count(), len),
    "ni": (Count("i"), lambda rows: len(_numbers(rows, "i"))),
    "ns": (Count("s"), lambda rows: len(_numbers(rows, "s"))),
    "si": (Sum("i"), lambda rows: _total(rows, "i")),
    "sf": (Sum("f"), lambda rows: _total(rows, "f")),
    "mean": (Mean("f"), _mean),
    "li": (Min("i"), lambda rows: _extreme(rows, "i", min)),
    "hf": (Max("f"), lambda rows: _extreme(rows, "f", max)),
    "ls": (Min("s"), lambda rows: _extreme(rows, "s", min)),
    "first": (First("i"), lambda rows: min(rows, key=lambda row: row["t"])["i"] if rows else None),
    "last": (Last("s"), lambda rows: max(reversed(rows), key=lambda row: row["t"])["s"] if rows else None),
    "distinct": (CountDistinct("f"), lambda rows: len({_one(value) for value in _numbers(rows, "f")})),
    "variance": (Variance("i"), lambda rows: _covariance(rows, "i", 1)),
    "deviation": (StdDev("i", ddof=0), lambda rows: _root(_covariance(rows, "i", 0))),
    "covariance": (Covariance("i", "number"), lambda rows: _covariance(rows, "number", 1)),
    "cheapest": (ArgMin("number", by="f"), lambda rows: _of_extreme(rows, "f", min)),
    "dearest": (ArgMax("i", by="s"), lambda rows: _of_extreme(rows, "s", max, "i")),
    "spread": (
        Spread(),
        lambda rows: _extreme(rows, "i", max) - _extreme(rows, "i", min) if _numbers(rows, "i") else None,
    ),
    "joined": (Joined(), lambda rows: "".join(row["s"] or "-" for row in rows)),
    "constant": (Constant(), lambda rows: 7),
}
_WHERE = pl.col("i") > 0
for _name, _aggregate in {
    "n": Count(where=_WHERE),
    "ni": Count("s", where=_WHERE),
    "sf": Sum("f", where=_WHERE),
    "ls": Min("s", where=_WHERE),
    "first": First("i", where=_WHERE),
    "last": Last("s", where=_WHERE),
    "distinct": CountDistinct("f", where=_WHERE),
    "variance": Variance("i", where=_WHERE),
    "dearest": ArgMax("i", by="s", where=_WHERE),
}.items():
    AGGREGATES[f"{_name}_where"] = _aggregate, _where(AGGREGATES["ns" if _name == "ni" else _name][1])
MERGED = ("n", "sf", "hf", "last", "distinct", "variance", "dearest", "first_where", "joined")
"""The aggregates at multiples: those that merge in ways of their own."""
FOLDED = (("n", "ni", "si", "sf", "mean", "n_where", "sf_where"), ("n", "si", "li", "hf"), ("n",))
"""Aggregates that are folded in columns of numbers, unless an extreme has nulls."""
TIMES = st.integers(0, 40)
ROW = st.fixed_dictionaries(
    {
        "k": st.sampled_from("abc"),
        "t": TIMES,
        "i": st.none() | st.integers(-3, 3),
        "f": st.none() | st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 0.1, 1e16, -1e16, 3.3]),
        "s": st.none() | st.sampled_from(["x", "", "yy"]),
    }
)
STEP = st.one_of(
    st.tuples(st.just("rows"), st.lists(ROW, min_size=1, max_size=12)),
    st.tuples(st.just("advance"), TIMES),
    st.tuples(st.just("restore"), st.integers(1, 3)),
)


@cache
def operator_of(ttl_ms: int | None, every_ms: int | None = None, names: Iterable[str] = tuple(AGGREGATES)) -> Any:
    shared: dict[str, Any] = {
        "keys": ["k"],
        "event_time": TimeColumn("t"),
        "aggregates": {name: AGGREGATES[name][0] for name in (names if every_ms is None else MERGED)},
        "schema": SCHEMA,
        "ttl_us": None if ttl_ms is None else ttl_ms * 1000,
    }
    if every_ms is None:
        return running_aggregate_operator("totals", **shared)
    return periodic_aggregate_operator("totals", every_us=every_ms * 1000, **shared)


def batch_of(rows: Sequence[Row]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), schema=SCHEMA)


SLICES = st.lists(st.integers(0, 3), min_size=3, max_size=3)
INTERRUPT = st.tuples(st.just("interrupt"), st.tuples(TIMES, SLICES, st.integers(1, 3)))
EXACT = {0.1: 0.5, 1e16: 4.0, -1e16: -2.25, 3.3: 3.25}
"""Floats whose sums do not depend on the order in which they are added, instead of others."""


class Totals:
    """Subtasks of the operator, which rows are dealt out to, and what they emit."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self.worlds = [World(make(), max_parallelism=MAX_PARALLELISM)]
        self.found: list[Row] = []
        self.late: list[Row] = []

    def process(self, rows: Sequence[Row]) -> None:
        batch = batch_of(rows)
        owners = subtask_of(key_groups(batch, ("k",), MAX_PARALLELISM), len(self.worlds), MAX_PARALLELISM)
        for subtask, world in enumerate(self.worlds):
            part = batch.filter(pa.array(owners == subtask))
            if part.num_rows:
                world.process(part)

    def advance(self, watermark_us: int) -> None:
        for world in self.worlds:
            world.advance(watermark_us)

    def drain(self) -> None:
        for world in self.worlds:
            self.found.extend(world.out.rows())
            self.late.extend(world.out.rows(LATE))
            world.out.clear()

    def restore(self, parallelism: int) -> None:
        self.drain()
        snapshots = [world.snapshot() for world in self.worlds]
        self.worlds = restored(self._make, snapshots, parallelism, MAX_PARALLELISM)


def keys_in_state(world: World) -> list[str]:
    assert isinstance(world.operator, RunningAggregateOperator)
    keys: list[str] = world.operator.contents()["parts"]["k"].to_list()
    return keys


def results(life: Sequence[Row], names: Iterable[str] = AGGREGATES) -> dict[str, Any]:
    return {name: AGGREGATES[name][1](life) for name in names}


@settings(max_examples=examples(90))
@given(
    st.lists(STEP, max_size=10),
    st.none() | st.integers(1, 15),
    st.sampled_from([1, 2, 32]),
    st.sampled_from([tuple(AGGREGATES), *FOLDED]),
)
def test_each_row_has_what_python_computes_of_the_rows_up_to_it(
    plan: list[tuple[str, Any]], ttl: int | None, rounds: int, names: tuple[str, ...]
) -> None:
    with patch.object(prefix_scan, "ROUNDS", rounds):
        totals = Totals(lambda: operator_of(ttl, names=names))
        lives: dict[str, list[Row]] = defaultdict(list)
        expected: list[Row] = []
        expected_late: list[int] = []
        watermark = -(2**62)
        for step, argument in plan:
            if step == "rows":
                rows = [{**row, "number": number} for number, row in enumerate(argument)]
                for row in rows:
                    if ttl is not None and row["t"] <= watermark:
                        expected_late.append(row["number"])
                        continue
                    life = lives[row["k"]]
                    if ttl is not None and life and row["t"] > max(each["t"] for each in life) + ttl:
                        life.clear()
                    life.append(row)
                    expected.append({"k": row["k"], "t": row["t"], **results(life, names)})
                totals.process(rows)
            elif step == "advance":
                watermark = max(watermark, argument)
                totals.advance(watermark * 1000)
            else:
                totals.restore(argument)
            held = Counter(key for world in totals.worlds for key in keys_in_state(world))
            assert held == Counter(
                key
                for key, life in lives.items()
                if life and (ttl is None or max(row["t"] for row in life) + ttl > watermark)
            )
        totals.drain()
        assert by_key(totals.found) == by_key(expected)
        assert sorted(row["number"] for row in totals.late) == sorted(expected_late)


@pytest.mark.parametrize("name", AGGREGATES)
def test_an_aggregate_alone_has_a_part_for_each_row(name: str) -> None:
    """Also one whose part of a row is a constant, such as a count."""
    aggregate, of = AGGREGATES[name]
    rows = [{"k": "ab"[n % 2], "t": n, "number": n, "i": n - 3, "f": n / 2, "s": "x" * n} for n in range(7)]
    totals = Totals(
        lambda: running_aggregate_operator(
            "totals", keys=["k"], event_time=TimeColumn("t"), aggregates={name: aggregate}, schema=SCHEMA, ttl_us=None
        )
    )
    totals.process(rows[:5])
    totals.process(rows[5:])
    totals.drain()
    expected = [
        {"k": row["k"], "t": row["t"], name: of([each for each in rows[: n + 1] if each["k"] == row["k"]])}
        for n, row in enumerate(rows)
    ]
    assert by_key(totals.found) == by_key(expected)


@settings(max_examples=examples(90))
@given(st.lists(STEP | INTERRUPT, max_size=10), st.none() | st.integers(1, 15), st.integers(1, 7))
def test_at_each_multiple_a_key_has_what_python_computes_of_all_its_rows_before_it(
    plan: list[tuple[str, Any]], ttl: int | None, every: int
) -> None:
    """Also if a subtask stops, and is restored, when it has emitted the multiple for some of its key groups."""
    with patch.object(window_base, "PIECE_ROWS", 1), patch.object(window_base, "SLICE_ROWS", 1):
        check_multiples(plan, ttl, every)


def check_multiples(plan: list[tuple[str, Any]], ttl: int | None, every: int) -> None:
    totals = Totals(lambda: operator_of(ttl, every))
    taken: dict[str, list[Row]] = defaultdict(list)
    expected_late: list[int] = []
    watermark = -(2**62)
    for step, argument in plan:
        if step == "rows":
            rows = [
                {**row, "number": number, "f": EXACT.get(row["f"], row["f"])} for number, row in enumerate(argument)
            ]
            totals.process(rows)
            for row in rows:
                if row["t"] // every * every + every - 1 <= watermark:
                    expected_late.append(row["number"])
                else:
                    taken[row["k"]].append(row)
        elif step == "advance":
            watermark = max(watermark, argument)
            totals.advance(watermark * 1000)
        elif step == "interrupt":
            time, slices, parallelism = argument
            watermark = max(watermark, time)
            for world, count in zip(totals.worlds, slices, strict=False):
                any(world.operator.advance_watermark(watermark * 1000) for _ in range(count))
            totals.restore(parallelism)
            totals.advance(watermark * 1000)
        else:
            totals.restore(argument)
    totals.advance(MAX_WATERMARK_US)
    totals.drain()
    expected: list[Row] = []
    for key, rows in taken.items():
        life: list[Row] = []
        before = None
        for end in sorted({row["t"] // every * every + every for row in rows}):
            if ttl is not None and before is not None and end - before > ttl:
                life.clear()
            before = end
            life += [row for row in rows if end - every <= row["t"] < end]
            expected.append({"k": key, "t": end, **results(life, MERGED)})
    assert by_key(totals.found) == by_key(expected)
    assert sorted(row["number"] for row in totals.late) == sorted(expected_late)
    if ttl is not None:
        assert all("table:totals" not in world.snapshot() for world in totals.worlds)


def by_key(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Return the rows of each key in their order, with NaN equal to itself and times as numbers."""
    found = defaultdict(list)
    for row in rows:
        values = [_comparable(each) for each in row.values()]
        if not isinstance(values[1], int):
            values[1] = round((values[1] - datetime(1970, 1, 1)).total_seconds() * 1000)
        found[row["k"]].append(values)
    return dict(found)


def _comparable(value: Any) -> Any:
    """Return a value in which NaN is equal to itself, and floats that differ by rounding are equal."""
    if not isinstance(value, float):
        return value
    if abs(value) < 1e-12:  # a covariance of 0 may be computed as less than the rounding of its terms
        return 0.0
    return "NaN" if math.isnan(value) else float(f"{value:.12g}")


@pytest.mark.parametrize("kind", [pa.time64("us"), pa.time32("s"), pa.date32(), pa.timestamp("ms"), pa.duration("us")])
@pytest.mark.parametrize("cut", [1, 4])
def test_an_extreme_of_times_is_null_as_long_as_they_are(kind: pa.DataType, cut: int) -> None:
    values = pa.array(
        [None, 3, None, 1], pa.int32() if pa.types.is_time32(kind) or pa.types.is_date(kind) else pa.int64()
    )
    batch = pa.record_batch({"k": pa.array([1, 1, 1, 1]), "v": values.view(kind)})
    aggregates = {"low": Min("v"), "high": Max("v")}
    world = World(
        running_aggregate_operator("o", keys=["k"], event_time=None, aggregates=aggregates, schema=batch.schema)
    )
    for first in range(0, 4, cut):
        world.process(batch.slice(first, cut))
    none, three, _, one = batch.column("v").to_pylist()
    found = [(row["low"], row["high"]) for row in world.out.rows()]
    assert found == [(none, none), (three, three), (three, three), (one, three)]


def test_an_interval_that_is_finer_than_event_time_is_refused_by_its_name() -> None:
    schema = pa.schema([("k", pa.int64()), ("t", pa.timestamp("ms"))])
    with pytest.raises(ConfigError, match="operator 'totals': every: 2500 µs is finer than the event time 't'"):
        periodic_aggregate_operator(
            "totals", keys=["k"], event_time=TimeColumn("t"), aggregates={"n": Count()}, schema=schema, every_us=2500
        )
