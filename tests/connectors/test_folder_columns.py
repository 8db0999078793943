"""Files in folders whose names have values of columns, as Spark writes what is partitioned."""

from __future__ import annotations

import os
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from connector_worlds import all_splits, read_split
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream import testing
from midstream.connectors.files import file_source
from midstream.connectors.files.file_source import FileSource
from midstream.connectors.files.folder_columns import NULL_FOLDER, folder_values
from midstream.connectors.files.text_parsers import CsvOptions
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import DataError, SchemaError

FORMATS = ["parquet", "csv", "jsonl"]


def put(path: Path, folder: str, *numbers: int, format: str = "parquet", **more: Any) -> None:
    (path / folder).mkdir(parents=True, exist_ok=True)
    frame = pl.DataFrame({"n": numbers, **{name: [value] * len(numbers) for name, value in more.items()}})
    file = path / folder / f"part-0.{format}"
    write: Any = {"parquet": frame.write_parquet, "csv": frame.write_csv, "jsonl": frame.write_ndjson}[format]
    write(file)


def rows(source: FileSource) -> list[dict[str, Any]]:
    return [row for split in all_splits(source) for row in read_split(source, split)[0]]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("watch", [False, True])
def test_values_in_the_names_of_folders_are_columns(tmp_path, format, watch):
    put(tmp_path, "day=2026-11-30/zone=a%2Fb", 1, 2, format=format)
    put(tmp_path, f"day={NULL_FOLDER}/zone=c", 3, format=format)
    for file in tmp_path.rglob("*.*"):
        os.utime(file, (1, 1))
    source = FileSource(tmp_path, watch=watch)
    assert source.schema == schema_of([("n", pa.int64()), ("day", pa.large_string()), ("zone", pa.large_string())])
    assert rows(source) == [
        {"n": 1, "day": "2026-11-30", "zone": "a/b"},
        {"n": 2, "day": "2026-11-30", "zone": "a/b"},
        {"n": 3, "day": None, "zone": "c"},
    ]
    declared = FileSource(tmp_path, schema=schema_of([("day", pa.date32()), ("n", pa.int64())]), watch=watch)
    assert [(row["day"], row["n"]) for row in rows(declared)] == [
        (date(2026, 11, 30), 1),
        (date(2026, 11, 30), 2),
        (None, 3),
    ]
    assert testing.check_source(FileSource(tmp_path)).num_rows == 3


def test_folders_above_what_is_requested_and_a_file_itself_have_no_columns(tmp_path, monkeypatch):
    put(tmp_path, "a=1/b=2/c", 1)
    monkeypatch.chdir(tmp_path)
    for path, names in {
        tmp_path: ["n", "a", "b"],
        tmp_path / "a=1": ["n", "b"],
        tmp_path / "a=1/b=2": ["n"],
        tmp_path / "a=1/b=2/c/part-0.parquet": ["n"],
        f"{tmp_path}/*/b=2/**": ["n", "a", "b"],
        f"{tmp_path}/a=1/*/c/*.parquet": ["n", "b"],
        "a=1": ["n", "b"],
        "**/*.parquet": ["n", "a", "b"],
        f"file://{tmp_path}": ["n", "a", "b"],
    }.items():
        assert FileSource(path).schema.names == names, path


@pytest.mark.parametrize("format", FORMATS)
def test_a_column_that_files_have_themselves_is_read_from_them(tmp_path, format):
    put(tmp_path, "k=1", 1, k=1, format=format)
    put(tmp_path, "k=2", 2, k=20, format=format)
    for schema in (None, schema_of([("n", pa.int64()), ("k", pa.int64())])):
        assert rows(FileSource(tmp_path, schema=schema)) == [{"n": 1, "k": 1}, {"n": 2, "k": 20}]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("watch", [False, True])
def test_each_file_has_a_column_itself_or_in_its_folder(tmp_path, format, watch):
    schema = schema_of([("n", pa.int64()), ("k", pa.int64())])
    early = FileSource(tmp_path, schema=schema, watch=True, format=format)
    put(tmp_path, "k=1", 1, k=10, format=format)
    put(tmp_path, "k=2", 2, format=format)
    put(tmp_path, "k=3", 3, k=30, format=format)
    for file in tmp_path.rglob("*.*"):
        os.utime(file, (1, 1))
    expected = [{"n": 1, "k": 10}, {"n": 2, "k": 2}, {"n": 3, "k": 30}]
    assert rows(early) == expected
    assert rows(FileSource(tmp_path, schema=schema, watch=watch)) == expected
    assert rows(FileSource(tmp_path, watch=watch)) == expected


def test_what_is_requested_twice_has_the_columns_of_all_its_folders(tmp_path):
    put(tmp_path, "a=1", 1)
    put(tmp_path, "a=2", 2)
    for paths in ([tmp_path / "a=1", tmp_path], [tmp_path, tmp_path / "a=1"], [f"{tmp_path}/a=1/*", tmp_path / "**"]):
        assert rows(FileSource(paths)) == [{"n": 1, "a": "1"}, {"n": 2, "a": "2"}]


@pytest.mark.parametrize("folder", ["a=%FF", "%E9=1"])
def test_a_folder_whose_name_is_not_utf_8_is_refused(tmp_path, folder):
    """Two values would be one otherwise."""
    put(tmp_path, folder, 1)
    with pytest.raises(
        DataError, match=f"{folder}/part-0.parquet: '.*' in the name of its folder is no percent-encoded"
    ):
        FileSource(tmp_path)


def test_a_csv_without_a_header_has_the_other_declared_columns(tmp_path):
    (tmp_path / "k=7").mkdir()
    (tmp_path / "k=7/a.csv").write_text("1,x\n")
    schema = schema_of([("n", pa.int64()), ("k", pa.int64()), ("t", pa.large_string())])
    source = FileSource(tmp_path, schema=schema, csv=CsvOptions(header=False))
    assert rows(source) == [{"n": 1, "k": 7, "t": "x"}]


def test_files_whose_folders_have_other_columns_are_refused_unless_columns_are_declared(tmp_path):
    put(tmp_path, "a=1", 1)
    put(tmp_path, "b=2", 2)
    put(tmp_path, "", 3)
    with pytest.raises(
        SchemaError, match=r"b=2/part-0.parquet: its folders have values of the columns \(b\), and .* of \(a\)"
    ):
        rows(FileSource([tmp_path / "**"]))
    declared = FileSource(tmp_path, schema=schema_of([("n", pa.int64()), ("a", pa.int8())]))
    assert rows(declared) == [{"n": 1, "a": 1}, {"n": 2, "a": None}, {"n": 3, "a": None}]


@pytest.mark.parametrize(
    ("folder", "kind", "said"),
    [
        ("a=0x1F", pa.int64(), "'0x1F' as the value of the column 'a', which is declared as int64"),
        ("a=300", pa.int8(), "declared as int8"),
        ("a=2026-02-30", pa.date32(), "declared as date32"),
        ("a=1.234", pa.decimal128(5, 2), "declared as decimal"),
        ("a=x", pa.bool_(), "declared as bool"),
        ("a=1/a=2", pa.int64(), "two of its folders have a value of the column 'a'"),
        (f"a={NULL_FOLDER}", pa.field("a", pa.int64(), nullable=False), "must have a value"),
    ],
)
def test_a_value_that_its_column_cannot_have_is_refused_at_the_start(tmp_path, folder, kind, said):
    put(tmp_path, folder, 1)
    field = kind if isinstance(kind, pa.Field) else pa.field("a", kind)
    with pytest.raises((SchemaError, DataError), match=said):
        FileSource(tmp_path, schema=pa.schema([pa.field("n", pa.int64()), field]))


def test_a_file_of_which_no_column_is_read_is_refused(tmp_path):
    put(tmp_path, "a=1", 1)
    with pytest.raises(SchemaError, match="all columns that are read are in the names of its folders"):
        rows(FileSource(tmp_path, schema=schema_of([("a", pa.int64())])))


def test_large_files_are_several_splits_with_the_same_values(tmp_path, monkeypatch):
    monkeypatch.setattr(file_source, "_SPLIT_BYTES_MIN", 100)
    (tmp_path / "a=x").mkdir()
    pq.write_table(pa.table({"n": range(1000)}), tmp_path / "a=x/part.parquet", row_group_size=100)
    source = FileSource(tmp_path)
    assert len(all_splits(source)) == 10
    assert rows(source) == [{"n": n, "a": "x"} for n in range(1000)]


def test_bad_records_are_dropped_as_elsewhere(tmp_path):
    (tmp_path / "a=x").mkdir()
    (tmp_path / "a=x/lines.jsonl").write_text('{"n": 1}\nnone\n{"n": 2}\n')
    source = FileSource(tmp_path, schema=schema_of([("n", pa.int64()), ("a", pa.large_string())]), on_bad_record="drop")
    (split,) = all_splits(source)
    reader = source.open_split(split)
    found = reader.read(10)
    assert found is not None
    assert found[0].to_pylist() == [{"n": 1, "a": "x"}, {"n": 2, "a": "x"}]
    bad = reader.bad_records()
    assert bad is not None
    reader.close()


VALUES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "text": (
        pa.large_string(),
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20),
    ),
    "int": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "bool": (pa.bool_(), st.booleans()),
    "date": (pa.date32(), st.dates()),
    "time": (pa.timestamp("us"), st.datetimes(datetime(1900, 1, 1))),
    "money": (pa.decimal128(9, 2), st.decimals(-999, 999, places=2)),
    "float": (pa.float64(), st.floats(allow_nan=False, allow_infinity=False)),
}


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(VALUES)), format=st.sampled_from(FORMATS))
def test_every_value_is_what_was_written(data, name, format, tmp_path_factory):
    kind, values = VALUES[name]
    value = data.draw(values)
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)
    folder = f"c {name}={quote(text, safe=' ')}"
    if len(folder.encode()) > 255:
        return
    path = tmp_path_factory.mktemp("files")
    put(path, folder, 1, format=format)
    source = FileSource(path, schema=schema_of([("n", pa.int64()), (f"c {name}", kind)]))
    (row,) = rows(source)
    assert row[f"c {name}"] == value
    assert rows(FileSource(path))[0][f"c {name}"] == text
    assert isinstance(value, Decimal) or source.schema.field(f"c {name}").type == kind


def test_a_path_of_an_object_store_has_no_first_slash() -> None:
    assert folder_values("bucket/t/a=1/x.parquet", ["bucket/t"]) == {"a": "1"}
    assert folder_values("bucket/t/a=1/x.parquet", ["/bucket/t/"]) == {"a": "1"}
    assert folder_values("bucket/t2/a=1/x.parquet", ["bucket/t"]) == {}
    assert folder_values("a=1/x.parquet", [""]) == {"a": "1"}
    assert folder_values("b/=1/a=/x=y/z.csv", ["b"]) == {"a": "", "x": "y"}
