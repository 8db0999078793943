"""Tests of carts.py: pytest examples/carts"""

from datetime import datetime

import pytest
from carts import ABANDONED, EVENT, AbandonedCarts, env, sold, with_event_time

from midstream import Environment, testing


def event(user, item, action, price, at):
    return {"user": user, "item": item, "action": action, "price": price, "at": f"2024-01-01 {at}"}


def test_a_purchase_counts_in_its_ten_minutes():
    result = testing.run(
        env,
        {
            "events": [
                event("ann", "tea", "add", 3, "12:00"),
                event("ann", "", "buy", 3, "12:04"),
                event("bob", "", "buy", 5, "12:09"),
                event("bob", "", "buy", 7, "12:10"),
            ]
        },
    )
    assert [row["sold"] for row in result["sold"]] == [8, 7]


def test_a_purchase_that_comes_too_late_goes_aside():
    with testing.job(env) as job:
        job.feed(event("ann", "", "buy", 3, "12:00"))
        job.advance_to("2024-01-01 12:10")
        job.feed(event("bob", "", "buy", 5, "12:09"))
        assert [row["sold"] for row in job.take("sold")] == [3]
        assert [row["user"] for row in job.take("late")] == ["bob"]


def test_a_cart_is_abandoned_once_and_only_with_something_in_it():
    with testing.job(env) as job:
        job.feed([event("ann", "tea", "add", 3, "12:00"), event("bob", "tea", "add", 3, "12:00")])
        job.feed([event("ann", "pot", "add", 9, "12:20"), event("bob", "tea", "remove", 3, "12:20")])
        job.advance_to("2024-01-01 12:49:59")
        assert job.take("abandoned") == []
        job.advance_to("2024-01-01 12:50")
        assert job.take("abandoned") == [
            {"user": "ann", "items": 2, "worth": 12, "since": datetime(2024, 1, 1, 12, 20)}
        ]
        job.end()
        assert job.take("abandoned") == []


@pytest.mark.parametrize("parallelism", [1, 2, 5])
def test_carts_and_timers_survive_a_failure(parallelism):
    carts = testing.harness(AbandonedCarts(), EVENT, ABANDONED, key="user", event_time="at")
    carts.process([event(user, "tea", "add", 3, "12:00") for user in ("ann", "bob", "eve")])
    carts.snapshot_and_restore(parallelism)
    assert carts.state["cart"] == {user: {"tea": 3} for user in ("ann", "bob", "eve")}
    assert len(carts.advance_to("2024-01-01 12:30")) == 3


def test_nothing_depends_on_where_batches_are_cut():
    orders = with_event_time(Environment().from_collection([], schema=EVENT))
    rows = [event("ann", "", "buy", minute, f"12:{minute:02d}") for minute in range(30)]
    testing.check_cuts(sold(orders), rows)
