"""Key groups: which subtask owns a key. Vectorised, and the same on every platform and version.

`key_group = stable_hash(key) % max_parallelism`; a subtask owns a contiguous range of key groups. Python's `hash` is
salted per process and must never be used for this.

The hash is that of a value's canonical form: an integer as 64 bits, a time of day in nanoseconds, a string as its
bytes. So a row keeps its key group in polars' types, in any width of integer, and in any unit of times of day
(docs/decisions/012-canonical-types-and-keys.md).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.batches import first_null
from midstream.engine.core.error_rows import row_text
from midstream.engine.core.errors import JobError, SchemaError

UInt64s = npt.NDArray[np.uint64]

_C1 = np.uint64(0xBF58476D1CE4E5B9)
_C2 = np.uint64(0x94D049BB133111EB)
_COMBINE = np.uint64(0x9E3779B97F4A7C15)
_27, _30, _31 = np.uint64(27), np.uint64(30), np.uint64(31)


def key_type_supported(kind: pa.DataType) -> bool:
    """Whether a column of this type can be a key: integers, booleans, dates, times, strings and binary can.

    `key_cast` names what to do about the others.
    """
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_date(kind)
        or pa.types.is_timestamp(kind)
        or pa.types.is_time(kind)
        or pa.types.is_duration(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def key_cast(kind: pa.DataType, method: str = "key_by") -> str:
    """Describe, for a column whose type cannot be a key, what to cast it to before `method`, and why."""
    if pa.types.is_floating(kind):
        why = (
            "a float that is almost equal would be another key, and NaN equals nothing: round and cast it to an integer"
        )
    elif pa.types.is_decimal(kind):
        why = f"cast it to a string, or multiplied by 10^{kind.scale} to an integer"
    elif pa.types.is_fixed_size_binary(kind):
        why = "cast it to binary"
    elif pa.types.is_struct(kind):
        return f"before {method}(), use with_columns() to make its fields separate columns"
    elif pa.types.is_nested(kind):
        why = "convert it to a string"
    else:
        why = "cast it to an integer or a string"
    return f"{why}, with with_columns() before {method}()"


_PER_SECOND: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def _factor(kind: pa.DataType) -> int:
    """Return how many of the canonical unit make one of a temporal type; the canonical unit is the one that polars
    uses.
    """
    if pa.types.is_time(kind):
        return _PER_SECOND["ns"] // _PER_SECOND[kind.unit]
    return _PER_SECOND["ms"] if getattr(kind, "unit", "") == "s" else 1


def _mix(x: UInt64s) -> UInt64s:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): a bijection that mixes all bits."""
    x = x ^ (x >> _30)
    x *= _C1
    x ^= x >> _27
    x *= _C2
    x ^= x >> _31
    return x


def hash_column(column: pa.Array[Any]) -> UInt64s:
    """Return a stable 64-bit hash per row.

    Raises JobError on a null key, SchemaError on a type that cannot be a key.
    """
    kind = column.type
    is_integer = pa.types.is_integer(kind)
    if not is_integer and not key_type_supported(kind):
        raise SchemaError(f"a column of type {kind} cannot be a key; {key_cast(kind)}")
    row = first_null(column)
    if row is not None:
        raise JobError(f"a key is null, in row {row}; filter out or fill null keys before key_by()")
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
        is_integer = True
    if is_integer:
        values = column.to_numpy(zero_copy_only=True)
        if values.dtype.itemsize == 8:
            return _mix(values.view(np.uint64) + _COMBINE)
        return _mix(values.astype(np.int64).view(np.uint64) + _COMBINE)
    if pa.types.is_temporal(kind):
        if pa.types.is_date64(kind):
            column = column.cast(pa.date32())
        whole = column.view(pa.int32() if column.type.bit_width == 32 else pa.int64())
        factor = _factor(kind)
        if factor == 1:
            return hash_column(whole)
        return _mix(whole.to_numpy(zero_copy_only=True).astype(np.int64).view(np.uint64) * np.uint64(factor) + _COMBINE)
    encoded = column.cast(pa.large_binary()).dictionary_encode()  # the hash takes bytes only
    digest = xxhash.xxh3_64_intdigest
    uniques = np.fromiter((digest(v) for v in to_list(encoded.dictionary)), np.uint64, count=len(encoded.dictionary))
    rows: UInt64s = uniques[encoded.indices.to_numpy(zero_copy_only=True)]
    return rows


def hash_keys(batch: pa.RecordBatch, keys: tuple[str, ...]) -> UInt64s:
    """Return a stable hash per row over one or more key columns. Raises JobError naming the row whose key is null."""
    for name in keys:
        row = first_null(batch.column(name))
        if row is not None:
            error = JobError(
                f"key {name!r} is null in the row {row_text(batch, row)}; filter out or fill null keys before key_by()"
            )
            error.row = row
            raise error
    first, *rest = keys
    result = hash_column(batch.column(first))
    for name in rest:
        result = _mix(result * _COMBINE + hash_column(batch.column(name)))
    return result


def key_groups(batch: pa.RecordBatch, keys: tuple[str, ...], max_parallelism: int) -> npt.NDArray[np.int32]:
    """Return the key group of each row: int32 in [0, max_parallelism)."""
    remainders, divisor = hash_keys(batch, keys), np.uint64(max_parallelism)
    multiples = remainders // divisor  # numpy divides by multiplying, but not for `%`
    multiples *= divisor
    remainders -= multiples
    return remainders.astype(np.int32)


def subtask_of(groups: npt.NDArray[np.int32], parallelism: int, max_parallelism: int) -> npt.NDArray[np.int32]:
    """Return the subtask that owns each key group."""
    owners: npt.NDArray[np.int32] = groups * np.int32(parallelism) // np.int32(max_parallelism)
    return owners


def key_group_range(subtask: int, parallelism: int, max_parallelism: int) -> range:
    """Return the key groups that `subtask` owns: exactly those that `subtask_of` assigns to it."""
    start = -(-subtask * max_parallelism // parallelism)
    end = -(-(subtask + 1) * max_parallelism // parallelism)
    return range(start, end)
