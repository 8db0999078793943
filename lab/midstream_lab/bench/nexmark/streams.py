"""What queries take out of the stream of all events, and what several of them have in common."""

from __future__ import annotations

from typing import Final

import polars as pl
import pyarrow as pa

from midstream.api.data_stream import DataStream
from midstream_lab.bench.nexmark.generator import BID

EURO: Final = 0.908
"""The price of a dollar, in q1 and q14."""
TIME: Final = pa.timestamp("ms")


def only(kind: int, events: DataStream, *columns: str, **named: pl.Expr) -> DataStream:
    """Return some columns of one kind of events. Columns that are not selected need not be filtered."""
    return events.select("kind", *columns, **named).filter(pl.col("kind") == kind).select(*columns, *named)


def bids(events: DataStream, *columns: str) -> DataStream:
    """Return the bids, with `auction` and `columns`."""
    return only(BID, events, *columns, auction=pl.col("bid_auction"))
