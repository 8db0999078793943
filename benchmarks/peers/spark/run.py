"""One run of one workload on Spark Structured Streaming; the last line on stdout is the result as JSON.

usage: .venv/bin/python benchmarks/peers/spark/run.py WORKLOAD [--variant V] [--events N] [--max-seconds S]

Seconds count from the beginning of the first micro-batch to the end of the one in which the last windows fired,
its commit included; the session is warm: the same query has run a few batches before.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import kafka
import latency
import nexmark
import pyspark
import windows
from definitions import LATENCY_RATE_PER_S, LATENCY_S, arguments, print_result
from session import open_session

WINDOWED = {
    "window": {"native": windows.run_window},
    "strings": {"native": windows.run_strings},
    "sliding": {"native": windows.run_sliding},
    "udf": {name: partial(windows.run_udf, variant=name) for name in windows.UDF_VARIANTS},
    "kafka": {"native": kafka.run_kafka},
    **{
        query: {
            "native": partial(nexmark.run_nexmark, query=query),
            "parquet": partial(nexmark.run_nexmark, query=query, in_files=True),
        }
        for query in nexmark.QUERIES
    },
}
EVENTS = {"window": 20_000_000, "strings": 10_000_000, "sliding": 10_000_000, "udf": 4_000_000, "kafka": kafka.EVENTS}
NEXMARK_EVENTS = 10_000_000
BATCH = {"window": 4_000_000, "strings": 1_000_000, "sliding": 200_000, "udf": 400_000, "kafka": 500_000}
NEXMARK_BATCH = {"q0": 2_000_000, "q1": 2_000_000, "q2": 2_000_000}
NEXMARK_BATCH_OTHERS = 500_000
"""Events in a micro-batch: so many that one takes about a second."""


LATENCY_EVENTS = LATENCY_RATE_PER_S * LATENCY_S


def main() -> None:
    args = arguments(__doc__, [*WINDOWED, "latency", "latency_kafka"], batch=None)
    workload = args.workload
    if workload == "latency_kafka":
        _latency_kafka(args.variant or "stateless", args.parallelism)
        return
    variants = latency.VARIANTS if workload == "latency" else WINDOWED[workload]
    variant = args.variant or next(iter(variants))
    if variant not in variants:
        sys.exit(f"error: {workload} has the variants {', '.join(variants)}, not {variant}")
    settings = latency.settings(variant, args.parallelism) if workload == "latency" else {}
    if workload == "kafka":
        settings = kafka.settings()
    spark = open_session(args.parallelism, **settings)
    try:
        if workload == "latency":
            run = latency.run_latency(spark, args.events or LATENCY_EVENTS, args.parallelism, variant)
            events = run.events
        else:
            events = args.events or EVENTS.get(workload, NEXMARK_EVENTS)
            batch = args.batch or {**BATCH, **NEXMARK_BATCH}.get(workload, NEXMARK_BATCH_OTHERS)
            run = variants[variant](spark, events, batch, args.parallelism, args.max_seconds)
            events = run.events_of(events)
    finally:
        spark.stop()
    print_result(
        engine="spark",
        version=pyspark.__version__,
        workload=workload,
        variant=variant,
        events=events,
        parallelism=args.parallelism,
        seconds=run.seconds,
        **run.figures,
    )


def _latency_kafka(variant: str, parallelism: int) -> None:
    """`variant`: a query, and "-real-time" for that mode."""
    query, mode = (variant.removesuffix("-real-time"), "real-time" if variant.endswith("-real-time") else "micro-batch")
    settings = latency.settings(mode, parallelism) | kafka.settings()
    if mode == "real-time":  # its tasks run all at once, and Spark's shortest batch is the documented one
        settings |= {
            "slots": kafka.latency_kafka.PARTITIONS + 2 * parallelism,
            "spark.sql.streaming.realTimeMode.minBatchDuration": "5000",
        }
    spark = open_session(parallelism, **settings)
    try:
        figures = kafka.run_latency_kafka(spark, query, mode, parallelism)
    finally:
        spark.stop()
    result = {"engine": "spark", "version": pyspark.__version__, "workload": "latency_kafka", "variant": variant}
    print(json.dumps(result | figures | {"correct": True}))


if __name__ == "__main__":
    main()
