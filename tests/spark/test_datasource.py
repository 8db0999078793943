"""Python Data Sources as sources: partitions and offset ranges planned on the driver, read exactly once."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
    SimpleDataSourceStreamReader,
)
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType, TimestampType

from midstream.core.errors import ConfigError, JobError, SchemaError
from midstream.operators.source import DiscoveryContext, Source, Split
from midstream.runtime.storage import LocalStorage
from midstream.spark.datasource import DataSourceBatchSource, DataSourceStreamSource
from midstream.spark.ddl import parse_ddl

SCHEMA = StructType([StructField("n", LongType()), StructField("who", StringType())])


def read(source: Source, split: Split, rows_max: int = 100) -> tuple[list[Any], list[int]]:
    """Values of the first column, and the offset after each."""
    reader = source.open_split(split)
    rows: list[Any] = []
    offsets: list[int] = []
    while (got := reader.read(rows_max)) is not None:
        assert got[0].schema == source.schema
        rows += got[0].column(0).to_pylist()
        offsets += [got[1]] * got[0].num_rows
    reader.close()
    return rows, offsets


# ---- batch ----


class Numbers(DataSource):
    """`form`: what read() yields."""

    @classmethod
    def name(cls) -> str:
        return "numbers"

    def schema(self) -> StructType:
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        return NumbersReader(self.options.get("form", "tuple"))


class Part(InputPartition):
    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop


class NumbersReader(DataSourceReader):
    def __init__(self, form: str) -> None:
        self.form = form

    def partitions(self) -> list[Part]:
        return [Part(0, 3), Part(3, 3), Part(3, 10)]

    def read(self, partition: Part) -> Iterator[Any]:
        numbers = range(partition.start, partition.stop)
        if self.form == "batch":
            for n in numbers:
                yield pa.record_batch({"n": pa.array([n]), "who": pa.array([f"w{n}"])})
        for n in numbers:
            match self.form:
                case "tuple":
                    yield (n, f"w{n}")
                case "row":
                    yield Row(who=f"w{n}", n=n)
                case "list":
                    yield [n, None]
                case "short":
                    yield (n,)
                case "text":
                    yield "n"
                case "wrong type":
                    yield ("n", 1)
                case "wrong row":
                    yield Row(x=1, n=2)


def batch_splits(source: Source) -> list[Split]:
    discovery = source.discover(None, DiscoveryContext("src", 2, None))
    assert discovery.exhausted
    assert source.discover(discovery.position, DiscoveryContext("src", 2, None)).splits == ()
    return list(discovery.splits)


@pytest.mark.parametrize("form", ["tuple", "row", "list", "batch"])
def test_partitions_are_splits_and_every_form_of_row_is_read(form):
    source = DataSourceBatchSource(Numbers, options={"form": form})
    assert source.bounded
    assert source.blocking
    splits = batch_splits(source)
    shipped = pickle.loads(pickle.dumps(source))
    assert [read(shipped, split)[0] for split in splits] == [[0, 1, 2], [], [3, 4, 5, 6, 7, 8, 9]]


@pytest.mark.parametrize("form", ["tuple", "batch"])
def test_a_restored_partition_is_read_again_without_the_rows_emitted(form):
    source = DataSourceBatchSource(Numbers(options={"form": form}))
    split = batch_splits(source)[2]
    rows, offsets = read(source, split, rows_max=1)
    for done, offset in enumerate(offsets, 1):
        assert read(source, msgspec.structs.replace(split, offset=offset), rows_max=2)[0] == rows[done:]


@pytest.mark.parametrize(
    ("form", "kind", "says"),
    [
        ("short", SchemaError, r"data source 'numbers', partition 000000: row 0 has 1 values, the schema 2 columns"),
        ("text", JobError, r"row 0 is str; read\(\) must give tuples, Rows or record batches"),
        ("wrong type", SchemaError, r"rows 0 to 2 do not fit the schema struct<n:bigint,who:string>"),
        ("wrong row", SchemaError, r"row 0 has x, n, the schema n, who"),
    ],
)
def test_rows_that_do_not_fit_are_named(form, kind, says):
    source = DataSourceBatchSource(Numbers, options={"form": form})
    with pytest.raises(kind, match=says):
        read(source, batch_splits(source)[0])


def test_record_batches_of_another_schema_are_named():
    source = DataSourceBatchSource(
        Numbers, options={"form": "batch"}, schema=StructType([StructField("z", LongType())])
    )
    with pytest.raises(SchemaError, match="column 'z' is missing; got n, who"):
        read(source, batch_splits(source)[0])


def test_what_is_no_source_is_refused_at_once():
    class Empty(DataSource):
        def schema(self) -> StructType:
            return SCHEMA

    with pytest.raises(ConfigError, match=r"has no reader\(\)"):
        DataSourceBatchSource(Empty)
    with pytest.raises(ConfigError, match=r"has neither streamReader\(\) nor simpleStreamReader\(\)"):
        DataSourceStreamSource(Empty)
    with pytest.raises(ConfigError, match="is not a PySpark DataSource"):
        DataSourceBatchSource(int)
    with pytest.raises(ConfigError, match="give options to the data source itself"):
        DataSourceBatchSource(Numbers({}), options={"a": "b"})
    with pytest.raises(SchemaError, match="its schema is 3"):
        DataSourceBatchSource(Numbers, schema=3)


def test_timestamps_are_instants():
    class Times(Numbers):
        def schema(self) -> StructType:
            return StructType([StructField("at", TimestampType()), StructField("k", IntegerType())])

        def reader(self, schema: StructType) -> DataSourceReader:
            return TimesReader()

    class TimesReader(DataSourceReader):
        def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
            yield (datetime(2020, 1, 1, 12, tzinfo=timezone.utc), 1)

    source = DataSourceBatchSource(Times)
    assert source.schema == pa.schema([("at", pa.timestamp("us", "UTC")), ("k", pa.int32())])
    (split,) = batch_splits(source)
    assert read(source, split)[0] == [datetime(2020, 1, 1, 12, tzinfo=timezone.utc)]


def test_a_schema_may_be_text_before_any_session_runs():
    source = DataSourceBatchSource(Numbers, schema="n bigint, who string")
    assert source.schema == pa.schema([("n", pa.int64()), ("who", pa.large_string())])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("n bigbig", "'bigbig' is not a type"),
        ("n", "it ends too early"),
        ("", "there is no column in it"),
        ("n int who string", "expected ',' before 'who'"),
        ("n array<int", "it ends too early"),
        ("n int; drop", "'; drop' cannot be understood"),
        ("n int, < int", "expected a column name before '<'"),
    ],
)
def test_text_that_is_no_schema_is_refused(text, says):
    with pytest.raises(SchemaError) as caught:
        DataSourceBatchSource(Numbers, schema=text)
    assert f"data source 'numbers': the schema {text!r} cannot be parsed: {says}; give a StructType" in str(
        caught.value
    )


@pytest.mark.spark
@pytest.mark.parametrize(
    "text",
    [
        "a INT, b Integer, c bigint, d LONG, e smallint, f tinyint, g float, h real, i double, j boolean",
        "a string, b binary, c date, d timestamp, e timestamp_ntz, f timestamp_ltz, g void, h byte, i short",
        "a decimal, b decimal(5), c dec(12, 3), d numeric(38,18), e varchar(10), f char(3)",
        "a array<array<int>>, m map<string,map<int,string>>, s struct<x: int, y struct<z:string>>, e struct<>",
        "`odd name` int NOT NULL, `back``tick` string COMMENT 'a, b', s struct<x:int not null comment 'c'>, date date",
    ],
)
def test_text_is_read_as_spark_reads_it(spark, text):
    assert parse_ddl(text) == StructType.fromDDL(text)


# ---- streams ----


class Log(DataSource):
    """Offsets count rows. How many there are stands in a file, and so does what was committed."""

    @classmethod
    def name(cls) -> str:
        return "log"

    def schema(self) -> StructType:
        return SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        kind = self.options.get("kind", "new")
        if kind == "simple":
            return super().streamReader(schema)
        return (NewLogReader if kind == "new" else OldLogReader)(Path(self.options["dir"]))

    def simpleStreamReader(self, schema: StructType) -> SimpleDataSourceStreamReader:
        return SimpleLogReader(Path(self.options["dir"]))


class LogFiles:
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def size(self) -> int:
        return int((self.directory / "size").read_text())

    def initialOffset(self) -> dict:
        return {"at": int((self.directory / "first").read_text())}

    def commit(self, end: dict) -> None:
        with open(self.directory / "commits", "a") as file:
            file.write(json.dumps(end) + "\n")

    def stop(self) -> None:
        (self.directory / "stopped").touch()


class OldLogReader(LogFiles, DataSourceStreamReader):
    def latestOffset(self) -> dict:
        return {"at": self.size()}

    def partitions(self, start: dict, end: dict) -> list[Part]:
        middle = (start["at"] + end["at"]) // 2
        return [Part(start["at"], middle), Part(middle, end["at"])]

    def read(self, partition: Part) -> Iterator[tuple[int, str]]:
        return ((n, f"w{n}") for n in range(partition.start, partition.stop))


class NewLogReader(OldLogReader):
    def latestOffset(self, start: dict, limit: object) -> dict:
        assert type(limit).__name__ == "ReadAllAvailable"
        return {"at": max(self.size(), start["at"])}


class SimpleLogReader(LogFiles, SimpleDataSourceStreamReader):
    def read(self, start: dict) -> tuple[Iterator[tuple[int, str]], dict]:
        end = {"at": self.size()}
        return self.readBetweenOffsets(start, end), end

    def readBetweenOffsets(self, start: dict, end: dict) -> Iterator[tuple[int, str]]:
        return ((n, f"w{n}") for n in range(start["at"], end["at"]))


class LogWorld:
    def __init__(self, directory: Path, kind: str) -> None:
        self.directory = directory
        self.kind = kind
        (directory / "log").mkdir()
        self.storage = LocalStorage(str(directory / "checkpoints"))
        self.begin(0)
        self.grow(0)

    def begin(self, at: int) -> None:
        (self.directory / "log" / "first").write_text(str(at))

    def grow(self, size: int) -> None:
        (self.directory / "log" / "size").write_text(str(size))

    def source(self) -> DataSourceStreamSource:
        return DataSourceStreamSource(Log, options={"kind": self.kind, "dir": str(self.directory / "log")})

    def discover(self, source: Source, position: bytes | None) -> tuple[list[Split], bytes]:
        found = source.discover(position, DiscoveryContext("src", 1, self.storage))
        assert not found.exhausted
        return list(found.splits), found.position

    def rows(self, source: Source, splits: list[Split]) -> list[int]:
        shipped = pickle.loads(pickle.dumps(source))
        return [n for split in splits for n in read(shipped, split)[0]]

    def commits(self) -> list[int]:
        path = self.directory / "log" / "commits"
        return [json.loads(line)["at"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(params=["new", "old", "simple"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> LogWorld:
    return LogWorld(tmp_path, request.param)


def test_ranges_follow_one_another_and_nothing_new_is_no_split(world):
    source = world.source()
    assert not source.bounded
    assert world.discover(source, None)[0] == []
    world.grow(5)
    splits, first = world.discover(source, None)
    assert world.rows(source, splits) == [0, 1, 2, 3, 4]
    assert world.discover(source, first) == ([], first)
    world.grow(8)
    splits, _ = world.discover(source, first)
    assert world.rows(source, splits) == [5, 6, 7]


def test_a_planned_range_stays_as_it_is_although_the_source_has_grown(world):
    source = world.source()
    world.grow(5)
    splits, first = world.discover(source, None)
    world.grow(9)
    later, second = world.discover(source, first)
    world.grow(20)
    assert world.discover(source, first) == (later, second), "after a failover"
    restored = world.source()
    assert world.discover(restored, first) == (later, second), "after a restore in another process"
    assert world.rows(restored, later) == [5, 6, 7, 8]
    again, _ = world.discover(source, None)
    assert again == splits, "after a failure before the first checkpoint"


def test_a_fresh_start_does_not_take_up_the_plans_of_an_earlier_one(world):
    world.grow(5)
    world.discover(world.source(), None)
    world.begin(3)
    world.grow(6)
    fresh = world.source()
    splits, _ = world.discover(fresh, None)
    assert world.rows(fresh, splits) == [3, 4, 5]


def test_a_job_that_fails_before_its_first_checkpoint_begins_where_it_began(world):
    source = world.source()
    world.begin(2)
    world.grow(4)
    splits, _ = world.discover(source, None)
    world.begin(4)
    again, _ = world.discover(source, None)
    assert again == splits


def test_offsets_are_committed_only_once_a_checkpoint_holds_all_rows_before_them(world):
    source = world.source()
    world.grow(4)
    first_splits, first = world.discover(source, None)
    world.grow(8)
    second_splits, second = world.discover(source, first)
    source.checkpoint_completed(None, [])
    source.checkpoint_completed(second, None)
    source.checkpoint_completed(second, [*first_splits[-1:], *second_splits])
    assert world.commits() == []
    source.checkpoint_completed(second, second_splits[-1:])
    assert world.commits() == [4]
    source.checkpoint_completed(second, second_splits[-1:])
    assert world.commits() == [4], "not twice"
    source.checkpoint_completed(second, [])
    assert world.commits() == [4, 8]


def test_plans_are_deleted_when_a_checkpoint_is_beyond_them(world):
    source = world.source()
    position = None
    for size in (3, 6, 9):
        world.grow(size)
        splits, position = world.discover(source, position)
        source.checkpoint_completed(position, splits)
        assert world.storage.list("plans/src") == []


def test_without_storage_ranges_are_planned_all_the_same(world):
    source = world.source()
    world.grow(3)
    found = source.discover(None, DiscoveryContext("src", 1, None))
    assert world.rows(source, list(found.splits)) == [0, 1, 2]
    source.checkpoint_completed(found.position, [])
    assert world.commits() == [3]


def test_closing_stops_the_reader_that_discovery_started(tmp_path):
    world = LogWorld(tmp_path, "new")
    source = world.source()
    source.close()
    assert not (tmp_path / "log" / "stopped").exists()
    world.discover(source, None)
    source.close()
    source.close()
    assert (tmp_path / "log" / "stopped").exists()


def test_a_simple_reader_that_does_not_advance_is_an_error(tmp_path):
    world = LogWorld(tmp_path, "simple")
    world.begin(5)

    class Stuck(Log):
        def simpleStreamReader(self, schema: StructType) -> SimpleDataSourceStreamReader:
            class Reader(SimpleLogReader):
                def read(self, start: dict) -> tuple[Iterator[tuple[int, str]], dict]:
                    return iter([(1, "x")]), start

            return Reader(Path(self.options["dir"]))

    source = DataSourceStreamSource(Stuck, options={"kind": "simple", "dir": str(tmp_path / "log")})
    with pytest.raises(JobError, match="gave rows, but an end offset that is its start"):
        world.discover(source, None)


steps = st.lists(st.sampled_from(["grow", "discover", "read", "checkpoint", "fail", "kill"]), max_size=40)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=steps, kind=st.sampled_from(["new", "old", "simple"]))
def test_whatever_fails_each_row_counts_once_and_only_checkpointed_rows_are_committed(tmp_path_factory, history, kind):
    world = LogWorld(tmp_path_factory.mktemp("log"), kind)
    source = world.source()
    size = 0
    position: bytes | None = None
    pending: list[Split] = []
    seen: list[int] = []
    saved: tuple[bytes | None, list[Split], list[int]] = (None, [], [])
    for step in [*history, "grow", "discover", *["read"] * 100]:
        if step == "grow":
            size += 3
            world.grow(size)
        elif step == "discover":
            found, position = world.discover(source, position)
            pending = [*pending, *found]
        elif step == "read" and pending:
            reader = source.open_split(pending[0])
            got = reader.read(1)
            if got is None:
                pending = pending[1:]
            else:
                seen = [*seen, *got[0].column(0).to_pylist()]
                pending = [msgspec.structs.replace(pending[0], offset=got[1]), *pending[1:]]
        elif step == "checkpoint":
            saved = (position, pending, seen)
            source.checkpoint_completed(position, pending)
            assert all(at <= len(seen) for at in world.commits())
        elif step in ("fail", "kill"):
            position, pending, seen = saved
            if step == "kill":
                source = world.source()
    assert seen == list(range(len(seen)))
    assert len(seen) >= size - 3 * 33
    assert not pending
