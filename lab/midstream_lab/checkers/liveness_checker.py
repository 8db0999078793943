"""Checks that what a job owes comes in time: answers to clients, its end after its data has ended, its end after a cancel.

The bound is derived from the scenario. It counts from the request, or from the last disturbance, if that was later: a
fault may have its effects for `LASTS_US`, after each deployment the tasks begin from their checkpoint, and after each
failed checkpoint the next one may have to wait. Whatever is still owed is checked now and then, and when it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from midstream.engine.coordinator.checkpoints.schedule import FINAL_RETRY_MS, FINAL_RETRY_MS_MAX
from midstream.engine.coordinator.placement.attempt import Attempt
from midstream.engine.protocol import messages as m
from midstream_lab.checkers.failure_causes import LASTS_US

JOB_ENDS: Final = "the end of the job, all of whose tasks are at the end of their data"
CANCEL_ENDS: Final = "the end of the job, which was cancelled"
COMMIT_S_MAX: Final = 3.0
"""How long a commit on a slot takes at most."""


class LivenessChecker:
    """What one driver owes, with the time since which it does. `struck_us`: the times at which faults have struck."""

    def __init__(self, limit_s: float, struck_us: Sequence[int], now_us: Callable[[], int], bug: Callable[[str], None]):
        self.longest = 0.0
        """The largest part of the bound that anything has taken."""
        self._limit_s = limit_s
        self._struck_us = struck_us
        self._now_us = now_us
        self._bug = bug
        self._committed = 0
        """How many commits slots have done: where they are slower than checkpoints, those of many checkpoints wait."""
        self._owed: dict[object, tuple[str, int, int]] = {}
        """What is owed, since when, and how many commits were done before, by client; or by itself."""
        self._disturbed_us = 0
        """When an attempt began or a checkpoint failed last, for which `FailureCauses` demands a cause."""
        self._pause_s = 0.0
        """The longest pause that may follow that."""

    def on_request(self, client: int, request: m.ClientRequest) -> None:
        self._owed[client] = f"an answer to {request!r}", self._now_us(), self._committed

    def owes(self, what: str) -> None:
        self._owed.setdefault(what, (what, self._now_us(), self._committed))

    def on_message(self, message: m.FromSlot, attempt: Attempt | None) -> None:
        """Note that a commit is done, and that the job owes its end once all its tasks are at the end of their data."""
        self._committed += isinstance(message, m.CommitDone)
        if isinstance(message, m.TaskEndOfData) and attempt is not None and attempt.at_end_of_data:
            self.owes(JOB_ENDS)

    def ended(self) -> None:
        for what in (JOB_ENDS, CANCEL_ENDS):
            self.comes(what)

    def deployed(self) -> None:
        """An attempt begins: a job whose data had ended has to come to its end again."""
        self._disturbed_us, self._pause_s = self._now_us(), 0.0
        self._owed.pop(JOB_ENDS, None)

    def failed(self, in_a_row: int) -> None:
        """A checkpoint has failed, the last of `in_a_row` checkpoints."""
        pause_ms = min(FINAL_RETRY_MS << min(in_a_row, 20), FINAL_RETRY_MS_MAX)
        self._disturbed_us, self._pause_s = self._now_us(), pause_ms / 1000

    def comes(self, key: object) -> None:
        """What was owed comes now. Check that it does not come too late."""
        owed = self._owed.pop(key, None)
        if owed is not None:
            self._check(*owed)

    def check(self) -> None:
        """Check that nothing is owed for too long."""
        for owed in list(self._owed.values()):
            self._check(*owed)

    def _check(self, what: str, since_us: int, commits: int) -> None:
        quiet_us = max(since_us, self._disturbed_us, max(self._struck_us, default=-LASTS_US) + LASTS_US)
        taken_s = (self._now_us() - quiet_us) / 1e6
        limit_s = self._limit_s + self._pause_s + (self._committed - commits) * COMMIT_S_MAX
        self.longest = max(self.longest, taken_s / limit_s)
        if taken_s > limit_s:
            self._bug(
                f"{what} has not come {taken_s:.3f} s after it was due to begin; at most {limit_s:.3f} s are allowed"
            )
