"""Iceberg tables: which Arrow types they hold, how they are partitioned, and what a manifest records about a file."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import count
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet
from pyiceberg.conversions import from_bytes, to_bytes
from pyiceberg.io.pyarrow import (
    StatisticsCollector,
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
    pyarrow_to_schema,
    schema_to_pyarrow,
)
from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import (
    IdentityTransform,
    Transform,
    TruncateTransform,
    UnknownTransform,
    VoidTransform,
    parse_transform,
)
from pyiceberg.types import (
    DoubleType,
    FixedType,
    FloatType,
    IcebergType,
    ListType,
    MapType,
    NestedField,
    PrimitiveType,
    StructType,
    UUIDType,
)

from midstream.connectors.common.table_columns import stored_leaf, stored_schema, stored_type
from midstream.engine.core.batches import canonical_type
from midstream.engine.core.errors import ConfigError, SchemaError

FORMAT_VERSION_MAX: Final = 2
"""The newest format of tables that pyiceberg writes."""
_TRANSFORM: Final = re.compile(r"(?P<name>[a-z]+)\((?:(?P<width>\d+)\s*,\s*)?(?P<column>.+)\)", re.DOTALL)
_BY_TIME: Final = ("year", "month", "day", "hour")
_BY_WIDTH: Final = ("bucket", "truncate")
_METRICS: Final = "write.metadata.metrics."
_TICKS: Final = {
    pa.date32().id: pa.int32(),
    pa.timestamp("us").id: pa.int64(),
    pa.time64("us").id: pa.int64(),
}
"""The types in which single values of times are recorded, by the ids of their own types."""


class ColumnMetrics(msgspec.Struct, frozen=True, array_like=True):
    """What a manifest records about the columns of a file, by the ids of fields, and where its row groups begin."""

    sizes: dict[int, int]
    values: dict[int, int]
    nulls: dict[int, int]
    lower: dict[int, bytes]
    upper: dict[int, bytes]
    offsets: list[int]


def iceberg_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the canonical Arrow type in which Iceberg stores `kind`; None if it cannot."""
    return stored_type(kind, _leaf)


def _leaf(kind: pa.DataType) -> pa.DataType | None:
    if pa.types.is_time(kind):
        return pa.time64("us")
    found = stored_leaf(kind)
    return pa.int32() if found in (pa.int8(), pa.int16()) else found


def iceberg_schema(schema: pa.Schema, where: str) -> pa.Schema:
    """Return the schema of a table for this stream. Raises SchemaError naming the first column that Iceberg cannot
    hold.
    """
    return stored_schema(schema, iceberg_type, "Iceberg", where)


def new_schema(columns: pa.Schema) -> Schema:
    """Return the schema of a new table with these columns, which are of types that `iceberg_schema` returns."""
    ids = count(1)
    return pyarrow_to_schema(pa.schema([_with_ids(field.name, field.type, ids) for field in columns]))


def _with_ids(name: str, kind: pa.DataType, ids: Iterator[int]) -> pa.Field[Any]:
    metadata = {"PARQUET:field_id": str(next(ids))}
    if pa.types.is_large_list(kind):
        kind = pa.large_list(_with_ids("element", kind.value_type, ids))
    elif pa.types.is_struct(kind):
        kind = pa.struct([_with_ids(field.name, field.type, ids) for field in kind])
    return pa.field(name, kind, metadata=metadata)


def columns_of(schema: Schema) -> pa.Schema:
    """Return the table's schema in canonical types; required columns are not nullable."""
    found = schema_to_pyarrow(schema, include_field_ids=False)
    return pa.schema([pa.field(field.name, canonical_type(field.type), field.nullable) for field in found])


def parquet_columns(schema: Schema, names: Sequence[str]) -> pa.Schema:
    """Return the schema of a data file with these columns, by which readers find them: it has the ids of fields."""
    found = schema_to_pyarrow(schema)
    return pa.schema([found.field(name).with_nullable(True) for name in names])


def new_spec(partition_by: Sequence[str], schema: Schema, where: str) -> PartitionSpec:
    """Return the partitioning of a new table: names of columns, or transforms such as `day(at)` or `bucket(16, user)`.

    Raises ConfigError for one that Iceberg does not know, SchemaError for a column that is missing or has another type.
    """
    fields: list[PartitionField] = []
    for text in partition_by:
        column, name, transform = text, text, None
        called = _TRANSFORM.fullmatch(text)
        if called is not None and text not in schema.column_names:
            kind, width, column = called["name"], called["width"], called["column"]
            kind = kind.removesuffix("s") if kind.removesuffix("s") in _BY_TIME else kind
            if not (kind in _BY_TIME and width is None) and not (
                kind in _BY_WIDTH and width and 0 < int(width) < 2**31
            ):
                raise ConfigError(
                    f"{where}: partition_by has {text!r}; give a column, year(c), month(c), day(c), hour(c), "
                    "bucket(16, c) or truncate(4, c)"
                )
            transform = parse_transform(kind if width is None else f"{kind}[{width}]")
            name = f"{column}_{ {'truncate': 'trunc'}.get(kind, kind) }"
        if column not in schema.column_names:
            raise SchemaError(
                f"{where}: partition_by has {text!r}, and there is no column {column!r}; there are "
                f"{', '.join(schema.column_names)}"
            )
        field = schema.find_field(column)
        transform = transform or IdentityTransform()
        if not transform.can_transform(field.field_type):
            raise SchemaError(f"{where}: partition_by has {text!r}, and column {column!r} is {field.field_type}")
        fields.append(PartitionField(field.field_id, PARTITION_FIELD_ID_START + len(fields), transform, name))
    names = [field.name for field in fields]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise ConfigError(f"{where}: partition_by names {doubled!r} twice")
    return PartitionSpec(*fields)


def spec_text(spec: PartitionSpec, schema: Schema) -> str:
    """Return a partitioning as text: `day(at), bucket[16](user)`."""
    fields = []
    for field in spec.fields:
        column, transform = schema.find_column_name(field.source_id), str(field.transform)
        fields.append(str(column) if transform == "identity" else f"{transform}({column})")
    return ", ".join(fields)


def same_partitioning(one: PartitionSpec, other: PartitionSpec) -> bool:
    """Whether two partitionings differ in nothing but names, and fields that were removed: tables of version 1 keep these."""
    pairs = [[(field.source_id, str(field.transform)) for field in spec.fields] for spec in (one, other)]
    left = [[pair for pair in each if pair[1] != "void"] for each in pairs]
    return left[0] == left[1]


def check_supported(table: Table, where: str) -> None:
    """Raise ConfigError for a table that this sink cannot write."""
    metadata = table.metadata
    if metadata.format_version > FORMAT_VERSION_MAX:
        raise ConfigError(
            f"{where}: the table has format version {metadata.format_version}, and pyiceberg writes up to "
            f"{FORMAT_VERSION_MAX}; write to a table of version {FORMAT_VERSION_MAX}"
        )
    check_partitioning(metadata.spec(), metadata.schema(), where)


def check_rewritable(table: Table, option: str, where: str) -> None:
    """Raise ConfigError for a table with a column that would not stay as it is if its files were rewritten, as they are with
    this option of the sink.
    """

    def refused(field: NestedField) -> IcebergType | None:
        kind = field.field_type
        if isinstance(kind, MapType | FixedType | UUIDType):
            return kind
        inner = kind.fields if isinstance(kind, StructType) else ()
        for each in (kind.element_field,) if isinstance(kind, ListType) else inner:
            found = kind if each.required else refused(each)
            if found is not None:
                return found
        return None

    for field in table.metadata.schema().fields:
        kind = refused(field)
        if kind is not None:
            raise ConfigError(
                f"{where}: column {field.name!r} of the table has the type {kind}, and would not stay as it is: with {option}, "
                f"files of the table are rewritten; drop the column, or leave {option} out"
            )


def check_partitioning(spec: PartitionSpec, schema: Schema, where: str) -> None:
    """Raise ConfigError for a partitioning that this sink does not support."""
    columns = {field.field_id: field for field in schema.fields}
    for field in spec.fields:
        if isinstance(field.transform, VoidTransform):
            continue
        if field.source_id not in columns:
            raise ConfigError(
                f"{where}: partition field {field.name!r} is made of a field within a column, which this sink does not "
                "support; write to a table that is partitioned by whole columns"
            )
        kind = columns[field.source_id].field_type
        is_unknown = isinstance(field.transform, UnknownTransform) or not field.transform.can_transform(kind)
        if is_unknown or isinstance(kind, DoubleType | FloatType):
            raise ConfigError(
                f"{where}: partition field {field.name!r} is {field.transform} of a column that is {kind}, which "
                "this sink does not support"
            )


@dataclass(frozen=True, slots=True)
class Partitioner:
    """Groups rows by the values of a table's partition fields. It is made on the slots, of what travels as text."""

    spec: PartitionSpec
    schema: Schema
    where: str

    @classmethod
    def of(cls, spec: str, schema: str, where: str) -> Partitioner:
        """Make one of the JSON of the partition spec and of the table's schema."""
        return cls(PartitionSpec.model_validate_json(spec), Schema.model_validate_json(schema), where)

    def values(self, batch: pa.RecordBatch) -> list[pa.Array[Any]]:
        """Return the value of each partition field for each row."""
        columns = {field.field_id: field for field in self.schema.fields}
        found: list[pa.Array[Any]] = []
        for field in self.spec.fields:
            source = columns.get(field.source_id)  # None: only a void transform is left of a column that was dropped
            index = -1 if source is None else batch.schema.get_field_index(source.name)
            if source is None or index < 0:  # what the stream lacks is null
                found.append(pa.nulls(batch.num_rows))
                continue
            made = transformed(field.transform, source.field_type, batch.column(index))
            self._check_truncated(source.name, str(field.transform), batch.column(index), made)
            found.append(made.view(_TICKS[made.type.id]) if made.type.id in _TICKS else made)
        return found

    def _check_truncated(self, name: str, transform: str, column: pa.Array[Any], made: pa.Array[Any]) -> None:
        """Raise SchemaError for a number so near to the least one of its type that what it is truncated to is none."""
        if not transform.startswith("truncate") or pa.types.is_large_binary(made.type) or made.type != column.type:
            return
        if pa.types.is_decimal(made.type):
            wide = pa.decimal256(76, made.type.scale)
            below = pa.scalar(-(Decimal(10) ** (made.type.precision - made.type.scale)), wide)
            is_wrong = pc.less_equal(made.cast(wide), below)
        else:
            is_wrong = pc.greater(made, column)  # it has wrapped around
        if pc.any(is_wrong).as_py():
            value = column.filter(is_wrong)[0]
            raise SchemaError(
                f"{self.where}: column {name!r} has the value {value}, and the partition field {transform} of it is less than "
                f"any {column.type}; partition the table in another way"
            )

    def encoded(self, values: Sequence[Any]) -> list[bytes | None]:
        """Return the values of a partition in the form that Iceberg gives to single values."""
        kinds = _value_types(self.spec, self.schema)
        return [None if value is None else to_bytes(kind, value) for kind, value in zip(kinds, values, strict=True)]


def transformed(transform: Transform[Any, Any], kind: IcebergType, column: pa.Array[Any]) -> pa.Array[Any]:
    if isinstance(transform, TruncateTransform) and pa.types.is_large_binary(column.type):
        return pc.binary_slice(column, 0, transform.width)  # pyiceberg truncates small binaries only
    return transform.pyarrow_transform(kind)(column)


def written_schema(metadata: TableMetadata, spec: PartitionSpec) -> Schema | None:
    """Return the newest schema of the table with all columns that `spec` is made of, also those that were dropped since.

    A manifest of files with that partitioning needs it: readers fail without the type of each partition value.
    """
    needed = {field.source_id for field in spec.fields}
    newest_first = sorted(metadata.schemas, key=lambda schema: schema.schema_id, reverse=True)
    schemas = [metadata.schema(), *newest_first]
    return next((schema for schema in schemas if needed <= schema.field_ids), None)


def _value_types(spec: PartitionSpec, schema: Schema) -> list[PrimitiveType]:
    found = [field.field_type for field in spec.partition_type(schema).fields]
    return [kind for kind in found if isinstance(kind, PrimitiveType)]


def decoded_partition(spec: PartitionSpec, schema: Schema, values: Sequence[bytes | None]) -> list[Any]:
    """Return the values that `Partitioner.encoded` was given. Raises ValueError for others."""
    kinds = _value_types(spec, schema)
    if len(kinds) != len(values):
        raise ValueError(f"{len(values)} values for {len(kinds)} partition fields")
    try:
        return [None if value is None else from_bytes(kind, value) for kind, value in zip(kinds, values, strict=True)]
    except Exception as error:  # struct.error, UnicodeDecodeError, ...: whatever forged bytes lead to
        raise ValueError(str(error)) from error


def check_metrics(schema: Schema, properties: Mapping[str, str], where: str) -> None:
    """Raise ConfigError if the table's properties have an unknown mode for what manifests record about columns."""
    try:
        _metrics_plan(schema, properties)
    except ValueError as error:
        raise ConfigError(
            f"{where}: {error}, in one of the table's properties {_METRICS}*; set it to none, counts, truncate(16) or full"
        ) from error


def _metrics_plan(schema: Schema, properties: Mapping[str, str]) -> dict[int, StatisticsCollector]:
    return compute_statistics_plan(schema, {k: v for k, v in properties.items() if k.startswith(_METRICS)})


def column_metrics(
    filesystem: pyarrow.fs.FileSystem,
    path: str,
    schema: Schema,
    properties: Mapping[str, str],
    with_nan: Collection[str],
) -> ColumnMetrics:
    """Return what the manifest records about a file's columns.

    `schema`: the table's, with the file's columns only.
    `with_nan`: columns for which Parquet's least and greatest values do not hold.
    """
    metadata = pyarrow.parquet.read_metadata(path, filesystem=filesystem)
    ids = parquet_path_to_id_mapping(schema)
    try:
        found = data_file_statistics_from_parquet_metadata(metadata, _metrics_plan(schema, properties), ids)
        bounds = found.to_serialized_dict()
    except (OverflowError, ValueError):  # a time outside of the years 1 to 9999, or a bound that would be a surrogate
        counts = _metrics_plan(schema, {f"{_METRICS}default": "counts"})
        found = data_file_statistics_from_parquet_metadata(metadata, counts, ids)
        bounds = found.to_serialized_dict()
    # Fields within others have no bounds: it is not known which have NaN.
    bounded = {field.field_id for field in schema.fields if field.name not in with_nan}
    bounded -= _without_bounds(metadata, ids)
    return ColumnMetrics(
        dict(found.column_sizes),
        dict(found.value_counts),
        dict(found.null_value_counts),
        {field_id: bound for field_id, bound in bounds["lower_bounds"].items() if field_id in bounded},
        {field_id: bound for field_id, bound in bounds["upper_bounds"].items() if field_id in bounded},
        found.split_offsets,
    )


def _without_bounds(metadata: pyarrow.parquet.FileMetaData, ids: Mapping[str, int]) -> set[int]:
    """Return the fields of which a row group has values, but no bounds: Parquet omits long ones."""
    without = set()
    for group in range(metadata.num_row_groups):
        for column in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(column)
            found = chunk.statistics
            if found is None or not (found.has_min_max or found.null_count == chunk.num_values):
                without.add(ids[chunk.path_in_schema])
    return without
