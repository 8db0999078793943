"""A schema registry on loopback: what of its HTTP API the client uses, kept in memory, with faults on request."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote


class StubRegistry:
    """`fault`: an HTTP status, or "garbage", that every request is answered with; None for none."""

    def __init__(self) -> None:
        self.schemas: list[dict[str, Any]] = []
        """The one with id n is at n - 1."""
        self.subjects: dict[str, list[int]] = {}
        self.fault: int | str | None = None
        self.requests: list[str] = []
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(*registry._get(_parts(self.path)))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._answer(*registry._post(_parts(self.path), body))

            def _answer(self, status: int, body: Any) -> None:
                registry.requests.append(f"{self.command} {self.path}")
                data = json.dumps(body).encode()
                if registry.fault == "garbage":
                    status, data = 200, b"<html>a proxy</html>"
                elif isinstance(registry.fault, int):
                    status, data = registry.fault, b'{"error_code": %d, "message": "a fault"}' % registry.fault
                self.send_response(status)
                self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None: ...

        self._handler = Handler
        self._server: ThreadingHTTPServer | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def register(
        self, subject: str, schema: Any, references: list[dict[str, Any]] | None = None, kind: str = "AVRO"
    ) -> int:
        """The id of a schema, as its program would get it. One of Protobuf is the text of a descriptor, as programs register it."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        entry = {"schema": text, "references": references or [], "schemaType": kind}
        if entry not in self.schemas:
            self.schemas.append(entry)
        found = self.schemas.index(entry) + 1
        versions = self.subjects.setdefault(subject, [])
        if found not in versions:
            versions.append(found)
        return found

    def start(self) -> None:
        """Again on the same port after `stop`."""
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), self._handler)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _get(self, path: list[str]) -> tuple[int, Any]:
        match path:
            case ["schemas", "ids", number] if 0 < int(number) <= len(self.schemas):
                return 200, self.schemas[int(number) - 1]
            case ["subjects", subject, "versions", version] if subject in self.subjects:
                versions = self.subjects[subject]
                at = len(versions) if version == "latest" else int(version)
                if 0 < at <= len(versions):
                    found = versions[at - 1]
                    return 200, {"subject": subject, "version": at, "id": found, **self.schemas[found - 1]}
        return 404, {"error_code": 40403, "message": "Schema not found"}

    def _post(self, path: list[str], body: dict[str, Any]) -> tuple[int, Any]:
        match path:
            case ["subjects", subject, "versions"]:
                kind = body.get("schemaType", "AVRO")
                return 200, {"id": self.register(subject, body["schema"], body.get("references"), kind)}
            case ["subjects", subject] if subject in self.subjects:
                for at, found in enumerate(self.subjects[subject], 1):
                    if self.schemas[found - 1]["schema"] == body["schema"]:
                        return 200, {"subject": subject, "version": at, "id": found, **self.schemas[found - 1]}
        return 404, {"error_code": 404, "message": "not there"}


def _parts(path: str) -> list[str]:
    return [unquote(part) for part in path.partition("?")[0].strip("/").split("/")]


@contextmanager
def running_registry() -> Iterator[StubRegistry]:
    registry = StubRegistry()
    registry.start()
    try:
        yield registry
    finally:
        registry.stop()
