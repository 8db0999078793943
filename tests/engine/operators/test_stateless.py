"""Filters, projections, functions per row and per batch; event time; sinks."""

from __future__ import annotations

import re
import traceback
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

import numpy as np
import polars as pl
import polars.selectors as cs
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_world import World

from midstream.engine.core.arrow_types import schema_of, to_list
from midstream.engine.core.errors import ConfigError, JobError, SchemaError
from midstream.engine.core.python_values import to_python
from midstream.engine.operators.base import Operator
from midstream.engine.operators.row_functions import (
    FilterFunctionOperator,
    FlatMapOperator,
    MapBatchesOperator,
    MapOperator,
)
from midstream.engine.operators.sink_api import Sink, SinkWriter, WriterContext
from midstream.engine.operators.sink_operator import SinkOperator
from midstream.engine.operators.stateless import FilterOperator, ProjectOperator
from midstream.engine.operators.watermarks import TimestampsOperator, WatermarkStrategy

SCHEMA = schema_of([("n", pa.int64()), ("s", pa.large_string())])
NO_NAME: Any = {"n": "other"}.get
EPOCH = datetime(1970, 1, 1)


def rows(*values: tuple[int | None, str | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"n": n, "s": s} for n, s in values], schema=SCHEMA)


def run(operator: Operator, batch: pa.RecordBatch) -> list[dict[str, Any]]:
    world = World(operator)
    world.process(batch)
    assert all(out.schema == operator.schema for _, out in world.out.batches)  # type: ignore[attr-defined]
    return world.out.rows()


values = st.lists(st.tuples(st.none() | st.integers(-5, 5), st.none() | st.sampled_from(["a", "b"])), max_size=20)


@given(values)
def test_expressions_and_functions_do_what_python_does(given_rows: list[tuple[int | None, str | None]]) -> None:
    batch = rows(*given_rows)
    kept = [{"n": n, "s": s} for n, s in given_rows if n is not None and n > 1]
    assert run(FilterOperator("f", pl.col("n") > 1, SCHEMA), batch) == kept
    assert run(FilterFunctionOperator("f", lambda row: row["n"] is not None and row["n"] > 1, SCHEMA), batch) == kept
    doubled = [{"m": None if n is None else n * 2, "one": 1} for n, _ in given_rows]
    assert (
        run(ProjectOperator("s", [(pl.col("n") * 2).alias("m"), pl.lit(1).alias("one")], SCHEMA, keep=False), batch)
        == doubled
    )
    wider = [{"n": n, "s": "x", "m": None if n is None else -n} for n, _ in given_rows]
    exprs = [pl.lit("x").alias("s"), (-pl.col("n")).alias("m")]
    assert run(ProjectOperator("w", exprs, SCHEMA, keep=True), batch) == wider
    assert run(MapOperator("m", lambda row: {**row, "s": str(row["n"])}, SCHEMA), batch) == [
        {"n": n, "s": str(n)} for n, _ in given_rows
    ]
    assert run(FlatMapOperator("m", lambda row: [row] * (row["n"] or 0), SCHEMA), batch) == [
        {"n": n, "s": s} for n, s in given_rows for _ in range(n or 0)
    ]
    assert run(MapBatchesOperator("b", lambda frame: frame.filter(pl.col("n") > 1), SCHEMA), batch) == kept
    assert run(MapBatchesOperator("b", lambda arrow: arrow, SCHEMA, "arrow"), batch) == batch.to_pylist()


@pytest.mark.parametrize(
    "expr",
    [
        pl.all().max(),
        pl.all().cum_count(),
        pl.all().shift(),
        pl.all().forward_fill(),
        pl.all().sort(),
        pl.exclude("s").rank(),
        pl.exclude("s").sum().over("s"),
        pl.col("n") - pl.col("n").min(),
        pl.col("n") + pl.len(),
        pl.col("n").is_duplicated() & (pl.col("n") > 2),
        pl.col(["n"]).peak_max() & (pl.col("n") > 2),
        (pl.col("^n$") > 3).any(),
        cs.string().str.to_date(strict=False),
        pl.col("s").str.to_date(strict=False).dt.year(),
        cs.string().str.contains("x").any(),
        cs.integer().map_batches(lambda column: column + (column.len() > 4), return_dtype=pl.Int64),
        pl.col("n").map_elements(lambda n: n, return_dtype=pl.Int64) + pl.col("n").shift(),
    ],
)
def test_an_expression_that_depends_on_other_rows_is_refused(expr: pl.Expr) -> None:
    for keep in (False, True):
        with pytest.raises(JobError, match="does not compute each row on its own"):
            ProjectOperator("s", [expr], SCHEMA, keep=keep)


@pytest.mark.parametrize(
    "exprs",
    [
        [pl.col("s"), pl.col("n")],
        [pl.col("s").alias("n"), pl.col("n").alias("s")],
        [pl.all()],
        [pl.col("n") + 1, pl.exclude("n")],
        [pl.struct(pl.all()).alias("both")],
        [pl.any_horizontal(pl.all().is_null()).alias("a_null"), pl.col("s")],
        [pl.when(pl.col("n") > 1).then(pl.col("s")).alias("t")],
        [pl.lit(1).alias("one")],
        [pl.last().alias("z"), pl.nth(0) + 1],
        [pl.col("n"), cs.float().round(2)],
        [pl.col("n").map_elements({1: 11, 2: 12, 4: 14}.get, pl.Int64).alias("by_function")],
    ],
)
@pytest.mark.parametrize("keep", [False, True])
def test_reading_only_what_expressions_need_changes_nothing(exprs: list[pl.Expr], keep: bool) -> None:
    batch = rows((1, "a"), (2, None), (None, "c"), (4, "d"))
    frame = pl.from_arrow(batch)
    assert isinstance(frame, pl.DataFrame)
    made = frame.with_columns(exprs)
    expected = made if keep else made.select(frame.select(exprs).columns)
    assert run(ProjectOperator("p", exprs, SCHEMA, keep=keep), batch) == expected.to_dicts()
    sliced = run(ProjectOperator("p", exprs, SCHEMA, keep=keep), batch.slice(1, 2))
    assert sliced == expected.slice(1, 2).to_dicts()


SELECTORS = [
    *(cs.numeric(), cs.integer(), cs.float(), cs.string(), cs.boolean(), cs.temporal(), cs.nested(), cs.binary()),
    *(
        cs.first(),
        cs.last(),
        cs.by_index(1),
        cs.by_index(-2),
        cs.by_index(0, 2),
        pl.nth(2),
        pl.nth(-1),
        pl.first(),
        pl.last(),
    ),
    *(
        cs.all(),
        cs.by_name("a", "e"),
        cs.by_name("nope", require_all=False),
        cs.matches("[ab]"),
        pl.col("^[bc]$"),
        pl.col("^z$"),
    ),
    *(
        ~cs.numeric(),
        cs.all() - cs.by_name("b"),
        cs.numeric() & cs.first(),
        cs.exclude("a"),
        pl.exclude("e"),
        pl.col(pl.Int64),
    ),
]


@pytest.mark.parametrize("keep", [False, True])
def test_a_selector_gives_the_columns_that_polars_gives_also_if_it_matches_none(keep: bool) -> None:
    frame = pl.DataFrame(
        {"a": [1, None], "b": ["x", None], "c": [1.5, None], "d": [True, None], "e": [None, 2]},
        schema_overrides={"e": pl.Int64},
    )
    batch = frame.to_arrow().combine_chunks().to_batches()[0]
    for selector in SELECTORS:
        for expr in (selector, selector.is_null().name.suffix("_is_null")):
            exprs = [expr, pl.col("c").alias("c again"), pl.col("a").is_null().alias("a is null")]
            expected = frame.with_columns(exprs) if keep else frame.select(exprs)
            assert run(ProjectOperator("p", exprs, batch.schema, keep=keep), batch) == expected.to_dicts(), str(expr)
            if keep:
                made = run(ProjectOperator("p", [expr], batch.schema, keep=True), batch)
                assert made == frame.with_columns(expr).to_dicts(), str(expr)


def test_a_filter_reads_what_its_expression_needs() -> None:
    batch = rows((1, "a"), (2, None), (None, "c"))
    assert run(FilterOperator("f", pl.col("s").is_not_null(), SCHEMA), batch) == [
        {"n": 1, "s": "a"},
        {"n": None, "s": "c"},
    ]
    assert run(FilterOperator("f", ~pl.any_horizontal(pl.all().is_null()), SCHEMA), batch) == [{"n": 1, "s": "a"}]
    assert run(FilterOperator("f", pl.lit(True), SCHEMA), batch) == batch.to_pylist()


def test_a_function_may_go_on_with_a_dict_that_it_has_returned() -> None:
    same: dict[str, Any] = {}

    def fill(row: dict[str, Any]) -> dict[str, Any]:
        same.update(row)
        return same

    def fill_twice(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for s in ("x", "y"):
            same.update(row, s=s)
            yield same

    assert run(MapOperator("m", fill, SCHEMA), rows((1, "a"), (2, "b"))) == [{"n": 1, "s": "a"}, {"n": 2, "s": "b"}]
    assert [row["s"] for row in run(FlatMapOperator("f", fill_twice, SCHEMA), rows((1, "a"), (2, "b")))] == [*"xyxy"]


def test_a_function_may_return_a_dict_of_another_class() -> None:
    batch = rows((1, "a"), (2, "b"))
    assert run(MapOperator("m", lambda row: OrderedDict(reversed(row.items())), SCHEMA), batch) == batch.to_pylist()
    with pytest.raises(JobError, match=r"the row {'n': 1, 's': 'a'} has column 'x', which is not declared"):
        run(MapOperator("m", lambda row: Counter(x=1, **row), SCHEMA), batch)
    with pytest.raises(JobError, match=r"the row {'n': 1, 's': 'a'} has no column 's'"):
        run(MapOperator("m", lambda row: OrderedDict(n=1, x=2), SCHEMA), batch)


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_times_that_a_function_passes_on_swaps_or_changes_come_out_so(unit: Literal["ms", "us", "ns"]) -> None:
    kind = pa.timestamp(unit)
    schema = pa.schema([("t", kind), ("u", kind), ("n", pa.int64())])
    columns = [pa.array([k, k + 10**9, None], pa.int64()).cast(kind) for k in (7_000_000, 7_001_000)]
    batch = pa.RecordBatch.from_arrays([*columns, pa.array([1, 2, 3])], schema=schema)
    given = [{**row, "t": t, "u": u} for row, t, u in zip(batch.to_pylist(), *map(to_python, columns), strict=True)]

    def outcome(function: Callable[[dict[str, Any]], dict[str, Any]]) -> list[dict[str, Any]]:
        world = World(MapOperator("m", function, schema))
        world.process(batch)
        (made,) = [batch for _, batch in world.out.batches]
        values = [to_python(column) for column in made.columns]
        return [dict(zip(schema.names, row, strict=True)) for row in zip(*values, strict=True)]

    later = datetime(2100, 1, 1)
    for function in (
        lambda row: row,
        lambda row: {**row, "t": row["u"], "u": row["t"]},
        lambda row: {**row, "u": later if row["n"] == 2 else row["u"]},
    ):
        assert outcome(function) == [function(row) for row in given]


@pytest.mark.parametrize(
    "expr",
    [
        cs.string().str.to_date("%Y-%m-%d", strict=False),
        pl.col("s").str.split(",").list.eval(pl.element().str.len_chars().sum()),
        pl.col(["n"]).is_in([1, 2]) & (cs.integer() > 1),
        pl.max_horizontal(cs.integer(), 3),
        cs.integer().map_elements(lambda n: n + 1, return_dtype=pl.Int64),
    ],
)
def test_an_expression_that_depends_on_no_other_rows_is_accepted(expr: pl.Expr) -> None:
    ProjectOperator("s", [expr], SCHEMA, keep=False)


def test_what_an_expression_cannot_be_is_reported_on_the_driver() -> None:
    with pytest.raises(SchemaError, match=r"operator 'f': column 'x' is not in the stream's schema \(n, s\)"):
        FilterOperator("f", pl.col("x") > 1, SCHEMA)
    with pytest.raises(SchemaError, match="must be boolean; this one is int64"):
        FilterOperator("f", pl.col("n"), SCHEMA)
    with pytest.raises(JobError, match="does not compute each row on its own"):
        ProjectOperator("s", [pl.col("n").sum()], SCHEMA, keep=False)
    with pytest.raises(SchemaError, match="column 'x' is not in the stream's schema"):
        ProjectOperator("s", [pl.col("n", "x") + 1], SCHEMA, keep=True)
    with pytest.raises(SchemaError, match="operator 's': StructFieldNotFoundError"):
        ProjectOperator("s", [pl.struct("n").struct.field("")], SCHEMA, keep=False)
    with pytest.raises(SchemaError, match=r"operator 's': cannot get the 7-th column when schema has 2 columns"):
        ProjectOperator("s", [pl.nth(7)], SCHEMA, keep=False)
    with pytest.raises(JobError, match="is not a polars expression"):
        ProjectOperator("w", ["n"], SCHEMA, keep=True)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        (pl.col("s").map_batches(lambda column: column + 1, return_dtype=pl.Int64), "TypeError: cannot do arithmetic"),
        (pl.col("s").name.map(NO_NAME), "TypeError: 'None' is not an instance of 'str'"),
    ],
)
def test_a_function_in_an_expression_that_fails_without_rows_is_named(expr: pl.Expr, message: str) -> None:
    where = f"operator 'p': a function in an expression, called without rows for its type, raised {message}"
    with pytest.raises(JobError, match=re.escape(where)):
        ProjectOperator("p", [expr], SCHEMA, keep=False)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda row: {**row, "n": 1 // row["n"]},
            r"operator 'm': the function raised ZeroDivisionError for the row {'n': 0, 's': 'b'}: ",
        ),
        (
            lambda row: row if row["n"] else row["x"],
            r"the function raised KeyError for the row {'n': 0, 's': 'b'}: 'x'",
        ),
        (lambda row: None, r"the result for the row {'n': 1, 's': 'a'} is None; return a dict with the columns n, s"),
        (lambda row: {"n": 1}, r"the row {'n': 1, 's': 'a'} has no column 's'"),
        (lambda row: {**row, "x": 1}, r"the row {'n': 1, 's': 'a'} has column 'x', which is not declared \(n, s\)"),
        (lambda row: {**row, b"n": 1} if row["n"] == 0 else row, r"the row {'n': 0, 's': 'b'} has column b'n', which"),
        (lambda row: {**row, (1,): 1}, r"the row {'n': 1, 's': 'a'} has column \(1,\), which is not declared"),
        (
            lambda row: {**row, "n": "one" if row["n"] == 0 else 1},
            r"the row {'n': 0, 's': 'b'}: column 'n': 'one', declared as int64",
        ),
    ],
)
def test_a_function_that_fails_names_the_operator_and_the_row(function: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        run(MapOperator("m", function, SCHEMA), rows((1, "a"), (0, "b")))


def test_a_time_that_no_datetime_can_hold_is_an_error_that_names_the_operator() -> None:
    schema = pa.schema([("t", pa.timestamp("us", "UTC"))])
    batch = pa.RecordBatch.from_arrays([pa.array([10**18]).view(schema.field("t").type)], schema=schema)
    with pytest.raises(
        JobError, match=r"operator 'm': column 't', timestamp\[us, tz=UTC\], has a value that Python cannot represent"
    ):
        run(MapOperator("m", lambda row: row, schema), batch)


def test_a_map_with_a_key_twice_is_an_error_that_names_the_key_and_the_row() -> None:
    kind = pa.map_(pa.string(), pa.int64())
    batch = pa.record_batch({"n": pa.array([1, 2]), "m": pa.array([[("a", 1)], [("b", 1), ("b", 2)]], kind)})
    message = (
        r"operator 'm': column 'm', map<.*: a map that has 'b' twice as a key, as no dict can; the row is {'n': 2, "
    )
    with pytest.raises(JobError, match=message):
        run(MapOperator("m", lambda row: row, batch.schema), batch)


def test_errors_of_other_functions_name_the_row_or_what_came_back() -> None:
    batch = rows((1, "a"), (0, "b"))
    with pytest.raises(JobError, match=r"ZeroDivisionError for the row {'n': 0, 's': 'b'}") as e:
        run(FilterFunctionOperator("f", lambda row: 1 // row["n"], SCHEMA), batch)
    text = "".join(traceback.format_exception(e.value))
    assert text.index("ZeroDivisionError") < text.index("JobError")
    with pytest.raises(JobError, match=r"returned a dict for the row {'n': 1, 's': 'a'}"):
        run(FlatMapOperator("f", lambda row: row, SCHEMA), batch)  # type: ignore[arg-type,return-value]  # the mistake under test
    with pytest.raises(JobError, match=r"ValueError for the row {'n': 0, 's': 'b'}"):

        def generator(row: dict[str, Any]) -> Any:
            yield row
            if row["n"] == 0:
                raise ValueError("no")

        run(FlatMapOperator("f", generator, SCHEMA), batch)
    with pytest.raises(JobError, match="returned a list"):
        run(MapBatchesOperator("b", lambda frame: [1], SCHEMA), batch)
    with pytest.raises(SchemaError, match=r"column 's' is missing"):
        run(MapBatchesOperator("b", lambda frame: frame.select("n"), SCHEMA), batch)


# ---- event time ----

TIMED = pa.schema([("t", pa.timestamp("ms"))])


def timed(*millis: int | None) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(list(millis), pa.timestamp("ms"))], schema=TIMED)


@given(st.lists(st.lists(st.integers(-1000, 1000), max_size=5), max_size=10), st.integers(0, 50))
def test_no_row_within_the_bound_is_late(batches: list[list[int]], delay_ms: int) -> None:
    world = World(TimestampsOperator("t", "t", WatermarkStrategy.bounded(delay_ms / 1000), TIMED))
    latest = None
    for batch in batches:
        world.process(timed(*batch))
        latest = max([*batch, *([latest] if latest is not None else [])], default=None)
    assert world.out.watermarks == sorted(set(world.out.watermarks))
    assert ([None, *world.out.watermarks])[-1] == (None if latest is None else (latest - delay_ms) * 1000 - 1)


def test_watermarks_follow_their_rows() -> None:
    world = World(TimestampsOperator("t", "t", WatermarkStrategy.monotonous(), TIMED))
    world.process(timed(5, 3))
    assert world.out.batches[0][1].num_rows == 2
    assert world.out.watermarks == [4_999]


def test_a_silent_stream_becomes_idle_once_and_active_with_its_next_row() -> None:
    world = World(TimestampsOperator("t", "t", WatermarkStrategy.monotonous(idle_after="1 s"), TIMED))
    world.advance_clock(1_000_600)
    world.process(timed(1))
    world.advance_clock(1_001_599)
    assert world.out.idles == []
    world.advance_clock(1_005_000)
    assert world.out.idles == [True]
    world.process(timed(2))
    assert world.out.idles == [True, False]
    world.operator.end_input(0)
    world.advance_clock(1_100_000)
    assert world.out.idles == [True, False]


def test_a_stream_that_waited_for_its_output_is_not_idle() -> None:
    world = World(TimestampsOperator("t", "t", WatermarkStrategy.monotonous(idle_after="1 s"), TIMED))
    (_, check, _) = world.alarms.pop()
    world.clock.ms += 5_000  # the task is blocked by back-pressure, and its timer's mail with it
    check()
    assert world.out.idles == [], "rows may wait that event time must not overtake"
    world.advance_clock(world.clock.ms + 999)
    assert world.out.idles == []
    world.advance_clock(world.clock.ms + 1)
    assert world.out.idles == [True]


@pytest.mark.parametrize("set_by_ms", [-3_600_000, 3_600_000])
def test_setting_the_wall_clock_makes_no_stream_idle_and_keeps_none_from_it(set_by_ms: int) -> None:
    world = World(TimestampsOperator("t", "t", WatermarkStrategy.monotonous(idle_after="1 s"), TIMED))
    (_, check, _) = world.alarms.pop()
    world.clock.ms += 900
    world.process(timed(1))
    world.clock.ms += 100
    world.clock.set(set_by_ms)
    check()
    assert world.out.idles == []
    world.advance_clock(world.clock.ms + 899)
    assert world.out.idles == []
    world.advance_clock(world.clock.ms + 1)
    assert world.out.idles == [True]


def test_bad_event_times_are_refused() -> None:
    with pytest.raises(SchemaError, match="'n' is int64, not a timestamp"):
        TimestampsOperator("t", "n", WatermarkStrategy.monotonous(), SCHEMA)
    with pytest.raises(JobError, match=r"operator 't': event-time column 't' is null in the row {'t': None}"):
        run(TimestampsOperator("t", "t", WatermarkStrategy.monotonous(), TIMED), timed(1, None))
    with pytest.raises(ConfigError, match="at least 1 ms"):
        WatermarkStrategy.monotonous(idle_after=0)


# ---- sinks ----


class Recorder(SinkWriter):
    def __init__(self) -> None:
        self.rows: list[int] = []
        self.full = False
        self.wake: Callable[[], None] | None = None
        self.closed = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self.rows.extend(to_list(batch.column("n")))

    def ready(self) -> bool:
        return not self.full

    def on_ready(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def prepare(self, checkpoint_id: int) -> Callable[[], Sequence[bytes]] | None:
        taken, self.rows = self.rows, []
        return (lambda: [str(taken).encode()]) if taken else None

    def close(self) -> None:
        self.closed += 1


class RecorderSink(Sink):
    def writer(self, context: WriterContext) -> SinkWriter:
        return Recorder()


def test_a_sink_hands_what_its_writer_prepared_to_the_checkpoint() -> None:
    world = World(SinkOperator("s", RecorderSink(), SCHEMA))
    world.process(rows((1, "a"), (2, "b")))
    snapshot = world.operator.snapshot(1)
    world.process(rows((3, "c")))
    assert snapshot.complete().committables == (b"[1, 2]",)
    assert world.operator.snapshot(2).complete().committables == (b"[3]",)
    assert world.operator.snapshot(3).complete().committables == ()


def test_a_full_writer_makes_the_task_wait_until_it_wakes_it() -> None:
    world = World(SinkOperator("s", RecorderSink(), SCHEMA))
    writer: Recorder = world.operator._writer  # type: ignore[attr-defined]
    woken: list[bool] = []
    assert world.operator.ready(lambda: woken.append(True))
    writer.full = True
    assert not world.operator.ready(lambda: woken.append(True))
    assert writer.wake is not None
    writer.wake()
    assert woken == [True]


def test_a_sink_is_closed_once_and_also_when_it_never_opened() -> None:
    SinkOperator("s", RecorderSink(), SCHEMA).close()
    world = World(SinkOperator("s", RecorderSink(), SCHEMA))
    writer: Recorder = world.operator._writer  # type: ignore[attr-defined]
    world.operator.close()
    world.operator.close()
    assert writer.closed == 1


def test_rows_give_nanoseconds_as_microseconds_where_none_is_lost() -> None:
    schema = pa.schema([("t", pa.timestamp("ns"))])
    out = pa.schema([("t", pa.timestamp("us"))])
    batch = pa.RecordBatch.from_arrays([pa.array([1_000], pa.timestamp("ns"))], schema=schema)
    assert run(MapOperator("m", lambda row: row, out), batch) == [{"t": EPOCH + timedelta(microseconds=1)}]
    batch = pa.RecordBatch.from_arrays([pa.array([1_999], pa.timestamp("ns"))], schema=schema)
    operators: list[Operator] = [
        MapOperator("m", lambda row: row, out),
        FlatMapOperator("m", lambda row: [row], out),
        FilterFunctionOperator("m", lambda row: True, schema),
    ]
    for operator in operators:
        with pytest.raises(
            JobError, match=r"^operator 'm': column 't', timestamp.ns., has a value that Python cannot represent"
        ):
            run(operator, batch)


def test_times_in_rows_are_datetimes_nulls_none_and_times_beyond_year_9999_an_error() -> None:
    units: list[tuple[Literal["ms", "us", "ns"], int]] = [("ms", 1), ("us", 1000), ("ns", 10**6)]
    for unit, factor in units:
        column = pa.array([-1 * factor, None, 5 * factor], pa.timestamp(unit))
        assert to_python(column) == [EPOCH - timedelta(milliseconds=1), None, EPOCH + timedelta(milliseconds=5)]
    assert to_python(pa.array([None], pa.timestamp("us"))) == [None]
    with pytest.raises((ValueError, OverflowError)):
        to_python(pa.array([2**60], pa.timestamp("ms")))


NESTED = pa.schema([("n", pa.int64()), ("seen", pa.large_list(pa.int64()))])


def test_a_list_in_a_row_is_taken_as_it_is_when_the_row_is_returned() -> None:
    def growing() -> Callable[[dict[str, Any]], dict[str, Any]]:
        seen: list[int] = []

        def function(row: dict[str, Any]) -> dict[str, Any]:
            seen.append(row["n"])
            return {"n": row["n"], "seen": seen}

        return function

    batch = pa.RecordBatch.from_pylist([{"n": n} for n in range(3)], schema=pa.schema([("n", pa.int64())]))
    expected = [{"n": n, "seen": list(range(n + 1))} for n in range(3)]
    one, two = growing(), growing()
    assert run(MapOperator("m", one, NESTED), batch) == expected
    assert run(FlatMapOperator("m", lambda row: [two(row)], NESTED), batch) == expected


@pytest.mark.parametrize("row", [defaultdict(int, n=1), Counter(n=1, zz=5)])
def test_a_row_that_would_make_up_columns_is_refused(row: dict[str, Any]) -> None:
    schema = pa.schema([("n", pa.int64()), ("x", pa.int64())])
    batch = pa.RecordBatch.from_pylist([{"n": 1}], schema=pa.schema([("n", pa.int64())]))
    for operator in (MapOperator("m", lambda _: row, schema), FlatMapOperator("m", lambda _: [row], schema)):
        with pytest.raises(JobError, match=r"operator 'm': the result for the row {'n': 1} has no column 'x'"):
            run(operator, batch)


def test_frames_with_columns_that_arrow_does_not_have_are_refused_by_name() -> None:
    schema = pa.schema([("n", pa.int64())])
    batch = pa.RecordBatch.from_pylist([{"n": 1}], schema=schema)
    for dtype, value in ((pl.Object(), print), (pl.Int128(), 1), (pl.List(pl.Int128), [1])):

        def made(_: pl.DataFrame, dtype: pl.DataType = dtype, value: Any = value) -> pl.DataFrame:
            return pl.DataFrame({"n": pl.Series([value], dtype=dtype)})

        with pytest.raises(SchemaError, match=r"column 'n' is .* in polars, which Arrow does not have"):
            run(MapBatchesOperator("m", made, schema), batch)


def test_a_buffer_that_is_filled_again_is_taken_as_it_is_when_the_row_is_returned() -> None:
    buffer = bytearray(1)
    schema = pa.schema([("b", pa.large_binary())])

    def fill(row: dict[str, Any]) -> dict[str, Any]:
        buffer[0] = 65 + row["n"]
        return {"b": buffer}

    batch = pa.RecordBatch.from_pylist([{"n": n} for n in range(3)], schema=pa.schema([("n", pa.int64())]))
    expected = [{"b": b"A"}, {"b": b"B"}, {"b": b"C"}]
    assert run(MapOperator("m", fill, schema), batch) == expected
    assert run(FlatMapOperator("m", lambda row: [fill(row)], schema), batch) == expected


def test_a_slice_of_lists_of_fixed_size_with_nulls_goes_through_expressions() -> None:
    schema = pa.schema([("v", pa.list_(pa.int8(), 2))])
    batch = pa.RecordBatch.from_arrays([pa.array([[1, 2], None, [3, 4], None], schema.field("v").type)], schema=schema)
    for part in (batch, batch.slice(1, 2), batch.slice(0, 2)):
        expected = [row for row in part.to_pylist() if row["v"] is not None]
        assert run(FilterOperator("f", pl.col("v").is_not_null(), schema), part) == expected


def test_an_expression_that_fails_names_the_row() -> None:
    schema = schema_of([("n", pa.int64()), ("s", pa.large_string())])
    batch = pa.RecordBatch.from_pylist([{"n": i, "s": "x" if i == 700 else str(i)} for i in range(1000)], schema=schema)
    cast = pl.col("s").cast(pl.Int64)
    for operator in (
        ProjectOperator("p", [cast], schema, keep=True),
        FilterOperator("p", cast > 3, schema),
    ):
        with pytest.raises(JobError, match=r"operator 'p': .* for the row {'n': 700, 's': 'x'}: conversion from") as e:
            run(operator, batch)
        assert e.value.row == 700


def test_long_values_and_wide_rows_are_shortened() -> None:
    schema = pa.schema([(f"c{i}", pa.large_string()) for i in range(100)])
    batch = pa.RecordBatch.from_pylist([{f"c{i}": "y" * 10_000 for i in range(100)}], schema=schema)
    with pytest.raises(JobError) as e:
        run(MapOperator("m", lambda row: None, schema), batch)  # type: ignore[arg-type,return-value]  # the mistake under test
    assert len(str(e.value)) < 1500
    assert "more columns}" in str(e.value)


async def never(row: dict[str, Any]) -> bool:
    return False


@pytest.mark.parametrize(
    ("predicate", "kind"),
    [
        (lambda row: row["s"].isdigit, "a builtin_function_or_method"),
        (lambda row: lambda: False, "a function"),
        (lambda row: (row["s"] == wanted for wanted in ("x", "y")), "a generator"),
        (lambda row: map(bool, (0, 0)), "a map"),
        (never, "a coroutine"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine 'never' was never awaited")
def test_a_filter_that_returns_what_is_always_true_is_refused(predicate: Callable[..., Any], kind: str) -> None:
    with pytest.raises(
        JobError, match=f"for the row {{'n': 1, 's': 'a'}}: .*returned {kind}, which is true for every row"
    ):
        run(FilterFunctionOperator("f", predicate, SCHEMA), rows((1, "a")))


def test_a_filter_keeps_the_rows_for_which_its_function_is_true() -> None:
    answers: list[Any] = [
        True,
        False,
        None,
        0,
        1,
        "",
        "no",
        [],
        [0],
        np.bool_(True),
        np.bool_(False),
    ]
    found = run(
        FilterFunctionOperator("f", lambda row: answers[row["n"]], SCHEMA),
        rows(*((n, "a") for n in range(len(answers)))),
    )
    assert [row["n"] for row in found] == [n for n, answer in enumerate(answers) if answer]
    assert (
        run(FilterFunctionOperator("f", lambda row: re.match("a", row["s"]), SCHEMA), rows((1, "ab"), (2, "b")))[0]["n"]
        == 1
    )


def test_a_row_that_a_generator_returns_is_not_lost_silently() -> None:
    def both(row: dict[str, Any]) -> Any:
        yield row
        if row["n"] == 2:
            return [row]
        return None

    assert run(FlatMapOperator("f", both, SCHEMA), rows((1, "a"), (3, "b"))) == [{"n": 1, "s": "a"}, {"n": 3, "s": "b"}]
    with pytest.raises(
        JobError, match=r"for the row {'n': 2, 's': 'b'}: .*that yields rows returned a list, which would be"
    ):
        run(FlatMapOperator("f", both, SCHEMA), rows((1, "a"), (2, "b")))
