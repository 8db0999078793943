"""`list`, `status`, `logs`, `checkpoint`, `savepoint`, `rescale` and `stop`, asked of a real driver over its port; its coordinator is scripted."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from answering import said

from machine import limit_s
from midstream.cli.main import main
from midstream.engine.core.errors import ClusterError
from midstream.engine.protocol.messages import DoCheckpoint, DoRescale, DoSavepoint, DoStop, GetStatus, Logged, LogLine
from midstream.runtime.driver.client import Client
from midstream.runtime.driver.job_registry import find
from waiting import until


def test_all_jobs_of_this_machine_are_listed(start, capsys):
    start("aaaa1111", "flights")
    start("bbbb2222", "clicks")
    assert main(["list"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:3] for row in rows[1:3]] == [
        ["aaaa1111", "flights", "running"],
        ["bbbb2222", "clicks", "running"],
    ]
    listed = json.loads(said(["list", "--json"], capsys))["jobs"]
    assert [job["job_id"] for job in listed] == ["aaaa1111", "bbbb2222"]


@pytest.mark.parametrize("name", [[], ["flights"], ["aaaa1111"], ["aaaa"]])
def test_a_job_is_found_by_id_name_or_the_beginning_of_its_id(name, start, capsys):
    start("aaaa1111", "flights")
    assert "flights running" in said(["status", *name], capsys)
    assert json.loads(said(["status", *name, "--json"], capsys))["job_id"] == "aaaa1111"


def test_status_shows_the_last_failure_with_its_traceback(start, capsys):
    start("aaaa1111", "flights")
    assert 'File "job.py", line 3, in parse' in said(["status"], capsys)


def test_a_checkpoint_answers_with_its_path(start, capsys):
    coordinator = start("aaaa1111", "flights")
    assert said(["checkpoint", "flights"], capsys) == "/data/chk-4"
    assert coordinator.asked == [DoCheckpoint()]


def test_a_job_that_is_killed_before_it_has_answered_is_a_failed_request(start, capsys, monkeypatch):
    def killed(self, request, timeout_s=None):
        raise ClusterError("job flights (a1) closed the connection; it may have ended")

    start("a1", "flights")
    monkeypatch.setattr(Client, "request", killed)
    assert main(["checkpoint", "flights"]) == 1
    assert "closed the connection; it may have ended" in capsys.readouterr().err


def test_a_checkpoint_that_fails_is_a_failed_request_and_says_why(start, capsys):
    start("aaaa1111", "flights").refuses = True
    assert "job flights (aaaa1111): checkpoint 4 failed: the disk is full" in said(["checkpoint"], capsys, status=1)


@pytest.mark.parametrize(("drain", "says"), [([], "flights stopped resume from:"), (["--drain"], "flights finished")])
def test_a_job_is_stopped_with_its_last_checkpoint(drain, says, start, capsys):
    coordinator = start("aaaa1111", "flights")
    out = said(["stop", *drain], capsys)
    assert says in out
    assert "/data/chk-5" in out
    assert coordinator.asked == [DoStop(bool(drain))]


def test_a_command_that_waits_says_what_the_job_waits_for(start, capsys, monkeypatch):
    monkeypatch.setattr("midstream.cli.commands.job_commands.POLL_INTERVAL_S", 0.05)
    start("aaaa1111", "flights").is_slow = True
    assert main(["stop", "flights"]) == 0
    told = capsys.readouterr()
    sentence = "waiting for the metadata of checkpoint 5 to be written in /data, 31 s so far (given up after 600 s)"
    assert told.err.count(sentence) == 1
    assert "/data/chk-5" in told.out


def test_a_savepoint_answers_with_its_path_wherever_the_command_was_given(start, capsys, tmp_path, monkeypatch):
    coordinator = start("aaaa1111", "flights")
    monkeypatch.chdir(tmp_path)
    assert said(["savepoint", "flights"], capsys) == "/data/savepoints/1"
    assert main(["savepoint", "flights", "saved", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"format_version": 1, "job_id": "aaaa1111", "savepoint": f"{tmp_path}/saved"}
    main(["savepoint", "flights", "s3://bucket/saved"])
    assert coordinator.asked == [
        DoSavepoint(None),
        DoSavepoint(f"{tmp_path}/saved"),
        DoSavepoint("s3://bucket/saved"),
    ]


def test_a_job_stops_with_a_savepoint(start, capsys):
    coordinator = start("aaaa1111", "flights")
    told = json.loads(said(["stop", "flights", "--savepoint", "/data/saved", "--json"], capsys))
    assert told == {"format_version": 1, "job_id": "aaaa1111", "drained": False, "savepoint": "/data/saved"}
    assert coordinator.asked == [DoStop(False, "/data/saved")]


@pytest.mark.parametrize("command", [["savepoint", "flights", "/data/saved"], ["stop", "--savepoint", "/data/saved"]])
def test_a_savepoint_that_cannot_be_made_is_a_failed_request_and_says_why(command, start, capsys):
    start("aaaa1111", "flights").refuses = True
    assert "no savepoint was made: /data/saved: the place is taken" in said(command, capsys, status=1)
    assert main([*command, "--json"]) == 1
    assert "the place is taken" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize("command", [["savepoint", "flights", ""], ["stop", "--savepoint", " "]])
def test_a_savepoint_needs_a_place_that_is_one(command, start, capsys):
    start("aaaa1111", "flights")
    assert "an empty path; give a directory or a storage URL" in said(command, capsys, status=2)


def test_a_job_that_is_unknown_or_has_ended_cannot_be_stopped(start, capsys):
    start("aaaa1111", "flights")
    for command in (["stop", "clicks"], ["stop", "clicks", "--drain"], ["savepoint", "clicks"]):
        assert "no running job 'clicks' on this machine; running: flights (aaaa1111)" in said(command, capsys, status=2)
        assert main([*command, "--json"]) == 2
        assert "no running job" in json.loads(capsys.readouterr().out)["error"]


def test_a_job_is_rescaled_from_a_checkpoint_made_for_it(start, capsys):
    coordinator = start("aaaa1111", "flights")
    out = said(["rescale", "flights", "--parallelism", "3"], capsys)
    assert out == "flights runs at parallelism 3 from: /data/chk-6"
    told = json.loads(said(["rescale", "--parallelism", "3", "--json"], capsys))
    assert told == {"format_version": 1, "job_id": "aaaa1111", "parallelism": 3, "checkpoint": "/data/chk-6"}
    assert coordinator.asked == [DoRescale(3)] * 2
    assert "runs at parallelism 2, as it did before" in said(["rescale", "--parallelism", "2"], capsys)


def test_a_rescale_that_cannot_be_is_a_failed_request_and_says_how_the_job_goes_on(start, capsys):
    start("aaaa1111", "flights").refuses = True
    out = said(["rescale", "--parallelism", "3"], capsys, status=1)
    assert "could not rescale to parallelism 3; the job continues at 2: the job needs 3 slots, but there are 2" in out
    assert "'two' is not a whole number" in said(["rescale", "--parallelism", "two"], capsys, status=2)
    assert "no running job 'clicks'" in said(["rescale", "clicks", "--parallelism", "2"], capsys, status=2)
    assert "--parallelism" in said(["rescale"], capsys, status=2)


def test_a_job_that_is_unknown_is_refused_with_those_that_run(start, capsys):
    start("aaaa1111", "flights")
    assert "no running job 'clicks' on this machine; running: flights (aaaa1111)" in said(["stop", "clicks"], capsys, 2)


def test_without_a_name_there_must_be_one_job(start, capsys):
    assert "no job runs on this machine" in said(["status"], capsys, 2)
    start("aaaa1111", "flights")
    start("bbbb2222", "clicks")
    assert "2 jobs run on this machine; choose one: flights (aaaa1111), clicks (bbbb2222)" in said(
        ["status"], capsys, 2
    )


def test_what_the_slots_print_and_log_is_shown(start, capsys):
    job = start("abc", "flights")
    lines = (
        LogLine(0, "hello\x1b[2J", "stdout", operator="divide", uid="parse", subtask=3),
        LogLine(0, "from a thread", "app.rows", level=30),
    )
    job.driver.logs.add(1, Logged(lines, dropped=5))
    assert main(["logs", "flights"]) == 0
    dropped, printed, logged = capsys.readouterr().out.splitlines()
    assert "5 lines left out" in dropped
    assert printed.endswith(" divide/3 stdout: hello�[2J")
    assert logged.endswith(" slot 1 WARNING app.rows: from a thread")
    assert main(["logs", "--operator", "parse", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["number"], one["slot"], one["text"], one["subtask"]) for one in found] == [(1, 1, lines[0].text, 3)]


@pytest.mark.parametrize("follow", [[], ["--follow"]])
def test_logs_of_an_operator_that_is_not_there_are_refused_with_the_others(follow, start, capsys):
    start("abc", "flights")
    refused = said(["logs", "--operator", "map-1", *follow], capsys, 1)
    assert "there is no operator 'map-1'; the uids of all are: read, parse, write" in refused


def _sleep_with(monkeypatch: pytest.MonkeyPatch, sleep: Callable[[float], None]) -> None:
    """Replace the sleep of commands alone: threads of other libraries in this process sleep too."""
    monkeypatch.setattr(
        "midstream.cli.commands.job_commands.time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    )


def test_logs_are_followed_until_the_job_ends(start, capsys, monkeypatch):
    job = start("abc", "flights")
    job.driver.logs.add(0, Logged((LogLine(0, "one", "stdout"),)))
    later = iter([lambda: job.driver.logs.add(0, Logged((LogLine(0, "two", "stdout"),)))])

    def wait(_seconds):
        then = next(later, None)
        if then is None:
            job.driver.cancel("the test ends it")
            job.driver.ended.wait(limit_s(30))
        else:
            then()

    _sleep_with(monkeypatch, wait)
    assert main(["logs", "--follow"]) == 0
    assert [line.rsplit(": ")[-1] for line in capsys.readouterr().out.splitlines()] == ["one", "two"]


def test_a_job_is_watched_until_it_ends(start, capsys):
    answering = start("aaaa1111", "flights")

    def stop_later() -> None:
        until("the job to be watched", lambda: GetStatus() in answering.asked)
        assert answering.driver.request(DoStop()).result(limit_s(20)).checkpoint == "/data/chk-5"

    stopping = threading.Thread(target=stop_later)
    stopping.start()
    out = said(["top", "flights"], capsys)
    stopping.join(limit_s(20))
    assert "flights running" in out and out.endswith("flights stopped; midstream history aaaa1111 has all of it")


def test_watching_ends_with_ctrl_c_and_the_job_runs_on(start, capsys, monkeypatch):
    answering = start("aaaa1111", "flights")

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    _sleep_with(monkeypatch, interrupt)
    assert said(["top"], capsys).endswith("flights runs on")
    assert not answering.driver.ended.is_set()


def test_machines_get_a_status_on_each_line(start, capsys):
    start("aaaa1111", "flights").is_slow = False

    def stop_later() -> None:
        Client(find("aaaa1111")).request(DoStop(), 20)

    stopping = threading.Timer(0.5, stop_later)
    stopping.start()
    assert main(["top", "aaaa", "--json"]) == 0
    stopping.join(limit_s(20))
    states = [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()]
    assert states[0] == "running" and states[-1] == "stopped"
