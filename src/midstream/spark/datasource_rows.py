"""Data sources and their schemas, converted between Spark and Arrow, and rows for their writers."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.conversion import ArrowTableToRowsConversion
from pyspark.sql.datasource import CaseInsensitiveDict, DataSource
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import Row, StructField, StructType

from midstream.engine.core.errors import ConfigError, SchemaError
from midstream.engine.core.schemas import check_schema, checked_name
from midstream.spark.ddl import parse_ddl
from midstream.spark.spark_types import NoArrowForm, arrow_type


def make_data_source(data_source: type[DataSource] | DataSource, options: Mapping[str, str] | None) -> DataSource:
    """Return an instance. Raises ConfigError for what is not a Python Data Source, and for an instance with options."""
    if isinstance(data_source, DataSource):
        if options:
            raise ConfigError(f"{data_source.name()}: give options to the data source itself, or its class and options")
        return data_source
    if not (isinstance(data_source, type) and issubclass(data_source, DataSource)):
        raise ConfigError(
            f"{data_source!r} is not a PySpark DataSource: give a subclass of DataSource, or an instance; Spark's "
            "named sources (kafka, rate, delta, …) run in its JVM, where slots cannot read"
        )
    return data_source(options=CaseInsensitiveDict({key: str(value) for key, value in (options or {}).items()}))


def struct_of(data_source: DataSource, declared: StructType | str | None) -> StructType:
    """Return the declared schema, or the result of `schema()`."""
    where = f"data source {data_source.name()!r}"
    schema = declared if declared is not None else data_source.schema()
    try:
        struct = parse_ddl(schema) if isinstance(schema, str) else schema
    except ValueError as error:
        raise SchemaError(f"{where}: the schema {schema!r} cannot be parsed: {error}; give a StructType") from error
    if not isinstance(struct, StructType):
        raise SchemaError(f"{where}: its schema is {struct!r}; it must be a StructType or a DDL string")
    return struct


def arrow_schema(struct: StructType, where: str) -> pa.Schema:
    """Return the Arrow schema. Raises SchemaError naming a column that has no Arrow form."""
    fields = []
    for field in struct.fields:
        try:
            fields.append(pa.field(checked_name(field.name, where), arrow_type(field.dataType, field.name)))
        except NoArrowForm as error:
            raise SchemaError(f"{where}: column {field.name!r} has no Arrow form: {error}") from error
    schema = pa.schema(fields)
    check_schema(schema, where)
    return schema


def spark_struct(schema: pa.Schema, where: str) -> StructType:
    """Return the Spark schema. Raises SchemaError naming a column that has no Spark type."""
    fields = []
    for field in schema:
        try:
            fields.append(StructField(field.name, from_arrow_type(field.type), nullable=True))
        except PySparkException as error:
            raise SchemaError(f"{where}: column {field.name!r} is {field.type}, for which Spark has no type") from error
    return StructType(fields)


def rows_of(batch: pa.RecordBatch, struct: StructType) -> list[Row]:
    rows: list[Row] = ArrowTableToRowsConversion.convert(pa.Table.from_batches([batch]), struct)
    return rows
