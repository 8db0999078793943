"""What travels in a channel: record batches, watermarks, and control events.

A channel carries, in order: any number of batches and watermarks with barriers
between them, then `EndOfData`, possibly more barriers, then `EndOfPartition`.
Times are microseconds since the epoch, as int64, everywhere inside the engine.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec
import pyarrow as pa

MIN_WATERMARK_US: Final = -(2**63)
MAX_WATERMARK_US: Final = 2**63 - 1

Batch: TypeAlias = pa.RecordBatch


class Watermark(msgspec.Struct, frozen=True, tag="watermark"):
    """No row with an event time at or below `timestamp_us` will follow."""

    timestamp_us: int


Assigned: TypeAlias = tuple[tuple[int, int], ...]
"""How many splits of each of some sources, given by their vertices, had been assigned to any of its subtasks."""
ALL_ASSIGNED: Final = 2**63 - 1
"""The number of splits of a source of which nothing more will come."""


class WatermarkStatus(msgspec.Struct, frozen=True, tag="status"):
    """Whether this channel takes part in the minimum over channels (idle ones do not).

    `assigned`: the splits that this considers. Until the next status, the channel has rows and watermarks of these only;
    and if it is idle, all of their rows that come by this channel have come. Only for sources that may be idle.
    """

    idle: bool
    assigned: Assigned = ()


class CheckpointBarrier(msgspec.Struct, frozen=True, tag="barrier"):
    """The boundary between the rows of checkpoint `checkpoint_id` and those after it.

    `created_ms` is the coordinator's wall clock at the trigger. After `timeout_ms` (0: immediately; None: never) the
    barrier may overtake the rows before it. `completed_id` is the newest checkpoint that had completed then, 0 if none
    had: `CheckpointCompleted` may come later than the barrier, and what older checkpoints hold may be deleted as soon
    as a newer one has completed. `pauses_sources`: the job stops or moves with this checkpoint, so sources are not read
    after it, unless it is aborted.
    """

    checkpoint_id: int
    created_ms: int
    timeout_ms: int | None = None
    completed_id: int = 0
    pauses_sources: bool = False


class CancelCheckpointMarker(msgspec.Struct, frozen=True, tag="cancel"):
    """Checkpoint `checkpoint_id` was cancelled by the coordinator or a task upstream: stop aligning for it."""

    checkpoint_id: int


class EndOfData(msgspec.Struct, frozen=True, tag="end_of_data"):
    """The last row has been sent."""


class EndOfPartition(msgspec.Struct, frozen=True, tag="end_of_partition"):
    """The last element of a channel, which is released after it."""


Event: TypeAlias = Watermark | WatermarkStatus | CheckpointBarrier | CancelCheckpointMarker | EndOfData | EndOfPartition
Element: TypeAlias = Batch | Event

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Event)


def encode_event(event: Event) -> bytes:
    return _encoder.encode(event)


def decode_event(data: bytes | memoryview) -> Event:
    """Decode an event. Raises one of UNDECODABLE for bytes that are not an event."""
    event: Event = _decoder.decode(data)
    return event
