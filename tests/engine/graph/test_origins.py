"""On whose silence the idleness of a channel depends, compared with what follows from the subtasks one by one."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream.connectors.memory.collection_source import CollectionSource
from midstream.engine.core.ids import TaskId
from midstream.engine.graph.idleness import channel_origins
from midstream.engine.graph.job_graph import Edge, JobGraph, OperatorSpec, Partitioning, SourceSpec, Vertex
from midstream.engine.operators.watermarks import TimestampsOperator, WatermarkStrategy

SCHEMA = pa.schema([("at", pa.timestamp("us"))])


def graph(nodes: list[tuple[int, bool, list[tuple[int, Partitioning]]]]) -> JobGraph:
    """Of each node: its parallelism, whether it assigns event time, and from where it reads; nowhere: a source."""
    vertices, edges = [], []
    for number, (parallelism, assigns, reads) in enumerate(nodes):
        source = SourceSpec(f"s{number}", "s", CollectionSource(SCHEMA.empty_table()))
        operator = TimestampsOperator("t", "at", WatermarkStrategy.monotonous(), SCHEMA)
        operators = (OperatorSpec(f"t{number}", "t", operator),) if assigns else ()
        vertices.append(Vertex(number, parallelism, None if reads else source, operators))
        for origin, partitioning in reads:
            edges.append(Edge(len(edges), origin, number, partitioning, SCHEMA))
    return JobGraph(tuple(vertices), tuple(edges), 128)


def subtasks_that_assign(job: JobGraph, ref: TaskId) -> frozenset[TaskId]:
    vertex = job.vertices[ref.vertex]
    if vertex.source is not None or vertex.operators:
        return frozenset((ref,))
    return frozenset(
        each
        for edge in job.inputs(ref.vertex)
        for producer in job.producers(edge, ref.subtask)
        for each in subtasks_that_assign(job, TaskId(edge.source, producer))
    )


@st.composite
def graphs(draw: st.DrawFn) -> JobGraph:
    nodes: list[tuple[int, bool, list[tuple[int, Partitioning]]]] = []
    for number in range(draw(st.integers(2, 6))):
        parallelism = draw(st.integers(1, 3))
        reads: list[tuple[int, Partitioning]] = []
        for origin in draw(st.lists(st.integers(0, number - 1), max_size=3)) if number else []:
            same = nodes[origin][0] == parallelism
            kinds = [Partitioning.REBALANCE, Partitioning.BROADCAST, *([Partitioning.FORWARD] * 2 if same else [])]
            reads.append((origin, draw(st.sampled_from(kinds))))
        nodes.append((parallelism, draw(st.booleans()) and draw(st.booleans()), reads))
    return graph(nodes)


@settings(max_examples=examples(200))
@given(graphs())
def test_a_channel_is_within_another_exactly_if_all_that_its_idleness_depends_on_is(job: JobGraph) -> None:
    for vertex in job.vertices:
        for subtask in range(vertex.parallelism):
            ref = TaskId(vertex.id, subtask)
            found = channel_origins(job, ref)
            channels = [
                subtasks_that_assign(job, TaskId(edge.source, producer))
                for edge in job.inputs(vertex.id)
                for producer in job.producers(edge, subtask)
            ]
            assert len(found) == len(channels)
            for one, its in zip(found, channels, strict=True):
                for other, others in zip(found, channels, strict=True):
                    assert one.is_within(other) == (its <= others), (ref, one, other)
                    assert (one == other) <= (its == others)
                    siblings = [
                        c for o, c in zip(found, channels, strict=True) if (o.every, o.one) == (other.every, other.one)
                    ]
                    if len({o.subtask for o in found if (o.every, o.one) == (other.every, other.one)}) > 1:
                        together = frozenset[TaskId]().union(*siblings)
                        assert one.is_within_together(other) == (its <= together), (ref, one, other)


def test_subtasks_behind_a_shuffle_are_idle_together_and_those_of_a_source_on_their_own() -> None:
    job = graph([(2, False, []), (2, False, [(0, Partitioning.KEYED)]), (1, False, [(1, Partitioning.REBALANCE)])])
    of_source = channel_origins(job, TaskId(1, 0))
    assert not of_source[0].is_within(of_source[1])
    behind = channel_origins(job, TaskId(2, 0))
    assert behind[0] == behind[1]
