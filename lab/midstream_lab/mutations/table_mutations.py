"""Known bugs of tables as state, to be put back on purpose: see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa

from midstream.engine.checkpoint import state_files
from midstream.engine.checkpoint.state_files import location_of
from midstream.engine.core.arrow_types import to_list
from midstream.engine.protocol.messages import ChunkHandle
from midstream.engine.state import table_runs
from midstream.engine.state.code_index import Index
from midstream.engine.state.columnar import FrameRun
from midstream.engine.state.state_parts import Chunk
from midstream.engine.state.table_runs import TableRun
from midstream.engine.state.table_state import TableState
from midstream.engine.state.tombstones import DeletionVector, TombstonedRun
from midstream_lab.mutations.mutation import Mutation, Replacements
from midstream_lab.scenarios import targeted


def snapshot_of_before() -> Replacements:
    """A snapshot has what the one before had, whatever has been put in since."""
    original = TableState._hold

    def hold(self: Any, *arguments: Any) -> None:
        planned = vars(self).get("_planned")
        original(self, *arguments)
        self._planned = planned

    return [(TableState, "_hold", hold)]


def last_subtask_only() -> Replacements:
    """Of the tables of several old subtasks only the last is restored."""
    original = TableState.restore
    return [(TableState, "restore", lambda self, chunks, where: original(self, chunks[-1:], where))]


def upsert_adds() -> Replacements:
    """What a table had of a key stays when it is replaced."""
    return [(TableState, "upsert", TableState.append)]


def removed_rows_are_stored() -> Replacements:
    """A snapshot holds rows that were removed since their run was made."""
    return [(TableRun, "living", property(lambda run: run))]


class _UntilWritten(FrameRun):
    """The live rows of a run, whichever they are when they are read."""

    def __init__(self, run: TombstonedRun) -> None:
        self._run = run
        self.rows, self.chunk_id, self.groups = run.rows, None, None

    @property
    def frame(self) -> pl.DataFrame:  # type: ignore[override]  # it is never assigned
        run = self._run
        return run.frame if run.there is None else run.frame.filter(pl.Series(run.there))


def rows_removed_until_written() -> Replacements:
    """A run changes between the snapshot and the moment at which it is written: rows removed meanwhile are not stored."""
    return [(TombstonedRun, "living", property(_UntilWritten))]


def removals_are_not_restored() -> Replacements:
    """A restore has all rows of a chunk, those that were removed since it was stored, too."""
    original = state_files._keyed_rows_of

    def keyed_rows_of(tables: Any, found: Any, chunk: ChunkHandle, owned: Any, where: str) -> Chunk | None:
        return original(tables, found, msgspec.structs.replace(chunk, removed=()), owned, where)

    return [(state_files, "_keyed_rows_of", keyed_rows_of)]


def removals_after_the_selection() -> Replacements:
    """The positions of removed rows count those rows of a chunk that a subtask has, not all of them."""
    original = state_files._keyed_rows_of

    def keyed_rows_of(tables: Any, found: Any, chunk: ChunkHandle, owned: Any, where: str) -> Chunk | None:
        if not chunk.removed or owned.key_groups is None:
            return original(tables, found, chunk, owned, where)
        kept = original(tables, found, msgspec.structs.replace(chunk, removed=()), owned, where)
        if kept is None:
            return None
        removed = {position for each in chunk.removed for position in to_list(tables[location_of(each)].column(0))}
        rows = [row for row in range(kept.table.num_rows) if row not in removed]
        return Chunk(f"{kept.id}-", kept.table.take(pa.array(rows, pa.int64())))

    return [(state_files, "_keyed_rows_of", keyed_rows_of)]


def newest_removals_only() -> Replacements:
    """A checkpoint has only those removals of a run that the one before did not have."""
    original = TombstonedRun.deletion_vectors
    return [(TombstonedRun, "deletion_vectors", lambda self, ids: original(self, ids)[-1:])]


def removals_of_before() -> Replacements:
    """A deletion vector that was merged with another one has the positions of the first alone."""
    original = DeletionVector.positions

    def positions(self: Any) -> Any:
        if isinstance(self._found, tuple) and isinstance(self._found[0], DeletionVector):
            self.rows, self._found = self._found[0].rows, self._found[:1]
        return original(self)

    return [(DeletionVector, "positions", positions)]


def removed_rows_are_due_again() -> Replacements:
    """Rows that were removed by their keys are due like all others."""

    def until(self: Any, column: str, tick: int) -> Any:
        return np.flatnonzero(self.frame.get_column(column).to_physical().to_numpy() <= tick)

    return [(TableRun, "until", until)]


def due_before_not_at() -> Replacements:
    """What is due at the very time that was requested stays."""
    original = TableRun.until
    return [(TableRun, "until", lambda self, column, tick: original(self, column, tick - 1))]


def newest_run_only() -> Replacements:
    """Of the rows of a key only those are found that were added last."""
    original = TableState._found
    return [(TableState, "_found", lambda self, keys: original(self, keys)[-1:])]


def positions_of_before() -> Replacements:
    """Runs that are merged are searched by the positions that their rows had before."""

    def merged(runs: Sequence[TableRun], *, by_code: bool = False) -> TableRun:
        made = original(runs, by_code=by_code)
        if made._index is not None:
            indexes = [run.living_index() for run in runs]
            codes = np.concatenate([index.codes for index in indexes if index is not None])
            rows = np.concatenate([index.rows for index in indexes if index is not None])
            order = codes.argsort(kind="stable")
            made._index = Index.of(codes[order], rows[order])
        return made

    original = table_runs.merged
    return [(table_runs, "merged", merged)]


def codes_that_were_removed() -> Replacements:
    """A run that is written again without removed rows is searched as if they were there."""
    return [(TableRun, "living_index", lambda run: run._index)]


MUTATIONS: Final[Mapping[str, Mutation]] = {
    "table_of_before": Mutation(
        "a table is stored as it was at the checkpoint before", snapshot_of_before, targeted.in_tables
    ),
    "table_of_the_last": Mutation(
        "of the tables of several subtasks one is restored", last_subtask_only, targeted.in_tables
    ),
    "upsert_adds": Mutation("rows that are replaced stay", upsert_adds, targeted.in_tables),
    "removed_rows_are_stored": Mutation(
        "rows that were removed from a table are stored", removed_rows_are_stored, targeted.in_tables
    ),
    "rows_removed_until_written": Mutation(
        "rows that are removed after a snapshot are not in it", rows_removed_until_written, targeted.in_tables
    ),
    "removals_are_not_restored": Mutation(
        "a restore has rows that were removed after they were stored", removals_are_not_restored, targeted.in_tables
    ),
    "removals_after_the_selection": Mutation(
        "removed rows are counted among those that a subtask has of a chunk",
        removals_after_the_selection,
        targeted.in_tables,
    ),
    "newest_removals_only": Mutation(
        "a checkpoint has only the newest removals of what is stored", newest_removals_only, targeted.in_tables
    ),
    "removals_of_before": Mutation(
        "merged deletion vectors have the positions of the first", removals_of_before, targeted.in_tables
    ),
    "removed_rows_are_due_again": Mutation(
        "rows that were removed are due again", removed_rows_are_due_again, targeted.in_tables
    ),
    "due_before_not_at": Mutation(
        "what is due at a time stays until a later one", due_before_not_at, targeted.in_tables
    ),
    "newest_run_only": Mutation("of a key the oldest rows are not found", newest_run_only, targeted.in_tables),
    "positions_of_before": Mutation(
        "a merged run is searched by positions of before", positions_of_before, targeted.in_tables
    ),
    "codes_that_were_removed": Mutation(
        "a run that was written again is searched for rows that it has not", codes_that_were_removed, targeted.in_tables
    ),
}
