"""From the snapshots of a task's operators to one state file and its acknowledgement.

Runs on the I/O pool, on immutable things only. A sink whose rows cannot be made durable is lost
work, so that fails the task; a state file that cannot be written only fails the checkpoint, and
what the sinks prepared for it is reported again with the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from midstream.checkpoint.state_files import encode_parts
from midstream.core.errors import StorageError
from midstream.core.seams import Storage
from midstream.operators.base import Snapshot
from midstream.protocol.messages import ChunkHandle, PartHandle


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    parts: tuple[tuple[str, tuple[PartHandle, ...]], ...]
    """Per operator uid, in chain order."""
    committables: tuple[tuple[str, tuple[bytes, ...]], ...]
    """Per operator uid, only where there are some."""
    chunks: dict[str, ChunkHandle]
    """Every chunk of this snapshot, for the next one to refer to once this one has completed."""
    files: tuple[str, ...] = ()
    state_bytes: int = 0
    error: Exception | None = None
    """The state file could not be written."""


def store_snapshot(
    storage: Storage, uids: Sequence[str], snapshots: Sequence[Snapshot], known: Mapping[str, ChunkHandle], file: str
) -> Callable[[], StoredSnapshot]:
    """The work of completing and storing a snapshot, to be run once on the I/O pool.

    Raises whatever an operator's `later` raises.
    """

    def work() -> StoredSnapshot:
        results = [snapshot.complete() for snapshot in snapshots]
        committables = tuple(
            (uid, result.committables) for uid, result in zip(uids, results, strict=True) if result.committables
        )
        pieces: list[memoryview] = []
        parts: list[tuple[str, tuple[PartHandle, ...]]] = []
        size = 0
        for uid, result in zip(uids, results, strict=True):
            new, handles = encode_parts(result.parts, known, file, size)
            pieces.extend(new)
            size += sum(piece.nbytes for piece in new)
            parts.append((uid, handles))
        if pieces:
            try:
                storage.write(file, pieces)
            except (StorageError, OSError) as error:
                return StoredSnapshot((), committables, {}, error=error)
        chunks = {chunk.id: chunk for _, handles in parts for handle in handles for chunk in handle.chunks}
        return StoredSnapshot(tuple(parts), committables, chunks, (file,) if pieces else (), size)

    return work
