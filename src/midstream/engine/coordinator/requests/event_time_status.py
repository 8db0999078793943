"""How far event time has advanced on each edge, and what holds it back, computed from the metrics of tasks. Pure.

Event time begins at sources and at operators that make watermarks. The event time of a task is the lowest of the
channels for which it waits. So what holds it back is found by following the slowest channel to its producer,
repeatedly, up to a task at which event time begins.
"""

from __future__ import annotations

from collections.abc import Mapping

from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.core.ids import TaskId
from midstream.engine.graph.job_graph import Edge, JobGraph, Vertex
from midstream.engine.protocol.job_status import HeldBackStatus
from midstream.engine.protocol.task_metrics import TaskMetrics

Metrics = Mapping[TaskId, TaskMetrics]
"""The metrics of the tasks that have reported."""


def edge_watermark_us(graph: JobGraph, edge: Edge, metrics: Metrics) -> int | None:
    """Return `FlowStatus.watermark_us` of an edge; None until all consumers have reported."""
    marks = []
    for ref in _subtasks(graph.vertices[edge.target]):
        if ref not in metrics:
            return None
        marks += [each.watermark_us for each in metrics[ref].inputs if each.edge == edge.id]
    lowest_us = min(marks, default=MIN_WATERMARK_US)
    return None if lowest_us == MIN_WATERMARK_US else lowest_us


def held_back(graph: JobGraph, vertex: Vertex, metrics: Metrics) -> HeldBackStatus | None:
    """Return what holds back the event time of `vertex`; None if nothing is more advanced, or if that is not known."""
    refs = _subtasks(vertex)
    if not all(ref in metrics for ref in refs):
        return None
    if _begins_event_time(vertex):
        return _slowest(vertex, {ref: metrics[ref] for ref in refs})
    furthest_us = MIN_WATERMARK_US
    at: TaskId | None = None
    while at is None or not _begins_event_time(graph.vertices[at.vertex]):
        inputs = [each for ref in (refs if at is None else [at]) if ref in metrics for each in metrics[ref].inputs]
        if not inputs:
            break
        furthest_us = max(furthest_us, *(each.furthest_us for each in inputs))
        slowest = min(inputs, key=lambda each: each.watermark_us)
        watermark_us = slowest.watermark_us
        at = TaskId(graph.edges[slowest.edge].source, slowest.producer)
    if at is None:
        return None
    split = ""
    if at in metrics and (own := metrics[at].slowest_split) is not None:
        split, watermark_us, furthest_us = own.split, own.watermark_us, max(furthest_us, own.furthest_us)
    return _status(graph.vertices[at.vertex], at.subtask, split, watermark_us, furthest_us)


def _slowest(vertex: Vertex, metrics: Metrics) -> HeldBackStatus | None:
    """Return the slowest split of the vertex's own source; None without splits: which subtasks are idle is not known
    then.
    """
    found = [(split, ref) for ref, each in metrics.items() if (split := each.slowest_split) is not None]
    if not found:
        return None
    furthest_us = max(
        *(split.furthest_us for split, _ in found),
        *(each.watermark_us for each in metrics.values() if each.watermark_us != MAX_WATERMARK_US),
        MIN_WATERMARK_US,
    )
    slowest, ref = min(found, key=lambda each: each[0].watermark_us)
    return _status(vertex, ref.subtask, slowest.split, slowest.watermark_us, furthest_us)


def _status(vertex: Vertex, subtask: int, split: str, watermark_us: int, furthest_us: int) -> HeldBackStatus | None:
    if furthest_us <= watermark_us:
        return None
    name = vertex.specs[0].name
    if watermark_us == MIN_WATERMARK_US:
        return HeldBackStatus(vertex.id, name, subtask, split, None, None)
    return HeldBackStatus(vertex.id, name, subtask, split, watermark_us, furthest_us - watermark_us)


def _begins_event_time(vertex: Vertex) -> bool:
    return vertex.source is not None or any(spec.operator.makes_watermarks for spec in vertex.operators)


def _subtasks(vertex: Vertex) -> list[TaskId]:
    return [TaskId(vertex.id, subtask) for subtask in range(vertex.parallelism)]
