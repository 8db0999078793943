"""Jobs with a deliberate mistake: each is found within 200 seeds, and the report names the mistake, and its line."""

from __future__ import annotations

import random
import re
import time
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from midstream import (
    CoProcessFunction,
    Count,
    Environment,
    KeyedProcessFunction,
    ListState,
    MapState,
    ValueState,
    WatermarkStrategy,
    tumbling,
)
from midstream.api.data_stream import DataStream
from midstream.testing import simulate

pytestmark = pytest.mark.turns(2)

Row = dict[str, Any]
SEEDS = range(200)
ROWS = [
    {"id": i, "key": i % 5, "name": f"name {i % 7}", "at": datetime.fromtimestamp(1_700_000_000 + i)} for i in range(60)
]


def rows(env: Environment, data: list[Row] | None = None) -> DataStream:
    return env.from_collection(data or ROWS, splits=1).uid("rows")


def report_of(build: Callable[[DataStream], DataStream], data: list[Row] | None = None) -> str:
    """What is reported about the job of one source."""
    env = Environment("wrong")
    build(rows(env, data)).print().uid("result")
    with pytest.raises(AssertionError) as raised:
        simulate(env, seeds=SEEDS)
    text = str(raised.value)
    print(text)  # for whoever reads the test's output
    return text


def test_state_in_an_attribute_of_a_function_object() -> None:
    class Number:
        def __init__(self) -> None:
            self.count = 0

        def __call__(self, row: Row) -> Row:
            self.count += 1  # the mistake
            return {**row, "n": self.count}

    text = report_of(lambda s: s.map(Number(), {"id": int, "key": int, "name": str, "at": datetime, "n": int}))
    assert "state outside of its declared state" in text
    assert "keeps state in an attribute of the function object: self.count += 1" in text
    assert "test_simulated_wrong_jobs.py:" in text


def test_state_in_an_attribute_of_a_keyed_function() -> None:
    class First(KeyedProcessFunction):
        def __init__(self) -> None:
            self.seen: set[int] = set()

        def process(self, row: Row, ctx: Any) -> Any:
            if row["key"] not in self.seen:
                self.seen.add(row["key"])  # the mistake
                yield {"key": row["key"]}

    text = report_of(lambda s: s.key_by("key").process(First(), {"key": int}))
    assert "state outside of its declared state" in text
    assert "self.seen.add(row" in text
    assert "ValueState" in text


COUNTED: dict[int, int] = {}


class Remembering(KeyedProcessFunction):
    def add(self, row: Row) -> None:
        self.seen.append(row["id"])  # type: ignore[attr-defined]  # a subclass declares it


class DeclaredAndGlobal(Remembering):
    seen = ListState(pa.int64())
    known = MapState(key=pa.int64(), value=pa.int64())

    def process(self, row: Row, ctx: Any) -> Row:
        self.add(row)
        self.seen.clear()
        self.known[1] = 2
        self.known.update({3: 4})
        COUNTED[ctx.key] = COUNTED.get(ctx.key, 0) + 1  # the mistake
        return {"id": row["id"], "n": COUNTED[ctx.key]}


def test_declared_state_is_not_taken_for_the_mistake() -> None:
    text = report_of(lambda s: s.key_by("key").process(DeclaredAndGlobal(), {"id": int, "n": int}))
    assert "keeps state in a global variable: COUNTED[ctx.key]" in text
    assert "keeps state in an attribute" not in text


TOTAL = 0


def running_total(row: Row) -> Row:
    global TOTAL
    TOTAL += row["id"]  # the mistake
    return {"id": row["id"], "total": TOTAL}


def test_state_in_a_global_variable() -> None:
    text = report_of(lambda s: s.map(running_total, {"id": int, "total": int}))
    assert "state outside of its declared state" in text
    assert "keeps state in a global variable: TOTAL += row" in text


SEEN: list[int] = []


def nth(row: Row) -> Row:
    SEEN.append(row["id"])  # the mistake
    return {"id": row["id"], "n": len(SEEN)}


def test_state_in_a_global_list() -> None:
    text = report_of(lambda s: s.map(nth, {"id": int, "n": int}))
    assert "keeps state in a global variable: SEEN.append" in text
    assert SEEN == []  # each task has its own


def test_state_in_a_closure() -> None:
    def counting() -> Callable[[Row], Row]:
        count = 0

        def count_up(row: Row) -> Row:
            nonlocal count
            count += 1  # the mistake
            return {"id": row["id"], "n": count}

        return count_up

    text = report_of(lambda s: s.map(counting(), {"id": int, "n": int}))
    assert "state outside of its declared state" in text
    assert "keeps state in a variable of an enclosing function: count += 1" in text


def test_state_in_a_mutable_default_argument() -> None:
    def without_repeats(row: Row, seen: list[str] = []) -> bool:  # noqa: B006 - the mistake
        if row["name"] in seen:
            return False
        seen.append(row["name"])
        return True

    text = report_of(lambda s: s.filter(without_repeats))
    assert "state outside of its declared state" in text
    assert "keeps state in a mutable default argument: seen.append" in text


def test_the_time_of_day() -> None:
    text = report_of(lambda s: s.map(lambda row: {"id": row["id"], "at": time.time()}, {"id": int, "at": float}))
    assert "wall clock" in text
    assert "reads the clock" in text


def test_the_clock_of_the_context() -> None:
    class Stamp(KeyedProcessFunction):
        def process(self, row: Row, ctx: Any) -> Row:
            return {"id": row["id"], "is_night": ctx.now.hour < 12}  # the mistake

    text = report_of(lambda s: s.key_by("key").process(Stamp(), {"id": int, "is_night": bool}))
    assert "wall clock" in text
    assert "reads the clock: return" in text


def test_the_date_of_today() -> None:
    def stamped(row: Row) -> Row:
        return {"id": row["id"], "hour": datetime.now().isoformat()}

    text = report_of(lambda s: s.map(stamped, {"id": int, "hour": str}))
    assert "wall clock" in text
    assert "reads the clock: return" in text


def test_random_numbers() -> None:
    text = report_of(lambda s: s.filter(lambda row: random.random() < 0.5))
    assert "random numbers" in text
    assert "draws random numbers" in text


def test_random_ids() -> None:
    def marked(row: Row) -> Row:
        return {"id": row["id"], "mark": str(uuid.uuid4())}

    text = report_of(lambda s: s.map(marked, {"id": int, "mark": str}))
    assert "random numbers" in text
    assert "Warning: " in text
    assert "cannot be simulated" in text


def test_hash_of_text() -> None:
    text = report_of(lambda s: s.map(lambda row: {"id": row["id"], "b": hash(row["name"]) % 4}, {"id": int, "b": int}))
    assert "hash() of text" in text
    assert "PYTHONHASHSEED" in text


def test_the_order_of_a_set() -> None:
    def first_word(row: Row) -> Row:
        words = set(f"alpha{row['id']} beta{row['id']} gamma{row['id']}".split())
        return {"id": row["id"], "word": next(iter(words))}  # the mistake

    text = report_of(lambda s: s.map(first_word, {"id": int, "word": str}))
    assert "another process" in text
    assert "order in which a set of strings is iterated" in text
    assert "words = set(" in text


class Enrich(CoProcessFunction):
    price = ValueState()

    def process1(self, row: Row, ctx: Any) -> Any:
        yield {"id": row["id"], "price": self.price.value}  # the mistake: the price may come later

    def process2(self, row: Row, ctx: Any) -> Any:
        self.price.value = row["price"]


def test_the_order_of_two_inputs() -> None:
    env = Environment("wrong")
    prices = env.from_collection([{"key": k, "price": 10 * k} for k in range(5)], splits=1).uid("prices")
    (
        rows(env)
        .key_by("key")
        .connect(prices.key_by("key"))
        .process(Enrich(), {"id": int, "price": int})
        .uid("enrich")
        .print()
        .uid("result")
    )
    with pytest.raises(AssertionError) as raised:
        simulate(env, seeds=SEEDS)
    text = str(raised.value)
    assert "order in which rows of two inputs" in text
    assert "'enrich'" in text
    assert "expected:" in text


def test_a_batch_function_that_depends_on_where_batches_are_cut() -> None:
    def shares(frame: pl.DataFrame) -> pl.DataFrame:
        return frame.select("id", share=pl.col("id") / pl.col("id").sum())

    text = report_of(lambda s: s.map_batches(shares, {"id": int, "share": float}).uid("shares"))
    assert "where batches are cut" in text
    assert "'shares'" in text


def test_a_side_effect(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"

    def noted(row: Row) -> Row:
        with open(log, "a") as file:  # the mistake
            file.write(f"{row['id']}\n")
        return row

    text = report_of(lambda s: s.map(noted, {"id": int, "key": int, "name": str, "at": datetime}))
    assert "side effect" in text
    assert f"writes to {log}" in text
    assert "times instead of" in text


def test_rows_that_come_too_late() -> None:
    shuffled = sorted(ROWS, key=lambda row: (row["id"] // 20, row["id"] * 7 % 20))  # type: ignore[operator]
    text = report_of(
        lambda s: (
            s.with_watermarks("at", WatermarkStrategy.bounded("2 s"))  # the mistake: they are 20 s out of order
            .key_by("key")
            .window(tumbling("5 s"))
            .aggregate(n=Count())
            .uid("counts")
        ),
        shuffled,
    )
    assert "Rows are too late" in text and re.search(r"The bound of .* is 2 s", text)
    assert "'counts'" in text
    assert "allowed_lateness" in text


def test_rows_that_a_function_takes_for_late() -> None:
    class Late(KeyedProcessFunction):
        def process(self, row: Row, ctx: Any) -> Row:
            return {"id": row["id"], "late": row["at"] <= ctx.watermark}  # the mistake

    shuffled = sorted(ROWS, key=lambda row: (row["id"] // 20, row["id"] * 7 % 20))  # type: ignore[operator]
    text = report_of(
        lambda s: (
            s.with_watermarks("at", WatermarkStrategy.bounded("2 s"))
            .key_by("key")
            .process(Late(), {"id": int, "late": bool})
        ),
        shuffled,
    )
    assert "which rows are late depends on where batches are cut" in text
    assert "--ignore" in text
    assert "batch function" not in text


def test_a_timer_that_counts_rows_after_its_time() -> None:
    class Hour(KeyedProcessFunction):
        seen = ListState()

        def process(self, row: Row, ctx: Any) -> None:
            self.seen.append(row["at"])
            ctx.timers.event_time(row["at"] + timedelta(seconds=7))

        def on_timer(self, time: Any, ctx: Any) -> Row:
            return {"key": ctx.key, "at": time, "n": len(list(self.seen))}  # the mistake: also of those after `time`

    text = report_of(
        lambda s: (
            s.with_watermarks("at", WatermarkStrategy.monotonous())
            .key_by("key")
            .process(Hour(), {"key": int, "at": datetime, "n": int})
        )
    )
    assert "depends on which rows arrive before a timer of event time fires" in text
    assert "count only rows whose time is at or before `time`" in text
    assert "sets an event-time timer: ctx.timers.event_time" in text


def test_a_timer_of_two_inputs_that_counts_rows_after_its_time() -> None:
    class Paid(CoProcessFunction):
        paid = ValueState(default=0)

        def process1(self, row: Row, ctx: Any) -> None:
            ctx.timers.event_time(row["at"] + timedelta(seconds=7))

        def process2(self, row: Row, ctx: Any) -> None:
            self.paid.value += 1

        def on_timer(self, time: Any, ctx: Any) -> Row:
            return {"key": ctx.key, "at": time, "n": self.paid.value}  # the mistake

    def build(s: DataStream) -> DataStream:
        timed = s.with_watermarks("at", WatermarkStrategy.monotonous())
        orders, payments = timed.filter(pl.col("id") % 2 == 0), timed.filter(pl.col("id") % 2 == 1)
        both = orders.key_by("key").connect(payments.key_by("key"))
        return both.process(Paid(), {"key": int, "at": datetime, "n": int})

    text = report_of(build)
    assert "Rows from different inputs arrive in any order" in text
    assert "And timers fire between two batches, when rows with a later time may have been processed" in text
    assert "sets an event-time timer: ctx.timers.event_time" in text


def test_a_function_that_fails_only_after_a_restart() -> None:
    class Once:
        """Assumes that ids always arrive in order."""

        last = -1

        def __call__(self, row: Row) -> Row:
            if row["id"] != self.last + 1:
                raise ValueError(f"{row['id']} behind {self.last}")
            self.last = row["id"]  # the mistake
            return row

    text = report_of(lambda s: s.map(Once(), {"id": int, "key": int, "name": str, "at": datetime}))
    assert "the job fails, but not because of a simulated fault" in text
    assert "ValueError" in text


def test_a_job_that_fails_by_itself_is_reported() -> None:
    text = report_of(lambda s: s.map(lambda row: {"id": 1 // row["id"]}, {"id": int}))
    assert "fails on its own, without any fault" in text
    assert "ZeroDivisionError" in text
