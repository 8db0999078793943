"""Days of time zones against Python's own calendar: every zone and year, midnights that are skipped or come twice."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream import Count, DataStream, Environment, Sum, WatermarkStrategy, sliding, testing, tumbling
from midstream.engine.core.errors import ConfigError
from midstream.engine.operators.windows.local_days import LocalDays

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DAY = 86_400_000_000
ZONES = (
    *("UTC", "Europe/Paris", "America/New_York", "America/Sao_Paulo", "America/Havana", "America/St_Johns"),
    *("Asia/Kathmandu", "Australia/Lord_Howe", "Africa/Cairo", "Asia/Gaza", "Pacific/Apia", "America/Toronto"),
)


def us(time: datetime) -> int:
    return (time - EPOCH) // timedelta(microseconds=1)


def shown(zone: str, time_us: int) -> date:
    return (EPOCH + timedelta(microseconds=time_us)).astimezone(ZoneInfo(zone)).date()


def expected(zone: str, time_us: int) -> date:
    """The day that the calendar shows, or the earlier one if the calendar shows that again within the next two hours."""
    later = [shown(zone, time_us + minutes * 60_000_000) for minutes in range(0, 121, 20)]
    return min(later)


@settings(max_examples=examples(150), deadline=None)
@given(
    zone=st.sampled_from(ZONES),
    times=st.lists(
        st.datetimes(datetime(1900, 1, 2), datetime(2037, 12, 30), timezones=st.just(UTC)), min_size=1, max_size=20
    ),
)
def test_an_instant_belongs_to_the_day_that_the_calendar_shows(zone: str, times: list[datetime]) -> None:
    days = LocalDays(zone, "us")
    ticks = np.array([us(time) for time in times])
    found = days.positions(ticks)
    assert found.tolist() == [days.position(int(time)) for time in ticks], "alone and in a batch"
    for time, position in zip(ticks.tolist(), found.tolist(), strict=True):
        day = date(1970, 1, 1) + timedelta(days=position // DAY)
        assert day == expected(zone, time), (zone, time)
        assert days.instant(position) <= time < days.instant(position + DAY)


@pytest.mark.parametrize(
    ("zone", "day", "hours"),
    [
        ("Europe/Paris", date(2024, 3, 31), 23),
        ("Europe/Paris", date(2024, 10, 27), 25),
        ("America/Sao_Paulo", date(2018, 11, 4), 23),  # midnight is skipped
        ("America/Havana", date(2024, 11, 3), 25),  # the hour after midnight comes twice
        ("America/St_Johns", date(2010, 11, 6), 25),  # at 00:01 it was 23:01 again
        ("Australia/Lord_Howe", date(2024, 4, 7), 24.5),
        ("Pacific/Apia", date(2011, 12, 30), 0),  # there was no such day
    ],
)
def test_days_in_which_the_clock_is_set(zone: str, day: date, hours: float) -> None:
    for unit, per_hour in (("ms", 3_600_000), ("us", 3_600_000_000), ("ns", 3_600_000_000_000)):
        days = LocalDays(zone, unit)  # type: ignore[arg-type]
        position = (day - date(1970, 1, 1)).days * days.ticks
        assert days.instant(position + days.ticks) - days.instant(position) == round(hours * per_hour)


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from(ZONES), st.integers(-(2**61), 2**61), st.integers(0, 2 * DAY))
def test_positions_never_go_back(zone: str, time: int, step: int) -> None:
    days = LocalDays(zone, "us")
    before, after = days.position(time), days.position(time + step)
    assert before <= after
    assert days.instant(before) <= time < days.instant(before + DAY)


def rows(zone: str) -> list[dict[str, object]]:
    """A row each half hour over both changes of the clock, of two keys."""
    starts = [datetime(2024, 3, 29, tzinfo=UTC), datetime(2024, 10, 25, tzinfo=UTC)]
    times = [start + timedelta(minutes=30) * n for start in starts for n in range(24 * 2 * 5)]
    return [{"k": n % 2, "at": time.replace(tzinfo=None), "n": n} for n, time in enumerate(times)]


@pytest.mark.parametrize("zone", ["Europe/Paris", "America/New_York", "Pacific/Auckland"])
@pytest.mark.parametrize(("days", "every"), [(1, 1), (3, 1), (7, 7)])
@pytest.mark.parametrize("cut", ["whole", 1, 7])
def test_windows_of_days_are_what_polars_makes_of_them(zone: str, days: int, every: int, cut: int) -> None:
    given_rows = rows(zone)
    env = Environment("days")
    stream = env.from_collection(given_rows).with_watermarks("at", WatermarkStrategy.monotonous()).key_by("k")
    window = sliding(f"{days} d", f"{every} d", zone=zone)
    made = testing.run(stream.window(window).aggregate(n=Count(), total=Sum("n")), cut=cut).rows
    frame = pl.DataFrame(given_rows).with_columns(
        local=pl.col("at").dt.replace_time_zone("UTC").dt.convert_time_zone(zone).dt.date()
    )
    wanted: dict[tuple[int, date], tuple[int, int]] = {}
    epoch = date(1970, 1, 1)
    for row in frame.rows(named=True):
        number = (row["local"] - epoch).days
        for start in range(number - days + 1, number + 1):
            if start % every == 0:
                key = (row["k"], epoch + timedelta(start))
                count, total = wanted.get(key, (0, 0))
                wanted[key] = count + 1, total + row["n"]
    found = {}
    for row in made:
        local = row["window_start"].replace(tzinfo=UTC).astimezone(ZoneInfo(zone))
        assert local.time() == datetime.min.time(), "windows begin at local midnight"
        end = row["window_end"].replace(tzinfo=UTC).astimezone(ZoneInfo(zone))
        assert end.time() == datetime.min.time()
        assert (end.date() - local.date()).days == days
        found[row["k"], local.date()] = row["n"], row["total"]
    assert found == wanted
    assert len(found) == len(made)


def test_a_late_row_counts_until_the_day_and_the_lateness_are_over() -> None:
    env = Environment("late")
    clicks = env.from_collection([{"k": 1, "at": datetime(2024, 10, 27)}]).uid("clicks")
    timed = clicks.with_watermarks("at", WatermarkStrategy.monotonous()).key_by("k")
    days = timed.window(tumbling("1 d", zone="Europe/Paris")).allowed_lateness("1 h").aggregate(n=Count())
    with testing.job(days) as job:
        job.feed({"k": 1, "at": "2024-10-27 22:59:59"})  # in Paris, the 27th ends at 23:00 UTC
        assert job.take() == []
        job.feed({"k": 1, "at": "2024-10-27 23:00:00"})
        assert [row["n"] for row in job.take()] == [1]
        job.feed({"k": 1, "at": "2024-10-26 22:00:00"})  # the first instant of the 27th
        assert [row["n"] for row in job.take()] == [2]
        job.feed([{"k": 1, "at": "2024-10-27 23:59:59.999999"}, {"k": 1, "at": "2024-10-27 12:00:00"}])
        assert [row["n"] for row in job.take()] == [3]
        job.feed({"k": 1, "at": "2024-10-28 00:00:00"})
        job.feed({"k": 1, "at": "2024-10-27 12:00:00"})
        assert job.take() == [], "an hour after the end of the day the window takes no more rows"


@pytest.mark.parametrize("after", [5, 100, 241])
def test_a_restore_goes_on_within_a_day(after: int) -> None:
    def per_day() -> DataStream:
        stream = Environment("days").from_collection(given_rows[:1]).uid("rows")
        timed = stream.with_watermarks("at", WatermarkStrategy.monotonous()).key_by("k")
        return timed.window(sliding("2 d", "1 d", zone="Europe/Paris")).aggregate(n=Count(), total=Sum("n")).uid("w")

    given_rows = rows("Europe/Paris")
    whole = testing.run(per_day(), given_rows).rows
    with testing.job(per_day()) as job:
        before = job.feed(given_rows[:after]).take()
        snapshot = job.snapshot()
    with testing.job(per_day(), restore=snapshot) as job:
        assert before + job.feed(given_rows[after:]).end().take() == whole


def test_windows_with_a_zone_are_whole_days_of_a_zone_that_exists() -> None:
    with pytest.raises(ConfigError, match="zone='Europe/Pariss' is not a time zone; give a name of the IANA database"):
        tumbling("1 d", zone="Europe/Pariss")
    with pytest.raises(ConfigError, match="size '6 h' is not a whole number of days"):
        tumbling("6 h", zone="Europe/Paris")
    with pytest.raises(ConfigError, match="offset '2 h' is not a whole number of days"):
        tumbling("1 d", "2 h", zone="Europe/Paris")
    with pytest.raises(ConfigError, match="zone=1 is not a time zone"):
        tumbling("1 d", zone=1)  # type: ignore[arg-type]
    assert str(tumbling("1 d", zone="Europe/Paris")) == "tumbling windows of 1 d in Europe/Paris"
