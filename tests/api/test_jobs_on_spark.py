"""Jobs through the API on Spark: the default slots, DataFrames and Python Data Sources in, Data Sources out."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamWriter,
    InputPartition,
    WriterCommitMessage,
)

from midstream import ClusterError, ConfigError, Environment
from waiting import until_spark_is_idle

pytestmark = pytest.mark.spark


class CountingReader(DataSourceReader):
    def partitions(self):
        return [InputPartition(start) for start in (0, 10, 20)]

    def read(self, partition):
        for n in range(partition.value, partition.value + 10):
            yield (n,)


class Counting(DataSource):
    @classmethod
    def name(cls):
        return "counting"

    def schema(self):
        return "n long"

    def reader(self, schema):
        return CountingReader()


@dataclass
class Lines(WriterCommitMessage):
    numbers: list[int]


class JsonWriter(DataSourceStreamWriter):
    def __init__(self, directory: str) -> None:
        self.directory = directory

    def write(self, iterator):
        return Lines([row.n for row in iterator])

    def commit(self, messages, batchId):
        numbers = [n for message in messages if message is not None for n in message.numbers]
        (Path(self.directory) / f"{batchId}.json").write_text(json.dumps(numbers), encoding="utf-8")

    def abort(self, messages, batchId):
        pass


class JsonFiles(DataSource):
    @classmethod
    def name(cls):
        return "jsonfiles"

    def streamWriter(self, schema, overwrite):
        return JsonWriter(self.options["directory"])


@pytest.mark.smoke
def test_a_data_frame_and_a_data_source_go_in_and_a_data_source_writes(spark: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    env = Environment("spark", parallelism=2, checkpoint_dir=tmp_path / "checkpoints")
    framed = env.from_dataframe(spark.range(100, 110).withColumnRenamed("id", "n"))
    counted = env.from_datasource(Counting)
    both = framed.union(counted).map(lambda row: {"n": row["n"] + 1})
    both.write_datasource(JsonFiles, options={"directory": str(out)})
    kept = both.collect()
    status = env.execute()
    expected = [*range(1, 31), *range(101, 111)]
    assert status.state == "finished"
    assert sorted(row["n"] for row in kept.rows()) == expected
    assert sorted(n for file in out.glob("*.json") for n in json.loads(file.read_text())) == expected
    until_spark_is_idle(spark)


def test_more_slots_than_cores_are_refused_with_both_numbers(spark: Any) -> None:
    env = Environment("wide", parallelism=9)
    env.from_collection([{"n": 1}]).print()
    with pytest.raises(ClusterError, match=r"9 slots.*4"):
        env.execute()


def test_another_master_than_the_sessions_is_refused(spark: Any) -> None:
    env = Environment("elsewhere")
    env.from_collection([{"n": 1}]).print()
    with pytest.raises(ConfigError, match="already has a Spark session"):
        env.execute(master="local[7]")


def test_what_functions_log_on_spark_is_logged_by_the_program(spark: Any, caplog: pytest.LogCaptureFixture) -> None:
    def says(row: dict[str, Any]) -> dict[str, Any]:
        logging.getLogger("app.rows").info("row %d", row["n"])
        return row

    caplog.set_level(logging.INFO, "app")
    env = Environment("says")
    env.from_collection([{"n": 7}]).map(says).print(limit=0)
    env.execute()
    (record,) = [record for record in caplog.records if record.name == "app.rows"]
    assert (record.levelno, record.getMessage(), record.operator) == (logging.INFO, "row 7", "map")  # type: ignore[attr-defined]
    until_spark_is_idle(spark)
