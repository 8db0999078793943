"""The expected results of the queries: computed with polars over all events together, independently of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import polars as pl

from midstream_lab.bench.nexmark.generator import (
    AUCTION,
    BID,
    COLUMNS,
    FIRST_CATEGORY,
    PERSON,
    Int64s,
    kind_of,
    time_ms,
)
from midstream_lab.bench.nexmark.joins import CATEGORIES

CHUNK: Final = 1_000_000
WINDOW_MS: Final = 10_000
PANE_MS: Final = 2_000
PANES: Final = WINDOW_MS // PANE_MS
DAY_MS: Final = 86_400_000
_REPORTED: Final = [f"{what}{rank}" for what in ("bids", "bidder", "bid_auction") for rank in range(4)]
"""What q15 and q16 count: in all bids, and in those of each rank of price."""


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


def q9(count: int) -> list[float]:
    carried = ("item", "reserve", "expires", "seller")
    auctions = whole(count, AUCTION, "auction", *carried).rename({"time": "begins"})
    auctions = auctions.with_columns(pl.col("item").str.len_bytes())
    best = []
    for bids in frames(count, BID, "bid_auction", "bidder", "price", "extra"):
        joined = bids.join(auctions, left_on="bid_auction", right_on="auction")
        within = joined.filter(pl.col("time").is_between(pl.col("begins"), pl.col("expires")))
        best.append(_first_highest(within))
    winning = _first_highest(pl.concat(best)).with_columns(pl.col("extra").str.len_bytes())
    return _sums(winning, "bid_auction", *carried, "bidder", "price", "time", "extra")


def _first_highest(bids: pl.DataFrame) -> pl.DataFrame:
    in_order = bids.sort("price", "time", "bidder", "extra", descending=[True, False, False, False])
    return in_order.unique("bid_auction", keep="first", maintain_order=True)


def q11(count: int) -> list[float]:
    bids = whole(count, BID, "bidder").sort("bidder", "time")
    begins = (pl.col("time").diff().over("bidder").fill_null(WINDOW_MS + 1) > WINDOW_MS).cast(pl.Int64)
    sessions = bids.with_columns(number=begins.cum_sum()).group_by("number", "bidder")
    found = sessions.agg(n=pl.len(), begin=pl.col("time").min(), end=pl.col("time").max() + WINDOW_MS)
    return _sums(found, "bidder", "n", "begin", "end")


def q12(count: int) -> list[float | None]:
    rows, bidders = _added(_sums(part, "bidder") for part in frames(count, BID, "bidder"))
    return [None, rows, bidders]


def q14(count: int) -> list[float]:
    parts = []
    for bids in frames(count, BID, "bid_auction", "bidder", "price", "extra"):
        dear = bids.with_columns(euros=pl.col("price") * 0.908).filter(pl.col("euros") > 1e6, pl.col("euros") < 5e7)
        hour = pl.col("time") // 3_600_000 % 24
        length = pl.when(hour.is_between(8, 18)).then(7).otherwise(9)
        text = pl.col("extra")
        seen = dear.with_columns(kind=length, c=text.str.count_matches("c"), extra=text.str.len_bytes())
        parts.append(_sums(seen, "bid_auction", "bidder", "euros", "kind", "c", "extra"))
    return _added(iter(parts))


def _ranks() -> list[pl.Expr]:
    price = pl.col("price")
    return [pl.lit(True), price < 10_000, (price >= 10_000) & (price < 1_000_000), price >= 1_000_000]


def _reported(count: int, *by: str) -> pl.DataFrame:
    """Return the statistics of each day and value of `by`."""
    bids = whole(count, BID, "bid_auction", "bidder", "price", *by)
    counts = [rank.sum().alias(f"bids{k}") if k else pl.len().alias("bids0") for k, rank in enumerate(_ranks())]
    distinct = [
        pl.col(what).filter(rank).n_unique().alias(f"{what}{k}") if k else pl.col(what).n_unique().alias(f"{what}0")
        for what in ("bidder", "bid_auction")
        for k, rank in enumerate(_ranks())
    ]
    return bids.group_by(pl.col("time").alias("day") // DAY_MS, *by).agg(pl.col("time").max(), *counts, *distinct)


def q15(count: int) -> list[float]:
    return _sums(_reported(count), *_REPORTED)


def q16(count: int) -> list[float]:
    found = _reported(count, "channel").with_columns(
        pl.col("channel").str.len_bytes(), minute=pl.col("time") // 60_000 * 60_000
    )
    return _sums(found, "channel", "minute", *_REPORTED)


def q17(count: int) -> list[float]:
    price = pl.col("price")
    found = pl.concat(
        part.group_by("bid_auction", pl.col("time") // DAY_MS).agg(
            n=pl.len(),
            **{f"n{k}": rank.sum() for k, rank in enumerate(_ranks()) if k},
            least=price.min(),
            most=price.max(),
            total=price.sum(),
        )
        for part in frames(count, BID, "bid_auction", "price")
    )
    sums = [pl.col(name).sum() for name in ("n", "n1", "n2", "n3", "total")]
    days = found.group_by("bid_auction", "time").agg(*sums, pl.col("least").min(), pl.col("most").max())
    days = days.with_columns(average=pl.col("total") // pl.col("n"))
    return _sums(days, "bid_auction", "n", "n1", "n2", "n3", "least", "most", "average", "total")


def q18(count: int) -> list[float]:
    parts, texts = [], ("channel", "url", "extra")
    for bids in frames(count, BID, "bid_auction", "bidder", "price", *texts):
        shown = bids.with_columns(pl.col(texts).str.len_bytes(), day=pl.col("time") // DAY_MS)
        parts.append(shown.unique(("bid_auction", "bidder", "day"), keep="last", maintain_order=True))
    last = pl.concat(parts).unique(("bid_auction", "bidder", "day"), keep="last", maintain_order=True)
    return _sums(last, "bidder", "bid_auction", "price", "channel", "url", "time", "extra")


def q20(count: int) -> list[float]:
    carried = ("item", "reserve", "expires", "seller")
    auctions = whole(count, AUCTION, "auction", "category", *carried).filter(pl.col("category") == FIRST_CATEGORY)
    auctions = auctions.select("auction", pl.col("item").str.len_bytes(), *carried[1:])
    parts, texts = [], ("channel", "url", "extra")
    for bids in frames(count, BID, "bid_auction", "bidder", "price", *texts):
        joined = bids.join(auctions, left_on="bid_auction", right_on="auction")
        lengths = joined.with_columns(pl.col(texts).str.len_bytes())
        parts.append(_sums(lengths, "bid_auction", "bidder", "price", *texts, *carried))
    return _added(iter(parts))


def q21(count: int) -> list[float]:
    """The number of a channel that is not hot is in its name too."""
    parts = []
    for bids in frames(count, BID, "bid_auction", "bidder", "price", "channel"):
        number = pl.col("channel").str.strip_prefix("channel-").str.to_integer(strict=False)
        hot = [
            pl.when(pl.col("channel") == name).then(k)
            for k, name in enumerate(("Apple", "Google", "Facebook", "Baidu"))
        ]
        named = bids.with_columns(id=pl.coalesce(*hot, pl.when(number % 10 > 0).then(number)))
        parts.append(_sums(named.filter(pl.col("id").is_not_null()), "bid_auction", "bidder", "price", "id"))
    return _added(iter(parts))


def q22(count: int) -> list[float]:
    parts = []
    for bids in frames(count, BID, "bid_auction", "bidder", "price", "channel", "url"):
        made = {f"dir{k}": pl.col("url").str.extract(f"^https://[^/]*(?:/[^/]*){{{k}}}/([^/])") for k in range(3)}
        letters = bids.with_columns(pl.col("channel").str.len_bytes(), **made)
        codes = {name: _code(pl.col(name)) for name in made}
        parts.append(_sums(letters.with_columns(**codes), "bid_auction", "bidder", "price", "channel", *made))
    return _added(iter(parts))


def _code(letter: pl.Expr) -> pl.Expr:
    """Return the code of a lower-case letter."""
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    return letter.replace_strict(list(alphabet), [ord(each) for each in alphabet], return_dtype=pl.Int64)


EXPECTED: Final[Mapping[str, Callable[[int], Sequence[float | None]]]] = {
    "q0": q0,
    "q1": q1,
    "q2": q2,
    "q3": q3,
    "q4": q4,
    "q5": q5,
    "q7": q7,
    "q8": q8,
    "q9": q9,
    "q11": q11,
    "q12": q12,
    "q14": q14,
    "q15": q15,
    "q16": q16,
    "q17": q17,
    "q18": q18,
    "q20": q20,
    "q21": q21,
    "q22": q22,
}
"""The number of rows, then what `QUERIES` lists as checked; None for what depends on the clock."""
