"""The queries, as a user of midstream would write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Final

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from midstream.api.stream import DataStream
from midstream.bench.nexmark.generator import AUCTION, BID, FIRST_CATEGORY, PERSON
from midstream.bench.summing_sink import Measure, SummingSink, Sums, Vector, summing
from midstream.operators.aggregates import Aggregate, Columns, Count, Last, Max, Min, Sum
from midstream.operators.batch_functions import BatchContext, CoBatchFunction, KeyedBatchFunction
from midstream.operators.watermarks import WatermarkStrategy
from midstream.operators.windows import session, sliding, tumbling
from midstream.state.table import TableState

SIZE: Final = "10 s"
SLIDE: Final = "2 s"
DAY: Final = "1 d"
EURO: Final = 0.908
"""The price of a dollar, in q1 and q14."""
CATEGORIES: Final = 5
_TIME: Final = pa.timestamp("ms")


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


def only(kind: int, events: DataStream, *columns: str, **named: pl.Expr) -> DataStream:
    """Return some columns of one kind of events. Columns that are not selected need not be filtered."""
    return events.select("kind", *columns, **named).filter(pl.col("kind") == kind).select(*columns, *named)


def bids(events: DataStream, *columns: str) -> DataStream:
    """Return the bids, with `auction` and `columns`."""
    return only(BID, events, *columns, auction=pl.col("bid_auction"))


# ---- q0 to q2, q14, q21, q22: row by row ----


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
        begins = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts)]
        return float(np.frombuffer(letters, np.uint8)[begins].sum())


# ---- q3, q20: incremental joins ----


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
    """Each bid with its auction, which may come later, but before event time passes the bid."""

    auctions = TableState(
        {
            "auction": int,
            "item": str,
            "initial_bid": int,
            "reserve": int,
            "opened": _TIME,
            "expires": _TIME,
            "seller": int,
            "category": int,
        }
    )
    waiting = TableState(
        {"auction": int, "bidder": int, "price": int, "channel": str, "url": str, "time": _TIME, "extra": str}
    )
    result: Final = pa.schema([*waiting.schema, *list(auctions.schema)[1:]])

    def process1(self, rows: pl.DataFrame, ctx: BatchContext) -> pl.DataFrame:
        waiting = self.waiting.frame
        self.auctions.append(rows)
        self.waiting.frame = waiting.join(rows, on="auction", how="anti")
        return waiting.join(rows, on="auction").select(self.result.names)

    def process2(self, rows: pl.DataFrame, ctx: BatchContext) -> pl.DataFrame:
        auctions = self.auctions.frame
        self.waiting.append(self._early(rows, ctx).join(auctions, on="auction", how="anti"))
        return rows.join(auctions, on="auction").select(self.result.names)

    def on_watermark(self, ctx: BatchContext) -> None:
        if self.waiting.frame.height:
            self.waiting.frame = self._early(self.waiting.frame, ctx)

    def _early(self, bids: pl.DataFrame, ctx: BatchContext) -> pl.DataFrame:
        return bids.filter(pl.col("time") > ctx.watermark)


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


# ---- q4, q9: a join by time; a running average ----


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

    auctions = TableState({"auction": int, "time": _TIME, "expires": _TIME, "category": int})
    bids = TableState({"auction": int, "time": _TIME, "price": int})

    def on_watermark(self, ctx: BatchContext) -> pl.DataFrame:
        by_auction = self.ended(ctx).group_by("auction")
        return by_auction.agg(pl.col("category").first(), pl.col("price").max()).drop("auction")


class WinningBids(BidsOfEndedAuctions):
    """Each auction with the highest of its bids, the earliest of several; of several at one time that of the bidder
    with the smallest number.
    """

    auctions = TableState(
        {
            "auction": int,
            "item": str,
            "initial_bid": int,
            "reserve": int,
            "time": _TIME,
            "expires": _TIME,
            "seller": int,
            "category": int,
        }
    )
    bids = TableState({"auction": int, "bidder": int, "price": int, "time": _TIME, "extra": str})
    result: Final = pa.schema(
        [
            *auctions.schema,
            *((name, pa.int64()) for name in ("bidder", "price")),
            ("bid_time", _TIME),
            ("extra", pa.large_string()),
        ]
    )

    def on_watermark(self, ctx: BatchContext) -> pl.DataFrame:
        highest = self.ended(ctx).filter(pl.col("price") == pl.col("price").max().over("auction"))
        first = highest.sort("time", "bidder").unique("auction", keep="first")
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


# ---- q5, q7, q8, q11, q12: windows ----


class Top(Aggregate):
    """The rows with the largest `by`, all of them if several have it: a list of structs of `by` and `others`."""

    def __init__(self, by: str, *others: str) -> None:
        self.columns = (by, *others)

    def partial(self, event_time: pl.Expr) -> Mapping[str, pl.Expr]:
        by = pl.col(self.columns[0])
        return {"best": by.max(), "rows": pl.struct(self.columns).filter(by == by.max())}

    def merge(self, part: Columns) -> Mapping[str, pl.Expr]:
        best = part("best")
        return {"best": best.max(), "rows": part("rows").filter(best == best.max()).explode()}

    def finish(self, part: Columns) -> pl.Expr:
        return part("rows")


def _highest(by: str, window: pl.Expr) -> Callable[[pl.DataFrame], pl.DataFrame]:
    """Return a function that keeps the possible maxima of each window in a batch, so that little is sent to the one
    subtask.
    """
    return lambda frame: frame.filter(pl.col(by) == pl.col(by).max().over(window))


def _rows_of(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.select("window_end", "top").explode("top").unnest("top")


def q5(events: DataStream) -> DataStream:
    """Return the auctions with the most bids, per sliding window."""
    counts = bids(events, "time").key_by("auction").window(sliding(SIZE, SLIDE)).aggregate(n=Count())
    return (
        counts.map_batches(_highest("n", pl.col("window_start")))
        .with_watermarks("window_start", WatermarkStrategy.bounded(SIZE))
        .window_all(tumbling(SLIDE))
        .aggregate(top=Top("n", "auction"))
        .map_batches(_rows_of, schema={"window_end": pa.timestamp("ms"), "n": int, "auction": int})
    )


def q7(events: DataStream) -> DataStream:
    """Return the highest bids, per window."""
    return (
        bids(events, "time", "price", "bidder")
        .map_batches(_highest("price", pl.col("time").dt.truncate("10s")))
        .window_all(tumbling(SIZE))
        .aggregate(top=Top("price", "auction", "bidder"))
        .map_batches(_rows_of, schema={"window_end": pa.timestamp("ms"), "price": int, "auction": int, "bidder": int})
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
    now = datetime.now(timezone.utc).replace(tzinfo=None)
    return frame.select("bidder", at=pl.lit(now, pl.Datetime("ms")))


def q12(events: DataStream) -> DataStream:
    """Return how many bids a user makes in windows by the wall clock: by the time at which they were read."""
    return (
        bids(events, "bidder")
        .map_batches(_stamped, schema={"bidder": int, "at": _TIME})
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


# ---- q15 to q18: reports of a day, as it ends ----

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


_COUNTS: Final[Mapping[str, Aggregate]] = {
    "total_bids": Count(),
    **{f"rank{rank + 1}_bids": CountRank(rank) for rank in range(RANKS)},
}
_STATISTICS: Final[Mapping[str, Aggregate]] = {
    **_COUNTS,
    "bidders": DistinctByRank("bidder"),
    "auctions": DistinctByRank("auction"),
}
_DISTINCT: Final = {
    f"{rank}_{what}": pl.col(what).struct.field(rank)
    for what in ("bidders", "auctions")
    for rank in ("total", "rank1", "rank2", "rank3")
}


def q15(events: DataStream) -> DataStream:
    """Return how many bids a day has, how many bidders and auctions they have, and the same of each rank of price."""
    days = bids(events, "time", "bidder", "price").window_all(tumbling(DAY)).aggregate(**_STATISTICS)
    return days.select(*_COUNTS, day=pl.col("window_start"), **_DISTINCT)


def q16(events: DataStream) -> DataStream:
    """Return the same of each channel, and the minute of its last bid."""
    by_channel = bids(events, "time", "bidder", "price", "channel").key_by("channel")
    days = by_channel.window(tumbling(DAY)).aggregate(last=Max("time"), **_STATISTICS)
    minute = pl.col("last").dt.truncate("1m")
    return days.select("channel", *_COUNTS, day=pl.col("window_start"), minute=minute, **_DISTINCT)


def q17(events: DataStream) -> DataStream:
    """Return how many bids an auction has on a day, and at which prices."""
    days = (
        bids(events, "time", "price")
        .key_by("auction")
        .window(tumbling(DAY))
        .aggregate(**_COUNTS, min_price=Min("price"), max_price=Max("price"), sum_price=Sum("price"))
    )
    return days.with_columns(avg_price=pl.col("sum_price") // pl.col("total_bids"))


_LAST: Final = ("price", "channel", "url", "time", "extra")


def q18(events: DataStream) -> DataStream:
    """Return the last bid of a bidder for an auction on a day."""
    days = (
        bids(events, "bidder", *_LAST)
        .select("auction", "bidder", "time", bid=pl.struct(_LAST))
        .key_by("bidder", "auction")
        .window(tumbling(DAY))
        .aggregate(bid=Last("bid"))
    )
    return days.select("bidder", "auction", **{name: pl.col("bid").struct.field(name) for name in _LAST})


_BY_CATEGORY: Final = tuple(
    f"{what}_of_{FIRST_CATEGORY + k}" for what in ("auctions", "prices") for k in range(CATEGORIES)
)

_BID: Final = ("bid_auction", "bidder", "price")
_AUCTION: Final = ("auction", "item", "initial_bid", "reserve", "expires", "seller", "category")
_RANKED: Final = (*_COUNTS, *_DISTINCT)

QUERIES: Final[Mapping[str, Query]] = {
    "q0": Query(q0, _BID, ("auction", "bidder", "price")),
    "q1": Query(q1, _BID, ("auction", "bidder", "price"), has_floats=True),
    "q2": Query(q2, ("bid_auction", "price"), ("auction", "price")),
    "q3": Query(q3, ("person", "name", "city", "state", "auction", "seller", "category"), ("auction",)),
    "q4": Query(q4, ("auction", "category", "expires", "bid_auction", "price"), _BY_CATEGORY, ByCategory()),
    "q5": Query(q5, ("bid_auction",), ("n", "auction")),
    "q7": Query(q7, _BID, ("price", "auction", "bidder")),
    "q8": Query(q8, ("person", "name", "seller"), ("id",)),
    "q9": Query(
        q9,
        (*_BID, "extra", *_AUCTION),
        ("auction", "item", "reserve", "expires", "seller", "bidder", "price", "bid_time", "extra"),
    ),
    "q11": Query(q11, _BID[:2], ("bidder", "bid_count", "window_start", "window_end")),
    "q12": Query(q12, _BID[:2], ("bid_count", "bidders"), CountsOfBidders()),
    "q14": Query(
        q14, (*_BID, "extra"), ("auction", "bidder", "price", "bid_time_type", "c_counts", "extra"), has_floats=True
    ),
    "q15": Query(q15, _BID, _RANKED),
    "q16": Query(q16, (*_BID, "channel"), ("channel", "minute", *_RANKED)),
    "q17": Query(
        q17, ("bid_auction", "price"), ("auction", *_COUNTS, "min_price", "max_price", "avg_price", "sum_price")
    ),
    "q18": Query(q18, (*_BID, "channel", "url", "extra"), ("bidder", "auction", *_LAST)),
    "q20": Query(
        q20,
        (*_BID, "channel", "url", "extra", *_AUCTION),
        ("auction", "bidder", "price", "channel", "url", "extra", "item", "reserve", "expires", "seller"),
    ),
    "q21": Query(q21, (*_BID, "channel", "url"), ("auction", "bidder", "price", "channel_ids"), ChannelIds()),
    "q22": Query(
        q22, (*_BID, "channel", "url"), ("auction", "bidder", "price", "channel", "dir1", "dir2", "dir3"), Directories()
    ),
}
