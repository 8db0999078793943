"""State of one operator is not restored into another one of the same uid, nor into one of other columns."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import permutations

import polars as pl
import pytest

from midstream import (
    ApproxCountDistinct,
    ArgMax,
    Collect,
    ConfigError,
    Count,
    CountDistinct,
    Covariance,
    DataStream,
    Environment,
    Last,
    Max,
    Mean,
    Quantile,
    SchemaError,
    Sum,
    TopN,
    Variance,
    WatermarkStrategy,
    count,
    session,
    sliding,
    testing,
    tumbling,
)
from midstream.inprocess.in_process_job import JobSnapshot

NOON = datetime(2024, 1, 1, 12)
ROWS = [{"k": s % 2, "j": s % 3, "v": s % 5, "at": NOON + timedelta(seconds=s)} for s in range(20)]
Make = Callable[[DataStream], DataStream]

TEN = tumbling("10 s")
OPERATORS: dict[str, Make] = {
    "window": lambda rows: rows.key_by("k").window(TEN).aggregate(n=Count()),
    "other window": lambda rows: rows.key_by("k").window(sliding("10 s", "5 s")).aggregate(n=Count()),
    "other aggregate": lambda rows: rows.key_by("k").window(TEN).aggregate(n=Sum("v")),
    "other column": lambda rows: rows.key_by("k").window(TEN).aggregate(n=Sum("j")),
    "other key": lambda rows: rows.key_by("j").window(TEN).aggregate(n=Count()),
    "session": lambda rows: rows.key_by("k").window(session("10 s")).aggregate(n=Count()),
    "count window": lambda rows: rows.key_by("k").window(count(7)).aggregate(n=Count()),
    "top of windows": lambda rows: rows.key_by("k").window(TEN).top(2, by="v"),
    "running": lambda rows: rows.key_by("k").aggregate(n=Count()),
    "running every": lambda rows: rows.key_by("k").aggregate(every="10 s", n=Count()),
    "running every, expiring": lambda rows: rows.key_by("k").aggregate(every="10 s", ttl="1 min", n=Count()),
    "running top": lambda rows: rows.key_by("k").top(2, by="v", every="10 s"),
    "sorted": lambda rows: rows.key_by("k").sort_by_time(),
    "first of keys": lambda rows: rows.drop_duplicates("k"),
    "first of keys within": lambda rows: rows.drop_duplicates("k", within="1 h"),
    "first of rows": lambda rows: rows.distinct(),
    "first of rows within": lambda rows: rows.drop_duplicates(within="1 h"),
}


def stream(make: Make) -> DataStream:
    rows = Environment().from_collection(ROWS, splits=1).uid("rows")
    return make(rows.with_watermarks("at", WatermarkStrategy.bounded("3 s"))).uid("one")


def snapshot_of(make: Make) -> JobSnapshot:
    with testing.job(stream(make)) as job:
        return job.feed(ROWS[:16]).snapshot()


def resumed(make: Make, snapshot: JobSnapshot) -> None:
    with testing.job(stream(make), restore=snapshot) as job:
        job.feed(ROWS[16:]).end()


@pytest.mark.turns(3)
@pytest.mark.parametrize("before", OPERATORS)
def test_no_operator_takes_the_state_of_another(before: str) -> None:
    snapshot = snapshot_of(OPERATORS[before])
    resumed(OPERATORS[before], snapshot)
    for after in OPERATORS.keys() - {before}:
        with pytest.raises(ConfigError, match=r"\(uid 'one'\): in checkpoint 1 .* give the operator a new uid"):
            resumed(OPERATORS[after], snapshot)


ROWS_OF: list[Make] = [
    lambda rows: rows,
    lambda rows: rows.select("j", "k", "v", "at"),
    lambda rows: rows.with_columns(v=pl.col("v").cast(pl.Int32)),
    lambda rows: rows.with_columns(more=pl.lit(1)),
    lambda rows: rows.drop("v"),
    lambda rows: rows.rename({"j": "v", "v": "j"}),
]


@pytest.mark.parametrize("within", [None, "1 h"])
def test_whole_rows_are_not_compared_with_those_of_other_columns(within: str | None) -> None:
    def first_of(of: Make) -> Make:
        return lambda rows: of(rows).drop_duplicates(within=within)

    snapshots = [snapshot_of(first_of(of)) for of in ROWS_OF]
    for (_, snapshot), (after, _) in permutations(zip(ROWS_OF, snapshots, strict=True), 2):
        with pytest.raises(ConfigError, match=r"the key was whole rows of .*, now it is whole rows of"):
            resumed(first_of(after), snapshot)


NUMBERS = [pl.Int32(), pl.Int64(), pl.Float32(), pl.Decimal(10, 0), pl.Decimal(38, 2)]
INSTANTS = [pl.Datetime("ms"), pl.Datetime("us"), pl.Datetime("us", "UTC")]
LENGTHS = [pl.Duration("ms"), pl.Duration("us")]
AGGREGATES = {
    "count": Count("x"),
    "sum": Sum("x"),
    "mean": Mean("x"),
    "max": Max("x"),
    "last": Last("x"),
    "argmax": ArgMax("x", by="x"),
    "distinct": CountDistinct("x"),
    "pairs": CountDistinct("x", "k"),
    "approximate": ApproxCountDistinct("x"),
    "quantile": Quantile("x", 0.5),
    "list": Collect("x"),
    "largest": TopN("x", 2, by="x"),
    "variance": Variance("x"),
    "covariance": Covariance("x", "x"),
}


def values_of(kind: pl.DataType) -> pl.Expr:
    """Return 0 to 4 as numbers, or the same seconds as times or durations of each type."""
    match kind:
        case pl.Datetime(time_zone=str()):
            return pl.from_epoch("v").cast(pl.Datetime("us")).dt.replace_time_zone("UTC")
        case pl.Datetime():
            return pl.from_epoch("v").cast(kind)
        case pl.Duration():
            return pl.duration(seconds="v").cast(kind)
    return pl.col("v").cast(kind)


@pytest.mark.turns(3)
@pytest.mark.parametrize("kinds", [NUMBERS, INSTANTS, LENGTHS], ids=["numbers", "instants", "lengths"])
@pytest.mark.parametrize("name", AGGREGATES)
def test_parts_of_the_same_values_of_another_type_mean_the_same_or_are_not_restored(
    name: str, kinds: list[pl.DataType]
) -> None:
    def made(kind: pl.DataType) -> DataStream:
        return stream(
            lambda rows: rows.with_columns(x=values_of(kind)).key_by("k").window(TEN).aggregate(y=AGGREGATES[name])
        )

    snapshots, expected = {}, {}
    for kind in kinds:
        try:
            with testing.job(made(kind)) as job:
                snapshots[kind] = job.feed(ROWS[:6], cut="whole").snapshot()
                expected[kind] = [row["y"] for row in job.feed(ROWS[6:10], cut="whole").end().take()]
        except SchemaError:  # no such aggregate of this type
            continue
    for before, after in permutations(expected, 2):
        try:
            with testing.job(made(after), restore=snapshots[before]) as job:
                found = [row["y"] for row in job.feed(ROWS[6:10], cut="whole").end().take()]
        except ConfigError:
            continue  # refused
        assert all(map(is_near, found, expected[after])), (before, after, found, expected[after])


def is_near(one: object, other: object) -> bool:
    return math.isclose(one, other) if isinstance(one, float) and isinstance(other, float) else one == other
