"""What `make demo` has written: how many flights are in the result, and the worst days of 2013."""

from __future__ import annotations

import polars as pl

delays = pl.read_parquet("out/demo/delays/*.parquet")
worst = (
    delays.filter(pl.col("departed") >= 20)
    .sort("delay_mean", descending=True)
    .select(
        pl.col("window_start").dt.date().alias("day"),
        "origin",
        "airline",
        "flights",
        pl.col("delay_mean").round(1).alias("mean delay (min)"),
        pl.col("visib_mean").round(1).alias("visibility (mi)"),
    )
    .head(5)
)
print(f"\nout/demo/delays: {delays['flights'].sum():,} flights in {len(delays):,} rows; the worst days:")
with pl.Config(tbl_hide_dataframe_shape=True, tbl_hide_column_data_types=True):
    print(worst)
