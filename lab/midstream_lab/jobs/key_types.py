"""Rows on edges in other schemas than SCHEMA, keyed by columns of other types; and the conversion back.

A node whose chain ends with one of `KEY_LAYOUTS` emits rows of that layout; "plain" converts them to ordinary rows again, and
checks that the keys still belong to the rows. All columns but the keys are those of SCHEMA; `was` is the original key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from midstream.engine.core.arrow_types import is_struct_array, schema_of, to_list
from midstream.engine.operators.base import Operator, OperatorContext, Output
from midstream_lab.jobs.recorded_rows import SCHEMA, Outside

_SUMMER_TIME_ENDS_US: Final = 1_729_990_800_000_000
"""27 October 2024, 1:00 UTC, when the hour from 2:00 begins again in Berlin."""
_HALF_HOUR_US: Final = 1_800_000_000
_MINUTE_US: Final = 60_000_000


@dataclass(frozen=True, slots=True)
class KeyLayout:
    """The form of rows on an edge. `key`: returns the values of the key columns for the id and key of a row."""

    name: str
    key_columns: tuple[tuple[str, pa.DataType], ...]
    key: Callable[[int, int], tuple[Any, ...]]

    def __reduce__(self) -> tuple[Callable[[str], KeyLayout], tuple[str]]:
        return _named, (self.name,)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.key_columns)

    @property
    def schema(self) -> pa.Schema:
        others = [(field.name, field.type) for field in SCHEMA if field.name not in ("id", "key")]
        return schema_of([*self.key_columns, ("id", pa.int64()), ("was", pa.int64()), *others])

    def stored_key(self, row: int, key: int) -> Any:
        """Return the key of a row in the form of `stored_keys`."""
        values = self.key(row, key)
        return values[0] if len(values) == 1 else values

    def arrays(self, ids: Sequence[int], keys: Sequence[int]) -> list[pa.Array[Any]]:
        rows = [self.key(row, key) for row, key in zip(ids, keys, strict=True)]
        return [pa.array([row[i] for row in rows], kind) for i, (_, kind) in enumerate(self.key_columns)]


class _Plain(KeyLayout):
    __slots__ = ()

    @property
    def schema(self) -> pa.Schema:
        return SCHEMA


PLAIN: Final = _Plain("plain", (("key", pa.int64()),), lambda row, key: (key,))
_KEY_LAYOUTS: Final = (
    KeyLayout("by_text", (("key", pa.large_string()),), lambda row, key: (f"Schlüssel {key}",)),
    KeyLayout(
        # the keys lie in two hours in which the wall clock shows the same times
        "by_zone",
        (("key", pa.timestamp("us", "Europe/Berlin")),),
        lambda row, key: (_SUMMER_TIME_ENDS_US + (key - 2) * _HALF_HOUR_US,),
    ),
    KeyLayout("by_time", (("key", pa.time64("us")),), lambda row, key: (key * _MINUTE_US + 1,)),
    KeyLayout("by_flag", (("key", pa.bool_()),), lambda row, key: (key % 2 == 1,)),
    KeyLayout(
        "by_two",
        (("key", pa.int32()), ("half", pa.large_string())),
        lambda row, key: (-key, "even" if row % 2 == 0 else "odd"),
    ),
    # every row has its own key, so there are more keys than key groups
    KeyLayout("by_id", (("key", pa.int64()),), lambda row, key: (row,)),
)
KEY_LAYOUTS: Final[Mapping[str, KeyLayout]] = {layout.name: layout for layout in _KEY_LAYOUTS}


def _named(name: str) -> KeyLayout:
    return KEY_LAYOUTS.get(name, PLAIN)


def stored_keys(column: pa.ChunkedArray[Any]) -> list[Any]:
    """Return the keys in a table of state: times as integers, since some datetimes are equal; several columns as
    tuples.
    """
    array = column.combine_chunks()
    if is_struct_array(array):
        return list(zip(*(_plain_values(array.field(i)) for i in range(array.type.num_fields)), strict=True))
    return _plain_values(array)


def _plain_values(array: pa.Array[Any]) -> list[Any]:
    values: list[Any] = (array.cast(pa.int64()) if pa.types.is_temporal(array.type) else array).to_pylist()
    return values


class _Reform(Operator):
    """Base of operators that forward every row in another schema."""

    keeps_splits = True

    def __init__(self, outside: Outside, layout: KeyLayout) -> None:
        self._outside = outside
        self._layout = layout
        self._out: Output

    def open(self, context: OperatorContext, out: Output) -> None:
        self._outside.check_open(context)
        self._out = out


class Rekey(_Reform):
    """Converts rows of SCHEMA to another form."""

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        keys = self._layout.arrays(to_list(batch.column("id")), to_list(batch.column("key")))
        others = [batch.column(name) for name in SCHEMA.names if name not in ("id", "key")]
        columns = [*keys, batch.column("id"), batch.column("key"), *others]
        self._out.emit(pa.RecordBatch.from_arrays(columns, schema=self._layout.schema))


class Plain(_Reform):
    """Converts rows of a form to rows of SCHEMA."""

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        plain = as_plain(batch, self._layout)
        if plain is None:
            self._outside.world.bug(
                f"rows have other keys than they had: {batch.select(self._layout.keys).to_pylist()}"
            )
        else:
            self._out.emit(plain)


def as_plain(batch: pa.RecordBatch, layout: KeyLayout) -> pa.RecordBatch | None:
    """Convert rows of a form to rows of SCHEMA; return None if their keys do not belong to them in that form."""
    if layout is PLAIN:
        return batch
    expected = layout.arrays(to_list(batch.column("id")), to_list(batch.column("was")))
    if any(not batch.column(name).equals(keys) for name, keys in zip(layout.keys, expected, strict=True)):
        return None
    columns = [batch.column("was" if name == "key" else name) for name in SCHEMA.names]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
