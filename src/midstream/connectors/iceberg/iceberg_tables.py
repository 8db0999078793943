"""Iceberg tables: which Arrow types they hold, how they are partitioned, and what a manifest records about a file."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet

from midstream.connectors.common.table_columns import stored_leaf, stored_schema, stored_type
from midstream.engine.core.batches import canonical_type
from midstream.engine.core.errors import ConfigError, SchemaError

if TYPE_CHECKING:
    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table
    from pyiceberg.types import PrimitiveType

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
    from pyiceberg.io.pyarrow import pyarrow_to_schema

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
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    found = schema_to_pyarrow(schema, include_field_ids=False)
    return pa.schema([pa.field(field.name, canonical_type(field.type), field.nullable) for field in found])


def parquet_columns(schema: Schema, names: Sequence[str]) -> pa.Schema:
    """Return the schema of a data file with these columns, by which readers find them: it has the ids of fields."""
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    found = schema_to_pyarrow(schema)
    return pa.schema([found.field(name).with_nullable(True) for name in names])


def new_spec(partition_by: Sequence[str], schema: Schema, where: str) -> PartitionSpec:
    """Return the partitioning of a new table: names of columns, or transforms such as `day(at)` or `bucket(16, user)`.

    Raises ConfigError for one that Iceberg does not know, SchemaError for a column that is missing or has another type.
    """
    from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
    from pyiceberg.transforms import IdentityTransform, parse_transform

    fields: list[PartitionField] = []
    for text in partition_by:
        column, name, transform = text, text, None
        called = _TRANSFORM.fullmatch(text)
        if called is not None and text not in schema.column_names:
            kind, width, column = called["name"], called["width"], called["column"]
            kind = kind.removesuffix("s") if kind.removesuffix("s") in _BY_TIME else kind
            if not (kind in _BY_TIME and width is None) and not (kind in _BY_WIDTH and width and int(width) > 0):
                raise ConfigError(
                    f"{where}: partition_by has {text!r}; give a column, year(c), month(c), day(c), hour(c), "
                    "bucket(16, c) or truncate(4, c)"
                )
            transform = parse_transform(kind if width is None else f"{kind}[{width}]")
            name = f"{column}_{ {'truncate': 'trunc'}.get(kind, kind) }"
        if column not in schema.column_names:
            raise SchemaError(
                f"{where}: partition_by has {text!r}, and the stream has no column {column!r}; it has "
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
    pairs = [[(field.source_id, str(field.transform)) for field in spec.fields] for spec in (one, other)]
    return pairs[0] == pairs[1]


def check_supported(table: Table, where: str) -> None:
    """Raise ConfigError for a table that this sink cannot write."""
    from pyiceberg.transforms import UnknownTransform
    from pyiceberg.types import DoubleType, FloatType

    metadata = table.metadata
    if metadata.format_version > FORMAT_VERSION_MAX:
        raise ConfigError(
            f"{where}: the table has format version {metadata.format_version}, and pyiceberg writes up to "
            f"{FORMAT_VERSION_MAX}; write to a table of version {FORMAT_VERSION_MAX}"
        )
    columns = {field.field_id: field for field in metadata.schema().fields}
    for field in metadata.spec().fields:
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
        from pyiceberg.partitioning import PartitionSpec
        from pyiceberg.schema import Schema

        return cls(PartitionSpec.model_validate_json(spec), Schema.model_validate_json(schema), where)

    def values(self, batch: pa.RecordBatch) -> list[pa.Array[Any]]:
        """Return the value of each partition field for each row."""
        found: list[pa.Array[Any]] = []
        for field in self.spec.fields:
            source = self.schema.find_field(field.source_id)
            index = batch.schema.get_field_index(source.name)
            if index < 0:  # the stream lacks the column, so it is null
                found.append(pa.nulls(batch.num_rows))
                continue
            column = batch.column(index)
            if pa.types.is_large_binary(column.type):  # which truncate does not know
                column = column.cast(pa.binary())
            made = field.transform.pyarrow_transform(source.field_type)(column)
            found.append(made.view(_TICKS[made.type.id]) if made.type.id in _TICKS else made)
        return found

    def encoded(self, values: Sequence[Any]) -> list[bytes | None]:
        """Return the values of a partition in the form that Iceberg gives to single values."""
        from pyiceberg.conversions import to_bytes

        kinds = _value_types(self.spec, self.schema)
        return [None if value is None else to_bytes(kind, value) for kind, value in zip(kinds, values, strict=True)]


def _value_types(spec: PartitionSpec, schema: Schema) -> list[PrimitiveType]:
    from pyiceberg.types import PrimitiveType

    found = [field.field_type for field in spec.partition_type(schema).fields]
    return [kind for kind in found if isinstance(kind, PrimitiveType)]


def decoded_partition(spec: PartitionSpec, schema: Schema, values: Sequence[bytes | None]) -> list[Any]:
    """Return the values that `Partitioner.encoded` was given. Raises ValueError for others."""
    from pyiceberg.conversions import from_bytes

    kinds = _value_types(spec, schema)
    if len(kinds) != len(values):
        raise ValueError(f"{len(values)} values for {len(kinds)} partition fields")
    try:
        return [None if value is None else from_bytes(kind, value) for kind, value in zip(kinds, values, strict=True)]
    except Exception as error:  # struct.error, UnicodeDecodeError, ...: whatever forged bytes lead to
        raise ValueError(str(error)) from error


def column_metrics(
    filesystem: pyarrow.fs.FileSystem,
    path: str,
    schema: Schema,
    properties: Mapping[str, str],
    unbounded: Collection[str],
) -> ColumnMetrics:
    """Return what the manifest records about a file's columns.

    `schema`: the table's, with the file's columns only.
    `unbounded`: columns for which Parquet's least and greatest values do not hold.
    """
    from pyiceberg.io.pyarrow import (
        compute_statistics_plan,
        data_file_statistics_from_parquet_metadata,
        parquet_path_to_id_mapping,
    )
    from pyiceberg.types import DoubleType, FloatType

    metadata = pyarrow.parquet.read_metadata(path, filesystem=filesystem)
    ids = parquet_path_to_id_mapping(schema)
    plan = compute_statistics_plan(schema, {k: v for k, v in properties.items() if k.startswith(_METRICS)})
    lower: dict[int, bytes] = {}
    upper: dict[int, bytes] = {}
    try:
        found = data_file_statistics_from_parquet_metadata(metadata, plan, ids)
    except (OverflowError, ValueError):  # a time outside of the years 1 to 9999
        counts = compute_statistics_plan(schema, {f"{_METRICS}default": "counts"})
        found = data_file_statistics_from_parquet_metadata(metadata, counts, ids)
    bounds = found.to_serialized_dict()
    top = {field.field_id: field for field in schema.fields}
    for field_id in {*bounds["lower_bounds"], *bounds["upper_bounds"]}:
        field = top.get(field_id)  # fields within others have no bounds: it is not known which have NaN
        if field is None or (isinstance(field.field_type, FloatType | DoubleType) and field.name in unbounded):
            continue
        with suppress(KeyError):
            lower[field_id] = bounds["lower_bounds"][field_id]
        with suppress(KeyError):
            upper[field_id] = bounds["upper_bounds"][field_id]
    return ColumnMetrics(
        dict(found.column_sizes),
        dict(found.value_counts),
        dict(found.null_value_counts),
        lower,
        upper,
        found.split_offsets,
    )
