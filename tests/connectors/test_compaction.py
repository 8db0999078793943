"""Compaction of small files: which, what is in the table afterwards, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet
import pytest
from compaction_world import FEW, Driver, before_the_commit, kind_of, live, new_sink, on_disk, partitioned
from connector_worlds import batch, written
from deltalake import DeltaTable, write_deltalake
from deltalake.transaction import AddAction, RemoveAction
from hypothesis import given
from hypothesis import strategies as st
from keyed_tables import rows_of, users
from table_worlds import WORLDS, DeltaWorld, IcebergWorld, Job, TableWorld

from committers import committer_of
from midstream.connectors.common import compaction
from midstream.connectors.common.compaction import LiveFile, files_to_compact
from midstream.connectors.delta import delta_compaction
from midstream.connectors.iceberg import iceberg_sink
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import ConfigError, SchemaError, StorageError
from midstream.engine.operators.sink_api import CommittedOutput
from permissions import unprivileged

OUTPUT = CommittedOutput("out", frozenset(["job-a"]))


@pytest.fixture(autouse=True)
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "FILES_MIN", FEW)
    monkeypatch.setattr(iceberg_sink, "_PAUSE_S", 0.0)


@pytest.fixture(params=sorted(WORLDS))
def world(request: pytest.FixtureRequest, tmp_path: Path) -> TableWorld:
    return WORLDS[request.param](tmp_path)


# ---- which files -------------------------------------------------------------


def file(name: str, size: int, partition: str = "", order: int = 0) -> LiveFile:
    return LiveFile(name, size, (partition,), (order, name))


def test_files_of_one_partition_and_of_like_size_are_compacted_the_oldest_first() -> None:
    def chosen(*files: LiveFile) -> list[list[str]]:
        return [[each.path for each in group] for group in files_to_compact(files, 1000)]

    few = [file(str(n), 300, order=9 - n) for n in range(FEW)]
    assert chosen() == chosen(*few[1:]) == []
    assert chosen(*few) == [["3", "2", "1"]], "three have the target size"
    assert chosen(*few[1:], file("large", 500), file("other", 300, "p"), file("tiny", 1)) == []
    tiny, tiny_others = ([file(f"{p}{n}", n + 1, p, n) for n in range(FEW + 1)] for p in ("", "p"))
    assert chosen(*few, *tiny) == [[each.path for each in tiny]], "one group of a partition, where there are most"
    of_both = [[each.path for each in tiny_others], ["3", "2", "1"]]
    assert chosen(*few, *tiny_others) == of_both
    assert chosen(*few, *tiny_others, *(file(f"q{n}", 300, "q") for n in range(FEW))) == of_both, (
        "not more than one file"
    )


@given(st.lists(st.integers(1, 400), min_size=100, max_size=400))
def test_files_of_any_sizes_become_few_and_no_row_is_written_again_often(sizes: list[int]) -> None:
    target, now, rewritten = 1000, list[LiveFile](), 0
    for order, size in enumerate(sizes):
        now.append(file(f"{order}", size, order=order))
        while groups := files_to_compact(now, target):
            [chosen] = groups
            assert len(chosen) > 1
            together = sum(each.size for each in chosen)
            assert together <= target
            rewritten += together
            now = [each for each in now if each not in chosen]
            now.append(file(f"{order}+", together, order=order))
        small = [each for each in now if 2 * each.size < target]
        assert len(small) < 3 * FEW
    assert sum(each.size for each in now) == sum(sizes)
    assert rewritten <= 3 * FEW * sum(sizes)


# ---- what is in the table ----------------------------------------------------


def test_small_files_become_one_with_the_same_rows_and_their_bounds(world: TableWorld) -> None:
    driver = Driver(new_sink(world))
    driver.commit_numbers(3, 1, 2)
    assert driver.compact() is None
    driver.commit_numbers(7)
    before = world.version()
    done = driver.compact()
    assert done is not None
    assert done.text().startswith("compacted 4 files into 1 of ")
    assert world.version() != before
    assert live(world) == on_disk(world)
    assert len(live(world)) == 1
    assert world.numbers() == [1, 2, 3, 7]
    if isinstance(world, IcebergWorld):
        [found] = world.table.inspect.files().to_pylist()
        assert (found["readable_metrics"]["n"]["lower_bound"], found["readable_metrics"]["n"]["upper_bound"]) == (1, 7)
        newest = world.table.current_snapshot()
        assert newest is not None
        assert newest.summary is not None
        totals = newest.summary.additional_properties
        assert (totals["total-records"], totals["total-data-files"]) == ("4", "1")
        assert pl.scan_iceberg(world.table).collect()["n"].sum() == 13
    else:
        actions = pa.table(DeltaTable(world.path / "t").get_add_actions(flatten=True)).to_pylist()
        assert [(each["min.n"], each["max.n"], each["num_records"]) for each in actions] == [(1, 7, 4)]
        assert DeltaTable(world.path / "t").to_pyarrow_table().num_rows == 4
    assert driver.compact() is None
    driver.commit_numbers(8)
    assert world.numbers() == [1, 2, 3, 7, 8]


def test_files_of_many_partitions_are_compacted_in_one_commit(world: TableWorld) -> None:
    driver, rows = partitioned(world)
    done = driver.compact()
    assert done is not None
    assert (done.old, done.new) == (3 * FEW, 3)
    assert driver.compact() is None
    assert len(live(world)) == 3
    assert rows() == [(n, p) for n in range(FEW) for p in range(3)]


def test_partitions_that_others_have_changed_meanwhile_are_left_out(world: TableWorld) -> None:
    driver, rows = partitioned(world)

    def delete() -> None:
        if isinstance(world, IcebergWorld):
            world.table.delete("p = 1")
        else:
            DeltaTable(world.path / "t").delete("p = 1")

    before_the_commit(driver, delete)
    done = driver.compact()
    assert done is not None
    assert (done.old, done.new) == (2 * FEW, 2)
    assert live(world) == on_disk(world)
    assert rows() == [(n, p) for n in range(FEW) for p in (0, 2)]


def test_it_begins_by_itself_after_some_commits_and_with_the_first_of_a_driver(world: TableWorld) -> None:
    sink = new_sink(world)
    committer = committer_of(sink, "job-a")
    for n in range(1, 6):
        committer.commit(n, written(sink, batch(n), n, attempt=n))
        committer._compactor.wait()
    assert len(live(world)) == 1
    later = committer_of(sink, "job-a")
    for n in range(6, 9):
        committer.commit(n, written(sink, batch(n), n, attempt=n))
    committer._compactor.wait()
    assert len(live(world)) == 4
    later.commit(9, written(sink, batch(9), 9, attempt=9))
    later._compactor.wait()
    assert len(live(world)) == 1
    assert world.numbers() == list(range(1, 10))
    committer.close()
    later.close()


def test_files_that_lack_a_column_and_those_of_others_get_all_columns(world: TableWorld) -> None:
    columns = schema_of([("n", pa.int64()), ("x", pa.float64()), ("p", pa.large_string())])
    world.create(columns, ["p"])
    driver = Driver(new_sink(world, columns))
    for n in range(3):
        driver.commit(rows_of(columns, (n, float("nan"), "a b%é/x=~"), (10 + n, float(n), None)))
    world.add_column("late")
    world.add(pa.table({"n": [99], "x": [9.5], "p": ["a b%é/x=~"], "late": [5]}))
    world.add(pa.table({"n": [98], "x": [8.5], "p": pa.array([None], pa.string()), "late": [6]}))
    driver = Driver(new_sink(world, columns, restoring=True), first=4)

    def rows() -> list[str]:
        if isinstance(world, IcebergWorld):
            return sorted(map(repr, world.table.scan().to_arrow().to_pylist()))
        return sorted(map(repr, pl.read_delta(str(world.path / "t")).rows()))

    before = rows()
    assert len(before) == 8
    assert driver.compact() is not None
    assert rows() == before
    assert len(live(world)) == 2
    assert driver.compact() is None


def test_nested_columns_of_all_types_stay_as_they_are(world: TableWorld) -> None:
    inner = pa.struct([("a", pa.int32()), ("b", pa.large_list(pa.large_string()))])
    columns = schema_of(
        [("n", pa.int64()), ("s", inner), ("raw", pa.large_binary()), ("d", pa.decimal128(20, 3)), ("at", pa.timestamp("us", "UTC"))]
        + [("day", pa.date32()), ("ok", pa.bool_()), ("f", pa.float32())]
    )  # fmt: skip
    driver = Driver(new_sink(world, columns))
    values: list[list[Any]] = [
        [1, {"a": None, "b": ["x", None]}, b"\0\xff", None, 0, -1, None, float("-inf")],
        [2, None, None, 7, -1, None, True, None],
        [3, {"a": 5, "b": None}, b"", -3, None, 19000, False, float("nan")],
        [4, {"a": 5, "b": []}, None, None, 2**45, 0, True, 0.5],
    ]
    for row in values:
        driver.commit(pa.RecordBatch.from_arrays([pa.array([each], kind) for each, kind in zip(row, columns.types, strict=True)], schema=columns))  # fmt: skip

    def found() -> list[str]:
        table = world.table.scan().to_arrow() if isinstance(world, IcebergWorld) else pl.read_delta(str(world.path / "t")).to_arrow()  # fmt: skip
        return sorted(map(repr, table.to_pylist()))

    before = found()
    assert driver.compact() is not None
    assert found() == before


def test_rows_by_key_are_merged_into_compacted_files(world: TableWorld) -> None:
    columns, options = kind_of(True)
    driver = Driver(new_sink(world, columns, **options))
    for n in range(FEW + 1):
        driver.commit(users((n, f"name {n}", "insert")))
    assert driver.compact() is not None
    driver.commit(users((1, "new", "update"), (2, None, "delete")))
    found = pl.scan_iceberg(world.table).collect() if isinstance(world, IcebergWorld) else pl.read_delta(str(world.path / "t"))  # fmt: skip
    assert sorted(found.rows()) == [(0, "name 0"), (1, "new"), (3, "name 3"), (4, "name 4")]


def test_to_readers_of_what_is_new_there_is_nothing_in_it(world: TableWorld) -> None:
    driver = Driver(new_sink(world))
    driver.commit_numbers(1, 2)
    jobs = [Job(world.source(watch=True)), Job(world.source(watch=True, start="latest"))]
    changes = Job(world.source(watch=True, changes=True)) if isinstance(world, DeltaWorld) else None
    assert [job.numbers() for job in jobs] == [[1, 2], []]
    split = None if changes is None else changes.splits()[0]
    driver.commit_numbers(3, 4)
    assert driver.compact() is not None
    assert [job.numbers() for job in jobs] == [[3, 4], [3, 4]]
    assert [job.splits() for job in jobs] == [(), ()]
    driver.commit_numbers(5)
    assert [job.numbers() for job in jobs] == [[5], [5]]
    if changes is not None and split is not None:
        reader = changes.source.open_split(split)
        read: list[tuple[int, str]] = []
        while (found := reader.read(100)) is not None and found[0].num_rows:
            read += [(row["n"], row["_op"]) for row in found[0].to_pylist()]
        assert read == [(n, "insert") for n in range(1, 6)]


# ---- bad input ---------------------------------------------------------------


def test_files_that_are_always_small_are_refused(world: TableWorld) -> None:
    with pytest.raises(
        ConfigError, match="auto_compact makes files of up to roll_size, which is 1024 bytes; make it at least 1 MiB"
    ):
        new_sink(world, roll_size="1 KiB")


def test_a_table_with_a_column_that_would_not_stay_as_it_is_is_refused(world: TableWorld) -> None:
    world.create(pa.schema([pa.field("n", pa.int64()), pa.field("m", pa.map_(pa.string(), pa.int64()))]))
    new_sink(world, auto_compact=False)
    with pytest.raises((ConfigError, SchemaError), match=r"column 'm' of the table .*, and would not stay as it is"):
        new_sink(world)


def test_a_driver_that_cannot_write_files_is_refused(world: TableWorld) -> None:
    world.create()
    new_sink(world).committer  # noqa: B018 - it can
    directory = world.path / ("warehouse/lake/t/data" if isinstance(world, IcebergWorld) else "t")
    for above in (world.path, *world.path.rglob("*")):
        above.chmod(0o777 if above.is_dir() else 0o666)
    for above in world.path.parents:
        if above.stat().st_uid == os.geteuid() and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o011)
    directory.chmod(0o555)
    with unprivileged(), pytest.raises(StorageError, match="auto_compact has the driver write files, and it cannot"):
        new_sink(world)
    directory.chmod(0o777)


def test_a_partition_column_whose_folder_deltalake_may_name_in_another_way_is_refused(tmp_path: Path) -> None:
    columns = schema_of([("n", pa.int64()), ("é p", pa.large_string())])
    with pytest.raises(ConfigError, match="auto_compact cannot name files in folders of the partition column 'é p'"):
        new_sink(DeltaWorld(tmp_path), columns, partition_by=["é p"])


def test_paths_that_deltalake_would_write_in_another_way_are_left_alone(tmp_path: Path) -> None:
    """It would not remove such a file, and its rows would be there twice."""
    table = tmp_path / "t"
    write_deltalake(table, pa.table({"n": [1]}))
    opened = DeltaTable(table)
    for character in map(chr, [*range(1, 0x80), 0xE9, 0x20AC]):
        name = f"a{character}b"
        actions: list[Any] = [AddAction(name, 1, {}, 1, False, "{}"), RemoveAction(f"{name}2", False, 1, 1, {})]
        opened.create_write_transaction(actions, "append", opened.schema(), [])
        opened.update_incremental()
        log = (table / f"_delta_log/{opened.version():020d}.json").read_text().splitlines()
        found = [json.loads(line) for line in log]
        [added] = [each["add"]["path"] for each in found if "add" in each]
        [removed] = [each["remove"]["path"] for each in found if "remove" in each]
        assert removed == f"{added}2"
        if delta_compaction._SURELY_NAMED.fullmatch(added):
            assert character == "%" or added == name
    for name in ("p=a b", "p=a%20b", "p=a+b", "/p", "p=é"):
        assert not delta_compaction._SURELY_NAMED.fullmatch(name) or name.startswith("/")


def test_compacted_files_are_in_the_folder_of_their_partition_whatever_other_writers_call_it(tmp_path: Path) -> None:
    """Polars takes the values of partitions from the folders. To Delta, empty text is null."""
    world, columns = DeltaWorld(tmp_path), schema_of([("n", pa.int64()), ("p", pa.large_string())])
    world.create(columns, ["p"])
    world.add(pa.table({"n": [0], "p": [""]}))
    driver = Driver(new_sink(world, columns, append=True))
    for n in range(1, FEW):
        driver.commit(rows_of(columns, (n, None)))
    assert driver.compact() is not None
    assert len(live(world)) == 1
    assert sorted(pl.read_delta(str(tmp_path / "t")).rows()) == [(n, None) for n in range(FEW)]


def test_files_under_such_paths_stay(tmp_path: Path) -> None:
    world = DeltaWorld(tmp_path)
    world.create()
    for n in range(1, 6):
        world.append(n)
    for version in range(1, 6):
        log = tmp_path / f"t/_delta_log/{version:020d}.json"
        log.write_text(log.read_text().replace("part-", "part%2D"))
    driver = Driver(new_sink(world, append=True))
    assert driver.compact() is None
    driver.commit_numbers(*range(6, 10))
    assert driver.compact() is not None
    assert world.numbers() == list(range(1, 10))
    assert len(live(world)) == 6
