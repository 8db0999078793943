"""Calls outside of a slot's loop: concurrent, with their outcomes on the loop, and none after the end."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from midstream.engine.core.interfaces import Done, Failed, FunctionCalls, Outcomes
from midstream.inprocess.virtual_loop import VirtualLoop
from midstream.runtime import concurrent_calls
from midstream.runtime.calls_in_turn import CallsInTurn
from midstream.runtime.concurrent_calls import ConcurrentCalls
from midstream.runtime.event_loop import EventLoop
from waiting import until


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    made = EventLoop()
    yield made
    made.close()


class Collected:
    """The outcomes, by number, until there are as many as expected."""

    def __init__(self, loop: EventLoop, expected: int) -> None:
        self._loop = loop
        self._expected = expected
        self.found: dict[int, Done[Any] | Failed] = {}
        self.mails = 0
        self.threads: set[int] = set()

    def __call__(self, outcomes: Outcomes) -> None:
        self.mails += 1
        self.threads.add(threading.get_ident())
        self.found.update(outcomes)
        if len(self.found) >= self._expected:
            self._loop.stop()


def value(outcome: Done[Any] | Failed) -> Any:
    assert isinstance(outcome, Done), outcome
    return outcome.value


def test_coroutines_run_concurrently_and_their_outcomes_come_to_the_loop(loop: EventLoop) -> None:
    collected = Collected(loop, 501)
    calls = ConcurrentCalls(loop).open(True, 500, collected)
    under_way = most = 0

    async def call(number: int) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.02)
        under_way -= 1
        return number * 2

    async def fails() -> None:
        raise OSError("no answer")

    loop.post(lambda: calls.start([*((n, lambda n=n: call(n)) for n in range(500)), (500, fails)]))
    loop.run()
    assert most == 500
    failed = collected.found.pop(500)
    assert isinstance(failed, Failed) and isinstance(failed.error, OSError)
    assert {number: value(outcome) for number, outcome in collected.found.items()} == {n: n * 2 for n in range(500)}
    assert collected.threads == {threading.get_ident()}
    assert collected.mails < 501, "completions come together"


def test_blocking_functions_run_in_as_many_threads_as_there_may_be_calls(loop: EventLoop) -> None:
    collected = Collected(loop, 8)
    calls = ConcurrentCalls(loop).open(False, 8, collected)
    barrier = threading.Barrier(8, timeout=60)  # each waits for all others
    loop.post(lambda: calls.start([(n, barrier.wait) for n in range(8)]))
    loop.run()
    assert sorted(value(outcome) for outcome in collected.found.values()) == list(range(8))


def test_a_coroutine_that_is_cancelled_ends(loop: EventLoop) -> None:
    collected = Collected(loop, 1)
    calls = ConcurrentCalls(loop).open(True, 1, collected)
    begun = threading.Event()

    async def call() -> None:
        begun.set()
        await asyncio.sleep(3600)

    def begin() -> None:
        calls.start([(1, call)])
        assert begun.wait(60)
        calls.cancel([1])

    loop.post(begin)
    loop.run()
    failed = collected.found[1]
    assert isinstance(failed, Failed) and isinstance(failed.error, asyncio.CancelledError)


def test_the_end_cancels_coroutines_and_then_closes_the_function(loop: EventLoop) -> None:
    collected = Collected(loop, 1)
    calls = ConcurrentCalls(loop).open(True, 1, collected)
    begun = threading.Event()
    events: list[str] = []

    async def call() -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            events.append("cancelled")

    async def last() -> None:
        await asyncio.sleep(0.05)
        events.append("closed")

    calls.start([(1, call)])
    assert begun.wait(60)
    calls.close(last)
    assert events == ["cancelled", "closed"]
    loop.stop()
    loop.run()
    assert collected.found == {}


def test_the_end_waits_for_no_thread(loop: EventLoop) -> None:
    collected = Collected(loop, 1)
    calls = ConcurrentCalls(loop).open(False, 1, collected)
    begun, ends, ran = threading.Event(), threading.Event(), []

    def call() -> None:
        begun.set()
        ends.wait(60)

    calls.start([(1, call), (2, lambda: ran.append(2))])
    assert begun.wait(60)
    calls.close()
    ends.set()
    loop.stop()
    loop.run()
    assert collected.found == {} and ran == []


def test_calls_that_never_return_take_no_thread_from_the_others(
    loop: EventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrent_calls, "STUCK_MAX", 4)
    collected = Collected(loop, 2)
    calls = ConcurrentCalls(loop).open(False, 2, collected)
    begun, ends = threading.Semaphore(0), threading.Event()

    def hang() -> None:
        begun.release()
        ends.wait(60)

    def called(*numbers: int) -> dict[int, Done[Any] | Failed]:
        collected.found.clear()
        loop.post(lambda: calls.start([(number, lambda: "made") for number in numbers]))
        while not collected.found.keys() >= set(numbers):
            loop.run()  # the outcomes of those that hung may come first
        return {number: collected.found[number] for number in numbers}

    for first in (10, 20):  # both threads, and then those that have taken their place
        calls.start([(first, hang), (first + 1, hang)])
        assert all(begun.acquire(timeout=60) for _ in range(2))
        calls.cancel([first, first + 1])
        if first == 10:
            assert [value(outcome) for outcome in called(1, 2).values()] == ["made", "made"]
    for outcome in called(3, 4).values():
        assert isinstance(outcome, Failed) and "have not returned since they timed out" in str(outcome.error)
    ends.set()
    until("the return of all that hung", lambda: not calls._stuck)  # type: ignore[attr-defined]
    assert [value(outcome) for outcome in called(5, 6).values()] == ["made", "made"]


def test_calls_on_threads_do_not_share_their_context(loop: EventLoop) -> None:
    seen = contextvars.ContextVar("seen", default=0)
    collected = Collected(loop, 20)
    calls = ConcurrentCalls(loop).open(False, 1, collected)

    def count() -> int:
        seen.set(seen.get() + 1)
        return seen.get()

    loop.post(lambda: calls.start([(n, count) for n in range(20)]))
    loop.run()
    assert {value(outcome) for outcome in collected.found.values()} == {1}


def in_turn(of_coroutines: bool) -> tuple[VirtualLoop, list[tuple[int, Any]], FunctionCalls]:
    loop = VirtualLoop(0)
    found: list[tuple[int, Any]] = []

    def completed(outcomes: Outcomes) -> None:
        found.extend(
            (number, outcome.value if isinstance(outcome, Done) else type(outcome.error))
            for number, outcome in outcomes
        )

    return loop, found, CallsInTurn(loop, of_coroutines, 10, completed)


@pytest.mark.parametrize("of_coroutines", [True, False])
def test_in_a_test_calls_complete_in_the_order_in_which_they_began(of_coroutines: bool) -> None:
    loop, found, calls = in_turn(of_coroutines)

    async def answer(n: int) -> int:
        await asyncio.sleep((5 - n) * 0.001)
        return 10 // n

    def work(n: int) -> Callable[[], Any]:
        return lambda: answer(n) if of_coroutines else 10 // n

    calls.start([(n, work(n)) for n in (5, 0, 2)])
    assert found == []
    loop.run()
    assert found == [(5, 2), (0, ZeroDivisionError), (2, 5)]
    calls.start([(1, work(1))])
    calls.close()
    loop.run()
    assert len(found) == 3


def test_in_a_test_within_an_asyncio_loop_coroutines_run_too() -> None:
    async def outer() -> list[tuple[int, Any]]:
        loop, found, calls = in_turn(True)

        async def answer() -> int:
            return 7

        calls.start([(1, answer)])
        loop.run()
        calls.close(answer)
        return found

    assert asyncio.run(outer()) == [(1, 7)]


def test_in_a_test_what_close_raises_is_raised() -> None:
    _, _, calls = in_turn(True)

    async def last() -> None:
        raise OSError("the session is gone")

    with pytest.raises(OSError, match="the session is gone"):
        calls.close(last)
