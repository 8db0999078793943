# examples/visits.py
import polars as pl

from midstream import Count, Environment, Mean, WatermarkStrategy, tumbling

env = Environment("visits", parallelism=2, checkpoint_dir="state/visits", checkpoint_interval="2 s")
(
    env.generate(lambda i: {"ms": i, "page": i % 7, "took": i * 31 % 97}, rows_per_s=20_000)
    .select("page", "took", at=pl.col("ms").cast(pl.Datetime("ms")))
    .with_watermarks("at", WatermarkStrategy.bounded("5 s"))
    .filter(pl.col("took") > 2)
    .key_by("page")
    .window(tumbling("10 s"))
    .aggregate(visits=Count(), mean=Mean("took"))
    .write_parquet("out/visits")
)

if __name__ == "__main__":
    env.execute()
