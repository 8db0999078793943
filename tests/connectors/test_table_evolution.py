"""Tables of sinks with evolve=True: what is added and widened, and what stays as it is when others change the table as well."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any

import polars as pl
import psycopg
import pyarrow as pa
import pytest
from connector_worlds import written
from deltalake import DeltaTable, Schema, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table
from pyiceberg.types import IntegerType, LongType, StringType

from committers import committer_of
from effort import examples
from machine import limit_s
from midstream import Environment, Job
from midstream.connectors.common.table_evolution import Evolution, TableSystem, evolution, missing
from midstream.connectors.delta import delta_evolution, delta_merges, delta_sink
from midstream.connectors.delta.delta_sink import DeltaSink
from midstream.connectors.iceberg import iceberg_commits, iceberg_sink
from midstream.connectors.iceberg.iceberg_catalog import CatalogTable
from midstream.connectors.iceberg.iceberg_sink import IcebergSink
from midstream.connectors.postgres.postgres_sink import PostgresSink
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import ConfigError, SchemaError
from midstream.engine.operators.sink_api import CommittedOutput, Sink
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until

OLD = schema_of([("id", pa.int64()), ("name", pa.large_string())])
NEW = schema_of([("city", pa.large_string()), ("id", pa.int64()), ("name", pa.large_string())])
ANN, BOB, CY = {"id": 1, "name": "ann"}, {"id": 2, "name": "bob"}, {"id": 3, "name": "cy", "city": "Bern"}
LEFT_ALONE = {"name": "bob", "city": None}


def rows_of(schema: pa.Schema, *rows: dict[str, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), schema)


class World(ABC):
    """A table that sinks and others change."""

    def __init__(self, place: Any) -> None:
        self.place = place

    @abstractmethod
    def make(self, **options: Any) -> Sink: ...
    @abstractmethod
    def exists(self) -> bool: ...
    @abstractmethod
    def rows(self) -> list[dict[str, Any]]: ...
    @abstractmethod
    def columns(self) -> list[str]: ...
    @abstractmethod
    def drop(self, name: str) -> None:
        """Another program drops a column."""

    @abstractmethod
    def add(self, name: str) -> None:
        """Another program adds a column of text."""

    def sink(self, schema: pa.Schema, **options: Any) -> Any:
        sink = self.make(**({"evolve": True} | options))
        sink.validate(schema, restoring=True)
        return sink

    def put(
        self, schema: pa.Schema, *rows: dict[str, Any], checkpoint: int = 1, job: str = "job-a", **options: Any
    ) -> Any:
        """Commit rows by a new sink, and return it."""
        sink = self.sink(schema, **options)
        committer_of(sink, job).commit(checkpoint, written(sink, rows_of(schema, *rows), checkpoint, job_id=job))
        return sink


class DeltaWorld(World):
    def make(self, **options: Any) -> DeltaSink:
        return DeltaSink(self.place / "delta", **options)

    def exists(self) -> bool:
        return DeltaTable.is_deltatable(self.place / "delta")

    def rows(self) -> list[dict[str, Any]]:
        return pl.read_delta(str(self.place / "delta")).sort("id").to_dicts()

    def columns(self) -> list[str]:
        return [field.name for field in self.table().schema().fields]

    def table(self) -> DeltaTable:
        return DeltaTable(self.place / "delta")

    def drop(self, name: str) -> None:
        rows = pl.read_delta(str(self.place / "delta")).drop(name)
        write_deltalake(self.place / "delta", rows.to_arrow(), mode="overwrite", schema_mode="overwrite")

    def add(self, name: str) -> None:
        self.table().alter.add_columns(Schema.from_arrow(pa.schema([(name, pa.string())])).fields)


class IcebergWorld(World):
    def __init__(self, place: Any) -> None:
        super().__init__(place)
        uri, warehouse = f"sqlite:///{place}/catalog.db", f"file://{place}/warehouse"
        self.catalog = load_catalog("midstream", type="sql", uri=uri, warehouse=warehouse)

    def make(self, **options: Any) -> IcebergSink:
        return IcebergSink("lake.users", catalog=self.catalog, **options)

    def exists(self) -> bool:
        return self.catalog.table_exists("lake.users")

    def rows(self) -> list[dict[str, Any]]:
        return self.table().scan().to_arrow().sort_by("id").to_pylist()

    def columns(self) -> list[str]:
        return [field.name for field in self.table().schema().fields]

    def table(self) -> Table:
        return self.catalog.load_table("lake.users")

    def drop(self, name: str) -> None:
        with self.table().update_schema() as update:
            update.delete_column(name)

    def add(self, name: str) -> None:
        with self.table().update_schema() as update:
            update.add_column(name, StringType())

    def files(self) -> list[Path]:
        return sorted((self.place / "warehouse").rglob("*.parquet"))


class PostgresWorld(World):
    def make(self, **options: Any) -> PostgresSink:
        return PostgresSink(self.place, "users", **options)

    def query(self, sql: str) -> tuple[list[str], list[Any]]:
        with psycopg.connect(self.place, autocommit=True) as connection:
            cursor = connection.execute(sql)
            names = [column.name for column in cursor.description or ()]
            return names, cursor.fetchall() if names else []

    def exists(self) -> bool:
        return self.query("SELECT to_regclass('users') IS NOT NULL")[1] == [(True,)]

    def rows(self) -> list[dict[str, Any]]:
        names, rows = self.query("SELECT * FROM users ORDER BY id")
        return [dict(zip(names, row, strict=True)) for row in rows]

    def columns(self) -> list[str]:
        return self.query("SELECT * FROM users LIMIT 0")[0]

    def drop(self, name: str) -> None:
        self.query(f"ALTER TABLE users DROP COLUMN {name}")

    def add(self, name: str) -> None:
        self.query(f"ALTER TABLE users ADD COLUMN {name} text")


@pytest.fixture(params=["delta", "iceberg", pytest.param("postgres", marks=pytest.mark.systems)])
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(iceberg_sink, "_PAUSE_S", 0.0)
    if request.param == "postgres":
        return PostgresWorld(request.getfixturevalue("database"))
    return DeltaWorld(tmp_path) if request.param == "delta" else IcebergWorld(tmp_path)


@pytest.fixture
def delta(tmp_path: Path) -> DeltaWorld:
    return DeltaWorld(tmp_path)


@pytest.fixture
def iceberg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> IcebergWorld:
    monkeypatch.setattr(iceberg_sink, "_PAUSE_S", 0.0)
    return IcebergWorld(tmp_path)


# ---- columns that are added -------------------------------------------------


@pytest.mark.parametrize("key", [(), ("id",)])
def test_a_column_is_added_and_rows_without_it_have_null(world, key):
    world.put(OLD, ANN, BOB, key=key)
    world.put(NEW, CY, {"id": 2, "name": "bo", "city": "Rome"} if key else CY, job="job-b", key=key)
    assert world.columns() == ["id", "name", "city"]
    bob, cies = (({"id": 2, "name": "bo", "city": "Rome"}), [CY]) if key else ({"id": 2, **LEFT_ALONE}, [CY, CY])
    assert world.rows() == [ANN | {"city": None}, bob, *cies]
    world.put(OLD, {"id": 4, "name": "di"}, job="job-c", key=key)
    assert world.rows()[-1] == {"id": 4, "name": "di", "city": None}, "what the stream lacks is null"


@pytest.mark.parametrize("key", [(), ("id",)])
def test_what_the_program_before_has_prepared_is_committed_to_the_table_as_it_is_now(world, key):
    old = world.sink(OLD, key=key)
    held = written(old, rows_of(OLD, ANN, BOB))
    new = world.sink(NEW, key=key)
    committer = committer_of(new, "job-b")
    for _ in range(2):
        new.check_committables(1, held)
        committer.commit(1, held)
    committer.commit(2, written(new, rows_of(NEW, CY), 2, job_id="job-b"))
    assert world.rows() == [ANN | {"city": None}, BOB | {"city": None}, CY]


def test_nothing_is_added_without_evolve_and_the_message_says_how(world):
    world.put(OLD, ANN)
    with pytest.raises(SchemaError, match=r"no column 'city'; it has id, name\. Add it there \(evolve=True does\)"):
        world.sink(NEW, evolve=False)
    assert world.columns() == ["id", "name"]


@pytest.mark.parametrize("key", [(), ("id",)])
def test_a_column_that_others_drop_while_the_job_runs_is_added_with_the_next_commit(world, key):
    sink = world.put(NEW, CY, key=key)
    committer = committer_of(sink, "job-a")
    before = written(sink, rows_of(NEW, {"id": 4, "name": "di", "city": "Oslo"}), 2, subtask=1)
    world.drop("city")
    committer.commit(2, before)
    committer.commit(2, before)
    after = written(sink, rows_of(NEW, {"id": 5, "name": "eve", "city": "Kyiv"}), 3, subtask=2)
    committer.commit(3, after)
    assert world.rows() == [
        CY | {"city": None},
        {"id": 4, "name": "di", "city": "Oslo"},
        {"id": 5, "name": "eve", "city": "Kyiv"},
    ]


@pytest.mark.parametrize("key", [(), ("id",)])
def test_a_column_that_is_dropped_while_rows_are_written_is_added_all_the_same(world, key):
    sink = world.put(NEW, CY, key=key)
    world.drop("city")
    committables = written(sink, rows_of(NEW, {"id": 4, "name": "di", "city": "Oslo"}), 2, subtask=1)
    committer_of(sink, "job-a").commit(2, committables)
    assert world.rows()[-1] == {"id": 4, "name": "di", "city": "Oslo"}


def test_a_kill_between_the_column_and_the_rows_leaves_one_column_and_no_row_twice(world):
    world.put(OLD, ANN)
    for _ in range(3):  # each start ends after it has added the column
        sink = world.sink(NEW)
    assert world.columns() == ["id", "name", "city"]
    committables = written(sink, rows_of(NEW, CY), 2, job_id="job-b")
    for _ in range(2):
        committer_of(sink, "job-b").commit(2, committables)
    assert world.rows() == [ANN | {"city": None}, CY]


class Killed(BaseException):
    """The driver is gone."""


def kill_at(monkeypatch: pytest.MonkeyPatch, world: World, transaction: int, *, is_done: bool) -> None:
    """Kill the driver at one of the transactions that it makes, before or after that is done."""
    numbers = count()

    def killing(real: Any) -> Any:
        def transact(*arguments: Any, **options: Any) -> Any:
            number = next(numbers)
            if number == transaction and not is_done:
                raise Killed
            found = real(*arguments, **options)
            if number == transaction:
                raise Killed
            return found

        return transact

    if isinstance(world, IcebergWorld):
        monkeypatch.setattr(world.catalog, "commit_table", killing(world.catalog.commit_table))
    else:
        monkeypatch.setattr(delta_evolution, "_add", killing(delta_evolution._add))
        monkeypatch.setattr(delta_sink, "_add", killing(delta_sink._add))
        monkeypatch.setattr(delta_merges, "_merge", killing(delta_merges._merge))


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
@pytest.mark.parametrize("key", [(), ("id",)])
@pytest.mark.parametrize("is_done", [False, True])
def test_a_kill_at_any_transaction_leaves_one_column_and_each_row_once(tmp_path, monkeypatch, kind, key, is_done):
    """Two jobs start one after the other, and somebody drops the column in between."""
    for transaction in range(12):
        place = tmp_path / str(transaction)
        place.mkdir()
        world: DeltaWorld | IcebergWorld = DeltaWorld(place) if kind == "delta" else IcebergWorld(place)
        world.put(OLD, ANN, key=key)
        before = written(world.sink(OLD, key=key), rows_of(OLD, BOB), 2, subtask=1)
        held: dict[int, Any] = {2: before}

        def run(job: str, world: World = world, held: dict[int, Any] = held) -> None:
            sink = world.sink(NEW, key=key)
            committer = committer_of(sink, job)
            committer.commit(2, held[2])
            if 3 not in held:
                held[3] = written(sink, rows_of(NEW, CY), 3, job_id=job)
                world.drop("city")
            committer.commit(3, held[3])

        was_killed = False
        with monkeypatch.context() as patch:
            kill_at(patch, world, transaction, is_done=is_done)
            try:
                run("job-b")
            except Killed:
                was_killed = True
        run("job-c")
        assert world.columns() == ["id", "name", "city"]
        assert world.rows() == [ANN | {"city": None}, BOB | {"city": None}, CY]
        if not was_killed:
            break
    assert 4 <= transaction < 11, "each transaction was among them"


def test_two_drivers_that_add_the_same_column_at_once_add_it_once(world, monkeypatch):
    """The second one has seen the table before the first has changed it."""
    world.put(OLD, ANN)
    if isinstance(world, IcebergWorld):
        stale, real, answers = world.table(), CatalogTable.opened, []
        monkeypatch.setattr(CatalogTable, "opened", lambda self: answers.pop() if answers else real(self))
        world.sink(NEW)
        answers.append(stale)
        world.sink(NEW)
        assert not answers
    elif isinstance(world, DeltaWorld):
        stale_one = world.table()
        first = world.sink(NEW)
        monkeypatch.setattr(first, "opened", lambda: stale_one)
        first.validate(NEW, restoring=True)
    world.sink(NEW)
    world.sink(NEW)
    assert world.columns() == ["id", "name", "city"]
    if isinstance(world, IcebergWorld):
        assert len(world.table().metadata.schemas) == 2
    if isinstance(world, DeltaWorld):
        assert [each["operation"] for each in world.table().history()].count("ADD COLUMN") == 1


def test_what_others_add_first_is_kept_and_the_rest_is_added(world, monkeypatch):
    world.put(OLD, ANN)
    if isinstance(world, DeltaWorld):
        stale = world.table()
        world.add("mood")
        sink = world.make(evolve=True)
        monkeypatch.setattr(sink, "opened", lambda: stale)
        sink.validate(NEW, restoring=True)
    elif isinstance(world, IcebergWorld):
        answers, real = [world.table()], CatalogTable.opened
        world.add("mood")
        monkeypatch.setattr(CatalogTable, "opened", lambda self: answers.pop() if answers else real(self))
        world.sink(NEW)
    else:
        world.add("mood")
        world.sink(NEW)
    assert world.columns() == ["id", "name", "mood", "city"]


def test_a_column_that_is_dropped_between_the_plan_and_the_commit_keeps_its_values(world, monkeypatch):
    sink = world.put(NEW, CY)
    committables = written(sink, rows_of(NEW, {"id": 4, "name": "di", "city": "Oslo"}), 2, subtask=1)
    if isinstance(world, DeltaWorld):
        committer: Any = committer_of(sink, "job-a")
        committer._table.newest()
        fresh = committer._table.newest
        world.drop("city")
        committer._table.newest = lambda: (setattr(committer._table, "newest", fresh), committer._table.table)[1]
        committer.commit(2, committables)
    elif isinstance(world, IcebergWorld):
        real = iceberg_commits.SnapshotCommit.append
        dropped: list[int] = []

        def append(self: Any, *arguments: Any) -> None:
            if not dropped:
                world.drop("city")
                dropped.append(1)
            real(self, *arguments)

        monkeypatch.setattr(iceberg_commits.SnapshotCommit, "append", append)
        committer_of(sink, "job-a").commit(2, committables)
        assert dropped
    else:
        world.drop("city")
        committer_of(sink, "job-a").commit(2, committables)
    assert world.rows()[-1] == {"id": 4, "name": "di", "city": "Oslo"}


def test_columns_that_others_add_while_the_job_runs_are_null(world):
    sink = world.put(OLD, ANN)
    world.add("mood")
    committer_of(sink, "job-a").commit(2, written(sink, rows_of(OLD, BOB), 2, subtask=1))
    assert world.rows() == [ANN | {"mood": None}, BOB | {"mood": None}]


# ---- what is refused --------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ([("ID", pa.int64())], {}, "column 'ID' differs from 'id' .*only by upper and lower case.*rename one of them"),
        (
            [("id", pa.int64()), ("X", pa.int64()), ("x", pa.int64())],
            {},
            "(are the same to|only by upper and lower case)",
        ),
        ([("id", pa.large_string())], {}, "column 'id' is large_string in the stream and (int64|bigint) in .*; cast"),
        (
            [("name", pa.large_string()), ("at", pa.date32()), ("id", pa.float64())],
            {},
            "column 'id' is double in the stream",
        ),
        (
            [("id", pa.int64()), ("nr", pa.int64())],
            {"key": ["nr"]},
            "no column 'nr', and a column of the key .*is never added",
        ),
    ],
)
def test_what_cannot_be_changed_is_refused_and_the_table_stays_as_it_is(world, columns, options, said):
    world.put(OLD, ANN)
    with pytest.raises(SchemaError, match=said):
        world.sink(schema_of(columns), **options)
    assert (world.columns(), world.rows()) == (["id", "name"], [ANN])


@pytest.mark.parametrize(
    ("there", "stream", "said"),
    [
        (
            pa.int32(),
            pa.int64(),
            "column 'x' is int64 in the stream and int32 in the table, and deltalake changes no types",
        ),
        (pa.float32(), pa.float64(), "column 'x' is double in the stream and float in the table"),
        (pa.decimal128(5, 2), pa.decimal128(9, 2), r"column 'x' is decimal128\(9, 2\) in the stream"),
        (
            pa.date32(),
            pa.timestamp("us"),
            r"column 'x' is timestamp\[us\] in the stream and date32\[day\] in the table",
        ),
        (pa.int64(), pa.decimal128(20, 0), r"cast the stream's column to int64, or give it another name"),
    ],
)
def test_deltalake_widens_no_column(delta, there, stream, said):
    delta.put(schema_of([("id", pa.int64()), ("x", there)]), {"id": 1})
    with pytest.raises(SchemaError, match=said):
        delta.sink(schema_of([("id", pa.int64()), ("x", stream), ("new", pa.int64())]))
    assert (delta.columns(), delta.table().version()) == (["id", "x"], 1)


@pytest.mark.parametrize("name", ["a b", "a;b", "a\nb", "a=b", "_change_type"])
def test_names_that_spark_does_not_write_are_not_added_to_a_delta_table(delta, name):
    delta.put(OLD, ANN)
    for kind in (pa.int64(), pa.large_list(pa.struct([(name, pa.int64())]))):
        column = "x" if kind != pa.int64() else name
        with pytest.raises(SchemaError, match=r"cannot be added: .*; rename it"):
            delta.sink(schema_of([("id", pa.int64()), (column, kind)]))
    assert delta.columns() == ["id", "name"]


@pytest.mark.parametrize("name", ["a.b", "é`x", "select", '"', "x" * 200])
def test_columns_of_odd_names_are_added(delta, iceberg, name):
    schema = schema_of([("id", pa.int64()), (name, pa.int64())])
    for each in (delta, iceberg):
        each.put(OLD, ANN)
        for key in ((), ("id",)):
            each.put(schema, {"id": 2, name: 7}, job="job-b" if key else "job-c", key=key)
        assert {row[name] for row in each.rows() if row["id"] == 2} == {7}


def test_a_column_that_must_have_values_and_is_not_in_the_stream_is_refused_by_name(world):
    fields: list[pa.Field[Any]] = [pa.field("id", pa.int64()), pa.field("must", pa.string(), nullable=False)]
    if isinstance(world, PostgresWorld):
        world.query("CREATE TABLE users (id bigint, must text NOT NULL)")
    elif isinstance(world, IcebergWorld):
        world.catalog.create_namespace("lake")
        world.catalog.create_table("lake.users", pa.schema(fields))
    else:
        DeltaTable.create(world.place / "delta", pa.schema(fields))
    for city in ({}, {"city": pa.large_string()}):
        with pytest.raises(SchemaError, match=r"column 'must' of .* must have a value"):
            world.sink(schema_of([("id", pa.int64()), *city.items()]))
    assert world.columns() == ["id", "must"]


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_nothing_is_added_to_a_table_that_is_refused_for_another_reason(request, kind):
    world = request.getfixturevalue(kind)
    world.put(OLD, ANN, partition_by=["name"])
    for options, said in (
        ({"partition_by": ["city"]}, "partition"),
        ({"key": ["id"], "partition_by": ["id"]}, "partitioned by"),
        ({"key": ["x"]}, "key column 'x' is not in the stream"),
    ):
        with pytest.raises((ConfigError, SchemaError), match=said):
            world.sink(NEW, **options)
    new = world.make(evolve=True)
    with pytest.raises(ConfigError, match="the table is not empty"):
        new.validate(NEW, restoring=False)
    assert world.columns() == ["id", "name"]


# ---- plans ----

LEAVES: st.SearchStrategy[pa.DataType] = st.sampled_from(
    [pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.large_string(), pa.decimal128(5, 2)]
)
NAMES = st.sampled_from(["a", "b", "c", "element"])


def structs(kinds: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    return st.dictionaries(NAMES, kinds, min_size=1).map(lambda fields: pa.struct(list(fields.items())))


TYPES: st.SearchStrategy[pa.DataType] = st.recursive(
    LEAVES, lambda kinds: structs(kinds) | kinds.map(pa.large_list), max_leaves=6
)
SCHEMAS = st.dictionaries(NAMES, TYPES, min_size=1).map(lambda columns: schema_of(list(columns.items())))
ANY = TableSystem(
    "any", lambda there, kind: not pa.types.is_nested(there) and not pa.types.is_nested(kind), "", lambda _: None
)


@settings(max_examples=examples(200), deadline=None)
@given(SCHEMAS, SCHEMAS)
def test_a_plan_once_carried_out_leaves_nothing_to_do_and_nothing_is_lost(stream, table):
    try:
        plan = evolution(stream, table, ANY, (), "test")
    except SchemaError:
        return
    after = plan.applied(table)
    assert evolution(stream, after, ANY, (), "test") == Evolution((), ())
    assert after.names[: len(table)] == table.names
    assert set(after.names) == {*stream.names, *table.names}
    assert missing(stream, table, ANY, (), "test") == plan.added
    if not plan.added and not plan.widened:
        assert after == table


# ---- structs ----------------------------------------------------------------

FLAT = schema_of(
    [("id", pa.int64()), ("s", pa.struct([("a", pa.int64())])), ("l", pa.large_list(pa.struct([("q", pa.int64())])))]
)
GROWN = schema_of(
    [
        ("l", pa.large_list(pa.struct([("element", pa.large_string()), ("q", pa.int64())]))),
        ("s", pa.struct([("b", pa.struct([("c", pa.bool_())])), ("a", pa.int64())])),
        ("id", pa.int64()),
    ]
)
FLAT_ROW = {"id": 1, "s": {"a": 1}, "l": [{"q": 1}]}
GROWN_ROW = {"id": 2, "s": {"a": 2, "b": {"c": True}}, "l": [{"q": 2, "element": "x"}]}
FILLED = {"id": 1, "s": {"a": 1, "b": None}, "l": [{"q": 1, "element": None}]}


def canonical(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Readers differ in the structs of nulls that they return."""
    found = []
    for row in rows:
        inner = row["s"]["b"]
        found.append(row | {"s": row["s"] | {"b": None if inner in (None, {"c": None}) else inner}})
    return found


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
@pytest.mark.parametrize("key", [(), ("id",)])
def test_fields_are_added_within_structs_and_lists(request, kind, key):
    world = request.getfixturevalue(kind)
    old = world.put(FLAT, FLAT_ROW, key=key)
    held = written(old, rows_of(FLAT, FLAT_ROW | {"id": 0}), 2, subtask=1)
    new = world.sink(GROWN, key=key)
    committer = committer_of(new, "job-b")
    committer.commit(2, held)
    committer.commit(3, written(new, rows_of(GROWN, GROWN_ROW), 3, job_id="job-b"))
    assert canonical(world.rows()) == [FILLED | {"id": 0}, FILLED, GROWN_ROW]
    if key:
        with pytest.raises(SchemaError, match=r"the field '[sl]\.(b|element)', which the stream lacks"):
            world.sink(FLAT, key=key)
    else:
        world.put(FLAT, FLAT_ROW | {"id": 3}, job="job-c")
        assert canonical(world.rows())[-1] == FILLED | {"id": 3}


# ---- Iceberg ----------------------------------------------------------------


@pytest.mark.parametrize("key", [(), ("id",)])
@pytest.mark.parametrize(
    ("narrow", "wide", "value", "most"),
    [
        (pa.int32(), pa.int64(), 1, 2**40),
        (pa.int16(), pa.uint32(), 1, 2**32 - 1),
        (pa.float32(), pa.float64(), 0.5, 1e300),
        (pa.decimal128(3, 2), pa.decimal128(30, 2), Decimal("1.50"), Decimal("10000000000.50")),
    ],
)
def test_iceberg_columns_are_widened_and_old_and_new_rows_are_found(iceberg, narrow, wide, value, most, key):
    small, large = schema_of([("id", pa.int64()), ("x", narrow)]), schema_of([("x", wide), ("id", pa.int64())])
    old = iceberg.put(small, {"id": 1, "x": value}, key=key)
    held = written(old, rows_of(small, {"id": 2, "x": value}), 2, subtask=1)
    new = iceberg.sink(large, key=key)
    committer = committer_of(new, "job-b")
    committer.commit(2, held)
    committer.commit(3, written(new, rows_of(large, {"id": 3, "x": most}), 3, job_id="job-b"))
    iceberg.put(small, {"id": 4, "x": value}, job="job-c", key=key)
    assert [(row["id"], row["x"]) for row in iceberg.rows()] == [(1, value), (2, value), (3, most), (4, value)]
    found = iceberg.table().scan(row_filter=f"x > {value}").to_arrow()
    assert found["id"].to_pylist() == [3]


@pytest.mark.parametrize("options", [{"key": ["x"]}, {"partition_by": ["bucket(4, x)"]}, {"partition_by": ["x"]}])
def test_columns_of_the_key_and_the_partitioning_are_not_widened(iceberg, options):
    iceberg.put(schema_of([("id", pa.int64()), ("x", pa.int32())]), {"id": 1, "x": 1}, **options)
    with pytest.raises(SchemaError, match="the type of a column of the key or the partitioning is never changed; cast"):
        iceberg.sink(schema_of([("id", pa.int64()), ("x", pa.int64())]), **options)
    assert iceberg.table().schema().find_type("x") == IntegerType()


def test_other_types_of_iceberg_are_refused(iceberg):
    iceberg.put(schema_of([("id", pa.int64()), ("d", pa.date32()), ("x", pa.float32())]), {"id": 1})
    for columns in ([("d", pa.timestamp("us"))], [("x", pa.int64())], [("x", pa.decimal128(9, 2))]):
        with pytest.raises(
            SchemaError, match="Iceberg widens only int to long, float to double, and decimals of the same"
        ):
            iceberg.sink(schema_of([("id", pa.int64()), ("new", pa.int64()), *columns]))
    assert iceberg.columns() == ["id", "d", "x"]


def test_a_name_mapping_gets_the_column_and_files_of_others_are_read_with_it(iceberg):
    iceberg.put(OLD, ANN)
    mapping = [{"field-id": 1, "names": ["id"]}, {"field-id": 2, "names": ["name"]}]
    with iceberg.table().transaction() as change:
        change.set_properties({"schema.name-mapping.default": json.dumps(mapping)})
    iceberg.put(NEW, CY, job="job-b")
    table = iceberg.table()
    found = table.name_mapping()
    assert found is not None
    assert [(field.field_id, field.names) for field in found.root] == [(1, ["id"]), (2, ["name"]), (3, ["city"])]
    path = iceberg.place / "theirs.parquet"
    pl.DataFrame({"id": [9], "city": ["Lima"], "name": ["zoe"]}).write_parquet(path)
    table.add_files([f"file://{path}"])
    assert iceberg.rows()[-1] == {"id": 9, "name": "zoe", "city": "Lima"}


def test_a_column_that_was_renamed_is_added_under_the_name_that_the_stream_has(iceberg):
    sink = iceberg.put(NEW, CY)
    committables = written(sink, rows_of(NEW, {"id": 4, "name": "di", "city": "Oslo"}), 2, subtask=1)
    with iceberg.table().update_schema() as update:
        update.rename_column("city", "town")
    committer_of(sink, "job-a").commit(2, committables)
    assert iceberg.rows() == [
        {"id": 3, "name": "cy", "town": "Bern", "city": None},
        {"id": 4, "name": "di", "town": None, "city": "Oslo"},
    ]


def test_a_renamed_column_that_the_new_program_renames_as_well_keeps_what_was_prepared(iceberg):
    sink = iceberg.put(NEW, CY)
    held = written(sink, rows_of(NEW, {"id": 4, "name": "di", "city": "Oslo"}), 2, subtask=1)
    with iceberg.table().update_schema() as update:
        update.rename_column("city", "town")
    renamed = schema_of([("id", pa.int64()), ("name", pa.large_string()), ("town", pa.large_string())])
    committer_of(iceberg.sink(renamed), "job-b").commit(2, held)
    assert iceberg.rows()[-1] == {"id": 4, "name": "di", "town": "Oslo"}
    assert sorted(iceberg.columns()) == ["id", "name", "town"]


def test_files_that_were_written_again_are_the_only_ones_that_remain(iceberg):
    sink = iceberg.put(NEW, CY)
    committables = written(sink, rows_of(NEW, {"id": 4, "name": "di", "city": "Oslo"}), 2, subtask=1)
    iceberg.drop("city")
    committer_of(sink, "job-a").commit(2, committables)
    known = {Path(task.file.file_path).name for task in iceberg.table().scan().plan_files()}
    assert {path.name for path in iceberg.files()} == known


def test_a_column_that_was_made_again_with_another_type_is_no_place_for_rows_that_wait(iceberg):
    sink = iceberg.put(NEW, CY)
    committables = written(sink, rows_of(NEW, {"id": 4, "name": "di", "city": "Oslo"}), 2, subtask=1)
    iceberg.drop("city")
    with iceberg.table().update_schema() as update:
        update.add_column("city", LongType())
    with pytest.raises(SchemaError, match="column 'city' is large_string, declared as int64"):
        committer_of(sink, "job-a").commit(2, committables)
    assert [row["id"] for row in iceberg.rows()] == [3]


# ---- rolled back ------------------------------------------------------------


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
@pytest.mark.parametrize("key", [(), ("id",)])
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_column_that_was_added_stays_when_the_rows_are_rolled_back(request, monkeypatch, kind, key, is_killed):
    world = request.getfixturevalue(kind)
    sink = world.put(OLD, ANN, key=key)
    committer_of(sink, "job-a").commit(2, written(sink, rows_of(OLD, BOB), 2, subtask=1))
    sink = world.sink(NEW, key=key)
    committer_of(sink, "job-a").commit(3, written(sink, rows_of(NEW, CY), 3, subtask=2))
    output = CommittedOutput("out", frozenset({"job-a"}))
    sink.check_rollback(output, 1)
    if is_killed and kind == "delta":
        with monkeypatch.context() as patch:
            patch.setattr(sink, "_restore_columns", lambda table: None)
            sink.roll_back(output, 1, ())
        assert world.columns() == ["id", "name"], "deltalake sets the schema back as well"
    for _ in range(2):
        sink.roll_back(output, 1, ())
    assert (world.columns(), world.rows()) == (["id", "name", "city"], [ANN | {"city": None}])
    committer_of(sink, "job-b").commit(2, written(sink, rows_of(NEW, CY), 2, job_id="job-b"))
    assert world.rows() == [ANN | {"city": None}, CY]


# ---- in jobs ----------------------------------------------------------------


@pytest.mark.systems
def test_a_job_whose_source_has_got_a_column_resumes_and_its_table_gets_it_too(world, tmp_path):
    origin, key = tmp_path / "origin", () if isinstance(world, IcebergWorld) else ("id",)
    write_deltalake(origin, pa.table({"id": range(1000), "name": ["a"] * 1000}))

    def start(**options: Any) -> Job:
        env = Environment("copy", parallelism=2, checkpoint_dir=tmp_path / "chk", checkpoint_interval="200 ms")
        source = env.read_delta(origin, watch=True, interval="50 ms", rows_per_s=3000).uid("in")
        source.sink(world.make(key=key, evolve=True)).uid("out")
        return env.start(slots=ProcessSlots(), **options)

    job = start()
    until("something committed", lambda: world.exists() and world.rows())
    job.stop(timeout_s=limit_s(60))
    more = pa.table({"city": ["Bern"] * 10, "id": range(1000, 1010), "name": ["b"] * 10})
    write_deltalake(origin, more, mode="append", schema_mode="merge")
    job = start(restore_from="latest")
    until("the rest", lambda: len(world.rows()) >= 1010)
    job.stop(drain=True, timeout_s=limit_s(60))
    assert world.columns() == ["id", "name", "city"]
    expected = [(n, "a", None) for n in range(1000)] + [(n, "b", "Bern") for n in range(1000, 1010)]
    assert [(row["id"], row["name"], row["city"]) for row in world.rows()] == expected
