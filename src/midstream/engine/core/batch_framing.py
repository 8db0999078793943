"""The prefix of each serialised batch, between slots and in channel state: its length, and which layout it has.

    uint64, little-endian:   layout (8 bits, the highest) | length in bytes (56 bits)

The layout is the index of its schema among those that batches of the edge may have; it is 0 for rows.
"""

from __future__ import annotations

import struct
from typing import Final

_NUMBER: Final = struct.Struct("<Q")
PREFIX_BYTES: Final = _NUMBER.size
_LENGTH_BITS: Final = 56
_LENGTH: Final = (1 << _LENGTH_BITS) - 1


def prefix(length: int, layout: int) -> bytes:
    return _NUMBER.pack(layout << _LENGTH_BITS | length)


def read_prefix(data: memoryview, at: int = 0) -> tuple[int, int]:
    """Return the length and the layout. Raises struct.error if fewer than `PREFIX_BYTES` bytes are left."""
    (number,) = _NUMBER.unpack_from(data, at)
    return number & _LENGTH, number >> _LENGTH_BITS
