"""The queries, as a user of midstream would write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl
import pyarrow as pa

from midstream.api.stream import DataStream
from midstream.bench.nexmark.generator import AUCTION, BID, FIRST_CATEGORY, PERSON
from midstream.bench.summing_sink import Measure, SummingSink, Vector, summing
from midstream.operators.aggregates import Aggregate, Columns, Count, Max
from midstream.operators.batch_functions import BatchContext, CoBatchFunction, KeyedBatchFunction
from midstream.operators.watermarks import WatermarkStrategy
from midstream.operators.windows import sliding, tumbling
from midstream.state.table import TableState

SIZE: Final = "10 s"
SLIDE: Final = "2 s"
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


# ---- q0 to q2: row by row ----


def q0(events: DataStream) -> DataStream:
    """Return all bids."""
    return bids(events, "bidder", "price", "time")


def q1(events: DataStream) -> DataStream:
    """Return the bids in another currency."""
    return bids(events, "bidder", "price", "time").with_columns(price=pl.col("price") * 0.908)


def q2(events: DataStream) -> DataStream:
    """Return the bids of some auctions."""
    return bids(events, "price").filter(pl.col("auction") % 123 == 0)


# ---- q3: an incremental join ----


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


# ---- q4: a join by time, and a running average ----


class WinningBids(CoBatchFunction):
    """The highest of an auction's bids within its time, once that is over."""

    auctions = TableState({"auction": int, "time": _TIME, "expires": _TIME, "category": int})
    bids = TableState({"auction": int, "time": _TIME, "price": int})

    def process1(self, rows: pl.DataFrame, ctx: BatchContext) -> None:
        self.auctions.append(rows)

    def process2(self, rows: pl.DataFrame, ctx: BatchContext) -> None:
        self.bids.append(rows)

    def on_watermark(self, ctx: BatchContext) -> pl.DataFrame:
        auctions, bids = self.auctions.frame, self.bids.frame
        is_over = pl.col("expires") <= ctx.watermark
        over, alive = auctions.filter(is_over), auctions.filter(~is_over)
        # an auction comes before event time passes its first bid
        may_win = pl.col("auction").is_in(alive["auction"].implode()) | (pl.col("time") > ctx.watermark)
        self.auctions.frame, self.bids.frame = alive, bids.filter(may_win)
        within = bids.join(over, on="auction", suffix="_begins").filter(
            pl.col("time").is_between("time_begins", "expires")
        )
        return within.group_by("auction").agg(pl.col("category").first(), pl.col("price").max()).drop("auction")


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
        .process_batches(WinningBids(), {"category": int, "price": int})
        .key_by("category")
        .process_batches(RunningAverages(), {"category": int, "price": int, "average": float})
    )


# ---- q5, q7, q8: windows ----


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


_BY_CATEGORY: Final = tuple(
    f"{what}_of_{FIRST_CATEGORY + k}" for what in ("auctions", "prices") for k in range(CATEGORIES)
)

_BID: Final = ("bid_auction", "bidder", "price")

QUERIES: Final[Mapping[str, Query]] = {
    "q0": Query(q0, _BID, ("auction", "bidder", "price")),
    "q1": Query(q1, _BID, ("auction", "bidder", "price")),
    "q2": Query(q2, ("bid_auction", "price"), ("auction", "price")),
    "q3": Query(q3, ("person", "name", "city", "state", "auction", "seller", "category"), ("auction",)),
    "q4": Query(q4, ("auction", "category", "expires", "bid_auction", "price"), _BY_CATEGORY, ByCategory()),
    "q5": Query(q5, ("bid_auction",), ("n", "auction")),
    "q7": Query(q7, _BID, ("price", "auction", "bidder")),
    "q8": Query(q8, ("person", "name", "seller"), ("id",)),
}
