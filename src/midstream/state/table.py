"""Keyed state in columns: one table of the rows of all keys of a subtask.

A declaration is a class attribute; when the operator opens, its function gets a bound copy of it, which holds rows. The
rows lie in frames that never change: a snapshot refers to them, and a large frame is stored only once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import polars as pl
import pyarrow as pa

from midstream.core.batches import empty_batch, frame_schema, from_polars, to_polars
from midstream.core.errors import JobError, SchemaError, StorageError
from midstream.core.schemas import SchemaLike, as_schema
from midstream.core.seams import Ids
from midstream.state.columnar import Run, StateForm, freeze
from midstream.state.declared import DeclaredState
from midstream.state.parts import KEY_GROUP, Chunk

PIECES_MAX: Final = 64
"""A frame in more pieces of memory than this is copied into one, since every operation pays for each piece."""


class TableState(DeclaredState):
    """A polars DataFrame with the rows of all keys of this subtask, empty at first; for functions on batches.

    `schema`: the columns, as an Arrow or polars schema or as `{"column": type}`. Among them are those that the stream
    is keyed by (of two streams: the first one's), with their types; by them the rows are redistributed when the job
    resumes at another parallelism. So a table may hold rows only of keys that the function was given here: others fail
    the next checkpoint with JobError.

    Raises SchemaError for an invalid schema, and when the function is used for a stream with other keys.

        >>> class Latest(KeyedBatchFunction):
        ...     latest = TableState({"user": str, "price": int})
        ...     def process(self, rows, ctx):
        ...         self.latest.frame = pl.concat([self.latest.frame, rows]).unique("user", keep="last")
        >>> latest = testing.harness(Latest(), orders.schema, orders.schema, key="user")
        >>> _ = latest.process([{"user": "ann", "price": 3}, {"user": "ann", "price": 4}])
        >>> latest.state["latest"].rows()
        [('ann', 4)]
    """

    kind = "table"

    def __init__(self, schema: SchemaLike) -> None:
        self.schema = as_schema(schema, "TableState")
        if KEY_GROUP in self.schema.names:
            raise SchemaError(f"TableState: a column cannot be called {KEY_GROUP!r}; rename it")
        self.name = ""
        self._runs: list[Run] | None = None
        # The following attributes are set when the state is bound.
        self._key_groups: range
        self._form: StateForm
        self._empty: pl.DataFrame
        self._is_exact: bool
        """Whether polars has exactly the types of the schema, not finer ones."""
        self._whole: pl.DataFrame | None
        """All rows in one frame; None until it is first requested."""
        self._frozen: Callable[[], tuple[Chunk, ...]] | None
        """The result of the last snapshot, which is reused until a row changes."""

    @property
    def frame(self) -> pl.DataFrame:
        """All rows; those of a key are in the order in which they were added.

        Assign another frame to replace them: its columns must be those of the schema, in any order. Changing a frame in
        place has no effect on the state. Raises SchemaError for another frame, JobError for a row without its key.
        """
        runs = self._bound_runs()
        if self._whole is None:
            self._whole = pl.concat([run.frame for run in runs], rechunk=False) if runs else self._empty
        return self._whole.clone()

    @frame.setter
    def frame(self, frame: pl.DataFrame) -> None:
        self._bound_runs()
        whole = self._conforming(frame)
        self._hold([Run(whole)] if whole.height else [], whole)

    def append(self, frame: pl.DataFrame) -> None:
        """Add rows at the end.

        Unlike assigning to `frame`, this does not store a large table again in each checkpoint.

        `frame`: a polars DataFrame with the columns of the schema, in any order.

        Raises SchemaError for another frame, JobError for a row without its key.

            def process(self, rows, ctx):
                self.waiting.append(rows)
        """
        runs = list(self._bound_runs())
        rows = self._conforming(frame)
        if not rows.height:
            return
        # Each run is more than twice as long as the next: there are few, and the long ones seldom change.
        while runs and runs[-1].frame.height <= 2 * rows.height:
            rows = pl.concat([runs.pop().frame, rows], rechunk=True)
        self._hold([*runs, Run(rows)])

    def _hold(self, runs: Sequence[Run], whole: pl.DataFrame | None = None) -> None:
        self._runs, self._whole, self._frozen = list(runs), whole, None

    def _bound_runs(self) -> list[Run]:
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
        for key in self._form.keys:
            if frame.get_column(key).null_count():
                raise JobError(
                    f"{where}: key column {key!r} is null in some row; a row without its key belongs to no subtask"
                )
        return frame.rechunk() if max(frame.n_chunks("all")) > PIECES_MAX else frame.clone()

    # ---- for the operator ----

    def type_text(self) -> str:
        return ", ".join(f"{field.name} {field.type}" for field in self.schema)

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
        state._form = StateForm(self.schema, tuple(keys), max_parallelism)
        state._empty = to_polars(empty_batch(self.schema))
        state._is_exact = frame_schema(state._empty) == self.schema
        state._hold([])
        return state

    def freeze(self, ids: Ids, where: str) -> Callable[[], tuple[Chunk, ...]] | None:
        """Return a function that makes chunks of all rows on the I/O pool; None if there are none.

        It raises JobError for a row whose key belongs to another subtask.
        """
        runs, form, owned = self._bound_runs(), self._form, self._key_groups
        if not runs:
            return None
        if self._frozen is None:
            chunks = freeze([(0, runs)], form, ids)

            def owned_chunks() -> tuple[Chunk, ...]:
                made = chunks()
                for chunk in made:
                    _check_owner(chunk.table, form.keys, owned, f"{where}: state {self.name!r}")
                return made

            self._frozen = owned_chunks
        return self._frozen

    def thaw(self, chunks: Sequence[Chunk], where: str) -> None:
        """Restore such chunks, of one old subtask or several. Raises StorageError if they have other columns."""
        whole = self._thawed(chunks, where)
        self._hold([Run(whole)] if whole.height else [], whole)

    def _thawed(self, chunks: Sequence[Chunk], where: str) -> pl.DataFrame:
        frames = []
        for chunk in chunks:
            table = chunk.table.drop_columns([KEY_GROUP])
            if not table.schema.equals(self.schema):
                stored = ", ".join(f"{field.name} {field.type}" for field in table.schema)
                raise StorageError(
                    f"{where}: state {self.name!r} in the checkpoint has the columns {stored}; the declared columns are "
                    f"{self.type_text()}. Declare them as they were, or give the operator a new uid to start without state"
                )
            frames.append(to_polars(table))
        return pl.concat(frames, rechunk=True)


def _check_owner(table: pa.Table, keys: Sequence[str], owned: range, where: str) -> None:
    groups = table.column(KEY_GROUP).to_numpy()
    foreign = np.flatnonzero((groups < owned.start) | (groups >= owned.stop))
    if len(foreign):
        row = int(foreign[0])
        key = ", ".join(f"{name}={table.column(name)[row].as_py()!r}" for name in keys)
        raise JobError(
            f"{where} holds {len(foreign)} rows of keys that belong to other subtasks, the first with {key}: at another "
            "parallelism they would be lost or duplicated. Keep a row only under the key that it arrived with"
        )
