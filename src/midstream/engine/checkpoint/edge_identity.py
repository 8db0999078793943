"""The ends of an edge, by which it is identified in another version or parallelism of a job, where its number may
differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from midstream.engine.checkpoint.metadata import EdgeLayout, VertexLayout, layout_of
from midstream.engine.graph.job_graph import JobGraph


class EdgeIdentity(NamedTuple):
    """Identifies an edge. `source` is the uid of the last operator before it, `tag` the side output of that operator,
    and `target` the uid of the first operator after it.
    """

    source: str
    target: str
    port: int
    tag: str | None
    number: int
    """The number of the edge among those between the same ends: a stream may be united with itself, by other keys."""


def edge_identities(vertices: Sequence[VertexLayout], edges: Sequence[EdgeLayout]) -> list[EdgeIdentity]:
    """Return the ends of each edge of a graph, in order."""
    seen: Counter[tuple[str, str, int, str | None]] = Counter()
    found = []
    for edge in edges:
        ends = vertices[edge.source].uids[-1], vertices[edge.target].uids[0], edge.port, edge.tag
        found.append(EdgeIdentity(*ends, seen[ends]))
        seen[ends] += 1
    return found


def loses_edges(graph: JobGraph, other: JobGraph) -> bool:
    """Return whether an edge of `graph` that may have rows in flight does not exist in `other`."""
    return graph is not other and bool(_redistributable(graph) - _redistributable(other))


def _redistributable(graph: JobGraph) -> set[EdgeIdentity]:
    """Return the ends between which rows in flight can be stored and assigned again."""
    pairs = zip(edge_identities(*layout_of(graph)), graph.edges, strict=True)
    return {ends for ends, edge in pairs if edge.partitioning.redistributable}
