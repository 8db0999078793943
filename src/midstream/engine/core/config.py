"""The settings of a job: one typed struct, parsed from strings such as "64 MiB" and "10 s"."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final, Literal, TypeAlias, TypeGuard

import msgspec

from midstream.engine.core.errors import ConfigError

Duration: TypeAlias = str | float | int | timedelta
Size: TypeAlias = str | int

MAX_PARALLELISM_MAX: Final = 32768
"""The largest number of key groups, and so of subtasks of an operator."""

BUFFER_BYTES_MIN: Final = 4096

_DURATION_S = {
    **dict.fromkeys(("us", "microsecond", "microseconds"), 1e-6),
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 1e-3),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
_HOW_TO_WRITE: Final = (
    "is not a duration; write a number of seconds, or a number with a unit, such as '250 ms' or '5 min' (the units are "
    "us, ms, s, min, h and d, or their names in full: '2 hours')"
)
_SIZE_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_NUMBER_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def duration_s(value: Duration, name: str) -> float:
    """Return seconds from a timedelta, a number of seconds, or a string such as "250 ms", "10 s", "5 min".

    Raises ConfigError naming `name` for anything else, and for a negative or infinite duration.
    """
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, bool):
        raise ConfigError(f"{name}: {value!r} {_HOW_TO_WRITE}")
    elif isinstance(value, (int, float)):
        seconds = float(value)
    else:
        match = _NUMBER_UNIT.fullmatch(value) if isinstance(value, str) else None
        unit = match.group(2).lower() if match else ""
        if match is None or (unit and unit not in _DURATION_S):
            if isinstance(value, str) and _NUMBER_UNIT.fullmatch(value.strip().removeprefix("-")) and "-" in value:
                raise ConfigError(f"{name}: {value!r} must not be negative")
            raise ConfigError(f"{name}: {value!r} {_HOW_TO_WRITE}")
        seconds = float(match.group(1)) * _DURATION_S[unit or "s"]
    if seconds < 0:
        raise ConfigError(f"{name}: {value!r} must not be negative")
    if not seconds < 1e10:
        raise ConfigError(f"{name}: {value!r} must be less than {1e10 / 86_400:,.0f} days, some 317 years")
    return seconds


def duration_us(value: Duration, name: str) -> int:
    return round(duration_s(value, name) * 1_000_000)


def signed_duration_us(value: Duration, name: str) -> int:
    """Like `duration_us`, but the duration may be negative: "-2 h"."""
    if isinstance(value, str):
        text = value.strip()
        return -duration_us(text[1:].strip(), name) if text.startswith("-") else duration_us(text, name)
    zero = timedelta(0) if isinstance(value, timedelta) else 0
    is_negative = isinstance(value, (timedelta, int, float)) and value < zero  # type: ignore[operator]
    return -duration_us(-value, name) if is_negative else duration_us(value, name)


def duration_text(duration_us: int) -> str:
    """Format a duration in the largest unit of which it is a whole number, such as "5 min"."""
    units = {"d": 86_400_000_000, "h": 3_600_000_000, "min": 60_000_000, "s": 1_000_000, "ms": 1_000, "us": 1}
    unit = next(unit for unit, length_us in units.items() if duration_us % length_us == 0)
    return f"{duration_us // units[unit]} {unit}"


def interval_s(value: Duration, name: str) -> float:
    """Like `duration_s`, but 0 is refused as well."""
    seconds = duration_s(value, name)
    if not seconds:
        raise ConfigError(f"{name}: 0 is not an interval; give a time such as '1 s'")
    return seconds


def size_bytes(value: Size, name: str) -> int:
    """Return bytes from an integer or a string such as "32 KiB" or "64 MiB". Raises ConfigError for anything else."""
    if is_whole(value):
        return value
    match = _NUMBER_UNIT.fullmatch(value) if isinstance(value, str) else None
    unit = match.group(2).lower() if match else ""
    if match is None or (unit and unit not in _SIZE_BYTES):
        raise ConfigError(f"{name}: {value!r} is not a size; write for example '32 KiB' or '64 MiB'")
    return round(float(match.group(1)) * _SIZE_BYTES[unit or "b"])


class RestartStrategy(msgspec.Struct, frozen=True, kw_only=True):
    """What a job does after a failure; made by `no_restart`, `fixed_restarts` and `exponential_restarts`.

    `kind`: "none": the job fails. "fixed": at most `attempts` restarts, `delay_s` apart. "exponential": the delay
    doubles from `delay_s` up to `max_delay_s`, and is reset once the job has run for `reset_after_s` without failing.
    `attempts`: the maximum number of restarts; of "exponential" since the last reset (0: no limit).
    `delay_s`, `max_delay_s`, `reset_after_s`: in seconds.
    `same_failures`: the job fails once the same code has failed in the same way this many times in a row, without a
    completed checkpoint in between (0: no limit).

        >>> fixed_restarts(3).attempts
        3
    """

    kind: Literal["fixed", "exponential", "none"] = "exponential"
    attempts: int = 0
    delay_s: float = 0.2
    max_delay_s: float = 60.0
    reset_after_s: float = 300.0
    same_failures: int = 0


DEFAULT_RESTART: Final = RestartStrategy(same_failures=10)
"""The restart strategy of a job that does not set one."""


class AutoscaleBounds(msgspec.Struct, frozen=True):
    """Between which parallelisms a job scales itself; `is_advice`: it only reports what would be better."""

    min: int
    max: int
    is_advice: bool = False


class JobConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a job; sizes are in bytes, times in seconds."""

    name: str = "job"
    parallelism: int = 1
    autoscale: AutoscaleBounds | None = None
    max_parallelism: int = 128
    checkpoint_dir: str | None = None
    checkpoint_interval_s: float | None = 10.0
    checkpoint_timeout_s: float = 600.0
    aligned_timeout_s: float | None = 1.0
    """How long a checkpoint's barriers wait for rows in flight before they overtake them; None: they never overtake."""
    queue_time_s: float | None = 0.01
    """How long rows should wait in a queue at most. A queue may always hold one batch; None: queues may fill up."""
    min_pause_s: float = 0.0
    tolerable_failures: int = 3
    retained_checkpoints: int = 2
    inline_bytes: int = 64 * 2**10
    """The largest size of a task's part of a checkpoint that is stored in the metadata instead of a file."""
    restart: RestartStrategy = DEFAULT_RESTART
    buffer_bytes: int = 32 * 2**10
    pool_bytes: int = 128 * 2**20
    batch_rows: int = 131_072
    state_memory: int | Literal["auto", "unlimited"] = "auto"
    """How many bytes of state each slot holds in memory; what is above lies on its local disk. "auto": half
    of the memory that the slot's process may use, divided by the number of the job's slots on that machine.
    """
    slot_timeout_s: float = 60.0
    heartbeat_timeout_s: float = 30.0
    tls: str = "auto"
    """Whether connections between the job's processes are encrypted: auto (unless all are on one machine), on, off, or
    a directory with the user's own certificate.
    """
    trusted_packages: tuple[str, ...] = ()
    """Packages, in addition to the job's own, from which pickles in a checkpoint may call anything."""

    def _check_autoscale(self, bounds: AutoscaleBounds) -> None:
        least, most = bounds.min, bounds.max
        check_parallelism(least, self.max_parallelism, "autoscale")
        check_parallelism(most, self.max_parallelism, "autoscale")
        if least >= most and not bounds.is_advice:
            raise ConfigError(
                f"autoscale: ({least}, {most}) are no bounds, the lower one first; a job that stays at one parallelism "
                f"has parallelism={least}"
            )
        if not bounds.is_advice and not least <= self.parallelism <= most:
            raise ConfigError(
                f"parallelism: {self.parallelism} is not between the bounds of autoscale, {least} and {most}"
            )

    def check(self) -> JobConfig:
        """Return the config itself. Raises ConfigError naming the first setting that is invalid."""
        if not self.name.strip():
            raise ConfigError("name: a job needs a name that is not empty")
        if not 1 <= self.max_parallelism <= MAX_PARALLELISM_MAX:
            raise ConfigError(f"max_parallelism: {self.max_parallelism} is not between 1 and {MAX_PARALLELISM_MAX}")
        if self.autoscale is not None:
            self._check_autoscale(self.autoscale)
        check_parallelism(self.parallelism, self.max_parallelism, "the job")
        if not self.tls.strip():
            raise ConfigError("tls: the value is empty; give 'auto', 'on', 'off', or a directory with a certificate")
        if self.buffer_bytes < BUFFER_BYTES_MIN:
            raise ConfigError(f"buffer_size: {self.buffer_bytes} bytes is below the smallest size, 4 KiB")
        if self.state_memory == 0:
            raise ConfigError("state_memory: 0 bytes is too little; give a size such as '1 GiB', 'auto' or 'unlimited'")
        if self.checkpoint_interval_s is not None and self.checkpoint_interval_s <= 0:
            raise ConfigError(
                "checkpoint_interval: 0 is not an interval; give a time, or None for no periodic checkpoints"
            )
        for name in ("checkpoint_timeout_s", "slot_timeout_s", "heartbeat_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name.removesuffix('_s')}: must be longer than 0")
        if self.retained_checkpoints < 1:
            raise ConfigError(f"retained_checkpoints: {self.retained_checkpoints} is less than 1")
        if self.batch_rows < 1:
            raise ConfigError(f"batch_rows: {self.batch_rows} is less than 1")
        if self.tolerable_failures < 0:
            raise ConfigError(f"tolerable_failures: {self.tolerable_failures} is negative")
        return self


def is_whole(value: object, least: int = 0) -> TypeGuard[int]:
    """Whether `value` is an integer of at least `least`. To Python, True would be one as well."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_parallelism(parallelism: int, max_parallelism: int, where: str) -> None:
    if not is_whole(parallelism, 1):
        raise ConfigError(f"{where}: parallelism {parallelism!r} is not a positive whole number")
    if parallelism > max_parallelism:
        raise ConfigError(
            f"{where}: parallelism {parallelism} is above max_parallelism {max_parallelism}; "
            "raise max_parallelism (only possible for a job without state) or lower the parallelism"
        )
