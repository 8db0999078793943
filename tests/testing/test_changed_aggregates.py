"""State of an aggregate is never continued by another one, even if its columns have the same names and types."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import polars as pl
import pytest

from midstream import (
    ArgMax,
    ArgMin,
    Collect,
    ConfigError,
    Count,
    CountDistinct,
    Covariance,
    DataStream,
    Environment,
    First,
    KeyedStream,
    Last,
    Max,
    Mean,
    Min,
    Quantile,
    Sum,
    TopN,
    Variance,
    WatermarkStrategy,
    count,
    session,
    testing,
    tumbling,
)
from midstream.engine.operators.windows.aggregates import description_of

AT = datetime(2024, 1, 1)
ROWS = [{"k": 1, "at": AT, "v": 5, "f": 100}]
SHAPES: dict[str, Callable[[KeyedStream, Any], DataStream]] = {
    "running": lambda keyed, n: keyed.aggregate(n=n),
    "running with a ttl": lambda keyed, n: keyed.aggregate(n=n, ttl="1 h"),
    "every": lambda keyed, n: keyed.aggregate(n=n, every="1 h"),
    "tumbling": lambda keyed, n: keyed.window(tumbling("1 h")).aggregate(n=n),
    "session": lambda keyed, n: keyed.window(session("1 h")).aggregate(n=n),
    "count": lambda keyed, n: keyed.window(count(2)).aggregate(n=n),
}
CHANGES = [
    (Sum("v"), Sum("f")),
    (Min("v"), Min("f")),
    (Max("v"), Max("f")),
    (Mean("v"), Mean("f")),
    (Count(), Count("v")),
    (Count("v"), Count("f")),
    (First("v"), First("f")),
    (First("v"), Last("v")),
    (Last("v"), Last("v", order="arrival")),
    (ArgMin("v", by="f"), ArgMax("v", by="f")),
    (ArgMin("v", by="f"), ArgMin("f", by="v")),
    (Variance("v"), Variance("f")),
    (Covariance("v", "f"), Covariance("f", "v")),
    (CountDistinct("v"), CountDistinct("f")),
    (Quantile("v", 0.5), Quantile("v", 0.5, relative_error=0.1)),
    (Collect("v", limit=3), Collect("v", limit=4)),
    (TopN("v", 3, by="f"), TopN("v", 4, by="f")),
    (TopN("v", 3, by="f"), TopN("v", 3, by="f", descending=False)),
]


def made(shape: str, aggregate: Any) -> DataStream:
    schema = {"k": int, "at": datetime, "v": int, "f": int}
    stream = Environment().from_collection([], schema=schema, splits=1).uid("rows")
    keyed = stream.with_watermarks("at", WatermarkStrategy.monotonous()).key_by("k")
    return SHAPES[shape](keyed, aggregate).uid("aggregates")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("before", "after"), CHANGES, ids=description_of)
def test_another_aggregate_of_the_same_name_and_type_is_refused(shape: str, before: Any, after: Any) -> None:
    if shape == "every" and getattr(after, "order", "") == "arrival":
        after = ArgMin("v", by="f")  # that shape refuses the order of arrival
    with testing.job(made(shape, before)) as job:
        snapshot = job.feed("rows", ROWS).snapshot()
    with (
        pytest.raises(ConfigError, match=r"its state cannot be read as that|it holds"),
        testing.job(made(shape, after), restore=snapshot),
    ):
        pass
    with testing.job(made(shape, before), restore=snapshot) as job:
        job.feed("rows", ROWS)


def test_what_is_computed_from_the_same_parts_and_which_rows_count_may_change() -> None:
    for before, after in (
        (Count(), Count(where=pl.col("v") > 5)),
        (Quantile("v", 0.5), Quantile("v", 0.9)),
        (Variance("v"), Variance("v", ddof=0)),
    ):
        with testing.job(made("running", before)) as job:
            snapshot = job.feed("rows", ROWS).snapshot()
        with testing.job(made("running", after), restore=snapshot) as job:
            assert len(job.feed("rows", ROWS).take()) == 1
