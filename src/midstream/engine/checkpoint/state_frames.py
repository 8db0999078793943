"""State from a table: rows as `read_state` returns them become the chunks that a job would have stored.

Everything that a restored job relies on is checked here, so that a mistake is reported with its column, row and value
when the table is given, and not by the job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import polars as pl
import pyarrow as pa

from midstream.engine.checkpoint.state_columns import NAMESPACES, TIMERS, StateColumns
from midstream.engine.core.arrow_types import is_bytes, nulls
from midstream.engine.core.batches import check_held_by_polars, first_null, invalid_value, single_batch, to_polars
from midstream.engine.core.casts import CastRefused, cast_exactly
from midstream.engine.core.error_rows import counted, row_text, value_text
from midstream.engine.core.errors import SchemaError
from midstream.engine.core.key_groups import key_groups, subtask_of
from midstream.engine.core.python_values import first_without_python, to_python
from midstream.engine.core.schemas import first_repeated
from midstream.engine.operators.row_conversion import fields_text
from midstream.engine.state.expiring_states import UNKNOWN_US
from midstream.engine.state.heap_snapshot import encoded_keys, is_instant
from midstream.engine.state.state_parts import KEY_GROUP, Chunk, StatePart

_ROWS_AT_ONCE: Final = 65_536
"""The rows of which Python values are made at once, to see whether there are any."""


def conformed(columns: StateColumns, given: pa.Table, where: str) -> pa.RecordBatch:
    """Return the rows with the columns and types of the state.

    Raises SchemaError naming `where` and the column for columns or values that the state cannot have, and for rows that
    contradict one another.
    """
    batch = _in_its_types(columns, given, where)
    problem = invalid_value(batch)
    if problem is not None:
        raise SchemaError(f"{where}: row {problem[0]}: {problem[1]}")
    never_null = {key.name for key in columns.keys} | columns.pickled
    if columns.kind in (TIMERS, "list"):
        never_null.add(columns.columns.names[len(columns.keys)])
    for name in batch.schema.names:
        row = first_null(batch.column(name)) if name in never_null else None
        if row is not None:
            what = "key column" if name in [key.name for key in columns.keys] else "column"
            raise SchemaError(
                f"{where}: {what} {name!r} is null in row {row}, {row_text(batch, row)}; leave such rows out, or fill them"
            )
    if columns.kind != "table":
        _check_for_python(columns, batch, where)
        _check_identities(columns, batch, where)
        if columns.kind == "list" and columns.written:
            _check_times_of_items(batch, where)
    return batch


def parts_by_subtask(
    columns: StateColumns, batch: pa.RecordBatch, parallelism: int, max_parallelism: int, new_id: Callable[[], str]
) -> list[StatePart | None]:
    """Return the part of each subtask; None for one that has no rows."""
    if not batch.num_rows:
        return [None] * parallelism
    table = _at_rest(columns, batch, max_parallelism)
    if not columns.keys:  # every subtask has the same rows
        return [StatePart(columns.rule, (Chunk(new_id(), table),))] * parallelism
    return [
        None if rows is None else StatePart(columns.rule, (Chunk(new_id(), rows),))
        for rows in divided(table, parallelism, max_parallelism)
    ]


def divided(table: pa.Table, parallelism: int, max_parallelism: int) -> list[pa.Table | None]:
    """Return the rows of each subtask, in their order; None for one that has none."""
    groups = table.column(KEY_GROUP).to_numpy().astype(np.int32)
    owners = subtask_of(groups, parallelism, max_parallelism)
    order = owners.argsort(kind="stable")
    ordered = table.take(pa.array(order, pa.int64()))
    ends = np.bincount(owners, minlength=parallelism).cumsum()
    starts = np.concatenate([[0], ends[:-1]])
    return [
        ordered.slice(int(start), int(end - start)) if end > start else None
        for start, end in zip(starts, ends, strict=True)
    ]


def _at_rest(columns: StateColumns, batch: pa.RecordBatch, max_parallelism: int) -> pa.Table:
    """Return the table that a job stores for these rows."""
    names = [key.name for key in columns.keys]
    if columns.kind == "table":
        groups = pa.array(key_groups(batch, tuple(names), max_parallelism))
        return pa.Table.from_arrays([groups, *batch.columns], names=[KEY_GROUP, *batch.schema.names])
    others = [batch.column(name) for name in batch.schema.names[len(names) :]]
    if columns.written:
        others[-1] = _written_us(others[-1])
    by = others[0] if columns.kind == "list" else others[-1] if columns.written else None
    if by is not None:  # a list is restored in the order of its rows, and a map that expires in that of its times
        order = pa.array(by.to_numpy().argsort(kind="stable"), pa.int64())
        batch, others = batch.take(order), [column.take(order) for column in others]
    made = encoded_keys([batch.column(name) for name in names], names, max_parallelism) if names else {}
    if columns.kind == TIMERS:
        return pa.table(made | {"time_us": others[0].view(pa.int64())})
    at_rest = ["namespace", "value"] if columns.kind in NAMESPACES else ["value"]
    if columns.written:
        at_rest.append(columns.written)
    return pa.table(made | dict(zip(at_rest, others, strict=True)))


def _written_us(column: pa.Array[Any]) -> pa.Array[Any]:
    return column.view(pa.int64()).fill_null(UNKNOWN_US)


# ---- checks ----------------------------------------------------------------


def _in_its_types(columns: StateColumns, given: pa.Table, where: str) -> pa.RecordBatch:
    expected = columns.columns
    twice = first_repeated(given.column_names)
    if twice is not None:
        raise SchemaError(f"{where}: the table has more than one column {twice!r}; leave one out")
    if columns.written and expected.names[-1] not in given.column_names:  # as if it was written when the job resumes
        given = given.append_column(expected.field(-1), nulls(given.num_rows, expected.types[-1]))
    missing = [name for name in expected.names if name not in given.column_names]
    extra = [name for name in given.column_names if name not in expected.names]
    if missing or extra:
        what = f"has no column {missing[0]!r}" if missing else f"has a column {extra[0]!r}, which this state has not"
        raise SchemaError(
            f"{where}: the table {what}. The columns of {columns} are {fields_text(expected)}; the table has "
            f"{', '.join(given.column_names) or 'none'}"
        )
    check_held_by_polars(expected, where)
    batch = single_batch(given.select(expected.names))
    made = [_cast(batch.column(field.name), field, columns, where) for field in expected]
    return pa.RecordBatch.from_arrays(made, schema=expected)


def _cast(column: pa.Array[Any], field: pa.Field[Any], columns: StateColumns, where: str) -> pa.Array[Any]:
    if field.name in columns.pickled and not (is_bytes(column.type) or pa.types.is_null(column.type)):
        raise SchemaError(
            f"{where}: the values of column {field.name!r} are pickled, since the state has no type, and can only be kept "
            f"as read_state returns them, as bytes; the table has {column.type}. To write such values, declare the state "
            "with a type under another name, and write that one"
        )
    try:
        return cast_exactly(column, field.type)
    except CastRefused as refused:
        row = _first_refused(column, field.type)
        at = "" if row is None else f", row {row}, value {value_text(column.slice(row, 1))}"
        raise SchemaError(
            f"{where}: column {field.name!r}{at}: {refused}; {columns} holds {field.type}, so convert the column to exactly "
            "these values first"
        ) from refused


def _first_refused(column: pa.Array[Any], kind: pa.DataType) -> int | None:
    """Return the first row that cannot be cast; None if that is so because of the type, whatever the values."""

    def is_refused(first: int, stop: int) -> bool:
        try:
            cast_exactly(column.slice(first, stop - first), kind)
        except CastRefused:
            return True
        return False

    if is_refused(0, 0):
        return None
    first, stop = 0, len(column)
    while stop - first > 1:
        middle = (first + stop) // 2
        first, stop = (first, middle) if is_refused(first, middle) else (middle, stop)
    return first


def _check_for_python(columns: StateColumns, batch: pa.RecordBatch, where: str) -> None:
    """Check that functions can be given the values: an entry is a Python object."""
    for field, column in zip(batch.schema, batch.columns, strict=True):
        is_plain = pa.types.is_integer(field.type) or pa.types.is_floating(field.type) or is_bytes(field.type)
        if is_plain or columns.kind == TIMERS or (is_instant(field.type) and field in columns.keys):
            continue  # a key that is an instant is held as an integer
        for first in range(0, len(column), _ROWS_AT_ONCE):
            some = column.slice(first, _ROWS_AT_ONCE)
            try:
                to_python(some)
            except (ValueError, OverflowError) as error:
                row, why = first_without_python(some)
                raise SchemaError(
                    f"{where}: column {field.name!r}, {field.type}, has a value in row {first + row} that Python cannot "
                    f"represent: {why}; replace it, or leave the row out"
                ) from error


def _check_identities(columns: StateColumns, batch: pa.RecordBatch, where: str) -> None:
    """Check that no two rows are the same entry."""
    count = len(columns.keys) + (columns.kind == TIMERS or columns.kind in NAMESPACES)
    names = batch.schema.names[:count]
    identities = to_polars(batch.select(names))
    if columns.kind in ("map", "broadcast") and identities.dtypes[-1].is_float():
        nan = identities.to_series(count - 1).is_nan().arg_true()
        if len(nan):
            raise SchemaError(
                f"{where}: row {nan[0]}: NaN as a key of the map equals nothing, not even itself, so it would never be "
                "found; leave the row out"
            )
    again = identities.is_duplicated().arg_true()
    if len(again):
        first = int(again[0])
        same = identities.with_row_index("".join(names) + "_").join(
            identities.slice(first, 1), on=names, how="semi", nulls_equal=True
        )
        rows = ", ".join(map(str, same.to_series(0).head(5)))
        raise SchemaError(
            f"{where}: {same.height} rows have {row_text(batch.select(names), first)} (rows {rows}), and "
            f"{_ONE_ROW.get(columns.kind, 'each key has one row')}; leave all but one out"
        )
    if columns.kind == "list":
        _check_positions(identities, where)


_ONE_ROW: Final = {
    "list": "each position in a list has one row",
    "map": "each key of a map has one row",
    "broadcast": "each key of the map has one row",
    TIMERS: "a timer is set once for a key and a time",
}


def _check_positions(identities: pl.DataFrame, where: str) -> None:
    """Check that lists have no gap. `identities`: the keys, and the position."""
    *keys, position = identities.columns
    free = "".join(identities.columns)  # a name begins so of no column
    count, low, high = f"{free}_n", f"{free}_low", f"{free}_high"
    made = pl.len().cast(pl.Int64).alias(count), pl.col(position).min().alias(low), pl.col(position).max().alias(high)
    lists = identities.group_by(keys, maintain_order=True).agg(made)
    broken = lists.filter((pl.col(low) != 0) | (pl.col(high) != pl.col(count) - 1)).head(1)
    if broken.height:
        *key, items, first, last = broken.row(0)
        shown = ", ".join(f"{name}={value!r}" for name, value in zip(keys, key, strict=True))
        raise SchemaError(
            f"{where}: the list of {shown} has {counted(items, 'item')} at positions from {first} to {last}; positions are "
            f"0, 1, 2 … without a gap: number them again, in polars with pl.int_range(pl.len()).over({keys!r})"
        )


def _check_times_of_items(batch: pa.RecordBatch, where: str) -> None:
    """Check that no item of a list is older than the one before it. The columns: keys, position, item, time."""
    *keys, position, _, written = batch.schema.names
    items = to_polars(batch.select([*keys, position])).with_row_index(
        "".join(batch.schema.names)
    )  # a name of no column
    times = pl.Series(_written_us(batch.column(written)).to_numpy())
    ordered = items.with_columns(times.alias(written)).sort(position, maintain_order=True)
    wrong = ordered.filter(pl.col(written) < pl.col(written).shift().over(keys)).to_series(0).sort()
    if len(wrong):
        row = int(wrong[0])
        raise SchemaError(
            f"{where}: row {row}, {row_text(batch.select([*keys, position, written]), row)}: an item of a list is written "
            f"after those before it, and {written!r} is earlier, or null; give it the time of the item before, or leave out "
            f"the column {written!r}: all of the state is then as if it was written when the job resumes"
        )
