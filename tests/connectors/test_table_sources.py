"""Tables as streams: what each version of a Delta or an Iceberg table adds is read once, whatever else happens to it."""

from __future__ import annotations

import json
import os
import pickle
import zlib
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote

import msgspec
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.typedef import Record
from pyiceberg.types import LongType
from table_worlds import CONTEXT, NUMBERS, WORLDS, DeltaWorld, IcebergWorld, Job, TableWorld, read

from effort import examples
from midstream import testing
from midstream.connectors.files import table_source
from midstream.connectors.files.table_files import TableFile, packed, unpacked
from midstream.connectors.iceberg.iceberg_source import IcebergSource
from midstream.engine.core.errors import (
    ConfigError,
    DataError,
    InvariantError,
    SchemaError,
    StorageError,
)
from midstream.engine.operators.source_api import Split

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> TableWorld:
    return WORLDS[request.param](tmp_path)


def test_a_table_is_read_then_what_each_version_adds(world):
    world.create()
    world.append(1, 2)
    world.append(3)
    job = Job(world.source(watch=True))
    assert job.numbers() == [1, 2, 3]
    assert job.numbers() == []
    world.append(4)
    world.append(5, 6)
    assert job.numbers() == [4, 5, 6]
    world.append(7)
    assert Job(world.source(watch=True), job.position).numbers() == [7], "it goes on from a checkpoint"


def test_without_watch_it_ends_with_the_table_as_it_was(world):
    world.create()
    world.append(1, 2)
    source = world.source()
    assert source.bounded
    found = source.discover(None, CONTEXT)
    assert found.exhausted
    world.append(3)
    assert source.discover(found.position, CONTEXT).splits == ()
    assert testing.check_source(world.source()).column("n").to_pylist() == [1, 2, 3]
    assert testing.check_source(world.source(watch=True)).num_rows == 3


def test_an_empty_table_begins_with_its_first_rows(world):
    world.create()
    job = Job(world.source(watch=True))
    assert job.numbers() == []
    world.append(1)
    assert job.numbers() == [1]


def test_a_version_that_rearranges_rows_adds_none(world):
    world.create()
    for n in range(4):
        world.append(n)
    job = Job(world.source(watch=True))
    assert job.numbers() == [0, 1, 2, 3]
    world.compact()
    assert len(world.files()) == 1
    assert job.numbers() == []
    world.append(4)
    world.compact()
    assert job.numbers() == [4]


OPERATIONS = st.lists(
    st.sampled_from(["append", "append", "append", "compact", "add column", "read", "read", "restart", "one row"]),
    max_size=12,
)


@pytest.mark.parametrize("kind", WORLDS)
@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(operations=OPERATIONS, began=st.integers(0, 4))
def test_every_row_is_read_once_whatever_writers_do_in_between(kind, operations, began):
    with TemporaryDirectory() as directory:
        world = WORLDS[kind](Path(directory))
        world.create()
        added: list[int] = []
        found: list[int] = []
        columns = 0
        job: Job | None = None
        for step, operation in enumerate(operations):
            if step == began:
                job = Job(world.source(watch=True, columns=["n"]))
            match operation:
                case "append" | "one row":
                    new = [len(added) + each for each in range(3 if operation == "append" else 1)]
                    world.append(*new)
                    added += new
                case "compact":
                    world.compact()
                case "add column":
                    columns += 1
                    world.add_column(f"c{columns}")
                case "restart" if job is not None:
                    job = Job(world.source(watch=True, columns=["n"]), job.position)
                case "read" if job is not None:
                    found += job.numbers()
        found += (job or Job(world.source(watch=True, columns=["n"]))).numbers()
        assert found == sorted(added) == world.numbers()


def test_versions_that_delete_rows_are_refused_or_skipped(world):
    world.create()
    world.append(1, 2, 3)
    job, skipping = Job(world.source(watch=True)), Job(world.source(watch=True, on_change="skip"))
    assert job.numbers() == skipping.numbers() == [1, 2, 3]
    world.delete(2)
    world.append(4)
    with pytest.raises(
        DataError,
        match=r"\((DELETE|delete|overwrite)\) deletes or changes rows.*on_change='skip'",
    ):
        job.numbers()
    assert skipping.numbers() == [4]
    assert Job(world.source()).numbers() == world.numbers() == [1, 3, 4]


def test_rows_deleted_by_their_positions_are_left_out(world, monkeypatch):
    world.create()
    world.append(*range(100))
    world.append(100, 101)
    world.delete_positions(7)
    world.delete_positions(101)
    expected = [n for n in range(102) if n not in (7, 101)]
    assert world.numbers() == expected
    monkeypatch.setattr(table_source, "_LARGE_FILE_BYTES", 0)
    assert testing.check_source(world.source()).column("n").to_pylist() == expected
    (first, *_) = world.source().discover(None, CONTEXT).splits
    rest = Split(first.id, first.payload, offset=6)
    assert [row["n"] for row in read(world.source(), rest, rows_max=2)][:3] == [6, 8, 9]


def test_a_new_column_ends_the_job_unless_its_columns_are_chosen(world):
    world.create()
    world.append(1)
    job, chosen = Job(world.source(watch=True)), Job(world.source(watch=True, columns=["n"]))
    assert job.numbers() == chosen.numbers() == [1]
    world.add_column("more")
    world.add(pa.table({"n": [2], "more": pa.array([20], pa.int64())}))
    with pytest.raises(SchemaError, match=r"column 'more' was added; start again to read it, or give columns="):
        job.splits()
    assert chosen.rows() == [{"n": 2}]
    again = Job(world.source(watch=True), job.position)
    assert again.rows() == [{"n": 2, "more": 20}], "nothing was lost"
    assert [row["more"] for row in Job(world.source()).rows()] == [None, 20]
    assert [row["more"] for row in Job(world.source(columns=["more"])).rows()] == [None, 20]


def test_a_column_that_changes_its_type_ends_the_job(world):
    world.create(pa.schema([("n", pa.int64()), ("small", pa.int32())]))
    world.add(pa.table({"n": [1], "small": pa.array([1], pa.int32())}))
    job = Job(world.source(watch=True))
    assert job.numbers() == [1]
    world.widen("small")
    world.add(pa.table({"n": [2], "small": pa.array([2**40], pa.int64())}))
    with pytest.raises(SchemaError, match=r"column 'small' was int32 and is now int64; start again"):
        job.splits()
    assert Job(world.source(watch=True), job.position).rows() == [{"n": 2, "small": 2**40}]
    assert [row["small"] for row in Job(world.source()).rows()] == [1, 2**40]


def test_a_table_that_changed_before_the_first_discovery_is_refused(world):
    world.create()
    world.append(1)
    source = world.source(watch=True)
    world.add_column("more")
    with pytest.raises(SchemaError, match="column 'more' was added"):
        source.discover(None, CONTEXT)


def test_the_start_is_a_version_a_time_or_now(world):
    world.create()
    world.append(1)
    world.append(2)
    second = world.version()
    between = datetime.now(UTC)
    world.append(3)
    job = Job(world.source(watch=True, start="latest"))
    assert job.numbers() == []
    world.append(4)
    assert job.numbers() == [4]
    assert Job(world.source(start=second)).numbers() == [2, 3, 4]
    assert Job(world.source(start=between)).numbers() == [3, 4]
    assert Job(world.source(start=between + timedelta(days=1))).numbers() == []
    assert Job(world.source(start=LONG_AGO)).numbers() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"start": "latest"}, ConfigError, "for which watch=True is needed"),
        ({"start": "earliest"}, ConfigError, "start='earliest' is no version, 'latest', datetime or None"),
        ({"start": -1}, ConfigError, "start=-1 is no version"),
        ({"start": True}, ConfigError, "start=True is no version"),
        ({"start": 99}, ConfigError, r"start=99(, and the newest version is 1| is no snapshot of the table)"),
        ({"start": datetime(2024, 1, 1)}, ConfigError, "has no time zone"),
        ({"columns": "n"}, ConfigError, r"columns='n' is a string; give a list: \['n'\]"),
        ({"columns": ["m"]}, SchemaError, "column 'm' does not exist; the table has n"),
        ({"columns": []}, SchemaError, "no columns"),
        ({"columns": ["n", "n"]}, SchemaError, "more than one column 'n'"),
        ({"on_change": "ignore"}, ConfigError, "on_change='ignore' is neither 'fail' nor 'skip'"),
        ({"interval": "0 s"}, ConfigError, "interval"),
        ({"rows_per_s": 0}, ConfigError, "rows_per_s 0 is not a positive number"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_where_the_source_is_made(world, arguments, error, message):
    world.create()
    world.append(1)
    with pytest.raises(error, match=message):
        world.source(**arguments)


def test_a_table_that_is_missing_or_was_replaced_is_named(world):
    with pytest.raises(ConfigError, match=r"(there is no Delta table|the table does not exist in the catalog)"):
        world.source()
    world.create()
    world.append(1)
    job = Job(world.source(watch=True))
    assert job.numbers() == [1]
    world.drop()
    with pytest.raises(ConfigError, match=r"(no longer exists|does not exist in the catalog)"):
        job.splits()
    world.create()
    with pytest.raises(ConfigError, match=r"(is now the newest: the table was replaced|was dropped and made again)"):
        job.splits()
    world.append(1)
    world.append(1)
    with pytest.raises(ConfigError, match=r"(was replaced by another one|was dropped and made again).*--fresh"):
        job.splits()


def test_a_table_that_was_replaced_before_the_first_discovery_is_refused(tmp_path):
    world = DeltaWorld(tmp_path)
    world.create()
    world.append(1)
    source = world.source()
    world.drop()
    world.create(pa.schema([("m", pa.int64())]))
    world.add(pa.table({"m": [1]}))
    with pytest.raises(ConfigError, match="the table was replaced by another one"):
        source.discover(None, CONTEXT)


def test_versions_that_were_cleaned_up_before_they_were_read_are_named(world):
    world.create()
    world.append(1)
    job = Job(world.source(watch=True))
    assert job.numbers() == [1]
    world.append(2)
    missed = world.version()
    world.append(3)
    world.append(4)
    world.forget()
    named = (
        rf"version {missed} is to be read next, and is no longer|snapshot \d+ was read, and what came next has expired"
    )
    with pytest.raises(ConfigError, match=named):
        job.splits()
    assert Job(world.source()).numbers() == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match=r"(the table's log|begins with|is no snapshot)"):
        world.source(start=missed)


def test_metadata_up_to_what_was_read_may_be_cleaned_up(world):
    world.create()
    world.append(1)
    world.append(2)
    job = Job(world.source(watch=True))
    assert job.numbers() == [1, 2]
    world.append(3)
    world.forget()
    assert job.numbers() == [3]


def test_a_file_that_was_vacuumed_is_named_with_its_version(world):
    world.create()
    world.append(1)
    source = world.source(watch=True)
    (split,) = source.discover(None, CONTEXT).splits
    (path,) = world.files()
    data = path.read_bytes()
    path.write_bytes(data + b"x")
    with pytest.raises(DataError, match=rf"{path}: has {len(data) + 1} bytes, and {len(data)} in the table's metadata"):
        source.open_split(split)
    path.unlink()
    with pytest.raises(
        StorageError, match=rf"{path}: the file no longer exists; version {world.version()} of the table"
    ):
        source.open_split(split)


def test_large_files_are_read_in_several_splits(world, monkeypatch):
    world.create()
    world.append(*range(5000))
    (path,) = world.files()
    monkeypatch.setattr(table_source, "_LARGE_FILE_BYTES", 0)
    monkeypatch.setattr("midstream.connectors.files.file_source._SPLIT_BYTES_MIN", 0)
    pl.read_parquet(path).write_parquet(path.with_suffix(".groups"), row_group_size=1000, compression="uncompressed")
    source = world.source()
    file = TableFile(str(path), path.stat().st_size, 1)
    monkeypatch.setattr(source, "_located", lambda _: (pa.fs.LocalFileSystem(), str(path.with_suffix(".groups"))))
    parts = source._parts(file)
    assert [(part.first, part.last) for part in parts] == [(n, n + 1) for n in range(5)]


PARTITIONS = pa.table(
    {
        "n": pa.array([1, 2, 3], pa.int64()),
        "text": pa.array(["a b/ü=%:\"'", "\U0001f600", None], pa.string()),
        "flag": pa.array([True, False, None], pa.bool_()),
        "day": pa.array([date(1969, 12, 31), date(9999, 12, 31), None], pa.date32()),
        "at": pa.array([datetime(1969, 1, 1, 3, 4, 5, 6, UTC), datetime(2024, 1, 1, tzinfo=UTC), None], pa.timestamp("us", "UTC")),
        "local": pa.array([datetime(1969, 1, 1, 3, 4, 5, 6), datetime(2024, 1, 1), None], pa.timestamp("us")),
        "price": pa.array([Decimal("1.50"), Decimal("0.00"), None], pa.decimal128(5, 2)),
        "big": pa.array([2**63 - 1, -(2**63), None], pa.int64()),
    }
)  # fmt: skip


@pytest.mark.parametrize("is_live", [False, True])
def test_columns_by_which_a_table_is_partitioned_are_read(world, is_live):
    names = PARTITIONS.column_names[1:]
    world.create(PARTITIONS.schema, names)
    job = Job(world.source(watch=True))
    assert job.rows() == [] if is_live else True
    world.add(PARTITIONS)
    rows = job.rows() if is_live else Job(world.source()).rows()
    assert sorted(rows, key=lambda row: row["n"]) == PARTITIONS.to_pylist()
    (only, *_) = Job(world.source(columns=["flag"])).rows()
    assert set(only) == {"flag"}
    assert {row["flag"] for row in Job(world.source(columns=["flag"])).rows()} == {True, False, None}


NESTED = pa.table(
    {
        "n": pa.array([1, 2], pa.int64()),
        "s": pa.array([{"a": 1, "b": {"c": "x"}}, None], pa.struct([("a", pa.int32()), ("b", pa.struct([("c", pa.string())]))])),
        "l": pa.array([[{"q": 1}, {"q": None}], []], pa.list_(pa.struct([("q", pa.int64())]))),
        "raw": pa.array([b"\0\xff", None], pa.binary()),
        "upper Case.dot": pa.array([1.5, float("-inf")], pa.float64()),
    }
)  # fmt: skip


def test_nested_columns_and_odd_names_are_read(world):
    world.create(NESTED.schema)
    world.add(NESTED)
    assert testing.check_source(world.source()).to_pylist() == NESTED.to_pylist()


def test_the_place_of_a_row_names_file_and_version(world):
    world.create()
    world.append(1, 2, 3)
    source = world.source()
    (split,) = source.discover(None, CONTEXT).splits
    place = source.place(Split(split.id, split.payload, offset=1), 1, 1)
    assert str(world.files()[0].name) in place
    assert place.endswith(f"(version {world.version()}), row 2, counted from 0")


def test_columns_of_an_iceberg_table_are_found_by_their_ids(tmp_path):
    world = IcebergWorld(tmp_path)
    world.create(NESTED.schema)
    world.add(NESTED)
    with world.table.update_schema() as update:
        update.rename_column("n", "number")
        update.rename_column("s.a", "renamed")
        update.rename_column("l.element.q", "qq")
        update.delete_column("raw")
    world.add_column("raw")
    world.add_column("n")
    found = Job(world.source()).rows()
    assert found == world.table.scan().to_arrow().to_pylist()
    assert [(row["number"], row["n"], row["raw"]) for row in found] == [(1, None, None), (2, None, None)]
    assert [row["s"] for row in found] == [{"renamed": 1, "b": {"c": "x"}}, None]


def test_a_renamed_column_is_read_on_under_its_old_name(tmp_path):
    world = IcebergWorld(tmp_path)
    world.create()
    world.append(1)
    job = Job(world.source(watch=True))
    assert job.numbers() == [1]
    with world.table.update_schema() as update:
        update.rename_column("n", "number")
    world.add(pa.table({"number": pa.array([2], pa.int64())}))
    assert job.rows() == [{"n": 2}]


def test_files_without_ids_are_read_by_the_name_mapping(tmp_path):
    world = IcebergWorld(tmp_path)
    world.create()
    pl.DataFrame({"n": [1, 2]}).write_parquet(tmp_path / "plain.parquet")
    world.table.add_files([f"file://{tmp_path}/plain.parquet"])
    assert Job(world.source()).numbers() == [1, 2]
    with world.table.transaction() as changed:
        changed.remove_properties("schema.name-mapping.default")
    with pytest.raises(
        DataError, match=r"plain.parquet: its columns have no field ids, and the table has no schema.name-mapping"
    ):
        Job(world.source()).rows()


DEEP = pa.table(
    {
        "n": pa.array([1], pa.int64()),
        "s": pa.array([{"a": 5, "b": {"c": "x"}}], pa.struct([("a", pa.int64()), ("b", pa.struct([("c", pa.string())]))])),
        "l": pa.array([[{"q": 7}]], pa.list_(pa.struct([("q", pa.int64())]))),
        "m": pa.array([[("k", {"z": 1})]], pa.map_(pa.string(), pa.struct([("z", pa.int32())]))),
    }
)  # fmt: skip


@pytest.mark.parametrize("has_ids", [False, True])
def test_fields_within_columns_that_were_renamed_or_replaced_are_found(tmp_path, has_ids):
    world = IcebergWorld(tmp_path)
    world.create(DEEP.schema)
    if has_ids:
        world.add(DEEP)
    else:
        pq.write_table(DEEP, tmp_path / "plain.parquet")
        world.table.add_files([f"file://{tmp_path}/plain.parquet"])
    with world.table.update_schema() as update:
        update.rename_column("s.a", "renamed")
        update.rename_column("l.element.q", "qq")
        update.rename_column("m.value.z", "zz")
        update.update_column("m.value.z", LongType())
    with world.table.update_schema() as update:
        update.add_column(("s", "new"), LongType())
        update.add_column(("s", "b", "d"), LongType())
        update.add_column(("m", "value", "y"), LongType())
    renamed = {
        "n": 1, "s": {"renamed": 5, "b": {"c": "x", "d": None}, "new": None}, "l": [{"qq": 7}], "m": [("k", {"zz": 1, "y": None})],
    }  # fmt: skip
    assert Job(world.source()).rows() == world.table.scan().to_arrow().to_pylist() == [renamed]
    for name, value in renamed.items():
        assert Job(world.source(columns=[name])).rows() == [{name: value}]
    with world.table.update_schema() as update:
        update.delete_column("s.b.c")
        update.delete_column("m.value.zz")
    (found,) = Job(world.source()).rows()
    assert [found] == world.table.scan().to_arrow().to_pylist()
    assert (found["s"]["b"], found["m"]) == ({"d": None}, [("k", {"y": None})])


def test_times_by_which_a_table_is_partitioned_are_read_from_the_metadata(tmp_path):
    world = IcebergWorld(tmp_path)
    world.create(pa.schema([("n", pa.int64()), ("p", pa.time64("us"))]), ["p"])
    pq.write_table(pa.table({"n": [1]}), tmp_path / "plain.parquet")
    path = tmp_path / "plain.parquet"
    for value in (time(1, 2, 3, 4), time(0), None):
        us = (
            None
            if value is None
            else (value.hour * 3600 + value.minute * 60 + value.second) * 10**6 + value.microsecond
        )
        copied = path.with_name(f"{us}.parquet")
        copied.write_bytes(path.read_bytes())
        file = DataFile.from_args(
            content=DataFileContent.DATA, file_path=f"file://{copied}", file_format=FileFormat.PARQUET,
            partition=Record(us), record_count=1, file_size_in_bytes=copied.stat().st_size,
        )  # fmt: skip
        file.spec_id = world.table.spec().spec_id
        with world.table.transaction() as changed:
            changed.set_properties({"schema.name-mapping.default": '[{"names": ["n"], "field-id": 1}]'})
            with changed.update_snapshot().fast_append() as append:
                append.append_data_file(file)
    assert [row["p"] for row in Job(world.source()).rows()] == [time(1, 2, 3, 4), time(0), None]


@pytest.mark.parametrize("position", [-1, 3, 2**50])
def test_deleted_rows_that_a_file_does_not_have_are_refused(tmp_path, position):
    world = IcebergWorld(tmp_path)
    world.create()
    world.append(1, 2, 3)
    world.delete_positions(2)
    (path,) = (tmp_path / "warehouse").glob("*-deletes.parquet")
    pl.read_parquet(path).with_columns(pos=pl.lit(position, pl.Int64)).write_parquet(path)
    with pytest.raises(DataError, match=rf"-deletes.parquet: row {position} of file:.* is deleted, which has 3 rows"):
        Job(world.source()).rows()


def test_an_iceberg_table_that_was_rolled_back_is_refused(tmp_path):
    world = IcebergWorld(tmp_path)
    world.create()
    world.append(1)
    first = world.version()
    world.append(2)
    job = Job(world.source(watch=True))
    assert job.numbers() == [1, 2]
    world.table.manage_snapshots().rollback_to_snapshot(first).commit()
    world.append(3)
    with pytest.raises(
        ConfigError,
        match="the table was rolled back to an older one since; to read it from the beginning, start with --fresh",
    ):
        job.splits()


def test_a_table_whose_expired_snapshots_are_forgotten_as_parents_is_refused(tmp_path):
    world = IcebergWorld(tmp_path)
    world.create()
    world.append(1)
    first = world.version()
    job = Job(world.source(watch=True))
    assert job.numbers() == [1]
    world.append(2)
    world.table.maintenance.expire_snapshots().by_id(first).commit()
    with pytest.raises(ConfigError, match=rf"snapshot {first} was read, and what came next has expired"):
        job.splits()


@pytest.mark.parametrize("format_version", ["1", "2"])
def test_rows_whose_snapshot_expired_before_it_was_read_are_not_lost_in_silence(tmp_path, format_version):
    world = IcebergWorld(tmp_path)
    world.catalog.create_namespace("lake")
    world.catalog.create_table("lake.t", NUMBERS, properties={"format-version": format_version})
    began_empty, latest = Job(world.source(watch=True)), Job(world.source(watch=True, start="latest"))
    assert began_empty.numbers() == latest.numbers() == []
    world.append(1)
    first = world.version()
    assert Job(world.source(start=first)).numbers() == Job(world.source(start=LONG_AGO)).numbers() == [1]
    world.append(2)
    world.table.maintenance.expire_snapshots().by_id(first).commit()
    for job in (began_empty, latest):
        with pytest.raises(ConfigError, match=r"nothing was read, and what came next has expired.*--fresh"):
            job.splits()
    with pytest.raises(ConfigError, match=rf"the oldest snapshot that has not expired is newer: {world.version()}"):
        world.source(start=LONG_AGO)
    assert Job(world.source(start=world.version())).numbers() == [2]
    assert Job(world.source()).numbers() == [1, 2]


def test_slots_get_no_password_of_the_catalog(tmp_path):
    world = IcebergWorld(tmp_path)
    world.create()
    source: Any = world.source()
    assert source._files.properties == {}
    with pytest.raises(InvariantError, match="only the driver has the catalog"):
        pickle.loads(pickle.dumps(IcebergSource("lake.t", catalog=world.properties()))).discover(None, CONTEXT)


def test_a_delta_log_that_cannot_be_read_is_named(tmp_path):
    world = DeltaWorld(tmp_path)
    world.create()
    world.append(1)
    job = Job(world.source(watch=True))
    assert job.numbers() == [1]
    log = tmp_path / f"t/_delta_log/{world.version() + 1:020d}.json"
    log.write_text('{"add": {"path"')
    with pytest.raises(StorageError, match=rf"{log}: cannot be read: "):
        job.splits()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ({"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["deletionVectors", "newThing"]}}, "requires newThing"),
        ({"protocol": {"minReaderVersion": 9, "minWriterVersion": 7}}, "requires reader version 9"),
        ({"add": {"path": "../elsewhere.parquet", "size": 1, "partitionValues": {}, "dataChange": True}}, "is not a plain path"),
        ({"add": {"path": "file:///a.parquet", "size": 1, "partitionValues": {}, "dataChange": True}}, "shallow clone"),
    ],
)  # fmt: skip
def test_what_a_delta_log_may_hold_and_cannot_be_read_is_refused(tmp_path, action, message):
    world = DeltaWorld(tmp_path)
    world.create()
    job = Job(world.source(watch=True))
    job.splits()
    (tmp_path / f"t/_delta_log/{world.version() + 1:020d}.json").write_text(json.dumps(action))
    with pytest.raises((ConfigError, StorageError), match=message):
        job.rows()


def test_deleted_rows_in_a_damaged_checkpoint_are_refused(tmp_path):
    deleted = packed(pl.Series([True, False, True, False, False]).to_numpy())
    assert unpacked(deleted, 5, "f").tolist() == [True, False, True, False, False]
    assert unpacked(deleted, 500, "f").tolist()[:5] == [True, False, True, False, False]
    bomb = zlib.compress(bytes(2**24))
    for damaged, rows in ((b"xx", 5), (deleted, 0), (bomb, 8 * 2**24 - 8)):
        with pytest.raises(StorageError, match="f: the checkpoint is damaged where it has the deleted rows"):
            unpacked(damaged, rows, "f")
    assert not unpacked(bomb, 8 * 2**24, "f").any()


def commit(world: DeltaWorld, *actions: dict[str, Any], at: datetime | None = None) -> Path:
    """Write the next version of a Delta table as another writer would."""
    log = world.path / f"t/_delta_log/{world.version() + 1:020d}.json"
    log.write_text("\n".join(map(json.dumps, actions)))
    if at is not None:
        os.utime(log, (at.timestamp(), at.timestamp()))
    return log


def added(world: DeltaWorld, name: str, number: int, **more: Any) -> dict[str, Any]:
    """Write a data file, and return the action that adds it. `name` is encoded in the log as `as_path` has it."""
    path = world.path / "t" / name
    path.parent.mkdir(exist_ok=True)
    pl.DataFrame({"n": [number, -1]}).write_parquet(path)
    values = {"path": name, "partitionValues": {}, "size": path.stat().st_size, "modificationTime": 1}
    return {"add": {**values, "dataChange": True, "stats": '{"numRecords": 2}', **more}}


def test_a_start_in_time_finds_versions_that_say_nothing_of_their_time(tmp_path):
    def day(number: int) -> datetime:
        return datetime(2024, 1, number, tzinfo=UTC)

    def ms(number: int) -> int:
        return int(day(number).timestamp() * 1000)

    world = DeltaWorld(tmp_path)
    world.create()
    os.utime(tmp_path / f"t/_delta_log/{0:020d}.json", (1, 1))
    commit(world, {"commitInfo": {"timestamp": ms(1), "operation": "WRITE"}}, added(world, "a", 1))
    commit(world, added(world, "b", 2), at=day(2))
    commit(world, {"commitInfo": {"operation": "WRITE"}}, added(world, "c", 3), at=day(3))
    commit(world, {"commitInfo": {"timestamp": ms(9), "inCommitTimestamp": ms(4)}}, added(world, "d", 4))
    commit(world, {"commitInfo": {"timestamp": ms(2)}}, added(world, "e", 5))
    log = tmp_path / "t/_delta_log"
    created = json.loads((log / f"{0:020d}.json").read_text().splitlines()[0])["commitInfo"]["timestamp"]
    assert created > ms(9)
    (log / f"{0:020d}.json").write_text((log / f"{0:020d}.json").read_text().replace(str(created), "1"))
    for number in range(1, 5):
        at = world.source(start=day(number))
        assert [n for n in Job(at).numbers() if n > 0] == list(range(number, 6)), number
        just_after = world.source(start=day(number) + timedelta(microseconds=1))
        assert [n for n in Job(just_after).numbers() if n > 0] == list(range(number + 1, 6)), number
    assert Job(world.source(start=day(5))).numbers() == []


def test_a_log_of_which_only_the_checkpoint_is_left_is_read(tmp_path):
    world = DeltaWorld(tmp_path)
    world.create()
    world.append(1)
    job = Job(world.source(watch=True))
    assert job.numbers() == [1]
    world.table.create_checkpoint()
    for path in (tmp_path / "t/_delta_log").glob("0*.json"):
        path.unlink()
    again = Job(world.source(watch=True))
    assert again.numbers() == [1]
    assert job.numbers() == again.numbers() == []
    with pytest.raises(
        ConfigError,
        match="version 1 is to be read next, and is no longer in the table's log, which now begins with version 2",
    ):
        world.source(start=1)
    with pytest.raises(ConfigError, match="the table's log begins later, with version 2"):
        world.source(start=LONG_AGO)
    (tmp_path / f"t/_delta_log/{2:020d}.json").write_text(json.dumps(added(world, "a", 2)))
    assert job.numbers() == again.numbers() == [-1, 2]


@pytest.mark.parametrize(
    "written",
    ["ü.parquet", "a b.parquet", "a%20b.parquet", "x'\"<>{}|^`~#?.parquet", "t/a+b&c;d=e.parquet", "a:b.parquet"],
)
def test_deleted_rows_are_found_however_the_path_of_their_file_is_written(tmp_path, written):
    world = DeltaWorld(tmp_path)
    world.create()
    commit(world, added(world, unquote(written), 1, path=written.replace("#", "%23").replace("?", "%3F")))
    world.append(2)
    world.delete_positions(-1)
    assert sorted(row["n"] for row in Job(world.source()).rows()) == [1, 2]


def test_the_deleted_rows_of_a_file_are_not_those_of_its_namesake(tmp_path):
    world = DeltaWorld(tmp_path)
    world.create()
    commit(world, added(world, "a.parquet", 1))
    world.delete_positions(1)
    commit(world, added(world, "t/a.parquet", 2))
    assert Job(world.source()).numbers() == [-1, -1, 2]


def test_what_deltalake_cannot_read_is_reported_in_short(tmp_path):
    world = DeltaWorld(tmp_path)
    world.create()
    commit(world, added(world, "a.parquet", 1))
    world.delete_positions(1)
    log = tmp_path / f"t/_delta_log/{2:020d}.json"
    log.write_text(log.read_text().replace("numRecords", "noRecords"))
    with pytest.raises(StorageError, match=r"DeltaSource of .*: cannot be read: .*Missing numRecords"):
        world.source().discover(None, CONTEXT)
    log.write_text("\ufeff{}")
    with pytest.raises(StorageError, match=r"cannot be read: .*whilst parsing value$"):
        world.source()


def test_a_file_that_a_version_adds_twice_is_read_once(tmp_path):
    world = DeltaWorld(tmp_path)
    world.create()
    add = added(world, "a.parquet", 1)
    commit(world, add, add)
    assert Job(world.source()).numbers() == Job(world.source(start=0)).numbers() == [-1, 1]


def test_versions_of_a_time_when_columns_had_other_names_in_files_are_refused(tmp_path):
    world = DeltaWorld(tmp_path)
    world.create()
    metadata = json.loads((tmp_path / f"t/_delta_log/{0:020d}.json").read_text().splitlines()[2])["metaData"]
    mapped = {**metadata, "configuration": {"delta.columnMapping.mode": "name"}}
    commit(world, {"metaData": mapped}, added(world, "a.parquet", 1))
    commit(world, {"metaData": metadata})
    with pytest.raises(
        ConfigError,
        match=r"version 1 \(a commit\): the table has column mapping \(name\), which this source cannot read",
    ):
        Job(world.source(start=1)).rows()


def test_fields_that_were_added_within_columns_are_null_in_older_files(tmp_path):
    def struct(**fields: object) -> dict[str, object]:
        described = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in fields.items()]
        return {"type": "struct", "fields": described}

    world = DeltaWorld(tmp_path)
    world.create(DEEP.schema)
    world.add(DEEP)
    metadata = json.loads((tmp_path / f"t/_delta_log/{0:020d}.json").read_text().splitlines()[2])["metaData"]
    now = struct(
        n="long",
        s=struct(x="long", b=struct(d="string"), a="long"),
        l={"type": "array", "elementType": struct(r="string"), "containsNull": True},
        m={"type": "map", "keyType": "string", "valueType": struct(y="long", z="integer"), "valueContainsNull": True},
    )
    commit(world, {"metaData": {**metadata, "schemaString": json.dumps(now)}})
    expected = {
        "n": 1, "s": {"x": None, "b": {"d": None}, "a": 5}, "l": [{"r": None}], "m": [("k", {"y": None, "z": 1})],
    }  # fmt: skip
    assert Job(world.source()).rows() == Job(world.source(start=1)).rows() == [expected]
    (other,) = pl.read_delta(str(tmp_path / "t")).to_dicts()
    assert {**other, "m": [*other["m"].items()]} == expected


WRONG = {
    "size": [0, -1], "first": [-1, 1, 2**40], "last": [0, 2, -2, 2**40], "path": ["", "../a.parquet", "/etc/passwd", "a\0b", "file://[", "s3://"],
    "constants": [{"n": "x"}], "deleted": [b"x"], "deletes": [("gone.parquet",), ("/etc/passwd",)],
}  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_split_that_was_forged_is_refused_or_is_a_part_of_the_table(world, field, value):
    world.create()
    world.append(1, 2)
    source = world.source()
    (split,) = source.discover(None, CONTEXT).splits
    file = msgspec.msgpack.decode(split.payload, type=TableFile)
    forged = Split(split.id, msgspec.msgpack.encode(msgspec.structs.replace(file, **{field: value})), split.offset)
    found = []
    with suppress(ConfigError, DataError, SchemaError, StorageError):
        found = [row["n"] for row in read(source, forged)]
    assert found in ([], [1, 2])
