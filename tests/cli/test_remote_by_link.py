"""A job on another machine: the link to its page in place of its name."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from answering import TOKEN, Start, said

from machine import limit_s
from midstream.cli.main import main
from midstream.engine.core.errors import ClusterError
from midstream.engine.protocol.messages import DoCheckpoint, DoRescale, DoSavepoint, DoStop, GetStatus, Logged, LogLine
from midstream.page import remote_client as page_line
from midstream.page.remote_client import PageJob, RemoteClient, job_at
from midstream.page.request_types import ActionState, document
from midstream.page.site import status_json
from sample_status import sample
from waiting import until


def test_a_job_is_shown_and_asked_as_by_its_name(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    job = start("aaaa1111", "flights", has_page=True)
    assert "flights running" in said(["status", job.link], capsys)
    by_name, by_link = (json.loads(said(["status", which, "--json"], capsys)) for which in ("flights", job.link))
    assert by_link == {**by_name, "now_ms": by_link["now_ms"]}
    job.asked.clear()
    assert said(["checkpoint", job.link], capsys) == "/data/chk-4"
    assert said(["savepoint", job.link], capsys) == "/data/savepoints/1"
    assert said(["savepoint", job.link, "s3://bucket/saved"], capsys) == "s3://bucket/saved"
    assert "flights runs at parallelism 3 from: /data/chk-6" in said(["rescale", job.link, "--parallelism=3"], capsys)
    assert "runs at parallelism 2, as it did before" in said(["rescale", job.link, "--parallelism", "2"], capsys)
    assert "flights stopped resume from: /data/chk-5" in said(["stop", job.link], capsys)
    assert [each for each in job.asked if each != GetStatus()] == [
        DoCheckpoint(),
        DoSavepoint(None),
        DoSavepoint("s3://bucket/saved"),
        DoRescale(3),
        DoRescale(2),
        DoStop(),
    ]


@pytest.mark.parametrize(
    ("arguments", "asked", "says"),
    [
        (["--drain"], DoStop(drain=True), "flights finished"),
        (["--savepoint", "/data/saved"], DoStop(False, "/data/saved"), "/data/saved"),
    ],
)
def test_the_answer_to_a_stop_arrives_though_the_driver_ends(
    arguments: list[str], asked: DoStop, says: str, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    job = start("aaaa1111", "flights", has_page=True)
    assert says in said(["stop", job.link, *arguments], capsys)
    assert asked in job.asked
    assert job.driver.ended.wait(limit_s(20))


def test_what_fails_is_a_failed_request_and_says_why(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    job = start("aaaa1111", "flights", has_page=True)
    job.refuses = True
    assert "job flights (aaaa1111): checkpoint 4 failed: the disk is full" in said(["checkpoint", job.link], capsys, 1)
    assert "needs 3 slots, but there are 2" in said(["rescale", job.link, "--parallelism=3"], capsys, 1)
    assert "there is no operator 'x'" in said(["rows", job.link, "x"], capsys, 1)


def test_the_token_comes_from_the_link_or_the_environment(
    start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = start("aaaa1111", "flights", has_page=True).link.partition("#")[0]
    assert "flights running" in said(["status", link], capsys)
    wants = "needs the token of the page; give the whole link that midstream run has printed, with #token=…, or set"
    assert wants in said(["checkpoint", link], capsys, 2)
    other = said(["checkpoint", f"{link}#token=another-token-than-this-job-has"], capsys, 2)
    assert "the token is not that of this job; give the whole link" in other and "another-token" not in other
    monkeypatch.setenv("MIDSTREAM_PAGE_TOKEN", TOKEN)
    assert said(["checkpoint", link], capsys) == "/data/chk-4"
    assert said(["checkpoint", link.rstrip("/")], capsys) == "/data/chk-4"


def test_a_relative_path_would_be_one_of_another_machine(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    job = start("aaaa1111", "flights", has_page=True)
    for command in (["savepoint", job.link, "saved"], ["stop", job.link, "--savepoint", "~/saved"]):
        assert "is a relative path, and the job may run on another machine" in said(command, capsys, 2)
    assert set(job.asked) == {GetStatus()}


def test_logs_are_those_of_the_job_and_end_with_it(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    job = start("aaaa1111", "flights", has_page=True)
    line = LogLine(0, "hello", "stdout", operator="divide", uid="parse", subtask=3)
    job.driver.logs.add(1, Logged((line,), dropped=5))
    both = [json.loads(said(["logs", which, "--operator=parse", "--json"], capsys)) for which in ("flights", job.link)]
    assert both[0] == both[1] and both[0]["text"] == "hello"


@pytest.mark.parametrize("machine", [[], ["--json"]])
def test_a_job_is_watched_until_it_ends(machine: list[str], start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    job = start("aaaa1111", "flights", has_page=True)

    def stop_later() -> None:
        until("the job to be watched", lambda: job.asked.count(GetStatus()) > 2)
        job.driver.request(DoStop()).result(limit_s(20))

    stopping = threading.Thread(target=stop_later)
    stopping.start()
    out = said(["top", job.link, *machine], capsys)
    stopping.join(limit_s(20))
    assert out.endswith("flights stopped") if not machine else '"state":"stopped"' in out


@pytest.mark.parametrize(
    ("link", "says"),
    [
        ("http://", "this is not the link to a job's page, which has the form http://HOST:PORT/#token=…"),
        ("http://127.0.0.1:0/", "this is not the link"),
        ("http://127.0.0.1:700000/", "this is not the link"),
        ("http://me:secret@127.0.0.1:80/", "this is not the link"),
        ("http://[::1", "this is not the link"),
        ("http://127.0.0.1:80/#token=%0Ax", "characters that are not allowed in tokens"),
    ],
)
def test_what_is_no_link_is_refused(link: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in said(["status", link], capsys, 2)


def test_nobody_listening_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert main(["status", f"http://127.0.0.1:{port}/"]) != 0
    assert f"http://127.0.0.1:{port}/ does not answer: Connection refused" in capsys.readouterr().err


def test_commands_about_this_machine_take_no_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert "history shows jobs that this user has started on this machine" in said(["history", "http://x/"], capsys, 2)
    assert "open it in a browser" in said(["page", "http://x/"], capsys, 2)


# ---- pages that are none, or go away

Answer = Callable[[str], tuple[int, bytes]]


@pytest.fixture
def website() -> Iterator[Callable[[Answer], str]]:
    servers: list[ThreadingHTTPServer] = []

    def begin(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = answer(f"{self.command} {self.path}")
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/below/#token={TOKEN}"

    yield begin
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (200, b"<html>hello</html>", "is not the page of a job, or of another version of midstream"),
        (200, b"\xff\xfe", "is not the page of a job"),
        (200, b"[" * 100_000, "is not the page of a job"),
        (404, b"nothing here", "answers with status 404: nothing here; check that this is the page of a job"),
        (302, b"", "answers with status 302: nothing"),
        (503, b"the job's driver is busy", "the job's driver is busy"),
    ],
)
def test_another_website_is_no_job(
    status: int, body: bytes, says: str, website: Callable[[Answer], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", website(lambda _: (status, body))]) != 0
    told = capsys.readouterr()
    assert says in told.err and "Traceback" not in told.err and TOKEN not in told.err + told.out


def test_an_answer_without_end_is_refused(website: Callable[[Answer], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_line, "ANSWER_BYTES_MAX", 1 << 20)
    with pytest.raises(ClusterError, match="more than 1 MiB cannot come from a page"):
        job_at(website(lambda _: (200, b"x" * (1 << 22))))


def test_a_page_behind_a_path_is_asked_below_it(website: Callable[[Answer], str]) -> None:
    asked: list[str] = []

    def answer(request: str) -> tuple[int, bytes]:
        asked.append(request)
        return 200, status_json(sample())

    found = job_at(website(answer))
    assert (found.name, found.job_id, asked) == ("flights", "0123456789abcdef", ["GET /below/status.json"])
    assert TOKEN not in repr(found)


@pytest.mark.parametrize("then", ["gone", "another driver"])
def test_whether_it_was_done_is_not_known_when_the_page_goes_away_meanwhile(
    then: str, website: Callable[[Answer], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_line, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(page_line, "SILENCE_S", 0.2)

    def answer(request: str) -> tuple[int, bytes]:
        if request.startswith("POST"):
            return 202, document(ActionState(7, "checkpoint", "waiting", 0))
        if request.endswith("status.json"):
            return 200, status_json(sample())
        return (503, b"busy") if then == "gone" else (404, b"there is no such action")

    link = website(answer)
    job = PageJob("a", "flights", link.partition("#")[0], TOKEN)
    began_s = time.monotonic()
    with pytest.raises(ClusterError, match=r"whether the job has carried out the request \(checkpoint\) is unknown"):
        RemoteClient(job).request(DoCheckpoint())
    assert time.monotonic() - began_s < 20
