"""Tests of clickstream.py: pytest examples/clickstream"""

from collections import Counter
from datetime import datetime, timedelta

import polars as pl
import pytest
from clicks import BAD, clicks
from clickstream import CLICK, env, lines
from polars.testing import assert_frame_equal

from midstream import BAD_RECORDS, testing

SOME = clicks(120)
ONCE = pl.DataFrame(SOME, pl.Schema(CLICK)).unique("id")
OUTPUTS = ("visits", "top", "late")


def test_visits_are_those_that_polars_finds():
    begins = (pl.col("at").diff() > timedelta(minutes=30)).fill_null(True)
    expected = ONCE.sort("at").with_columns(visit=begins.cum_sum().over("user"))
    expected = expected.group_by("user", "visit").agg(
        window_start=pl.min("at"),
        window_end=pl.max("at") + timedelta(minutes=30),
        clicks=pl.len().cast(pl.Int64),
        cents=pl.sum("cents"),
        pages=pl.n_unique("page").cast(pl.Int64),
        first=pl.first("page"),
        last=pl.last("page"),
        from_campaigns=pl.count("campaign").cast(pl.Int64),
    )
    result = testing.run(env, SOME, cut="whole").frame("visits")
    assert_frame_equal(result, expected.drop("visit"), check_row_order=False)
    assert result["clicks"].max() > 2
    assert result["user"].is_duplicated().any()


def test_the_three_most_viewed_pages_of_each_hour_ties_by_name():
    expected = []
    for hour, rows in ONCE.group_by(pl.col("at").dt.truncate("1h")):
        ranked = sorted(Counter(rows["page"]).items(), key=lambda each: (-each[1], each[0]))
        expected += [(hour[0], rank, page, views) for rank, (page, views) in enumerate(ranked[:3], 1)]
    result = testing.run(env, SOME, cut="whole").frame("top").drop("window_end")
    assert sorted(result.rows()) == sorted(expected)
    assert len(expected) == 6


def test_a_click_counts_once_within_an_hour_and_aside_if_it_is_too_late():
    click = {"id": 1, "user": "ann", "page": "/", "at": "2024-05-01 12:00"}
    with testing.job(env) as job:
        job.feed([click, click, click | {"id": 2, "at": "2024-05-01 12:10"}])
        job.advance_to("2024-05-01 12:30")
        job.feed(click | {"id": 3, "at": "2024-05-01 12:29"})
        job.advance_to("2024-05-01 12:40")
        [visit] = job.take("visits")
        assert (visit["clicks"], visit["window_end"]) == (2, datetime(2024, 5, 1, 12, 40))
        assert [row["id"] for row in job.take("late")] == [3]


def test_lines_that_cannot_be_read_are_kept():
    bad = lines.side_output(BAD_RECORDS).preview(20, seconds=30).rows
    assert Counter(row["bytes"].decode() for row in bad) == dict.fromkeys(BAD, 2)


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_restart_in_the_middle_changes_nothing(parallelism):
    with testing.job(env) as job:
        job.feed(SOME[:70], cut=10)
        job.snapshot_and_restore(parallelism)
        result = job.feed(SOME[70:], cut=10).end().result()
    expected = testing.run(env, SOME, cut="whole")
    for name in OUTPUTS:
        assert_frame_equal(result.frame(name), expected.frame(name), check_row_order=False)


def test_nothing_depends_on_where_batches_are_cut():
    testing.check_cuts(env, SOME, cuts=3)


def test_failures_change_nothing():
    testing.simulate(env, {"lines": SOME}, seeds=range(2))
