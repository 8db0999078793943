"""Event times in nanoseconds are compared to the nanosecond, also with those of a stream in another unit."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from effort import examples
from midstream import DataStream, Environment, WatermarkStrategy, testing

PER_US = 1_000
SHIFT = {"ns": 1, "us": PER_US}
BASE = 1_700_000_000_000_000_000
Rows = list[tuple[int, int]]
"""A key, and nanoseconds after the base."""

rows = st.lists(st.tuples(st.integers(0, 1), st.integers(-2_500, 2_500)), min_size=1, max_size=12)
units = st.sampled_from([("ns", "ns"), ("ns", "us"), ("us", "ns")])
micros = st.integers(0, 2)


def table(given_rows: Rows, unit: str, name: str, number: str) -> pa.Table:
    times = [(BASE + at) // SHIFT[unit] for _, at in given_rows]
    return pa.table(
        {
            "k": pa.array([key for key, _ in given_rows], pa.int64()),
            name: pa.array(times, pa.int64()).cast(pa.timestamp(unit)),
            number: pa.array(range(len(given_rows)), pa.int64()),
        }
    )


def stream(env: Environment, data: pa.Table, name: str) -> DataStream:
    made = env.from_collection(data, splits=1).uid(name)
    return made.with_watermarks(name, WatermarkStrategy.bounded("1 s"))


def seen(given_rows: Rows, unit: str) -> Rows:
    """Rows as a column of this unit has them."""
    return [(key, (BASE + at) // SHIFT[unit] * SHIFT[unit] - BASE) for key, at in given_rows]


def numbers(made: DataStream, inputs: dict[str, pa.Table], cut: Any, *columns: str) -> Counter[Any]:
    (found,) = [
        table for label, table in testing.run(made, inputs, cut=cut).tables().items() if "side output" not in label
    ]
    return Counter(zip(*(found.column(name).to_pylist() for name in columns), strict=True))


@given(rows, rows, units, micros, st.integers(-2, 2), st.sampled_from([1, 3, "whole"]))
@example([(0, 0)], [(0, -999), (0, 1)], ("ns", "ns"), 0, 0, 1)
@settings(max_examples=examples(45))
def test_joins_keep_their_bounds_to_the_nanosecond(left, right, unit, width, lower, cut):
    inputs = {"at": table(left, unit[0], "at", "l"), "since": table(right, unit[1], "since", "r")}
    lefts, rights = seen(left, unit[0]), seen(right, unit[1])
    within = timedelta(microseconds=lower), timedelta(microseconds=lower + width)
    pairs = Counter(
        (i, j)
        for i, (key, at) in enumerate(lefts)
        for j, (other, since) in enumerate(rights)
        if key == other and lower * PER_US <= since - at <= (lower + width) * PER_US
    )
    found = {i for i, _ in pairs}
    alone = Counter((i, None) for i in range(len(left)) if i not in found)
    expected = {
        "inner": pairs,
        "left": pairs + alone,
        "semi": Counter((i,) for i in found),
        "anti": Counter((i,) for i, _ in alone),
    }
    if unit[0] == unit[1]:  # a full join needs times of one type
        matched = {j for _, j in pairs}
        expected["full"] = pairs + alone + Counter((None, j) for j in range(len(right)) if j not in matched)
    how: Any
    for how, wanted in expected.items():
        env = Environment("doc")
        lefts_of, rights_of = (stream(env, data, name) for name, data in inputs.items())
        made = lefts_of.join(rights_of, on="k", how=how, within=within)
        assert numbers(made, inputs, cut, *(("l",) if how in ("semi", "anti") else ("l", "r"))) == wanted, how


@given(rows, rows, units, st.none() | micros, st.sampled_from([1, 3, "whole"]))
@example([(0, 5)], [(0, 3), (0, 1), (0, 9)], ("ns", "ns"), None, "whole")
@settings(max_examples=examples(90))
def test_an_as_of_join_finds_the_newest_row_to_the_nanosecond(left, right, unit, tolerance, cut):
    inputs = {"at": table(left, unit[0], "at", "l"), "since": table(right, unit[1], "since", "r")}
    env = Environment("doc")
    made = stream(env, inputs["at"], "at").join_asof(
        stream(env, inputs["since"], "since"),
        on="k",
        tolerance=None if tolerance is None else timedelta(microseconds=tolerance),
    )
    expected: Counter[Any] = Counter()
    rights = seen(right, unit[1])
    for i, (key, at) in enumerate(seen(left, unit[0])):
        oldest = at - tolerance * PER_US if tolerance is not None else None
        versions = [
            (since, j)
            for j, (other, since) in enumerate(rights)
            if key == other and since <= at and (oldest is None or since >= oldest)
        ]
        expected[i, max(versions)[1] if versions else None] += 1
    assert numbers(made, inputs, cut, "l", "r") == expected


@given(rows, micros, st.sampled_from([1, 3, "whole"]))
@example([(0, 0), (0, 1_001), (0, -999)], 1, "whole")
@settings(max_examples=examples(90))
def test_duplicates_are_near_to_the_nanosecond(given_rows, within, cut):
    data = table(given_rows, "ns", "at", "n")
    made = stream(Environment("doc"), data, "at").drop_duplicates("k", within=timedelta(microseconds=within))
    kept: list[tuple[int, int, int]] = []
    for number, (key, at) in enumerate(given_rows):
        if all(key != other or abs(at - near) > within * PER_US for other, near, _ in kept):
            kept.append((key, at, number))
    assert numbers(made, {"at": data}, cut, "n") == Counter((number,) for *_, number in kept)


@pytest.mark.parametrize("cut", [1, "whole"])
def test_duplicates_at_the_ends_of_what_nanoseconds_hold_are_far_apart(cut):
    ends = [-(2**63) + 10**15, 2**63 - 10**15]
    data = pa.table({"k": pa.array([0, 0], pa.int64()), "at": pa.array(ends, pa.int64()).cast(pa.timestamp("ns"))})
    made = stream(Environment("doc"), data, "at").drop_duplicates("k", within="100000 d")
    assert len(next(iter(testing.run(made, {"at": data}, cut=cut).tables().values()))) == 2
