"""Tracks from which checkpoint each start of a job continues, and so which output belongs together.

A start continues from a checkpoint: the output up to that checkpoint and the start's own output form one line, which
must be exact. Output of other starts after that checkpoint belongs to an abandoned lineage. It was rolled back, or it was
kept, because of the request or because the job was started over; otherwise no start may rewind beyond it.
Commits of kept output that had begun when the start took over may still complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from midstream_lab.jobs.recorded_rows import Outside

After = Literal["rollback", "keep", "fresh"]


class Lineage:
    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self._before: dict[str, frozenset[str]] = {}
        """The names of the output from which each start continued, by its job id."""
        self._left: dict[str, None] = {}
        """The names of output that was kept when the job went back beyond it."""
        self._following: set[str] = set()
        """The names in commits that were under way at that time; they may still be added to the kept output."""
        self._newest_left: dict[str, int] = {}
        """The newest checkpoint with committed output in an abandoned line when a start began, by its job id."""

    def has_begun(self, job_id: str) -> bool:
        return job_id in self._before

    def continues(self, job_id: str, before: Iterable[str]) -> None:
        self._before[job_id] = frozenset(before)

    def begins(self, job_id: str, before: Iterable[str], after: After | None) -> Iterator[str]:
        """Begin a start that continues after the output `before`, and yield complaints about other output.

        `after`: what happens to other output, according to the request.
        """
        self.continues(job_id, before)
        others = [name for name in self._outside.committed if name not in self._before[job_id]]
        if after in ("keep", "fresh"):
            self._left.update(dict.fromkeys(others))
            self._following.update(self._outside.under_way)
        elif after == "rollback":
            for name in [name for name in self._left if name not in self._outside.committed]:
                del self._left[name]
        wrong = [name for name in others if name not in self._left and name not in self._following]
        if wrong:
            yield f"{job_id} resumes after {wrong[0]}, which is committed and not of its lineage ({len(wrong)} such)"
        self._newest_left[job_id] = max((self._outside.staged[name].checkpoint_id for name in others), default=0)

    def output(self, job_id: str) -> dict[str, None]:
        """Return the names of the committed output in the line of this start."""
        before, staged = self._before.get(job_id, frozenset()), self._outside.staged
        return {n: None for n in self._outside.committed if n in before or staged[n].job_id == job_id}

    def check_id(self, job_id: str, checkpoint_id: int) -> Iterator[str]:
        """Yield a complaint unless a checkpoint of this start has a higher id than those of abandoned lines."""
        if checkpoint_id <= self._newest_left.get(job_id, 0):
            yield f"{job_id} makes checkpoint {checkpoint_id}, and {self._newest_left[job_id]} of an abandoned lineage is published"

    def check_end(self) -> Iterator[str]:
        gone = [name for name in self._left if name not in self._outside.committed]
        if gone:
            yield f"{gone[0]} had to be kept, and is gone ({len(gone)} such)"
