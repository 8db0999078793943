"""Sources in step: which ceiling follows from which reports, and that splits stay together and come to their end."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream.connectors.memory.collection_source import CollectionSource
from midstream.engine.coordinator.effects import Effects
from midstream.engine.coordinator.events import Send
from midstream.engine.coordinator.placement.attempt import Attempt
from midstream.engine.coordinator.placement.source_drift import SourceDrift
from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.core.ids import TaskId
from midstream.engine.graph.drift_groups import drift_groups
from midstream.engine.graph.job_graph import Edge, JobGraph, OperatorSpec, Partitioning, SourceSpec, Vertex
from midstream.engine.operators.watermarks import TimestampsOperator, WatermarkStrategy
from midstream.engine.protocol import messages as m
from midstream.engine.worker.drift_limit import STEPS, DriftLimit, is_moved

SCHEMA = pa.schema([("at", pa.timestamp("us"))])
DRIFT_US = 800
LOW, HIGH = MIN_WATERMARK_US, MAX_WATERMARK_US


def source(number: int, drift_us: int | None, parallelism: int = 1) -> Vertex:
    operator = TimestampsOperator("t", "at", WatermarkStrategy(0, None, drift_us), SCHEMA)
    spec = SourceSpec(f"s{number}", "s", CollectionSource(SCHEMA.empty_table()))
    return Vertex(number, parallelism, spec, (OperatorSpec(f"t{number}", "t", operator),))


def graph(*drifts_us: int | None, meet: Sequence[tuple[int, ...]], parallelism: int = 1) -> JobGraph:
    """A source for each drift, and a vertex that reads from each tuple of sources."""
    vertices = [source(number, drift_us, parallelism) for number, drift_us in enumerate(drifts_us)]
    edges: list[Edge] = []
    for sources in meet:
        operator = TimestampsOperator("t", "at", WatermarkStrategy(0), SCHEMA)
        target = len(vertices)
        vertices.append(Vertex(target, 1, None, (OperatorSpec(f"m{target}", "m", operator),)))
        edges += [Edge(len(edges) + i, each, target, Partitioning.GLOBAL, SCHEMA) for i, each in enumerate(sources)]
    return JobGraph(tuple(vertices), tuple(edges), 128)


@dataclass
class Assignment:
    """What `SplitAssignment` is asked."""

    undiscovered: set[int] = field(default_factory=set)
    backlogs: set[int] = field(default_factory=set)
    assigned: dict[TaskId, int] = field(default_factory=dict)

    def has_discovered(self, vertex: int) -> bool:
        return vertex not in self.undiscovered

    def has_backlog(self, vertex: int) -> bool:
        return vertex in self.backlogs

    def assigned_to(self, ref: TaskId) -> int:
        return self.assigned.get(ref, 0)


class Bench:
    def __init__(self, job: JobGraph) -> None:
        self.effects = Effects()
        self.sources = Assignment()
        self.drift = SourceDrift(self.effects, cast("Any", self.sources), job)
        self.attempt = self.begin(job)

    def begin(self, job: JobGraph, number: int = 0, finished: Sequence[TaskId] = ()) -> Attempt:
        self.attempt = Attempt(number, job, tuple(range(job.slots)), finished)
        self.drift.deployed(self.attempt)
        return self.attempt

    def report(self, vertex: int, lowest_us: int, subtask: int = 0, splits: int = 0) -> None:
        self.drift.report(m.SourceProgress(self.attempt.number, TaskId(vertex, subtask), lowest_us, splits))

    def ceilings(self) -> dict[int, int]:
        """The ceilings that are sent now, by vertex."""
        self.drift.advance()
        self.drift.check()
        sent = [each.message for each in self.effects.take() if isinstance(each, Send)]
        return {each.vertex: each.ceiling_us for each in sent if isinstance(each, m.DriftCeiling)}


@pytest.mark.parametrize(
    ("drifts_us", "meet", "groups"),
    [
        ((1, 2), [(0, 1)], [[0, 1]]),
        ((1, 2), [(0,), (1,)], [[0], [1]]),
        ((1, None, 2), [(0, 1, 2)], [[0, 2]]),
        ((1, None, 2), [(0, 1), (1, 2)], [[0, 2]]),
        ((1, 2, 3, 4), [(0, 3), (1, 2)], [[0, 3], [1, 2]]),
        ((None, None), [(0, 1)], []),
    ],
)
def test_sources_are_in_step_whose_rows_meet(
    drifts_us: tuple[int | None, ...], meet: list[tuple[int, ...]], groups: list[list[int]]
) -> None:
    found = drift_groups(graph(*drifts_us, meet=meet))
    assert [[each.vertex for each in group] for group in found] == groups


@pytest.mark.parametrize(
    ("reports", "more", "ceilings"),
    [
        ({}, {}, {}),
        ({0: 5000}, {}, {}),  # the other one has not reported yet
        ({0: 5000, 1: 3000}, {}, {0: 3800, 1: 3800}),
        ({0: 5000, 1: LOW}, {}, {}),  # before the first row of some split
        ({0: 5000, 1: HIGH}, {}, {0: 5800, 1: 5800}),  # none of its splits may have rows
        ({0: HIGH, 1: HIGH}, {}, {0: HIGH, 1: HIGH}),
        ({0: 5000, 1: HIGH}, {"undiscovered": {1}}, {}),
        ({0: 5000, 1: 3000}, {"backlogs": {1}}, {0: 5800, 1: HIGH}),
        ({0: 5000}, {"backlogs": {0}}, {0: HIGH}),
        ({0: 5000, 1: HIGH}, {"assigned": {TaskId(1, 0): 1}}, {}),  # it does not know its split yet
        ({0: 5000, 1: 3000}, {"assigned": {TaskId(1, 0): 1}}, {0: 3800, 1: 3800}),
    ],
)
def test_ceilings_follow_from_the_slowest_that_counts(
    reports: Mapping[int, int], more: Mapping[str, Any], ceilings: Mapping[int, int]
) -> None:
    bench = Bench(graph(DRIFT_US, DRIFT_US, meet=[(0, 1)]))
    for name, value in more.items():
        setattr(bench.sources, name, value)
    for vertex, lowest_us in reports.items():
        bench.report(vertex, lowest_us)
    assert bench.ceilings() == ceilings


def test_each_source_has_its_own_drift_and_all_subtasks_get_the_ceiling() -> None:
    bench = Bench(graph(DRIFT_US, 100, meet=[(0, 1)], parallelism=2))
    for vertex, subtask in ((0, 0), (0, 1), (1, 0), (1, 1)):
        bench.report(vertex, 1000 + 10 * subtask, subtask)
    bench.drift.advance()
    sent = {(each.slot, each.message.vertex, each.message.ceiling_us) for each in bench.effects.take()}  # type: ignore[union-attr]
    assert sent == {(slot, vertex, us) for slot in (0, 1) for vertex, us in ((0, 1800), (1, 1100))}


def test_a_ceiling_is_sent_when_it_matters() -> None:
    bench = Bench(graph(DRIFT_US, meet=[(0,)]))
    bench.report(0, 1000)
    assert bench.ceilings() == {0: 1800}
    bench.report(0, 1000 + DRIFT_US // STEPS - 1)
    assert bench.ceilings() == {}
    bench.report(0, 1000 + DRIFT_US // STEPS)
    assert bench.ceilings() == {0: 1900}
    bench.report(0, 1099)
    assert bench.ceilings() == {0: 1899}, "one that would be too high falls at once"


def test_nothing_of_one_attempt_counts_in_the_next() -> None:
    job = graph(DRIFT_US, DRIFT_US, meet=[(0, 1)])
    bench = Bench(job)
    bench.report(0, 5000)
    bench.report(1, HIGH)
    assert bench.ceilings() == {0: 5800, 1: 5800}
    bench.drift.attempt_over()
    bench.report(0, 9000)
    assert bench.ceilings() == {}
    bench.begin(job, 1)
    assert bench.ceilings() == {}, "nothing is known of the next attempt"
    bench.report(0, 5000)
    bench.report(1, 5000)
    assert bench.ceilings() == {0: 5800, 1: 5800}
    bench.begin(job, 2, finished=[TaskId(1, 0)])
    bench.report(0, 5000)
    assert bench.ceilings() == {0: 5800, 1: 5800}, "what had finished is not waited for"


@pytest.mark.parametrize(
    ("before_us", "now_us", "moved"),
    [(0, 0, False), (0, 9, False), (0, 10, True), (0, -1, True), (0, HIGH, True), (HIGH, HIGH, False), (LOW, 0, True)],
)
def test_a_change_is_sent_if_it_is_a_step_or_falls(before_us: int, now_us: int, moved: bool) -> None:
    assert is_moved(before_us, now_us, 10) is moved


# ---- readers and coordinator together


class Times:
    def __init__(self) -> None:
        self.reached_us: dict[int, int] = {}

    def progress_us(self, split: int) -> int:
        return self.reached_us.get(split, MIN_WATERMARK_US)


class Reader:
    """A subtask that reads its splits batch by batch, and one after the other, while its limit holds none of them."""

    def __init__(self, ref: TaskId, splits: list[list[int]], outbox: deque[m.SourceProgress]) -> None:
        self.ref = ref
        self.left = {number: deque(times_us) for number, times_us in enumerate(splits) if times_us}
        self.empty: set[int] = set()
        """The splits without rows at present."""
        self.times = Times()
        self.limit = DriftLimit(lambda us, splits: outbox.append(m.SourceProgress(0, ref, us, splits)))
        self.limit.begin(self.times, DRIFT_US)
        self.update()

    def update(self) -> None:
        self.limit.update(self.counted)

    @property
    def counted(self) -> list[int]:
        return [number for number in self.left if number not in self.empty]

    @property
    def readable(self) -> list[int]:
        return [number for number in self.counted if not self.limit.holds(number)]

    def read(self, number: int) -> None:
        self.times.reached_us[number] = max(self.left[number].popleft(), self.times.progress_us(number))
        if not self.left[number]:
            del self.left[number]
        self.update()

    def rest(self, number: int, is_empty: bool) -> None:
        (self.empty.add if is_empty else self.empty.discard)(number)
        self.update()


_SPLIT = st.lists(st.integers(0, 2000), max_size=12).map(lambda steps: [sum(steps[: i + 1]) for i in range(len(steps))])
_SUBTASK = st.lists(_SPLIT, max_size=3)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.lists(_SUBTASK, min_size=2, max_size=2), min_size=1, max_size=3), st.integers(0, 1 << 30), st.booleans()
)
def test_splits_stay_together_and_all_are_read_to_the_end(
    sources: list[list[list[list[int]]]], seed: int, has_lulls: bool
) -> None:
    random = Random(seed)
    job = graph(*(DRIFT_US for _ in sources), meet=[tuple(range(len(sources)))], parallelism=2)
    bench = Bench(job)
    inbox: dict[TaskId, deque[int]] = {}
    outbox: dict[TaskId, deque[m.SourceProgress]] = {}
    readers = {}
    for vertex, subtasks in enumerate(sources):
        for subtask, splits in enumerate(subtasks):
            ref = TaskId(vertex, subtask)
            inbox[ref], outbox[ref] = deque(), deque()
            readers[ref] = Reader(ref, splits, outbox[ref])
    for _ in range(20_000):
        moves: list[tuple[str, TaskId, int]] = []
        for ref, reader in readers.items():
            moves += [("read", ref, number) for number in reader.readable]
            moves += [("ceiling", ref, 0)] * bool(inbox[ref]) + [("report", ref, 0)] * bool(outbox[ref])
            moves += [("wake", ref, number) for number in reader.empty]
            moves += [("rest", ref, number) for number in reader.counted if has_lulls and random.random() < 0.05]
        if not moves:
            break
        move, ref, number = random.choice(moves)
        reader = readers[ref]
        if move == "read":
            at_us = reader.times.progress_us(number)
            lowest_us = min(each.times.progress_us(split) for each in readers.values() for split in each.left)
            assert has_lulls or at_us <= max(lowest_us, lowest_us + DRIFT_US), (ref, number, at_us, lowest_us)
            reader.read(number)
        elif move == "ceiling":
            reader.limit.ceiling_us = inbox[ref].popleft()
        elif move == "report":
            bench.drift.report(outbox[ref].popleft())
            for vertex, ceiling_us in bench.ceilings().items():
                for subtask in (0, 1):
                    inbox[TaskId(vertex, subtask)].append(ceiling_us)
        else:
            reader.rest(number, move == "rest")
        reader.limit.check(reader.counted)
    assert not any(reader.left for reader in readers.values()), "a split is held back for good"
