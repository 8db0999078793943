"""The driver's control port: one connection per slot and per client, each authenticated, typed and bounded.

A slot's connection is closed if it is silent for the heartbeat timeout, if it sends an invalid message, or if it does not
read. The driver is notified once of the end of each connection that was not released. Loop thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from midstream.engine.protocol import messages as m
from midstream.engine.protocol.framing import CONTROL_FRAME_BYTES_MAX, ProtocolViolation
from midstream.engine.protocol.handshake import Identity, Role
from midstream.engine.protocol.live_rows import GetRows, RowSample, SampleRows
from midstream.runtime.event_loop import EventLoop
from midstream.runtime.network.connection import Connection
from midstream.runtime.network.listener import Listener
from midstream.runtime.network.message_channel import (
    HEARTBEAT_INTERVAL_S_MAX,
    HEARTBEATS_PER_TIMEOUT,
    RECEIVE_BUFFER_BYTES,
    MessageChannel,
    SharedEncoding,
)
from midstream.runtime.network.ports import ANY_PORT, Ports
from midstream.runtime.network.tls import JobKeys

if TYPE_CHECKING:
    from midstream.runtime.driver.driver import Driver

REGISTER_TIMEOUT_S: Final = 30.0
QUESTIONS_PER_CLIENT_MAX: Final = 64

_log = logging.getLogger(__name__)
FromSlotLine: TypeAlias = m.FromSlot | m.Logged | RowSample
DriverRequest: TypeAlias = m.ClientRequest | m.GetLogs | GetRows
"""The requests of clients, to the coordinator or to the driver alone."""
_slot_decoder: msgspec.msgpack.Decoder[FromSlotLine] = msgspec.msgpack.Decoder(FromSlotLine)
_client_decoder: msgspec.msgpack.Decoder[DriverRequest] = msgspec.msgpack.Decoder(DriverRequest)


class ControlServer:
    """All connections to slots and clients. Listens from the constructor on, and accepts peers from `start` on."""

    def __init__(
        self,
        loop: EventLoop,
        keys: JobKeys,
        bind_host: str,
        heartbeat_timeout_s: float,
        driver: Driver,
        *,
        modules: m.JobModules | None = None,
        ports: Ports = ANY_PORT,
    ) -> None:
        self.loop = loop
        self.modules = modules or m.JobModules()
        self.driver = driver
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.heartbeat_interval_s = min(HEARTBEAT_INTERVAL_S_MAX, heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT)
        self.encoding = SharedEncoding()
        """The encoding shared by messages to slots."""
        self._slots: dict[int, SlotConnection] = {}
        self._slot_count = 0
        self._open: set[SlotConnection | ClientConnection] = set()
        """All connections that are not closed: slots that have registered or may still do so, slots being released, clients."""
        self._all_released: Callable[[], None] | None = None
        self._listener = Listener(
            loop,
            bind_host,
            keys,
            driver.identity_refusal,
            self._opened,
            frame_bytes_max=CONTROL_FRAME_BYTES_MAX,
            buffer_bytes=RECEIVE_BUFFER_BYTES,
            ports=ports,
        )
        self.host, self.port = self._listener.host, self._listener.port

    def start(self) -> None:
        self._listener.start()
        self.loop.call_later(self.heartbeat_interval_s, self._check_heartbeats)

    def send(self, slot: int, message: m.ToSlot) -> None:
        """Send to a slot; the message is dropped if the slot is gone."""
        connection = self._slots.get(slot)
        if connection is not None:
            connection.channel.send(message)

    def send_all(self, message: SampleRows) -> None:
        """Send to every slot that is connected."""
        for connection in list(self._slots.values()):  # sending to a slot that does not read removes it
            connection.channel.send(message)

    def release(self, slot: int) -> None:
        """Send what is queued, then have the slot end; its loss is no longer reported."""
        connection = self._slots.pop(slot, None)
        if connection is not None:
            connection.channel.send(m.Release())
            self._finish(connection)

    def drop(self, slot: int) -> bool:
        """Cut the slot off. Returns False if it was gone already."""
        connection = self._slots.pop(slot, None)
        if connection is None:
            return False
        self._open.discard(connection)
        connection.channel.close()
        return True

    def release_all(self, done: Callable[[], None]) -> None:
        """Release every slot, answer every client, and accept no more peers; then call `done`, once."""
        self._listener.close()
        self._all_released = done
        for slot in list(self._slots):
            self.release(slot)
        for connection in list(self._open):
            if isinstance(connection, ClientConnection) or connection.slot is None:
                self._finish(connection)
        self._notify_if_all_released()

    def close(self) -> None:
        """Close all remaining connections, without reporting it."""
        self._listener.close()
        for connection in self._open:
            connection.channel.close()
        self._open.clear()
        self._slots.clear()

    # ---- called by the connections

    def add(self, connection: SlotConnection) -> int:
        slot = self._slot_count
        self._slot_count += 1
        self._slots[slot] = connection
        return slot

    def refuse(self, connection: SlotConnection, reason: str) -> None:
        """End a refused slot in good order, so that Spark does not run its task again."""
        _log.info("%s", reason)
        connection.channel.send(m.Release())
        self._finish(connection)

    def ended(self, connection: SlotConnection | ClientConnection, reason: str) -> None:
        """Process the end of a connection that was not requested."""
        self._open.discard(connection)
        connection.channel.close()
        if isinstance(connection, SlotConnection):
            if connection.slot is None:
                _log.warning("a slot connected and did not register: %s", reason)
            elif self._slots.pop(connection.slot, None) is not None:
                self.driver.shell.slot_lost(connection.slot, reason)

    # ---- inside

    def _finish(self, connection: SlotConnection | ClientConnection) -> None:
        def finished() -> None:
            self._open.discard(connection)
            self._notify_if_all_released()

        connection.channel.finish(finished)

    def _notify_if_all_released(self) -> None:
        if not self._open and self._all_released is not None:
            done, self._all_released = self._all_released, None
            done()

    def _opened(self, stream: Connection, identity: Identity) -> None:
        connection = (
            SlotConnection(self, stream) if identity.role is Role.SLOT_CONTROL else ClientConnection(self, stream)
        )
        self._open.add(connection)

    def _check_heartbeats(self) -> None:
        now_s, beat = self.loop.monotonic_s(), m.Heartbeat()
        for slot, connection in list(self._slots.items()):
            silent_s = now_s - connection.channel.received_s
            if silent_s > self.heartbeat_timeout_s:
                self.ended(
                    connection,
                    f"nothing was received from it for {silent_s:.1f} s: its process or its machine is frozen, the network "
                    "is down, or a function of the job has held Python's interpreter lock for so long (then raise "
                    "heartbeat_timeout)",
                )
            elif slot in self._slots:
                connection.channel.send(beat)
        self.loop.call_later(self.heartbeat_interval_s, self._check_heartbeats)


class SlotConnection:
    """The control connection of one slot: `slot` is None until it has registered."""

    def __init__(self, server: ControlServer, stream: Connection) -> None:
        self.slot: int | None = None
        self._server = server
        self.channel: MessageChannel[FromSlotLine] = MessageChannel(
            stream, _slot_decoder, self._received, self._lost, server.encoding.encode
        )
        self._timer = server.loop.call_later(REGISTER_TIMEOUT_S, lambda: self._lost("it does not register"))

    def _received(self, message: FromSlotLine) -> None:
        server = self._server
        if isinstance(message, m.Register) != (self.slot is None):
            raise ProtocolViolation(f"{type(message).__name__} out of turn")
        if not isinstance(message, m.Register):
            assert self.slot is not None
            if isinstance(message, m.Logged):
                server.driver.logs.add(self.slot, message)
            elif isinstance(message, RowSample):
                server.driver.live_rows.handle_sample(message)
            else:
                server.driver.shell.slot_message(self.slot, message)
            return
        self._timer.cancel()
        reason = server.driver.shell.refusal(message)
        if reason:
            server.refuse(self, f"slot of process {message.pid} is refused: {reason}")
            return
        self.slot = server.add(self)
        # before the driver learns of the slot, so that its messages come after the welcome
        self.channel.send(m.Welcome(self.slot, server.heartbeat_interval_s, server.heartbeat_timeout_s, server.modules))
        server.driver.shell.slot_registered(self.slot, message)

    def _lost(self, reason: str) -> None:
        self._timer.cancel()
        self._server.ended(self, reason)


class ClientConnection:
    """The connection of a client, which may send any number of requests; each gets one answer, as soon as it is ready."""

    def __init__(self, server: ControlServer, stream: Connection) -> None:
        self._server = server
        self._open_questions = 0
        self.channel: MessageChannel[DriverRequest] = MessageChannel(
            stream, _client_decoder, self._received, self._lost
        )

    def answer(self, reply: m.Reply) -> None:
        self._open_questions -= 1
        self.channel.send(reply)

    def _received(self, request: DriverRequest) -> None:
        if self._open_questions >= QUESTIONS_PER_CLIENT_MAX:
            raise ProtocolViolation(f"more than {QUESTIONS_PER_CLIENT_MAX} requests at once")
        self._open_questions += 1
        self._server.driver.client_requested(self, request)

    def _lost(self, reason: str) -> None:
        self._server.ended(self, reason)
