"""A job on a standalone cluster whose slots, executors, workers, driver, network and disk fail one after the other.

SOAK_FAULTS: how many. About a minute for three of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("soak.py")
FAULTS = int(os.environ.get("SOAK_FAULTS", "8"))
SECONDS_PER_FAULT = 240
NAMESPACES = ("unshare", "--net", "--mount")


def why_not() -> str:
    """Why there can be no machines of its own here, or ""."""
    tools = [tool for tool in ("unshare", "nsenter", "ip", "bridge") if shutil.which(tool) is None]
    if tools:
        return f"there is no {', '.join(tools)} here"
    tried = subprocess.run(
        [*NAMESPACES, "sh", "-c", "mount -t tmpfs tmpfs /tmp && ip link add br0 type bridge"],
        check=False,
        capture_output=True,
        text=True,
    )
    return f"no network and mount namespaces can be made here: {tried.stderr.strip()}" if tried.returncode else ""


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS_PER_FAULT * (FAULTS + 2))
def test_whatever_fails_the_output_is_exact_and_nothing_grows(tmp_path: Path) -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}: {' '.join(NAMESPACES)} python {SCRIPT} DIRECTORY {FAULTS} {seed}")
    done = subprocess.run(
        [*NAMESPACES, sys.executable, str(SCRIPT), str(tmp_path), str(FAULTS), str(seed)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["exact"] and said["status"] == 0 and said["rows"] > 1000 * FAULTS
    first, last = said["sizes"][0], said["sizes"][-1]
    assert last[1] < 2 * first[1], "slots grow"
