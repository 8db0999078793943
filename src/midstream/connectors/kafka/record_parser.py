"""Kafka records as rows: values parsed a batch at a time, and columns that show where each row came from.

JSON is parsed by the JSON-lines reader and follows its rules: each value becomes one line of a text. For each line to
be one row, a value must be one object. It is one if it begins and ends with a brace, if it has no line end (outside of
strings, where a line end would not be JSON, one is replaced), and if there are as many rows as values: an object that
continued in the next value would have a brace after a line end, where JSON has none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream.connectors.common.malformed_records import BadRecord, parsed_apart
from midstream.connectors.common.row_operations import OP
from midstream.connectors.files.csv_jsonl import ROW_NUMBER
from midstream.connectors.files.file_formats import MISSES_VALUE, WantedColumns
from midstream.connectors.files.text_parsers import CsvOptions, check_types, csv_parser, jsonl_parser
from midstream.connectors.kafka.debezium import changes, envelope_columns, row_columns
from midstream.engine.core.batches import canonical_schema, conform, empty_batch, single_batch
from midstream.engine.core.errors import ConfigError, SchemaError
from midstream.engine.core.schemas import check_schema

if TYPE_CHECKING:
    from midstream.connectors.kafka.avro_values import AvroValues
    from midstream.connectors.kafka.client import OptionValue
    from midstream.connectors.kafka.protobuf_values import ProtobufValues

KafkaFormat: TypeAlias = Literal["json", "csv", "avro", "protobuf", "debezium", "bytes", "text"]
FORMATS: Final = ("json", "csv", "avro", "protobuf", "debezium", "bytes", "text")
WRITTEN_FORMATS: Final = ("json", "avro", "protobuf", "bytes", "text")
VALUE: Final = "value"
HEADERS: Final = pa.large_list(pa.struct([("name", pa.large_string()), ("value", pa.large_binary())]))
METADATA: Final[Mapping[str, pa.DataType]] = {
    "topic": pa.large_string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("ms", "UTC"),
    "key": pa.large_binary(),
    "headers": HEADERS,
}
_SPACE: Final = b" \t\r\n"
_LINE_END: Final[Any] = pa.scalar(b"\n", pa.large_binary())


class Records(Protocol):
    """Records of one partition in their order."""

    def __len__(self) -> int: ...

    def offset(self, at: int) -> int: ...

    def values(self) -> pa.Array[Any]:
        """As large_binary; null where a record has none."""

    def metadata(self, what: str) -> pa.Array[Any]:
        """What of METADATA each of them has."""

    def without_headers(self) -> Mapping[int, str]:
        """Return the positions, in ascending order, of records whose headers cannot be read, each with the reason."""

    def bad(self, at: int, text: str) -> BadRecord: ...


class RecordParser:
    """Parses records. `schema` is that of the result: the columns of the values, then those of `metadata` (item: column
    name).
    """

    def __init__(
        self,
        format: KafkaFormat,
        schema: pa.Schema | str | None,
        metadata: Mapping[str, str] | Sequence[str],
        drops_bad_records: bool,
        who: str,
        *,
        csv: CsvOptions | None = None,
        registry: Mapping[str, OptionValue] | None = None,
        subject: str | None = None,
        message: object = None,
    ) -> None:
        """`subject`: the registry's subject whose newest schema is the reader's, for Avro without `schema`."""
        if format not in FORMATS:
            raise ConfigError(f"{who}: format {format!r} is not one of {', '.join(FORMATS)}")
        if isinstance(metadata, str):
            raise ConfigError(f"{who}: metadata={metadata!r} is a string; give a list: metadata=[{metadata!r}]")
        self.metadata = dict(metadata) if isinstance(metadata, Mapping) else {what: what for what in metadata}
        for what in self.metadata:
            if what not in METADATA:
                raise ConfigError(f"{who}: metadata {what!r} is not one of {', '.join(METADATA)}")
        self._format = format
        self._drops = drops_bad_records
        if csv is not None and format != "csv":
            raise ConfigError(f"{who}: csv= requires format='csv'")
        _check_described(format, registry, message, who)
        self._csv = csv or CsvOptions()
        self._described = _described(format, schema, registry, subject, message, who)
        """The reader of values, for formats that have schemas of their own."""
        if self._described is not None:
            self._wanted = WantedColumns(self._described.schema, declared=True)
        elif isinstance(schema, str):
            raise ConfigError(f"{who}: schema= as a string is only for Avro; give columns and their types")
        else:
            self._wanted = _wanted(format, schema, self._csv, who)
        self._rows: WantedColumns | None = None
        """The columns of the rows in envelopes, for Debezium."""
        if format == "debezium":
            in_avro = self._described is not None
            self._rows = row_columns(self._wanted.schema, who) if in_avro else self._wanted
            self._wanted = self._wanted if in_avro else envelope_columns(self._wanted)
        self._parse: Callable[[bytes], pa.Table] | None = None
        self._values = self._wanted.schema
        """The columns that are read from values."""
        if self._rows is not None:
            self._values = pa.schema([*self._rows.schema, pa.field(OP, pa.large_string())])
        fields = [*self._values, *(pa.field(name, METADATA[what]) for what, name in self.metadata.items())]
        self.schema = pa.schema(fields)
        check_schema(self.schema, who)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parse": None}

    @property
    def no_rows(self) -> pa.RecordBatch:
        return empty_batch(self.schema)

    def check(self) -> None:
        """Check, on the driver before the job starts, that what is needed to read values exists."""
        if self._described is not None:
            self._described.check()

    def rows(self, records: Records, where: str) -> tuple[pa.RecordBatch, list[BadRecord]]:
        """Return one row per record, except for bad ones, which are dropped or raise SchemaError naming the first of
        them.
        """
        count = len(records)
        if not count:
            return self.no_rows, []
        values = records.values()
        pieces: list[pa.RecordBatch] = []
        bad: list[BadRecord] = []
        unread = records.without_headers() if "headers" in self.metadata else {}
        unread_at = np.fromiter(unread, np.int64, len(unread))

        def parse(first: int, last: int) -> pa.RecordBatch:
            if np.searchsorted(unread_at, first) < np.searchsorted(unread_at, last):
                raise pa.ArrowInvalid("headers that cannot be read")
            return self._parsed(values.slice(first, last - first), where)

        try:
            pieces.append(parse(0, count))
        except pa.ArrowException as error:
            for part in parsed_apart(parse, 0, count, str(error)):
                if isinstance(part, pa.RecordBatch):
                    pieces.append(part)
                    continue
                at, why = part
                if at in unread:
                    bad.append(self._bad(records, at, where, unread[at], "read it without metadata 'headers'"))
                else:
                    text = (
                        f"the record's value is not {self._format} of the declared columns: {ROW_NUMBER.sub('', why)}"
                    )
                    bad.append(self._bad(records, at, where, text, "declare other types in schema="))
        if not pieces:
            return self.no_rows, bad
        columns = [
            pa.concat_arrays([piece.column(index) for piece in pieces]) if len(pieces) > 1 else pieces[0].column(index)
            for index in range(len(self._values))
        ]
        metadata_columns = [records.metadata(what) for what in self.metadata]
        if bad and metadata_columns:
            good = np.delete(np.arange(count), [each.at for each in bad])
            metadata_columns = [column.take(good) for column in metadata_columns]
        found = pa.RecordBatch.from_arrays(columns + metadata_columns, schema=self.schema)
        is_change = None if self._rows is None else found.column(OP).is_valid()
        return (found if is_change is None else found.filter(is_change)), bad

    def _bad(self, records: Records, at: int, where: str, text: str, advice: str) -> BadRecord:
        if not self._drops:
            raise SchemaError(
                f"{where}, offset {records.offset(at)}: {text}; {advice}, or set on_bad_record='drop', which drops such "
                "records to side_output(BAD_RECORDS)"
            )
        return records.bad(at, text)

    def _parsed(self, values: pa.Array[Any], where: str) -> pa.RecordBatch:
        if self._rows is not None:
            in_avro = self._described is not None
            envelopes = self._of_values(values.to_pylist(), where) if in_avro else self._json(values, where)
            return changes(envelopes, values.is_valid(), self._rows)
        if self._format == "json":
            return self._json(values, where)
        if self._format in ("csv", "avro", "protobuf"):
            return self._of_values(values.to_pylist(), where)
        if self._format == "text":
            values = values.cast(pa.large_string())
            values.validate(full=True)
        return pa.RecordBatch.from_arrays([values], schema=self._wanted.schema)

    def _json(self, values: pa.Array[Any], where: str) -> pa.RecordBatch:
        if self._parse is None:
            self._parse = jsonl_parser(self._wanted)
        table = self._parse(_as_lines(values))
        if table.num_rows != len(values):
            raise pa.ArrowInvalid("JSON parse error: more than one value in a record")
        return conform(single_batch(table), self._wanted.schema, where)

    def _of_values(self, values: list[bytes | None], where: str) -> pa.RecordBatch:
        """Parse values of formats that cannot represent a record without a value: it becomes a row of nulls."""
        there = [value for value in values if value is not None]
        if len(there) < len(values) and self._wanted.required:
            raise pa.ArrowInvalid(f"column {self._wanted.required[0]!r} {MISSES_VALUE}")
        if not there:
            found = empty_batch(self._wanted.schema)
        elif self._described is not None:
            found = self._described.parse(there)
        else:
            found = conform(single_batch(self._csv_rows(there)), self._wanted.schema, where)
        if len(there) == len(values):
            return found
        is_there = np.array([value is not None for value in values])
        return found.take(pa.array(np.cumsum(is_there) - 1, pa.int64(), mask=~is_there))

    def _csv_rows(self, values: list[bytes]) -> pa.Table:
        """Parse each value as one line. A value with a line end in quotes must be parsed alone."""
        if self._parse is None:
            self._parse = csv_parser(self._csv, self._wanted, self._wanted.schema.names)
        text = b"\n".join(values)
        if len(values) > 1 and (b"\r" in text or text.count(b"\n") >= len(values)):
            raise pa.ArrowInvalid("CSV parse error: a value with a line end, among others")
        table = self._parse(text)
        if table.num_rows != len(values):
            raise pa.ArrowInvalid("CSV parse error: not one row")
        return table


@dataclass(frozen=True, slots=True)
class BoundValues:
    """Writes the values of rows with given columns."""

    register: Callable[[], None]
    """Registers the schema in a registry, if there is one, on the driver before there are rows.

    Raises ConfigError or StorageError.
    """
    values: Callable[[pa.RecordBatch], list[bytes | None]]
    """Returns the value of each row. Raises SchemaError for a value without a form in the format."""


class Described(Protocol):
    """Writes values of a format with schemas of its own. Created and registered on the driver, used in the slots."""

    @property
    def fields(self) -> Collection[str] | None:
        """The only columns that there may be; None if any may be."""

    def bound(self, values: pa.Schema) -> BoundValues:
        """Return the writer for rows with these columns. Raises SchemaError for columns without a form in the format."""


def check_written_format(
    format: KafkaFormat, registry: Mapping[str, OptionValue] | None, message: object, topic: str, who: str
) -> Described | None:
    """Return what describes the values of a format with schemas. Raises ConfigError for a format that cannot be
    written.
    """
    if format not in WRITTEN_FORMATS:
        raise ConfigError(f"{who}: format {format!r} is not one of {', '.join(WRITTEN_FORMATS)}")
    _check_described(format, registry, message, who)
    if format == "avro":
        from midstream.connectors.kafka.avro_values import AvroWriting

        return AvroWriting(registry, topic, who)
    if format == "protobuf":
        from midstream.connectors.kafka.protobuf_values import ProtobufWriting

        return ProtobufWriting(registry, message, topic, who)
    return None


def _check_described(format: KafkaFormat, registry: object, message: object, who: str) -> None:
    if registry is not None and format not in ("avro", "protobuf", "debezium"):
        raise ConfigError(f"{who}: registry= requires format='avro', 'protobuf' or 'debezium'")
    if message is not None and format != "protobuf":
        raise ConfigError(f"{who}: message= requires format='protobuf'")
    if message is None and format == "protobuf":
        raise ConfigError(
            f"{who}: format='protobuf' needs message=, a message class that protoc has generated, such as orders_pb2.Order"
        )


def _described(
    format: KafkaFormat,
    schema: pa.Schema | str | None,
    registry: Mapping[str, OptionValue] | None,
    subject: str | None,
    message: object,
    who: str,
) -> AvroValues | ProtobufValues | None:
    if format == "avro" or (format == "debezium" and registry is not None):
        if isinstance(schema, pa.Schema):
            raise ConfigError(
                f"{who}: schema= of Avro is the text of the Avro schema (JSON) to read with; without it the newest in the "
                "registry is used"
            )
        from midstream.connectors.kafka.avro_values import AvroValues

        return AvroValues(registry, schema, subject, who)
    if format == "protobuf":
        if schema is not None:
            raise ConfigError(
                f"{who}: schema= does not apply to format='protobuf', whose columns are the fields of message="
            )
        from midstream.connectors.kafka.protobuf_values import ProtobufValues

        return ProtobufValues(registry, message, who)
    return None


def _wanted(format: KafkaFormat, schema: pa.Schema | None, csv: CsvOptions, who: str) -> WantedColumns:
    if format not in ("json", "csv", "debezium"):
        if schema is not None:
            raise ConfigError(
                f"{who}: schema= requires json, csv, avro or debezium; {format} has one column {VALUE!r}, and those of metadata="
            )
        kind = pa.large_binary() if format == "bytes" else pa.large_string()
        return WantedColumns(pa.schema([(VALUE, kind)]), declared=True)
    if schema is None:
        raise ConfigError(f"{who}: format={format!r} needs schema=, the columns to read and their types")
    check_schema(schema, f"{who}: the declared schema")
    in_seconds = canonical_schema(schema, keeps_seconds=True)
    check_types(in_seconds, "csv" if format == "csv" else "jsonl", csv, who=who)
    required = tuple(field.name for field in schema if not field.nullable)
    return WantedColumns(canonical_schema(schema), declared=True, required=required, in_seconds=in_seconds)


def _as_lines(values: pa.Array[Any]) -> bytes:
    """Put each value on one line; a record without a value has no columns. Raises ArrowInvalid for what is not an
    object.
    """
    if values.null_count:
        values = values.fill_null(b"{}")
    if pc.all(pc.and_(pc.starts_with(values, "{"), pc.ends_with(values, "}"))).as_py():
        one: Any = pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), values)
        joined: Any = pc.binary_join(one, _LINE_END)
        _, ends, data = joined.buffers()
        # Arrow's scalar would be one more copy, in new memory.
        text = bytes(memoryview(data)[: np.frombuffer(ends, np.int64)[1]])
        line_ends = np.count_nonzero(np.frombuffer(text, np.uint8) == ord("\n"))  # bytes.count takes five times as long
        if line_ends == len(values) - 1 and b"\r" not in text:
            return text
    lines: list[bytes] = [line.strip(_SPACE) for line in values.to_pylist()]  # type: ignore[union-attr]  # none is null
    if not all(line.startswith(b"{") and line.endswith(b"}") for line in lines):
        raise pa.ArrowInvalid("JSON parse error: not an object")
    return b"\n".join(map(_one_line, lines))


def _one_line(line: bytes) -> bytes:
    """Replace the line ends of a JSON value by blanks: they can only be between values, where a blank means the same."""
    if b"\n" not in line and b"\r" not in line:
        return line
    try:
        msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise pa.ArrowInvalid(f"JSON parse error: {error}") from error
    return line.replace(b"\n", b" ").replace(b"\r", b" ")
