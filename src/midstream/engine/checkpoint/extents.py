"""Extents: runs of bytes that a checkpoint refers to, in a file or, if they are small, in its metadata.

A task writes at most one file of each kind per checkpoint. What would be a small file travels in the acknowledgement
instead and becomes part of `_metadata`: a small checkpoint is a single file. Otherwise extents are encoded one by one
while they are written, so that at most one of them is in memory.

    bytes inline in one checkpoint <= INLINE_JOB_BYTES_MAX, whatever the number of tasks

Blocking I/O: for I/O threads only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, TypeVar

import msgspec
import xxhash

from midstream.engine.core.interfaces import Storage
from midstream.engine.protocol.messages import ChannelState, ChunkHandle, OperatorSnapshot, Segment

Piece = bytes | memoryview

INLINE_JOB_BYTES_MAX: Final = 4 * 2**20
"""The limit for one checkpoint: metadata is written in one call at the end, and sent over the control connections."""
KINDS: Final = 2
"""The kinds of files, state and channel state, each of which has its own budget."""


class Extent(msgspec.Struct, frozen=True):
    file: str
    offset: int
    length: int
    checksum: int
    """The xxh3_64 of the bytes."""
    inline: bytes
    """The bytes themselves; then `file` is empty. Extents are never empty."""


Handle = TypeVar("Handle", ChunkHandle, Segment)


def with_extent(handle: Handle, extent: Extent) -> Handle:
    """Return the handle with the location of its bytes."""
    return msgspec.structs.replace(handle, **msgspec.structs.asdict(extent))


@dataclass(frozen=True, slots=True)
class WrittenExtent:
    extents: tuple[Extent, ...]
    files: tuple[str, ...]
    """The file written, if any."""
    stored_bytes: int
    inline_bytes: int


def inline_bytes_max(requested_bytes: int, tasks: int) -> int:
    """Return how many bytes of each kind each task may put into the metadata: `requested_bytes`, or less if there are
    many tasks.
    """
    return min(requested_bytes, INLINE_JOB_BYTES_MAX // (KINDS * tasks))


def write_extents(
    storage: Storage, file: str, encoded: Iterable[Sequence[Piece]], inline_bytes_max: int
) -> WrittenExtent:
    """Store the extents of `encoded`, whose items are the pieces of one extent each. Raises StorageError or OSError."""
    source = iter(encoded)
    first: list[Sequence[Piece]] = []
    waiting_bytes = 0
    for pieces in source:
        first.append(pieces)
        waiting_bytes += _nbytes(pieces)
        if waiting_bytes > inline_bytes_max:
            break
    else:
        inline = tuple(_inline(b"".join(pieces)) for pieces in first)
        return WrittenExtent(inline, (), waiting_bytes, waiting_bytes)
    extents: list[Extent] = []
    storage.write(file, _recorded(chain(first, source), file, extents))
    return WrittenExtent(tuple(extents), (file,), sum(extent.length for extent in extents), 0)


def _inline(data: bytes) -> Extent:
    return Extent("", 0, len(data), xxhash.xxh3_64_intdigest(data), data)


def _recorded(encoded: Iterable[Sequence[Piece]], file: str, extents: list[Extent]) -> Iterator[Piece]:
    """Yield the pieces one after the other, adding to `extents`."""
    offset = 0
    for pieces in encoded:
        digest = xxhash.xxh3_64()
        for piece in pieces:
            digest.update(piece)
            yield piece
        length = _nbytes(pieces)
        extents.append(Extent(file, offset, length, digest.intdigest(), b""))
        offset += length


def _nbytes(pieces: Sequence[Piece]) -> int:
    return sum(memoryview(piece).nbytes for piece in pieces)


def files_of(operators: Iterable[OperatorSnapshot], channels: Iterable[ChannelState] = ()) -> set[str]:
    """Return the files that these snapshots and states reference."""
    files = {extent.file for op in operators for part in op.parts for extent in part.extents}
    return (files | {segment.file for state in channels for segment in state.segments}) - {""}


def check_extent(data: memoryview, length: int, checksum: int) -> str:
    """Return what is wrong with the bytes of an extent; "" if nothing is."""
    if data.nbytes != length:
        return f"only {data.nbytes} bytes of it are present: it was truncated or replaced"
    if xxhash.xxh3_64_intdigest(data) != checksum:
        return "its checksum is wrong: the file is damaged"
    return ""
