"""Schemas and rows, from Spark's form to Arrow's and back."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, Final

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.conversion import ArrowTableToRowsConversion, LocalDataToArrowConversion
from pyspark.sql.datasource import CaseInsensitiveDict, DataSource
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.types import Row, StructField, StructType

from midstream.connectors.formats import check_columns
from midstream.core.batches import conform, single_batch
from midstream.core.errors import ConfigError, JobError, SchemaError
from midstream.spark.ddl import parse_ddl

_CHUNK_ROWS: Final = 8192
_IN_UTC: Final = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}


def make_data_source(data_source: type[DataSource] | DataSource, options: Mapping[str, str] | None) -> DataSource:
    """Raises ConfigError for what is no Python Data Source, or for an instance with options."""
    if isinstance(data_source, DataSource):
        if options:
            raise ConfigError(f"{data_source.name()}: give options to the data source itself, or its class and options")
        return data_source
    if not (isinstance(data_source, type) and issubclass(data_source, DataSource)):
        raise ConfigError(f"{data_source!r} is not a PySpark DataSource: give a subclass of DataSource, or an instance")
    return data_source(options=CaseInsensitiveDict({key: str(value) for key, value in (options or {}).items()}))


def struct_of(data_source: DataSource, declared: StructType | str | None) -> StructType:
    """The declared schema, or what `schema()` says."""
    where = f"data source {data_source.name()!r}"
    schema = declared if declared is not None else data_source.schema()
    try:
        struct = parse_ddl(schema) if isinstance(schema, str) else schema
    except ValueError as error:
        raise SchemaError(f"{where}: the schema {schema!r} cannot be parsed: {error}; give a StructType") from error
    if not isinstance(struct, StructType):
        raise SchemaError(f"{where}: its schema is {struct!r}; it must be a StructType or DDL text")
    return struct


def arrow_schema(struct: StructType, where: str) -> pa.Schema:
    """Raises SchemaError naming the column that has no Arrow form."""
    fields = []
    for field in struct.fields:
        try:
            fields += list(to_arrow_schema(StructType([field]), **_IN_UTC))
        except PySparkException as error:
            raise SchemaError(
                f"{where}: column {field.name!r} is {field.dataType.simpleString()}, which has no Arrow form"
            ) from error
    schema = pa.schema(fields)
    check_columns(schema, where)
    return schema


def spark_struct(schema: pa.Schema, where: str) -> StructType:
    """Raises SchemaError naming the column that Spark has no type for."""
    fields = []
    for field in schema:
        try:
            fields.append(StructField(field.name, from_arrow_type(field.type), nullable=True))
        except PySparkException as error:
            raise SchemaError(f"{where}: column {field.name!r} is {field.type}, which Spark has no type for") from error
    return StructType(fields)


def batches_of(rows: Iterable[Any], struct: StructType, schema: pa.Schema, where: str) -> Iterator[pa.RecordBatch]:
    """What `read` of a data source gives, record batches or tuples, as batches of `schema`.

    Raises SchemaError or JobError when it gives something else.
    """
    iterator = iter(rows)
    first = next(iterator, None)
    if first is None:
        return
    if isinstance(first, pa.RecordBatch):
        for batch in chain([first], iterator):
            if not isinstance(batch, pa.RecordBatch):
                raise JobError(f"{where}: read() gave {type(batch).__name__} after record batches; it must keep to one")
            yield conform(batch, schema, where)
        return
    names = struct.names
    before = 0
    remaining = chain([first], iterator)
    while chunk := list(islice(remaining, _CHUNK_ROWS)):
        tuples = [_as_tuple(row, names, before + at, where) for at, row in enumerate(chunk)]
        try:
            table = LocalDataToArrowConversion.convert(tuples, struct, True)
        except (PySparkException, pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise SchemaError(
                f"{where}: rows {before} to {before + len(chunk) - 1} do not fit the schema {struct.simpleString()}: {error}"
            ) from error
        before += len(chunk)
        yield conform(single_batch(table), schema, where)


def _as_tuple(row: Any, names: list[str], number: int, where: str) -> tuple[Any, ...]:
    if not isinstance(row, (tuple, list)):
        raise JobError(
            f"{where}: row {number} is {type(row).__name__}; read() must give tuples, Rows or record batches"
        )
    if isinstance(row, Row) and hasattr(row, "__fields__"):
        if set(row.__fields__) != set(names):
            raise SchemaError(f"{where}: row {number} has {', '.join(row.__fields__)}, the schema {', '.join(names)}")
        return tuple(row[name] for name in names)
    if len(row) != len(names):
        raise SchemaError(f"{where}: row {number} has {len(row)} values, the schema {len(names)} columns")
    return tuple(row)


def rows_of(batch: pa.RecordBatch, struct: StructType) -> list[Row]:
    rows: list[Row] = ArrowTableToRowsConversion.convert(pa.Table.from_batches([batch]), struct)
    return rows
