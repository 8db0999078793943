"""However a driver ends, its slots end too, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from machine import limit_s
from midstream.runtime.driver.job_registry import list_jobs
from waiting import alive, until

Started = tuple["subprocess.Popen[str]", list[int]]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Started]]:
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path))
    script = Path(__file__).with_name("own_driver.py")
    processes = []

    def start(then: str) -> Started:
        process = subprocess.Popen(
            [sys.executable, str(script), then],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(script.parent.parent), *sys.path])},
        )
        processes.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready "), process.communicate(timeout=limit_s(30))
        return process, [int(word) for word in line.split()[1:]]

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=limit_s(20))


def test_a_driver_that_is_killed_takes_its_slots_along_and_its_entry_is_stale(
    started: Callable[[str], Started], tmp_path: Path
) -> None:
    process, pids = started("wait")
    assert len(list_jobs()) == 1
    process.kill()
    process.wait(limit_s(10))
    until("the end of the slots", lambda: not any(map(alive, pids)), 5)
    assert list_jobs() == [] and not list(tmp_path.glob("jobs/*"))


def test_slots_of_a_driver_that_hangs_end_after_the_heartbeat_timeout(started: Callable[[str], Started]) -> None:
    process, pids = started("wait")
    began_s = time.monotonic()
    process.send_signal(signal.SIGSTOP)
    until("the end of the slots", lambda: not any(map(alive, pids)), 10)
    assert time.monotonic() - began_s >= 1.0


@pytest.mark.systems
def test_ctrl_c_ends_the_slots_in_good_order(started: Callable[[str], Started], tmp_path: Path) -> None:
    process, pids = started("wait")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=limit_s(20))
    assert "KeyboardInterrupt" in errors and "lost its driver" not in errors
    assert not any(map(alive, pids)) and not list(tmp_path.glob("jobs/*"))


@pytest.mark.systems
def test_a_program_that_ends_ends_its_job(started: Callable[[str], Started], tmp_path: Path) -> None:
    process, pids = started("leave")
    _, errors = process.communicate(timeout=limit_s(20))
    assert process.returncode == 0 and errors == ""
    assert not any(map(alive, pids)) and not list(tmp_path.glob("jobs/*"))


def test_the_secret_is_neither_on_a_command_line_nor_in_the_environment(started: Callable[[str], Started]) -> None:
    _, pids = started("wait")
    (entry,) = list_jobs()
    for pid in pids:
        shown = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        assert entry.keys.secret not in shown and entry.keys.secret.hex().encode() not in shown
