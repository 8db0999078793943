"""Virtual time, the queue of mails, and storage: `engine.core.interfaces` for one thread.

Mails run in the order in which they were posted, I/O runs synchronously when its turn comes, and time stands still until it
is advanced: the same calls give the same run.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from math import ceil
from typing import TypeVar

from midstream.engine.core.errors import StorageError
from midstream.engine.core.interfaces import Done, Failed, Mail

T = TypeVar("T")


class VirtualTimer:
    """core.interfaces.Timer."""

    __slots__ = ("due_us", "mail")

    def __init__(self, due_us: int, mail: Mail) -> None:
        self.due_us = due_us
        self.mail: Mail | None = mail

    def cancel(self) -> None:
        self.mail = None


class VirtualLoop:
    """core.interfaces.Clock, Executor and Ids."""

    def __init__(self, now_us: int, passed_s: Callable[[], float] = lambda: 0.0, first_id: int = 0) -> None:
        """Begin at `now_us`. `passed_s`: returns real time, which the monotonic clock adds to virtual time; work is cut
        into slices by it. `first_id`: the number of the first id.
        """
        self.now_us = now_us
        """The wall clock, in microseconds since the epoch."""
        self._passed_s = passed_s
        self._began_us = now_us
        self._mails: deque[Mail] = deque()
        self._timers: list[tuple[int, int, VirtualTimer]] = []
        self._numbers = count(first_id)

    def now_ms(self) -> int:
        return self.now_us // 1000

    def monotonic_s(self) -> float:
        return (self.now_us - self._began_us) / 1e6 + self._passed_s()

    own_core_s = stopwatch_s = processor_s = monotonic_s
    core_share = 1.0

    def new_id(self) -> str:
        return f"{self.next_id_number():016x}"

    def next_id_number(self) -> int:
        """Return the number of an id that is not used otherwise."""
        return next(self._numbers)

    def post(self, mail: Mail) -> None:
        self._mails.append(mail)

    def call_later(self, delay_s: float, mail: Mail) -> VirtualTimer:
        return self._call(self.now_us + ceil(max(0.0, delay_s) * 1e6), mail)  # never before it is due

    def call_at(self, time_ms: int, mail: Mail) -> VirtualTimer:
        return self._call(max(self.now_us, time_ms * 1000), mail)

    def _call(self, due_us: int, mail: Mail) -> VirtualTimer:
        timer = VirtualTimer(due_us, mail)
        heapq.heappush(self._timers, (timer.due_us, next(self._numbers), timer))
        return timer

    def submit(self, work: Callable[[], T], done: Callable[[Done[T] | Failed], None]) -> None:
        def run() -> None:
            try:
                outcome: Done[T] | Failed = Done(work())
            except KeyboardInterrupt:
                raise  # the work runs on the user's thread, so this is the user's Ctrl-C and no outcome of the work
            except BaseException as error:  # noqa: BLE001 - as in the event loop of slots, `done` reports it
                outcome = Failed(error)
            done(outcome)

        self._mails.append(run)

    def run(self, enough: Callable[[], bool] = lambda: False) -> None:
        """Run mails, including those that they post, until none is left or `enough` is true. Time stands still."""
        while self._mails and not enough():
            self._mails.popleft()()

    @property
    def next_timer_us(self) -> int | None:
        """Return the time of the next timer; None if there is none."""
        while self._timers and self._timers[0][2].mail is None:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def advance(self, until_us: int, enough: Callable[[], bool] = lambda: False) -> None:
        """Let time pass, timer by timer, running all mails that follow from each."""
        self.run(enough)
        while (due_us := self.next_timer_us) is not None and due_us <= until_us and not enough():
            _, _, timer = heapq.heappop(self._timers)
            self.now_us = max(self.now_us, due_us)
            assert timer.mail is not None
            timer.mail()
            self.run(enough)
        if not enough():
            self.now_us = max(self.now_us, until_us)


class MemoryStorage:
    """core.interfaces.Storage in a dict."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def __copy__(self) -> MemoryStorage:
        made = MemoryStorage()
        made._files = dict(self._files)
        return made

    def read(self, path: str) -> bytes:
        if path not in self._files:
            raise StorageError(f"cannot read {path}: there is no such file")
        return self._files[path]

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        return self.read(path)[offset : offset + length]

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        self._files[path] = b"".join(parts)

    def create(self, path: str, data: bytes, durable: bool = True) -> bool:
        if path in self._files:
            return False
        self._files[path] = data
        return True

    def delete(self, path: str) -> None:
        for file in [file for file in self._files if file == path or file.startswith(f"{path}/")]:
            del self._files[file]

    def list(self, path: str) -> list[str]:
        below = f"{path}/" if path else ""
        return sorted({file[len(below) :].split("/", 1)[0] for file in self._files if file.startswith(below)})

    def sweep(self, path: str, unwanted: Callable[[str], bool]) -> None:
        """Do nothing: in memory, no file is ever left unfinished."""

    def exists(self, path: str) -> bool:
        return path in self._files or any(file.startswith(f"{path}/") for file in self._files)
