"""The file formats, their errors, and the columns that a file must have."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

import pyarrow as pa

from midstream.engine.core.errors import DataError, SchemaError, StorageError

Format: TypeAlias = Literal["parquet", "csv", "jsonl"]

_SUFFIXES: dict[str, Format] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}
_COMPRESSION = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4", ".zip": "zip"}
UNREADABLE = (OSError, pa.ArrowException, UnicodeDecodeError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)
MISSES_VALUE = "has no value, though it is declared with nullable=False (without that, it is null)"
_NOT_UTF8 = ("invalid UTF8", "Invalid UTF8", "'utf-8' codec")
_OTHER_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")
"""The byte order marks of UTF-16 and UTF-32."""
_COMPRESSED_STARTS = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f": ".zst", b"PK\x03": ".zip", b"\x04\x22\x4d": ".lz4"}
"""How compressed files begin, as far as no text does."""
_OF_VALUES = (
    MISSES_VALUE,
    "conversion error",
    "changed from",
    "unexpected field",
    "Failed to convert JSON",
    "JSON parsing of",
    "Failed to parse string",
    "is not a valid decimal",
    "cannot be represented as decimal",
    "Rescaling Decimal value",
    "precision not supported by type",
    "Number too big",
)
"""Fragments of pyarrow's messages for a well-formed file whose values do not have the declared types."""


@dataclass(frozen=True)
class WantedColumns:
    """The columns that a source reads: those `declared` by the user, or else all columns of the first file.

    A declared column that a file or line lacks is null there, except for `required` ones, which have a value in every
    row.
    """

    schema: pa.Schema
    declared: bool
    required: tuple[str, ...] = ()
    in_seconds: pa.Schema | None = None
    """The same columns, in seconds where they were declared so: text is parsed in that unit. None: as in `schema`."""
    may_lack_all: bool = False
    """Whether a file may have none of them, as of a table to which they were added later."""

    def only(self, names: Collection[str]) -> WantedColumns:
        """Return those of the columns that are in `names` or required, whose values are checked in any case."""
        kept = [field for field in self.schema if field.name in names or field.name in self.required]
        return replace(self, schema=pa.schema(kept), in_seconds=None)

    @property
    def in_text(self) -> pa.Schema:
        return self.schema if self.in_seconds is None else self.in_seconds


_NO_OBJECT: Final = "Column() changed from object"
"""What pyarrow reports of a line that is a value, or an array."""


def format_of(path: str) -> Format | None:
    """Return the format that a file's suffix names, ignoring a compression suffix; None if it names none."""
    lower = path.lower()
    for suffix in _COMPRESSION:
        lower = lower.removesuffix(suffix)
    return next((found for suffix, found in _SUFFIXES.items() if lower.endswith(suffix)), None)


def compression_of(path: str) -> str | None:
    return next((kind for suffix, kind in _COMPRESSION.items() if path.lower().endswith(suffix)), None)


def what_is_wrong(where: str, format: Format, text: str) -> SchemaError | DataError:
    """Classify an error of pyarrow by its text: SchemaError for the values of a file, DataError for its bytes."""
    if any(sign in text for sign in _NOT_UTF8):
        text = f"{where}: {text}; only UTF-8 can be read: convert the file, for example with iconv -f latin1 -t utf-8"
        if format == "csv":
            text = f"{text}, or declare pa.binary() to read bytes"
        return SchemaError(text) if "conversion error" in text else DataError(text)
    if format == "jsonl" and _NO_OBJECT in text:
        return SchemaError(
            f'{where}: {text}; each line must be an object such as {{"n": 1}}: convert a file that is one array, for '
            "example with jq -c '.[]'"
        )
    if any(sign in text for sign in _OF_VALUES):
        return SchemaError(f"{where}: {text}; declare other types for its columns in schema=, or repair the file")
    return DataError(f"{where}: cannot be read as {format}; it is incomplete, damaged, or of another format: {text}")


def check_encoding(head: bytes, path: str) -> None:
    """Raise DataError for a text file that begins with the mark of another encoding than UTF-8, or is compressed."""
    for start, suffix in _COMPRESSED_STARTS.items():
        if head.startswith(start):
            raise DataError(
                f"{path}: begins as {suffix} files do; a file is decompressed as its name says: let it end in {suffix}"
            )
    if head.startswith(_OTHER_MARKS):
        raise DataError(
            f"{path}: begins with the byte order mark of UTF-16 or UTF-32, and only UTF-8 can be read; convert the file, for "
            "example with iconv -f utf-16 -t utf-8"
        )


@contextmanager
def explained(path: str, format: Format) -> Iterator[None]:
    """Convert errors: those in the bytes of a file to DataError, those in its values to SchemaError, and those of its
    file system, which may be temporary, to StorageError.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise StorageError(f"{path}: the file does not exist any more") from error
    except PermissionError as error:
        raise StorageError(f"{path}: cannot be read: permission denied") from error
    except UNREADABLE as error:
        # pyarrow reports damaged bytes as an OSError without an errno, and so does an object store that is not reached
        if isinstance(error, OSError) and (error.errno is not None or not os.path.isabs(path)):
            raise StorageError(f"{path}: cannot be read as {format}: {error}") from error
        raise what_is_wrong(path, format, str(error)) from error


def check_names(found: list[str], wanted: WantedColumns, path: str) -> None:
    """Raise SchemaError for a column that a file must have but lacks, or must not have."""
    names = wanted.schema.names
    for name in names:
        if name not in found and (not wanted.declared or name in wanted.required):
            raise SchemaError(f"{path}: column {name!r} is missing; it has {', '.join(found) or 'no columns'}")
    if not wanted.may_lack_all and not any(name in found for name in names):
        raise SchemaError(
            f"{path}: it has none of the declared columns ({', '.join(names)}); it has "
            f"{', '.join(found) or 'no columns'}"
        )
    extra = [name for name in found if wanted.schema.get_field_index(name) < 0]
    if extra and not wanted.declared:
        raise SchemaError(
            f"{path}: column {extra[0]!r} is not in other files; declare schema= with the columns to read"
        )
