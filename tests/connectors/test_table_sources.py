"""Tables as streams: what each version of a Delta or an Iceberg table adds is read once, whatever else happens to it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.manifest import DataFile
from pyiceberg.types import TimestamptzType
from table_worlds import CONTEXT, LONG_AGO, NESTED, WORLDS, DeltaWorld, IcebergWorld, Job, TableWorld, read

from effort import examples
from midstream import testing
from midstream.connectors.files import table_source
from midstream.connectors.files.table_files import TableFile, packed, unpacked
from midstream.connectors.iceberg.iceberg_files import min_time_us
from midstream.engine.core.errors import ConfigError, DataError, SchemaError, StorageError
from midstream.engine.operators.source_api import Split


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
    assert [row["n"] for split in found.splits for row in read(source, split)] == [1, 2]
    assert testing.check_source(world.source()).column("n").to_pylist() == [1, 2, 3]
    assert testing.check_source(world.source(watch=True)).num_rows == 3


TIMED = pa.schema([("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))])


def at(*days: float) -> pa.Table:
    times = [datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=day) for day in days]
    return pa.table({"n": pa.array(range(len(days)), pa.int64()), "at": pa.array(times, TIMED.field("at").type)})


def days_of(splits: Iterable[Split]) -> list[float | None]:
    start_us = 1_767_225_600_000_000  # 2026
    return [None if s.min_time_us is None else (s.min_time_us - start_us) / 86_400_000_000 for s in splits]


def test_files_have_the_earliest_event_time_of_their_statistics_and_are_read_in_its_order(world):
    world.create(TIMED)
    world.add(at(5, 3.5))
    world.add(at(-20_000.25, 9))  # before 1970
    context = replace(CONTEXT, event_time="at")
    source = world.source(watch=True)
    first = source.discover(None, context)
    assert days_of(first.splits) == [-20_000.25, 3.5]
    assert days_of(source.discover(None, CONTEXT).splits) == [None, None], "no column is the event time"
    assert days_of(source.discover(None, replace(CONTEXT, event_time="n")).splits) == [None, None], "it is no time"
    world.add(at(8))
    world.append(7)  # without a time
    world.add(at(7, 6))
    later = source.discover(first.position, context)
    assert days_of(later.splits) == [None, 6, 8]
    assert days_of(world.source(watch=True).discover(None, context).splits) == [None, -20_000.25, 3.5, 6, 8]
    world.delete_positions(7)
    assert days_of(world.source().discover(None, context).splits)[0] is None


def test_statistics_of_other_columns_may_have_dates_that_python_lacks(tmp_path):
    world = DeltaWorld(tmp_path)
    until = pa.array([3_000_000], pa.int32()).cast(pa.date32())  # the year 10183
    world.create(pa.schema([*TIMED, ("until", until.type)]))
    world.add(at(5).append_column("until", until))
    for time, days in (("at", 5), ("until", None), (None, None)):
        context = replace(CONTEXT, event_time=time)
        assert days_of(world.source(columns=["n", "at"]).discover(None, context).splits) == [days]


def test_an_event_time_in_the_statistics_that_no_row_may_have_is_ignored(tmp_path):
    wrong_us = 1_767_225_600_000_000_000  # nanoseconds
    world = DeltaWorld(tmp_path)
    world.create(TIMED)
    world.add(pa.table({"n": [1], "at": pa.array([wrong_us], TIMED.field("at").type)}))
    assert days_of(world.source().discover(None, replace(CONTEXT, event_time="at")).splits) == [None]
    found = [
        min_time_us(
            cast("DataFile", SimpleNamespace(lower_bounds={7: bound.to_bytes(8, "little")})), 7, TIMED.field("at")
        )
        for bound in (wrong_us, 5)
    ]
    assert found == [None, 5]


def test_a_column_that_became_event_time_under_another_name_has_its_own_statistics(tmp_path):
    world = IcebergWorld(tmp_path)
    world.create(TIMED)
    world.add(at(3))
    with world.table.update_schema() as update:
        update.rename_column("at", "old")
    with world.table.update_schema() as update:
        update.add_column("at", TimestamptzType())
    assert days_of(world.source().discover(None, replace(CONTEXT, event_time="at")).splits) == [None]
    assert days_of(world.source().discover(None, replace(CONTEXT, event_time="old")).splits) == [3]


@pytest.mark.parametrize(
    "stats",
    [
        None,
        "",
        "no JSON",
        "[]",
        "{}",
        '{"minValues": null}',
        '{"minValues": {"at": 5}}',
        '{"minValues": {"at": "soon"}}',
    ]
    + ['{"minValues": {"at": "2026-01-01T00:00:00.000+99:00"}}', '{"minValues": {"at": "20000-01-01T00:00:00Z"}}'],
)
def test_statistics_that_say_nothing_of_the_event_time_are_ignored(tmp_path, stats):
    world = DeltaWorld(tmp_path)
    world.create(TIMED)
    source = world.source(watch=True)
    position = source.discover(None, CONTEXT).position
    world.add(at(1))
    log = tmp_path / "t/_delta_log/00000000000000000001.json"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if "add" in line:
            line["add"]["stats"] = stats
    log.write_text("\n".join(map(json.dumps, lines)))
    assert days_of(source.discover(position, replace(CONTEXT, event_time="at")).splits) == [None]


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
    st.sampled_from(
        [
            "append",
            "append",
            "append",
            "compact",
            "add column",
            "read",
            "read",
            "restart",
            "one row",
            "forget",
            "delete",
        ]
    ),
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
        numbers, columns = count(), 0
        is_read = False
        job: Job | None = None
        for step, operation in enumerate(operations):
            if step == began:
                job = Job(world.source(watch=True, columns=["n"]))
            is_read &= operation in ("read", "restart", "forget")
            match operation:
                case "append" | "one row":
                    new = [next(numbers) for _ in range(3 if operation == "append" else 1)]
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
                    is_read = True
                case "forget" if added and (job is None or is_read):
                    world.forget()
                case "delete" if added and job is None:
                    world.delete(added.pop(len(added) // 2))
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
        world.source(start=missed).prepare("in", None, False)


def test_a_job_resumes_when_its_start_has_expired(world):
    world.create()
    world.append(1)
    world.append(2)
    start = world.version()
    between = datetime.now(UTC)
    world.append(3)
    since, after = Job(world.source(start=start, watch=True)), Job(world.source(start=between, watch=True))
    assert (since.numbers(), after.numbers()) == ([2, 3], [3])
    world.forget()
    world.append(4)
    for job, at in ((since, start), (after, between)):
        again = world.source(start=at, watch=True)
        again.prepare("in", None, True)
        assert Job(again, job.position).numbers() == [4]
        with pytest.raises(
            ConfigError, match=r"(the table's log|begins with|is no snapshot|can no longer be found out|is newer)"
        ):
            again.prepare("in", None, False)


def test_a_start_that_the_table_does_not_have_is_refused_before_slots_are_requested(world):
    world.create()
    world.append(1)
    with pytest.raises(ConfigError, match=r"start=99(, and the newest version is 1| is no snapshot of the table)"):
        world.source(start=99).prepare("in", None, False)


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


def test_deleted_rows_in_a_damaged_checkpoint_are_refused(tmp_path):
    deleted = packed(pl.Series([True, False, True, False, False]).to_numpy())
    assert unpacked(deleted, 5, "f").tolist() == [True, False, True, False, False]
    assert unpacked(deleted, 500, "f").tolist()[:5] == [True, False, True, False, False]
    bomb = zlib.compress(bytes(2**24))
    for damaged, rows in ((b"xx", 5), (deleted, 0), (bomb, 8 * 2**24 - 8)):
        with pytest.raises(StorageError, match="f: the checkpoint is damaged where it has the deleted rows"):
            unpacked(damaged, rows, "f")
    assert not unpacked(bomb, 8 * 2**24, "f").any()


WRONG: dict[str, list[Any]] = {
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
    found: list[int] = []
    with suppress(ConfigError, DataError, SchemaError, StorageError):
        found = [row["n"] for row in read(source, forged)]
    assert found in ([], [1, 2])
