"""The event loop: order, timers, wake-ups from other threads, I/O, the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from machine import limit_s
from midstream.engine.core.interfaces import Done, Failed
from midstream.engine.worker.source_reads import READS_MAX, SourceReads
from midstream.runtime import event_loop as loop_module
from midstream.runtime.event_loop import EventLoop
from midstream.runtime.io_pool import THREADS_MAX


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop("test")
    yield loop
    loop.close()


def test_mails_run_in_order_and_those_posted_by_mails_after_them(loop: EventLoop) -> None:
    ran: list[int] = []

    def second() -> None:
        ran.append(2)
        loop.stop()

    def first() -> None:
        ran.append(1)
        loop.post(second)

    loop.post(first)
    loop.post(lambda: ran.append(3))
    loop.run()
    assert ran == [1, 3, 2]


def test_timers_fire_in_the_order_of_their_times_never_early_and_not_when_cancelled(loop: EventLoop) -> None:
    fired: list[tuple[str, float]] = []
    began_s = loop.monotonic_s()

    def note(name: str) -> None:
        fired.append((name, loop.monotonic_s() - began_s))

    def begin() -> None:
        loop.call_later(0.10, lambda: note("late"))
        loop.call_later(0.02, lambda: note("early"))
        loop.call_later(0.0, lambda: note("now"))
        loop.call_later(0.05, lambda: note("cancelled")).cancel()
        loop.call_later(0.12, loop.stop)

    loop.post(begin)
    loop.run()
    assert [name for name, _ in fired] == ["now", "early", "late"]
    assert fired[1][1] >= 0.02 and fired[2][1] >= 0.10


def test_a_timer_that_is_due_does_not_fire_if_the_mail_before_it_cancels_it(loop: EventLoop) -> None:
    fired: list[str] = []

    def first() -> None:
        fired.append("first")
        second.cancel()

    def start() -> None:
        nonlocal second  # type: ignore[misc]  # it is bound further down
        loop.call_later(0.0, first)
        second = loop.call_later(0.0, lambda: fired.append("second"))
        loop.call_later(0.05, loop.stop)

    second = loop.call_later(3600, lambda: None)
    loop.post(start)
    loop.run()
    assert fired == ["first"]


def test_cancelled_timers_do_not_pile_up(loop: EventLoop) -> None:
    def begin() -> None:
        for _ in range(20_000):
            loop.call_later(3600, lambda: None).cancel()
        loop.stop()

    loop.post(begin)
    loop.run()
    assert len(loop._timers._entries) < 3000


def test_a_jump_of_the_wall_clock_is_noticed_by_a_loop_that_sleeps(loop, monkeypatch) -> None:
    """The wall clock stands still here, but for the jump, as after a suspend: nothing else wakes the loop."""
    wall_ms = [1_000_000]
    monkeypatch.setattr(loop_module, "WALL_CLOCK_CHECK_S", 0.02)
    monkeypatch.setattr(loop, "now_ms", lambda: wall_ms[0])
    fired: list[str] = []

    def fire() -> None:
        fired.append("due")
        loop.stop()

    loop.call_at(wall_ms[0] + 3_600_000, fire)
    loop.call_at(wall_ms[0] + 7_200_000, lambda: fired.append("not due"))
    loop.call_at(wall_ms[0] + 1, lambda: fired.append("cancelled")).cancel()
    jump = threading.Timer(0.1, lambda: wall_ms.__setitem__(0, wall_ms[0] + 3_600_000))
    jump.start()
    loop.call_later(60, loop.stop)
    loop.run()
    jump.join()
    assert fired == ["due"]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_the_wall_clock_is_read_only_while_something_waits_for_it(loop, monkeypatch, is_cancelled: bool) -> None:
    waits: list[float] = []

    def select(timeout: float) -> list[Any]:
        waits.append(timeout)
        loop.stop()
        return []

    monkeypatch.setattr(loop._selector, "select", select)
    timer = loop.call_at(loop.now_ms() + 3_600_000, lambda: None)
    loop.call_later(600, lambda: None)
    if is_cancelled:
        timer.cancel()
    loop.run()
    assert (waits[0] > 500) is is_cancelled
    assert is_cancelled or waits[0] == loop_module.WALL_CLOCK_CHECK_S


def test_a_flood_of_mails_starves_neither_timers_nor_io(loop: EventLoop) -> None:
    seen: list[str] = []

    def flood() -> None:
        if len(seen) < 2:
            loop.post(flood)
        else:
            loop.stop()

    def begin() -> None:
        for _ in range(1000):
            loop.post(flood)
        loop.call_later(0.01, lambda: seen.append("timer"))
        loop.submit(lambda: 1, lambda _: seen.append("io"))

    loop.post(begin)
    loop.run()
    assert sorted(seen) == ["io", "timer"]


def test_a_mail_from_another_thread_wakes_a_sleeping_loop(loop: EventLoop) -> None:
    answers = threading.Semaphore(0)
    thread = threading.Thread(target=loop.run)
    thread.start()
    for _ in range(2000):
        loop.post(answers.release)
        assert answers.acquire(timeout=limit_s(5)), "a wake-up was lost"
    loop.stop()
    thread.join(limit_s(5))
    assert not thread.is_alive()


def test_work_reports_its_value_or_its_error_on_the_loop_thread(loop: EventLoop) -> None:
    outcomes: list[object] = []
    here = threading.get_ident()

    def done(outcome: Done[int] | Failed) -> None:
        assert threading.get_ident() == here
        outcomes.append(outcome.value if isinstance(outcome, Done) else type(outcome.error))
        if len(outcomes) == 2:
            loop.stop()

    def on_pool() -> int:
        assert threading.get_ident() != here
        return 7

    loop.post(lambda: loop.submit(on_pool, done))
    loop.post(lambda: loop.submit(lambda: 1 // 0, done))
    loop.run()
    assert sorted(map(str, outcomes)) == ["7", "<class 'ZeroDivisionError'>"]


def test_io_that_hangs_does_not_keep_the_process(loop: EventLoop) -> None:
    release = threading.Event()
    loop.post(lambda: loop.submit(lambda: release.wait(limit_s(30)), lambda _: None))
    loop.post(loop.stop)
    loop.run()
    began_s = time.monotonic()
    loop.close(io_wait_s=0.2)
    assert time.monotonic() - began_s < 2
    release.set()


def fail() -> None:
    raise ZeroDivisionError


def lack() -> None:
    raise KeyError("x")


def test_what_escapes_a_mail_ends_the_run_or_goes_to_the_fatal_handler() -> None:
    loop = EventLoop("test")
    loop.post(fail)
    with pytest.raises(ZeroDivisionError):
        loop.run()
    loop.close()
    caught: list[BaseException] = []
    guarded = EventLoop("test", fatal=caught.append)
    guarded.post(fail)
    guarded.call_later(0, lack)
    guarded.call_later(0.01, guarded.stop)
    guarded.run()
    guarded.close()
    assert [type(error) for error in caught] == [ZeroDivisionError, KeyError]


def test_work_does_not_wait_for_sources_whose_reads_block(loop: EventLoop) -> None:
    reads, release = SourceReads(loop), threading.Event()
    ended: list[object] = []
    written: list[object] = []

    def read_done(outcome: object) -> None:
        ended.append(outcome)
        if len(ended) == 40:
            loop.stop()

    def write_done(outcome: object) -> None:
        written.append(outcome)
        release.set()

    def begin() -> None:
        for _ in range(40):
            reads.submit(lambda: release.wait(60), read_done)
        loop.submit(lambda: None, write_done)

    loop.post(begin)
    loop.run()
    assert written == [Done(None)]
    assert ended == 40 * [Done(True)], "a read ended before the write, or was not made"
    assert READS_MAX <= THREADS_MAX - 8
