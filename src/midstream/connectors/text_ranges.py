"""Finds the numbers in text that pyarrow has made others: infinite, beyond the range of a type, or rounded integers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

BOM: Final = b"\xef\xbb\xbf"
_EXACT_MAX: Final = 2.0**53
"""Floats of 64 bits hold all integers up to this one."""


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


def may_be_rounded(values: pa.ChunkedArray[Any]) -> bool:
    """Whether a float in this column, or in its lists and structs, is so large that it may be a rounded integer."""
    floats = (leaf for leaf in _leaves(values) if pa.types.is_floating(leaf.type))
    return any(bool(pc.any(pc.greater_equal(pc.abs(leaf), pa.scalar(_EXACT_MAX))).as_py()) for leaf in floats)


def check_inferred(integers: Iterable[tuple[str, int]]) -> None:
    """Raise ArrowInvalid for the first integer, after its column's name, that a float of 64 bits does not hold."""
    for name, integer in integers:
        as_float = float(integer) if integer.bit_length() <= 1023 else math.inf
        if as_float != integer:
            raise pa.ArrowInvalid(
                f"conversion error to double, the type inferred: the integer {integer} in column {name!r} would become "
                f"{as_float}; pa.uint64() and pa.decimal128(38, 0) keep such integers, pa.float64() rounds them"
            )


def integers_in_csv(texts: pa.Table) -> Iterator[tuple[str, int]]:
    """Yield the integers in columns of strings, after the name of their column."""
    for name, column in zip(texts.column_names, texts.columns, strict=True):
        for text in column.filter(pc.match_substring_regex(column, r"^\s*[+-]?[0-9]{1,900}\s*$")):
            yield name, int(text.as_py())


def integers_in_json(lines: bytes, schema: pa.Schema) -> Iterator[tuple[str, int]]:
    """Yield the integers in JSON lines that are floats by the schema, after the name of their column."""
    for line in filter(bytes.strip, lines.removeprefix(BOM).splitlines()):
        try:
            row = json.loads(line)
        except ValueError:
            continue  # several objects in one line, which are refused as such
        for field in schema:
            for integer in _integers_in(row.get(field.name), field.type):
                yield field.name, integer


def _integers_in(value: Any, kind: pa.DataType) -> Iterator[int]:
    if isinstance(value, dict):
        for field in map(kind.field, range(kind.num_fields)):
            yield from _integers_in(value.get(field.name), field.type)
    elif isinstance(value, list):
        for each in value:
            yield from _integers_in(each, kind.field(0).type)
    elif isinstance(value, int) and pa.types.is_floating(kind):
        yield value


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
