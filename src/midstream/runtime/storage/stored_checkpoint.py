"""Checkpoints as users name them, by a path, and their state as frames."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import polars as pl
from polars.io.plugins import register_io_source

from midstream.engine.checkpoint.store import checkpoint_path, load
from midstream.engine.checkpoint.stored_in_flight import rows_in_flight
from midstream.engine.checkpoint.stored_states import Readable, chosen_state, stored_states
from midstream.engine.core.errors import ConfigError, StorageError
from midstream.engine.core.interfaces import Storage
from midstream.engine.core.urls import below, parted
from midstream.runtime.storage.file_storage import FileStorage

if TYPE_CHECKING:
    from midstream.engine.checkpoint.metadata import CheckpointMetadata

_CHECKPOINT: Final = re.compile(r"((?P<root>.*)/)?(?P<name>chk-\d+)(/_metadata)?/?")


class OpenedCheckpoint(NamedTuple):
    storage: Storage
    root: str
    metadata: CheckpointMetadata

    @property
    def path(self) -> str:
        return below(self.root, checkpoint_path(self.metadata.checkpoint_id))

    @property
    def states(self) -> list[Readable]:
        return [*stored_states(self.metadata, self.path), *rows_in_flight(self.metadata)]

    def state(self, uid: str, name: str | None) -> Readable:
        """Return the state of that name. Raises ConfigError with the names that exist."""
        return chosen_state(self.states, uid, name, self.path)


def open_checkpoint(where: str) -> OpenedCheckpoint:
    """Open a checkpoint. `where`: a chk-N directory, its metadata file, a savepoint, or a job's checkpoint directory.

    Raises StorageError if there is no checkpoint or its metadata is damaged.
    """
    directory, parameters = parted(where)
    match = _CHECKPOINT.fullmatch(directory)
    root, which = (_root(match["root"]) + parameters, match["name"]) if match else (where, "latest")
    storage = FileStorage(root)
    if not storage.list(""):
        raise StorageError(f"{root}: this directory does not exist or is empty")
    try:
        return OpenedCheckpoint(storage, root, load(storage, None, which))
    except StorageError as error:
        raise StorageError(f"{root}: {error}") from error


def _root(path: str | None) -> str:
    return "." if path is None else path or "/"


def read_state(path: str, uid: str, name: str | None = None) -> pl.LazyFrame:
    """Read a state of a job from a checkpoint or savepoint, as a table with a row per entry.

    `path`: a savepoint, a checkpoint (chk-N), or a job's checkpoint directory, which means its newest checkpoint; a
    path or a storage URL.
    `uid`: the uid of the operator, as `midstream state PATH` lists it.
    `name`: the state's name; it may be left out if the operator has only one.

    Return a polars LazyFrame. State of a process function has the key columns, `position` (in a list) or `map_key` (in
    a map), and a column with the name of the state; timers have the key columns and `time`; a table has its own columns;
    and an operator such as a window or a join has the columns with which it keeps its rows. `in_flight` has the rows that
    the operator had not processed (`in_flight:UID` those of operator UID, if it has several inputs). Values of a state
    without a type are pickled bytes, which are not read. A name that a key column already has ends with `_`.

    The files are read when the frame is collected, those of one subtask at a time. A running job deletes the files of
    old checkpoints: make a savepoint of it to read for longer.

    Raises StorageError if there is no checkpoint or it is damaged, ConfigError if it has no such state.

        waiting = read_state("savepoints/orders", "open-orders", "ordered_at")
        print(waiting.filter(pl.col("order") == 17).collect())
    """
    if not isinstance(path, str):
        raise ConfigError(f"read_state: the path is a string, such as 'state/orders', not {path!r}")
    opened = open_checkpoint(path)
    return rows_of(opened, opened.state(uid, name))


def rows_of(opened: OpenedCheckpoint, state: Readable) -> pl.LazyFrame:
    """Return the rows of a state, which are read when the frame is collected."""
    storage, where = opened.storage, opened.path

    def rows(
        with_columns: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, batch_size: int | None
    ) -> Iterator[pl.DataFrame]:
        for frame in state.frames(storage, where):
            if n_rows is not None:
                frame = frame.head(n_rows)
                n_rows -= frame.height
            if predicate is not None:
                frame = frame.filter(predicate)
            yield frame if with_columns is None else frame.select(with_columns)
            if n_rows == 0:
                return

    return register_io_source(rows, schema=state.empty_frame(storage, where).schema)
