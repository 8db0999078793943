"""Control connections: typed messages, first in first out, both ways, bounded.

One `MessageChannel` is the ConnectionEnd of a control connection: it validates what arrives against the types that this side
expects, and queues what must be sent. A peer that does not read is given up once `QUEUE_BYTES_MAX` are queued for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeAlias, TypeVar

import msgspec

from midstream.engine.core.errors import UNDECODABLE, ClusterError
from midstream.engine.protocol.framing import CONTROL_FRAME_BYTES_MAX, MESSAGE, ProtocolViolation, frame
from midstream.runtime.network.connection import Connection

RECEIVE_BUFFER_BYTES: Final = 64 * 2**10
QUEUE_BYTES_MAX: Final = CONTROL_FRAME_BYTES_MAX
HEARTBEATS_PER_TIMEOUT: Final = 5
"""The minimum number of heartbeats sent within the timeout after which a peer is lost."""
HEARTBEAT_INTERVAL_S_MAX: Final = 1.0
"""The longest interval between heartbeats, which also carry what users see while the job runs."""

In = TypeVar("In")

Encode: TypeAlias = Callable[[msgspec.Struct], bytes]
_encode: Final[Encode] = msgspec.msgpack.Encoder().encode


class SharedEncoding:
    """Encodes for several channels: the same message, sent to one after the other, is encoded once, and they share the
    bytes.

    Messages to all slots can be long: at the start each slot learns of all others. Messages never change.
    """

    def __init__(self) -> None:
        self._last: tuple[msgspec.Struct, bytes] | None = None

    def encode(self, message: msgspec.Struct) -> bytes:
        if self._last is None or self._last[0] is not message:
            self._last = message, _encode(message)
        return self._last[1]


class MessageChannel(Generic[In]):
    """Sends and receives messages. `received` gets each message; `lost` is called once when the peer is gone.

    Loop thread only.
    """

    def __init__(
        self,
        connection: Connection,
        decoder: msgspec.msgpack.Decoder[In],
        received: Callable[[In], None],
        lost: Callable[[str], None],
        encode: Encode = _encode,
    ) -> None:
        self._connection = connection
        self._encode = encode
        self._decoder = decoder
        self._received = received
        self._lost = lost
        self._queue: deque[list[bytes | memoryview]] = deque()
        self.waiting_bytes = 0
        """The size of the messages that are queued."""
        connection.carry(self)

    @property
    def received_s(self) -> float:
        """When data last arrived from the peer, on the monotonic clock."""
        return self._connection.received_s

    @property
    def local_host(self) -> str:
        return self._connection.local_host

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message. Raises ClusterError if it is too large."""
        body = self._encode(message)
        if len(body) >= CONTROL_FRAME_BYTES_MAX:
            raise ClusterError(
                f"a {type(message).__name__} message of {len(body)} bytes is above the limit of "
                f"{CONTROL_FRAME_BYTES_MAX}; if the job's functions contain large objects, load these in open() instead"
            )
        self._queue.append(frame(MESSAGE, body))
        self.waiting_bytes += len(body)
        if self.waiting_bytes - len(body) > QUEUE_BYTES_MAX:
            self._connection.close()
            self.lost(f"it does not read what is sent to it ({self.waiting_bytes} bytes wait)")
            return
        self._connection.wake()

    def share(self) -> None:
        """Allow one other thread to call `send_aside`."""
        self._connection.share()

    def send_aside(self, message: msgspec.Struct) -> None:
        """Send a small message that may be lost, from that other thread, ahead of queued messages."""
        self._connection.send_aside(frame(MESSAGE, msgspec.msgpack.encode(message)))

    def send_inside(self, message: msgspec.Struct) -> None:
        """Send a message from inside a step of the loop: immediately if there is room; no loss is reported."""
        body = _encode(message)
        self._queue.append(frame(MESSAGE, body))
        self.waiting_bytes += len(body)
        self._connection.wake()
        self._connection.send_inside()

    def finish(self, finished: Callable[[], None] | None = None) -> None:
        """Send what is queued, then close; `finished` is called at the end, whether it succeeded or not."""
        self._connection.finish(finished)

    def close(self) -> None:
        self._connection.close()

    # ---- ConnectionEnd

    def pull(self, bytes_max: int) -> list[bytes | memoryview]:
        pieces: list[bytes | memoryview] = []
        pulled_bytes = 0
        while self._queue and pulled_bytes < bytes_max:
            message = self._queue.popleft()
            pieces += message
            pulled_bytes += len(message[1])
        self.waiting_bytes -= pulled_bytes
        return pieces

    def receive(self, frame: memoryview) -> None:
        if frame[0] != MESSAGE:
            raise ProtocolViolation(f"a frame of type {frame[0]:#x} on a control connection")
        try:
            message = self._decoder.decode(frame[1:])
        except UNDECODABLE as error:
            raise ProtocolViolation(f"an invalid control message: {error}") from error
        self._received(message)

    def lost(self, reason: str) -> None:
        self._lost(reason)
