"""q3, q4, q9, q20: auctions with their sellers, and with their bids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl
import pyarrow as pa

from midstream.api.stream import DataStream
from midstream.bench.nexmark.generator import AUCTION, FIRST_CATEGORY, PERSON
from midstream.bench.nexmark.streams import TIME, bids, only
from midstream.bench.summing_sink import Vector
from midstream.operators.batch_functions import BatchContext, CoBatchFunction, KeyedBatchFunction
from midstream.state.table import TableState

CATEGORIES: Final = 5


class PersonsAuctions(CoBatchFunction):
    persons = TableState({"person": int, "name": str, "city": str, "state": str})
    waiting = TableState({"person": int, "auction": int})
    """Auctions whose seller has not arrived yet."""

    def process1(self, rows: pl.DataFrame, ctx: BatchContext) -> pl.DataFrame:
        waiting = self.waiting.frame
        self.persons.append(rows)
        self.waiting.frame = waiting.join(rows, on="person", how="anti")
        return rows.join(waiting, on="person").drop("person")

    def process2(self, rows: pl.DataFrame, ctx: BatchContext) -> pl.DataFrame:
        auctions, persons = rows.rename({"seller": "person"}), self.persons.frame
        self.waiting.append(auctions.join(persons, on="person", how="anti"))
        return auctions.join(persons, on="person").drop("person")


def q3(events: DataStream) -> DataStream:
    """Return auctions of one category with their sellers from three states."""
    persons = only(PERSON, events, "person", "name", "city", "state").filter(pl.col("state").is_in(["OR", "ID", "CA"]))
    auctions = only(AUCTION, events, "seller", "auction", "category").filter(pl.col("category") == FIRST_CATEGORY)
    return (
        persons.key_by("person")
        .connect(auctions.select("seller", "auction").key_by("seller"))
        .process_batches(PersonsAuctions(), {"name": str, "city": str, "state": str, "auction": int})
    )


class AuctionsBids(CoBatchFunction):
    """Each bid with its auction, which may come later, but before event time reaches the bid."""

    auctions = TableState(
        {
            "auction": int,
            "item": str,
            "initial_bid": int,
            "reserve": int,
            "opened": TIME,
            "expires": TIME,
            "seller": int,
            "category": int,
        }
    )
    waiting = TableState(
        {"auction": int, "bidder": int, "price": int, "channel": str, "url": str, "time": TIME, "extra": str}
    )
    result: Final = pa.schema([*waiting.schema, *list(auctions.schema)[1:]])

    def process1(self, rows: pl.DataFrame, ctx: BatchContext) -> None:
        # Bids that wait are joined as they are due: looking through all of them for each few auctions made the slower
        # side slower still, and so more bids wait.
        self.auctions.append(rows)

    def process2(self, rows: pl.DataFrame, ctx: BatchContext) -> pl.DataFrame:
        auctions, early = self.auctions.frame, rows.filter(pl.col("time") > ctx.watermark)
        self.waiting.append(early.join(auctions, on="auction", how="anti"))
        return rows.join(auctions, on="auction").select(self.result.names)

    def on_watermark(self, ctx: BatchContext) -> pl.DataFrame | None:
        waiting = self.waiting.frame
        is_due = waiting["time"] <= ctx.watermark
        if not is_due.any():
            return None
        self.waiting.frame = waiting.filter(~is_due)
        return waiting.filter(is_due).join(self.auctions.frame, on="auction").select(self.result.names)


def q20(events: DataStream) -> DataStream:
    """Return the bids for auctions of one category, with their auction."""
    columns = ("item", "initial_bid", "reserve", "expires", "seller", "category")
    auctions = only(AUCTION, events, "auction", *columns, opened=pl.col("time"))
    auctions = auctions.filter(pl.col("category") == FIRST_CATEGORY).select(*AuctionsBids.auctions.schema.names)
    offered = bids(events, "bidder", "price", "channel", "url", "time", "extra")
    return (
        auctions.key_by("auction")
        .connect(offered.key_by("auction"))
        .process_batches(AuctionsBids(), AuctionsBids.result)
    )


class BidsOfEndedAuctions(CoBatchFunction):
    """Keeps auctions and their bids until an auction's time is over."""

    auctions: TableState
    """Has `auction`, `time`, `expires`."""
    bids: TableState
    """Has `auction`, `time`."""

    def process1(self, rows: pl.DataFrame, ctx: BatchContext) -> None:
        self.auctions.append(rows)

    def process2(self, rows: pl.DataFrame, ctx: BatchContext) -> None:
        self.bids.append(rows)

    def ended(self, ctx: BatchContext) -> pl.DataFrame:
        """Return the bids within the time of the auctions that are over by now, which are then forgotten.

        A column that both have is the bid's; the auction's has the suffix `_of_auction`.
        """
        auctions, bids = self.auctions.frame, self.bids.frame
        is_over = pl.col("expires") <= ctx.watermark
        over, alive = auctions.filter(is_over), auctions.filter(~is_over)
        # an auction comes before event time passes its first bid
        may_win = pl.col("auction").is_in(alive["auction"].implode()) | (pl.col("time") > ctx.watermark)
        self.auctions.frame, self.bids.frame = alive, bids.filter(may_win)
        return bids.join(over, on="auction", suffix="_of_auction").filter(
            pl.col("time").is_between("time_of_auction", "expires")
        )


class WinningPrices(BidsOfEndedAuctions):
    """The highest of an auction's bids within its time, once that is over."""

    auctions = TableState({"auction": int, "time": TIME, "expires": TIME, "category": int})
    bids = TableState({"auction": int, "time": TIME, "price": int})

    def on_watermark(self, ctx: BatchContext) -> pl.DataFrame:
        by_auction = self.ended(ctx).group_by("auction")
        return by_auction.agg(pl.col("category").first(), pl.col("price").max()).drop("auction")


class WinningBids(BidsOfEndedAuctions):
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
    result: Final = pa.schema(
        [
            *auctions.schema,
            *((name, pa.int64()) for name in ("bidder", "price")),
            ("bid_time", TIME),
            ("extra", pa.large_string()),
        ]
    )

    def on_watermark(self, ctx: BatchContext) -> pl.DataFrame:
        highest = self.ended(ctx).filter(pl.col("price") == pl.col("price").max().over("auction"))
        first = highest.sort("time", "bidder", "extra").unique("auction", keep="first")
        return first.rename({"time": "bid_time", "time_of_auction": "time"}).select(self.result.names)


class RunningAverages(KeyedBatchFunction):
    totals = TableState({"category": int, "total": int, "count": int})

    def process(self, rows: pl.DataFrame, ctx: BatchContext) -> pl.DataFrame:
        before = rows.join(self.totals.frame, on="category", how="left", maintain_order="left")
        counted = before.with_columns(
            total=pl.col("total").fill_null(0) + pl.col("price").cum_sum().over("category"),
            count=pl.col("count").fill_null(0) + pl.int_range(1, pl.len() + 1).over("category"),
        )
        both = pl.concat([self.totals.frame, counted.select("category", "total", "count")])
        self.totals.frame = both.unique("category", keep="last")
        return counted.select("category", "price", average=pl.col("total") / pl.col("count"))


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
        .process_batches(RunningAverages(), {"category": int, "price": int, "average": float})
    )


def q9(events: DataStream) -> DataStream:
    """Return auctions as they end, with the bid that has won."""
    auctions = only(AUCTION, events, *WinningBids.auctions.schema.names)
    return (
        auctions.key_by("auction")
        .connect(bids(events, "bidder", "price", "time", "extra").key_by("auction"))
        .process_batches(WinningBids(), WinningBids.result)
    )
