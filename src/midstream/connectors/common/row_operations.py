"""Rows that put or delete the row of their key in a table: the columns of the key, and the one with the operation.

Without such a column every row is put. "insert" and "update" are the same: the row replaces the one with its key, or is
added if there is none. Of a deleting row only the key counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream.engine.core.arrow_types import is_text
from midstream.engine.core.batches import first_null
from midstream.engine.core.errors import ConfigError, SchemaError
from midstream.engine.core.python_values import shown

OP: Final = "_op"
"""The column in which sources of changes give the operation."""
INSERT: Final = "insert"
UPDATE: Final = "update"
DELETE: Final = "delete"
_OPERATIONS: Final = (INSERT, UPDATE, DELETE)


def checked_key(key: Sequence[str], op: str | None, where: str) -> tuple[str, ...]:
    """Return `key`. Raises ConfigError for arguments that contradict each other."""
    if isinstance(key, str):
        raise ConfigError(f"{where}: key={key!r} is a string; give a list of columns: key=[{key!r}]")
    if len(set(key)) < len(key):
        raise ConfigError(f"{where}: key={list(key)!r} names a column twice; name each once")
    if op is not None and not isinstance(op, str):
        raise ConfigError(f"{where}: op={op!r} is not the name of a column; give the one with the operations: op='op'")
    if op is not None and not key:
        raise ConfigError(
            f"{where}: op={op!r} needs the columns by which rows are found: give them as well, for example key=['id']"
        )
    if op in key:
        raise ConfigError(f"{where}: column {op!r} is the operation, and cannot be in the key; take it out of key")
    return tuple(key)


def check_columns(schema: pa.Schema, key: Sequence[str], op: str | None, where: str) -> None:
    """Raise SchemaError if a column is not in the stream, or if that of the operation is not text."""
    for what, name in (*(("key", name) for name in key), *((("operation", op),) if op is not None else ())):
        if name not in schema.names:
            raise SchemaError(f"{where}: {what} column {name!r} is not in the stream; it has {', '.join(schema.names)}")
    if op is not None and not is_text(schema.field(op).type):
        raise SchemaError(
            f"{where}: operation column {op!r} is {schema.field(op).type}; it must be text, with the values "
            f"{_listed()}: convert it with with_columns()"
        )


def check_key_types(schema: pa.Schema, key: Sequence[str], where: str) -> None:
    """Raise SchemaError if a column of the key has a type of which equal values cannot be found."""
    for name in key:
        kind = schema.field(name).type
        if pa.types.is_floating(kind) or pa.types.is_nested(kind):
            raise SchemaError(
                f"{where}: key column {name!r} is {kind}, of which equal values cannot be found; cast it to an integer, a "
                "decimal or text"
            )


def written_columns(schema: pa.Schema, op: str | None) -> pa.Schema:
    """Return the columns that go to the table: all but that of the operation."""
    return pa.schema([field for field in schema if field.name != op])


def key_and_operations(
    batch: pa.RecordBatch, key: Sequence[str], op: str | None, before: int, where: str
) -> tuple[pa.RecordBatch, pa.Array[Any]]:
    """Return the columns that go to the table, and which rows delete; these have only their key, and null elsewhere.

    `before`: the number of earlier rows since the last checkpoint. Raises SchemaError for a row without a key, or with an
    unknown operation.
    """
    for name in key:
        row = first_null(batch.column(name))
        if row is not None:
            raise SchemaError(
                f"{where}: row {before + row} since the last checkpoint: key column {name!r} is null; filter such rows "
                "out, or fill it"
            )
    if op is None:
        return batch, pa.array(np.zeros(batch.num_rows, bool))
    operations = batch.column(op)
    known = pc.is_in(operations, value_set=pa.array(_OPERATIONS, operations.type))
    unknown = int(pc.index(known, pa.scalar(False)).as_py())
    if unknown >= 0:
        raise SchemaError(
            f"{where}: row {before + unknown} since the last checkpoint: operation column {op!r} is "
            f"{shown(operations[unknown].as_py())}; it must be {_listed()}"
        )
    deletes = pc.equal(operations, pa.scalar(DELETE, operations.type))
    rows = pa.array(np.arange(batch.num_rows))
    kept = pc.if_else(deletes, pa.scalar(None, pa.int64()), rows)
    schema = written_columns(batch.schema, op)
    columns = [batch.column(name) if name in key else batch.column(name).take(kept) for name in schema.names]
    return pa.RecordBatch.from_arrays(columns, schema=schema), deletes


def check_put(
    batch: pa.RecordBatch, required: Sequence[str], deletes: pa.Array[Any], before: int, where: str
) -> pa.RecordBatch:
    """Return `batch`. Raises SchemaError if a row that is put has a null in one of the columns `required`."""
    for name in required:
        missing = pc.and_not(pc.is_null(batch.column(name)), deletes)
        row = int(pc.index(missing, pa.scalar(True)).as_py())
        if row >= 0:
            raise SchemaError(
                f"{where}: row {before + row} since the last checkpoint: column {name!r} must have a value, but it is null"
            )
    return batch


def _listed() -> str:
    *some, last = map(repr, _OPERATIONS)
    return f"{', '.join(some)} or {last}"
