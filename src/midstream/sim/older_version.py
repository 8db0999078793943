"""Starts of a job by an older midstream, in which barriers overtook on every edge whose rows can be redistributed.

This version must be able to read the rows in flight that such a version has stored, even on edges on which barriers
do not overtake any more (`graph.overtaking`). In the older version tasks could wait for each other forever, so its
checkpoints may time out: that is not a bug of this version.
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
"""The share of such starts in a run that has any."""


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
    """Return how long a checkpoint of this start may take: without a limit if tasks may wait for each other."""
    return math.inf if is_older(graph) else patience_s


def _redistributable(graph: JobGraph) -> frozenset[int]:
    return frozenset(edge.id for edge in graph.edges if edge.partitioning.redistributable)


def in_flight_where_none_may_be(metadata: CheckpointMetadata, scenario: Scenario) -> list[str]:
    """Return complaints about rows in flight in a checkpoint, on edges on which barriers do not overtake."""
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
    """Let slots follow the rule of the version that started their job, within the block."""
    if not scenario.has_older:
        yield
        return
    today: Callable[[JobGraph], frozenset[int]] = vars(slot)["overtakable"]  # a mutation may have replaced it

    def by_start(graph: JobGraph) -> frozenset[int]:
        return _redistributable(graph) if is_older(graph) else today(graph)

    with patch.object(slot, "overtakable", by_start):
        yield
