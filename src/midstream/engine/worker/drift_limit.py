"""Holds back the splits of one source subtask that are too far ahead in event time, and reports how far the slowest is.

The coordinator sets the ceiling (`coordinator.placement.source_drift`): the event time of the slowest split of all
subtasks and sources that are kept in step, plus the drift. A split above it is not read, which is all that a hold does:
barriers, assignments and the end of the job do not depend on it.

Only splits that may have rows count. A split that its source has found empty several times in a row does not, whatever its
strategy says about idleness: nothing would be gained by waiting for it. It counts again with its next rows. Before its
first row a split is as far as the event time of the
subtask, since it cannot move that back.

A change is reported as soon as it matters: immediately if the slowest split is further back than reported, and otherwise
once it has advanced by a `STEPS`-th of the drift. So a report is due after a batch, or when a split is assigned or becomes
empty, and never because time passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.operators.base import SplitTimes

STEPS: Final = 8
"""A change of less than the drift divided by this is not reported, and does not move the ceiling. Both together may
cost a quarter of the drift, and limit the messages to `STEPS` while event time advances by the drift."""


class DriftLimit:
    """The limit of one source subtask. There is none before `begin`.

    `report`: sends the lowest event time of the splits that count, and the number of splits that were assigned in this
    attempt.
    """

    def __init__(self, report: Callable[[int, int], None]) -> None:
        self._report = report
        self._times: SplitTimes | None = None
        self._step_us = 1
        self.ceiling_us = MIN_WATERMARK_US
        """Until the coordinator has set it, each split is read up to its first rows."""
        self._assigned = 0
        self._reported: tuple[int, int] | None = None

    def begin(self, times: SplitTimes, drift_us: int) -> None:
        """Keep the splits in step. `times`: how far each of them is."""
        self._times, self._step_us = times, max(1, drift_us // STEPS)

    def holds(self, split: int) -> bool:
        """Whether a split is too far ahead to be read."""
        return self._times is not None and self._times.progress_us(split) > self.ceiling_us

    def assigned(self, splits: Iterable[int]) -> None:
        """Count a split that was assigned in this attempt. The report shows that it is known, even if it has no rows."""
        self._assigned += 1
        self.update(splits)

    def update(self, splits: Iterable[int]) -> None:
        """Report how far the slowest of these splits is, if that is due: the open ones that may have rows."""
        if self._times is None:
            return
        lowest_us = min(map(self._times.progress_us, splits), default=MAX_WATERMARK_US)
        if (
            self._reported is None
            or self._reported[1] != self._assigned
            or is_moved(self._reported[0], lowest_us, self._step_us)
        ):
            self._reported = lowest_us, self._assigned
            self._report(lowest_us, self._assigned)

    def check(self, splits: Iterable[int]) -> None:
        """Assert that what was reported is not ahead of these splits."""
        if self._times is not None and self._reported is not None:
            lowest_us = min(map(self._times.progress_us, splits), default=MAX_WATERMARK_US)
            assert self._reported[0] <= lowest_us and self._reported[1] == self._assigned, (self._reported, lowest_us)


def is_moved(before_us: int, now_us: int, step_us: int) -> bool:
    """Whether a report or a ceiling has to be replaced: it would be too high, or is `step_us` or more too low."""
    return now_us < before_us or now_us - before_us >= step_us
