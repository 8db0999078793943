"""A key is the same key for routing, in state, after a restore and in a join, whatever its type: for every operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from operator_world import World, restored

from effort import examples
from key_samples import FOLD_S, is_of_python, key_samples
from midstream.engine.core.arrow_types import schema_of, to_list
from midstream.engine.core.batches import canonical_type, conform
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.errors import InvariantError, JobError, SchemaError
from midstream.engine.core.key_groups import hash_column, key_groups, key_type_supported, subtask_of
from midstream.engine.operators.base import Operator
from midstream.engine.operators.functions.batch_functions import BatchFunctionOperator, KeyedBatchFunction
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.functions.interval_join import interval_join_operator
from midstream.engine.operators.functions.process_functions import (
    BroadcastProcessFunction,
    KeyedProcessFunction,
)
from midstream.engine.operators.windows import window_operator as window_base
from midstream.engine.operators.windows.aggregates import Count, Max, Min
from midstream.engine.operators.windows.window_factory import LATE, Window, session, sliding, tumbling, window_operator
from midstream.engine.state.keyed_states import BroadcastState, ListState, MapState, ReducingState, ValueState
from midstream.engine.state.table_state import TableState
from process_operators import broadcast_process_operator, process_operator

MAX_PARALLELISM = 16
MANY = 2 * 70_000
"""More than fire in one piece, in each of two subtasks."""
assert MANY // 2 > window_base.PIECE_ROWS
MANY_OF = ("int64", "string", "time64[us]", "dictionary<values=string>")
FEW = examples(1_500)
PLANS = [(1, 1), (2, 2), (4, 4), (1, 4), (4, 2)]
"""At how many subtasks the job begins, and at how many it continues after a restore."""
NAMES = list(key_samples(20))


class Subtasks:
    """All subtasks of an operator; rows are dealt out as in a job."""

    def __init__(self, make: Callable[[], Operator], keys: Sequence[str], parallelism: int) -> None:
        self._make, self._keys = make, tuple(keys)
        self.worlds = [
            World(make(), subtask=i, parallelism=parallelism, max_parallelism=MAX_PARALLELISM)
            for i in range(parallelism)
        ]
        self.out: list[pa.RecordBatch] = []
        self.late: list[pa.RecordBatch] = []

    def process(self, batch: pa.RecordBatch, port: int = 0) -> None:
        groups = key_groups(batch, self._keys, MAX_PARALLELISM)
        owners = subtask_of(groups, len(self.worlds), MAX_PARALLELISM)
        for subtask, world in enumerate(self.worlds):
            mine = batch.filter(pa.array(owners == subtask))
            if mine.num_rows:
                world.process(mine, port)

    def advance(self, watermark_us: int) -> None:
        for world in self.worlds:
            world.advance(watermark_us)
        self.collect()

    def restore(self, parallelism: int) -> None:
        self.collect()
        self.worlds = restored(self._make, [world.snapshot() for world in self.worlds], parallelism, MAX_PARALLELISM)

    def collect(self) -> None:
        for world in self.worlds:
            for tag, batch in world.out.batches:
                (self.late if tag == LATE else self.out).append(batch)
            world.out.clear()

    def table(self) -> pa.Table:
        """All that came out."""
        self.collect()
        return pa.Table.from_batches(self.out)


def rows_of(name: str, count: int) -> tuple[pa.RecordBatch, list[str]]:
    """`count` rows of different keys: by `k`, and by `i` too where the type has fewer values."""
    sample = key_samples(count)[name]
    kind = canonical_type(sample.type)
    column = conform(pa.record_batch({"k": sample}), pa.schema([("k", kind)]), "the source").column(0)
    few = len(column) < count
    indices = np.arange(count) % len(column)
    batch = pa.record_batch(
        {
            "k": column.take(pa.array(indices, pa.int64())),
            "i": pa.array(np.arange(count) // len(column) if few else np.arange(count)),
            "t": pa.array(np.zeros(count, np.int64), pa.timestamp("ms")),
            "id": pa.array(np.arange(count)),
        }
    )
    return batch, ["k", "i"] if few else ["k"]


def check_keys_and_counts(made: pa.Table, rows: pa.RecordBatch, n: int) -> None:
    """One row per key, with the key it came with, and `n` rows counted."""
    assert made.num_rows == rows.num_rows
    made = made.sort_by("id").combine_chunks()
    assert made.column("id").to_numpy().tolist() == list(range(rows.num_rows))
    assert made.column("k").type == rows.column("k").type
    assert made.column("k").combine_chunks().equals(rows.column("k"))
    assert set(made.column("n").to_pylist()) == {n}


# ---- windows


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "window", [tumbling("10 s"), sliding("10 s", "5 s"), session("10 s")], ids=["tumbling", "sliding", "session"]
)
def test_windows(window: Window, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_base, "PIECE_ROWS", FEW // 10)  # so that each firing is cut by key group
    rows, keys = rows_of(name, FEW)
    for before, after in PLANS:
        check_window(window, rows, keys, before, after)


@pytest.mark.parametrize("name", NAMES)
def test_large_windows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At full size for some types; for the others both the windows and the pieces that they fire in are smaller."""
    many = MANY
    if name not in MANY_OF:
        many //= 10
        monkeypatch.setattr(window_base, "PIECE_ROWS", window_base.PIECE_ROWS // 10)
    rows, keys = rows_of(name, many)
    aggregates = {"n": Count(), "id": Min("id")}

    def make() -> Operator:
        return window_operator(
            "w", window=tumbling("10 s"), keys=keys, event_time="t", aggregates=aggregates, schema=rows.schema
        )

    job = Subtasks(make, keys, 1)
    job.process(rows.slice(0, many // 2))
    job.restore(2)
    job.process(rows.slice(many // 2))
    job.advance(MAX_WATERMARK_US)
    check_keys_and_counts(job.table(), rows, 1)


def check_window(window: Window, rows: pa.RecordBatch, keys: Sequence[str], before: int, after: int) -> None:
    """Rows of each key, the half of them ahead of a restore, and a late one of some."""

    def make() -> Operator:
        return window_operator(
            "w",
            window=window,
            keys=keys,
            event_time="t",
            aggregates={"n": Count(), "id": Min("id"), "same": Max("id")},
            schema=rows.schema,
            allowed_lateness="1 h",
        )

    combiner = make().combiner(())
    assert combiner is not None
    combined, of = combiner.combine(rows), tuple(keys)
    # A combined row is sent to, and filtered for, the same subtask as the rows that it stands for.
    assert key_groups(combined, of, MAX_PARALLELISM).tolist() == key_groups(rows, of, MAX_PARALLELISM).tolist()
    job = Subtasks(make, keys, before)
    for at in range(0, rows.num_rows, 9_000):
        job.process(rows.slice(at, 9_000))
    if before != after:
        job.restore(after)
    job.process(combined)
    first_end_us = 5_000_000 if window == sliding("10 s", "5 s") else 10_000_000
    job.advance(first_end_us)
    check_keys_and_counts(job.table(), rows, 2)
    assert job.table().column("id").equals(job.table().column("same"))
    # and a late row updates just the window of its key
    job.out.clear()
    job.process(rows.slice(0, 3))
    check_keys_and_counts(job.table(), rows.slice(0, 3), 3)


@pytest.mark.parametrize(
    "key", [pa.timestamp("ns"), pa.timestamp("ns", "UTC"), pa.time64("ns"), pa.duration("ns"), None], ids=str
)
def test_a_late_row_joins_the_session_of_its_own_key_only(key: pa.DataType | None) -> None:
    """Not that of another which is equal to it as a value of Python."""
    if key is None:  # both are half past one in New York
        kind: pa.DataType = pa.timestamp("us", "America/New_York")
        first, second = FOLD_S * 10**6, (FOLD_S + 3600) * 10**6
    else:
        kind, first, second = key, 1, 2
    schema = schema_of([("k", kind), ("t", pa.timestamp("ms")), ("id", pa.int64())])
    aggregates = {"n": Count()}

    def make() -> Operator:
        return window_operator(
            "w", window=session("10 s"), keys=["k"], event_time="t", aggregates=aggregates, schema=schema
        )

    def row(key: int, time_ms: int, id: int) -> pa.RecordBatch:
        column = pa.array([key], pa.int64()).cast(kind)
        return pa.record_batch([column, pa.array([time_ms], pa.timestamp("ms")), pa.array([id])], schema=schema)

    job = Subtasks(make, ["k"], 1)
    job.process(row(first, 20_000, 0))
    job.advance(25_000_000)
    job.process(pa.Table.from_batches([row(second, 11_000, 1), row(first, 11_000, 2)]).combine_chunks().to_batches()[0])
    job.advance(MAX_WATERMARK_US)
    assert [batch.column("id").to_pylist() for batch in job.late] == [[1]]
    assert job.table().column("n").to_pylist() == [2]
    assert job.table().column("k").cast(pa.int64()).to_pylist() == [first]


def test_rows_of_key_groups_of_others_in_a_window_are_never_passed_over() -> None:
    rows, keys = rows_of("int64", MANY)

    def make() -> Operator:
        aggregates = {"n": Count()}
        return window_operator(
            "w", window=tumbling("10 s"), keys=keys, event_time="t", aggregates=aggregates, schema=rows.schema
        )

    world = World(make(), subtask=1, parallelism=4, max_parallelism=MAX_PARALLELISM)
    world.process(rows)  # of all subtasks
    with pytest.raises(InvariantError, match="which owns the key groups 4 to 7, has rows of key groups 0 to 15"):
        world.advance(MAX_WATERMARK_US)


# ---- process functions


class Counts(KeyedProcessFunction):
    """Counts in every kind of state, and emits the counts by a timer."""

    value = ValueState[int](pa.int64(), default=0)
    listed = ListState[int](pa.int64())
    mapped = MapState[int, int](key=pa.int64(), value=pa.int64())
    reduced = ReducingState[int](lambda a, b: a + b)

    def process(self, row: dict[str, Any], ctx: Any) -> None:
        key = ctx.key if isinstance(ctx.key, tuple) else (ctx.key,)
        assert key[0] == row["k"] and getattr(key[0], "fold", 0) == getattr(row["k"], "fold", 0)
        self.value.value += 1
        self.listed.append(row["id"])
        self.mapped[row["id"]] = self.mapped.get(row["id"], 0) + 1
        self.reduced.add(1)
        ctx.timers.event_time(datetime(1970, 1, 1) + timedelta(seconds=1))

    def on_timer(self, time: datetime, ctx: Any) -> dict[str, Any]:
        n = self.value.value
        assert list(self.listed) == [self.listed._list()[0]] * n
        assert dict(self.mapped) == {self.listed._list()[0]: n}
        assert self.reduced.value == n
        key = ctx.key[0] if isinstance(ctx.key, tuple) else ctx.key
        return {"k": key, "n": n, "id": self.listed._list()[0]}


def function_schema(rows: pa.RecordBatch) -> pa.Schema:
    return pa.schema([("k", rows.schema.field("k").type), ("n", pa.int64()), ("id", pa.int64())])


@pytest.mark.parametrize("name", [name for name in NAMES if is_of_python(key_samples(20)[name].type)])
def test_process_functions(name: str) -> None:
    rows, keys = rows_of(name, FEW)

    def make() -> Operator:
        return process_operator(
            "p", Counts(), keys=keys, event_time="t", input_schema=rows.schema, schema=function_schema(rows)
        )

    for before, after in [(1, 1), (4, 4), (1, 4), (4, 2)]:
        job = Subtasks(make, keys, before)
        job.process(rows)
        if before != after:
            job.restore(after)
        job.process(rows)
        job.advance(1_000_000)
        check_keys_and_counts(job.table(), rows, 2)


class Ruled(BroadcastProcessFunction):
    seen = ValueState[int](default=0)
    rules = BroadcastState[int, int]()

    def process(self, row: dict[str, Any], ctx: Any) -> dict[str, Any]:
        self.seen.value += 1
        return {"k": row["k"], "n": self.seen.value + self.rules[0], "id": row["id"]}

    def process_broadcast(self, row: dict[str, Any], ctx: Any) -> None:
        assert ctx.key is None
        self.rules[0] = row["rule"]


@pytest.mark.parametrize("name", ["time64[us]", "timestamp[us, tz=America/New_York]", "int8", "date64[ms]"])
def test_functions_of_a_keyed_stream_with_a_broadcast_one(name: str) -> None:
    rows, keys = rows_of(name, 4_000)
    rule = pa.record_batch({"rule": pa.array([10])})

    def make() -> Operator:
        return broadcast_process_operator(
            "p",
            Ruled(),
            keys=keys,
            event_times=(None, None),
            input_schemas=(rows.schema, rule.schema),
            schema=function_schema(rows),
        )

    job = Subtasks(make, keys, 2)
    for world in job.worlds:
        world.process(rule, 1)
    job.process(rows)
    job.restore(4)
    job.out.clear()
    job.process(rows)
    check_keys_and_counts(job.table(), rows, 12)


def test_two_instants_of_one_wall_clock_time_are_two_keys_with_two_timers() -> None:
    kind = pa.timestamp("us", "America/New_York")
    column = pa.array([FOLD_S * 10**6, (FOLD_S + 3600) * 10**6, FOLD_S * 10**6], pa.int64()).cast(kind)
    first, second, _ = to_list(column)
    assert first == second and first.fold != second.fold, "equal to Python"
    rows = pa.record_batch(
        {"k": column, "t": pa.array([0, 0, 0], pa.timestamp("ms")), "id": pa.array([0, 1, 0])}
    )  # fmt: skip
    schema = function_schema(rows)
    world = World(process_operator("p", Counts(), keys=["k"], event_time="t", input_schema=rows.schema, schema=schema))
    world.process(rows)
    assert world.advance(1_000_000)
    assert [(row["id"], row["n"], row["k"].fold) for row in world.out.rows()] == [(0, 2, 0), (1, 1, 1)]


@pytest.mark.parametrize(
    ("kind", "value"), [(pa.timestamp("us"), 2**62), (pa.duration("ms"), 2**62), (pa.time64("us"), 2**40)]
)
def test_a_key_that_python_cannot_hold_is_refused_naming_its_column(kind: pa.DataType, value: int) -> None:
    rows = pa.record_batch(
        {
            "k": pa.array([value], pa.int64()).view(kind),
            "t": pa.array([0], pa.timestamp("ms")),
            "id": pa.array([0]),
        }
    )
    schema = function_schema(rows)
    world = World(process_operator("p", Counts(), keys=["k"], event_time="t", input_schema=rows.schema, schema=schema))
    with pytest.raises(
        JobError, match=r"operator 'p': a value of the key column 'k', which is .* cannot be represented in Python"
    ):
        world.process(rows)


# ---- functions on batches


@pytest.mark.parametrize("name", NAMES)
def test_functions_on_batches_and_their_tables(name: str) -> None:
    rows, keys = rows_of(name, FEW)
    table_schema = pa.schema([*(rows.schema.field(key) for key in keys), pa.field("seen", pa.int64())])

    class Count(KeyedBatchFunction):
        counts = TableState(table_schema)

        def process(self, rows: pl.DataFrame, ctx: Any) -> pl.DataFrame:
            before = rows.join(self.counts.frame, on=keys, how="left", maintain_order="left")
            made = before.with_columns(n=pl.col("seen").fill_null(0) + 1)
            both = pl.concat([self.counts.frame, made.select(*keys, seen="n")])
            self.counts.frame = both.unique(keys, keep="last", maintain_order=True)
            return made.select("k", "n", "id")

    def make() -> Operator:
        port = Port("process", tuple(keys), "t", rows.schema)
        return BatchFunctionOperator("b", Count(), [port], function_schema(rows))

    for before, after in [(1, 1), (4, 4), (1, 4), (4, 2)]:
        job = Subtasks(make, keys, before)
        job.process(rows)
        job.collect()
        job.out.clear()
        job.restore(after)
        job.process(rows)
        check_keys_and_counts(job.table(), rows, 2)


@pytest.mark.parametrize("name", NAMES)
def test_joins_by_time(name: str) -> None:
    rows, keys = rows_of(name, FEW)
    other = rows.rename_columns([*keys, *(f"{n}2" for n in rows.schema.names[len(keys) :])])

    def make() -> Operator:
        left = Port("process1", tuple(keys), "t", rows.schema)
        right = Port("process2", tuple(keys), "t2", other.schema)
        return interval_join_operator("j", [left, right], 0, 1_000_000)

    for before, after in [(1, 1), (4, 4), (1, 4), (4, 2)]:
        job = Subtasks(make, keys, before)
        job.process(rows)
        if before != after:
            job.restore(after)
        job.process(other, 1)
        table = job.table()
        assert table.column("id").equals(table.column("id2"))
        check_keys_and_counts(table.append_column("n", pa.array([2] * table.num_rows)), rows, 2)


def test_keys_of_other_units_are_not_joined_but_refused() -> None:
    schemas = [schema_of([("k", pa.duration(unit)), (f"t{unit}", pa.timestamp("ms"))]) for unit in ("ms", "us")]
    ports = [Port(f"process{i + 1}", ("k",), schema.names[1], schema) for i, schema in enumerate(schemas)]
    with pytest.raises(SchemaError, match=r"these are duration\[ms\] and duration\[us\]"):
        interval_join_operator("j", ports, 0, 1)


# ---- the canonical form


@pytest.mark.parametrize("name", NAMES)
def test_no_conversion_on_the_way_changes_where_a_key_belongs(name: str) -> None:
    """Neither that of the source, nor that into polars' types."""
    sample = key_samples(5_000)[name]
    column = sample.cast(canonical_type(sample.type))
    hashes = hash_column(column).tolist()
    if key_type_supported(sample.type):
        assert hash_column(sample).tolist() == hashes
    assert (
        hash_column(pl.Series(pl.from_arrow(column)).to_arrow(compat_level=pl.CompatLevel.oldest())).tolist() == hashes
    )
