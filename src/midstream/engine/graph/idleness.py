"""The origins of a channel's idleness: the subtasks that assign event time, on whose idleness it depends.

A task is idle when all its inputs are. So two channels with the same origins become idle together and active together,
though a consumer is notified of the one before the other; and a channel whose origins are all among those of a second
one cannot stay active while the second one stays idle.
"""

from __future__ import annotations

from dataclasses import dataclass

from midstream.engine.core.ids import TaskId
from midstream.engine.graph.job_graph import JobGraph, Vertex


@dataclass(frozen=True, slots=True)
class IdleOrigin:
    """All subtasks of the vertices `every`, and subtask `subtask` of the vertices `one`."""

    every: frozenset[int] = frozenset()
    one: frozenset[int] = frozenset()
    subtask: int = 0
    """0 where `one` is empty, so that the same origins are equal."""

    @property
    def is_empty(self) -> bool:
        return not self.every and not self.one

    def is_within(self, other: IdleOrigin) -> bool:
        return self.is_within_all(other) or (self.subtask == other.subtask and self.is_within_alike(other))

    def is_within_all(self, other: IdleOrigin) -> bool:
        """For any subtasks of the two."""
        return self.every <= other.every and self.one <= other.every

    def is_within_alike(self, other: IdleOrigin) -> bool:
        """If both belong to the same subtask."""
        return self.every <= other.every and self.one <= other.every | other.one

    def is_within_together(self, other: IdleOrigin) -> bool:
        """If `other` stands for the channels of all subtasks."""
        return self.every | self.one <= other.every | other.one


def channel_origins(graph: JobGraph, ref: TaskId) -> list[IdleOrigin]:
    """Return the origin of each channel into a task, in the order of its gates and their channels.

    If all rows of a channel come from unbounded sources and have no event time, its origin is empty.
    """
    found: list[IdleOrigin] = []
    for vertex in graph.vertices[: ref.vertex]:
        found.append(_origin_of(graph, vertex, found))
    origins: list[IdleOrigin] = []
    for edge in graph.inputs(ref.vertex):
        each = found[edge.source]
        origins += [
            IdleOrigin(each.every, each.one, producer if each.one else 0)
            for producer in graph.producers(edge, ref.subtask)
        ]
    return origins


def is_bounded(graph: JobGraph, vertex: int) -> bool:
    """Whether every source that a vertex depends on is bounded."""
    needed = {vertex}
    for each in reversed(graph.vertices[: vertex + 1]):
        if each.id in needed:
            if each.source is not None and not each.source.source.bounded:
                return False
            needed.update(edge.source for edge in graph.inputs(each.id))
    return True


def _origin_of(graph: JobGraph, vertex: Vertex, before: list[IdleOrigin]) -> IdleOrigin:
    """The origins of what a vertex emits, for any one of its subtasks."""
    every, one = frozenset[int](), frozenset[int]()
    has_event_time = any(spec.operator.makes_watermarks for spec in vertex.operators)
    if vertex.source is not None or has_event_time:
        if has_event_time or vertex.source is None or vertex.source.source.bounded:
            one = frozenset((vertex.id,))
    else:
        for edge in graph.inputs(vertex.id):
            read = before[edge.source]
            every |= read.every
            if edge.partitioning.all_to_all:
                every |= read.one
            else:
                one |= read.one
    if vertex.parallelism == 1:
        every, one = every | one, frozenset()
    return IdleOrigin(every, one - every)
