"""Which starts of a job go on from which, and so which output belongs together.

A start goes on from a checkpoint: what had been put out by then and what it puts out itself are one line, and
exact. What others have put out behind that checkpoint belongs to a line that was left. It was taken back, or
kept because the request said so, or the job was started over; without either, no start goes back behind it.
Of what is kept, commits that had begun when the start took over may still come to their end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from midstream.sim.rows import Outside

After = Literal["take-back", "keep", "fresh"]


class Lines:
    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self._before: dict[str, frozenset[str]] = {}
        """By job id of a start: names of what had been put out when it began."""
        self._left: dict[str, None] = {}
        """Names of what was kept when the job went back behind it."""
        self._following: set[str] = set()
        """Names in commits that were under way then: they may still become part of it."""
        self._newest_left: dict[str, int] = {}
        """By job id of a start: the newest checkpoint that was put out in a line that was left, when it began."""

    def has_begun(self, job_id: str) -> bool:
        return job_id in self._before

    def goes_on(self, job_id: str, before: Iterable[str]) -> None:
        self._before[job_id] = frozenset(before)

    def begins(self, job_id: str, before: Iterable[str], after: After | None) -> Iterator[str]:
        """A start begins, from where `before` had been put out. Complaints about what else is there.

        `after`: what the request says is to become of that.
        """
        self.goes_on(job_id, before)
        others = [name for name in self._outside.committed if name not in self._before[job_id]]
        if after in ("keep", "fresh"):
            self._left.update(dict.fromkeys(others))
            self._following.update(self._outside.under_way)
        elif after == "take-back":
            for name in [name for name in self._left if name not in self._outside.committed]:
                del self._left[name]
        wrong = [name for name in others if name not in self._left and name not in self._following]
        if wrong:
            yield f"{job_id} goes on behind {wrong[0]}, which is committed and not of its line ({len(wrong)} such)"
        self._newest_left[job_id] = max((self._outside.staged[name].checkpoint_id for name in others), default=0)

    def output(self, job_id: str) -> dict[str, None]:
        """Names of what is committed of the line of this start."""
        before, staged = self._before.get(job_id, frozenset()), self._outside.staged
        return {n: None for n in self._outside.committed if n in before or staged[n].job_id == job_id}

    def check_id(self, job_id: str, checkpoint_id: int) -> Iterator[str]:
        """Complaints about the id of a checkpoint of this start: what was left behind must be older."""
        if checkpoint_id <= self._newest_left.get(job_id, 0):
            yield f"{job_id} makes checkpoint {checkpoint_id}, and {self._newest_left[job_id]} of a line that was left is put out"

    def check_end(self) -> Iterator[str]:
        gone = [name for name in self._left if name not in self._outside.committed]
        if gone:
            yield f"{gone[0]} was to be kept, and is gone ({len(gone)} such)"
