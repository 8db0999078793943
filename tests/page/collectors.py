"""HTTP servers that keep what is posted to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

from machine import limit_s


@contextmanager
def collecting(received: Callable[[bytes], None]) -> Iterator[str]:
    """Serve on the loopback address, which is yielded, and pass on the body of each POST."""

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(limit_s(30))
