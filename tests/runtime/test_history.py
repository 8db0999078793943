"""What is kept of jobs: while they run, when they have ended, and when their driver was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from jobs import NumbersJob
from machine import limit_s
from midstream.engine.core.errors import JobError
from midstream.engine.protocol.job_status import FailureStatus, JobStatus
from midstream.runtime.driver import job_history as history
from midstream.runtime.driver import job_registry
from midstream.runtime.driver.job import start_job
from midstream.runtime.driver.job_history import HistoryWriter, JobRecord
from midstream.runtime.network.tls import JobKeys
from midstream.runtime.process.process_slots import ProcessSlots
from sample_status import sample
from waiting import until


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def entry_of(job_id: str) -> job_registry.JobEntry:
    return job_registry.entry_of_this_process(job_id, "flights", "127.0.0.1", 7000, JobKeys(b"the job's secret"))


def of(job_id: str, state: str = "running", started_ms: int = 0, name: str = "flights") -> JobStatus:
    return msgspec.structs.replace(sample(), job_id=job_id, state=state, started_ms=started_ms, name=name)


def kept(status: JobStatus) -> None:
    writer = HistoryWriter(entry_of(status.job_id))
    writer.start()
    writer.end(status)


def test_a_job_that_ends_is_kept_as_it_ended(home: Path) -> None:
    job = start_job(NumbersJob(1_000).plan(), ProcessSlots())
    until("the job to be recorded while it runs", lambda: bool(history.records()[0]), 30)
    final = job.wait(limit_s(60))
    ((record,), unreadable) = history.records()
    assert (record.seen, unreadable) == (final, 0)
    assert record.seen.state == "finished" and not record.runs
    (file,) = (home / "history").iterdir()
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_the_newest_of_many_statuses_is_what_is_written() -> None:
    writer = HistoryWriter(entry_of("a"))
    for rows in range(50):
        writer.keep(msgspec.structs.replace(of("a"), restarts=rows))
    writer.start()
    writer.end(msgspec.structs.replace(of("a", "stopped"), restarts=50))
    assert history.find("a").seen == msgspec.structs.replace(of("a", "stopped"), restarts=50)


def test_a_job_whose_process_is_gone_is_lost(home: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = job_registry.process_started(child.pid)
    assert started is not None
    entry = msgspec.structs.replace(entry_of("a"), pid=child.pid, process_started=started)
    writer = HistoryWriter(entry)
    writer.start()
    writer.keep(of("a"))
    until("the record to be written", (home / "history" / "a.json").exists, 30)
    assert history.find("a").seen.state == "running"
    child.communicate(b"\n")
    assert history.find("a").seen.state == "lost"
    writer.end(of("a", "failed"))
    assert history.find("a").seen.state == "failed"


def test_a_driver_on_another_machine_may_live_as_long_as_its_record_is_young() -> None:
    def record(now_ms: int) -> JobRecord:
        status = msgspec.structs.replace(sample(), now_ms=now_ms)
        return JobRecord(status=status, pid=os.getpid(), process_started="some boot 7", machine="another")

    assert record(round(time.time() * 1e3)).seen.state == "running"
    assert record(round((time.time() - 3600) * 1e3)).seen.state == "lost"


def test_only_the_newest_records_stay_and_what_killed_writers_left_goes(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "RECORDS_MAX", 3)
    for number in range(5):
        kept(of(f"job-{number}", "finished", started_ms=number))
        os.utime(home / "history" / f"job-{number}.json", (number, number))
    (home / "history" / ".0123").write_bytes(b"half of it")
    (home / "history" / ".4567").write_bytes(b"half of it")
    os.utime(home / "history" / ".0123", (0, 0))
    kept(of("job-5", "finished", started_ms=5))
    assert sorted(path.name for path in (home / "history").iterdir()) == [
        ".4567",
        *(f"job-{n}.json" for n in (3, 4, 5)),
    ]
    assert [record.status.job_id for record in history.records()[0]] == ["job-5", "job-4", "job-3"]


def test_a_record_is_bounded_and_holds_no_secret(home: Path) -> None:
    details = "first " + "x" * 50_000 + " last"
    failures = (FailureStatus(0, 0, "ValueError", details),)
    kept(msgspec.structs.replace(of("a", "failed"), failures=failures))
    assert len((home / "history" / "a.json").read_bytes()) < 30_000
    assert b"secret" not in (home / "history" / "a.json").read_bytes()
    assert history.find("a").status.failures[0].details.endswith("x last")


@pytest.mark.parametrize(
    "data", [b"", b"{", b'{"pid": 1}', b"\xff\xfe", b'{"seen": "\xff"}', b"[1]", b'{"status": null}']
)
def test_what_cannot_be_read_is_counted_and_left_alone(home: Path, data: bytes) -> None:
    kept(of("a", "finished"))
    (home / "history" / "other.json").write_bytes(data)
    found, unreadable = history.records()
    assert ([record.status.job_id for record in found], unreadable) == (["a"], 1)
    with pytest.raises(JobError, match=r"no record of a job 'b' in .*history; there are: flights; 1 more of another"):
        history.find("b")


def test_a_job_is_found_by_its_id_its_beginning_or_as_the_newest_of_its_name() -> None:
    for number, name in enumerate(("flights", "flights", "delays")):
        kept(of(f"ab{number}", "finished", started_ms=number, name=name))
    assert history.find("ab0").status.job_id == "ab0"
    assert history.find("flights").status.job_id == "ab1"
    with pytest.raises(JobError, match=r"'ab' matches 3 job ids \(ab2, ab1, ab0\)"):
        history.find("ab")
    with pytest.raises(JobError, match="no record of a job ''"):
        history.find("")


def test_a_home_that_cannot_be_written_is_said_once_and_the_job_runs(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home.mkdir()
    (home / "history").write_bytes(b"a file where a directory should be")
    writer = HistoryWriter(entry_of("a"))
    writer.start()
    writer.keep(of("a"))
    until("the first attempt", lambda: bool(caplog.records), 30)
    writer.end(of("a", "finished"))
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "the history of job a cannot be written at present"
    ]
    assert history.records() == ([], 0)
