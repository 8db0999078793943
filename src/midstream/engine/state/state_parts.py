"""State at rest: every piece of operator state is an Arrow table with a rule for redistributing it.

A snapshot of an operator is a dict of named parts. A part's `chunks` are immutable: they may be written to a file by an
I/O thread while the operator continues, and a chunk that an earlier checkpoint has already stored is recognised by its
id and not written again. If rows of such a chunk are removed, their positions are stored with it, in chunks that are
called deletion vectors: what a checkpoint writes follows from what has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.engine.core.errors import InvariantError, StorageError

if TYPE_CHECKING:
    from midstream.engine.state.columnar import FrameRun

KEY_GROUP = "__key_group"
REMOVED: Final = pa.schema([pa.field("position", pa.uint32())])
"""The column of a deletion vector."""


class Redistribute(Enum):
    """How the rows of a part reach the new subtasks when the parallelism changes."""

    KEYED = "keyed"
    """Rows carry their key group in column `__key_group` (int32); each goes to its owner."""
    SPLIT = "split"
    """All rows of all subtasks, distributed round-robin."""
    UNION = "union"
    """Every subtask gets all rows of all subtasks."""
    BROADCAST = "broadcast"
    """Every subtask holds the same rows; each new one gets one full copy."""
    NEWEST = "newest"
    """Every subtask holds a version of the same rows as one chunk, whose id begins with the time of the version in 15
    digits; each new one gets the newest version."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """An immutable table, and which of its rows have been removed since it was made.

    `id` is unique for as long as the job lives; the same id means the same rows, whichever have been removed. A chunk
    without a table is only a reference: a completed checkpoint has it in a file.
    """

    id: str
    made: pa.Table | Callable[[], pa.Table] | None = None
    """The table, or a function that makes it, so that a checkpoint has one table at a time in memory."""
    removed: tuple[Chunk, ...] = ()
    """Its deletion vectors; only chunks of keyed state have some."""
    key_groups: range | None = None
    """The key groups of the subtask, if rows of others may be among those that have been removed."""
    whole: WholeChunk | None = None
    """In a restore: the chunk as it is stored, if most of its rows are restored. A state that holds all of it refers to it
    in its next snapshot, instead of storing the rows again."""

    @property
    def stored(self) -> pa.Table:
        """All rows, which are stored once. Raises InvariantError if the chunk is only a reference."""
        if self.made is None:
            raise InvariantError(f"chunk {self.id} was released, but no completed checkpoint has it")
        return self.made() if callable(self.made) else self.made

    @property
    def table(self) -> pa.Table:
        """The rows that have not been removed. Raises InvariantError if the chunk is only a reference."""
        return without_removed(self.stored, [each.stored for each in self.removed], f"chunk {self.id}")


@dataclass(frozen=True, slots=True)
class WholeChunk:
    """A chunk of keyed state as it is stored, more than half of whose rows a subtask restores. So no other subtask does."""

    id: str
    made: pa.Table | Callable[[], pa.Table]
    """All rows, or a function that makes the table of them."""
    groups: npt.NDArray[np.int32]
    """The key group of each row."""
    removed: tuple[Chunk, ...]
    """The deletion vectors of the checkpoint."""
    left: npt.NDArray[np.bool_] | None
    """Which rows these do not have; None for all."""
    kept: npt.NDArray[np.bool_] | None
    """Which of the rows that are left belong to the subtask; None if all rows of the chunk do."""
    key_groups: range | None = None
    """The key groups of the subtask, if the chunk has rows of others."""
    run: FrameRun | None = None
    """The run of this process that the chunk was made of."""

    @property
    def table(self) -> pa.Table:
        """All rows."""
        return self.made() if callable(self.made) else self.made


class StoredForm(msgspec.Struct, frozen=True):
    """How a state was declared by the program that has stored it."""

    name: str
    """The name of its attribute."""
    columns: bytes
    """The encoded result of `DeclaredState.form`."""


@dataclass(frozen=True, slots=True)
class StatePart:
    redistribute: Redistribute
    chunks: tuple[Chunk, ...]
    stored: StoredForm | None = None
    """In a restore: how the state was declared, if it has to be converted to what is declared now."""

    def table(self) -> pa.Table:
        """Return all chunks as one table. Raises ValueError if there are none."""
        return pa.concat_tables([chunk.table for chunk in self.chunks])


def check_columns(table: pa.Table, expected: Mapping[str, pa.DataType], where: str) -> None:
    """Check that restored state has these columns, with these types and without nulls. Raises StorageError."""
    for name, kind in expected.items():
        index = table.schema.get_field_index(name)
        if index < 0:
            problem = f"has the columns {', '.join(table.column_names)}, and not one column {name!r}"
        elif table.schema.field(index).type != kind:
            problem = f"has a column {name!r} of the type {table.schema.field(index).type} instead of {kind}"
        elif table.column(index).null_count:
            problem = f"has {table.column(index).null_count} nulls in column {name!r}, which never has any"
        else:
            continue
        raise StorageError(
            f"{where}: the state in the checkpoint {problem}: it is damaged, or midstream has not written it. To go back "
            "to an older checkpoint, name it with --from"
        )


def without_removed(table: pa.Table, vectors: Sequence[pa.Table], where: str) -> pa.Table:
    """Return the rows that are in none of the deletion vectors. Raises what `rows_left` raises."""
    return filtered(table, rows_left(table.num_rows, vectors, where)) if vectors else table


def rows_left(rows: int, vectors: Sequence[pa.Table], where: str) -> npt.NDArray[np.bool_]:
    """Return which of a chunk's rows are in none of its deletion vectors.

    Raises StorageError if these are damaged: they have other columns, a position twice or one without a row.
    """
    is_left = np.ones(rows, np.bool_)
    for vector in vectors:
        check_columns(vector, {field.name: field.type for field in REMOVED}, where)
        positions = vector.column(0).to_numpy()
        if len(positions) and positions.max() >= rows:
            raise StorageError(
                f"{where}: row {positions.max()} has been removed, according to the checkpoint, and there are "
                f"{rows} rows: it is damaged, or midstream has not written it. To go back to an older "
                "checkpoint, name it with --from"
            )
        is_left[positions] = False
    removed = sum(vector.num_rows for vector in vectors)
    if rows - np.count_nonzero(is_left) != removed:
        raise StorageError(
            f"{where}: {removed} rows have been removed, according to the checkpoint, some of them twice: it is damaged, "
            "or midstream has not written it. To go back to an older checkpoint, name it with --from"
        )
    return is_left


def filtered(table: pa.Table, keep: npt.NDArray[np.bool_]) -> pa.Table:
    """Return some rows of a table, in their order."""
    try:
        return table.filter(pa.array(keep))
    except pa.ArrowNotImplementedError:  # of string_view and binary_view, as users may declare their state
        edges = np.flatnonzero(np.diff(keep, prepend=False, append=False)).tolist()
        return pa.concat_tables(
            [table.slice(low, high - low) for low, high in zip(edges[::2], edges[1::2], strict=True)]
        )
