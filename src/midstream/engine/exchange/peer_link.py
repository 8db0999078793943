"""This slot's end of the data connection to one peer slot: many channels over one byte stream.

The transport pulls frames when the socket can take them, so that the socket never holds more than a small number of
bytes, where no barrier can overtake them. Credits go first, because the peer's senders wait for them. Then the
subpartitions that can send take turns, one buffer each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from midstream.engine.core.batch_framing import prefix
from midstream.engine.core.elements import decode_event, encode_event
from midstream.engine.core.errors import UNDECODABLE, InvariantError
from midstream.engine.core.ids import ChannelId
from midstream.engine.core.interfaces import DataConnection
from midstream.engine.exchange.batch_lease import LeasedBatch
from midstream.engine.exchange.frame_layout import HEADER, FrameKind, header
from midstream.engine.exchange.input_channel import RemoteChannel
from midstream.engine.exchange.listeners import BarrierOrEnd
from midstream.engine.exchange.subpartition import Subpartition


class Sender:
    """Sends the elements of one subpartition to its remote consumer, as far as the consumer's credit allows."""

    __slots__ = ("_buffer_bytes", "_credit", "_credit_starved", "_element", "_rows_max", "_sequence", "_sub")

    def __init__(self, subpartition: Subpartition, buffer_bytes: int, rows_max: int) -> None:
        self._sub = subpartition
        self._buffer_bytes = buffer_bytes
        self._rows_max = rows_max
        self._credit = 0
        self._credit_starved = False
        """Whether rows have waited for credit since the last buffer was sent."""
        self._sequence = 0
        self._element: memoryview | None = None
        """The bytes that are still to be sent of the current batch."""

    def grant(self, credits: int) -> None:
        if not self._credit and (self._element is not None or self._sub.queue.queued_buffers):
            self._credit_starved = True
        self._credit += credits
        self._sub.request_rows()

    def can_send(self) -> bool:
        if self._element is not None:
            return self._credit > 0 or self._sub.has_overtaking_barrier
        return self._sub.head_is_event() or (self._credit > 0 and not self._sub.is_empty)

    def next_frame(self, pieces: list[bytes | memoryview]) -> int:
        """Append one frame to `pieces`, and return its size in bytes. It may only be called if `can_send`."""
        inside = self._element is not None
        if not inside or self._sub.has_overtaking_barrier:
            element = self._sub.take(self._rows_max)
            if element is None:
                raise InvariantError(f"{self._sub.channel}: nothing to send")
            if not isinstance(element, LeasedBatch):
                return self._frame(pieces, FrameKind.EVENT, (encode_event(element),), inside)
            message = element.batch.serialize()
            start = prefix(message.size, element.layout)
            view = memoryview(message)
            first = view[: self._buffer_bytes - len(start)]
            self._element = view[len(first) :]
            sent = self._frame(pieces, FrameKind.DATA, (start, first), self._credit_starved)
        else:
            assert self._element is not None
            part = self._element[: self._buffer_bytes]
            self._element = self._element[len(part) :]
            sent = self._frame(pieces, FrameKind.DATA, (part,), self._credit_starved)
        self._credit_starved = False
        self._credit -= 1
        if not self._element:
            self._element = None
            self._sub.sent()
        return sent

    def _frame(
        self, pieces: list[bytes | memoryview], kind: FrameKind, payload: tuple[bytes | memoryview, ...], flag: bool
    ) -> int:
        """Append one frame, and return its size in bytes.

        `flag` means of an event that it is inside a batch, and of data that it had to wait for credit.
        """
        size = sum(map(len, payload))
        head = header(kind, self._sub.channel, self._sequence, int(flag), size)
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        pieces.append(head)
        pieces.extend(payload)
        return len(head) + size


class PeerLink:
    """This slot's end of the connection to one peer slot. It implements `engine.core.interfaces.ConnectionEnd`, and
    `QueueListener` for the queues of the subpartitions that it sends.

    `on_lost` is called with the reason when the connection is lost, but not after `close`.
    """

    def __init__(self, peer: int, buffer_bytes: int, rows_max: int, on_lost: Callable[[str], None]) -> None:
        self.peer = peer
        self._buffer_bytes = buffer_bytes
        self._rows_max = rows_max
        self._on_lost = on_lost
        self._link: DataConnection | None = None
        self._senders: list[Sender] = []
        self._sender_indices: dict[ChannelId, int] = {}
        self._receivers: dict[ChannelId, RemoteChannel] = {}
        self._ready: deque[Sender] = deque()
        self._in_ready: set[Sender] = set()
        self._credits: dict[ChannelId, int] = {}

    def attach(self, link: DataConnection) -> None:
        self._link = link
        if self._credits or self._ready:
            link.wake()

    def add_sender(self, subpartition: Subpartition) -> None:
        index = self._sender_indices[subpartition.channel] = len(self._senders)
        self._senders.append(Sender(subpartition, self._buffer_bytes, self._rows_max))
        subpartition.queue.connect(self, index)

    def add_receiver(self, channel: RemoteChannel) -> None:
        self._receivers[channel.id] = channel

    def grant(self, channel: ChannelId, credits: int) -> None:
        self._credits[channel] = self._credits.get(channel, 0) + credits
        self._wake()

    @property
    def edges(self) -> set[int]:
        """The ids of the edges of which it carries channels."""
        return {channel.edge for channel in (*self._sender_indices, *self._receivers)}

    # ---- from the queues ----

    def on_data(self, channel: int) -> None:
        """Have the channel's sender take its turn, if it can send."""
        sender = self._senders[channel]
        if sender not in self._in_ready and sender.can_send():
            self._in_ready.add(sender)
            self._ready.append(sender)
            self._wake()

    def on_arrival(self, channel: int, event: BarrierOrEnd) -> None:
        """Do nothing: the event has not arrived at the consumer."""

    # ---- called by the transport ----

    def pull(self, bytes_max: int) -> list[bytes | memoryview]:
        pieces: list[bytes | memoryview] = []
        size = 0
        if self._credits:
            for channel, credits in self._credits.items():
                pieces.append(header(FrameKind.CREDIT, channel, 0, credits, 0))
            self._credits.clear()
        while self._ready and size < bytes_max:
            sender = self._ready.popleft()
            size += sender.next_frame(pieces)
            if sender.can_send():
                self._ready.append(sender)
            else:
                self._in_ready.discard(sender)
        return pieces

    def receive(self, frame: memoryview) -> None:
        if len(frame) < HEADER.size:
            raise InvariantError(f"slot {self.peer}: a data frame of {len(frame)} bytes")
        kind, edge, producer, consumer, sequence, value = HEADER.unpack_from(frame)
        channel = ChannelId(edge, producer, consumer)
        payload = frame[HEADER.size :]
        if kind == FrameKind.CREDIT:
            index = self._sender_indices.get(channel)
            if index is None:
                raise InvariantError(f"slot {self.peer} grants credit for {channel}, which does not exist here")
            self._senders[index].grant(value)
            self.on_data(index)
            return
        receiver = self._receivers.get(channel)
        if receiver is None:
            raise InvariantError(f"slot {self.peer} sends to {channel}, which does not exist here")
        if kind == FrameKind.DATA:
            receiver.receive_data(sequence, payload, credit_starved=value == 1)
        elif kind == FrameKind.EVENT:
            try:
                event = decode_event(payload)
            except UNDECODABLE as error:
                raise InvariantError(f"slot {self.peer} sends a malformed event to {channel}: {error}") from error
            receiver.receive_event(sequence, event, inside=value == 1)
        else:
            raise InvariantError(f"slot {self.peer} sends a frame of unknown kind {kind}")

    def lost(self, reason: str) -> None:
        self._link = None
        self._on_lost(reason)

    def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
        self._ready.clear()

    def check(self) -> None:
        for receiver in self._receivers.values():
            receiver.check()

    def _wake(self) -> None:
        if self._link is not None:
            self._link.wake()
