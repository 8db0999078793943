"""The NEXMark events of the peer benchmarks by numpy, and what each query must come to by polars.

The checks hold the number of rows of a query's result and the sums of its numeric columns. Needs what .venv has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

Longs: TypeAlias = npt.NDArray[np.int64]

FIRST = ["Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter"]
LAST = ["Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris"]
CITY = [
    "Phoenix",
    "Los Angeles",
    "San Francisco",
    "Boise",
    "Portland",
    "Bend",
    "Redmond",
    "Seattle",
    "Kent",
    "Cheyenne",
]
STATE = ["AZ", "CA", "ID", "OR", "WA", "WY"]
CHANNEL = ["Google", "Facebook", "Baidu", "Apple"]
PRICE = [int(100 * np.floor(10 ** (i / 4096 * 6) + 1e-9)) for i in range(4096)]
FIRST_ID = 1000
EXPIRES_MS = 2 * 167
"""An auction is open for less than that, plus 1 ms."""


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The splitmix64 finaliser."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw(n: Longs, salt: int, k: int | Longs) -> Longs:
    return (mix(n.astype(np.uint64) * np.uint64(16) + np.uint64(salt)) >> np.uint64(33)).astype(np.int64) % k


def last_auction(n: Longs) -> Longs:
    return n // 50 * 3 + np.minimum(n % 50, 3) - 1


def persons(events: int) -> pl.DataFrame:
    n = np.arange(0, events, 50)
    return pl.DataFrame(
        {
            "id": FIRST_ID + n // 50,
            "time": n // 10,
            "first": draw(n, 0, 11),
            "last": draw(n, 1, 9),
            "state": draw(n, 3, 6),
        }
    )


def auctions(events: int) -> pl.DataFrame:
    n = np.arange(events)
    n = n[(n % 50 >= 1) & (n % 50 <= 3)]
    person = n // 50
    hot = person // 100 * 100
    seller = np.where(draw(n, 0, 4) > 0, hot, person - draw(n, 1, np.minimum(person, 999) + 1))
    time = n // 10
    return pl.DataFrame(
        {
            "id": FIRST_ID + last_auction(n),
            "time": time,
            "seller": FIRST_ID + seller,
            "category": 10 + draw(n, 2, 5),
            "expires": time + 1 + draw(n, 4, EXPIRES_MS),
        }
    )


def bids(events: int) -> pl.DataFrame:
    n = np.arange(events)
    n = n[n % 50 >= 4]
    person, auction = n // 50, last_auction(n)
    chosen = np.where(draw(n, 0, 2) > 0, auction // 100 * 100, auction - draw(n, 1, np.minimum(auction, 99) + 1))
    hot = np.minimum(person // 100 * 100 + 1, person)
    bidder = np.where(draw(n, 2, 4) > 0, hot, person - draw(n, 3, np.minimum(person, 999) + 1))
    return pl.DataFrame(
        {
            "auction": FIRST_ID + chosen,
            "bidder": FIRST_ID + bidder,
            "price": np.array(PRICE)[draw(n, 4, 4096)],
            "time": n // 10,
        }
    )


def _q0(events: int) -> list[float]:
    return _totals(bids(events), "auction", "bidder", "price", "time")


def _q1(events: int) -> list[float]:
    return _totals(bids(events).with_columns(pl.col("price") * 0.908), "auction", "bidder", "price", "time")


def _q2(events: int) -> list[float]:
    return _totals(bids(events).filter(pl.col("auction") % 123 == 0), "auction", "price")


def _q3(events: int) -> list[float]:
    wanted = persons(events).filter(pl.col("state").is_in([STATE.index(name) for name in ("OR", "ID", "CA")]))
    sold = auctions(events).filter(pl.col("category") == 10).select(auction="id", id="seller")
    return _totals(sold.join(wanted, on="id"), "auction")


def _q4(events: int) -> list[float]:
    """Per category, from 10 on: auctions with a bid, and the sum of their highest prices."""
    both = bids(events).join(auctions(events).rename({"time": "opened"}), left_on="auction", right_on="id")
    valid = both.filter((pl.col("opened") <= pl.col("time")) & (pl.col("time") <= pl.col("expires")))
    final = valid.group_by("auction", "category").agg(pl.col("price").max())
    sums = final.group_by("category").agg(pl.len(), pl.col("price").sum()).sort("category")
    found = {category: (float(count), float(price)) for category, count, price in sums.iter_rows()}
    return [figure for category in range(10, 15) for figure in found.get(category, (0.0, 0.0))]


def _q5(events: int) -> list[float]:
    panes = bids(events).group_by("auction", pane=pl.col("time") // 2000).agg(n=pl.len().cast(pl.Int64))
    windows = pl.concat([panes.with_columns(window=pl.col("pane") - back) for back in range(5)])
    counts = windows.group_by("auction", "window").agg(pl.col("n").sum())
    return _totals(counts.filter(pl.col("n") == pl.col("n").max().over("window")), "n", "auction")


def _q7(events: int) -> list[float]:
    windows = bids(events).with_columns(window=pl.col("time") // 10_000)
    return _totals(windows.filter(pl.col("price") == pl.col("price").max().over("window")), "price", "auction")


def _q8(events: int) -> list[float]:
    sellers = auctions(events).select(id="seller", window=pl.col("time") // 10_000).unique()
    created = persons(events).with_columns(window=pl.col("time") // 10_000)
    return _totals(created.join(sellers, on=["id", "window"]), "id")


def _totals(rows: pl.DataFrame, *columns: str) -> list[float]:
    return [float(rows.height), *(float(rows[column].sum()) for column in columns)]


EXPECTED: dict[str, Callable[[int], list[float]]] = {
    "q0": _q0,
    "q1": _q1,
    "q2": _q2,
    "q3": _q3,
    "q4": _q4,
    "q5": _q5,
    "q7": _q7,
    "q8": _q8,
}
"""Query → number of events → number of rows, then the sums of the columns."""
