"""Functions that get all rows of a window, against plain Python: late rows, half-fired windows, restores, all types, all cuts."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import World
from test_top_rows import TUMBLING, ms
from test_windows_interrupted import SCHEMA, Plan, check, keys, small_slices, steps  # noqa: F401 - a fixture
from window_oracle import Oracle, SessionOracle, SlidingOracle, Window

from effort import examples
from midstream import TableState
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.errors import ConfigError, JobError, SchemaError
from midstream.engine.operators.functions.window_functions import (
    WindowContext,
    WindowFunction,
    window_function_operator,
)
from midstream.engine.operators.windows.window_factory import WINDOW_END, WINDOW_START, Session, Sliding

LISTS = pa.schema([("rows", pa.large_list(pa.struct([("t", pa.timestamp("ms")), ("v", pa.int64())])))])


class Listed(WindowFunction):
    def process(self, rows: pl.DataFrame, ctx: WindowContext) -> pl.DataFrame:
        assert rows["k"].unique().to_list() == [ctx.key]
        assert rows["t"].min() >= ctx.window_start  # type: ignore[operator]
        return rows.select(pl.struct("t", "v").implode().alias("rows"))


class AsTheyCame(WindowFunction):
    def process(self, rows: pl.DataFrame, ctx: WindowContext) -> pl.DataFrame:
        return rows.drop("k", strict=False)


def operator(
    window: Sliding | Session = TUMBLING,
    lateness: int = 0,
    function: WindowFunction | None = None,
    made: pa.Schema = LISTS,
    of_keys: tuple[str, ...] = ("k",),
    schema: pa.Schema = SCHEMA,
) -> Any:
    return window_function_operator(
        "w",
        window=window,
        keys=of_keys,
        event_time="t",
        function=function or Listed(),
        made=made,
        schema=schema,
        allowed_lateness=lateness / 1000,
    )


def listed(out: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (row["k"], ms(row[WINDOW_START]), ms(row[WINDOW_END]), *((ms(each["t"]), each["v"]) for each in row["rows"]))
        for row in out
    ]


def check_rows(shape: Sliding | Session, oracle: Oracle, lateness: int, of_keys: tuple[int, ...], plan: Plan) -> None:
    def result(key: Any, window: Window) -> tuple[Any, ...]:
        return (key, window.start, window.end, *sorted((t, v) for _, (_, t, v) in window.rows))

    oracle.result = result
    check(shape, oracle, lateness, of_keys, plan, operator, listed)


@pytest.mark.usefixtures("small_slices")
@settings(max_examples=examples(40))
@given(st.sampled_from([(10, 10, 0), (20, 5, 0), (7, 3, 2)]), st.sampled_from([0, 0, 25]), keys, steps)
def test_tumbling_and_sliding_windows_have_all_their_rows(
    shape: tuple[int, int, int], lateness: int, of_keys: tuple[int, ...], plan: Plan
) -> None:
    size, slide, offset = shape
    window = Sliding(size * 1000, slide * 1000, offset * 1000)
    check_rows(window, SlidingOracle(size, slide, offset, lateness), lateness, of_keys, plan)


@pytest.mark.usefixtures("small_slices")
@settings(max_examples=examples(40))
@given(st.sampled_from([1, 5]), st.sampled_from([0, 0, 25]), keys, steps)
def test_sessions_have_all_their_rows(gap: int, lateness: int, of_keys: tuple[int, ...], plan: Plan) -> None:
    check_rows(Session(gap * 1000), SessionOracle(gap, lateness), lateness, of_keys, plan)


VALUES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.float32(), [1.5, None, math.nan, -math.inf, math.nan]),
    (pa.uint64(), [2**64 - 1, 0, None, 7]),
    (pa.bool_(), [True, None, False]),
    (pa.decimal128(38, 3), [Decimal("1.5"), None, Decimal(-(10**34))]),
    (pa.large_string(), ["b", "", None, "ä"]),
    (pa.large_binary(), [b"\xff", b"", None]),
    (pa.date32(), [date(2024, 1, 1), None, date(1, 1, 1)]),
    (pa.duration("ns"), [timedelta(1), timedelta(-1), None]),
    (pa.timestamp("ms", "Asia/Tokyo"), [datetime(2024, 1, 1), None]),
    (pa.large_list(pa.struct([("a", pa.int64())])), [[{"a": 1}], None, [], [{"a": None}]]),
    (pa.time32("s"), [None]),
]


@pytest.mark.parametrize(
    ("kind", "values"), VALUES, ids=lambda value: str(value) if isinstance(value, pa.DataType) else ""
)
@pytest.mark.parametrize(("of_keys", "unit"), [(("k",), "us"), ((), "ns")])
def test_rows_of_all_types_reach_the_function_as_they_are_however_batches_are_cut(
    kind: pa.DataType, values: list[Any], of_keys: tuple[str, ...], unit: str
) -> None:
    schema = pa.schema([("k", pa.int64()), ("t", pa.timestamp(unit)), ("x", kind)])
    rows = [{"k": 1, "t": number, "x": value} for number, value in enumerate(values)]
    batch = pa.RecordBatch.from_pylist(rows, schema=schema)
    made = pa.schema([schema.field("t"), schema.field("x")])
    for window in (TUMBLING, Session(1_000_000)):
        for cut in (1, 2, len(rows)):
            world = World(operator(window, function=AsTheyCame(), made=made, of_keys=of_keys, schema=schema))
            for start in reversed(range(0, len(rows), cut)):
                world.process(batch.slice(start, cut))
            parts = world.snapshot()
            world = World(
                operator(window, function=AsTheyCame(), made=made, of_keys=of_keys, schema=schema), parts=parts
            )
            world.advance(MAX_WATERMARK_US)
            [(_, found)] = world.out.batches
            assert str(found.select(["t", "x"]).to_pylist()) == str(batch.select(["t", "x"]).to_pylist())
            assert found.schema.field("x").type == kind


@settings(max_examples=examples(40))
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 2, None])), min_size=1, max_size=12),
    st.permutations(range(12)),
    st.integers(1, 12),
)
def test_the_order_of_rows_does_not_depend_on_the_order_of_arrival(
    values: list[tuple[int, int | None]], order: list[int], cut: int
) -> None:
    rows = [{"k": 1, "t": t, "v": v} for t, v in values]

    def made(rows: list[dict[str, Any]], cut: int) -> list[dict[str, Any]]:
        world = World(operator())
        batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
        for start in range(0, len(rows), cut):
            world.process(batch.slice(start, cut))
        world.advance(MAX_WATERMARK_US)
        return world.out.rows()

    assert made([rows[index] for index in order if index < len(rows)], cut) == made(rows, len(rows))


class Lived(WindowFunction):
    def __init__(self, fails_in: str = "") -> None:
        self.fails_in = fails_in

    def _at(self, what: str) -> None:
        if self.fails_in == what:
            raise ValueError(what)

    def open(self, context: Any) -> None:
        self.calls = context.metrics.counter("calls")
        self._at("open")

    def process(self, rows: pl.DataFrame, ctx: WindowContext) -> pl.DataFrame | None:
        self.calls.inc()
        self._at("process")
        return None if ctx.key == 1 else rows.select("v", pl.lit("a").alias("s"))

    def close(self) -> None:
        self._at("close")


MADE = schema_of([("s", pa.string()), ("v", pa.int64())])


def test_a_function_is_opened_counts_and_may_return_nothing() -> None:
    world = World(operator(function=Lived(), made=MADE))
    world.process(pa.RecordBatch.from_pylist([{"k": k, "t": 5, "v": k} for k in (2, 1, 2)], schema=SCHEMA))
    world.advance(MAX_WATERMARK_US)
    assert [(row["k"], row["v"], row["s"]) for row in world.out.rows()] == [(2, 2, "a")] * 2
    metrics = world.operator.user_metrics
    assert metrics is not None
    assert metrics.counters == {"calls": 2}
    world.operator.close()
    assert world.failures == []


def test_what_a_function_raises_names_the_key_and_the_window() -> None:
    with pytest.raises(JobError, match="operator 'w': open raised ValueError"):
        World(operator(function=Lived("open"), made=MADE))
    world = World(operator(function=Lived("process"), made=MADE))
    world.process(pa.RecordBatch.from_pylist([{"k": 7, "t": 5, "v": 1}], schema=SCHEMA))
    with pytest.raises(
        JobError,
        match=r"operator 'w': process, for the window of k=7 from 1970-01-01 00:00:00 to 1970-01-01 00:00:00.010000 raised",
    ):
        world.advance(MAX_WATERMARK_US)
    world = World(operator(function=Lived("close"), made=MADE))
    world.operator.close()
    assert [str(each) for each in world.failures] == ["operator 'w': close raised ValueError: close"]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (pl.DataFrame({"v": [1]}), r"column 's'.* \(for the window of k=7"),
        (pl.DataFrame({"v": ["x"], "s": ["a"]}), "column 'v'"),
        ([{"v": 1, "s": "a"}], "process returned a list; return a polars DataFrame"),
    ],
)
def test_a_result_that_does_not_fit_is_refused(returned: Any, message: str) -> None:
    class Returns(WindowFunction):
        def process(self, rows: pl.DataFrame, ctx: WindowContext) -> Any:
            return returned

    world = World(operator(function=Returns(), made=MADE))
    world.process(pa.RecordBatch.from_pylist([{"k": 7, "t": 5, "v": 1}], schema=SCHEMA))
    with pytest.raises((JobError, SchemaError), match=message):
        world.advance(MAX_WATERMARK_US)


def test_bounds_and_keys_are_as_in_the_stream() -> None:
    class Sees(WindowFunction):
        def process(self, rows: pl.DataFrame, ctx: WindowContext) -> pl.DataFrame:
            return pl.DataFrame({"s": [repr((ctx.key, ctx.window_start, ctx.window_end))]})

    schema = schema_of([("k", pa.date32()), ("l", pa.large_string()), ("t", pa.timestamp("ns", "Asia/Tokyo"))])
    row = {"k": date(2024, 1, 1), "l": "a", "t": 5}
    start = datetime(1970, 1, 1, tzinfo=UTC)
    end = start + timedelta(milliseconds=10)
    for of_keys, key in ((("k", "l"), (date(2024, 1, 1), "a")), (("l",), "a"), ((), None)):
        world = World(operator(function=Sees(), made=schema_of([("s", pa.string())]), of_keys=of_keys, schema=schema))
        world.process(pa.RecordBatch.from_pylist([row], schema=schema))
        world.advance(MAX_WATERMARK_US)
        assert [each["s"] for each in world.out.rows()] == [repr((key, start, end))]


def test_a_function_that_returns_nothing_emits_nothing() -> None:
    class Silent(WindowFunction):
        def process(self, rows: pl.DataFrame, ctx: WindowContext) -> None:
            return None

    world = World(operator(function=Silent()))
    world.process(pa.RecordBatch.from_pylist([{"k": 7, "t": 5, "v": 1}], schema=SCHEMA))
    world.advance(MAX_WATERMARK_US)
    assert world.out.batches == []


def test_wrong_arguments_are_refused() -> None:
    class Kept(WindowFunction):
        kept = TableState({"k": int})

    with pytest.raises(JobError, match="operator 'w': Kept declares the state 'kept', but a window function has none"):
        operator(function=Kept(), made=MADE)
    for name in ("k", WINDOW_START):
        with pytest.raises(ConfigError, match=f"operator 'w': two output columns are called '{name}'"):
            operator(made=pa.schema([(name, pa.int64())]))
    with pytest.raises(ConfigError, match="operator 'w': an output column must not be called '__start', as one"):
        operator(made=pa.schema([("__start", pa.int64())]))
    with pytest.raises(SchemaError, match="polars cannot hold"):
        operator(made=pa.schema([("x", pa.decimal256(50))]))


def test_state_of_an_aggregate_is_refused() -> None:
    from test_windows_interrupted import operator as aggregating

    assert aggregating(TUMBLING, 0).state_settings() != operator().state_settings()
