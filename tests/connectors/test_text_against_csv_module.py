"""Random CSV, TSV and JSON lines, in blocks and parts of any size: the rows that Python's own readers find, or a refusal."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json

import msgspec
import pyarrow as pa
from connector_worlds import all_splits, read_all, read_split
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from effort import examples
from midstream.connectors.files import file_source as files
from midstream.connectors.files import line_splitter
from midstream.connectors.files.file_source import CsvOptions, FileSource
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import ConfigError

BOM = b"\xef\xbb\xbf"
PIECES = ["a", "b,", "\t", ";", '"', '""', "\n", "\r\n", "\r", "é", "\ufeff", " ", "x" * 9, ","]
VALUES = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)
PLACES = settings(max_examples=examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture])


def written(text: str, *, compress: str | None, with_bom: bool) -> bytes:
    data = (BOM if with_bom else b"") + text.encode()
    if compress is None:
        return data
    return gzip.compress(data) if compress == "gz" else bz2.compress(data)


def read_in_places(source: FileSource, expected: list, rows_max: int, data: st.DataObject) -> None:
    """All rows; and those behind a place in the midst, after a restore."""
    assert read_all(source, rows_max) == expected
    splits = all_splits(source)
    if splits:
        split = data.draw(st.sampled_from(splits))
        rows, offsets = read_split(source, split, rows_max=1)
        if rows:
            done = data.draw(st.integers(1, len(rows)))
            assert read_split(source, msgspec.structs.replace(split, offset=offsets[done - 1]))[0] == rows[done:]


def field(value: str | None, delimiter: str, how: str) -> str:
    """`value` as it may be written: null is nothing, and an empty text has quotes."""
    if value is None:
        return ""
    must = value == "" or any(sign in value for sign in f'{delimiter}\r\n"') or value in ("NA", "null")
    if (
        how == "stray"
        and '"' in value
        and not value.startswith('"')
        and not any(c in value for c in f"{delimiter}\r\n")
    ):
        return value
    return '"' + value.replace('"', '""') + '"' if must or how == "all" else value


@PLACES
@given(
    columns=st.integers(1, 3),
    rows=st.lists(st.lists(st.none() | VALUES, min_size=3, max_size=3), max_size=30),
    delimiter=st.sampled_from([",", "\t"]),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    last_end=st.booleans(),
    how=st.sampled_from(["few", "all", "stray"]),
    header=st.booleans(),
    compress=st.sampled_from([None, None, None, "gz", "bz2"]),
    with_bom=st.booleans(),
    block_bytes=st.integers(1, 80),
    split_bytes=st.integers(1, 120),
    judged_bytes=st.sampled_from([1, 10, 60, 2**16]),
    in_one_piece=st.booleans(),
    rows_max=st.integers(1, 9),
    data=st.data(),
)
def test_csv_gives_the_rows_of_pythons_reader_or_is_refused(
    tmp_path, monkeypatch, columns, rows, delimiter, end, last_end, how, header, compress, with_bom, block_bytes,
    split_bytes, judged_bytes, in_one_piece, rows_max, data,
):  # fmt: skip
    monkeypatch.setattr(files, "_TEXT_SPLIT_BYTES", split_bytes)
    monkeypatch.setattr(line_splitter, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(line_splitter, "JUDGED_BYTES", judged_bytes)
    names = ["n1", "n2", "n3"][:columns]
    given_rows = [row[:columns] for row in rows]
    body = [delimiter.join(names)] if header else []
    body += [delimiter.join(field(value, delimiter, how) for value in row) for row in given_rows]
    text = end.join(body) + (end if last_end and body else "")
    in_python = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
    in_python = in_python[1:] if header else in_python
    if columns == 1:  # an empty line is a row
        in_python = [row or [""] for row in in_python]
        if not last_end and body and not body[-1]:  # but nothing is no line
            given_rows = given_rows[:-1]
    expected = [dict(zip(names, row, strict=True)) for row in given_rows]
    plain = [[value or "" for value in row] for row in given_rows]
    assert plain == in_python, "the test itself"
    path = tmp_path / f"a.csv{'.' + compress if compress else ''}"
    must_bom = text.startswith("\ufeff")  # at the start of a file it is its mark, and the value only behind one
    path.write_bytes(written(text, compress=compress, with_bom=with_bom or must_bom))
    schema = pa.schema([(name, pa.string()) for name in names])
    options = CsvOptions(delimiter=delimiter, header=header, newlines_in_values=in_one_piece)
    source = FileSource(path, schema=schema, csv=options)
    if not path.stat().st_size:
        return
    try:
        read_in_places(source, expected, rows_max, data)
    except ConfigError as error:
        if "cannot be read in parts" not in str(error) or in_one_piece or compress:
            raise
        event("refused")


def test_reading_goes_on_within_a_block_that_was_cut_again(tmp_path, monkeypatch):
    """What was judged to be its end lay in a quoted value; its rows are counted from where it begins all the same."""
    monkeypatch.setattr(line_splitter, "BLOCK_BYTES", 12)
    monkeypatch.setattr(line_splitter, "JUDGED_BYTES", 10)
    path = tmp_path / "a.csv"
    path.write_bytes(b',1\n,2\n,3\n,"\n"\n,5\n,6\n,7\n,8')
    source = FileSource(path, schema=pa.schema([("a", pa.string()), ("b", pa.string())]), csv=CsvOptions(header=False))
    cuts = []
    recut = line_splitter.LineSplitter.recut
    monkeypatch.setattr(
        line_splitter.LineSplitter, "recut", lambda *arguments: cuts.append(arguments) or recut(*arguments)
    )
    [split] = all_splits(source)
    rows, offsets = read_split(source, split, rows_max=1)
    assert [row["b"] for row in rows] == ["1", "2", "3", "\n", "5", "6", "7", "8"]
    assert cuts, "no block was cut again"
    for done, offset in enumerate(offsets, 1):
        assert read_split(source, msgspec.structs.replace(split, offset=offset))[0] == rows[done:]


@PLACES
@given(
    rows=st.lists(
        st.fixed_dictionaries({}, optional={"a": st.none() | st.integers(-9, 9), "b": st.none() | VALUES}), max_size=30
    ),
    end=st.sampled_from(["\n", "\r\n", "\r", "\n \n", "\n\n"]),
    last_end=st.booleans(),
    compress=st.sampled_from([None, None, None, "gz", "bz2"]),
    with_bom=st.booleans(),
    is_ascii=st.booleans(),
    block_bytes=st.integers(1, 80),
    split_bytes=st.integers(1, 120),
    rows_max=st.integers(1, 9),
    data=st.data(),
)
def test_json_lines_give_the_rows_of_pythons_reader(
    tmp_path, monkeypatch, rows, end, last_end, compress, with_bom, is_ascii, block_bytes, split_bytes, rows_max, data
):
    monkeypatch.setattr(files, "_TEXT_SPLIT_BYTES", split_bytes)
    monkeypatch.setattr(line_splitter, "BLOCK_BYTES", block_bytes)
    text = end.join(json.dumps(row, ensure_ascii=is_ascii) for row in rows) + (end if last_end else "")
    path = tmp_path / f"a.jsonl{'.' + compress if compress else ''}"
    path.write_bytes(written(text, compress=compress, with_bom=with_bom))
    source = FileSource(path, schema=schema_of([("a", pa.int64()), ("b", pa.string())]))
    read_in_places(source, [{"a": row.get("a"), "b": row.get("b")} for row in rows], rows_max, data)
