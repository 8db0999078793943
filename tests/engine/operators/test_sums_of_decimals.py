"""Sums of decimals end at 38 digits, wherever their 128 bits end."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import World, restored

from effort import examples
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.errors import JobError
from midstream.engine.operators.windows.aggregates import Max, Mean, Min, Sum
from midstream.engine.operators.windows.window_factory import (
    Session,
    Sliding,
    session,
    sliding,
    tumbling,
    window_operator,
)

LARGEST = 10**38 - 1


def operator(scale: int, precision: int = 38, window: Sliding | Session | None = None) -> Any:
    schema = schema_of([("k", pa.int64()), ("t", pa.timestamp("ms")), ("v", pa.decimal128(precision, scale))])
    return window_operator(
        "w",
        window=window or tumbling("1 h"),
        keys=["k"],
        event_time="t",
        aggregates={"sum": Sum("v"), "mean": Mean("v"), "min": Min("v"), "max": Max("v")},
        schema=schema,
    )


def decimals(numbers: list[int], scale: int, precision: int = 38) -> pa.Array[Any]:
    return pa.array(numbers, pa.decimal256(76, 0)).cast(pa.decimal128(38, 0)).view(pa.decimal128(precision, scale))


def batch(numbers: list[int], scale: int, precision: int = 38, apart_ms: int = 1) -> pa.RecordBatch:
    times = pa.array([i * apart_ms for i in range(len(numbers))], pa.timestamp("ms"))
    return pa.record_batch({"k": pa.array([1] * len(numbers)), "t": times, "v": decimals(numbers, scale, precision)})


def value(number: int, scale: int) -> Decimal:
    return Decimal((0 if number >= 0 else 1, tuple(map(int, str(abs(number)))), -scale))


@pytest.mark.parametrize("scale", [0, 2, 18, 38])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "numbers", [[LARGEST, 1], [LARGEST] * 2, [LARGEST] * 3, [LARGEST] * 4, [LARGEST // 2] * 2 + [2], [LARGEST] * 7]
)
@pytest.mark.parametrize("apart", [False, True], ids=["one batch", "a batch for each"])
def test_a_sum_of_more_digits_fails_the_job(numbers: list[int], sign: int, scale: int, apart: bool) -> None:
    numbers = [sign * number for number in numbers]
    world = World(operator(scale))
    for part in [[number] for number in numbers] if apart else [numbers]:
        world.process(batch(part, scale))
    with pytest.raises(JobError, match=rf"aggregate 'sum' does not fit decimal128\(38, {scale}\) for k=1"):
        world.advance(MAX_WATERMARK_US)


@pytest.mark.parametrize("scale", [0, 2, 18, 38])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "numbers",
    [
        [LARGEST],
        [LARGEST - 1, 1],
        [LARGEST, 1, -1],
        [LARGEST] * 2 + [-LARGEST],
        [LARGEST] * 4 + [-LARGEST] * 4,
        [LARGEST] * 4 + [-LARGEST] * 3 + [-1],
        [LARGEST] * 40 + [-LARGEST] * 39,
    ],
)
def test_a_sum_that_is_too_large_only_on_the_way_is_right(numbers: list[int], sign: int, scale: int) -> None:
    """In batches of one row and in one, with a restore wherever it stands."""
    numbers = [sign * number for number in numbers]
    for parts in ([numbers], [[number] for number in numbers]):
        worlds = [World(operator(scale))]
        for part in parts:
            worlds[0].process(batch(part, scale))
            if len(parts) < 10:
                worlds = restored(lambda: operator(scale), [worlds[0].snapshot()], 1, 16)
        worlds[0].advance(MAX_WATERMARK_US)
        (row,) = worlds[0].out.rows()
        assert row["sum"] == value(sum(numbers), scale)
        assert row["min"] == value(min(numbers), scale) and row["max"] == value(max(numbers), scale)
        assert row["mean"] == pytest.approx(sum(numbers) / 10**scale / len(numbers), rel=1e-9, abs=1e30 / 10**scale)


@pytest.mark.parametrize("window", [sliding("1 h", "1 min"), session("2 h")], ids=["sliding", "session"])
def test_parts_of_many_panes_are_merged_as_they_are(window: Sliding | Session) -> None:
    numbers = [LARGEST] * 20 + [-LARGEST] * 19
    world = World(operator(5, window=window))
    world.process(batch(numbers, 5, apart_ms=60_000 if isinstance(window, Session) else 1))
    world.advance(MAX_WATERMARK_US)
    assert {row["sum"] for row in world.out.rows()} == {value(LARGEST, 5)}


@settings(max_examples=examples(200))
@given(
    st.lists(
        st.lists(st.one_of(st.integers(-LARGEST, LARGEST), st.sampled_from([LARGEST, -LARGEST, 1, -1])), max_size=9),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 38),
)
def test_a_sum_is_right_or_refused(parts: list[list[int]], scale: int) -> None:
    numbers = [number for part in parts for number in part]
    if not numbers:
        return
    world = World(operator(scale))
    for part in parts:
        world.process(batch(part, scale))
    if abs(sum(numbers)) > LARGEST:
        with pytest.raises(JobError, match="does not fit"):
            world.advance(MAX_WATERMARK_US)
    else:
        world.advance(MAX_WATERMARK_US)
        assert [row["sum"] for row in world.out.rows()] == [value(sum(numbers), scale)]


@pytest.mark.parametrize(("precision", "numbers"), [(5, [99_999] * 300), (18, [10**18 - 1] * 300)])
def test_a_sum_has_more_digits_than_its_column(precision: int, numbers: list[int]) -> None:
    world = World(operator(2, precision))
    world.process(batch(numbers, 2, precision))
    world.advance(MAX_WATERMARK_US)
    assert [row["sum"] for row in world.out.rows()] == [value(sum(numbers), 2)]
