"""drift=: which ones are refused, and a join of a fast and a slow source whose state stays small."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from midstream import (
    ConfigError,
    Count,
    DataStream,
    Environment,
    JobError,
    Tuning,
    WatermarkStrategy,
    testing,
    tumbling,
)
from midstream.engine.core.config import Duration
from midstream.runtime.process.process_slots import ProcessSlots

START = datetime(2026, 1, 1)
ROWS = 6_000
STEP_US = 300_000
"""From row to row; half an hour in all."""


def rows_of(index: Any) -> dict[str, Any]:
    return {"k": index % 100, "at": (np.datetime64(START, "us") + index * STEP_US).astype("datetime64[us]")}


@pytest.mark.parametrize(
    ("drift", "max_delay", "why"),
    [
        (0, 0, r"drift: 0 would let no split be ahead of another; give a time such as '5 min', or leave drift out"),
        ("-5 min", 0, r"drift: '-5 min' would let no split be ahead of another"),
        (timedelta(seconds=-1), 0, r"would let no split be ahead of another"),
        ("1 s", "5 s", r"drift: '1 s' is less than max_delay='5 s': .* give at least 5 s"),
        ("soon", 0, r"drift: 'soon' is not a duration"),
    ],
)
def test_drifts_that_no_job_can_keep_are_refused(drift: Duration, max_delay: Duration, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        WatermarkStrategy.bounded(max_delay, drift=drift)


@pytest.mark.parametrize("drift", ["5 s", 5, timedelta(seconds=5)])
def test_a_drift_may_be_as_long_as_the_delay(drift: Duration) -> None:
    assert WatermarkStrategy.bounded("5 s", drift=drift).drift_us == 5_000_000
    assert WatermarkStrategy.monotonous(drift=drift).drift_us == 5_000_000
    assert WatermarkStrategy.bounded("5 s").drift_us is None


IN_STEP = WatermarkStrategy.bounded("1 s", drift="1 min")


def _after_a_rebalance(env: Environment) -> DataStream:
    return env.generate(rows_of, count=10).rebalance().with_watermarks("at", IN_STEP)


def _after_a_second_reader(env: Environment) -> DataStream:
    rows = env.generate(rows_of, count=10)
    rows.print()
    return rows.with_watermarks("at", IN_STEP)


def _with_a_source_further_out_of_order(env: Environment) -> DataStream:
    late = env.generate(rows_of, count=10).with_watermarks("at", WatermarkStrategy.bounded("1 h", drift="2 h"))
    return env.generate(rows_of, count=10).with_watermarks("at", IN_STEP).name("early").union(late)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (
            _after_a_rebalance,
            r"test_sources_in_step.py:\d+.* arrive here mixed. Call with_watermarks\(\) directly after",
        ),
        (_after_a_second_reader, r"before the stream divides, or leave drift out"),
        (
            _with_a_source_further_out_of_order,
            r"'early'.*: drift='1 min' is less than the max_delay of 1 h of operator 'watermarks'.* Give at least 1 h",
        ),
    ],
)
def test_a_drift_where_splits_are_not_seen_is_refused(made: Callable[[Environment], DataStream], why: str) -> None:
    env = Environment("refused", parallelism=2)
    made(env).print()
    with pytest.raises(JobError, match=why):
        env.execute(slots=ProcessSlots())


def test_rows_that_a_test_feeds_are_not_kept_in_step() -> None:
    env = Environment("fed")
    early = env.from_collection([{"k": 1, "at": START + timedelta(hours=hour)} for hour in range(20)], splits=1)
    late = env.from_collection([{"k": 1, "at": START + timedelta(days=9)}], splits=1)
    both = [stream.with_watermarks("at", IN_STEP) for stream in (early, late)]
    joined = both[0].join(both[1], on="k", within=("-1 min", 0), how="left")
    assert joined.preview(100).table.num_rows == 20
    result = testing.run(joined)
    assert [len(result[name]) for name in result] == [20, 0, 0], "no row is late"


def test_a_preview_of_many_splits_is_not_kept_in_step() -> None:
    env = Environment("previewed")
    rows = [{"k": 1, "at": START + timedelta(hours=hour)} for hour in range(2_000)]
    timed = env.from_collection(rows, splits=5).with_watermarks("at", IN_STEP)
    assert timed.preview(2_000).table.num_rows == 2_000


def wide_rows_of(index: Any) -> dict[str, Any]:
    return {**rows_of(index), "text": [Random(int(each)).randbytes(200).hex() for each in index]}


def largest_state(directory: Path, drift: Duration | None) -> int:
    """The largest state, in bytes, of a join of two sources of which one is fast and the other has 3,000 rows a second."""
    strategy = WatermarkStrategy.bounded("1 s", drift=drift)
    env = Environment(
        "in-step",
        checkpoint_dir=directory,
        checkpoint_interval="100 ms",
        tuning=Tuning(batch_rows=100),
    )
    fast = env.generate(wide_rows_of, count=ROWS, splits=1).with_watermarks("at", strategy)
    slow = env.generate(rows_of, count=ROWS, splits=1, rows_per_s=3_000).with_watermarks("at", strategy)
    pairs = (
        fast.join(slow, on="k", within=("-5 s", 0))
        .key_by("k")
        .window(tumbling("10 min"))
        .aggregate(n=Count())
        .collect()
    )
    status = env.execute(slots=ProcessSlots())
    assert sum(row["n"] for row in pairs.rows()) == ROWS
    return max(size.bytes for size in status.state_growth)


def test_the_state_of_a_join_stays_small_although_one_source_is_much_faster(tmp_path: Path) -> None:
    free, in_step = largest_state(tmp_path / "free", None), largest_state(tmp_path / "in step", "20 s")
    assert in_step < free / 2, (in_step, free)
