"""What the kernel knows of packets that nobody answers."""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Iterator

import pytest

from midstream.runtime.network.tcp_stall import TcpStall

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is Linux's")


class Kernel:
    """A socket of which nothing is asked but its TCP_INFO."""

    def __init__(self) -> None:
        self.probes = self.unacknowledged = self.sent_ms = self.received_ms = 0

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option, size) == (socket.IPPROTO_TCP, socket.TCP_INFO, 60)
        head = struct.pack("=8B", 1, 0, 0, self.probes, 0, 0, 0, 0)
        words = [0] * 13
        words[4], words[9], words[12] = self.unacknowledged, self.sent_ms, self.received_ms
        return head + struct.pack("=13I", *words)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            yield near, far


def test_nothing_is_overdue_while_nothing_waits() -> None:
    kernel = Kernel()
    kernel.received_ms = kernel.sent_ms = 3_600_000
    assert TcpStall(kernel).overdue_s(5_000.0) == 0  # type: ignore[arg-type]


def test_what_is_sent_after_a_long_silence_is_given_its_time() -> None:
    kernel = Kernel()
    unanswered = TcpStall(kernel)  # type: ignore[arg-type]
    kernel.unacknowledged, kernel.received_ms, kernel.sent_ms = 3, 3_600_000, 10
    assert unanswered.overdue_s(5_000.0) == 0
    kernel.received_ms, kernel.sent_ms = 3_604_000, 1_000
    assert unanswered.overdue_s(5_004.0) == 4


def test_an_answer_begins_the_time_anew() -> None:
    kernel = Kernel()
    unanswered = TcpStall(kernel)  # type: ignore[arg-type]
    kernel.unacknowledged, kernel.received_ms, kernel.sent_ms = 3, 20, 10
    assert unanswered.overdue_s(100.0) == 0
    kernel.received_ms, kernel.sent_ms = 500, 10  # heard at 109.5
    assert unanswered.overdue_s(110.0) == 0
    kernel.received_ms, kernel.sent_ms = 20_500, 900
    assert unanswered.overdue_s(130.0) == 20
    kernel.unacknowledged = 0
    assert unanswered.overdue_s(131.0) == 0


@pytest.mark.parametrize("ms_until_the_answer", [-2, 1, 40, 3_900])
def test_two_things_on_their_way_at_two_moments_far_apart_are_not_one_that_waits(ms_until_the_answer: int) -> None:
    """The slot was inside a long call between the two. -2: an answer in the same tick of the kernel's clock."""
    kernel = Kernel()
    unanswered = TcpStall(kernel)  # type: ignore[arg-type]
    kernel.unacknowledged, kernel.received_ms, kernel.sent_ms = 1, 30, 1
    assert unanswered.overdue_s(100.0) == 0
    kernel.received_ms, kernel.sent_ms = 4_000 - ms_until_the_answer, 1
    assert unanswered.overdue_s(104.0) == 0
    kernel.received_ms, kernel.sent_ms = 5_000 - ms_until_the_answer, 600
    assert unanswered.overdue_s(105.0) == 1, "that one is never answered"


def test_a_peer_that_answers_and_has_no_room_is_not_overdue() -> None:
    kernel = Kernel()
    unanswered = TcpStall(kernel)  # type: ignore[arg-type]
    kernel.unacknowledged = 2
    for second in range(0, 200, 5):  # the kernel tries again every minute, and is answered each time
        kernel.sent_ms = 1_000 * (second % 60) + 1
        kernel.received_ms = 1_000 * (second % 60)
        assert unanswered.overdue_s(float(second)) == 0


def test_probes_that_are_not_answered_are_overdue() -> None:
    kernel = Kernel()
    unanswered = TcpStall(kernel)  # type: ignore[arg-type]
    kernel.probes, kernel.received_ms, kernel.sent_ms = 1, 100, 2_000
    assert unanswered.overdue_s(10.0) == 0
    kernel.probes, kernel.received_ms, kernel.sent_ms = 4, 10_100, 12_000
    assert unanswered.overdue_s(20.0) == 10


def test_a_real_peer_that_reads_nothing_is_not_overdue(pair: tuple[socket.socket, socket.socket]) -> None:
    near, _ = pair
    near.setblocking(False)
    unanswered = TcpStall(near)
    began_s = time.monotonic()
    sent = 0
    longest_s = 0.0
    while time.monotonic() - began_s < 4:
        try:
            sent += near.send(bytes(65_536))
        except BlockingIOError:
            time.sleep(0.02)
        longest_s = max(longest_s, unanswered.overdue_s(time.monotonic()))
    assert sent > 65_536
    assert longest_s < 1
