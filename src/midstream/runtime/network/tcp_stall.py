"""Measures for how long the machine at the other end of a TCP connection has left sent data unanswered.

Packets between two machines can be dropped silently: by a firewall, a broken route, a cable. The kernel then
retransmits for a quarter of an hour before it gives up the connection, and sends no keepalives meanwhile. Until then,
`TCP_INFO` reports this.

TCP_USER_TIMEOUT would not do: it also ends connections to a machine that answers but has no room for more, such as that
of a slot inside a long call of a user's function.
"""

from __future__ import annotations

import socket
import struct
import sys
from typing import Final, NamedTuple

_LAYOUT: Final = struct.Struct("=3xB4x16xI16xI8xI")
"""The beginning of Linux's `struct tcp_info`; later kernels have only extended it at the end."""

_TICK_S: Final = 0.05
"""More than the possible error of the kernel's times of answers, which are only as exact as its timer."""


class _Info(NamedTuple):
    probes: int
    """Unanswered probes of a peer without room."""
    unacknowledged: int
    """Segments sent and not acknowledged."""
    sent_ms: int
    """The time since data were last sent, for the first time or again."""
    received_ms: int
    """The time since the last acknowledgement, even of nothing new."""


class TcpStall:
    """Tracks one connection. On systems other than Linux nothing is known, and nothing is ever overdue."""

    __slots__ = ("_polled_s", "_since_s", "_sock")

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._since_s: float | None = None
        """The first of consecutive calls that found something unanswered, with no answer between them."""
        self._polled_s = 0.0
        """The time of the previous call."""

    def overdue_s(self, now_s: float) -> float:
        """Return for how many seconds, at least, sent data has been unanswered; 0 if all of it is answered.

        `now_s`: the time of a monotonic clock. Data sent after a long silence is not overdue at once: the time counts
        from the first call that finds it unanswered. If an answer came after the previous call, that call's finding was
        answered, and what is waiting now is newer: calls may be far apart, with a long call of a user's function
        between them. A peer without room answers every time it is probed.
        """
        if sys.platform != "linux":
            return 0.0
        info = _Info(*_LAYOUT.unpack(self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAYOUT.size)))
        if not info.probes and not (info.unacknowledged and info.received_ms > info.sent_ms):
            self._since_s = None
            return 0.0
        answered = now_s - info.received_ms / 1000 > self._polled_s - _TICK_S
        if self._since_s is None or answered:
            self._since_s = now_s
        self._polled_s = now_s
        return now_s - self._since_s
