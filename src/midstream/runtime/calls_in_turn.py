"""Calls of users' functions where the executor decides when each completes: in the simulator, and in the calling thread.

The same calls complete in the same order in each run. Coroutines that are started together run concurrently, so that a
test of 1,000 rows does not wait 1,000 times.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from midstream.engine.core.interfaces import Call, Done, Executor, Failed, Outcomes


class CallsInTurn:
    """engine.core.interfaces.FunctionCalls of one function."""

    def __init__(
        self, executor: Executor, of_coroutines: bool, threads_max: int, completed: Callable[[Outcomes], None]
    ) -> None:
        self._executor = executor
        self._loop = asyncio.new_event_loop() if of_coroutines else None
        self._completed = completed
        self._closed = False

    def start(self, calls: Sequence[Call]) -> None:
        if self._loop is not None:
            self._executor.submit(lambda: self._run([work for _, work in calls]), self._done_with(calls))
            return
        for number, work in calls:
            self._executor.submit(work, lambda outcome, number=number: self._deliver([(number, outcome)]))  # type: ignore[misc]

    def cancel(self, numbers: Collection[int]) -> None:
        """Do nothing: a call takes no time of its own."""

    def close(self, last: Callable[[], Any] | None = None) -> None:
        self._closed = True
        loop, self._loop = self._loop, None
        if loop is None:
            return
        if last is not None:
            _complete(loop, last())
        loop.close()

    def _done_with(self, calls: Sequence[Call]) -> Callable[[Done[list[Done[Any] | Failed]] | Failed], None]:
        def done(outcome: Done[list[Done[Any] | Failed]] | Failed) -> None:
            if self._closed:
                return
            found = [outcome] * len(calls) if isinstance(outcome, Failed) else outcome.value
            self._deliver([(number, each) for (number, _), each in zip(calls, found, strict=True)])

        return done

    def _deliver(self, outcomes: Outcomes) -> None:
        if not self._closed:
            self._completed(outcomes)

    def _run(self, works: Sequence[Callable[[], Any]]) -> list[Done[Any] | Failed]:
        if self._loop is None:
            return []
        found: list[Done[Any] | Failed] = _complete(self._loop, _all(works))
        return found


async def _all(works: Sequence[Callable[[], Any]]) -> list[Done[Any] | Failed]:
    return await asyncio.gather(*map(_outcome, works))


async def _outcome(work: Callable[[], Any]) -> Done[Any] | Failed:
    try:
        return Done(await work())
    except BaseException as error:  # noqa: BLE001 - the outcome, good or bad, goes to the caller
        return Failed(error)


def _complete(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end. It has a thread because the calling thread may be in an asyncio loop already."""
    found: list[Done[Any] | Failed] = []
    thread = threading.Thread(target=lambda: found.append(loop.run_until_complete(_outcome(lambda: coroutine))))
    thread.start()
    thread.join()
    [outcome] = found
    if isinstance(outcome, Failed):
        raise outcome.error
    return outcome.value
