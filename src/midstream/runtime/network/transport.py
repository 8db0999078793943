"""Data connections between slots: the Transport of engine.core.interfaces over TCP.

Of two slots the one with the lower id dials. Its connection may come before the other side has opened its end; it is
then held, unread, within limits of number and time. Both sides name the attempt in the handshake: a peer with an older
one than was opened last is refused.

A peer whose loop is inside a long call of a user's function answers late, and may authenticate so late that the other
side has hung up: then it is dialled again. The driver judges by heartbeats whether a slot is alive; only an unreachable
machine is given up soon.
"""

from __future__ import annotations

import secrets
from typing import Final

from midstream.engine.core.config import MAX_PARALLELISM_MAX
from midstream.engine.core.errors import ClusterError
from midstream.engine.core.interfaces import ConnectionEnd, DataConnection, Timer
from midstream.engine.protocol.framing import DATA_FRAME_BYTES_MAX
from midstream.engine.protocol.handshake import NONCE_BYTES, Dialer, Identity, Role
from midstream.runtime.event_loop import EventLoop
from midstream.runtime.network.connection import HANDSHAKE_TIMEOUT_S, Connection, dial
from midstream.runtime.network.listener import Listener
from midstream.runtime.network.ports import ANY_PORT, Ports
from midstream.runtime.network.tls import JobKeys, tls_of

RECEIVE_BUFFER_BYTES: Final = 512 * 2**10
DIAL_TIMEOUT_S: Final = 30.0
REDIAL_S: Final = 0.5
OPEN_TIMEOUT_S: Final = 600.0
HELD_MAX: Final = MAX_PARALLELISM_MAX
"""The limit on held connections: the maximum number of slots, since each has proved that it is one of the job."""


class TcpTransport:
    """The data connections of one slot. Loop thread only; listens from the constructor on."""

    def __init__(
        self,
        loop: EventLoop,
        keys: JobKeys,
        job_id: str,
        host: str,
        *,
        ports: Ports = ANY_PORT,
        open_timeout_s: float = OPEN_TIMEOUT_S,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
        held_max: int = HELD_MAX,
    ) -> None:
        self.slot: int | None = None
        """The slot's own id, once the driver has assigned it. No peer dials before."""
        self._loop = loop
        self._keys = keys
        self._job_id = job_id
        self._open_timeout_s = open_timeout_s
        self._held_max = held_max
        self._attempt = -1
        """The newest attempt that was opened."""
        self._peers: dict[tuple[int, int], _PeerConnection] = {}
        """Open ends, by peer slot and attempt."""
        self._held: dict[tuple[int, int], tuple[Connection, Timer]] = {}
        """Connections that arrived before their end was opened."""
        self._listener = Listener(
            loop,
            host,
            keys,
            self._refusal,
            self._came,
            frame_bytes_max=DATA_FRAME_BYTES_MAX,
            buffer_bytes=RECEIVE_BUFFER_BYTES,
            ports=ports,
            handshake_timeout_s=handshake_timeout_s,
        )
        self.host, self.port = self._listener.host, self._listener.port
        self._listener.start()

    @property
    def held(self) -> int:
        """The number of held connections, at most `held_max`."""
        return len(self._held)

    def open(self, slot: int, host: str, port: int, attempt: int, end: ConnectionEnd) -> DataConnection:
        assert self.slot is not None and slot != self.slot, (slot, self.slot)
        assert attempt >= self._attempt, f"attempt {attempt} opened after {self._attempt}"
        key = (slot, attempt)
        assert key not in self._peers, f"slot {slot} opened twice in attempt {attempt}"
        if attempt > self._attempt:
            self._attempt = attempt
            for old in [k for k in self._held if k[1] < attempt]:
                self._let_go(old)
        peer = _PeerConnection(self, key, end)
        self._peers[key] = peer
        if key in self._held:
            connection, timer = self._held.pop(key)
            timer.cancel()
            peer.connected(connection)
            return peer
        dials = self.slot < slot
        what = (
            f"slot {slot} at {host}:{port} did not answer in time" if dials else f"slot {slot} did not connect in time"
        )
        peer.timer = self._loop.call_later(self._open_timeout_s, lambda: peer.lost(what))
        if dials:
            self._dial(peer, host, port)
        return peer

    def check_answers(self, timeout_s: float) -> None:
        """Give up connections whose peer's machine has left data unanswered for longer than `timeout_s`."""
        for peer in list(self._peers.values()):
            if peer.connection is not None:
                peer.connection.check_answers(timeout_s)

    def close(self) -> None:
        """Close everything, without notifying the ends."""
        self._listener.close()
        for key in list(self._held):
            self._let_go(key)
        for peer in list(self._peers.values()):
            peer.close()

    def forget(self, key: tuple[int, int]) -> None:
        del self._peers[key]

    def _dial(self, peer: _PeerConnection, host: str, port: int) -> None:
        slot, attempt = peer.key
        if peer.is_closed:
            return

        def failed(connection: Connection, reason: str) -> None:
            if connection.is_established and not connection.is_judged:
                self._loop.call_later(REDIAL_S, lambda: self._dial(peer, host, port))
            else:
                peer.lost(f"slot {slot} at {host}:{port}: {reason}")

        identity = Identity(Role.SLOT_DATA, self._job_id, attempt, from_slot=self.slot or 0, to_slot=slot)
        try:
            peer.connection = Connection(
                self._loop,
                dial(host, port),
                Dialer(self._keys.secret, identity, secrets.token_bytes(NONCE_BYTES)),
                peer.connected,
                failed,
                frame_bytes_max=DATA_FRAME_BYTES_MAX,
                buffer_bytes=RECEIVE_BUFFER_BYTES,
                tls=tls_of(self._keys),
                handshake_timeout_s=DIAL_TIMEOUT_S,
                connecting=True,
            )
        except ClusterError as error:
            reason = f"slot {slot}: {error}"
            self._loop.post(lambda: peer.lost(reason))

    def _refusal(self, identity: Identity) -> str:
        """Return why this authenticated peer is refused, or ""."""
        key = (identity.from_slot, identity.attempt)
        if identity.role is not Role.SLOT_DATA or identity.job_id != self._job_id:
            return "this is a slot's data port, of another job or for another purpose"
        if self.slot is None or identity.to_slot != self.slot or not 0 <= identity.from_slot < self.slot:
            return f"this is slot {self.slot}; it does not expect slot {identity.from_slot} to dial {identity.to_slot}"
        if identity.attempt < self._attempt:
            return f"attempt {identity.attempt} is over; this is attempt {self._attempt}"
        if key in self._held or (key in self._peers and self._peers[key].connection is not None):
            return f"slot {identity.from_slot} is connected already in attempt {identity.attempt}"
        if key not in self._peers and len(self._held) >= self._held_max:
            return "too many connections wait to be opened"
        return ""

    def _came(self, connection: Connection, identity: Identity) -> None:
        key = (identity.from_slot, identity.attempt)
        peer = self._peers.get(key)
        if peer is not None:
            peer.connected(connection)
        else:
            timer = self._loop.call_later(self._open_timeout_s, lambda: self._let_go(key))
            self._held[key] = (connection, timer)

    def _let_go(self, key: tuple[int, int]) -> None:
        connection, timer = self._held.pop(key)
        timer.cancel()
        connection.close()


class _PeerConnection:
    """The DataLink that `open` returns; its connection may not exist yet."""

    __slots__ = ("_end", "_transport", "connection", "key", "timer")

    def __init__(self, transport: TcpTransport, key: tuple[int, int], end: ConnectionEnd) -> None:
        self._transport = transport
        self._end: ConnectionEnd | None = end
        self.key = key
        self.connection: Connection | None = None
        self.timer: Timer | None = None

    @property
    def is_closed(self) -> bool:
        return self._end is None

    def wake(self) -> None:
        if self.connection is not None and self._end is not None:
            self.connection.wake()

    def close(self) -> None:
        if self._end is None:
            return
        self._end = None
        self._transport.forget(self.key)
        if self.timer is not None:
            self.timer.cancel()
        if self.connection is not None:
            self.connection.close()

    def connected(self, connection: Connection) -> None:
        assert self._end is not None
        if self.timer is not None:
            self.timer.cancel()
        self.connection = connection
        connection.carry(self)

    # ---- ConnectionEnd of the connection

    def pull(self, bytes_max: int) -> list[bytes | memoryview]:
        return [] if self._end is None else self._end.pull(bytes_max)

    def receive(self, frame: memoryview) -> None:
        if self._end is not None:
            self._end.receive(frame)

    def lost(self, reason: str) -> None:
        end = self._end
        if end is not None:
            self.close()
            end.lost(reason)
