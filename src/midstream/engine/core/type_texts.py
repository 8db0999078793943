"""Arrow types from their texts, as the settings of state in a checkpoint have them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

import pyarrow as pa

from midstream.engine.core.arrow_types import map_of

_PLAIN_TYPES: Final[list[pa.DataType]] = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *(pa.float16(), pa.float32(), pa.float64(), pa.bool_(), pa.null(), pa.date32(), pa.date64()),
    *(pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()),
    *(pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
    *(pa.duration(unit) for unit in ("s", "ms", "us", "ns")),
    *(pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")),
]
_PLAIN: Final = {str(kind): kind for kind in _PLAIN_TYPES}
_WORD: Final = re.compile(r"[a-z0-9_]+(\[[^\]]*\])?")
_TIMESTAMP: Final = re.compile(r"timestamp\[(s|ms|us|ns), tz=([^\]]+)\]")
_DECIMAL: Final = re.compile(r"decimal(128|256)\((\d+), (-?\d+)\)")
_BINARY: Final = re.compile(r"fixed_size_binary\[(\d+)\]")
_SIZE: Final = re.compile(r"\[(\d+)\]")
_NOT_NULL: Final = " not null"
_Fields: TypeAlias = "list[pa.Field[Any]]"


@lru_cache(maxsize=1024)
def type_of_text(text: str) -> pa.DataType | None:
    """Return the type whose text this is; None if there is none."""
    return next((kind for kind, end in _types(text, 0) if end == len(text) and str(kind) == text), None)


def columns_of_text(text: str) -> _Fields | None:
    """Return the columns that `fields_text` lists, such as "user int64, name large_string"; None if it lists none."""
    found = (fields for fields, end in _fields(text, 0, " ") if end == len(text))
    return next(found, None)


def _types(text: str, at: int) -> Iterator[tuple[pa.DataType, int]]:
    """Yield the types whose texts begin at `at`, and where each ends: the name of a field may look like part of one."""
    for pattern, make in _PARAMETERS:
        match = pattern.match(text, at)
        if match:
            try:
                yield make(match.groups()), match.end()
            except (ValueError, pa.ArrowException):  # a number that no such type has
                return
    word = _WORD.match(text, at)
    if word is None:
        return
    if word[0] in _PLAIN:
        yield _PLAIN[word[0]], word.end()
    elif text.startswith("<", word.end()):
        yield from _nested(text, word[0], word.end() + 1)


def _nested(text: str, word: str, at: int) -> Iterator[tuple[pa.DataType, int]]:
    if word == "struct":
        yield from _structs(text, at)
    elif word == "map":
        yield from _maps(text, at)
    else:
        for field, end in _field(text, at, ": "):
            size = _SIZE.match(text, end + 1)
            if not text.startswith(">", end):
                continue
            if word == "list":
                yield pa.list_(field), end + 1
            elif word == "large_list":
                yield pa.large_list(field), end + 1
            elif word == "fixed_size_list" and size:
                yield pa.list_(field, int(size[1])), size.end()


def _structs(text: str, at: int) -> Iterator[tuple[pa.DataType, int]]:
    if text.startswith(">", at):
        yield pa.struct([]), at + 1
    for fields, end in _fields(text, at, ": "):
        if text.startswith(">", end):
            yield pa.struct(fields), end + 1


def _maps(text: str, at: int) -> Iterator[tuple[pa.DataType, int]]:
    for key, end in _types(text, at):
        if text.startswith(", ", end):
            for item, last in _types(text, end + 2):
                if text.startswith(">", last):
                    yield map_of(pa.field("key", key, nullable=False), pa.field("value", item)), last + 1


def _fields(text: str, at: int, colon: str) -> Iterator[tuple[_Fields, int]]:
    for field, end in _field(text, at, colon):
        yield [field], end
        if text.startswith(", ", end):
            for others, last in _fields(text, end + 2, colon):
                yield [field, *others], last


def _field(text: str, at: int, colon: str) -> Iterator[tuple[pa.Field[Any], int]]:
    start = text.find(colon, at)
    while start >= 0:
        for kind, end in _types(text, start + len(colon)):
            if text.startswith(_NOT_NULL, end):
                yield pa.field(text[at:start], kind, nullable=False), end + len(_NOT_NULL)
            yield pa.field(text[at:start], kind), end
        start = text.find(colon, start + 1)


_Make: TypeAlias = Callable[[Sequence[Any]], pa.DataType]
_PARAMETERS: Final[tuple[tuple[re.Pattern[str], _Make], ...]] = (
    (_TIMESTAMP, lambda found: pa.timestamp(found[0], found[1])),
    (_DECIMAL, lambda found: _decimal(found[0], int(found[1]), int(found[2]))),
    (_BINARY, lambda found: pa.binary(int(found[0]))),
)


def _decimal(bits: str, precision: int, scale: int) -> pa.DataType:
    return pa.decimal128(precision, scale) if bits == "128" else pa.decimal256(precision, scale)
