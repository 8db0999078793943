"""Checks the metadata of a checkpoint, beyond its types, before anything is computed with it.

Whoever can write to a checkpoint directory can write metadata with a correct checksum. A problem is reported with its
location in the metadata; without these checks it would be an IndexError or a division by zero elsewhere, or a file
outside of the directory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from midstream.engine.checkpoint.extents import files_of
from midstream.engine.core.config import MAX_PARALLELISM_MAX
from midstream.engine.graph.job_graph import Partitioning
from midstream.engine.protocol.messages import ChannelState, ChunkHandle, OperatorSnapshot, Segment
from midstream.engine.state.state_parts import Redistribute

if TYPE_CHECKING:
    from midstream.engine.checkpoint.metadata import CheckpointMetadata

_PARTITIONINGS = frozenset(each.value for each in Partitioning)
_OFFSET_MAX = 2**63 - 1
_REDISTRIBUTIONS = frozenset(each.value for each in Redistribute)


def first_problem(metadata: CheckpointMetadata) -> str | None:
    """Return the first thing that is wrong, and where; None if nothing is."""
    return next(_problems(metadata), None)


def _problems(metadata: CheckpointMetadata) -> Iterator[str]:
    if not 1 <= metadata.max_parallelism <= MAX_PARALLELISM_MAX:
        yield f"max_parallelism is {metadata.max_parallelism}, not 1 to {MAX_PARALLELISM_MAX}"
    for name in ("checkpoint_id", "epoch", "attempt", "created_ms", "completed_ms", "state_bytes"):
        if getattr(metadata, name) < 0:
            yield f"{name} is {getattr(metadata, name)}"
    yield from _problems_of_layout(metadata)
    yield from _problems_of_operators(metadata)
    yield from (f"files: {problem}" for file in metadata.files if (problem := problem_of_path(file)))
    yield from _problems_of_channels(metadata)
    missing = files_of((s for op in metadata.operators for s in op.subtasks), metadata.channels) - set(metadata.files)
    if missing:
        yield f"file {min(missing)!r} is referred to, and is not among its files"


def _problems_of_layout(metadata: CheckpointMetadata) -> Iterator[str]:
    count = len(metadata.vertices)
    for at, vertex in enumerate(metadata.vertices):
        if vertex.id != at:
            yield f"vertex {at} has the id {vertex.id}"
        if not vertex.uids:
            yield f"vertex {at} has no operators"
        if not 1 <= vertex.parallelism <= metadata.max_parallelism:
            yield f"vertex {at} has a parallelism of {vertex.parallelism}, and max_parallelism is {metadata.max_parallelism}"
    for at, edge in enumerate(metadata.edges):
        if edge.id != at or not 0 <= edge.source < count or not 0 <= edge.target < count:
            yield f"edge {at} has the id {edge.id} and leads from vertex {edge.source} to {edge.target} of {count}"
        if edge.partitioning not in _PARTITIONINGS:
            yield f"edge {at} has the partitioning {edge.partitioning!r}"


def _problems_of_operators(metadata: CheckpointMetadata) -> Iterator[str]:
    uids = [operator.uid for operator in metadata.operators]
    if len(set(uids)) < len(uids):
        yield f"two operators have the uid {next(uid for uid in uids if uids.count(uid) > 1)!r}"
    parallelisms = {vertex.id: vertex.parallelism for vertex in metadata.vertices}
    for operator in metadata.operators:
        where = f"operator {operator.uid!r}"
        if operator.parallelism != parallelisms.get(operator.vertex):
            yield f"{where} has a parallelism of {operator.parallelism}, and its vertex {operator.vertex} another one"
        elif len(operator.subtasks) != operator.parallelism:
            yield f"{where} has {len(operator.subtasks)} subtasks and a parallelism of {operator.parallelism}"
        if list(operator.finished) != sorted({i for i in operator.finished if 0 <= i < operator.parallelism}):
            yield f"{where} has the finished subtasks {operator.finished} of {operator.parallelism}"
        for snapshot in operator.subtasks:
            yield from (f"{where}: {problem}" for problem in _problems_of_parts(snapshot, metadata.max_parallelism))


def _problems_of_parts(snapshot: OperatorSnapshot, key_groups: int) -> Iterator[str]:
    for part in snapshot.parts:
        if part.redistribute not in _REDISTRIBUTIONS:
            yield f"part {part.name!r} is redistributed as {part.redistribute!r}"
        if part.stride < 1 or not 0 <= part.index < part.stride:
            yield f"part {part.name!r} has the rows from {part.index} by {part.stride}"
        for chunk in part.chunks:
            if not -1 <= chunk.key_group_min <= chunk.key_group_max < key_groups:
                yield f"chunk {chunk.id} has the key groups {chunk.key_group_min} to {chunk.key_group_max} of {key_groups}"
            yield from (f"chunk {chunk.id}: {problem}" for problem in _problems_of_extent(chunk))
            yield from (f"chunk {chunk.id}: {problem}" for problem in _problems_of_removed(chunk, part.redistribute))


def _problems_of_removed(chunk: ChunkHandle, rule: str) -> Iterator[str]:
    if chunk.removed and rule != Redistribute.KEYED.value:
        yield f"rows have been removed from it, and it is redistributed as {rule!r}"
    if chunk.live_rows < 0:
        yield f"{chunk.rows - chunk.live_rows} of its {chunk.rows} rows have been removed"
    for vector in chunk.removed:
        yield from (f"deletion vector {vector.id}: {problem}" for problem in _problems_of_extent(vector))
        if vector.removed:
            yield f"deletion vector {vector.id} has deletion vectors"


def _problems_of_extent(extent: ChunkHandle | Segment) -> Iterator[str]:
    if extent.offset < 0 or extent.length < 0 or extent.rows < 0 or extent.offset + extent.length > _OFFSET_MAX:
        yield f"{extent.rows} rows in {extent.length} bytes at {extent.offset}"
    if extent.file and (problem := problem_of_path(extent.file)):
        yield problem


def problem_of_path(path: str) -> str | None:
    """Return what is wrong with a path that must lie within the checkpoint directory."""
    parts = path.split("/")
    if not path or "\0" in path or "\\" in path or any(part in {"", ".", ".."} for part in parts):
        return f"{path!r} is not a path within the checkpoint directory"
    return None


def _problems_of_channels(metadata: CheckpointMetadata) -> Iterator[str]:
    vertices, edges = metadata.vertices, metadata.edges
    for channel in metadata.channels:
        where = f"rows in flight on edge {channel.edge} from {channel.producer} to {channel.consumer}"
        if not 0 <= channel.edge < len(edges):
            yield f"{where}: there are {len(edges)} edges"
        elif not 0 <= channel.consumer < vertices[edges[channel.edge].target].parallelism:
            yield f"{where}: it leads to {vertices[edges[channel.edge].target].parallelism} subtasks"
        if not 0 <= channel.producer < MAX_PARALLELISM_MAX:  # it may belong to the parallelism before a rescale
            yield f"{where}: there is no such producer"
        yield from (f"{where}: {problem}" for problem in _problems_of_channel(channel, metadata.max_parallelism))


def _problems_of_channel(channel: ChannelState, key_groups: int) -> Iterator[str]:
    if channel.skip < 0:
        yield f"{channel.skip} batches are consumed"
    for low, high in _ranges(channel):
        if not 0 <= low <= high <= key_groups:
            yield f"the key groups {low} to {high} of {key_groups}"
    for segment in channel.segments:
        if segment.batches < 1 or not 0 <= segment.combined <= segment.batches:
            yield f"{segment.combined} combined batches of {segment.batches}"
        yield from _problems_of_extent(segment)


def _ranges(channel: ChannelState) -> Iterable[tuple[int, int]]:
    own = (channel.key_groups,) if channel.key_groups is not None else ()
    return (*own, *((low, high) for low, high, _ in channel.ahead))
