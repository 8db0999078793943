"""Functions on batches: tables as state, watermarks, snapshots and rescales in between, errors."""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import Parts, World, restored

from effort import examples
from midstream.engine.core.arrow_types import TimestampType, schema_of
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.errors import JobError, SchemaError
from midstream.engine.core.key_groups import key_groups, subtask_of
from midstream.engine.operators.functions.batch_functions import (
    BatchFunctionOperator,
    CoBatchFunction,
    KeyedBatchFunction,
)
from midstream.engine.operators.functions.function_operator import Port, two_ports
from midstream.engine.operators.functions.process_functions import KeyedProcessFunction
from midstream.engine.state.keyed_states import ValueState
from midstream.engine.state.table_state import TableState
from process_operators import process_operator

IN = schema_of([("k", pa.large_string()), ("t", pa.timestamp("ms")), ("v", pa.int64())])
OUT = schema_of([("k", pa.large_string()), ("v", pa.int64()), ("n", pa.int64())])
EPOCH = datetime(1970, 1, 1)
MAX_PARALLELISM = 8
HELD_MS = 10


def batch(*rows: tuple[str, int, int | None]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    arrays = [pa.array(list(values), field.type) for values, field in zip(columns, IN, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=IN)


def operator_of(
    function: KeyedBatchFunction,
    *,
    keys: Sequence[str] = ("k",),
    event_time: str | None = "t",
    input_schema: pa.Schema = IN,
    schema: pa.Schema = OUT,
) -> Any:
    return BatchFunctionOperator("held", function, [Port("process", tuple(keys), event_time, input_schema)], schema)


class Held(KeyedBatchFunction):
    """Numbers the rows of each key, and holds them until event time has passed them by a while."""

    rows = TableState({"k": str, "t": pa.timestamp("ms"), "v": int, "n": int})
    counts = TableState({"k": str, "n": int})

    def process(self, rows: pl.DataFrame, ctx: Any) -> None:
        numbered = rows.join(self.counts.frame, on="k", how="left", maintain_order="left").with_columns(
            n=pl.col("n").fill_null(0) + pl.int_range(1, pl.len() + 1).over("k")
        )
        self.rows.append(numbered)
        counts = numbered.group_by("k").agg(pl.col("n").last())
        self.counts.frame = self.counts.frame.update(counts, on="k", how="full")

    def on_watermark(self, ctx: Any) -> pl.DataFrame:
        held = self.rows.frame
        is_due = pl.col("t").dt.offset_by(f"{HELD_MS}ms") <= ctx.watermark
        self.rows.frame = held.filter(~is_due)
        return held.filter(is_due).select("k", "v", "n")


def expected(plan: list[tuple[str, Any]]) -> list[tuple[str, int, int]]:
    """The same without an engine, when the stream has ended."""
    counts: dict[str, int] = defaultdict(int)
    made = []
    for step, argument in plan:
        for key, _, value in argument if step == "rows" else ():
            counts[key] += 1
            made.append((key, value, counts[key]))
    return made


ROW = st.tuples(st.sampled_from("abcde"), st.integers(0, 100), st.integers(-5, 5))
STEP = st.one_of(
    st.tuples(st.just("rows"), st.lists(ROW, min_size=1, max_size=6)),
    st.tuples(st.just("advance"), st.integers(0, 120)),
    st.tuples(st.just("restore"), st.integers(1, 4)),
)


@settings(max_examples=examples(150))
@given(st.lists(STEP, max_size=15))
def test_rows_are_held_and_numbered_as_in_plain_python_through_snapshots_and_rescales(
    plan: list[tuple[str, Any]],
) -> None:
    worlds = [World(operator_of(Held()), max_parallelism=MAX_PARALLELISM)]
    found: list[tuple[str, int, int]] = []
    watermark = -1
    waiting: Counter[int] = Counter()  # when the rows that are held will be due

    def drain() -> None:
        for world in worlds:
            found.extend((row["k"], row["v"], row["n"]) for row in world.out.rows())
            world.out.clear()

    for step, argument in plan:
        if step == "rows":
            waiting.update(time + HELD_MS for _, time, _ in argument)
            keys = pa.record_batch({"k": pa.array([row[0] for row in argument], pa.large_string())})
            owners = subtask_of(key_groups(keys, ("k",), MAX_PARALLELISM), len(worlds), MAX_PARALLELISM)
            for subtask, world in enumerate(worlds):
                mine = [row for row, owner in zip(argument, owners, strict=True) if owner == subtask]
                if mine:
                    world.process(batch(*mine))
        elif step == "advance":
            watermark = max(watermark, argument)
            for world in worlds:
                world.advance(watermark * 1000)
            drain()
            waiting = Counter({due: n for due, n in waiting.items() if due > watermark})
        else:
            worlds = restored(
                lambda: operator_of(Held()), [world.snapshot() for world in worlds], argument, MAX_PARALLELISM
            )
        held = sum(world.operator._function.rows.frame.height for world in worlds)  # type: ignore[attr-defined]
        assert held == waiting.total()
    for world in worlds:
        world.advance(MAX_WATERMARK_US)
    drain()
    assert Counter(found) == Counter(expected(plan))


class Pairs(CoBatchFunction):
    """Every row of one input with every row of the other of the same key."""

    left = TableState({"k": str, "t": pa.timestamp("ms"), "v": int})
    right = TableState({"k": str, "n": int})

    def process1(self, rows: pl.DataFrame, ctx: Any) -> pl.DataFrame:
        self.left.append(rows)
        return rows.join(self.right.frame, on="k").select("k", "v", "n")

    def process2(self, rows: pl.DataFrame, ctx: Any) -> pa.Table:
        named = rows.rename({"other": "k"})
        self.right.append(named)
        return named.join(self.left.frame, on="k").select("n", "v", "k").to_arrow()


RIGHT = schema_of([("n", pa.int64()), ("other", pa.large_string())])


def pairs() -> Any:
    return BatchFunctionOperator("pairs", Pairs(), two_ports((["k"], ["other"]), ("t", None), (IN, RIGHT)), OUT)


def right(*rows: tuple[str, int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"n": n, "other": key} for key, n in rows], schema=RIGHT)


def test_two_inputs_share_the_tables_under_the_keys_of_the_first_through_a_rescale() -> None:
    world = World(pairs(), max_parallelism=MAX_PARALLELISM)
    world.process(batch(("a", 0, 1), ("b", 0, 2)), 0)
    world.process(right(("a", 10), ("c", 30)), 1)
    assert world.out.rows() == [{"k": "a", "v": 1, "n": 10}]
    parts = world.snapshot()
    assert set(parts) == {"table:left", "table:right"}
    worlds = restored(pairs, [parts], 3, MAX_PARALLELISM)
    owner = {}
    for key in "abc":
        group = key_groups(pa.record_batch({"k": pa.array([key], pa.large_string())}), ("k",), MAX_PARALLELISM)
        owner[key] = int(subtask_of(group, 3, MAX_PARALLELISM)[0])
    worlds[owner["c"]].process(batch(("c", 0, 3)), 0)
    worlds[owner["a"]].process(right(("a", 11)), 1)
    assert worlds[owner["c"]].out.rows()[0] == {"k": "c", "v": 3, "n": 30}
    assert worlds[owner["a"]].out.rows()[-1] == {"k": "a", "v": 1, "n": 11}


def test_a_table_that_stays_the_same_keeps_its_chunks_and_an_empty_one_has_none() -> None:
    world = World(operator_of(Held()))
    assert world.snapshot() == {}
    world.process(batch(("a", 0, 1)))
    first = world.snapshot()
    world.advance(HELD_MS * 1000)  # what was held is gone, what was counted is not
    second = world.snapshot()
    assert set(second) == {"table:counts"}
    assert second["table:counts"].chunks[0].id == first["table:counts"].chunks[0].id


class Asks(KeyedBatchFunction):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def process(self, rows: pl.DataFrame, ctx: Any) -> None:
        self.seen.append((ctx.watermark, ctx.now))

    def on_watermark(self, ctx: Any) -> None:
        self.seen.append(ctx.watermark)


def test_the_watermark_is_the_beginning_of_time_at_first_and_the_end_of_time_at_the_end() -> None:
    world = World(operator_of(Asks()))
    world.process(batch(("a", 0, 1)))
    world.advance(7_000)
    world.process(batch(("a", 0, 1)))
    world.advance(MAX_WATERMARK_US)
    now = EPOCH + timedelta(milliseconds=world.clock.ms)
    at = EPOCH + timedelta(milliseconds=7)
    assert world.operator._function.seen == [(datetime.min, now), at, (at, now), datetime.max]  # type: ignore[attr-defined]


def test_times_of_a_stream_with_a_zone_are_aware() -> None:
    zoned = IN.set(1, pa.field("t", pa.timestamp("ms", "Europe/Berlin")))
    world = World(operator_of(Asks(), input_schema=zoned))
    world.advance(7_000)
    seen = world.operator._function.seen  # type: ignore[attr-defined]
    assert seen == [datetime(1970, 1, 1, 0, 0, 0, 7000, UTC)]


class OnTime(KeyedBatchFunction):
    """Drops late rows."""

    def process(self, rows: pl.DataFrame, ctx: Any) -> pl.DataFrame:
        return rows.filter(pl.col("t") > ctx.watermark).select("k", "v", n="v")


def test_no_row_is_late_before_there_is_a_watermark() -> None:
    world = World(operator_of(OnTime()))
    world.process(batch(("a", 5, 1)))
    world.advance(7_000)
    world.process(batch(("a", 7, 2), ("a", 8, 3)))
    assert [row["v"] for row in world.out.rows()] == [1, 3]


class Until(KeyedBatchFunction):
    """Hands on its rows when event time has come to them, in whatever unit and zone that is."""

    def __init__(self, kind: TimestampType) -> None:
        self._time = pl.col("t").dt.convert_time_zone("UTC") if kind.tz else pl.col("t")
        self._rows = pl.DataFrame()

    def process(self, rows: pl.DataFrame, ctx: Any) -> None:
        self._rows = rows

    def on_watermark(self, ctx: Any) -> pl.DataFrame:
        return self._rows.filter(self._time <= ctx.watermark).select("k", "v", n="v")


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin"])
@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_times_of_every_unit_and_zone_compare_with_the_watermark_even_the_last(
    unit: Literal["ms", "us", "ns"], zone: str | None
) -> None:
    kind = pa.timestamp(unit, zone)
    schema = IN.set(1, pa.field("t", kind))
    world = World(operator_of(Until(kind), input_schema=schema))
    rows = batch(("a", 5, 1), ("a", 9, 2))
    world.process(rows.set_column(1, "t", rows.column("t").cast(pa.timestamp(unit)).view(kind)))
    world.advance(7_000)
    assert [row["v"] for row in world.out.rows()] == [1]
    world.out.clear()
    world.advance(MAX_WATERMARK_US)
    assert [row["v"] for row in world.out.rows()] == [1, 2]


# ---- what is refused -------------------------------------------------------


class Returns(KeyedBatchFunction):
    table = TableState({"k": str, "n": int})

    def __init__(self, what: Any) -> None:
        self._what = what

    def process(self, rows: pl.DataFrame, ctx: Any) -> Any:
        return self._what(self, rows)

    def on_watermark(self, ctx: Any) -> Any:
        return self._what(self, None)


def no_column(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.select("nowhere")


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        (lambda self, rows: [1], JobError, "operator 'held': process returned a list; return a polars DataFrame"),
        (
            lambda self, rows: rows.select("k", "v"),
            SchemaError,
            "operator 'held': the result of process: column 'n' is missing; got k, v",
        ),
        (
            lambda self, rows: no_column(rows),
            JobError,
            "operator 'held': process raised ColumnNotFoundError: .*nowhere",
        ),
        (
            lambda self, rows: setattr(self.table, "frame", rows),
            JobError,
            "operator 'held': process raised SchemaError: state 'table': column 'n' is missing; got k, t, v",
        ),
        (
            lambda self, rows: setattr(self, "table", rows),
            JobError,
            "operator 'held': process raised JobError: 'table' of Returns is a TableState, which cannot be replaced",
        ),
    ],
)
def test_errors_name_the_operator_and_what_was_called(what: Any, error: type, message: str) -> None:
    world = World(operator_of(Returns(what)))
    with pytest.raises(error, match=message):
        world.process(batch(("a", 0, 1)))


def test_an_error_keeps_the_users_traceback_and_names_on_watermark() -> None:
    def what(function: Any, rows: Any) -> None:
        return no_column(pl.DataFrame())  # type: ignore[return-value]

    world = World(operator_of(Returns(what)))
    with pytest.raises(JobError, match="operator 'held': on_watermark raised ColumnNotFoundError") as caught:
        world.advance(1000)
    assert "no_column" in "".join(traceback.format_exception(caught.value))


def test_a_null_key_is_refused_with_its_row() -> None:
    world = World(operator_of(Asks()))
    with pytest.raises(JobError, match=r"operator 'held': key 'k' is null in the row {'k': None, "):
        world.process(batch(("a", 0, 1), (None, 0, 1)))  # type: ignore[arg-type]


def test_a_row_without_its_event_time_is_refused() -> None:
    world = World(operator_of(Asks()))
    rows = batch(("a", 0, 1), ("b", 0, 1))
    times = pa.array([0, None], IN.field("t").type)
    with pytest.raises(
        JobError, match=r"operator 'held': event-time column 't' is null in the row {'k': 'b', 't': None, 'v': 1}"
    ):
        world.process(rows.set_column(1, "t", times))


def test_a_row_under_a_foreign_key_fails_the_snapshot_and_not_before() -> None:
    def what(function: Any, rows: Any) -> None:
        function.table.append(pl.DataFrame({"k": list("abcdefgh"), "n": [1] * 8}))

    world = World(operator_of(Returns(what)), subtask=1, parallelism=2)
    world.process(batch(("a", 0, 1)))
    [chunk] = world.operator.snapshot(1).complete().parts["table:table"].chunks
    with pytest.raises(JobError, match=r"operator 'held': state 'table' holds \d rows of keys that belong to other"):
        chunk.stored  # noqa: B018  # it is made now


class WithoutKey(Asks):
    table = TableState({"user": str, "n": int})


class WithOtherKey(Asks):
    table = TableState({"k": int})


class WithValue(Asks):
    value = ValueState(pa.int64())


class ByRow(KeyedProcessFunction):
    table = TableState({"k": str})

    def process(self, row: Any, ctx: Any) -> None: ...


def test_states_that_do_not_go_with_the_function_or_its_keys_are_refused_when_it_is_built() -> None:
    with pytest.raises(
        SchemaError, match=r"operator 'held': TableState 'table' has no column 'k', .*\(it has user, n\)"
    ):
        operator_of(WithoutKey())
    with pytest.raises(SchemaError, match=r"column 'k' of TableState 'table' is int64, the key .* is large_string"):
        operator_of(WithOtherKey())
    with pytest.raises(
        JobError, match=r"ValueState 'value' holds the state of one key at a time.*declare a TableState"
    ):
        operator_of(WithValue())
    with pytest.raises(JobError, match=r"TableState 'table' is for functions on batches \(process_batches"):
        process_operator("x", ByRow(), keys=["k"], event_time=None, input_schema=IN, schema=OUT)


def test_a_table_that_is_declared_no_more_is_refused() -> None:
    world = World(operator_of(Held()))
    world.process(batch(("a", 0, 1)))
    parts: Parts = world.snapshot()
    with pytest.raises(JobError, match="the checkpoint holds table state 'counts', which Asks does not declare"):
        World(operator_of(Asks()), parts={"table:counts": parts["table:counts"]})


def test_its_settings_are_the_columns_of_each_table_and_the_key() -> None:
    assert operator_of(Held()).state_settings() == {
        "table:rows": {"table state 'rows'": "k large_string, t timestamp[ms], v int64, n int64"},
        "table:counts": {"table state 'counts'": "k large_string, n int64"},
        "": {"the key": "k large_string"},
    }


class Closes(Asks):
    def open(self, context: Any) -> None:
        raise ValueError("no model")


def test_an_error_in_open_is_named() -> None:
    with pytest.raises(JobError, match="operator 'held': open raised ValueError: no model"):
        World(operator_of(Closes()))
