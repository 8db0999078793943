"""Entries of a keyed state that are rows in columns, because all of them would take too much memory as Python objects.

An entry is either an object in the state's dict or rows here. Since rows come in batches, the entries of all keys of a
batch are fetched at once before the function sees the first row, and so are those of the next timers. What exceeds the
limit is spilled once a batch is processed: those entries go that have been in the dict longest.

A checkpoint has the rows as chunks that follow those of the dict, in the same columns, so that whatever reads the state
needs no difference: a later chunk supersedes earlier ones for its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

import polars as pl
import pyarrow as pa

from midstream.engine.core.batches import from_polars, is_held_by_polars, to_polars
from midstream.engine.core.interfaces import Ids
from midstream.engine.state.changelog import GONE, ChangelogSnapshot
from midstream.engine.state.heap_snapshot import KeyEncoding, state_rows, state_table
from midstream.engine.state.keyed_states import ListState, MapState, State
from midstream.engine.state.safe_pickle import OwnCode
from midstream.engine.state.state_parts import KEY_GROUP, Chunk
from midstream.engine.state.table_runs import TableRun
from midstream.engine.state.table_state import TableState

SPILLED_ID: Final = "spilled-"
"""What the ids of chunks of such rows begin with: a restore leaves their rows where they are."""


class _SpilledIds:
    def __init__(self, ids: Ids) -> None:
        self._ids = ids

    def new_id(self) -> str:
        return SPILLED_ID + self._ids.new_id()


class SpilledEntries(TableState):
    """The spilled entries of one state."""

    kind = "spilled"

    def __init__(self, state: State, encoding: KeyEncoding, own: OwnCode, where: str) -> None:
        super().__init__(pa.schema([*encoding.flat_fields, *_value_fields(state)]))
        self._state = state
        self._encoding = encoding
        self._own = own
        self._where = where

    @property
    def has_rows(self) -> bool:
        return bool(self._bound_runs())

    def fetch(self, keys: Iterable[Any]) -> None:
        """Move the entries of these keys into the dict."""
        entries = self._state.entries()
        missing = list(dict.fromkeys(key for key in keys if key not in entries))
        if missing:
            self._restore(self.pop(to_polars(self._encoding.flat_batch(missing))))

    def fetch_all(self) -> None:
        """Move all entries into the dict."""
        rows = self.frame
        self._hold([])
        self._restore(rows)

    def _restore(self, rows: pl.DataFrame) -> None:
        if not rows.height:
            return
        state, log = self._state, self._state.log
        table = self._encoding.nested(pa.table(from_polars(rows, self.schema, self._where)))
        keys, entries = state_rows(state, table, self._encoding, self._own, self._where)
        state.restore(entries)
        held = state.entries()
        log.changed.update((key, held[key]) for key in dict.fromkeys(keys))

    def spill(self, keys: Collection[Any]) -> None:
        """Move the entries of these keys, which the dict has, to the rows. Empty collections are dropped."""
        held = self._state.entries()
        taken = ChangelogSnapshot((), "", {key: held[key] for key in keys})
        table = state_table(self._state, taken, self._encoding, self._own, self._where)
        self.append(to_polars(self._encoding.flat(table.drop_columns([KEY_GROUP]))))
        self._state.forget(keys)
        self._state.log.changed.update(dict.fromkeys(keys, GONE))

    def chunks(self, ids: Ids) -> Callable[[], tuple[Chunk, ...]] | None:
        """Return a function that makes chunks of all rows on the I/O pool; None if there are none."""
        chunks = self.snapshot(_SpilledIds(ids), self._where)
        if chunks is None:
            return None
        encoding = self._encoding
        return lambda: tuple(Chunk(chunk.id, encoding.nested(chunk.table)) for chunk in chunks())

    def restore_chunk(self, chunk: Chunk) -> None:
        """Add the rows of such a chunk. Raises StorageError if it has other columns."""
        rows = self._restored_rows([Chunk(chunk.id, self._encoding.flat(chunk.table))], self._where)
        self._hold([*self._bound_runs(), TableRun(rows)])


def _value_fields(state: State) -> list[pa.Field[Any]]:
    """Return the columns of a state at rest, without its key."""
    assert state.type is not None
    value = pa.field("value", state.type)
    if isinstance(state, ListState):
        return [pa.field("namespace", pa.int64()), value]
    if isinstance(state, MapState):
        assert state.key_type is not None
        return [pa.field("namespace", state.key_type), value]
    return [value]


def is_spillable(state: State, encoding: KeyEncoding) -> bool:
    if not state.is_keyed or state.ttl is not None or state.type is None:
        return False
    if isinstance(state, MapState) and state.key_type is None:
        return False
    return all(is_held_by_polars(field.type) for field in (*encoding.flat_fields, *_value_fields(state)))
