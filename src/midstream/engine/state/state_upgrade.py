"""How a state is restored from one that an older program had declared otherwise.

`upgrade_of` decides it from the two declarations, before anything runs; the slots decide the same again, and convert what
they restore. What has been converted is in no checkpoint yet, so the next one stores all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import polars as pl
import pyarrow as pa

from midstream.engine.core.arrow_bytes import NOT_ARROW
from midstream.engine.core.arrow_types import chunked
from midstream.engine.core.batches import to_polars
from midstream.engine.core.errors import JobError, SchemaError, StorageError, text_of
from midstream.engine.core.python_values import ValueMisfit, converter_of, shown
from midstream.engine.state.declared_state import DeclaredState
from midstream.engine.state.safe_pickle import Pickles
from midstream.engine.state.state_parts import StoredForm
from midstream.engine.state.type_evolution import Conversion, NoConversion, conversion

TABLE: Final = "table"
_ROWS: Final = "rows"


@dataclass(frozen=True, slots=True)
class Upgrade:
    """How the stored columns of a state become those that are declared."""

    stored: pa.Schema
    """The columns as they are stored; pickled ones are missing."""
    columns: Mapping[str, tuple[pa.DataType, pa.DataType, Conversion]] = field(default_factory=dict)
    """The columns that are converted, with the old and the new type. Of a table, its rows as one column of structs."""
    migrates: bool = False
    """Whether the values, or all rows of a table, are passed through `migrate`."""
    changes: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()

    @property
    def changes_nothing(self) -> bool:
        return not self.columns and not self.migrates

    def type_of(self, column: str) -> pa.DataType | None:
        """Return the stored type of a column; None if it is pickled."""
        return _type_in(self.stored, column)

    def converted(self, table: pa.Table, where: str) -> pa.Table:
        """Return a table with each of its columns converted, if it has to be."""
        for name, (old, new, convert) in self.columns.items():
            index = table.schema.get_field_index(name)
            if index >= 0:
                _check_type(table.schema.field(index).type, old, f"{where}: column {name!r}")
                table = table.set_column(index, name, convert.of(table.column(index), new))
        return table

    def converted_rows(self, table: pa.Table, where: str) -> pa.Table:
        """Return a table of the same rows with the columns that are declared."""
        _check_type(pa.struct(list(table.schema)), pa.struct(list(self.stored)), where)
        if _ROWS not in self.columns:
            return table
        _, new, convert = self.columns[_ROWS]
        rows = chunked([batch.to_struct_array() for batch in table.to_batches()], pa.struct(list(table.schema)))
        return pa.Table.from_struct_array(convert.of(rows, new))


def decoded_form(data: bytes, where: str) -> pa.Schema:
    """Decode the columns in which a state was stored. Raises StorageError."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(data))
    except NOT_ARROW as error:
        raise StorageError(f"{where}: the types with which it was stored are damaged: {error}") from error


def upgrade_of(state: DeclaredState, stored: pa.Schema, is_renamed: bool) -> Upgrade | NoConversion:
    """Decide how a state is restored that was stored as `stored`, under another name with `is_renamed`."""
    if state.kind == TABLE:
        return _table_upgrade(state, stored, is_renamed)
    declared = state.form()
    columns: dict[str, tuple[pa.DataType, pa.DataType, Conversion]] = {}
    migrates = False
    changes: list[str] = []
    losses: list[str] = []
    for name, prefix in (("namespace", "keys "), ("value", "")):
        old, new = _type_in(stored, name), _type_in(declared, name)
        is_value = name == "value"
        if is_value and state.migrate is not None and (is_renamed or old != new):
            migrates = True
            changes.append(f"converted by migrate ({old or 'pickled'} → {new or 'pickled'})")
            continue
        if old is None and new is None:
            continue
        if old is None or new is None:
            way = "; convert the values with migrate=" if is_value else ""
            return NoConversion(f"{prefix}{old or 'pickled'} cannot be converted to {new or 'pickled'} by itself{way}")
        if old == new:
            continue
        found = conversion(old, new, state.defaults if is_value else {})
        if isinstance(found, NoConversion):
            return NoConversion(f"{prefix}{found.reason}{'; convert the values with migrate=' if is_value else ''}")
        columns[name] = old, new, found
        changes += [f"{prefix}{change}" for change in found.changes]
        losses += [f"{prefix}{loss}" for loss in found.losses]
    return Upgrade(stored, columns, migrates, tuple(changes), tuple(losses))


def _table_upgrade(state: DeclaredState, stored: pa.Schema, is_renamed: bool) -> Upgrade | NoConversion:
    old, new = pa.struct(list(stored)), pa.struct(list(state.form()))
    if state.migrate is not None and (is_renamed or old != new):
        return Upgrade(stored, {}, migrates=True, changes=("converted by migrate",))
    if old == new:
        return Upgrade(stored)
    found = conversion(old, new, state.defaults, "column")
    if isinstance(found, NoConversion):
        return NoConversion(f"{found.reason}; convert the rows with migrate=")
    return Upgrade(stored, {_ROWS: (old, new, found)}, changes=found.changes, losses=found.losses)


def upgrade_at_restore(state: DeclaredState, stored: StoredForm, where: str) -> Upgrade:
    """Return how a state is restored, which was checked before the job began. Raises StorageError."""
    what = f"{where}: state {state.name!r}"
    found = upgrade_of(state, decoded_form(stored.columns, what), stored.name != state.name)
    if isinstance(found, NoConversion):
        raise StorageError(f"{what}: {found.reason}")
    return found


def migrated_values(
    state: DeclaredState,
    keys: Sequence[Any],
    values: Sequence[Any],
    kind: pa.DataType | None,
    pickles: Pickles,
    where: str,
) -> list[Any]:
    """Pass stored values through `migrate`. `kind`: the declared type; None if values are pickled.

    Raises SchemaError, which ends the job, naming the value for which it fails or returns one that does not fit.
    """
    assert state.migrate is not None
    keep = None if kind is None else converter_of(kind).keep
    made = []
    for key, value in zip(keys, values, strict=True):
        try:
            new = state.migrate(value)
        except (Exception, SystemExit) as error:  # of the user's function
            raise SchemaError(
                f"{_migrate_of(state, key, value, where)} failed: {type(error).__name__}: {text_of(error)}"
            ) from error
        try:
            if keep is None:
                pickles.dumps(new, "the value")  # now, rather than in the next checkpoint
            made.append(new if keep is None else keep(new))
        except (ValueMisfit, JobError) as misfit:
            raise SchemaError(
                f"{_migrate_of(state, key, value, where)} returned {shown(new)}, which does not fit: {misfit}"
            ) from misfit
    return made


def _migrate_of(state: DeclaredState, key: Any, value: Any, where: str) -> str:
    of_key = "" if key is None else f" of key {shown(key)}"
    return f"{where}: state {state.name!r}: migrate({shown(value)}){of_key}"


def migrated_rows(state: DeclaredState, tables: Sequence[pa.Table], upgrade: Upgrade, what: str) -> Any:
    """Pass the rows of a table through `migrate`, and return what it returns. Raises SchemaError, which ends the job."""
    assert state.migrate is not None
    for table in tables:
        _check_type(pa.struct(list(table.schema)), pa.struct(list(upgrade.stored)), what)
    frame = pl.concat(map(to_polars, tables), rechunk=True)
    try:
        return state.migrate(frame)
    except (Exception, SystemExit) as error:  # of the user's function
        raise SchemaError(
            f"{what}: migrate, of {frame.height:,} stored rows with the columns {', '.join(frame.columns)}, failed: "
            f"{type(error).__name__}: {text_of(error)}"
        ) from error


def _check_type(found: pa.DataType, stored: pa.DataType, where: str) -> None:
    if found != stored:
        raise StorageError(
            f"{where}: stored as {found}, and according to the metadata as {stored}: it is damaged, or midstream has not "
            "written it. To go back to an older checkpoint, name it with --from"
        )


def _type_in(form: pa.Schema, column: str) -> pa.DataType | None:
    index = form.get_field_index(column)
    return None if index < 0 else form.field(index).type
