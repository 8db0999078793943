"""CSV and JSON lines: blocks of whole lines, each parsed by pyarrow on its own.

An offset is where a block of lines begins and how many of its rows are done, so that reading goes
on there without parsing what came before. Everything here blocks, and runs on an I/O pool (or on
the driver, to infer a schema).
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final, Literal, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.fs
import pyarrow.json

from midstream.connectors.formats import check_columns, check_names, compression_of, explained, what_is_wrong
from midstream.core.batches import conform, single_batch
from midstream.core.errors import ConfigError, SchemaError, StorageError
from midstream.operators.source import SplitReader

TextFormat: TypeAlias = Literal["csv", "jsonl"]

BLOCK_BYTES: Final = 4 * 2**20
LINE_BYTES_MAX: Final = 64 * 2**20
_SAMPLE_BYTES = 32 * 2**20
"""Types are inferred from so much of the first file."""
_ROW_BITS = 24
_ROW_MASK = (1 << _ROW_BITS) - 1
"""Of an offset: rows within a block, which has fewer bytes than these bits can count."""
_ROW_NUMBER = re.compile(r"Row #\d+: | in row \d+")
_CSV_COLUMN = re.compile(r"In CSV column #(\d+): ")


class CsvOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a CSV file is written.

    `null_values`: texts that stand for null, in every column, unless quoted. `header`: the first line
    names the columns; without one, the schema must be declared and names them in order.
    `timestamp_formats`: strptime formats, tried after ISO 8601.
    """

    delimiter: str = ","
    quote: str = '"'
    header: bool = True
    null_values: tuple[str, ...] = ("", "NA", "null")
    newlines_in_values: bool = False
    timestamp_formats: tuple[str, ...] = ()


def block_and_rows(offset: int) -> tuple[int, int]:
    """At which byte the block of an offset begins, and how many of its rows are done."""
    return offset >> _ROW_BITS, offset & _ROW_MASK


class TextReader(SplitReader):
    """The rows of the lines of `path` that begin at bytes `first` up to, not including, `last` (None: the end).

    `offset`: see above; 0 is the beginning. Columns beyond `schema` are left out if it was `declared`,
    else refused. Raises StorageError or SchemaError naming the line.
    """

    def __init__(
        self,
        filesystem: pyarrow.fs.FileSystem,
        path: str,
        format: TextFormat,
        schema: pa.Schema,
        *,
        declared: bool,
        csv: CsvOptions,
        first: int = 0,
        last: int | None = None,
        offset: int = 0,
    ) -> None:
        self._filesystem = filesystem
        self._path = path
        self._format: TextFormat = format
        self._schema = schema
        self._names = schema.names
        self._quote = csv.quote.encode() if format == "csv" and csv.newlines_in_values else b""
        self._rest: pa.RecordBatch | None = None
        self._block_start, self._skip_rows = block_and_rows(offset)
        self._done_rows = 0
        """Rows of the block at `_block_start` that are emitted."""
        header_bytes = 0
        with explained(path, format), ExitStack() as stack:
            if format == "csv":
                self._names, header_bytes = read_header(filesystem, path, csv, schema)
                check_names(self._names, schema, declared, path)
                self._parse = _csv_parser(csv, schema, self._names)
            else:
                self._parse = _jsonl_parser(schema, declared)
            stream = _open_text(filesystem, path, stack)
            if self._block_start == 0 and first > header_bytes:
                _skip(stream, first - 1)
                self._lines = _Lines(stream, path, first - 1, last, self._quote)
                self._lines.skip_line()
            else:
                start = max(self._block_start, header_bytes)
                _skip(stream, start)
                self._lines = _Lines(stream, path, start, last, self._quote)
            self._stack = stack.pop_all()

    def read(self, rows_max: int) -> tuple[pa.RecordBatch, int] | None:
        assert rows_max > 0, rows_max
        while self._rest is None:
            with explained(self._path, self._format):
                data = self._lines.next_block()
            if data is not None:
                self._open_block(self._lines.position - len(data), data)
            elif self._skip_rows:
                raise StorageError(
                    f"{self._path}: ends {self._skip_rows} rows before the one from which it is to be read on; "
                    "it is no longer what was read before"
                )
            else:
                return None
        batch = self._rest.slice(0, rows_max)
        self._done_rows += batch.num_rows
        if batch.num_rows < self._rest.num_rows:
            self._rest = self._rest.slice(rows_max)
            return batch, self._block_start << _ROW_BITS | self._done_rows
        self._rest = None
        return batch, self._lines.position << _ROW_BITS

    def _open_block(self, start: int, data: bytes) -> None:
        if not data.strip():
            return
        batch = self._parsed(start, data)
        self._block_start, self._done_rows = start, min(self._skip_rows, batch.num_rows)
        self._skip_rows -= self._done_rows
        if batch.num_rows > self._done_rows:
            self._rest = batch.slice(self._done_rows)

    def _parsed(self, start: int, data: bytes) -> pa.RecordBatch:
        try:
            table = self._parse(data)
        except pa.ArrowException as error:
            line, text = self._culprit(data, str(error))
            with ExitStack() as stack:
                stream = _open_text(self._filesystem, self._path, stack)
                line += _count_lines(stream, start)
            raise what_is_wrong(f"{self._path}, line {line}", self._format, text) from error
        return conform(single_batch(table), self._schema, self._path)

    def _culprit(self, data: bytes, text: str) -> tuple[int, str]:
        """Which line of `data`, counted from 1, does not parse, and why; the first where that cannot be told."""
        lines = data.splitlines(keepends=True)
        good, bad = 0, len(lines)  # the first `good` lines parse, the first `bad` do not
        if self._quote:  # a row may have several lines
            good = bad - 1
        while bad - good > 1:
            middle = (good + bad) // 2
            try:
                self._parse(b"".join(lines[good:middle]))
                good = middle
            except pa.ArrowException as error:
                bad, text = middle, str(error)
        column = _CSV_COLUMN.search(text)
        if column is not None and int(column[1]) < len(self._names):
            text = text.replace(column[0], f"column {self._names[int(column[1])]!r}: ")
        if self._format == "jsonl" and "unexpected field" in text:
            found = msgspec.json.decode(lines[bad - 1], type=dict[str, Any])
            extra = ", ".join(repr(name) for name in found if name not in self._names)
            text = f"unexpected field {extra or 'in a nested value'}; the columns are {', '.join(self._names)}"
        return (1 if self._quote else bad), _ROW_NUMBER.sub("", text)

    def close(self) -> None:
        self._rest = None
        self._stack.close()


class _Lines:
    """Cuts a stream, of which `position` bytes are read, into blocks of whole lines.

    `quote`: line ends between two of these do not end a line (b"": all do).
    """

    def __init__(self, stream: Any, path: str, position: int, last: int | None, quote: bytes) -> None:
        self.position = position
        """Where the next block begins."""
        self._stream = stream
        self._path = path
        self._last = last
        self._quote = quote
        self._read = b""
        """Read, from `position` on."""

    def next_block(self) -> bytes | None:
        if self._last is not None and self.position >= self._last:
            return None
        block = self._block()
        if self._last is not None and self.position + len(block) > self._last:
            end = block.find(b"\n", self._last - 1 - self.position) + 1
            if end:
                self._read = block[end:] + self._read
                block = block[:end]
        self.position += len(block)
        return block or None

    def skip_line(self) -> None:
        block = self._block()
        end = (block.find(b"\n") + 1) or len(block)
        self._read = block[end:] + self._read
        self.position += end

    def _block(self) -> bytes:
        wanted = BLOCK_BYTES
        while True:
            at_end = self._fill(wanted)
            end = len(self._read) if at_end else self._end()
            if end or at_end:
                block, self._read = self._read[:end], self._read[end:]
                return block
            if wanted >= LINE_BYTES_MAX:
                raise StorageError(
                    f"{self._path}: the line that begins at byte {self.position} has more than {LINE_BYTES_MAX} bytes; "
                    "is this a file of lines?"
                )
            wanted += BLOCK_BYTES

    def _fill(self, wanted: int) -> bool:
        """Whether the stream ended before so many bytes."""
        while len(self._read) < wanted:
            more = self._stream.read(wanted - len(self._read))
            if not more:
                return True
            self._read += more
        return False

    def _end(self) -> int:
        """Behind the last line end in what is read; 0 if there is none."""
        end = self._read.rfind(b"\n") + 1
        if self._quote:
            open_quotes = self._read.count(self._quote, 0, end) % 2
            while end and open_quotes:
                before = self._read.rfind(b"\n", 0, end - 1) + 1
                open_quotes = (open_quotes - self._read.count(self._quote, before, end)) % 2
                end = before
        return end


def _skip(stream: Any, count: int) -> None:
    if stream.seekable():
        stream.seek(count)
        return
    while count:
        got = len(stream.read(min(count, BLOCK_BYTES)))
        if not got:
            return
        count -= got


def _count_lines(stream: Any, end: int) -> int:
    lines = 0
    while end and (data := stream.read(min(end, BLOCK_BYTES))):
        lines += data.count(b"\n")
        end -= len(data)
    return lines


# ---- parsing ----


def _csv_parser(csv: CsvOptions, schema: pa.Schema, names: list[str]) -> Callable[[bytes], pa.Table]:
    parse = _csv_parse(csv)
    convert = _csv_convert(csv, {field.name: field.type for field in schema}, schema.names)

    def parsed(data: bytes) -> pa.Table:
        read = pyarrow.csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=names)
        return pyarrow.csv.read_csv(
            pa.BufferReader(data), read_options=read, parse_options=parse, convert_options=convert
        )

    return parsed


def _jsonl_parser(schema: pa.Schema, declared: bool) -> Callable[[bytes], pa.Table]:
    as_read = pa.schema([pa.field(field.name, _json_type(field.type)) for field in schema])
    parse = pyarrow.json.ParseOptions(
        explicit_schema=as_read, unexpected_field_behavior="ignore" if declared else "error"
    )

    def parsed(data: bytes) -> pa.Table:
        read = pyarrow.json.ReadOptions(use_threads=False, block_size=len(data) + 1)
        return pyarrow.json.read_json(pa.BufferReader(data), read_options=read, parse_options=parse).cast(schema)

    return parsed


def check_types(schema: pa.Schema, format: TextFormat, csv: CsvOptions) -> None:
    """Raises SchemaError naming the first column whose type cannot be read from text."""
    for field in schema:
        only = pa.schema([field])
        try:
            if format == "csv":
                _csv_parser(csv, only, [field.name])(b'"x"\n')
            else:
                _jsonl_parser(only, declared=True)(b"{}\n")
        except pa.ArrowNotImplementedError as error:
            raise SchemaError(
                f"FileSource: column {field.name!r} is {field.type}, which cannot be read from {format}: {error}"
            ) from error
        except pa.ArrowInvalid:
            pass  # "x" is no value of most types


def read_header(
    filesystem: pyarrow.fs.FileSystem, path: str, csv: CsvOptions, schema: pa.Schema
) -> tuple[list[str], int]:
    """The names of a CSV file's columns, and how many bytes the header takes; without one, those of `schema`."""
    if not csv.header:
        return schema.names, 0
    with ExitStack() as stack:
        head = _open_text(filesystem, path, stack).read(2**20)
    end = 0
    while end < len(head):
        end = (head.find(b"\n", end) + 1) or len(head)
        if head[:end].strip() and head.count(csv.quote.encode() or b"\n\n", 0, end) % 2 == 0:
            break
    if not head[:end].strip():
        raise SchemaError(f"{path}: empty; it has no header that names its columns")
    found = pyarrow.csv.read_csv(pa.BufferReader(head[:end]), parse_options=_csv_parse(csv)).schema
    check_columns(found, path)
    return found.names, end


def infer_schema(filesystem: pyarrow.fs.FileSystem, path: str, format: TextFormat, csv: CsvOptions) -> pa.Schema:
    """The columns of a file as its first part shows them. Raises SchemaError when it shows none."""
    with explained(path, format), ExitStack() as stack:
        head = _open_text(filesystem, path, stack).read(_SAMPLE_BYTES)
        if len(head) == _SAMPLE_BYTES:  # end with a whole line
            head = head[: head.rfind(b"\n") + 1]
        if not head.strip():
            raise SchemaError(f"{path}: empty; its columns cannot be inferred: declare schema=")
        block_size = len(head) + 1
        if format == "csv":
            found = pyarrow.csv.read_csv(
                pa.BufferReader(head),
                read_options=pyarrow.csv.ReadOptions(block_size=block_size, use_threads=False),
                parse_options=_csv_parse(csv),
                convert_options=_csv_convert(csv, {}, None),
            ).schema
        else:
            read = pyarrow.json.ReadOptions(block_size=block_size, use_threads=False)
            found = pyarrow.json.read_json(pa.BufferReader(head), read_options=read).schema
    fields = [pa.field(f.name, pa.large_string()) if pa.types.is_null(f.type) else f for f in found]
    return pa.schema(fields)


def _csv_parse(csv: CsvOptions) -> pyarrow.csv.ParseOptions:
    return pyarrow.csv.ParseOptions(
        delimiter=csv.delimiter, quote_char=csv.quote or False, newlines_in_values=csv.newlines_in_values
    )


def _csv_convert(
    csv: CsvOptions, types: dict[str, pa.DataType], columns: list[str] | None
) -> pyarrow.csv.ConvertOptions:
    return pyarrow.csv.ConvertOptions(
        column_types=types,
        include_columns=columns,
        null_values=list(csv.null_values),
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
        timestamp_parsers=[pyarrow.csv.ISO8601, *csv.timestamp_formats],
    )


def _json_type(kind: pa.DataType) -> pa.DataType:
    """The type to read in place of one that pyarrow's JSON reader does not know; a cast does the rest."""
    if pa.types.is_large_list(kind):
        return pa.list_(_json_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _json_type(f.type)) for f in kind])
    if pa.types.is_date(kind) or pa.types.is_time(kind):
        return pa.large_string()
    return kind


def _open_text(filesystem: pyarrow.fs.FileSystem, path: str, stack: ExitStack) -> Any:
    """The bytes of a file, decompressed as its suffix says."""
    compression = compression_of(path)
    if compression is None:
        return stack.enter_context(filesystem.open_input_file(path))
    if compression != "zip":
        return stack.enter_context(filesystem.open_input_stream(path, compression=compression))
    archive = stack.enter_context(
        zipfile.ZipFile(io.BufferedReader(stack.enter_context(filesystem.open_input_file(path))))
    )
    members = [name for name in archive.namelist() if not name.endswith("/")]
    if len(members) != 1:
        raise ConfigError(f"{path}: a zip archive of {len(members)} files; only archives of one file can be read")
    return stack.enter_context(pa.PythonFile(stack.enter_context(archive.open(members[0])), mode="r"))
