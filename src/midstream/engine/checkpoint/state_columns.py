"""The columns that a state has as a table, for reading and for writing: their names and types.

The types are those of the stored rows; of state without any entry, those with which it was declared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from midstream.engine.checkpoint.metadata import OperatorState
from midstream.engine.operators.base import KEY
from midstream.engine.state.expiring_states import WRITTEN_COLUMNS
from midstream.engine.state.state_parts import KEY_GROUP, Redistribute
from midstream.engine.state.state_upgrade import decoded_form

NAMESPACES: Final = {"list": "position", "map": "map_key", "broadcast": "map_key"}
"""What the namespace of a row is, by the kind of state."""
TIMERS: Final = "timers"
KEY_COLUMN: Final = "key"
"""The column at rest that has the key, or a struct of all key columns, of state with entries."""
_OF_ENTRIES: Final = frozenset({"value", "list", "map", "reducing", "broadcast"})
_TIMER_PARTS: Final = ("timers:event", "timers:processing")


def kind_of_part(part: str) -> str:
    """Return the kind of state that a part has, such as value or timers; "" for one that no function declares."""
    kind, colon, _ = part.partition(":")
    return kind if colon else ""


def name_of_part(part: str) -> str:
    """Return the name under which users know the state of a part."""
    return part if kind_of_part(part) in ("", TIMERS) else part.partition(":")[2]


def shown_names(keys: Sequence[str], part: str, *, has_times: bool = False) -> list[str]:
    """Return the names of the columns of state that has entries: one that a key column already has ends with `_`.

    `has_times`: whether it has the times at which its entries were last written, since they expire.
    """
    kind = kind_of_part(part)
    names = list(keys)
    others = ["time"] if kind == TIMERS else [NAMESPACES[kind]] if kind in NAMESPACES else []
    if kind != TIMERS:
        others += [name_of_part(part), *(["written_at"] if has_times else [])]
    for name in others:
        while name in names:
            name += "_"
        names.append(name)
    return names


@dataclass(frozen=True, slots=True)
class StateColumns:
    """The columns of one state."""

    uid: str
    part: str
    keys: tuple[pa.Field[Any], ...]
    """Those of the stream; none if the state is not keyed."""
    columns: pa.Schema
    """All of its columns, as users see them."""
    pickled: frozenset[str] = frozenset()
    """Those whose values are pickled."""
    written: str = ""
    """The column at rest for the last column, `written_at`, of state whose entries expire."""

    @property
    def kind(self) -> str:
        return kind_of_part(self.part)

    @property
    def rule(self) -> Redistribute:
        return Redistribute.KEYED if self.keys else Redistribute.BROADCAST

    def __str__(self) -> str:
        return f"state {name_of_part(self.part)!r} of operator {self.uid!r}"


def key_columns(operator: OperatorState, where: str) -> tuple[pa.Field[Any], ...]:
    """Return the key columns of the operator's (first) stream; () if it has none. Raises StorageError."""
    return tuple(_form(operator, "", where) or ())


def _form(operator: OperatorState, part: str, where: str) -> pa.Schema | None:
    """Return the columns in which a part is stored, as declared; None if that is not recorded."""
    form = dict(operator.forms).get(part)
    return None if form is None else decoded_form(form, f"{where}: operator {operator.uid!r}")


def has_only_keys(operator: OperatorState) -> bool:
    """Whether the state of an operator follows from nothing but its keys and its own declaration."""
    return all(part or what.startswith(KEY) for part, what, _ in operator.settings)


def columns_of(operator: OperatorState, part: str, stored: pa.Schema | None, where: str) -> StateColumns | None:
    """Return the columns of a part; None if they are neither stored nor recorded. Raises StorageError.

    `stored`: the columns of its rows at rest, if it has any.
    """
    kind, form = kind_of_part(part), _form(operator, part, where)
    keys: Sequence[pa.Field[Any]] = key_columns(operator, where)
    if kind == "table":
        found = form if stored is None else pa.schema([field for field in stored if field.name != KEY_GROUP])
        if found is None or not keys or any(key.name not in found.names for key in keys):
            return None
        return StateColumns(operator.uid, part, tuple(found.field(key.name) for key in keys), found)
    if kind == "broadcast":
        keys = ()
    elif stored is not None:
        keys = _stored_keys(stored, keys)
    if kind != "broadcast" and not keys:
        return None
    types = _types(part, stored, form)
    if types is None:
        return None
    names = [key.name for key in keys]
    pickled = _pickled(kind, form, shown_names(names, part))
    written = next((name for name in WRITTEN_COLUMNS if stored is not None and name in stored.names), "")
    if written:
        types = [*types, pa.timestamp("us", "UTC")]
    shown = shown_names(names, part, has_times=bool(written))[len(keys) :]
    columns = pa.schema([*keys, *(pa.field(name, of) for name, of in zip(shown, types, strict=True))])
    return StateColumns(operator.uid, part, tuple(keys), columns, pickled, written)


def _types(part: str, stored: pa.Schema | None, form: pa.Schema | None) -> list[pa.DataType] | None:
    """Return the types of the columns after the keys; None if they are neither stored nor recorded."""
    kind = kind_of_part(part)
    if part in _TIMER_PARTS:
        return [pa.timestamp("us", "UTC")]
    if kind not in _OF_ENTRIES:
        return None
    names = ("namespace", "value") if kind in NAMESPACES else ("value",)
    if stored is not None:
        return [stored.field(name).type for name in names]
    if form is None:
        return None
    declared = {"namespace": pa.int64()} if kind == "list" else {}
    declared |= {field.name: field.type for field in form}
    return [declared.get(name, pa.large_binary()) for name in names]  # what has no type is pickled


def _stored_keys(stored: pa.Schema, keys: Sequence[pa.Field[Any]]) -> list[pa.Field[Any]]:
    if KEY_COLUMN not in stored.names:
        return []
    kind = stored.field(KEY_COLUMN).type
    if pa.types.is_struct(kind):
        return [kind.field(index) for index in range(kind.num_fields)]
    return [pa.field(key.name, kind) for key in keys[:1]]


def _pickled(kind: str, form: pa.Schema | None, names: Sequence[str]) -> frozenset[str]:
    """Return which of the columns `names` have values without a type."""
    if kind not in _OF_ENTRIES or form is None:
        return frozenset()
    found = set(names[-1:]) if "value" not in form.names else set()
    if NAMESPACES.get(kind) == "map_key" and "namespace" not in form.names:
        found.add(names[-2])
    return frozenset(found)
