"""The TCP ports on which a job's processes listen: any free one, or one of a range that a firewall allows."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from typing import Final

from midstream.engine.core.errors import ClusterError, ConfigError

PORT_MAX: Final = 65_535
BACKLOG: Final = 512


@dataclass(frozen=True, slots=True)
class Ports:
    """The range from `first` to `last`; `first` 0: any port. Raises ConfigError for invalid port numbers."""

    first: int = 0
    last: int = 0
    set_by: str = ""
    """The settings that determined the ports, and how to change them, for messages."""

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last <= PORT_MAX:
            raise ConfigError(
                f"there are no ports {self.first} to {self.last}: ports are 1 to {PORT_MAX}, or 0 for any; {self.set_by}"
            )

    def __str__(self) -> str:
        if not self.first:
            return "any free port"
        return f"port {self.first}" if self.first == self.last else f"ports {self.first} to {self.last}"


ANY_PORT: Final = Ports()


def listen(host: str, ports: Ports = ANY_PORT) -> socket.socket:
    """Return a nonblocking listening socket on the first free port of `ports`. Raises ClusterError if none is free."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ClusterError(f"cannot listen on {host!r}: {error.strerror or error}") from error
    for port in range(ports.first, ports.last + 1):
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address[0], port, *address[2:]))
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE:
                continue
            set_by = f" ({ports.set_by})" if ports.set_by else ""
            raise ClusterError(f"cannot listen on {host}, port {port}{set_by}: {error.strerror or error}") from error
        sock.setblocking(False)
        return sock
    are = "is" if ports.first == ports.last else "are all"
    raise ClusterError(f"{ports} on {host} {are} in use: {ports.set_by or 'choose others'}")
