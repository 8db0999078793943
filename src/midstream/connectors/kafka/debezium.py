"""Debezium's envelopes as rows: each change of a database is a row with its operation.

An envelope has the row `before` and `after` the change, and `op`: c (create), r (read by the first snapshot), u (update)
or d (delete). In JSON the envelope may be the field `payload`, next to a schema. The record without a value that follows
a delete is for the topic's compaction, and is no change.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream.connectors.common.row_operations import DELETE, INSERT, OP, UPDATE
from midstream.connectors.files.file_formats import MISSES_VALUE, WantedColumns
from midstream.engine.core.arrow_types import is_list_array, is_struct_array, to_list
from midstream.engine.core.errors import SchemaError

_FIELDS: Final = ("before", "after", "op")
_OPERATIONS: Final = {"c": INSERT, "r": INSERT, "u": UPDATE, "d": DELETE}
_UNAVAILABLE: Final = b"__debezium_unavailable_value"
"""What Debezium writes in place of a text or bytes that the database did not record; bytes are in base64 in JSON."""
_IN_LISTS: Final = ([_UNAVAILABLE.decode()], [_UNAVAILABLE], [b64encode(_UNAVAILABLE)], list(_UNAVAILABLE))
"""What it writes in place of a list: the placeholder as the only item or, in a list of numbers, one number per byte."""


def envelope_columns(columns: WantedColumns) -> WantedColumns:
    """Return the columns of an envelope in JSON of rows with these."""

    def envelope(rows: pa.Schema) -> pa.Schema:
        row = pa.struct(list(rows))
        fields = [("before", row), ("after", row), ("op", pa.large_string())]
        return pa.schema([*fields, ("payload", pa.struct(fields))])

    in_seconds = None if columns.in_seconds is None else envelope(columns.in_seconds)
    return WantedColumns(envelope(columns.schema), declared=True, in_seconds=in_seconds)


def row_columns(envelope: pa.Schema, who: str) -> WantedColumns:
    """Return the columns of the rows in envelopes with this schema. Raises SchemaError if it is not that of an envelope."""
    kinds = {field.name: field.type for field in envelope}
    row = kinds.get("after")
    if row is None or not pa.types.is_struct(row) or kinds.get("before") != row or "op" not in kinds:
        raise SchemaError(
            f"{who}: the schema is not that of a Debezium envelope, which has `before` and `after`, two records with the "
            f"same fields, and `op`; it has {', '.join(envelope.names)}"
        )
    return WantedColumns(pa.schema(list(row)), declared=True)


def changes(envelopes: pa.RecordBatch, has_value: pa.Array[Any], columns: WantedColumns) -> pa.RecordBatch:
    """Return one row for each envelope: the columns, then the operation, which is null for a record without a value.

    Of a delete the row is the one before it, of which a database may have recorded no more than the key. Raises
    ArrowInvalid for what is no envelope, and for a row with a value that the database did not record: written to a copy,
    the placeholder would replace the value.
    """
    found: list[pa.Array[Any]] = [envelopes.column(name) for name in _FIELDS]
    if "payload" in envelopes.schema.names:
        inner = _parts_of(envelopes.column("payload"))
        found = [_either(within, plain) for plain, within in zip(found, inner, strict=True)]
    before, after, op = found
    operation = _operation(op)
    _refuse_if(pc.and_(has_value, operation.is_null()), op, _without_operation)
    is_delete = _op_is(op, "d")
    row_is_null = pc.if_else(is_delete, before.is_null(), after.is_null())
    _refuse_if(pc.and_(has_value, row_is_null), is_delete, _without_row)
    made = [pc.if_else(is_delete, old, new) for old, new in zip(_parts_of(before), _parts_of(after), strict=True)]
    is_row = pc.and_(has_value, pc.invert(is_delete))
    for name in columns.required:
        missing = pc.and_(is_row, made[columns.schema.names.index(name)].is_null())
        _refuse_if(missing, missing, partial(_without_value, name))
    for name, column in zip(columns.schema.names, made, strict=True):
        unavailable = _is_unavailable(column)
        _refuse_if(unavailable, unavailable, partial(_not_recorded, name))
    return pa.RecordBatch.from_arrays([*made, operation], names=[*columns.schema.names, OP])


def _op_is(op: pa.Array[Any], code: str) -> Any:
    return pc.equal(op, pa.scalar(code, pa.large_string())).fill_null(False)


def _parts_of(column: pa.Array[Any]) -> list[pa.Array[Any]]:
    """Return the fields of a struct; those of a null are null."""
    assert is_struct_array(column), column.type
    return column.flatten()


def _refuse_if(rows: Any, values: pa.Array[Any], why: Callable[[Any], str]) -> None:
    """Raise ArrowInvalid for the first of these rows, with its value."""
    if pc.any(rows).as_py():
        raise pa.ArrowInvalid(why(values.filter(rows)[0].as_py()))


def _without_operation(code: str | None) -> str:
    if code is None:
        return "not a Debezium envelope: it has no `op`"
    return f"the operation {code!r} of a Debezium envelope is none of {', '.join(_OPERATIONS)}"


def _without_value(name: str, _: object) -> str:
    return f"column {name!r} {MISSES_VALUE}"


def _not_recorded(name: str, _: object) -> str:
    return (
        f"column {name!r} is {_UNAVAILABLE.decode()}: the database did not record the value, which the change left as "
        "it was; let it record whole rows (PostgreSQL: ALTER TABLE … REPLICA IDENTITY FULL)"
    )


def _without_row(is_delete: bool) -> str:
    return f"a Debezium envelope that does not have the row {'before' if is_delete else 'after'} its change"


def _is_unavailable(column: pa.Array[Any]) -> pa.Array[Any]:
    """Return for each row whether its text, bytes or list is the placeholder."""
    if column.type in (pa.large_string(), pa.large_binary()):
        placeholders = pa.array([_UNAVAILABLE, b64encode(_UNAVAILABLE)], pa.large_binary())
        return pc.is_in(column, value_set=placeholders.cast(column.type))
    found = np.zeros(len(column), np.bool_)
    if is_list_array(column):
        lengths = pc.list_value_length(column).fill_null(0).to_numpy()
        rows = np.flatnonzero((lengths == 1) | (lengths == len(_UNAVAILABLE)))
        found[rows] = [values in _IN_LISTS for values in to_list(column.take(pa.array(rows, pa.int64())))]
    return pa.array(found)


def _either(first: pa.Array[Any], second: pa.Array[Any]) -> pa.Array[Any]:
    """Return the values of `first`, and where they are null those of `second`."""
    if not first.null_count:
        return first
    if first.null_count == len(first):
        return second
    both = pa.concat_arrays([first, second])
    rows = np.arange(len(first))
    at = np.where(first.is_null().to_numpy(zero_copy_only=False), rows + len(first), rows)
    return both.take(pa.array(at, pa.int64()))


def _operation(op: pa.Array[Any]) -> pa.Array[Any]:
    codes, names = (
        pa.array(list(_OPERATIONS), pa.large_string()),
        pa.array(list(_OPERATIONS.values()), pa.large_string()),
    )
    at: Any = pc.index_in(op, value_set=codes)
    return names.take(at)
