"""The join by windows: what plain Python joins window by window, whatever arrives when, and windows that do not fit."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any, get_args
from unittest.mock import patch
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from join_plans import LEFT, RIGHT, SAME_TIME, SIZES, Plan, PlannedJoin, Row, batch, contents, plans
from operator_world import World

from effort import examples
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.errors import ConfigError, JobError
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.functions.interval_join import How
from midstream.engine.operators.functions.window_join import window_join_operator
from midstream.engine.operators.windows.window_specs import LATE, Sliding, sliding, tumbling
from midstream.engine.state import columnar, join_index

HOWS = get_args(How)
Ends = tuple[int, int]
NANOSECONDS = pa.schema([pa.field("u", pa.timestamp("ns")) if field.name == "u" else field for field in RIGHT])


def operator_of(window: Sliding, how: str = "inner", right: pa.Schema = SAME_TIME, left: pa.Schema = LEFT) -> Any:
    ports = [Port("process1", ("k",), "t", left), Port("process2", ("id",), "u", right)]
    return window_join_operator("join", ports, window, how)


@settings(max_examples=examples(200))
@given(
    plans(40),
    st.sampled_from([(4, 4), (10, 5), (7, 3), (1, 1), (12, 4)]),
    st.integers(-5, 5),
    st.sampled_from(HOWS),
    st.sampled_from([RIGHT, SAME_TIME]),
    SIZES,
)
def test_the_result_is_what_python_joins_window_by_window(
    plan: Plan, lengths: Ends, offset: int, how: str, right: pa.Schema, sizes: Ends
) -> None:
    size, slide = lengths
    window = sliding(size / 1000, slide / 1000, offset / 1000)

    def windows(time: int) -> list[Ends]:
        starts = range(time - size + 1, time + 1)
        return [(start, start + size) for start in starts if (start - offset) % slide == 0]

    unit_ms = 1 if right is SAME_TIME else 0.001
    join = PlannedJoin(lambda: operator_of(window, how, right), right, lambda time: windows(time)[-1][1] - unit_ms)
    with patch.object(join_index, "RUN_ROWS", sizes[0]), patch.object(columnar, "OWN_CHUNK_ROWS", sizes[1]):
        found = join.go(plan)
    open_windows = {
        row: [window for window in windows(row[2]) if window[1] - unit_ms > join.marks_at[row[3]]] for row in join.given
    }
    bounds = [[value // 1000 for value in found[name].dt.epoch("us")] for name in ("window_start", "window_end")]
    numbers = [found[name].to_list() if name in found.columns else [None] * found.height for name in ("a", "b")]
    assert Counter(zip(found["k"], *bounds, *numbers, strict=True)) == joined(open_windows, how)


def joined(windows: dict[Row, list[Ends]], how: str) -> Counter[tuple[Any, ...]]:
    """Return how often each key, window, and pair of numbers is in the result."""
    sides: dict[tuple[int, Ends], tuple[list[int], list[int]]] = {}
    for (port, key, _, number), each in windows.items():
        for window in each:
            sides.setdefault((key, window), ([], []))[port].append(number)
    made: list[tuple[Any, ...]] = []
    for (key, window), (left, right) in sides.items():
        if how in ("semi", "anti"):
            pairs: list[tuple[int | None, int | None]] = [(a, None) for a in left if bool(right) == (how == "semi")]
        else:
            pairs = [(a, b) for a in left for b in right]
            pairs += [(a, None) for a in left if not right and how in ("left", "full")]
            pairs += [(None, b) for b in right if not left and how in ("right", "full")]
        made += [(key, *window, *pair) for pair in pairs]
    return Counter(made)


def test_a_window_has_ended_when_event_time_has_reached_its_last_microsecond() -> None:
    world = World(operator_of(tumbling(0.01), "left", RIGHT))
    world.process(batch([(0, 1, 5, 1)], 0), 0)
    world.advance(9_998)
    assert world.out.rows() == [] and contents(world)["left_unmatched"].height == 1
    world.process(batch([(0, 1, 2, 2)], 0), 0)
    world.advance(9_999)
    assert [row["a"] for row in world.out.rows()] == [1, 2]
    world.process(batch([(0, 1, 9, 3)], 0), 0)
    assert world.out.rows(LATE) == [{"k": 1, "t": datetime(1970, 1, 1) + timedelta(milliseconds=9), "a": 3}]


@pytest.mark.parametrize("zone", ["Europe/Paris", "Pacific/Apia", "America/Sao_Paulo"])
@pytest.mark.parametrize("lengths", [(1, 1), (2, 1), (3, 2)])
def test_days_of_a_time_zone_are_told_apart_even_if_two_windows_end_together(zone: str, lengths: Ends) -> None:
    """Apia had no 30 December 2011; Paris had days of 23 and 25 hours in 2024, and São Paulo days from 01:00 in 2018."""
    size, slide = lengths
    window = sliding(f"{size} d", f"{slide} d", zone=zone)
    firsts = [datetime(2011, 12, 27, tzinfo=UTC), datetime(2024, 3, 29, tzinfo=UTC), datetime(2018, 11, 2, tzinfo=UTC)]
    times = [first + timedelta(hours=7 * n) for first in firsts for n in range(20)]
    schemas = [pa.schema([("k", pa.int64()), (name, pa.timestamp("us", zone))]) for name in "tu"]
    ports = [Port(f"process{n}", ("k",), name, schema) for n, name, schema in zip((1, 2), "tu", schemas, strict=True)]
    world = World(window_join_operator("join", ports, window))
    for port, schema in enumerate(schemas):
        rows = [{"k": 1, schema.names[1]: time} for time in times]
        world.process(pa.RecordBatch.from_pylist(rows, schema=schema), port)
    days = {time: time.astimezone(ZoneInfo(zone)).date().toordinal() for time in times}
    epoch = datetime(1970, 1, 1).toordinal()

    def windows(time: datetime) -> set[int]:
        day = days[time] - epoch
        return {start for start in range(day - size + 1, day + 1) if start % slide == 0}

    expected = Counter((a, b) for a in times for b in times for _ in windows(a) & windows(b))
    assert Counter((row["t"].astimezone(UTC), row["u"].astimezone(UTC)) for row in world.out.rows()) == expected
    world.advance(MAX_WATERMARK_US)
    assert set(world.snapshot()) == {"progress"}


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_times_at_the_end_of_their_range_are_refused_with_their_row(unit: str) -> None:
    schema = pa.schema([("k", pa.int64()), ("t", pa.timestamp(unit)), ("a", pa.int64())])
    right = pa.schema([("id", pa.int64()), ("u", pa.timestamp(unit)), ("b", pa.int64())])
    world = World(operator_of(tumbling("1 h"), "full", right, schema))
    last = {"ms": 253_402_300_799_999, "us": 253_402_300_799_999_999, "ns": 2**63 - 1}[unit]
    for time in (last - 7_200_000_000_000 * (unit == "ns"), 0, -1):
        rows = pa.RecordBatch.from_arrays(
            [pa.array([1]), pa.array([time]).cast(schema.types[1]), pa.array([time])], schema=schema
        )
        world.process(rows, 0)
    for time in [last + 1] if unit != "ns" else [last - 1, -(2**63) + 1]:
        rows = pa.RecordBatch.from_arrays(
            [pa.array([1]), pa.array([time]).cast(schema.types[1]), pa.array([0])], schema=schema
        )
        with pytest.raises(JobError, match=r"operator 'join': event-time column 't' is -?\d+ .* since 1970"):
            world.process(rows, 0)
    world.advance(MAX_WATERMARK_US)
    starts, ends, times = (
        [value or 0 for _, made in world.out.batches for value in made.column(name).cast(pa.int64()).to_pylist()]
        for name in ("window_start", "window_end", "a")
    )
    hour = {"ms": 3_600_000, "us": 3_600_000_000, "ns": 3_600_000_000_000}[unit]
    assert len(times) == 3
    assert all(
        start <= time < end and end - start == hour for start, time, end in zip(starts, times, ends, strict=True)
    )


def test_windows_and_columns_that_do_not_fit_are_refused() -> None:
    for pattern, window in (
        (r"window size: 1 µs is finer than the event time 'window_end', which is in milliseconds", tumbling(1e-6)),
        (r"a row would be in 86,400 sliding windows of 1 d every 1 s, and it is held once for each", sliding("1 d", 1)),
        (r"are longer than event times of .* can be apart", tumbling("100000 d")),
    ):
        with pytest.raises(ConfigError, match=pattern):
            operator_of(window, "full", NANOSECONDS if "longer" in pattern else SAME_TIME)
    operator_of(tumbling(1e-6), right=RIGHT)  # which has microseconds
    keyed = pa.schema([("window_end", pa.int64()), ("t", pa.timestamp("us"))])
    ports = [Port(f"process{n}", ("window_end",), "t", keyed) for n in (1, 2)]
    with pytest.raises(ConfigError, match="the key column must not be called 'window_end'"):
        window_join_operator("join", ports, tumbling(1))


def test_state_of_other_windows_is_refused() -> None:
    settings_of = [
        operator_of(window, how).state_settings()[""] for window in (tumbling(1), tumbling(2)) for how in HOWS
    ]
    assert len({tuple(sorted(each.items())) for each in settings_of}) == len(settings_of)
    assert settings_of[0]["the window"] == "tumbling windows of 1 s"
