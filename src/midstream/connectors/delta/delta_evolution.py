"""Columns that are added to a Delta table, each time in one transaction that conflicts with any other change of the schema.

Adding a column changes no row, so it is no change to a rollback. deltalake sets the schema back with the rows, so columns
that were added since are added again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from midstream.connectors.common.table_evolution import Change, TableSystem, evolution, missing
from midstream.connectors.delta.column_mapping import mapping_of
from midstream.connectors.delta.delta_tables import schema_of
from midstream.engine.core.arrow_types import is_list_of_any_length
from midstream.engine.core.errors import ConfigError

if TYPE_CHECKING:
    from deltalake import DeltaTable

ADDED: Final = "ADD COLUMN"
"""The operation of a version that adds columns, as the log has it."""
_RESTORE: Final = "RESTORE"
_UNFIT: Final = frozenset(" ,;{}()\n\t=")
"""Characters that names in tables without column mapping cannot have: Spark refuses to write to such tables."""
_OF_CHANGE_FEED: Final = frozenset(("_change_type", "_commit_version", "_commit_timestamp"))


def _unfit(name: str) -> str | None:
    if not name:
        return "it has no name"
    wrong = sorted(_UNFIT & set(name))
    if wrong:
        return f"names in Delta tables without column mapping have no {wrong[0]!r}"
    return "the change data feed of Delta tables has a column of that name" if name.lower() in _OF_CHANGE_FEED else None


_DELTA: Final = TableSystem("Delta", lambda there, kind: False, "deltalake changes no types of columns", _unfit)


def evolve(
    table: DeltaTable, stream: pa.Schema, key: Sequence[str], check: Callable[[pa.Schema], object], where: str
) -> None:
    """Add what the table lacks to hold the stream, as a new version of the table.

    `stream`: its columns in the types of a table that would be made for it. `check`: raises for columns of the table that
    the sink cannot write to. Raises SchemaError for a column that the table cannot hold, CommitFailedError if another
    writer has changed the schema.
    """
    _check_addable(table, where)
    there = schema_of(table)
    plan = evolution(stream, there, _DELTA, _fixed(table, key), where)
    check(plan.applied(there))
    _add(table, plan.added)


def add_missing(table: DeltaTable, stream: pa.Schema, key: Sequence[str], where: str) -> None:
    """Add the columns of the stream that the table lacks, and compare no types. Raises as `evolve` does."""
    changes = missing(stream, schema_of(table), _DELTA, _fixed(table, key), where)
    if changes:
        _check_addable(table, where)
    _add(table, changes)


def check_columns_restorable(table: DeltaTable, older: DeltaTable, where: str) -> None:
    """Raise ConfigError if columns have changed since an older version, and those of today could not be had after it is
    restored.
    """
    if mapping_of(table, where) != mapping_of(older, where) and mapping_of(table, where).is_mapped:
        raise ConfigError(
            f"{where}: columns of the table have changed since version {older.version()}, and deltalake does not add columns to "
            "tables with column mapping, as it would have to after it had restored that version; restore the table in Spark, "
            "and start with --fresh"
        )


def _check_addable(table: DeltaTable, where: str) -> None:
    if mapping_of(table, where).is_mapped:
        raise ConfigError(
            f"{where}: deltalake does not add columns to tables with column mapping; add them in Spark (ALTER TABLE), and leave "
            "evolve out"
        )


def restore_columns(table: DeltaTable, opened: Callable[[], DeltaTable], where: str) -> None:
    """If the newest version has set the table back, add the columns again that were added since."""
    newest = table.version()
    if newest > 0 and table.history(1)[0].get("operation") == _RESTORE:
        before = opened()
        before.load_as_version(newest - 1)
        _add(table, missing(schema_of(before), schema_of(table), _DELTA._replace(unfit=lambda name: None), (), where))


def _fixed(table: DeltaTable, key: Sequence[str]) -> Collection[str]:
    return {*key, *table.metadata().partition_columns}


def _add(table: DeltaTable, changes: Sequence[Change]) -> None:
    from deltalake import CommitProperties, Schema

    if changes:
        fields: Any = Schema.from_arrow(pa.schema(_nested(changes, schema_of(table)))).fields
        table.alter.add_columns(fields, commit_properties=CommitProperties(max_commit_retries=0))
        table.update_incremental()


def _nested(changes: Sequence[Change], there: Iterable[pa.Field[Any]]) -> list[pa.Field[Any]]:
    """Return what is added within the fields `there` as fields of the same form, without all else, as deltalake wants it."""
    kinds = {field.name: field.type for field in there}
    within: dict[str, list[Change]] = {}
    found: list[pa.Field[Any]] = []
    for (name, *inner), kind in changes:
        if inner:
            within.setdefault(name, []).append(Change(tuple(inner), kind))
        else:
            found.append(pa.field(name, kind))
    return [*found, *(pa.field(name, _outer(each, kinds[name])) for name, each in within.items())]


def _outer(changes: Sequence[Change], there: pa.DataType) -> pa.DataType:
    if is_list_of_any_length(there):
        return pa.large_list(_outer([Change(path[1:], kind) for path, kind in changes], there.value_type))
    assert pa.types.is_struct(there), there
    return pa.struct(_nested(changes, there))
