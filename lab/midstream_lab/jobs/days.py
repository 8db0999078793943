"""Windows of local days in a simulated job: which days they are, and what is computed of them, in plain Python.

The time of a run is too short for days, so rows are at other times for these windows: half an hour for each millisecond,
across a change of the clock. Their values follow from their ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from functools import cache
from math import ceil, isclose
from random import Random
from typing import Any, Final, NamedTuple
from zoneinfo import ZoneInfo

import polars as pl
import pyarrow as pa

from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.operators.windows.aggregates import Aggregate, ArgMax, ArgMin, Count, First, Last, Sum
from midstream.engine.operators.windows.distinct_count import CountDistinct
from midstream.engine.operators.windows.moments import Covariance, Variance
from midstream.engine.operators.windows.sketches import ApproxCountDistinct, Quantile
from midstream.engine.operators.windows.value_lists import Collect, TopN
from midstream.engine.operators.windows.window_factory import sliding, window_operator
from midstream.engine.operators.windows.window_operator import WindowOperator
from midstream_lab.jobs.recorded_rows import SCHEMA, time_ms
from midstream_lab.jobs.timed import Ids

SCALE: Final = 1_800_000
"""The microseconds of local time for each of the run."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_US: Final = timedelta(microseconds=1)
_CHANGES: Final = {
    "Europe/Paris": ("2024-03-31", "2024-10-27"),
    "America/Santiago": ("2024-04-07", "2024-09-08"),  # the clock is set at midnight
    "America/Havana": ("2024-03-10", "2024-11-03"),  # a midnight is skipped, and another comes twice
    "Australia/Lord_Howe": ("2024-04-07", "2024-10-06"),  # by half an hour
}
"""Days on which the clock changes, by time zone."""


class Value(NamedTuple):
    """What the aggregates read of a row."""

    at: int
    x: int | None
    y: float | None
    word: str
    id: int


@cache
def value_of(row: int) -> Value:
    drawn = row * 2_654_435_761 & 0xFFFFFFFF
    x, y = (drawn >> 8) % 7 - 3, (drawn >> 11) % 1000 / 8
    return Value(
        time_ms(row), None if drawn % 5 == 0 else x, None if drawn % 7 == 0 else y, "abcde"[(drawn >> 16) % 5], row
    )


_FIELDS: Final = (
    pa.field("at", pa.timestamp("us")),
    pa.field("x", pa.int64()),
    pa.field("y", pa.float64()),
    pa.field("word", pa.large_string()),
)
_READ_SCHEMA: Final = pa.schema([*SCHEMA, *_FIELDS])
_SOME: Final = pl.col("x") > 0


def _some(rows: Sequence[Value]) -> list[Value]:
    return [row for row in rows if row.x is not None and row.x > 0]


def _xs(rows: Sequence[Value]) -> list[int]:
    return [row.x for row in rows if row.x is not None]


def _ys(rows: Sequence[Value]) -> list[float]:
    return [row.y for row in rows if row.y is not None]


def _covariance(pairs: Sequence[tuple[float, float]], ddof: int) -> float | None:
    if len(pairs) <= ddof:
        return None
    mx, my = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    products = [(x - mx) * (y - my) for x, y in pairs]
    return float(sum(products)) / (len(pairs) - ddof)


def _median(rows: Sequence[Value]) -> float | None:
    found = sorted(_ys(rows))
    return found[ceil(len(found) / 2) - 1] if found else None


_NONE: Final[tuple[Any, ...]] = (None, None, None)
_AGGREGATES: Final[Mapping[str, tuple[Aggregate, Callable[[list[Value]], object]]]] = {
    "distinct": (CountDistinct("x"), lambda rows: len({*_xs(rows)})),
    "pairs": (CountDistinct("x", "word"), lambda rows: len({(r.x, r.word) for r in rows if r.x is not None})),
    "some_words": (CountDistinct("word", where=_SOME), lambda rows: len({row.word for row in _some(rows)})),
    "about": (ApproxCountDistinct("id"), lambda rows: len({row.id for row in rows})),
    "median": (Quantile("y", 0.5), _median),
    "words": (Collect("word"), lambda rows: [row.word for row in sorted(rows, key=lambda r: (r.at, r.word))]),
    "first_three": (
        Collect("x", limit=3),
        lambda rows: [x for _, x in sorted((row.at, row.x) for row in rows if row.x is not None)[:3]],
    ),
    "top": (
        TopN("word", 2, by="y"),
        lambda rows: [word for _, word in sorted((-row.y, row.word) for row in rows if row.y is not None)[:2]],
    ),
    "of_least": (
        ArgMin("word", by="x"),
        lambda rows: min(((r.x, i, r.word) for i, r in _known_x(rows)), default=_NONE)[2],
    ),
    "of_most": (ArgMax("x", by="y"), lambda rows: min(((-y, i, r.x) for i, r, y in _known_y(rows)), default=_NONE)[2]),
    "variance": (Variance("y"), lambda rows: _covariance([(y, y) for y in _ys(rows)], 1)),
    "covariance": (
        Covariance("x", "y", ddof=0),
        lambda rows: _covariance([(r.x, r.y) for r in rows if r.x is not None and r.y is not None], 0),
    ),
    "came_first": (First("x", order="arrival"), lambda rows: rows[0].x),
    "came_last": (Last("word", order="arrival"), lambda rows: rows[-1].word),
    "first": (First("x"), lambda rows: min(enumerate(rows), key=lambda each: (each[1].at, each[0]))[1].x),
    "last": (Last("y"), lambda rows: max(enumerate(rows), key=lambda each: (each[1].at, each[0]))[1].y),
    "some": (Count(where=_SOME), lambda rows: len(_some(rows))),
    "sum_of_some": (Sum("x", where=_SOME), lambda rows: sum(_xs(_some(rows)))),
}
"""Aggregates, and what they are of rows in the order of arrival."""


def _known_x(rows: Sequence[Value]) -> list[tuple[int, Value]]:
    return [(number, row) for number, row in enumerate(rows) if row.x is not None]


def _known_y(rows: Sequence[Value]) -> list[tuple[int, Value, float]]:
    return [(number, row, row.y) for number, row in enumerate(rows) if row.y is not None]


@dataclass(frozen=True)
class Days:
    """Windows of `size` local days, one beginning on each day, with some aggregates."""

    zone: str
    size: int
    begin_us: int
    """The instant at which the time of the run begins."""
    aggregates: tuple[str, ...]

    def operator(self, uid: str, allowed_ms: int) -> WindowOperator:
        return window_operator(
            uid,
            window=sliding(f"{self.size} d", "1 d", zone=self.zone),
            keys=["key"],
            event_time="at",
            aggregates={"ids": Ids(), **{name: _AGGREGATES[name][0] for name in self.aggregates}},
            schema=_READ_SCHEMA,
            allowed_lateness=timedelta(microseconds=allowed_ms * 1000 * SCALE),
        )

    def with_values(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows with what the aggregates read, at their local times."""
        at_us = batch.column("ts").view(pa.int64()).to_numpy() * SCALE + self.begin_us
        values = [value_of(row) for row in batch.column("id").to_pylist()]
        columns = [pa.array([value[i] for value in values], _FIELDS[i].type) for i in (1, 2, 3)]
        at = pa.array(at_us).view(pa.timestamp("us"))
        return pa.RecordBatch.from_arrays([*batch.columns, at, *columns], schema=_READ_SCHEMA)

    def watermark(self, watermark_us: int) -> int:
        """Return the watermark of local times. What is one microsecond of the run before an instant is so here too."""
        if watermark_us in (MIN_WATERMARK_US, MAX_WATERMARK_US):
            return watermark_us
        return (watermark_us + 1) * SCALE + self.begin_us - 1

    def watermark_of_run(self, watermark_us: int) -> int:
        if watermark_us in (MIN_WATERMARK_US, MAX_WATERMARK_US):
            return watermark_us
        return self.time_of_run(watermark_us + 1) - 1

    def time_of_run(self, instant_us: int) -> int:
        passed, rest = divmod(instant_us - self.begin_us, SCALE)
        assert not rest, f"{instant_us} µs is at no whole microsecond of the run"
        return passed

    def windows(self, time_us: int) -> list[tuple[int, int]]:
        """Return the bounds, in the time of the run, of the windows to which a time of the run belongs, ascending."""
        instant = _EPOCH + timedelta(microseconds=time_us * SCALE + self.begin_us)
        return self._windows_of(instant.astimezone(ZoneInfo(self.zone)).toordinal())

    def last_end(self, pane_us: int) -> int:
        """Return the end, in the time of the run, of the last window of a day. `pane_us`: the day's midnight as if in UTC."""
        return self._windows_of((_EPOCH + timedelta(microseconds=pane_us)).toordinal())[-1][1]

    def _windows_of(self, day: int) -> list[tuple[int, int]]:
        return [
            (self._midnight(first), self._midnight(first + self.size)) for first in range(day - self.size + 1, day + 1)
        ]

    @cache  # noqa: B019 - there are few, and they are never dropped
    def _midnight(self, day: int) -> int:
        local = datetime.combine(datetime.fromordinal(day), time(), ZoneInfo(self.zone))
        return self.time_of_run((local.astimezone(UTC) - _EPOCH) // _US)

    def wrong_values(self, batch: pa.RecordBatch) -> str:
        """Return how the aggregates in emitted windows differ from those of their rows, which are in `ids`; "" if not."""
        for emitted in batch.select(["ids", *self.aggregates]).to_pylist():
            rows = [value_of(row) for row in emitted["ids"]]
            for name in self.aggregates:
                due = _AGGREGATES[name][1](rows)
                if not _is_equal(emitted[name], due):
                    return f"{name} of the rows {emitted['ids']} is {emitted[name]!r} instead of {due!r}"
        return ""


def _is_equal(found: object, due: object) -> bool:
    if not isinstance(found, float) or not isinstance(due, float):
        return found == due
    return isclose(found, due, rel_tol=0.01, abs_tol=1e-9)  # the error of a quantile


def _drawn(random: Random) -> Days:
    zone = random.choice(tuple(_CHANGES))
    change = datetime.fromisoformat(random.choice(_CHANGES[zone])).replace(tzinfo=UTC)
    begin_us = (change - timedelta(hours=random.randrange(72)) - _EPOCH) // _US
    size, drawn = random.choice((1, 1, 2)), random.sample(tuple(_AGGREGATES), 3)
    if size > 1:  # windows that overlap are put together from days, which lose the order of arrival
        drawn = [name.removeprefix("came_") for name in drawn]
    return Days(zone, size, begin_us, tuple(dict.fromkeys(drawn)))


DAYS: Final[Mapping[str, Days]] = {f"days_{n:02}": _drawn(Random(f"days {n}")) for n in range(60)}
"""The kinds of such nodes."""
