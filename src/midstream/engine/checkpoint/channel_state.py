"""Channel state: the batches that were in flight when a barrier overtook them, at rest.

A file is a series of segments, each some whole batches of one channel: (prefix with length and layout, Arrow IPC record
batch message) each, without the schema, which is the one of the edge's layouts (see `engine.core.batch_framing`). They
are encoded while they are written, one at a time; few bytes go into the metadata instead (see `extents`). Batches are
never cut: one that was partly sent when the barrier overtook it is stored whole by its producer, and its receiver drops
the part that has arrived. So a restore reassembles nothing, and a segment is read, checked and filtered on its own.

Watermarks in flight are not stored: each operator's last ones are (`OperatorSnapshot`), and it emits them again.
Everything here is pure or blocking I/O: for I/O threads only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import msgspec
import numpy as np
import pyarrow as pa

from midstream.engine.checkpoint.channel_state_references import segments_left
from midstream.engine.checkpoint.extents import Piece, WrittenExtent, check_extent, with_extent, write_extents
from midstream.engine.core.arrow_bytes import NOT_ARROW, read_batch
from midstream.engine.core.batch_framing import PREFIX_BYTES, prefix, read_prefix
from midstream.engine.core.batches import concat
from midstream.engine.core.errors import StorageError
from midstream.engine.core.interfaces import Storage
from midstream.engine.core.key_groups import key_groups
from midstream.engine.protocol.messages import ChannelState, Segment


@dataclass(frozen=True, slots=True)
class Captured:
    """Batches of one channel, oldest first, or (`stored`) where an earlier checkpoint has stored them."""

    edge: int
    producer: int
    consumer: int
    is_output: bool
    batches: tuple[pa.RecordBatch, ...] = ()
    stored: tuple[ChannelState, ...] = ()
    layouts: tuple[int, ...] = ()
    """The layout of each batch, as an index of `Edge.layouts`; empty if all of them are rows."""


def store_channels(
    storage: Storage, captured: Sequence[Captured], file: str, segment_bytes: int, inline_bytes_max: int = 0
) -> tuple[tuple[ChannelState, ...], WrittenExtent]:
    """Write `captured` to `file`, and return its locations in this file and in older ones, in the same order.

    What an older checkpoint holds inline counts against `inline_bytes_max` and goes into the file if that is exceeded:
    it cannot accumulate from one recovery to the next. Raises StorageError or OSError.
    """
    carried = sum(len(segment.inline) for item in captured for state in item.stored for segment in state.segments)
    moves = carried > inline_bytes_max
    states: list[tuple[ChannelState, list[Segment]]] = []
    new: list[tuple[list[Segment], int]] = []
    """Receives the locations of the new extents, in the order of writing."""

    def encoded() -> Iterator[Sequence[Piece]]:
        for item in captured:
            for state in item.stored:
                segments = list(state.segments)
                states.append((state, segments))
                for index, segment in enumerate(segments):
                    if moves and segment.inline:
                        new.append((segments, index))
                        yield (segment.inline,)
            segments = []
            for pieces, batches, rows, combined in _segments(item.batches, item.layouts, segment_bytes):
                new.append((segments, len(segments)))
                segments.append(Segment("", 0, 0, 0, batches, rows, b"", combined))
                yield pieces
            if segments:
                states.append((ChannelState(item.edge, item.producer, item.consumer, item.is_output, ()), segments))

    written = write_extents(storage, file, encoded(), 0 if moves else inline_bytes_max - carried)
    for (segments, index), extent in zip(new, written.extents, strict=True):
        segments[index] = with_extent(segments[index], extent)
    return tuple(msgspec.structs.replace(state, segments=tuple(segments)) for state, segments in states), written


def _segments(
    batches: Sequence[pa.RecordBatch], layouts: Sequence[int], segment_bytes: int
) -> Iterator[tuple[Sequence[Piece], int, int, int]]:
    """Yield the bytes, and the numbers of batches, of rows and of combined batches of each segment.

    Each of them has at least `segment_bytes`.
    """
    pieces: list[Piece] = []
    size = rows = combined = 0
    for index, batch in enumerate(batches):
        message = memoryview(batch.serialize())
        layout = layouts[index] if layouts else 0
        pieces += (prefix(message.nbytes, layout), message)
        size += PREFIX_BYTES + message.nbytes
        rows += batch.num_rows
        combined += bool(layout)
        if size >= segment_bytes or index == len(batches) - 1:
            count = len(pieces) // 2
            yield (pieces if count == 1 else (b"".join(pieces),)), count, rows, combined
            pieces, size, rows, combined = [], 0, 0, 0


def read_segment(
    storage: Storage, segment: Segment, layouts: Sequence[pa.Schema], where: str, data: memoryview | None = None
) -> list[pa.RecordBatch]:
    """Read a segment's batches. Raises StorageError naming `where` and the file if it is missing, short or altered.

    `layouts`: the schemas that its batches may have (`Edge.layouts`). `data`: its bytes, if they have been read and checked before.
    """
    if data is None:
        data = segment_bytes(storage, segment, where)
    batches = []
    position = 0
    try:
        while position < data.nbytes:
            length, layout = read_prefix(data, position)
            position += PREFIX_BYTES
            if length > data.nbytes - position:
                raise StorageError(f"a batch of {length} bytes is announced where {data.nbytes - position} are left")
            if layout >= len(layouts):
                raise StorageError(f"a batch of layout {layout} is announced where there are {len(layouts)}")
            batches.append(read_batch(data[position : position + length], layouts[layout]))
            position += length
    except (StorageError, struct.error, *NOT_ARROW) as error:
        raise _damaged(segment, where, f"its bytes are intact but are not batches of this edge: {error}") from error
    if len(batches) != segment.batches or sum(batch.num_rows for batch in batches) != segment.rows:
        raise _damaged(segment, where, f"it does not hold {segment.batches} batches of {segment.rows} rows")
    return batches


ReadAhead = dict[tuple[str, int], memoryview]
"""Bytes of segments that have been read and checked already, by file and offset."""


def verify_channels(storage: Storage, states: Sequence[ChannelState], keep_bytes_max: int = 0) -> ReadAhead:
    """Raise StorageError, naming channel and file, unless every segment to be read exists and is intact.

    This first checks that all files exist and are long enough, which costs nothing, then their bytes; of these it
    returns the first `keep_bytes_max`, so that they need not be read again.
    """
    unread = [(state, segment) for state in states for segment in segments_left(state) if segment.file]
    ends: dict[str, tuple[Segment, ChannelState]] = {}
    for state, segment in unread:
        if segment.file not in ends or segment.offset > ends[segment.file][0].offset:
            ends[segment.file] = segment, state
    for segment, state in ends.values():
        if not _read(storage, segment, segment.length - 1, 1, channel_text(state)):
            raise _damaged(segment, channel_text(state), "its last byte is missing: it was truncated or replaced")
    kept: ReadAhead = {}
    seen: set[tuple[str, int]] = set()
    for state, segment in unread:
        key = segment.file, segment.offset
        if key not in seen:
            seen.add(key)
            data = segment_bytes(storage, segment, channel_text(state))
            if keep_bytes_max >= data.nbytes:
                keep_bytes_max -= data.nbytes
                kept[key] = data
    return kept


def channel_text(state: ChannelState) -> str:
    """Name a channel in messages."""
    return f"in-flight data of edge {state.edge}, subtask {state.producer} to {state.consumer}"


def segment_bytes(storage: Storage, segment: Segment, where: str) -> memoryview:
    """Return the bytes of a segment, with length and checksum verified. Raises StorageError."""
    if segment.inline:
        data = memoryview(segment.inline)
    else:
        data = memoryview(_read(storage, segment, 0, segment.length, where))
    problem = check_extent(data, segment.length, segment.checksum)
    if problem:
        raise _damaged(segment, where, problem)
    return data


def _read(storage: Storage, segment: Segment, offset: int, length: int, where: str) -> bytes:
    try:
        return storage.read_range(segment.file, segment.offset + offset, length)
    except StorageError as error:
        raise StorageError(f"{where}: {error}") from error


def rows_of(
    batches: Sequence[pa.RecordBatch],
    keys: tuple[str, ...],
    layouts: Sequence[pa.Schema],
    state: ChannelState,
    first: int,
    max_parallelism: int,
) -> Sequence[pa.RecordBatch]:
    """Return, for each batch, the rows that are part of `state`; the first one is batch number `first` of its segments.

    `keys`, `layouts`: those of its edge.

    All batches of one layout in a row are processed as one: a call into Arrow costs more than the rows of a small batch.
    """
    if state.key_groups is None or not batches:
        return batches
    if len(layouts) == 1:
        return _rows_of(batches, keys, state, first, max_parallelism)
    found: list[pa.RecordBatch] = []
    for _, run in groupby(batches, lambda batch: batch.schema.equals(layouts[0])):
        found += _rows_of(list(run), keys, state, first + len(found), max_parallelism)
    return found


def _rows_of(
    batches: Sequence[pa.RecordBatch], keys: tuple[str, ...], state: ChannelState, first: int, max_parallelism: int
) -> Sequence[pa.RecordBatch]:
    """Do this for batches of one layout. All layouts have the key columns."""
    assert state.key_groups is not None
    combined_rows = concat(batches)
    found = key_groups(combined_rows, keys, max_parallelism)
    low, high = state.key_groups
    is_ours = (found >= low) & (found < high)
    if state.ahead:
        consumed = np.zeros(max_parallelism, np.int64)
        for ahead_low, ahead_high, skip in state.ahead:
            consumed[ahead_low:ahead_high] = skip
        numbers = np.repeat(np.arange(first, first + len(batches)), [batch.num_rows for batch in batches])
        is_ours &= consumed[found] <= numbers
    kept = np.flatnonzero(is_ours)
    if len(kept) == combined_rows.num_rows:
        return batches
    rows = combined_rows.take(pa.array(kept, pa.int64()))
    ends = np.searchsorted(kept, np.cumsum([batch.num_rows for batch in batches]))
    return [rows.slice(start, end - start) for start, end in pairwise([0, *ends.tolist()])]


def _damaged(segment: Segment, where: str, what: str) -> StorageError:
    location = f"file {segment.file} (bytes {segment.offset} to {segment.offset + segment.length})"
    return StorageError(
        f"{where}: channel state {location if segment.file else 'in the metadata'}: {what}. "
        "This checkpoint cannot be restored; to rewind to an older one, name it with --from."
    )
