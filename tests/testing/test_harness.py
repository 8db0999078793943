"""A single function with its states and timers, called by a test."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import polars as pl
import pyarrow as pa
import pytest

from midstream import (
    BroadcastProcessFunction,
    BroadcastState,
    CoBatchFunction,
    ConfigError,
    CoProcessFunction,
    JobError,
    KeyedBatchFunction,
    KeyedProcessFunction,
    ReducingState,
    SchemaError,
    TableState,
    ValueState,
)
from midstream.testing import harness

NOON = datetime(2024, 1, 1, 12)
ROW = {"user": str, "at": datetime}


class Counter(KeyedProcessFunction):
    n = ValueState(default=0)

    def process(self, row, ctx):
        self.n.value += 1
        if self.n.value == 3:
            ctx.side_output("third", {"user": row["user"]})
        return {"user": row["user"], "n": self.n.value}


class Session(KeyedProcessFunction):
    """One row when nothing has come of a user for a minute, and a word after an hour of silence of the wall clock."""

    last = ValueState(pa.timestamp("us"))

    def process(self, row, ctx):
        if self.last.value is not None:
            ctx.timers.delete_event_time(self.last.value + timedelta(minutes=1))
        self.last.value = ctx.timestamp
        ctx.timers.event_time(ctx.timestamp + timedelta(minutes=1))
        ctx.timers.processing_time(ctx.now + timedelta(hours=1))

    def on_timer(self, at, ctx):
        return {"user": ctx.key, "text": f"{at:%H:%M:%S}"}


def sessions():
    return harness(Session(), ROW, {"user": str, "text": str}, key="user", event_time="at")


def test_a_function_is_called_row_by_row():
    counter = harness(
        Counter(), {"user": str}, {"user": str, "n": int}, key="user", side_outputs={"third": {"user": str}}
    )
    assert counter.process({"user": "ann"}) == [{"user": "ann", "n": 1}]
    assert counter.process([{"user": "bob"}, {"user": "ann"}]) == [{"user": "bob", "n": 1}, {"user": "ann", "n": 2}]
    assert counter.state == {"n": {"ann": 2, "bob": 1}}
    assert counter.side_output("third") == []
    counter.process({"user": "ann"})
    assert counter.side_output("third") == [{"user": "ann"}]
    assert counter.side_output("third") == []


@pytest.mark.parametrize("parallelism", [1, 3, 8])
def test_state_and_timers_survive_a_restore_at_any_parallelism(parallelism):
    function = sessions()
    function.process([{"user": user, "at": NOON} for user in "abcdef"])
    timers, state = function.timers, function.state
    assert len(timers[0]) == len(timers[1]) == 6
    function.snapshot_and_restore(parallelism)
    assert (sorted(function.timers[0]), sorted(function.timers[1])) == (sorted(timers[0]), sorted(timers[1]))
    assert function.state == state
    rows = function.advance_to(NOON + timedelta(minutes=1))
    assert sorted(row["user"] for row in rows) == list("abcdef")
    assert len(function.advance_processing_time("1 h")) == 6


def test_timers_fire_when_the_test_advances_time():
    function = sessions()
    assert function.process({"user": "ann", "at": "2024-01-01 12:00"}) == []
    assert function.advance_to("2024-01-01 12:00:59.999999") == []
    function.process({"user": "ann", "at": "2024-01-01 12:00:30"})
    assert function.timers[0] == [(NOON + timedelta(seconds=90), "ann")]
    assert function.advance_to("2024-01-01 12:01:30") == [{"user": "ann", "text": "12:01:30"}]
    assert function.timers[0] == []
    assert function.now == datetime(2000, 1, 1, tzinfo=UTC)
    assert function.advance_processing_time("1 h") == [{"user": "ann", "text": "01:00:00"}]


def test_all_timers_that_are_set_can_be_fired():
    function = sessions()
    function.process([{"user": "ann", "at": NOON}, {"user": "bob", "at": NOON + timedelta(hours=3)}])
    assert [row["text"] for row in function.fire_timers()] == ["12:01:00", "15:01:00", "01:00:00", "01:00:00"]
    assert function.fire_timers() == []
    function.process({"user": "ann", "at": NOON + timedelta(hours=9)})
    assert len(function.end()) == 2


class Both(CoProcessFunction):
    total = ReducingState(lambda one, other: one + other)

    def process1(self, row, ctx):
        self.total.add(row["n"])

    def process2(self, row, ctx):
        ctx.timers.event_time(ctx.timestamp)
        return {"id": row["id"], "total": self.total.value}

    def on_timer(self, at, ctx):
        return {"id": ctx.key, "total": -1}


def test_a_function_with_two_inputs():
    function = harness(
        Both(),
        {"user": int, "n": int},
        {"id": int, "total": int},
        key="user",
        second={"id": int, "at": datetime},
        second_key="id",
        second_event_time="at",
    )
    assert function.process1([{"user": 1, "n": 2}, {"user": 1, "n": 3}]) == []
    assert function.process2({"id": 1, "at": NOON}) == [{"id": 1, "total": 5}]
    assert function.state == {"total": {1: 5}}
    assert function.advance_to(NOON) == [{"id": 1, "total": -1}]


class Rules(BroadcastProcessFunction):
    rules = BroadcastState()

    def process(self, row, ctx):
        return {"user": row["user"], "rule": self.rules.get("rule")}

    def process_broadcast(self, row, ctx):
        self.rules["rule"] = row["rule"]


@pytest.mark.parametrize("key", [(), "user"], ids=["plain", "keyed"])
def test_a_function_with_a_broadcast_input(key):
    function = harness(Rules(), {"user": str}, {"user": str, "rule": int}, key=key, second={"rule": int}, parallelism=2)
    function.process_broadcast({"rule": 7})
    assert [row["rule"] for row in function.process([{"user": user} for user in "abcd"])] == [7] * 4
    assert function.state == {"rules": {"rule": 7}}
    assert function.snapshot_and_restore(3).process({"user": "e"}) == [{"user": "e", "rule": 7}]


class RunningTotal(KeyedBatchFunction):
    totals = TableState({"user": str, "total": int})

    def process(self, rows, ctx):
        added = rows.group_by("user", maintain_order=True).agg(total=pl.col("n").sum())
        self.totals.frame = pl.concat([self.totals.frame, added]).group_by("user", maintain_order=True).sum()
        return added

    def on_watermark(self, ctx):
        return self.totals.frame


def test_a_function_on_batches_gets_all_rows_of_a_call_together():
    function = harness(
        RunningTotal(),
        {"user": str, "n": int, "at": datetime},
        {"user": str, "total": int},
        key="user",
        event_time="at",
    )
    rows = [{"user": "ann", "n": 1, "at": NOON}, {"user": "ann", "n": 2, "at": NOON}]
    assert function.process(rows) == [{"user": "ann", "total": 3}]
    function.process(rows)
    assert function.state["totals"].to_dicts() == [{"user": "ann", "total": 6}]
    assert function.snapshot_and_restore(2).advance_to(NOON) == [{"user": "ann", "total": 6}]


class Matches(CoBatchFunction):
    left = TableState({"user": str, "n": int})

    def process1(self, rows, ctx):
        self.left.append(rows)

    def process2(self, rows, ctx):
        return rows.join(self.left.frame, on="user", how="inner")


def test_a_function_on_batches_of_two_inputs():
    function = harness(Matches(), {"user": str, "n": int}, {"user": str, "n": int}, key="user", second={"user": str})
    assert function.process1([{"user": "ann", "n": 1}, {"user": "bob", "n": 2}]) == []
    assert function.process2({"user": "bob"}) == [{"user": "bob", "n": 2}]
    assert function.timers == ([], [])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: harness(Counter, {"user": str}, {"n": int}, key="user"),  # type: ignore[arg-type]
            JobError,
            r"Counter is a class; give an instance",
        ),
        (lambda: harness(Counter(), {"user": str}, {"n": int}), ConfigError, "is for a keyed stream; give key="),
        (lambda: harness(Both(), {"n": int}, {"n": int}, key="n"), ConfigError, "takes two inputs, so give second="),
        (lambda: harness(Counter(), {"user": str}, {"n": int}, key="usr"), SchemaError, "key column 'usr'"),
        (
            lambda: harness(Counter(), {"user": str}, {"n": int}, key="user", event_time="at"),
            SchemaError,
            "event_time 'at'",
        ),
        (lambda: harness(3, {"user": str}, {"n": int}, key="user"), JobError, "3 is not a KeyedProcessFunction"),  # type: ignore[arg-type]
    ],
    ids=["class", "no-key", "one-input", "key", "event-time", "number"],
)
def test_what_does_not_fit_is_refused_with_its_place(make, error, message):
    with pytest.raises(error, match=rf"test_harness\.py:\d+: .*{message}"):
        make()


def test_an_error_of_the_function_is_raised_as_it_is():
    class Fails(KeyedProcessFunction):
        def process(self, row, ctx):
            raise KeyError("x")

    function = harness(Fails(), {"user": str}, {"n": int}, key="user")
    with pytest.raises(KeyError) as caught:
        function.process({"user": "ann"})
    assert "{'user': 'ann'}" in " ".join(caught.value.__notes__)
    with pytest.raises(JobError, match="has failed"):
        function.process({"user": "ann"})


class YieldsAndReturns(KeyedProcessFunction):
    def process(self, row, ctx):
        yield {"user": row["user"]}
        if row["user"] == "bob":
            return {"user": "lost"}

    def on_timer(self, time, ctx):
        yield {"user": ctx.key}
        return {"user": "lost"}


def test_a_row_that_a_generator_returns_is_not_lost_silently():
    function = harness(YieldsAndReturns(), {"user": str}, {"user": str}, key="user")
    assert function.process({"user": "ann"}) == [{"user": "ann"}]
    with pytest.raises(
        JobError, match=r"process \(key 'bob'\).* that yields rows returned a dict, which would be lost"
    ):
        function.process({"user": "bob"})


def test_stop_iteration_of_a_function_reaches_the_test_with_its_place():
    class First(KeyedProcessFunction):
        def process(self, row, ctx):
            return {"user": next(name for name in () if name == row["user"])}

    function = harness(First(), {"user": str}, {"user": str}, key="user")
    with pytest.raises(StopIteration) as caught:
        function.process({"user": "ann"})
    assert "{'user': 'ann'}" in " ".join(caught.value.__notes__)


class Uncopied(KeyedProcessFunction):
    held = ValueState()

    def __init__(self, make):
        self.make = make

    def process(self, row, ctx):
        self.held.value = self.make()


@pytest.mark.parametrize("make", [lambda: (each for each in ()), lambda: lambda: 1])
def test_a_state_that_cannot_be_copied_is_named(make):
    function = harness(Uncopied(make), {"user": str}, {"user": str}, key="user")
    function.process({"user": "ann"})
    with pytest.raises(JobError, match=r"(state 'held'|state of 'function').* cannot be copied: "):
        _ = function.state
