"""Real jobs in which something is wrong that a page has to show."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from midstream import Count, Environment, KeyedProcessFunction, Tuning, WatermarkStrategy, fixed_restarts, tumbling
from midstream.engine.operators.sink_api import Sink, SinkWriter
from midstream.engine.operators.source_api import Discovery, DiscoveryContext, Source, Split, SplitReader

SHOP = 7
"""The key that nine of ten rows have."""
EVIL = "<img src=x onerror='document.title=1'><script>document.title=2</script>"


class Sessions(KeyedProcessFunction):
    """Takes 50 µs for a row."""

    def process(self, row: Any, ctx: Any) -> Any:
        time.sleep(50e-6)
        return row


def skewed(directory: Path) -> Environment:
    """Nine of ten rows have one key, so that one subtask of `process` has all the work."""
    env = Environment(
        "shop visits",
        parallelism=2,
        checkpoint_dir=directory / "state",
        checkpoint_interval="2 s",
        tuning=Tuning(batch_rows=5_000),
    )
    began_ms = round(time.time() * 1000)
    row = {"user": int, "at": pl.Datetime("us")}
    (
        env.generate(
            lambda i: {"user": np.where(i % 10 < 9, SHOP, i % 97), "at_ms": began_ms + i // 50}, rows_per_s=50_000
        )
        .select("user", at=pl.col("at_ms").cast(pl.Datetime("ms")).cast(pl.Datetime("us")))
        .with_watermarks("at", WatermarkStrategy.monotonous())
        .key_by("user")
        .process(Sessions(), row)
        .key_by("user")
        .window(tumbling("1 s"))
        .aggregate(visits=Count())
        .write_parquet(directory / "visits")
    )
    return env


class Orders(Source):
    """Four splits that never end; the rows of the last one are all of one moment, `behind_s` ago."""

    blocking = False
    bounded = False
    rows_per_s = 2_000.0
    schema = pa.schema([("k", pa.int64()), ("at", pa.timestamp("us"))])

    def __init__(self, behind_s: float) -> None:
        self.behind_s = behind_s

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        found = () if position else tuple(Split(f"orders-{n}", b"") for n in range(4))
        return Discovery(found, b"all", exhausted=True)

    def splits_per_reader(self, parallelism: int) -> int:
        return 4 // parallelism

    def open_split(self, split: Split) -> SplitReader:
        still_us = round((time.time() - self.behind_s) * 1e6) if split.id == "orders-3" else None
        return _OrdersReader(split.offset, still_us)


class _OrdersReader(SplitReader):
    def __init__(self, offset: int, still_us: int | None) -> None:
        self._offset = offset
        self._still_us = still_us

    def read(self, rows_max: int) -> tuple[pa.RecordBatch, int]:
        rows = min(rows_max, 20)
        at_us = round(time.time() * 1e6) if self._still_us is None else self._still_us
        keys = pa.array(np.arange(self._offset, self._offset + rows) % 10, pa.int64())
        times = pa.array(np.full(rows, at_us), pa.int64()).cast(pa.timestamp("us"))
        self._offset += rows
        return pa.RecordBatch.from_arrays([keys, times], schema=Orders.schema), self._offset


def split_behind(directory: Path) -> Environment:
    """One split of four stands still 14 minutes before the others."""
    env = Environment("orders by minute", parallelism=2, checkpoint_dir=directory / "state")
    (
        env.source(Orders(behind_s=14 * 60 + 20))
        .uid("orders")
        .with_watermarks("at", WatermarkStrategy.monotonous())
        .key_by("k")
        .window(tumbling("1 s"))
        .aggregate(orders=Count())
        .write_parquet(directory / "orders")
    )
    return env


class Archive(Sink):
    """Takes 200 µs for a row."""

    def writer(self, context: Any) -> SinkWriter:
        return _SlowWriter()


class _SlowWriter(SinkWriter):
    def write(self, batch: Any) -> None:
        time.sleep(200e-6 * batch.num_rows)


def slow_sink(directory: Path) -> Environment:
    """Behind the sink so many rows wait that no aligned checkpoint is complete in time."""
    env = Environment(
        f"archive {EVIL}",
        parallelism=2,
        checkpoint_dir=directory / "state",
        checkpoint_interval="1 s",
        checkpoint_timeout="1 s",
        aligned_timeout=None,
        tuning=Tuning(queue_time=None, batch_rows=2_000),
        tolerable_failures=1_000_000,
    )

    def read(batch: pl.DataFrame) -> pl.DataFrame:
        time.sleep(10e-6 * batch.height)  # so that the work of what feeds the sink can be measured
        return batch

    env.generate(lambda i: {"n": i, "k": i % 101}, rows_per_s=200_000).map_batches(read).rebalance().sink(Archive())
    return env


def failing(directory: Path) -> Environment:
    """A function that cannot take one of the rows, again and again."""
    env = Environment("prices", parallelism=1, checkpoint_dir=directory / "state", restart=fixed_restarts(1_000, "2 s"))

    def parse_price(row: Any) -> Any:
        if row["n"] == 1_000:
            print(f"about to parse {EVIL}")
            raise ValueError(f"{EVIL} is not a price")
        return row

    env.generate(lambda i: {"n": i}, rows_per_s=5_000).map(parse_price).write_parquet(directory / "out")
    return env
