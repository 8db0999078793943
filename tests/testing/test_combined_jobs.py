"""Jobs whose rows are combined before they are sent: the same results as without, or the same error."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import polars as pl
import pytest

from midstream import (
    LATE,
    Count,
    Environment,
    First,
    JobError,
    Last,
    Max,
    Mean,
    Min,
    Sum,
    WatermarkStrategy,
    session,
    sliding,
    testing,
    tumbling,
)
from midstream.engine.exchange import adaptive_combiner as combining
from midstream.engine.exchange.adaptive_combiner import AdaptiveCombiner
from midstream.engine.operators.windows.window_operator import WindowOperator
from midstream.engine.operators.windows.window_specs import Window

NOON = datetime(2024, 1, 1, 12)
ROWS = 20_000
WINDOWS: list[Window] = [tumbling("10 s"), sliding("10 s", "2 s"), session("3 s"), tumbling("1 min")]


def rows() -> pl.DataFrame:
    """Seven keys, with times that go to and fro by a second; a gap in the middle."""
    numbers = pl.int_range(ROWS, eager=True)
    ms = numbers * 2 + (numbers * 7919) % 1000 + (numbers >= ROWS // 2).cast(pl.Int64) * 10_000
    return pl.DataFrame(
        {
            "key": (numbers * 104_729 % 7).cast(pl.String),
            "at": pl.Series([NOON + timedelta(milliseconds=each) for each in ms.to_list()]),
            "n": numbers * 7919 % 1001 - 500,
            "x": (numbers * 31 % 997).cast(pl.Float64) / 7,
        }
    )


def stream(env: Environment):
    read = env.from_collection([], schema={"key": str, "at": datetime, "n": int, "x": float}).uid("rows")
    return read.with_watermarks("at", WatermarkStrategy.bounded("2 s"))


def windowed(window: Window, *, is_keyed: bool):
    rows_of = stream(Environment())
    opened = rows_of.key_by("key").window(window) if is_keyed else rows_of.window_all(window)
    found = opened.allowed_lateness("1 s").aggregate(
        rows=Count(),
        sum=Sum("n"),
        low=Min("n"),
        high=Max("n"),
        first=First("n"),
        last=Last("n"),
        x=Sum("x"),
        m=Mean("x"),
    )
    return found.uid("found")


def found_in(what: Any, *, combines: bool, monkeypatch: pytest.MonkeyPatch, given: pl.DataFrame) -> tuple[list, int]:
    """The results, and how many batches were combined."""
    combined = 0
    original, without_tags = AdaptiveCombiner.apply, WindowOperator.combiner

    def apply(self: AdaptiveCombiner, batch: Any) -> Any:
        nonlocal combined
        sent = original(self, batch)
        combined += sent is not batch
        return sent

    with monkeypatch.context() as patched:
        patched.setattr(AdaptiveCombiner, "apply", apply)
        # A test reads every side output, and so late rows, of which there are none here.
        patched.setattr(WindowOperator, "combiner", lambda self, tags: without_tags(self, ()))
        if not combines:
            patched.setattr(combining, "ROWS_MIN", 2 * ROWS)
        else:
            patched.setattr(combining, "ROWS_MIN", 500)
        found = testing.run(what, given, cut=[2_000, 100, 3_000], parallelism=2)
    results, late = found["found"], found["found", LATE]
    assert not late
    return sorted(results, key=lambda row: (row.get("key", ""), row["window_start"], row["rows"])), combined


@pytest.mark.parametrize("is_keyed", [True, False])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_results_are_the_same(window: Window, is_keyed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    what = windowed(window, is_keyed=is_keyed)
    with_it, batches = found_in(what, combines=True, monkeypatch=monkeypatch, given=rows())
    without, none = found_in(what, combines=False, monkeypatch=monkeypatch, given=rows())
    assert batches > 3 and none == 0 and len(with_it) > (1 if is_keyed else 0)
    assert len(with_it) == len(without)
    for one, other in zip(with_it, without, strict=True):
        assert {name: one[name] for name in one if name not in "xm"} == {
            name: other[name] for name in other if name not in "xm"
        }
        assert (one["x"], one["m"]) == pytest.approx((other["x"], other["m"]), rel=1e-13)


def test_a_row_without_a_key_is_refused_with_the_same_words_and_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = rows().with_columns(key=pl.when(pl.int_range(ROWS) == 1234).then(None).otherwise("key"))
    texts = []
    for combines in (True, False):
        with pytest.raises(JobError) as raised:
            found_in(windowed(WINDOWS[0], is_keyed=True), combines=combines, monkeypatch=monkeypatch, given=bad)
        texts.append(str(raised.value).splitlines()[0].partition(";")[0])
    assert texts[0] == f"operator 'window': {texts[1]}" and "'key' is null in the row" in texts[1]


def test_late_rows_that_are_read_are_not_combined_away(monkeypatch: pytest.MonkeyPatch) -> None:
    result = stream(Environment()).key_by("key").window(tumbling("10 s")).aggregate(rows=Count()).uid("found")
    late = result.side_output(LATE).select("key", "n").uid("late")
    tried = []
    monkeypatch.setattr(AdaptiveCombiner, "apply", lambda self, batch: tried.append(batch) or batch)
    given = pl.concat([rows(), rows().head(1_000)])
    found = testing.run([result, late], given, cut=2_000, parallelism=2)
    assert not tried
    assert len(found["late"]) == 1_000 and "__rows" not in found["late"][0]
    assert sum(row["rows"] for row in found["found"]) == ROWS
