"""Small graphs, and checkpoints of them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pyarrow as pa

from in_memory import NeverRun, NoRows
from midstream.engine.checkpoint.metadata import CheckpointMetadata, OperatorState, SourcePosition, layout_of
from midstream.engine.graph.job_graph import Edge, JobGraph, OperatorSpec, Partitioning, SourceSpec, Vertex
from midstream.engine.operators.source_api import Split
from midstream.engine.protocol.messages import OperatorSnapshot

SCHEMA = pa.schema([("n", pa.int64())])
MAX_PARALLELISM = 16
SPLIT = msgspec.msgpack.encode(Split("file", b"a"))


def chain(*uids: str) -> tuple[OperatorSpec, ...]:
    return tuple(OperatorSpec(uid, uid.title(), NeverRun()) for uid in uids)


def pipeline(
    sources: int = 2, workers: int = 2, keyed: bool = True, uids: tuple[str, ...] = ("count",), source: str = "read"
) -> JobGraph:
    """source → one chain of operators."""
    kind = Partitioning.KEYED if keyed else Partitioning.FORWARD
    return JobGraph(
        (
            Vertex(0, sources, SourceSpec(source, source.title(), NoRows()), ()),
            Vertex(1, workers, None, chain(*uids)),
        ),
        (Edge(0, 0, 1, kind, SCHEMA, ("n",) if keyed else ()),),
        MAX_PARALLELISM,
    )


def metadata_of(
    graph: JobGraph,
    states: Mapping[str, tuple[OperatorSnapshot, ...]] | None = None,
    *,
    checkpoint_id: int = 1,
    epoch: int = 1,
    job_name: str = "job",
    finished: Mapping[str, tuple[int, ...]] | None = None,
    files: tuple[str, ...] = (),
    settings: Mapping[str, tuple[tuple[str, str, str], ...]] | None = None,
    forms: Mapping[str, tuple[tuple[str, bytes], ...]] | None = None,
) -> CheckpointMetadata:
    """A completed checkpoint of `graph` with this state by uid."""
    operators = []
    for vertex in graph.vertices:
        for spec in vertex.specs:
            subtasks = (states or {}).get(spec.uid) or tuple(
                OperatorSnapshot(spec.uid) for _ in range(vertex.parallelism)
            )
            ended = (finished or {}).get(spec.uid, ())
            of = (settings or {}).get(spec.uid, ()), (forms or {}).get(spec.uid, ())
            operators.append(OperatorState(spec.uid, spec.name, vertex.id, vertex.parallelism, subtasks, ended, *of))
    vertices, edges = layout_of(graph)
    return CheckpointMetadata(
        job_name=job_name,
        job_id="id",
        checkpoint_id=checkpoint_id,
        epoch=epoch,
        attempt=0,
        created_ms=1,
        completed_ms=2,
        max_parallelism=graph.max_parallelism,
        vertices=vertices,
        edges=edges,
        operators=tuple(operators),
        sources=tuple(
            SourcePosition(v.source.uid, b"5", False, (SPLIT,)) for v in graph.vertices if v.source is not None
        ),
        committables=(),
        state_bytes=0,
        files=files,
    )
