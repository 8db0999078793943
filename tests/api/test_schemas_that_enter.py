"""Every way by which columns enter a job refuses columns that would be lost, or would fail later, at the call."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import polars.selectors as cs
import pyarrow as pa
import pyarrow.parquet
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from midstream import Environment, KeyedBatchFunction, KeyedProcessFunction
from midstream.engine.core.arrow_types import nulls, schema_of
from midstream.engine.core.errors import MidstreamError, SchemaError
from midstream.engine.core.schemas import DEPTH_MAX
from midstream.engine.operators.source_api import Discovery, DiscoveryContext, Source, Split, SplitReader
from midstream.spark.datasource_rows import arrow_schema


def deep(depth: int) -> pa.DataType:
    kind: pa.DataType = pa.int64()
    for _ in range(depth - 1):
        kind = pa.large_list(kind)
    return kind


NUL = "v\0x"
WHY = {
    "no columns": "no columns|no rows to infer the columns from|its columns cannot be inferred",
    "twice": "more than one column 'a'",
    "empty name": "empty name|'' is not a column name",
    "NUL": "has a NUL in its name",
    "two fields": "struct with more than one field 'x'",
    "NUL in a field": "has a NUL in its name",
    "lists of size 0": "lists that never have a value",
    "too deep": f"nested more than {DEPTH_MAX} deep|too deeply nested",
}
STRUCT_TWICE = pa.struct([pa.field("x", pa.int64()), pa.field("x", pa.int64())])
BAD: dict[str, pa.Schema] = {
    "no columns": pa.schema([]),
    "twice": schema_of([("a", pa.int64()), ("b", pa.int64()), ("a", pa.int64())]),
    "empty name": schema_of([("b", pa.int64()), ("", pa.int64())]),
    "NUL": schema_of([("b", pa.int64()), (NUL, pa.int64())]),
    "two fields": schema_of([("b", pa.map_(pa.string(), pa.large_list(STRUCT_TWICE)))]),
    "NUL in a field": schema_of([("b", pa.large_list(pa.struct([(NUL, pa.int64())])))]),
    "lists of size 0": schema_of([("b", pa.struct([("x", pa.list_(pa.int64(), 0))]))]),
    "too deep": schema_of([("b", deep(DEPTH_MAX + 1))]),
}
GOOD = schema_of([("a", pa.int64()), ("A", pa.int64()), ("é b", pa.struct([("", pa.int64())])), ("d", deep(DEPTH_MAX))])


@dataclass
class World:
    env: Environment
    path: Path

    @property
    def rows(self) -> Any:
        return self.env.from_collection([{"k": 1, "v": 2}])


class Own(Source):
    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        raise NotImplementedError

    def open_split(self, split: Split) -> SplitReader:
        raise NotImplementedError


class Returning(Own, SplitReader):
    """Returns one thing as all of its rows."""

    blocking = False

    def __init__(self, schema: pa.Schema, returned: Any) -> None:
        super().__init__(schema)
        self.returned = returned

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        return Discovery((Split("all", b""),) if position is None else (), b"all", exhausted=True)

    def open_split(self, split: Split) -> SplitReader:
        self.read_already = split.offset
        return self

    def read(self, rows_max: int) -> Any:
        self.read_already += 1
        return self.returned if self.read_already == 1 else None


class Function(KeyedProcessFunction):
    def process(self, row: Any, ctx: Any) -> None: ...


class BatchFunction(KeyedBatchFunction):
    def process(self, rows: Any, ctx: Any) -> Any: ...


def parquet(world: World, schema: pa.Schema) -> Any:
    pyarrow.parquet.write_table(schema.empty_table(), world.path / "a.parquet")
    return world.env.read_files(world.path / "a.parquet")


def csv(world: World, schema: pa.Schema) -> Any:
    (world.path / "a.csv").write_text(",".join(schema.names) + "\n" + ",".join("1" for _ in schema.names) + "\n")
    return world.env.read_files(world.path / "a.csv")


def jsonl(world: World, schema: pa.Schema) -> Any:
    def value(kind: pa.DataType) -> Any:
        if pa.types.is_struct(kind):
            return {each.name: value(each.type) for each in kind}
        return [value(kind.field(0).type)] if pa.types.is_large_list(kind) else 1

    (world.path / "a.jsonl").write_text(json.dumps({field.name: value(field.type) for field in schema}) + "\n")
    return world.env.read_files(world.path / "a.jsonl")


def frame_of(schema: pa.Schema) -> pl.DataFrame:
    made = pl.from_arrow(pa.table({str(at): nulls(0, kind) for at, kind in enumerate(schema.types)}))
    assert isinstance(made, pl.DataFrame)
    return made.rename({str(at): name for at, name in enumerate(schema.names)})


def struct_frame(names: list[str]) -> pl.DataFrame:
    return pl.DataFrame({"b": [1]}).select(b=pl.struct([pl.lit(1).alias(name) for name in names]))


ANY = frozenset(BAD)
FLAT = frozenset({"twice", "empty name", "NUL"})
ENTRIES: dict[str, tuple[Callable[[World, pa.Schema], Any], frozenset[str]]] = {
    "table": (lambda w, s: w.env.from_collection(s.empty_table()), ANY),
    "record batch": (lambda w, s: w.env.from_collection(pa.RecordBatch.from_pylist([], s)), ANY),
    "frame": (lambda w, s: w.env.from_collection(frame_of(s)), frozenset({"empty name", "NUL"})),
    "dicts": (lambda w, s: w.env.from_collection([dict.fromkeys(s.names, 1)]), frozenset({"no columns", "empty name", "NUL"})),
    "dicts with schema": (lambda w, s: w.env.from_collection([], s), ANY),
    "generate batch": (lambda w, s: w.env.generate(lambda i: pa.record_batch([nulls(len(i), t) for t in s.types], schema=s), 3), ANY - {"no columns"}),
    "generate dict": (lambda w, s: w.env.generate(lambda i: dict.fromkeys(s.names, i), 3), frozenset({"no columns", "empty name", "NUL"})),
    "generate with schema": (lambda w, s: w.env.generate(lambda i: {"a": i}, 3, schema=s), ANY),
    "parquet": (parquet, ANY),
    "csv": (csv, FLAT),
    "jsonl": (jsonl, frozenset({"no columns", "empty name", "NUL", "NUL in a field", "too deep"})),
    "files with schema": (lambda w, s: w.env.read_files(w.path, format="jsonl", watch=True, schema=s), ANY),
    "kafka json": (lambda w, s: w.env.read_kafka("host:9092", "t", schema=s), ANY),
    "kafka csv": (lambda w, s: w.env.read_kafka("host:9092", "t", format="csv", schema=s), ANY),
    "own source": (lambda w, s: w.env.source(Own(s)), ANY),
    "map": (lambda w, s: w.rows.map(lambda row: row, s), ANY),
    "flat_map": (lambda w, s: w.rows.flat_map(lambda row: [row], s), ANY),
    "map_batches": (lambda w, s: w.rows.map_batches(lambda frame: frame, s), ANY),
    "process_batches": (lambda w, s: w.rows.key_by("k").process_batches(BatchFunction(), s), ANY),
    "process": (lambda w, s: w.rows.key_by("k").process(Function(), s), ANY),
    "side output": (lambda w, s: w.rows.key_by("k").process(Function(), {"k": int}, side_outputs={"side": s}), ANY),
    "select": (lambda w, s: w.rows.select(*(pl.col("v").alias(name) for name in s.names), cs.temporal()), frozenset({"no columns", "empty name", "NUL"})),
    "with_columns": (lambda w, s: w.rows.with_columns(*(pl.col("v").alias(name) for name in s.names)), frozenset({"empty name", "NUL"})),
}  # fmt: skip
CASES = [(entry, bad) for entry, (_, possible) in ENTRIES.items() for bad in BAD if bad in possible]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(Environment("entries"), tmp_path)


@pytest.mark.parametrize(("entry", "bad"), CASES)
def test_columns_that_cannot_be_kept_are_refused_where_they_enter(world, entry, bad):
    with pytest.raises(MidstreamError, match=WHY[bad]) as caught:
        ENTRIES[entry][0](world, BAD[bad])
    assert str(caught.value).startswith("test_schemas_that_enter.py:"), "the place of the call is named"
    assert len(world.env.program.graph.nodes) <= 1, "nothing but the rows before it has been added"


@pytest.mark.parametrize("entry", ["table", "dicts with schema", "parquet", "own source", "map", "kafka json"])
def test_names_that_differ_by_case_and_fields_without_one_are_kept(world, entry):
    assert ENTRIES[entry][0](world, GOOD).schema == GOOD


@pytest.mark.parametrize("declare", [True, False])
def test_a_lone_surrogate_is_not_a_name(world, declare):
    name = "v\ud800"
    with pytest.raises(SchemaError, match="has a lone surrogate in its name"):
        if declare:
            world.env.from_collection([], {name: int})
        else:
            world.env.from_collection([{name: 1}])


def test_a_struct_that_an_expression_makes_is_checked_too(world):
    with pytest.raises(SchemaError, match="has a NUL in its name"):
        world.rows.select(s=pl.struct(pl.col("v").alias(NUL)))
    with pytest.raises(SchemaError, match="has a NUL in its name"):
        world.env.from_collection(struct_frame([NUL]))


def test_a_selector_that_matches_nothing_does_not_drop_rows_in_silence(world):
    with pytest.raises(SchemaError, match=r"select: the schema has no columns; rows have at least one"):
        world.rows.select(cs.temporal())


def test_columns_from_spark_are_checked():
    for names, why in (
        (["a", "a"], "more than one column 'a'"),
        ([], "no columns"),
        ([NUL], "NUL"),
        (["\ud800"], "lone"),
        ([""], "''"),
    ):
        with pytest.raises(SchemaError, match=why):
            arrow_schema(StructType([StructField(name, LongType()) for name in names]), "data source 'x'")


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.list_(pa.int64()), pa.timestamp("s"), pa.dictionary(pa.int8(), pa.string())]
)
def test_a_source_declares_types_as_rows_of_a_job_have_them(world, kind):
    with pytest.raises(
        SchemaError, match=r"column 'v' of Own is .*; declare (large_string|large_list|timestamp\[ms\])"
    ):
        world.env.source(Own(pa.schema([pa.field("v", kind)])))
    others: list[Any] = [{"v": int}, None]
    for schema in others:
        with pytest.raises(SchemaError, match=r"the schema of Own is .*; it must be a pyarrow\.Schema"):
            world.env.source(Own(schema))


V = pa.schema([pa.field("v", pa.int64())])
BATCH = pa.record_batch({"v": [1, 2]})


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            (pa.record_batch({"v": ["x"]}), 1),
            r"Returning: split 'all': column 'v' is string, declared as int64",
        ),
        ((pa.record_batch({"v": [2.5]}), 1), r"column 'v' is double, declared as int64"),
        ((pa.record_batch({"w": [1]}), 1), r"column 'v' is missing; got w"),
        ((pa.record_batch({"v": [1], "w": [1]}), 1), r"column 'w' is not in the declared schema"),
        (
            BATCH,
            r"Returning: split 'all': read returned RecordBatch; return a tuple of a pyarrow.RecordBatch and the offset",
        ),
        ((pa.table({"v": [1]}), 1), r"read returned \(Table, int\); return"),
        (({"v": 1}, 1), r"read returned \(dict, int\); return"),
        ((BATCH, None), r"Returning: split 'all': the offset is None"),
    ],
)
def test_what_a_source_reads_is_checked_against_what_it_declared(world, returned, message):
    read = world.env.source(Returning(V, returned)).with_columns(w=pl.col("v") + 1)
    with pytest.raises(MidstreamError, match=message):
        read.preview()


def test_rows_of_a_source_get_the_types_that_it_declared(world):
    batch = pa.record_batch({"v": pa.array([1, 2], pa.int16())})
    assert world.env.source(Returning(V, (batch, 1))).preview().table.schema == V
