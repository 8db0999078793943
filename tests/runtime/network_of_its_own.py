"""A job whose slots are on machines of their own, as far as the network is concerned. Run inside a new network namespace.

The driver is this process, and its slots are on two nodes (`nodes`). What is done there says the first argument: `cut`,
`firewall` or `closed`. Prints one line of JSON. Everything ends with this process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jobs import NumbersJob
from machine import limit_s
from midstream.runtime.driver.job import Job, start_job
from midstream.runtime.network.ports import Ports
from midstream.runtime.process import process_slots
from nodes import DRIVER, Nodes
from waiting import until

HEARTBEAT_TIMEOUT_S = 4.0
LET_THROUGH = Ports(7200, 7202, "of the test")


class OnNodes(process_slots.ProcessSlots):
    bind_host = DRIVER
    driver_host = DRIVER


class OnPorts(OnNodes):
    driver_ports = slot_ports = LET_THROUGH


def main(what: str, directory: Path) -> dict[str, Any]:
    with ExitStack() as stack:
        nodes = Nodes(stack)
        process_slots.subprocess = SimpleNamespace(Popen=nodes.popen, PIPE=subprocess.PIPE)  # type: ignore[assignment]  # of its names the module uses two
        if what == "cut":
            return cut(stack, nodes, directory)
        nodes.only_let_through(LET_THROUGH)
        return behind_a_firewall(OnPorts() if what == "firewall" else OnNodes(), directory)


def behind_a_firewall(slots: OnNodes, directory: Path) -> dict[str, Any]:
    """A job that runs to its end, or is given up."""
    numbers = NumbersJob(20_000, rows_per_s=20_000, checkpoint_dir=str(directory))
    job = start_job(numbers.plan(), slots)
    until("the end", lambda: job.ended, 100)
    status = job.status()
    return {
        "failure": status.failures[0].summary if status.failures else "",
        "state": status.state,
        "tls": status.tls,
        "numbers": numbers.numbers() == list(range(20_000)),
    }


def cut(stack: ExitStack, nodes: Nodes, directory: Path) -> dict[str, Any]:
    """A job whose slots cannot reach each other for a while."""
    numbers = NumbersJob(
        400_000, rows_per_s=20_000, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S, checkpoint_dir=str(directory)
    )
    job = start_job(numbers.plan(), OnNodes())
    stack.callback(end, job)
    until("two checkpoints", lambda: job.status().checkpoints_completed >= 2, 60)
    nodes.cut(True)
    failures = until("word of the cut", lambda: job.status().failures, 60)
    nodes.cut(False)
    status = job.wait(limit_s(120))
    return {
        "failure": failures[0].summary,
        "state": status.state,
        "tls": status.tls,
        "numbers": numbers.numbers() == list(range(400_000)),
    }


def end(job: Job) -> None:
    if not job.ended:
        job.stop(drain=True, timeout_s=limit_s(60))


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
