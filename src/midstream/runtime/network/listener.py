"""A listening socket that accepts only peers that prove that they have the job's secret.

The cost of outsiders is bounded: there are limits on the number of unauthenticated connections and on the seconds and
bytes of each, and all of them together cause one line in the log. At the limit, a new connection replaces the oldest
one from the address that has the most: idle connections cannot keep out an honest peer, and a flood affects only peers
on the same machine, which dial again.
"""

from __future__ import annotations

import errno
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from midstream.engine.protocol.handshake import NONCE_BYTES, Acceptor, Identity
from midstream.runtime.event_loop import READ, EventLoop
from midstream.runtime.network.connection import HANDSHAKE_TIMEOUT_S, Connection, ConnectionState
from midstream.runtime.network.ports import ANY_PORT, Ports, listen
from midstream.runtime.network.tls import JobKeys, tls_of

UNAUTHENTICATED_MAX: Final = 128
ACCEPTS_PER_TURN_MAX: Final = 64
ACCEPT_PAUSE_S: Final = 0.25

_log = logging.getLogger(__name__)


def accepted(
    loop: EventLoop, listening: socket.socket, count_max: int, ready: Callable[[int], None]
) -> Iterator[tuple[socket.socket, str]]:
    """Accept the connections that wait at a socket, whose events go to `ready`, and yield each with its address.

    If the process has no more descriptors, the socket is watched again after a pause: otherwise the loop would be busy
    with an event that it cannot handle.
    """

    def resume() -> None:
        if listening.fileno() >= 0:
            loop.watch(listening, READ, ready)

    for _ in range(count_max):
        if listening.fileno() < 0:
            return
        try:
            sock, address = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise
            _log.warning("cannot accept a connection: %s; trying again in %.2f s", error.strerror, ACCEPT_PAUSE_S)
            loop.unwatch(listening)
            loop.call_later(ACCEPT_PAUSE_S, resume)
            return
        yield sock, address[0]


class Listener:
    """Accepts connections. `refusal` returns "" to accept an authenticated identity, else the reason; `opened` gets the
    accepted ones.
    """

    def __init__(
        self,
        loop: EventLoop,
        host: str,
        keys: JobKeys,
        refusal: Callable[[Identity], str],
        opened: Callable[[Connection, Identity], None],
        *,
        frame_bytes_max: int,
        buffer_bytes: int,
        ports: Ports = ANY_PORT,
        unauthenticated_max: int = UNAUTHENTICATED_MAX,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        self._loop = loop
        self._keys = keys
        self._refusal = refusal
        self._opened = opened
        self._frame_bytes_max = frame_bytes_max
        self._buffer_bytes = buffer_bytes
        self._unauthenticated_max = unauthenticated_max
        self._handshake_timeout_s = handshake_timeout_s
        self._strangers: dict[Connection, str] = {}
        """Unauthenticated connections, oldest first, with the address from which they come."""
        self._turned_away = 0
        self._sock = listen(host, ports)
        self.host: str = self._sock.getsockname()[0]
        self.port: int = self._sock.getsockname()[1]

    @property
    def unauthenticated(self) -> int:
        """The number of unauthenticated connections, at most `unauthenticated_max`."""
        return len(self._strangers)

    def start(self) -> None:
        """Begin to accept. Like everything but the constructor, on the loop thread only."""
        self._loop.watch(self._sock, READ, self._ready)

    def close(self) -> None:
        """Stop listening and drop unfinished handshakes; opened connections live on. May be called again."""
        if self._sock.fileno() < 0:
            return
        self._loop.unwatch(self._sock)
        self._sock.close()
        for stranger in list(self._strangers):
            stranger.close()
        self._strangers.clear()

    def _ready(self, _mask: int) -> None:
        for sock, address in accepted(self._loop, self._sock, ACCEPTS_PER_TURN_MAX, self._ready):
            self._admit(sock, address)

    def _admit(self, sock: socket.socket, host: str) -> None:
        if len(self._strangers) >= self._unauthenticated_max:
            ((crowd, _),) = Counter(self._strangers.values()).most_common(1)
            oldest = next(stranger for stranger, where in self._strangers.items() if where == crowd)
            oldest.close()
            self._failed(oldest, "too many unauthenticated connections at once")
        connection = Connection(
            self._loop,
            sock,
            Acceptor(self._keys.secret, secrets.token_bytes(NONCE_BYTES), self._refusal),
            self._authenticated,
            self._failed,
            frame_bytes_max=self._frame_bytes_max,
            buffer_bytes=self._buffer_bytes,
            tls=tls_of(self._keys),
            handshake_timeout_s=self._handshake_timeout_s,
        )
        if connection.state is not ConnectionState.CLOSED:
            self._strangers[connection] = host

    def _authenticated(self, connection: Connection) -> None:
        del self._strangers[connection]
        assert isinstance(connection.handshake, Acceptor) and connection.handshake.identity is not None
        self._opened(connection, connection.handshake.identity)

    def _failed(self, connection: Connection, reason: str) -> None:
        self._strangers.pop(connection, None)
        self._turned_away += 1
        if self._turned_away == 1:
            _log.warning("refused a connection to port %d: %s (logged once)", self.port, reason)
