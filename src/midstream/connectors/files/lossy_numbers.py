"""Finds the numbers in text that pyarrow has made others: infinite, beyond the range of a type, hexadecimal, or rounded integers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from midstream.engine.core.arrow_types import to_list

BOM: Final = b"\xef\xbb\xbf"
_BEYOND_FLOAT: Final = re.compile(rb"[0-9]{309}")
"""More digits than the largest float has; pyarrow refuses large exponents, but reads such numbers as infinite."""
_TINY: Final = rb"[eE]-[0-9]{2}|\.[0-9]{29,}[eE]-"
_HEXADECIMAL: Final = r"^\s*[+-]?0[xX]"
_EXACT_MAX: Final = 2.0**53
"""Floats of 64 bits hold all integers up to this one."""


def has_decimal(kind: pa.DataType) -> bool:
    return any(decimals_in(kind))


def decimals_in(kind: pa.DataType) -> Iterator[pa.DataType]:
    """Return the types of decimals that a type is or contains."""
    if pa.types.is_decimal(kind):
        yield kind
    for index in range(kind.num_fields):
        yield from decimals_in(kind.field(index).type)


def has_infinite(values: pa.ChunkedArray[Any]) -> bool:
    """Whether a float in this column, or in its lists and structs, is infinite."""
    return any(bool(pc.any(pc.is_inf(leaf)).as_py()) for leaf in _leaves(values) if pa.types.is_floating(leaf.type))


def may_have_hexadecimal(data: bytes) -> bool:
    """Whether a value of CSV may begin with 0x, which pyarrow accepts in integers, where 0xFF can become -1."""
    array = np.frombuffer(data, np.uint8)
    zeros = _places(array, data, b"0x", b"0X")
    return bool(np.any((zeros == 0) | ~_IS_ALNUM[array[zeros - 1]]))


class OddDecimals:
    """Finds the numbers that pyarrow rescales by more digits than it can, without a check, to decimals of these types.

    It then reads 0, or another number, or ends the process. Other numbers beyond the precision of a type remain as they
    are, so that `check_precision` finds them.
    """

    def __init__(self, types: Iterable[pa.DataType]) -> None:
        kinds: list[Any] = list(types)
        digits = [
            _digits_max(kind) - kind.scale + 1 for kind in kinds if kind.precision + kind.scale > _digits_max(kind)
        ]
        self._is_wide = bool(digits)
        wide = rb"|[eE]\+?[0-9]|[0-9]{%d}" % min(digits) if digits else b""
        self._pattern = re.compile(_TINY + wide) if kinds else None

    def may_be_in(self, data: bytes) -> bool:
        if self._pattern is None:
            return False
        if not self._is_wide and not len(_places(np.frombuffer(data, np.uint8), data, b"e-", b"E-")):
            return False
        return self._pattern.search(data) is not None

    def check(self, texts: pa.Table, schema: pa.Schema) -> None:
        """Raise ArrowInvalid for such a number among the texts of columns of `schema`."""
        assert self._pattern is not None
        pattern = self._pattern.pattern.decode()
        for name, column in zip(texts.column_names, texts.columns, strict=True):
            for text in to_list(column.filter(pc.match_substring_regex(column, pattern)).drop_null()):
                _check_digits(name, schema.field(name).type, text)

    def check_json(self, lines: bytes, schema: pa.Schema) -> None:
        """Raise ArrowInvalid as `check` does."""
        assert self._pattern is not None
        for line in filter(self._pattern.search, lines.removeprefix(BOM).splitlines()):
            for name, value, kind in _numbers_in_json(line, schema):
                if pa.types.is_decimal(kind) and isinstance(value, (Decimal, str)):
                    _check_digits(name, kind, value)


def _digits_max(kind: pa.DataType) -> int:
    return 76 if pa.types.is_decimal256(kind) else 38


def _check_digits(name: str, kind: pa.DataType, value: str | Decimal) -> None:
    assert pa.types.is_decimal(kind), kind
    try:
        number = Decimal(value)
    except InvalidOperation:
        return  # pyarrow refuses it, too
    exponent = number.as_tuple().exponent
    if not isinstance(exponent, int):
        return
    which = "after" if -exponent - kind.scale > _digits_max(kind) else "before"
    if which == "after" or (number and number.adjusted() >= kind.precision - kind.scale):
        raise pa.ArrowInvalid(
            f"conversion error to {kind}: the number {value!s} in column {name!r} has too many digits {which} the point"
        )


def check_precision(table: pa.Table) -> None:
    """Raise ArrowInvalid for a decimal with more digits than its type has, which pyarrow reads if it has zeros to append."""
    for name, column in zip(table.column_names, table.columns, strict=True):
        if has_decimal(column.type):
            try:
                column.validate(full=True)
            except pa.ArrowInvalid as error:
                raise pa.ArrowInvalid(
                    f"conversion error to {column.type}: a number in column {name!r} has too many digits before the point"
                ) from error


def _places(array: npt.NDArray[np.uint8], data: bytes, *pairs: bytes) -> npt.NDArray[np.int64]:
    """Return where these pairs of characters are in `data`; ten times as fast as `find` where they are rare."""
    found = [np.empty(0, np.int64)]
    for pair in pairs:
        for first in (0, 1) if pair[1:] in data else ():
            is_pair = array[first : first + (len(data) - first) // 2 * 2].view(np.uint16) == np.frombuffer(
                pair, np.uint16
            )
            if is_pair.any():
                found.append(np.flatnonzero(is_pair) * 2 + first)
    return np.concatenate(found)


_IS_ALNUM: Final = np.array([chr(code).isascii() and chr(code).isalnum() for code in range(256)])


def is_integral(kind: pa.DataType) -> bool:
    """Whether pyarrow reads this type from an integer."""
    return pa.types.is_integer(kind) or pa.types.is_duration(kind)


def has_nan(values: pa.ChunkedArray[Any]) -> bool:
    """Whether a float in this column is NaN, which pyarrow also reads from texts such as nan(1)."""
    return bool(pa.types.is_floating(values.type) and pc.any(pc.is_nan(values)).as_py())


def check_notation(name: str, kind: pa.DataType, texts: pa.ChunkedArray[Any]) -> None:
    """Raise ArrowInvalid for a text that pyarrow reads as a number, and Python does not."""
    if is_integral(kind):
        odd = texts.filter(pc.match_substring_regex(texts, _HEXADECIMAL))
        what = "is hexadecimal; integers have decimal digits"
    elif pa.types.is_floating(kind):
        odd, what = texts.filter(pc.match_substring(texts, "(")), "is not a number"
    else:
        return
    if len(odd):
        raise pa.ArrowInvalid(f"conversion error to {kind}: the value {odd[0].as_py()!r} in column {name!r} {what}")


def _numbers_in_json(line: bytes, schema: pa.Schema) -> Iterator[tuple[str, Any, pa.DataType]]:
    try:
        row = json.loads(line, parse_float=Decimal, parse_int=Decimal)
    except (ValueError, RecursionError) as error:
        raise pa.ArrowInvalid(f"JSON parse error in a line with a very large or small number: {error}") from error
    for field in schema if isinstance(row, dict) else ():
        for value, kind in _values_in(row.get(field.name), field.type):
            yield field.name, value, kind


def check_finite_in_json(lines: bytes, schema: pa.Schema) -> None:
    """Raise ArrowInvalid for a number with so many digits that it has become infinite."""
    if _BEYOND_FLOAT.search(lines) is None:
        return
    for line in filter(_BEYOND_FLOAT.search, lines.removeprefix(BOM).splitlines()):
        for name, value, kind in _numbers_in_json(line, schema):
            if isinstance(value, Decimal) and pa.types.is_floating(kind) and math.isinf(float(value)):
                raise pa.ArrowInvalid(
                    f"conversion error to {kind}: the number {value:.3e} in column {name!r} is beyond the range of that "
                    "type; declare another one"
                )


def check_depth(data: bytes, depth_max: int) -> None:
    """Raise ArrowInvalid for JSON that is nested too deep for pyarrow to infer its type, which can end the process."""
    if _depth(data) > depth_max and _depth(_STRING.sub(b"", data)) > depth_max:  # there may be brackets in strings
        raise pa.ArrowInvalid(f"JSON parse error: values are nested more than {depth_max} deep; declare schema=")


def _depth(data: bytes) -> int:
    steps = _STEPS[np.frombuffer(data, np.uint8)]
    return int(np.cumsum(steps[steps != 0], dtype=np.int64).max(initial=0))


_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_STEPS: Final = np.array([(chr(code) in "[{") - (chr(code) in "]}") for code in range(256)], np.int8)


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
        except (ValueError, RecursionError):
            continue  # several objects in one line, which are refused as such
        for field in schema:
            for value, kind in _values_in(row.get(field.name), field.type):
                if isinstance(value, int) and pa.types.is_floating(kind):
                    yield field.name, value


def _values_in(value: Any, kind: pa.DataType) -> Iterator[tuple[Any, pa.DataType]]:
    """Yield the values inside objects and arrays of JSON, with their types."""
    if isinstance(value, dict):
        for field in map(kind.field, range(kind.num_fields)):
            yield from _values_in(value.get(field.name), field.type)
    elif isinstance(value, list):
        for each in value:
            yield from _values_in(each, kind.field(0).type)
    else:
        yield value, kind


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
