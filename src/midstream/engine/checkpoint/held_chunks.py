"""Chunks that a slot still holds when an attempt has ended: the next one takes them, instead of reading them again.

A run never changes once it has been stored, and the state of the attempt that has ended still holds it. The next attempt
takes a run in place of a chunk only if the checkpoint names the bytes that were written from the run, or that the run was
read from: the same file, which has one writer, the same place in it, and the same checksum. So an attempt never takes what
was written for a checkpoint that did not complete. Rows that have changed since the checkpoint are in other runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from midstream.engine.core.interfaces import Storage
from midstream.engine.protocol.messages import ChunkHandle

if TYPE_CHECKING:  # with it comes polars, which a process may import only once its threads are limited
    from midstream.engine.state.columnar import FrameRun

OnTaken: TypeAlias = Callable[[Storage, ChunkHandle, pa.Table], None]


@dataclass(frozen=True, slots=True)
class HeldChunk:
    run: FrameRun
    made: Callable[[], pa.Table]
    """Makes the table that was stored."""


@dataclass(frozen=True, slots=True)
class HeldChunks:
    """`on_taken`: called with each chunk that is taken; the simulator compares it with what is stored."""

    on_taken: OnTaken | None = None
    _chunks: dict[tuple[object, ...], HeldChunk] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._chunks)

    def add(self, handles: Iterable[ChunkHandle], held: HeldChunk) -> None:
        """`handles`: where the run is stored."""
        self._chunks.update((_stored_bytes(handle), held) for handle in handles)

    def take(self, handle: ChunkHandle, storage: Storage) -> HeldChunk | None:
        """Return the chunk if it is held. It is called on the I/O pool."""
        held = self._chunks.get(_stored_bytes(handle))
        if held is not None and self.on_taken is not None:
            self.on_taken(storage, handle, held.made())
        return held


def _stored_bytes(handle: ChunkHandle) -> tuple[object, ...]:
    """Return what identifies the bytes of a chunk in a file."""
    return handle.id, handle.file, handle.offset, handle.length, handle.checksum, handle.rows
