"""Iceberg tables as streams: metadata and files as other writers write them."""

from __future__ import annotations

import pickle
from datetime import time
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.typedef import Record
from pyiceberg.types import LongType
from table_worlds import CONTEXT, DEEP, LONG_AGO, NESTED, NUMBERS, IcebergWorld, Job

from midstream.connectors.iceberg.iceberg_source import IcebergSource
from midstream.engine.core.errors import ConfigError, DataError, InvariantError


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


def test_a_job_does_not_resume_with_another_column_of_the_same_name(tmp_path):
    """Rows that were added before it came would have no value there."""
    world = IcebergWorld(tmp_path)
    world.create()
    world.append(1)
    job = Job(world.source(columns=["n"], watch=True))
    assert job.numbers() == [1]
    assert job.position is not None
    world.source(columns=["n"], watch=True).check_resume(job.position)
    with world.table.update_schema() as update:
        update.rename_column("n", "number")
    with world.table.update_schema() as update:
        update.add_column("n", LongType())
    world.source(columns=["number"], watch=True).check_resume(job.position)
    with pytest.raises(ConfigError, match=r"'n' is not the one.*is called 'number' now: read it by that name"):
        world.source(columns=["n"], watch=True).check_resume(job.position)
    with world.table.update_schema(allow_incompatible_changes=True) as update:
        update.delete_column("number")
    with pytest.raises(ConfigError, match=r"'n' is not the one.*which was dropped: leave 'n' out"):
        world.source(columns=["n"], watch=True).check_resume(job.position)


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
    world.create(NUMBERS.append(pa.field("p", pa.time64("us"))), ["p"])
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
        match=r"was rolled back to an older one since, or .*; to read it from the beginning, start with --fresh",
    ):
        job.splits()


def test_a_snapshot_that_expired_unread_is_named_although_the_one_before_is_still_known(tmp_path):
    world = IcebergWorld(tmp_path)
    world.create()
    world.append(1)
    job = Job(world.source(watch=True))
    assert job.numbers() == [1]
    world.append(2)
    missed = world.version()
    world.append(3)
    world.table.maintenance.expire_snapshots().by_id(missed).commit()
    with pytest.raises(ConfigError, match=r"was rolled back .*, or the snapshots in between have expired"):
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
        world.source(start=LONG_AGO).prepare("in", None, False)
    assert Job(world.source(start=world.version())).numbers() == [2]
    assert Job(world.source()).numbers() == [1, 2]


def test_slots_get_no_password_of_the_catalog(tmp_path):
    world = IcebergWorld(tmp_path)
    world.create()
    source: Any = world.source()
    assert source._files.properties == {}
    with pytest.raises(InvariantError, match="only the driver has the catalog"):
        pickle.loads(pickle.dumps(IcebergSource("lake.t", catalog=world.properties()))).discover(None, CONTEXT)
