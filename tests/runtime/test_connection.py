"""Connections over loopback: what a stranger can do to a listener, backpressure, order, priority, and the end."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from machine import limit_s
from midstream.engine.core.errors import ClusterError, ConfigError
from midstream.engine.protocol.framing import LENGTH, UNAUTHENTICATED_FRAME_BYTES_MAX, frame
from midstream.engine.protocol.handshake import HELLO, MAGIC, VERSION, Dialer, Identity, Role
from midstream.runtime.event_loop import EventLoop
from midstream.runtime.network.connection import NOT_SENT_BYTES_MAX, PULL_BYTES_MAX, Connection, dial
from midstream.runtime.network.listener import Listener
from midstream.runtime.network.ports import Ports, listen
from midstream.runtime.network.tls import JobKeys, keys_for, tls_of
from midstream.runtime.network.transport import TcpTransport
from waiting import until

SECRET = bytes(range(32))
KEYS = {tls: keys_for(tls, "127.0.0.1", SECRET) for tls in ("off", "on")}
IDENTITY = Identity(Role.SLOT_DATA, "job", 0, 0, 1)
KIND = 0x11


class End:
    """A ConnectionEnd that sends what it is given and keeps what it gets."""

    def __init__(self) -> None:
        self.queue: deque[list[bytes | memoryview]] = deque()
        self.pulled_bytes = 0
        self.received: list[bytes] = []
        self.reasons: list[str] = []

    def pull(self, bytes_max: int) -> list[bytes | memoryview]:
        pieces: list[bytes | memoryview] = []
        size = 0
        while self.queue and size < bytes_max:
            one = self.queue.popleft()
            pieces += one
            size += sum(map(len, one))
        self.pulled_bytes += size
        return pieces

    def receive(self, frame: memoryview) -> None:
        self.received.append(bytes(frame))

    def lost(self, reason: str) -> None:
        self.reasons.append(reason)


class Loops:
    """Event loops on threads; everything that is to happen on one goes through `call`."""

    def __init__(self, keys: JobKeys) -> None:
        self.keys = keys
        self._running: list[tuple[EventLoop, threading.Thread]] = []
        self.fatal: list[BaseException] = []

    def new(self) -> EventLoop:
        loop = EventLoop("test", fatal=self.fatal.append)
        thread = threading.Thread(target=loop.run, daemon=True)
        thread.start()
        self._running.append((loop, thread))
        return loop

    def call(self, loop: EventLoop, work: Callable[[], Any]) -> Any:
        results: list[Any] = []
        done = threading.Event()

        def mail() -> None:
            try:
                results.append(work())
            finally:
                done.set()

        loop.post(mail)
        assert done.wait(limit_s(10)), "the loop is stuck"
        return results[0]

    def close(self) -> None:
        for loop, thread in self._running:
            loop.stop()
            thread.join(limit_s(10))
            assert not thread.is_alive()
            loop.close()
        assert not self.fatal, self.fatal


@pytest.fixture(params=["off", "on"], ids=["plain", "tls"])
def loops(request: pytest.FixtureRequest) -> Iterator[Loops]:
    loops = Loops(KEYS[request.param])
    yield loops
    loops.close()


class Server:
    def __init__(self, loops: Loops, **options: Any) -> None:
        self.loop = loops.new()
        self.keys = loops.keys
        self.came: list[tuple[Connection, Identity]] = []
        self.judged: list[Identity] = []
        options = {"frame_bytes_max": 2**20, "buffer_bytes": 2**16, **options}
        self.listener = Listener(self.loop, "127.0.0.1", loops.keys, self._judge, self._opened, **options)
        loops.call(self.loop, self.listener.start)

    def _judge(self, identity: Identity) -> str:
        self.judged.append(identity)
        return "" if identity.job_id == "job" else "not this job"

    def _opened(self, connection: Connection, identity: Identity) -> None:
        self.came.append((connection, identity))

    def stranger(self) -> socket.socket:
        sock = socket.create_connection((self.listener.host, self.listener.port), timeout=limit_s(10))
        sock.settimeout(10)
        return sock

    def greeted(self, dialer: Dialer) -> socket.socket:
        """A connection that has come as far as the handshake."""
        sock, tls = self.stranger(), tls_of(self.keys)
        if tls is None:
            return sock
        encrypted = tls.connect(sock)
        dialer.channel = tls.channel(encrypted)
        return encrypted


def closed_by_peer(sock: socket.socket) -> bool:
    """Whether the peer closes, whatever it sends before."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        return True
    return True


def answer(sock: socket.socket) -> memoryview:
    data = b""
    while len(data) < 4 or len(data) < 4 + LENGTH.unpack_from(data)[0]:
        piece = sock.recv(65536)
        assert piece, "closed"
        data += piece
    return memoryview(data)[4:]


# ---- strangers ---------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        os.urandom(4096),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        LENGTH.pack(0) + bytes(64),
        LENGTH.pack(2**32 - 1) + bytes(64),
        LENGTH.pack(UNAUTHENTICATED_FRAME_BYTES_MAX + 1) + bytes(64),
        b"".join(frame(HELLO, MAGIC + bytes((VERSION + 1,)) + bytes(32))),
        b"".join(frame(HELLO, MAGIC + bytes((VERSION,)) + bytes(31))),
        b"".join(frame(0x10, b"\x81\xa4type\xa8get_stat")),
    ],
    ids=["garbage", "http", "empty frame", "4 GiB frame", "frame above the limit", "version", "short nonce", "message"],
)
def test_what_is_no_handshake_is_closed_without_an_answer(loops: Loops, said: bytes) -> None:
    server = Server(loops)
    with server.stranger() as sock:
        sock.sendall(said)
        assert closed_by_peer(sock)
    until("the stranger to be forgotten", lambda: server.listener.unauthenticated == 0)
    assert not server.came and not server.judged


def test_a_handshake_that_is_played_back_proves_nothing(loops: Loops) -> None:
    server = Server(loops)
    dialer = Dialer(SECRET, IDENTITY, os.urandom(32))
    with server.greeted(dialer) as sock:
        hello = dialer.start()
        sock.sendall(hello)
        proof = dialer.receive(answer(sock))
        sock.sendall(proof)
        dialer.receive(answer(sock))
    until("the honest one", lambda: len(server.came) == 1)
    with server.greeted(dialer) as sock:
        sock.sendall(hello + proof)
        assert closed_by_peer(sock)
    assert len(server.came) == 1 and len(server.judged) == 1


def test_one_that_dribbles_bytes_is_cut_off_in_time(loops: Loops) -> None:
    server = Server(loops, handshake_timeout_s=0.4)
    began_s = time.monotonic()
    dialer = Dialer(SECRET, IDENTITY, os.urandom(32))
    with server.greeted(dialer) as sock:
        hello = dialer.start()
        with pytest.raises(OSError, match=r"reset|Broken pipe|EOF occurred"):
            for byte in hello * 100:
                sock.sendall(bytes((byte,)))
                time.sleep(0.02)
    assert time.monotonic() - began_s < 5


def test_a_thousand_idle_connections_keep_nobody_out(loops: Loops) -> None:
    server = Server(loops, unauthenticated_max=64)
    idle = []
    try:
        for _ in range(400):
            idle.append(server.stranger())
            assert server.listener.unauthenticated <= 64
        ends = connect(loops, server)
        ends[0].queue.append(frame(KIND, b"hello"))
        loops.call(ends[2], ends[1].wake)
        until("the frame", lambda: ends[3].received)
    finally:
        for sock in idle:
            sock.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux all of 127.0.0.0/8 is this machine")
def test_a_crowd_from_one_address_takes_nobody_elses_place(loops: Loops) -> None:
    server = Server(loops, unauthenticated_max=8)
    port = server.listener.port
    crowd = []
    with server.stranger() as honest:  # slow to say who it is
        try:
            for _ in range(200):
                crowd.append(socket.create_connection(("127.0.0.1", port), 10, ("127.0.0.2", 0)))
            until("the crowd to have been seen", lambda: closed_by_peer(crowd[0]))
            honest.settimeout(0.2)
            with pytest.raises(TimeoutError):  # it is waited for
                honest.recv(1)
            assert server.listener.unauthenticated <= 8
        finally:
            for sock in crowd:
                sock.close()


def test_a_port_in_use_is_a_clear_error() -> None:
    with listen("127.0.0.1") as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ClusterError, match=f"port {port} on 127.0.0.1 is in use: choose others"):
            listen("127.0.0.1", Ports(port, port))
        with listen("127.0.0.1", Ports(port, port + 20)) as other:
            assert port < other.getsockname()[1] <= port + 20


def test_ports_that_are_all_in_use_are_named_with_what_has_set_them() -> None:
    with ExitStack() as stack:
        first = stack.enter_context(listen("127.0.0.1")).getsockname()[1]
        ports = Ports(first, first + 2, "they follow from x=1; raise x")
        with contextlib.suppress(ClusterError):  # until none is left: others on this machine may have some of them
            while True:
                stack.enter_context(listen("127.0.0.1", ports))
        with pytest.raises(
            ClusterError,
            match=f"ports {first} to {first + 2} on 127.0.0.1 are all in use: they follow from x=1; raise x",
        ):
            listen("127.0.0.1", ports)


@pytest.mark.parametrize(("first", "last"), [(70_000, 70_016), (7216, 7200), (-1, 5)])
def test_what_are_no_ports_is_refused(first: int, last: int) -> None:
    with pytest.raises(ConfigError, match=f"there are no ports {first} to {last}: .*spark.blockManager.port"):
        Ports(first, last, "they follow from spark.blockManager.port")


def test_an_address_that_is_not_this_machines_is_named_with_the_port() -> None:
    with pytest.raises(ClusterError, match=r"cannot listen on 192\.0\.2\.1, port 7200 \(as set\): Cannot assign"):
        listen("192.0.2.1", Ports(7200, 7216, "as set"))


# ---- traffic -------------------------------------------------------------------


def connect(loops: Loops, server: Server) -> tuple[End, Connection, EventLoop, End]:
    """The dialer's end, connection and loop, and the acceptor's end, with frames flowing."""
    loop = loops.new()
    here, there = End(), End()
    opened: list[Connection] = []
    before = len(server.came)
    loops.call(
        loop,
        lambda: Connection(
            loop,
            dial(server.listener.host, server.listener.port),
            Dialer(SECRET, IDENTITY, os.urandom(32)),
            opened.append,
            lambda _, reason: pytest.fail(reason),
            frame_bytes_max=2**20,
            buffer_bytes=2**16,
            tls=tls_of(loops.keys),
            connecting=True,
        ),
    )
    until("both sides", lambda: opened and len(server.came) > before)
    loops.call(loop, lambda: opened[0].carry(here))
    loops.call(server.loop, lambda: server.came[-1][0].carry(there))
    return here, opened[0], loop, there


def test_frames_of_all_sizes_arrive_whole_and_in_order_both_ways(loops: Loops) -> None:
    server = Server(loops)
    here, connection, loop, there = connect(loops, server)
    bodies = [bytes((n % 251,)) * (n * 37 % 70_000) for n in range(1, 600)]
    pieces = [frame(KIND, *(memoryview(body)[i : i + 1000] for i in range(0, len(body), 1000))) for body in bodies]

    def send() -> None:
        here.queue.extend(pieces)
        connection.wake()

    def send_back() -> None:
        there.queue.extend(pieces)
        server.came[0][0].wake()

    loops.call(loop, send)
    loops.call(server.loop, send_back)
    until("all", lambda: len(here.received) == len(there.received) == len(bodies))
    assert here.received == there.received == [bytes((KIND,)) + body for body in bodies]


def test_connections_of_one_loop_share_what_they_receive_into(loops: Loops) -> None:
    server = Server(loops)
    ends = [connect(loops, server) for _ in range(8)]
    bodies = [[bytes((peer, n)) * (n * 971 % 40_000) for n in range(60)] for peer in range(len(ends))]
    for (here, connection, loop, _), of_peer in zip(ends, bodies, strict=True):
        here.queue.extend(frame(KIND, body) for body in of_peer)
        loops.call(loop, connection.wake)
    until("all", lambda: all(len(there.received) == 60 for _, _, _, there in ends))
    for (_, _, _, there), of_peer in zip(ends, bodies, strict=True):
        assert there.received == [bytes((KIND,)) + body for body in of_peer]

    def own_bytes() -> int:
        return sum(connection._decoder.buffer_bytes for connection, _ in server.came)

    assert loops.call(server.loop, own_bytes) == 0


def test_a_peer_that_does_not_read_holds_back_the_sender_and_a_priority_frame_overtakes(loops: Loops) -> None:
    server = Server(loops)
    here, connection, loop, there = connect(loops, server)
    stop, go = threading.Event(), threading.Event()

    def block() -> None:
        stop.set()
        go.wait(limit_s(20))

    server.loop.post(block)
    assert stop.wait(limit_s(10))
    count, body = 4000, bytes(32 * 2**10)

    def send() -> None:
        here.queue.extend(frame(KIND, body) for _ in range(count))
        connection.wake()

    loops.call(loop, send)
    settled = [0, 0.0]

    def is_settled() -> bool:
        if here.pulled_bytes != settled[0]:
            settled[:] = [here.pulled_bytes, time.monotonic()]
        return time.monotonic() - settled[1] > 0.3

    until("the sender to be held back", is_settled)
    # what left the end: one pull, and what both kernels buffer (their limit is some megabytes)
    assert here.pulled_bytes < 16 * 2**20, here.pulled_bytes
    assert len(here.queue) > count / 2
    loops.call(loop, lambda: here.queue.appendleft(frame(KIND, b"urgent")))
    go.set()
    until("all", lambda: len(there.received) == count + 1)
    place = there.received.index(bytes((KIND,)) + b"urgent")
    assert place * len(body) < 16 * 2**20 + NOT_SENT_BYTES_MAX + PULL_BYTES_MAX


def test_an_authenticated_peer_that_breaks_the_rules_is_cut_off_and_the_end_is_told_once(loops: Loops) -> None:
    server = Server(loops)
    here, connection, loop, there = connect(loops, server)

    def send() -> None:
        here.queue.append([LENGTH.pack(2**20 + 1)])
        connection.wake()

    loops.call(loop, send)
    until("the end", lambda: there.reasons)
    assert "a frame of 1048577 bytes, where 1 to 1048576 are allowed" in there.reasons[0]
    until("the other end", lambda: here.reasons)
    assert len(here.reasons) == len(there.reasons) == 1


def test_finish_sends_everything_before_it_closes(loops: Loops) -> None:
    server = Server(loops)
    here, connection, loop, there = connect(loops, server)
    finished = threading.Event()

    def send() -> None:
        here.queue.extend(frame(KIND, bytes(100_000)) for _ in range(100))
        connection.finish(finished.set)

    loops.call(loop, send)
    assert finished.wait(limit_s(10))
    until("the other end", lambda: there.reasons)
    assert len(there.received) == 100 and not here.reasons


# ---- the transport between slots ----------------------------------------------------


class Slots:
    def __init__(self, loops: Loops, count: int, **options: Any) -> None:
        self.loops = loops
        self.of = []
        for slot in range(count):
            loop = loops.new()
            transport = loops.call(loop, partial(TcpTransport, loop, loops.keys, "job", "127.0.0.1", **options))
            transport.slot = slot
            self.of.append((loop, transport))

    def open(self, slot: int, peer: int, attempt: int = 0) -> tuple[End, Any]:
        end = End()
        loop, transport = self.of[slot]
        other = self.of[peer][1]
        return end, self.loops.call(loop, lambda: transport.open(peer, other.host, other.port, attempt, end))

    def send(self, slot: int, end: End, link: Any, body: bytes) -> None:
        def send() -> None:
            end.queue.append(frame(KIND, body))
            link.wake()

        self.loops.call(self.of[slot][0], send)

    def close(self) -> None:
        for loop, transport in self.of:
            self.loops.call(loop, transport.close)


def test_slots_reach_each_other_whoever_opens_first(loops: Loops) -> None:
    slots = Slots(loops, 3)
    first = slots.open(0, 1)
    second = slots.open(1, 0)
    late = slots.open(2, 1)  # the higher one opens first: it waits for the lower one
    early = slots.open(1, 2)
    for slot, (end, link), (other, _) in ((0, first, second), (1, second, first), (2, late, early)):
        slots.send(slot, end, link, b"from %d" % slot)
        until("the frame", lambda other=other: other.received)  # type: ignore[misc]  # mypy infers no lambda with defaults
        assert other.received == [bytes((KIND,)) + b"from %d" % slot]
    slots.close()


def test_a_connection_of_an_older_attempt_is_refused_and_a_newer_one_waits(loops: Loops) -> None:
    slots = Slots(loops, 2)
    stale, _ = slots.open(0, 1, attempt=3)
    until("the connection to be held", lambda: slots.of[1][1].held == 1)
    newer, _ = slots.open(1, 0, attempt=4)
    until("the older one to hear of it", lambda: stale.reasons)
    assert slots.of[1][1].held == 0
    matching, link = slots.open(0, 1, attempt=4)
    slots.send(0, matching, link, b"now")
    until("the frame", lambda: newer.received)
    assert not newer.reasons
    slots.close()


def test_a_zombie_of_an_older_attempt_is_told_that_it_is_over(loops: Loops) -> None:
    slots = Slots(loops, 2)
    slots.open(1, 0, attempt=7)
    zombie, _ = slots.open(0, 1, attempt=6)
    reason = until("the refusal", lambda: zombie.reasons)[0]
    assert "attempt 6 is over; this is attempt 7" in reason
    slots.close()


def test_a_peer_that_never_comes_is_reported_in_time(loops: Loops) -> None:
    slots = Slots(loops, 2, open_timeout_s=0.3)
    end, _ = slots.open(1, 0)
    assert "slot 0 did not connect in time" in until("the report", lambda: end.reasons)[0]
    slots.close()


def test_slots_that_are_too_busy_to_prove_themselves_meet_later(loops: Loops) -> None:
    slots = Slots(loops, 2, handshake_timeout_s=0.2)
    there, _ = slots.open(1, 0)
    loop, transport = slots.of[0]
    here = End()

    def open_and_be_busy() -> None:
        """Longer than the other side waits for the proof."""
        other = slots.of[1][1]
        transport.open(1, other.host, other.port, 0, here)
        until("the other side to hang up", lambda: slots.of[1][1]._listener._turned_away)

    loops.call(loop, open_and_be_busy)
    loops.call(loop, transport._peers[1, 0].wake)
    until("the connection", lambda: slots.of[1][1]._peers[0, 0].connection)
    assert not here.reasons and not there.reasons
    slots.close()


def test_another_thread_may_send_whole_frames_while_the_loop_is_busy(loops: Loops) -> None:
    slots = Slots(loops, 2)
    here, link = slots.open(0, 1)
    there, _ = slots.open(1, 0)
    slots.send(0, here, link, b"first")
    until("the frame", lambda: there.received)
    loop = slots.of[0][0]
    connection = link.connection
    loops.call(loop, connection.share)
    stop, sent = threading.Event(), []

    def aside() -> None:
        while not stop.is_set():
            connection.send_aside(frame(KIND, b"aside"))
            sent.append(1)

    thread = threading.Thread(target=aside)
    thread.start()
    for _ in range(50):
        slots.send(0, here, link, bytes(100_000))
    until("all frames of the loop", lambda: sum(len(body) == 100_001 for body in there.received) == 50)
    stop.set()
    thread.join(limit_s(10))
    assert {bytes(body[1:]) for body in there.received} <= {b"first", b"aside", bytes(100_000)}, "none is torn"
    assert sent and not here.reasons and not there.reasons
    slots.close()


def test_what_is_said_in_the_midst_of_sending_comes_behind_it(loops: Loops) -> None:
    """By a signal handler or a `__del__` that prints: it may come between any two instructions of the loop's."""
    server = Server(loops)
    ours, connection, loop, theirs = connect(loops, server)
    pull = ours.pull

    def interrupted(bytes_max: int) -> list[bytes | memoryview]:
        pieces = pull(bytes_max)
        ours.pull = pull  # type: ignore[method-assign]
        ours.queue.append(frame(KIND, b"said meanwhile"))
        connection.wake()
        connection.send_inside()
        return pieces

    def send() -> None:
        connection.share()
        ours.pull = interrupted  # type: ignore[method-assign]
        ours.queue.append(frame(KIND, b"first"))
        connection.wake()

    loops.call(loop, send)
    until("both", lambda: len(theirs.received) == 2)
    assert [body[1:] for body in theirs.received] == [b"first", b"said meanwhile"]


def test_a_link_that_is_closed_is_told_nothing_and_its_peer_is(loops: Loops) -> None:
    slots = Slots(loops, 2)
    here, link = slots.open(0, 1)
    there, _ = slots.open(1, 0)
    slots.send(0, here, link, b"x")
    until("the frame", lambda: there.received)
    loops.call(slots.of[0][0], link.close)
    until("the peer to hear of it", lambda: there.reasons)
    assert not here.reasons
    slots.close()
