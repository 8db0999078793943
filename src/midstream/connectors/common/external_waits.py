"""Waits of this process's sources and sinks for the outside world, such as brokers that do not answer, and warnings.

Heartbeats of the slot report them, and the job's status shows them. They are recorded per process rather than passed
through tasks, since a wait may be in any thread of the I/O pool, or in a commit that belongs to no task.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

_numbers = itertools.count()
_begun: dict[int, tuple[str, float]] = {}
"""What each wait is for, and its beginning. Each access is a single operation, so threads need no lock."""

_warnings: dict[str, None] = {}


class ExternalWait:
    """One wait, which may begin and end any number of times.

    Used with `with`, it ends with the block. At the latest it ends when this object is deleted, which an exception may
    delay for long: its traceback holds the frames that it passed through, and their variables.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._number = next(_numbers)
        self._now_s = now_s

    def __enter__(self) -> ExternalWait:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self, what: str) -> None:
        """Begin waiting. `what` completes "waiting for …". If the wait has begun, it continues."""
        if self._number not in _begun:
            _begun[self._number] = what, self._now_s()

    def end(self) -> None:
        _begun.pop(self._number, None)

    def __del__(self) -> None:
        self.end()


def waits(now_s: float) -> list[tuple[str, int]]:
    """Return what is waited for and for how many milliseconds, longest first; several waits for the same thing are one."""
    since: dict[str, float] = {}
    for what, since_s in list(_begun.values()):
        since[what] = min(since_s, since.get(what, since_s))
    longest = sorted(since.items(), key=lambda item: item[1])
    return [(what, max(0, round((now_s - since_s) * 1000))) for what, since_s in longest]


def warn(text: str) -> None:
    """Report a condition that holds until the process ends: the job's status shows the text once for all slots."""
    _warnings[text] = None


def warnings() -> list[str]:
    """Return what this process has reported, oldest first."""
    return list(_warnings)
