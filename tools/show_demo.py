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
with pl.Config(tbl_hide_dataframe_shape=True, tbl_hide_column_data_types=True, tbl_width_chars=100, fmt_str_lengths=40):
    print(worst)
print(
    """
what next: run it again with  rm -rf out/demo; .venv/bin/midstream run examples/flights.py
  and meanwhile, from another terminal,  .venv/bin/midstream list  and  .venv/bin/midstream status
  kill -9 one of its slots (the processes that status names): the job resumes from its newest checkpoint
  stop it with Ctrl-C, and continue with  .venv/bin/midstream run examples/flights.py --from latest
the result is the same each time: every flight once"""
)
