"""The join by time: the rows that polars joins, whatever arrives when, and nothing kept that is of no more use."""

from __future__ import annotations

from typing import Any, get_args
from unittest.mock import patch

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from join_plans import LEFT, MAX_PARALLELISM, RIGHT, SAME_TIME, SIZES, Plan, PlannedJoin, Row, batch, contents, plans
from operator_world import World, restored
from polars.testing import assert_frame_equal

from effort import examples
from in_memory import CountingIds
from midstream.engine.core.errors import JobError, SchemaError
from midstream.engine.core.key_groups import key_groups, subtask_of
from midstream.engine.operators.event_time_column import TimeColumn
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.functions.interval_join import How, interval_join_operator
from midstream.engine.operators.windows.window_specs import LATE_RIGHT
from midstream.engine.state import columnar, join_index
from midstream.engine.state.state_parts import Redistribute, StatePart
from midstream.engine.state.table_state import TableState

HOWS = get_args(How)


def operator_of(lower_ms: int, upper_ms: int, how: str = "inner", right: pa.Schema = RIGHT) -> Any:
    first, second = Port("process1", ("k",), "t", LEFT), Port("process2", ("id",), "u", right)
    return interval_join_operator("join", [first, second], lower_ms * 1000, upper_ms * 1000, how)


@settings(max_examples=examples(200))
@given(plans(40), st.integers(-12, 12), st.integers(0, 12), st.sampled_from(HOWS), SIZES)
def test_the_result_is_what_polars_joins_of_the_rows_that_are_not_late(
    plan: Plan, lower: int, width: int, how: str, sizes: tuple[int, int]
) -> None:
    with patch.object(join_index, "RUN_ROWS", sizes[0]), patch.object(columnar, "OWN_CHUNK_ROWS", sizes[1]):
        compare(plan, lower, lower + width, how)


def compare(plan: Plan, lower: int, upper: int, how: str) -> None:
    right = SAME_TIME if how == "full" else RIGHT  # the event times of a full join are in one column
    join = PlannedJoin(lambda: operator_of(lower, upper, how, right), right)

    def check_contents() -> None:
        held_ms = max(upper, 0), max(-lower, 0)
        for port, (side, number) in enumerate((("left", "a"), ("right", "b"))):
            tables = [
                table for world in join.worlds for name, table in contents(world).items() if name.startswith(side)
            ]
            assert sorted(n for table in tables for n in table[number]) == [
                n for p, k, t, n in join.given if p == port and t + held_ms[port] > join.marks[k]
            ]

    found = join.go(plan, (lambda: None) if how in ("semi", "anti") else check_contents)
    assert_frame_equal(found, joined_by_polars(join.given, lower, upper, how, right), check_row_order=False)


def joined_by_polars(rows: list[Row], lower: int, upper: int, how: str, right: pa.Schema) -> pl.DataFrame:
    a = pl.DataFrame(batch([row for row in rows if row[0] == 0], 0))
    b = pl.DataFrame(batch([row for row in rows if row[0] == 1], 1, right)).rename({"id": "k"})
    apart = pl.col("u").dt.epoch("ms") - pl.col("t").dt.epoch("ms")
    pairs = a.join(b, on="k").filter(apart.is_between(lower, upper))
    is_paired = pairs.select("a").unique()
    if how == "semi":
        return a.join(is_paired, on="a", how="semi")
    alone = a.join(is_paired, on="a", how="anti")
    if how == "anti":
        return alone
    unpaired = b.join(pairs.select("b").unique(), on="b", how="anti")
    if how == "full":
        unpaired = unpaired.with_columns(t="u")
    parts = [pairs, *([alone] if how in ("left", "full") else []), *([unpaired] if how in ("right", "full") else [])]
    return pl.concat(parts, how="diagonal").select(pairs.columns)


def test_a_run_that_was_stored_is_not_stored_again_and_is_dropped_as_a_whole() -> None:
    world = World(operator_of(0, 1000))
    rows = columnar.OWN_CHUNK_ROWS

    def stored() -> dict[str, int]:
        return {chunk.id: chunk.table.num_rows for chunk in world.snapshot()["table:left"].chunks}

    world.process(batch([(0, n, n % 1000, n) for n in range(rows)], 0), 0)
    first = stored()
    assert list(first.values()) == [rows]
    world.advance(1_300_000)
    world.process(batch([(0, 1, 2000, 1)], 0), 0)
    second = stored()
    assert first.items() < second.items()  # the dead rows are in it still, as many as they are
    assert [row for row in second.values() if row != rows] == [1]
    world.advance(1_600_000)
    assert first.keys().isdisjoint(stored())
    assert sum(stored().values()) < rows // 2
    world.advance(2_000_000)
    assert list(stored().values()) == [1]


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
    assert contents(one)["left"]["a"].sort().to_list() == [0, 5, 10, 20, 30, 110, 120, 130]
    one.process(batch([(1, owners.index(1), t, t) for t in (15, 16)], 1), 1)
    assert [(row["a"], row["b"]) for row in one.out.rows()] == [(110, 16)]
    assert [row["b"] for row in one.out.rows(LATE_RIGHT)] == [15]
    [again] = restored(lambda: operator_of(0, 10), [one.snapshot()], 1, 2)
    assert contents(again)["left"]["a"].sort().to_list() == [0, 5, 10, 20, 30, 110, 120, 130]


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
    assert sum(contents(world)["left"].height for world in worlds) == 50
    for world in worlds:
        world.advance(20_000)
    kept = pl.concat([contents(world)["left"] for world in worlds])
    assert sorted(kept["a"].to_list()) == list(range(11, 50))


def test_a_row_is_kept_for_just_as_long_as_its_like_may_come() -> None:
    world = World(operator_of(-5, 10))
    world.process(batch([(0, 1, 100, 1)], 0), 0)
    world.process(batch([(1, 1, 200, 2)], 1), 1)
    world.advance(109_999)
    assert set(world.snapshot()) == {"table:left", "table:right", "progress"}
    world.advance(110_000)
    assert set(world.snapshot()) == {"table:right", "progress"}
    world.advance(205_000)
    assert set(world.snapshot()) == {"progress"}


def test_rows_that_are_semi_or_anti_joined_are_kept_until_their_first_partner_alone() -> None:
    for how in ("semi", "anti"):
        world = World(operator_of(-5, 10, how))
        world.process(batch([(0, 1, 100, 1), (0, 2, 100, 2)], 0), 0)
        world.process(batch([(1, 1, 101, 3), (1, 1, 102, 4)], 1), 1)
        assert {name: frame.height for name, frame in contents(world).items()} == {"right": 2, "left_unmatched": 1}
        assert contents(world)["right"].columns == ["u", "k"], "no other column of the right matters"
        world.process(batch([(0, 1, 103, 5)], 0), 0)
        assert [row["a"] for row in world.out.rows()] == ([1, 5] if how == "semi" else [])
        world.advance(110_000)
        assert [row["a"] for row in world.out.rows()] == ([1, 5] if how == "semi" else [2])


def test_what_has_been_stored_is_not_stored_again_when_other_rows_find_their_first_partner() -> None:
    world = World(operator_of(0, 1000, "left"))
    rows = columnar.OWN_CHUNK_ROWS
    with patch.object(join_index, "RUN_ROWS", rows):
        for first in (0, rows):
            world.process(batch([(0, n, 5, n) for n in range(first, first + rows)], 0), 0)
        before = [chunk.id for chunk in world.snapshot()["table:left_unmatched"].chunks]
        world.process(batch([(1, 1, 6, 1)], 1), 1)
        after = world.snapshot()
    unmatched = after["table:left_unmatched"].chunks
    assert [chunk.id for chunk in unmatched] == before and len(before) == 2
    assert sorted(sum(each.table.num_rows for each in chunk.removed) for chunk in unmatched) == [0, 1]
    assert [chunk.table.num_rows for chunk in after["table:left"].chunks] == [1]


def test_the_columns_are_those_of_both_with_the_keys_once() -> None:
    assert operator_of(0, 1).schema.names == ["k", "t", "a", "b", "u"]
    for how in ("semi", "anti"):
        assert operator_of(0, 1, how).schema.names == ["k", "t", "a"]
    first, both = Port("process1", ("k",), "t", LEFT), Port("process2", ("k",), "t", LEFT)
    assert interval_join_operator("join", [first, both], 0, 1).schema.names == ["k", "t", "a", "t_right", "a_right"]
    named_as_the_key = Port("process2", ("id",), "u", RIGHT.append(pa.field("k", pa.int64())))
    named = interval_join_operator("join", [first, named_as_the_key], 0, 1, suffix="_of_b")
    assert named.schema.names == ["k", "t", "a", "b", "u", "k_of_b"]
    named_twice = Port(
        "process2", ("id",), "u", RIGHT.append(pa.field("a", pa.int64())).append(pa.field("a_right", pa.int8()))
    )
    with pytest.raises(
        SchemaError, match=r"operator 'join': two columns of the result would be called 'a_right'.*suffix="
    ):
        interval_join_operator("join", [first, named_twice], 0, 1)


def test_the_time_of_a_row_is_the_lefts_or_that_of_the_only_row_there_is() -> None:
    delays = {how: operator_of(-5, 10, how, SAME_TIME).watermark_delay_us for how in HOWS}
    assert delays == {"inner": 10_000, "left": 10_000, "right": 5_000, "full": 10_000, "semi": 10_000, "anti": 10_000}
    assert [operator_of(2, 5, how, SAME_TIME).watermark_delay_us for how in ("left", "right")] == [5_000, 0]
    assert [operator_of(-5, -2, how, SAME_TIME).watermark_delay_us for how in ("left", "right")] == [0, 5_000]
    with pytest.raises(
        SchemaError, match=r"full join puts the event times .* column 't', and these are timestamp\[ms\] and"
    ):
        operator_of(0, 1, "full")
    ends = [
        Port("process1", ("k",), TimeColumn("t", is_end=True), LEFT),
        Port("process2", ("id",), "u", SAME_TIME),
    ]
    world = World(interval_join_operator("join", ends, 0, 0, "full"))
    world.process(batch([(0, 1, 11, 1)], 0), 0)
    world.process(batch([(1, 1, 10, 2), (1, 2, 20, 3)], 1, SAME_TIME), 1)
    world.advance(20_000)
    times = [made.column("t").cast(pa.int64()).to_pylist() for _, made in world.out.batches]
    assert times == [[11], [21]], "both are in a window that ends one unit later"


def test_another_interval_is_refused_where_completed_rows_could_not_be_told_from_others() -> None:
    settings = {how: operator_of(0, 1, how, SAME_TIME).state_settings()[""] for how in HOWS}
    assert "the interval" not in settings["inner"]
    assert all(settings[how]["the interval"] == "0 µs to 1000 µs" for how in HOWS if how != "inner")
    assert {settings[how]["the kind of join"] for how in HOWS} == set(HOWS)


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


def test_a_full_join_of_windows_with_rows_is_refused_where_it_would_change_their_times() -> None:
    """The event time of a window's row is just before its end, so b's time plus one unit would be in a key."""
    end, instant = TimeColumn("t", is_end=True), TimeColumn("u")
    right = SAME_TIME
    for first, second in ((end, instant), (TimeColumn("t"), TimeColumn("u", is_end=True))):
        ports = [Port("process1", ("t",), first, LEFT), Port("process2", ("u",), second, right)]
        with pytest.raises(SchemaError, match=r"the (left|right) stream is the end of a window, .* by one unit"):
            interval_join_operator("join", ports, 0, 0, "full")
    both = [Port("process1", ("t",), end, LEFT), Port("process2", ("u",), TimeColumn("u", is_end=True), right)]
    interval_join_operator("join", both, 0, 0, "full")
