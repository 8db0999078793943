"""The one thread on which all protocol code of a process runs: mails, timers and sockets, in turn.

A round is: a bounded number of mails (and a bounded time), then the sockets that are ready, then the timers that are
due. So no source of work starves another, and what has arrived on a socket is processed before a timer that depends on
it (a peer's heartbeat before its timeout).

`post` is the hot path: an append to a deque and one check of a flag. The loop announces that it is about to sleep
*before* it checks for mails a last time, and a poster checks whether the loop sleeps *after* it has appended: whichever
comes second sees the other, so no wake-up is lost, and one is sent only to a loop that really sleeps.
"""

from __future__ import annotations

import heapq
import logging
import math
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from midstream.engine.core.interfaces import WALL_CLOCK_CHECK_S, Done, Failed, Mail
from midstream.runtime.core_share import CoreShare, Schedule
from midstream.runtime.io_pool import THREADS_MAX, IoPool

T = TypeVar("T")
Ready = Callable[[int], None]
"""Called with the selector's event mask."""

MAILS_PER_ROUND_MAX: Final = 256
ROUND_S_MAX: Final = 0.001
"""The time after which sockets are checked. A step of a slow function takes longer; then they are checked after each
step.
"""
IO_CLOSE_WAIT_S: Final = 5.0
TIMERS_SWEEP_MIN: Final = 1024

READ: Final = selectors.EVENT_READ
WRITE: Final = selectors.EVENT_WRITE

_log = logging.getLogger(__name__)


class LoopTimer:
    """The result of `call_later` and `call_at`."""

    __slots__ = ("mail",)

    def __init__(self, mail: Mail) -> None:
        self.mail: Mail | None = mail

    def cancel(self) -> None:
        self.mail = None

    def fire(self) -> None:
        """Run the mail unless an earlier mail has cancelled it since it became due."""
        mail, self.mail = self.mail, None
        if mail is not None:
            mail()


class _TimerHeap:
    """Timers by the time at which they are due, on one clock. Cancelled ones are removed from time to time."""

    __slots__ = ("_count", "_entries", "_sweep_at")

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, LoopTimer]] = []
        self._count = 0
        self._sweep_at = TIMERS_SWEEP_MIN

    @property
    def first_due(self) -> float | None:
        """Return when the next timer is due; None if none is set."""
        while self._entries and self._entries[0][2].mail is None:
            heapq.heappop(self._entries)
        return self._entries[0][0] if self._entries else None

    def add(self, due: float, mail: Mail) -> LoopTimer:
        timer = LoopTimer(mail)
        self._count += 1
        if len(self._entries) >= self._sweep_at:
            self._entries = [entry for entry in self._entries if entry[2].mail is not None]
            heapq.heapify(self._entries)
            self._sweep_at = max(TIMERS_SWEEP_MIN, 2 * len(self._entries))
        heapq.heappush(self._entries, (due, self._count, timer))
        return timer

    def post_due(self, now: float, mails: deque[Mail]) -> None:
        entries = self._entries
        while entries and (entries[0][2].mail is None or entries[0][0] <= now):
            timer = heapq.heappop(entries)[2]
            if timer.mail is not None:
                mails.append(timer.fire)

    def clear(self) -> None:
        self._entries.clear()


class EventLoop:
    """The Clock and Executor (see engine.core.interfaces) of one process.

    `fatal` receives, on the loop thread, what escapes a mail, a timer or a socket callback; the loop continues until
    `stop` is called. Without `fatal`, or if it raises, `run` raises.
    """

    def __init__(
        self,
        name: str = "midstream",
        fatal: Callable[[BaseException], None] | None = None,
        io_threads_max: int = THREADS_MAX,
    ) -> None:
        self.busy_since_s = math.inf
        """The start of the current mail or socket callback, on the monotonic clock; infinite while the loop sleeps.

        Other threads may read it.
        """
        self._mails: deque[Mail] = deque()
        self._asleep = False
        self._timers = _TimerHeap()
        """By the monotonic clock, in seconds."""
        self._wall_timers = _TimerHeap()
        """By the wall clock, in milliseconds. It may jump, so while there are any it is read at least every
        `WALL_CLOCK_CHECK_S`.
        """
        self._fatal = fatal
        self._pool = IoPool(name, io_threads_max)
        self._schedule = Schedule()
        self._share = CoreShare(time.monotonic, self._schedule.read)
        self._receive_buffer = bytearray()
        self._stopping = False
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_in, READ, self._woken)

    # ---- Clock

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        return time.monotonic()

    stopwatch_s = monotonic_s

    def processor_s(self) -> float:
        return time.thread_time()

    def own_core_s(self) -> float:
        return self._share.own_core_s()

    @property
    def core_share(self) -> float:
        return self._share.share

    # ---- Executor

    def post(self, mail: Mail) -> None:
        self._mails.append(mail)
        if self._asleep:
            self._wake()

    def post_first(self, mail: Mail) -> None:
        """Like `post`, but before the mails already posted. Loop thread only."""
        self._mails.appendleft(mail)

    def call_later(self, delay_s: float, mail: Mail) -> LoopTimer:
        return self._timers.add(time.monotonic() + delay_s, mail)

    def call_at(self, time_ms: int, mail: Mail) -> LoopTimer:
        return self._wall_timers.add(time_ms, mail)

    def submit(self, work: Callable[[], T], done: Callable[[Done[T] | Failed], None]) -> None:
        self._pool.submit(partial(self._do, work, done))

    # ---- sockets (loop thread only)

    def watch(self, sock: socket.socket, events: int, ready: Ready) -> None:
        """Call `ready` whenever `sock` is ready for one of `events`, replacing an earlier registration.

        A call that is already due may still follow `unwatch`, or be for the earlier `events`.
        """
        try:
            self._selector.modify(sock, events, ready)
        except KeyError:
            self._selector.register(sock, events, ready)

    def unwatch(self, sock: socket.socket) -> None:
        """Stop watching; does nothing if the socket was not watched. Must be called before the socket is closed."""
        try:
            self._selector.unregister(sock)
        except KeyError:
            return

    def receive_buffer(self, size_bytes: int) -> bytearray:
        """Return the buffer shared by all connections of this loop, of at least that size: they receive one after the
        other.
        """
        if len(self._receive_buffer) < size_bytes:
            self._receive_buffer = bytearray(size_bytes)
        return self._receive_buffer

    # ---- life

    def run(self) -> None:
        """Run on the calling thread until `stop`. Mails posted before `stop` are still run."""
        assert not self._closed
        mails, selector = self._mails, self._selector
        while True:
            now_s = self.busy_since_s = time.monotonic()
            round_end_s = now_s + ROUND_S_MAX
            for _ in range(MAILS_PER_ROUND_MAX):
                if not mails:
                    break
                mail = mails.popleft()
                try:
                    mail()
                except BaseException as error:  # noqa: BLE001 - decided by the fatal handler
                    self._escaped(error)
                now_s = self.busy_since_s = time.monotonic()
                if now_s >= round_end_s:
                    break
            if self._stopping and not mails:
                return
            timeout_s = self._timeout_s()
            self._asleep = True
            if mails:
                self._asleep = False
                timeout_s = 0.0
            self.busy_since_s = math.inf
            ready = selector.select(timeout_s)
            self._asleep = False
            if ready:
                self.busy_since_s = time.monotonic()
            for key, mask in ready:
                try:
                    key.data(mask)
                except BaseException as error:  # noqa: BLE001 - decided by the fatal handler
                    self._escaped(error)
            if timeout_s is not None:
                self._timers.post_due(time.monotonic(), mails)
                self._wall_timers.post_due(self.now_ms(), mails)

    def stop(self) -> None:
        """End `run` once the mails posted so far are done. Callable from any thread."""
        self.post(self._stop)

    def close(self, io_wait_s: float = IO_CLOSE_WAIT_S) -> None:
        """End the I/O threads and close what the loop has opened, after `run` has ended. Later posts do nothing."""
        if self._closed:
            return
        self._closed = True
        self._schedule.close()
        if not self._pool.close(io_wait_s):
            _log.warning("I/O that began before the end still hangs after %.0f s; it is abandoned", io_wait_s)
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()
        self._mails.clear()
        self._timers.clear()
        self._wall_timers.clear()

    # ---- inside

    def _timeout_s(self) -> float | None:
        """Return how long the loop may sleep; None if no timer is set."""
        due_s, due_ms = self._timers.first_due, self._wall_timers.first_due
        timeout_s = None if due_s is None else max(0.0, due_s - time.monotonic())
        if due_ms is None:
            return timeout_s
        wait_s = max(0.0, min((due_ms - self.now_ms()) / 1000, WALL_CLOCK_CHECK_S))
        return wait_s if timeout_s is None else min(timeout_s, wait_s)

    def _stop(self) -> None:
        self._stopping = True

    def _do(self, work: Callable[[], T], done: Callable[[Done[T] | Failed], None]) -> None:
        """Run work on an I/O thread; its outcome, success or failure, is posted as a mail."""
        outcome: Done[T] | Failed
        try:
            outcome = Done(work())
        except BaseException as error:  # noqa: BLE001 - reported as the outcome
            outcome = Failed(error)
        if not self._closed:
            self.post(partial(done, outcome))

    def _wake(self) -> None:
        self._asleep = False
        try:
            self._wake_out.send(b"\0")
        except BlockingIOError:
            return  # enough wake-ups are on their way
        except OSError:
            if not self._closed:
                raise

    def _woken(self, _mask: int) -> None:
        try:
            while self._wake_in.recv(4096):
                pass
        except BlockingIOError:
            return

    def _escaped(self, error: BaseException) -> None:
        if self._fatal is None:
            raise error
        self._fatal(error)
