"""Failures of the job, and the decision whether it restarts."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from midstream.engine.coordinator.effects import Effects, TimerKind
from midstream.engine.core.config import RestartStrategy
from midstream.engine.core.errors import (
    ClusterError,
    InvariantError,
    JobError,
    MidstreamError,
    UnavailableError,
    is_permanent,
)
from midstream.engine.core.interfaces import Done, Failed
from midstream.engine.core.tracebacks import kind_and_line, users_part
from midstream.engine.protocol.job_status import FailureStatus


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of the job. `details` is a traceback, or empty. `fatal`: a restart cannot help."""

    summary: str
    details: str
    error: MidstreamError
    """The error that is raised to the user if the job ends because of this failure."""
    fatal: bool = False
    fingerprint: str = ""
    """Equal whenever the same code fails in the same way; empty if the next time may differ."""
    row: str = ""
    """Equal whenever the same row fails in the same way; empty if the row is not known, or may not fail the next time."""

    def status(self, at_ms: int, attempt: int) -> FailureStatus:
        """Return the failure as the job's status shows it."""
        return FailureStatus(at_ms, attempt, self.summary, self.details, users_part(self.details))


def failure_of_user_code(summary: str, details: str, fatal: bool, fingerprint: str, row: str = "") -> Failure:
    """Return the failure that a slot has reported; `details` is the traceback."""
    return Failure(
        summary, details, JobError(f"{summary}\n\n{details}" if details else summary), fatal, fingerprint, row
    )


def failure_of(error: BaseException, where: str) -> Failure:
    """Return the failure of something that ran on the driver. A MidstreamError keeps its class."""
    summary = f"{where}: {error}" if isinstance(error, MidstreamError) else f"{where}: {type(error).__name__}: {error}"
    details = "".join(traceback.format_exception(error))
    if isinstance(error, MidstreamError):
        shown: MidstreamError = type(error)(summary)
    else:
        shown = JobError(f"{summary}\n\n{details}")
    shown.__cause__ = error
    fatal = is_permanent(error) or isinstance(error, InvariantError)
    what = kind_and_line(error)
    return Failure(summary, details, shown, fatal, what and f"{where}: {what}")


def warn_if_failed(effects: Effects, where: str, outcome: Done[None] | Failed) -> None:
    if isinstance(outcome, Failed):
        effects.notifications.warned(failure_of(outcome.error, where).summary)


def slot_lost(text: str, last_lines: str, crash: str) -> Failure:
    """Return the failure of a lost slot. `text`: which slot, and how. `crash`: its `Failure.fingerprint`."""
    last = f"Its last lines:\n{last_lines}" if last_lines else ""
    return Failure(text, last, ClusterError(f"{text}\n\n{last}" if last else text), fingerprint=crash)


def slots_gone(reason: str, newest_checkpoint: str | None) -> Failure:
    """Return the failure of all slots together, after which the job can only be started again."""
    last = f"its last checkpoint is {newest_checkpoint}" if newest_checkpoint else "it has no checkpoint to resume from"
    error = UnavailableError(f"{reason}, and all slots of the job with it; {last}. Start the job again")
    return Failure(str(error), "", error, fatal=True)


class Failover:
    """Counts restarts, and waits before each."""

    def __init__(self, effects: Effects, strategy: RestartStrategy) -> None:
        self.restart_count = 0
        self._effects = effects
        self._strategy = strategy
        self._delay: str | None = None
        """The timer of the pause before the next attempt, which is not deployed before it fires."""
        self._recent = 0
        """The number of restarts since the job last ran for `reset_after_s` (exponential only)."""
        self._running_since_ms: int | None = None
        self._fingerprint = ""
        """The last `Failure.fingerprint` that was not empty."""
        self._repeats = 0
        """How often that failure has occurred in succession, without a completed checkpoint in between."""
        self._row = ""
        """The `Failure.row` of that failure."""
        self._is_same_row = False
        """Whether it was the same row twice."""

    @property
    def delayed(self) -> bool:
        return self._delay is not None

    def running(self) -> None:
        self._running_since_ms = self._effects.now_ms

    def checkpoint_completed(self, _: object) -> None:
        """A checkpoint has completed: a failure from now on is not the same failure as before."""
        self._fingerprint = self._row = ""
        self._repeats = 0

    def schedule_restart(self, failure: Failure) -> float | None:
        """Count a failure, and return in how many seconds the job restarts. None: it does not restart, and fails."""
        if failure.fingerprint:  # a failure that may differ next time does not end the sequence
            self._repeats = self._repeats + 1 if failure.fingerprint == self._fingerprint else 1
            self._is_same_row = bool(failure.row) and failure.row == self._row
            self._fingerprint, self._row = failure.fingerprint, failure.row
            if self._is_stuck(failure):
                return None
        delay_s = self._after_failure(self._effects.now_ms)
        if delay_s is not None:
            self.delay(delay_s)
        return delay_s

    def _is_stuck(self, failure: Failure) -> bool:
        limit = min(2, self._strategy.same_failures) if self._is_same_row else self._strategy.same_failures
        return 0 < limit <= self._repeats and failure.fingerprint == self._fingerprint

    def describe(self, failure: Failure, what_follows: str) -> str:
        """Return the text that the user is notified with; a traceback that was shown before is not repeated."""
        times = self._repeats if failure.fingerprint and failure.fingerprint == self._fingerprint else 1
        text = failure.summary
        if times > 1:
            text += f"\nThe same failure {times} times in a row without a checkpoint in between"
            if self._strategy.same_failures:
                text += f"; at {self._strategy.same_failures} the job ends"
            text += "."
        elif failure.details:
            shown = users_part(failure.details)
            text += f"\n{shown}" if shown else ""
        return f"{text}\n{what_follows}"

    def delay(self, delay_s: float) -> None:
        self._effects.cancel_timer(self._delay)
        self._delay = self._effects.set_timer(TimerKind.RESTART, delay_s, self._delay_is_over)

    def _delay_is_over(self) -> None:
        self._delay = None

    def _after_failure(self, now_ms: int) -> float | None:
        """Return the delay in seconds before the restart; None: the job fails."""
        strategy = self._strategy
        since, self._running_since_ms = self._running_since_ms, None
        if strategy.kind == "none":
            return None
        if strategy.kind == "fixed":
            if self.restart_count >= strategy.attempts:
                return None
            self.restart_count += 1
            return strategy.delay_s
        if since is not None and now_ms - since >= strategy.reset_after_s * 1000:
            self._recent = 0
        if strategy.attempts and self._recent >= strategy.attempts:
            return None
        delay_s = min(strategy.delay_s * 2.0 ** min(self._recent, 40), strategy.max_delay_s)
        self._recent += 1
        self.restart_count += 1
        return delay_s

    def final_error(self, failure: Failure) -> MidstreamError:
        """Return the error that is raised to the user when the job is not restarted any more."""
        if not self.restart_count:
            return failure.error
        if failure.fingerprint and self._is_stuck(failure):
            what = "the same failure, of the same row," if self._is_same_row else "the same failure"
            why = f"{what} {self._repeats} times in a row without a checkpoint in between"
        else:
            why = f"the job failed after {self.restart_count} restart{'s' if self.restart_count > 1 else ''}"
        error = type(failure.error)(f"{why}: {failure.error}")
        error.__cause__ = failure.error.__cause__
        return error
