"""Bytes of keyed state that a checkpoint writes, against all it refers to. Run: python benchmarks/state_bytes.py

One window over all rows, and a table of which rows are replaced, a checkpoint each `--rows` rows of random keys: chunks
that an earlier checkpoint has stored are referred to and not written again. Of one operator, without a job around it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
import polars as pl
import pyarrow as pa
from aggregate import opened

from midstream.engine.operators.windows.aggregates import Count, Sum
from midstream.engine.operators.windows.window_factory import tumbling, window_operator
from midstream.engine.operators.windows.window_operator import WindowOperator
from midstream.engine.state.state_parts import Chunk
from midstream.engine.state.table_state import TableState

COLUMNS: dict[str, pa.DataType] = {"ts": pa.timestamp("ms"), "key": pa.int64(), "value": pa.float64()}
SCHEMA = pa.schema(COLUMNS)
CHECKPOINTS = 200


class _Ids:
    def __init__(self) -> None:
        self._numbers = count()

    def new_id(self) -> str:
        return str(next(self._numbers))


def of_window(keys: int, rows: int) -> Callable[[], Sequence[Chunk]]:
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
    checkpoint_ids = count(1)

    def checkpoint() -> Sequence[Chunk]:
        columns = [np.zeros(rows, "M8[ms]"), random.integers(0, keys, rows), random.random(rows)]
        operator.process(pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=SCHEMA), 0)
        result = operator.snapshot(next(checkpoint_ids)).complete()
        return [chunk for part in result.parts.values() for chunk in part.chunks]

    return checkpoint


def of_table(keys: int, rows: int) -> Callable[[], Sequence[Chunk]]:
    random = np.random.default_rng(keys)
    table = TableState({"key": int, "total": float, "n": int}).bound("totals", ["key"], range(128), 128)
    ids = _Ids()

    def put(held: np.ndarray) -> None:
        totals = {"key": held, "total": random.random(len(held)), "n": np.ones(len(held), np.int64)}
        table.upsert(pl.DataFrame(totals))

    put(np.arange(keys))

    def checkpoint() -> Sequence[Chunk]:
        for _ in range(4):
            put(np.unique(random.integers(0, keys, rows // 4)))
        snapshot = table.snapshot(ids, "table")
        assert snapshot is not None
        return snapshot()

    return checkpoint


def measure(kind: str, keys: int, rows: int, checkpoint: Callable[[], Sequence[Chunk]]) -> None:
    stored: set[str] = set()
    written, full = [], []
    for _ in range(CHECKPOINTS):
        chunks = [each for chunk in checkpoint() for each in (chunk, *chunk.removed)]
        full.append(sum(chunk.stored.nbytes for chunk in chunks))
        written.append(sum(chunk.stored.nbytes for chunk in chunks if chunk.id not in stored))
        stored = {chunk.id for chunk in chunks}
    half = CHECKPOINTS // 2
    figures = {
        "kind": kind,
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
        measure("window", keys, rows, of_window(keys, rows))
    for keys in (10_000, 100_000, 1_000_000):
        measure("table", keys, rows, of_table(keys, rows))


if __name__ == "__main__":
    main()
