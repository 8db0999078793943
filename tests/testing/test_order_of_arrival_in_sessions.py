"""Sessions of a key whose rows arrive in turns, before another row makes them one: the order of arrival is kept.

A batch, and the state, have a part for each session. Parts of two sessions do not say which of their rows came first.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream import (
    Accumulator,
    Aggregate,
    ArgMax,
    ArgMin,
    Count,
    Environment,
    First,
    Last,
    TopN,
    WatermarkStrategy,
    session,
    testing,
)
from midstream.engine.operators.windows.aggregates import AnyAggregate
from midstream.engine.state import session_index

START = datetime(2024, 1, 1)
GAP_S = 2
BOUND_S = 16
COLUMNS = {"k": int, "at": datetime, "id": int, "v": int, "ids": list[int]}
Times = list[tuple[int, int, int]]
"""The key, the second and the value of each row, in the order of arrival."""


class AllIds(Aggregate):
    """A user's aggregate of expressions, whose result depends on the order of arrival."""

    columns = ("id",)

    def partial(self, event_time: pl.Expr) -> dict[str, pl.Expr]:
        return {"ids": pl.col("id").implode()}

    def merge(self, part: Any) -> dict[str, pl.Expr]:
        return {"ids": part("ids").explode().implode()}

    def finish(self, part: Any) -> pl.Expr:
        return part("ids")


class AllIdsInPython(Accumulator[list[int]]):
    columns = ("id",)
    type = list[int]

    def init(self) -> list[int]:
        return []

    def add(self, accumulator: list[int], row: dict[str, Any]) -> list[int]:
        return [*accumulator, row["id"]]

    def merge(self, first: list[int], second: list[int]) -> list[int]:
        return first + second

    def result(self, accumulator: list[int]) -> list[int]:
        return accumulator


def rows_of(times: Times) -> list[dict[str, Any]]:
    return [
        {"k": key, "at": START + timedelta(seconds=s), "id": number, "v": value, "ids": [number]}
        for number, (key, s, value) in enumerate(times)
    ]


AGGREGATES: dict[str, AnyAggregate] = {
    "n": Count(),
    "first": First("id", order="arrival"),
    "last": Last("id", order="arrival"),
    "least": ArgMin("id", by="v"),
    "most": ArgMax("id", by="v"),
    "best": TopN("ids", 3, by="v"),
    "all": AllIds(),
    "all_in_python": AllIdsInPython(),
}


def found_in(
    times: Times,
    cut: Any,
    parallelism: int = 1,
    restores: tuple[int, ...] = (),
    aggregates: dict[str, AnyAggregate] = AGGREGATES,
) -> list[dict[str, Any]]:
    """The results. `restores`: after which batches the job is restored, at alternating parallelism."""
    rows = Environment().from_collection([], schema=COLUMNS).uid("rows")
    timed = rows.with_watermarks("at", WatermarkStrategy.bounded(BOUND_S))
    sessions = timed.key_by("k").window(session(GAP_S))
    found = sessions.aggregate(**aggregates)
    with testing.job(found, parallelism=parallelism) as job:
        given_rows = rows_of(times)
        sizes = [cut] * len(times) if isinstance(cut, int) else [*cut, *[len(times)] * len(times)]
        for number, size in enumerate(sizes):
            if not given_rows:
                break
            job.feed("rows", given_rows[:size], cut="whole")
            del given_rows[:size]
            if number in restores:
                job.snapshot_and_restore(1 + number % 2)
        result = job.end().result()
    assert not any(result.late.values())
    return sorted(result.rows, key=lambda row: (row["k"], row["window_start"]))


def expected_of(times: Times) -> list[dict[str, Any]]:
    made = []
    for key in sorted({key for key, _, _ in times}):
        own = sorted((row for row in rows_of(times) if row["k"] == key), key=lambda row: row["at"])
        sessions = [[own[0]]]
        for row in own[1:]:
            if row["at"] - sessions[-1][-1]["at"] <= timedelta(seconds=GAP_S):
                sessions[-1].append(row)
            else:
                sessions.append([row])
        for rows in sessions:
            arrived = sorted(rows, key=lambda row: row["id"])
            best = sorted(arrived, key=lambda row: -row["v"])
            made.append(
                {
                    "k": key,
                    "window_start": rows[0]["at"],
                    "window_end": rows[-1]["at"] + timedelta(seconds=GAP_S),
                    "n": len(rows),
                    "first": arrived[0]["id"],
                    "last": arrived[-1]["id"],
                    "least": min(arrived, key=lambda row: row["v"])["id"],
                    "most": best[0]["id"],
                    "best": [row["ids"] for row in best[:3]],
                    "all": [row["id"] for row in arrived],
                    "all_in_python": [row["id"] for row in arrived],
                }
            )
    return made


IN_TURNS: Times = [(1, 0, 5), (1, 2, 5), (1, 4, 5), (1, 8, 1), (1, 5, 1), (1, 6, 5)]


@pytest.mark.parametrize("cut", [1, 2, [2, 3, 1], 6])
def test_rows_that_arrive_in_turns_are_in_the_order_of_arrival_once_their_sessions_are_one(cut: Any) -> None:
    """Those at 4 and 5 s, and the one at 8 s between them, are two sessions of a batch, which the one at 6 s makes one."""
    assert found_in(IN_TURNS, cut) == expected_of(IN_TURNS)


@pytest.mark.parametrize("name", AGGREGATES)
def test_an_aggregate_alone_keeps_the_order_of_arrival(name: str) -> None:
    [found] = found_in(IN_TURNS, [2, 3, 1], aggregates={name: AGGREGATES[name]})
    [expected] = expected_of(IN_TURNS)
    assert found[name] == expected[name]


@settings(max_examples=examples(90))
@given(
    steps=st.lists(
        st.tuples(st.sampled_from([0, 0, 1, 4]), st.integers(0, BOUND_S - 1), st.integers(0, 1)),
        min_size=4,
        max_size=25,
    ),
    cut=st.one_of(st.sampled_from([1, 2, 5, 9, 40]), st.lists(st.integers(1, 9), min_size=1, max_size=6)),
    parallelism=st.sampled_from([1, 2]),
    restores=st.lists(st.integers(0, 8), max_size=2).map(tuple),
    runs_max=st.sampled_from([1, 12]),
)
def test_the_result_is_that_of_all_rows_in_the_order_of_arrival(steps, cut, parallelism, restores, runs_max) -> None:
    times, newest_s = [], BOUND_S
    for advance_s, before_s, value in steps:
        newest_s += advance_s
        times.append((1, newest_s - before_s, value))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_index, "RUNS_MAX", runs_max)
        assert found_in(times, cut, parallelism, restores) == expected_of(times)
