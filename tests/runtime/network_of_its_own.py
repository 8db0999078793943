"""A job whose slots are on machines of their own, as far as the network is concerned. Run inside a new network namespace.

    driver, this process: 10.77.0.1, on a bridge
    node 0: 10.77.0.10, node 1: 10.77.0.11, each in a namespace of its own, on a port of that bridge

What is done there says the first argument: `cut`, `firewall` or `closed`. Prints one line of JSON. Everything ends with
this process.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jobs import NumbersJob
from midstream.runtime import processes
from midstream.runtime.job import Job, start_job
from midstream.runtime.ports import Ports
from waiting import until

DRIVER = "10.77.0.1"
HEARTBEAT_TIMEOUT_S = 4.0
LET_THROUGH = Ports(7200, 7202, "of the test")


def command(*words: str) -> None:
    subprocess.run(words, check=True)


class Nodes:
    """Two nodes. `cut`: they cannot reach each other, and both can reach the driver."""

    def __init__(self, stack: ExitStack) -> None:
        command("ip", "link", "set", "lo", "up")
        command("ip", "link", "add", "br0", "type", "bridge")
        command("ip", "address", "add", f"{DRIVER}/24", "dev", "br0")
        command("ip", "link", "set", "br0", "up")
        self._pids = [self._node(stack, number) for number in range(2)]
        self._turns = itertools.cycle(self._pids)

    def _node(self, stack: ExitStack, number: int) -> int:
        holder = stack.enter_context(
            subprocess.Popen(["unshare", "--net", "sh", "-c", "echo made; exec cat"], stdin=-1, stdout=-1)
        )
        stack.callback(holder.kill)
        assert holder.stdout is not None and holder.stdout.readline() == b"made\n"
        inside = ("nsenter", f"--target={holder.pid}", "--net")
        command("ip", "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        command("ip", "link", "set", f"port{number}", "master", "br0", "up")
        command(*inside, "ip", "address", "add", f"10.77.0.{10 + number}/24", "dev", "eth0")
        command(*inside, "ip", "link", "set", "lo", "up")
        command(*inside, "ip", "link", "set", "eth0", "up")
        return holder.pid

    def popen(self, words: list[str], **named: Any) -> subprocess.Popen[bytes]:
        """In place of `subprocess.Popen`: on one node after the other."""
        return subprocess.Popen(["nsenter", f"--target={next(self._turns)}", "--net", *words], **named)

    def cut(self, is_cut: bool) -> None:
        for number in range(2):
            command("bridge", "link", "set", "dev", f"port{number}", "isolated", "on" if is_cut else "off")

    def only_let_through(self, ports: Ports) -> None:
        """Between all machines nothing else of TCP, by rules of routing: whoever connects to another port is refused."""
        through = f"{ports.first}-{ports.last}"
        for inside in ((), *(("nsenter", f"--target={pid}", "--net") for pid in self._pids)):
            rule = (*inside, "ip", "rule", "add")
            command(*rule, "pref", "100", "ipproto", "tcp", "dport", through, "lookup", "main")
            command(*rule, "pref", "101", "ipproto", "tcp", "sport", through, "lookup", "main")
            command(*rule, "pref", "102", "to", "10.77.0.0/24", "ipproto", "tcp", "unreachable")


class OnNodes(processes.ProcessSlots):
    bind_host = DRIVER
    driver_host = DRIVER


class OnPorts(OnNodes):
    driver_ports = slot_ports = LET_THROUGH


def main(what: str, directory: Path) -> dict[str, Any]:
    with ExitStack() as stack:
        nodes = Nodes(stack)
        processes.subprocess = SimpleNamespace(Popen=nodes.popen, PIPE=subprocess.PIPE)  # type: ignore[assignment]  # of its names the module uses two
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
    status = job.wait(120)
    return {
        "failure": failures[0].summary,
        "state": status.state,
        "tls": status.tls,
        "numbers": numbers.numbers() == list(range(400_000)),
    }


def end(job: Job) -> None:
    if not job.ended:
        job.stop(drain=True, timeout_s=60)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
