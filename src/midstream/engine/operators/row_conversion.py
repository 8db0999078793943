"""Conversion between batches and rows of Python values, with errors that name the operator and the row.

A row is a dict with every column of its schema, its values in their Python form (engine/core/python_values.py); nulls are None.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from datetime import datetime
from functools import lru_cache, partial
from operator import is_
from typing import Any, Final, TypeAlias

import pyarrow as pa

from midstream.engine.core.batches import first_null
from midstream.engine.core.error_rows import row_text
from midstream.engine.core.errors import JobError, SchemaError, text_of
from midstream.engine.core.key_groups import key_cast, key_type_supported
from midstream.engine.core.python_values import ValueMisfit, first_without_python, kind_of, to_array, to_python

USER_ERRORS: Final = (Exception, SystemExit)
"""What a user's function raises. KeyboardInterrupt is not among them: it is a signal."""
Row: TypeAlias = dict[str, Any]
Origin: TypeAlias = "int | datetime | None"
"""The origin of a function's row: the position of a row in its batch, or the time of a timer."""


def to_rows(batch: pa.RecordBatch, where: str) -> Iterator[Row]:
    """Yield rows one by one: thousands of dicts at a time would keep the garbage collector busy.

    Raises JobError immediately, naming `where` and the column with a value that Python cannot represent.
    """
    return _row_maker(tuple(batch.schema.names))(_columns(batch, where))


def _columns(batch: pa.RecordBatch, where: str) -> list[list[Any]]:
    columns: list[list[Any]] = []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        try:
            columns.append(to_python(column))
        except (ValueError, OverflowError) as error:  # nanoseconds, or a time that no datetime can hold
            row, why = first_without_python(column)
            raise JobError(
                f"{where}: column {field.name!r}, {field.type}, has a value that Python cannot represent: {why}; the row is "
                f"{row_text(batch, row)}"
            ) from error
    return columns or [[None] * batch.num_rows]


def _display(names: Sequence[str]) -> tuple[str, str]:
    """Return source code: the target that unpacks the values of a row, and a dict of them that is faster than
    `dict(zip(…))`.
    """
    values = "".join(f"v{index}, " for index in range(len(names)))
    entries = ", ".join(f"{name!r}: v{index}" for index, name in enumerate(names))
    return values or "_, ", f"{{{entries}}}"


@lru_cache(maxsize=256)
def _row_maker(names: tuple[str, ...]) -> Callable[[Sequence[Sequence[Any]]], Iterator[Row]]:
    values, row = _display(names)
    maker: Callable[[Sequence[Sequence[Any]]], Iterator[Row]] = eval(
        f"lambda columns: ({row} for {values} in zip(*columns, strict=True))"
    )
    return maker


def map_rows(function: Callable[[Row], Row], batch: pa.RecordBatch, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """Return a batch of `schema` with what `function` returns for each row.

    Raises JobError naming `where`, and the row for which the function raised or returned what does not fit.
    """
    made: list[list[Any]] = [[] for _ in schema]
    given = _columns(batch, where)
    try:
        names = tuple(batch.schema.names), tuple(schema.names)
        row = _mapper(*names, nested_columns(schema))(function, given, made)
    except USER_ERRORS as error:
        raise user_error(where, "the function", error, (batch, len(made[-1])) if made else None) from error
    if row is not _FITS:
        index = len(made[-1]) if made else 0
        at = f"{where}: the result for the row {row_text(batch, index)}"
        _check_row(row, schema, at, index)
        raise AssertionError(f"{at} fits, but was treated as one that does not")
    arrays = []
    for field, values in zip(schema, made, strict=True):
        source = batch.schema.get_field_index(field.name)
        if source >= 0 and _passed_on(values, given[source], field.type, batch.column(source).type):
            arrays.append(batch.column(source))
        else:
            arrays.append(_column(values, field, where, None, batch))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def yielded(generator: Generator[Any, None, Any]) -> Iterator[Any]:
    """Yield what a user's generator yields. Raises TypeError if it returns a value at its end, which Python would drop."""
    returned = yield from generator
    if returned is not None:
        raise TypeError(
            f"a function that yields rows returned {kind_of(returned)}, which would be lost; yield it instead"
        )


_FITS: Final = object()
_Mapper: TypeAlias = Callable[[Callable[[Row], Row], Sequence[Sequence[Any]], Sequence[list[Any]]], Any]


@lru_cache(maxsize=256)
def _mapper(names: tuple[str, ...], made_names: tuple[str, ...], nested: tuple[str, ...]) -> _Mapper:
    """Generate a function from input columns to output columns, which appends to `made` and copies those in `nested`.

    It returns the first row whose columns are not exactly `made_names`, or _FITS. It appends to the last of `made`
    last.
    """
    values, row = _display(names)
    lists = "".join(f"a{index}, " for index in range(len(made_names)))
    appends = "; ".join(
        f"a{index}(copied(row[{name!r}]))" if name in nested else f"a{index}(row[{name!r}])"
        for index, name in enumerate(made_names)
    )
    scope: dict[str, Any] = {"FITS": _FITS, "copied": copied}
    exec(
        f"""
def mapper(function, columns, made):
    {f"{lists} = [values.append for values in made]" if lists else ""}
    for {values} in zip(*columns, strict=True):
        row = function({row})
        if type(row) is not dict:
            if not isinstance(row, dict):
                return row
            row = dict(row)
        if len(row) != {len(made_names)}:
            return row
        try:
            {appends or "pass"}
        except KeyError:
            return row
    return FITS
""",
        scope,
    )
    mapper: _Mapper = scope["mapper"]
    return mapper


def _passed_on(values: Sequence[Any], given: Sequence[Any], kind: pa.DataType, given_kind: pa.DataType) -> bool:
    """Whether these are the same objects as in the input column: comparing takes half as long as converting.

    The answer is False for lists and dicts, which a function may have changed in place.
    """
    return kind == given_kind and not pa.types.is_nested(kind) and all(map(is_, values, given))


def as_it_is_now(schema: pa.Schema) -> Callable[[Any], Any]:
    """Return a function that copies a row of `schema` for keeping.

    A user's function may continue to use the same dict, or a list in it (of its state, for example). A value that is
    not a row is returned unchanged, and refused later.
    """
    nested = nested_columns(schema)
    return partial(_copied_row, nested) if nested else _copied_flat_row


def _copied_flat_row(row: Any) -> Any:
    return dict(row) if isinstance(row, dict) else row


def _copied_row(nested: Sequence[str], row: Any) -> Any:
    if not isinstance(row, dict):
        return row
    row = dict(row)
    for name in nested:
        if name in row:
            row[name] = copied(row[name])
    return row


def nested_columns(schema: pa.Schema) -> tuple[str, ...]:
    """Return the columns whose values can change in place: lists and dicts, and bytes, for which a bytearray may be
    given.
    """
    return tuple(
        field.name
        for field in schema
        if pa.types.is_nested(field.type)
        or pa.types.is_large_binary(field.type)
        or pa.types.is_fixed_size_binary(field.type)
    )


def copied(value: Any) -> Any:
    """Copy lists, dicts and buffers, including nested ones."""
    if isinstance(value, list):
        return [copied(item) for item in value]
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    return {key: copied(item) for key, item in value.items()} if isinstance(value, dict) else value


def to_batch(
    rows: Sequence[Row],
    schema: pa.Schema,
    where: str,
    origin: Sequence[Origin] | None = None,
    given: pa.RecordBatch | None = None,
) -> pa.RecordBatch:
    """Return a batch of `schema` from rows that a user's function returned.

    `origin[i]` is the position of the input row, or the time of the timer, for which `rows[i]` was returned. None: the
    same position; empty: unknown. `given`: the batch of the input rows. Raises JobError naming `where`, the input row
    or that time, and what does not fit.
    """
    names = schema.names
    try:
        columns = [[row[name] for row in rows] for name in names]
        fits = list(map(len, rows)).count(len(names)) == len(rows) and (
            list(map(type, rows)).count(dict) == len(rows) or all(isinstance(row, dict) for row in rows)
        )
    except (KeyError, TypeError, IndexError):
        columns, fits = [], False
    if not fits:
        for index, row in enumerate(rows):
            _check_row(row, schema, *_result_of(where, index, origin, given))
        raise AssertionError(f"{where}: rows fit one by one, but not together")
    arrays = [_column(values, field, where, origin, given) for values, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _column(
    values: Sequence[Any],
    field: pa.Field[Any],
    where: str,
    origin: Sequence[Origin] | None,
    given: pa.RecordBatch | None,
) -> pa.Array[Any]:
    try:
        return to_array(values, field.type)
    except ValueMisfit as misfit:
        at, row = _result_of(where, misfit.index, origin, given)
        raise at_row(JobError(f"{at}: column {field.name!r}: {misfit}"), row) from misfit
    except SchemaError as error:
        raise SchemaError(f"{where}: column {field.name!r}: {error}") from error


def _result_of(
    where: str, index: int, origin: Sequence[Origin] | None, given: pa.RecordBatch | None
) -> tuple[str, int | None]:
    """Return what to call row `index` of the results, and the position of the input row for which it was returned."""
    if origin is not None and not origin:
        return f"{where}: row {index} of those emitted for this batch", None
    of = index if origin is None else origin[index]
    if not isinstance(of, int):
        return f"{where}: the result for the timer of {of}", None
    return f"{where}: the result for {'a row' if given is None else f'the row {row_text(given, of)}'}", of


def _check_row(row: Any, schema: pa.Schema, at: str, index: int | None) -> None:
    """Raise JobError beginning with `at`, about the input row `index`, for a row that does not fit."""
    misfit = _misfit(row, schema)
    if misfit:
        raise at_row(JobError(f"{at} {misfit}"), index)


def _misfit(row: Any, schema: pa.Schema) -> str:
    """Describe what is wrong with the columns of a row; empty if they are those of `schema`."""
    names = schema.names
    if not isinstance(row, dict):
        return f"is {kind_of(row)}; return a dict with the columns {', '.join(names)}"
    missing = [name for name in names if name not in row]
    if missing:
        return f"has no column {missing[0]!r}; the columns are {', '.join(names)}: those of schema=, or else of the stream itself"
    extra = [name for name in row if name not in names]
    if extra:
        return f"has column {extra[0]!r}, which is not declared ({', '.join(names)}); declare what is returned with `schema=`"
    return ""


def at_row(error: JobError, row: int | None) -> JobError:
    """Mark `error` as being about that row of the batch."""
    error.row = row
    return error


def fields_text(fields: Iterable[pa.Field[Any]]) -> str:
    """List the names and types of fields."""
    return ", ".join(f"{field.name} {field.type}" for field in fields)


def user_error(where: str, what: str, error: BaseException, at: tuple[pa.RecordBatch, int] | None = None) -> JobError:
    """Return the JobError for an exception of a user's function; `raise user_error(…) from error` keeps the traceback.

    `at`: the batch that the operator was given, and the position of the row in it.
    """
    row = "" if at is None else f" for the row {row_text(*at)}"
    text = text_of(error)
    if isinstance(error, SystemExit):
        text = f"{text}; a function must not end its process: raise an error, or return".removeprefix("; ")
    made = JobError(f"{where}: {what} raised {type(error).__name__}{row}{': ' + text if text else ''}")
    return at_row(made, None if at is None else at[1])


def require_columns(schema: pa.Schema, names: Iterable[str], where: str, what: str) -> None:
    """Raise SchemaError naming the first of `names` that is not in `schema`."""
    for name in names:
        if schema.get_field_index(name) < 0:
            raise SchemaError(
                f"{where}: {what} {name!r} is not in the stream's schema ({', '.join(schema.names) or 'no columns'})"
            )


def require_keys(schema: pa.Schema, keys: Iterable[str], where: str) -> None:
    """Raise SchemaError naming the first of `keys` that is missing, or whose type cannot be a key."""
    for key in keys:
        require_columns(schema, [key], where, "key column")
        kind = schema.field(key).type
        if not key_type_supported(kind):
            raise SchemaError(f"{where}: key column {key!r} is {kind}, which cannot be a key; {key_cast(kind)}")


def check_keys(batch: pa.RecordBatch, keys: Iterable[str], where: str) -> None:
    """Raise JobError naming the first row in which a key is null."""
    for key in keys:
        row = first_null(batch.column(key))
        if row is not None:
            raise null_error(f"{where}: key {key!r}", batch, row, "filter out or fill null keys first")


def null_error(what: str, batch: pa.RecordBatch, row: int, cure: str) -> JobError:
    return row_error(f"{what} is null", batch, row, cure)


def row_error(what: str, batch: pa.RecordBatch, row: int, cure: str) -> JobError:
    return at_row(JobError(f"{what} in the row {row_text(batch, row)}; {cure}"), row)
