"""Parquet files as a source, and what all formats have in common: finding files, watching, refusing."""

from __future__ import annotations

import json
import os
import pickle
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from connector_worlds import all_splits, read_all, read_split, values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from effort import examples
from midstream import Environment, testing
from midstream.connectors.common import filesystem as connectors_filesystem
from midstream.connectors.common.filesystem import find_files
from midstream.connectors.files import directory_watch
from midstream.connectors.files import file_source as files
from midstream.connectors.files.file_source import FileSource
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import ConfigError, DataError, JobError, SchemaError, StorageError
from midstream.engine.operators.source_api import DiscoveryContext, Split
from permissions import unprivileged

CONTEXT = DiscoveryContext(uid="src", parallelism=2, storage=None)


def parquet_file(path: Path, start: int, stop: int, row_group_size: int = 1000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = list(range(start, stop))
    table = pa.table({"n": pa.array(numbers, pa.int64()), "who": pa.array([f"w{n}" for n in numbers], pa.string())})
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(0, 60),
    group=st.integers(1, 20),
    split_bytes=st.sampled_from([1, 300, 4 * 2**20]),
    rows_max=st.integers(1, 25),
    data=st.data(),
)
def test_from_every_offset_exactly_the_rest_is_read(tmp_path, monkeypatch, rows, group, split_bytes, rows_max, data):
    monkeypatch.setattr(files, "_SPLIT_BYTES_MIN", split_bytes)
    source = pickle.loads(pickle.dumps(FileSource(parquet_file(tmp_path / "a.parquet", 0, rows, group))))
    splits = all_splits(source)
    assert values(read_all(source, rows_max)) == list(range(rows))
    if not splits:
        assert rows == 0
        return
    split = data.draw(st.sampled_from(splits))
    expected, offsets = read_split(source, split, rows_max=1)
    for done, offset in enumerate(offsets, 1):
        assert read_split(source, msgspec.structs.replace(split, offset=offset), rows_max)[0] == expected[done:]


def test_row_groups_that_are_done_are_not_read_again(tmp_path):
    path = parquet_file(tmp_path / "a.parquet", 0, 3000)
    source = FileSource(path)
    (split,) = all_splits(source)
    first_group = pq.ParquetFile(path).metadata.row_group(0).column(0)
    with open(path, "r+b") as file:
        file.seek(first_group.data_page_offset)
        file.write(b"\xff" * (first_group.total_compressed_size - 8))
    times = os.stat(path)
    part = msgspec.structs.replace(
        msgspec.msgpack.decode(split.payload, type=files.FileSplit), modified_ns=times.st_mtime_ns
    )
    split = msgspec.structs.replace(split, payload=msgspec.msgpack.encode(part))
    rows, _ = read_split(source, msgspec.structs.replace(split, offset=1500))
    assert values(rows) == list(range(1500, 3000))
    with pytest.raises(StorageError, match=r"a\.parquet: cannot be read as parquet; it is incomplete, damaged"):
        read_split(source, split)


# ---- which files ----


def test_paths_lists_directories_and_globs_find_their_files(tmp_path):
    for name, start in (("a/1.parquet", 0), ("a/b/2.parquet", 10), ("c/3.parquet", 20)):
        parquet_file(tmp_path / name, start, start + 2)
    assert values(read_all(FileSource(tmp_path / "a" / "1.parquet"))) == [0, 1]
    assert values(read_all(FileSource([str(tmp_path / "c"), tmp_path / "a" / "1.parquet"]))) == [20, 21, 0, 1]
    assert values(read_all(FileSource(tmp_path))) == [0, 1, 10, 11, 20, 21]
    assert values(read_all(FileSource(f"{tmp_path}/*/*.parquet"))) == [0, 1, 20, 21]
    assert values(read_all(FileSource(f"{tmp_path}/**/[12].parquet"))) == [0, 1, 10, 11]
    assert values(read_all(FileSource(f"file://{tmp_path}/c"))) == [20, 21]
    inner = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    assert values(read_all(FileSource("a", filesystem=inner))) == [0, 1, 10, 11]


@pytest.mark.filterwarnings("error")
def test_a_set_of_characters_may_have_brackets_and_signs(tmp_path):
    for number, name in enumerate(("[1]", "&&", "||", "a")):
        parquet_file(tmp_path / name / "1.parquet", number, number + 1)
    assert values(read_all(FileSource(f"{tmp_path}/[[]1]/*.parquet"))) == [0]
    assert sorted(values(read_all(FileSource(f"{tmp_path}/[&|~][&&||]/*.parquet")))) == [1, 2]
    assert values(read_all(FileSource(f"{tmp_path}/[!&|[]/*.parquet"))) == [3]


def test_files_named_twice_are_read_once(tmp_path):
    path = parquet_file(tmp_path / "1.parquet", 0, 2)
    assert values(read_all(FileSource([path, tmp_path, path]))) == [0, 1]


def test_hidden_and_unfinished_names_are_left_out_below_a_directory(tmp_path):
    parquet_file(tmp_path / "1.parquet", 0, 2)
    for name in (
        ".x.parquet",
        "_x.parquet",
        "x.parquet.tmp",
        "x.part",
        ".hidden/x.parquet",
        "_temporary/0/x.parquet",
        "_SUCCESS",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
    assert values(read_all(FileSource(tmp_path))) == [0, 1]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nothing.parquet", "there is no file {}/nothing.parquet"),
        ("empty", "there is no file to read in {}/empty"),
        ("*.parquet", "no file matches {}/[*].parquet"),
        ("nosuch/*.csv", "no file matches {}/nosuch/[*].csv"),
        ("notes.txt", "the name of {}/notes.txt does not show its format; give format="),
        ("mixed", "2.csv is csv, but files before it are parquet"),
    ],
)
def test_what_is_not_there_or_not_known_is_named(tmp_path, path, says):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    parquet_file(tmp_path / "mixed" / "1.parquet", 0, 1)
    (tmp_path / "mixed" / "2.csv").write_text("n\n1\n")
    with pytest.raises(ConfigError, match=says.format(tmp_path)):
        FileSource(tmp_path / path)


def test_bad_settings_are_named(tmp_path):
    path = parquet_file(tmp_path / "a.parquet", 0, 1)
    with pytest.raises(ConfigError, match="format 'orc' is not one of"):
        FileSource(path, format="orc")  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(ConfigError, match="empty list of paths"):
        FileSource([])
    with pytest.raises(ConfigError, match="'' is not a path"):
        FileSource("")
    with pytest.raises(ConfigError, match="interval: 0 is not an interval"):
        FileSource(path, interval=0)
    with pytest.raises(ConfigError, match="cannot use 'ftp://host/x'"):
        FileSource("ftp://host/x")
    with pytest.raises(ConfigError, match="rows_per_s 0 is not a positive number"):
        FileSource(path, rows_per_s=0)
    with pytest.raises(SchemaError, match="has no columns"):
        FileSource(path, schema=pa.schema([]))


# ---- what is wrong with them ----


def test_damaged_truncated_and_foreign_files_are_named(tmp_path):
    path = parquet_file(tmp_path / "a.parquet", 0, 1000)
    whole = path.read_bytes()
    for data in (
        whole[: len(whole) // 2],
        whole[:-4],
        b"",
        b"PAR1",
        b"n\n1\n2\n",
        whole[:-50] + b"\xff" * 42 + whole[-8:],
    ):
        path.write_bytes(data)
        with pytest.raises(StorageError, match=rf"{path}: cannot be read as parquet; it is incomplete, damaged"):
            FileSource(path)


@pytest.mark.parametrize("split_bytes", [1, 4 * 2**20])
def test_a_bad_file_among_good_ones_is_found_on_the_driver_if_it_is_large_else_when_it_is_opened(
    tmp_path, monkeypatch, split_bytes
):
    monkeypatch.setattr(files, "_SPLIT_BYTES_MIN", split_bytes)
    parquet_file(tmp_path / "1.parquet", 0, 2)
    (tmp_path / "2.parquet").write_bytes(b"PAR1 half")
    source = FileSource(tmp_path)
    with pytest.raises(StorageError, match=r"2\.parquet: cannot be read as parquet"):
        if split_bytes == 1:
            source.discover(None, CONTEXT)
        else:
            read_split(source, all_splits(source)[1])


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"n": [1]}, r"2\.parquet: column 'who' is missing; it has n"),
        ({"n": ["x"], "who": ["y"]}, r"2\.parquet: column 'n' is large_string, in other files as int64"),
        ({"n": [1], "who": ["y"], "z": [0]}, r"2\.parquet: column 'z' is not in other files; declare schema="),
    ],
)
def test_a_file_that_differs_from_the_first_is_named_with_its_column(tmp_path, columns, says):
    parquet_file(tmp_path / "1.parquet", 0, 2)
    pq.write_table(pa.table(columns), tmp_path / "2.parquet")
    with pytest.raises(SchemaError, match=says):
        read_all(FileSource(tmp_path))


def test_a_declared_schema_picks_columns_and_widens_them(tmp_path):
    pq.write_table(pa.table({"n": pa.array([1], pa.int32()), "x": [0.5]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"y": ["q"], "n": pa.array([2], pa.int64())}), tmp_path / "2.parquet")
    assert read_all(FileSource(tmp_path, schema=pa.schema([("n", pa.int64())]))) == [{"n": 1}, {"n": 2}]
    with pytest.raises(SchemaError, match="column 'n' is int32, declared as large_string"):
        read_all(FileSource(tmp_path / "1.parquet", schema=pa.schema([("n", pa.string())])))


def test_a_value_too_large_for_the_declared_type_is_an_error_and_not_wrapped(tmp_path):
    pq.write_table(pa.table({"n": pa.array([1], pa.int32())}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"n": pa.array([2**40], pa.int64())}), tmp_path / "1.parquet")
    with pytest.raises(
        SchemaError, match=r"1\.parquet: column 'n' is int64, in other files as int32: .*; declare schema="
    ):
        read_all(FileSource(tmp_path))
    with pytest.raises(SchemaError, match="column 'n' is int64, declared as int32"):
        read_all(FileSource(tmp_path, schema=pa.schema([("n", pa.int32())])))


def test_a_file_that_changes_or_goes_after_it_was_found_is_named(tmp_path):
    path = parquet_file(tmp_path / "1.parquet", 0, 2)
    source = FileSource(path)
    (split,) = all_splits(source)
    parquet_file(path, 0, 3)
    with pytest.raises(StorageError, match=r"1\.parquet: has changed since it was found"):
        source.open_split(split)
    path.unlink()
    with pytest.raises(StorageError, match=r"1\.parquet: the file has disappeared since it was found"):
        source.open_split(split)


def test_a_file_that_is_gone_on_restore_is_named_with_the_position_and_what_is_left(tmp_path):
    path = parquet_file(tmp_path / "1.parquet", 0, 5)
    source = FileSource(tmp_path)
    (split,) = all_splits(source)
    parquet_file(tmp_path / "2.parquet", 5, 7)
    path.unlink()
    restored = msgspec.structs.replace(split, offset=3)
    with pytest.raises(StorageError, match=r"to resume at offset 3 .* 1 files in .*, 2\.parquet to 2\.parquet"):
        source.open_split(restored)


def test_a_file_or_directory_that_may_not_be_read_is_named(open_path):
    path = parquet_file(open_path / "in" / "1.parquet", 0, 2)
    path.chmod(0)
    with unprivileged(), pytest.raises(StorageError, match=r"in/1\.parquet: cannot be read: permission denied"):
        FileSource(path)
    path.parent.chmod(0o111 if os.getuid() else 0)
    with unprivileged(), pytest.raises(StorageError, match=r"in: cannot be listed"):
        FileSource(path.parent)
    path.parent.chmod(0o755)


def test_what_a_file_lacks_is_null_if_it_is_declared_so(tmp_path):
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"b": ["x"], "z": [0], "a": [3]}), tmp_path / "2.parquet")
    schema = schema_of([("b", pa.string()), ("a", pa.int64())])
    rows = [{"b": None, "a": 1}, {"b": None, "a": 2}, {"b": "x", "a": 3}]
    assert read_all(FileSource(tmp_path, schema=schema)) == rows
    must = pa.schema([pa.field("b", pa.string(), nullable=False), *schema_of([("a", pa.int64())])])
    with pytest.raises(SchemaError, match=r"1\.parquet: column 'b' is missing; it has a"):
        read_all(FileSource(tmp_path, schema=must))
    pq.write_table(pa.table({"b": ["y", "y", None], "a": [4, 5, 6]}), tmp_path / "1.parquet", row_group_size=2)
    with pytest.raises(SchemaError, match=r"1\.parquet, row 3: column 'b' has no value"):
        read_all(FileSource(tmp_path, schema=must))
    with pytest.raises(SchemaError, match=r"declared column 'c' is missing from .*1\.parquet and .*2\.parquet"):
        FileSource(tmp_path, schema=pa.schema([("a", pa.int64()), ("c", pa.int64())]))


def test_floats_that_a_declared_type_does_not_hold_are_refused(tmp_path):
    pq.write_table(pa.table({"x": [0.5, 0.1]}), tmp_path / "1.parquet")
    with pytest.raises(SchemaError, match=r"double does not fit float: 0\.1 would become another value"):
        read_all(FileSource(tmp_path, schema=pa.schema([("x", pa.float32())])))
    pq.write_table(pa.table({"x": [0.5, 0.25]}), tmp_path / "1.parquet")
    assert values(read_all(FileSource(tmp_path, schema=pa.schema([("x", pa.float32())]))), "x") == [0.5, 0.25]


def test_a_file_that_is_written_again_while_it_is_read_is_refused_before_its_last_rows(tmp_path):
    path = parquet_file(tmp_path / "1.parquet", 0, 300_000, 150_000)
    source = FileSource(path)
    (split,) = all_splits(source)
    reader = source.open_split(split)
    part = reader.read(1000)
    assert part is not None
    seen = part[0].num_rows
    os.utime(path, (1, 1))
    with pytest.raises(StorageError, match=r"1\.parquet: has changed since it was found"):
        while (got := reader.read(100_000)) is not None:
            seen += got[0].num_rows
    assert seen < 300_000
    reader.close()


def test_splits_of_small_files_need_no_look_into_them(tmp_path, monkeypatch):
    for n in range(3):
        parquet_file(tmp_path / f"{n}.parquet", n, n + 1)
    source = FileSource(tmp_path)
    monkeypatch.setattr(files, "parquet_row_groups", None)
    assert len(all_splits(source)) == 3


# ---- event times ----


def timed_file(path: Path, *groups: list[int | None], unit: Any = "us") -> None:
    kind = pa.timestamp(unit)
    with pq.ParquetWriter(path, pa.schema([("n", pa.int64()), ("at", kind)])) as file:
        for times in groups:
            array = pa.array(times, pa.int64()).cast(kind)
            file.write_table(pa.table({"n": pa.array(range(len(times)), pa.int64()), "at": array}))


def times_of(source: FileSource) -> list[tuple[str, int | None]]:
    found = source.discover(None, replace(CONTEXT, event_time="at")).splits
    return [(Path(split.id.split(":", 2)[2]).stem, split.min_time_us) for split in found]


def test_files_are_read_in_the_order_of_their_earliest_event_times(tmp_path):
    timed_file(tmp_path / "a.parquet", [50, 60], [40, 90])
    timed_file(tmp_path / "b.parquet", [-7], [30, None])  # before 1970; what has no time fails when it is read
    timed_file(tmp_path / "c.parquet", [5], [None])
    timed_file(tmp_path / "d.parquet", [])
    timed_file(tmp_path / "e.parquet", [], [8])
    source = FileSource(tmp_path)
    assert times_of(source) == [("c", None), ("d", None), ("b", -7), ("e", 8), ("a", 40)]
    ids = [split.id for split in source.discover(None, CONTEXT).splits]
    assert ids == sorted(ids), "no column is the event time"
    assert {split.id for split in source.discover(None, replace(CONTEXT, event_time="at")).splits} == set(ids)


def test_parts_of_a_file_have_their_own_times(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_SPLIT_BYTES_MIN", 1)
    timed_file(tmp_path / "a.parquet", [50, 60], [40, 90], [], [70])
    timed_file(tmp_path / "b.parquet", [45])
    assert times_of(FileSource(tmp_path)) == [("a", 50), ("a", 40), ("a", 70), ("b", 45)]


@pytest.mark.parametrize(("unit", "time", "time_us"), [("ms", -3, -3000), ("ns", 2999, 2), ("ns", -1, -1)])
def test_times_in_other_units_are_microseconds_rounded_down(tmp_path, unit, time, time_us):
    timed_file(tmp_path / "a.parquet", [time], unit=unit)
    assert times_of(FileSource(tmp_path)) == [("a", time_us)]


def test_times_without_statistics_or_of_another_kind_are_not_known(tmp_path):
    kind = pa.timestamp("us")
    pq.write_table(pa.table({"at": pa.array([1], kind)}), tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    pq.write_table(pa.table({"at": pa.array([1], kind)}), tmp_path / "b.parquet", write_statistics=False)
    pq.write_table(pa.table({"at": pa.array([2**62], kind)}), tmp_path / "c.parquet")  # beyond the year 9999
    schema = pa.schema([("at", kind), ("n", pa.int64())])
    pq.write_table(pa.table({"n": pa.array([1], pa.int64())}), tmp_path / "d.parquet")  # lacks the column
    assert times_of(FileSource(tmp_path, schema=schema)) == [(name, None) for name in "abcd"]
    pq.write_table(pa.table({"at.x": pa.array([1], kind), "at": pa.array([{"x": 5}])}), tmp_path / "e.parquet")
    source = FileSource(tmp_path / "e.parquet")
    (split,) = source.discover(None, replace(CONTEXT, event_time="at.x")).splits
    assert split.min_time_us is None, "two columns have this path"


def test_of_very_many_files_the_times_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_TIMED_FILES_MAX", 1)
    timed_file(tmp_path / "a.parquet", [50])
    assert times_of(FileSource(tmp_path)) == [("a", 50)]
    timed_file(tmp_path / "b.parquet", [40])
    assert times_of(FileSource(tmp_path)) == [("a", None), ("b", None)]


# ---- watching ----


@pytest.fixture(autouse=True)
def files_rest_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_watch, "REST_S", 0.0)


def found(source: FileSource, position: bytes | None) -> tuple[list[int], bytes]:
    discovery = source.discover(position, CONTEXT)
    assert not discovery.exhausted
    return sorted(row["n"] for split in discovery.splits for row in read_split(source, split)[0]), discovery.position


def test_a_watched_directory_gives_each_file_once_also_late_ones_with_older_names_and_times(tmp_path):
    parquet_file(tmp_path / "5.parquet", 50, 52)
    source = FileSource(tmp_path, watch=True)
    assert not source.bounded
    rows, first = found(source, None)
    assert rows == [50, 51]
    assert found(source, first) == ([], first)
    late = parquet_file(tmp_path / ".late", 10, 12)
    os.utime(late, (0, 0))
    late.rename(tmp_path / "1.parquet")
    parquet_file(tmp_path / "9.parquet", 90, 91)
    rows, second = found(source, first)
    assert rows == [10, 11, 90]
    assert found(source, second) == ([], second)
    assert found(source, first) == (rows, second), "the same again after a restore"


def test_files_found_together_are_read_in_order_of_their_times(tmp_path):
    for at, name in enumerate(["c", "a", "b"], 1):
        os.utime(parquet_file(tmp_path / f"{name}.parquet", at, at + 1), (at, at))
    source = FileSource(tmp_path, watch=True)
    splits = source.discover(None, CONTEXT).splits
    assert [row["n"] for split in splits for row in read_split(source, split)[0]] == [1, 2, 3]
    assert sorted(splits, key=lambda split: split.id) == list(splits)


def test_removed_files_are_forgotten_and_the_position_stays_small(tmp_path, monkeypatch):
    monkeypatch.setattr(directory_watch, "GONE_S", 0)
    parquet_file(tmp_path / "keep.parquet", 0, 1)
    source = FileSource(tmp_path, watch=True)
    position = None
    for round_ in range(20):
        path = parquet_file(tmp_path / f"{round_}.parquet", round_, round_ + 1)
        _, position = found(source, position)
        path.unlink()
    assert position is not None and len(position) < 100


def test_a_file_just_begun_is_left_until_there_is_something_in_it(tmp_path):
    parquet_file(tmp_path / "1.parquet", 0, 1)
    (tmp_path / "2.parquet").touch()
    source = FileSource(tmp_path, watch=True)
    rows, position = found(source, None)
    assert rows == [0]
    parquet_file(tmp_path / "2.parquet", 2, 3)
    assert found(source, position)[0] == [2]


def test_looks_that_take_long_are_less_frequent(tmp_path, monkeypatch):
    parquet_file(tmp_path / "1.parquet", 0, 1)
    source = FileSource(tmp_path, watch=True, interval="1 s")
    found(source, None)
    assert source.discovery_interval_s == 1
    times = iter([10.0, 12.0])
    monkeypatch.setattr(files.time, "thread_time", lambda: next(times))
    source.discover(None, CONTEXT)
    assert source.discovery_interval_s == 18


def test_an_empty_directory_can_be_watched_when_format_and_schema_are_given(tmp_path):
    with pytest.raises(ConfigError, match="is empty; give format="):
        FileSource(tmp_path, watch=True)
    with pytest.raises(ConfigError, match="is empty; give schema= to watch it"):
        FileSource(tmp_path, format="parquet", watch=True)
    with pytest.raises(ConfigError, match=r"the directory .*gone to watch does not exist; create it first"):
        FileSource(tmp_path / "gone", format="parquet", watch=True)
    source = FileSource(tmp_path, format="parquet", schema=pa.schema([("n", pa.int64())]), watch=True)
    rows, position = found(source, None)
    assert rows == []
    parquet_file(tmp_path / "1.parquet", 7, 8)
    assert found(source, position)[0] == [7]


def test_splits_are_plain_data(tmp_path):
    source = FileSource(parquet_file(tmp_path / "1.parquet", 0, 2))
    (split,) = all_splits(source)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(split), type=Split) == split
    assert msgspec.msgpack.decode(split.payload)[0] == str(tmp_path / "1.parquet")


def test_a_page_that_does_not_match_its_checksum_is_refused(tmp_path):
    path = tmp_path / "in.parquet"
    rows = pa.table({"n": list(range(10_000))})
    pq.write_table(rows, path, compression="none", use_dictionary=False, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[20_000] ^= 0x55
    path.write_bytes(data)
    with pytest.raises(StorageError, match=r"in\.parquet: .*CRC checksum"):
        read_all(FileSource(path))


@pytest.mark.parametrize("at", ["1500-01-01T00:00:00.123456", "1969-12-31T23:59:59.999999", "2024-06-01T00:00:00"])
def test_int96_timestamps_of_whole_microseconds_are_read(tmp_path, at):
    times = pa.array([datetime.fromisoformat(at), None], pa.timestamp("us"))
    pq.write_table(pa.table({"t": times, "n": [1, 2]}), tmp_path / "in.parquet", use_deprecated_int96_timestamps=True)
    assert values(read_all(FileSource(tmp_path / "in.parquet")), "t") == times.to_pylist()


@pytest.mark.parametrize("kind", ["struct", "list", "map", "list of structs"])
def test_int96_timestamps_inside_of_other_columns_are_checked_too(tmp_path, kind):
    """Spark writes INT96 by default, also within structs, lists and maps."""

    def column(ns: list[int | None]) -> pa.Array[Any]:
        times = pa.array(ns, pa.timestamp("ns"))
        if kind == "struct":
            return pa.StructArray.from_arrays([times, pa.array(ns)], ["t", "n"])
        if kind == "map":
            return pa.MapArray.from_arrays(pa.array([0, len(ns)]), pa.array(range(len(ns))), times)
        inner = times if kind == "list" else pa.StructArray.from_arrays([times], ["t"])
        return pa.ListArray.from_arrays([0, len(ns)], inner)

    whole = pa.table({"x": column([1_600_000_000_123_456_000, None])})
    pq.write_table(whole, tmp_path / "whole.parquet", use_deprecated_int96_timestamps=True)
    (first, *_) = read_all(FileSource(tmp_path / "whole.parquet"), 10)
    assert "123456" in str(first)
    cut = pa.table({"x": column([None, 1_600_000_000_123_456_789])})
    pq.write_table(cut, tmp_path / "cut.parquet", use_deprecated_int96_timestamps=True)
    with pytest.raises(SchemaError, match="column 'x' has the time 1600000000123456789 ns since 1970 as INT96"):
        read_all(FileSource(tmp_path / "cut.parquet"), 10)


def test_int96_timestamps_are_instants_where_a_zone_is_declared(tmp_path):
    """They cannot be marked as UTC, and Spark writes its timestamps so by default."""
    at = datetime(2024, 6, 1, 12, 30)
    naive, utc = pa.timestamp("us"), pa.timestamp("us", "UTC")
    columns = {
        "t": pa.array([at, None], naive),
        "s": pa.array([{"t": at, "n": 1}, None], pa.struct([("t", naive), ("n", pa.int64())])),
        "l": pa.array([[at], None], pa.list_(naive)),
        "m": pa.array([[("a", at)], None], pa.map_(pa.string(), naive)),
    }
    pq.write_table(pa.table(columns), tmp_path / "in.parquet", use_deprecated_int96_timestamps=True)
    schema = pa.schema(
        {
            "t": utc,
            "s": pa.struct([("t", utc), ("n", pa.int64()), ("new", pa.string())]),
            "l": pa.list_(utc),
            "m": pa.map_(pa.string(), utc),
        }
    )
    instant = at.replace(tzinfo=UTC)
    batches = read_all(FileSource(tmp_path / "in.parquet", schema=schema))
    assert values(batches, "t") == [instant, None]
    assert values(batches, "s") == [{"t": instant, "n": 1, "new": None}, None]
    assert values(batches, "l") == [[instant], None]
    assert values(batches, "m") == [[("a", instant)], None]
    assert values(read_all(FileSource(tmp_path / "in.parquet")), "t") == [at, None]
    pq.write_table(pa.table({"t": columns["t"]}), tmp_path / "64.parquet")
    with pytest.raises(SchemaError, match="state which zone is meant"):
        read_all(FileSource(tmp_path / "64.parquet", schema=pa.schema({"t": utc})))


def test_nanoseconds_of_int96_timestamps_are_not_cut_off(tmp_path):
    times = pa.array([1_700_000_000_123_456_000, 1_700_000_000_123_456_789], pa.timestamp("ns"))
    pq.write_table(pa.table({"t": times}), tmp_path / "in.parquet", use_deprecated_int96_timestamps=True)
    with pytest.raises(SchemaError, match=r"in\.parquet: column 't' has the time 1700000000123456789 ns since 1970"):
        read_all(FileSource(tmp_path / "in.parquet"))


def test_a_column_with_a_dot_beside_a_struct_of_that_path_is_read(tmp_path):
    columns = {"a.b": [1, 2], "a": [{"b": "x"}, {"b": "y"}]}
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    source = FileSource(tmp_path / "in.parquet", schema=pa.schema([("a.b", pa.int64())]))
    assert read_all(source) == [{"a.b": 1}, {"a.b": 2}]


def test_a_link_to_a_directory_above_is_refused(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    pq.write_table(pa.table({"n": [1]}), tmp_path / "in" / "deep" / "1.parquet")
    (tmp_path / "in" / ".old").symlink_to(tmp_path / "in")
    (tmp_path / "there").symlink_to(tmp_path / "in")
    assert len(find_files(pyarrow.fs.LocalFileSystem(), str(tmp_path / "there"))) == 1
    for target in (tmp_path / "in", tmp_path / "in" / "deep", tmp_path):
        (tmp_path / "in" / "deep" / "link").symlink_to(target)
        with pytest.raises(StorageError, match="link: links back to "):
            find_files(pyarrow.fs.LocalFileSystem(), str(tmp_path / "in"))
        (tmp_path / "in" / "deep" / "link").unlink()
    (tmp_path / "in" / "side").mkdir()
    (tmp_path / "in" / "side" / "link").symlink_to(tmp_path / "in" / "deep")
    with pytest.raises(StorageError, match=r"side/link/1.parquet: is the same file as .*/deep/1.parquet, by a link"):
        find_files(pyarrow.fs.LocalFileSystem(), str(tmp_path / "in"))
    (tmp_path / "in" / "deep" / "link").symlink_to(tmp_path / "in" / "side")
    with pytest.raises(StorageError, match="link: links back to "):
        find_files(pyarrow.fs.LocalFileSystem(), str(tmp_path / "in"))


@pytest.mark.parametrize("step", ["_listed", "_links_in"])
def test_a_directory_that_is_deleted_while_it_is_listed_has_no_files(tmp_path, monkeypatch, step):
    pq.write_table(pa.table({"n": [1]}), tmp_path / "1.parquet")
    (tmp_path / "old").mkdir()
    original = getattr(connectors_filesystem, step)

    def deleting(*arguments, **options):
        if str(tmp_path / "old") in arguments and (tmp_path / "old").exists():
            (tmp_path / "old").rmdir()
        return original(*arguments, **options)

    monkeypatch.setattr(connectors_filesystem, step, deleting)
    found = find_files(pyarrow.fs.LocalFileSystem(), str(tmp_path))
    assert [info.base_name for info in found] == ["1.parquet"]
    assert not (tmp_path / "old").exists()


def test_a_name_that_is_not_utf8_is_refused(tmp_path):
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.parquet")).write_bytes(b"")
    with pytest.raises(StorageError, match=r"\\xff.parquet'?: the name is not UTF-8"):
        find_files(pyarrow.fs.LocalFileSystem(), str(tmp_path))


def numbers(source: FileSource) -> list[int]:
    return sorted(values(read_all(source), "n"))


def test_a_link_to_what_is_read_anyway_is_refused(tmp_path):
    for day in ("01", "02"):
        (tmp_path / "in" / day).mkdir(parents=True)
        pq.write_table(pa.table({"n": [int(day)]}), tmp_path / "in" / day / "a.parquet")
    assert numbers(FileSource(tmp_path / "in")) == [1, 2]
    (tmp_path / "in" / "latest").symlink_to(tmp_path / "in" / "02")
    with pytest.raises(StorageError, match=r"latest/a.parquet: is the same file as .*02/a.parquet, by a link"):
        FileSource(tmp_path / "in")
    assert numbers(FileSource(tmp_path / "in" / "latest")) == [2]
    assert numbers(FileSource(f"{tmp_path}/in/l*/*.parquet")) == [2], "nothing is read twice"
    (tmp_path / "in" / "latest").rename(tmp_path / "in" / ".latest")
    assert numbers(FileSource(tmp_path / "in")) == [1, 2]
    (tmp_path / "in" / "b.parquet").symlink_to(tmp_path / "in" / "01" / "a.parquet")
    with pytest.raises(StorageError, match=r"b.parquet: is the same file as .*01/a.parquet, by a link"):
        FileSource(f"{tmp_path}/in/**/*.parquet")
    (tmp_path / "elsewhere").mkdir()
    pq.write_table(pa.table({"n": [3]}), tmp_path / "elsewhere" / "a.parquet")
    (tmp_path / "in" / "b.parquet").unlink()
    (tmp_path / "in" / "03").symlink_to(tmp_path / "elsewhere")
    assert numbers(FileSource(tmp_path / "in")) == [1, 2, 3]


@pytest.mark.parametrize("is_local", [True, False])
def test_the_files_of_a_delta_table_are_not_taken_for_its_rows(tmp_path, is_local):
    table = tmp_path / "in" / "tables" / "orders"
    (table / "_delta_log").mkdir(parents=True)
    (table / "_delta_log" / "0.json").write_text("{}")
    pq.write_table(pa.table({"n": [1]}), table / "old.parquet")
    pq.write_table(pa.table({"n": [2]}), tmp_path / "in" / "beside.parquet")
    root = f"{tmp_path}/in"
    given: dict[str, Any] = {}
    if not is_local:
        below = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
        root, given = "in", {"filesystem": below}
    for path in ("/tables/orders", "/tables/orders/*.parquet", ""):
        with pytest.raises(ConfigError, match=r"tables/orders: is a Delta table, whose directory also has files"):
            FileSource(root + path, **given)
    assert numbers(FileSource(f"{root}/*.parquet", **given)) == [2]
    assert numbers(FileSource(f"{root}/tables/orders/old.parquet", **given)) == [1]


def test_a_pattern_finds_names_with_line_ends(tmp_path):
    (tmp_path / "a\nb").mkdir()
    pq.write_table(pa.table({"n": [1]}), tmp_path / "a\nb" / "c.parquet")
    assert numbers(FileSource(f"{tmp_path}/**/*.parquet")) == [1]


POINT = pa.struct([("x", pa.int64()), ("y", pa.int64())])
OF_STRUCTS: list[tuple[pa.DataType, list[Any]]] = [
    (POINT, [{"x": 1, "y": 2}, None, {"x": None, "y": 3}]),
    (pa.list_(POINT), [[{"x": 1, "y": 2}, None], None, [], [{"x": 3, "y": None}]]),
    (pa.struct([("p", pa.list_(POINT)), ("n", pa.int64())]), [{"p": [{"x": 1, "y": 2}], "n": 3}, {"p": None, "n": 4}, None]),
]  # fmt: skip


def renamed(kind: pa.DataType, names: dict[str, str]) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([(names.get(f.name, f.name), renamed(f.type, names)) for f in kind if names.get(f.name) != ""])
    return pa.list_(renamed(kind.value_type, names)) if pa.types.is_list(kind) else kind


@pytest.mark.parametrize("names", [{}, {"y": ""}, {"y": "z"}, {"x": "", "y": "y"}, {"n": "m"}], ids=str)
@pytest.mark.parametrize(("kind", "rows"), OF_STRUCTS, ids=str)
def test_a_declared_struct_is_read_from_parquet_as_from_json_lines(tmp_path, kind, rows, names):
    """Its other fields are left out and those that it lacks are null, like columns."""
    table = pa.table({"v": pa.array(rows, kind)})
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    schema = pa.schema([("v", renamed(kind, names))])
    from_json, from_parquet = (
        read_all(FileSource(tmp_path / name, schema=schema)) for name in ("a.jsonl", "a.parquet")
    )
    assert from_parquet == from_json
    assert len(from_json) == len(rows)


def test_a_struct_with_none_of_the_declared_fields_or_without_a_schema_must_be_the_same(tmp_path):
    pq.write_table(pa.table({"v": pa.array([{"x": 1, "y": 2}], POINT)}), tmp_path / "1.parquet")
    schema = pa.schema([("v", pa.struct([("z", pa.int64())]))])
    with pytest.raises(SchemaError, match=r"1\.parquet: column 'v' is struct.*: it has no field 'z'"):
        read_all(FileSource(tmp_path / "1.parquet", schema=schema))
    pq.write_table(pa.table({"v": pa.array([{"x": 1}])}), tmp_path / "2.parquet")
    with pytest.raises(SchemaError, match=r"2\.parquet: column 'v' is .*in other files as .*: it has no field 'y'"):
        read_all(FileSource(tmp_path))


@pytest.mark.parametrize("group", [1, 3])
def test_a_text_that_is_not_utf8_is_refused_with_file_row_and_bytes(tmp_path, group):
    """polars relies on UTF-8: str.to_uppercase() of other bytes ended the process."""
    latin = ["a", "b", "ü" * 20, "café"]
    written = pa.array([text.encode("latin-1") for text in latin], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), len(latin), written.buffers())
    pq.write_table(pa.table({"s": texts}), tmp_path / "a.parquet", row_group_size=group)
    read = Environment("latin").read_files(tmp_path / "a.parquet").with_columns(u=pl.col("s").str.to_uppercase())
    with pytest.raises(
        DataError, match=r"a\.parquet, row \d.*: column 's' has the text b'\\xfc.*', which is not UTF-8"
    ):
        read.preview()


@pytest.mark.parametrize("ticks", [86_400, -1, 2**31 - 1])
def test_a_time_beyond_the_day_is_refused_from_every_source_and_function(tmp_path, ticks):
    """Python and polars have it as a time of another day: 24:00 as 00:00."""
    times = pa.table({"t": pa.array([0, ticks], pa.int32()).view(pa.time32("s")), "n": [1, 2]})
    env = Environment("late")
    message = rf"column 't' has {ticks} as time32\[s\], which is no time of day: a day has 86400 s"
    with pytest.raises(DataError, match=rf"^row 1 of the input .*, counted from 0: {message}"):
        testing.run(env.from_collection(times, splits=1))
    made = env.from_collection([{"n": 1}]).map_batches(lambda _: times, schema={"t": pa.time32("s"), "n": int})
    with pytest.raises(JobError, match=rf"row 1 of the result of .*: {message}"):
        testing.run(made)
    in_us = ticks * 10**6
    written = pa.table({"t": pa.array([0, in_us], pa.int64()).view(pa.time64("us"))})
    pq.write_table(written, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=rf"a\.parquet, row 1, counted from 0: column 't' has {in_us} as time64\[us\]"):
        env.read_files(tmp_path / "a.parquet").preview()


def test_a_text_that_is_not_utf8_is_refused_from_every_source_and_function():
    texts = pa.Array.from_buffers(pa.string(), 2, pa.array([b"x", b"caf\xe9"]).buffers())
    env = Environment("latin")
    with pytest.raises(DataError, match=r"^row 1 of the input .*, counted from 0: column 's' has the text b'caf\\xe9'"):
        testing.run(env.from_collection(pa.table({"s": texts}), splits=1))
    made = env.from_collection([{"n": 1}]).map_batches(lambda _: pa.table({"s": texts}), schema={"s": str})
    with pytest.raises(
        JobError, match=r"row 1 of the result of .*: column 's' has the text b'caf\\xe9', which is not UTF-8"
    ):
        testing.run(made)


def test_a_file_is_decoded_on_the_thread_that_reads_it(tmp_path):
    """The processor time of that thread is what the source reports as its work."""
    source = FileSource(parquet_file(tmp_path / "a.parquet", 0, 500_000, 500_000))
    (split,) = all_splits(source)

    def share() -> float:
        reader = source.open_split(split)
        process_s, thread_s = time.process_time(), time.thread_time()
        while reader.read(100_000) is not None:
            pass
        found = (time.thread_time() - thread_s) / (time.process_time() - process_s)
        reader.close()
        return found

    assert max(share() for _ in range(5)) > 0.4, "threads of other tests may work meanwhile, but not each time"
