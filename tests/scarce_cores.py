"""A machine with less than a core for each thread, on a clock of its own."""

from __future__ import annotations

from midstream.runtime.core_share import CoreShare


class Machine:
    """A core that a thread gets for `share` of the time that it wants it."""

    def __init__(self, share: float, known: bool = True) -> None:
        self.share = share
        self._known = known
        self.now_s = 50.0
        self._worked_s = self._waited_s = 0.0

    def work(self, seconds: float) -> None:
        """As long as that takes on a core of its own."""
        self._worked_s += seconds
        self._waited_s += seconds / self.share - seconds
        self.now_s += seconds / self.share

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def schedule(self) -> tuple[float, float] | None:
        return (self._worked_s, self._waited_s) if self._known else None

    def clock(self) -> CoreShare:
        return CoreShare(lambda: self.now_s, self.schedule)
