"""map_async: in a job, at the call, after restores and at another parallelism."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import datetime
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream import (
    FAILED,
    ConfigError,
    Count,
    DataStream,
    Environment,
    JobError,
    WatermarkStrategy,
    testing,
    tumbling,
)

MADE = {"n": int, "twice": int}


async def awaited(row: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(0.001 * (row["n"] % 3))
    return {"n": row["n"], "twice": 2 * row["n"]}


def blocking(row: dict[str, Any]) -> dict[str, Any]:
    return {"n": row["n"], "twice": 2 * row["n"]}


class Client:
    """Opens and closes its connection in the loop in which it is called."""

    async def open(self, ctx: Any) -> None:
        self._loop = asyncio.get_running_loop()

    async def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        assert asyncio.get_running_loop() is self._loop
        return blocking(row)

    async def close(self) -> None:
        assert asyncio.get_running_loop() is self._loop


def numbers(count: int) -> Any:
    return Environment("slow").from_collection([{"n": n} for n in range(count)], schema={"n": int})


@pytest.mark.parametrize("function", [awaited, blocking, Client()])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("parallelism", [1, 3])
def test_each_row_has_its_result(function: Any, ordered: bool, parallelism: int) -> None:
    found = testing.run(
        numbers(30).map_async(function, MADE, ordered=ordered, capacity=4), parallelism=parallelism, cut=7
    )
    assert Counter(row["n"] for row in found.rows) == Counter(range(30))
    assert all(row["twice"] == 2 * row["n"] for row in found.rows)


@given(
    fails=st.lists(st.sampled_from([0, 0, 1, 3, 4]), min_size=9, max_size=9),
    cut=st.integers(1, 9),
    capacity=st.integers(1, 5),
    ordered=st.booleans(),
    at=st.integers(0, 9),
    parallelism=st.sampled_from([(1, 1), (1, 3), (2, 1)]),
)
def test_rows_that_fail_for_a_while_are_called_again_through_a_restore_and_a_rescale(
    fails: list[int], cut: int, capacity: int, ordered: bool, at: int, parallelism: tuple[int, int]
) -> None:
    """A row fails that often; more than three times, it goes to the side output. A restore begins with its first call."""
    left = dict(enumerate(fails))

    def flaky(row: dict[str, Any]) -> dict[str, Any]:
        if left[row["n"]]:
            left[row["n"]] -= 1
            raise OSError("no answer")
        return blocking(row)

    before, after = parallelism
    stream = numbers(0).map_async(flaky, MADE, ordered=ordered, capacity=capacity, on_error="side_output")
    rows = [{"n": n} for n in range(9)]
    with testing.job(stream, parallelism=before) as job:
        job.feed(rows[:at], cut=cut)
        job.snapshot_and_restore(after)
        job.feed(rows[at:], cut=cut)
        found = job.end().result()
    emitted = [row["n"] for row in found.rows]
    failed = [row["row"]["n"] for row in found[FAILED]]
    assert Counter(emitted + failed) == Counter(range(9))
    assert {n for n, times in enumerate(fails) if times <= 3} <= set(emitted)
    if ordered and parallelism == (1, 1):
        assert emitted == sorted(emitted)


def test_windows_have_each_row_that_was_on_time_before_the_calls() -> None:
    rows = [{"at": datetime(2024, 1, 1, 0, n % 7, n % 60), "n": n} for n in range(60)]
    source = Environment("slow").from_collection(rows, schema={"at": pl.Datetime("us"), "n": int})

    async def same(row: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0.001 * (row["n"] % 3))
        return row

    def counted(stream: DataStream) -> list[dict[str, Any]]:
        windows = stream.key_by("minute").window(tumbling("1 min")).aggregate(n=Count())
        return sorted(testing.run(windows, cut=7).rows, key=str)

    timed = source.with_watermarks("at", WatermarkStrategy.bounded("10 min")).with_columns(minute=pl.lit(1))
    expected = counted(timed)
    assert sum(row["n"] for row in expected) == 60
    for ordered in (True, False):
        assert counted(timed.map_async(same, capacity=9, ordered=ordered)) == expected


def test_a_coroutine_function_is_refused_where_it_would_not_be_awaited() -> None:
    stream = numbers(3)
    calls = (stream.map, stream.flat_map, stream.filter, stream.map_batches)
    for call in calls:
        with pytest.raises(JobError, match=r"is a coroutine function .*map_async\(\), which awaits it"):
            call(awaited)

    async def yields(row: Any) -> Any:
        yield row

    with pytest.raises(JobError, match="asynchronous generator"):
        stream.map_async(yields)
    with pytest.raises(JobError, match="hidden returned a coroutine, and is not a coroutine function itself"):

        def hidden(row: Any) -> Any:
            return awaited(row)

        testing.run(stream.map_async(hidden, MADE))


def test_what_makes_no_sense_is_refused_at_the_call() -> None:
    stream = numbers(3)
    for wrong in ({"capacity": 0}, {"timeout": 0}, {"timeout": "soon"}, {"retries": -1}, {"ordered": 1}):
        with pytest.raises(ConfigError, match=r"test_slow_calls.py:\d+: map_async"):
            stream.map_async(blocking, MADE, **wrong)
    with pytest.raises(AttributeError, match="it before key_by"):
        stream.key_by("n").map_async(blocking)


def test_what_the_function_raises_fails_the_job_after_its_retries() -> None:
    class Fails:
        calls = 0

        def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
            self.calls += 1
            raise LookupError(f"call {self.calls}")

    with pytest.raises(LookupError, match="call 3"):
        testing.run(numbers(1).map_async(Fails(), MADE, retries=2))


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_function_may_return_the_same_dict_each_time(is_awaited: bool) -> None:
    shared: dict[str, Any] = {}

    def same(row: dict[str, Any]) -> dict[str, Any]:
        shared.update(row)
        return shared

    async def same_awaited(row: dict[str, Any]) -> dict[str, Any]:
        return same(row)

    found = testing.run(numbers(5).map_async(same_awaited if is_awaited else same), cut="whole")
    assert [row["n"] for row in found.rows] == list(range(5))
