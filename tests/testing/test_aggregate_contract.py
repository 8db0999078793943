"""`testing.check_aggregate`: it passes for the project's own aggregates, and reports what is wrong with others."""

from __future__ import annotations

import threading
from datetime import datetime
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from midstream import (
    Accumulator,
    Aggregate,
    Count,
    First,
    JobError,
    Last,
    Max,
    Mean,
    Min,
    SchemaError,
    Sum,
    testing,
)

ROWS = [{"price": price, "at": datetime(2024, 1, 1), "text": f"t{price}"} for price in (5, 3, 9, 7, 1, 1, 8)]


class Median(Accumulator):
    columns = ("price",)
    type = pa.float64()

    def init(self):
        return []

    def add(self, accumulator, row):
        accumulator.append(row["price"])
        return accumulator

    def merge(self, first, second):
        return first + second

    def result(self, accumulator):
        values = sorted(accumulator)
        return float(values[len(values) // 2])


class MeanOfMeans(Median):
    """As if a mean could be made of the means of the parts."""

    def init(self):
        return None

    def add(self, accumulator, row):
        return row["price"] if accumulator is None else (accumulator + row["price"]) / 2

    def merge(self, first, second):
        return (first + second) / 2

    def result(self, accumulator):
        return float(accumulator)


SHARED: list[int] = []


class OneForAll(Median):
    def init(self):
        return SHARED

    def result(self, accumulator):
        return float(len(accumulator))


class Forgets(Median):
    def merge(self, first, second):
        return second


class RangeOfPrices(Aggregate):
    columns = ("price",)

    def partial(self, event_time):
        return {"low": pl.col("price").min(), "high": pl.col("price").max()}

    def merge(self, part):
        return {"low": part("low").min(), "high": part("high").max()}

    def finish(self, part):
        return part("high") - part("low")


class CountOfParts(RangeOfPrices):
    def merge(self, part):
        return {"low": part("low").min(), "high": part("high").sum()}


class CountsParts(RangeOfPrices):
    """Counts what it merges, instead of adding up: every part that is merged becomes one."""

    def partial(self, event_time):
        return {"rows": pl.col("price").count().cast(pl.Int64)}

    def merge(self, part):
        return {"rows": part("rows").count().cast(pl.Int64)}

    def finish(self, part):
        return part("rows")


class CountsDifferentParts(CountsParts):
    def partial(self, event_time):
        return {"rows": pl.col("price").n_unique().cast(pl.Int64)}

    def merge(self, part):
        return {"rows": part("rows").n_unique().cast(pl.Int64)}


class AddsTwoAtMost(RangeOfPrices):
    def partial(self, event_time):
        return {"sum": pl.col("price").sum()}

    def merge(self, part):
        return {"sum": part("sum").head(2).sum()}

    def finish(self, part):
        return part("sum")


@pytest.mark.parametrize(
    ("aggregate", "result"),
    [
        (Count(), 7),
        (Count("price"), 7),
        (Sum("price"), 34),
        (Min("price"), 1),
        (Max("price"), 9),
        (Mean("price"), 34 / 7),
        (First("text"), "t5"),
        (Last("text"), "t8"),
        (Median(), 5.0),
        (RangeOfPrices(), 8),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, (Aggregate, Accumulator)) else "",
)
def test_what_is_associative_passes_and_gives_the_result(aggregate, result):
    assert testing.check_aggregate(aggregate, ROWS) == pytest.approx(result)


@pytest.mark.parametrize(
    ("aggregate", "message"),
    [
        (MeanOfMeans(), "MeanOfMeans: parts of .* give .*, but all rows together give .*merge must be associative"),
        (Forgets(), "merge must be associative"),
        (CountOfParts(), "merge must be associative"),
        (CountsParts(), "all rows together give 7, and 1 after merge is called with nothing else"),
        (CountsDifferentParts(), "all rows together give 6, and 1 after merge is called with nothing else"),
        (AddsTwoAtMost(), "merge must be associative"),
        (OneForAll(), "must keep nothing elsewhere|must return a new accumulator"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, (Aggregate, Accumulator)) else "",
)
def test_what_depends_on_how_parts_are_merged_is_reported(aggregate, message):
    SHARED.clear()
    with pytest.raises(AssertionError, match=message):
        testing.check_aggregate(aggregate, ROWS)


def test_an_aggregate_that_does_not_pickle_is_reported():
    class Locked(Median):
        def __init__(self):
            self.lock = threading.Lock()

    with pytest.raises(AssertionError, match="Locked does not pickle"):
        testing.check_aggregate(Locked(), ROWS)


def test_what_a_function_raises_is_raised_with_its_cause():
    class Fails(Median):
        def result(self, accumulator):
            raise LookupError("no result")

    with pytest.raises(JobError, match=r"Fails\.result raised LookupError: no result"):
        testing.check_aggregate(Fails(), ROWS)


def test_a_column_that_is_not_there_is_refused():
    with pytest.raises(SchemaError, match="column 'cost'"):
        testing.check_aggregate(Sum("cost"), ROWS)


def test_too_few_rows_are_refused():
    with pytest.raises(AssertionError, match="at least three rows"):
        testing.check_aggregate(Count(), ROWS[:2])


def test_accumulators_may_be_instances_of_every_class_of_the_main_file():
    program = """
from collections import namedtuple
from dataclasses import dataclass
from enum import Enum
import pyarrow as pa
from midstream.engine.operators.windows.aggregates import Accumulator

Pair = namedtuple("Pair", "n kind")
class Kind(Enum):
    ONE = 1
@dataclass
class Count:
    n: int = 0
    kind: Kind = Kind.ONE

class Counting(Accumulator):
    columns, type = ("n",), pa.int64()
    def __init__(self, empty):
        self.empty = empty
    def init(self):
        return self.empty(0, Kind.ONE)
    def add(self, accumulator, row):
        return self.empty(accumulator.n + 1, Kind.ONE)
    def merge(self, first, second):
        return self.empty(first.n + second.n, Kind.ONE)
    def result(self, accumulator):
        return accumulator.n
"""
    main: dict[str, Any] = {"__name__": "__main__"}
    exec(program, main)
    for empty in ("Pair", "Count"):
        aggregate = main["Counting"](main[empty])
        assert testing.check_aggregate(aggregate, [{"n": 1}, {"n": 2}, {"n": 3}]) == 3, empty
