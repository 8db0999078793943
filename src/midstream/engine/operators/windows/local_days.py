"""The days of a time zone: when each begins, with days of 23 and 25 hours, and days that begin at 01:00.

Windows of whole days are laid out by *position*: the midnight of a day in its zone, as if the zone were UTC, so that all
days are equally long. Rows are moved to the position of their day, and the ends of windows back to instants.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from typing import Final, Literal

import numpy as np
import polars as pl

from midstream.engine.core.errors import ConfigError
from midstream.engine.operators.event_time_column import Int64s

_TICKS: Final = {"ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}
_FIRST, _LAST = date(2, 1, 1), date(9998, 12, 31)
"""Days outside of these are those of UTC. (Nanoseconds since 1970 end earlier, in 2262.)"""
_FIRST_NS, _LAST_NS = date(1678, 1, 1), date(2262, 1, 1)
_EPOCH: Final = date(1970, 1, 1)
MANY_DAYS: Final = 400
"""If the rows of a batch are further apart, not every day in between is computed."""
_TWICE: Final[tuple[Literal["earliest", "latest"], ...]] = ("earliest", "latest")
"""Which of two midnights: the clock may be set back over midnight."""


def check_zone(zone: str) -> None:
    """Raise ConfigError for a name that is not in the time-zone database."""
    try:
        if not isinstance(zone, str):
            raise TypeError(f"{zone!r} is not a str")
        pl.Series([_EPOCH]).cast(pl.Datetime("us", "UTC")).dt.convert_time_zone(zone)
    except (pl.exceptions.PolarsError, TypeError) as error:
        raise ConfigError(
            f"window: zone={zone!r} is not a time zone; give a name of the IANA database, such as 'Europe/Paris' or 'UTC'"
        ) from error


class LocalDays:
    """The days of `zone`, for times in `unit` ("ms", "us" or "ns") since 1970 in UTC."""

    def __init__(self, zone: str, unit: Literal["ms", "us", "ns"]) -> None:
        self.ticks = _TICKS[unit]
        """The length of a day of UTC."""
        self._zone, self._unit = zone, unit
        self._local = pl.Datetime(unit)
        first, last = (_FIRST_NS, _LAST_NS) if unit == "ns" else (_FIRST, _LAST)
        self._first, self._last = (first - _EPOCH).days, (last - _EPOCH).days
        self._begins: dict[int, int] = {}
        """The instants at which days begin, by the number of the day since 1970, as far as they have been computed."""

    def instant(self, position: int) -> int:
        """Return the instant at which the day with this position begins."""
        return self._begin(position // self.ticks)

    def position(self, time: int) -> int:
        """Return the position of the day to which an instant belongs."""
        number = time // self.ticks + 1  # no zone is a day or more ahead of UTC or behind it
        while self._begin(number) > time:
            number -= 1
        return number * self.ticks

    def positions(self, times: Int64s) -> Int64s:
        """Return the position of the day of each of these instants, which are not empty."""
        first, last = (self.position(int(time)) // self.ticks for time in (times.min(), times.max()))
        if first == last:
            return np.full(len(times), first * self.ticks, np.int64)
        days = np.arange(first, last + 1)
        if len(days) > MANY_DAYS:  # only those that may have rows
            days = np.unique(np.unique(times // self.ticks)[:, None] + np.array([-1, 0, 1]))
        self._compute(days.tolist())
        begins = np.fromiter(map(self._begin, days.tolist()), np.int64, len(days))
        positions: Int64s = days[begins.searchsorted(times, "right") - 1] * self.ticks
        return positions

    def _begin(self, number: int) -> int:
        found = self._begins.get(number)
        if found is None:
            if not self._first <= number <= self._last:
                return number * self.ticks
            self._compute([number])
            found = self._begins[number]
        return found

    def _compute(self, numbers: Sequence[int]) -> None:
        missing = [n for n in numbers if self._first <= n <= self._last and n not in self._begins]
        if not missing:
            return
        midnights = pl.Series([_EPOCH + timedelta(number) for number in missing], dtype=pl.Date).cast(self._local)
        earliest, latest = (
            midnights.dt.replace_time_zone(self._zone, ambiguous=which, non_existent="null").dt.epoch(self._unit)
            for which in _TWICE
        )
        for number, begin, again in zip(missing, earliest, latest, strict=True):
            if begin is None:
                begin = self._after_gap(number)
            elif begin != again and self._day_of(again - 1) < number:
                begin = again  # the clock is set back to the day before, so that most of its last hour comes twice
            self._begins[number] = begin

    def _after_gap(self, number: int) -> int:
        """Return when a day begins whose midnight is skipped because the clock is set forward, by bisection."""
        low, high = (number - 2) * self.ticks, (number + 2) * self.ticks
        while high - low > 1:
            middle = (low + high) // 2
            if self._day_of(middle) >= number:
                high = middle
            else:
                low = middle
        return high

    def _day_of(self, time: int) -> int:
        """Return the number of the day that the calendar of the zone shows at an instant."""
        local = pl.Series([time]).cast(self._local).dt.replace_time_zone("UTC").dt.convert_time_zone(self._zone)
        shown: date = local.dt.date()[0]
        return (shown - _EPOCH).days
