"""Tests of orders.py: pytest examples/orders"""

from datetime import timedelta
from itertools import product

import polars as pl
import pytest
from orders import env
from polars.testing import assert_frame_equal
from shop import shop

from midstream import testing

DAY = timedelta(days=1)
SOME = shop(60)
"""What the files in the directory `in` hold."""


def joined(left: dict, rows: dict, since: str, time: str) -> dict:
    """Full join of two dicts of rows by order in plain Python: the rows of one order, each list merged pair by pair."""
    result = {}
    for order in left.keys() | rows.keys():
        ones, others = left.get(order, []), rows.get(order, [])
        pairs = [(one, other) for one, other in product(ones, others) if one[since] <= other[time] <= one[since] + DAY]
        result[order] = [one | other for one, other in pairs]
        result[order] += [one for one in ones if not any(one is each for each, _ in pairs)]
        result[order] += [
            other | {since: other[time]} for other in others if not any(other is each for _, each in pairs)
        ]
    return result


def by_order(frame: pl.DataFrame) -> dict:
    return {row["order"]: [row] for row in frame.unique().to_dicts()}


def test_each_order_is_joined_with_its_payment_and_shipment_of_24_hours():
    result = testing.run(env, SOME, cut="whole").frame("whole")
    paid = joined(by_order(SOME["orders"]), by_order(SOME["payments"]), "ordered", "paid")
    whole = joined(paid, by_order(SOME["shipments"]), "ordered", "shipped")
    expected = pl.DataFrame([row for rows in whole.values() for row in rows], result.schema)
    assert_frame_equal(result, expected, check_row_order=False)
    assert (
        result.select(pl.exclude("order", "ordered").is_null().any()).row(0) == (True,) * 5
    )  # all that can be missing is


def test_an_order_is_unpaid_after_half_an_hour_and_a_payment_in_its_last_instant_counts():
    with testing.job(env) as job:
        job.feed("orders", [{"order": order, "customer": "ann", "ordered": "2024-10-26 12:00"} for order in (1, 2)])
        job.feed("payments", {"order": 2, "paid": "2024-10-26 12:30"})
        job.advance_to("2024-10-26 12:29:59")
        assert job.take("unpaid") == []
        job.advance_to("2024-10-26 12:30")
        assert [row["order"] for row in job.take("unpaid")] == [1]


def test_the_day_on_which_the_clock_is_set_back_has_25_hours():
    result = testing.run(env, SOME, cut="whole").frame("days")
    paris = pl.col("paid").dt.replace_time_zone("UTC").dt.convert_time_zone("Europe/Paris").dt.date()
    days = (
        SOME["payments"].unique().group_by(paris).agg(pl.len().cast(pl.Int64), pl.col("paid_cents").sum()).sort("paid")
    )
    assert result["window_end"][1] - result["window_start"][1] == timedelta(hours=25)
    assert result.select("payments", "cents").rows() == days.select("len", "paid_cents").rows()


def test_the_last_total_of_a_customer_has_all_orders_once():
    result = testing.run(env, SOME, cut="whole").frame("totals").unique("customer", keep="last", maintain_order=True)
    once = SOME["orders"].unique().group_by("customer").agg(orders=pl.len().cast(pl.Int64), cents=pl.sum("cents"))
    assert_frame_equal(result.drop("ordered"), once, check_row_order=False)


def test_a_row_that_comes_too_late_is_reported():
    with testing.job(env) as job:
        job.advance_to("2024-10-26 12:00")
        job.feed("payments", {"order": 1, "paid_cents": 5, "paid": "2024-10-26 11:59"})
        job.end()
        assert job.result().late.keys() == {"payments-once"}


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_restart_in_the_middle_changes_nothing(parallelism):
    halves = [{name: part(rows) for name, rows in SOME.items()} for part in (lambda r: r[:30], lambda r: r[30:])]
    with testing.job(env) as job:
        job.feed_all(halves[0], cut=10)
        job.snapshot_and_restore(parallelism)
        job.feed_all(halves[1], cut=10)
        job.end()
        result = job.result()
    expected = testing.run(env, SOME, cut="whole")
    for name in ("whole", "unpaid", "days", "totals"):
        assert_frame_equal(result.frame(name), expected.frame(name), check_row_order=False)


def test_nothing_depends_on_where_batches_are_cut():
    testing.check_cuts(env, {name: rows[:30] for name, rows in SOME.items()}, cuts=3)


def test_failures_change_nothing():
    testing.simulate(env, SOME, seeds=range(2))
