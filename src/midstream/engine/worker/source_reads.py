"""The I/O of all sources of a slot, which leaves some threads of the pool to everything else.

A read may block for as long as its source likes. Checkpoints are written on the same threads, and do not wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from midstream.engine.core.interfaces import Done, Executor, Failed

T = TypeVar("T")

READS_MAX: Final = 24
"""How many threads the sources of a slot may use at a time."""


class SourceReads:
    """Submits the work of sources to the executor, in turn. Loop thread only.

    It belongs to the slot and not to an attempt: a read that hangs keeps its thread when the attempt is over.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._under_way = 0
        """At most READS_MAX."""
        self._waiting: deque[Callable[[], None]] = deque()
        """Empty unless READS_MAX are under way."""

    def submit(self, work: Callable[[], T], done: Callable[[Done[T] | Failed], None]) -> None:
        """Run work on the pool, as `Executor.submit` does, once a thread is free for it."""

        def completed(outcome: Done[T] | Failed) -> None:
            self._under_way -= 1
            if self._waiting:
                self._waiting.popleft()()
            done(outcome)

        def start() -> None:
            self._under_way += 1
            self._executor.submit(work, completed)

        if self._under_way < READS_MAX:
            start()
        else:
            self._waiting.append(start)
