"""What is in the rows of a simulated job is looked at: whoever changes a column, a window or a bound of one is found out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from midstream.engine.checkpoint import channel_state, savepoint
from midstream.engine.coordinator.checkpoints import checkpoint_coordinator, metadata_builder
from midstream.engine.operators.functions import entry_restore
from midstream.engine.operators.key_group_watermarks import KeyGroupWatermarks
from midstream.engine.operators.watermarks import TimestampsOperator
from midstream.engine.operators.windows import session_windows
from midstream.engine.operators.windows.pane_windows import PaneWindowOperator
from midstream.engine.operators.windows.session_windows import SessionWindowOperator
from midstream.engine.operators.windows.window_operator import WindowOperator
from midstream.engine.operators.windows.window_specs import END, START
from midstream.engine.state import heap_snapshot as heap
from midstream.engine.state.heap_snapshot import KeyEncoding
from midstream.engine.state.table_state import TableState
from midstream.engine.worker import gate_recovery
from midstream.engine.worker.source_reader import ReadProgress as Step
from midstream.engine.worker.source_reader import SourceReader, SplitRequestState
from midstream.engine.worker.watermark_valve import WatermarkValve
from midstream.simulation.faults import Fault
from midstream.simulation.world import World
from midstream_lab.checkers.content_checker import check_numbers
from midstream_lab.jobs.on_time import on_time_at
from midstream_lab.jobs.recorded_rows import Outside, SimSource
from midstream_lab.jobs.shapes import FORWARD, KEYED, REBALANCE, SHAPES, Input, Node
from midstream_lab.jobs.topologies import with_parallelism
from midstream_lab.run import run
from midstream_lab.scenarios import targeted
from midstream_lab.scenarios.scenario import Scenario, draw
from midstream_lab.scenarios.targeted_idleness import watching

Patches = list[tuple[Any, str, Any]]


@dataclass(frozen=True)
class Bug:
    """What to replace, where that is looked for, and what is said about it."""

    patches: Patches
    scenario: Callable[[int], Scenario]
    said: str
    seeds: int = 30


@contextmanager
def replaced(patches: Patches) -> Iterator[None]:
    if not patches:
        yield
        return
    target, name, value = patches[0]
    with patch.object(target, name, value), replaced(patches[1:]):
        yield


# ---- columns ----------------------------------------------------------------


def swapped(batches: Sequence[pa.RecordBatch], column: str) -> list[pa.RecordBatch]:
    """Each batch with the first and the last value of the column in each other's place."""
    return [
        b.set_column(
            b.schema.get_field_index(column), column, b.column(column).take([len(b) - 1, *range(1, len(b) - 1), 0])
        )
        if len(b) > 1
        else b
        for b in batches
    ]


def wiped(batches: Sequence[pa.RecordBatch], column: str) -> list[pa.RecordBatch]:
    found = []
    for batch in batches:
        nothing = "" if column == "text" else 0
        values = pa.array([nothing] * len(batch), batch.column(column).type)
        found.append(batch.set_column(batch.schema.get_field_index(column), column, values))
    return found


def recovered(change: Callable[[Sequence[pa.RecordBatch], str], list[pa.RecordBatch]], column: str) -> Bug:
    original = channel_state.rows_of
    return Bug(
        [(gate_recovery, "rows_of", lambda *arguments: change(original(*arguments), column))],
        partial(in_flight, "keyed" if column == "n" else "pipeline"),
        f"another {column} than they should|an n in rows|an n that no operator",
    )


def in_flight(topology: str, seed: int) -> Scenario:
    """Slots die while there are large batches of rows, all of one key, in front of slow sinks."""
    drawn = draw(seed, topology=topology, parallelism=2, faults=("kill_slot",), rows=100)
    drawn = replace(drawn, aligned_timeout_s=0.0, interval_s=0.002, sink_rows=1, sink_pause_s=0.003)
    return replace(drawn, keys=1, text_bytes=200, batch_rows=10, queue_time_s=None, timeout_s=60.0)


# ---- rows that are held -----------------------------------------------------


def held_without_text() -> Patches:
    original = heap.state_rows

    def state_rows(*arguments: Any) -> tuple[list[Any], Iterator[Any]]:
        keys, rows = original(*arguments)
        return keys, ((key, name, [{**row, "text": ""} for row in value]) for key, name, value in rows)

    return [(entry_restore, "state_rows", state_rows)]


def table_with_another_time() -> Patches:
    original = TableState.restore

    def restore(self: Any, chunks: Any, where: str) -> None:
        original(self, chunks, where)
        if "ts" in self.frame.columns:
            self.frame = self.frame.with_columns(pl.col("ts") + pl.duration(milliseconds=1))

    return [(TableState, "restore", restore)]


def under_another_group() -> Patches:
    original = KeyEncoding.columns

    def columns(self: Any, keys: Any) -> Any:
        found = original(self, keys)
        groups = (found["__key_group"].to_numpy() + 1) % self._max_parallelism
        return {**found, "__key_group": pa.array(groups.astype(np.int32))}

    return [(KeyEncoding, "columns", columns)]


def holding(topology: str, seed: int) -> Scenario:
    drawn = draw(seed, topology=topology, parallelism=2, faults=("kill_slot",), rows=100)
    return replace(drawn, interval_s=0.002, text_bytes=200)


# ---- windows ----------------------------------------------------------------


def another_bound(bound: str) -> Patches:
    original = WindowOperator._emit
    return [(WindowOperator, "_emit", lambda self, made: original(self, made.with_columns(pl.col(bound) + 1000)))]


def a_session_begins_before_its_rows() -> Patches:
    original = session_windows._small_sessions

    def small_sessions(*arguments: Any) -> pl.DataFrame:
        return original(*arguments).with_columns(pl.col(START) - 1000)

    return [(session_windows, "_small_sessions", small_sessions)]


def without_the_last_part(operator: type) -> Patches:
    original = operator._snapshot_chunks  # type: ignore[attr-defined]

    def snapshot(self: Any) -> Any:
        chunks = original(self)
        return lambda: chunks()[:-1]

    return [(operator, "_snapshot_chunks", snapshot)]


def fired_twice() -> Patches:
    return [(KeyGroupWatermarks, "restore", lambda self, part: None)]


def no_late_output() -> Patches:
    return [(WindowOperator, "_emit_late", lambda self, batch: None)]


def windowed(topology: str, seed: int, kinds: tuple[str, ...] = ("kill_slot",)) -> Scenario:
    return replace(draw(seed, topology=topology, parallelism=2, faults=kinds, rows=100), interval_s=0.001)


def drained(seed: int) -> Scenario:
    """Late rows, by splits that are found when others have been read, in a job that is drained in the end."""
    drawn = draw(seed, topology="splits", parallelism=1, faults=(), rows=400)
    drain = Fault(400 + seed * 37 % 400, "drain", 0)
    return replace(drawn, rounds=3, splits=7, batch_rows=10, interval_s=0.005, faults=(drain,), rescaled=None)


# ---- others -----------------------------------------------------------------


def running_ones_forget() -> Patches:
    """In a checkpoint of an operator that has finished in part the others have no state."""
    original = metadata_builder.operator_states

    def operator_states(*arguments: Any) -> Any:
        return tuple(
            msgspec.structs.replace(
                op,
                subtasks=tuple(
                    msgspec.structs.replace(task, parts=()) if op.finished and i in op.running else task
                    for i, task in enumerate(op.subtasks)
                ),
            )
            for op in original(*arguments)
        )

    return [(checkpoint_coordinator, "operator_states", operator_states)]


def not_waited_for() -> Patches:
    """The first channel does not hold event time back until it says something."""
    original = WatermarkValve.__init__

    def init(self: Any, origins: Any) -> None:
        original(self, origins)
        if len(origins) > 1:
            self._is_reported_idle[0] = True
            self._set_idle(0)

    return [(WatermarkValve, "__init__", init)]


def idle_at_once() -> Patches:
    """A split counts as idle whenever somebody looks."""
    original = TimestampsOperator._check_idle

    def check_idle(self: Any) -> None:
        self._last_row_s = dict.fromkeys(self._last_row_s, -1e9)
        original(self)

    return [(TimestampsOperator, "_check_idle", check_idle)]


def partly_idle(seed: int) -> Scenario:
    """One of two sources may count as idle; the rows of the other never come late for that."""
    drawn = draw(seed, topology="timers", parallelism=2, faults=(), rows=100)
    return replace(drawn, splits=2, rounds=1, interval_s=0.002, tempo=replace(drawn.tempo, io_us=100))


def partly_alarmed(seed: int) -> Scenario:
    """Rows that have waited for the clock may be late, and others of the job are not."""
    shape = (
        Node(("source", "tight")),
        Node(("source", "tight")),
        Node(("alarm",), (Input(0, KEYED),)),
        Node(("count",), (Input(1, KEYED),)),
        Node(("sink",), (Input(2, REBALANCE),)),
        Node(("sink",), (Input(3, FORWARD),)),
    )
    drawn = draw(seed, topology="keyed", parallelism=2, faults=(), rows=100)
    return replace(
        drawn, shape=with_parallelism(shape, 2, Random(seed), same=True), splits=2, rounds=1, interval_s=0.002
    )


def ends_too_soon() -> Patches:
    original = SourceReader.step

    def step(self: Any) -> Step:
        return (
            Step.ENDED
            if self._request_state is SplitRequestState.NO_MORE and len(self._splits) == 1
            else original(self)
        )

    return [(SourceReader, "step", step)]


def saved_without_windows() -> Patches:
    original = savepoint._repacked_snapshot

    def moved(place: Any, snapshot: Any) -> Any:
        found = original(place, snapshot)
        parts = tuple(part for part in found.parts if part.name != "parts")
        return msgspec.structs.replace(found, parts=parts)

    return [(savepoint, "_repacked_snapshot", moved)]


WRONG_WINDOWS = r"it emits \[.*\] \(\d+\) instead of \["

BUGS = {
    **{
        f"{change.__name__} {column}": recovered(change, column)
        for change in (swapped, wiped)
        for column in ("sequence", "ts", "n", "text")
    },
    "held rows lose their text": Bug(held_without_text(), partial(holding, "timers"), "another text than they should"),
    "a table changes a time": Bug(table_with_another_time(), partial(holding, "tables"), "another ts than they should"),
    "state lies with another subtask": Bug(
        under_another_group(), partial(holding, "timers"), "in key groups that are not theirs"
    ),
    "the end of a window": Bug(another_bound(END), partial(windowed, "window"), WRONG_WINDOWS),
    "the start of a window": Bug(another_bound(START), partial(windowed, "sliding"), WRONG_WINDOWS),
    "the end of a session": Bug(another_bound(END), partial(windowed, "session"), WRONG_WINDOWS),
    "the start of a session": Bug(
        a_session_begins_before_its_rows(), partial(windowed, "session"), "other bounds than its rows"
    ),
    "part of the state of windows": Bug(
        without_the_last_part(PaneWindowOperator), partial(windowed, "sliding"), "checkpoint .* lost"
    ),
    "part of the state of sessions": Bug(
        without_the_last_part(SessionWindowOperator), partial(windowed, "session"), "checkpoint .* lost"
    ),
    "windows fire twice": Bug(
        fired_twice(), targeted.ending("sliding"), f"key group .* is at .*, and had come to|{WRONG_WINDOWS}"
    ),
    "late rows of a drained job": Bug(no_late_output(), drained, "are late and should not be, .* are not"),
    "state of who still runs": Bug(running_ones_forget(), targeted.ending("keyed"), "checkpoint .* state of count1"),
    "a silent channel beside idle ones": Bug(
        not_waited_for(), partly_idle, "event time of a task is .*, and should be"
    ),
    "a silent channel beside alarms": Bug(
        not_waited_for(), partly_alarmed, "event time of a task is .*, and should be"
    ),
    "a split that is idle": Bug(idle_at_once(), partly_idle, "a split that has come to .* had rows|which was due by"),
    "a source ends too soon": Bug(ends_too_soon(), partial(windowed, "window"), "without a request to end"),
    "a savepoint without windows": Bug(
        saved_without_windows(),
        partial(windowed, "window", kinds=("savepoint", "stop_savepoint")),
        "another state than the checkpoint",
    ),
}


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", BUGS)
def test_it_is_seen_when_something_is_wrong_with(name: str) -> None:
    bug = BUGS[name]
    for seed in range(bug.seeds):
        with replaced(bug.patches):
            failures = run(bug.scenario(seed)).failures
        if failures:
            assert re.search(bug.said, failures[0]), failures[0]
            assert not run(bug.scenario(seed)).failures, f"seed {seed} fails without the bug"
            return
    pytest.fail(f"survived {bug.seeds} seeds")


@pytest.mark.parametrize("found", [[1], [1, 1], [1, 3], [1, 2, 3], [0, 1]])
def test_numbers_of_a_key_that_are_not_all_there_once_are_seen(found: list[int]) -> None:
    key = 7 << 20
    assert check_numbers([np.array([key | n for n in found])], {7: (2, 0)})
    assert not check_numbers([np.array([key | 2]), np.array([key | 1])], {7: (2, 0)})


def test_only_who_is_behind_an_idle_source_or_an_alarm_may_get_its_rows_late() -> None:
    shape = partly_alarmed(0).shape
    outside = Outside(World(0, draw(0).tempo))
    sources = [SimSource(outside, number, (1,), keys=1, ends="") for number in range(2)]
    assert on_time_at(shape, sources)[2:] == [frozenset({0}), frozenset({1}), frozenset(), frozenset({1})]
    beside_idle = on_time_at(SHAPES["timers"], sources)
    assert beside_idle[2:] == [frozenset({0})] * 3


def test_rows_that_a_timer_has_held_beside_an_idle_source_may_be_late_where_they_meet_others() -> None:
    shape = (
        Node(("source", "idle")),
        Node(("source", "tight")),
        Node(("source", "tight")),
        Node(("timer",), (Input(0, KEYED), Input(1, KEYED))),
        Node(("count",), (Input(3, KEYED), Input(1, KEYED))),
        Node(("count",), (Input(3, KEYED), Input(2, KEYED))),
        Node(("count",), (Input(1, KEYED), Input(2, KEYED))),
        Node(("count",), (Input(5, KEYED), Input(4, KEYED))),
    )
    outside = Outside(World(0, draw(0).tempo))
    sources = [SimSource(outside, number, (1,), keys=1, ends="") for number in range(3)]
    one, two, both = frozenset({1}), frozenset({2}), frozenset({1, 2})
    assert on_time_at(shape, sources)[3:] == [one, one, two, both, two]
    without_idle = (Node(("source", "tight")), *shape[1:])
    first, every = frozenset({0, 1}), frozenset({0, 1, 2})
    assert on_time_at(without_idle, sources)[3:] == [first, first, every, both, every]


def test_rows_are_not_late_because_only_an_idle_input_is_left() -> None:
    assert not run(partly_idle(0)).failures


@pytest.mark.parametrize("seed", [5, 28, 29, 32])
def test_rows_are_not_late_because_another_subtask_was_sent_its_split_sooner(seed: int) -> None:
    assert not run(watching(seed)).failures


@pytest.mark.turns(2)
@pytest.mark.parametrize("topology", ["quiet", "quiet_twice"])
def test_rows_of_a_single_split_are_never_late_because_it_was_idle(topology: str) -> None:
    """Some of these seeds have late rows where an idle subtask is not waited for."""
    for seed in range(9, 18):
        assert not run(targeted.quiet(topology)(seed)).failures
