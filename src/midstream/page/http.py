"""The part of HTTP/1.1 that a page needs: one request per connection, checked strictly, and one response.

Pure: bytes in, a `Request` or a `Refusal` out. Anything ambiguous is refused: no transfer codings, no repeated lengths
or hosts, no folded lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, unquote

HEAD_BYTES_MAX: Final = 16 * 2**10
HEADERS_MAX: Final = 100
BODY_BYTES_MAX: Final = 8 * 2**10
QUERY_FIELDS_MAX: Final = 8

_REQUEST_LINE: Final = re.compile(rb"([A-Z]{1,16}) (/[\x21-\x7e]{0,2000}) HTTP/1\.([01])")
_HEADER: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}):[ \t]*([\x20-\x7e\t\x80-\xff]*?)[ \t]*")
_LENGTH: Final = re.compile(r"[0-9]{1,9}")
_ONCE: Final = ("host", "content-length", "authorization", "origin", "sec-fetch-site")

REASONS: Final = {
    200: "OK",
    202: "Accepted",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    410: "Gone",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    501: "Not Implemented",
    503: "Service Unavailable",
}

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SAFETY: Final = (
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
    ("Connection", "close"),
)
"""The headers sent with every response for safety."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request. `path` is decoded and has no query; the names of `headers` are in lower case."""

    method: str
    path: str
    query: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()

    def encoded(self, with_body: bool = True) -> bytes:
        """Encode the response; `with_body` is false in answer to HEAD."""
        lines = [
            f"HTTP/1.1 {self.status} {REASONS[self.status]}",
            f"Content-Type: {self.content_type}",
            f"Content-Length: {len(self.body)}",
            *(f"{name}: {value}" for name, value in (*SAFETY, *self.headers)),
        ]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + (self.body if with_body else b"")


class Refusal(Exception):
    """A request that is not served: `status`, and a sentence with the reason."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status

    @property
    def response(self) -> Response:
        return Response(self.status, f"{self}\n".encode())


class RequestReader:
    """Assembles a request from the bytes given to `feed`. Raises Refusal, after which the reader must not be used."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._head: Request | None = None
        self._body_bytes = 0

    def feed(self, data: bytes) -> Request | None:
        self._data += data
        if self._head is None:
            end = self._data.find(b"\r\n\r\n")
            if max(end, len(self._data) if end < 0 else 0) > HEAD_BYTES_MAX:
                raise Refusal(431, f"the head of the request has more than {HEAD_BYTES_MAX} bytes")
            if end < 0:
                return None
            self._head = _parsed_head(bytes(self._data[:end]))
            self._body_bytes = _body_bytes(self._head)
            del self._data[: end + 4]
        if len(self._data) < self._body_bytes:
            return None
        if len(self._data) > self._body_bytes:
            raise Refusal(400, "more bytes than one request arrived on the connection")
        head = self._head
        return Request(head.method, head.path, head.query, head.headers, bytes(self._data))


def _parsed_head(head: bytes) -> Request:
    first, *lines = head.split(b"\r\n")
    found = _REQUEST_LINE.fullmatch(first)
    if found is None:
        raise Refusal(400, "the first line is not a request of HTTP/1.1")
    if len(lines) > HEADERS_MAX:
        raise Refusal(431, f"the request has more than {HEADERS_MAX} header lines")
    headers: dict[str, str] = {}
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None:
            raise Refusal(400, "a header line is malformed")
        name, value = header[1].decode("ascii").lower(), header[2].decode("latin-1")
        if name in headers and name in _ONCE:
            raise Refusal(400, f"the header {name} occurs twice")
        headers[name] = value
    if "transfer-encoding" in headers:
        raise Refusal(501, "transfer codings are not supported")
    path, _, query = found[2].decode("ascii").partition("?")
    try:
        fields = parse_qsl(query, keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX, errors="strict")
        return Request(found[1].decode("ascii"), unquote(path, errors="strict"), dict(fields), headers)
    except ValueError as error:
        raise Refusal(400, "the address is not valid on this page") from error


def _body_bytes(head: Request) -> int:
    text = head.headers.get("content-length", "0")
    if not _LENGTH.fullmatch(text):
        raise Refusal(400, "the length of the body is not a number")
    if int(text) > BODY_BYTES_MAX:
        raise Refusal(413, f"the body of the request has more than {BODY_BYTES_MAX} bytes")
    return int(text)
