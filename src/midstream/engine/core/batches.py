"""Record batches: canonical types, conversion to and from polars, concatenation, size.

The canonical form of a schema is the one that polars returns without copying: large strings, large binaries, large
lists, no unit of seconds, and what Arrow stores of its own extension types, such as text for JSON. Sources convert
once; everything downstream may rely on it. Times of day keep their unit, since polars has them in nanoseconds only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.lib import concat_batches

from midstream.engine.core.arrow_types import (
    TICKS_PER_S,
    is_arrows_extension,
    is_list_of_any_length,
    is_text,
    key_twice,
    leaves,
)
from midstream.engine.core.casts import CastRefused, cast_exactly
from midstream.engine.core.errors import SchemaError

SMALL_BYTES: Final = 4096
"""The smallest buffer size allowed; memory need not be counted more finely than this."""


def canonical_type(kind: pa.DataType, *, keeps_seconds: bool = False) -> pa.DataType:
    """`keeps_seconds`: for types as they were declared, whose unit says what a number or a fraction in text means."""
    inner = partial(canonical_type, keeps_seconds=keeps_seconds)
    if is_arrows_extension(kind):
        return inner(kind.storage_type)
    if is_text(kind):
        return pa.large_string()
    if pa.types.is_binary(kind) or pa.types.is_binary_view(kind):
        return pa.large_binary()
    if is_list_of_any_length(kind):
        return pa.large_list(inner(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(inner(kind.value_type), int(kind.list_size))
    if pa.types.is_map(kind):  # without the mark that its keys are sorted, which no array of maps keeps
        return pa.map_(inner(kind.key_type), inner(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, inner(f.type)) for f in kind])
    if pa.types.is_dictionary(kind):
        return inner(kind.value_type)
    if pa.types.is_timestamp(kind) and kind.unit == "s" and not keeps_seconds:
        return pa.timestamp("ms", kind.tz)
    if kind == pa.duration("s") and not keeps_seconds:
        return pa.duration("ms")
    if pa.types.is_date64(kind):
        return pa.date32()
    if pa.types.is_decimal(kind) and kind.bit_width < 128:
        return pa.decimal128(kind.precision, kind.scale)
    return kind


def canonical_schema(schema: pa.Schema, *, keeps_seconds: bool = False) -> pa.Schema:
    """Return the same columns in canonical types, all nullable, without metadata."""
    return pa.schema([pa.field(f.name, canonical_type(f.type, keeps_seconds=keeps_seconds)) for f in schema])


def conform(batch: pa.RecordBatch, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """Return `batch` with exactly the columns and types of `schema`; a cast must keep every value.

    Raises SchemaError naming `where` and the first column that does not fit.
    """
    if batch.schema.equals(schema):
        return batch
    columns = []
    for field in schema:
        index = batch.schema.get_field_index(field.name)
        if index < 0:
            raise SchemaError(
                f"{where}: column {field.name!r} is missing; got {', '.join(batch.schema.names) or 'no columns'}"
            )
        column = batch.column(index)
        if column.type != field.type:
            try:
                column = cast_exactly(column, field.type)
            except CastRefused as refused:
                raise SchemaError(
                    f"{where}: column {field.name!r} is {column.type}, declared as {field.type}: {refused}"
                ) from refused
        columns.append(column)
    extra = [name for name in batch.schema.names if schema.get_field_index(name) < 0]
    if extra:
        raise SchemaError(f"{where}: column {extra[0]!r} is not in the declared schema")
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def invalid_value(batch: pa.RecordBatch) -> tuple[int, str] | None:
    """Return the row of the first value that its type does not have, and what is wrong with it, if there is one.

    Arrow, and so Parquet, checks neither the bytes of a text nor the range of a time of day nor the digits of a decimal
    nor the keys of a map. polars relies on them: for bytes that are not UTF-8 it returns wrong characters, or reads
    memory that it does not own, and it drops all entries of a key but one. Python and polars take 24:00 as 00:00.
    """
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        is_flat = column.type.num_fields == 0
        if _is_valid(column) if is_flat else all(map(_is_valid, leaves(column))) and key_twice(column) is None:
            continue
        for row in range(len(column)):
            twice = key_twice(column.slice(row, 1))
            if twice is not None:
                return row, f"column {name!r} has a map with the key {twice} twice; leave one of its entries out"
            for values in leaves(column.slice(row, 1)):
                for each in (values.slice(at, 1) for at in range(len(values))):
                    if not _is_valid(each):
                        return row, f"column {name!r} has {_what_is_invalid(each)}"
    return None


def _is_valid(values: pa.Array[Any]) -> bool:
    if pa.types.is_time(values.type):
        return _is_within_day(values)
    return _is_validated(values) if pa.types.is_decimal(values.type) else _is_utf8(values)


def _what_is_invalid(value: pa.Array[Any]) -> str:
    kind = value.type
    if pa.types.is_time(kind):
        ticks = _ticks(value)[0].as_py()
        return f"{ticks} as {kind}, which is no time of day: a day has {86_400 * TICKS_PER_S[kind.unit]} {kind.unit}"
    if pa.types.is_decimal(kind):
        return f"a number with more digits than {kind} has; give its column a larger precision"
    text = value.cast(pa.large_binary())[0].as_py()
    return f"the text {text!r:.200}, which is not UTF-8; write it in UTF-8, or as a column of bytes"


def _is_within_day(times: pa.Array[Any]) -> bool:
    """Whether all times of day are at least 00:00 and before 24:00; `times` has a type of times."""
    ends: Any = pc.min_max(_ticks(times))
    first, last = ends["min"].as_py(), ends["max"].as_py()
    assert pa.types.is_time(times.type), times.type
    return first is None or (first >= 0 and last < 86_400 * TICKS_PER_S[times.type.unit])


def _ticks(times: pa.Array[Any]) -> pa.Array[Any]:
    return times.view(pa.int32() if pa.types.is_time32(times.type) else pa.int64())


def _is_utf8(values: pa.Array[Any]) -> bool:
    """Whether all texts are UTF-8; true of other values. Those in ASCII are recognized together, at the speed of memory."""
    kind = values.type
    if not is_text(kind) or not len(values):
        return True
    if pa.types.is_large_string(kind):
        _, offsets, data = values.buffers()
        ends = np.frombuffer(memoryview(offsets), np.int64)  # type: ignore[arg-type]  # the stub has no buffers of pyarrow
        found = np.frombuffer(memoryview(data or b""), np.int8)[ends[values.offset] : ends[values.offset + len(values)]]
        if not len(found) or found.min() >= 0:
            return True
    return _is_validated(values)


def _is_validated(values: pa.Array[Any]) -> bool:
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


_PLAIN: Final = frozenset(
    kind.id
    for kind in (
        *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
        *(pa.float32(), pa.float64(), pa.bool_(), pa.large_string(), pa.large_binary()),
        *(pa.timestamp("us"), pa.duration("us"), pa.date32()),
    )
)
"""Types that polars reads identically with either conversion."""
_PLAIN_DTYPES: Final = frozenset(
    (
        *(pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64),
        *(pl.Float32, pl.Float64, pl.Boolean, pl.String, pl.Binary),
        *(pl.Datetime, pl.Duration, pl.Date),
    )
)
"""The same types of polars, which become the same columns of Arrow with either conversion."""
_OLDEST: Final = pl.CompatLevel.oldest()


def to_polars(rows: pa.RecordBatch | pa.Table) -> pl.DataFrame:
    if isinstance(rows, pa.RecordBatch) and rows.num_columns and all(kind.id in _PLAIN for kind in rows.schema.types):
        return pl.DataFrame(rows)  # half the time of from_arrow, which matters for small batches
    if any(pa.types.is_fixed_size_list(field.type) and rows.column(field.name).null_count for field in rows.schema):
        rows = rows.take(pa.array(np.arange(rows.num_rows), pa.int64()))  # polars fails on a slice of such a column
    frame = pl.from_arrow(rows)
    assert isinstance(frame, pl.DataFrame)
    return frame


def selected(frame: pl.DataFrame, names: Iterable[str]) -> pl.DataFrame:
    """Return some columns of a frame. `DataFrame.select` takes four times as long, which matters for small batches."""
    return frame_of([frame.get_column(name) for name in names])


def frame_of(columns: Sequence[pl.Series]) -> pl.DataFrame:
    """Return a frame of columns with different names. `pl.DataFrame` takes three times as long, which matters for small batches."""
    if not columns:
        return pl.DataFrame()
    first, *others = columns
    return first.to_frame().hstack(others)


def rows_at(frame: pl.DataFrame, positions: npt.NDArray[Any]) -> pl.DataFrame:
    """Return the rows at these positions. `frame[positions]` takes several times as long for few rows: a thread of polars
    does it.
    """
    index = index_of(positions)
    return frame_of([column[index] for column in frame.iter_columns()])


def stacked(frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Return the rows of frames with the same columns one after the other. `pl.concat` takes four times as long for few."""
    return frame_of([pl.concat(columns, rechunk=True) for columns in zip(*frames, strict=True)])


def without(frame: pl.DataFrame, names: Collection[str]) -> pl.DataFrame:
    """Return a frame without some columns. `DataFrame.drop` takes twenty times as long."""
    return selected(frame, [name for name in frame.columns if name not in names]) if names else frame


def rows_where(frame: pl.DataFrame, kept: npt.NDArray[np.bool_]) -> pl.DataFrame:
    """Return some rows of a frame. `DataFrame.filter` would hand it to a thread of polars."""
    mask = pl.Series(kept)
    return frame_of([column.filter(mask) for column in frame.iter_columns()])


def index_of(positions: npt.NDArray[Any]) -> pl.Series:
    """Return positions with which `column[...]` takes values in a tenth of the time of `gather`."""
    return pl.Series(positions.astype(np.uint32))


def is_held_by_polars(kind: pa.DataType) -> bool:
    return _why_not_held(kind) is None


def check_held_by_polars(schema: pa.Schema, where: str) -> None:
    """Raise SchemaError naming `where` and the first column whose type polars does not support."""
    for field in schema:
        why = _why_not_held(field.type)
        if why is not None:
            raise SchemaError(
                f"{where}: column {field.name!r} is {field.type}, which polars cannot hold ({why}); leave it out with "
                "select() first, or have the source return it as another type"
            )


def _why_not_held(kind: pa.DataType) -> str | None:
    if _has_users_type(kind):  # such a type may lack a hash
        return "it is an extension type of the program"
    return _why_polars_lacks(kind)


@lru_cache(maxsize=1024)
def _why_polars_lacks(kind: pa.DataType) -> str | None:
    if _has_decimal256(kind):  # polars does not refuse it, but panics
        return "its decimals have at most 38 digits: use decimal128"
    try:
        to_polars(empty_batch(pa.schema([("column", kind)])))
    except pl.exceptions.PolarsError as error:
        return str(error).splitlines()[0]
    return None


def _has_users_type(kind: pa.DataType) -> bool:
    """Whether `kind` is an extension type that was defined in Python or contains one."""
    if isinstance(kind, pa.ExtensionType):
        return True
    return any(_has_users_type(kind.field(index).type) for index in range(kind.num_fields))


def _has_decimal256(kind: pa.DataType) -> bool:
    """Whether `kind` is a 256-bit decimal or contains one."""
    if pa.types.is_decimal256(kind):
        return True
    return any(_has_decimal256(kind.field(index).type) for index in range(kind.num_fields))


def to_arrow(frame: pl.DataFrame) -> pa.Table:
    """Convert a frame without copying, to the types that `canonical_type` names.

    Raises SchemaError for a column whose type Arrow does not have.
    """
    _check_dtypes(tuple(zip(frame.columns, frame.dtypes, strict=True)))  # a schema takes four times as long to make
    table = frame.to_arrow(compat_level=_OLDEST)
    for index, field in enumerate(table.schema):
        if field.type.num_fields:
            chunks = table.column(index).chunks
            sound = [_with_sound_values(chunk) for chunk in chunks]
            if any(new is not old for new, old in zip(sound, chunks, strict=True)):
                table = table.set_column(index, field, pa.chunked_array(sound, field.type))
    return table


def _with_sound_values(array: Any) -> Any:
    """Return an array whose lists Arrow can concatenate.

    If all lists are empty, polars may hand over values of length 0 that begin past the end of a buffer without bytes,
    or structs of length 0 whose fields do. Arrow takes the array as valid, and fails later, where it slices that
    buffer, or writes bytes that cannot be read.
    """
    kind = array.type
    if not len(array):
        return pa.nulls(0, kind) if array.offset or kind.num_fields else array
    if pa.types.is_struct(kind):
        fields = [array.field(number) for number in range(kind.num_fields)]
        sound = [_with_sound_values(field) for field in fields]
        if all(new is old for new, old in zip(sound, fields, strict=True)):
            return array
        return pa.StructArray.from_arrays(sound, fields=list(kind), mask=array.is_null())
    if not kind.num_fields:
        return array
    values = array.values
    new = _with_sound_values(values)
    if new is values:
        return array
    own = 1 if pa.types.is_fixed_size_list(kind) else 2  # validity, and offsets
    return pa.Array.from_buffers(kind, len(array), array.buffers()[:own], array.null_count, array.offset, [new])


@lru_cache(maxsize=1024)
def _check_dtypes(columns: tuple[tuple[str, pl.DataType], ...]) -> None:
    for name, dtype in columns:
        _check_names(name, dtype)
        if _is_foreign(dtype):
            raise SchemaError(f"column {name!r} is {dtype} in polars, which Arrow does not have; cast it first")


def _check_names(name: str, dtype: Any) -> None:
    """Raise SchemaError for a name at which polars would panic when it hands the column to Arrow."""
    check_column_name(name, "column")
    for field in getattr(dtype, "fields", ()):
        _check_names(field.name, field.dtype)
    if hasattr(dtype, "inner"):
        _check_names("", dtype.inner)


def check_column_name(name: str, what: str) -> None:
    """Raise SchemaError for a name that does not reach every library as it is: Arrow's C interface ends it at a NUL, so
    that two names could become one, and a lone surrogate is not Unicode text.
    """
    if "\0" in name:
        raise SchemaError(
            f"{what} {name!r} has a NUL in its name; rename it (a text file with such names may be UTF-16)"
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise SchemaError(f"{what} {name!r} has a lone surrogate in its name, which is not text; rename it") from error


def _is_foreign(dtype: Any) -> bool:
    """Whether Arrow lacks this type or one nested in it. Objects would otherwise be stored as their addresses."""
    inner = [dtype.inner] if hasattr(dtype, "inner") else [field.dtype for field in getattr(dtype, "fields", ())]
    return dtype.base_type() in (pl.Object, pl.Int128, pl.UInt128) or any(map(_is_foreign, inner))


def frame_schema(frame: pl.DataFrame) -> pa.Schema:
    """Return the canonical Arrow schema of a polars frame."""
    return canonical_schema(to_arrow(frame.clear()).schema)


def from_polars(frame: pl.DataFrame, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """Convert a frame to one batch of `schema`. Its columns may be in any order."""
    if frame.width and _PLAIN_DTYPES.issuperset(map(type, frame.dtypes)):
        # half the time of `to_arrow`, and without a thread of polars, which matters for small batches
        for name in frame.columns:
            check_column_name(name, "column")
        arrays = [column.to_arrow(compat_level=_OLDEST) for column in frame.iter_columns()]
        return conform(pa.RecordBatch.from_arrays(arrays, frame.columns), schema, where)
    return conform(single_batch(to_arrow(frame.rechunk())), schema, where)


def single_batch(table: pa.Table) -> pa.RecordBatch:
    """Return all rows of `table` as one batch (no copy when it has one chunk)."""
    batches = table.to_batches()
    if len(batches) > 1:
        batches = table.combine_chunks().to_batches()
    if not batches:
        return empty_batch(table.schema)
    if len(batches) > 1:  # an offset overflow in a 32-bit string column; canonical types have none
        raise SchemaError("a batch has more than 2 GiB of text in one column; use smaller batches")
    return batches[0]


def first_null(column: pa.Array[Any]) -> int | None:
    """Return the first row whose value is null, or None if there is none."""
    return int(pc.index(pc.is_null(column), pa.scalar(True)).as_py()) if column.null_count else None


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


def concat(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Concatenate batches of the same schema, in order."""
    if len(batches) == 1:
        return batches[0]
    return concat_batches(batches)


def batch_bytes(batch: pa.RecordBatch) -> int:
    """Return the bytes that the rows of `batch` take. A slice counts only its own rows, unless the whole is small."""
    total: int = batch.get_total_buffer_size()  # 80 times as fast as nbytes, which reads every offset
    return total if total <= SMALL_BYTES else int(batch.nbytes)
