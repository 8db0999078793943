"""Spark ends under a running job: it fails at once, says so, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from machine import limit_s
from midstream.runtime.driver.job_registry import list_jobs
from waiting import alive, until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(200)]


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGKILL, "was killed by SIGKILL"),
        pytest.param(signal.SIGTERM, "ended with status 143", marks=pytest.mark.nightly),
    ],
)
def test_a_job_whose_spark_ends_fails_at_once_and_says_where_to_go_on(
    number: signal.Signals, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path))
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    script = Path(__file__).with_name("ending_spark.py")
    with open(tmp_path / "errors", "w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [sys.executable, str(script), "local[2]", str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": str(script.parent.parent)},
        )
    try:
        assert process.stdout is not None
        stopped = process.stdout.readline()
        ready = process.stdout.readline()
        assert ready.startswith("ready "), (stopped, ready, (tmp_path / "errors").read_text())
        jvm, *slots = (int(word) for word in ready.split()[1:])
        assert len(slots) == 2 and len(list_jobs()) == 1
        assert os.getsid(jvm) == jvm, "what is sent to the driver's process group must not end Spark"
        os.kill(jvm, number)
        killed_s = time.monotonic()
        killed = process.stdout.readline()
        assert time.monotonic() - killed_s < 15
        rest = process.stdout.read()
        assert process.wait(limit_s(30)) == 0, (tmp_path / "errors").read_text()
    finally:
        process.kill()
        process.communicate()
    what = r"and all slots of the job with it; its last checkpoint is {}/chk-\d+\. Start the job again"
    assert "the Spark session was stopped, " in stopped
    assert re.search(what.format(tmp_path / "stopped"), stopped), stopped
    assert f"Spark's JVM (process {jvm}) {how}" in killed
    assert re.search(what.format(tmp_path / "killed"), killed), killed
    assert "can no longer be used" in rest and "start the program again" in rest
    until("the end of the slots", lambda: not any(map(alive, slots)))
    assert list_jobs() == [] and not list(tmp_path.glob("jobs/*"))
    errors_said = (tmp_path / "errors").read_text()  # Spark's dying workers may say what they like
    assert "ending went wrong" not in errors_said and "Exception in thread midstream" not in errors_said
