"""Clicks of a site: the visits of each user, and the three most viewed pages of each hour.

midstream run examples/clickstream/clickstream.py --preview 5
midstream run examples/clickstream/clickstream.py --slots process
midstream simulate examples/clickstream/clickstream.py --seeds 0:20

Shows side outputs of lines that cannot be read and of late rows, drop_duplicates, sessions, and the largest rows of a
window. `clicks.py` makes the input. With `watch=True` the job runs until it is stopped, and reads new files.
"""

from pathlib import Path

import polars as pl
import pyarrow as pa

from midstream import (
    BAD_RECORDS,
    LATE,
    Count,
    CountDistinct,
    Environment,
    First,
    Last,
    Sum,
    WatermarkStrategy,
    session,
    tumbling,
)

INPUT = Path(__file__).parent / "in"
CLICK = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),  # a line without it is a bad record
        pa.field("user", pa.string(), nullable=False),
        pa.field("page", pa.string(), nullable=False),
        pa.field("at", pa.timestamp("us"), nullable=False),
        pa.field("cents", pa.int64()),
        pa.field("campaign", pa.string()),  # since the second day: null in the lines before
    ]
)
env = Environment("clickstream", parallelism=2, checkpoint_dir="state/clickstream", checkpoint_interval="1 s")

lines = env.read_files(INPUT, schema=CLICK, on_bad_record="drop", bad_records_max=(100, 1000)).uid("lines")
clicks = (
    lines.with_watermarks("at", WatermarkStrategy.bounded("10 min")).drop_duplicates("id", within="1 h").uid("once")
)
visits = (
    clicks.key_by("user")
    .window(session("30 min"))
    .aggregate(
        clicks=Count(),
        cents=Sum("cents"),
        pages=CountDistinct("page"),
        first=First("page"),
        last=Last("page"),
        from_campaigns=Count(where=pl.col("campaign").is_not_null()),
    )
    .uid("visits-of-users")
)
views = clicks.key_by("page").window(tumbling("1 h")).aggregate(views=Count()).uid("views-per-hour")
top = views.window_all(tumbling("1 h")).top(3, by="views").uid("three-pages")

visits.write_parquet("out/clickstream/visits").uid("visits")
top.write_parquet("out/clickstream/top").uid("top")
clicks.side_output(LATE).write_jsonl("out/clickstream/late").uid("late")
lines.side_output(BAD_RECORDS).write_parquet("out/clickstream/bad").uid("bad")

if __name__ == "__main__":
    env.execute(resume=True)
