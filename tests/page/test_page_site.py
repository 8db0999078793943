"""Who may see and do what, and what is answered."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from served import TOKEN, WITH_TOKEN, Asking, FakeJob

from midstream.engine.core.config import MAX_PARALLELISM_MAX
from midstream.engine.protocol.job_status import DETAILS_CHARS_MAX, FailureStatus, JobStatus
from midstream.engine.protocol.live_rows import Column, GetRows, LiveRows, RowSample
from midstream.engine.protocol.messages import DoCheckpoint, DoRescale, DoSavepoint, DoStop, Reply
from midstream.page.http import Request, Response
from midstream.page.site import (
    ACTIONS_OPEN_MAX,
    ANSWER_S_MAX,
    FILES,
    ROWS_OPEN_MAX,
    ROWS_S_MAX,
    WAITING_MAX,
)
from sample_status import sample

STATIC = Path(__file__).parent.parent.parent / "src" / "midstream" / "page" / "static"
DATA = ("/status.json", "/rates.json", "/metrics")


def asking(host: str = "127.0.0.1") -> Asking:
    return Asking(FakeJob(sample()), host)


def status_of(answer: Response | None) -> int:
    assert answer is not None
    return answer.status


def test_the_pages_own_files_are_served_to_everybody_and_hold_nothing_of_a_job():
    for host in ("127.0.0.1", "0.0.0.0"):
        site = asking(host)
        for path, (name, kind) in FILES.items():
            answer = site.get(path, {})
            assert answer is not None and (answer.status, answer.content_type) == (200, kind)
            assert answer.body == (STATIC / name).read_bytes()
        assert site.job.times_asked == 0


def test_everything_that_the_page_loads_lies_beside_it():
    assert {file.name for file in STATIC.iterdir()} == {name for name, _ in FILES.values()}
    for file in STATIC.iterdir():
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]|innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", text), file
        for linked in re.findall(r"""(?:href|src)="([^"#]+)"|from "([^"]+)"|fetch\(["`]([^"`$]+)""", text):
            name = next(filter(None, linked))
            assert not name.startswith("/"), f"{file.name}: {name} would not be found behind a proxy"
    html = (STATIC / "page.html").read_text(encoding="utf-8")
    assert "style=" not in html and not re.search(r"<script(?![^>]*src=)", html) and not re.search(r"\son\w+=", html)


@pytest.mark.parametrize("path", DATA)
@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8080", "127.0.0.1:9", "127.1.2.3", "[::1]:8080", "a.localhost:1"]
)
def test_on_loopback_a_reader_of_this_machine_needs_no_token(path: str, host: str):
    assert status_of(asking().get(path, {"host": host})) == 200


@pytest.mark.parametrize("path", DATA)
@pytest.mark.parametrize(
    "host",
    [
        None,
        "",
        "evil.example",
        "evil.example:8080",
        "localhost.evil.example",
        "10.0.0.1:8080",
        "127.0.0.1.evil.example",
        "[::1",
    ],
)
def test_a_website_whose_name_points_at_this_machine_reads_nothing(path: str, host: str | None):
    site = asking()
    assert status_of(site.get(path, {} if host is None else {"host": host})) == 403
    through_a_proxy = {"host": host or "", "authorization": f"Bearer {TOKEN}"}
    assert status_of(site.get(path, through_a_proxy)) == 200


@pytest.mark.parametrize("path", DATA)
def test_beyond_loopback_readers_need_the_token(path: str):
    site = asking("0.0.0.0")
    assert status_of(site.get(path)) == 401
    assert status_of(site.get(path, {"host": "localhost", "authorization": "Bearer other"})) == 403
    assert site.job.times_asked == 0
    assert status_of(site.get(path, WITH_TOKEN)) == 200


@pytest.mark.parametrize(
    "given",
    ["", "Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer \xe9", f"Bearer {TOKEN[:-1]}"],
)
def test_nothing_is_changed_without_the_token(given: str):
    site = asking()
    headers = {"host": "localhost", "content-type": "application/json", "authorization": given}
    for request in (
        Request("POST", "/actions", {}, headers, b'{"action":"stop"}'),
        Request("GET", "/actions/1", {}, headers),
    ):
        assert status_of(site.request(request)) in (401, 403)
    assert site.job.times_asked == 0


@pytest.mark.parametrize(
    "headers",
    [{"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}, {"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "http://localhost:2"}],
    ids=["cross-site", "same-site", "other-origin", "null-origin", "other-port"],
)  # fmt: skip
def test_nothing_is_changed_for_another_site(headers: dict[str, str]):
    site = asking()
    assert status_of(site.act(b'{"action":"stop"}', headers)) == 403
    assert site.job.times_asked == 0


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"sec-fetch-site": "same-origin"},
        {"origin": "http://localhost:1"},
        {"sec-fetch-site": "same-origin", "origin": "https://hub.example"},
    ],
    ids=["none", "fetch", "origin", "proxy"],
)
def test_the_page_itself_may(headers: dict[str, str]):
    assert status_of(asking().act(b'{"action":"stop"}', headers)) == 202


def test_a_token_as_json_makes_no_other_content_type_pass():
    site = asking()
    assert status_of(site.act(b'{"action":"stop"}', {"content-type": "text/plain"})) == 415
    assert site.job.times_asked == 0


@pytest.mark.parametrize(
    ("body", "request_made"),
    [
        (b'{"action":"checkpoint"}', DoCheckpoint()),
        (b'{"action":"savepoint"}', DoSavepoint()),
        (b'{"action":"savepoint","directory":"/data/x"}', DoSavepoint("/data/x")),
        (b'{"action":"rescale","parallelism":7}', DoRescale(7)),
        (b'{"action":"stop"}', DoStop()),
        (b'{"action":"stop","savepoint":"/data/y"}', DoStop(savepoint="/data/y")),
        (b'{"action":"drain"}', DoStop(drain=True)),
    ],
)
def test_an_action_is_asked_of_the_job_and_its_answer_can_be_fetched(body: bytes, request_made: object):
    site = asking()
    began = site.act(body)
    assert began is not None and began.status == 202
    number = json.loads(began.body)["id"]
    (made, future), *_ = site.job.asked
    assert made == request_made
    at = f"/actions/{number}"
    first = site.get(at, WITH_TOKEN)
    assert first is not None and json.loads(first.body)["state"] == "waiting"
    future.set_result(Reply(checkpoint="/data/chk-1"))
    then = site.get(at, WITH_TOKEN)
    assert then is not None and (json.loads(then.body)["state"], json.loads(then.body)["answer"]) == (
        "done",
        "/data/chk-1",
    )


def test_an_action_that_the_job_refuses_says_why():
    site = asking()
    site.act(b'{"action":"rescale","parallelism":7}')
    site.job.asked[0][1].set_result(Reply(error="too few cores"))
    answer = site.get("/actions/1", WITH_TOKEN)
    assert answer is not None
    assert json.loads(answer.body) == {
        "format_version": 1,
        "id": 1,
        "action": "rescale",
        "state": "failed",
        "began_ms": 100_000,
        "answer": "too few cores",
    }


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b'"stop"', b'{"action":"format"}', b'{"action":"stop","drain":true}', b'{"action":"rescale"}',
     b'{"action":"rescale","parallelism":0}', b'{"action":"rescale","parallelism":"4"}', b'{"action":"rescale","parallelism":1.5}',
     b'{"action":"rescale","parallelism":%d}' % (MAX_PARALLELISM_MAX + 1), b'{"action":"savepoint","directory":""}',
     b'{"action":"savepoint","directory":"' + b"x" * 5000 + b'"}', b'{"action":"stop"', b"\xff", b'{"action":"stop"} x',
     b'{"action":"stop","savepoint":""}', b'{"action":"drain","savepoint":"/x"}', b"[" * 8000, b'{"action":"stop","action":' + b'"' + b"\xc3(" + b'"}',
     b'{"action":"savepoint","directory":"  "}', b'{"action":"savepoint","directory":"a\\u0000b"}', b'{"x":' + b"[" * 4000 + b"]" * 4000 + b',"action":"stop"}'],
    ids=range(23),
)  # fmt: skip
def test_what_is_no_action_is_refused(body: bytes):
    site = asking()
    assert status_of(site.act(body)) == 400
    assert site.job.times_asked == 0


@pytest.mark.parametrize("number", ["", "0", "2", "-1", "x", "1" * 50, "٣", "1/2"])
def test_no_action_is_answered_for_a_number_that_there_is_not(number: str):
    site = asking()
    site.act(b'{"action":"stop"}')
    assert status_of(site.get(f"/actions/{number}", WITH_TOKEN)) == 404


def test_only_so_many_actions_wait_at_once():
    site = asking()
    assert [status_of(site.act(b'{"action":"checkpoint"}')) for _ in range(ACTIONS_OPEN_MAX)] == [
        202
    ] * ACTIONS_OPEN_MAX
    assert status_of(site.act(b'{"action":"checkpoint"}')) == 429
    site.job.asked[0][1].set_result(Reply())
    assert status_of(site.act(b'{"action":"checkpoint"}')) == 202


def test_many_readers_cost_the_driver_one_question():
    site = asking()
    for _ in range(50):
        assert status_of(site.get("/status.json")) == 200
    assert site.job.times_asked == 1
    site.loop.passes(1)
    assert status_of(site.get("/metrics")) == 200
    assert site.job.times_asked == 2


def test_a_driver_that_does_not_answer_is_asked_once_and_readers_are_told():
    job = FakeJob()
    site = Asking(job)
    assert [site.get("/status.json") for _ in range(WAITING_MAX)] == [None] * WAITING_MAX
    assert status_of(site.get("/status.json")) == 503
    site.loop.passes(ANSWER_S_MAX + 1)
    assert [answer.status for answer in site.answers] == [503] * WAITING_MAX
    assert site.get("/status.json") is None
    assert job.times_asked == 1, "the first question is still open"
    job.asked[0][1].set_result(Reply(status=sample()))
    assert site.answers[-1].status == 200


def test_of_a_job_that_has_ended_its_last_status_is_shown():
    job = FakeJob()
    site = Asking(job)
    final = msgspec.structs.replace(sample(), state="finished")
    job.last = final
    answer = site.get("/status.json")
    assert answer is not None and msgspec.json.decode(answer.body, type=JobStatus) == final
    assert job.times_asked == 0


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/status.json"), ("DELETE", "/"), ("GET", "/actions"), ("PUT", "/metrics"), ("POST", "/actions/1")],
)
def test_other_methods_are_refused(method: str, path: str):
    assert status_of(asking().request(Request(method, path, {}, WITH_TOKEN))) == 405


@pytest.mark.parametrize("path", ["/static/page.html", "/../page.js", "/page.js/", "//", "/status", "/actionsx"])
def test_there_is_nothing_else(path: str):
    assert status_of(asking().get(path, WITH_TOKEN)) == 404


def test_the_json_is_that_of_the_command_line():
    answer = asking().get("/status.json")
    assert answer is not None
    assert msgspec.json.decode(answer.body, type=JobStatus) == sample()


def test_of_a_long_traceback_its_end_is_sent():
    failure = FailureStatus(0, 0, "it failed", "x" * 200_000 + "the end")
    answer = Asking(FakeJob(msgspec.structs.replace(sample(), failures=(failure,)))).get("/status.json")
    assert answer is not None
    details = json.loads(answer.body)["failures"][0]["details"]
    assert details.endswith("the end") and len(details) == DETAILS_CHARS_MAX + 1


def look(site: Asking, body: bytes, **headers: str) -> Response | None:
    given = {**WITH_TOKEN, "content-type": "application/json", **headers}
    return site.request(Request("POST", "/rows", {}, {key: value for key, value in given.items() if value}, body))


def test_live_rows_are_shown_with_the_token_only_and_when_they_come():
    site = asking()
    body = b'{"operator": "read", "rows": 3}'
    assert status_of(look(site, body, authorization="")) == 401
    assert status_of(look(site, body, authorization="Bearer guessed")) == 403
    assert status_of(look(site, body, origin="http://elsewhere")) == 403
    assert status_of(site.request(Request("GET", "/rows", {}, WITH_TOKEN))) == 405
    assert site.job.asked == []

    assert look(site, body) is None, "the rows have not come"
    ((request, future),) = site.job.asked
    assert request == GetRows("read", 3)
    seen = LiveRows("read", "read", "read", RowSample(0, 1, (Column("n", "int64"),), (("5",), (None,)), 9))
    future.set_result(Reply(rows=seen))
    assert site.answers[-1].status == 200
    assert msgspec.json.decode(site.answers[-1].body, type=LiveRows) == seen

    assert look(site, body) is None
    site.job.asked[-1][1].set_result(Reply(error="there is no operator 'read'; the uids of all are: a, b"))
    assert site.answers[-1].encoded(True).startswith(b"HTTP/1.1 409 Conflict\r\n")
    assert site.answers[-1].body.rstrip().endswith(b"the uids of all are: a, b")

    assert look(site, body) is None
    site.loop.passes(ROWS_S_MAX + 1)
    assert site.answers[-1].status == 503
    answered = len(site.answers)
    site.job.asked[-1][1].set_result(Reply(rows=seen))
    assert len(site.answers) == answered, "answered once"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"operator": ""}',
        b'{"operator": 5}',
        b'{"operator": "a", "rows": 0}',
        b'{"operator": "a", "rows": 101}',
        b'{"operator": "a", "rows": 1.5}',
        b'{"operator": "a", "more": 1}',
        b'{"operator": "' + b"a" * 1001 + b'"}',
    ],
    ids=["empty", "list", "nothing", "no name", "number", "no rows", "many rows", "half rows", "unknown", "long"],
)
def test_a_question_for_rows_that_is_none_is_refused_before_the_job_hears_of_it(body: bytes):
    site = asking()
    assert status_of(look(site, body)) == 400
    assert status_of(look(site, b'{"operator": "a"}', **{"content-type": "text/plain"})) == 415
    assert site.job.asked == []


def test_only_so_many_wait_for_rows():
    site = asking()
    for _ in range(ROWS_OPEN_MAX):
        assert look(site, b'{"operator": "read"}') is None
    assert status_of(look(site, b'{"operator": "read"}')) == 429
    site.job.asked[0][1].set_result(Reply(error="no"))
    assert look(site, b'{"operator": "read"}') is None
