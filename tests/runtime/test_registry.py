"""The files by which commands find the jobs of this machine."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import psutil
import pytest

from midstream.runtime.driver import job_registry
from midstream.runtime.network.tls import JobKeys


def announced(job_id: str = "job-1") -> job_registry.JobEntry:
    entry = job_registry.entry_of_this_process(job_id, "numbers", "127.0.0.1", 7000, JobKeys(b"secret"))
    job_registry.announce(entry)
    return entry


@pytest.fixture(autouse=True)
def _empty(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path))


def test_a_step_of_the_wall_clock_hides_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = announced()
    began_s = psutil.Process().create_time()
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: began_s + 3600)
    assert job_registry.list_jobs() == [entry]


def test_which_process_it_is_is_told_by_its_boot_and_its_ticks() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = job_registry.process_started(child.pid)
    assert started is not None and started == job_registry.process_started(child.pid)
    assert started != job_registry.process_started(os.getpid())
    child.communicate(b"\n")
    assert job_registry.process_started(child.pid) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what is told of zombies is read from Linux' /proc")
def test_a_process_that_has_ended_and_that_no_parent_has_reaped_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert job_registry.process_started(child.pid) is not None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    assert job_registry.process_started(child.pid) is None
    child.communicate()


def test_files_of_dead_jobs_go_away() -> None:
    entry = announced()
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    job_registry.announce(msgspec.structs.replace(entry, job_id="its process is gone", pid=child.pid))
    job_registry.announce(msgspec.structs.replace(entry, job_id="its number is used again", process_started="a boot 7"))
    (job_registry.home() / "jobs" / "garbage.json").write_bytes(b"{")
    damaged = msgspec.json.encode(msgspec.structs.replace(entry, pid=child.pid)).replace(b"job-1", b"job-\xff")
    (job_registry.home() / "jobs" / "damaged.json").write_bytes(damaged)
    assert job_registry.list_jobs() == [entry]
    assert [path.name for path in (job_registry.home() / "jobs").glob("*.json")] == ["job-1.json"]


def test_an_entry_of_another_version_stays_while_its_process_is_there() -> None:
    directory = job_registry.home() / "jobs"
    directory.mkdir(parents=True)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    (directory / "new.json").write_bytes(msgspec.json.encode({"pid": os.getpid(), "what": "nobody knows yet"}))
    (directory / "old.json").write_bytes(msgspec.json.encode({"pid": child.pid}))
    (directory / "damaged.json").write_bytes(msgspec.json.encode({"pid": 2**40}))
    (directory / "negative.json").write_bytes(msgspec.json.encode({"pid": -1}))
    assert job_registry.list_jobs() == []
    assert [path.name for path in directory.glob("*.json")] == ["new.json"]
