"""The first rows of each key so far, at multiples of event time, against plain Python: through restores and half-fired multiples."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_running_aggregates import INTERRUPT, SCHEMA, STEP, Row, Totals, by_key

from effort import examples
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.errors import ConfigError
from midstream.engine.operators.event_time_column import TimeColumn
from midstream.engine.operators.functions.periodic_aggregate import periodic_top_operator
from midstream.engine.operators.windows import window_operator as window_base


@cache
def operator_of(count: int, every_ms: int, ttl_ms: int | None, *, descending: bool) -> Any:
    return periodic_top_operator(
        "top",
        keys=["k"],
        event_time=TimeColumn("t"),
        count=count,
        by=["f"],
        descending=descending,
        schema=SCHEMA,
        every_us=every_ms * 1000,
        ttl_us=None if ttl_ms is None else ttl_ms * 1000,
    )


def order(row: Row, *, descending: bool) -> tuple[Any, ...]:
    """By `f`, nulls and NaN last, then by all other columns, ascending with nulls last."""
    f = row["f"]
    first = (True, 0) if f is None or math.isnan(f) else (False, -f if descending else f)
    rest = [row[name] for name in SCHEMA.names if name not in ("k", "f")]
    return (*first, *((value is None, 0 if value is None else value) for value in rest))


@settings(max_examples=examples(90))
@given(
    st.lists(STEP | INTERRUPT, max_size=10),
    st.none() | st.integers(1, 15),
    st.integers(1, 7),
    st.integers(1, 3),
    st.booleans(),
)
def test_a_key_has_its_first_rows_when_they_are_others_than_before(
    plan: list[tuple[str, Any]], ttl: int | None, every: int, count: int, descending: bool
) -> None:
    tops = Totals(lambda: operator_of(count, every, ttl, descending=descending))
    with patch.object(window_base, "PIECE_ROWS", 1), patch.object(window_base, "SLICE_ROWS", 1):
        taken, late = carry_out(plan, tops, every)
    expected: list[Row] = []
    for key, rows in taken.items():
        known: list[tuple[int, Row]] = []
        before = None
        for end in sorted({row["t"] // every * every + every for row in rows}):
            if ttl is not None and before is not None and end - before > ttl:
                known = []
            before = end
            new = [(end, row) for row in rows if end - every <= row["t"] < end]
            known = sorted([*known, *new], key=lambda each: order(each[1], descending=descending))[:count]
            if any(since == end for since, _ in known):
                for rank, (_, row) in enumerate(known, 1):
                    others = {name: value for name, value in row.items() if name not in ("k", "t")}
                    expected.append({"k": key, "t": end, "rank": rank, **others})
    assert by_key(tops.found) == by_key(expected)
    assert len(tops.late) == late


def carry_out(plan: Sequence[tuple[str, Any]], tops: Totals, every: int) -> tuple[dict[str, list[Row]], int]:
    """Return the rows of each key that are not late, and the number of the others."""
    taken: dict[str, list[Row]] = defaultdict(list)
    late = 0
    watermark = -(2**62)
    for step, argument in plan:
        if step == "rows":
            rows = [{name: row.get(name) for name in SCHEMA.names} for row in argument]
            tops.process(rows)
            for row in rows:
                if row["t"] // every * every + every - 1 <= watermark:
                    late += 1
                else:
                    taken[row["k"]].append(row)
        elif step == "advance":
            watermark = max(watermark, argument)
            tops.advance(watermark * 1000)
        elif step == "interrupt":
            time, slices, parallelism = argument
            watermark = max(watermark, time)
            for world, steps in zip(tops.worlds, slices, strict=False):
                any(world.operator.advance_watermark(watermark * 1000) for _ in range(steps))
            tops.restore(parallelism)
            tops.advance(watermark * 1000)
        else:
            tops.restore(argument)
    tops.advance(MAX_WATERMARK_US)
    tops.drain()
    return taken, late


def test_the_time_of_the_result_cannot_be_a_key() -> None:
    with pytest.raises(
        ConfigError, match="the event-time column 't' has the time of the result, so it cannot be a key"
    ):
        periodic_top_operator(
            "top", keys=["t"], event_time=TimeColumn("t"), count=1, by=["f"], descending=True, schema=SCHEMA, every_us=1
        )  # fmt: skip


def test_state_with_an_expiry_is_not_that_without_one() -> None:
    with_ttl, longer, without = (operator_of(1, 10, ttl, descending=True).state_settings() for ttl in (5, 6, None))
    assert with_ttl == longer
    assert with_ttl["table:totals"] != without["table:totals"]
