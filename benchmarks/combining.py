"""What combining a batch before it is sent costs and spares, in processor time per batch.

    python benchmarks/combining.py

For batches of several sizes and numbers of keys, for two consumers, one of them in another slot: first the rows are
split, one half is serialised and read again, and both are reduced; then the batch is combined first, and what is left
of it goes the same way, without a reduction.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from midstream.engine.core.batches import to_polars
from midstream.engine.core.key_groups import key_groups, subtask_of
from midstream.engine.exchange.result_partition import split_rows
from midstream.engine.operators.windows.aggregates import Count, Sum
from midstream.engine.operators.windows.pane_windows import PANE, PaneCombiner
from midstream.engine.operators.windows.window_aggregation import WindowAggregation

NARROW = pa.schema([("key", pa.int64()), ("at", pa.timestamp("us")), ("n", pa.int64())])
WIDE = pa.schema([*NARROW, ("text", pa.large_string())])
TEXT = "x" * 80
ROUNDS = 30
BUFFER_BYTES = 65_536
PANE_US = 10_000_000


def batch(rows: int, keys: int, schema: pa.Schema) -> pa.RecordBatch:
    random = np.random.default_rng(1)
    columns: dict[str, pa.Array[Any]] = {
        "key": pa.array(random.integers(0, keys, rows)),
        "at": pa.array(np.sort(random.integers(0, PANE_US, rows))).view(pa.timestamp("us")),
        "n": pa.array(random.integers(0, 100, rows)),
        "text": pa.array([TEXT] * rows, pa.large_string()),
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def sent(rows: pa.RecordBatch) -> list[pa.RecordBatch]:
    """The rows of both consumers as they have arrived."""
    owners = subtask_of(key_groups(rows, ("key",), 128), 2, 128)
    here, there = split_rows(rows, owners, 2, BUFFER_BYTES)
    received = bytearray(memoryview(there.serialize()))
    return [here, pa.ipc.read_record_batch(pa.py_buffer(received), rows.schema)]


def processor_ms(work: Callable[[], object]) -> float:
    work()
    began_s = time.process_time()
    for _ in range(ROUNDS):
        work()
    return (time.process_time() - began_s) / ROUNDS * 1000


def main() -> None:
    print(
        f"{'columns':8} {'rows':>8} {'keys':>7} {'rows sent':>10} {'combined':>10}   (ms of processor time per batch)"
    )
    for name, schema in (("narrow", NARROW), ("wide", WIDE)):
        reduction = WindowAggregation("w", ["key"], "at", {"n": Count(), "sum": Sum("n")}, schema)
        combiner = PaneCombiner(reduction, PANE_US, PANE_US, 0, None)
        parts = [*reduction.part_schema.names, PANE]
        for rows in (131_072, 32_768, 16_384, 8_192):
            for keys in (100, 1_000, 10_000):
                given = batch(rows, keys, schema)

                def plain(
                    given: pa.RecordBatch = given, reduction: WindowAggregation = reduction
                ) -> list[pl.DataFrame]:
                    return [reduction.reduce(to_polars(part.select(reduction.columns))) for part in sent(given)]

                def combined(
                    given: pa.RecordBatch = given, combiner: PaneCombiner = combiner, parts: list[str] = parts
                ) -> list[pl.DataFrame]:
                    return [to_polars(part.select(parts)) for part in sent(combiner.combine(given))]

                cost_ms = processor_ms(plain), processor_ms(combined)
                print(f"{name:8} {rows:8,} {keys:7,} {cost_ms[0]:10.2f} {cost_ms[1]:10.2f}")


if __name__ == "__main__":
    main()
