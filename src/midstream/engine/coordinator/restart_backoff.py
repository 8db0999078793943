"""The decision whether the job restarts after a failure, and the pause before it."""

from __future__ import annotations

from midstream.engine.coordinator.effects import Effects, TimerKind
from midstream.engine.coordinator.failures import Failure
from midstream.engine.core.config import RestartStrategy
from midstream.engine.core.errors import MidstreamError
from midstream.engine.core.tracebacks import users_part


class RestartBackoff:
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
