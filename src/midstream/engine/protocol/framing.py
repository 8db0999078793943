"""Frames on a byte stream: a length, a type byte, a body.

    length: u32, little endian, of what follows | type: u8 | body

The length is checked against a limit before memory is allocated for the frame, and the limit is tiny until the peer has
proved that it has the job's secret (see `handshake`). Types below 0x10 belong to the connection itself, the others to
its user. Sans-I/O: runs on the thread that owns the connection.
"""

from __future__ import annotations

import struct
from typing import Final

from midstream.engine.core.errors import ClusterError

LENGTH: Final = struct.Struct("<I")
LENGTH_BYTES: Final = LENGTH.size
MESSAGE: Final = 0x10
"""The type of a frame with one control message, in msgpack."""

UNAUTHENTICATED_FRAME_BYTES_MAX: Final = 4 * 2**10
CONTROL_FRAME_BYTES_MAX: Final = 256 * 2**20
"""The limit for control messages; a Deploy carries the whole job graph with the user's functions."""
DATA_FRAME_BYTES_MAX: Final = 64 * 2**20


class ProtocolViolation(ClusterError):
    """The peer violated the protocol. The connection is closed, and nothing received on it is used."""


def frame(kind: int, *body: bytes | memoryview) -> list[bytes | memoryview]:
    """Return a whole frame as pieces of the byte stream; `body` is not copied."""
    length = 1 + sum(len(piece) for piece in body)
    return [LENGTH.pack(length) + bytes((kind,)), *body]


class FrameDecoder:
    """Cuts a byte stream into frames, in place.

    The owner receives directly into `space()`, reports the number of bytes with `received(n)`, and takes frames with
    `next_frame()` until it returns None. A frame is a view of the buffer: it is valid until the next call of `space()`
    and is never copied, except that a frame cut off by the end of the buffer is moved to its front.

    A thread with many connections lends all of them one large buffer (`allow`), since it receives from one at a time. A
    decoder then has a buffer of its own only while it holds part of a frame, and a frame is valid until the next call
    of `space()` of any of them. Before that call, `keep()` must be called on the decoder that received last.
    """

    __slots__ = ("_buffer", "_end", "_frame_bytes_max", "_lent", "_start", "_view")

    def __init__(self, frame_bytes_max: int, buffer_bytes: int) -> None:
        assert buffer_bytes > LENGTH_BYTES, buffer_bytes
        self._frame_bytes_max = frame_bytes_max
        self._buffer = bytearray(buffer_bytes)
        self._view = memoryview(self._buffer)
        self._lent: bytearray | None = None
        self._start = 0
        self._end = 0
        """Bytes [start, end) of the buffer have been received and not yet taken."""

    @property
    def waiting_bytes(self) -> int:
        """The bytes received but not yet taken as a frame."""
        return self._end - self._start

    @property
    def buffer_bytes(self) -> int:
        """The size of the decoder's own buffer."""
        return 0 if self._buffer is self._lent else len(self._buffer)

    def allow(self, frame_bytes_max: int, buffer_bytes: int = 0, lent: bytearray | None = None) -> None:
        """Set new limits, for a peer that has authenticated, and a larger buffer: its own, or a lent one. Waiting bytes
        stay.
        """
        self._frame_bytes_max = frame_bytes_max
        self._lent = lent
        if buffer_bytes > len(self._buffer):
            self._move(bytearray(buffer_bytes))

    def space(self) -> memoryview:
        """Return the buffer for the next bytes; never empty. Frames taken before are no longer valid."""
        if self._start == self._end:
            self._start = self._end = 0
            if self._lent is not None and self._buffer is not self._lent:
                self._buffer, self._view = self._lent, memoryview(self._lent)
            return self._view
        needed = LENGTH_BYTES
        if self._end - self._start >= LENGTH_BYTES:
            needed += self._length()
        if self._lent is not None and self._buffer is not self._lent and needed <= len(self._lent):
            self._move(self._lent)
        size = len(self._buffer)
        if self._start + needed > size or (self._start and size - self._end < size // 4):
            # the waiting frame does not fit after `start`, or only a few bytes could be received
            self._move(self._buffer if needed <= size else bytearray(needed))
        assert self._end < len(self._buffer), (self._start, self._end, size)
        return self._view[self._end :]

    def keep(self) -> None:
        """Return a lent buffer: the waiting bytes, usually part of a frame, are copied."""
        if self._buffer is self._lent and self._start < self._end:
            self._move(bytearray(self._end - self._start))

    def received(self, count: int) -> None:
        assert 0 < count <= len(self._buffer) - self._end, (count, self._end, len(self._buffer))
        self._end += count

    def next_frame(self) -> memoryview | None:
        """Return the next whole frame, from its type byte on, or None. Raises ProtocolViolation on an invalid
        length."""
        start = self._start
        if self._end - start < LENGTH_BYTES:
            return None
        stop = start + LENGTH_BYTES + self._length()
        if stop > self._end:
            return None
        self._start = stop
        return self._view[start + LENGTH_BYTES : stop]

    def _length(self) -> int:
        length: int = LENGTH.unpack_from(self._buffer, self._start)[0]
        if not 1 <= length <= self._frame_bytes_max:
            raise ProtocolViolation(f"a frame of {length} bytes, where 1 to {self._frame_bytes_max} are allowed")
        return length

    def _move(self, target: bytearray) -> None:
        """Move the waiting bytes to the front of `target`, which may be the current buffer."""
        waiting = self._end - self._start
        if target is self._buffer:
            self._view[:waiting] = self._view[self._start : self._end]
        else:
            view = memoryview(target)
            view[:waiting] = self._view[self._start : self._end]
            self._buffer, self._view = target, view
        self._start, self._end = 0, waiting
