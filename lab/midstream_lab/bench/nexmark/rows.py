"""q0 to q2, q14, q21, q22: rows, each by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from midstream.api.data_stream import DataStream
from midstream_lab.bench.nexmark.streams import EURO, bids
from midstream_lab.bench.summing_sink import Sums, Vector


def q0(events: DataStream) -> DataStream:
    """Return all bids."""
    return bids(events, "bidder", "price", "time")


def q1(events: DataStream) -> DataStream:
    """Return the bids in another currency."""
    return bids(events, "bidder", "price", "time").with_columns(price=pl.col("price") * EURO)


def q2(events: DataStream) -> DataStream:
    """Return the bids of some auctions."""
    return bids(events, "price").filter(pl.col("auction") % 123 == 0)


def count_char(text: pl.Expr, char: str) -> pl.Expr:
    """Return how often a character occurs: the query's own function."""
    return text.str.count_matches(char, literal=True).cast(pl.Int64)


def q14(events: DataStream) -> DataStream:
    """Return bids of some prices in another currency, with the time of day in words, and a character counted."""
    hour = pl.col("time").dt.hour()
    time_of_day = (
        pl.when(hour.is_between(8, 18))
        .then(pl.lit("dayTime"))
        .when((hour <= 6) | (hour >= 20))
        .then(pl.lit("nightTime"))
        .otherwise(pl.lit("otherTime"))
    )
    return (
        bids(events, "bidder", "price", "time", "extra")
        .with_columns(price=pl.col("price") * EURO)
        .filter(pl.col("price").is_between(1_000_000, 50_000_000, closed="none"))
        .with_columns(bid_time_type=time_of_day, c_counts=count_char(pl.col("extra"), "c"))
    )


def q21(events: DataStream) -> DataStream:
    """Return bids with the number of their channel: of four by name, of others from the URL, if it has one."""
    numbers = {"apple": "0", "google": "1", "facebook": "2", "baidu": "3"}
    by_name = pl.col("channel").str.to_lowercase().replace_strict(numbers, default=None)
    in_url = pl.col("url").str.extract("(&|^)channel_id=([^&]*)", 2)
    return (
        bids(events, "bidder", "price", "channel", "url")
        .select("auction", "bidder", "price", "channel", channel_id=pl.coalesce(by_name, in_url))
        .filter(pl.col("channel_id").is_not_null())
    )


@dataclass(frozen=True)
class ChannelIds:
    """Adds the channels' numbers up."""

    def __call__(self, batch: pa.RecordBatch) -> Vector:
        numbers = float(pc.sum(batch.column("channel_id").cast(pa.int64())).as_py() or 0)
        return np.append(Sums(("auction", "bidder", "price"))(batch), numbers)


def q22(events: DataStream) -> DataStream:
    """Return bids with the three directories of their URL."""
    parts = bids(events, "bidder", "price", "channel", "url").with_columns(parts=pl.col("url").str.split("/"))
    directories = {f"dir{k + 1}": pl.col("parts").list.get(3 + k, null_on_oob=True) for k in range(3)}
    return parts.select("auction", "bidder", "price", "channel", **directories)


@dataclass(frozen=True)
class Directories:
    """Adds the codes of the directories' first letters up, so that one that is not what it should be shows."""

    def __call__(self, batch: pa.RecordBatch) -> Vector:
        numbers = Sums(("auction", "bidder", "price", "channel"))(batch)
        return np.concatenate([numbers, [self._first_letters(batch.column(f"dir{k}")) for k in (1, 2, 3)]])

    def _first_letters(self, texts: pa.Array[Any]) -> float:
        _, offsets, letters = texts.buffers()
        if not len(texts):
            return 0.0
        assert offsets is not None and letters is not None, texts.type
        begins = np.frombuffer(memoryview(offsets), np.int64)[texts.offset : texts.offset + len(texts)]
        return float(np.frombuffer(memoryview(letters), np.uint8)[begins].sum())
