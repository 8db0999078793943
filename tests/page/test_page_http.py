"""What is a request, and what is refused."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.page.http import BODY_BYTES_MAX, HEAD_BYTES_MAX, Refusal, Request, RequestReader, Response

GET = b"GET /status.json?a=1&b=%20x HTTP/1.1\r\nHost: localhost:80\r\nX-Some: thing \r\n\r\n"
POST = b'POST /actions HTTP/1.1\r\nHost: h\r\nContent-Length: 12\r\n\r\n{"action":1}'


def read(data: bytes) -> Request | None:
    return RequestReader().feed(data)


def test_a_request_is_read_however_it_is_cut():
    for data in (GET, POST):
        whole = read(data)
        assert whole is not None
        for cut in range(1, len(data)):
            reader = RequestReader()
            assert reader.feed(data[:cut]) is None
            assert reader.feed(data[cut:]) == whole
    request = read(GET)
    assert request == Request(
        "GET", "/status.json", {"a": "1", "b": " x"}, {"host": "localhost:80", "x-some": "thing"}, b""
    )
    posted = read(POST)
    assert posted is not None and posted.body == b'{"action":1}' and posted.method == "POST"


@pytest.mark.parametrize(
    ("status", "data"),
    [
        (400, b"hello\r\n\r\n"),
        (400, b"GET http://elsewhere/ HTTP/1.1\r\n\r\n"),
        (400, b"GET / HTTP/2\r\n\r\n"),
        (400, b"GET /\x00 HTTP/1.1\r\n\r\n"),
        (400, b"GET /%ff HTTP/1.1\r\n\r\n"),
        (400, b"GET /" + b"x" * 3000 + b" HTTP/1.1\r\n\r\n"),
        (400, b"GET /?" + b"&".join(b"a%d=1" % i for i in range(20)) + b" HTTP/1.1\r\n\r\n"),
        (400, b"GET / HTTP/1.1\r\nno header\r\n\r\n"),
        (400, b"GET / HTTP/1.1\r\nHost : x\r\n\r\n"),
        (400, b"GET / HTTP/1.1\r\n folded: x\r\n\r\n"),
        (400, b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"),
        (400, b"GET / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n"),
        (400, b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"),
        (400, b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"),
        (400, b"POST / HTTP/1.1\r\nContent-Length: 1_0\r\n\r\n"),
        (400, b"POST / HTTP/1.1\r\nContent-Length: 1\r\n\r\nab"),
        (413, b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (BODY_BYTES_MAX + 1)),
        (431, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 101 + b"\r\n"),
        (431, b"GET / HTTP/1.1\r\nX: " + b"y" * HEAD_BYTES_MAX),
        (501, b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"),
    ],
    ids=[
        "no-request", "absolute", "version", "control", "no-utf8", "long-path", "many-fields", "no-header",
        "space-in-name", "folded", "two-hosts", "bare-newline", "two-lengths", "negative", "underscore", "too-much",
        "large-body", "many-headers", "large-head", "chunked",
    ],
)  # fmt: skip
def test_what_is_not_plainly_a_request_is_refused(status: int, data: bytes):
    with pytest.raises(Refusal) as refused:
        read(data)
    assert refused.value.status == status


@given(st.binary(max_size=300))
def test_whatever_comes_is_read_refused_or_waited_for(data: bytes):
    with suppress(Refusal):
        found = read(data)
        assert found is None or found.path.startswith("/")


def test_every_response_keeps_others_from_framing_sniffing_and_storing_it():
    data = Response(200, b"<b>", "text/html").encoded()
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 200 OK" and body == b"<b>" and "Content-Length: 3" in lines
    policy = next(line for line in lines if line.startswith("Content-Security-Policy: "))
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    for header in ("X-Content-Type-Options: nosniff", "Cache-Control: no-store", "Referrer-Policy: no-referrer"):
        assert header in lines
    assert not any("Access-Control" in line for line in lines)
    assert (
        Response(200, b"<b>")
        .encoded(with_body=False)
        .endswith(b"Content-Length: 3\r\n" + data[data.index(b"Content-Sec") : data.index(b"\r\n\r\n") + 4])
    )
