"""A local Spark session for benchmarks, and one measured run of a streaming query on it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import psutil
from definitions import peak_mb
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.streaming import DataStreamWriter

WARM_UP_BATCHES = 3
WARM_UP_S_MAX = 15.0
POLL_S = 0.05
START_S_MAX = 120.0
BLOCK = 10_000
"""Events that a source makes of one row."""


@dataclass(frozen=True)
class Batch:
    """What Spark reports of a micro-batch."""

    number: int
    began_s: float
    """Unix time at which the trigger began."""
    took_s: float
    """Planning, execution, state store commit, both write-ahead logs."""
    watermark_ms: int
    observed: tuple[float, ...]
    state_bytes: int
    state_rows: int
    blocks: int

    @property
    def ended_s(self) -> float:
        return self.began_s + self.took_s


@dataclass(frozen=True)
class Run:
    batches: list[Batch]
    is_bounded: bool
    """The time was up before the last batch."""
    memory_mb: float
    result_rows: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)
    """Figures that only this workload has."""

    @property
    def seconds(self) -> float:
        return self.batches[-1].ended_s - self.batches[0].began_s

    def events_of(self, n: int) -> int:
        """How many of n events have been processed."""
        return min(n, BLOCK * sum(batch.blocks for batch in self.batches)) if self.is_bounded else n

    @property
    def watermark_ms(self) -> int | None:
        """By which the last batch fired its windows, None at the end of the input."""
        return self.batches[-1].watermark_ms if self.is_bounded else None

    @property
    def totals(self) -> list[float]:
        return [float(sum(column)) for column in zip(*(batch.observed for batch in self.batches), strict=True)]

    @property
    def figures(self) -> dict[str, Any]:
        """What every result holds."""
        state = max(self.batches, key=lambda batch: batch.state_bytes)
        return {
            "checkpoints_completed": len(self.batches),
            "checkpoints_per_s": round(len(self.batches) / self.seconds, 2),
            "batch_s_mean": round(sum(batch.took_s for batch in self.batches) / len(self.batches), 3),
            "batch_s_max": round(max(batch.took_s for batch in self.batches), 3),
            "state_mb_max": round(state.state_bytes / 1e6, 1),
            "state_rows_max": max(batch.state_rows for batch in self.batches),
            "state_bytes_per_row": round(state.state_bytes / max(1, state.state_rows), 1),
            "result_rows": self.result_rows,
            "memory_mb": self.memory_mb,
            **({"bounded": True} if self.is_bounded else {}),
            **self.more,
        }


def open_session(parallelism: int, *, slots: int | None = None, **settings: Any) -> SparkSession:
    """`slots`: how many tasks run at a time, as many as `parallelism` unless given."""
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join([str(path) for path in sys.path[:2]])  # for Spark's Python workers
    builder = SparkSession.builder.master(f"local[{slots or parallelism}]").appName("peer")
    for name, value in {
        "spark.driver.memory": "8g",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "OFF",  # failures come back as exceptions
        "spark.sql.ansi.enabled": "false",  # generators multiply modulo 2**64
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": parallelism,
        "spark.sql.streaming.numRecentProgressUpdates": 1_000_000,
        **settings,
    }.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def run_query(
    frame: DataFrame,
    metrics: Mapping[str, Column],
    last_batch: int,
    max_seconds: float | None,
) -> Run:
    """Run the query into a sink that takes every row and adds `metrics` up, until `last_batch` has been committed.

    The same query runs a few batches first, from another checkpoint directory, so that the session is warm.
    """
    observed = frame.observe("totals", *(column.alias(name) for name, column in metrics.items()))
    names = list(metrics)
    _run(observed, names, min(last_batch, WARM_UP_BATCHES - 1), WARM_UP_S_MAX)
    return _run(observed, names, last_batch, max_seconds)


def _run(frame: DataFrame, names: list[str], last_batch: int, max_seconds: float | None) -> Run:
    writer = frame.writeStream.format("noop").outputMode("append")
    return run_until(writer, lambda progress: progress["batchId"] >= last_batch, max_seconds, names)


def run_until(
    writer: DataStreamWriter, is_last: Callable[[Any], bool], max_seconds: float | None, names: Sequence[str] = ()
) -> Run:
    """Run a query until the batch has been committed of whose progress `is_last`. `names`: of the observed metrics."""
    directory = tempfile.mkdtemp(prefix="peer-spark-")
    try:
        query = writer.option("checkpointLocation", directory).start()
        try:
            is_bounded = wait_until(query, is_last, max_seconds)
            memory_mb = session_memory_mb()
        finally:
            query.stop()
        batches = []
        for progress in query.recentProgress:
            # A trigger that found nothing to do is reported too, under the number of the batch to come.
            if "addBatch" in progress["durationMs"]:
                batches.append(_batch(progress, names))
            if is_last(progress):
                break
        return Run(batches, is_bounded, memory_mb)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def wait_until(query: Any, is_done: Callable[[Any], bool], max_seconds: float | None) -> bool:
    """Whether the time, from the first finished batch on, was up before `is_done` of the last progress."""
    began_s = time.monotonic()
    first_s: float | None = None
    while True:
        if (failure := query.exception()) is not None:
            raise failure
        progress = query.lastProgress
        now_s = time.monotonic()
        if progress is not None:
            if first_s is None:
                first_s = now_s - progress["durationMs"]["triggerExecution"] / 1000
            if is_done(progress):
                return False
            if max_seconds is not None and now_s - first_s > max_seconds:
                return True
        elif now_s - began_s > START_S_MAX + (max_seconds or 0):
            raise TimeoutError(f"no batch has finished after {now_s - began_s:.0f} s")
        time.sleep(POLL_S)


def _batch(progress: Any, names: Sequence[str]) -> Batch:
    observed = progress["observedMetrics"].get("totals")
    operators = progress["stateOperators"]
    return Batch(
        number=progress["batchId"],
        began_s=_unix_s(progress["timestamp"]),
        took_s=progress["durationMs"]["triggerExecution"] / 1000,
        watermark_ms=watermark_ms(progress),
        observed=tuple(0.0 if observed is None or observed[name] is None else observed[name] for name in names),
        state_bytes=sum(operator["memoryUsedBytes"] for operator in operators),
        state_rows=sum(operator["numRowsTotal"] for operator in operators),
        blocks=progress["numInputRows"],
    )


def watermark_ms(progress: Any) -> int:
    """By which the batch fired its windows."""
    return round(_unix_s(progress["eventTime"].get("watermark", "1970-01-01T00:00:00.000Z")) * 1000)


def _unix_s(text: str) -> float:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC).timestamp()


def session_memory_mb() -> float:
    """The JVM and its Python workers; this process only asks."""
    return peak_mb(process.pid for process in psutil.Process().children(recursive=True))
