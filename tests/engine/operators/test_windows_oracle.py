"""Every kind of window against plain Python: random batches, watermarks, interruptions and rescales."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import World, restored
from window_oracle import Oracle, Row, SessionOracle, SlidingOracle

from effort import examples
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.batches import concat
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.key_groups import key_groups, subtask_of
from midstream.engine.operators.windows import window_operator as window_base
from midstream.engine.operators.windows.aggregates import Count, First, Last, Max, Mean, Min, Sum
from midstream.engine.operators.windows.window_combiner import ROWS
from midstream.engine.operators.windows.window_factory import (
    LATE,
    WINDOW_END,
    WINDOW_START,
    Session,
    Sliding,
    window_operator,
)

SCHEMA = schema_of([("k", pa.large_string()), ("t", pa.timestamp("ms")), ("v", pa.int64())])
MAX_PARALLELISM = 8
KEYS = "abcdefg"

rows = st.lists(
    st.tuples(st.sampled_from(KEYS), st.integers(-60, 60), st.one_of(st.none(), st.integers(-9, 9))), max_size=12
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("rows"), rows),
        st.tuples(st.just("combined"), st.lists(rows, min_size=1, max_size=3)),
        st.tuples(st.just("watermark"), st.integers(-60, 90)),
        st.tuples(st.just("one watermark"), st.tuples(st.integers(0, 3), st.integers(-60, 90))),
        st.tuples(st.just("rescale"), st.integers(1, 4)),
        st.tuples(st.just("interrupt"), st.tuples(st.integers(-60, 90), st.integers(1, 4))),
    ),
    max_size=14,
)


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that every firing is cut."""
    monkeypatch.setattr(window_base, "PIECE_ROWS", 2)
    monkeypatch.setattr(window_base, "SLICE_ROWS", 2)


class Job:
    """All subtasks of one window operator, and their oracle."""

    def __init__(self, make: Callable[[], Any], oracle: Oracle) -> None:
        self.make, self.oracle = make, oracle
        self.worlds = [World(make(), max_parallelism=MAX_PARALLELISM)]
        self.out: list[dict[str, Any]] = []
        self.late: list[dict[str, Any]] = []
        self.combined_late = 0
        """How many rows were late in combined batches; which ones these were is not known any more."""

    def run(self, plan: list[tuple[str, Any]]) -> None:
        for step, argument in plan:
            match step:
                case "rows":
                    self.rows(argument)
                case "combined":
                    self.combined(argument)
                case "watermark":
                    self.watermark(argument, range(len(self.worlds)))
                case "one watermark":
                    subtask, watermark = argument
                    self.watermark(watermark, [subtask % len(self.worlds)])
                case "rescale":
                    self.rescale(argument)
                case "interrupt":
                    watermark, parallelism = argument
                    for world in self.worlds:
                        world.operator.advance_watermark(watermark * 1000)
                    self.rescale(parallelism)
                    self.watermark(watermark, range(parallelism))
        for world in self.worlds:
            world.advance(MAX_WATERMARK_US)
        for key in KEYS:
            self.oracle.advance(key, MAX_WATERMARK_US)
        self.collect()

    def rows(self, given_rows: list[Row]) -> None:
        # through the oracle in the order in which each subtask gets its rows
        self.oracle.process(given_rows)
        batch = batch_of(given_rows)
        owners = self.owners(batch)
        for subtask, world in enumerate(self.worlds):
            world.process(batch.filter(pa.array(owners == subtask)))

    def combined(self, batches: list[list[Row]]) -> None:
        """Batches that are combined one by one, then sent to their owners, and joined there."""
        batches = [given_rows for given_rows in batches if given_rows]
        if not batches:
            return
        known = len(self.oracle.late)
        # A late row of a session is in time if the session that it is combined into is: as if the latest came first.
        self.oracle.process([row for given_rows in batches for row in sorted(given_rows, key=lambda row: -row[1])])
        combiner = self.make().combiner(())
        batch = concat([combiner.combine(batch_of(given_rows)) for given_rows in batches])
        assert batch.schema == combiner.schema
        owners = self.owners(batch)
        for subtask, world in enumerate(self.worlds):
            world.process(batch.filter(pa.array(owners == subtask)))
        found = [row for world in self.worlds for row in world.out.rows(LATE)]
        assert len(self.oracle.late) - known == sum(ROWS in row for row in found) - self.combined_late
        self.combined_late = sum(ROWS in row for row in found)
        del self.oracle.late[known:]

    def owners(self, batch: pa.RecordBatch) -> np.ndarray[Any, Any]:
        return subtask_of(key_groups(batch, ("k",), MAX_PARALLELISM), len(self.worlds), MAX_PARALLELISM)

    def watermark(self, watermark: int, subtasks: Any) -> None:
        owners = self.owners(batch_of([(key, 0, 0) for key in KEYS]))
        for subtask in subtasks:
            world = self.worlds[subtask]
            before = len(world.out.rows())
            world.advance(watermark * 1000)
            ends = [row[WINDOW_END] for row in world.out.rows()[before:]]
            assert ends == sorted(ends), "results of one firing are in the order of the ends of their windows"
            for key, owner in zip(KEYS, owners, strict=True):
                if owner == subtask:
                    self.oracle.advance(key, watermark)

    def rescale(self, parallelism: int) -> None:
        self.collect()
        snapshots = [world.snapshot() for world in self.worlds]
        self.worlds = restored(self.make, snapshots, parallelism, MAX_PARALLELISM)

    def collect(self) -> None:
        for world in self.worlds:
            self.out.extend(world.out.rows())
            self.late.extend(row for row in world.out.rows(LATE) if ROWS not in row)
            world.out.clear()
        self.combined_late = 0


def batch_of(given_rows: list[Row]) -> pa.RecordBatch:
    columns = [list(column) for column in zip(*given_rows, strict=True)] or [[], [], []]
    arrays = [pa.array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def check(window: Sliding | Session, oracle: Oracle, lateness_ms: int, plan: list[tuple[str, Any]]) -> None:
    def make() -> Any:
        return window_operator(
            "w",
            window=window,
            keys=["k"],
            event_time="t",
            aggregates={
                "n": Count(),
                "sum": Sum("v"),
                "min": Min("v"),
                "max": Max("v"),
                "mean": Mean("v"),
                "first": First("v"),
                "last": Last("v"),
            },
            schema=SCHEMA,
            allowed_lateness=lateness_ms / 1000,
        )

    job = Job(make, oracle)
    job.run(plan)
    got = Counter((row["k"], ms(row[WINDOW_START]), ms(row[WINDOW_END]), *list(row.values())[3:]) for row in job.out)
    assert got == Counter(oracle.out)
    assert Counter((row["k"], ms(row["t"]), row["v"]) for row in job.late) == Counter(oracle.late)


def ms(time: Any) -> int:
    value = pa.scalar(time, pa.timestamp("ms")).value
    assert value is not None
    return value


@settings(max_examples=examples(150))
@given(
    st.sampled_from([(10, 10, 0), (10, 10, 3), (20, 5, 0), (15, 10, 0), (7, 3, 2), (40, 10, 0)]),
    st.sampled_from([0, 0, 5, 25]),
    steps,
)
def test_tumbling_and_sliding_windows(shape: tuple[int, int, int], lateness: int, plan: list[tuple[str, Any]]) -> None:
    size, slide, offset = shape
    window = Sliding(size * 1000, slide * 1000, offset * 1000)
    check(window, SlidingOracle(size, slide, offset, lateness), lateness, plan)


@pytest.mark.parametrize("times", [[1, 2], [1, 12, 2], [5, 5, 5]])
def test_combined_batches_that_were_joined_are_one_window(times: list[int]) -> None:
    plan = [("combined", [[("a", time, 1)] for time in times])]
    check(Sliding(10_000, 10_000), SlidingOracle(10, 10, 0, 0), 0, plan)
    check(Sliding(20_000, 10_000), SlidingOracle(20, 10, 0, 0), 0, plan)
    check(Session(5_000), SessionOracle(5, 0), 0, plan)


@settings(max_examples=examples(150))
@given(st.sampled_from([1, 5, 20]), st.sampled_from([0, 0, 5, 25]), steps)
def test_session_windows(gap: int, lateness: int, plan: list[tuple[str, Any]]) -> None:
    check(Session(gap * 1000), SessionOracle(gap, lateness), lateness, plan)


@settings(max_examples=examples(300))
@given(
    st.integers(5, 12),
    st.integers(0, 12),
    st.lists(st.tuples(st.lists(st.integers(-12, 12), max_size=2), st.integers(1, 12)), min_size=2, max_size=8),
)
def test_a_session_that_rows_keep_open(gap: int, lateness: int, plan: list[tuple[list[int], int]]) -> None:
    """Rows come about where event time is, which advances by less than a session takes."""
    now, steps = 0, list[tuple[str, Any]]()
    for near, by in plan:
        steps += [("rows", [("a", now + each, 1) for each in near]), ("watermark", now + by)]
        now += by
    check(Session(gap * 1000), SessionOracle(gap, lateness), lateness, steps)
