"""CSV and JSON lines: blocks of whole lines, each parsed by pyarrow separately.

An offset is the position of a block of lines and the number of its rows that are done, so reading resumes there without
parsing what comes before. Everything here blocks, and runs on an I/O pool (or on the driver, to infer a schema).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.fs
import pyarrow.json

from midstream.connectors.common.malformed_records import BadRecord, parsed_apart, reported
from midstream.connectors.files.file_formats import (
    WantedColumns,
    check_encoding,
    check_names,
    explained,
    what_is_wrong,
)
from midstream.connectors.files.line_splitter import LineSplitter, edges_of, last_line, line_begins, next_line
from midstream.connectors.files.lossy_numbers import (
    BOM,
    check_depth,
    check_inferred,
    integers_in_csv,
    integers_in_json,
    may_be_rounded,
)
from midstream.connectors.files.text_file import TextFile
from midstream.connectors.files.text_parsers import (
    CsvOptions,
    TextFormat,
    check_texts,
    csv_convert_options,
    csv_parse_options,
    csv_parser,
    is_an_object_a_line,
    jsonl_parser,
    misread_columns,
    quotes_of,
    read_json,
)
from midstream.connectors.files.time_formats import (
    check_years,
)
from midstream.engine.core.arrow_types import buffer_reader
from midstream.engine.core.batches import conform, single_batch
from midstream.engine.core.errors import DataError, SchemaError
from midstream.engine.core.schemas import DEPTH_MAX, check_distinct
from midstream.engine.operators.bad_records import BadRecords
from midstream.engine.operators.source_api import SplitReader

_HEADER_BYTES_MAX: Final = 2**20
_SAMPLE_BYTES: Final = 32 * 2**20
"""The part of the first file from which types are inferred."""
_ROW_BITS: Final = 24
_ROW_MASK: Final = (1 << _ROW_BITS) - 1
"""The bits of an offset that count rows within a block; a block has fewer bytes than they can count."""
ROW_NUMBER = re.compile(r"Row #\d+: | in row \d+")
_CSV_COLUMN = re.compile(r"In CSV column #(\d+): ")
_NO_OBJECT: Final = "JSON parse error: not one object in each line"
_UNIT = re.compile(r"timestamp\[(s|ms|us)\b")
_FRACTION = re.compile(rb":\d\d\.(\d+)")
_PLACES: Final = {"s": 0, "ms": 3, "us": 6}
_WITHOUT_VALUE: Final = ("Rescaling Decimal", "changed from", "years 1 to 9999")
"""Fragments of messages that do not show the value that is wrong."""


def block_and_rows(offset: int) -> tuple[int, int]:
    """Return the byte at which the block of an offset begins, and how many of its rows are done."""
    return offset >> _ROW_BITS, offset & _ROW_MASK


class TextReader(SplitReader):
    """Reads rows from the lines of `path` that begin at bytes from `first` up to `last` (exclusive; None: the end).

    `offset`: see above; 0 is the beginning. `check` raises if the file has changed; it is called before the last rows
    are returned. `drops_bad_lines`: a line that cannot be read is reported by `bad_records`; otherwise it raises
    StorageError or SchemaError naming the line.
    """

    def __init__(
        self,
        filesystem: pyarrow.fs.FileSystem,
        path: str,
        format: TextFormat,
        wanted: WantedColumns,
        *,
        csv: CsvOptions,
        check: Callable[[], None],
        first: int = 0,
        last: int | None = None,
        offset: int = 0,
        drops_bad_lines: bool = False,
    ) -> None:
        self._file = TextFile(filesystem, path)
        self._path = path
        self._format: TextFormat = format
        self._schema = wanted.schema
        self._names = wanted.schema.names
        self._quotes = quotes_of(csv) if format == "csv" else None
        self._check = check
        self._is_checked = False
        self._drops_bad_lines = drops_bad_lines
        self._block: _Block | None = None
        """The block at `_block_start`, if it has rows left."""
        self._bad: list[BadRecord] = []
        """The bad lines of the last read."""
        self._base = 0
        """The number of the first row of the last read in its block."""
        self._block_start, self._skip_rows = block_and_rows(offset)
        self._done_rows = 0
        """Rows of the block at `_block_start` that have been emitted; bad lines count as rows."""
        begin = 0
        with explained(path, format), ExitStack() as stack:
            if format == "csv":
                names, begin = read_header(self._file, csv, wanted.schema)
                if names:
                    self._names = names
                    check_names(names, wanted, path)
                self._parse = csv_parser(csv, wanted, self._names)
            else:
                check_encoding(self._file.read(0, len(BOM)), path)
                self._parse = jsonl_parser(wanted)
            self._lines = LineSplitter(
                self._file, self._quotes, stack, begin=begin, position=self._block_start, first=first, last=last
            )
            self._stack = stack.pop_all()

    def read(self, rows_max: int) -> tuple[pa.RecordBatch, int] | None:
        assert rows_max > 0, rows_max
        while self._block is None:
            with explained(self._path, self._format):
                data = self._lines.next_block()
            if self._lines.is_done and not self._is_checked:
                self._check()
                self._is_checked = True
            if data is not None:
                self._open_block(data)
            elif self._skip_rows:
                raise DataError(
                    f"{self._path}: ends {self._skip_rows} rows before the one where reading is to resume; it has "
                    "changed since it was read"
                )
            else:
                return None
        self._base, end = self._done_rows, min(self._done_rows + rows_max, self._block.rows)
        batch, self._bad = self._block.slice(self._base, end)
        self._done_rows = end
        if end < self._block.rows:
            return batch, self._block_start << _ROW_BITS | end
        self._block = None
        return batch, self._lines.position << _ROW_BITS

    def bad_records(self) -> BadRecords | None:
        return reported(self._bad, self._base)

    def _open_block(self, data: bytes) -> None:
        if data.isspace() and self._has_no_rows(data):
            return
        begins = self._lines.position - len(data)  # taken before parsing, since a block that is cut again is longer
        block = self._parsed(data)
        self._block_start, self._done_rows = begins, min(self._skip_rows, block.rows)
        self._skip_rows -= self._done_rows
        if block.rows > self._done_rows:
            self._block = block

    def _has_no_rows(self, space: bytes) -> bool:
        """Whether a line of white space has no row: in CSV it may be a value, and in a single column an empty line is
        one.
        """
        return self._format == "jsonl" or (len(self._names) > 1 and not space.strip(b"\r\n"))

    def _parsed(self, data: bytes) -> _Block:
        try:
            table = self._parse(data)
            if self._drops_bad_lines and self._format == "jsonl" and not is_an_object_a_line(data, table.num_rows):
                raise pa.ArrowInvalid(_NO_OBJECT)
        except pa.ArrowException as error:
            if not self._lines.ends_with_line(data):
                with explained(self._path, self._format):
                    return self._parsed(self._lines.recut(data))
            if self._drops_bad_lines:
                return self._good_and_bad(data, str(error))
            at, text = self._culprit(data, str(error))
            line = self._file.line_at(self._lines.position - len(data) + at)
            raise what_is_wrong(f"{self._path}, line {line}", self._format, text) from error
        return _Block(conform(single_batch(table), self._schema, self._path))

    def _good_and_bad(self, data: bytes, error: str) -> _Block:
        """Separate the good lines of `data` from those that cannot be read."""
        begins = line_begins(data, edges_of(self._quotes, data))
        lines = [
            (begin, end)
            for begin, end in pairwise(begins)
            if not (data[begin:end].isspace() and self._has_no_rows(data[begin:end]))
        ]

        def parse(first: int, last: int) -> pa.Table:
            piece = b"".join(data[begin:end] for begin, end in lines[first:last])
            table = self._parse(piece)
            is_right = self._format == "csv" or is_an_object_a_line(piece, table.num_rows)
            if not is_right or table.num_rows != last - first:
                raise pa.ArrowInvalid(_NO_OBJECT if self._format == "jsonl" else "CSV parse error: not one row")
            return table

        good: list[pa.RecordBatch] = []
        bad: list[BadRecord] = []
        start = self._lines.position - len(data)
        for part in parsed_apart(parse, 0, len(lines), error) if lines else ():
            if isinstance(part, pa.Table):
                good.append(conform(single_batch(part), self._schema, self._path))
                continue
            number, text = part
            begin, end = lines[number]
            line = data[begin:end].rstrip(b"\r\n")
            text = f"the line is not {self._format} of the columns: {self._reworded(line, text)}"
            bad.append(BadRecord(number, self._path, None, start + begin, line, text))
        batch = single_batch(pa.Table.from_batches(good, self._schema))
        return _Block(batch, bad)

    def _culprit(self, data: bytes, text: str) -> tuple[int, str]:
        """Return where the line that does not parse begins, and why; the first line if that cannot be determined."""
        begins = line_begins(data, edges_of(self._quotes, data))
        good, bad = 0, len(begins) - 1  # the first `good` lines parse, the first `bad` do not
        while bad - good > 1:
            middle = (good + bad) // 2
            try:
                self._parse(data[begins[good] : begins[middle]])
                good = middle
            except pa.ArrowException as error:
                bad, text = middle, str(error)
        return begins[bad - 1], self._reworded(data[begins[bad - 1] : begins[bad]], text)

    def _reworded(self, line: bytes, text: str) -> str:
        """Reword a message of pyarrow about one line, with names instead of numbers."""
        column = _CSV_COLUMN.search(text)
        if column is not None and int(column[1]) < len(self._names):
            text = text.replace(column[0], f"column {self._names[int(column[1])]!r}: ")
        if self._format == "jsonl" and "unexpected field" in text:
            try:
                found = msgspec.json.decode(line, type=dict[str, Any])
            except (msgspec.DecodeError, RecursionError):  # the line has more errors after that field
                found = {}
            extra = ", ".join(repr(name) for name in found if name not in self._names)
            text = f"unexpected field {extra or 'in a nested value'}; the columns are {', '.join(self._names)}"
        unit, fractions = _UNIT.search(text), _FRACTION.findall(line)
        if unit is not None and any(len(digits) > _PLACES[unit[1]] for digits in fractions):
            text = f"{text}, which has a fraction finer than {unit[1]}"
        if any(sign in text for sign in _WITHOUT_VALUE):
            text = f"{text}, in the line {line.strip().decode(errors='replace')!r:.200}"
        return ROW_NUMBER.sub("", text)

    def close(self) -> None:
        self._block = None
        self._stack.close()


class _Block:
    """Rows of good lines, and the bad lines among them, each with its number `at` among both."""

    def __init__(self, good: pa.RecordBatch, bad: Sequence[BadRecord] = ()) -> None:
        self.rows = good.num_rows + len(bad)
        self._good = good
        self._bad = bad
        self._at = [each.at for each in bad]

    def slice(self, first: int, last: int) -> tuple[pa.RecordBatch, list[BadRecord]]:
        before, until = bisect_left(self._at, first), bisect_left(self._at, last)
        return self._good.slice(first - before, last - first - until + before), list(self._bad[before:until])


# ---- parsing ----


def read_header(file: TextFile, csv: CsvOptions, schema: pa.Schema) -> tuple[list[str], int]:
    """Return the names of a CSV file's columns, and where its first row begins; without a header, the names of
    `schema`. A file without a header that should have one is empty, and has no names.
    """
    head = file.read(0, _HEADER_BYTES_MAX if csv.header else len(BOM))
    check_encoding(head, file.path)
    start = len(BOM) if head.startswith(BOM) else 0
    if not csv.header:
        return schema.names, start
    text = head[start:].lstrip(b"\r\n")
    if not text and len(head) < _HEADER_BYTES_MAX:
        return [], len(head)
    edges = edges_of(quotes_of(csv), text)
    end = (next_line(text, 1, edges) if text else 0) or len(text)
    if end == len(text) and len(head) == _HEADER_BYTES_MAX:
        raise SchemaError(
            f"{file.path}: its header has more than {_HEADER_BYTES_MAX} bytes; check that this is a file of lines"
        )
    if end == len(text) and len(edges) % 2:
        raise SchemaError(f"{file.path}: a quoted value of its header never ends")
    header = text[:end] if text[:end].endswith((b"\r", b"\n")) else text[:end] + b"\n"
    found = pyarrow.csv.read_csv(buffer_reader(header), parse_options=csv_parse_options(csv, 0)).schema
    check_distinct(found.names, file.path)
    return found.names, len(head) - len(text) + end


def infer_schema(filesystem: pyarrow.fs.FileSystem, path: str, format: TextFormat, csv: CsvOptions) -> pa.Schema:
    """Infer the columns of a file from its first part; an empty file has none."""
    file = TextFile(filesystem, path)
    with explained(path, format):
        head = file.read(0, _SAMPLE_BYTES)
        is_all = len(head) < _SAMPLE_BYTES
        check_encoding(head, path)
        if not head.removeprefix(BOM).strip():
            return pa.schema([])
        if format == "csv":
            found = _infer_csv(file, head, is_all, csv)
        else:
            found = _infer_json(head if is_all else head[: last_line(head, edges_of(None, head))])
    fields = [pa.field(f.name, pa.large_string()) if pa.types.is_null(f.type) else f for f in found]
    return pa.schema(fields)


def _infer_json(data: bytes) -> pa.Schema:
    """Infer the columns of JSON lines. pyarrow ignores the zone of a timestamp: a column is in UTC if all values have one."""
    check_depth(data, DEPTH_MAX)
    read = read_json(data, None)
    found = read.schema
    rounded = [field for field, column in zip(found, read.columns, strict=True) if may_be_rounded(column)]
    if rounded:
        check_inferred(integers_in_json(data, pa.schema(rounded)))
    times = {field.name: field.type for field in found if pa.types.is_timestamp(field.type)}
    if not times:
        return found
    as_text = pa.schema([pa.field(name, pa.large_string()) for name in times])
    texts = read_json(data, pyarrow.json.ParseOptions(explicit_schema=as_text))
    for name, kind in times.items():
        index = found.get_field_index(name)
        fitting = (each for each in (kind, pa.timestamp(kind.unit, "UTC")) if _can_cast(texts.select([name]), each))
        found = found.set(index, pa.field(name, next(fitting, pa.large_string())))
    return found


def _can_cast(texts: pa.Table, kind: pa.DataType) -> bool:
    try:
        check_years(texts.cast(pa.schema([pa.field(texts.column_names[0], kind)])))
    except pa.ArrowInvalid:
        return False
    return True


def _infer_csv(file: TextFile, head: bytes, is_all: bool, csv: CsvOptions) -> pa.Schema:
    names, begin = read_header(file, csv, pa.schema([]))
    rows = head[begin:]
    if not is_all:
        rows = rows[: last_line(rows, edges_of(quotes_of(csv), rows))]
    if not rows.strip(b"\r\n"):
        return pa.schema([(name, pa.null()) for name in names])

    def parsed(types: dict[str, pa.DataType], columns: list[str] | None) -> pa.Table:
        return pyarrow.csv.read_csv(
            buffer_reader(rows),
            pyarrow.csv.ReadOptions(block_size=len(rows) + 1, use_threads=False, column_names=names),
            csv_parse_options(csv, len(names)),
            csv_convert_options(csv, types, columns),
        )

    table = parsed({}, None)
    rounded = [name for name, column in zip(names, table.columns, strict=True) if may_be_rounded(column)]
    if rounded:
        check_inferred(integers_in_csv(parsed(dict.fromkeys(rounded, pa.large_string()), rounded)))
    found = table.schema
    for field in found:
        if pa.types.is_binary(field.type):  # pyarrow takes text that is not UTF-8 for bytes
            _check_utf8(file, begin, rows, field.name)
    misread = misread_columns(table, rows, csv)
    texts = parsed(dict.fromkeys(misread, pa.large_string()), misread) if misread else table
    for index, (name, column) in enumerate(zip(names, table.columns, strict=True)):
        try:
            check_years(table.select([name]))
            if name in misread:
                check_texts(name, column, texts.column(name), csv, column.type)
        except pa.ArrowInvalid:
            found = found.set(index, pa.field(name, pa.large_string()))
    return found


def _check_utf8(file: TextFile, begin: int, rows: bytes, name: str) -> None:
    try:
        rows.decode()
    except UnicodeDecodeError as error:
        line = file.line_at(begin + rows.rfind(b"\n", 0, error.start) + 1)
        text = f"column {name!r}: CSV conversion error: invalid UTF8 data"
        raise what_is_wrong(f"{file.path}, line {line}", "csv", text) from error
