"""What went wrong, and whether the job is to try again."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from midstream.coordinator.effects import Effects
from midstream.core.config import RestartStrategy
from midstream.core.errors import ClusterError, ConfigError, InvariantError, JobError, MidstreamError, SchemaError


@dataclass(frozen=True, slots=True)
class Failure:
    """`details`: traceback, or empty. `fatal`: trying again cannot help."""

    summary: str
    details: str
    error: MidstreamError
    """What the user gets to see if the job ends of it."""
    fatal: bool = False


def failure_of_user_code(summary: str, details: str, fatal: bool) -> Failure:
    """As a slot reports it: `details` is the traceback."""
    return Failure(summary, details, JobError(f"{summary}\n\n{details}" if details else summary), fatal)


def failure_of(error: BaseException, where: str) -> Failure:
    """Of something that ran on the driver. Errors of our own keep their kind."""
    summary = f"{where}: {error}" if isinstance(error, MidstreamError) else f"{where}: {type(error).__name__}: {error}"
    details = "".join(traceback.format_exception(error))
    if isinstance(error, MidstreamError):
        shown: MidstreamError = type(error)(summary)
    else:
        shown = JobError(f"{summary}\n\n{details}")
    shown.__cause__ = error
    return Failure(summary, details, shown, fatal=isinstance(error, (ConfigError, SchemaError, InvariantError)))


def slots_gone(reason: str, newest_checkpoint: str | None) -> Failure:
    """What the slots ran on has ended: the job can only be started again."""
    last = f"its last checkpoint is {newest_checkpoint}" if newest_checkpoint else "it has no checkpoint to go on from"
    error = ClusterError(f"{reason}, and all slots of the job with it; {last}. Start the job again")
    return Failure(str(error), "", error, fatal=True)


class Restarts:
    """Counts restarts, and waits before each."""

    def __init__(self, effects: Effects, strategy: RestartStrategy) -> None:
        self.total = 0
        self._effects = effects
        self._strategy = strategy
        self._delay: str | None = None
        """Timer before whose end the next attempt is not deployed."""
        self._recent = 0
        """Restarts since the job last ran for `reset_after_s` (exponential only)."""
        self._running_since_ms: int | None = None

    @property
    def delayed(self) -> bool:
        return self._delay is not None

    def running(self) -> None:
        self._running_since_ms = self._effects.now_ms

    def try_again(self) -> bool:
        """After a failure. False: no more, the job is to fail."""
        delay_s = self._after_failure(self._effects.now_ms)
        if delay_s is not None:
            self.delay(delay_s)
        return delay_s is not None

    def delay(self, delay_s: float) -> None:
        self._effects.cancel_timer(self._delay)
        self._delay = self._effects.set_timer("restart", delay_s, self._delay_is_over)

    def _delay_is_over(self) -> None:
        self._delay = None

    def _after_failure(self, now_ms: int) -> float | None:
        """Delay in seconds before the restart; None: the job is to fail."""
        strategy = self._strategy
        since, self._running_since_ms = self._running_since_ms, None
        if strategy.kind == "none":
            return None
        if strategy.kind == "fixed":
            if self.total >= strategy.attempts:
                return None
            self.total += 1
            return strategy.delay_s
        if since is not None and now_ms - since >= strategy.reset_after_s * 1000:
            self._recent = 0
        if strategy.attempts and self._recent >= strategy.attempts:
            return None
        delay_s = min(strategy.delay_s * 2.0 ** min(self._recent, 40), strategy.max_delay_s)
        self._recent += 1
        self.total += 1
        return delay_s

    def last_word(self, failure: Failure) -> MidstreamError:
        """What the user gets to see of a job that is not restarted any more."""
        if not self.total:
            return failure.error
        times = f"{self.total} restart{'s' if self.total > 1 else ''}"
        error = type(failure.error)(f"the job failed after {times}: {failure.error}")
        error.__cause__ = failure.error.__cause__
        return error
