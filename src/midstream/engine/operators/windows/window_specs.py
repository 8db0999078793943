"""Event-time windows, and the functions that define them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from midstream.engine.core.config import Duration, duration_text, duration_us, signed_duration_us
from midstream.engine.core.errors import ConfigError

WINDOW_START: Final = "window_start"
WINDOW_END: Final = "window_end"
LATE: Final = "late"
"""The tag of the side output of late rows, unchanged: of a window, those too late for all of their windows; of a join, those
of the left stream."""
LATE_RIGHT: Final = "late_right"
"""The tag of the side output of a join's late rows of the right stream, unchanged."""


@dataclass(frozen=True, slots=True)
class Sliding:
    """Windows of `size_us` that start every `slide_us`, shifted by `offset_us` from the epoch (UTC); all in
    microseconds.

    Made by `tumbling` and `sliding`.

        >>> print(sliding("1 h", "5 min"))
        sliding windows of 1 h every 5 min
    """

    size_us: int
    slide_us: int
    offset_us: int = 0

    def __str__(self) -> str:
        kind = "tumbling" if self.slide_us == self.size_us else "sliding"
        slide = "" if self.slide_us == self.size_us else f" every {duration_text(self.slide_us)}"
        offset = f" shifted by {duration_text(self.offset_us)}" if self.offset_us else ""
        return f"{kind} windows of {duration_text(self.size_us)}{slide}{offset}"


@dataclass(frozen=True, slots=True)
class Session:
    """Windows of a key's rows that are at most `gap_us` microseconds apart; a window ends `gap_us` after its last row.

    Made by `session`.

        >>> print(session("30 min"))
        sessions with a gap of 30 min
    """

    gap_us: int

    def __str__(self) -> str:
        return f"sessions with a gap of {duration_text(self.gap_us)}"


Window: TypeAlias = Sliding | Session


def tumbling(size: Duration, offset: Duration = 0) -> Sliding:
    """Return windows that follow one another without gap or overlap.

    `size`: the length of a window: a duration such as "1 h", a number of seconds, or a timedelta.
    `offset`: windows begin at multiples of `size` since 1970-01-01 00:00 UTC, shifted by this duration, which may be
    negative: "-2 h" makes days of two hours east of UTC.

    Raises ConfigError for an invalid duration, and for a size that is not longer than 0.

        >>> per_minute = clicks.key_by("user").window(tumbling("1 min")).aggregate(n=Count())
        >>> [row["n"] for row in testing.run(per_minute).rows]
        [1, 1]
    """
    return sliding(size, size, offset)


def sliding(size: Duration, slide: Duration, offset: Duration = 0) -> Sliding:
    """Return windows that overlap, so that a row is in several of them.

    `size`: the length of a window: a duration such as "1 h", a number of seconds, or a timedelta.
    `slide`: the time from the start of one window to the next, no longer than `size`.
    `offset`: windows begin at multiples of `slide` since 1970-01-01 00:00 UTC, shifted by this duration, which may be
    negative.

    Raises ConfigError for an invalid duration, for one that is not longer than 0, and for a slide longer than the size.

        >>> last_hour = clicks.key_by("user").window(sliding("1 h", "30 min")).aggregate(n=Count())
        >>> [row["n"] for row in testing.run(last_hour).rows]
        [2, 2]
    """
    window = Sliding(duration_us(size, "size"), duration_us(slide, "slide"), signed_duration_us(offset, "offset"))
    if window.size_us <= 0 or window.slide_us <= 0:
        raise ConfigError(f"window: size {size!r} and slide {slide!r} must be longer than 0")
    if window.slide_us > window.size_us:
        raise ConfigError(f"window: slide {slide!r} is longer than size {size!r}: rows between windows would be lost")
    return window if window.offset_us >= 0 else replace(window, offset_us=window.offset_us % window.slide_us)


def session(gap: Duration) -> Session:
    """Return windows of a key's rows that are close together; a window ends when no row has come for the length of the
    gap.

    `gap`: how far apart neighbouring rows of a window are at most (rows exactly this far apart are in one): a duration such as "30 min", a number of seconds, or
    a timedelta.

    Raises ConfigError for an invalid duration, and for a gap that is not longer than 0.

        >>> visits = clicks.key_by("user").window(session("30 min")).aggregate(n=Count())
        >>> for row in testing.run(visits).rows:
        ...     print(*row.values())
        ann 2024-01-01 12:00:00 2024-01-01 12:32:00 2
    """
    window = Session(duration_us(gap, "gap"))
    if window.gap_us <= 0:
        raise ConfigError(f"window: gap {gap!r} must be longer than 0")
    return window
