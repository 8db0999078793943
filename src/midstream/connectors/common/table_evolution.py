"""What a table must change so that it holds a stream: fields that are added, and types that are widened.

Columns, and the fields of structs, are found by name. Nothing is dropped, renamed, narrowed or moved, and what is added may
be null. A plan has no effect; a sink carries it out in one transaction, and plans again if another writer was first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from midstream.connectors.common.table_columns import has_not_null
from midstream.engine.core.arrow_types import is_list_of_any_length
from midstream.engine.core.errors import SchemaError

ELEMENT: Final = "element"
"""The name of a list's items in a path."""

Path = tuple[str, ...]
"""Names, from the column inwards."""


class Change(NamedTuple):
    path: Path
    type: pa.DataType


class TableSystem(NamedTuple):
    """What the format of a table, and the library that writes it, allow."""

    name: str
    widens: Callable[[pa.DataType, pa.DataType], bool]
    """Whether a column of the first type may become one of the second."""
    limit: str
    """What it does not allow, for messages."""
    unfit: Callable[[str], str | None]
    """Why a field that is added may not have this name; None if it may."""


class Evolution(NamedTuple):
    added: tuple[Change, ...]
    widened: tuple[Change, ...]

    def applied(self, table: pa.Schema) -> pa.Schema:
        """Return what the columns of the table will be."""
        return pa.schema(_changed_fields(table, [*self.added, *self.widened]))


def _changed_fields(fields: Iterable[pa.Field[Any]], changes: Sequence[Change]) -> list[pa.Field[Any]]:
    within: dict[str, list[Change]] = {}
    for path, kind in changes:
        within.setdefault(path[0], []).append(Change(path[1:], kind))
    found = [
        pa.field(field.name, _changed_type(field.type, within.pop(field.name, ())), field.nullable) for field in fields
    ]
    return [*found, *(pa.field(name, added.type) for name, (added,) in within.items())]


def _changed_type(kind: pa.DataType, changes: Sequence[Change]) -> pa.DataType:
    if not changes:
        return kind
    if not changes[0].path:
        return changes[0].type
    if is_list_of_any_length(kind):
        return pa.large_list(_changed_type(kind.value_type, [Change(path[1:], to) for path, to in changes]))
    assert pa.types.is_struct(kind), kind
    return pa.struct(_changed_fields(kind, changes))


def evolution(
    stream: pa.Schema, table: pa.Schema, system: TableSystem, fixed: Collection[str], where: str
) -> Evolution:
    """Return what makes the table hold every value of the stream.

    `stream`: its columns in the types of a table that would be made for it. `fixed`: the columns of the key and of the
    partitioning, which are never changed.

    Raises SchemaError for the first column for which that is impossible.
    """
    plan = _Plan(system, frozenset(fixed), where, checks_types=True)
    plan.compare(stream, table, ())
    return Evolution(tuple(plan.added), tuple(plan.widened))


def missing(
    stream: pa.Schema, table: pa.Schema, system: TableSystem, fixed: Collection[str], where: str
) -> tuple[Change, ...]:
    """Return the fields of the stream that the table lacks, and compare no types. Raises as `evolution` does."""
    plan = _Plan(system, frozenset(fixed), where, checks_types=False)
    plan.compare(stream, table, ())
    return tuple(plan.added)


class _Plan:
    def __init__(self, system: TableSystem, fixed: frozenset[str], where: str, *, checks_types: bool) -> None:
        self.added: list[Change] = []
        self.widened: list[Change] = []
        self._system = system
        self._fixed = fixed
        self._where = where
        self._checks_types = checks_types

    def compare(self, stream: Iterable[pa.Field[Any]], table: Iterable[pa.Field[Any]], above: Path) -> None:
        there = {field.name: field.type for field in table}
        ignoring_case = {name.lower(): name for name in there}
        for field in stream:
            path = (*above, field.name)
            kind, similar = there.get(field.name), ignoring_case.get(field.name.lower())
            if kind is not None:
                self._compare_types(field.type, kind, path)
            elif similar is not None:
                raise SchemaError(
                    f"{self._where}: column {_text(path)!r} differs from {_text((*above, similar))!r} of the table only by "
                    f"upper and lower case, which readers of {self._system.name} tables ignore; rename one of them"
                )
            elif field.name in self._fixed and not above:
                raise SchemaError(
                    f"{self._where}: the table has no column {field.name!r}, and a column of the key or the partitioning is "
                    f"never added; it has {', '.join(there)}. Add it there, with values for the rows that it has"
                )
            elif (reason := self._unfit(field)) is not None:
                raise SchemaError(f"{self._where}: column {_text(path)!r} cannot be added: {reason}; rename it")
            else:
                self.added.append(Change(path, field.type))

    def _unfit(self, field: pa.Field[Any]) -> str | None:
        """Return why this field, or one within it, may not be added."""
        kind, reason = field.type, self._system.unfit(field.name)
        while is_list_of_any_length(kind):
            kind = kind.value_type
        inner = map(self._unfit, kind) if pa.types.is_struct(kind) else ()
        return reason or next((each for each in inner if each is not None), None)

    def _compare_types(self, kind: pa.DataType, there: pa.DataType, path: Path) -> None:
        if has_not_null(there):
            return  # the sink refuses such a column by itself
        if pa.types.is_struct(kind) and pa.types.is_struct(there):
            self.compare(kind, there, path)
        elif is_list_of_any_length(kind) and is_list_of_any_length(there):
            self._compare_types(kind.value_type, there.value_type, (*path, ELEMENT))
        elif self._checks_types and not _holds(there, kind):
            if not self._system.widens(there, kind):
                raise SchemaError(
                    f"{self._where}: column {_text(path)!r} is {kind} in the stream and {there} in the table, and "
                    f"{self._system.limit}; cast the stream's column to {there}, or give it another name, under which it is "
                    "added"
                )
            if path[0] in self._fixed:
                raise SchemaError(
                    f"{self._where}: column {_text(path)!r} is {kind} in the stream and {there} in the table, and the type of "
                    f"a column of the key or the partitioning is never changed; cast the stream's column to {there}"
                )
            self.widened.append(Change(path, kind))


def _holds(there: pa.DataType, kind: pa.DataType) -> bool:
    """Whether a column of the type `there` holds every value of `kind`."""
    types = pa.types
    if (types.is_integer(there) and types.is_integer(kind)) or (types.is_floating(there) and types.is_floating(kind)):
        return bool(there.bit_width >= kind.bit_width)
    if types.is_decimal(there) and types.is_decimal(kind):
        return bool(there.scale == kind.scale and there.precision >= kind.precision)
    return there == kind


def _text(path: Path) -> str:
    return ".".join(path)
