"""drop_duplicates, distinct, sort_by_time and top as users call them: results, event time afterwards, and refusals."""

from __future__ import annotations

import logging
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from midstream import (
    LATE,
    ConfigError,
    Count,
    DataStream,
    Environment,
    JobError,
    SchemaError,
    WatermarkStrategy,
    testing,
    tumbling,
)

HERE = re.escape(Path(__file__).name)
START = datetime(2024, 1, 1, 12)
ROWS = [
    {"at": START + timedelta(minutes=minute), "page": page, "ms": ms, "x": ms / 2}
    for minute, page, ms in [(0, "a", 5), (2, "b", 7), (1, "a", 5), (9, "a", 9), (4, "b", 7), (65, "c", 1)]
]


def untimed() -> DataStream:
    return Environment("pages").from_collection(ROWS, splits=1).uid("rows")


def stream() -> DataStream:
    return untimed().with_watermarks("at", WatermarkStrategy.bounded("10 min"))


def refused(kind: type[Exception], part: str) -> Any:
    """The message begins with this file and the line of the call, and contains `part`."""
    return pytest.raises(kind, match=rf"(?s)^{HERE}:\d+: .*{part}")


def minutes(made: DataStream, cut: Any = 1) -> list[int]:
    return [int((row["at"] - START).total_seconds()) // 60 for row in testing.run(made, cut=cut).rows]


@pytest.mark.parametrize("cut", [1, 2, "whole"])
def test_rows_are_dropped_that_are_near_a_kept_one(cut: Any) -> None:
    assert minutes(stream().drop_duplicates("page"), cut) == [0, 2, 65]
    assert minutes(stream().drop_duplicates(["page"], within="2 min"), cut) == [0, 2, 9, 65]
    assert minutes(stream().drop_duplicates("page", "ms", within=timedelta(hours=2)), cut) == [0, 2, 9, 65]
    assert minutes(stream().drop_duplicates("page", within=0), cut) == [0, 2, 1, 9, 4, 65]


def test_without_columns_whole_rows_are_compared_with_nulls_and_nan_as_equal() -> None:
    doubled = untimed().drop("x", "at")
    assert testing.run(doubled.distinct()).rows == testing.run(doubled.drop_duplicates()).rows
    assert [row["ms"] for row in testing.run(doubled.distinct()).rows] == [5, 7, 9, 1]
    rows: list[dict[str, Any]] = [
        {"s": None, "x": 1.0},
        {"s": "", "x": float("nan")},
        {"s": None, "x": 1.0},
        {"s": "", "x": float("nan")},
    ]
    odd = Environment("odd").from_collection([*rows, {"s": "", "x": None}, {"s": "", "x": -0.0}, {"s": "", "x": 0.0}])
    made = odd.distinct()
    assert made.schema == odd.schema
    assert len(testing.check_cuts(made).rows) == 4
    with refused(SchemaError, "column 'l' is .* cannot be compared; name the columns that make rows duplicates"):
        Environment("odd").from_collection([{"l": [1]}]).distinct()


def test_whole_rows_within_a_time_have_late_rows_as_they_were() -> None:
    made = untimed().with_watermarks("at", WatermarkStrategy.monotonous()).drop_duplicates(within="1 h")
    late = made.side_output(LATE)
    assert late.schema == made.schema == untimed().schema
    result = testing.run([made, late], cut=1)
    assert [[row["at"].minute for row in result[each]] for each in (made, late)] == [[0, 2, 9, 5], [1, 4]]


def test_results_do_not_depend_on_where_batches_are_cut() -> None:
    testing.check_cuts(stream().drop_duplicates("page", within="3 min"))
    testing.check_cuts(stream().key_by("page").sort_by_time())
    testing.check_cuts(stream().key_by("page").window(tumbling("1 h")).top(2, by="ms"))


def test_windows_may_follow_without_another_declaration_of_event_time() -> None:
    hour = tumbling("1 h")
    for made in (
        stream().drop_duplicates("page", within="1 min"),
        stream().drop_duplicates("page"),
        stream().key_by("page").sort_by_time(),
    ):
        assert made.event_time == "at"
        counted = testing.run(made.window_all(hour).aggregate(n=Count())).rows
        assert sum(row["n"] for row in counted) == len(testing.run(made).rows)
    per_page = stream().key_by("page").window(tumbling("10 min")).aggregate(n=Count())
    again = per_page.drop_duplicates("page", within="30 min").key_by("page").sort_by_time()
    best = again.window_all(hour).top(1, by="n")
    found = [(row["page"], row["n"]) for row in testing.run(best).rows]
    assert found == [("a", 3), ("c", 1)]
    per_day = best.window_all(tumbling("1 d")).aggregate(n=Count())
    assert [row["n"] for row in testing.run(per_day).rows] == [2]


def test_rows_of_a_key_are_in_the_order_of_time_and_late_ones_apart() -> None:
    made = untimed().with_watermarks("at", WatermarkStrategy.monotonous()).key_by("page").sort_by_time()
    late = made.side_output(LATE)
    result = testing.run([made, late], cut=1)
    assert [row["ms"] for row in result[made]] == [5, 7, 9, 1]
    assert [row["at"].minute for row in result[late]] == [1, 4]
    in_order = minutes(stream().key_by("page").sort_by_time())
    assert [minute for minute in in_order if minute in (0, 1, 9)] == [0, 1, 9]


def test_the_largest_rows_of_a_window_have_ranks() -> None:
    made = stream().key_by("page").window(tumbling("1 h")).top(2, by=["ms", "x"])
    assert made.schema.names == ["page", "window_start", "window_end", "rank", "at", "ms", "x"]
    rows = sorted((row["page"], row["rank"], row["ms"], row["at"].minute) for row in testing.run(made).rows)
    assert rows == [("a", 1, 9, 9), ("a", 2, 5, 0), ("b", 1, 7, 2), ("b", 2, 7, 4), ("c", 1, 1, 5)]
    least = testing.run(stream().window_all(tumbling("1 h")).top(1, by="ms", descending=False)).rows
    assert [(row["page"], row["ms"]) for row in least] == [("a", 5), ("c", 1)]
    per_day = made.rename({"window_start": "hour"}).window_all(tumbling("1 d")).top(1, by=["rank", "ms"])
    assert per_day.schema.names == ["window_start", "window_end", "rank", "page", "hour", "at", "ms", "x"]
    [row] = testing.run(per_day).rows
    assert (row["rank"], row["page"], row["hour"], row["window_start"].hour) == (1, "b", START, 0)


@pytest.mark.parametrize("names", [["rank", "window_end"], ["window_start"], ["window_end", "rank", "window_start"]])
def test_columns_that_are_replaced_may_be_anywhere_among_the_others(names: list[str]) -> None:
    replaced = stream().with_columns(**{name: pl.col("ms") for name in names})
    for columns in ([*names, "page", "at", "ms"], ["page", *names, "at", "ms"], ["page", "at", "ms", *names]):
        made = replaced.select(*columns).key_by("page").window(tumbling("1 h")).top(1, by=names[0])
        assert made.schema.names == ["page", "window_start", "window_end", "rank", "at", "ms"]
        assert sorted((row["page"], row["rank"], row["ms"]) for row in testing.run(made).rows) == [
            ("a", 1, 9),
            ("b", 1, 7),
            ("c", 1, 1),
        ]


def test_the_largest_rows_so_far_are_emitted_at_multiples_if_they_are_others() -> None:
    keyed = stream().with_columns(when="at").key_by("page")
    made = keyed.top(1, by="ms", every="5 min")
    assert made.schema.names == ["page", "at", "rank", "ms", "x", "when"] and made.event_time == "at"
    rows = [(row["page"], row["at"].minute, row["ms"], row["when"].minute) for row in testing.run(made).rows]
    assert sorted(rows) == [("a", 5, 5, 0), ("a", 10, 9, 9), ("b", 5, 7, 2), ("c", 10, 1, 5)]
    per_hour = made.key_by("page").window(tumbling("1 h")).aggregate(n=Count())
    assert {row["page"]: row["n"] for row in testing.run(per_hour).rows} == {"a": 2, "b": 1, "c": 1}
    testing.check_cuts(made)
    late = keyed.top(1, by="ms", every="1 min", ttl="1 h").side_output(LATE)
    assert late.schema == keyed.schema
    with refused(ConfigError, "top: every=None is not a duration"):
        keyed.top(1, by="ms", every=None)  # type: ignore[arg-type]
    with refused(ConfigError, "top: every: 0 is not an interval"):
        keyed.top(1, by="ms", every=0)
    with refused(JobError, "top: the stream has no event time"):
        untimed().key_by("page").top(1, by="ms", every="1 min")
    with refused(SchemaError, "top: column 'm' is not in the stream's schema"):
        keyed.top(1, by="m", every="1 min")


def test_unbounded_state_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="midstream"):
        untimed().drop_duplicates("page")
        [warning] = caplog.messages
        assert re.match(rf"{HERE}:\d+: drop_duplicates remembers each distinct value of page .* within='1 h'", warning)
        stream().drop_duplicates("page", within="1 h")
        assert len(caplog.messages) == 1


def test_wrong_arguments_of_drop_duplicates_are_refused() -> None:
    with refused(SchemaError, "drop_duplicates: key column 'pages' is not in the stream's schema"):
        stream().drop_duplicates("pages")
    with refused(SchemaError, r"drop_duplicates: key column 'x' is double, .* before drop_duplicates\(\)"):
        stream().drop_duplicates("x")
    with refused(JobError, "drop_duplicates: a column is named twice in page, page"):
        stream().drop_duplicates("page", ["page"])
    for wrong in (3, pl.col("page"), None):
        with refused(JobError, "is not the name of a column; write for example drop_duplicates"):
            stream().drop_duplicates(wrong)  # type: ignore[arg-type]
    with refused(
        JobError, r"drop_duplicates: within= .* no event time; call with_watermarks.*\(timestamp columns: at\)"
    ):
        untimed().drop_duplicates("page", within="1 h")
    with refused(JobError, "drop_duplicates: with_columns.* computes the event-time column"):
        stream().with_columns(at=pl.col("at").dt.offset_by("1h")).drop_duplicates("page", within="1 h")
    with refused(ConfigError, "drop_duplicates: within"):
        stream().drop_duplicates("page", within="-1 h")
    with refused(JobError, r"drop_duplicates: defines where rows go, and so does rebalance\(\)"):
        stream().rebalance().drop_duplicates("page")
    with pytest.raises(JobError, match="operator 'drop_duplicates': key 'page' is null in the row"):
        testing.run(stream().with_columns(page=pl.when(pl.col("ms") > 5).then("page")).drop_duplicates("page"))
    with pytest.raises(JobError, match="no side output 'late'"):
        stream().drop_duplicates("page").side_output(LATE)


def test_wrong_arguments_of_the_others_are_refused() -> None:
    with refused(JobError, "sort_by_time: the stream has no event time"):
        untimed().key_by("page").sort_by_time()
    hours = stream().key_by("page").window(tumbling("1 h"))
    for count in (0, -1, 1.5, True, "3"):
        with refused(ConfigError, f"top: count {count!r} is not a positive whole number"):
            hours.top(count, by="ms")  # type: ignore[arg-type]
    with refused(ConfigError, "top: count 1180591620717411303424 is more than 2,147,483,647; give a smaller one"):
        hours.top(2**70, by="ms")
    with refused(SchemaError, "top: column 'm' is not in the stream's schema"):
        hours.top(1, by="m")
    with refused(JobError, "top: by= names no column"):
        hours.top(1, by=[])
    with refused(ConfigError, "'page' is a key"):
        hours.top(1, by="page")
