"""Parses schemas written as DDL text without a JVM, since a data source may be examined before a session runs.

It supports the part of Spark's grammar that data sources use: `name type [NOT NULL] [COMMENT 'text'], …`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from pyspark.sql import types as t

_TOKEN: Final = re.compile(r"\s*(?:`((?:[^`]|``)+)`|('(?:[^'\\]|\\.)*')|(\w+)|([<>(),:]))")
_SIMPLE: Final[dict[str, Callable[[], t.DataType]]] = {
    "boolean": t.BooleanType,
    "tinyint": t.ByteType,
    "byte": t.ByteType,
    "smallint": t.ShortType,
    "short": t.ShortType,
    "int": t.IntegerType,
    "integer": t.IntegerType,
    "bigint": t.LongType,
    "long": t.LongType,
    "float": t.FloatType,
    "real": t.FloatType,
    "double": t.DoubleType,
    "string": t.StringType,
    "binary": t.BinaryType,
    "date": t.DateType,
    "timestamp": t.TimestampType,
    "timestamp_ltz": t.TimestampType,
    "timestamp_ntz": t.TimestampNTZType,
    "void": t.NullType,
}


def parse_ddl(text: str) -> t.StructType:
    """Parse a schema. Raises ValueError saying what was expected where."""
    parser = _Parser(text)
    struct = t.StructType(parser.fields(""))
    if not struct.fields:
        raise ValueError("it has no columns")
    return struct


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, bool]] = []
        """The text of each token, and whether it was quoted (and so is a name, whatever it looks like)."""
        at = 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                raise ValueError(f"{text[at:].strip()!r} cannot be parsed")
            quoted, string, word, mark = match.groups()
            self._tokens.append((quoted.replace("``", "`"), True) if quoted else (string or word or mark, False))
            at = match.end()
        self._at = 0

    def fields(self, end: str) -> list[t.StructField]:
        """Parse columns up to the token `end`, which is not consumed ("": the end of the text)."""
        found: list[t.StructField] = []
        while self._peek() != end:
            if found:
                self._expect(",")
            found.append(self._field())
        return found

    def _field(self) -> t.StructField:
        name, is_quoted = self._next()
        if not is_quoted and not re.fullmatch(r"\w+", name):
            raise ValueError(f"expected a column name before {name!r}")
        if self._peek() == ":":
            self._next()
        kind = self._type()
        nullable = True
        metadata: dict[str, str] = {}
        if self._peek().lower() == "not":
            self._next()
            self._expect("null")
            nullable = False
        if self._peek().lower() == "comment":
            self._next()
            metadata["comment"] = self._next()[0].strip("'")
        return t.StructField(name, kind, nullable, metadata)

    def _type(self) -> t.DataType:
        name = self._next()[0].lower()
        if name in _SIMPLE:
            return _SIMPLE[name]()
        if name in ("decimal", "dec", "numeric"):
            precision, scale = ([*self._numbers(), 0] if self._peek() == "(" else [10, 0])[:2]
            return t.DecimalType(precision, scale)
        if name in ("char", "character", "varchar"):
            (length,) = self._numbers()
            return t.VarcharType(length) if name == "varchar" else t.CharType(length)
        if name not in ("array", "map", "struct"):
            raise ValueError(f"{name!r} is not a type")
        self._expect("<")
        kind: t.DataType
        if name == "array":
            kind = t.ArrayType(self._type())
        elif name == "map":
            key = self._type()
            self._expect(",")
            kind = t.MapType(key, self._type())
        else:
            kind = t.StructType(self.fields(">"))
        self._expect(">")
        return kind

    def _numbers(self) -> list[int]:
        self._expect("(")
        numbers = [int(self._next()[0])]
        while self._peek() == ",":
            self._next()
            numbers.append(int(self._next()[0]))
        self._expect(")")
        return numbers

    def _peek(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    def _next(self) -> tuple[str, bool]:
        if self._at == len(self._tokens):
            raise ValueError("it ends too early")
        self._at += 1
        return self._tokens[self._at - 1]

    def _expect(self, text: str) -> None:
        found = self._next()[0]
        if found.lower() != text:
            raise ValueError(f"expected {text!r} before {found!r}")
