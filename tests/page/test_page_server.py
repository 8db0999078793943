"""The page over real sockets: what outsiders can cost, and that nothing of it reaches the job."""

from __future__ import annotations

import random
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from served import TOKEN, FakeJob

from jobs import NumbersJob
from machine import limit_s
from midstream import Environment
from midstream.api.submit import StartOptions
from midstream.engine.core.errors import ConfigError
from midstream.engine.protocol.job_status import JobStatus
from midstream.page import server as page_server
from midstream.page.address import PageAddress, token_of
from midstream.page.server import CONNECTIONS_MAX, PageServer, open_page
from midstream.runtime.driver import job_registry
from midstream.runtime.driver.job import Job, start_job
from midstream.runtime.process.process_slots import ProcessSlots
from sample_status import sample
from waiting import until


def get(page: PageServer, path: str = "status.json") -> bytes:
    with urllib.request.urlopen(page.url + path, timeout=limit_s(30)) as answer:
        return bytes(answer.read())


def connected(page: PageServer) -> socket.socket:
    return socket.create_connection((page.address.host, page.address.port), timeout=limit_s(30))


def is_closed_by_the_page(sock: socket.socket) -> bool:
    """Waits for it, as long as the socket's timeout."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        return True
    return True


@pytest.fixture
def served() -> Iterator[tuple[PageServer, FakeJob]]:
    job = FakeJob(sample())
    page = PageServer(PageAddress(), TOKEN)
    page.begin(job)
    yield page, job
    page.end()
    assert page.ended(30)


def test_the_page_is_served(served: tuple[PageServer, FakeJob]):
    page, _ = served
    assert b"<title>midstream</title>" in get(page, "")
    assert msgspec.json.decode(get(page), type=JobStatus) == sample()
    assert b"midstream_job_slots" in get(page, "metrics?subtasks=1")
    with urllib.request.urlopen(urllib.request.Request(page.url, method="HEAD"), timeout=limit_s(30)) as answer:
        assert answer.read() == b"" and int(answer.headers["Content-Length"]) > 500
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(page, "nothing")
    assert refused.value.code == 404
    assert TOKEN in page.link and TOKEN not in page.url
    for path in ("", "page.js", "status.json", "metrics"):
        assert TOKEN.encode() not in get(page, path)


def test_connections_that_say_nothing_keep_no_reader_out(served: tuple[PageServer, FakeJob]):
    page, _ = served
    silent = [connected(page) for _ in range(CONNECTIONS_MAX + 8)]
    assert b"job_id" in get(page)
    assert is_closed_by_the_page(silent[0])
    for sock in silent:
        sock.close()


@pytest.mark.parametrize("what", ["nothing", "drips", "reads nothing"])
def test_a_connection_is_closed_when_its_time_is_over(what: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page_server, "CONNECTION_S_MAX", 0.5)
    status = msgspec.structs.replace(sample(), warnings=("w" * 20_000_000,))
    page = PageServer(PageAddress(), TOKEN)
    page.begin(FakeJob(status))
    with connected(page) as sock:
        if what == "reads nothing":
            sock.sendall(b"GET /status.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until_s = time.monotonic() + 60
        while what == "drips":
            assert time.monotonic() < until_s, "it may go on for ever"
            try:
                sock.sendall(b"G")
                time.sleep(0.02)
            except ConnectionError:
                break
        if what == "reads nothing":
            until("it is closed", lambda: not page._connections)
        else:
            assert is_closed_by_the_page(sock)
    page.end()
    assert page.ended(30)


def test_no_bytes_bring_the_page_down(served: tuple[PageServer, FakeJob]):
    page, _ = served
    chance = random.Random(7)
    for size in (1, 10, 1_000, 40_000):
        for start in (b"", b"GET / HTTP/1.1\r\n", b"POST /actions HTTP/1.1\r\nContent-Length: 5\r\n\r\n"):
            with connected(page) as sock, suppress(ConnectionError):
                sock.sendall(start + chance.randbytes(size))
                sock.shutdown(socket.SHUT_WR)
                assert is_closed_by_the_page(sock)
    assert b"job_id" in get(page)


def test_one_that_only_stops_sending_still_gets_its_answer(served: tuple[PageServer, FakeJob]):
    page, _ = served
    with connected(page) as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(100).startswith(b"HTTP/1.1 200 OK")


def test_a_request_that_fails_is_logged_and_the_others_are_answered(
    served: tuple[PageServer, FakeJob], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    page, job = served

    def broken(request: object) -> Any:
        raise RuntimeError("the driver is broken")

    with monkeypatch.context() as patched, connected(page) as sock:
        patched.setattr(job, "request", broken)
        sock.sendall(b"GET /status.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until("it is logged", lambda: "a request failed" in caplog.text, 30)
    assert b"<title>" in get(page, "")


def test_how_a_job_has_ended_is_shown_to_an_open_page(served: tuple[PageServer, FakeJob]):
    page, job = served
    get(page)
    job.last = msgspec.structs.replace(sample(), state="finished")
    page.end()
    assert msgspec.json.decode(get(page), type=JobStatus).state == "finished"
    assert page.ended(30)
    with pytest.raises(urllib.error.URLError):
        get(page)


def test_a_page_that_is_not_looked_at_ends_at_once():
    page = PageServer(PageAddress(), TOKEN)
    page.begin(FakeJob(sample()))
    page.end()
    assert page.ended(30)


def test_a_page_of_a_job_that_never_began_lets_go_of_its_port():
    page = PageServer(PageAddress(), TOKEN)
    page.end()
    PageServer(PageAddress(port=page.address.port), TOKEN).end()


def test_a_port_in_use_costs_the_job_its_page_and_nothing_else(caplog: pytest.LogCaptureFixture):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert open_page(PageAddress(port=port), "numbers") is None
    assert f"job numbers runs without its page: port {port} on 127.0.0.1 is in use" in caplog.text
    assert open_page(None, "numbers") is None


def test_a_page_that_fails_costs_the_job_nothing(
    running: list[Job], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def no_site(*arguments: object) -> Any:
        raise RuntimeError("no site to be had")

    monkeypatch.setattr(page_server, "Site", no_site)
    numbers = NumbersJob(1_000)
    page = open_page(PageAddress(), "numbers")
    assert page is not None
    job = start_job(numbers.plan(), ProcessSlots(), page)
    running.append(job)
    assert job.wait(limit_s(60)).state == "finished" and numbers.numbers() == list(range(1_000))
    assert page.ended(30)
    assert "the page of the job has failed; the job continues without it" in caplog.text


def test_every_job_has_a_page_unless_told_otherwise(
    running: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def start(page: str | None) -> Job:
        env = Environment("paged")
        env.generate(lambda i: {"n": i}, rows_per_s=100).print(limit=0)
        job = env.submission(StartOptions(slots=ProcessSlots())).start(page)
        running.append(job)
        return job

    job = start(None)
    assert job.page is not None and job.page.startswith("http://127.0.0.1:") and "#token=" in job.page
    assert [entry.page for entry in job_registry.list_jobs() if entry.job_id == job.job_id] == [job.page]
    assert f'href="{job.page}"' in job._repr_html_() and "<midstream" not in job._repr_html_()
    job.cancel()
    assert "href" not in job._repr_html_()
    assert start("off").page is None
    monkeypatch.setenv("MIDSTREAM_PAGE", "off")
    assert start(None).page is None
    with pytest.raises(ConfigError, match="--page: 'x'"):
        start("x")


@pytest.mark.parametrize(
    ("text", "address"),
    [("0", PageAddress()), ("8080", PageAddress("127.0.0.1", 8080)), ("0.0.0.0:80", PageAddress("0.0.0.0", 80)),
     ("[::1]:0", PageAddress("::1", 0)), ("localhost:0", PageAddress("localhost", 0)), ("off", None)],
    ids=["any", "port", "all", "ipv6", "name", "off"],
)  # fmt: skip
def test_addresses(text: str, address: PageAddress | None):
    assert PageAddress.of(text) == address
    assert PageAddress.of(None, {"MIDSTREAM_PAGE": text}) == address
    assert PageAddress.of(None, {}) == PageAddress()
    assert PageAddress("::1").is_loopback and PageAddress("localhost").is_loopback
    assert not PageAddress("0.0.0.0").is_loopback and not PageAddress("::").is_loopback


@pytest.mark.parametrize("text", ["", "on", "-1", "65536", "1.5", "host", ":80", "host:", "8080x", "٣", "999999999999"])
def test_no_addresses(text: str):
    with pytest.raises(ConfigError, match="PORT, HOST:PORT or off"):
        PageAddress.of(text)


def test_a_token_is_long_and_new_each_time_unless_it_is_given():
    assert token_of({}) != token_of({}) and len(token_of({})) >= 32
    assert token_of({"MIDSTREAM_PAGE_TOKEN": "x" * 16}) == "x" * 16
    for bad in ("", "short", "x" * 15, "with space in it 123", "x" * 300, "größe-größe-größe"):
        with pytest.raises(ConfigError, match="MIDSTREAM_PAGE_TOKEN"):
            token_of({"MIDSTREAM_PAGE_TOKEN": bad})
