"""The Kafka example as `make kafka-demo` runs it, with a broker of its own, but on process slots."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import midstream
from kafka_broker import find_jars
from machine import limit_s
from waiting import until

ROOT = Path(__file__).parents[2]
PROGRAM = f"""
import os, runpy, sys
from midstream.runtime.process.process_slots import ProcessSlots
demo = runpy.run_path({str(ROOT / "examples/kafka.py")!r})["demo"]
sys.exit(not demo(os.environ["KAFKA_BOOTSTRAP"], slots=ProcessSlots()))
"""
COMMAND = (sys.executable, str(ROOT / "tools/kafka_server.py"), sys.executable, "-c", PROGRAM)
LIMIT_S = 240.0
pytestmark = [pytest.mark.systems, pytest.mark.timeout(LIMIT_S + 60)]


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """As of people who have midstream installed; whatever is written goes to a directory of its own."""
    jars = find_jars()
    if isinstance(jars, str):
        pytest.skip(jars)
    path = os.pathsep.join([str(Path(midstream.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    environment.pop("KAFKA_BOOTSTRAP", None)
    return environment


def assert_nothing_is_left(directory: Path) -> None:
    assert [path.name for path in directory.iterdir() if "midstream" in path.name] == []
    for process in psutil.process_iter(["cmdline"]):
        with suppress(psutil.NoSuchProcess):
            assert not any(str(directory) in part for part in process.info["cmdline"] or ()), process


def test_the_demo_kills_a_slot_and_finds_every_flight_once(environment, tmp_path):
    done = subprocess.run(COMMAND, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^killed     a slot \(kill -9 \d+\) after [\d,]+ flights", done.stdout, re.MULTILINE), done.stdout
    assert "5,432 committed records of demo-delays: 336,776 flights" in done.stdout
    assert "0 missing, 0 twice, 0 wrong" in done.stdout
    assert "every flight is counted once" in done.stdout
    assert_nothing_is_left(tmp_path)


def test_a_demo_that_is_terminated_leaves_nothing_behind(environment, tmp_path):
    process = subprocess.Popen(
        COMMAND, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("produced ")
        assert process.stdout.readline().startswith("started ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(limit_s(120)) == 128 + signal.SIGTERM
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    until("its processes have ended", lambda: not _of_group(process.pid), 30)
    assert_nothing_is_left(tmp_path)


def _of_group(group: int) -> list[int]:
    found = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            if os.getpgid(pid) == group:
                found.append(pid)
    return found
