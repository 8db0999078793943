"""The expected results of the queries: computed with polars over all events at once, independently of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import polars as pl

from midstream.bench.nexmark.generator import AUCTION, BID, COLUMNS, FIRST_CATEGORY, PERSON, Int64s, kind_of, time_ms
from midstream.bench.nexmark.queries import CATEGORIES

CHUNK: Final = 1_000_000
WINDOW_MS: Final = 10_000
PANE_MS: Final = 2_000
PANES: Final = WINDOW_MS // PANE_MS


def frames(count: int, kind: int, *names: str) -> Iterator[pl.DataFrame]:
    """Yield events of one kind in order, chunk by chunk: `time` in ms, and columns."""
    for start in range(0, count, CHUNK):
        n: Int64s = np.arange(start, min(start + CHUNK, count))
        n = n[kind_of(n) == kind]
        columns = COLUMNS[kind](n)
        made = {"time": pl.Series(time_ms(n))}
        for name in names:
            values, texts = columns[name]()
            series = pl.Series(values)
            made[name] = series if texts is None else pl.Series(pl.from_arrow(texts)).gather(series)
        yield pl.DataFrame(made)


def whole(count: int, kind: int, *names: str) -> pl.DataFrame:
    return pl.concat(frames(count, kind, *names))


def _sums(frame: pl.DataFrame, *names: str) -> list[float]:
    return [float(frame.height), *(float(frame[name].sum()) for name in names)]


def _added(parts: Iterator[list[float]]) -> list[float]:
    return [sum(column) for column in zip(*parts, strict=True)]


def q0(count: int) -> list[float]:
    parts = frames(count, BID, "bid_auction", "bidder", "price")
    return _added(_sums(part, "bid_auction", "bidder", "price") for part in parts)


def q1(count: int) -> list[float]:
    rows, auctions, bidders, prices = q0(count)
    return [rows, auctions, bidders, prices * 0.908]


def q2(count: int) -> list[float]:
    parts = frames(count, BID, "bid_auction", "price")
    return _added(_sums(part.filter(pl.col("bid_auction") % 123 == 0), "bid_auction", "price") for part in parts)


def q3(count: int) -> list[float]:
    persons = whole(count, PERSON, "person", "state").filter(pl.col("state").is_in(["OR", "ID", "CA"]))
    auctions = whole(count, AUCTION, "auction", "seller", "category").filter(pl.col("category") == FIRST_CATEGORY)
    return _sums(auctions.join(persons, left_on="seller", right_on="person"), "auction")


def q4(count: int) -> list[float]:
    auctions = whole(count, AUCTION, "auction", "expires", "category").rename({"time": "begins"})
    best = []
    for bids in frames(count, BID, "bid_auction", "price"):
        joined = bids.join(auctions, left_on="bid_auction", right_on="auction")
        within = joined.filter(pl.col("time").is_between(pl.col("begins"), pl.col("expires")))
        best.append(within.group_by("bid_auction", "category").agg(pl.col("price").max()))
    final = pl.concat(best).group_by("bid_auction", "category").agg(pl.col("price").max())
    categories = [final.filter(pl.col("category") == FIRST_CATEGORY + k) for k in range(CATEGORIES)]
    return [
        float(final.height),
        *(float(frame.height) for frame in categories),
        *(float(frame["price"].sum()) for frame in categories),
    ]


def q5(count: int) -> list[float]:
    panes = pl.concat(
        part.group_by(pl.col("time") // PANE_MS, "bid_auction").agg(n=pl.len().cast(pl.Int64))
        for part in frames(count, BID, "bid_auction")
    )
    windows = pl.concat(panes.with_columns(pl.col("time") + later) for later in range(PANES))
    counts = windows.group_by("time", "bid_auction").agg(pl.col("n").sum())
    return _sums(counts.filter(pl.col("n") == pl.col("n").max().over("time")), "n", "bid_auction")


def q7(count: int) -> list[float]:
    highest = pl.col("price") == pl.col("price").max().over("window")
    parts = [
        part.with_columns(window=pl.col("time") // WINDOW_MS).filter(highest)
        for part in frames(count, BID, "bid_auction", "bidder", "price")
    ]
    return _sums(pl.concat(parts).filter(highest), "price", "bid_auction", "bidder")


def q8(count: int) -> list[float]:
    persons = whole(count, PERSON, "person").select("person", window=pl.col("time") // WINDOW_MS)
    sellers = whole(count, AUCTION, "seller").select("seller", window=pl.col("time") // WINDOW_MS)
    both = persons.join(sellers, left_on=["person", "window"], right_on=["seller", "window"], how="semi")
    return _sums(both, "person")


EXPECTED: Final[Mapping[str, Callable[[int], Sequence[float]]]] = {
    "q0": q0,
    "q1": q1,
    "q2": q2,
    "q3": q3,
    "q4": q4,
    "q5": q5,
    "q7": q7,
    "q8": q8,
}
"""The number of rows, then what `QUERIES` lists as checked."""
