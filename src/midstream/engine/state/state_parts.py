"""State at rest: every piece of operator state is an Arrow table with a rule for redistributing it.

A snapshot of an operator is a dict of named parts. A part's `chunks` are immutable: they may be written to a file by an
I/O thread while the operator continues, and a chunk that an earlier checkpoint has already stored is recognised by its
id and not written again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import msgspec
import pyarrow as pa

from midstream.engine.core.errors import InvariantError, StorageError

KEY_GROUP = "__key_group"


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
    """An immutable table. `id` is unique for as long as the job lives; the same id means the same rows.

    A chunk without a table is only a reference: a completed checkpoint has it in a file.
    """

    id: str
    made: pa.Table | None = None

    @property
    def table(self) -> pa.Table:
        """The rows. Raises InvariantError if the chunk is only a reference."""
        if self.made is None:
            raise InvariantError(f"chunk {self.id} was released, but no completed checkpoint has it")
        return self.made


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
