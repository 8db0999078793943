"""Restart strategies, as users write them: what happens after a failure."""

from __future__ import annotations

from midstream.core.config import Duration, RestartStrategy, duration_s, is_whole
from midstream.core.errors import ConfigError


def no_restart() -> RestartStrategy:
    """Let the first failure end the job."""
    return RestartStrategy(kind="none")


def fixed_restarts(attempts: int, delay: Duration = "1 s") -> RestartStrategy:
    """Restart at most `attempts` times from the newest checkpoint, `delay` after each failure."""
    return RestartStrategy(kind="fixed", attempts=_attempts(attempts, 1), delay_s=duration_s(delay, "delay"))


def exponential_restarts(
    delay: Duration = "200 ms", max_delay: Duration = "1 min", reset_after: Duration = "5 min", attempts: int = 0
) -> RestartStrategy:
    """Restart after a delay that doubles with every failure.

    `delay`, `max_delay`: the first and the longest delay. `reset_after`: after this long without a failure the
    delay starts over. `attempts`: the maximum number of restarts in a row; 0 for no limit.
    """
    strategy = RestartStrategy(
        kind="exponential",
        attempts=_attempts(attempts, 0),
        delay_s=duration_s(delay, "delay"),
        max_delay_s=duration_s(max_delay, "max_delay"),
        reset_after_s=duration_s(reset_after, "reset_after"),
    )
    if not 0 < strategy.delay_s <= strategy.max_delay_s:
        raise ConfigError(f"restart: delay {delay!r} must be longer than 0 and no longer than max_delay {max_delay!r}")
    return strategy


def _attempts(attempts: int, least: int) -> int:
    if not is_whole(attempts, least):
        raise ConfigError(f"restart: attempts {attempts!r} is not a whole number of at least {least}")
    return attempts
