"""One nonblocking TCP connection: TLS if the job uses it, the handshake, then frames between a socket and a `ConnectionEnd`.

Sending is by pull: what waits to be sent stays in the ConnectionEnd, where a priority frame can still overtake it, until the
socket accepts it. Outside the ConnectionEnd there are at most `PULL_BYTES_MAX` here and about `NOT_SENT_BYTES_MAX` unsent in
the kernel. All connections of the loop receive into one buffer in turn, and a frame is passed on as a view of it: a
slot may have a thousand peers. Loop thread only.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum, auto
from functools import partial
from typing import Final

from midstream.engine.core.errors import ClusterError
from midstream.engine.core.interfaces import ConnectionEnd
from midstream.engine.protocol.framing import (
    LENGTH_BYTES,
    UNAUTHENTICATED_FRAME_BYTES_MAX,
    FrameDecoder,
    ProtocolViolation,
)
from midstream.engine.protocol.handshake import Acceptor, Handshake, Refused
from midstream.runtime.event_loop import READ, WRITE, EventLoop
from midstream.runtime.network.tcp_stall import TcpStall
from midstream.runtime.network.tls import Tls, TlsSocket, explained, is_final

PULL_BYTES_MAX: Final = 128 * 2**10
NOT_SENT_BYTES_MAX: Final = 128 * 2**10
PULLS_PER_TURN_MAX: Final = 8
READS_PER_TURN_MAX: Final = 4
PIECES_PER_CALL_MAX: Final = 512
HANDSHAKE_TIMEOUT_S: Final = 10.0
FLUSH_TIMEOUT_S: Final = 5.0

_TCP_NOTSENT_LOWAT: Final = getattr(socket, "TCP_NOTSENT_LOWAT", 25 if os.uname().sysname == "Linux" else None)
_KEEPALIVE: Final = [
    (getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
]
"""Keepalives, by which even an idle side notices within a minute that the host is gone; see also `unanswered`."""


class ConnectionState(Enum):
    CONNECTING = auto()
    SECURING = auto()
    """TLS is being negotiated."""
    HANDSHAKE = auto()
    OPEN = auto()
    """Authenticated; frames flow once `carry` has been called."""
    FINISHING = auto()
    """Sends what is left, then waits for the peer to close; received data are dropped."""
    CLOSED = auto()


class Connection:
    """A connection. `opened` is called once when the handshake is complete; `failed(reason)` once if it never is.

    After `carry(end)`, `ConnectionEnd.lost` is called instead. Nothing is called after `close`.
    """

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        handshake: Handshake,
        opened: Callable[[Connection], None],
        failed: Callable[[Connection, str], None],
        *,
        frame_bytes_max: int,
        buffer_bytes: int,
        tls: Tls | None = None,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
        connecting: bool = False,
    ) -> None:
        self.handshake = handshake
        self.received_s = loop.monotonic_s()
        """When the last byte from the peer arrived, on the monotonic clock."""
        self.is_established = not connecting
        """The peer's machine has accepted the connection; the peer may be too busy to send anything on it."""
        self.is_judged = False
        """The peer's answer in the handshake ended the connection; another try would get the same answer."""
        self._loop = loop
        self._sock = sock
        self._tls = tls
        self._unanswered = TcpStall(sock)
        self._opened = opened
        self._failed = failed
        self._frame_bytes_max = frame_bytes_max
        self._buffer_bytes = buffer_bytes
        self._decoder = FrameDecoder(UNAUTHENTICATED_FRAME_BYTES_MAX, UNAUTHENTICATED_FRAME_BYTES_MAX + LENGTH_BYTES)
        self._end: ConnectionEnd | None = None
        self._out: list[bytes | memoryview] = []
        """The pieces that were pulled and that the kernel has not accepted yet; the first may be the rest of a piece."""
        self._blocked = False
        """The kernel accepts no more; the selector reports when it does."""
        self._flush_posted = False
        self._finished: Callable[[], None] | None = None
        self._guard: threading.RLock | None = None
        """Held whenever the socket is used for sending, once another thread may send as well."""
        self._sending = False
        """The loop thread is sending. A signal handler or a `__del__` that prints in the meantime sends nothing in
        between.
        """
        self._state = ConnectionState.CONNECTING if connecting or tls is not None else ConnectionState.HANDSHAKE
        self._timer = loop.call_later(handshake_timeout_s, self._handshake_late)
        _prepare(sock)
        if connecting:
            loop.watch(sock, WRITE, self._ready)
        else:
            self._begin()

    @property
    def state(self) -> ConnectionState:
        return self._state

    @property
    def local_host(self) -> str:
        """The address of the local end."""
        host: str = self._sock.getsockname()[0]
        return host

    def check_answers(self, timeout_s: float) -> None:
        """Give up the connection if the peer's machine has left data unanswered for longer than `timeout_s`."""
        if self._state is not ConnectionState.OPEN:
            return
        overdue_s = self._unanswered.overdue_s(self._loop.monotonic_s())
        if overdue_s <= timeout_s:
            return
        try:
            peer: str = self._sock.getpeername()[0]
        except OSError:  # the connection is broken, which the loop will notice
            return
        self._give_up(
            f"what {self.local_host} sent to {peer} has not been answered for {overdue_s:.0f} s: "
            "the network between these two machines drops packets: check the firewall and the routes between them"
        )

    def carry(self, end: ConnectionEnd) -> None:
        """Start passing frames to and from `end`, but not from inside this call."""
        assert self._state is ConnectionState.OPEN and self._end is None, (self._state, self._end)
        self._end = end
        self._loop.post(self._start_traffic)

    def wake(self) -> None:
        """Note that the end has something to be pulled."""
        if not self._flush_posted and not self._blocked:
            self._flush_posted = True
            self._loop.post_first(self._flush)  # an acknowledgement must not wait for the next step of a slow function

    def send_inside(self) -> None:
        """Send what the kernel accepts now, from inside a step of the loop, which discovers a failure itself."""
        with self._guard or nullcontext():
            if not self._sending:
                self._sending = True
                try:
                    self._send_some()
                finally:
                    self._sending = False

    def _send_some(self) -> None:
        if self._state is not ConnectionState.OPEN or self._blocked or self._end is None:
            return
        for _ in range(PULLS_PER_TURN_MAX):
            self._out = self._out or self._end.pull(PULL_BYTES_MAX)
            if not self._out:
                return
            try:
                sent = self._sock.sendmsg(self._out[:PIECES_PER_CALL_MAX])
            except OSError:  # no room, or broken: `wake` has been called, and the flush will notice
                return
            if not self._taken(sent):
                return

    def finish(self, finished: Callable[[], None] | None = None) -> None:
        """Send what the end still has, then close; `finished` is called when that is done or has failed."""
        if self._state is not ConnectionState.OPEN:
            self.close()
            if finished is not None:
                finished()
            return
        self._finished = finished
        self._state = ConnectionState.FINISHING
        self._timer = self._loop.call_later(FLUSH_TIMEOUT_S, self._finish_late)
        self._watch()
        self.wake()

    def close(self) -> None:
        """Close immediately, without any call. May be called again."""
        if self._state is ConnectionState.CLOSED:
            return
        if self._guard is None:
            self._close()
        else:
            with self._guard:
                self._close()

    def _close(self) -> None:
        self._state = ConnectionState.CLOSED
        self._timer.cancel()
        self._loop.unwatch(self._sock)
        self._sock.close()
        self._out.clear()
        self._end = None

    # ---- another thread

    def share(self) -> None:
        """Allow one other thread to call `send_aside`. Loop thread only."""
        self._guard = threading.RLock()

    def send_aside(self, frame: list[bytes | memoryview]) -> None:
        """Send a frame while the loop is busy, or the rest of one. The frame is dropped if the kernel accepts nothing."""
        assert self._guard is not None
        with self._guard:
            if self._state is not ConnectionState.OPEN:
                return
            if not self._out:
                self._out = frame
            out = self._out
            try:
                sent = self._sock.sendmsg(out[:PIECES_PER_CALL_MAX])
            except OSError:
                sent = 0  # a broken connection is noticed by the loop
            if not sent and out is frame and not (isinstance(self._sock, TlsSocket) and self._sock.has_begun):
                self._out = []
            while sent:
                piece = out[0]
                if sent < len(piece):
                    out[0] = memoryview(piece)[sent:]
                    return  # the loop sends the rest before anything else
                sent -= len(piece)
                del out[0]

    # ---- opening

    def _begin(self) -> None:
        if self._tls is None:
            self._begin_handshake()
            return
        self._state = ConnectionState.SECURING
        self._loop.unwatch(self._sock)
        try:
            self._sock = self._tls.wrap(self._sock, accepted=isinstance(self.handshake, Acceptor))
        except OSError as error:
            self._give_up(explained(error))
            return
        self._unanswered = TcpStall(self._sock)
        self._secure()

    def _secure(self) -> None:
        """Continue to negotiate TLS."""
        assert self._tls is not None and isinstance(self._sock, TlsSocket)
        try:
            self._sock.do_handshake()
        except ssl.SSLWantReadError:
            self._loop.watch(self._sock, READ, self._ready)
        except ssl.SSLWantWriteError:
            self._loop.watch(self._sock, WRITE, self._ready)
        except OSError as error:
            self.is_judged = is_final(error)
            self._turn_away(explained(error))
        else:
            self.handshake.channel = self._tls.channel(self._sock)
            self._begin_handshake()

    def _turn_away(self, reason: str) -> None:
        """End the connection after TLS has sent the peer the reason.

        If it were closed immediately, with unread data, the reason would not reach the peer.
        """
        if not self.is_judged or not isinstance(self.handshake, Acceptor):
            self._give_up(reason)
            return
        self._state = ConnectionState.FINISHING
        self._finished = partial(self._failed, self, reason)
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:  # the peer is gone
            self._give_up(reason)
        else:
            self._loop.watch(self._sock, READ, self._ready)

    def _begin_handshake(self) -> None:
        self._state = ConnectionState.HANDSHAKE
        self._out.append(self.handshake.start())
        self._watch()
        self._flush()

    def _connected(self) -> None:
        error = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._give_up(f"cannot connect: {os.strerror(error)}")
        else:
            self.is_established = True
            self._begin()

    def _greet(self, frame: memoryview) -> None:
        self._out.append(self.handshake.receive(frame))
        self._flush()
        if not self.handshake.done or self._state is not ConnectionState.HANDSHAKE:
            return
        self._timer.cancel()
        self._state = ConnectionState.OPEN
        self._decoder.allow(self._frame_bytes_max, lent=self._loop.receive_buffer(self._buffer_bytes))
        if isinstance(self.handshake, Acceptor) and self.handshake.refusal:
            self._failed(self, self.handshake.refusal)
            self.finish()
            return
        self._loop.unwatch(self._sock)  # until there is an end to hand frames to
        self._opened(self)

    def _start_traffic(self) -> None:
        if self._state is not ConnectionState.OPEN:
            return
        self._watch()
        try:
            self._hand_on()
        except ProtocolViolation as error:
            self._give_up(str(error))
            return
        self._flush()
        self._read_on()

    def _read_on(self) -> None:
        """Process data that TLS has already received, which the selector does not see."""
        if self._open() and isinstance(self._sock, TlsSocket) and self._sock.pending():
            self._loop.post(lambda: self._ready(READ))

    def _handshake_late(self) -> None:
        took_too_long = "the handshake" if self.is_established else "connecting"
        self._give_up(f"{took_too_long} took too long")

    def _open(self) -> bool:
        return self._state is not ConnectionState.CLOSED

    # ---- reading

    def _ready(self, mask: int) -> None:
        if self._state is ConnectionState.CONNECTING:
            self._connected()
            return
        if self._state is ConnectionState.SECURING:
            self._secure()
            return
        if mask & WRITE and self._open():
            self._blocked = False
            self._flush()
            if not self._blocked and self._open():
                self._watch()
        if mask & READ and self._open():
            try:
                self._read()
            except (ProtocolViolation, Refused) as error:
                self.is_judged = True
                self._give_up(str(error))

    def _read(self) -> None:
        try:
            self._receive()
        finally:
            self._decoder.keep()  # another connection may use the receive buffer next

    def _receive(self) -> None:
        decoder, sock = self._decoder, self._sock
        for _ in range(READS_PER_TURN_MAX):
            space = decoder.space()
            try:
                count = sock.recv_into(space)
            except BlockingIOError:
                return
            except OSError as error:
                self.is_judged = is_final(error)
                self._give_up(explained(error))
                return
            if count == 0:
                self._give_up("the peer closed the connection")
                return
            self.received_s = self._loop.monotonic_s()
            if self._state is ConnectionState.FINISHING:
                continue
            decoder.received(count)
            self._hand_on()
            if self._state is ConnectionState.CLOSED or self._end is None:
                return
            if count < len(space):
                return
        self._read_on()

    def _hand_on(self) -> None:
        """Pass every complete frame to the handshake or to the end."""
        decoder = self._decoder
        while self._state is ConnectionState.HANDSHAKE:
            frame = decoder.next_frame()
            if frame is None:
                return
            self._greet(frame)
        end = self._end
        while end is not None and self._state is ConnectionState.OPEN:
            frame = decoder.next_frame()
            if frame is None:
                return
            end.receive(frame)

    # ---- writing

    def _flush(self) -> None:
        if self._guard is None:
            self._send_all()
            return
        with self._guard:
            self._sending = True
            try:
                self._send_all()
            finally:
                self._sending = False

    def _send_all(self) -> None:
        self._flush_posted = False
        if self._state in (ConnectionState.CLOSED, ConnectionState.CONNECTING, ConnectionState.SECURING):
            return
        for _ in range(PULLS_PER_TURN_MAX):
            if not self._out:
                if self._end is not None:
                    self._out = self._end.pull(PULL_BYTES_MAX)
                if not self._out:
                    if self._state is ConnectionState.FINISHING:
                        self._all_sent()
                    return
            if not self._send():
                return
        self.wake()

    def _send(self) -> bool:
        """Send from `_out`, and return whether the kernel accepted all of it."""
        out = self._out
        try:
            sent = self._sock.sendmsg(out if len(out) <= PIECES_PER_CALL_MAX else out[:PIECES_PER_CALL_MAX])
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._give_up(explained(error))
            return False
        return self._taken(sent)

    def _taken(self, sent: int) -> bool:
        """Remove the bytes that the kernel has accepted from `_out`, and return whether that is all of it."""
        out = self._out
        whole = 0
        for piece in out:
            if sent < len(piece):
                break
            sent -= len(piece)
            whole += 1
        if whole == len(out):
            out.clear()
            return True
        del out[:whole]
        if sent:
            out[0] = memoryview(out[0])[sent:]
        elif whole == PIECES_PER_CALL_MAX:
            return True  # only the call's limit stopped it
        if not self._blocked:
            self._blocked = True
            self._watch()
        return False

    def _watch(self) -> None:
        self._loop.watch(self._sock, READ | WRITE if self._blocked else READ, self._ready)

    # ---- ending

    def _all_sent(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                raise
            self._give_up("the peer closed the connection")

    def _finish_late(self) -> None:
        self._give_up("the peer did not accept what was left to send")

    def _give_up(self, reason: str) -> None:
        state, end, finished = self._state, self._end, self._finished
        if state is ConnectionState.CLOSED:
            return
        self.close()
        if state is ConnectionState.FINISHING:
            if finished is not None:
                finished()
        elif end is not None:
            end.lost(reason)
        else:
            self._failed(self, reason)


def dial(host: str, port: int) -> socket.socket:
    """Return a socket that connects to a numeric address (looking up a name would block), for a Connection that is
    `connecting`. Raises ClusterError for any other.
    """
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        family, kind, proto, _, address = info[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise ClusterError(f"cannot connect to {host}:{port}: {error.strerror or error}") from error
    sock.setblocking(False)
    error_number = sock.connect_ex(address)
    if error_number not in (0, errno.EINPROGRESS):
        sock.close()
        raise ClusterError(f"cannot connect to {host}:{port}: {os.strerror(error_number)}")
    return sock


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    if _TCP_NOTSENT_LOWAT is not None:
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, NOT_SENT_BYTES_MAX)
