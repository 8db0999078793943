"""A batch is reduced pane by pane, whichever of the ways to pick a pane's rows is taken."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from midstream.engine.operators.windows.aggregates import Count, Last, Sum
from midstream.engine.operators.windows.pane_windows import _by_pane
from midstream.engine.operators.windows.window_aggregation import WindowAggregation

TYPES: dict[str, pa.DataType] = {"k": pa.int64(), "at": pa.timestamp("us"), "x": pa.float64()}
SCHEMA = pa.schema(TYPES)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("is_sorted", [False, True])
def test_each_pane_gets_its_rows_in_their_order(seed: int, is_sorted: bool) -> None:
    drawn = random.Random(f"panes {seed} {is_sorted}")
    rows, span_s = drawn.choice((1, 2, 5, 40)), drawn.choice((1, 3, 12, 100))
    times = np.array([drawn.randrange(-span_s * 10**6, span_s * 10**6) for _ in range(rows)], np.int64)
    if is_sorted:
        times.sort()
    columns: list[pa.Array[Any]] = [
        pa.array([drawn.randrange(3) for _ in range(rows)], pa.int64()),
        pa.array(times).view(pa.timestamp("us")),
        pa.array([drawn.random() for _ in range(rows)]),
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
    aggregation = WindowAggregation("window", ["k"], "at", {"n": Count(), "sum": Sum("x"), "last": Last("x")}, SCHEMA)
    frame = pl.DataFrame(batch)
    found = dict(_by_pane(aggregation, frame, times, 10**6, 0))
    assert sorted(found) == sorted({int(time) // 10**6 * 10**6 for time in times})
    for pane, part in found.items():
        own = frame.filter(pl.Series(times // 10**6 * 10**6 == pane))
        assert part.sort("k").equals(aggregation.reduce(own).sort("k")), (pane, part, own)
