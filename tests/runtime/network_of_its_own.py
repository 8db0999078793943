"""A job whose slots are on machines of their own, as far as the network is concerned. Run inside a new network namespace.

    driver, this process: 10.77.0.1, on a bridge
    node 0: 10.77.0.10, node 1: 10.77.0.11, each in a namespace of its own, on a port of that bridge

Prints one line of JSON. Everything ends with this process.
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
from waiting import until

DRIVER = "10.77.0.1"
HEARTBEAT_TIMEOUT_S = 4.0


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


class OnNodes(processes.ProcessSlots):
    bind_host = DRIVER
    driver_host = DRIVER


def main(directory: Path) -> dict[str, Any]:
    with ExitStack() as stack:
        nodes = Nodes(stack)
        processes.subprocess = SimpleNamespace(Popen=nodes.popen, PIPE=subprocess.PIPE)  # type: ignore[assignment]  # of its names the module uses two
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
            "numbers": numbers.numbers() == list(range(400_000)),
        }


def end(job: Job) -> None:
    if not job.ended:
        job.stop(drain=True, timeout_s=60)


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
