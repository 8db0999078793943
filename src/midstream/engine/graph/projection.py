"""Which columns of a source its task uses: those that no operator needs are not read."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from midstream.engine.graph.job_graph import Vertex
from midstream.engine.operators.base import Operator
from midstream.engine.operators.source_api import Source


def with_projection(vertex: Vertex) -> Vertex:
    """Return the vertex with a source that reads only the columns that its operators need, if it can do so.

    What leaves the task stays the same, so that checkpoints do not depend on it.
    """
    spec = vertex.source
    if spec is None or not vertex.operators or not (spec.source.supports_projection and _is_projected(spec.source)):
        return vertex
    inputs = [spec.source.schema.names, *(_names(each.operator) for each in vertex.operators)]
    wanted = frozenset(inputs.pop())
    for each, names in zip(reversed(vertex.operators), reversed(inputs), strict=True):
        needed = each.operator.columns_needed(wanted)
        wanted = frozenset(names) if needed is None else needed
    return vertex if wanted >= set(spec.source.schema.names) else _narrowed(vertex, wanted)


def _is_projected(source: Source) -> bool:
    """Whether `open_projected` opens what `open_split` does, which a subclass may have replaced alone."""
    made_by = [
        next(each for each in type(source).__mro__ if name in vars(each)) for name in ("open_projected", "open_split")
    ]
    return issubclass(*made_by)


def _names(operator: Operator) -> list[str]:
    """Return the columns that the operator emits; a sink emits none."""
    schema: pa.Schema | None = getattr(operator, "schema", None)
    return [] if schema is None else list(schema.names)


def _narrowed(vertex: Vertex, columns: frozenset[str]) -> Vertex:
    spec = vertex.source
    assert spec is not None
    read = pa.schema([field for field in spec.source.schema if field.name in columns])
    operators = []
    for each in vertex.operators:
        operator = each.operator.narrowed(columns)
        operators.append(replace(each, operator=operator))
        columns = frozenset(_names(operator))
    return replace(vertex, source=replace(spec, columns=read), operators=tuple(operators))
