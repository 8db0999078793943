"""What `openapi.json` says is what the page does: each address, each answer, each refusal."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from served import TOKEN, WITH_TOKEN, Asking, FakeJob

from machine import limit_s
from midstream import Environment
from midstream.engine.protocol.live_rows import Column, LiveRows, RowSample
from midstream.engine.protocol.messages import GetLogs, LogEntry, LogLine, Reply
from midstream.page.http import Request, Response
from midstream.page.rate_history import STEP_S
from midstream.page.request_types import Action, Logs, LogsQuery, document, logs_of
from midstream.page.routes import ROUTES, openapi
from midstream.page.site import ANSWER_S_MAX, LOGS_OPEN_MAX, ROWS_OPEN_MAX, ROWS_S_MAX
from midstream.runtime.process.process_slots import ProcessSlots
from sample_status import sample
from waiting import until

DESCRIPTION: dict[str, Any] = json.loads(openapi())


def logged(*numbers: int) -> tuple[LogEntry, ...]:
    return tuple(
        LogEntry(number, number % 2, LogLine(1_000 + number, f"Zeile {number} ✓ \x1b[0m", "stdout", operator=f"op{number % 3}", uid="ü"))
        for number in numbers
    )  # fmt: skip


def described(path: str, method: str) -> dict[str, Any]:
    operation: dict[str, Any] = DESCRIPTION["paths"][path][method]
    return operation


def keeps_to_the_description(path: str, method: str, answer: Response) -> object:
    """What the answer holds. Fails for a status, a content type or a body that is not described there."""
    found = described(path, method)["responses"][str(answer.status)]["content"]
    assert list(found) == [answer.content_type]
    schema = found[answer.content_type].get("schema")
    if not answer.content_type.startswith("application/json"):
        return answer.body.decode()
    body = json.loads(answer.body)
    jsonschema.Draft202012Validator({**schema, "components": DESCRIPTION["components"]}).validate(body)
    return body


def test_every_address_is_described_and_no_other():
    known = {(route.path, route.method.lower()) for route in ROUTES}
    assert {(path, method) for path, item in DESCRIPTION["paths"].items() for method in item} == known
    site = Asking(FakeJob(sample()))
    for path, method in known:
        answer = site.request(Request(method.upper(), path.replace("{id}", "7"), {}, {}))
        assert answer is None or answer.status not in (404, 405) or "{id}" in path, f"{path} is not served"
        other = site.request(Request("DELETE", path.replace("{id}", "7"), {}, WITH_TOKEN))
        assert other is not None and other.status == 405
    operations = [operation["operationId"] for item in DESCRIPTION["paths"].values() for operation in item.values()]
    assert len(set(operations)) == len(operations)


def test_it_is_openapi_of_that_version_and_every_reference_in_it_leads_somewhere():
    assert DESCRIPTION["openapi"] == "3.1.0" and {"title", "version"} <= DESCRIPTION["info"].keys()

    def references(value: object) -> Iterator[str]:
        if isinstance(value, dict):
            for key, each in value.items():
                if key == "$ref":
                    yield each
                elif key == "mapping":
                    yield from each.values()
                else:
                    yield from references(each)
        elif isinstance(value, list):
            for each in value:
                yield from references(each)

    used = set(references(DESCRIPTION))
    schemas = DESCRIPTION["components"]["schemas"]
    assert used == {f"#/components/schemas/{name}" for name in schemas}, "a schema is missing, or not used"
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


SEEN = LiveRows("read", "lesen", "lesen", RowSample(3, 1, (Column("größe", "int64"),), (("1",), (None,)), 50))


def look(site: Asking, body: bytes, headers: dict[str, str] | None = None) -> Response | None:
    given = {
        **({} if headers and "host" in headers else WITH_TOKEN),
        "content-type": "application/json",
        **(headers or {}),
    }
    return site.request(Request("POST", "/rows", {}, given, body))


def answers() -> Iterator[tuple[str, str, int, Response | None]]:
    """Of each kind that there is: address, method, the status that is due, and what was answered."""
    site = Asking(FakeJob(sample()))
    local = {"host": "localhost:1"}
    wrong = {"host": "localhost:1", "authorization": "Bearer wrong"}
    yield "/status.json", "get", 200, site.get("/status.json")
    yield "/status.json", "get", 403, site.get("/status.json", wrong)
    yield "/status.json", "get", 401, Asking(FakeJob(sample()), "0.0.0.0").get("/status.json", local)
    yield "/rates.json", "get", 200, site.get("/rates.json")
    site.loop.passes(STEP_S)
    yield "/rates.json", "get", 200, site.get("/rates.json")
    yield "/rates.json", "get", 403, site.get("/rates.json", wrong)
    yield "/rates.json", "get", 401, Asking(FakeJob(sample()), "0.0.0.0").get("/rates.json", local)
    yield "/metrics", "get", 200, site.get("/metrics", subtasks="true")
    yield "/metrics", "get", 400, site.get("/metrics", subtasks="some")
    yield "/metrics", "get", 400, site.get("/metrics", subtask="1")
    yield "/openapi.json", "get", 200, site.get("/openapi.json", {})
    began = site.act(b'{"action":"checkpoint"}')
    yield "/actions", "post", 202, began
    assert began is not None
    number = json.loads(began.body)["id"]
    yield "/actions/{id}", "get", 200, site.get(f"/actions/{number}", WITH_TOKEN)
    site.job.asked[0][1].set_result(Reply(checkpoint="/data/ünï/chk-4"))
    yield "/actions/{id}", "get", 200, site.get(f"/actions/{number}", WITH_TOKEN)
    yield "/actions/{id}", "get", 404, site.get("/actions/99", WITH_TOKEN)
    yield "/actions/{id}", "get", 403, site.get("/actions/1", wrong)
    yield "/actions/{id}", "get", 401, site.get("/actions/1", local)
    yield "/actions", "post", 400, site.act(b'{"action":"format"}')
    yield "/actions", "post", 415, site.act(b'{"action":"stop"}', {"content-type": "text/plain"})
    yield "/actions", "post", 401, site.request(Request("POST", "/actions", {}, local))
    yield "/logs", "get", 401, site.get("/logs", local)
    yield "/logs", "get", 403, site.get("/logs", wrong)
    yield "/logs", "get", 400, site.get("/logs", WITH_TOKEN, after="x")
    assert site.get("/logs", WITH_TOKEN) is None
    site.job.asked[-1][1].set_result(Reply(logs=logged(0, 1, 2)))
    yield "/logs", "get", 200, site.answers[-1]
    body = b'{"operator": "read"}'
    yield "/rows", "post", 401, look(site, body, local)
    yield "/rows", "post", 403, look(site, body, wrong)
    yield "/rows", "post", 400, look(site, b'{"operator": "r\xff"}')
    yield "/rows", "post", 400, look(site, b"[" * 5_000)
    yield "/rows", "post", 415, look(site, body, {"content-type": "text/plain"})
    for replied in (
        Reply(rows=SEEN),
        Reply(rows=LiveRows("read", "read", "read", None)),
        Reply(error="no such operator"),
    ):
        assert look(site, body) is None
        site.job.asked[-1][1].set_result(replied)
        yield "/rows", "post", 409 if replied.error else 200, site.answers[-1]
    silent = Asking(FakeJob())
    assert [look(silent, body) for _ in range(ROWS_OPEN_MAX)] == [None] * ROWS_OPEN_MAX
    yield "/rows", "post", 429, look(silent, body)
    silent.loop.passes(ROWS_S_MAX + 1)
    yield "/rows", "post", 503, silent.answers[-1]
    silent = Asking(FakeJob())
    assert [silent.get("/logs", WITH_TOKEN) for _ in range(LOGS_OPEN_MAX)] == [None] * LOGS_OPEN_MAX
    yield "/logs", "get", 429, silent.get("/logs", WITH_TOKEN)
    assert silent.get("/status.json") is None
    silent.loop.passes(ANSWER_S_MAX + 1)
    yield "/logs", "get", 503, silent.answers[0]
    yield "/status.json", "get", 503, silent.answers[-1]
    silent.job.last = sample()
    yield "/logs", "get", 410, silent.get("/logs", WITH_TOKEN)


def test_each_answer_and_each_refusal_is_as_described():
    seen = set()
    for path, method, status, answer in answers():
        assert answer is not None and answer.status == status, (path, status, answer)
        body = keeps_to_the_description(path, method, answer)
        if isinstance(body, dict) and path != "/openapi.json":
            assert next(iter(body)) == "format_version"
        seen.add((path, status))
    for path, item in DESCRIPTION["paths"].items():
        for operation in item.values():
            missed = {int(status) for status in operation["responses"]} - {status for at, status in seen if at == path}
            # 413 is the reader's, 429 of actions is in test_page_site, 503 of metrics is that of the status
            assert missed <= {"/actions": {403, 413, 429}, "/rows": {413}, "/metrics": {401, 403, 503}}.get(
                path, set()
            ), path


@pytest.mark.parametrize(
    "body",
    [{"action": "checkpoint"}, {"action": "savepoint", "directory": "/å"}, {"action": "rescale", "parallelism": 4},
     {"action": "stop", "savepoint": "s3://b/x"}, {"action": "drain"}, {"action": "format"}, {"action": "rescale"}, {"action": "rescale", "parallelism": 0},
     {"action": "savepoint", "directory": ""}, {"action": "stop", "drain": True}, [], "stop", {}],
    ids=range(13),
)  # fmt: skip
def test_what_the_description_says_of_a_body_is_what_the_page_takes(body: object):
    schema = described("/actions", "post")["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**schema, "components": DESCRIPTION["components"]})
    taken = Asking(FakeJob(sample())).act(json.dumps(body).encode())
    assert taken is not None and validator.is_valid(body) == (taken.status == 202)
    if taken.status == 202:
        msgspec.convert(body, Action)


def test_who_needs_the_token_is_described():
    site = Asking(FakeJob(sample()))
    for path, item in DESCRIPTION["paths"].items():
        for method, operation in item.items():
            answer = site.request(Request(method.upper(), path.replace("{id}", "1"), {}, {"host": "localhost"}))
            needs = operation["security"] == [{"token": []}]
            assert (answer is not None and answer.status == 401) == needs, path
    assert TOKEN not in openapi().decode()


# ---- logs


def lines_of(site: Asking, replied: Reply, **query: str) -> dict[str, Any]:
    assert site.get("/logs", WITH_TOKEN, **query) is None
    site.job.asked[-1][1].set_result(replied)
    body: dict[str, Any] = json.loads(site.answers[-1].body)
    return body


def test_logs_are_read_on_from_where_the_last_answer_ended():
    site = Asking(FakeJob(sample()))
    first = lines_of(site, Reply(logs=logged(0, 1, 2)))
    assert [line["number"] for line in first["lines"]] == [0, 1, 2] and (first["after"], first["dropped"]) == (2, 0)
    assert first["lines"][1]["text"] == "Zeile 1 ✓ \x1b[0m"
    then = lines_of(site, Reply(logs=logged(7, 8)), after=str(first["after"]))
    assert site.job.asked[-1][0] == GetLogs(2)
    assert (then["after"], then["dropped"]) == (8, 4), "3 to 6 were no longer kept"
    assert lines_of(site, Reply(), after="8") == {"format_version": 1, "lines": [], "after": 8, "dropped": 0}


def test_logs_of_one_slot_and_of_one_operator():
    site = Asking(FakeJob(sample()))
    of_slot = lines_of(site, Reply(logs=logged(*range(6))), slot="1")
    assert [line["number"] for line in of_slot["lines"]] == [1, 3, 5] and of_slot["after"] == 5
    of_operator = lines_of(site, Reply(logs=logged(*range(6))), operator="op1")
    assert [line["number"] for line in of_operator["lines"]] == [1, 4]
    assert len(lines_of(site, Reply(logs=logged(*range(6))), operator="ü")["lines"]) == 6
    assert lines_of(site, Reply(logs=logged(*range(6))), operator="nothing", slot="0")["lines"] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("after", "-2"), ("after", ""), ("after", "1.5"), ("after", "1" * 40), ("after", "٣"), ("after", " 1"), ("after", "1_0"), ("slot", "-1"), ("slot", "null"),
     ("slot", "x"), ("operator", ""), ("operator", "x" * 5000), ("limit", "5"), ("Slot", "1")],
)  # fmt: skip
def test_a_request_for_logs_that_makes_no_sense_is_refused(name: str, value: str):
    site = Asking(FakeJob(sample()))
    refused = site.get("/logs", WITH_TOKEN, **{name: value})
    assert refused is not None and refused.status == 400 and site.job.times_asked == 0


def test_logs_are_refused_to_another_site_whatever_token_it_has():
    site = Asking(FakeJob(sample()))
    refused = site.get("/logs", {**WITH_TOKEN, "sec-fetch-site": "cross-site"})
    assert refused is not None and refused.status == 403 and site.job.times_asked == 0


def test_a_job_that_ends_while_it_is_asked_for_logs_says_so():
    site = Asking(FakeJob())
    assert site.get("/logs", WITH_TOKEN) is None
    site.job.asked[0][1].set_result(Reply(error="the job has ended"))
    assert (site.answers[0].status, site.answers[0].body) == (410, b"the job has ended\n")


def test_an_answer_that_comes_too_late_is_dropped():
    site = Asking(FakeJob())
    assert site.get("/logs", WITH_TOKEN) is None
    site.loop.passes(ANSWER_S_MAX + 1)
    site.job.asked[0][1].set_result(Reply(logs=logged(0)))
    assert [answer.status for answer in site.answers] == [503]


def test_a_document_is_an_object_and_says_its_version_first():
    assert document({}) == b'{"format_version":1}'
    assert document({"a": 1}) == b'{"format_version":1,"a":1}'
    assert msgspec.json.decode(document(logs_of((), LogsQuery())), type=Logs) == Logs((), -1, 0)
    with pytest.raises(TypeError, match="tuple"):
        document((1, 2))


def test_a_program_reads_the_logs_of_a_real_job_and_stops_it_with_a_savepoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MIDSTREAM_PAGE_TOKEN", TOKEN)

    def printing(row: dict[str, int]) -> dict[str, int]:
        print(f"Zeile {row['n']} ✓")
        return row

    env = Environment(parallelism=1, name="gelesen", checkpoint_dir=str(tmp_path / "state"))
    numbers = env.generate(lambda i: {"n": i}, count=10_000_000, rows_per_s=20)
    numbers.map(printing, {"n": int}).uid("printing").write_jsonl(str(tmp_path / "out"))
    job = env.start(slots=ProcessSlots())
    assert job.page is not None
    base = job.page.partition("#")[0]

    def asked(path: str, action: object = None) -> dict[str, Any]:
        body = None if action is None else json.dumps(action).encode()
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(base + path, body, headers), timeout=limit_s(60)) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found

    assert asked("openapi.json") == DESCRIPTION
    of_operator = "logs?operator=printing"
    logs = until("lines have come", lambda: found if (found := asked(of_operator))["lines"] else None)
    assert logs["lines"][0]["text"] == "Zeile 0 ✓" and logs["lines"][0]["uid"] == "printing"
    more = until("more", lambda: found if (found := asked(f"{of_operator}&after={logs['after']}"))["lines"] else None)
    assert more["lines"][0]["number"] > logs["lines"][-1]["number"]
    saved = str(tmp_path / "gespeichert")
    asked("actions", {"action": "stop", "savepoint": saved})
    job.wait(timeout_s=limit_s(120))
    assert job.status().state == "stopped" and (tmp_path / "gespeichert" / "_savepoint").exists()
