"""Slots on different machines, whose network fails. Each test has network namespaces of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from machine import limit_s

pytestmark = pytest.mark.systems

SCRIPT = Path(__file__).parent / "network_of_its_own.py"
TOOLS = ("ip", "bridge", "unshare", "nsenter")


def missing() -> str:
    """Why there can be no network namespaces here, or ""."""
    tools = [tool for tool in TOOLS if shutil.which(tool) is None]
    if tools:
        return f"there is no {', '.join(tools)} here"
    tried = subprocess.run(
        ["unshare", "--net", "sh", "-c", "ip link add br0 type bridge && ip link add port0 type veth peer name port1"],
        check=False,
        capture_output=True,
        text=True,
    )
    return f"no network namespaces can be made here: {tried.stderr.strip()}" if tried.returncode else ""


WHY_NOT = missing()


def done_in_a_network_of_its_own(what: str, directory: Path) -> dict[str, Any]:
    """What `network_of_its_own.py` says of it."""
    done = subprocess.run(
        ["unshare", "--net", sys.executable, str(SCRIPT), what, str(directory)],
        check=False,
        capture_output=True,
        text=True,
        timeout=limit_s(150),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_two_slots_that_cannot_reach_each_other_are_named_and_the_job_goes_on_when_they_can(tmp_path: Path) -> None:
    said = done_in_a_network_of_its_own("cut", tmp_path)
    assert "the connection to slot " in said["failure"]
    assert "has not been answered for " in said["failure"]
    assert "10.77.0.10" in said["failure"] and "10.77.0.11" in said["failure"]
    assert said["state"] == "finished" and said["numbers"]
    assert said["tls"] == "on", "what leaves a machine is encrypted"


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_behind_a_firewall_the_ports_that_are_set_are_all_that_a_job_needs(tmp_path: Path) -> None:
    said = done_in_a_network_of_its_own("firewall", tmp_path)
    assert said == {"failure": "", "state": "finished", "tls": "on", "numbers": True}


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_behind_a_firewall_a_job_on_other_ports_is_given_up_with_the_address_that_is_not_reached(
    tmp_path: Path,
) -> None:
    said = done_in_a_network_of_its_own("closed", tmp_path)
    assert said["state"] == "failed" and not said["numbers"]
    assert re.search(
        r"a slot on \S+ cannot reach its driver: cannot connect to 10\.77\.0\.1:\d+: Network is unreach",
        said["failure"],
    ), said
