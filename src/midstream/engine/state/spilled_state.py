"""State of process functions that is rows in columns, because all of it would take too much memory as Python objects.

An entry of a keyed state is either an object or a row here. Since rows come in batches, the entries of the keys of a batch
are fetched at once before the function sees the first row; timers are fetched when they are due. What exceeds the limit is
spilled once a batch is processed: the entries that have been objects for longest, and timers that are due late.

A checkpoint has these rows as chunks that follow those of the objects, in the same columns, so that whatever reads the
state needs no difference: a later chunk supersedes earlier ones for its keys.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar, cast

import numpy as np
import polars as pl
import pyarrow as pa

from midstream.engine.core.arrow_types import to_list
from midstream.engine.core.batches import from_polars, is_held_by_polars, to_polars
from midstream.engine.core.interfaces import Ids
from midstream.engine.state.changelog import GONE, ChangelogSnapshot
from midstream.engine.state.expiring_states import UNKNOWN_US, ExpiringState
from midstream.engine.state.heap_snapshot import KeyEncoding, state_rows, state_table
from midstream.engine.state.keyed_states import ListState, MapState, State
from midstream.engine.state.safe_pickle import OwnCode
from midstream.engine.state.state_parts import KEY_GROUP, Chunk
from midstream.engine.state.table_runs import LAST_TICK, TableRun, run_frames
from midstream.engine.state.table_state import TableState
from midstream.engine.state.timers import NEVER_US, TimerQueue, TimerRow
from midstream.engine.state.tombstones import Int64s

S = TypeVar("S", bound="SpilledRows")

SPILLED_ID: Final = "spilled-"
"""What the ids of chunks of such rows begin with: a restore leaves their rows where they are."""
TIMERS_MAX: Final = 65_536
"""The number of timers, of those that are due first, above which not all of one stretch become objects at once."""
_TIME: Final = "time_us"


class _SpilledIds:
    def __init__(self, ids: Ids) -> None:
        self._ids = ids

    def new_id(self) -> str:
        return SPILLED_ID + self._ids.new_id()


class SpilledRows(TableState):
    """The rows of one state, or of one kind of timers. `values`: the columns that are not keys."""

    kind = "spilled"

    def __init__(self, encoding: KeyEncoding, values: Sequence[pa.Field[Any]], where: str) -> None:
        super().__init__(pa.schema([*encoding.flat_fields, *values]))
        self._encoding = encoding
        self._where = where

    def opened(self: S, name: str, key_groups: range, max_parallelism: int) -> S:
        """Return a copy that holds rows of these key groups."""
        keys = [field.name for field in self._encoding.flat_fields]
        return cast("S", self.bound(name, keys, key_groups, max_parallelism))

    @property
    def has_rows(self) -> bool:
        return bool(self._bound_runs())

    def fetch_all(self) -> None:
        rows = self.frame
        self._hold([])
        self._revive(rows)

    def chunks(self, ids: Ids, stored_bytes: Callable[[str], int | None]) -> Callable[[], tuple[Chunk, ...]] | None:
        """Return a function that makes chunks of all rows on the I/O pool; None if there are none."""
        chunks = self.snapshot(_SpilledIds(ids), self._where, stored_bytes)
        if chunks is None:
            return None
        encoding = self._encoding

        def nested(chunk: Chunk) -> pa.Table:
            return encoding.nested(chunk.stored)

        return lambda: tuple(
            chunk if chunk.made is None else replace(chunk, made=partial(nested, chunk)) for chunk in chunks()
        )

    def has_columns_of(self, chunk: Chunk) -> bool:
        """Whether a chunk of such rows has the columns that they have now: entries may have begun to expire."""
        columns = [self.schema.field(name) for name in self.schema.names if name not in self._layout.keys]
        stored = [field for field in chunk.table.schema if field.name not in (KEY_GROUP, "key")]
        return columns == stored and self._encoding.is_key_of(chunk.table)

    def restore_chunk(self, chunk: Chunk) -> None:
        """Add the rows of a chunk that `has_columns_of` accepts. Raises StorageError if it is damaged."""
        frames = self._restored_frames([Chunk(chunk.id, self._encoding.flat(chunk.table))], self._where)
        self._hold([*self._bound_runs(), *map(TableRun, run_frames(frames))])

    def _revive(self, rows: pl.DataFrame) -> None:
        """Make objects of rows that have been removed."""
        if rows.height:
            self._restore_objects(self._encoding.nested(pa.table(from_polars(rows, self.schema, self._where))))

    @abstractmethod
    def _restore_objects(self, table: pa.Table) -> None:
        """Make objects of rows, in the columns that a checkpoint has of them."""

    def _add(self, table: pa.Table) -> None:
        """Add rows in the columns that a checkpoint has of them."""
        self.append(to_polars(self._encoding.flat(table)))


class SpilledEntries(SpilledRows):
    """The spilled entries of one state. All rows of a key are spilled together, and lie in one run, and so in one chunk."""

    _keeps_keys_together = True

    def __init__(self, state: State, encoding: KeyEncoding, own: OwnCode, where: str) -> None:
        super().__init__(encoding, _value_fields(state), where)
        self._state = state
        self._own = own
        self._written = state.written_column if isinstance(state, ExpiringState) else ""

    def opened(self: S, name: str, key_groups: range, max_parallelism: int) -> S:
        bound = super().opened(name, key_groups, max_parallelism)
        assert isinstance(bound, SpilledEntries)
        if isinstance(bound._state, ExpiringState):
            bound._state.spilled = bound
        return bound

    def fetch(self, keys: Iterable[Any]) -> None:
        """Make objects of what these keys have."""
        held = self._state.entries()
        missing = [key for key in dict.fromkeys(keys) if key not in held]
        if missing:
            self._revive(self.pop(to_polars(self._encoding.flat_batch(missing))))

    @property
    def first_us(self) -> int:
        return min((run.first(self._written) for run in self._searchable()), default=NEVER_US)

    def fetch_written(self, until_us: int, number: int) -> list[Any]:
        until_us = max(UNKNOWN_US, min(until_us, LAST_TICK))
        found = next((rows for run in self._searchable() if (rows := self._keys_written(run, until_us, number))), None)
        if found is None:
            return []
        self.fetch(found)
        return found

    def _keys_written(self, run: TableRun, until_us: int, number: int) -> list[Any]:
        at = run.until(self._written, until_us)[:number]
        if not len(at):
            return []
        names = [field.name for field in self._encoding.flat_fields]
        schema = pa.schema([self.schema.field(name) for name in names])
        keys = from_polars(run.rows_at(at, names), schema, self._where)
        return list(dict.fromkeys(self._encoding.keys(self._encoding.nested(pa.table(keys)))))

    def spill(self, number: int) -> int:
        """Turn up to `number` entries into rows, and return how many. Empty collections are dropped."""
        held = self._state.entries()
        keys = list(islice(held, number))
        taken = ChangelogSnapshot((), "", {key: held[key] for key in keys})
        self._add(state_table(self._state, taken, self._encoding, self._own, self._where).drop_columns([KEY_GROUP]))
        self._state.forget(keys)
        self._state.log.changed.update(dict.fromkeys(keys, GONE))
        return len(keys)

    def _restore_objects(self, table: pa.Table) -> None:
        state = self._state
        keys, entries = state_rows(state, table, self._encoding, self._own, self._where)
        state.restore(entries)
        held = state.entries()
        state.log.changed.update((key, held[key]) for key in dict.fromkeys(keys))


class SpilledTimers(SpilledRows):
    """The spilled timers of one queue. Those of one time are due in any order, since they belong to different keys.

    They become objects when they are due, and not with the rows of their keys. So a timer that is set again is a row and an
    object: it is spilled no second time, and one timer when it is due, since all rows of a time become objects before the
    first timer of this time is removed from the queue. The row of one that is deleted is removed once the batch is processed.
    """

    def __init__(self, queue: TimerQueue, encoding: KeyEncoding, where: str) -> None:
        super().__init__(encoding, [pa.field(_TIME, pa.int64())], where)
        self._queue = queue

    def opened(self: S, name: str, key_groups: range, max_parallelism: int) -> S:
        bound = super().opened(name, key_groups, max_parallelism)
        assert isinstance(bound, SpilledTimers)
        bound._queue.load = bound._load
        bound._lookup_keys = *bound._lookup_keys, _TIME
        return bound

    def spill(self, number: int) -> int:
        """Turn up to about `number` timers into rows, unless they are rows already, and return how many."""
        timers = self._queue.pop_late(number)
        if timers:
            self.append(self._new(timers))
        return len(timers)

    def settle(self) -> None:
        """Remove the rows of timers that have been deleted, and find out which of those that were refused are set."""
        queue = self._queue
        if queue.refused:
            refused, queue.refused = queue.refused, []
            queue.dropped += self._new(refused).height
        if queue.deleted:
            deleted, queue.deleted = queue.deleted, set()
            self.pop(self._rows(deleted))
            self._note_first()

    def _rows(self, timers: Collection[TimerRow]) -> pl.DataFrame:
        keys = self._encoding.flat_batch([key for _, key in timers])
        times = pa.array([time_us for time_us, _ in timers], pa.int64())
        return to_polars(keys.append_column(pa.field(_TIME, pa.int64()), times))

    def _new(self, timers: Collection[TimerRow]) -> pl.DataFrame:
        """Return rows of those of the timers that have none here."""
        rows = self._rows(timers)
        found = self.lookup(rows)
        return rows.join(found, on=rows.columns, how="anti", maintain_order="left") if found.height else rows

    def fetch_all(self) -> None:
        self.settle()
        super().fetch_all()
        self._note_first()

    def append(self, frame: pl.DataFrame) -> None:
        super().append(frame)
        self._note_first()

    def has_columns_of(self, chunk: Chunk) -> bool:
        """The end of time marks removed rows, so no timer of that time is spilled; a damaged checkpoint may have one."""
        return super().has_columns_of(chunk) and not (chunk.table.column(_TIME).to_numpy() > LAST_TICK).any()

    def restore_chunk(self, chunk: Chunk) -> None:
        super().restore_chunk(chunk)
        self._note_first()

    def _note_first(self) -> None:
        self._queue.first_spilled_us = min((run.first(_TIME) for run in self._searchable()), default=NEVER_US)

    def _load(self, until_us: int) -> None:
        """Make objects of the timers that are due first, by `until_us` at the latest, but not of too many."""
        self.settle()
        found = [(run, at) for run in self._searchable() if len(at := run.until(_TIME, until_us))]
        if sum(len(at) for _, at in found) > TIMERS_MAX:
            found = [(run, at) for run, at in self._first_of(found) if len(at)]
        self._revive(self._removed(found))
        self._note_first()

    def _first_of(self, found: Sequence[tuple[TableRun, Int64s]]) -> list[tuple[TableRun, Int64s]]:
        """Return about `TIMERS_MAX` of these positions: those of the earliest times, according to a sample."""
        total = sum(len(at) for _, at in found)
        sample = np.sort(np.concatenate([run.times(_TIME)[at[:: total // TIMERS_MAX]] for run, at in found]))
        before, first = int(sample[len(sample) * TIMERS_MAX // total]), self._queue.first_spilled_us
        if before > first:
            return [(run, at[run.times(_TIME)[at] < before]) for run, at in found]
        taken, room = [], TIMERS_MAX  # of the first time alone there are too many
        for run, at in found:
            of_first = at[run.times(_TIME)[at] == first][:room]
            taken.append((run, of_first))
            room -= len(of_first)
        return taken

    def _restore_objects(self, table: pa.Table) -> None:
        self._queue.restore(zip(to_list(table.column(_TIME)), self._encoding.keys(table), strict=True))


def _value_fields(state: State) -> list[pa.Field[Any]]:
    """Return the columns of a state at rest, without its key."""
    assert state.type is not None
    fields: list[pa.Field[Any]] = [pa.field("value", state.type)]
    if isinstance(state, ExpiringState):
        fields.insert(0, pa.field(state.written_column, pa.int64()))
    if isinstance(state, ListState):
        fields.insert(0, pa.field("namespace", pa.int64()))
    elif isinstance(state, MapState):
        assert state.key_type is not None
        fields.insert(0, pa.field("namespace", state.key_type))
    return fields


def can_spill(state: State, encoding: KeyEncoding) -> bool:
    """Whether the entries of a state can be rows: not if they are pickled, or of types that polars does not hold."""
    if not state.is_keyed or state.type is None:
        return False
    if isinstance(state, MapState) and state.key_type is None:
        return False
    return can_spill_keys(encoding) and all(is_held_by_polars(field.type) for field in _value_fields(state))


def can_spill_keys(encoding: KeyEncoding) -> bool:
    return all(is_held_by_polars(field.type) for field in encoding.flat_fields)
