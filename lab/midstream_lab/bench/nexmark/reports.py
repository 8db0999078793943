"""q15 to q18: reports of a day, as it ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import polars as pl

from midstream.api.data_stream import DataStream
from midstream.engine.operators.windows.aggregates import Aggregate, Columns, Count, Last, Max, Min, Sum
from midstream.engine.operators.windows.window_factory import tumbling
from midstream_lab.bench.nexmark.streams import bids

DAY: Final = "1 d"
RANKS: Final = 3
RANK: Final = (pl.col("price") >= 10_000).cast(pl.Int64) + (pl.col("price") >= 1_000_000).cast(pl.Int64)
"""Bids of low, middle and high prices: 0, 1, 2."""


class CountRank(Aggregate):
    """The number of bids of one rank."""

    columns = ("price",)

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        return {"n": RANK.eq(self.rank).sum().cast(pl.Int64)}

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        return {"n": part("n").sum()}

    def finish(self, part: Columns) -> pl.Expr:
        return part("n")


class DistinctByRank(Aggregate):
    """How many values a column of whole numbers has: in all bids, and in those of each rank. A struct."""

    def __init__(self, column: str) -> None:
        self.columns = (column, "price")

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        return {"seen": (pl.col(self.columns[0]) * RANKS + RANK).unique()}  # one number stands for value and rank

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        return {"seen": part("seen").explode().unique()}

    def finish(self, part: Columns) -> pl.Expr:
        seen = part("seen")
        total = seen.list.eval(pl.element() // RANKS).list.n_unique()
        ranks = [seen.list.eval(pl.element() % RANKS == rank).list.sum() for rank in range(RANKS)]
        names = ("total", *(f"rank{rank + 1}" for rank in range(RANKS)))
        return pl.struct(
            *(count.cast(pl.Int64).alias(name) for name, count in zip(names, (total, *ranks), strict=True))
        )


COUNTS: Final[Mapping[str, Aggregate]] = {
    "total_bids": Count(),
    **{f"rank{rank + 1}_bids": CountRank(rank) for rank in range(RANKS)},
}
_STATISTICS: Final[Mapping[str, Aggregate]] = {
    **COUNTS,
    "bidders": DistinctByRank("bidder"),
    "auctions": DistinctByRank("auction"),
}
DISTINCT: Final = {
    f"{rank}_{what}": pl.col(what).struct.field(rank)
    for what in ("bidders", "auctions")
    for rank in ("total", "rank1", "rank2", "rank3")
}


def q15(events: DataStream) -> DataStream:
    """Return how many bids a day has, how many bidders and auctions they have, and the same of each rank of price."""
    days = bids(events, "time", "bidder", "price").window_all(tumbling(DAY)).aggregate(**_STATISTICS)
    return days.select(*COUNTS, day=pl.col("window_start"), **DISTINCT)


def q16(events: DataStream) -> DataStream:
    """Return the same of each channel, and the minute of its last bid."""
    by_channel = bids(events, "time", "bidder", "price", "channel").key_by("channel")
    days = by_channel.window(tumbling(DAY)).aggregate(last=Max("time"), **_STATISTICS)
    minute = pl.col("last").dt.truncate("1m")
    return days.select("channel", *COUNTS, day=pl.col("window_start"), minute=minute, **DISTINCT)


def q17(events: DataStream) -> DataStream:
    """Return how many bids an auction has on a day, and at which prices."""
    days = (
        bids(events, "time", "price")
        .key_by("auction")
        .window(tumbling(DAY))
        .aggregate(**COUNTS, min_price=Min("price"), max_price=Max("price"), sum_price=Sum("price"))
    )
    return days.with_columns(avg_price=pl.col("sum_price") // pl.col("total_bids"))


LAST_OF_BID: Final = ("price", "channel", "url", "time", "extra")


def q18(events: DataStream) -> DataStream:
    """Return the last bid of a bidder for an auction on a day."""
    days = (
        bids(events, "bidder", *LAST_OF_BID)
        .select("auction", "bidder", "time", bid=pl.struct(LAST_OF_BID))
        .key_by("bidder", "auction")
        .window(tumbling(DAY))
        .aggregate(bid=Last("bid"))
    )
    return days.select("bidder", "auction", **{name: pl.col("bid").struct.field(name) for name in LAST_OF_BID})
