"""Bytes of keyed window state that a checkpoint writes, against all it refers to. Run: python benchmarks/state_bytes.py

One window over all rows, a checkpoint each `--rows` rows of random keys: chunks that an earlier checkpoint has
stored are referred to and not written again. Of one operator, without a job around it.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import pyarrow as pa
from aggregate import opened

from midstream.engine.operators.base import SnapshotResult
from midstream.engine.operators.windows.aggregates import Count, Sum
from midstream.engine.operators.windows.window_factory import tumbling, window_operator
from midstream.engine.operators.windows.window_operator import WindowOperator

COLUMNS: dict[str, pa.DataType] = {"ts": pa.timestamp("ms"), "key": pa.int64(), "value": pa.float64()}
SCHEMA = pa.schema(COLUMNS)
CHECKPOINTS = 200


def measure(keys: int, rows: int) -> None:
    operator: WindowOperator = window_operator(
        "window",
        window=tumbling("10 h"),
        keys=["key"],
        event_time="ts",
        aggregates={"total": Sum("value"), "n": Count()},
        schema=SCHEMA,
    )
    opened(operator, "window")
    random = np.random.default_rng(keys)
    stored: set[str] = set()
    written, full = [], []
    for checkpoint_id in range(1, CHECKPOINTS + 1):
        columns = [np.zeros(rows, "M8[ms]"), random.integers(0, keys, rows), random.random(rows)]
        operator.process(pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=SCHEMA), 0)
        later = operator.snapshot(checkpoint_id).later
        assert later is not None
        result: SnapshotResult = later()
        chunks = [chunk for part in result.parts.values() for chunk in part.chunks]
        full.append(sum(chunk.table.nbytes for chunk in chunks))
        written.append(sum(chunk.table.nbytes for chunk in chunks if chunk.id not in stored))
        stored = {chunk.id for chunk in chunks}
    half = CHECKPOINTS // 2
    figures = {
        "keys": keys,
        "rows_per_checkpoint": rows,
        "full_mib": round(full[-1] / 2**20, 2),
        "written_mib_mean": round(float(np.mean(written[half:])) / 2**20, 2),
        "written_mib_median": round(float(np.median(written[half:])) / 2**20, 2),
        "written_mib_max": round(max(written[half:]) / 2**20, 2),
    }
    print(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=20_000, help="between two checkpoints")
    rows = parser.parse_args().rows
    for keys in (10_000, 100_000, 1_000_000, 10_000_000):
        measure(keys, rows)


if __name__ == "__main__":
    main()
