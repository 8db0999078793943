"""q15 to q18: reports of a day, as it ends."""

from __future__ import annotations

from typing import Final

import polars as pl

from midstream.api.data_stream import DataStream
from midstream.engine.operators.windows.aggregates import Count, Last, Max, Min, Sum
from midstream.engine.operators.windows.distinct_count import CountDistinct
from midstream.engine.operators.windows.window_factory import tumbling
from midstream_lab.bench.nexmark.streams import bids

DAY: Final = "1 d"
_CHEAP, _DEAR = pl.col("price") < 10_000, pl.col("price") >= 1_000_000
_RANKS: Final = {"total": None, "rank1": _CHEAP, "rank2": ~_CHEAP & ~_DEAR, "rank3": _DEAR}
"""All bids, and those of low, middle and high prices."""
COUNTS: Final = {f"{rank}_bids": Count(where=where) for rank, where in _RANKS.items()}
DISTINCT: Final = {
    f"{rank}_{column}s": CountDistinct(column, where=where)
    for column in ("bidder", "auction")
    for rank, where in _RANKS.items()
}


def q15(events: DataStream) -> DataStream:
    """Return how many bids a day has, how many bidders and auctions they have, and the same of each rank of price."""
    days = bids(events, "time", "bidder", "price").window_all(tumbling(DAY)).aggregate(**COUNTS, **DISTINCT)
    return days.drop("window_end").rename({"window_start": "day"})


def q16(events: DataStream) -> DataStream:
    """Return the same of each channel, and the minute of its last bid."""
    by_channel = bids(events, "time", "bidder", "price", "channel").key_by("channel")
    days = by_channel.window(tumbling(DAY)).aggregate(minute=Max("time"), **COUNTS, **DISTINCT)
    days = days.drop("window_end").rename({"window_start": "day"})
    return days.with_columns(minute=pl.col("minute").dt.truncate("1m"))


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
    by_bidder = bids(events, "bidder", *LAST_OF_BID).key_by("bidder", "auction")
    return by_bidder.window(tumbling(DAY)).aggregate(**{name: Last(name) for name in LAST_OF_BID})
