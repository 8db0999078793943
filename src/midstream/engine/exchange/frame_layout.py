"""The layout of frames on a data connection between two slots.

Every frame is a little-endian uint32 length, then a 15-byte header, then the payload:

| field    | bytes | meaning                                                              |
|----------|-------|----------------------------------------------------------------------|
| kind     | 1     | DATA, EVENT or CREDIT                                                 |
| edge     | 2     | with producer and consumer: which channel                            |
| producer | 2     |                                                                      |
| consumer | 2     |                                                                      |
| sequence | 4     | counts the DATA and EVENT frames of the channel; a gap is an error   |
| value    | 4     | CREDIT: buffers granted; EVENT: 1 inside a batch, else 0;            |
|          |       | DATA: 1 after a wait for credit, else 0                              |

DATA frames carry at most `buffer_bytes` of the channel's byte stream, which is a series of
(prefix of 8 bytes, Arrow IPC record batch message); the prefix has the length and the layout (`engine.core.batch_framing`), and
the schema, which is the one of the edge's layouts, is never sent.
EVENT frames carry one encoded event. They are sent between two batches of the stream, except for barriers that overtake:
these may be sent inside a batch, which then counts as after them. The consumer sends CREDIT frames to the producer.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

from midstream.engine.core.ids import ChannelId


class FrameKind(IntEnum):
    DATA = 0x11
    EVENT = 0x12
    CREDIT = 0x13


FRAME: Final = struct.Struct("<IBHHHII")
HEADER: Final = struct.Struct("<BHHHII")
ELEMENT_BYTES_MAX: Final = 2**31
"""A serialised batch that is larger is refused before memory is allocated for it."""


def header(kind: FrameKind, channel: ChannelId, sequence: int, value: int, payload_bytes: int) -> bytes:
    return FRAME.pack(HEADER.size + payload_bytes, kind, *channel, sequence, value)
