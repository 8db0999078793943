"""`list --all`, `history` and `page` of jobs that run no more."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import msgspec
import pytest

from machine import limit_s
from midstream.cli.main import main
from midstream.engine.protocol.job_status import FailureStatus, JobStatus
from midstream.runtime.driver import job_registry
from midstream.runtime.driver.job_history import HistoryWriter
from midstream.runtime.network.tls import JobKeys
from sample_status import sample

FAILURE = FailureStatus(1_700_000_000_000, 2, "ValueError: bad row 17", "Traceback …", "")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path))
    return tmp_path


def kept(status: JobStatus, pid: int | None = None) -> None:
    entry = job_registry.entry_of_this_process(status.job_id, status.name, "127.0.0.1", 7000, JobKeys(b"secret"))
    writer = HistoryWriter(entry if pid is None else msgspec.structs.replace(entry, pid=pid))
    writer.start()
    writer.end(status)


@pytest.fixture
def failed() -> JobStatus:
    status = msgspec.structs.replace(sample(), job_id="abcd", name="delays", state="failed", failures=(FAILURE,))
    kept(status)
    return status


def test_jobs_that_have_ended_are_listed_on_request(failed: JobStatus, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert "no job runs on this machine" in capsys.readouterr().out
    assert main(["list", "--all"]) == 0
    assert re.search(r"abcd +delays +failed", capsys.readouterr().out)
    assert main(["list", "--all", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["jobs"]
    assert (listed["job_id"], listed["state"]) == ("abcd", "failed")


def test_records_that_cannot_be_read_are_said(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--all"]) == 0
    assert "no job runs on this machine, and none has" in capsys.readouterr().out
    (home / "history").mkdir()
    (home / "history" / "x.json").write_text("{}")
    assert main(["list", "--all"]) == 0
    assert "left out: 1 recorded by another version of midstream" in capsys.readouterr().out


def test_the_history_of_a_job_shows_how_it_ended_and_its_failures(
    failed: JobStatus, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["history", "delays"]) == 0
    out = capsys.readouterr().out
    assert "delays  failed" in out and "attempt 2: ValueError: bad row 17" in out
    assert main(["history", "ab", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failures"][0]["summary"] == FAILURE.summary
    assert main(["history", "flights"]) == 2
    assert "error: no record of a job 'flights'" in capsys.readouterr().err


def test_the_page_of_a_job_that_has_ended_is_served_until_ctrl_c(failed: JobStatus) -> None:
    command = [sys.executable, "-c", "from midstream.cli.main import main; raise SystemExit(main())", "page", "delays"]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, env=dict(os.environ)) as serving:
        try:
            assert serving.stdout is not None
            link = json.loads(serving.stdout.readline())["page"].partition("#")[0]
            with urlopen(f"{link}status.json", timeout=limit_s(10)) as answer:
                assert msgspec.json.decode(answer.read(), type=JobStatus) == failed
        finally:
            serving.send_signal(signal.SIGINT)
        assert serving.wait(limit_s(30)) == 128 + signal.SIGINT


def test_two_running_jobs_of_one_name_are_told_apart_and_no_record_is_shown_instead(
    failed: JobStatus, capsys: pytest.CaptureFixture[str]
) -> None:
    for job_id in ("aaaa", "bbbb"):
        job_registry.announce(
            job_registry.entry_of_this_process(job_id, "delays", "127.0.0.1", 7000, JobKeys(b""), "http://127.0.0.1:1/")
        )
    assert main(["page", "delays"]) == 2
    assert "'delays' matches 2 running jobs (aaaa, bbbb); use the id of one" in " ".join(
        capsys.readouterr().err.split()
    )
    assert main(["page", "aaaa"]) == 0
    assert capsys.readouterr().out == "page: http://127.0.0.1:1/\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["page", "delays", "--page", "off"], "--page: off, so there is nothing to serve"),
        (["page", "delays", "--page", "99999"], "'99999' is not PORT, HOST:PORT or off"),
        (["page", "flights"], "no record of a job 'flights'"),
        (["page"], "JOB requires an argument"),
        (["history"], "JOB requires an argument"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    failed: JobStatus, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) in (1, 2)
    assert says in " ".join(capsys.readouterr().err.split())
