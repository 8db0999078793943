"""The columns that a state has as a table, for reading and for writing: their names and types.

The types are those of the stored rows; of state without any entry, those in the settings with which it was declared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from midstream.engine.checkpoint.metadata import OperatorState
from midstream.engine.core.type_texts import columns_of_text, type_of_text
from midstream.engine.operators.base import KEY
from midstream.engine.state.expiring_states import WRITTEN_COLUMNS
from midstream.engine.state.state_parts import KEY_GROUP, Redistribute

NAMESPACES: Final = {"list": "position", "map": "map_key", "broadcast": "map_key"}
"""What the namespace of a row is, by the kind of state."""
TIMERS: Final = "timers"
KEY_COLUMN: Final = "key"
"""The column at rest that has the key, or a struct of all key columns, of state with entries."""
PICKLED: Final = "pickled"
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


def key_columns(operator: OperatorState) -> tuple[pa.Field[Any], ...]:
    """Return the key columns of the operator's (first) stream; () if it has none, or has not recorded them."""
    text = next((value for part, what, value in operator.settings if not part and what == KEY), "")
    return tuple(columns_of_text(text) or ())


def has_only_keys(operator: OperatorState) -> bool:
    """Whether the state of an operator follows from nothing but its keys and its own declaration."""
    return all(part or what.startswith(KEY) for part, what, _ in operator.settings)


def columns_of(
    operator: OperatorState, part: str, stored: pa.Schema | None, keys: Sequence[pa.Field[Any]]
) -> StateColumns | None:
    """Return the columns of a part; None if they cannot be determined.

    `stored`: the columns of its rows at rest, if it has any. `keys`: the key columns of the operator.
    """
    kind = kind_of_part(part)
    settings = next((value for of, what, value in operator.settings if of == part and what.startswith(kind)), None)
    if kind == "table":
        if stored is not None:
            found = [field for field in stored if field.name != KEY_GROUP]
        else:
            found = columns_of_text(settings or "") or []
        by_name = {field.name: field for field in found}
        if not found or not keys or not by_name.keys() >= {key.name for key in keys}:
            return None
        return StateColumns(operator.uid, part, tuple(by_name[key.name] for key in keys), pa.schema(found))
    if kind == "broadcast":
        keys = ()
    elif stored is not None:
        keys = _stored_keys(stored, keys)
    if kind != "broadcast" and not keys:
        return None
    types = _types(part, stored, settings)
    names = shown_names([key.name for key in keys], part)
    if types is None or len(names) != len(keys) + len(types):
        return None
    pickled = _pickled(kind, settings, names)
    written = next((name for name in WRITTEN_COLUMNS if stored is not None and name in stored.names), "")
    if written:
        names = shown_names([key.name for key in keys], part, has_times=True)
        types = [*types, pa.timestamp("us", "UTC")]
    shown = pa.schema([*keys, *(pa.field(name, of) for name, of in zip(names[len(keys) :], types, strict=True))])
    return StateColumns(operator.uid, part, tuple(keys), shown, pickled, written)


def _types(part: str, stored: pa.Schema | None, settings: str | None) -> list[pa.DataType] | None:
    """Return the types of the columns after the keys; None if they cannot be determined."""
    kind = kind_of_part(part)
    if part in _TIMER_PARTS:
        return [pa.timestamp("us", "UTC")]
    if kind not in _OF_ENTRIES:
        return None
    if stored is not None:
        return [stored.field(name).type for name in ("namespace", "value") if name in stored.names]
    return _declared_types(kind, settings)


def _stored_keys(stored: pa.Schema, keys: Sequence[pa.Field[Any]]) -> list[pa.Field[Any]]:
    if KEY_COLUMN not in stored.names:
        return []
    kind = stored.field(KEY_COLUMN).type
    if pa.types.is_struct(kind):
        return [kind.field(index) for index in range(kind.num_fields)]
    return [pa.field(key.name, kind) for key in keys[:1]]


def _declared_types(kind: str, settings: str | None) -> list[pa.DataType] | None:
    if settings is None:
        return None
    of_position = [pa.int64()] if kind == "list" else []
    for texts in _splits(kind, settings):
        types = [pa.large_binary() if text == PICKLED else type_of_text(text) for text in texts]
        if all(types):
            return [*of_position, *(each for each in types if each is not None)]
    return None


def _splits(kind: str, settings: str) -> list[list[str]]:
    """Return the texts that the types of a state may have: those of a map are separated by a word."""
    if NAMESPACES.get(kind) != "map_key":
        return [[settings]]
    words = settings.split(" to ")
    return [[" to ".join(words[:at]), " to ".join(words[at:])] for at in range(1, len(words))]


def _pickled(kind: str, settings: str | None, names: Sequence[str]) -> frozenset[str]:
    if kind not in _OF_ENTRIES or settings is None:
        return frozenset()
    if NAMESPACES.get(kind) != "map_key":
        return frozenset(names[-1:]) if settings == PICKLED else frozenset()
    first, second = settings.startswith(f"{PICKLED} to "), settings.endswith(f" to {PICKLED}")
    return frozenset(name for name, is_pickled in zip(names[-2:], (first, second), strict=True) if is_pickled)
