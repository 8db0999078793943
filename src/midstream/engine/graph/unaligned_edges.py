"""Finds the edges on which barriers may overtake rows. An edge whose rows may be moved to other consumers is not always one.

Rows in flight on a forward or broadcast edge belong to their consumers, so barriers keep their position among them, and
a task downstream of such an edge reads up to the barrier before it takes its snapshot. Where rows take two paths, this
could deadlock: task A, which has not reached its barrier, sends to B and to C, and B sends to C. B has already taken
its snapshot (another subtask's barrier had arrived), so that C blocks the channel of B, and waits for the barrier of A.
Then A waits for B to take its rows, B waits for C, and C for A.

So between tasks that can wait for each other in that way, barriers do not overtake either: B takes its snapshot after
A, C does not block B while it waits for A, and A continues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from midstream.engine.graph.job_graph import Edge, JobGraph, Partitioning


def unaligned_edges(graph: JobGraph) -> frozenset[int]:
    """The ids of the edges on which barriers may overtake rows, whose rows in flight may be part of a checkpoint."""
    upstream = _upstream(graph)
    found = {edge.id for edge in graph.edges if edge.partitioning.redistributable}
    while cyclic := _in_cycles(graph.edges, found, upstream):
        found -= cyclic  # their targets align from now on, and other tasks can wait for these in turn
    return frozenset(found)


def _upstream(graph: JobGraph) -> Sequence[Set[int]]:
    """Return, for each vertex, itself and those whose rows reach it."""
    found: list[Set[int]] = []
    for vertex in graph.vertices:  # in topological order
        found.append({vertex.id}.union(*(found[edge.source] for edge in graph.inputs(vertex.id))))
    return found


def _in_cycles(edges: Sequence[Edge], overtaken: Set[int], upstream: Sequence[Set[int]]) -> set[int]:
    """The edges over which a task would wait for itself, if barriers overtook on all of `overtaken`."""
    aligning = {edge.target for edge in edges if edge.id not in overtaken}
    inputs = {task: [edge.partitioning for edge in edges if edge.target == task] for task in aligning}
    # A task with a single channel never blocks one while it waits for another.
    holding = {task for task in aligning if inputs[task] != [Partitioning.FORWARD]}
    passed = {
        (held, by): {
            edge.id
            for edge in edges
            if edge.id in overtaken and held in upstream[edge.source] and edge.target in upstream[by] - {by}
        }
        for held in aligning
        for by in holding
    }
    waits_for = {task: {by for by in holding if passed[task, by]} for task in aligning}
    for edge in edges:
        if edge.id not in overtaken:
            waits_for[edge.target] |= upstream[edge.source] & aligning
    found = set[int]()
    for (held, by), between in passed.items():
        if between and held in _reached(by, waits_for):
            found |= between
    return found


def _reached(first: int, waits_for: Mapping[int, Set[int]]) -> set[int]:
    found, following = set[int](), [first]
    while following:
        task = following.pop()
        following += waits_for[task] - found
        found |= waits_for[task]
    return found
