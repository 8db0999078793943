"""Whole rows as keys: a column with the bytes of all others, equal for equal rows.

Nulls equal each other, and so do all NaN, and 0.0 and -0.0. State has these bytes: they do not depend on versions.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from midstream.engine.core.errors import SchemaError
from midstream.engine.operators.stateless import Stateless

_BYTES: Final = pa.large_binary()


class RowKeysOperator(Stateless):
    """Adds the column `key`, which is last. Raises SchemaError for a column whose values have no such bytes."""

    keeps_rows = keeps_every_row = True

    def __init__(self, name: str, key: str, schema: pa.Schema) -> None:
        super().__init__(name, schema.append(pa.field(key, _BYTES)))
        for field in schema:
            if pa.types.is_nested(field.type) or pa.types.is_null(field.type):
                raise SchemaError(
                    f"{self._where}: column {field.name!r} is {field.type}, which cannot be compared; name the columns "
                    "that make rows duplicates"
                )

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        self._out.emit(pa.RecordBatch.from_arrays([*batch.columns, row_keys(batch)], schema=self.schema))


def row_keys(batch: pa.RecordBatch) -> pa.Array[Any]:
    """Return for each row the bytes of its values: first those of one width, then texts and binaries, whose lengths are
    among the first.
    """
    fixed: list[npt.NDArray[np.uint8]] = []
    texts: list[Any] = []
    for column in batch.columns:
        if column.null_count:
            fixed.append(np.asarray(pc.is_null(column)).astype(np.uint8)[:, None])
        else:
            fixed.append(np.zeros((len(column), 1), np.uint8))
        if pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type):
            text: Any = column.cast(_BYTES).fill_null(b"")
            texts.append(text)
            fixed.append(_bytes(pc.binary_length(text).to_numpy().astype("<i8")))
        else:
            fixed.append(_fixed_bytes(column))
    whole = np.concatenate(fixed, axis=1)
    buffers = [None, pa.py_buffer(whole.tobytes())]
    keys: Any = pa.FixedSizeBinaryArray.from_buffers(pa.binary(whole.shape[1]), len(whole), buffers).cast(_BYTES)
    if texts:
        separator: Any = pa.scalar(b"", _BYTES)
        keys = pc.binary_join_element_wise(keys, *texts, separator)
    found: pa.Array[Any] = keys
    return found


def _fixed_bytes(column: pa.Array[Any]) -> npt.NDArray[np.uint8]:
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    width = column.type.bit_width // 8
    data = column.buffers()[1]
    assert data is not None, column.type
    values = np.frombuffer(memoryview(data), np.uint8)[column.offset * width :][: len(column) * width].copy()
    if pa.types.is_floating(column.type):
        numbers = values.view(f"<f{width}")
        numbers[numbers == 0] = 0  # there is -0.0, too
        numbers[np.isnan(numbers)] = np.nan
    rows = values.reshape(len(column), width)
    if column.null_count:
        rows[np.asarray(pc.is_null(column))] = 0
    return rows


def _bytes(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), values.dtype.itemsize)
