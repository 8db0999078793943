"""Lines that cannot be read: left out one by one, told of with their bytes and place, and none of the good ones with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from connector_worlds import all_splits
from hypothesis import given, settings
from hypothesis import strategies as st

import midstream.connectors.files.line_splitter
from effort import examples
from midstream.connectors.files.file_source import CsvOptions, FileSource
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import ConfigError, SchemaError
from midstream.engine.operators.source_api import Split

SCHEMA = schema_of([("n", pa.int64()), ("t", pa.large_string())])
CSV = CsvOptions(header=False)
GOOD = {
    "jsonl": [b'{"n":1,"t":"a"}', b'{"n": 2}', b' {"t":"\xc3\xa9","x":[{}]} ', b"{}", b'{"n":null,"t":"}"}'],
    "csv": [b"1,a", b"2,", b'3,"x,y"', b'4,"a ""b"""', b',"\n"', b"5,\xc3\xa9"],
}
BAD = {
    "jsonl": [
        b"{",
        b"}",
        b"nonsense",
        b"[1]",
        b"null",
        b'"n"',
        b'{"n":1.5}',
        b'{"n":1}{"n":2}',
        b'{"n":1} x',
        b'{"t":"\xff"}',
        b'{"n":1,"n":2}',
        b'{"n":99999999999999999999}',
        b'{"t":"\\ud800"}',
        b'{"n":1}\x00',
        b'{"n":' + b"[" * 2_000,
        b'{"x":' + b'{"a":' * 2_000,
    ],
    "csv": [b"1", b"1,a,b", b"one,a", b"1.5,a", b"1,\xff", b'1,"\xff"', b"99999999999999999999,a", b"\x00,a"],
}


def source_of(path: Path, format: str, **more: Any) -> FileSource:
    arguments: dict[str, Any] = {"schema": SCHEMA, "format": format, "csv": CSV, "on_bad_record": "drop", **more}
    return FileSource(path, **arguments)


def read(
    source: FileSource, split: Split, rows_max: int = 1000
) -> tuple[list[Any], list[Any], list[tuple[int, int, int]]]:
    """Rows, bad records, and after each batch the offset and how many of both there were."""
    reader = source.open_split(split)
    rows: list[Any] = []
    bad: list[Any] = []
    after: list[tuple[int, int, int]] = []
    while (got := reader.read(rows_max)) is not None:
        piece, offset = got
        left_out = reader.bad_records()
        count = 0 if left_out is None else len(left_out.at)
        assert 0 < piece.num_rows + count <= rows_max
        if left_out is not None:
            assert list(left_out.at) == sorted(left_out.at) and left_out.at[-1] < piece.num_rows + count
            bad += left_out.rows.to_pylist()
        rows += piece.to_pylist()
        after.append((offset, len(rows), len(bad)))
    reader.close()
    return rows, bad, after


def all_of(source: FileSource, rows_max: int = 1000) -> tuple[list[Any], list[Any]]:
    rows, bad = [], []
    for split in all_splits(source):
        found = read(source, split, rows_max)
        rows += found[0]
        bad += found[1]
    return rows, bad


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lines")


@pytest.mark.parametrize("format", ["jsonl", "csv"])
def test_each_sample_is_what_it_is_called(directory, format):
    for kind, samples in (("good", GOOD[format]), ("bad", BAD[format])):
        for sample in samples:
            (directory / "one").write_bytes(sample + b"\n")
            rows, bad = all_of(source_of(directory / "one", format))
            assert (len(rows), len(bad)) == ((1, 0) if kind == "good" else (0, 1)), sample
            if bad:
                assert bad[0]["bytes"] == sample and bad[0]["position"] == 0
                assert bad[0]["source"] == str(directory / "one") and bad[0]["partition"] is None
                assert bad[0]["error"].startswith(f"the line is not {format} of the columns: "), bad[0]["error"]


@pytest.mark.parametrize("format", ["jsonl", "csv"])
@given(data=st.data())
@settings(max_examples=examples(60))
def test_lines_come_out_as_each_would_alone_from_any_offset_on(directory, format, data):
    lines = data.draw(st.lists(st.sampled_from(GOOD[format] + BAD[format]), min_size=1, max_size=12))
    end = data.draw(st.sampled_from([b"\n", b"\r\n"]))
    blank = b"" if format == "csv" else data.draw(st.sampled_from([b"", b" \t"]))
    text, begins = b"", []
    for line in lines:
        begins.append(len(text))
        text += line + end + (blank + end if data.draw(st.booleans()) else b"")
    path = directory / "many"
    path.write_bytes(text)
    alone = []
    for line in lines:
        (directory / "one").write_bytes(line + end)
        alone.append(all_of(source_of(directory / "one", format)))
    expected_rows = [row for rows, _ in alone for row in rows]
    expected_bad = [(at, line) for at, line, (_, bad) in zip(begins, lines, alone, strict=True) if bad]
    block_bytes = data.draw(st.sampled_from([1, 40, 100, 2**20]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(midstream.connectors.files.line_splitter, "BLOCK_BYTES", block_bytes)
        source = source_of(path, format)
        (split,) = all_splits(source)
        rows, bad, after = read(source, split, data.draw(st.integers(1, 5)))
        assert rows == expected_rows
        assert [(each["position"], each["bytes"]) for each in bad] == expected_bad
        for offset, rows_before, bad_before in after:
            rest_rows, rest_bad, _ = read(source, Split(split.id, split.payload, offset))
            assert rest_rows == rows[rows_before:] and rest_bad == bad[bad_before:]


@given(st.data())
@settings(max_examples=examples(150))
def test_a_flipped_byte_of_json_costs_no_row_but_its_own_and_makes_up_none(directory, data):
    """The oracle is another parser: a line that comes out as a row is an object with these values."""
    objects = data.draw(
        st.lists(st.fixed_dictionaries({"n": st.integers(-9, 9), "t": st.text(max_size=5)}), min_size=1)
    )
    text = bytearray(b"".join(json.dumps(each).encode() + b"\n" for each in objects))
    at = data.draw(st.integers(0, len(text) - 1))
    text[at] = data.draw(st.integers(0, 255))
    path = directory / "flipped"
    path.write_bytes(text)
    rows, bad = all_of(source_of(path, "jsonl"))
    hit = bytes(text[:at]).count(b"\n")
    assert rows[:hit] == objects[:hit]
    behind = objects[hit + 2 :]  # the line that is hit may be joined to the next one
    assert rows[len(rows) - len(behind) :] == behind
    # A carriage return alone ends a line, unless it lies between the values of an object, where JSON takes it for a blank.
    ways = [[line for line in way if line.strip()] for way in (bytes(text).splitlines(), bytes(text).split(b"\n"))]
    assert len(rows) + len(bad) in {len(lines) for lines in ways}
    for row in rows:
        assert any(_is(line, row) for lines in ways for line in lines), row


def test_a_carriage_return_between_the_values_of_an_object_is_a_blank(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"n":\r0, "t": ""}\n')
    rows, bad = all_of(source_of(tmp_path, "jsonl"))
    assert (rows, bad) == ([{"n": 0, "t": ""}], [])


def _is(line: bytes, row: dict[str, Any]) -> bool:
    try:
        found = json.loads(line)
    except ValueError:
        return False
    return isinstance(found, dict) and {name: found.get(name) for name in row} == row


def test_a_whole_file_of_another_format_is_told_of_line_by_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"".join(b"%d,x\n" % n for n in range(3_000)))
    rows, bad = all_of(source_of(tmp_path, "jsonl"))
    assert rows == [] and [each["bytes"] for each in bad] == [b"%d,x" % n for n in range(3_000)]


def test_parts_of_a_large_file_tell_of_each_bad_line_once(tmp_path, monkeypatch):
    monkeypatch.setattr("midstream.connectors.files.file_source._TEXT_SPLIT_BYTES", 1_000)
    lines = [b'{"n":%d}' % n if n % 7 else b'{"n":"%d"}' % n for n in range(2_000)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    rows, bad = all_of(source_of(tmp_path, "jsonl"))
    assert [row["n"] for row in rows] == [n for n in range(2_000) if n % 7]
    assert [each["bytes"] for each in bad] == [lines[n] for n in range(0, 2_000, 7)]
    text = (tmp_path / "a.jsonl").read_bytes()
    assert all(text[each["position"] :].startswith(each["bytes"]) for each in bad)


def test_without_drop_the_line_fails_the_job_and_a_missing_value_is_a_bad_line_too(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"1,a\n,b\n")
    fields: list[pa.Field[Any]] = [pa.field("n", pa.int64(), nullable=False), pa.field("t", pa.large_string())]
    required = pa.schema(fields)
    with pytest.raises(SchemaError, match=r"a\.csv, line 2: column 'n' has no value"):
        all_of(source_of(tmp_path, "csv", schema=required, on_bad_record="fail"))
    rows, bad = all_of(source_of(tmp_path, "csv", schema=required))
    assert (len(rows), [each["bytes"] for each in bad]) == (1, [b",b"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"on_bad_record": "side"},
            "on_bad_record 'side' is not one of fail, drop; with 'drop' they go to side_output",
        ),
        ({"bad_records_max": 5}, "bad_records_max=5 is not a pair"),
        ({"bad_records_max": (1, 1)}, "is not a pair"),
        ({"bad_records_max": (-1, 10)}, "is not a pair"),
        ({"bad_records_max": (1.0, 10)}, "is not a pair"),
        ({"bad_records_max": (1, 10), "on_bad_record": "fail"}, "requires on_bad_record='drop'"),
        ({"format": "parquet"}, "on_bad_record='drop' is for CSV and JSON lines"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path, arguments, message):
    (tmp_path / "a").write_bytes(b"1,a\n")
    with pytest.raises(ConfigError, match=message):
        source_of(tmp_path / "a", **{"format": "csv", **arguments})
