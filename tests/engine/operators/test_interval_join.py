"""The join by time: the same pairs as all rows compared with each other, and nothing kept that is of no more use."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import Parts, World, restored

from effort import examples
from in_memory import CountingIds
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.errors import JobError
from midstream.engine.core.key_groups import key_groups, subtask_of
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.functions.interval_join import IntervalJoinOperator, interval_join_operator
from midstream.engine.state import columnar, join_index
from midstream.engine.state.state_parts import Redistribute, StatePart
from midstream.engine.state.table_state import TableState

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


def sides(world: World) -> dict[str, pl.DataFrame]:
    """What it holds."""
    assert isinstance(world.operator, IntervalJoinOperator)
    return world.operator.contents()


TIMES = st.integers(0, 40)
STEP = st.one_of(
    st.tuples(st.just("rows"), st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), TIMES), max_size=8)),
    st.tuples(st.just("advance"), TIMES),
    st.tuples(st.just("snapshot"), st.none()),
    st.tuples(st.just("restore"), st.integers(1, 3)),
)
SIZES = st.sampled_from([(262_144, 8_192), (8, 3), (3, 1)])
"""From how many rows on a run is not merged, and is a chunk of its own."""


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(STEP, max_size=16), st.integers(-12, 12), st.integers(0, 12), st.booleans(), SIZES)
def test_pairs_are_those_with_all_rows_that_are_held(
    plan: list[tuple[str, Any]], lower: int, width: int, with_late: bool, sizes: tuple[int, int]
) -> None:
    """Late rows are held until the next watermark at least, whatever is restored in between."""
    with patch.object(join_index, "RUN_ROWS", sizes[0]), patch.object(columnar, "OWN_CHUNK_ROWS", sizes[1]):
        compare(plan, lower, lower + width, with_late)


def compare(plan: list[tuple[str, Any]], lower: int, upper: int, with_late: bool) -> None:
    worlds = [World(operator_of(lower, upper), max_parallelism=MAX_PARALLELISM)]
    came = 0
    held: list[Row] = []
    found: Counter[tuple[int, int]] = Counter()
    expected: Counter[tuple[int, int]] = Counter()
    chunks: dict[tuple[World, str], pa.Table] = {}
    watermark = -1

    def drain() -> None:
        for world in worlds:
            found.update((row["a"], row["b"]) for row in world.out.rows())
            world.out.clear()

    def snapshots() -> list[Parts]:
        parts = [world.snapshot() for world in worlds]
        for world, part in zip(worlds, parts, strict=True):
            for chunk in (chunk for each in part.values() for chunk in each.chunks):
                table = chunks.setdefault((world, chunk.id), chunk.table)
                assert table.equals(chunk.table)
        return parts

    for step, argument in plan:
        if step == "rows":
            given = [row for row in argument if with_late or row[2] > watermark]
            rows = [(p, k, t, came + i) for i, (p, k, t) in enumerate(given)]
            came += len(rows)
            for port in (0, 1):
                mine = [row for row in rows if row[0] == port]
                for _, k, t, n in mine:
                    for q, i, u, m in held:
                        left, right = ((t, n), (u, m)) if port == 0 else ((u, m), (t, n))
                        if q != port and k == i and lower <= right[0] - left[0] <= upper:
                            expected[left[1], right[1]] += 1
                held += mine
                keys = pa.record_batch({"k": pa.array([k for _, k, _, _ in mine], pa.int64())})
                owners = subtask_of(key_groups(keys, ("k",), MAX_PARALLELISM), len(worlds), MAX_PARALLELISM)
                for subtask, world in enumerate(worlds):
                    part = [row for row, owner in zip(mine, owners, strict=True) if owner == subtask]
                    if part:
                        world.process(batch(part, port), port)
        elif step == "advance":
            watermark = max(watermark, argument)
            held = [row for row in held if row[2] + (-lower if row[0] else upper) > watermark]
            for world in worlds:
                world.advance(watermark * 1000)
        elif step == "snapshot":
            snapshots()
        else:
            drain()
            worlds = restored(lambda: operator_of(lower, upper), snapshots(), argument, MAX_PARALLELISM)
        for port, (side, column) in enumerate((("left", "a"), ("right", "b"))):
            assert sorted(n for world in worlds for n in sides(world)[side][column]) == [
                n for p, _, _, n in held if p == port
            ]
    drain()
    assert found == expected
    for world in worlds:
        world.advance(MAX_WATERMARK_US)
    assert [world.snapshot() for world in worlds] == [{}] * len(worlds)


def test_a_run_that_was_stored_is_not_stored_again_and_is_dropped_as_a_whole() -> None:
    world = World(operator_of(0, 1000))
    rows = columnar.OWN_CHUNK_ROWS

    def stored() -> dict[str, int]:
        return {chunk.id: chunk.table.num_rows for part in world.snapshot().values() for chunk in part.chunks}

    world.process(batch([(0, n, n % 1000, n) for n in range(rows)], 0), 0)
    first = stored()
    assert list(first.values()) == [rows]
    world.advance(1_300_000)
    world.process(batch([(0, 1, 2000, 1)], 0), 0)
    second = stored()
    assert first.items() < second.items()  # the dead rows are in it still, as many as they are
    assert [row for row in second.values() if row != rows] == [16, 1]  # key groups, and the row
    world.advance(1_600_000)
    assert first.keys().isdisjoint(stored())
    assert sum(stored().values()) < rows // 2
    world.advance(2_000_000)
    assert stored() == {next(iter(stored())): 1}


def test_dead_rows_stay_dead_among_those_of_subtasks_that_have_not_come_so_far() -> None:
    """The restored watermark is the lowest: what the other subtask has dropped is not held once more."""
    worlds = [World(operator_of(0, 10), subtask=n, parallelism=2, max_parallelism=2) for n in range(2)]
    keys = pa.record_batch({"k": pa.array(range(20), pa.int64())})
    owners = subtask_of(key_groups(keys, ("k",), 2), 2, 2).tolist()
    for number, world in enumerate(worlds):
        mine = owners.index(number)
        world.process(batch([(0, mine, t, t + 100 * number) for t in (0, 5, 10, 20, 30)], 0), 0)
        world.advance((number * 10 + 5) * 1000)
    [one] = restored(lambda: operator_of(0, 10), [world.snapshot() for world in worlds], 1, 2)
    assert sides(one)["left"]["a"].sort().to_list() == [0, 5, 10, 20, 30, 110, 120, 130]
    one.process(batch([(1, owners.index(1), t, t) for t in (5, 10)], 1), 1)
    assert [row["a"] for row in one.out.rows()] == [110]
    [again] = restored(lambda: operator_of(0, 10), [one.snapshot()], 1, 2)
    assert sides(again)["left"]["a"].sort().to_list() == [0, 5, 10, 20, 30, 110, 120, 130]


def test_what_was_stored_as_tables_is_restored() -> None:
    """Two tables were the state of the join before its rows lay by key and time."""
    parts = {}
    for name, schema, rows in (
        ("left", LEFT, [{"k": n % 5, "t": n, "a": n} for n in range(50)]),
        ("right", pa.schema([LEFT.field("k") if f.name == "id" else f for f in RIGHT]), []),
    ):
        table = TableState(schema).bound(name, ["k"], range(MAX_PARALLELISM), MAX_PARALLELISM)
        table.append(pl.DataFrame(pa.Table.from_pylist(rows, schema=schema)))
        chunks = table.snapshot(CountingIds(), "here")
        if chunks is not None:
            parts[table.part_name] = StatePart(Redistribute.KEYED, chunks())
    worlds = restored(lambda: operator_of(0, 10), [parts], 3, MAX_PARALLELISM)
    assert sum(sides(world)["left"].height for world in worlds) == 50
    for world in worlds:
        world.advance(20_000)
    kept = pl.concat([sides(world)["left"] for world in worlds])
    assert sorted(kept["a"].to_list()) == list(range(11, 50))


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
    with pytest.raises(JobError, match="operator 'join': both streams have a column 't'; rename it"):
        interval_join_operator("join", [first, both], 0, 1)
    named_as_the_key = Port("process2", ("id",), "u", RIGHT.append(pa.field("k", pa.int64())))
    with pytest.raises(JobError, match="operator 'join': both streams have a column 'k'; rename it"):
        interval_join_operator("join", [first, named_as_the_key], 0, 1)


@pytest.mark.parametrize("port", [0, 1])
@pytest.mark.parametrize("spread", [1, 37])
def test_rows_of_one_key_are_not_paired_with_all_its_rows_of_other_times(
    port: int, spread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key has `many` rows, a row in 10 ms; each of them goes with some ten of the other stream."""
    many, few = 3_000, 300
    looked_at: list[int] = []
    original = join_index.TimedRun._near

    def near(self: Any, *arguments: Any) -> Any:
        made = original(self, *arguments)
        looked_at.append(len(made[0]))
        return made

    world = World(operator_of(-50, 49))
    world.process(batch([(1 - port, 1, 10 * i, i) for i in range(many)], 1 - port), 1 - port)
    monkeypatch.setattr(join_index.TimedRun, "_near", near)
    world.process(batch([(port, 1, 10 * (spread * i % many), i) for i in range(few)], port), port)
    pairs = len(world.out.rows())
    assert 9 * few < pairs <= 10 * few
    assert sum(looked_at) == pairs


FIRST, LAST = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The years 1 to 9999."""


@pytest.mark.parametrize(
    ("lower", "upper", "left", "right"),
    [
        (-10, 10, [LAST, LAST - 5], [LAST]),
        (-10, 10, [FIRST], [FIRST, 10 + FIRST, 11 + FIRST]),
        (-(2**63), 2**63, [FIRST, LAST], [LAST - 5, FIRST]),
        (0, 2**64, [FIRST, 0], [LAST, 0, FIRST]),
    ],
)
@pytest.mark.parametrize("is_left_first", [True, False])
def test_the_first_and_the_last_times_are_joined_like_others(
    lower: int, upper: int, left: list[int], right: list[int], is_left_first: bool
) -> None:
    ports = [
        Port(f"process{number}", ("k",), name, pa.schema([("k", pa.int64()), (name, pa.timestamp("us"))]))
        for number, name in ((1, "t"), (2, "u"))
    ]
    world = World(interval_join_operator("join", ports, lower, upper))
    for port, times in sorted(enumerate((left, right)), reverse=not is_left_first):
        at = pa.array(times, pa.int64()).cast(pa.timestamp("us"))
        world.process(pa.RecordBatch.from_arrays([pa.array([1] * len(times)), at], schema=ports[port].schema), port)
    pairs = [
        pair
        for _, made in world.out.batches
        for pair in zip(*(made.column(name).cast(pa.int64()).to_pylist() for name in "tu"), strict=True)
    ]
    assert sorted(pairs) == sorted((t, u) for t in left for u in right if lower <= u - t <= upper)


@pytest.mark.parametrize("port", [0, 1])
def test_a_null_key_is_refused_with_its_row(port: int) -> None:
    world = World(operator_of(-10, 10))
    rows = batch([(port, 1, 5, 7)], port)
    key = ("k", "id")[port]
    nulls = rows.set_column(rows.schema.get_field_index(key), rows.schema.field(key), pa.array([None], pa.int64()))
    with pytest.raises(JobError, match=rf"operator 'join': key '{key}' is null in the row .*'{key}': None"):
        world.process(nulls, port)
