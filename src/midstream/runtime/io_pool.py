"""Threads for blocking I/O, as many as are needed concurrently, up to a limit.

It does not use `concurrent.futures`. The threads of that are joined without a deadline when the interpreter exits, so
one write to a hung network disk would keep the program from ending. It also makes a Future with a lock and a condition
for every call, where a mail suffices.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

THREADS_MAX: Final = 32


class IoPool:
    """A pool of threads. `submit` may be called from one thread only; work must not raise."""

    def __init__(self, name: str, threads_max: int = THREADS_MAX) -> None:
        self._name = name
        self.threads_max = threads_max
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)
        """One permit per thread that waits for work (a permit may lag behind, which starts a thread too many)."""
        self._closed = False

    def submit(self, work: Callable[[], None]) -> None:
        assert not self._closed
        self._work.put(work)
        if not self._idle.acquire(blocking=False) and len(self._threads) < self.threads_max:
            thread = threading.Thread(target=self._run, name=f"{self._name}-io-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self, wait_s: float) -> bool:
        """Drop work that has not begun, and wait for work that has. Returns False if some still runs after `wait_s`."""
        self._closed = True
        while not self._work.empty():
            self._work.get()
        for _ in self._threads:
            self._work.put(None)
        deadline_s = time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            if work is None:
                return
            work()
            del work  # what it captured must not live until the next call
            self._idle.release()
