"""Firing that stops half-way, is stored, and continues elsewhere: each window of each key fires once all the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from operator_world import Parts, World, restored
from window_oracle import Oracle, Row, SessionOracle, SlidingOracle

from effort import examples
from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.core.key_groups import key_groups, subtask_of
from midstream.engine.operators.windows import window_operator as window_base
from midstream.engine.operators.windows.aggregates import Count, First, Last, Max, Mean, Min, Sum
from midstream.engine.operators.windows.window_factory import (
    LATE,
    WINDOW_END,
    WINDOW_START,
    Session,
    Sliding,
    window_operator,
)
from midstream.engine.state.state_parts import KEY_GROUP

SCHEMA = pa.schema([("k", pa.int64()), ("t", pa.timestamp("ms")), ("v", pa.int64())])
MAX_PARALLELISM = 8
KEYS = range(24)
AGGREGATES = {
    "n": Count(),
    "sum": Sum("v"),
    "min": Min("v"),
    "max": Max("v"),
    "mean": Mean("v"),
    "first": First("v"),
    "last": Last("v"),
}

keys = st.one_of(st.just((5,)), st.just((2, 9)), st.just(tuple(KEYS)))
batches = st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(0, 50))
"""Seed, rows, first time: of all keys, within 20 ms."""
slices = st.lists(st.integers(0, 3), min_size=4, max_size=4)
"""How many slices each subtask fires before it is stopped."""
steps = st.lists(
    st.one_of(
        st.tuples(st.just("rows"), batches),
        st.tuples(st.just("watermark"), st.integers(0, 90)),
        st.tuples(st.just("interrupt"), st.tuples(st.integers(0, 90), slices, st.integers(1, 4))),
    ),
    min_size=3,
    max_size=16,
)
Plan = list[tuple[str, Any]]
half_fired_twice: Plan = [
    ("rows", (1, 60, 0)),
    ("watermark", 9),
    ("interrupt", (19, [1, 2, 0, 0], 1)),
    ("interrupt", (19, [2, 0, 0, 0], 3)),
    ("rows", (2, 60, 0)),
    ("interrupt", (19, [0, 1, 3, 0], 4)),
]


def batch_of(rows: list[Row]) -> pa.RecordBatch:
    arrays = [pa.array(values, field.type) for values, field in zip(zip(*rows, strict=True), SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def rows_of(seed: int, count: int, first: int, of_keys: tuple[int, ...]) -> list[Row]:
    random = np.random.default_rng(seed)
    columns = (
        random.choice(of_keys, count),
        random.integers(first, first + 20, count),
        random.integers(-9, 10, count),
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))


class Job:
    """All subtasks of one window operator. `watermarks`: how far each key's event time has come, in ms."""

    def __init__(self, make: Callable[[], Any], parallelism: int = 1) -> None:
        self.make = make
        self.out: list[dict[str, Any]] = []
        self.late: list[dict[str, Any]] = []
        self.groups = key_groups(batch_of([(key, 0, 0) for key in KEYS]), ("k",), MAX_PARALLELISM)
        self.start([{}], parallelism)

    def start(self, snapshots: list[Parts], parallelism: int) -> None:
        self.worlds = restored(self.make, snapshots, parallelism, MAX_PARALLELISM)

    def rows(self, batch: pa.RecordBatch) -> None:
        owners = subtask_of(key_groups(batch, ("k",), MAX_PARALLELISM), len(self.worlds), MAX_PARALLELISM)
        for subtask, world in enumerate(self.worlds):
            world.process(batch.filter(pa.array(owners == subtask)))
        self.collect()

    def watermark(self, watermark_us: int) -> None:
        for world in self.worlds:
            world.advance(watermark_us)
        self.check_order()
        self.collect()

    def interrupt(self, watermark_us: int, counts: list[int], parallelism: int) -> dict[int, int]:
        """Fire this number of slices, then store and restore. How far each key group has come, as was stored."""
        for world, count in zip(self.worlds, counts, strict=False):
            for _ in range(count):
                if world.operator.advance_watermark(watermark_us):
                    break
        self.check_order()
        self.collect()
        snapshots = [world.snapshot() for world in self.worlds]
        self.start(snapshots, parallelism)
        return dict(marks_of(snapshots))

    def collect(self) -> None:
        for world in self.worlds:
            self.out.extend(world.out.rows())
            self.late.extend(world.out.rows(LATE))
            world.out.clear()

    def check_order(self) -> None:
        """Results of one firing are in the order of the ends of their windows, across its slices."""
        for world in self.worlds:
            ends = [row[WINDOW_END] for row in world.out.rows()]
            assert ends == sorted(ends)


def marks_of(snapshots: list[Parts]) -> Iterator[tuple[int, int]]:
    for parts in snapshots:
        if window_base.PROGRESS in parts:
            table = parts[window_base.PROGRESS].table()
            yield from zip(table.column(KEY_GROUP).to_pylist(), table.column("watermark").to_pylist(), strict=True)


def aggregates(out: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["k"], ms(row[WINDOW_START]), ms(row[WINDOW_END]), *list(row.values())[3:]) for row in out]


def check(
    window: Sliding | Session,
    oracle: Oracle,
    lateness: int,
    of_keys: tuple[int, ...],
    plan: Plan,
    make: Callable[[Sliding | Session, int], Any] | None = None,
    emitted: Callable[[list[dict[str, Any]]], list[tuple[Any, ...]]] = aggregates,
) -> None:
    """After every step: what has come out is what is due, where "due" for each key is what was stored for it."""
    job = Job(lambda: (make or operator)(window, lateness), parallelism=2)

    def compare() -> None:
        assert Counter(emitted(job.out)) == Counter(oracle.out)
        assert Counter((row["k"], ms(row["t"]), row["v"]) for row in job.late) == Counter(oracle.late)

    for step, argument in [*plan, ("watermark", MAX_WATERMARK_US // 1000)]:
        match step:
            case "rows":
                seed, count, first = argument
                rows = rows_of(seed, count, first, of_keys)
                oracle.process(rows)
                job.rows(batch_of(rows))
            case "watermark":
                job.watermark(argument * 1000)
                for key in KEYS:
                    oracle.advance(key, argument)
            case "interrupt":
                watermark, counts, parallelism = argument
                marks = job.interrupt(watermark * 1000, counts, parallelism)
                assert all(mark <= watermark or mark <= oracle.watermarks[key] for key, mark in by_key(job, marks))
                if len({mark for _, mark in by_key(job, marks)}) > 1:
                    event("stored while key groups had come differently far")
                for key, mark in by_key(job, marks):
                    oracle.advance(key, mark)
        compare()


def test_sums_of_floats_are_the_same_whatever_key_lies_with_them() -> None:
    """polars adds up slices of a column that it holds for sorted in another way than scattered rows."""
    floats = SCHEMA.set(2, pa.field("v", pa.float64()))
    of_values = (1e8, 0.1, 0.3)
    sums = set()
    for of_keys in ((5,), (5, 9), (9, 5, 2)):
        job = World(operator(Sliding(3_000_000, 1_000_000, 0), 0, floats), max_parallelism=MAX_PARALLELISM)
        for second, value in enumerate(of_values):
            job.process(
                pa.RecordBatch.from_arrays(
                    [
                        pa.array(of_keys),
                        pa.array([second * 1000] * len(of_keys), pa.timestamp("ms")),
                        pa.array([value] * len(of_keys)),
                    ],
                    schema=floats,
                )
            )
        job.advance(MAX_WATERMARK_US)
        found = [row for _, batch in job.out.batches for row in batch.to_pylist() if row["k"] == 5]
        sums.add(tuple(sorted(row["sum"] for row in found)))
    assert len(sums) == 1, sums


def by_key(job: Job, marks: dict[int, int]) -> list[tuple[int, int]]:
    return [(key, marks.get(group, MIN_WATERMARK_US)) for key, group in zip(KEYS, job.groups.tolist(), strict=True)]


def operator(window: Sliding | Session, lateness: int, schema: pa.Schema = SCHEMA) -> Any:
    return window_operator(
        "w",
        window=window,
        keys=["k"],
        event_time="t",
        aggregates=AGGREGATES,
        schema=schema,
        allowed_lateness=lateness / 1000,
    )


def ms(time: Any) -> int:
    value = pa.scalar(time, pa.timestamp("ms")).value
    assert value is not None
    return value


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every slice is one piece, a piece a key group or two."""
    monkeypatch.setattr(window_base, "PIECE_ROWS", 3)
    monkeypatch.setattr(window_base, "SLICE_ROWS", 1)


@pytest.mark.usefixtures("small_slices")
@settings(max_examples=examples(60))
@given(
    st.sampled_from([(10, 10, 0), (20, 5, 0), (15, 10, 0), (7, 3, 2), (40, 10, 0)]),
    st.sampled_from([0, 0, 5, 25]),
    keys,
    steps,
)
@example((20, 10, 0), 0, tuple(KEYS), half_fired_twice)
def test_tumbling_and_sliding_windows(
    shape: tuple[int, int, int], lateness: int, of_keys: tuple[int, ...], plan: Plan
) -> None:
    size, slide, offset = shape
    window = Sliding(size * 1000, slide * 1000, offset * 1000)
    check(window, SlidingOracle(size, slide, offset, lateness), lateness, of_keys, plan)


@pytest.mark.usefixtures("small_slices")
@settings(max_examples=examples(40))
@given(st.sampled_from([1, 5, 20]), st.sampled_from([0, 0, 5, 25]), keys, steps)
@example(5, 0, tuple(KEYS), half_fired_twice)
def test_session_windows(gap: int, lateness: int, of_keys: tuple[int, ...], plan: Plan) -> None:
    check(Session(gap * 1000), SessionOracle(gap, lateness), lateness, of_keys, plan)
