"""The join of a stream with a table: the checks of its arguments, and what the table is loaded from."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import polars as pl
import pyarrow as pa

from midstream.api.argument_checks import check_no_patterns
from midstream.api.data_stream import DataStream, main_output
from midstream.api.function_checks import check_table_function
from midstream.api.joins import On, key_columns
from midstream.connectors.lookup.table_loaders import Files, Returned, StoredTable, of_paths
from midstream.engine.core.batches import canonical_schema
from midstream.engine.core.config import Duration, interval_s
from midstream.engine.core.errors import ConfigError, JobError, SchemaError
from midstream.engine.core.key_groups import key_cast, key_type_supported
from midstream.engine.core.schemas import SchemaLike, as_declared, check_schema
from midstream.engine.operators.lookup_table import LookupTable, as_table, with_columns_of
from midstream.engine.operators.pandas_frames import is_pandas
from midstream.engine.operators.table_join import Constant, TableHow, TableJoinOperator, TableLoader

if TYPE_CHECKING:
    from midstream.connectors.postgres.postgres_query import PostgresQuery

TableLike: TypeAlias = (
    "pl.DataFrame | pa.Table | pa.RecordBatch | str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | PostgresQuery | "
    "Callable[[], Any]"
)
_KINDS = (
    "a polars, Arrow or pandas frame, a path of files or of a Delta table, a PostgresQuery, or a function without "
    "arguments that returns a frame"
)


def table_joined(
    stream: DataStream,
    table: object,
    on: tuple[On, On, On],
    how: TableHow,
    refresh: Duration | None,
    suffix: str,
    schema: SchemaLike | None,
) -> DataStream:
    """Return the join of a stream with a table. Raises as `DataStream.join_table` does."""
    if how not in get_args(TableHow):
        raise ConfigError(
            f"join_table: how={how!r} is none of {', '.join(map(repr, get_args(TableHow)))}; a row of the table without a "
            "partner has no time to be emitted at"
        )
    if not isinstance(suffix, str) or not suffix:
        raise ConfigError(f"join_table: suffix={suffix!r} must be a text that is not empty, such as '_right'")
    left_on, right_on = key_columns("join_table", *on)
    refresh_s = None if refresh is None else interval_s(refresh, "join_table: refresh")
    declared = None if schema is None else as_declared(schema, "join_table")
    loader, columns = _loader(table, declared, refresh_s is not None)
    _check_keys(stream.schema, left_on, columns, right_on)
    if isinstance(loader, Constant):
        LookupTable.of(loader.table, right_on, "join_table: the table", may_repeat=how in ("semi", "anti"))
    core = stream.core

    def make(name: str) -> TableJoinOperator:
        return TableJoinOperator(name, core.schema, loader, columns, (left_on, right_on), how, refresh_s, suffix)

    return main_output(core.then("join_table", make))


def _loader(table: object, declared: pa.Schema | None, refreshes: bool) -> tuple[TableLoader, pa.Schema]:
    """Return what loads the table, and the columns that are used, in canonical types."""
    if isinstance(table, (pl.DataFrame, pl.LazyFrame, pa.Table, pa.RecordBatch)) or is_pandas(table):
        if refreshes:
            raise ConfigError(
                "join_table: refresh= is given with a frame, which is part of the program and never changes; give a path, a "
                "PostgresQuery or a function that returns a frame"
            )
        found = as_table(table, "join_table: the table")
        columns = _canonical(found.schema if declared is None else declared)
        return Constant(with_columns_of(found, columns, "join_table: the table")), columns
    if isinstance(table, (str, os.PathLike)):
        table = [table]
    if isinstance(table, (list, tuple)) and table and all(isinstance(one, (str, os.PathLike)) for one in table):
        table = of_paths(table, declared)
    if isinstance(table, StoredTable):
        columns = _canonical(table.schema() if declared is None else declared)
        return replace(table, declared=columns) if isinstance(table, Files) else table, columns
    if not callable(table):
        kind = type(table).__name__
        way = "; join() joins two streams" if isinstance(table, DataStream) else ""
        raise JobError(f"join_table: {kind} is no table; give {_KINDS}{way}")
    check_table_function(table, "join_table")
    loader = Returned(table)
    if declared is not None:
        return loader, _canonical(declared)
    return loader, _canonical(loader.load().schema)


def _canonical(schema: pa.Schema) -> pa.Schema:
    check_schema(schema, "join_table: the table")
    return canonical_schema(schema)


def _check_keys(left: pa.Schema, left_on: Sequence[str], right: pa.Schema, right_on: Sequence[str]) -> None:
    sides = (left, left_on, "the stream"), (right, right_on, "the table")
    for schema, keys, side in sides:
        check_no_patterns(schema, f"join_table: {side}")
        if not keys:
            raise JobError(f"join_table: name at least one key column of {side}")
        for key in keys:
            if not isinstance(key, str) or schema.get_field_index(key) < 0:
                raise SchemaError(f"join_table: key column {key!r} is not in {side} ({', '.join(schema.names)})")
            kind = schema.field(key).type
            if not key_type_supported(kind):
                cast = key_cast(kind, "join_table").replace("with with_columns()", f"in {side}")
                raise SchemaError(f"join_table: key column {key!r} of {side} is {kind}, which cannot be a key; {cast}")
        if len(set(keys)) < len(keys):
            raise JobError(f"join_table: a column of {side} is named twice in {', '.join(keys)}")
    types = [[schema.field(key).type for key in keys] for schema, keys, _ in sides]
    if types[0] != types[1]:
        texts = [", ".join(f"{key} ({schema.field(key).type})" for key in keys) for schema, keys, _ in sides]
        raise SchemaError(
            f"join_table: the keys do not match: {texts[0]} of the stream and {texts[1]} of the table; both need as many key "
            "columns, of the same types in the same order: cast those of the stream with with_columns() first, or declare "
            "those of the table with schema="
        )
