"""Keyed state in columns: one table of the rows of all keys of a subtask.

A declaration is a class attribute; when the operator opens, its function gets a bound copy of it, which holds rows. The
rows lie in runs of frames that never change: a snapshot refers to them, and a large frame is stored only once. The rows
of some keys are looked up in each run, so that this costs little however many rows the table holds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple, cast

import numpy as np
import polars as pl
import pyarrow as pa

from midstream.engine.core.batches import empty_batch, frame_schema, from_polars, selected, stacked, to_polars
from midstream.engine.core.errors import JobError, SchemaError, StorageError
from midstream.engine.core.interfaces import Ids
from midstream.engine.core.schemas import SchemaLike, as_schema, field_defaults
from midstream.engine.state import columnar
from midstream.engine.state.columnar import FrameRun, PlannedChunks, StateLayout, nothing_stored, snapshot_runs
from midstream.engine.state.declared_state import DeclaredState
from midstream.engine.state.state_parts import (
    KEY_GROUP,
    Chunk,
    StoredForm,
    WholeChunk,
    check_columns,
    without_removed,
)
from midstream.engine.state.state_upgrade import migrated_rows, upgrade_at_restore
from midstream.engine.state.table_runs import LAST_TICK, TableRun, among, codes_of, compacted, run_frames
from midstream.engine.state.tombstones import Bools, Int64s, distinct

PIECES_MAX: Final = 64
"""A frame in more pieces of memory than this is copied into one, since every operation pays for each piece."""

_EPOCH: Final = datetime(1970, 1, 1)
_EPOCH_UTC: Final = datetime(1970, 1, 1, tzinfo=UTC)


class TableMark(NamedTuple):
    """What a table held, and which rows of each run were live."""

    runs: list[TableRun]
    living: list[tuple[Bools | None, int]]
    whole: pl.DataFrame | None
    planned: PlannedChunks | None


class TableState(DeclaredState):
    """A polars DataFrame with the rows of all keys of this subtask, empty at first; for functions on batches.

    `schema`: the columns, as an Arrow or polars schema or as `{"column": type}`. Among them are those that the stream
    is keyed by (of two streams: the first one's), with their types; by them the rows are redistributed when the job
    resumes at another parallelism. So a table may hold rows only of keys that the function was given here: others fail
    the next checkpoint with JobError.
    `was`: the name of the attribute in older checkpoints, if it was another one.
    `migrate`: makes the frame of these columns of a frame with the rows of an older checkpoint, which has other columns, or
    the name `was`. Rows keep their keys.

    Raises SchemaError for an invalid schema, and when the function is used for a stream with other keys.

    The rows of some keys are looked up (`lookup`), removed (`pop`) or replaced (`upsert`), and those that are due are
    removed (`pop_until`), at a cost that follows from these rows and hardly from all that the table holds. `frame` is all
    of it.

        >>> class Latest(KeyedBatchFunction):
        ...     latest = TableState({"user": str, "price": int})
        ...     def process(self, rows, ctx):
        ...         self.latest.upsert(rows.unique("user", keep="last"))
        >>> latest = testing.harness(Latest(), orders.schema, orders.schema, key="user")
        >>> _ = latest.process([{"user": "ann", "price": 3}, {"user": "ann", "price": 4}])
        >>> latest.state["latest"].rows()
        [('ann', 4)]
    """

    kind = "table"
    _keeps_keys_together: ClassVar[bool] = False
    """Whether the rows of a key, which then follow each other, stay in one run."""

    def __init__(
        self,
        schema: SchemaLike,
        *,
        was: str | None = None,
        migrate: Callable[[pl.DataFrame], pl.DataFrame] | None = None,
    ) -> None:
        self._set_upgrade(was, migrate)
        self.schema = as_schema(schema, "TableState")
        self.defaults = field_defaults(schema)
        if KEY_GROUP in self.schema.names:
            raise SchemaError(f"TableState: a column cannot be called {KEY_GROUP!r}; rename it")
        self.name = ""
        self._runs: list[FrameRun] | None = None
        # The following attributes are set when the state is bound.
        self._key_groups: range
        self._layout: StateLayout
        self._lookup_keys: tuple[str, ...]
        """The columns by which rows are looked up: the key columns."""
        self._empty: pl.DataFrame
        self._is_exact: bool
        """Whether polars has exactly the types of the schema, not finer ones."""
        self._whole: pl.DataFrame | None
        """All rows in one frame; None until it is first requested."""
        self._planned: PlannedChunks | None
        """The chunks of the last snapshot, which are the same until a row changes."""

    @property
    def frame(self) -> pl.DataFrame:
        """All rows; those of a key are in the order in which they were added.

        Assign another frame to replace them: its columns must be those of the schema, in any order. Changing a frame in
        place has no effect on the state. Raises SchemaError for another frame, JobError for a row without its key.
        """
        runs = self._bound_runs()
        if self._whole is None:
            frames = [run.living.frame for run in runs]
            self._whole = pl.concat(frames, rechunk=False) if frames else self._empty
        return self._whole.clone()

    @frame.setter
    def frame(self, frame: pl.DataFrame) -> None:
        self._bound_runs()
        whole = self._conforming(frame)
        self._hold([TableRun(whole)] if whole.height else [], whole)

    def append(self, frame: pl.DataFrame) -> None:
        """Add rows at the end.

        Unlike assigning to `frame`, this does not store a large table again in each checkpoint.

        `frame`: a polars DataFrame with the columns of the schema, in any order.

        Raises SchemaError for another frame, JobError for a row without its key.

            def process(self, rows, ctx):
                self.waiting.append(rows)
        """
        runs = self._table_runs()
        rows = self._conforming(frame)
        if rows.height:
            self._hold([*compacted(runs), TableRun(rows)])

    def lookup(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Return the rows of some keys, in the order in which they were added.

        `keys`: a polars DataFrame with the key columns under the names that they have in the table. Its other columns
        are ignored; a key may be in several of its rows, and one that is null finds nothing.

        Raises SchemaError for a frame without the key columns, or with other types.

            def process2(self, orders, ctx):
                return orders.join(self.users.lookup(orders), on="user")
        """
        frames = [run.rows_at(positions) for run, positions in self._found(keys)]
        return stacked(frames) if frames else self._empty.clone()

    def pop(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Remove the rows of some keys.

        `keys`: a polars DataFrame with the key columns, as for `lookup`.

        Return the rows, in the order in which they were added.

        Raises SchemaError as `lookup` does.

            def process2(self, paid, ctx):
                return paid.join(self.orders.pop(paid), on="order")
        """
        return self._removed(self._found(keys))

    def upsert(self, frame: pl.DataFrame) -> None:
        """Add rows at the end, in place of all rows that the table has of their keys.

        `frame`: a polars DataFrame with the columns of the schema, in any order. If several of its rows have one key, all
        of them are kept: use `unique` first if there should be one.

        Raises what `append` raises.

            def process(self, rows, ctx):
                self.latest.upsert(rows.unique("user", keep="last"))
        """
        self._bound_runs()
        rows = self._conforming(frame)
        if rows.height:
            runs = self._without(self._found(rows))
            self._hold([*compacted(runs), TableRun(rows)])

    def pop_until(self, column: str, time: datetime) -> pl.DataFrame:
        """Remove the rows that are due by `time`.

        `column`: a column of timestamps; a row in which it is null is never due.
        `time`: the latest time that is due, as a rule `ctx.watermark`; in UTC if it has no zone. Nanoseconds within that
        microsecond are due too. `datetime.max` stands for the end of time, `datetime.min` for its beginning.

        Return the rows, in the order in which they were added.

        Raises SchemaError if there is no such column of timestamps.

            def on_watermark(self, ctx):
                return self.waiting.pop_until("at", ctx.watermark)
        """
        self._bound_runs()
        kind = self._empty.schema.get(column)
        if not isinstance(kind, pl.Datetime):
            raise SchemaError(
                f"state {self.name!r} has no column {column!r} of timestamps, by which rows could be due (it has {self.type_text()})"
            )
        until = _ticks(time, kind.time_unit)
        return self._empty.clone() if until is None else self.pop_until_tick(column, until)

    def _found(self, keys: object) -> list[tuple[TableRun, Int64s]]:
        """Return the positions of the rows of these keys in each run that has some."""
        runs = self._searchable()
        requested = self._keys_of(keys)
        codes, is_exact = codes_of(requested)
        codes = distinct(codes)
        found = []
        for run in runs:
            positions = run.positions(codes, self._lookup_keys)
            if len(positions) and not is_exact:  # other keys may have the same hash
                positions = positions[among(run.rows_at(positions, self._lookup_keys), requested)]
            if len(positions):
                found.append((run, positions))
        return found

    def _keys_of(self, keys: object) -> pl.DataFrame:
        where, names = f"state {self.name!r}", ", ".join(self._lookup_keys)
        if not isinstance(keys, pl.DataFrame):
            raise SchemaError(
                f"{where}: keys are looked up with a polars DataFrame that has the columns {names}, not {type(keys).__name__}"
            )
        missing = [name for name in self._lookup_keys if name not in keys.columns]
        if missing:
            raise SchemaError(
                f"{where}: the keys to look up have no column {missing[0]!r} (they have {', '.join(keys.columns)}); "
                "give the key columns the names that they have in the table, with rename() or select()"
            )
        requested, own = selected(keys, self._lookup_keys), selected(self._empty, self._lookup_keys)
        if requested.dtypes != own.dtypes:
            schema = pa.schema([self.schema.field(name) for name in self._lookup_keys])
            requested = to_polars(from_polars(requested, schema, f"{where}: the keys to look up"))
        return requested.drop_nulls() if any(column.null_count() for column in requested) else requested

    def _removed(self, found: Sequence[tuple[TableRun, Int64s]]) -> pl.DataFrame:
        if not found:
            return self._empty.clone()
        rows = stacked([run.rows_at(positions) for run, positions in found])
        self._hold(self._without(found))
        return rows

    def _without(self, found: Sequence[tuple[TableRun, Int64s]]) -> list[TableRun]:
        """Remove rows, and return the runs that are left."""
        for run, positions in found:
            run.remove(positions)
        return [run.tidied() for run in self._searchable() if run.rows]

    def _searchable(self) -> list[TableRun]:
        """Return the runs, none of them very long: to remove a row costs something for each row of its run."""
        runs = self._table_runs()
        if any(run.is_long for run in runs):
            keys = self._layout.keys if self._keeps_keys_together else None
            runs = [piece for run in runs for piece in run.pieces(keys)]
            self._hold(runs, self._whole)
        return runs

    def _table_runs(self) -> list[TableRun]:
        # a Timeline has runs of another kind, which it searches itself
        return cast("list[TableRun]", self._bound_runs())

    def _hold(self, runs: Sequence[FrameRun], whole: pl.DataFrame | None = None) -> None:
        self._runs, self._whole, self._planned = list(runs), whole, None

    def _bound_runs(self) -> list[FrameRun]:
        if self._runs is None:
            raise JobError("TableState only works inside a function on batches, declared as an attribute of its class")
        return self._runs

    def _conforming(self, given: object) -> pl.DataFrame:
        where = f"state {self.name!r}"
        if not isinstance(given, pl.DataFrame):
            raise SchemaError(f"{where} is a table: give it a polars DataFrame, not {type(given).__name__}")
        frame = given
        if not self._is_exact or frame.schema != self._empty.schema:
            frame = to_polars(from_polars(frame, self.schema, where))
        for key in self._layout.keys:
            if frame.get_column(key).null_count():
                raise JobError(
                    f"{where}: key column {key!r} is null in some row; a row without its key belongs to no subtask"
                )
        return frame.rechunk() if max(frame.n_chunks("all")) > PIECES_MAX else frame.clone()

    # ---- for the operator ----

    def pop_until_tick(self, column: str, tick: int) -> pl.DataFrame:
        """Remove and return the rows of which a column of timestamps is at most `tick`, in its own unit."""
        found = [(run, run.until(column, min(tick, LAST_TICK))) for run in self._searchable()]
        return self._removed([(run, positions) for run, positions in found if len(positions)])

    def held_runs(self) -> Sequence[FrameRun]:
        """Return the runs, oldest first. Columns of them may be moved, so `frame` is put together again."""
        self._whole = None
        return self._runs or ()

    def stored_runs(self) -> Iterator[tuple[FrameRun, Callable[[], pa.Table]]]:
        """Yield the runs that are chunks of their own, each with a function that makes the table of its chunk."""
        for run in self._runs or ():
            if run.chunk_id is not None and run.columns():
                yield run, partial(self._layout.table, [(0, run)])

    def mark(self) -> TableMark:
        """Return what the table holds now, for `roll_back`."""
        runs = self._table_runs()
        return TableMark(list(runs), [(run.there, run.rows) for run in runs], self._whole, self._planned)

    def roll_back(self, mark: TableMark) -> None:
        """Undo all changes since `mark`."""
        for run, (there, rows) in zip(mark.runs, mark.living, strict=True):
            if run.there is not there:
                run.put_back(there, rows)
        self._runs, self._whole, self._planned = list(mark.runs), mark.whole, mark.planned

    def type_text(self) -> str:
        return ", ".join(f"{field.name} {field.type}" for field in self.schema)

    def form(self) -> pa.Schema:
        return self.schema

    def check_keys(self, name: str, keys: Sequence[pa.Field[Any]], where: str) -> None:
        """Raise SchemaError if the columns `keys` are not among those of the table."""
        for key in keys:
            index = self.schema.get_field_index(key.name)
            if index < 0:
                raise SchemaError(
                    f"{where}: TableState {name!r} has no column {key.name!r}, which the stream is keyed by "
                    f"(it has {', '.join(self.schema.names)}); add it, its type is {key.type}"
                )
            if self.schema.field(index).type != key.type:
                raise SchemaError(
                    f"{where}: column {key.name!r} of TableState {name!r} is {self.schema.field(index).type}, the key of "
                    f"the stream is {key.type}; declare it with that type"
                )

    def bound(self, name: str, keys: Sequence[str], key_groups: range, max_parallelism: int) -> TableState:
        """Return a copy that holds rows, only those of `key_groups`."""
        state = copy.copy(self)
        state.name = name
        state._key_groups = key_groups
        state._layout = StateLayout(self.schema, tuple(keys), max_parallelism)
        state._lookup_keys = state._layout.keys
        state._empty = to_polars(empty_batch(self.schema))
        state._is_exact = frame_schema(state._empty) == self.schema
        state._hold([])
        return state

    def snapshot(
        self, ids: Ids, where: str, stored_bytes: Callable[[str], int | None] = nothing_stored
    ) -> Callable[[], tuple[Chunk, ...]] | None:
        """Return a function that makes chunks of all rows on the I/O pool; None if there are none.

        Making a chunk raises JobError for a row whose key belongs to another subtask. `stored_bytes`: as of OperatorContext.
        """
        runs, layout, owned = self._bound_runs(), self._layout, self._key_groups
        if not runs:
            return None
        if self._planned is None:
            self._planned = snapshot_runs([(0, runs)], layout, ids)
        chunks = self._planned.beside(stored_bytes)

        def owned_chunks() -> tuple[Chunk, ...]:
            what = f"{where}: state {self.name!r}"
            return tuple(
                chunk
                if chunk.made is None
                else replace(chunk, made=partial(_owned, chunk, layout.keys, owned, what), key_groups=owned)
                for chunk in chunks()
            )

        return owned_chunks

    def restore(self, chunks: Sequence[Chunk], where: str) -> None:
        """Restore such chunks, of one old subtask or several. Raises StorageError if they have other columns.

        A chunk most of whose rows are restored stays what it is: the next checkpoint does not store it again. So do the
        frame and the index of a run that this process has. The rows of others are joined.
        """
        runs: list[TableRun] = []
        short: list[Chunk] = []
        for chunk in chunks:
            whole = chunk.whole
            if whole is None or len(whole.groups) < columnar.OWN_CHUNK_ROWS:
                short.append(chunk)
                continue
            runs += map(TableRun, run_frames(self._restored_frames(short, where)))
            short.clear()
            run = self._held_run(whole)
            if run is None:
                (frame,) = self._restored_frames([Chunk(whole.id, whole.table)], where)
                run = TableRun(frame)
            run.restore(whole)
            runs.append(run)
        runs += map(TableRun, run_frames(self._restored_frames(short, where)))
        self._hold(runs)

    def _held_run(self, whole: WholeChunk) -> TableRun | None:
        """Return the run that a chunk was made of, if this process still has it, and it has the declared columns."""
        run = whole.run
        return run.held_again() if isinstance(run, TableRun) and run.frame.schema == self._empty.schema else None

    def restore_upgraded(self, chunks: Sequence[Chunk], stored: StoredForm, where: str) -> None:
        """Restore chunks of a table that was declared otherwise. Raises SchemaError if `migrate` fails."""
        what = f"{where}: state {self.name!r}"
        upgrade = upgrade_at_restore(self, stored, where)
        tables = [chunk.table.drop_columns([KEY_GROUP]) for chunk in chunks]
        if not upgrade.migrates:
            rows = [to_polars(upgrade.converted_rows(table, what)) for table in tables]
            self._hold_restored(pl.concat(rows, rechunk=True))
            return
        made = migrated_rows(self, tables, upgrade, what)
        try:
            whole = self._conforming(made)
        except (JobError, SchemaError) as error:
            raise SchemaError(f"{where}: what migrate returned does not fit: {error}") from error
        groups = self._layout.groups(whole)
        if whole.height and not self._key_groups.start <= groups.min() <= groups.max() < self._key_groups.stop:
            raise SchemaError(
                f"{what}: migrate returned rows of keys that the table did not have; each row keeps its key"
            )
        self._hold_restored(whole)

    def _hold_restored(self, whole: pl.DataFrame) -> None:
        """Hold rows in a run of their own, which the next checkpoint stores."""
        self._hold([TableRun(whole)] if whole.height else [], whole)

    def _never_null(self) -> Sequence[str]:
        return self._layout.keys

    def _restored_frames(self, chunks: Sequence[Chunk], where: str) -> list[pl.DataFrame]:
        frames = []
        for chunk in chunks:
            table = chunk.table.drop_columns([KEY_GROUP])
            if not table.schema.equals(self.schema):
                stored = ", ".join(f"{field.name} {field.type}" for field in table.schema)
                raise StorageError(
                    f"{where}: state {self.name!r} in the checkpoint has the columns {stored}; the declared columns are "
                    f"{self.type_text()}. Declare them as they were, or give the operator a new uid to start without state"
                )
            check_columns(
                table, {n: self.schema.field(n).type for n in self._never_null()}, f"{where}: state {self.name!r}"
            )
            frames.append(to_polars(table))
        return frames


def _ticks(time: datetime, unit: str) -> int | None:
    """Convert a time to ticks since 1970, rounded down; None for the beginning of time, before which nothing is."""
    if not isinstance(time, datetime):
        raise JobError(f"{time!r} is not a datetime; give ctx.watermark, or another datetime")
    naive = time.replace(tzinfo=None)
    if naive == datetime.min:
        return None
    if naive == datetime.max:
        return LAST_TICK
    since_us = (time - (_EPOCH if time.tzinfo is None else _EPOCH_UTC)) // timedelta(microseconds=1)
    # event time in microseconds has passed all nanoseconds of its own microsecond
    ticks = since_us * 1000 + 999 if unit == "ns" else since_us // (1000 if unit == "ms" else 1)
    return min(ticks, LAST_TICK)


def _foreign(table: pa.Table, owned: range) -> Int64s:
    """Return the positions of rows of other subtasks."""
    groups = table.column(KEY_GROUP).to_numpy()
    return np.flatnonzero((groups < owned.start) | (groups >= owned.stop))


def _owned(chunk: Chunk, keys: Sequence[str], owned: range, where: str) -> pa.Table:
    """Return all rows of a chunk. Raises JobError if those that have not been removed are not all of this subtask."""
    table = chunk.stored
    if not len(_foreign(table, owned)):
        return table
    there = without_removed(table, [each.stored for each in chunk.removed], where)
    foreign = _foreign(there, owned)
    if len(foreign):
        row = int(foreign[0])
        key = ", ".join(f"{name}={there.column(name)[row].as_py()!r}" for name in keys)
        raise JobError(
            f"{where} holds {len(foreign)} rows of keys that belong to other subtasks, the first with {key}: at another "
            "parallelism they would be lost or duplicated. Keep a row only under the key that it arrived with"
        )
    return table
