"""Storage in memory, small graphs, and checkpoints of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pyarrow as pa

from midstream.checkpoint.metadata import CheckpointMetadata, OperatorState, SourcePosition, layout_of
from midstream.core.errors import StorageError
from midstream.graph.job_graph import Edge, JobGraph, OperatorSpec, Partitioning, SourceSpec, Vertex
from midstream.operators.base import Operator
from midstream.operators.source import Discovery, DiscoveryContext, Source, Split, SplitReader
from midstream.protocol.messages import OperatorSnapshot

SCHEMA = pa.schema([("n", pa.int64())])
MAX_PARALLELISM = 16


class MemoryStorage:
    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def read(self, path: str) -> bytes:
        if path not in self.files:
            raise StorageError(f"cannot read {path}: there is no such file")
        return self.files[path]

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        assert path not in self.files, path
        self.files[path] = b"".join(parts)

    def create(self, path: str, data: bytes) -> bool:
        if path in self.files:
            return False
        self.files[path] = data
        return True

    def delete(self, path: str) -> None:
        for file in [file for file in self.files if file == path or file.startswith(f"{path}/")]:
            del self.files[file]

    def list(self, path: str) -> list[str]:
        below = f"{path}/" if path else ""
        return sorted({f[len(below) :].split("/", 1)[0] for f in self.files if f.startswith(below)})

    def exists(self, path: str) -> bool:
        return path in self.files or any(file.startswith(f"{path}/") for file in self.files)


class NoRows(Source):
    schema = SCHEMA

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        raise AssertionError("not asked here")

    def open_split(self, split: Split) -> SplitReader:
        raise AssertionError("not asked here")


def chain(*uids: str) -> tuple[OperatorSpec, ...]:
    return tuple(OperatorSpec(uid, uid.title(), Operator()) for uid in uids)


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
) -> CheckpointMetadata:
    """A completed checkpoint of `graph` with this state by uid."""
    operators = []
    for vertex in graph.vertices:
        for spec in vertex.specs:
            subtasks = (states or {}).get(spec.uid) or tuple(
                OperatorSnapshot(spec.uid) for _ in range(vertex.parallelism)
            )
            ended = (finished or {}).get(spec.uid, ())
            operators.append(OperatorState(spec.uid, spec.name, vertex.id, vertex.parallelism, subtasks, ended))
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
            SourcePosition(v.source.uid, b"5", False, (b"split",)) for v in graph.vertices if v.source is not None
        ),
        committables=(),
        state_bytes=0,
        files=files,
    )
