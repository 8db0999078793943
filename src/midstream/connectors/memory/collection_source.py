"""A bounded source of rows that the program already holds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from midstream.connectors.common.batch_cursor import BatchCursor
from midstream.connectors.memory.generator_source import IndexRange, IndexSource
from midstream.engine.core.batches import canonical_schema, canonical_type, conform, single_batch
from midstream.engine.core.errors import SchemaError
from midstream.engine.core.python_values import ARROW_ERRORS, ValueMisfit, to_array
from midstream.engine.core.schemas import check_schema, checked_name
from midstream.engine.operators.source_api import Split, SplitReader, decoded, rows_text


class CollectionSource(IndexSource):
    """The rows of an Arrow table or record batch, which travels with the job; for small inputs and tests.

    `splits`: the number of contiguous parts, by default the parallelism (1 keeps all rows in order).
    """

    def __init__(
        self, rows: pa.Table | pa.RecordBatch, *, splits: int | None = None, rows_per_s: float | None = None
    ) -> None:
        check_schema(rows.schema, "from_collection")
        super().__init__(canonical_schema(rows.schema), rows.num_rows, splits, rows_per_s)
        batch = rows if isinstance(rows, pa.RecordBatch) else single_batch(rows)
        self._batch = conform(batch, self.schema, "CollectionSource")

    def open_split(self, split: Split) -> SplitReader:
        span = decoded(split.payload, IndexRange, "CollectionSource")
        assert span.stop is not None, span
        rest = self._batch.slice(span.start + split.offset, span.stop - span.start - split.offset)
        return BatchCursor(iter([rest]), where=f"rows {span.start} to {span.stop}", offset_rows=split.offset)

    def place(self, split: Split, first: int, last: int) -> str:
        start = decoded(split.payload, IndexRange, "CollectionSource").start + split.offset
        return f"{rows_text(start + first, start + last)} of the collection, counted from 0"


def from_rows(
    rows: Iterable[Mapping[str, Any]],
    schema: pa.Schema | None = None,
    *,
    splits: int | None = None,
    rows_per_s: float | None = None,
) -> CollectionSource:
    """Return a source of a list of dicts. `schema`: by default inferred from all rows.

    Raises SchemaError if there is no row to infer from, or if a value does not fit its column.
    """
    if type(rows).__module__.partition(".")[0] == "pandas":
        raise SchemaError(f"from_collection: got a pandas {type(rows).__name__}; convert it with pl.from_pandas(…)")
    listed = list(rows)
    for position, row in enumerate(listed):
        if not isinstance(row, Mapping):
            raise SchemaError(
                f"from_collection: row {position} is {type(row).__name__}, not a dict of column names to values"
            )
    if schema is None:
        names = list(dict.fromkeys(name for row in listed for name in row))
        if not names:
            raise SchemaError("from_collection: there are no rows to infer the columns from; give a schema")
        names = [checked_name(name, "from_collection") for name in names]
        columns = {name: _column(name, [row.get(name) for row in listed], None) for name in names}
    else:
        columns = {
            field.name: _column(field.name, [row.get(field.name) for row in listed], field.type) for field in schema
        }
        extra = [(at, name) for at, row in enumerate(listed) for name in row if name not in columns]
        if extra:
            raise SchemaError(
                f"from_collection: column {extra[0][1]!r} of row {extra[0][0]} is not in the declared schema"
            )
    return CollectionSource(pa.table(columns), splits=splits, rows_per_s=rows_per_s)


def _column(name: str, values: list[Any], kind: pa.DataType | None) -> pa.Array[Any]:
    try:
        return to_array(values, canonical_type(pa.array(values).type) if kind is None else kind)
    except ValueMisfit as misfit:
        way = "" if kind is not None else "; the type was inferred from all rows: give a schema"
        raise SchemaError(f"from_collection: column {name!r} of row {misfit.index}: {misfit}{way}") from misfit
    except ARROW_ERRORS as error:
        row, before = _first_misfit(values) if kind is None else (None, None)
        if row is None:
            raise SchemaError(f"from_collection: column {name!r}: {error}") from error
        value = f"{values[row]!r:.200} ({type(values[row]).__name__})"
        so_far = "" if before is None or pa.types.is_null(before) else f", after values of type {before}"
        raise SchemaError(
            f"from_collection: column {name!r} of row {row}: no type can be inferred with {value}{so_far}; give a schema, "
            "and values of one type that Arrow has"
        ) from error


def _first_misfit(values: list[Any]) -> tuple[int | None, pa.DataType | None]:
    """Return the first value with which no type can be inferred, and the type of those before it."""

    def inferred(count: int) -> pa.DataType | None:
        try:
            kind: pa.DataType = pa.array(values[:count]).type
        except ARROW_ERRORS:
            return None
        return kind

    row = bisect_left(range(1, len(values) + 1), True, key=lambda count: inferred(count) is None)
    return (row, inferred(row)) if row < len(values) else (None, None)
