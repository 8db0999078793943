"""Python Data Sources as sources: partitions and offset ranges planned on the driver, read exactly once."""

from __future__ import annotations

import json
import pickle
from array import array
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
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

from effort import examples
from midstream.engine.core.arrow_types import schema_of, to_list
from midstream.engine.core.errors import ConfigError, JobError, SchemaError
from midstream.engine.operators.source_api import DiscoveryContext, Source, Split
from midstream.engine.state.safe_pickle import OwnCode
from midstream.runtime.storage.file_storage import LocalStorage
from midstream.spark.datasource import DataSourceBatchSource, DataSourceStreamSource
from midstream.spark.ddl import parse_ddl

SCHEMA = StructType([StructField("n", LongType()), StructField("who", StringType())])


@pytest.fixture(autouse=True)
def own_code_of_the_tests(monkeypatch):
    """As `submit` sets it for a job of these classes."""
    monkeypatch.setattr(Source, "own", OwnCode(packages=frozenset({__name__})))


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

    def read(self, partition: Part) -> Iterator[Any]:  # type: ignore[override]  # narrower, as users write it
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
                case "none":
                    yield from (None, (n, "w"))
                case "none later":
                    yield from ((n, "w"), None)
                case "none after batch":
                    yield from (pa.record_batch({"n": pa.array([n]), "who": ["w"]}), None)
                case "empty batch":
                    yield from (pa.record_batch({"n": pa.array(few), "who": ["w"] * len(few)}) for few in ([], [n], []))
                case "wrong row":
                    yield Row(x=1, n=2)


def batch_splits(source: Source) -> list[Split]:
    discovery = source.discover(None, DiscoveryContext("src", 2, None))
    assert discovery.exhausted
    assert source.discover(discovery.position, DiscoveryContext("src", 2, None)).splits == ()
    return list(discovery.splits)


@pytest.mark.parametrize("form", ["tuple", "row", "list", "batch", "empty batch"])
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
        (
            "short",
            SchemaError,
            r"data source 'numbers', partition 000000: row 0 has 1 values, but the schema has 2 columns",
        ),
        ("text", JobError, r"row 0 is str; read\(\) must return tuples, Rows or record batches"),
        (
            "wrong type",
            SchemaError,
            r"row 0: column 'n' is bigint, and 'n', declared as int64: a str is not an integer",
        ),
        ("none", JobError, r"data source 'numbers', partition 000000: row 0 is NoneType; read\(\) must return tuples"),
        ("none later", JobError, r"row 1 is NoneType"),
        ("none after batch", JobError, r"returned NoneType after record batches"),
        ("wrong row", SchemaError, r"row 0 has x, n, but the schema has n, who"),
    ],
)
def test_rows_that_do_not_fit_are_named(form, kind, says):
    source = DataSourceBatchSource(Numbers, options={"form": form})
    with pytest.raises(kind, match=says):
        read(source, batch_splits(source)[0])


class Given(Numbers):
    """Reads the rows it was made with."""

    def __init__(self, schema: StructType, *rows: Any) -> None:
        super().__init__({})
        self.given = schema, rows

    def schema(self) -> StructType:
        return self.given[0]

    def reader(self, schema: StructType) -> DataSourceReader:
        rows = self.given[1]

        class Reader(DataSourceReader):
            def read(self, partition: InputPartition) -> Iterator[Any]:
                return iter(rows)

        return Reader()


def kept(text: str, *rows: Any) -> list[dict[str, Any]]:
    source = DataSourceBatchSource(Given(parse_ddl(text), *rows))
    (split,) = batch_splits(source)
    reader = source.open_split(split)
    found: list[dict[str, Any]] = []
    while (got := reader.read(10_000)) is not None:
        found += got[0].to_pylist()
    return found


LOCAL = datetime(2024, 7, 1, 12, 30, 0, 5)


@pytest.mark.parametrize(
    ("kind", "value", "back"),
    [
        ("tinyint", -128, -128),
        ("bigint", 2**63 - 1, 2**63 - 1),
        ("double", 0.1, 0.1),
        ("double", 7, 7.0),
        ("float", 0.5, 0.5),
        ("boolean", False, False),
        ("string", "", ""),
        ("binary", bytearray(b"\0"), b"\0"),
        ("decimal(5,2)", Decimal("-1.5"), Decimal("-1.50")),
        ("date", date(1, 1, 1), date(1, 1, 1)),
        ("timestamp", LOCAL.replace(tzinfo=timezone(timedelta(hours=2))), LOCAL.replace(hour=10, tzinfo=UTC)),
        ("timestamp", LOCAL, LOCAL.astimezone(UTC)),
        ("timestamp_ntz", LOCAL, LOCAL),
        ("void", None, None),
        ("array<int>", array("i", [1, 2]), [1, 2]),
        ("array<string>", ["a", None], ["a", None]),
        ("map<string,array<int>>", {"a": [1], "b": None}, [("a", [1]), ("b", None)]),
        ("struct<x:int,y:struct<z:timestamp>>", (1, (LOCAL,)), {"x": 1, "y": {"z": LOCAL.astimezone(UTC)}}),
        ("struct<x:int,y:string>", Row(y="a", x=1), {"x": 1, "y": "a"}),
        ("struct<x:int,y:string>", {"y": "a", "x": 1}, {"x": 1, "y": "a"}),
    ],
)
def test_a_value_of_a_tuple_is_kept_as_it_is(kind, value, back):
    assert kept(f"k int, v {kind}", (1, value), (2, None)) == [{"k": 1, "v": back}, {"k": 2, "v": None}]


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        ("bigint", 0.7, "0.7, declared as int64: a float is not an integer"),
        ("bigint", True, "a bool is not an integer"),
        ("bigint", "3", "a str is not an integer"),
        ("tinyint", 128, "it is beyond -128 to 127"),
        ("string", {"a": 1}, r"\{'a': 1\}, declared as large_string: a dict is not a str"),
        ("string", 3, "an int is not a str"),
        ("float", 0.1, "it holds 0.1000"),
        ("double", 2**53 + 1, "a float holds"),
        ("decimal(5,2)", Decimal("1.239"), "more than 2 decimal places"),
        ("decimal(5,2)", Decimal("NaN"), "finite number"),
        ("decimal(5,2)", 1.5, "a float is not a Decimal"),
        ("date", datetime(2024, 1, 1, 12), "a datetime is not a date"),
        ("timestamp", "2024-01-01", "a str is not a datetime"),
        (
            "timestamp",
            datetime(9999, 12, 31, 23, tzinfo=timezone(-timedelta(hours=2))),
            "it is beyond the years 1 to 9999",
        ),
        ("timestamp_ntz", datetime(2024, 1, 1, tzinfo=UTC), "zone"),
        ("boolean", 1, "an int is not a bool"),
        ("binary", "a", "a str is not bytes"),
        ("void", 1, "only None fits"),
        ("array<int>", "12", "v is str, not a list"),
        ("array<int>", [1, 0.5], r"\[1\]: 0.5, declared as int32"),
        ("map<string,int>", [("a", 1)], "v is list, not a dict"),
        ("map<string,int>", {None: 1}, r"v.key must have a value"),
        ("struct<x:int,y:int>", (1,), "v has 1 values, not 2"),
        ("struct<x:int,y:int>", {"x": 1}, "v has x, not x, y"),
        ("struct<x:int,y:int>", {"x": 1, "y": 2, "z": 3}, "v has x, y, z, not x, y"),
        ("struct<x:int>", Row(q=1), "v has q, not x"),
        ("struct<x:int>", 1, "v is int, not a tuple, a Row or a dict"),
        ("struct<x:struct<y:bigint>>", ((0.5,),), "x.y: 0.5, declared as int64"),
        ("struct<x:int not null>", (None,), r"v.x must have a value \(NOT NULL\)"),
        ("int not null", None, r"v must have a value \(NOT NULL\)"),
    ],
)
def test_a_value_of_a_tuple_that_would_not_come_back_is_refused(kind, value, says):
    good = (0, None) if "not null" not in kind else (0, 1 if kind == "int not null" else (1,))
    with pytest.raises(SchemaError, match=says) as caught:
        kept(f"k int, v {kind}", *[good] * 8200, (1, value))
    assert "data source 'numbers', partition 000000: row 8200: column 'v' is " in str(caught.value)


def test_keys_of_maps_that_no_dict_can_have_are_refused_for_tuples():
    for value, says in (
        ({(1,): 2}, "row 0: column 'v' is .* a dict cannot have keys of type struct<x:int>"),
        (None, "column 'v'"),
    ):
        with pytest.raises(SchemaError, match=f"data source 'numbers', partition 000000: {says}"):
            kept("v map<struct<x:int>,int>", (value,))


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
        DataSourceBatchSource(int)  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(ConfigError, match="give options to the data source itself"):
        DataSourceBatchSource(Numbers({}), options={"a": "b"})
    with pytest.raises(SchemaError, match="its schema is 3"):
        DataSourceBatchSource(Numbers, schema=3)  # type: ignore[arg-type]  # the mistake under test


def test_timestamps_are_instants():
    class Times(Numbers):
        def schema(self) -> StructType:
            return StructType([StructField("at", TimestampType()), StructField("k", IntegerType())])

        def reader(self, schema: StructType) -> DataSourceReader:
            return TimesReader()

    class TimesReader(DataSourceReader):
        def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
            yield (datetime(2020, 1, 1, 12, tzinfo=UTC), 1)

    source = DataSourceBatchSource(Times)
    assert source.schema == pa.schema([("at", pa.timestamp("us", "UTC")), ("k", pa.int32())])
    (split,) = batch_splits(source)
    assert read(source, split)[0] == [datetime(2020, 1, 1, 12, tzinfo=UTC)]


def test_a_schema_may_be_text_before_any_session_runs():
    source = DataSourceBatchSource(Numbers, schema="n bigint, who string")
    assert source.schema == schema_of([("n", pa.int64()), ("who", pa.large_string())])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("n bigbig", "'bigbig' is not a type"),
        ("n", "it ends too early"),
        ("", "it has no columns"),
        ("n int who string", "expected ',' before 'who'"),
        ("n array<int", "it ends too early"),
        ("n int; drop", "'; drop' cannot be parsed"),
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
    def latestOffset(self) -> dict:  # type: ignore[override]  # narrower, as users write it
        return {"at": self.size()}

    def partitions(self, start: dict, end: dict) -> list[Part]:
        middle = (start["at"] + end["at"]) // 2
        return [Part(start["at"], middle), Part(middle, end["at"])]

    def read(self, partition: Part) -> Iterator[tuple[int, str]]:  # type: ignore[override]  # narrower, as users write it
        return ((n, f"w{n}") for n in range(partition.start, partition.stop))


class NewLogReader(OldLogReader):
    def latestOffset(self, start: dict, limit: object) -> dict:  # type: ignore[override]  # narrower, as users write it
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


@pytest.mark.parametrize("row", [(1, "x"), None])
def test_a_simple_reader_that_does_not_advance_is_an_error(tmp_path, row):
    world = LogWorld(tmp_path, "simple")
    world.begin(5)

    class Stuck(Log):
        def simpleStreamReader(self, schema: StructType) -> SimpleDataSourceStreamReader:
            class Reader(SimpleLogReader):
                def read(self, start: dict) -> tuple[Iterator[tuple[int, str]], dict]:
                    return iter([row]), start

            return Reader(Path(self.options["dir"]))

    source = DataSourceStreamSource(Stuck, options={"kind": "simple", "dir": str(tmp_path / "log")})
    with pytest.raises(JobError, match="returned rows, but an end offset equal to its start"):
        world.discover(source, None)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"at": 500}, {"at": 300}),
        ({"a": {"p": 5, "q": 7}}, {"a": {"p": 5, "q": 6}}),
        ({"at": 5, "file": "x"}, {"at": 4.5, "file": "x"}),
    ],
)
def test_an_offset_that_goes_back_is_refused(before, after):
    source = Ends(before, after).source()
    position = source.discover(None, DiscoveryContext("src", 1, None)).position
    with pytest.raises(
        JobError, match=r"data source 'log': latestOffset\(\) returned .*, which is a step back"
    ) as caught:
        source.discover(position, DiscoveryContext("src", 1, None))
    assert json.dumps(after, sort_keys=True) in str(caught.value)
    assert json.dumps(before, sort_keys=True) in str(caught.value)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"hour": 14, "minute": 59}, {"hour": 15, "minute": 0}),
        ({"token": "b"}, {"token": "a"}),
        ({"file": "x", "line": 9}, {"file": "y", "line": 1}),
        ({"p0": 1}, {"p0": 1, "p1": 0}),
        ({"done": True}, {"done": False}),
    ],
)
def test_an_offset_that_only_its_source_understands_is_taken(before, after):
    source = Ends(before, after).source()
    position = source.discover(None, DiscoveryContext("src", 1, None)).position
    assert len(source.discover(position, DiscoveryContext("src", 1, None)).splits) == 1


class Ends(Log):
    """A stream whose latest offset is the first of these, then the second."""

    def __init__(self, *ends: dict) -> None:
        super().__init__({})
        self.ends = list(ends)

    def source(self) -> DataSourceStreamSource:
        return DataSourceStreamSource(self)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        ends = self.ends

        class Reader(DataSourceStreamReader):
            def initialOffset(self) -> dict:
                return {}

            def latestOffset(self) -> dict:  # type: ignore[override]  # narrower, as users write it
                return ends.pop(0)

            def partitions(self, start: dict, end: dict) -> list[Part]:
                return [Part(0, 1)]

            def read(self, partition: Part) -> Iterator[Any]:  # type: ignore[override]  # narrower, as users write it
                return iter(())

        return Reader()


steps = st.lists(st.sampled_from(["grow", "discover", "read", "checkpoint", "fail", "kill"]), max_size=40)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
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
                seen = [*seen, *to_list(got[0].column(0))]
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
