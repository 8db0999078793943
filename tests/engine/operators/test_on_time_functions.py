"""Duplicates and the order of time: the same rows as one after another, wherever batches are cut and whatever restores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import Parts, World, restored

from effort import examples
from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.core.errors import JobError
from midstream.engine.core.key_groups import key_groups, subtask_of
from midstream.engine.operators.event_time_column import TimeColumn
from midstream.engine.operators.functions.duplicates import drop_duplicates_operator
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.functions.time_sort import sort_by_time_operator
from midstream.engine.operators.windows.window_specs import LATE

MAX_PARALLELISM: Final = 8
KEYS: Final = ("k", "name")
Row = tuple[int, int, int]
"""Key, time in microseconds, number."""


def schema_of(unit: str, zone: str | None) -> pa.Schema:
    return pa.schema(
        [("k", pa.int32()), ("t", pa.timestamp(unit, zone)), ("name", pa.large_string()), ("n", pa.int64())]
    )


class Job:
    """The subtasks of one operator, and what they have emitted."""

    def __init__(self, make: Callable[[Port], Any], unit: str, zone: str | None, *, is_end: bool) -> None:
        self.schema = schema_of(unit, zone)
        self.per_us = {"ms": 0.001, "us": 1, "ns": 1000}[unit]
        self._is_end = is_end
        self._make = lambda: make(Port("process", KEYS, TimeColumn("t", is_end), self.schema))
        self.worlds = [World(self._make(), max_parallelism=MAX_PARALLELISM)]
        self.reached = [MIN_WATERMARK_US]
        self.out: list[int] = []
        self.late: list[int] = []

    def owners(self, rows: list[Row]) -> list[int]:
        groups = key_groups(self._batch(rows), KEYS, MAX_PARALLELISM)
        return subtask_of(groups, len(self.worlds), MAX_PARALLELISM).tolist()

    def _batch(self, rows: list[Row]) -> pa.RecordBatch:
        times = [int(t * self.per_us) + self._is_end for _, t, _ in rows]
        columns = [
            pa.array([k // 2 for k, _, _ in rows], pa.int32()),
            pa.array(times, pa.int64()).cast(self.schema.field("t").type),
            pa.array([f"name {k % 2}" for k, _, _ in rows], pa.large_string()),
            pa.array([n for _, _, n in rows], pa.int64()),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def process(self, rows: list[Row], cut: int) -> None:
        owners = self.owners(rows) if rows else []
        for number, world in enumerate(self.worlds):
            mine = [row for row, owner in zip(rows, owners, strict=True) if owner == number]
            for start in range(0, len(mine), cut):
                world.process(self._batch(mine[start : start + cut]))
        self.drain()

    def advance(self, subtask: int, watermark_us: int) -> int:
        """Advance one subtask; returns the watermark that it then has."""
        self.reached[subtask] = max(self.reached[subtask], watermark_us)
        self.worlds[subtask].advance(self.reached[subtask])
        self.drain()
        return self.reached[subtask]

    def restore(self, parallelism: int) -> None:
        parts: list[Parts] = [world.snapshot() for world in self.worlds]
        self.worlds = restored(self._make, parts, parallelism, MAX_PARALLELISM)
        self.reached = [MIN_WATERMARK_US] * parallelism

    def drain(self) -> None:
        for world in self.worlds:
            self.out += [row["n"] for row in world.out.rows()]
            self.late += [row["n"] for row in world.out.rows(LATE)]
            world.out.clear()

    def rows_in_state(self, name: str) -> int:
        return sum(world.operator.contents()[name].height for world in self.worlds)  # type: ignore[attr-defined]


TIMES = st.integers(0, 30)
STEP = st.one_of(
    st.tuples(
        st.just("rows"), st.tuples(st.lists(st.tuples(st.integers(0, 3), TIMES), max_size=12), st.integers(1, 12))
    ),
    st.tuples(st.just("advance"), st.tuples(st.integers(0, 2), TIMES)),
    st.tuples(st.just("restore"), st.integers(1, 3)),
)
PLAN = st.lists(STEP, max_size=14)
COLUMN = st.sampled_from([("ms", None), ("us", "Europe/Berlin"), ("ns", None)])


def run(job: Job, plan: list[tuple[str, Any]], step_us: int, took: Callable[[Row], None], passed: Any) -> list[int]:
    """Run the plan. `took` gets each row that is on time, in its order, `passed` each key and its new watermark; returns
    the numbers of the late rows.
    """
    marks = dict.fromkeys(range(4), MIN_WATERMARK_US)
    every_key = [(key, 0, 0) for key in marks]
    late: list[int] = []
    came = 0
    for step, argument in plan:
        if step == "rows":
            given, cut = argument
            rows = [(k, t * step_us, came + i) for i, (k, t) in enumerate(given)]
            came += len(rows)
            for row in rows:
                if row[1] <= marks[row[0]]:
                    late.append(row[2])
                else:
                    took(row)
            job.process(rows, cut)
        elif step == "advance":
            subtask = argument[0] % len(job.worlds)
            reached = job.advance(subtask, argument[1] * step_us)
            for (key, _, _), owner in zip(every_key, job.owners(every_key), strict=True):
                if owner == subtask:
                    marks[key] = max(marks[key], reached)
                    passed(key, marks[key])
        else:
            job.restore(argument)
    return late


@settings(max_examples=examples(150))
@given(PLAN, st.one_of(st.none(), st.integers(0, 12)), COLUMN, st.booleans())
def test_the_first_row_is_kept_and_each_that_is_not_near_a_kept_one(
    plan: list[tuple[str, Any]], within: int | None, column: tuple[str, str | None], is_end: bool
) -> None:
    step_us = 1000
    job = Job(
        lambda port: drop_duplicates_operator("d", port, None if within is None else within * step_us),
        *column,
        is_end=is_end,
    )
    kept: list[Row] = []
    times: dict[int, list[int]] = {}

    def took(row: Row) -> None:
        of_key = times.setdefault(row[0], [])
        if not of_key if within is None else all(abs(t - row[1]) > within * step_us for t in of_key):
            of_key.append(row[1])
            kept.append(row)

    def passed(key: int, mark: int) -> None:
        if within is not None:
            times[key] = [t for t in times.get(key, []) if t + within * step_us > mark]

    if within is None:
        plan = [step for step in plan if step[0] != "advance"]  # it has no event time
    late = run(job, plan, step_us, took, passed)
    assert (sorted(job.out), sorted(job.late)) == ([n for _, _, n in kept], late)
    assert job.rows_in_state("kept") == sum(map(len, times.values()))
    if within is not None:
        for subtask in range(len(job.worlds)):
            job.advance(subtask, MAX_WATERMARK_US)
        assert job.rows_in_state("kept") == 0


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10_000)), min_size=1, max_size=80),
    st.integers(0, 5_000),
    st.integers(1, 80),
)
def test_long_chains_of_rows_in_any_order_are_those_of_one_row_at_a_time(
    given: list[tuple[int, int]], within: int, cut: int
) -> None:
    def kept_of(cut: int) -> list[int]:
        job = Job(lambda port: drop_duplicates_operator("d", port, within), "us", None, is_end=False)
        job.process([(k, t, n) for n, (k, t) in enumerate(given)], cut)
        return job.out

    assert kept_of(cut) == kept_of(1) == kept_of(len(given))


@settings(max_examples=examples(150))
@given(PLAN, COLUMN, st.booleans())
def test_rows_of_a_key_leave_in_the_order_of_time_once_it_has_passed_them(
    plan: list[tuple[str, Any]], column: tuple[str, str | None], is_end: bool
) -> None:
    job = Job(lambda port: sort_by_time_operator("s", port), *column, is_end=is_end)
    waiting: list[Row] = []
    expected: dict[int, list[int]] = {key: [] for key in range(4)}
    key_of: dict[int, int] = {}

    def took(row: Row) -> None:
        waiting.append(row)
        key_of[row[2]] = row[0]

    def passed(key: int, mark: int) -> None:
        due = sorted((row for row in waiting if row[0] == key and row[1] <= mark), key=lambda row: row[1:])
        for row in due:
            waiting.remove(row)
        expected[key] += [n for _, _, n in due]

    late = run(job, plan, 1000, took, passed)
    found: dict[int, list[int]] = {key: [] for key in range(4)}
    for n in job.out:
        found[key_of[n]].append(n)
    assert (found, sorted(job.late)) == (expected, late)
    assert job.rows_in_state("waiting") == len(waiting)


@pytest.mark.parametrize("make", [sort_by_time_operator, lambda name, port: drop_duplicates_operator(name, port, 0)])
def test_what_is_late_by_a_part_of_a_microsecond_is_late(make: Any) -> None:
    """Event time is in microseconds: the nanoseconds of the last one have been passed, too."""
    schema = pa.schema([("k", pa.int64()), ("t", pa.timestamp("ns"))])
    world = World(make("f", Port("process", ("k",), "t", schema)))

    def times(*ns: int) -> pa.RecordBatch:
        at = pa.array(ns, pa.int64()).cast(pa.timestamp("ns"))
        return pa.RecordBatch.from_arrays([pa.array([1] * len(ns)), at], schema=schema)

    world.process(times(1_999, 1_001, 2_000, -1))
    world.advance(1)
    emitted = [value for tag, batch in world.out.batches for value in batch.column("t").cast(pa.int64()).to_pylist()]
    assert emitted in ([-1, 1_001, 1_999], [1_999, 1_001, 2_000, -1])
    world.out.clear()
    world.process(times(1_500))
    assert [tag for tag, _ in world.out.batches] == [LATE]
    world.advance(2)
    assert all(frame.is_empty() for frame in world.operator.contents().values())  # type: ignore[attr-defined]


FIELDS: list[tuple[str, pa.DataType]] = [
    ("k", pa.int64()),
    ("t", pa.timestamp("us")),
    ("x", pa.float64()),
    ("d", pa.decimal128(5, 2)),
    ("b", pa.large_binary()),
    ("at", pa.time32("s")),
    ("for", pa.duration("ns")),
    ("ok", pa.bool_()),
    ("all", pa.large_list(pa.int64())),
    ("in", pa.struct([("y", pa.float32())])),
    ("none", pa.null()),
]
ODD = pa.schema(FIELDS)


def test_ties_are_broken_by_the_other_columns_whatever_their_types() -> None:
    rows: list[dict[str, Any]] = [
        {"k": 1, "t": 5, "x": float("nan"), "all": [1], "in": {"y": 1.0}},
        {"k": 1, "t": 5, "x": None},
        {"k": 1, "t": 5, "x": 2.0, "ok": False},
        {"k": 1, "t": 5, "x": 2.0, "b": b"a", "at": 3, "for": 1, "ok": True},
    ]
    batch = pa.RecordBatch.from_pylist(rows, schema=ODD)
    orders = []
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        world = World(sort_by_time_operator("s", Port("process", ("k",), "t", ODD)))
        for row in order:
            world.process(batch.slice(row, 1))
        world.advance(5)
        orders.append([(repr(row["x"]), row["ok"]) for row in world.out.rows()])
    assert orders[0] == orders[1] == orders[2]
    assert orders[0][0][0] == "None"


def test_keys_of_many_types_are_compared_as_they_are() -> None:
    """Each column alone, and with another: two equal rows among different ones."""
    fields: list[tuple[str, pa.DataType]] = [
        ("a", pa.large_binary()),
        ("b", pa.time32("ms")),
        ("c", pa.date32()),
        ("time", pa.timestamp("ns", "Asia/Tokyo")),
        ("e", pa.bool_()),
        ("f", pa.uint64()),
        ("g", pa.duration("ms")),
    ]
    schema = pa.schema(fields)
    rows = [
        {"a": b"\0", "b": 1, "c": 1, "time": 2**62, "e": True, "f": 2**64 - 1, "g": 1},
        {"a": b"", "b": 2, "c": 2, "time": 2**62 + 1, "e": False, "f": 0, "g": -1},
        {"a": b"\0", "b": 1, "c": 1, "time": 2**62, "e": True, "f": 2**64 - 1, "g": 1},
    ]
    batch = pa.RecordBatch.from_pylist(rows, schema=schema)
    for keys in [(name,) for name in schema.names] + [tuple(schema.names)]:
        for within in (None, 10):
            time = None if within is None else "time"
            for cut in (1, 3):
                world = World(drop_duplicates_operator("d", Port("process", keys, time, schema), within))
                for start in range(0, 3, cut):
                    world.process(batch.slice(start, cut))
                assert pa.Table.from_batches([made for _, made in world.out.batches]).equals(
                    pa.Table.from_batches([batch.slice(0, 2)])
                ), (keys, within, cut)


def test_a_null_key_and_a_null_time_are_refused_with_their_row() -> None:
    schema = schema_of("us", None)
    for row, message in (
        ({"k": None, "t": 1, "name": "a", "n": 7}, r"operator 'd': key 'k' is null in the row .*'n': 7"),
        ({"k": 1, "t": None, "name": "a", "n": 7}, r"operator 'd': event-time column 't' is null in the row .*'n': 7"),
    ):
        world = World(drop_duplicates_operator("d", Port("process", KEYS, "t", schema), 5))
        with pytest.raises(JobError, match=message):
            world.process(pa.RecordBatch.from_pylist([row], schema=schema))


@pytest.mark.parametrize("within", [0, 2**63, 10**30])
def test_the_first_and_the_last_times_are_compared_like_others(within: int) -> None:
    first, last = -62_135_596_800_000_000, 253_402_300_799_999_999
    schema = pa.schema([("k", pa.int64()), ("t", pa.timestamp("us"))])
    world = World(drop_duplicates_operator("d", Port("process", ("k",), "t", schema), within))
    at = pa.array([last, first, last], pa.int64()).cast(pa.timestamp("us"))
    world.process(pa.RecordBatch.from_arrays([pa.array([1, 1, 1]), at], schema=schema))
    assert sum(batch.num_rows for _, batch in world.out.batches) == (2 if within == 0 else 1)
    world.advance(last)
    assert world.operator.contents()["kept"].height == (0 if within == 0 else 1)  # type: ignore[attr-defined]
    world.advance(MAX_WATERMARK_US)
    assert world.operator.contents()["kept"].height == 0  # type: ignore[attr-defined]


def test_a_batch_of_many_rows_of_one_key_is_decided_like_its_rows() -> None:
    """A thousand rows a second apart within ten seconds: every eleventh is kept."""
    times = np.arange(1000) * 1_000_000
    job = Job(lambda port: drop_duplicates_operator("d", port, 10_000_000), "us", None, is_end=False)
    job.process([(1, int(t), n) for n, t in enumerate(times)], 1000)
    assert job.out == list(range(0, 1000, 11))
