"""Sessions whose rows have their own gaps, against plain Python: late rows, half-fired windows, restores, all types of gaps."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Literal

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import World
from test_windows_interrupted import AGGREGATES, SCHEMA, Plan, check, keys, small_slices, steps  # noqa: F401 - a fixture
from window_oracle import Row, SessionOracle, Window

from effort import examples
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.core.errors import ConfigError, JobError, SchemaError
from midstream.engine.operators.windows.aggregates import Count
from midstream.engine.operators.windows.session_windows import Gap
from midstream.engine.operators.windows.window_factory import Session, Sliding, session, window_operator


class GapOracle(SessionOracle):
    """As Flink's dynamic gaps: a row spans its time and its gap, and spans that touch are one session."""

    def assign(self, row: Row) -> list[Window]:
        self.gap = gap_of(row[2])
        key, time, _ = row
        touching = [w for w in self.windows[key] if w.start <= time + self.gap and w.end >= time]
        start, end = min([time, *(w.start for w in touching)]), max([time + self.gap, *(w.end for w in touching)])
        if self.is_late(key, end):
            return []
        merged = Window(start, end, [row for w in touching for row in w.rows])
        self.windows[key] = [w for w in self.windows[key] if w not in touching] + [merged]
        return [merged]


def gap_of(value: int) -> int:
    """Values are from -9 to 9."""
    return value + 10


def with_gaps(window: Sliding | Session, lateness: int) -> Any:
    return window_operator(
        "w",
        window=window,
        keys=["k"],
        event_time="t",
        aggregates=AGGREGATES,
        schema=SCHEMA,
        allowed_lateness=lateness / 1000,
    )


@pytest.fixture
def gaps_from_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are in milliseconds from 1; as a column of numbers they would be seconds."""
    monkeypatch.setattr(Gap, "ends", lambda _, times, batch: times + gap_of(batch.column("v").to_numpy()))


@pytest.mark.usefixtures("small_slices", "gaps_from_values")
@settings(max_examples=examples(60))
@given(st.sampled_from([0, 0, 5, 25]), keys, steps)
def test_sessions_with_gaps_of_their_rows(lateness: int, of_keys: tuple[int, ...], plan: Plan) -> None:
    check(session(pl.col("v")), GapOracle(0, lateness), lateness, of_keys, plan, with_gaps)


MS = pa.timestamp("ms")
GAPS: list[tuple[pa.DataType, Any, pa.DataType, int]] = [
    (pa.int64(), 3, MS, 3_000_000),
    (pa.uint8(), 3, pa.timestamp("ns"), 3_000_000),
    (pa.float64(), 0.29, MS, 290_000),
    (pa.float32(), 0.5, pa.timestamp("us", "Asia/Tokyo"), 500_000),
    (pa.duration("s"), timedelta(seconds=2), MS, 2_000_000),
    (pa.duration("ms"), timedelta(milliseconds=7), pa.timestamp("us"), 7_000),
    (pa.duration("us"), timedelta(microseconds=7_999), MS, 7_000),
    (pa.duration("ns"), timedelta(microseconds=5), pa.timestamp("ns"), 5),
]


def operator(kind: pa.DataType, time: pa.DataType = MS) -> Any:
    schema = pa.schema([pa.field("k", pa.int64()), pa.field("t", time), pa.field("gap", kind)])
    return window_operator(
        "w", window=session(pl.col("gap")), keys=["k"], event_time="t", aggregates={"n": Count()}, schema=schema
    )


@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize(("kind", "gap", "time", "expected_us"), GAPS, ids=str)
def test_gaps_of_all_types_end_a_session(
    kind: pa.DataType, gap: Any, time: Any, expected_us: int, combined: bool
) -> None:
    world = World(operator(kind, time))
    schema = world.operator._aggregation.input_schema  # type: ignore[attr-defined]
    gaps = pa.array([gap, gap], kind).cast(schema.field("gap").type)
    rows = pa.RecordBatch.from_arrays([pa.array([1, 1]), pa.array([0, 0]).view(time), gaps], schema=schema)
    combiner = world.operator.combiner(())
    assert combiner is not None
    world.process(combiner.combine(rows) if combined else rows)
    world.advance(MAX_WATERMARK_US)
    [(_, made)] = world.out.batches
    assert made.column("n").to_pylist() == [2]
    end = made.column("window_end").cast(pa.timestamp("us", time.tz)).cast(pa.int64())
    assert end.to_pylist() == [expected_us]


@pytest.mark.parametrize(
    ("kind", "gap"),
    [
        (pa.int64(), 0),
        (pa.int64(), -1),
        (pa.int64(), 2**62),
        (pa.float64(), float("nan")),
        (pa.float64(), float("inf")),
        (pa.float64(), 0.0001),
        (pa.duration("us"), timedelta(microseconds=999)),
        (pa.duration("s"), timedelta(-1)),
    ],
)
def test_gaps_that_are_none_are_refused_with_their_row(kind: pa.DataType, gap: Any) -> None:
    world = World(operator(kind))
    schema = world.operator._aggregation.input_schema  # type: ignore[attr-defined]
    gaps = pa.array([gap], kind).cast(schema.field("gap").type)
    rows = pa.RecordBatch.from_arrays([pa.array([7]), pa.array([5]).view(MS), gaps], schema=schema)
    with pytest.raises(
        JobError, match=r"operator 'w': window gap: column 'gap' is .*'k': 7.*a gap must be longer than 0"
    ):
        world.process(rows)
    with pytest.raises(JobError, match="operator 'w': window gap: column 'gap' is null"):
        world.process(rows.set_column(2, schema.field(2), pa.nulls(1, gaps.type)))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"is not a column; compute it before, with with_columns\(gap=…\)"):
        session(pl.col("gap") * 2)
    with pytest.raises(SchemaError, match=r"operator 'w': window gap: column 'gap' is .*string"):
        operator(pa.large_string())
    with pytest.raises(SchemaError, match="operator 'w': window gap: column 'other' is not in the stream's schema"):
        window_operator(
            "w",
            window=session(pl.col("other")),
            keys=["k"],
            event_time="t",
            aggregates={"n": Count()},
            schema=SCHEMA,
        )
    assert operator(pa.int64()).state_settings() != operator(pa.int64(), pa.timestamp("us")).state_settings()
    assert str(session(pl.col("gap"))) == "sessions with the gap in column 'gap'"


@pytest.mark.parametrize("unit", ["ms", "us"])
@pytest.mark.parametrize("kind", [pa.int64(), pa.float64(), pa.duration("s")], ids=str)
def test_a_gap_that_ends_after_the_year_9999_is_refused_and_one_that_ends_with_it_is_not(
    unit: Literal["ms", "us"], kind: pa.DataType
) -> None:
    time = pa.timestamp(unit)
    world = World(operator(kind, time))
    schema = world.operator._aggregation.input_schema  # type: ignore[attr-defined]
    last = pa.array([datetime(9999, 12, 31, 23, 59, 50)]).cast(time)

    def batch(gap: int) -> pa.RecordBatch:
        gaps = pa.array([gap]).cast(kind).cast(schema.field("gap").type)
        return pa.RecordBatch.from_arrays([pa.array([7]), last, gaps], schema=schema)

    world.process(batch(9))
    with pytest.raises(JobError, match=r"column 'gap' is .*10.*'k': 7.*by the end of the year 9999; filter out"):
        world.process(batch(10))
