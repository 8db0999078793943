"""The job graph for reading: a text for people, a dict for machines. Never contains rows or secrets."""

from __future__ import annotations

from typing import TypedDict

from midstream.graph.job_graph import Edge, JobGraph, Partitioning


class OperatorDescription(TypedDict):
    uid: str
    name: str
    role: str
    """source, operator, or sink."""


class VertexDescription(TypedDict):
    id: int
    name: str
    parallelism: int
    operators: list[OperatorDescription]


class EdgeDescription(TypedDict):
    id: int
    source: int
    target: int
    partitioning: str
    keys: list[str]
    port: int
    side_output: str | None
    columns: dict[str, str]


class GraphDescription(TypedDict):
    slots: int
    max_parallelism: int
    vertices: list[VertexDescription]
    edges: list[EdgeDescription]


def describe(graph: JobGraph) -> GraphDescription:
    """Everything about the graph that a command line or a page can show, ready for JSON."""
    vertices: list[VertexDescription] = []
    for vertex in graph.vertices:
        operators: list[OperatorDescription] = []
        if vertex.source is not None:
            operators.append({"uid": vertex.source.uid, "name": vertex.source.name, "role": "source"})
        for spec in vertex.operators:
            operators.append({"uid": spec.uid, "name": spec.name, "role": "sink" if spec.sink else "operator"})
        vertices.append(
            {"id": vertex.id, "name": vertex.name, "parallelism": vertex.parallelism, "operators": operators}
        )
    edges: list[EdgeDescription] = [
        {
            "id": edge.id,
            "source": edge.source,
            "target": edge.target,
            "partitioning": edge.partitioning.value,
            "keys": list(edge.keys),
            "port": edge.port,
            "side_output": edge.tag,
            "columns": {field.name: str(field.type) for field in edge.schema},
        }
        for edge in graph.edges
    ]
    return {
        "slots": graph.slots,
        "max_parallelism": graph.max_parallelism,
        "vertices": vertices,
        "edges": edges,
    }


def describe_text(graph: JobGraph) -> str:
    """One line per vertex, and below it one per edge into it.

    >>> print(describe_text(graph))
    2 vertices, 2 slots, at most 128 key groups
    [0] ×2  flights → filter
    [1] ×2  window → parquet
          ← [0] keyed(origin)
    """
    width = len(str(max(vertex.parallelism for vertex in graph.vertices)))
    count, slots = len(graph.vertices), graph.slots
    vertices, slots_text = "vertex" if count == 1 else "vertices", "slot" if slots == 1 else "slots"
    lines = [f"{count} {vertices}, {slots} {slots_text}, at most {graph.max_parallelism} key groups"]
    for vertex in graph.vertices:
        lines.append(f"[{vertex.id}] ×{vertex.parallelism:<{width}}  {vertex.name}")
        lines.extend(f"      ← {_edge_text(edge)}" for edge in graph.inputs(vertex.id))
    return "\n".join(lines)


def _edge_text(edge: Edge) -> str:
    how = edge.partitioning.value
    if edge.partitioning is Partitioning.KEYED:
        how += f"({', '.join(edge.keys)})"
    side = f" side output {edge.tag!r}," if edge.tag is not None else ""
    port = f", input {edge.port}" if edge.port else ""
    return f"[{edge.source}]{side} {how}{port}"
