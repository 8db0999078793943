"""Which column of a source's rows the job uses as event time, so that the source can say from when on a split has rows."""

from __future__ import annotations

from collections.abc import Iterator

from midstream.engine.graph.job_graph import Vertex
from midstream.engine.operators.watermarks import TimestampsOperator


def with_splits(vertex: Vertex) -> Iterator[tuple[int, TimestampsOperator]]:
    """Yield the operators that make watermarks for each split of the source in their task, with their index."""
    if vertex.source is None:
        return
    for index, spec in enumerate(vertex.operators):
        if isinstance(spec.operator, TimestampsOperator):
            yield index, spec.operator
        if not spec.operator.keeps_splits:
            return


def source_event_time(vertex: Vertex) -> str | None:
    """Return the column of the source; None if event time is made of something else, or of several columns."""
    columns = {_source_column(vertex, index, operator.column) for index, operator in with_splits(vertex)}
    return columns.pop() if len(columns) == 1 else None


def _source_column(vertex: Vertex, index: int, column: str) -> str | None:
    found: str | None = column
    for spec in reversed(vertex.operators[:index]):
        found = None if found is None else spec.operator.input_column(found)
    return found
