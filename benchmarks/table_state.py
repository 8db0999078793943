"""Measures a running total per key in a TableState: a join with all that the table holds, or a lookup of a batch's keys.

    POLARS_MAX_THREADS=1 python benchmarks/table_state.py

Prints, by how many keys the table holds, milliseconds per batch of 10,000 rows with random keys, without what the
function does to its own batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import polars as pl

from midstream.engine.state.table_state import TableState

ROWS = 10_000
KEYS = (10_000, 100_000, 1_000_000, 4_000_000)


def table_of(keys: int) -> TableState:
    table = TableState({"k": int, "total": int, "name": str}).bound("totals", ["k"], range(128), 128)
    names = pl.Series(np.arange(keys)).cast(pl.String)
    table.frame = pl.DataFrame({"k": np.arange(keys), "total": np.zeros(keys, np.int64), "name": names})
    return table


def added_up(rows: pl.DataFrame, known: pl.DataFrame) -> pl.DataFrame:
    before = rows.join(known, on="k", how="left", maintain_order="left")
    total = pl.col("total").fill_null(0) + pl.col("v").cum_sum().over("k")
    return before.with_columns(total=total).select("k", "total", "name")


def by_frame(table: TableState, rows: pl.DataFrame) -> None:
    made = added_up(rows, table.frame)
    table.frame = pl.concat([table.frame, made]).unique("k", keep="last")


def by_lookup(table: TableState, rows: pl.DataFrame) -> None:
    made = added_up(rows, table.lookup(rows))
    table.upsert(made.unique("k", keep="last"))


def by_nothing(table: TableState, rows: pl.DataFrame) -> None:
    """What the function does to its own batch, whatever the table holds."""
    added_up(rows, rows.select("k", total=pl.lit(0), name=pl.lit("")).unique("k")).unique("k", keep="last")


def seconds(
    way: Callable[[TableState, pl.DataFrame], None], table: TableState, batches: Sequence[pl.DataFrame]
) -> float:
    """The time per batch, after as many that warm up."""
    for rows in batches:
        way(table, rows)
    began = time.perf_counter()
    for rows in batches:
        way(table, rows)
    return (time.perf_counter() - began) / len(batches)


def main() -> None:
    random = np.random.default_rng(1)
    print("| keys held | join with `frame`, and assign it | `lookup` and `upsert` |\n|---|---|---|")
    for keys in KEYS:
        count = 40 if keys <= 100_000 else 10
        batches = [
            pl.DataFrame({"k": random.integers(0, keys, ROWS), "v": np.ones(ROWS, np.int64)}) for _ in range(count)
        ]
        own, frame, lookup = (seconds(way, table_of(keys), batches) for way in (by_nothing, by_frame, by_lookup))
        print(f"| {keys:,} | {1000 * (frame - own):.1f} | {1000 * (lookup - own):.1f} |")


if __name__ == "__main__":
    main()
