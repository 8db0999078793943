"""Which sources are kept in step in event time: those with a drift whose rows meet in the job.

Rows that meet wait for each other, in joins and windows, and what waits is state. Sources that have nothing to do with
each other are not kept in step: a job may read history in one part and the present in another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from midstream.engine.graph.job_graph import JobGraph
from midstream.engine.graph.source_event_time import with_splits
from midstream.engine.operators.watermarks import TimestampsOperator


@dataclass(frozen=True, slots=True)
class LimitedSource:
    """A source that is not read further ahead than `drift_us` of the others in its group."""

    vertex: int
    parallelism: int
    operator: TimestampsOperator
    """The operator that makes its event time, and limits the drift."""

    @property
    def drift_us(self) -> int:
        assert self.operator.strategy.drift_us is not None
        return self.operator.strategy.drift_us


def drift_groups(graph: JobGraph) -> tuple[tuple[LimitedSource, ...], ...]:
    """Return the groups: sources belong together if their rows, or what is computed from them, reach a common vertex."""
    part = list(range(len(graph.vertices)))
    for edge in graph.edges:
        joined, kept = part[edge.source], part[edge.target]
        part = [kept if each == joined else each for each in part]
    groups: dict[int, list[LimitedSource]] = {}
    for vertex in graph.vertices:
        limits = [operator for _, operator in with_splits(vertex) if operator.strategy.drift_us is not None]
        if limits:  # of several in one task the last one counts, as in `limit_drift`
            source = LimitedSource(vertex.id, vertex.parallelism, limits[-1])
            groups.setdefault(part[vertex.id], []).append(source)
    return tuple(map(tuple, groups.values()))


def drifts_without_splits(graph: JobGraph) -> Iterator[TimestampsOperator]:
    """Yield the operators with a drift that do not see the splits of a source."""
    for vertex in graph.vertices:
        seen = [operator for _, operator in with_splits(vertex)]
        for spec in vertex.operators:
            operator = spec.operator
            if isinstance(operator, TimestampsOperator) and operator.strategy.drift_us is not None:
                if operator not in seen:
                    yield operator
