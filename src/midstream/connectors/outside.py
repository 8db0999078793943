"""What the sources and sinks of this process wait for outside of the job, such as brokers that do not answer.

A heartbeat of the slot takes it along, and the job's status shows it. It is known per process and not handed through tasks,
since what waits may be any thread of the I/O pool, or a commit that belongs to no task.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

_numbers = itertools.count()
_begun: dict[int, tuple[str, float]] = {}
"""By wait: what is waited for, and since when. Each access is one operation, so that threads need no lock."""


class Wait:
    """One wait, which may begin and end any number of times.

    Used with `with`, it ends with the block. It ends at the latest with this object, which an exception may keep for long:
    its traceback holds the frames that it went through, and with them their variables.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._number = next(_numbers)
        self._now_s = now_s

    def __enter__(self) -> Wait:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self, what: str) -> None:
        """`what`: as behind "waiting for". A wait that has begun goes on."""
        if self._number not in _begun:
            _begun[self._number] = what, self._now_s()

    def end(self) -> None:
        _begun.pop(self._number, None)

    def __del__(self) -> None:
        self.end()


def waits(now_s: float) -> list[tuple[str, int]]:
    """What is waited for and for how many milliseconds, the longest first; several waits for the same are one."""
    since: dict[str, float] = {}
    for what, since_s in list(_begun.values()):
        since[what] = min(since_s, since.get(what, since_s))
    longest = sorted(since.items(), key=lambda item: item[1])
    return [(what, max(0, round((now_s - since_s) * 1000))) for what, since_s in longest]
