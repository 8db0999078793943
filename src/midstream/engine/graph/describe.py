"""Formats the job graph as text."""

from __future__ import annotations

from midstream.engine.graph.job_graph import Edge, JobGraph, Partitioning


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
        if vertex.source is not None and vertex.source.columns is not None:
            read, all_of = vertex.source.columns.names, len(vertex.source.source.schema)
            lines.append(f"      reads {len(read)} of {all_of} columns: {', '.join(read)}")
        lines.extend(f"      ← {_edge_text(edge)}" for edge in graph.inputs(vertex.id))
    return "\n".join(lines)


def _edge_text(edge: Edge) -> str:
    how = edge.partitioning.value
    if edge.partitioning is Partitioning.KEYED:
        how += f"({', '.join(edge.keys)})"
    side = f" side output {edge.tag!r}," if edge.tag is not None else ""
    port = f", input {edge.port}" if edge.port else ""
    return f"[{edge.source}]{side} {how}{port}"
