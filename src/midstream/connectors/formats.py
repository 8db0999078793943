"""The file formats: which there are, what is wrong with a file, and which columns it must have."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

import pyarrow as pa

from midstream.core.errors import SchemaError, StorageError
from midstream.core.schemas import first_repeated

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
_OF_VALUES = (
    "conversion error",
    "changed from",
    "unexpected field",
    "Failed to convert JSON",
    "JSON parsing of",
    "Failed to parse string",
)
"""What pyarrow says when a file is well formed and its values are not of the declared types."""


def format_of(path: str) -> Format | None:
    """By the suffix, behind which there may be one of a compression; None when it says nothing."""
    lower = path.lower()
    for suffix in _COMPRESSION:
        lower = lower.removesuffix(suffix)
    return next((found for suffix, found in _SUFFIXES.items() if lower.endswith(suffix)), None)


def compression_of(path: str) -> str | None:
    return next((kind for suffix, kind in _COMPRESSION.items() if path.lower().endswith(suffix)), None)


def what_is_wrong(where: str, format: Format, text: str) -> SchemaError | StorageError:
    """`text`, of pyarrow, is about the values of a file (SchemaError) or about its bytes."""
    if any(sign in text for sign in _OF_VALUES):
        return SchemaError(f"{where}: {text}; declare other types for its columns in schema=, or mend the file")
    return StorageError(f"{where}: cannot be read as {format}; half-written, damaged, or of another format: {text}")


@contextmanager
def explained(path: str, format: Format) -> Iterator[None]:
    """What goes wrong with the bytes of a file becomes a StorageError, with its values a SchemaError."""
    try:
        yield
    except FileNotFoundError as error:
        raise StorageError(f"{path}: the file is gone") from error
    except PermissionError as error:
        raise StorageError(f"{path}: may not be read: permission denied") from error
    except UNREADABLE as error:
        raise what_is_wrong(path, format, str(error)) from error


def check_columns(schema: pa.Schema, where: str) -> None:
    if len(schema) == 0:
        raise SchemaError(f"{where}: has no columns")
    twice = first_repeated(schema.names)
    if twice is not None:
        raise SchemaError(f"{where}: has more than one column {twice!r}; rename one")


def check_names(found: list[str], schema: pa.Schema, declared: bool, path: str) -> None:
    for name in schema.names:
        if name not in found:
            raise SchemaError(f"{path}: column {name!r} is missing; it has {', '.join(found) or 'no columns'}")
    extra = [name for name in found if schema.get_field_index(name) < 0]
    if extra and not declared:
        raise SchemaError(
            f"{path}: column {extra[0]!r} is not in other files; declare schema= with the columns to read"
        )
