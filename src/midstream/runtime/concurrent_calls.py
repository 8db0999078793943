"""Calls of users' functions outside of a slot's loop: coroutines on one asyncio thread, others on threads of their own.

However many calls complete while the loop is busy, their outcomes reach it as one mail.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import Any, Final

from midstream.engine.core.interfaces import Call, Done, Executor, Failed, FunctionCalls, Outcomes
from midstream.runtime.io_pool import IoPool

_log = logging.getLogger(__name__)
CLOSE_WAIT_S: Final = 5.0
"""How long the loop waits for the coroutine that closes a function: the process may end afterwards."""
CALL: Final = "midstream-call"
"""The name of each call's task: asyncio would make one up."""
SWITCH_S: Final = 0.0002
"""How long one of the two threads, the slot's and that of the coroutines, computes while the other one waits.

Python's default is 5 ms, by which each call would take longer: `python -m midstream_lab bench lookup --parallelism 1`
does 18,090 rows/s instead of 17,660.
"""
STUCK_MAX: Final = 256
"""How many cancelled calls of a function may go on in threads of their own before no further call is made."""


class ConcurrentCalls:
    """All calls of one slot. `open` is an `engine.core.interfaces.OpenCalls`."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop of all coroutines, on a thread that ends with the process; started by the first function."""

    def open(self, of_coroutines: bool, threads_max: int, completed: Callable[[Outcomes], None]) -> FunctionCalls:
        outcomes = _Outcomes(self._executor, completed)
        if not of_coroutines:
            return _ThreadCalls(threads_max, outcomes)
        if self._loop is None:
            sys.setswitchinterval(SWITCH_S)
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="midstream-coroutines", daemon=True).start()
        return _CoroutineCalls(self._loop, outcomes)


class _Outcomes:
    """Outcomes on their way to the loop. `add` may be called from any thread."""

    def __init__(self, executor: Executor, completed: Callable[[Outcomes], None]) -> None:
        self._executor = executor
        self._completed = completed
        self._waiting: deque[tuple[int, Done[Any] | Failed]] = deque()
        self._is_posted = False
        self.closed = False

    def add(self, number: int, outcome: Done[Any] | Failed) -> None:
        self._waiting.append((number, outcome))
        if not self._is_posted:  # two threads may both post: the second mail finds nothing
            self._is_posted = True
            self._executor.post(self._deliver)

    def _deliver(self) -> None:
        self._is_posted = False  # before the outcomes are taken: one that is added later posts again
        found = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if found and not self.closed:
            self._completed(found)


class _ThreadCalls:
    """engine.core.interfaces.FunctionCalls on threads, which are started as they are needed.

    A call that has begun cannot be interrupted. Once it is cancelled, another thread may take the place of its thread, so
    that calls after it do not wait for it, and time out without having been made.
    """

    def __init__(self, threads_max: int, outcomes: _Outcomes) -> None:
        self._pool = IoPool("midstream-calls", threads_max)
        self._outcomes = outcomes
        self._lock = threading.Lock()
        self._begun: set[int] = set()
        """The calls that have begun, and were not cancelled."""
        self._cancelled: set[int] = set()
        """The calls that were cancelled before they had begun, or have not returned since."""
        self._stuck: set[int] = set()
        """Those of the cancelled calls that have not returned since."""

    def start(self, calls: Sequence[Call]) -> None:
        for number, work in calls:
            if len(self._stuck) < STUCK_MAX:
                self._pool.submit(partial(self._call, number, work))
                continue
            reason = (
                f"the call was not made: {STUCK_MAX} calls of the function have not returned since they timed out; give the "
                "function a limit of its own, such as the timeout of its client"
            )
            self._outcomes.add(number, Failed(TimeoutError(reason)))

    def _call(self, number: int, work: Callable[[], Any]) -> None:
        with self._lock:
            if number in self._cancelled or self._outcomes.closed:
                self._cancelled.discard(number)
                return
            self._begun.add(number)
        outcome: Done[Any] | Failed
        try:
            outcome = Done(contextvars.Context().run(work))
        except BaseException as error:  # noqa: BLE001 - the outcome, good or bad, goes to the caller
            outcome = Failed(error)
        with self._lock:
            if number in self._stuck:
                self._stuck.discard(number)
                self._pool.threads_max -= 1
            self._begun.discard(number)
            self._cancelled.discard(number)
        self._outcomes.add(number, outcome)

    def cancel(self, numbers: Collection[int]) -> None:
        with self._lock:
            self._cancelled.update(numbers)
            stuck = self._begun.intersection(numbers)
            self._begun -= stuck
            self._stuck |= stuck
            self._pool.threads_max += len(stuck)

    def close(self, last: Callable[[], Any] | None = None) -> None:
        self._outcomes.closed = True
        self._pool.close(0.0)


class _CoroutineCalls:
    """engine.core.interfaces.FunctionCalls on an asyncio loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, outcomes: _Outcomes) -> None:
        self._loop = loop
        self._outcomes = outcomes
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """The calls under way, by number. Only the asyncio thread uses it."""

    def start(self, calls: Sequence[Call]) -> None:
        self._loop.call_soon_threadsafe(self._start, calls)

    def _start(self, calls: Sequence[Call]) -> None:
        for number, work in calls:
            self._tasks[number] = asyncio.Task(self._call(number, work), loop=self._loop, name=CALL)

    async def _call(self, number: int, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        outcome: Done[Any] | Failed
        try:
            outcome = Done(await work())
        except BaseException as error:  # noqa: BLE001 - the outcome, good or bad, goes to the caller
            outcome = Failed(error)
        self._tasks.pop(number, None)
        self._outcomes.add(number, outcome)

    def cancel(self, numbers: Collection[int]) -> None:
        self._loop.call_soon_threadsafe(self._cancel, numbers)

    def _cancel(self, numbers: Collection[int]) -> None:
        for number in numbers:
            task = self._tasks.pop(number, None)
            if task is not None:
                task.cancel()

    def close(self, last: Callable[[], Any] | None = None) -> None:
        self._outcomes.closed = True
        closing = asyncio.run_coroutine_threadsafe(self._close(last), self._loop)
        if last is None:
            return
        try:
            closing.result(CLOSE_WAIT_S)
        except TimeoutError:
            _log.warning("close() of a coroutine function has not ended within %g s", CLOSE_WAIT_S)

    async def _close(self, last: Callable[[], Any] | None) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if last is not None:
            try:
                await last()
            except Exception:  # noqa: BLE001 - the attempt has ended; only the log can name it
                _log.warning("close() of a coroutine function failed", exc_info=True)
