"""The Spark format `midstream`: the state of a job as a DataFrame, and a DataFrame as the state of a job."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from midstream import (
    ConfigError,
    Environment,
    KeyedProcessFunction,
    ListState,
    SchemaError,
    StateSource,
    ValueState,
    read_state,
    write_savepoint,
)
from midstream.engine.core.arrow_types import to_list
from mutated_checkpoints import Base

NESTED = pa.struct(
    [
        ("small", pa.list_(pa.uint32())),
        ("length", pa.duration("us")),
        ("moment", pa.timestamp("us", "Europe/Berlin")),
        ("amount", pa.decimal128(10, 2)),
        ("large", pa.uint64()),
    ]
)
VALUE = {
    "small": [1, 2**32 - 1],
    "length": timedelta(days=1),
    "moment": datetime(2024, 7, 1, tzinfo=UTC),
    "amount": Decimal("1.50"),
    "large": 2**64 - 1,
}


class Keeper(KeyedProcessFunction):
    nested = ValueState(NESTED)
    times = ListState(pa.timestamp("ms"))
    clock = ValueState(pa.time64("us"))

    def process(self, row: Any, ctx: Any) -> Any:
        return None


@pytest.fixture
def path(tmp_path: Path) -> str:
    env = Environment("kept", parallelism=3)
    env.from_collection([{"k": 1}]).key_by("k").process(Keeper(), {"k": int}).uid("keeper").collect()
    count = 40
    states = {
        ("keeper", "nested"): pa.table({"k": range(count), "nested": pa.array([VALUE, None] * (count // 2), NESTED)}),
        ("keeper", "times"): pl.DataFrame(
            {"k": [1, 1, 2], "position": [0, 1, 0], "times": [datetime(2024, 1, day) for day in (1, 2, 3)]}
        ),
        ("keeper", "clock"): pl.DataFrame({"k": [1], "clock": [time(1, 2, 3, 4)]}),
    }
    return write_savepoint(tmp_path / "saved", like=env, states=states)


def load(spark: Any, path: str, **options: str) -> Any:
    spark.dataSource.register(StateSource)
    return spark.read.format("midstream").options(**options).load(path)


@pytest.mark.parametrize("name", ["nested", "times"])
def test_a_state_is_read_by_executors_and_written_back(spark: Any, path: str, name: str, tmp_path: Path) -> None:
    frame = load(spark, path, uid="keeper", name=name)
    expected = read_state(path, "keeper", name).collect()
    assert frame.columns == expected.columns
    assert frame.count() == expected.height
    if name == "nested":
        [found] = frame.where("k = 0").select("nested.small", "nested.large").collect()
        assert found.asDict() == {"small": VALUE["small"], "large": VALUE["large"]}
        back = frame.withColumn("nested", frame.nested)
        with pytest.raises(SchemaError, match=r"decimal128.* does not fit uint64"):
            write_savepoint(tmp_path / "no", like=path, states={("keeper", name): back})
        return
    again = write_savepoint(tmp_path / "again", like=path, states={("keeper", name): frame.sort("k", "position")})
    assert read_state(again, "keeper", name).collect().sort("k", "position").equals(expected.sort("k", "position"))


def source(**options: str) -> StateSource:
    return StateSource(options)


def test_there_is_a_partition_for_each_subtask_that_has_rows(path: str) -> None:
    """As an executor reads them, which gets them pickled."""
    found = source(path=path, uid="keeper", name="nested")
    schema = found.schema()
    assert isinstance(schema, StructType)
    reader = found.reader(schema)
    partitions = reader.partitions()
    assert len(partitions) == 3
    rows = pa.concat_tables([pa.Table.from_batches(reader.read(partition)) for partition in partitions])  # type: ignore[arg-type]
    keys: list[int] = to_list(rows.column("k"))
    assert sorted(keys) == list(range(40))


def test_rows_in_flight_have_a_partition_for_each_subtask(tmp_path: Path) -> None:
    Base("functions").mutant.write(tmp_path)
    found = source(path=str(tmp_path), uid="everything", name="in_flight")
    schema = found.schema()
    assert isinstance(schema, StructType)
    reader = found.reader(schema)
    read = [pa.Table.from_batches(reader.read(partition)) for partition in reader.partitions()]  # type: ignore[arg-type]
    numbers = [sorted(to_list(table.column("x"))) for table in read]
    assert len(numbers) == 2 and all(numbers) and sorted(numbers[0] + numbers[1]) == [n // 2 for n in range(12)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs the option 'path'"),
        ({"path": "P"}, "needs the option 'uid'; give path"),
        ({"path": "P", "uid": "keeper", "where": "k = 1"}, "has no option 'where'"),
        ({"path": "P", "uid": "keeper"}, "has several states, so name one of them: 'nested'"),
        ({"path": "P", "uid": "keeper", "name": "nope"}, "has no state 'nope' there"),
    ],
)
def test_options_that_name_no_state_are_refused(path: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        source(**{name: path if value == "P" else value for name, value in options.items()}).schema()
