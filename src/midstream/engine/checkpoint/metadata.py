"""The metadata of a completed checkpoint: versioned, checksummed, without pickles.

    magic (8) | format version (u32) | payload length (u64) | xxh3_64 (u64) | payload (msgpack)

All numbers are little-endian; the checksum covers version, length and payload, so that a damaged version cannot be
mistaken for another one. The header has this layout in every format. Pure functions: bytes in, structs out.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Final

import msgspec
import xxhash

from midstream.engine.checkpoint.metadata_checks import first_problem
from midstream.engine.core.errors import UNDECODABLE, StorageError
from midstream.engine.graph.job_graph import Edge, JobGraph
from midstream.engine.operators.base import Operator
from midstream.engine.protocol.messages import ChannelState, OperatorSnapshot

MAGIC: Final = b"MIDSTRM\x00"
VERSION: Final = 1
WITH_DELETIONS: Final = 2
"""The format of metadata with deletion vectors: a version that does not know these would restore removed rows."""
_FORMATS: Final = (VERSION, WITH_DELETIONS)
_HEADER: Final = struct.Struct("<8sIQQ")
_COVERED: Final = struct.Struct("<IQ")


class VertexLayout(msgspec.Struct, frozen=True):
    """The operators that ran in one task, the source (if there was one) first."""

    id: int
    name: str
    parallelism: int
    uids: tuple[str, ...]
    source: str | None
    """The uid of its source."""


class EdgeLayout(msgspec.Struct, frozen=True):
    id: int
    source: int
    target: int
    partitioning: str
    keys: tuple[str, ...]
    port: int
    tag: str | None
    columns: tuple[tuple[str, str], ...]
    """The name and type of each column: rows in flight can only be read as those."""
    combined: tuple[tuple[str, str], ...] = ()
    """What combined rows in flight depend on, as `OperatorState.settings`; empty if the edge combines none."""
    layouts: tuple[bytes, ...] = ()
    """The schemas of `Edge.layouts`, for those who read rows in flight without the job's code."""


class SourcePosition(msgspec.Struct, frozen=True):
    """The position of discovery, and the splits found but not yet assigned to a reader."""

    uid: str
    position: bytes | None
    exhausted: bool
    pending: tuple[bytes, ...]
    """Encoded engine.operators.source_api.Split, in the order of assignment."""
    packed: bytes = b""
    """In a file: the splits of `pending`, which is then empty, if there are many; their names are very similar."""


class Committables(msgspec.Struct, frozen=True):
    """The committables that one sink prepared for checkpoint `checkpoint_id`, unless they are known to be committed."""

    checkpoint_id: int
    uid: str
    name: str
    items: tuple[bytes, ...]


class OperatorState(msgspec.Struct, frozen=True):
    """All subtasks of one operator."""

    uid: str
    name: str
    vertex: int
    parallelism: int
    subtasks: tuple[OperatorSnapshot, ...]
    """The snapshots by subtask, without committables, which are stored separately."""
    finished: tuple[int, ...] = ()
    """The subtasks that had reached the end of their data."""
    settings: tuple[tuple[str, str, str], ...] = ()
    """Part ("" for all), setting, value: see `engine.operators.base.Operator.state_settings`."""
    forms: tuple[tuple[str, bytes], ...] = ()
    """Part ("" for the keys), and the columns in which it is stored: see `engine.operators.base.Operator.state_forms`."""

    @property
    def fully_finished(self) -> bool:
        return len(self.finished) == self.parallelism

    @property
    def running(self) -> tuple[int, ...]:
        finished = set(self.finished)
        return tuple(i for i in range(self.parallelism) if i not in finished)


class CheckpointMetadata(msgspec.Struct, frozen=True, kw_only=True):
    job_name: str
    job_id: str
    checkpoint_id: int
    epoch: int
    attempt: int
    created_ms: int
    completed_ms: int
    max_parallelism: int
    vertices: tuple[VertexLayout, ...]
    edges: tuple[EdgeLayout, ...]
    operators: tuple[OperatorState, ...]
    """The state of every operator of the graph, sources included, whether it has state or not."""
    sources: tuple[SourcePosition, ...]
    committables: tuple[Committables, ...]
    """The committables, in the order in which they must be committed."""
    state_bytes: int
    files: tuple[str, ...]
    """All state files that the checkpoint references, sorted; older checkpoints may share them."""
    channels: tuple[ChannelState, ...] = ()
    """The rows in flight. The order of one consumer's input parts is significant."""

    @property
    def finished_vertices(self) -> tuple[int, ...]:
        """The vertices of which every subtask had finished."""
        return tuple(sorted({op.vertex for op in self.operators if op.fully_finished}))


_PACKED_FROM_BYTES: Final = 64 * 2**10
_UNPACKED_BYTES_MAX: Final = 2**30
"""The limit on the unpacked splits of one source, some millions of files: a few damaged bytes could unpack to any
size."""
_CHANNELS_AT_ONCE: Final = 4096
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(CheckpointMetadata).decode
_decode_splits: Final = msgspec.msgpack.Decoder(tuple[bytes, ...]).decode


def layout_of(graph: JobGraph) -> tuple[tuple[VertexLayout, ...], tuple[EdgeLayout, ...]]:
    """Return the shape of a graph, against which a later graph can be checked."""
    vertices = tuple(
        VertexLayout(
            id=vertex.id,
            name=vertex.name,
            parallelism=vertex.parallelism,
            uids=tuple(spec.uid for spec in vertex.specs),
            source=vertex.source.uid if vertex.source else None,
        )
        for vertex in graph.vertices
    )
    edges = tuple(
        EdgeLayout(
            edge.id,
            edge.source,
            edge.target,
            edge.partitioning.value,
            edge.keys,
            edge.port,
            edge.tag,
            columns_of(edge),
            combined_of(edge, graph),
            tuple(layout.serialize().to_pybytes() for layout in edge.layouts),
        )
        for edge in graph.edges
    )
    return vertices, edges


def columns_of(edge: Edge) -> tuple[tuple[str, str], ...]:
    return tuple((field.name, str(field.type)) for field in edge.schema)


def combined_of(edge: Edge, graph: JobGraph) -> tuple[tuple[str, str], ...]:
    """Return what the form of combined batches on `edge` depends on: they become state of the operator downstream."""
    if edge.combiner is None:
        return ()
    return tuple(graph.vertices[edge.target].operators[0].operator.state_settings().get("", {}).items())


def names_of(graph: JobGraph) -> dict[str, str]:
    """Return the name of each operator by uid, sources included, in the order of the graph."""
    return {spec.uid: spec.name for vertex in graph.vertices for spec in vertex.specs}


def settings_of(operator: Operator) -> tuple[tuple[str, str, str], ...]:
    """Return what the state of `operator` depends on, to be compared with that of a later program."""
    return tuple((part, what, value) for part, of in operator.state_settings().items() for what, value in of.items())


def forms_of(operator: Operator) -> tuple[tuple[str, bytes], ...]:
    """Return the columns in which the states of `operator` are stored, and its keys under ""."""
    return tuple((part, form.serialize().to_pybytes()) for part, form in operator.state_forms().items())


def encode_metadata(metadata: CheckpointMetadata) -> bytes:
    payload = b"".join(_encoded(metadata))
    parts = (part for operator in metadata.operators for snapshot in operator.subtasks for part in snapshot.parts)
    version = WITH_DELETIONS if any(chunk.removed for part in parts for chunk in part.chunks) else VERSION
    return _HEADER.pack(MAGIC, version, len(payload), _checksum(version, payload)) + payload


def _encoded(metadata: CheckpointMetadata) -> Iterator[bytes]:
    """Encode in pieces: a single call for 100,000s of channels would block all threads of the process."""
    sources = tuple(map(_packed, metadata.sources))
    without = _encode(msgspec.structs.replace(metadata, sources=sources, channels=()))
    assert CheckpointMetadata.__struct_fields__[-1] == "channels" and without[-1] == 0x90, "no empty array at the end"
    yield without[:-1]
    channels = metadata.channels
    yield struct.pack(">BI", 0xDD, len(channels))  # an array of this length
    for first in range(0, len(channels), _CHANNELS_AT_ONCE):
        yield b"".join(map(_encode, channels[first : first + _CHANNELS_AT_ONCE]))


def decode_metadata(data: bytes, where: str) -> CheckpointMetadata:
    """Decode metadata. Raises StorageError that names `where` and the problem."""
    if data[: len(MAGIC)] != MAGIC[: len(data)] or not data:
        raise StorageError(f"{where}: this is not checkpoint metadata of midstream")
    if len(data) < _HEADER.size:
        raise StorageError(f"{where}: truncated: {len(data)} bytes are less than a header")
    _, version, length, checksum = _HEADER.unpack_from(data)
    payload = memoryview(data)[_HEADER.size :]
    if payload.nbytes < length:
        raise StorageError(f"{where}: truncated: {payload.nbytes} of {length} bytes are present")
    if payload.nbytes > length:
        raise StorageError(f"{where}: {payload.nbytes - length} bytes too long: the file is damaged")
    if _checksum(version, payload) != checksum:
        raise StorageError(f"{where}: the checksum is wrong: the file is damaged")
    if version not in _FORMATS:
        raise StorageError(
            f"{where}: written in format {version} by another version of midstream, and this one reads formats "
            f"{VERSION} and {WITH_DELETIONS}; resume with the version that wrote it"
        )
    try:
        metadata = _decode(payload)
        sources = tuple(map(_unpacked, metadata.sources))
    except (*UNDECODABLE, zlib.error, ValueError) as error:
        raise StorageError(f"{where}: the checksum is correct but the content is invalid: {error}") from error
    problem = first_problem(metadata)
    if problem is not None:
        raise StorageError(
            f"{where}: the checksum is correct but the content is invalid: {problem}. It is damaged, or midstream has "
            "not written it; name another checkpoint with --from"
        )
    return msgspec.structs.replace(metadata, sources=sources)


def _packed(source: SourcePosition) -> SourcePosition:
    if sum(map(len, source.pending)) < _PACKED_FROM_BYTES:
        return source
    return msgspec.structs.replace(source, pending=(), packed=zlib.compress(_encode(source.pending), 1))


def _unpacked(source: SourcePosition) -> SourcePosition:
    if not source.packed:
        return source
    unpacking = zlib.decompressobj()
    data = unpacking.decompress(source.packed, _UNPACKED_BYTES_MAX)
    if not unpacking.eof:
        raise ValueError(
            f"the splits of source {source.uid!r} take more than {_UNPACKED_BYTES_MAX} bytes, or are cut off"
        )
    return msgspec.structs.replace(source, pending=_decode_splits(data), packed=b"")


def _checksum(version: int, payload: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64(_COVERED.pack(version, len(payload)))
    digest.update(payload)
    return digest.intdigest()


def check_job(metadata: CheckpointMetadata, job_name: str, where: str) -> None:
    """Raise StorageError if the checkpoint belongs to a job of another name."""
    if metadata.job_name != job_name:
        raise StorageError(
            f"{where}: this is a checkpoint of the job {metadata.job_name!r}, not of {job_name!r}; "
            "give the job that name, or start from one of its own checkpoints"
        )
