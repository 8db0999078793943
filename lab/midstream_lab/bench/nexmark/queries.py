"""All queries, as a user of midstream would write them, and what is checked of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from midstream.api.data_stream import DataStream
from midstream_lab.bench.nexmark import joins, reports, rows, windowed
from midstream_lab.bench.nexmark.generator import FIRST_CATEGORY
from midstream_lab.bench.nexmark.joins import CATEGORIES, ByCategory
from midstream_lab.bench.nexmark.reports import COUNTS, DISTINCT, LAST_OF_BID
from midstream_lab.bench.nexmark.rows import ChannelIds, Directories
from midstream_lab.bench.nexmark.windowed import CountsOfBidders
from midstream_lab.bench.summing_sink import Measure, SummingSink, summing


@dataclass(frozen=True)
class Query:
    """A query. `build`: from the stream of all events to the result."""

    build: Callable[[DataStream], DataStream]
    reads: tuple[str, ...]
    """The columns of events, besides their kind and time."""
    checked: tuple[str, ...]
    """The checks besides the number of rows: by default sums of columns of the result."""
    measure: Measure | None = None
    """Returns the rows of a batch, then what is checked."""
    has_floats: bool = False
    """Whether a sum depends, in its last digits, on the order in which it is made."""

    def sink(self) -> SummingSink:
        if self.measure is None:
            return summing(*self.checked)
        return SummingSink(self.measure, 1 + len(self.checked))


_BY_CATEGORY: Final = tuple(
    f"{what}_of_{FIRST_CATEGORY + k}" for what in ("auctions", "prices") for k in range(CATEGORIES)
)

_BID: Final = ("bid_auction", "bidder", "price")
_AUCTION: Final = ("auction", "item", "initial_bid", "reserve", "expires", "seller", "category")
_RANKED: Final = (*COUNTS, *DISTINCT)

QUERIES: Final[Mapping[str, Query]] = {
    "q0": Query(rows.q0, _BID, ("auction", "bidder", "price")),
    "q1": Query(rows.q1, _BID, ("auction", "bidder", "price"), has_floats=True),
    "q2": Query(rows.q2, ("bid_auction", "price"), ("auction", "price")),
    "q3": Query(joins.q3, ("person", "name", "city", "state", "auction", "seller", "category"), ("auction",)),
    "q4": Query(joins.q4, ("auction", "category", "expires", "bid_auction", "price"), _BY_CATEGORY, ByCategory()),
    "q5": Query(windowed.q5, ("bid_auction",), ("n", "auction")),
    "q7": Query(windowed.q7, _BID, ("price", "auction", "bidder")),
    "q8": Query(windowed.q8, ("person", "name", "seller"), ("id",)),
    "q9": Query(
        joins.q9,
        (*_BID, "extra", *_AUCTION),
        ("auction", "item", "reserve", "expires", "seller", "bidder", "price", "bid_time", "extra"),
    ),
    "q11": Query(windowed.q11, _BID[:2], ("bidder", "bid_count", "window_start", "window_end")),
    "q12": Query(windowed.q12, _BID[:2], ("bid_count", "bidders"), CountsOfBidders()),
    "q14": Query(
        rows.q14,
        (*_BID, "extra"),
        ("auction", "bidder", "price", "bid_time_type", "c_counts", "extra"),
        has_floats=True,
    ),
    "q15": Query(reports.q15, _BID, _RANKED),
    "q16": Query(reports.q16, (*_BID, "channel"), ("channel", "minute", *_RANKED)),
    "q17": Query(
        reports.q17, ("bid_auction", "price"), ("auction", *COUNTS, "min_price", "max_price", "avg_price", "sum_price")
    ),
    "q18": Query(reports.q18, (*_BID, "channel", "url", "extra"), ("bidder", "auction", *LAST_OF_BID)),
    "q20": Query(
        joins.q20,
        (*_BID, "channel", "url", "extra", *_AUCTION),
        ("auction", "bidder", "price", "channel", "url", "extra", "item", "reserve", "expires", "seller"),
    ),
    "q21": Query(rows.q21, (*_BID, "channel", "url"), ("auction", "bidder", "price", "channel_ids"), ChannelIds()),
    "q22": Query(
        rows.q22,
        (*_BID, "channel", "url"),
        ("auction", "bidder", "price", "channel", "dir1", "dir2", "dir3"),
        Directories(),
    ),
}
