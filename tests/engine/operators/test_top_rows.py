"""The first rows of each window, against plain Python: through late rows, half-fired windows, restores, and all types."""

from __future__ import annotations

import math
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import World
from test_windows_interrupted import SCHEMA, Plan, batch_of, check, keys, ms, small_slices, steps  # noqa: F401 - a fixture
from window_oracle import Oracle, SessionOracle, SlidingOracle, Window

from effort import examples
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.errors import ConfigError, SchemaError, StorageError
from midstream.engine.operators.windows.window_factory import WINDOW_END, WINDOW_START, Session, Sliding, top_operator
from midstream.engine.state.state_parts import Chunk, StatePart

TUMBLING = Sliding(10_000, 10_000, 0)


def top(
    window: Sliding | Session = TUMBLING,
    lateness: int = 0,
    count: int = 2,
    by: tuple[str, ...] = ("v",),
    *,
    descending: bool = True,
    of_keys: tuple[str, ...] = ("k",),
    schema: pa.Schema = SCHEMA,
) -> Any:
    return top_operator(
        "top",
        window=window,
        keys=of_keys,
        event_time="t",
        count=count,
        by=by,
        descending=descending,
        schema=schema,
        allowed_lateness=lateness / 1000,
    )


def ranked(out: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The rows of each emission of a window, in the order of their ranks."""
    found: list[list[dict[str, Any]]] = []
    for row in out:
        if row["rank"] == 1:
            found.append([])
        found[-1].append(row)
        assert row["rank"] == len(found[-1])
        assert (row["k"], row[WINDOW_END]) == (found[-1][0]["k"], found[-1][0][WINDOW_END])
    return [
        (rows[0]["k"], ms(rows[0][WINDOW_START]), ms(rows[0][WINDOW_END]), *((ms(row["t"]), row["v"]) for row in rows))
        for rows in found
    ]


def check_top(shape: Sliding | Session, oracle: Oracle, lateness: int, of_keys: tuple[int, ...], plan: Plan) -> None:
    def result(key: Any, window: Window) -> tuple[Any, ...]:
        rows = sorted(((t, v) for _, (_, t, v) in window.rows), key=lambda row: (-row[1], row[0]))
        return (key, window.start, window.end, *rows[:2])

    oracle.result = result
    check(shape, oracle, lateness, of_keys, plan, top, ranked)


@pytest.mark.usefixtures("small_slices")
@settings(max_examples=examples(60))
@given(st.sampled_from([(10, 10, 0), (20, 5, 0), (7, 3, 2)]), st.sampled_from([0, 0, 25]), keys, steps)
def test_tumbling_and_sliding_windows_emit_their_first_rows(
    shape: tuple[int, int, int], lateness: int, of_keys: tuple[int, ...], plan: Plan
) -> None:
    size, slide, offset = shape
    window = Sliding(size * 1000, slide * 1000, offset * 1000)
    check_top(window, SlidingOracle(size, slide, offset, lateness), lateness, of_keys, plan)


@pytest.mark.usefixtures("small_slices")
@settings(max_examples=examples(30))
@given(st.sampled_from([1, 5]), st.sampled_from([0, 0, 25]), keys, steps)
def test_sessions_emit_their_first_rows(gap: int, lateness: int, of_keys: tuple[int, ...], plan: Plan) -> None:
    check_top(Session(gap * 1000), SessionOracle(gap, lateness), lateness, of_keys, plan)


VALUES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.float64(), [1.5, None, math.nan, -math.inf, 0.0, -0.0, math.nan, math.inf, None]),
    (pa.float32(), [1.5, math.nan, 2.5]),
    (pa.uint64(), [2**64 - 1, 0, None, 7]),
    (pa.int8(), [-128, 127, None, 0]),
    (pa.bool_(), [True, None, False, True]),
    (pa.decimal128(38, 3), [Decimal("1.5"), None, Decimal(-(10**34)), Decimal("1.499")]),
    (pa.large_string(), ["b", "", None, "ä", "a"]),
    (pa.large_binary(), [b"\xff", b"", None, b"\0"]),
    (pa.date32(), [date(2024, 1, 1), None, date(1, 1, 1)]),
    (pa.time32("s"), [time(23, 59), None, time(0)]),
    (pa.duration("ns"), [timedelta(1), timedelta(-1), None]),
    (pa.timestamp("us", "Asia/Tokyo"), [datetime(2024, 1, 1), None, datetime(1970, 1, 1)]),
]


@pytest.mark.parametrize(
    ("kind", "values"), VALUES, ids=lambda value: str(value) if isinstance(value, pa.DataType) else ""
)
@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("of_keys", [("k",), ()])
def test_values_of_all_types_have_their_order_with_nulls_and_nan_last_however_batches_are_cut(
    kind: pa.DataType, values: list[Any], descending: bool, of_keys: tuple[str, ...]
) -> None:
    schema = pa.schema([("k", pa.int64()), ("t", pa.timestamp("us")), ("x", kind), ("l", pa.large_list(pa.int64()))])
    rows = [{"k": 1, "t": number, "x": value, "l": [number]} for number, value in enumerate(values)]
    batch = pa.RecordBatch.from_pylist(rows, schema=schema)
    absent = [row for row in rows if row["x"] is None or row["x"] != row["x"]]
    there = [row for row in rows if row not in absent]
    # a stable sort keeps rows of one value in the order of t, in which they are
    expected = [row["t"] for row in [*sorted(there, key=lambda row: row["x"], reverse=descending), *absent]]
    for cut in (1, 2, len(rows)):
        for count in (1, 2, 100):
            world = World(top(count=count, by=("x",), descending=descending, of_keys=of_keys, schema=schema))
            for start in range(0, len(rows), cut):
                world.process(batch.slice(start, cut))
            combined = World(top(count=count, by=("x",), descending=descending, of_keys=of_keys, schema=schema))
            combiner = combined.operator.combiner(())
            assert combiner is not None
            for start in range(0, len(rows), cut):
                combined.process(combiner.combine(batch.slice(start, cut)))
            for each in (world, combined):
                each.advance(MAX_WATERMARK_US)
            [(_, made)] = world.out.batches
            assert str(combined.out.batches[0][1].to_pylist()) == str(made.to_pylist())
            assert made.column("t").cast(pa.int64()).to_pylist() == expected[:count]
            assert made.column("rank").to_pylist() == list(range(1, made.num_rows + 1))
            for name in ("x", "l"):
                taken = batch.column(name).take(made.column("t").cast(pa.int64()))
                assert str(made.column(name)) == str(taken)  # NaN equals nothing


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["a", "b", None])), min_size=1, max_size=12),
    st.permutations(range(12)),
    st.integers(1, 12),
    st.booleans(),
)
def test_ties_do_not_depend_on_the_order_of_arrival(
    values: list[tuple[int, str | None]], order: list[int], cut: int, descending: bool
) -> None:
    schema = SCHEMA.append(pa.field("s", pa.large_string()))
    rows = [{"k": 1, "t": 5, "v": v, "s": s} for v, s in values]

    def made(rows: list[dict[str, Any]], cut: int) -> list[dict[str, Any]]:
        world = World(top(count=3, descending=descending, schema=schema))
        batch = pa.RecordBatch.from_pylist(rows, schema=schema)
        for start in range(0, len(rows), cut):
            world.process(batch.slice(start, cut))
        world.advance(MAX_WATERMARK_US)
        return world.out.rows()

    shuffled = [rows[index] for index in order if index < len(rows)]
    assert made(shuffled, cut) == made(rows, len(rows))


@pytest.mark.parametrize("values", [(None, float("nan")), (0.0, -0.0)], ids=str)
@pytest.mark.parametrize("descending", [True, False])
def test_values_that_are_equal_by_the_order_do_not_depend_on_arrival(
    values: tuple[float | None, ...], descending: bool
) -> None:
    fields: list[tuple[str, pa.DataType]] = [("k", pa.int64()), ("t", pa.timestamp("us")), ("x", pa.float64())]
    schema = pa.schema(fields)
    rows = [{"k": 1, "t": 5, "x": value} for value in values]
    made = []
    for batch in (rows, rows[::-1]):
        world = World(top(count=1, by=("x",), descending=descending, schema=schema))
        world.process(pa.RecordBatch.from_pylist(batch, schema=schema))
        world.advance(MAX_WATERMARK_US)
        made.append(str(world.out.rows()))
    assert made[0] == made[1]


def test_of_rows_that_differ_only_in_nulls_and_nan_the_first_column_decides() -> None:
    names = [f"x{number}" for number in range(6)]
    kinds: dict[str, pa.DataType] = {"k": pa.int64(), "t": pa.timestamp("us"), "v": pa.int64()}
    schema = pa.schema(kinds | dict.fromkeys(names, pa.float64()))
    rows = [{"k": 1, "t": 5, "v": 1} | dict.fromkeys(names, math.nan) | {name: None} for name in names]
    world = World(top(count=len(names), schema=schema))
    world.process(pa.RecordBatch.from_pylist(rows, schema=schema))
    world.advance(MAX_WATERMARK_US)
    nulls = [[name for name in names if row[name] is None] for row in world.out.rows()]
    assert nulls == [[name] for name in reversed(names)]


def test_the_rows_of_a_window_may_be_rows_of_windows_themselves() -> None:
    """Their columns that have the names of the result's are left out, also if it is the first one."""
    schema = pa.schema(
        [("k", pa.int64()), ("window_start", pa.timestamp("us")), ("t", pa.timestamp("us")), ("v", pa.int64())]
    )
    world = World(top(count=1, schema=schema))
    world.process(
        pa.RecordBatch.from_pylist([{"k": 1, "window_start": 1, "t": 5, "v": v} for v in (1, 2)], schema=schema)
    )
    world.advance(MAX_WATERMARK_US)
    assert [(row["k"], row["rank"], row["v"]) for row in world.out.rows()] == [(1, 1, 2)]
    assert world.out.rows()[0]["window_start"] != 1


def test_state_has_no_more_rows_than_are_emitted() -> None:
    world = World(top(count=3))
    for start in range(0, 90, 10):
        rows = [{"k": 1, "t": 0, "v": v} for v in range(start, start + 10)]
        world.process(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
    held = [len(rows or ()) for chunk in world.snapshot()["parts"].chunks for rows in chunk.table.column(3).to_pylist()]
    assert max(held) == 3
    assert sum(held) <= 9 * 3


def test_state_of_another_count_or_order_is_refused() -> None:
    """Rows that were left out would be missing."""
    settings_of = [made.state_settings()[""] for made in (top(), top(count=3), top(by=("t",)), top(descending=False))]
    assert len({tuple(sorted(each.items())) for each in settings_of}) == 4


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(SchemaError, match="operator 'top': column 'w' is not in the stream's schema"):
        top(by=("w",))
    with pytest.raises(ConfigError, match="operator 'top': by='k' is a key"):
        top(by=("k",))
    with pytest.raises(ConfigError, match="operator 'top': the key column must not be called 'rank'; rename it"):
        top(of_keys=("k", "rank"), schema=SCHEMA.append(pa.field("rank", pa.int64())))
    with pytest.raises(SchemaError, match=r"operator 'top': by='l' is .*: such values have no order"):
        top(by=("l",), schema=SCHEMA.append(pa.field("l", pa.list_(pa.int64()))))


@pytest.mark.parametrize("shape", [TUMBLING, Session(10_000)])
@pytest.mark.parametrize("list_of_times", [[], None, [0, 1]])
def test_a_checkpoint_with_rows_that_lack_some_columns_is_refused(
    shape: Sliding | Session, list_of_times: list[int] | None
) -> None:
    before = World(top(shape))
    before.process(batch_of([(1, 1, 5)]))
    parts = before.snapshot()
    [chunk] = parts["parts"].chunks
    name = "__rows:t"
    at = chunk.table.schema.get_field_index(name)
    column = pa.array([list_of_times], chunk.table.schema.field(at).type)
    crafted = Chunk("c", chunk.table.set_column(at, name, column))
    parts = {**parts, "parts": StatePart(parts["parts"].redistribute, (crafted,))}
    with pytest.raises(
        StorageError, match="operator 'top': the state in the checkpoint has rows of which some columns"
    ):
        World(top(shape), parts=parts)
