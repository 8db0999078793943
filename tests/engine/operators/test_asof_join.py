"""The as-of join: the version that polars finds, whatever arrives when, and only versions that may still be needed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest.mock import patch

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from join_plans import LEFT, RIGHT, SIZES, STEP, Plan, PlannedJoin, Row, batch, contents
from operator_world import World
from polars.testing import assert_frame_equal

from effort import examples
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.operators.event_time_column import TimeColumn
from midstream.engine.operators.functions.asof_join import asof_join_operator
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.state import columnar, join_index, table_runs


def operator_of(tolerance_ms: int | None = None) -> Any:
    ports = [Port("process1", ("k",), "t", LEFT), Port("process2", ("id",), "u", RIGHT)]
    return asof_join_operator("join", ports, None if tolerance_ms is None else tolerance_ms * 1000)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(STEP, max_size=16), st.sampled_from([None, 0, 3, 10, 50]), SIZES)
def test_the_result_is_what_polars_joins_of_the_rows_that_are_not_late(
    plan: Plan, tolerance: int | None, sizes: tuple[int, int]
) -> None:
    with (
        patch.object(join_index, "RUN_ROWS", sizes[0]),
        patch.object(table_runs, "RUN_ROWS", sizes[0]),
        patch.object(columnar, "OWN_CHUNK_ROWS", sizes[1]),
    ):
        join = PlannedJoin(lambda: operator_of(tolerance))

        def check_contents() -> None:
            newest = pl.concat([contents(world)["newest"] for world in join.worlds])
            assert sorted(newest["b"]) == sorted(held_of(join.given, join.marks, tolerance))
            for port, (name, number) in enumerate((("left_waiting", "a"), ("right_waiting", "b"))):
                waiting = [n for world in join.worlds for n in contents(world)[name][number]]
                assert sorted(waiting) == [n for p, k, t, n in join.given if p == port and t > join.marks[k]]

        found = join.go(plan, check_contents)
    assert_frame_equal(found, joined_by_polars(join.given, tolerance), check_row_order=False)


def held_of(rows: list[Row], marks: dict[int, int], tolerance: int | None) -> list[int]:
    """Return the newest row of each key up to its watermark, if a row that may come can still have it."""
    newest: dict[int, tuple[int, int]] = {}
    for port, key, time, number in rows:
        if port == 1 and time <= marks[key]:
            newest[key] = max(newest.get(key, (time, number)), (time, number))
    return [n for key, (time, n) in newest.items() if tolerance is None or time + tolerance > marks[key]]


def joined_by_polars(rows: list[Row], tolerance: int | None) -> pl.DataFrame:
    a = pl.DataFrame(batch([row for row in rows if row[0] == 0], 0)).sort("t")
    b = pl.DataFrame(batch([row for row in rows if row[0] == 1], 1)).rename({"id": "k"}).sort("u", maintain_order=True)
    on_us = a.with_columns(on=pl.col("t").dt.epoch("us")), b.with_columns(on=pl.col("u").dt.epoch("us"))
    within = None if tolerance is None else tolerance * 1000
    joined = on_us[0].join_asof(on_us[1], on="on", by="k", tolerance=within, check_sortedness=False)
    return joined.drop("on", "on_right", strict=False)


def test_a_row_leaves_when_event_time_has_passed_it_and_with_the_last_of_two_versions_at_its_time() -> None:
    world = World(operator_of())
    world.process(batch([(0, 1, 10, 1), (0, 2, 10, 2)], 0), 0)
    world.process(batch([(1, 1, 10, 3), (1, 1, 10, 4), (1, 1, 11, 5)], 1), 1)
    world.advance(9_999)
    assert not world.out.rows()
    world.advance(10_000)
    assert sorted((row["a"], row["b"]) for row in world.out.rows()) == [(1, 4), (2, None)]
    assert {name: frame.height for name, frame in contents(world).items()} == {
        "left_waiting": 0,
        "right_waiting": 1,
        "newest": 1,
    }


def test_versions_that_are_older_than_the_tolerance_leave_the_state() -> None:
    for tolerance, left in ((None, 1), (5, 0)):
        world = World(operator_of(tolerance))
        world.process(batch([(1, 1, 10, 1)], 1), 1)
        world.advance(14_999)
        assert contents(world)["newest"].height == 1
        world.advance(15_000)
        assert contents(world)["newest"].height == left
        world.advance(MAX_WATERMARK_US)
        assert set(world.snapshot()) == {"progress"}


def test_what_has_been_stored_is_not_stored_again_when_other_keys_get_a_version() -> None:
    world = World(operator_of())
    rows = columnar.OWN_CHUNK_ROWS
    world.process(batch([(1, n, 5, n) for n in range(rows)], 1), 1)
    world.advance(5_000)
    before = {chunk.id for chunk in world.snapshot()["table:newest"].chunks}
    world.process(batch([(1, rows, 6, 1)], 1), 1)
    world.advance(6_000)
    assert before < {chunk.id for chunk in world.snapshot()["table:newest"].chunks}


KEYS: dict[str, pa.Array[Any]] = {
    "text": pa.array(["", "a", "a\0"], pa.large_string()),
    "binary": pa.array([b"", b"a", b"a\0"], pa.large_binary()),
    "bool": pa.array([True, False, True]),
    "date": pa.array([0, 1, -1], pa.date32()),
    "duration": pa.array([timedelta(0), timedelta(1), timedelta(-1)]),
    "uint64": pa.array([0, 2**64 - 1, 5], pa.uint64()),
}


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize(("unit", "is_end"), [("ms", False), ("us", True), ("ns", False), ("ns", True)])
def test_keys_and_times_of_all_types_find_their_version(keys: pa.Array[Any], unit: str, is_end: bool) -> None:
    schema = pa.schema([("k", keys.type), ("two", pa.int8()), ("t", pa.timestamp(unit, "UTC"))])
    right = pa.schema([schema.field("k"), schema.field("two"), ("u", pa.timestamp("us")), ("v", pa.int64())])
    ports = [
        Port("process1", ("k", "two"), TimeColumn("t", is_end=is_end), schema),
        Port("process2", ("k", "two"), "u", right),
    ]
    world = World(asof_join_operator("join", ports))
    two = pa.array([0, 0, 1], pa.int8())
    at = {"ms": 10, "us": 10_000, "ns": 10_000_000}[unit] + is_end
    times = pa.array([at] * 3).cast(pa.timestamp(unit, "UTC"))
    world.process(pa.RecordBatch.from_arrays([keys, two, times], schema=schema), 0)
    for version, time_us in ((1, 9_999), (2, 10_000), (3, 10_001)):
        values = pa.array([version * 10 + n for n in range(3)])
        arrays = [keys, two, pa.array([time_us] * 3).cast(pa.timestamp("us")), values]
        world.process(pa.RecordBatch.from_arrays(arrays, schema=right), 1)
    world.advance(10_000)
    assert sorted(row["v"] for row in world.out.rows()) == [20, 21, 22]
