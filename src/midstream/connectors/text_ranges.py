"""Finds the numbers in text that pyarrow has made infinite, being beyond the range of their column's type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc


def has_infinite(values: pa.ChunkedArray[Any]) -> bool:
    """Whether a float in this column, or in its lists and structs, is infinite."""
    return any(bool(pc.any(pc.is_inf(leaf)).as_py()) for leaf in _leaves(values) if pa.types.is_floating(leaf.type))


def check_ranges(table: pa.Table, as_written: pa.Table) -> None:
    """Raise ArrowInvalid if a float of `table` is infinite but not written so.

    `as_written`: the same columns as strings, or with floats of 64 bits.
    """
    for field, column in zip(table.schema, table.columns, strict=True):
        for leaf, written in zip(_leaves(column), _leaves(as_written.column(field.name)), strict=True):
            if not pa.types.is_floating(leaf.type):
                continue
            if pa.types.is_floating(written.type):
                is_written_so = pc.is_inf(written)
            else:
                is_written_so = pc.match_substring(written, "inf", ignore_case=True)
            beyond = written.filter(pc.and_not(pc.is_inf(leaf), is_written_so))
            if len(beyond):
                raise pa.ArrowInvalid(
                    f"conversion error to {leaf.type}: the number {beyond[0].as_py()} in column {field.name!r} is beyond "
                    "the range of that type; declare another one"
                )


def of_64_bits(kind: pa.DataType) -> pa.DataType:
    """Return the type with 64 bits for each float."""
    if pa.types.is_list(kind):
        return pa.list_(of_64_bits(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, of_64_bits(f.type)) for f in kind])
    return pa.float64() if pa.types.is_floating(kind) else kind


def _leaves(values: pa.ChunkedArray[Any]) -> Iterator[pa.ChunkedArray[Any]]:
    """Yield the column, or for a list or struct the columns inside it."""
    if pa.types.is_struct(values.type):
        for part in values.flatten():
            yield from _leaves(part)
    elif pa.types.is_list(values.type):
        yield from _leaves(
            pa.chunked_array([pc.list_flatten(chunk) for chunk in values.chunks], values.type.value_type)
        )
    else:
        yield values
