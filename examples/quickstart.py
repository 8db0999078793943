"""Page views per 10 seconds of event time. Run it: midstream run examples/quickstart.py"""

import polars as pl

from midstream import Count, Environment, WatermarkStrategy, tumbling

env = Environment("quickstart", parallelism=2)
(
    env.generate(lambda i: {"at_ms": i * 5, "page": i * 7 % 3}, count=12_000)
    .with_columns(pl.col("at_ms").cast(pl.Datetime("ms")).alias("at"), page=pl.format("/page/{}", "page"))
    .with_watermarks("at", WatermarkStrategy.monotonous())
    .key_by("page")
    .window(tumbling("10 s"))
    .aggregate(views=Count())
    .print()
)

if __name__ == "__main__":
    env.execute()
