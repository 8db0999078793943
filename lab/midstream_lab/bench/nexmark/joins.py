"""q3, q4, q9, q20: auctions with their sellers, and with their bids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl
import pyarrow as pa

from midstream.api.data_stream import DataStream
from midstream.engine.operators.functions.batch_functions import BatchContext, CoBatchFunction
from midstream.engine.operators.windows.aggregates import Last, Mean
from midstream.engine.state.table_state import TableState
from midstream_lab.bench.nexmark.generator import AUCTION, FIRST_CATEGORY, PERSON
from midstream_lab.bench.nexmark.streams import TIME, bids, only
from midstream_lab.bench.summing_sink import Vector

CATEGORIES: Final = 5
ANY_TIME: Final = "36500 d"


def q3(events: DataStream) -> DataStream:
    """Return auctions of one category with their sellers from three states."""
    persons = only(PERSON, events, "time", "person", "name", "city", "state")
    persons = persons.filter(pl.col("state").is_in(["OR", "ID", "CA"]))
    auctions = only(AUCTION, events, "time", "seller", "auction", "category").filter(
        pl.col("category") == FIRST_CATEGORY
    )
    return persons.join(auctions, left_on="person", right_on="seller", within=(f"-{ANY_TIME}", ANY_TIME))


def q20(events: DataStream) -> DataStream:
    """Return the bids for auctions of one category, with their auction."""
    columns = ("item", "initial_bid", "reserve", "expires", "seller", "category")
    auctions = only(AUCTION, events, "auction", *columns, "time")
    auctions = auctions.filter(pl.col("category") == FIRST_CATEGORY)
    offered = bids(events, "bidder", "price", "channel", "url", "time", "extra")
    return offered.join(auctions, on="auction", within=(f"-{ANY_TIME}", 0))


class BestBids(CoBatchFunction, ABC):
    """Keeps auctions, and the best of the bids for each, until an auction's time is over."""

    auctions: TableState
    """Has `auction`, `time`, `expires`."""
    bids: TableState
    """Has `auction`, `time`. Bids that event time has not come to, so that their auction may still be missing."""
    best: TableState
    """Has the columns of `bids`."""

    def process1(self, rows: pl.DataFrame, ctx: BatchContext) -> None:
        self.auctions.append(rows)

    def process2(self, rows: pl.DataFrame, ctx: BatchContext) -> None:
        self.bids.append(rows)

    @abstractmethod
    def best_of(self, bids: pl.DataFrame) -> pl.DataFrame:
        """Return one bid for each auction."""

    def ended(self, ctx: BatchContext) -> pl.DataFrame:
        """Return the best bids for the auctions that are over by now, which are then forgotten.

        A column that both have is the bid's; the auction's has the suffix `_of_auction`.
        """
        due = self.bids.pop_until("time", ctx.watermark)
        if due.height:
            is_within = pl.col("time").is_between("time_of_auction", "expires")
            times = self.auctions.lookup(due).select("auction", "expires", time_of_auction="time")
            valid = due.join(times, on="auction").filter(is_within).select(due.columns)
            self.best.upsert(self.best_of(pl.concat([self.best.lookup(valid), valid])))
        over = self.auctions.pop_until("expires", ctx.watermark)
        return self.best.pop(over).join(over, on="auction", suffix="_of_auction")


class WinningPrices(BestBids):
    """The highest of an auction's bids within its time, once that is over."""

    auctions = TableState({"auction": int, "time": TIME, "expires": TIME, "category": int})
    bids = TableState({"auction": int, "time": TIME, "price": int})
    best = TableState({"auction": int, "time": TIME, "price": int})

    def best_of(self, bids: pl.DataFrame) -> pl.DataFrame:
        return bids.group_by("auction").agg(pl.col("time").first(), pl.col("price").max())

    def on_watermark(self, ctx: BatchContext) -> pl.DataFrame:
        return self.ended(ctx).select("category", "price")


class WinningBids(BestBids):
    """Each auction with the highest of its bids, the earliest of several; of several at one time that of the bidder
    with the smallest number, and of several that a bidder makes at one time the one whose text sorts first.
    """

    auctions = TableState(
        {
            "auction": int,
            "item": str,
            "initial_bid": int,
            "reserve": int,
            "time": TIME,
            "expires": TIME,
            "seller": int,
            "category": int,
        }
    )
    bids = TableState({"auction": int, "bidder": int, "price": int, "time": TIME, "extra": str})
    best = TableState({"auction": int, "bidder": int, "price": int, "time": TIME, "extra": str})
    result: Final = pa.schema(
        [
            *auctions.schema,
            *((name, pa.int64()) for name in ("bidder", "price")),
            ("bid_time", TIME),
            ("extra", pa.large_string()),
        ]
    )

    def best_of(self, bids: pl.DataFrame) -> pl.DataFrame:
        highest = bids.filter(pl.col("price") == pl.col("price").max().over("auction"))
        return highest.sort("time", "bidder", "extra").unique("auction", keep="first")

    def on_watermark(self, ctx: BatchContext) -> pl.DataFrame:
        return self.ended(ctx).rename({"time": "bid_time", "time_of_auction": "time"}).select(self.result.names)


@dataclass(frozen=True)
class ByCategory:
    """Counts rows, those of each category, and the sum of prices in each."""

    def __call__(self, batch: pa.RecordBatch) -> Vector:
        category = batch.column("category").to_numpy() - FIRST_CATEGORY
        price = batch.column("price").to_numpy()
        counts = np.bincount(category, minlength=CATEGORIES)
        prices = np.bincount(category, price, minlength=CATEGORIES)
        return np.concatenate([[batch.num_rows], counts, prices]).astype(np.float64)


def q4(events: DataStream) -> DataStream:
    """Return the final prices of auctions as they end, and the category's average so far."""
    auctions = only(AUCTION, events, "auction", "time", "expires", "category")
    return (
        auctions.key_by("auction")
        .connect(bids(events, "time", "price").key_by("auction"))
        .process_batches(WinningPrices(), {"category": int, "price": int})
        .key_by("category")
        .aggregate(price=Last("price"), average=Mean("price"))
    )


def q9(events: DataStream) -> DataStream:
    """Return auctions as they end, with the bid that has won."""
    auctions = only(AUCTION, events, *WinningBids.auctions.schema.names)
    return (
        auctions.key_by("auction")
        .connect(bids(events, "bidder", "price", "time", "extra").key_by("auction"))
        .process_batches(WinningBids(), WinningBids.result)
    )
