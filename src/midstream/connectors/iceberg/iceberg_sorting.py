"""The order of rows in the data files of an Iceberg table that has one."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl
import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.table.sorting import NullOrder, SortDirection, SortField, SortOrder
from pyiceberg.transforms import UnknownTransform, VoidTransform

from midstream.connectors.iceberg.iceberg_tables import transformed
from midstream.engine.core.batches import to_polars


@dataclass(frozen=True, slots=True)
class Sorter:
    """Sorts rows by a table's sort order. It is made on the slots, of what travels as text."""

    order_id: int
    """That of the order; 0 if rows stay as they are."""
    fields: tuple[SortField, ...]
    schema: Schema

    @classmethod
    def of(cls, order: str, schema: str) -> Sorter:
        """Make one of the JSON of the sort order and of the table's schema. Rows are not sorted by an order that is made of
        fields within columns, or of an unknown transform: no reader relies on it.
        """
        found, columns = SortOrder.model_validate_json(order), Schema.model_validate_json(schema)
        ids = {field.field_id: field.field_type for field in columns.fields}
        for field in found.fields:
            kind = ids.get(field.source_id)
            is_unknown = isinstance(field.transform, UnknownTransform | VoidTransform)
            if kind is None or is_unknown or not field.transform.can_transform(kind):
                return cls(0, (), columns)
        return cls(found.order_id, tuple(found.fields), columns)

    def sorted(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows in their order; those that are equal in it stay in theirs. A column that they lack is null."""
        names = {field.field_id: field.name for field in self.schema.fields}
        keys = [field for field in self.fields if names[field.source_id] in rows.schema.names]
        if not keys:
            return rows
        columns = [
            transformed(field.transform, self.schema.find_type(field.source_id), rows.column(names[field.source_id]))
            for field in keys
        ]
        frame = to_polars(pa.RecordBatch.from_arrays(columns, [f"key {n}" for n in range(len(keys))]))
        order = frame.select(
            pl.arg_sort_by(
                frame.columns,
                descending=[field.direction == SortDirection.DESC for field in keys],
                nulls_last=[field.null_order == NullOrder.NULLS_LAST for field in keys],
                maintain_order=True,
            )
        )
        return rows.take(order.to_series().to_arrow())
