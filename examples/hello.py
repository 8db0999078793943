# examples/hello.py
import polars as pl

from midstream import Count, Environment, WatermarkStrategy, tumbling

env = Environment("hello")
(
    env.generate(lambda i: {"second": i, "user": i % 3}, count=180)
    .select("user", at=pl.from_epoch("second"))
    .with_watermarks("at", WatermarkStrategy.monotonous())
    .key_by("user")
    .window(tumbling("1 min"))
    .aggregate(clicks=Count())
    .select("user", "clicks", minute=pl.col("window_start").dt.strftime("%H:%M"))
    .print()
)
