"""Extents: runs of bytes that a checkpoint refers to, in a file, or, where they are few, in its metadata.

A task writes at most one file of each kind per checkpoint. What would be a small file travels in the
acknowledgement instead and is kept inside `_metadata`: a small checkpoint is one file. Otherwise
extents are encoded one by one while they are written, so that no more than one of them is in
memory however much there is to store.

    bytes inline in one checkpoint <= INLINE_JOB_BYTES_MAX, whatever the number of tasks

Blocking I/O: for I/O threads only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import xxhash

from midstream.core.seams import Storage

Piece = bytes | memoryview

INLINE_JOB_BYTES_MAX: Final = 4 * 2**20
"""It is written in one go when all else is done, and sent over the control connections."""
KINDS: Final = 2
"""State and channel state: each has its own budget."""


@dataclass(frozen=True, slots=True)
class Extent:
    file: str
    offset: int
    length: int
    checksum: int
    """xxh3_64 of the bytes."""
    inline: bytes
    """The bytes themselves; then `file` is empty. There are no empty extents."""


@dataclass(frozen=True, slots=True)
class Written:
    extents: tuple[Extent, ...]
    files: tuple[str, ...]
    """The one that was written, if one was."""
    stored_bytes: int
    inline_bytes: int


def inline_bytes_max(wanted_bytes: int, tasks: int) -> int:
    """How much each of `tasks` tasks may leave to the metadata, of each kind; `wanted_bytes` unless they are many."""
    return min(wanted_bytes, INLINE_JOB_BYTES_MAX // (KINDS * tasks))


def write_extents(storage: Storage, file: str, encoded: Iterable[Sequence[Piece]], inline_bytes_max: int) -> Written:
    """Store what `encoded` gives, each item the pieces of one extent. Raises StorageError or OSError."""
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
        return Written(inline, (), waiting_bytes, waiting_bytes)
    extents: list[Extent] = []
    storage.write(file, _noted(chain(first, source), file, extents))
    return Written(tuple(extents), (file,), sum(extent.length for extent in extents), 0)


def _inline(data: bytes) -> Extent:
    return Extent("", 0, len(data), xxhash.xxh3_64_intdigest(data), data)


def _noted(encoded: Iterable[Sequence[Piece]], file: str, extents: list[Extent]) -> Iterator[Piece]:
    """The pieces one after the other; `extents` grows as they go."""
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


def check_extent(data: memoryview, length: int, checksum: int) -> str:
    """What is wrong with the bytes of an extent; "" if nothing is."""
    if data.nbytes != length:
        return f"only {data.nbytes} bytes of it are there: it was cut short or replaced"
    if xxhash.xxh3_64_intdigest(data) != checksum:
        return "its checksum is wrong: the file is damaged"
    return ""
