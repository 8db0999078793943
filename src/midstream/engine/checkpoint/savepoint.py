"""Savepoints: checkpoints in a directory of their own that refer to nothing outside of it.

    _savepoint              the job's name; written first, which claims the location
    shared/e7-a2-c17-v3-s0.state     the bytes of the job's state files that this checkpoint refers to
    chk-17/_metadata        written last: without it there is no savepoint

A savepoint has the layout of a checkpoint directory, so one reader serves both; its paths are relative, so it may be
moved. What sinks had prepared is committed before the savepoint is made, so a savepoint does not refer to it.

Restoring makes the same copy. A checkpoint elsewhere, savepoint or not, is copied into the job's own directory and is
one of its checkpoints from then on: no later checkpoint refers to the original, which may be changed or deleted.

Everything here blocks: for `RunIo` only. One state file at a time is in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from midstream.engine.checkpoint.extents import Handle, check_extent, files_of
from midstream.engine.checkpoint.metadata import CheckpointMetadata, encode_metadata
from midstream.engine.checkpoint.state_files import SHARED, StateFile
from midstream.engine.checkpoint.store import SAVEPOINT, check_epoch, metadata_path
from midstream.engine.core.errors import StorageError
from midstream.engine.core.interfaces import Storage
from midstream.engine.core.urls import below, is_below
from midstream.engine.protocol.messages import ChunkHandle, OperatorSnapshot, Segment

FOLDER = "savepoints"
"""The folder below the checkpoint directory for savepoints without an explicit location."""
_CHECKPOINT = re.compile(r"chk-\d+")


class SavepointFile(msgspec.Struct, frozen=True):
    """The content of `_savepoint`."""

    job: str
    job_id: str


@dataclass(frozen=True, slots=True)
class SavepointLocation:
    """A directory that is claimed for one savepoint."""

    url: str
    storage: Storage


# ---- making ----------------------------------------------------------------


def claim_location(
    open_storage: Callable[[str], Storage], url: str | None, root: str | None, about: SavepointFile
) -> SavepointLocation:
    """Claim the location of a savepoint. `url` None: the next free number below the checkpoint directory `root`, which
    is None if no job has one.

    Raises StorageError if something exists there already or it cannot be written.
    """
    content = msgspec.json.encode(about)
    above = below(root or "", FOLDER)
    if url is not None:
        if root is not None and is_below(url, root) and not is_below(url, above):
            raise StorageError(
                f"{url}: this is in the job's checkpoint directory, where the job deletes what it does not need; give "
                f"a directory outside of it, or below {above}"
            )
        storage = open_storage(url)
        existing = storage.list("")
        if existing or not storage.create(SAVEPOINT, content):
            found = f"it has {existing[0]}" if existing else "another savepoint is being made there"
            raise StorageError(
                f"{url}: the place is taken ({found}); give a directory that is empty or does not exist yet"
            )
        return SavepointLocation(url, storage)
    number = max((int(name) for name in open_storage(above).list("") if name.isdecimal()), default=0)
    while True:
        number += 1
        location = below(above, str(number))
        storage = open_storage(location)
        if storage.create(SAVEPOINT, content):
            return SavepointLocation(location, storage)


def write_savepoint(source: Storage, metadata: CheckpointMetadata, location: SavepointLocation) -> None:
    """Copy checkpoint `metadata`, whose sinks have committed everything, from `source` to `location`.

    If this raises StorageError, nothing that could be restored remains there. It raises FencedError if a later
    coordinator has taken over `source`: that one may have had the sinks roll back what the savepoint does not hold.
    """
    kept = {path: path for path in metadata.files}
    made = copied(source, location.storage, msgspec.structs.replace(metadata, committables=()), kept)
    check_epoch(source, metadata.epoch)
    location.storage.write(metadata_path(metadata.checkpoint_id), [encode_metadata(made)])


def discard(location: SavepointLocation) -> None:
    """Delete an unfinished savepoint: the metadata first, the claim last."""
    for name in sorted(
        location.storage.list(""), key=lambda name: (not _CHECKPOINT.fullmatch(name), name == SAVEPOINT)
    ):
        if _CHECKPOINT.fullmatch(name) or name in (SHARED, SAVEPOINT):
            location.storage.delete(name)


# ---- restoring from a savepoint --------------------------------------------


def copy_in(
    elsewhere: Storage, metadata: CheckpointMetadata, storage: Storage, epoch: int, next_checkpoint_id: int
) -> CheckpointMetadata:
    """Copy the state of a checkpoint from elsewhere, and return the metadata to publish here.

    Its id is the old one, or the next one that is free here if that is higher. Raises StorageError.
    """
    checkpoint_id = max(metadata.checkpoint_id, next_checkpoint_id)
    names = {
        path: StateFile(epoch, 0, checkpoint_id, 0, number).path for number, path in enumerate(sorted(metadata.files))
    }
    made = copied(elsewhere, storage, metadata, names)
    return msgspec.structs.replace(made, checkpoint_id=checkpoint_id, epoch=epoch, attempt=0)


# ---- copying ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class _Piece:
    offset: int
    length: int
    checksum: int


class _Packing:
    """The location of each piece of the old files in the new, packed ones."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names
        self.pieces: dict[str, set[_Piece]] = {path: set() for path in names}
        self._offsets: dict[tuple[str, int], int] = {}

    def note(self, location: ChunkHandle | Segment) -> None:
        if location.file:  # otherwise it is in the metadata
            self.pieces[location.file].add(_Piece(location.offset, location.length, location.checksum))

    def pack(self) -> None:
        for path, pieces in self.pieces.items():
            offset = 0
            for piece in sorted(pieces):
                self._offsets[path, piece.offset] = offset
                offset += piece.length

    def repacked(self, location: Handle) -> Handle:
        if not location.file:
            return location
        file, offset = self._names[location.file], self._offsets[location.file, location.offset]
        return msgspec.structs.replace(location, file=file, offset=offset)


def copied(source: Storage, target: Storage, metadata: CheckpointMetadata, names: dict[str, str]) -> CheckpointMetadata:
    """Copy what `metadata` refers to, each file under its name in `names`, and return metadata that refers to the
    copies.
    """
    packing = _Packing(names)
    for chunk in _chunks(metadata):
        packing.note(chunk)
    for state in metadata.channels:
        for segment in state.segments:
            packing.note(segment)
    packing.pack()
    for path, pieces in packing.pieces.items():
        target.write(names[path], _read(source, path, sorted(pieces)))
    operators = tuple(
        msgspec.structs.replace(op, subtasks=tuple(_repacked_snapshot(packing, s) for s in op.subtasks))
        for op in metadata.operators
    )
    channels = tuple(
        msgspec.structs.replace(state, segments=tuple(map(packing.repacked, state.segments)))
        for state in metadata.channels
    )
    files = files_of((snapshot for op in operators for snapshot in op.subtasks), channels)
    return msgspec.structs.replace(metadata, operators=operators, channels=channels, files=tuple(sorted(files)))


def _chunks(metadata: CheckpointMetadata) -> Iterator[ChunkHandle]:
    for operator in metadata.operators:
        for snapshot in operator.subtasks:
            for part in snapshot.parts:
                yield from part.extents


def _repacked_snapshot(packing: _Packing, snapshot: OperatorSnapshot) -> OperatorSnapshot:
    def repacked(chunk: ChunkHandle) -> ChunkHandle:
        removed = tuple(map(packing.repacked, chunk.removed))
        return msgspec.structs.replace(packing.repacked(chunk), removed=removed)

    parts = tuple(msgspec.structs.replace(part, chunks=tuple(map(repacked, part.chunks))) for part in snapshot.parts)
    return msgspec.structs.replace(snapshot, parts=parts)


def _read(source: Storage, path: str, pieces: list[_Piece]) -> Iterator[bytes]:
    """Read pieces. Raises StorageError for one that is not what was written: a copy of damaged bytes would appear
    intact."""
    for piece in pieces:
        data = source.read_range(path, piece.offset, piece.length)
        problem = check_extent(memoryview(data), piece.length, piece.checksum)
        if problem:
            location = f"bytes {piece.offset} to {piece.offset + piece.length}"
            raise StorageError(f"state file {path} ({location}): {problem}; this checkpoint cannot be copied")
        yield data
