"""The join by time: the same pairs as all rows compared with each other, and nothing kept that is of no more use."""

from __future__ import annotations

from collections import Counter
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import World, restored

from midstream.core.elements import MAX_WATERMARK_US
from midstream.core.errors import JobError
from midstream.core.keys import key_groups, subtask_of
from midstream.operators.function_operator import Port
from midstream.operators.interval_join import interval_join_operator

LEFT = pa.schema([("k", pa.int64()), ("t", pa.timestamp("ms")), ("a", pa.int64())])
RIGHT = pa.schema([("b", pa.int64()), ("u", pa.timestamp("us", "Europe/Berlin")), ("id", pa.int64())])
MAX_PARALLELISM = 8

Row = tuple[int, int, int, int]
"""Input, key, time in ms, number."""


def operator_of(lower_ms: int, upper_ms: int) -> Any:
    first, second = Port("process1", ("k",), "t", LEFT), Port("process2", ("id",), "u", RIGHT)
    return interval_join_operator("join", [first, second], lower_ms * 1000, upper_ms * 1000)


def batch(rows: list[Row], port: int) -> pa.RecordBatch:
    if port == 0:
        return pa.RecordBatch.from_pylist([{"k": k, "t": t, "a": n} for _, k, t, n in rows], schema=LEFT)
    return pa.RecordBatch.from_pylist([{"id": k, "u": t * 1000, "b": n} for _, k, t, n in rows], schema=RIGHT)


TIMES = st.integers(0, 40)
STEP = st.one_of(
    st.tuples(st.just("rows"), st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), TIMES), max_size=8)),
    st.tuples(st.just("advance"), TIMES),
    st.tuples(st.just("restore"), st.integers(1, 3)),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(STEP, max_size=12), st.integers(-12, 12), st.integers(0, 12))
def test_pairs_are_those_of_all_rows_that_are_not_late(plan: list[tuple[str, Any]], lower: int, width: int) -> None:
    upper = lower + width
    worlds = [World(operator_of(lower, upper), max_parallelism=MAX_PARALLELISM)]
    came: list[Row] = []
    found: Counter[tuple[int, int]] = Counter()
    watermark = -1

    def drain() -> None:
        for world in worlds:
            found.update((row["a"], row["b"]) for row in world.out.rows())
            world.out.clear()

    for step, argument in plan:
        if step == "rows":
            rows = [(p, k, t, len(came) + i) for i, (p, k, t) in enumerate(r for r in argument if r[2] > watermark)]
            came += rows
            for port in (0, 1):
                mine = [row for row in rows if row[0] == port]
                keys = pa.record_batch({"k": pa.array([k for _, k, _, _ in mine], pa.int64())})
                owners = subtask_of(key_groups(keys, ("k",), MAX_PARALLELISM), len(worlds), MAX_PARALLELISM)
                for subtask, world in enumerate(worlds):
                    part = [row for row, owner in zip(mine, owners, strict=True) if owner == subtask]
                    if part:
                        world.process(batch(part, port), port)
        elif step == "advance":
            watermark = max(watermark, argument)
            for world in worlds:
                world.advance(watermark * 1000)
        else:
            drain()
            parts = [world.snapshot() for world in worlds]
            worlds = restored(lambda: operator_of(lower, upper), parts, argument, MAX_PARALLELISM)
    drain()
    lefts = [row for row in came if row[0] == 0]
    rights = [row for row in came if row[0] == 1]
    expected = {(a, b) for _, k, t, a in lefts for _, i, u, b in rights if k == i and lower <= u - t <= upper}
    assert found == Counter(expected)
    for world in worlds:
        world.advance(MAX_WATERMARK_US)
    assert [world.snapshot() for world in worlds] == [{}] * len(worlds)


def test_a_row_is_kept_for_just_as_long_as_its_like_may_come() -> None:
    world = World(operator_of(-5, 10))
    world.process(batch([(0, 1, 100, 1)], 0), 0)
    world.process(batch([(1, 1, 200, 2)], 1), 1)
    world.advance(109_999)
    assert set(world.snapshot()) == {"table:left", "table:right"}
    world.advance(110_000)
    assert set(world.snapshot()) == {"table:right"}
    world.advance(205_000)
    assert world.snapshot() == {}


def test_the_columns_are_those_of_both_with_the_keys_once() -> None:
    assert operator_of(0, 1).schema.names == ["k", "t", "a", "b", "u"]
    first = Port("process1", ("k",), "t", LEFT)
    both = Port("process2", ("k",), "t", LEFT)
    with pytest.raises(JobError, match="operator 'join': both streams have a column 't'; give it another name"):
        interval_join_operator("join", [first, both], 0, 1)
    named_as_the_key = Port("process2", ("id",), "u", RIGHT.append(pa.field("k", pa.int64())))
    with pytest.raises(JobError, match="operator 'join': both streams have a column 'k'; give it another name"):
        interval_join_operator("join", [first, named_as_the_key], 0, 1)


@pytest.mark.parametrize("port", [0, 1])
@pytest.mark.parametrize("spread", [1, 37])
def test_rows_of_one_key_are_not_paired_with_all_its_rows_of_other_times(
    port: int, spread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key has `many` rows, a row in 10 ms; each of them goes with some ten of the other stream."""
    many, few = 3_000, 300
    heights: list[int] = []
    original = pl.DataFrame.join

    def join(self: pl.DataFrame, *arguments: Any, **options: Any) -> pl.DataFrame:
        made = original(self, *arguments, **options)
        heights.append(made.height)
        return made

    world = World(operator_of(-50, 49))
    world.process(batch([(1 - port, 1, 10 * i, i) for i in range(many)], 1 - port), 1 - port)
    monkeypatch.setattr(pl.DataFrame, "join", join)
    world.process(batch([(port, 1, 10 * (spread * i % many), i) for i in range(few)], port), port)
    pairs = len(world.out.rows())
    assert 9 * few < pairs <= 10 * few
    assert max(heights) <= 4 * pairs
