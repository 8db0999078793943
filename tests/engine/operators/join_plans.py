"""Plans of what a join gets and when: rows, late ones too, watermarks, snapshots, and restores at another parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl
import pyarrow as pa
from hypothesis import strategies as st
from operator_world import Parts, World, restored

from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.core.key_groups import key_groups, subtask_of
from midstream.engine.operators.functions.event_time_join import EventTimeJoinOperator
from midstream.engine.operators.windows.window_specs import LATE, LATE_RIGHT

LEFT = pa.schema([("k", pa.int64()), ("t", pa.timestamp("ms")), ("a", pa.int64())])
RIGHT = pa.schema([("b", pa.int64()), ("u", pa.timestamp("us", "Europe/Berlin")), ("id", pa.int64())])
SAME_TIME = pa.schema([pa.field("u", pa.timestamp("ms")) if f.name == "u" else f for f in RIGHT])
MAX_PARALLELISM = 8

Row = tuple[int, int, int, int]
"""Input, key, time in ms, number."""
Plan = list[tuple[str, Any]]


def batch(rows: list[Row], port: int, right: pa.Schema = RIGHT) -> pa.RecordBatch:
    if port == 0:
        return pa.RecordBatch.from_pylist([{"k": k, "t": t, "a": n} for _, k, t, n in rows], schema=LEFT)
    columns = [[n for *_, n in rows], [t if right.field("u").type.unit == "ms" else t * 1000 for _, _, t, _ in rows]]
    arrays = [pa.array(columns[0], pa.int64()), pa.array(columns[1], pa.int64()).cast(right.field("u").type)]
    return pa.RecordBatch.from_arrays([*arrays, pa.array([k for _, k, *_ in rows], pa.int64())], schema=right)


def contents(world: World) -> dict[str, pl.DataFrame]:
    """Return what the join holds, by table."""
    assert isinstance(world.operator, EventTimeJoinOperator)
    return world.operator.contents()


def plans(last_ms: int, keys: int = 4) -> st.SearchStrategy[Plan]:
    """Plans with times up to `last_ms`: the fewer there are, the more rows are at the same time."""
    times = st.integers(0, last_ms)
    rows = st.tuples(st.integers(0, 1), st.integers(0, keys - 1), times)
    step = st.one_of(
        st.tuples(st.just("rows"), st.lists(rows, max_size=8)),
        st.tuples(st.just("rows"), st.lists(rows, min_size=1, max_size=2)),
        st.tuples(st.just("advance"), st.tuples(times, st.integers(0, 3))),
        st.tuples(st.just("snapshot"), st.none()),
        st.tuples(st.just("restore"), st.integers(1, 3)),
    )
    return st.lists(step, max_size=16)


SIZES = st.sampled_from([(262_144, 8_192), (8, 3), (3, 1)])
"""From how many rows on a run is not merged, and is a chunk of its own."""
GROUPS = key_groups(pa.record_batch({"k": pa.array(range(4), pa.int64())}), ("k",), MAX_PARALLELISM)


class PlannedJoin:
    """Carries out a plan. Checks at each step that no result is late downstream, and that a chunk's rows never change."""

    def __init__(
        self,
        make: Callable[[], Any],
        right: pa.Schema = RIGHT,
        last_ms: Callable[[int], float] = lambda time_ms: time_ms,
    ) -> None:
        """`last_ms`: from a row's time, the event time as of which it is late."""
        self._make = make
        self._last_ms = last_ms
        self._right = right
        self.worlds = [World(make(), max_parallelism=MAX_PARALLELISM)]
        self.marks = dict.fromkeys(range(4), -1)
        """By key: the watermark that its subtask has reached."""
        self.given: list[Row] = []
        """The rows that were not late."""
        self.marks_at: dict[int, int] = {}
        """The watermark that each of these had found, by its number."""
        self.late: list[Row] = []
        self.found = [pl.DataFrame(pa.Table.from_batches([], schema=make().schema))]
        self.found_late: list[Row] = []
        self._left_us = [MIN_WATERMARK_US]
        """The watermark that has left each subtask."""
        self._chunks: dict[tuple[World, str], pa.Table] = {}

    def go(self, plan: Plan, after_each: Callable[[], None] = lambda: None) -> pl.DataFrame:
        """Return the results of the whole plan, and of the end of time."""
        for step, argument in plan:
            if step == "rows":
                self._process([(p, k, t, len(self.given) + len(self.late) + i) for i, (p, k, t) in enumerate(argument)])
            elif step == "advance":
                self._advance(*argument)
            elif step == "snapshot":
                self._snapshots()
            else:
                self.worlds = restored(self._make, self._snapshots(), argument, MAX_PARALLELISM)
                self._left_us = [min(self._left_us)] * len(self.worlds)
            self._drain()
            after_each()
        for world in self.worlds:
            world.advance(MAX_WATERMARK_US)
            assert set(world.snapshot()) == {"progress"}
        self._drain()
        assert sorted(self.found_late) == sorted(self.late)
        return pl.concat(self.found)

    def _process(self, rows: list[Row]) -> None:
        self.late += [row for row in rows if self._last_ms(row[2]) <= self.marks[row[1]]]
        self.given += [row for row in rows if self._last_ms(row[2]) > self.marks[row[1]]]
        self.marks_at |= {row[3]: self.marks[row[1]] for row in rows}
        owners = self._owners()
        for port in (0, 1):
            for subtask, world in enumerate(self.worlds):
                part = [row for row in rows if row[0] == port and owners[row[1]] == subtask]
                if part:
                    world.process(batch(part, port, self._right), port)

    def _advance(self, time: int, only: int) -> None:
        """Let event time reach `time` in the subtask `only`, or in all of them if it is 3."""
        for subtask, world in enumerate(self.worlds):
            if only in (subtask, 3):
                world.advance(time * 1000)
                self._drain()
                left_us = time * 1000 - world.operator.watermark_delay_us
                self._left_us[subtask] = max(self._left_us[subtask], left_us)
                mine = [key for key, owner in enumerate(self._owners()) if owner == subtask]
                self.marks |= {key: max(self.marks[key], time) for key in mine}

    def _owners(self) -> list[int]:
        return subtask_of(GROUPS, len(self.worlds), MAX_PARALLELISM).tolist()

    def _drain(self) -> None:
        for world, mark_us in zip(self.worlds, self._left_us, strict=True):
            for tag, made in world.out.batches:
                frame = pl.DataFrame(made)
                if tag is None:
                    assert isinstance(world.operator, EventTimeJoinOperator)
                    times = frame.get_column(world.operator.result_time.name).dt.epoch("us")
                    assert times.null_count() == 0 and (times > mark_us).all(), "a row is late downstream"
                    self.found.append(frame)
                else:
                    port = (LATE, LATE_RIGHT).index(tag)
                    key, time, number = (("k", "t", "a"), ("id", "u", "b"))[port]
                    columns = frame.get_column(key), frame.get_column(time).dt.epoch("ms"), frame.get_column(number)
                    self.found_late.extend((port, *row) for row in zip(*columns, strict=True))
            world.out.clear()

    def _snapshots(self) -> list[Parts]:
        self._drain()
        parts = [world.snapshot() for world in self.worlds]
        for world, part in zip(self.worlds, parts, strict=True):
            for chunk in (chunk for each in part.values() for chunk in each.chunks):
                for each in (chunk, *chunk.removed):
                    table = self._chunks.setdefault((world, each.id), each.stored)
                    assert table.equals(each.stored)
        return parts
