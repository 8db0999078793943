"""How long what was sent on a TCP connection has been without any answer of the machine at its other end.

Packets between two machines can be dropped without a word: a firewall, a broken route, a cable. The
kernel then sends them again for a quarter of an hour before it gives the connection up, and sends no
keepalives meanwhile. What it knows in the meantime is in `TCP_INFO`.

TCP_USER_TIMEOUT would not do: it also ends connections to a machine that answers and has no room for
more, such as that of a slot inside a long call of a user's function.
"""

from __future__ import annotations

import socket
import struct
import sys
from typing import Final, NamedTuple

_LAYOUT: Final = struct.Struct("=3xB4x16xI16xI8xI")
"""The beginning of Linux's `struct tcp_info`; later kernels have only added to its end."""

_TICK_S: Final = 0.05
"""More than the kernel's clock may be behind: its times of answers are only as exact as its timer."""


class _Info(NamedTuple):
    probes: int
    """Probes of a peer without room that it has not answered."""
    unacknowledged: int
    """Segments that were sent and not acknowledged."""
    sent_ms: int
    """How long ago the last data were sent, for the first time or again."""
    heard_ms: int
    """How long ago the last acknowledgement came, even of nothing new."""


class Unanswered:
    """Of one connection. Nothing is known, and nothing is ever overdue, elsewhere than on Linux."""

    __slots__ = ("_looked_s", "_since_s", "_sock")

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._since_s: float | None = None
        """The first call of those in a row that found something without an answer, and no answer between them."""
        self._looked_s = 0.0
        """The call before this one."""

    def overdue_s(self, now_s: float) -> float:
        """For how many seconds at least what was sent has been without an answer; 0 if nothing is.

        `now_s`: of a monotonic clock. What is sent right after a long silence is not overdue: the time counts from the
        first call that finds it without an answer. If an answer came after the call before this one, that call's finding
        was answered, and what waits now is something newer: calls may be far apart, with a long call of a user's function
        between them. A peer that has no room answers each time when it is asked for some.
        """
        if sys.platform != "linux":
            return 0.0
        info = _Info(*_LAYOUT.unpack(self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAYOUT.size)))
        if not info.probes and not (info.unacknowledged and info.heard_ms > info.sent_ms):
            self._since_s = None
            return 0.0
        answered = now_s - info.heard_ms / 1000 > self._looked_s - _TICK_S
        if self._since_s is None or answered:
            self._since_s = now_s
        self._looked_s = now_s
        return now_s - self._since_s
