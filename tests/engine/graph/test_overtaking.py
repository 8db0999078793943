"""Where barriers may overtake rows, no task ever waits for itself: random graphs, with the barrier handlers of their tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Set
from random import Random

import pyarrow as pa
import pytest

from midstream.engine.checkpoint.barrier_handler import (
    BarrierAnnounced,
    BarrierEvent,
    BarrierHandler,
    BarrierReceived,
    Block,
    CaptureComplete,
    Resume,
    TakeSnapshot,
    TriggerReceived,
)
from midstream.engine.core.elements import CheckpointBarrier
from midstream.engine.graph.job_graph import Edge, JobGraph, Partitioning, Vertex
from midstream.engine.graph.unaligned_edges import unaligned_edges

FORWARD, KEYED, REBALANCE, BROADCAST = (
    Partitioning.FORWARD,
    Partitioning.KEYED,
    Partitioning.REBALANCE,
    Partitioning.BROADCAST,
)
BARRIER = CheckpointBarrier(1, 0, 0)
"""Of a checkpoint that may overtake at once."""
ROW = "row"


def graph_of(parallelism: int, *edges: tuple[int, int, Partitioning]) -> JobGraph:
    count = 1 + max(target for _, target, _ in edges)
    vertices = tuple(Vertex(i, parallelism, None, ()) for i in range(count))
    schema = pa.schema([])
    return JobGraph(vertices, tuple(Edge(i, s, t, p, schema) for i, (s, t, p) in enumerate(edges)), 16)


def random_graph(random: Random) -> JobGraph:
    tasks = random.randint(3, 7)
    kinds = (FORWARD, KEYED, KEYED, REBALANCE, BROADCAST)
    edges = [
        (source, target, random.choice(kinds))
        for target in range(1, tasks)
        for source in random.sample(range(target), random.randint(1, min(3, target)))
    ]
    return graph_of(random.choice((1, 2, 2, 3)), *edges)


DIAMOND = graph_of(2, (0, 1, FORWARD), (1, 2, KEYED), (2, 3, KEYED), (1, 3, BROADCAST))
"""Task 1 sends to 3 both itself and through 2."""
CROSSED = graph_of(
    2,
    *((0, 1, FORWARD), (0, 2, FORWARD), (1, 3, KEYED), (2, 4, KEYED)),
    *((3, 5, KEYED), (4, 6, KEYED), (2, 5, BROADCAST), (1, 6, BROADCAST)),
)
"""What 1 sends is held back at 5 for the sake of 2, and what 2 sends is held back at 6 for the sake of 1."""
ALONE = graph_of(1, (0, 1, FORWARD), (1, 2, KEYED), (0, 2, KEYED), (1, 3, KEYED), (2, 4, KEYED), (3, 4, BROADCAST))
"""Task 3 gets barriers from task 1 only."""


class Subtask:
    def __init__(self, network: Network, vertex: int, subtask: int) -> None:
        graph = network.graph
        self.network = network
        self.channels = [
            (edge, producer) for edge in graph.inputs(vertex) for producer in graph.producers(edge, subtask)
        ]
        self.queues: list[deque[object]] = [deque() for _ in self.channels]
        capturable = [i for i, (edge, _) in enumerate(self.channels) if edge.id in network.overtaken]
        self.handler = BarrierHandler(len(self.channels), capturable)
        self.outputs = graph.outputs(vertex)
        self.subtask = subtask
        self.rows = 0 if self.channels else network.random.randint(1, 6)
        """Of a source: how many it still has."""
        self.blocked: set[int] = set()
        self.capturing: set[int] = set()
        self.snapshots = 0

    def reached(self, edge: Edge) -> list[tuple[Subtask, int]]:
        found = []
        for consumer in self.network.graph.consumers(edge, self.subtask):
            task = self.network.tasks[edge.target, consumer]
            found.append((task, task.channels.index((edge, self.subtask))))
        return found

    def steps(self) -> Iterator[tuple[str, int]]:
        may_emit = all(ROW not in task.queues[at] for edge in self.outputs for task, at in self.reached(edge))
        if not self.channels and not self.snapshots:
            yield "trigger", 0
        if self.rows and may_emit:
            yield "emit", 0
        for channel, queue in enumerate(self.queues):
            if queue and channel not in self.blocked and (queue[0] is BARRIER or may_emit):
                yield "read", channel

    def step(self, what: str, channel: int) -> None:
        if what == "trigger":
            self.handle(TriggerReceived(BARRIER))
        elif what == "emit":
            self.rows -= 1
            self.emit()
        elif self.queues[channel].popleft() is BARRIER:
            self.handle(BarrierReceived(channel, BARRIER))
        else:
            self.emit()

    def emit(self) -> None:
        for edge in self.outputs:
            reached = self.reached(edge)
            if edge.partitioning in (KEYED, REBALANCE):
                reached = [self.network.random.choice(reached)]
            for task, at in reached:
                task.queues[at].append(ROW)

    def handle(self, event: BarrierEvent) -> None:
        for instruction in self.handler.handle(event):
            match instruction:
                case Block(channel):
                    self.blocked.add(channel)
                case Resume(channels):
                    self.blocked.difference_update(channels)
                case TakeSnapshot(_, overtaking, capture):
                    self.snapshots += 1
                    for channel in capture:
                        if BARRIER in self.queues[channel]:
                            self.queues[channel].remove(BARRIER)
                        else:
                            self.capturing.add(channel)
                    for edge in self.outputs:
                        may_overtake = overtaking and edge.id in self.network.overtaken
                        for task, at in self.reached(edge):
                            self.network.later.append((task, at, may_overtake))
                case CaptureComplete():
                    pass
                case _:
                    raise AssertionError(instruction)

    def arrives(self, channel: int, may_overtake: bool) -> None:
        if channel in self.capturing:
            self.capturing.remove(channel)
            self.handle(BarrierAnnounced(channel, BARRIER))
            return
        if may_overtake and self.network.random.random() < 0.5:  # the rows are still with their producer
            self.queues[channel].appendleft(BARRIER)
        else:
            self.queues[channel].append(BARRIER)
        self.handle(BarrierAnnounced(channel, BARRIER, self.queues[channel][0] is BARRIER))


class Network:
    """Every channel has room for one row, and a task processes a row if there is room for what it emits."""

    def __init__(self, graph: JobGraph, overtaken: Set[int], random: Random) -> None:
        self.graph = graph
        self.overtaken = overtaken
        self.random = random
        self.later: list[tuple[Subtask, int, bool]] = []
        """Barriers on their way."""
        self.tasks: dict[tuple[int, int], Subtask] = {}
        for vertex in graph.vertices:
            for subtask in range(vertex.parallelism):
                self.tasks[vertex.id, subtask] = Subtask(self, vertex.id, subtask)

    def run(self) -> list[tuple[int, int]]:
        """Any order of steps, until none is left; which tasks have not taken a snapshot, or still have rows then."""
        while True:
            while self.later:
                task, channel, may_overtake = self.later.pop(0)
                task.arrives(channel, may_overtake)
            steps = [(task, *step) for task in self.tasks.values() for step in task.steps()]
            if not steps:
                return [ref for ref, task in self.tasks.items() if task.snapshots != 1 or any(task.queues) or task.rows]
            task, what, channel = self.random.choice(steps)
            task.step(what, channel)


def redistributable(graph: JobGraph) -> frozenset[int]:
    return frozenset(edge.id for edge in graph.edges if edge.partitioning.redistributable)


@pytest.mark.parametrize("graph", [DIAMOND, CROSSED, ALONE], ids=["diamond", "crossed", "alone"])
def test_tasks_would_wait_for_themselves_if_barriers_overtook_wherever_rows_can_be_moved(graph: JobGraph) -> None:
    overtaken = redistributable(graph)
    assert any(Network(graph, overtaken, Random(seed)).run() for seed in range(2_000))
    assert unaligned_edges(graph) < overtaken


@pytest.mark.parametrize("start", range(0, 1_000, 250))
def test_every_checkpoint_of_every_graph_completes(start: int) -> None:
    for seed in range(start, start + 250):
        random = Random(seed)
        graph = (DIAMOND, CROSSED, ALONE)[seed // 4 % 3] if seed % 4 == 0 else random_graph(random)
        stuck = Network(graph, unaligned_edges(graph), random).run()
        assert not stuck, (seed, graph.edges, stuck)


def test_only_what_leads_back_to_a_task_is_read_in_order() -> None:
    assert unaligned_edges(DIAMOND) == {2}, (
        "the barrier on the way from 1 to 2 waits its turn; that from 2 to 3 need not"
    )
    assert unaligned_edges(ALONE) == {2, 4}


@pytest.mark.parametrize(
    "graph",
    [
        graph_of(2, (0, 1, KEYED), (1, 2, FORWARD), (2, 3, KEYED), (3, 4, REBALANCE)),
        graph_of(2, (0, 1, FORWARD), (1, 2, FORWARD), (2, 3, KEYED), (1, 4, FORWARD), (3, 5, FORWARD)),
        graph_of(2, (0, 2, KEYED), (1, 2, BROADCAST), (2, 3, KEYED)),
        graph_of(2, (0, 2, KEYED), (1, 2, BROADCAST), (2, 4, KEYED), (3, 5, BROADCAST), (4, 5, KEYED)),
        graph_of(2, (0, 1, KEYED), (0, 2, KEYED), (1, 3, KEYED), (2, 3, KEYED), (1, 4, BROADCAST), (3, 4, KEYED)),
    ],
    ids=["a chain", "two chains", "rules", "rules twice", "no task upstream aligns"],
)
def test_where_no_task_can_wait_for_itself_barriers_overtake(graph: JobGraph) -> None:
    assert unaligned_edges(graph) == redistributable(graph)
