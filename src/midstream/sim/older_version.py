"""Starts of a job by an older midstream, one in which barriers overtook on every edge whose rows can be redistributed.

What such a version has stored in flight has to be read once by this one, also on edges on which barriers
keep their place today (`graph.overtaking`). That tasks come to wait for each other in the older version is no bug
of this one: its checkpoints may run out of time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Final
from unittest.mock import patch

import pyarrow as pa

from midstream.checkpoint.metadata import CheckpointMetadata
from midstream.graph.job_graph import Edge, JobGraph, Partitioning, Vertex
from midstream.graph.overtaking import overtakable
from midstream.sim.scenario import Scenario
from midstream.worker import slot

NO_COLUMNS: Final = pa.schema([])
SHARE: Final = 0.5
"""Of the starts of a run that has such starts."""


class OlderGraph(JobGraph):
    """The job graph of a start by the older version."""


def started_by_older(scenario: Scenario, job_id: str) -> bool:
    return scenario.has_older and Random(f"older {scenario.seed} {job_id}").random() < SHARE


def as_started(graph: JobGraph, scenario: Scenario, job_id: str) -> JobGraph:
    is_older = started_by_older(scenario, job_id)
    return OlderGraph(graph.vertices, graph.edges, graph.max_parallelism) if is_older else graph


def is_older(graph: JobGraph) -> bool:
    return isinstance(graph, OlderGraph)


def patience_of(graph: JobGraph, patience_s: float) -> float:
    """How long a checkpoint of this start may take: for ever, if tasks may come to wait for each other."""
    return math.inf if is_older(graph) else patience_s


def _redistributable(graph: JobGraph) -> frozenset[int]:
    return frozenset(edge.id for edge in graph.edges if edge.partitioning.redistributable)


def in_flight_where_none_may_be(metadata: CheckpointMetadata, scenario: Scenario) -> list[str]:
    """Rows in flight in a checkpoint on an edge on which barriers keep their place: complaints."""
    if not metadata.channels:
        return []
    vertices = tuple(Vertex(vertex.id, vertex.parallelism, None, ()) for vertex in metadata.vertices)
    edges = tuple(
        Edge(edge.id, edge.source, edge.target, Partitioning(edge.partitioning), NO_COLUMNS) for edge in metadata.edges
    )
    graph = JobGraph(vertices, edges, metadata.max_parallelism)
    may_be = _redistributable(graph) if started_by_older(scenario, metadata.job_id) else overtakable(graph)
    wrong = sorted({state.edge for state in metadata.channels} - may_be)
    where = f"checkpoint {metadata.checkpoint_id}: rows in flight on edge"
    return [f"{where} {edge}, on which barriers do not overtake" for edge in wrong]


@contextmanager
def by_version(scenario: Scenario) -> Iterator[None]:
    """For as long as a run lasts, slots go by the rule of the version that started their job."""
    if not scenario.has_older:
        yield
        return
    today: Callable[[JobGraph], frozenset[int]] = vars(slot)["overtakable"]  # a mutation may have replaced it

    def by_start(graph: JobGraph) -> frozenset[int]:
        return _redistributable(graph) if is_older(graph) else today(graph)

    with patch.object(slot, "overtakable", by_start):
        yield
