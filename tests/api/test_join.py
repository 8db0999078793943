"""Joins of streams: their arguments, their columns, and the event time of what follows."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream import (
    LATE,
    LATE_RIGHT,
    ConfigError,
    Count,
    DataStream,
    Environment,
    JobError,
    ProcessSlots,
    SchemaError,
    WatermarkStrategy,
    session,
    sliding,
    testing,
    tumbling,
)

START = datetime(2024, 1, 1, 10)
HOWS: list[Any] = ["inner", "left", "right", "full", "semi", "anti"]
MONOTONOUS = WatermarkStrategy.monotonous()


def orders_and_payments(bound: float = 0) -> tuple[DataStream, DataStream]:
    env = Environment("shop")
    strategy = WatermarkStrategy.bounded(bound)
    orders = env.from_collection([], schema={"order": int, "at": datetime, "price": int}).uid("orders")
    payments = env.from_collection([], schema={"of": int, "paid": datetime, "price": int}).uid("payments")
    return orders.with_watermarks("at", strategy), payments.with_watermarks("paid", strategy)


@pytest.mark.parametrize("how", HOWS)
def test_a_join_has_the_columns_of_polars_with_the_keys_once(how: Any) -> None:
    orders, payments = orders_and_payments()
    joined = orders.join(payments, left_on="order", right_on="of", how=how, within=(0, 1))
    one_sided = how in ("semi", "anti")
    assert joined.columns == ["order", "at", "price", *([] if one_sided else ["paid", "price_right"])]
    assert joined.event_time == ("paid" if how == "right" else "at")
    named = orders.join(payments.rename({"of": "order"}), ["order"], "inner", within=(0, 1), suffix="_paid")
    assert named.columns == ["order", "at", "price", "paid", "price_paid"]
    for tag, stream in ((LATE, orders), (LATE_RIGHT, payments)):
        late = joined.side_output(tag)
        assert late.schema == stream.schema and late.event_time == stream.event_time


def test_a_key_that_is_the_event_time_of_the_right_has_the_lefts_name() -> None:
    env = Environment("test")
    left = env.from_collection([{"k": START, "at": START}]).with_watermarks("at", MONOTONOUS)
    right = env.from_collection([{"at": START, "y": 1}]).with_watermarks("at", MONOTONOUS)
    joined = left.join(right, left_on="k", right_on="at", how="right", within=(0, "1 s"))
    assert joined.columns == ["k", "at", "y"] and joined.event_time == "k"


def test_arguments_that_do_not_fit_are_refused_at_the_call() -> None:
    orders, payments = orders_and_payments()
    for error, pattern, arguments in (
        (JobError, r"join: name the key columns with on=, or with left_on= and right_on=", {"on": None}),
        (JobError, r"join: name the key columns", {"left_on": "order"}),
        (JobError, r"join: name the key columns", {"on": None, "left_on": "order"}),
        (JobError, r"join: name at least one column", {"on": []}),
        (JobError, r"join: a column is named twice", {"on": ["price", "price"]}),
        (JobError, r"join: 7 is not a column name", {"on": 7}),
        (SchemaError, r"join: key column 'order' is not in the stream's schema \(of, paid, price\)", {"on": "order"}),
        (SchemaError, r"the keys do not match: order \(int64\) and paid \(timestamp", {"on": None, "left_on": "order", "right_on": "paid"}),
        (SchemaError, r"the keys do not match", {"on": None, "left_on": ["order", "price"], "right_on": "of"}),
        (ConfigError, r"how='outer' is none of 'inner', 'left', 'right', 'full', 'semi', 'anti'", {"how": "outer"}),
        (ConfigError, r"join: within begins at 1 s, after its end -1 s", {"within": ("1 s", "-1 s")}),
        (ConfigError, r"within='1 h' is not a pair of durations; write for example", {"within": "1 h"}),
        (ConfigError, r"join: give within=, .* or window=, .* \(without it, the state would grow with every row of both", {"within": None}),
        (ConfigError, r"join: give within=, .* or window=, .* \(both are given\)", {"window": tumbling(1)}),
        (ConfigError, r"the rows of both streams would decide where sessions end, .* within=", {"within": None, "window": session(1)}),
        (ConfigError, r"window='1 h' is not a window; use tumbling\('1 h'\)", {"within": None, "window": "1 h"}),
        (ConfigError, r"must not be called 'window_start', .* leave the column out of on=", {"within": None, "window": tumbling(1), "on": "window_start", "_windows": True}),
        (ConfigError, r"within=\(1, 2, 3\) is not a pair", {"within": (1, 2, 3)}),
        (ConfigError, r"join: '- soon' is not", {"within": ("-- soon", "1 s")}),
        (ConfigError, r"join: None is not a duration", {"within": (None, "1 s")}),
        (ConfigError, r"suffix='' must be a text that is not empty", {"suffix": ""}),
        (SchemaError, r"two columns of the result would be called 'paidprice'", {"suffix": "paid", "on": None, "left_on": "order", "right_on": "of", "_add": True}),
    ):  # fmt: skip
        given: dict[str, Any] = {"on": "price", "within": (0, 1), **arguments}
        right = payments.with_columns(pricepaid=1) if given.pop("_add", False) else payments
        left = orders
        if given.pop("_windows", False):
            left, right = (stream.with_columns(window_start=1) for stream in (orders, payments))
        with pytest.raises(error, match=rf"test_join.py:\d+: .*{pattern}".replace("paidprice", "pricepaid")):
            left.join(right, **given)
    untimed = orders.select("order", "price")
    for left, right, side in ((untimed, payments, "left"), (orders, payments.select("of", "price"), "right")):
        with pytest.raises(JobError, match=rf"join: the {side} stream has no event time; call with_watermarks"):
            left.join(right, on="price", within=(0, 1))
    with pytest.raises(JobError, match=r"join: defines where rows go, and so does rebalance\(\)"):
        orders.rebalance().join(payments, on="price", within=(0, 1))
    with pytest.raises(JobError, match="join: the streams are of two Environments"):
        orders.join(orders_and_payments()[1], on="price", within=(0, 1))
    with pytest.raises(JobError, match="join: needs a DataStream, got a KeyedStream"):
        orders.join(payments.key_by("of"), on="price", within=(0, 1))  # type: ignore[arg-type]
    with pytest.raises(JobError, match="side_output: there is no side output 'later' here"):
        orders.join(payments, on="price", within=(0, 1)).side_output("later")


ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30)), max_size=25)


@settings(max_examples=examples(40))
@given(
    ROWS,
    ROWS,
    st.sampled_from(HOWS),
    st.tuples(st.integers(-6, 6), st.integers(0, 6)),
    st.sampled_from([0, 3]),
    st.sampled_from([1, 2, "whole", [5, 1]]),
    st.sampled_from([1, 3]),
)
def test_windows_and_joins_follow_a_join_and_lose_nothing(left, right, how, within, bound, cut, parallelism) -> None:
    """Nothing that a join emits is late for what follows, however rows arrive."""
    orders, payments = orders_and_payments(bound)
    interval = within[0], sum(within)
    joined = orders.join(payments, left_on="order", right_on="of", how=how, within=interval)
    per_ten = joined.key_by("order").window(tumbling(10)).aggregate(n=Count())
    shipped = payments.select(order="of", shipped="paid").with_watermarks("shipped", WatermarkStrategy.bounded(bound))
    chained = joined.join(shipped, on="order", how="left", within=(-100, 100))
    rows = {
        "orders": _rows("order", "at", left),
        "payments": _rows("of", "paid", right),
    }
    found = testing.run([joined, per_ten, chained], rows, cut=cut, parallelism=parallelism)
    assert not any(found.late.values())
    time = str(joined.event_time)
    expected = Counter((row["order"], _ten(row[time])) for row in found[joined])
    assert {(row["order"], row["window_start"]): row["n"] for row in found[per_ten]} == expected
    each = Counter(key for key, _ in right)
    assert len(found[chained]) == sum(max(1, each[row["order"]]) for row in found[joined])
    assert _numbers(found[joined]) == _numbers(_by_polars(rows, how, interval).to_dicts())


def _rows(key: str, time: str, rows: list[tuple[int, int]]) -> list[dict[str, Any]]:
    ordered = sorted(rows, key=lambda row: row[1])
    return [{key: k, time: START + timedelta(seconds=s), "price": n} for n, (k, s) in enumerate(ordered)]


def _ten(time: datetime) -> datetime:
    return START + (time - START) // timedelta(seconds=10) * timedelta(seconds=10)


def _frames(rows: dict[str, Any]) -> tuple[pl.DataFrame, pl.DataFrame]:
    left = pl.DataFrame(rows["orders"], {"order": int, "at": datetime, "price": int})
    return left, pl.DataFrame(rows["payments"], {"of": int, "paid": datetime, "price": int})


def _numbers(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The numbers of the rows that were joined, which stand for their other columns too."""
    return sorted(((row["price"], row.get("price_right")) for row in rows), key=repr)


def _by_polars(rows: dict[str, Any], how: str, within: tuple[int, int]) -> pl.DataFrame:
    left, right = _frames(rows)
    right = right.rename({"of": "order", "price": "price_right"})
    pairs = left.join(right, on="order").filter((pl.col("paid") - pl.col("at")).dt.total_seconds().is_between(*within))
    alone = left.join(pairs, on="price", how="anti")
    unpaired = right.join(pairs, on="price_right", how="anti")
    parts = {
        "inner": [pairs],
        "left": [pairs, alone],
        "right": [pairs, unpaired],
        "full": [pairs, alone, unpaired],
        "semi": [left.join(pairs, on="price", how="semi")],
        "anti": [alone],
    }
    return pl.concat(parts[how], how="diagonal")


@pytest.mark.parametrize("how", HOWS)
def test_a_join_by_windows_has_their_bounds_after_the_lefts_columns_or_in_place_of_such_columns(how: Any) -> None:
    orders, payments = orders_and_payments()
    added = [] if how in ("semi", "anti") else ["paid", "price_right"]
    given: dict[str, Any] = {"how": how, "window": tumbling("1 h")}
    joined = orders.join(payments, left_on="order", right_on="of", **given)
    assert joined.columns == ["order", "at", "price", "window_start", "window_end", *added]
    assert joined.event_time == "window_end"
    again = joined.join(payments.rename({"of": "order", "price": "last"}), on="order", **given)
    bounds = ["window_start", "window_end"]
    assert again.columns == ["order", "at", "price", *added, *bounds, *(["paid_right", "last"] if added else [])]
    hours = orders.key_by("order").window(tumbling("30 min")).aggregate(n=Count())
    both = hours.join(hours.rename({"n": "of"}), on="order", **given)
    assert both.columns == ["order", "n", "window_start", "window_end", *(["of"] if added else [])]
    assert joined.side_output(LATE).schema == orders.schema
    assert both.side_output(LATE).schema == hours.schema


@settings(max_examples=examples(40))
@given(
    ROWS,
    ROWS,
    st.sampled_from(HOWS),
    st.sampled_from([tumbling(5), tumbling(10), sliding(10, 5), sliding(7, 3)]),
    st.sampled_from([1, 2, "whole", [5, 1]]),
    st.sampled_from([1, 3]),
)
def test_windows_and_joins_follow_joins_by_windows_and_lose_nothing(
    left: Any, right: Any, how: Any, window: Any, cut: Any, parallelism: int
) -> None:
    orders, payments = orders_and_payments(0)
    joined = orders.join(payments, left_on="order", right_on="of", how=how, window=window)
    paid = payments.select(order="of", paid_again="paid", number="price").with_watermarks("paid_again", MONOTONOUS)
    chained = joined.join(paid, on="order", how="left", window=tumbling(20))
    counted = chained.key_by("order").window(tumbling(20)).aggregate(n=Count())
    rows = {"orders": _rows("order", "at", left), "payments": _rows("of", "paid", right)}
    found = testing.run([joined, chained, counted], rows, cut=cut, parallelism=parallelism)
    assert not any(found.late.values())
    twenty = timedelta(seconds=20)
    paid_in = Counter((row["of"], (row["paid"] - START) // twenty) for row in rows["payments"])
    # the results of a window are in the window of their last microsecond
    expected: Counter[tuple[int, datetime]] = Counter()
    for row in found[joined]:
        number = (row["window_end"] - timedelta(microseconds=1) - START) // twenty
        expected[row["order"], START + number * twenty] += max(1, paid_in[row["order"], number])
    assert Counter((row["order"], row["window_start"]) for row in found[chained]) == expected
    assert {(row["order"], row["window_start"]): row["n"] for row in found[counted]} == expected


def test_late_rows_of_both_streams_are_taken_aside_and_counted() -> None:
    orders, payments = orders_and_payments()
    joined = orders.join(payments, left_on="order", right_on="of", how="full", within=(0, 5))
    late, late_right = joined.side_output(LATE), joined.side_output(LATE_RIGHT)
    with testing.job([joined, late, late_right]) as job:
        job.feed("orders", {"order": 1, "at": START, "price": 1}).advance_to(START + timedelta(seconds=10))
        job.feed("orders", {"order": 2, "at": START + timedelta(seconds=10), "price": 2})
        job.feed("payments", {"of": 1, "paid": START + timedelta(seconds=3), "price": 3})
        assert [row["price"] for row in job.take(joined)] == [1]
        assert [row["price"] for row in job.take(late)] == [2]
        assert [row["price"] for row in job.take(late_right)] == [3]


def test_a_job_with_a_join_and_a_window_counts_what_it_drops_late() -> None:
    env = Environment("joined", parallelism=2)
    orders: list[dict[str, Any]] = [
        {"user": i % 3, "at": START + timedelta(seconds=7 * i), "price": i} for i in range(40)
    ]
    clicks: list[dict[str, Any]] = [{"who": i % 4, "seen": START + timedelta(seconds=5 * i)} for i in range(50)]
    left = env.from_collection(orders).with_watermarks("at", MONOTONOUS)
    right = env.from_collection(clicks).with_watermarks("seen", MONOTONOUS)
    joined = left.join(right, left_on="user", right_on="who", within=("-1 min", 0))
    sink = joined.key_by("user").window(tumbling("1 min")).aggregate(pairs=Count()).collect()
    status = env.execute(slots=ProcessSlots())
    minute = timedelta(minutes=1)
    pairs = [o for o in orders for c in clicks if o["user"] == c["who"] and o["at"] - minute <= c["seen"] <= o["at"]]
    expected = Counter((o["user"], START + (o["at"] - START) // minute * minute) for o in pairs)
    assert {(row["user"], row["window_start"]): row["pairs"] for row in sink.rows()} == dict(expected)
    assert sum(operator.late_rows for vertex in status.vertices for operator in vertex.operators) == 0


def test_an_asof_join_has_all_columns_and_the_lefts_event_time() -> None:
    orders, payments = orders_and_payments()
    joined = orders.join_asof(payments, left_on="order", right_on="of", tolerance="1 h")
    assert joined.columns == ["order", "at", "price", "paid", "price_right"] and joined.event_time == "at"
    assert joined.side_output(LATE_RIGHT).event_time == "paid"
    for error, pattern, arguments in (
        (ConfigError, r"join_asof: tolerance: .*'soon'", {"on": "price", "tolerance": "soon"}),
        (ConfigError, r"join_asof: tolerance: .*-1", {"on": "price", "tolerance": -1}),
        (JobError, r"join_asof: name the key columns with on=", {}),
        (SchemaError, r"join_asof: key column 'order' is not in the stream's schema", {"on": "order"}),
    ):
        with pytest.raises(error, match=rf"test_join.py:\d+: .*{pattern}"):
            orders.join_asof(payments, **arguments)
    with pytest.raises(JobError, match="join_asof: the right stream has no event time"):
        orders.join_asof(payments.select("of", "price"), on="price")
    with pytest.raises(JobError, match=r"computes the event-time column 'at' again"):
        orders.with_columns(at=pl.col("at").dt.offset_by("1s")).join_asof(payments, on="price")


@settings(max_examples=examples(40))
@given(
    ROWS,
    ROWS,
    st.sampled_from([None, 0, 5]),
    st.sampled_from([0, 3]),
    st.sampled_from([1, 2, "whole", [5, 1]]),
    st.sampled_from([1, 3]),
)
def test_an_asof_join_finds_the_versions_of_polars_however_rows_arrive(
    left, right, tolerance, bound, cut, parallelism
) -> None:
    orders, payments = orders_and_payments(bound)
    joined = orders.join_asof(payments.rename({"of": "order"}), on="order", tolerance=tolerance)
    per_ten = joined.key_by("order").window(tumbling(10)).aggregate(n=Count(), paid=Count("paid"))
    rows = {"orders": _rows("order", "at", left), "payments": _rows("of", "paid", right)}
    found = testing.run([joined, per_ten], rows, cut=cut, parallelism=parallelism)
    assert not any(found.late.values())
    a, b = _frames(rows)
    within = None if tolerance is None else timedelta(seconds=tolerance)
    times: dict[str, Any] = {"left_on": "at", "right_on": "paid", "by_left": "order", "by_right": "of"}
    expected = a.join_asof(b, **times, tolerance=within, check_sortedness=False)
    assert _numbers(found[joined]) == _numbers(expected.to_dicts())
    assert sum(row["n"] for row in found[per_ten]) == len(left)
    assert sum(row["paid"] for row in found[per_ten]) == expected["price_right"].count()
