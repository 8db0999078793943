"""q5, q7, q8, q11, q12: windows of ten seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import numpy as np
import polars as pl
import pyarrow as pa

from midstream.api.data_stream import DataStream
from midstream.engine.operators.functions.window_functions import WindowContext, WindowFunction
from midstream.engine.operators.watermarks import WatermarkStrategy
from midstream.engine.operators.windows.aggregates import Count, Max
from midstream.engine.operators.windows.window_factory import session, sliding, tumbling
from midstream_lab.bench.nexmark.generator import AUCTION, PERSON
from midstream_lab.bench.nexmark.streams import TIME, bids, only
from midstream_lab.bench.summing_sink import Vector

SIZE: Final = "10 s"
SLIDE: Final = "2 s"


class Highest(WindowFunction):
    """The rows with the largest value of a column, all of them if several have it."""

    def __init__(self, by: str, *others: str) -> None:
        self.by = by
        self.columns = (by, *others)

    def process(self, rows: pl.DataFrame, ctx: WindowContext) -> pl.DataFrame:
        return rows.filter(pl.col(self.by) == pl.col(self.by).max()).select(self.columns)


def _highest(by: str, window: pl.Expr) -> Callable[[pl.DataFrame], pl.DataFrame]:
    """Return a function that keeps the possible maxima of each window in a batch, so that little is sent to the one
    subtask.
    """
    return lambda frame: frame.filter(pl.col(by) == pl.col(by).max().over(window))


def q5(events: DataStream) -> DataStream:
    """Return the auctions with the most bids, per sliding window."""
    counts = bids(events, "time").key_by("auction").window(sliding(SIZE, SLIDE)).aggregate(n=Count())
    return (
        counts.map_batches(_highest("n", pl.col("window_start")))
        .with_watermarks("window_start", WatermarkStrategy.bounded(SIZE))
        .window_all(tumbling(SLIDE))
        .process(Highest("n", "auction"), {"n": int, "auction": int})
    )


def q7(events: DataStream) -> DataStream:
    """Return the highest bids, per window."""
    return (
        bids(events, "time", "price", "bidder")
        .map_batches(_highest("price", pl.col("time").dt.truncate("10s")))
        .window_all(tumbling(SIZE))
        .process(Highest("price", "auction", "bidder"), {"price": int, "auction": int, "bidder": int})
    )


def q8(events: DataStream) -> DataStream:
    """Return persons who sold something in the window in which they arrived."""
    came = only(PERSON, events, "time", "name", id=pl.col("person"))
    sold = only(AUCTION, events, "time", "name", id=pl.col("seller"))
    return (
        came.union(sold)
        .key_by("id")
        .window(tumbling(SIZE))
        .aggregate(name=Max("name"), rows=Count(), came=Count("name"))
        .filter((pl.col("came") > 0) & (pl.col("rows") > pl.col("came")))
        .select("id", "name")
    )


def q11(events: DataStream) -> DataStream:
    """Return how many bids a user makes in each session."""
    return bids(events, "bidder", "time").key_by("bidder").window(session(SIZE)).aggregate(bid_count=Count())


def _stamped(frame: pl.DataFrame) -> pl.DataFrame:
    now = datetime.now(UTC).replace(tzinfo=None)
    return frame.select("bidder", at=pl.lit(now, pl.Datetime("ms")))


def q12(events: DataStream) -> DataStream:
    """Return how many bids a user makes in windows by the wall clock: by the time at which they were read."""
    return (
        bids(events, "bidder")
        .map_batches(_stamped, schema={"bidder": int, "at": TIME})
        .with_watermarks("at", WatermarkStrategy.monotonous())
        .key_by("bidder")
        .window(tumbling(SIZE))
        .aggregate(bid_count=Count())
    )


@dataclass(frozen=True)
class CountsOfBidders:
    """Counts rows and bids, and adds the bids' bidders up: which window a bid is in makes no difference."""

    def __call__(self, batch: pa.RecordBatch) -> Vector:
        bidder, count = (batch.column(name).to_numpy() for name in ("bidder", "bid_count"))
        return np.array([batch.num_rows, count.sum(), count @ bidder], np.float64)
