"""Spark's data in real jobs: a DataFrame through Spark slots; Python Data Sources at both ends, stopped and restored."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from pyspark import TaskContext
from pyspark.sql import Row
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import LongType, StructField, StructType

from machine import limit_s
from midstream import Environment
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until


class Span(InputPartition):
    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop


class Counting(DataSource):
    """Rows 0 to what stands in `<dir>/size`; writes JSON files, listed per batch id in `<dir>/<id>.json`."""

    def schema(self) -> StructType:
        return StructType([StructField("n", LongType())])

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return CountingReader(Path(self.options["dir"]))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return CountingWriter(Path(self.options["dir"]))


class CountingReader(DataSourceStreamReader):
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def initialOffset(self) -> dict:
        return {"at": 0}

    def latestOffset(self, start: dict, limit: object) -> dict:
        return {"at": min(int((self.directory / "size").read_text()), start["at"] + 700)}

    def partitions(self, start: dict, end: dict) -> list[Span]:
        middle = (start["at"] + end["at"]) // 2
        return [Span(start["at"], middle), Span(middle, end["at"])]

    def read(self, partition: Span) -> Iterator[tuple[int]]:  # type: ignore[override]  # narrower, as users write it
        return ((n,) for n in range(partition.start, partition.stop))

    def commit(self, end: dict) -> None:
        (self.directory / "forgotten").write_text(str(end["at"]))


class Wrote(WriterCommitMessage):
    def __init__(self, file: str) -> None:
        self.file = file


class CountingWriter(DataSourceStreamWriter):
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, iterator: Iterator[Row]) -> Wrote:
        task = TaskContext.get()
        numbers = [row.n for row in iterator]
        assert task is not None
        file = f"{task.partitionId()}-{os.getpid()}-{task.attemptNumber()}-{task.taskAttemptId()}"
        (self.directory / file).write_text(json.dumps(numbers))
        return Wrote(file)

    def commit(self, messages: list[Wrote], batchId: int) -> None:  # type: ignore[override]  # narrower, as users write it
        listed = self.directory / f"{batchId}.listed"
        listed.write_text(json.dumps([message.file for message in messages]))
        listed.rename(self.directory / f"{batchId}.json")  # whoever looks meanwhile sees all of it or nothing

    def abort(self, messages: list[Wrote], batchId: int) -> None:  # type: ignore[override]  # narrower, as users write it
        for message in messages:
            (self.directory / message.file).unlink(missing_ok=True)


def committed(out: Path) -> list[int]:
    files = [file for batch in out.glob("*.json") for file in json.loads(batch.read_text())]
    return sorted(n for file in files for n in json.loads((out / file).read_text()))


def test_data_sources_at_both_ends_lose_and_double_nothing(tmp_path):
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    out.mkdir()

    def counting(rows_per_s: float | None) -> Environment:
        env = Environment("count", parallelism=2, checkpoint_dir=tmp_path / "chk", checkpoint_interval="200 ms")
        options = {"dir": str(source)}
        stream = env.from_datasource(
            Counting, streaming=True, options=options, interval="20 ms", rows_per_s=rows_per_s
        ).uid("in")
        stream.rebalance().write_datasource(Counting, options={"dir": str(out)}).uid("out")
        return env

    def rows_at_source(count: int) -> None:
        (source / "size.new").write_text(str(count))
        (source / "size.new").replace(source / "size")

    rows_at_source(8000)
    job = counting(6000).start(slots=ProcessSlots())
    until("something committed", lambda: len(committed(out)) > 0)
    os.kill(next(pid for pid in job.status().slot_pids if pid), signal.SIGKILL)
    until("the job restarted", lambda: job.status().restarts >= 1)
    before = len(committed(out))
    rows_at_source(10_000)
    until("more committed", lambda: len(committed(out)) > before)
    until("the source is told of a range that is read to its end", (source / "forgotten").exists)
    job.stop(timeout_s=limit_s(60))
    seen = committed(out)
    assert seen == sorted(set(seen))
    assert int((source / "forgotten").read_text()) <= len(seen)
    rows_at_source(12_000)
    job = counting(None).start(slots=ProcessSlots(), restore_from="latest")
    until("everything committed", lambda: len(committed(out)) >= 12000)
    job.stop(drain=True, timeout_s=limit_s(60))
    assert committed(out) == list(range(12000))
    assert int((source / "forgotten").read_text()) > 0


@pytest.mark.spark
def test_a_dataframe_flows_through_spark_slots_into_files_that_spark_reads(spark, tmp_path):
    env = Environment("frame", parallelism=2, checkpoint_dir=tmp_path / "chk", checkpoint_interval="200 ms")
    frame = spark.range(0, 50_000, 1, 3).selectExpr("id", "cast(id as string) as text")
    env.from_dataframe(frame).filter(pl.col("id") % 2 == 0).write_parquet(tmp_path / "out")
    assert env.execute().state == "finished"
    result = spark.read.parquet(str(tmp_path / "out"))
    assert result.count() == 25_000
    assert result.where("id % 2 = 0 and cast(id as string) = text").distinct().count() == 25_000
