"""Event-time windows, and the functions that define them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import polars as pl

from midstream.engine.core.config import Duration, duration_text, duration_us, is_whole, signed_duration_us
from midstream.engine.core.errors import ConfigError
from midstream.engine.operators.expressions import is_plain_column
from midstream.engine.operators.windows.local_days import check_zone

DAY_US: Final = 86_400_000_000
WINDOW_START: Final = "window_start"
WINDOW_END: Final = "window_end"
START: Final = "__start"
END: Final = "__end"
"""The columns with the bounds of each row's window in a merged frame, int64 in the event time's unit."""
IS_EARLY: Final = "is_early"
"""The column that marks early results, of windows that have some."""
LATE: Final = "late"
"""The tag of the side output of late rows, unchanged. A row is late for windows if it is too late for all of its windows;
of a join, these are the late rows of the left stream."""
LATE_RIGHT: Final = "late_right"
"""The tag of the side output of a join's late rows of the right stream, unchanged."""


_ROWS_MAX: Final = 2**62


@dataclass(frozen=True, slots=True)
class Sliding:
    """Windows of `size_us` that start every `slide_us`, shifted by `offset_us` from the epoch (UTC); all in
    microseconds. With a time zone they are whole days of it, and the epoch is its midnight of 1970-01-01.

    Made by `tumbling` and `sliding`.

        >>> print(sliding("1 h", "5 min"))
        sliding windows of 1 h every 5 min
    """

    size_us: int
    slide_us: int
    offset_us: int = 0
    zone: str | None = None

    def __str__(self) -> str:
        kind = "tumbling" if self.slide_us == self.size_us else "sliding"
        slide = "" if self.slide_us == self.size_us else f" every {duration_text(self.slide_us)}"
        offset = f" shifted by {duration_text(self.offset_us)}" if self.offset_us else ""
        zone = f" in {self.zone}" if self.zone else ""
        return f"{kind} windows of {duration_text(self.size_us)}{slide}{offset}{zone}"


@dataclass(frozen=True, slots=True)
class Session:
    """Windows of a key's rows that are at most `gap_us` microseconds apart; a window ends `gap_us` after its last row. Or
    each row has its own gap, in the column `gap_column`.

    Made by `session`.

        >>> print(session("30 min"))
        sessions with a gap of 30 min
    """

    gap_us: int
    gap_column: str | None = None

    def __str__(self) -> str:
        if self.gap_column is not None:
            return f"sessions with the gap in column {self.gap_column!r}"
        return f"sessions with a gap of {duration_text(self.gap_us)}"


@dataclass(frozen=True, slots=True)
class CountWindow:
    """Windows of `rows` rows of a key each, in the order of arrival.

    Made by `count`.

        >>> print(count(100))
        windows of 100 rows
    """

    rows: int

    def __str__(self) -> str:
        return f"windows of {self.rows} rows"


Window: TypeAlias = Sliding | Session
"""By event time."""


def tumbling(size: Duration, offset: Duration = 0, *, zone: str | None = None) -> Sliding:
    """Return windows that follow one another without gap or overlap.

    `size`: the length of a window: a duration such as "1 h", a number of seconds, or a timedelta.
    `offset`: windows begin at multiples of `size` since 1970-01-01 00:00 UTC, shifted by this duration, which may be
    negative: "4 d" makes weeks that begin on Mondays.
    `zone`: the IANA name of a time zone, for windows of whole days from midnight to midnight there, of 23 and 25 hours
    too when the clock changes. The event times are instants in UTC, as always.

    Raises ConfigError for an invalid duration, for a size that is not longer than 0, for an unknown zone, and with a
    zone for durations that are not whole days.

        >>> per_minute = clicks.key_by("user").window(tumbling("1 min")).aggregate(n=Count())
        >>> [row["n"] for row in testing.run(per_minute).rows]
        [1, 1]
    """
    return sliding(size, size, offset, zone=zone)


def sliding(size: Duration, slide: Duration, offset: Duration = 0, *, zone: str | None = None) -> Sliding:
    """Return windows that overlap, so that a row is in several of them.

    `size`: the length of a window: a duration such as "1 h", a number of seconds, or a timedelta.
    `slide`: the time from the start of one window to the next, no longer than `size`.
    `offset`: windows begin at multiples of `slide` since 1970-01-01 00:00 UTC, shifted by this duration, which may be
    negative.
    `zone`: the IANA name of a time zone, for windows of whole days there, as for `tumbling`.

    Raises ConfigError for an invalid duration, for one that is not longer than 0, for a slide longer than the size, for
    an unknown zone, and with a zone for durations that are not whole days.

        >>> last_hour = clicks.key_by("user").window(sliding("1 h", "30 min")).aggregate(n=Count())
        >>> [row["n"] for row in testing.run(last_hour).rows]
        [2, 2]
    """
    window = Sliding(duration_us(size, "size"), duration_us(slide, "slide"), signed_duration_us(offset, "offset"), zone)
    if window.size_us <= 0 or window.slide_us <= 0:
        raise ConfigError(f"window: size {size!r} and slide {slide!r} must be longer than 0")
    if window.slide_us > window.size_us:
        raise ConfigError(f"window: slide {slide!r} is longer than size {size!r}: rows between windows would be lost")
    if zone is not None:
        check_zone(zone)
        for what, given, length in (
            ("size", size, window.size_us),
            ("slide", slide, window.slide_us),
            ("offset", offset, window.offset_us),
        ):
            if length % DAY_US:
                raise ConfigError(
                    f"window: {what} {given!r} is not a whole number of days, which windows with a zone must be; leave zone out "
                    "for windows of hours (an offset shifts them)"
                )
    return window if window.offset_us >= 0 else replace(window, offset_us=window.offset_us % window.slide_us)


def session(gap: Duration | pl.Expr) -> Session:
    """Return windows of a key's rows that are close together; a window ends when no row has come for the length of the
    gap.

    `gap`: how far apart neighbouring rows of a window are at most (rows exactly this far apart share a window): a duration
    such as "30 min", a number of seconds, or a timedelta. Or `pl.col("gap")`, a column with the gap of each row, of
    durations or numbers of seconds: a row then spans the time from its own until its gap has passed, and rows whose spans
    overlap or touch are in one window, whatever the order in which they come. A row with a gap that is null, or
    not longer than 0, fails the job.

    Raises ConfigError for an invalid duration, for a gap that is not longer than 0, and for other expressions.

        >>> visits = clicks.key_by("user").window(session("30 min")).aggregate(n=Count())
        >>> for row in testing.run(visits).rows:
        ...     print(*row.values())
        ann 2024-01-01 12:00:00 2024-01-01 12:32:00 2
    """
    if isinstance(gap, pl.Expr):
        if not is_plain_column(gap):
            raise ConfigError(
                f"window: gap {gap} is not a column; compute it before, with with_columns(gap=…), and give pl.col('gap')"
            )
        return Session(0, gap.meta.output_name())
    window = Session(duration_us(gap, "gap"))
    if window.gap_us <= 0:
        raise ConfigError(f"window: gap {gap!r} must be longer than 0")
    return window


def count(rows: int) -> CountWindow:
    """Return windows of a number of rows of each key, one after the other, in the order of arrival.

    A window is emitted when its last row arrives; one that is incomplete at the end of the input is dropped. Rows of a key
    that come from several subtasks or splits arrive in no particular order, so which of them share a window may be another
    after a restart. No row is late.

    `rows`: the number of rows of a window, at least 1.

    Raises ConfigError for another number.

        >>> pairs = orders.key_by("user").window(count(2)).aggregate(total=Sum("price"))
        >>> [row["total"] for row in testing.run(pairs).rows]
        [7]
    """
    if not is_whole(rows, 1) or rows > _ROWS_MAX:
        raise ConfigError(f"window: count {rows!r} is not a whole number of rows from 1 to {_ROWS_MAX}")
    return CountWindow(rows)
