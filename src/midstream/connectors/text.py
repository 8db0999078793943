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
from typing import Any, Final, Literal, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.fs
import pyarrow.json

from midstream.connectors.bad_records import BadRecord, parsed_apart, reported
from midstream.connectors.formats import (
    MISSES_VALUE,
    Wanted,
    check_columns,
    check_names,
    explained,
    what_is_wrong,
)
from midstream.connectors.lines import Lines, Quotes, edges_of, last_line, line_begins, next_line
from midstream.connectors.text_file import TextFile
from midstream.connectors.text_ranges import (
    BOM,
    check_inferred,
    check_ranges,
    has_infinite,
    integers_in_csv,
    integers_in_json,
    may_be_rounded,
    of_64_bits,
)
from midstream.core.arrow_types import buffer_reader
from midstream.core.batches import conform, single_batch
from midstream.core.errors import ConfigError, DataError, SchemaError
from midstream.operators.bad_records import BadRecords
from midstream.operators.source import SplitReader

TextFormat: TypeAlias = Literal["csv", "jsonl"]

_HEADER_BYTES_MAX: Final = 2**20
_SAMPLE_BYTES: Final = 32 * 2**20
"""The part of the first file from which types are inferred."""
_ROW_BITS: Final = 24
_ROW_MASK: Final = (1 << _ROW_BITS) - 1
"""The bits of an offset that count rows within a block; a block has fewer bytes than they can count."""
ROW_NUMBER = re.compile(r"Row #\d+: | in row \d+")
_CSV_COLUMN = re.compile(r"In CSV column #(\d+): ")
_END_TEXT: Final = "end of the block"
_NULL_FIRST = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*null")
_NO_OBJECT: Final = "JSON parse error: not one object in each line"
_NULL_LINE = re.compile(rb"null[ \t]*(?:[\r\n]|\Z)")


class CsvOptions(msgspec.Struct, frozen=True, kw_only=True):
    r"""How CSV files are written.

    `delimiter`, `quote`: one ASCII character each; `quote` may be empty, if values are never quoted.
    `header`: the first line names the columns; without one, the schema must be declared and names them in order.
    `null_values`: strings that stand for null, in every column, unless quoted.
    `newlines_in_values`: read each file in one piece. Quoted values with line ends are read in any case, but a large
    file that is read in parts may be refused because of them.
    `timestamp_formats`: strptime formats, tried after ISO 8601.

        >>> _ = Path("words.csv").write_text("1;a\n2;b\n")
        >>> csv = CsvOptions(delimiter=";", header=False)
        >>> env.read_files("words.csv", schema={"n": int, "word": str}, csv=csv).preview().rows
        [{'n': 1, 'word': 'a'}, {'n': 2, 'word': 'b'}]

    Raises ConfigError for other delimiters and quotes, and for a text in place of a tuple.
    """

    delimiter: str = ","
    quote: str = '"'
    header: bool = True
    null_values: tuple[str, ...] = ("", "NA", "null")
    newlines_in_values: bool = False
    timestamp_formats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("null_values", "timestamp_formats"):
            given = getattr(self, name)
            if isinstance(given, str):  # its characters would be taken one by one
                raise ConfigError(
                    f"CsvOptions: {name} is the text {given!r}; give a tuple of texts, such as ({given!r},)"
                )
        for name, may_be_empty in (("delimiter", False), ("quote", True)):
            given = getattr(self, name)
            if not (isinstance(given, str) and given.isascii() and (len(given) == 1 or (may_be_empty and not given))):
                raise ConfigError(
                    f"CsvOptions: {name} is {given!r}; give one ASCII character"
                    + (', or "" if values are never quoted' if may_be_empty else "")
                )
            if given in ("\r", "\n"):
                raise ConfigError(f"CsvOptions: {name} is {given!r}, which ends a line; give another character")
        if self.delimiter == self.quote:
            raise ConfigError(f"CsvOptions: delimiter and quote are both {self.quote!r}; give different characters")


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
        wanted: Wanted,
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
        self._quotes = _quotes(csv) if format == "csv" else None
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
                self._names, begin = read_header(self._file, csv, wanted.schema)
                check_names(self._names, wanted, path)
                self._parse = csv_parser(csv, wanted, self._names)
            else:
                self._parse = jsonl_parser(wanted)
            self._lines = Lines(
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
            if self._drops_bad_lines and self._format == "jsonl" and not _is_an_object_a_line(data, table.num_rows):
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
            is_right = self._format == "csv" or _is_an_object_a_line(piece, table.num_rows)
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


def csv_parser(csv: CsvOptions, wanted: Wanted, names: list[str]) -> Callable[[bytes], pa.Table]:
    """Return a parser, which also raises ArrowException if the data end within a quoted value, which pyarrow ignores.

    To find out, it appends a line that is skipped, having a column too many, unless it becomes part of a value.
    """
    end = _END_TEXT + csv.delimiter * len(names)
    ends: list[str] = []

    def on_bad_line(line: pyarrow.csv.InvalidRow) -> Literal["skip", "error"]:
        if line.text != end:
            return "error"
        ends.append(end)
        return "skip"

    parse = _csv_parse(csv, len(names), on_bad_line)
    convert = _csv_convert(csv, {field.name: field.type for field in wanted.schema}, wanted.schema.names)

    def parsed(data: bytes) -> pa.Table:
        if data.startswith(BOM):  # part of a value, since the file does not begin here; pyarrow removes one
            data = BOM + data
        ends.clear()
        if csv.quote:
            data = b"".join((data, b"" if data.endswith((b"\r", b"\n")) else b"\n", end.encode()))
        read = pyarrow.csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=names)
        table = pyarrow.csv.read_csv(
            buffer_reader(data), read_options=read, parse_options=parse, convert_options=convert
        )
        if csv.quote and not ends:
            raise pa.ArrowInvalid("CSV parse error: a quoted value never ends")
        is_in_doubt = has_infinite if wanted.declared else may_be_rounded
        if in_doubt := [name for name in table.column_names if is_in_doubt(table.column(name))]:
            as_text = _csv_convert(csv, dict.fromkeys(in_doubt, pa.large_string()), in_doubt)
            texts = pyarrow.csv.read_csv(
                buffer_reader(data), read_options=read, parse_options=parse, convert_options=as_text
            )
            check_ranges(table.select(in_doubt), texts)
            if not wanted.declared:
                check_inferred(integers_in_csv(texts))
        return _checked(table, wanted)

    return parsed


def jsonl_parser(wanted: Wanted) -> Callable[[bytes], pa.Table]:
    """Return a parser of JSON lines, which raises ArrowException."""
    as_read = pa.schema([pa.field(field.name, _json_type(field.type)) for field in wanted.schema])
    parse = pyarrow.json.ParseOptions(
        explicit_schema=as_read, unexpected_field_behavior="ignore" if wanted.declared else "error"
    )

    def parsed(data: bytes) -> pa.Table:
        table = _read_json(data, parse)
        if any(has_infinite(column) for column in table.columns):
            in_64_bits = pyarrow.json.ParseOptions(
                explicit_schema=pa.schema([pa.field(field.name, of_64_bits(field.type)) for field in as_read]),
                unexpected_field_behavior="ignore",
            )
            check_ranges(table, _read_json(data, in_64_bits))
        if not wanted.declared and any(may_be_rounded(column) for column in table.columns):
            check_inferred(integers_in_json(data, wanted.schema))
        return _checked(table.cast(wanted.schema), wanted)

    return parsed


def _read_json(data: bytes, parse: pyarrow.json.ParseOptions | None) -> pa.Table:
    """Parse JSON lines, working around pyarrow, which reads the line `null` as a row of nulls, crashes if it is the
    first, and accepts any bytes as names and strings.
    """
    if _NULL_FIRST.match(data):
        raise pa.ArrowInvalid("JSON parse error: null is not an object")
    if not data.isascii():
        try:
            data.decode()  # names too: an invalid one would be taken for an unknown field and ignored
        except UnicodeDecodeError as error:
            raise pa.ArrowInvalid(f"JSON parse error: Invalid UTF8: {error.reason}") from error
    read = pyarrow.json.ReadOptions(use_threads=False, block_size=len(data) + 1)
    table = pyarrow.json.read_json(buffer_reader(data), read_options=read, parse_options=parse)
    if _has_empty_row(table) and _NULL_LINE.search(data):
        raise pa.ArrowInvalid("JSON parse error: null is not an object")
    return table


def _is_an_object_a_line(data: bytes, rows: int) -> bool:
    """Whether each line holds one object; pyarrow also accepts several objects in one line, and one in several lines.

    If each line begins and ends with a brace, no object continues in the next line: in JSON, a brace never follows a
    brace without a comma in between.
    """
    lines = data.count(b"\n") + (not data.endswith(b"\n"))
    if data.startswith(b"{") and data.endswith((b"}\n", b"}")) and data.count(b"}\n{") == lines - 1:
        return rows == lines
    found = [line for each in data.removeprefix(BOM).splitlines() if (line := each.strip(b" \t"))]
    return rows == len(found) and all(line.startswith(b"{") and line.endswith(b"}") for line in found)


def _has_empty_row(table: pa.Table) -> bool:
    """Whether some row is null in all columns."""
    if any(column.null_count == 0 for column in table.columns):
        return False
    empty: pa.Array[Any] | pa.ChunkedArray[Any] = pa.chunked_array([[True] * table.num_rows], pa.bool_())
    for column in table.columns:
        empty = pc.and_(empty, column.is_null())
    return bool(pc.any(empty).as_py())


def _checked(table: pa.Table, wanted: Wanted) -> pa.Table:
    for name in wanted.required:
        if table.column(name).null_count:
            raise pa.ArrowInvalid(f"column {name!r} {MISSES_VALUE}")
    return table


def check_types(
    schema: pa.Schema, format: TextFormat, csv: CsvOptions | None = None, *, who: str = "FileSource"
) -> None:
    """Raise SchemaError naming the first column whose type cannot be read from text."""
    csv = csv or CsvOptions()
    for field in schema:
        only = Wanted(pa.schema([field]), declared=True)
        try:
            if format == "csv":
                csv_parser(csv, only, [field.name])(b'"x"\n')
            else:
                jsonl_parser(only)(b"{}\n")
        except pa.ArrowNotImplementedError as error:
            raise SchemaError(
                f"{who}: column {field.name!r} is {field.type}, which cannot be read from {format}: {error}"
            ) from error
        except pa.ArrowInvalid:
            pass  # most types have no value "x"


def read_header(file: TextFile, csv: CsvOptions, schema: pa.Schema) -> tuple[list[str], int]:
    """Return the names of a CSV file's columns, and where its first row begins; without a header, the names of
    `schema`.
    """
    head = file.read(0, _HEADER_BYTES_MAX if csv.header else len(BOM))
    start = len(BOM) if head.startswith(BOM) else 0
    if not csv.header:
        return schema.names, start
    text = head[start:].lstrip(b"\r\n")
    if not text:
        raise SchemaError(f"{file.path}: empty; it has no header that names its columns")
    edges = edges_of(_quotes(csv), text)
    end = next_line(text, 1, edges) or len(text)
    if end == len(text) and len(head) == _HEADER_BYTES_MAX:
        raise SchemaError(
            f"{file.path}: its header has more than {_HEADER_BYTES_MAX} bytes; check that this is a file of lines"
        )
    if end == len(text) and len(edges) % 2:
        raise SchemaError(f"{file.path}: a quoted value of its header never ends")
    header = text[:end] if text[:end].endswith((b"\r", b"\n")) else text[:end] + b"\n"
    found = pyarrow.csv.read_csv(buffer_reader(header), parse_options=_csv_parse(csv, 0)).schema
    check_columns(found, file.path)
    return found.names, len(head) - len(text) + end


def infer_schema(filesystem: pyarrow.fs.FileSystem, path: str, format: TextFormat, csv: CsvOptions) -> pa.Schema:
    """Infer the columns of a file from its first part. Raises SchemaError if it shows none."""
    file = TextFile(filesystem, path)
    with explained(path, format):
        head = file.read(0, _SAMPLE_BYTES)
        is_all = len(head) < _SAMPLE_BYTES
        if not head.strip():
            raise SchemaError(f"{path}: empty; its columns cannot be inferred: declare schema=")
        if format == "csv":
            found = _infer_csv(file, head, is_all, csv)
        else:
            found = _infer_json(head if is_all else head[: last_line(head, edges_of(None, head))])
    fields = [pa.field(f.name, pa.large_string()) if pa.types.is_null(f.type) else f for f in found]
    return pa.schema(fields)


def _infer_json(data: bytes) -> pa.Schema:
    """Infer the columns of JSON lines. pyarrow ignores the zone of a timestamp: a column is in UTC if all values have one."""
    read = _read_json(data, None)
    found = read.schema
    rounded = [field for field, column in zip(found, read.columns, strict=True) if may_be_rounded(column)]
    if rounded:
        check_inferred(integers_in_json(data, pa.schema(rounded)))
    times = {field.name: field.type for field in found if pa.types.is_timestamp(field.type)}
    if not times:
        return found
    as_text = pa.schema([pa.field(name, pa.large_string()) for name in times])
    texts = _read_json(data, pyarrow.json.ParseOptions(explicit_schema=as_text))
    for name, kind in times.items():
        index = found.get_field_index(name)
        fitting = (each for each in (kind, pa.timestamp(kind.unit, "UTC")) if _can_cast(texts.column(name), each))
        found = found.set(index, pa.field(name, next(fitting, pa.large_string())))
    return found


def _can_cast(texts: pa.ChunkedArray[Any], kind: pa.DataType) -> bool:
    try:
        texts.cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


def _infer_csv(file: TextFile, head: bytes, is_all: bool, csv: CsvOptions) -> pa.Schema:
    names, begin = read_header(file, csv, pa.schema([]))
    rows = head[begin:]
    if not is_all:
        rows = rows[: last_line(rows, edges_of(_quotes(csv), rows))]
    if not rows.strip(b"\r\n"):
        return pa.schema([(name, pa.null()) for name in names])

    def parsed(types: dict[str, pa.DataType], columns: list[str] | None) -> pa.Table:
        return pyarrow.csv.read_csv(
            buffer_reader(rows),
            pyarrow.csv.ReadOptions(block_size=len(rows) + 1, use_threads=False, column_names=names),
            _csv_parse(csv, len(names)),
            _csv_convert(csv, types, columns),
        )

    table = parsed({}, None)
    rounded = [name for name, column in zip(names, table.columns, strict=True) if may_be_rounded(column)]
    if rounded:
        check_inferred(integers_in_csv(parsed(dict.fromkeys(rounded, pa.large_string()), rounded)))
    return table.schema


def _quotes(csv: CsvOptions) -> Quotes | None:
    return Quotes(csv.quote.encode(), csv.delimiter.encode()) if csv.quote else None


def _csv_parse(
    csv: CsvOptions,
    columns: int,
    on_bad_line: Callable[[pyarrow.csv.InvalidRow], Literal["skip", "error"]] | None = None,
) -> pyarrow.csv.ParseOptions:
    """Return parse options. In a single column an empty line is a row, since null is written so; otherwise it is
    ignored.
    """
    return pyarrow.csv.ParseOptions(
        delimiter=csv.delimiter,
        quote_char=csv.quote or False,
        ignore_empty_lines=columns != 1,
        invalid_row_handler=on_bad_line,
    )


def _csv_convert(
    csv: CsvOptions, types: dict[str, pa.DataType], columns: list[str] | None
) -> pyarrow.csv.ConvertOptions:
    return pyarrow.csv.ConvertOptions(
        column_types=types,
        include_columns=columns,
        include_missing_columns=True,
        null_values=list(csv.null_values),
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
        timestamp_parsers=[pyarrow.csv.ISO8601, *csv.timestamp_formats],  # type: ignore[list-item]  # its stub knows formats alone
    )


def _json_type(kind: pa.DataType) -> pa.DataType:
    """Return the type to read instead of one that pyarrow's JSON reader does not support; a cast does the rest."""
    if pa.types.is_large_list(kind):
        return pa.list_(_json_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _json_type(f.type)) for f in kind])
    if pa.types.is_date(kind) or pa.types.is_time(kind) or pa.types.is_timestamp(kind):
        return pa.large_string()  # timestamps, too: the reader ignores whether they have a zone
    return kind
