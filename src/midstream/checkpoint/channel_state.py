"""Channel state: the batches that were in flight when a barrier overtook them, at rest.

A file is a series of segments, each some whole batches of one channel: (uint64 length, Arrow IPC
record batch message) each, without the schema, which is the edge's. Batches are never cut: one
that was partly sent when the barrier overtook it is stored by its producer, whole, and its
receiver forgets the part that it had. So there is nothing to put together on restore, and a
segment is read, checked and filtered on its own.

Watermarks are not stored: each operator's own are (`OperatorSnapshot`), and it says them again.
Everything here is pure or blocking I/O: for I/O threads only.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash

from midstream.core.errors import StorageError
from midstream.core.keys import key_groups
from midstream.core.seams import Storage
from midstream.graph.job_graph import Edge
from midstream.protocol.messages import ChannelState, Segment

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Captured:
    """Batches of one channel, oldest first, or (`stored`) where they are since an earlier checkpoint."""

    edge: int
    producer: int
    consumer: int
    is_output: bool
    batches: tuple[pa.RecordBatch, ...] = ()
    stored: tuple[ChannelState, ...] = ()


def encode_channels(
    captured: Sequence[Captured], file: str, segment_bytes: int
) -> tuple[list[bytes | memoryview], tuple[ChannelState, ...]]:
    """The bytes of `file`, and what is in it and in older files, in the order of `captured`."""
    pieces: list[bytes | memoryview] = []
    states: list[ChannelState] = []
    offset = 0
    for item in captured:
        states.extend(item.stored)
        segments: list[Segment] = []
        waiting: list[bytes | memoryview] = []
        size = batches = rows = 0
        for index, batch in enumerate(item.batches):
            message = memoryview(batch.serialize())
            waiting += (_LENGTH.pack(message.nbytes), message)
            size += _LENGTH.size + message.nbytes
            batches, rows = batches + 1, rows + batch.num_rows
            if size >= segment_bytes or index == len(item.batches) - 1:
                digest = xxhash.xxh3_64()
                for piece in waiting:
                    digest.update(piece)
                segments.append(Segment(file, offset, size, digest.intdigest(), batches, rows))
                pieces += waiting
                offset += size
                waiting, size, batches, rows = [], 0, 0, 0
        if segments:
            states.append(ChannelState(item.edge, item.producer, item.consumer, item.is_output, tuple(segments)))
    return pieces, tuple(states)


def read_segment(storage: Storage, segment: Segment, schema: pa.Schema, place: str) -> list[pa.RecordBatch]:
    """Its batches. Raises StorageError naming `place` and the file when it is missing, short or altered."""
    data = segment_bytes(storage, segment, place)
    batches = []
    position = 0
    try:
        while position < data.nbytes:
            (length,) = _LENGTH.unpack_from(data, position)
            position += _LENGTH.size
            if length > data.nbytes - position:
                raise StorageError(f"a batch of {length} bytes is announced where {data.nbytes - position} are left")
            batches.append(pa.ipc.read_record_batch(pa.py_buffer(data[position : position + length]), schema))
            position += length
    except (StorageError, struct.error, pa.ArrowException, OSError) as error:
        raise _damaged(segment, place, f"its bytes are as written but are no batches of this edge: {error}") from error
    if len(batches) != segment.batches or sum(batch.num_rows for batch in batches) != segment.rows:
        raise _damaged(segment, place, f"it does not hold {segment.batches} batches of {segment.rows} rows")
    return batches


def verify_channels(storage: Storage, states: Sequence[ChannelState]) -> None:
    """Raises StorageError, naming the channel and the file, unless every segment to be read is there and whole."""
    for state in states:
        behind = 0
        for segment in state.segments:
            behind += segment.batches
            if behind > state.skip:
                segment_bytes(storage, segment, where(state))


def where(state: ChannelState) -> str:
    """For messages."""
    return f"in-flight data of edge {state.edge}, subtask {state.producer} to {state.consumer}"


def segment_bytes(storage: Storage, segment: Segment, place: str) -> memoryview:
    """Its bytes, of the right length and checksum. Raises StorageError."""
    try:
        data = memoryview(storage.read_range(segment.file, segment.offset, segment.length))
    except StorageError as error:
        raise StorageError(f"{place}: {error}") from error
    if data.nbytes != segment.length:
        raise _damaged(segment, place, f"only {data.nbytes} bytes of it are there: it was cut short or replaced")
    if xxhash.xxh3_64_intdigest(data) != segment.checksum:
        raise _damaged(segment, place, "its checksum is wrong: the file is damaged")
    return data


def rows_of(batch: pa.RecordBatch, edge: Edge, groups: range | None, max_parallelism: int) -> pa.RecordBatch:
    """The rows whose key group is in `groups` (None: all of them)."""
    if groups is None or batch.num_rows == 0:
        return batch
    found = key_groups(batch, edge.keys, max_parallelism)
    keep = (found >= groups.start) & (found < groups.stop)
    kept = int(np.count_nonzero(keep))
    if kept == batch.num_rows:
        return batch
    return batch.take(pa.array(np.flatnonzero(keep))) if kept else batch.slice(0, 0)


def _damaged(segment: Segment, place: str, what: str) -> StorageError:
    extent = f"bytes {segment.offset} to {segment.offset + segment.length}"
    return StorageError(
        f"{place}: channel state file {segment.file} ({extent}): {what}. "
        "This checkpoint cannot be restored; choose another one with --from."
    )
