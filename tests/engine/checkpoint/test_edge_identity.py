"""An edge is known by what is at its ends, and by which of the edges between the same ends it is."""

from __future__ import annotations

from midstream.engine.checkpoint.edge_identity import EdgeIdentity, edge_identities, loses_edges
from midstream.engine.checkpoint.metadata import EdgeLayout, VertexLayout
from midstream.engine.graph.job_graph import Edge, JobGraph, OperatorSpec, Partitioning, SourceSpec, Vertex
from recovering import SCHEMA


def edge(number: int, source: int, target: int, port: int = 0, tag: str | None = None) -> EdgeLayout:
    return EdgeLayout(number, source, target, "rebalance", (), port, tag, ())


def test_ends_are_operators_ports_and_side_outputs_and_edges_alike_are_counted() -> None:
    vertices = [VertexLayout(0, "", 1, ("files", "map"), "files"), VertexLayout(1, "", 1, ("join", "sink"), None)]
    edges = [edge(0, 0, 1), edge(1, 0, 1, port=1), edge(2, 0, 1), edge(3, 0, 1, tag="late")]
    assert edge_identities(vertices, edges) == [
        EdgeIdentity("map", "join", 0, None, 0),
        EdgeIdentity("map", "join", 1, None, 0),
        EdgeIdentity("map", "join", 0, None, 1),
        EdgeIdentity("map", "join", 0, "late", 0),
    ]


def graph(*partitionings: Partitioning) -> JobGraph:
    source = SourceSpec("source", "source", None)  # type: ignore[arg-type]
    sink = OperatorSpec("sink", "sink", None)  # type: ignore[arg-type]
    edges = tuple(Edge(i, 0, 1, partitioning, SCHEMA) for i, partitioning in enumerate(partitionings))
    return JobGraph((Vertex(0, 1, source, ()), Vertex(1, 1, None, (sink,))), edges, 16)


def test_edges_are_lost_when_rows_in_flight_between_their_ends_have_nowhere_to_go() -> None:
    one, two = graph(Partitioning.REBALANCE), graph(Partitioning.REBALANCE, Partitioning.REBALANCE)
    assert loses_edges(one, graph(Partitioning.FORWARD)) and not loses_edges(graph(Partitioning.FORWARD), one)
    assert loses_edges(two, one) and not loses_edges(one, two)
    assert not loses_edges(two, two)
