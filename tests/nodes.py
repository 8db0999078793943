"""Machines of a test's own, as far as the network is concerned. For a process in a new network namespace.

this process: 10.77.0.1, on a bridge
node 0: 10.77.0.10, node 1: 10.77.0.11, each in a namespace of its own, on a port of that bridge
"""

from __future__ import annotations

import itertools
import subprocess
from contextlib import ExitStack
from typing import Any

from midstream.runtime.network.ports import Ports

DRIVER = "10.77.0.1"


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

    def on(self, number: int, words: list[str], **named: Any) -> subprocess.Popen[bytes]:
        """A process on one of them."""
        return subprocess.Popen(["nsenter", f"--target={self._pids[number]}", "--net", *words], **named)

    def popen(self, words: list[str], **named: Any) -> subprocess.Popen[bytes]:
        """In place of `subprocess.Popen`: on one node after the other."""
        return subprocess.Popen(["nsenter", f"--target={next(self._turns)}", "--net", *words], **named)

    def cut(self, is_cut: bool) -> None:
        for number in range(2):
            command("bridge", "link", "set", "dev", f"port{number}", "isolated", "on" if is_cut else "off")

    def only_let_through(self, ports: Ports) -> None:
        """Lets only these TCP ports through between the machines, by routing rules; connections to others are refused."""
        through = f"{ports.first}-{ports.last}"
        for inside in ((), *(("nsenter", f"--target={pid}", "--net") for pid in self._pids)):
            rule = (*inside, "ip", "rule", "add")
            command(*rule, "pref", "100", "ipproto", "tcp", "dport", through, "lookup", "main")
            command(*rule, "pref", "101", "ipproto", "tcp", "sport", through, "lookup", "main")
            command(*rule, "pref", "102", "to", "10.77.0.0/24", "ipproto", "tcp", "unreachable")
