"""State of one operator is not restored into another one of the same uid, nor into one of other columns."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import permutations

import polars as pl
import pytest

from midstream import (
    ConfigError,
    Count,
    DataStream,
    Environment,
    Sum,
    WatermarkStrategy,
    count,
    session,
    sliding,
    testing,
    tumbling,
)

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


def restored(before: Make, after: Make) -> None:
    with testing.job(stream(before)) as job:
        snapshot = job.feed(ROWS[:16]).snapshot()
    with testing.job(stream(after), restore=snapshot) as job:
        job.feed(ROWS[16:]).end()


@pytest.mark.parametrize("before", OPERATORS)
def test_no_operator_takes_the_state_of_another(before: str) -> None:
    restored(OPERATORS[before], OPERATORS[before])
    for after in OPERATORS.keys() - {before}:
        with pytest.raises(ConfigError, match=r"\(uid 'one'\): in checkpoint 1 .* give the operator a new uid"):
            restored(OPERATORS[before], OPERATORS[after])


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
    for before, after in permutations(ROWS_OF, 2):
        with pytest.raises(ConfigError, match="the key was whole rows of .*, now it is whole rows of"):
            restored(
                lambda rows, of=before: of(rows).drop_duplicates(within=within),  # type: ignore[misc]
                lambda rows, of=after: of(rows).drop_duplicates(within=within),  # type: ignore[misc]
            )
