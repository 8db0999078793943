"""A keyed stream beside a broadcast one, from seven Spark slots to two with rows in flight: `RECOVERY_REPEAT` times (1)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from machine import limit_s

TIMES = int(os.environ.get("RECOVERY_REPEAT", "1"))
SECONDS_PER_TIME = 90

pytestmark = [pytest.mark.spark, pytest.mark.timeout(60 + SECONDS_PER_TIME * TIMES)]


@pytest.mark.turns(2)
def test_keyed_and_broadcast_inputs_lose_nothing_from_seven_to_two(tmp_path: Path) -> None:
    script = Path(__file__).with_name("keyed_broadcast.py")
    environment = {**os.environ, "PYTHONPATH": str(script.parent.parent), "MIDSTREAM_HOME": str(tmp_path)}
    environment.pop("PYSPARK_PYTHON", None)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(TIMES)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=limit_s(60) + SECONDS_PER_TIME * TIMES,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    assert len(done.stdout.splitlines()) == TIMES
