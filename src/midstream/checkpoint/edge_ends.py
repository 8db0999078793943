"""The ends of an edge: what it is known by wherever its number may be another, in another version or parallelism of a job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from midstream.checkpoint.metadata import EdgeLayout, VertexLayout, layout_of
from midstream.graph.job_graph import JobGraph


class EdgeEnds(NamedTuple):
    """`source` is the uid of the last operator before the edge, with its side output `tag`; `target` that of the first after it."""

    source: str
    target: str
    port: int
    tag: str | None
    number: int
    """Counts the edges between the same ends: a stream may be united with itself, by other keys."""


def edge_ends(vertices: Sequence[VertexLayout], edges: Sequence[EdgeLayout]) -> list[EdgeEnds]:
    """The ends of each edge of a graph, in order."""
    seen: Counter[tuple[str, str, int, str | None]] = Counter()
    found = []
    for edge in edges:
        ends = vertices[edge.source].uids[-1], vertices[edge.target].uids[0], edge.port, edge.tag
        found.append(EdgeEnds(*ends, seen[ends]))
        seen[ends] += 1
    return found


def loses_edges(graph: JobGraph, other: JobGraph) -> bool:
    """Whether rows in flight in `graph` could have nowhere to go in `other`."""
    return graph is not other and bool(_redistributable(graph) - _redistributable(other))


def _redistributable(graph: JobGraph) -> set[EdgeEnds]:
    """Between which ends rows can be in flight."""
    pairs = zip(edge_ends(*layout_of(graph)), graph.edges, strict=True)
    return {ends for ends, edge in pairs if edge.partitioning.redistributable}
