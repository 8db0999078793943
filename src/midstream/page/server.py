"""The sockets of a page, on one thread: a bounded number of connections, each for one request and a bounded time."""

from __future__ import annotations

import atexit
import logging
import socket
import threading
import time
from typing import Final

from midstream.engine.core.errors import ClusterError
from midstream.page.address import PageAddress, token_of
from midstream.page.http import Refusal, Request, RequestReader, Response
from midstream.page.site import Served, Site
from midstream.runtime.event_loop import READ, WRITE, EventLoop
from midstream.runtime.network.listener import accepted
from midstream.runtime.network.ports import Ports, listen

CONNECTIONS_MAX: Final = 64
"""The limit on connections; a further one replaces the oldest."""
CONNECTION_S_MAX: Final = 15.0
RECEIVE_BYTES: Final = 16 * 2**10
ACCEPTS_PER_TURN_MAX: Final = 16
WATCHED_S: Final = 3.0
"""A page in a browser sends a request every second: one that has not for this long is closed or in the background."""
FINAL_STATUS_S: Final = 2.5
"""How long an open page may take to fetch the final status."""
THREAD_END_S: Final = 5.0

_log = logging.getLogger(__name__)


def open_page(address: PageAddress | None, name: str) -> PageServer | None:
    """Begin to listen. None without an address, or if listening fails: a warning is logged, and the job runs all the
    same.

    Raises ConfigError for an invalid token in the environment.
    """
    if address is None:
        return None
    token = token_of()
    try:
        return PageServer(address, token)
    except (ClusterError, OSError) as error:
        _log.warning("job %s runs without its page: %s", name, error)
        return None


class PageServer:
    """Listens from the beginning; answers from `begin`, which sets the job, until some time after `end`."""

    def __init__(self, address: PageAddress, token: str) -> None:
        """Raises ClusterError if it cannot listen there."""
        self._sock = listen(address.host, Ports(address.port, address.port, "--page with another port, or without one"))
        host, port = self._sock.getsockname()[:2]
        self.address = PageAddress(address.host, port)
        if host in ("0.0.0.0", "::"):  # whichever it is reached by
            host = socket.gethostname()
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{port}/"
        self.link = f"{self.url}#token={token}"
        """The link with the token, in the part that browsers send to no server."""
        self._token = token
        self._loop = EventLoop("page", fatal=self._fatal)
        self._connections: dict[_Connection, None] = {}
        """The connections, oldest first."""
        self._job: Served | None = None
        self._site: Site | None = None
        self.job_has_ended = False
        self._thread = threading.Thread(target=self._run, name="midstream-page", daemon=True)

    def begin(self, job: Served) -> None:
        """Serve the page of this job, on a thread of its own."""
        self._job = job
        _open.add(self)
        self._thread.start()

    def end(self) -> None:
        """Note that the job has ended, or never began; returns immediately, from any thread."""
        self.job_has_ended = True
        if self._thread.ident is None:
            self._sock.close()
            self._loop.close()
        else:
            self._loop.post(self._end)

    def ended(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for the thread's end, and return whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- the thread

    def _run(self) -> None:
        try:
            assert self._job is not None
            self._site = Site(self._loop, self._job, self.address, self._token)
            self._loop.watch(self._sock, READ, self._ready)
            self._loop.run()
        except Exception:  # noqa: BLE001 - logged; the page is no reason to end a job
            _log.exception("the page of the job has failed; the job continues without it")
        finally:
            for connection in list(self._connections):
                connection.close()
            self._sock.close()
            self._loop.close()
            _open.discard(self)

    def _end(self) -> None:
        assert self._site is not None
        seen_s = self._site.watched_s
        watched = seen_s is not None and time.monotonic() - seen_s < WATCHED_S
        self._loop.call_later(FINAL_STATUS_S if watched else 0.0, self._loop.stop)

    def _fatal(self, error: BaseException) -> None:
        """Handle the failure of one request: it gets no answer, its connection is closed when its time is over, and all
        others continue.
        """
        _log.error("the page of the job: a request failed", exc_info=error)

    def _ready(self, _mask: int) -> None:
        for sock, _ in accepted(self._loop, self._sock, ACCEPTS_PER_TURN_MAX, self._ready):
            while len(self._connections) >= CONNECTIONS_MAX:
                next(iter(self._connections)).close()
            assert self._site is not None
            self._connections[_Connection(self._loop, sock, self._site, self._connections)] = None


class _Connection:
    """One request, one response."""

    def __init__(self, loop: EventLoop, sock: socket.socket, site: Site, open_ones: dict[_Connection, None]) -> None:
        self._loop = loop
        self._sock = sock
        self._site = site
        self._open_ones = open_ones
        self._reader = RequestReader()
        self._is_requested = False
        self._answered = False
        self._with_body = True
        self._unsent = memoryview(b"")
        sock.setblocking(False)
        loop.watch(sock, READ, self._ready)
        self._timer = loop.call_later(CONNECTION_S_MAX, self.close)

    def close(self) -> None:
        """Close the connection. May be called again."""
        if self._sock.fileno() < 0:
            return
        self._timer.cancel()
        self._loop.unwatch(self._sock)
        self._sock.close()
        self._open_ones.pop(self, None)

    def _ready(self, mask: int) -> None:
        if self._sock.fileno() < 0:
            return
        if mask & WRITE:
            self._send()
        elif mask & READ:
            self._receive()

    def _receive(self) -> None:
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        if self._answered:  # what still comes is dropped: closing now could lose the response
            if not data:
                self.close()
            return
        if not data and self._is_requested:  # it sends no more, and may still receive
            self._loop.unwatch(self._sock)
            return
        if not data or self._is_requested:
            self.close()
            return
        try:
            request = self._reader.feed(data)
            if request is not None:
                self._handle(request)
        except Refusal as refusal:
            self._is_requested = True
            self._respond(refusal.response)

    def _handle(self, request: Request) -> None:
        self._is_requested = True
        self._with_body = request.method != "HEAD"
        self._site.handle(request, self._respond)

    def _respond(self, response: Response) -> None:
        if self._sock.fileno() < 0:
            return  # it did not wait for it
        self._answered = True
        self._unsent = memoryview(response.encoded(self._with_body))
        self._send()

    def _send(self) -> None:
        try:
            while self._unsent:
                sent = self._sock.send(self._unsent)
                self._unsent = self._unsent[sent:]
        except BlockingIOError:
            self._loop.watch(self._sock, WRITE, self._ready)
            return
        except OSError:
            self.close()
            return
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()
            return
        self._loop.watch(self._sock, READ, self._ready)


_open: set[PageServer] = set()
"""Pages whose threads are alive."""


@atexit.register
def show_last() -> None:
    """Wait, at the end of the program, until open pages have fetched the final status."""
    until_s = time.monotonic() + THREAD_END_S
    for page in list(_open):
        if page.job_has_ended:
            page.ended(max(0.0, until_s - time.monotonic()))
