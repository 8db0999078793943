"""Delta tables as streams: logs and files as other writers write them."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from table_worlds import CONTEXT, DEEP, LONG_AGO, DeltaWorld, Job

from midstream.engine.core.errors import ConfigError, StorageError


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


def test_timestamps_that_spark_has_written_are_instants(tmp_path):
    """Its default is INT96, which cannot be marked as UTC."""
    at = datetime(2024, 6, 1, 12, 30, tzinfo=UTC)
    world = DeltaWorld(tmp_path)
    world.create(pa.schema([("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))]))
    rows = pa.table({"n": [1, 2], "at": pa.array([at.replace(tzinfo=None), None], pa.timestamp("us"))})
    action = added(world, "a", 1)
    pq.write_table(rows, world.path / "t/a", use_deprecated_int96_timestamps=True)
    action["add"]["size"] = (world.path / "t/a").stat().st_size
    commit(world, action)
    assert Job(world.source()).rows() == [{"n": 1, "at": at}, {"n": 2, "at": None}]


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
        world.source(start=1).prepare("in", None, False)
    with pytest.raises(ConfigError, match="the table's log begins later, with version 2"):
        world.source(start=LONG_AGO).prepare("in", None, False)
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


def test_a_job_that_was_stopped_while_the_log_was_cleaned_up_goes_on_or_is_refused_with_the_way_out(tmp_path):
    world = DeltaWorld(tmp_path)
    world.create()
    world.append(1)
    job = Job(world.source(watch=True))
    job.rows()
    for number in (2, 3, 4):
        world.append(number)
    world.table.create_checkpoint()
    log = sorted((tmp_path / "t/_delta_log").glob("0*.json"))
    for path in log[:2]:
        path.unlink()
    assert Job(world.source(watch=True), job.position).numbers() == [2, 3, 4]
    with pytest.raises(
        ConfigError, match=r"start=2: how the table was at version 2 can no longer be found out .*; start with"
    ):
        world.source(start=2).prepare("in", None, False)
    log[2].unlink()
    with pytest.raises(ConfigError, match=r"version 2 is to be read next, and is no longer in the table's log"):
        Job(world.source(watch=True), job.position).rows()


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
