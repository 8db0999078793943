"""Windows over windows of every kind: what a firing emits, in whichever pieces, is not late for the windows after it.

A watermark may be made of the first results of a firing, before the others have left the operator.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream import (
    CoProcessFunction,
    Count,
    Environment,
    KeyedProcessFunction,
    Last,
    Max,
    Mean,
    Min,
    ProcessContext,
    Sum,
    WatermarkStrategy,
    session,
    sliding,
    testing,
    tumbling,
)
from midstream.engine.core.errors import JobError
from midstream.engine.operators.windows import window_operator as window_base
from midstream.engine.operators.windows.window_factory import Window

START = datetime(2024, 1, 1)
COLUMNS = {"k": int, "at": datetime}
WINDOWS: dict[str, Window] = {"tumbling": tumbling(3), "sliding": sliding(6, 2), "session": session(2)}
TIMES_IN = {"tumbling": 1, "sliding": 3, "session": 1}
"""In how many windows a row is."""


def counted(rows: list[dict[str, Any]], column: str, less_s: float = 0) -> Counter[tuple[int, datetime]]:
    """The rows of each key and each window of 10 s, of results with an end, or a time `less_s` before it, in it."""
    found: Counter[tuple[int, datetime]] = Counter()
    for row in rows:
        seconds = int((row[column] - START).total_seconds() - less_s)
        found[row["k"], START + timedelta(seconds=seconds // 10 * 10)] += row["n"]
    return found


@settings(max_examples=examples(30))
@given(
    first=st.sampled_from(sorted(WINDOWS)),
    second=st.sampled_from(sorted(WINDOWS)),
    rows=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 40)), min_size=1, max_size=40),
    bound=st.sampled_from([0, 5, 50]),
    cut=st.sampled_from([1, 2, 7, "whole", [8, 1, 3]]),
    parallelism=st.sampled_from([1, 2, 3]),
    piece_rows=st.sampled_from([1, 3, 65_536]),
    marked=st.booleans(),
)
def test_no_result_is_late_for_the_windows_after_it(
    first, second, rows, bound, cut, parallelism, piece_rows, marked
) -> None:
    given_rows = [{"k": key, "at": START + timedelta(seconds=s)} for key, s in sorted(rows, key=lambda row: row[1])]
    source = Environment().from_collection([], schema=COLUMNS)
    timed = source.with_watermarks("at", WatermarkStrategy.bounded(bound))
    results = timed.key_by("k").window(WINDOWS[first]).aggregate(n=Count())
    again = (results.with_watermarks("window_end", WatermarkStrategy.monotonous()) if marked else results).key_by("k")
    per_ten = again.window(tumbling(10)).aggregate(n=Sum("n"))
    other = again.window(WINDOWS[second]).aggregate(n=Sum("n"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_base, "PIECE_ROWS", piece_rows)
        patch.setattr(window_base, "SLICE_ROWS", 2 * piece_rows)
        found = testing.run([results, per_ten, other], given_rows, cut=cut, parallelism=parallelism)
    assert not any(found.late.values())
    made = found[results]
    assert sum(row["n"] for row in made) == TIMES_IN[first] * len(rows)
    assert counted(found[per_ten], "window_start") == counted(
        made, "window_end", 0 if marked or first == "session" else 0.5
    )
    assert sum(row["n"] for row in found[other]) == TIMES_IN[first] * TIMES_IN[second] * len(rows)


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_a_result_has_the_event_time_of_its_window_for_whatever_follows(unit) -> None:
    """One unit before the end: for windows, functions, joins, and aggregates that look at the time."""
    kind = pa.timestamp(unit)
    source = Environment().from_collection([], schema={"k": int, "at": kind})
    timed = source.with_watermarks("at", WatermarkStrategy.monotonous())
    minutes = timed.key_by("k").window(tumbling("1 min")).aggregate(n=Count())
    assert minutes.event_time == "window_end"
    hours = minutes.key_by("k").window(tumbling("1 h")).aggregate(n=Sum("n"), last=Last("n"))
    stamped = minutes.key_by("k").process(Stamped(), {"window_end": kind, "time": kind})
    renamed = minutes.select("k", other="window_end").rename({"other": "ended"})
    assert renamed.event_time is None
    kept = minutes.rename({"window_end": "ended"}).select("k", "ended")
    assert kept.event_time == "ended"
    pairs = timed.join(kept, on="k", within=(0, "59999 ms"))
    begin = datetime(2024, 1, 1, 10)
    rows: list[dict[str, Any]] = [{"k": 1, "at": begin + timedelta(minutes=minute)} for minute in range(120)]
    found = testing.run([hours, stamped, pairs], rows)
    assert [(row["window_start"].hour, row["n"], row["last"]) for row in found[hours]] == [(10, 60, 1), (11, 60, 1)]
    least = timedelta(milliseconds=1) if unit == "ms" else timedelta(microseconds=1)
    assert len(found[stamped]) == 120
    assert all(row["window_end"] - row["time"] == least for row in found[stamped])
    expected = {row["at"] + timedelta(minutes=1): row["at"] for row in rows} if unit == "ms" else {}
    assert {row["ended"]: row["at"] for row in found[pairs]} == expected, "a minute less one unit is within 59,999 ms"


class Stamped(KeyedProcessFunction):
    def process(self, row: dict[str, Any], ctx: ProcessContext) -> dict[str, Any]:
        assert ctx.timestamp is not None
        return {"window_end": row["window_end"], "time": ctx.timestamp}


class AtTheEnd(KeyedProcessFunction):
    """Emits a row at the end of each window, when event time has reached it."""

    def process(self, row: dict[str, Any], ctx: ProcessContext) -> None:
        ctx.timers.event_time(row["window_end"])

    def on_timer(self, time: datetime, ctx: ProcessContext) -> dict[str, Any]:
        return {"window_end": time}


def test_after_a_function_the_event_time_of_windows_is_declared_again() -> None:
    """What the function emits at the end of a window would be late as a row of that window."""
    source = Environment().from_collection([], schema={"k": int, "at": datetime})
    timed = source.with_watermarks("at", WatermarkStrategy.monotonous()).key_by("k")
    made = timed.window(tumbling(10)).aggregate(n=Count())
    ends = made.key_by("k").process(AtTheEnd(), {"window_end": datetime})
    either = made.key_by("k").connect(timed.window(session(3)).aggregate(n=Count()).key_by("k"))
    assert ends.event_time is None and made.map(lambda row: row).event_time is None
    assert either.process(Both(), made.schema).event_time is None
    assert made.filter(pl.col("n") > 0).drop("window_start").event_time == "window_end"
    expected = made.expect(pl.col("n") > 0).window_all(tumbling(30)).aggregate(n=Sum("n"))
    with pytest.raises(JobError, match="the stream has no event time; call with_watermarks"):
        ends.window_all(tumbling(10))
    again = ends.with_watermarks("window_end", WatermarkStrategy.monotonous()).window_all(tumbling(10))
    rows = [{"k": 1, "at": START + timedelta(seconds=10 * second)} for second in range(6)]
    for cut in (1, 3, "whole"):
        assert [row["n"] for row in testing.run(again.aggregate(n=Count()), rows, cut=cut).rows] == [1] * 6
        assert [row["n"] for row in testing.run(expected, rows, cut=cut).rows] == [3, 3]


class Both(CoProcessFunction):
    def process1(self, row: dict[str, Any], ctx: ProcessContext) -> dict[str, Any]:
        return row

    process2 = process1


def test_the_last_second_that_there_is_can_be_windowed_twice() -> None:
    source = Environment().from_collection([], schema={"at": datetime})
    timed = source.with_watermarks("at", WatermarkStrategy.monotonous())
    twice = timed.window_all(tumbling(1)).aggregate(n=Count()).window_all(tumbling(1)).aggregate(n=Sum("n"))
    table, *_ = testing.run(twice.select("n"), [{"at": datetime(9999, 12, 31, 23, 59, 59)}]).tables().values()
    assert table.to_pylist() == [{"n": 1}]


def test_results_of_two_units_of_time_are_not_one_stream() -> None:
    timed = Environment().from_collection([], schema={"window_end": datetime}).uid("in")
    marked = timed.with_watermarks("window_end", WatermarkStrategy.monotonous())
    results = marked.window_all(tumbling("1 min")).aggregate(n=Count()).select("window_end")
    with pytest.raises(JobError, match=r"event time 'window_end', another one unit before 'window_end'"):
        marked.union(results)


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
@pytest.mark.parametrize("values", [[-0.0], [-0.0, -0.0], [0.0, -0.0], [-0.0, 0.0], [-0.0, None, 0.0, -0.0]])
def test_the_zero_of_an_aggregate_has_no_sign_wherever_batches_are_cut(kind, values) -> None:
    source = Environment().from_collection([], schema={"k": int, "f": kind, "at": datetime})
    windows = source.with_watermarks("at", WatermarkStrategy.monotonous()).key_by("k").window(tumbling("1 min"))
    made = windows.aggregate(least=Min("f"), most=Max("f"), total=Sum("f"), mean=Mean("f"))
    rows = [{"k": 1, "f": value, "at": START + timedelta(seconds=second)} for second, value in enumerate(values)]
    for parallelism in (1, 3):
        for cut in (1, 2, "whole"):
            [row] = testing.run(made, rows, cut=cut, parallelism=parallelism).rows
            assert [str(row[name]) for name in ("least", "most", "total", "mean")] == ["0.0"] * 4
