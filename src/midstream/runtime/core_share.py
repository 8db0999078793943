"""The share of a core that a thread gets, and a clock that runs at this rate.

On a busy machine, how long work takes says little about the work: a thread that waits for a core nine tenths of the
time takes ten times as long for everything, and so do the peers that it waits for. What is sized by how long it takes
(batches, slices, queues) is measured by this clock. Otherwise all of it would become smaller the busier the machine is,
which would make each row more expensive, and so the machine busier.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

POLL_INTERVAL_S: Final = 0.01
"""The interval between two measurements."""
RECENT_S: Final = 0.5
"""The time over which measurements lose their weight."""
CALM_S: Final = 0.001
"""Work without a wait that is added to recent measurements: a single late wake-up of a thread that hardly works proves
nothing.
"""
SHARE_MIN: Final = 0.05
"""The lower limit of the share: the clock is never slower, so times measured by it are bounded."""
SCHEDSTAT: Final = "/proc/thread-self/schedstat"
"""The file of Linux with nanoseconds on a core, nanoseconds ready to run without one (including a CPU quota), and
turns.
"""


class Schedule:
    """The system's figures for the thread that reads first."""

    def __init__(self) -> None:
        self._file: int | None = None

    def read(self) -> tuple[float, float] | None:
        """Return seconds on a core, and seconds that the thread has waited for one; None if the system does not report
        them.
        """
        try:
            if self._file is None:
                self._file = os.open(SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
            worked_ns, waited_ns, _ = os.pread(self._file, 64, 0).split()
        except (OSError, ValueError):
            return None
        return int(worked_ns) / 1e9, int(waited_ns) / 1e9

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class CoreShare:
    """The core share of the calling thread, from the figures of `schedule` (None: unknown).

    Where they are unknown the clock is `now_s`.
    """

    def __init__(self, now_s: Callable[[], float], schedule: Callable[[], tuple[float, float] | None]) -> None:
        self.share = 1.0
        """The recent share of the time that the thread wanted a core for which it had one."""
        self._now_s = now_s
        self._schedule = schedule
        self._seen: tuple[float, float] | None = None
        self._worked_s = self._waited_s = 0.0
        """Recent work and waits; older ones have less weight."""
        self._measured_s = self._own_s = now_s()

    def own_core_s(self) -> float:
        now_s = self._now_s()
        passed_s = now_s - self._measured_s
        if passed_s < POLL_INTERVAL_S:
            return self._own_s + passed_s * self.share
        before = self._own_s + POLL_INTERVAL_S * self.share  # the share may fall, and the clock must not go back
        self._measure(passed_s)
        self._own_s = max(before, self._own_s + passed_s * self.share)
        self._measured_s = now_s
        return self._own_s

    def _measure(self, passed_s: float) -> None:
        before, self._seen = self._seen, self._schedule()
        if before is None or self._seen is None:
            return
        weight = RECENT_S / (RECENT_S + passed_s)
        self._worked_s = weight * self._worked_s + self._seen[0] - before[0]
        self._waited_s = weight * self._waited_s + self._seen[1] - before[1]
        worked_s = self._worked_s + CALM_S
        self.share = max(SHARE_MIN, worked_s / (worked_s + self._waited_s))
