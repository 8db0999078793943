"""CSV and JSON lines as sources: exact suffixes from every offset, and errors that name file and line."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import zipfile
from datetime import date, datetime
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from connector_worlds import all_splits, read_all, read_split, values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from effort import examples
from midstream import Environment
from midstream.connectors.files import file_source as files
from midstream.connectors.files import line_splitter
from midstream.connectors.files.file_source import CsvOptions, FileSource
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import ConfigError, DataError, MidstreamError, SchemaError, StorageError


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_splitter, "BLOCK_BYTES", 64)


def csv_file(path: Path, rows: int) -> Path:
    path.write_text("n,who\n" + "".join(f"{n},w{n % 7}\n" for n in range(rows)))
    return path


def jsonl_file(path: Path, rows: int) -> Path:
    path.write_text("".join(json.dumps({"n": n, "who": f"w{n % 7}"}) + "\n" for n in range(rows)))
    return path


@pytest.mark.parametrize("make", [csv_file, jsonl_file])
def test_all_rows_come_in_order_with_inferred_types(make, tmp_path, small_blocks):
    source = FileSource(make(tmp_path / f"a.{make.__name__.split('_', maxsplit=1)[0]}", 100))
    assert source.schema == schema_of([("n", pa.int64()), ("who", pa.large_string())])
    assert source.bounded
    for rows_max in (1, 7, 1000):
        assert read_all(source, rows_max) == [{"n": n, "who": f"w{n % 7}"} for n in range(100)]


@pytest.mark.parametrize("make", [csv_file, jsonl_file])
@pytest.mark.parametrize("compress", [None, "gz", "bz2", "zip"])
def test_from_every_offset_exactly_the_rest_is_read(make, compress, tmp_path, small_blocks):
    path = make(tmp_path / f"a.{make.__name__.split('_', maxsplit=1)[0]}", 60)
    if compress is not None:
        plain, path = path, tmp_path / f"{path.name}.{compress}"
        data = plain.read_bytes()
        if compress == "zip":
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(plain.name, data)
        else:
            path.write_bytes(gzip.compress(data) if compress == "gz" else bz2.compress(data))
    source = FileSource(path)
    (split,) = all_splits(source)
    rows, offsets = read_split(source, split, rows_max=1)
    assert values(rows) == list(range(60))
    for done, offset in enumerate(offsets, 1):
        rest, _ = read_split(source, msgspec.structs.replace(split, offset=offset), rows_max=13)
        assert rest == rows[done:]


def test_offsets_hold_when_blocks_are_cut_elsewhere(tmp_path, monkeypatch):
    source = FileSource(csv_file(tmp_path / "a.csv", 100))
    (split,) = all_splits(source)
    monkeypatch.setattr(line_splitter, "BLOCK_BYTES", 400)
    rows, offsets = read_split(source, split, rows_max=1)
    for block_bytes in (50, 401, 4096):
        monkeypatch.setattr(line_splitter, "BLOCK_BYTES", block_bytes)
        for done in (1, 37, 38, 99, 100):
            rest, again = read_split(source, msgspec.structs.replace(split, offset=offsets[done - 1]), rows_max=1)
            assert rest == rows[done:]
            for more, offset in enumerate(again, done + 1):
                last, _ = read_split(source, msgspec.structs.replace(split, offset=offset))
                assert last == rows[more:]


texts_of_lines = st.lists(st.text("abc é,\t", max_size=12), min_size=1, max_size=40)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=texts_of_lines,
    split_bytes=st.integers(1, 90),
    block_bytes=st.integers(8, 64),
    ends=st.sampled_from(["\n", "\r\n"]),
    format=st.sampled_from(["csv", "jsonl"]),
    last_end=st.booleans(),
    data=st.data(),
)
def test_byte_ranges_hold_each_line_once(
    tmp_path, monkeypatch, texts, split_bytes, block_bytes, ends, format, last_end, data
):
    monkeypatch.setattr(files, "_TEXT_SPLIT_BYTES", split_bytes)
    monkeypatch.setattr(line_splitter, "BLOCK_BYTES", block_bytes)
    expected = [{"n": n, "t": value} for n, value in enumerate(texts)]
    path = tmp_path / f"a.{format}"
    if format == "csv":
        body = ["n,t", *(f'{n},"{value}"' for n, value in enumerate(texts))]
    else:
        body = [json.dumps(row, ensure_ascii=False) for row in expected]
    path.write_bytes((ends.join(body) + (ends if last_end else "")).encode())
    source = FileSource(path, schema=schema_of([("n", pa.int64()), ("t", pa.string())]))
    splits = all_splits(source)
    assert len(splits) >= len(path.read_bytes()) // split_bytes
    assert read_all(source, rows_max=3) == expected
    split = data.draw(st.sampled_from(splits))
    rows, offsets = read_split(source, split, rows_max=1)
    for done, offset in enumerate(offsets, 1):
        assert read_split(source, msgspec.structs.replace(split, offset=offset))[0] == rows[done:]


def test_values_with_line_ends_are_read_when_that_is_asked_for(tmp_path, small_blocks):
    path = tmp_path / "a.csv"
    path.write_text("n,t\n" + "".join(f'{n},"a ""quoted""\nline {n}\n"\n' for n in range(50)))
    source = FileSource(path, csv=CsvOptions(newlines_in_values=True))
    (split,) = all_splits(source)
    rows, offsets = read_split(source, split, rows_max=1)
    assert rows == [{"n": n, "t": f'a "quoted"\nline {n}\n'} for n in range(50)]
    for done in (1, 20, 49):
        assert read_split(source, msgspec.structs.replace(split, offset=offsets[done - 1]))[0] == rows[done:]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"null_values": "NA"}, r"null_values is the text 'NA'; give a tuple of texts, such as \('NA',\)"),
        ({"timestamp_formats": "%d/%m/%Y"}, "timestamp_formats is the text '%d/%m/%Y'; give a tuple"),
        ({"delimiter": "||"}, r"delimiter is '\|\|'; give one ASCII character"),
        ({"delimiter": ""}, "delimiter is ''; give one ASCII character"),
        ({"delimiter": None}, "delimiter is None; give one ASCII character"),
        ({"delimiter": "\n"}, r"delimiter is '\\n', which ends a line"),
        ({"quote": "§"}, "quote is '§'; give one ASCII character, or \"\" if values are never quoted"),
        ({"delimiter": '"'}, "delimiter and quote are both '\"'"),
    ],
)
def test_options_that_would_be_taken_for_others_are_refused(options, why):
    with pytest.raises(ConfigError, match=why):
        CsvOptions(**options)


def test_options_of_csv_are_kept(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("1;x;05.01.2013\n-;'a;b';06.01.2013\n")
    schema = schema_of([("n", pa.int64()), ("s", pa.string()), ("d", pa.timestamp("us"))])
    options = CsvOptions(delimiter=";", quote="'", header=False, null_values=("-",), timestamp_formats=("%d.%m.%Y",))
    assert read_all(FileSource(path, schema=schema, csv=options)) == [
        {"n": 1, "s": "x", "d": datetime(2013, 1, 5)},
        {"n": None, "s": "a;b", "d": datetime(2013, 1, 6)},
    ]


def test_declared_columns_are_picked_out_of_more(tmp_path):
    (tmp_path / "a.csv").write_text("a,b,c\n1,2,3\n")
    (tmp_path / "a.jsonl").write_text('{"a": 1, "b": 2, "c": 3}\n\n{"c": 4}\n')
    schema = pa.schema([("c", pa.float64())])
    assert read_all(FileSource(tmp_path / "a.csv", schema=schema)) == [{"c": 3.0}]
    assert read_all(FileSource(tmp_path / "a.jsonl", schema=schema)) == [{"c": 3.0}, {"c": 4.0}]


def test_json_lines_hold_nested_values_and_times(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"l": [1, 2], "s": {"x": "y"}, "at": "2013-01-01T05:30:00", "d": "2013-01-02"}\n')
    schema = pa.schema(
        [
            ("l", pa.list_(pa.int64())),
            ("s", pa.struct([("x", pa.string())])),
            ("at", pa.timestamp("us")),
            ("d", pa.date32()),
        ]
    )
    assert read_all(FileSource(path, schema=schema)) == [
        {"l": [1, 2], "s": {"x": "y"}, "at": datetime(2013, 1, 1, 5, 30), "d": date(2013, 1, 2)}
    ]


# ---- what is wrong with a file ----


def failure(source: FileSource) -> MidstreamError:
    with pytest.raises(MidstreamError) as caught:
        read_all(source)
    return caught.value


@pytest.mark.parametrize("at", [1, 2, 50, 99, 100])
@pytest.mark.parametrize(
    ("line", "kind", "says"),
    [
        ("1,2,3", DataError, "Expected 2 columns, got 3"),
        ("1", DataError, "Expected 2 columns, got 1"),
        ("x,w", SchemaError, "column 'n': CSV conversion error to int64: invalid value 'x'"),
    ],
)
def test_a_bad_line_of_csv_is_named(tmp_path, small_blocks, monkeypatch, at, line, kind, says):
    monkeypatch.setattr(files, "_TEXT_SPLIT_BYTES", 300)
    path = csv_file(tmp_path / "a.csv", 100)
    rows = path.read_text().splitlines()
    rows[at] = line
    path.write_text("\n".join(rows) + "\n")
    error = failure(FileSource(path, schema=schema_of([("n", pa.int64()), ("who", pa.string())])))
    assert type(error) is kind
    assert f"{path}, line {at + 1}: " in str(error)
    assert says in str(error)


@pytest.mark.parametrize("at", [0, 1, 50, 99])
@pytest.mark.parametrize(
    ("line", "kind", "says"),
    [
        ('{"n": 1', DataError, "JSON parse error"),
        ("n=1", DataError, "JSON parse error"),
        ('{"n": "x", "who": "w"}', SchemaError, "Column(/n) changed from number to string"),
        ('{"n": 1.5, "who": "w"}', SchemaError, "1.5"),
    ],
)
def test_a_bad_line_of_json_is_named(tmp_path, small_blocks, at, line, kind, says):
    path = jsonl_file(tmp_path / "a.jsonl", 100)
    rows = path.read_text().splitlines()
    rows[at] = line
    path.write_text("\n".join(rows) + "\n")
    error = failure(FileSource(path, schema=schema_of([("n", pa.int64()), ("who", pa.string())])))
    assert type(error) is kind
    assert f"{path}, line {at + 1}: " in str(error)
    assert says in str(error)


def test_a_file_that_differs_from_the_first_is_named_with_its_column(tmp_path):
    (tmp_path / "1.csv").write_text("a,b\n1,2\n")
    (tmp_path / "2.csv").write_text("a,c\n1,2\n")
    assert f"{tmp_path}/2.csv: column 'b' is missing; it has a, c" in str(failure(FileSource(tmp_path)))
    (tmp_path / "2.csv").write_text("a,b,c\n1,2,3\n")
    assert f"{tmp_path}/2.csv: column 'c' is not in other files" in str(failure(FileSource(tmp_path)))
    (tmp_path / "2.csv").write_text("a,b\n1,x\n")
    assert f"{tmp_path}/2.csv, line 2: column 'b': CSV conversion error to int64" in str(failure(FileSource(tmp_path)))


@pytest.mark.parametrize("end", ["\r", "\n", "\r\n"])
def test_any_line_end_ends_a_line(tmp_path, end):
    path = tmp_path / "a.csv"
    path.write_bytes(end.join(["n,who", *(f"{n},w" for n in range(1000)), ""]).encode())
    assert values(read_all(FileSource(path))) == list(range(1000))
    path.write_bytes(path.read_bytes().replace(b"997,w", b"x,w"))
    error = failure(FileSource(path, schema=pa.schema([("n", pa.int64())])))
    assert f"{path}, line 999: column 'n': " in str(error)


def test_spaces_are_values_and_an_empty_line_is_one_of_a_single_column(tmp_path):
    tabs = CsvOptions(delimiter="\t")
    (tmp_path / "a.csv").write_text("a\tb\n" + "\t\n" * 500)
    two = schema_of([("a", pa.int64()), ("b", pa.string())])
    assert read_all(FileSource(tmp_path / "a.csv", schema=two, csv=tabs)) == [{"a": None, "b": None}] * 500
    (tmp_path / "b.csv").write_text("a\n1\n\n\n2\n\n")
    assert values(read_all(FileSource(tmp_path / "b.csv")), "a") == [1, None, None, 2, None]
    (tmp_path / "c.csv").write_text("a,b\n1,2\n\n3,4\n\n")
    assert values(read_all(FileSource(tmp_path / "c.csv")), "a") == [1, 3]


def test_quoted_line_ends_beyond_a_block_and_a_part_are_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(line_splitter, "BLOCK_BYTES", 10_000)
    monkeypatch.setattr(files, "_TEXT_SPLIT_BYTES", 30_000)
    path = tmp_path / "a.csv"
    rows = [{"t": f'one, "{n}"\ntwo\r\nthree', "u": "x\n" * (n % 4), "v": f'{n}" pipe'} for n in range(4000)]
    body = io.StringIO(newline="")
    csv.writer(body, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows(row.values() for row in rows)
    path.write_bytes(f"t,u,v\n{body.getvalue()}".encode())
    source = FileSource(path)
    assert len(all_splits(source)) > 5
    assert read_all(source) == rows


def test_a_stray_quote_in_a_plain_value_begins_none(tmp_path, small_blocks):
    path = tmp_path / "a.csv"
    path.write_text("n,t\n" + "".join(f'{n},{n}" pipe\n' for n in range(1, 50)) + '50,"a\nb"\n')
    assert values(read_all(FileSource(path)), "t") == [*(f'{n}" pipe' for n in range(1, 50)), "a\nb"]


def test_a_part_that_cannot_be_cut_with_certainty_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(line_splitter, "JUDGED_BYTES", 20)
    monkeypatch.setattr(files, "_TEXT_SPLIT_BYTES", 100)
    path = tmp_path / "a.csv"
    path.write_text('t\n"' + "a line without quotes\n" * 20 + '"\n')
    assert "cannot be read in parts" in str(failure(FileSource(path)))
    whole = FileSource(path, csv=CsvOptions(newlines_in_values=True))
    assert values(read_all(whole), "t") == ["a line without quotes\n" * 20]


def test_a_quoted_value_that_never_ends_is_named_with_its_line(tmp_path, small_blocks):
    path = tmp_path / "a.csv"
    path.write_text(
        "n,t\n" + "".join(f"{n},x\n" for n in range(30)) + '30,"half\n' + "".join(f"{n},x\n" for n in range(99))
    )
    error = failure(FileSource(path, schema=pa.schema([("t", pa.string())])))
    assert f"{path}, line 32: a quoted value begins and never ends" in str(error)


def test_a_byte_order_mark_is_left_out_only_at_the_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr(line_splitter, "BLOCK_BYTES", 8)
    path = tmp_path / "a.csv"
    path.write_bytes("\ufefft,u\n\ufeffa,b\n\ufeffc,d\n".encode())
    assert read_all(FileSource(path)) == [{"t": "\ufeffa", "u": "b"}, {"t": "\ufeffc", "u": "d"}]


@pytest.mark.parametrize("line", ["null", "[1]", "3", '{"n": 1} null'])
@pytest.mark.parametrize("at", [0, 1, 30])
def test_a_json_value_that_is_no_object_is_named(tmp_path, line, at):
    path = jsonl_file(tmp_path / "a.jsonl", 60)
    rows = path.read_text().splitlines()
    rows[at] = line
    path.write_text("\n".join(rows))
    error = failure(FileSource(path, schema=pa.schema([("n", pa.int64())])))
    assert f"{path}, line {at + 1}: " in str(error)
    assert "each line must be an object" in str(error) or "null" in line
    path.write_text('[{"n": 1}, {"n": 2}]')
    with pytest.raises(SchemaError, match=r"convert a file that is one array, for example with jq -c"):
        FileSource(path)
    path.write_text("null\n")
    with pytest.raises(StorageError, match="null is not an object"):
        FileSource(path)


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path):
    for name, body in (("a.csv", b"t\nx\n\xff\n"), ("a.jsonl", b'{"t": "x"}\n\n{"t": "\xff"}\n')):
        (tmp_path / name).write_bytes(body)
        error = failure(FileSource(tmp_path / name, schema=pa.schema([("t", pa.string())])))
        assert f"{name}, line 3: " in str(error)


def test_a_declared_column_that_no_line_begins_with_is_warned_of(tmp_path, caplog):
    (tmp_path / "1.jsonl").write_text('{"a": 1}\n{"a": 2, "b": 3}\n')
    (tmp_path / "2.jsonl").write_text('{"c": 1}\n')
    (tmp_path / "3.jsonl").write_text('{"a": "not a line of JSON\n')
    schema = schema_of([(name, pa.int64()) for name in "abcd"])
    FileSource([tmp_path / "1.jsonl", tmp_path / "2.jsonl"], schema=schema.remove(3))
    FileSource([tmp_path / "1.jsonl", tmp_path / "3.jsonl"], schema=schema)  # its reader will report it
    assert caplog.messages == []
    FileSource(tmp_path / "1.jsonl", schema=schema)
    [warning] = caplog.messages
    ends = f"beginning of {tmp_path}/1.jsonl, where lines have a, b: 'c', 'd'; if a name is misspelt, all its values are null"
    assert warning.endswith(ends), "one file is named once"


def test_what_a_file_or_a_line_lacks_is_null_if_it_is_declared_so(tmp_path):
    (tmp_path / "1.csv").write_text("a,b\n1,2\n")
    (tmp_path / "2.csv").write_text("z,a\n9,3\n")
    schema = schema_of([("a", pa.int64()), ("b", pa.float32())])
    assert read_all(FileSource(tmp_path, schema=schema)) == [{"a": 1, "b": 2.0}, {"a": 3, "b": None}]
    (tmp_path / "3.csv").write_text("b,a\n5,\n7,8\n")
    must = pa.schema([pa.field("a", pa.int64(), nullable=False), *schema_of([("b", pa.float32())])])
    assert f"{tmp_path}/3.csv, line 2: column 'a' has no value" in str(failure(FileSource(tmp_path, schema=must)))
    (tmp_path / "3.csv").write_text("b\n5\n")
    assert f"{tmp_path}/3.csv: column 'a' is missing; it has b" in str(failure(FileSource(tmp_path, schema=must)))
    (tmp_path / "3.csv").write_text("x,y\n5,6\n")
    assert "3.csv: it has none of the declared columns (a, b)" in str(failure(FileSource(tmp_path, schema=schema)))
    with pytest.raises(SchemaError, match=r"declared column 'bb' is missing from .*1\.csv and .*3\.csv"):
        FileSource(tmp_path, schema=pa.schema([("a", pa.int64()), ("bb", pa.int64())]))
    (tmp_path / "1.jsonl").write_text('{"a": 1}\n{"b": 2}\n')
    one = FileSource(tmp_path / "1.jsonl", schema=schema)
    assert read_all(one) == [{"a": 1, "b": None}, {"a": None, "b": 2.0}]
    error = failure(FileSource(tmp_path / "1.jsonl", schema=must))
    assert f"{tmp_path}/1.jsonl, line 2: column 'a' has no value, though it is declared with nullable=False" in str(
        error
    )


def test_numbers_in_text_are_the_nearest_ones_of_the_declared_type(tmp_path):
    (tmp_path / "a.csv").write_text("x\n0.1\n16777217\n")
    (tmp_path / "a.jsonl").write_text('{"x": 0.1}\n{"x": 16777217}\n')
    for name in ("a.csv", "a.jsonl"):
        rows = read_all(FileSource(tmp_path / name, schema=pa.schema([("x", pa.float32())])))
        assert [float(row["x"]) for row in rows] == [0.10000000149011612, 16777216.0]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.csv.gz"])
def test_a_file_that_grows_while_it_is_read_is_refused_before_its_last_rows(tmp_path, small_blocks, name):
    path = (csv_file if "csv" in name else jsonl_file)(tmp_path / name, 50)
    more = csv_file(tmp_path / "more", 3).read_bytes()[6:]
    if name.endswith("gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
        more = gzip.compress(more)
    source = FileSource(path)
    (split,) = all_splits(source)
    reader = source.open_split(split)
    seen = 0
    with open(path, "ab") as file:
        file.write(more)
    with pytest.raises(StorageError, match="has changed since it was found"):
        while (got := reader.read(7)) is not None:
            seen += got[0].num_rows
    assert 0 < seen < 50
    reader.close()


def test_a_json_field_that_the_first_file_has_not_is_named(tmp_path):
    (tmp_path / "1.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "2.jsonl").write_text('{"a": 1}\n{"a": 1, "b": 2}\n')
    text_of = str(failure(FileSource(tmp_path)))
    assert f"{tmp_path}/2.jsonl, line 2: " in text_of
    assert "unexpected field 'b'; the columns are a" in text_of


def test_types_that_text_cannot_hold_are_refused_before_anything_runs(tmp_path):
    schema = pa.schema([("n", pa.int64()), ("m", pa.map_(pa.string(), pa.int64()))])
    with pytest.raises(SchemaError, match=r"column 'm' is map<large_string, int64>, which cannot be read from jsonl"):
        FileSource(jsonl_file(tmp_path / "a.jsonl", 1), schema=schema)
    for name, make in (("a.jsonl", jsonl_file), ("a.csv", csv_file)):
        with pytest.raises(SchemaError, match=r"column 'd' is decimal128\(5, -2\); declare a scale of at least 0"):
            FileSource(make(tmp_path / name, 1), schema=pa.schema([("d", pa.decimal128(5, -2))]))
    with pytest.raises(SchemaError, match=r"column 'l' is large_list<item: int64>, which cannot be read from csv"):
        FileSource(csv_file(tmp_path / "a.csv", 1), schema=pa.schema([("l", pa.list_(pa.int64()))]))


@pytest.mark.parametrize(("kind", "value"), [(pa.date32(), "2020-13-01"), (pa.timestamp("us"), "x")])
def test_a_text_that_is_no_time_is_named_with_its_line(tmp_path, kind, value):
    path = tmp_path / "a.jsonl"
    path.write_text('{"t": null}\n' * 5 + f'{{"t": "{value}"}}\n')
    error = failure(FileSource(path, schema=pa.schema([("t", kind)])))
    assert isinstance(error, SchemaError)
    assert f"{path}, line 6: " in str(error)
    assert value in str(error)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
@pytest.mark.parametrize(("unit", "digits"), [("s", 1), ("ms", 6), ("us", 9)])
def test_a_fraction_that_is_finer_than_the_declared_unit_is_named(tmp_path, name, unit, digits):
    at = f"2024-01-01 12:00:00.{'5' * digits}"
    (tmp_path / name).write_text(f't\n"{at}"\n' if name == "a.csv" else f'{{"t": "{at}"}}\n')
    error = failure(FileSource(tmp_path / name, schema=pa.schema([("t", pa.timestamp(unit))])))
    assert f"which has a fraction finer than {unit}" in str(error)


def test_what_cannot_be_a_header_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,a\n1,2\n")
    with pytest.raises(SchemaError, match="more than one column 'a'"):
        FileSource(path)
    path.write_text("")
    with pytest.raises(SchemaError, match="empty; its columns cannot be inferred: declare schema="):
        FileSource(path)
    with pytest.raises(ConfigError, match="without a header needs schema="):
        FileSource(path, csv=CsvOptions(header=False))


def test_an_empty_file_among_others_has_no_rows(tmp_path):
    (tmp_path / "1.csv").write_text("")
    csv_file(tmp_path / "2.csv", 3)
    (tmp_path / "3.csv").write_text("n,who\n")
    assert values(read_all(FileSource(tmp_path))) == [0, 1, 2]


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b"\n\r\n", b"\xef\xbb\xbf\r\n"])
@pytest.mark.parametrize("compress", [None, gzip.compress, bz2.compress])
@pytest.mark.parametrize("format", ["csv", "jsonl"])
def test_a_file_with_a_mark_or_line_ends_only_is_empty_too(tmp_path, content, compress, format):
    suffix = "" if compress is None else {gzip.compress: ".gz", bz2.compress: ".bz2"}[compress]
    (tmp_path / f"1.{format}{suffix}").write_bytes(content if compress is None else compress(content))
    (csv_file if format == "csv" else jsonl_file)(tmp_path / f"2.{format}", 3)
    declared = schema_of([("n", pa.int64()), ("who", pa.string())])
    for schema in (None, declared):
        for path in (tmp_path, tmp_path / "*"):
            assert values(read_all(FileSource(path, schema=schema))) == [0, 1, 2]
    alone = tmp_path / f"1.{format}*"
    assert read_all(FileSource(alone, schema=declared)) == []
    with pytest.raises(SchemaError, match=rf"1\.{format}.*: empty; its columns cannot be inferred: declare schema="):
        FileSource(alone)


def test_line_ends_that_are_longer_than_a_header_may_be_are_no_empty_file(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("\n" * (2**20 + 5) + "n,who\n1,a\n")
    error = failure(FileSource(path, schema=schema_of([("n", pa.int64()), ("who", pa.string())])))
    assert f"{path}: its header has more than" in str(error)


def test_a_truncated_archive_is_named(tmp_path):
    path = tmp_path / "a.csv.gz"
    data = gzip.compress(csv_file(tmp_path / "b.csv", 100_000).read_bytes())
    path.write_bytes(data[: len(data) // 2])
    error = failure(FileSource(path, schema=schema_of([("n", pa.int64()), ("who", pa.string())])))
    assert f"{path}" in str(error)
    assert "cannot be read as csv; it is incomplete, damaged" in str(error)
    (tmp_path / "c.csv.zip").write_bytes(b"PK nonsense")
    with pytest.raises(StorageError, match=r"c\.csv\.zip: cannot be read as csv"):
        FileSource(tmp_path / "c.csv.zip")


def test_a_file_without_line_ends_is_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(line_splitter, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(line_splitter, "LINE_BYTES_MAX", 5000)
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n' + "x" * 20_000)
    error = failure(FileSource(path, schema=pa.schema([("n", pa.int64())])))
    assert f"{path}, line 2: has more than 5000 bytes" in str(error)


def test_a_file_that_got_shorter_than_its_offset_is_refused(tmp_path):
    path = csv_file(tmp_path / "a.csv", 10)
    source = FileSource(path)
    (split,) = all_splits(source)
    _, offsets = read_split(source, split, rows_max=9)
    changed = csv_file(tmp_path / "b.csv", 5)
    info = changed.stat()
    part = msgspec.msgpack.decode(split.payload, type=files.FileSplit)
    part = msgspec.structs.replace(part, path=str(changed), size=info.st_size, modified_ns=info.st_mtime_ns)
    swapped = msgspec.structs.replace(split, payload=msgspec.msgpack.encode(part), offset=offsets[8])
    with pytest.raises(StorageError, match="it has changed since it was read"):
        read_split(source, swapped)


ZONED, LOCAL = '{"t":"2024-01-01T00:00:00+02:00"}\n', '{"t":"2024-06-01T12:00:00"}\n'


def test_a_json_timestamp_is_in_a_zone_if_and_only_if_its_column_is(tmp_path):
    (tmp_path / "in.jsonl").write_text(ZONED + LOCAL)
    with pytest.raises(SchemaError, match=r"line 1: .*2024-01-01T00:00:00\+02:00.*expected no zone offset"):
        read_all(FileSource(tmp_path / "in.jsonl", schema=schema_of([("t", pa.timestamp("us"))])))
    with pytest.raises(SchemaError, match=r"line 2: .*2024-06-01T12:00:00.*expected a zone offset"):
        read_all(FileSource(tmp_path / "in.jsonl", schema=schema_of([("t", pa.timestamp("us", "UTC"))])))
    nested = schema_of([("t", pa.struct([pa.field("at", pa.timestamp("us"))]))])
    (tmp_path / "nested.jsonl").write_text('{"t":{"at":"2024-01-01T00:00:00Z"}}\n')
    with pytest.raises(SchemaError, match="expected no zone offset"):
        read_all(FileSource(tmp_path / "nested.jsonl", schema=nested))


@pytest.mark.parametrize(
    ("lines", "kind"),
    [(LOCAL, pa.timestamp("ms")), (ZONED, pa.timestamp("ms", "UTC")), (ZONED + LOCAL, pa.large_string())],
)
def test_zones_of_json_timestamps_are_inferred(tmp_path, lines, kind):
    (tmp_path / "in.jsonl").write_text(lines)
    source = FileSource(tmp_path / "in.jsonl")
    assert source.schema == schema_of([("t", kind)])
    assert len(read_all(source)) == lines.count("\n")


def test_columns_that_must_have_a_value_are_declared_to_the_environment_too(tmp_path):
    must = pa.schema([pa.field("n", pa.int64(), nullable=False)])
    (tmp_path / "in.jsonl").write_text('{"n":1}\n{"m":2}\n')
    env = Environment("must")
    dropping = env.read_files(tmp_path / "in.jsonl", schema=must, on_bad_record="drop")
    assert dropping.preview().rows == [{"n": 1}]
    with pytest.raises(MidstreamError, match="line 2: column 'n' has no value"):
        env.read_files(tmp_path / "in.jsonl", schema=must).preview()


F32, F64 = pa.float32(), pa.float64()


@pytest.mark.parametrize(
    ("name", "kind", "text", "says"),
    [
        ("in.csv", F32, "1e39", r"to float: the number 1e39 in column 'x'"),
        ("in.csv", F32, "-4e38", r"to float: the number -4e38 in column 'x'"),
        ("in.csv", F64, "1e400", r"to double: the number 1e400 in column 'x'"),
        ("in.csv", F64, '"1e400"', r"to double: the number 1e400 in column 'x'"),
        ("in.jsonl", F32, "1e39", r"to float: the number 1e\+39 in column 'x'"),
        ("in.jsonl", F32, "-4" + "0" * 38, r"to float: the number -4e\+38 in column 'x'"),
        ("in.jsonl", F64, "1e400", "Number too big"),
        (
            "in.jsonl",
            pa.struct([("a", F64), ("b", pa.list_(F32))]),
            '{"a":1,"b":[2,1e39]}',
            r"the number 1e\+39 in column 'x'",
        ),
    ],
)
def test_a_number_beyond_the_range_of_its_type_is_refused(tmp_path, name, kind, text, says):
    """pyarrow makes it infinite."""
    if name == "in.csv":
        before, line, after = "n,x\n", f"1,{text}\n", "2,1.5\n3,inf\n"
    else:
        before, line, after = '{"n":0,"u":"a"}\n', f'{{"n":1,"x":{text}}}\n', '{"n":2,"u":1}\n{"n":3}\n'
    (tmp_path / name).write_text(before + line + after)
    schema = pa.schema([("n", pa.int64()), ("x", kind)])
    env = Environment("range")
    with pytest.raises(MidstreamError, match=f"line 2: .*{says}"):
        env.read_files(tmp_path / name, schema=schema).preview()
    dropping = env.read_files(tmp_path / name, schema=schema, on_bad_record="drop")
    assert [row["n"] for row in dropping.preview().rows if row["n"]] == [2, 3]


def test_numbers_that_are_written_as_infinite_are(tmp_path):
    schema = pa.schema([("x", F32), ("y", F64)])
    (tmp_path / "in.csv").write_text("x,y\ninf,-Infinity\n-INF,1\n3e38,1e308\n")
    (tmp_path / "in.jsonl").write_text(
        '{"x":Infinity,"y":-Infinity}\n{"x":-Infinity,"y":1,"z":2}\n{"x":3e38,"y":1e308}\n'
    )
    for name in ("in.csv", "in.jsonl"):
        rows = Environment("inf").read_files(tmp_path / name, schema=schema).preview().rows
        inf = float("inf")
        assert rows[:2] == [{"x": inf, "y": -inf}, {"x": -inf, "y": 1.0}]
        assert rows[2]["x"] == pytest.approx(3e38, rel=1e-6) and rows[2]["y"] == 1e308
