"""Deletion vectors of Delta tables: the positions of a data file's rows that are no longer in the table.

A descriptor in the log says where a vector lies, in a file of vectors or in the descriptor itself. A vector is a 64-bit
Roaring bitmap after a magic number; in a file, its length precedes it and a checksum follows it.
"""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any, Final
from uuid import UUID

import msgspec
import numpy as np
import pyarrow.fs

from midstream.connectors.common.filesystem import below
from midstream.connectors.common.optional_packages import require
from midstream.engine.core.errors import ConfigError, StorageError

_MAGIC: Final = 1681511377
_UUID_CHARS: Final = 20
_Z85: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_TO_B85: Final = str.maketrans(_Z85, _B85)


class VectorDescriptor(msgspec.Struct, rename="camel", frozen=True):
    """Where a vector lies, as the table's log says it."""

    storage_type: str
    path_or_inline_dv: str
    size_in_bytes: int
    cardinality: int
    offset: int | None = None


def deleted_positions(
    filesystem: pyarrow.fs.FileSystem, directory: str, vector: VectorDescriptor, where: str
) -> np.ndarray[Any, Any]:
    """Return the positions of the deleted rows, ascending. Raises StorageError if they cannot be read."""
    require("pyroaring", "delta", "reading deletion vectors")
    from pyroaring import BitMap64

    try:
        data = _stored(filesystem, directory, vector)
        (magic,) = struct.unpack_from("<I", data)
        if len(data) != vector.size_in_bytes or magic != _MAGIC:
            raise ValueError("it has another length or format than the log says")
        found = np.fromiter(BitMap64.deserialize(data[4:]), np.int64)
        if len(found) != vector.cardinality:
            raise ValueError(f"it names {len(found)} rows, and the log says {vector.cardinality}")
    except (OSError, ValueError, struct.error) as error:
        raise StorageError(
            f"{where}: the deletion vector {vector.path_or_inline_dv} cannot be read: {error}"
        ) from error
    return found


def _stored(filesystem: pyarrow.fs.FileSystem, directory: str, vector: VectorDescriptor) -> bytes:
    if vector.storage_type == "i":
        return _decoded(vector.path_or_inline_dv)[: vector.size_in_bytes]
    if vector.storage_type != "u":
        raise ConfigError(
            f"a deletion vector lies outside of the table, at {vector.path_or_inline_dv}; tables that share files with others "
            "cannot be read"
        )
    prefix = vector.path_or_inline_dv[:-_UUID_CHARS]
    name = f"deletion_vector_{UUID(bytes=_decoded(vector.path_or_inline_dv[-_UUID_CHARS:]))}.bin"
    path = below(filesystem, directory, f"{prefix}/{name}" if prefix else name)
    with filesystem.open_input_file(path) as file:
        file.seek(vector.offset or 0)
        read = file.read(vector.size_in_bytes + 8)
    size, data = read[:4], read[4 : 4 + vector.size_in_bytes]
    if struct.unpack(">I", size) != (vector.size_in_bytes,):
        raise ValueError(f"{path} has another one at offset {vector.offset}")
    if struct.unpack(">I", read[4 + vector.size_in_bytes :]) != (zlib.crc32(data),):
        raise ValueError(f"{path} does not match its checksum at offset {vector.offset}")
    return data


def _decoded(text: str) -> bytes:
    return base64.b85decode(text.translate(_TO_B85))
