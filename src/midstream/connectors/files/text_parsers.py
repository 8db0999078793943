"""CSV and JSON lines parsed by pyarrow, a block at a time; what it reads as other values than Python does is refused.

pyarrow reads hexadecimal integers, 31 February, the year 0, and decimals with any exponent or with too many digits. Whether a block may have such
values is determined by scanning the whole; only then are its columns read as texts, too, and compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain
from typing import Any, Final, Literal, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json

from midstream.connectors.files.file_formats import MISSES_VALUE, WantedColumns
from midstream.connectors.files.line_splitter import Quotes
from midstream.connectors.files.lossy_numbers import (
    BOM,
    OddDecimals,
    check_finite_in_json,
    check_inferred,
    check_notation,
    check_precision,
    check_ranges,
    decimals_in,
    has_infinite,
    has_nan,
    integers_in_csv,
    integers_in_json,
    is_integral,
    may_be_rounded,
    may_have_hexadecimal,
    of_64_bits,
)
from midstream.connectors.files.time_formats import (
    check_times,
    check_years,
    days_of,
    doubtful_times,
    expanded,
    from_texts,
)
from midstream.engine.core.arrow_types import buffer_reader
from midstream.engine.core.errors import ConfigError, SchemaError

TextFormat: TypeAlias = Literal["csv", "jsonl"]

_END_TEXT: Final = "end of the block"
_NULL_FIRST = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*null")
_NULL_LINE = re.compile(rb"null[ \t]*(?:[\r\n]|\Z)")


class CsvOptions(msgspec.Struct, frozen=True, kw_only=True):
    r"""How CSV files are written.

    `delimiter`, `quote`: one ASCII character each; `quote` may be empty, if values are never quoted.
    `header`: the first line names the columns; without one, the schema must be declared and names them in order.
    `null_values`: texts that stand for null, in every column, unless quoted; by default only the empty one, so that
    `NA` is Namibia. Another column type than text refuses what is neither a value of it nor one of these.
    `newlines_in_values`: read each file in one piece. Quoted values with line ends are read in any case, but a large
    file that is read in parts may be refused because of them.
    `timestamp_formats`: strptime formats of timestamps and dates, tried after ISO 8601: "%d/%m/%Y %H:%M:%S".

        >>> _ = Path("words.csv").write_text("1;a\n2;b\n")
        >>> csv = CsvOptions(delimiter=";", header=False)
        >>> env.read_files("words.csv", schema={"n": int, "word": str}, csv=csv).preview().rows
        [{'n': 1, 'word': 'a'}, {'n': 2, 'word': 'b'}]

    Raises ConfigError for other delimiters and quotes, for a text in place of a tuple, and for a format with a
    directive that is not supported.
    """

    delimiter: str = ","
    quote: str = '"'
    header: bool = True
    null_values: tuple[str, ...] = ("",)
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
        _strptime_formats(self)
        if self.delimiter == self.quote:
            raise ConfigError(f"CsvOptions: delimiter and quote are both {self.quote!r}; give different characters")


def _strptime_formats(csv: CsvOptions) -> list[str]:
    """Return the formats without abbreviations. Raises ConfigError."""
    return [expanded(format) for format in csv.timestamp_formats]


def csv_parser(csv: CsvOptions, wanted: WantedColumns, names: list[str]) -> Callable[[bytes], pa.Table]:
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

    parse = csv_parse_options(csv, len(names), on_bad_line)
    schema = wanted.in_text
    convert = csv_convert_options(csv, {field.name: field.type for field in schema}, schema.names)
    dates = [field.name for field in schema if pa.types.is_date(field.type)] if csv.timestamp_formats else []
    decimals = [field.name for field in schema if pa.types.is_decimal(field.type)]
    odd_decimals = OddDecimals(schema.field(name).type for name in decimals)

    def parsed(data: bytes) -> pa.Table:
        if data.startswith(BOM):  # part of a value, since the file does not begin here; pyarrow removes one
            data = BOM + data
        rows = data
        if csv.quote:
            data = b"".join((data, b"" if data.endswith((b"\r", b"\n")) else b"\n", end.encode()))
        read = pyarrow.csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=names)

        def table_of(convert: pyarrow.csv.ConvertOptions) -> pa.Table:
            return pyarrow.csv.read_csv(
                buffer_reader(data), read_options=read, parse_options=parse, convert_options=convert
            )

        def texts_of(columns: list[str]) -> pa.Table:
            return table_of(csv_convert_options(csv, dict.fromkeys(columns, pa.large_string()), columns))

        if odd_decimals.may_be_in(rows):
            odd_decimals.check(texts_of(decimals), schema)
        ends.clear()
        table = table_of(convert)
        if csv.quote and not ends:
            raise pa.ArrowInvalid("CSV parse error: a quoted value never ends")
        check_years(table)
        is_out_of_range = has_infinite if wanted.declared else may_be_rounded
        in_doubt = [
            *misread_columns(table, rows, csv),
            *(name for name in table.column_names if is_out_of_range(table.column(name))),
        ]
        if in_doubt:
            in_doubt = list(dict.fromkeys(in_doubt))
            texts = texts_of(in_doubt)
            for name in in_doubt:
                check_texts(name, table.column(name), texts.column(name), csv, schema.field(name).type)
            check_ranges(table.select(in_doubt), texts)
            if not wanted.declared:
                numbers = [name for name in in_doubt if pa.types.is_floating(table.column(name).type)]
                check_inferred(integers_in_csv(texts.select(numbers)))
        for name in dates:
            table = _replaced(table, schema.field(name), days_of(name, table.column(name)))
        return _checked(table, wanted)

    return parsed


def misread_columns(table: pa.Table, rows: bytes, csv: CsvOptions) -> list[str]:
    """Return the columns in which pyarrow may have read texts that are no values of the type, by scanning the whole."""
    hexadecimal = any(is_integral(kind) for kind in table.schema.types) and may_have_hexadecimal(rows)
    parenthesis = b"(" in rows
    formats = _strptime_formats(csv)
    return [
        field.name
        for field, column in zip(table.schema, table.columns, strict=True)
        if (hexadecimal and is_integral(field.type))
        or (parenthesis and has_nan(column))
        or (formats and pa.types.is_timestamp(field.type) and pc.any(doubtful_times(column, formats)).as_py())
    ]


def check_texts(
    name: str, column: pa.ChunkedArray[Any], texts: pa.ChunkedArray[Any], csv: CsvOptions, kind: pa.DataType
) -> None:
    """Raise ArrowInvalid if a value is not that of its text; `kind` is the type to name."""
    check_notation(name, kind, texts)
    if csv.timestamp_formats and pa.types.is_timestamp(column.type):
        check_times(name, column, texts, _strptime_formats(csv), kind)


def jsonl_parser(wanted: WantedColumns) -> Callable[[bytes], pa.Table]:
    """Return a parser of JSON lines, which raises ArrowException."""
    schema = wanted.in_text
    as_read = pa.schema([pa.field(field.name, _json_type(field.type)) for field in schema])
    parse = pyarrow.json.ParseOptions(
        explicit_schema=as_read, unexpected_field_behavior="ignore" if wanted.declared else "error"
    )

    odd_decimals = OddDecimals(chain.from_iterable(map(decimals_in, as_read.types)))

    def parsed(data: bytes) -> pa.Table:
        if odd_decimals.may_be_in(data):
            odd_decimals.check_json(data, as_read)
        table = read_json(data, parse)
        if any(has_infinite(column) for column in table.columns):
            in_64_bits = pyarrow.json.ParseOptions(
                explicit_schema=pa.schema([pa.field(field.name, of_64_bits(field.type)) for field in as_read]),
                unexpected_field_behavior="ignore",
            )
            check_ranges(table, read_json(data, in_64_bits))
            check_finite_in_json(data, schema)
        if not wanted.declared and any(may_be_rounded(column) for column in table.columns):
            check_inferred(integers_in_json(data, schema))
        columns = [
            pa.chunked_array([from_texts(chunk, field.type) for chunk in column.chunks], field.type)
            for field, column in zip(schema, table.columns, strict=True)
        ]
        table = pa.table(columns, schema=schema)
        check_years(table)
        return _checked(table, wanted)

    return parsed


def read_json(data: bytes, parse: pyarrow.json.ParseOptions | None) -> pa.Table:
    """Parse JSON lines, working around pyarrow, which reads the line `null` as a row of nulls, crashes if it is the
    first, and accepts any bytes as names and strings.
    """
    if _NULL_FIRST.match(data):
        raise pa.ArrowInvalid("JSON parse error: null is not an object")
    if not data.isascii():
        try:
            data.decode()  # names too: an invalid one would be mistaken for an unknown field and ignored
        except UnicodeDecodeError as error:
            raise pa.ArrowInvalid(f"JSON parse error: Invalid UTF8: {error.reason}") from error
    read = pyarrow.json.ReadOptions(use_threads=False, block_size=len(data) + 1)
    table = pyarrow.json.read_json(buffer_reader(data), read_options=read, parse_options=parse)
    if _has_empty_row(table) and _NULL_LINE.search(data):
        raise pa.ArrowInvalid("JSON parse error: null is not an object")
    return table


def is_an_object_a_line(data: bytes, rows: int) -> bool:
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


def _checked(table: pa.Table, wanted: WantedColumns) -> pa.Table:
    check_precision(table)
    for name in wanted.required:
        if table.column(name).null_count:
            raise pa.ArrowInvalid(f"column {name!r} {MISSES_VALUE}")
    for field, parsed in zip(wanted.schema, wanted.in_text, strict=True):
        if field.type != parsed.type:
            try:
                table = _replaced(table, field, table.column(field.name).cast(field.type))
            except pa.ArrowInvalid as error:
                raise pa.ArrowInvalid(f"conversion error to {parsed.type} in column {field.name!r}: {error}") from error
    return table


def _replaced(table: pa.Table, field: pa.Field[Any], column: pa.ChunkedArray[Any]) -> pa.Table:
    return table.set_column(table.column_names.index(field.name), field, column)


def check_types(
    schema: pa.Schema, format: TextFormat, csv: CsvOptions | None = None, *, who: str = "FileSource"
) -> None:
    """Raise SchemaError naming the first column whose type cannot be read from text."""
    csv = csv or CsvOptions()
    for field in schema:
        only = WantedColumns(pa.schema([field]), declared=True)
        if pa.types.is_decimal(field.type) and field.type.scale < 0:
            raise SchemaError(
                f"{who}: column {field.name!r} is {field.type}; declare a scale of at least 0 to read text"
            )
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


def quotes_of(csv: CsvOptions) -> Quotes | None:
    return Quotes(csv.quote.encode(), csv.delimiter.encode()) if csv.quote else None


def csv_parse_options(
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


def csv_convert_options(
    csv: CsvOptions, types: dict[str, pa.DataType], columns: list[str] | None
) -> pyarrow.csv.ConvertOptions:
    if csv.timestamp_formats:  # pyarrow reads dates in ISO 8601 only
        types = {name: pa.timestamp("us") if pa.types.is_date(kind) else kind for name, kind in types.items()}
    return pyarrow.csv.ConvertOptions(
        column_types=types,
        include_columns=columns,
        include_missing_columns=True,
        null_values=list(csv.null_values),
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
        timestamp_parsers=[pyarrow.csv.ISO8601, *_strptime_formats(csv)],  # type: ignore[list-item]  # its stub knows formats alone
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
