"""Restart strategies, as users write them: what happens after a failure."""

from __future__ import annotations

from midstream.engine.core.config import Duration, RestartStrategy, duration_s, is_whole
from midstream.engine.core.errors import ConfigError


def no_restart() -> RestartStrategy:
    """Let the first failure end the job.

    Returns a strategy for `Environment(restart=…)`.

        >>> env = Environment("shop", restart=no_restart())
    """
    return RestartStrategy(kind="none")


def fixed_restarts(attempts: int, delay: Duration = "1 s") -> RestartStrategy:
    """Restart a limited number of times from the newest checkpoint.

    `attempts`: the maximum number of restarts, at least 1.
    `delay`: the time after each failure: a duration such as "1 s", a number of seconds, or a timedelta.

    Returns a strategy for `Environment(restart=…)`. Raises ConfigError for another number or duration.

        >>> env = Environment("shop", restart=fixed_restarts(3, "5 s"))
    """
    return RestartStrategy(kind="fixed", attempts=_attempts(attempts, 1), delay_s=duration_s(delay, "delay"))


def exponential_restarts(
    delay: Duration = "200 ms", max_delay: Duration = "1 min", reset_after: Duration = "5 min", attempts: int = 0
) -> RestartStrategy:
    """Restart after a delay that doubles with every failure.

    `delay`, `max_delay`: the first and the longest delay, as durations.
    `reset_after`: after this long without a failure the delay starts over.
    `attempts`: the maximum number of restarts in a row; 0 for no limit.

    Returns a strategy for `Environment(restart=…)`. Raises ConfigError for invalid durations and numbers, and if
    `delay` is 0 or longer than `max_delay`.

        >>> env = Environment("shop", restart=exponential_restarts(delay="1 s", max_delay="5 min"))
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
