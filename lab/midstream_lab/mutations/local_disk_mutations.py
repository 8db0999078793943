"""Known bugs of state on local disks, to be put back on purpose: see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import polars as pl

from midstream.engine.core.batches import to_polars
from midstream.engine.core.interfaces import LocalDisk
from midstream.engine.state import columns_on_disk
from midstream.engine.state.columnar import Columns
from midstream.engine.state.session_index import IndexedRun
from midstream.engine.state.spilled_state import SpilledEntries, SpilledRows, SpilledTimers
from midstream.engine.state.table_runs import TableRun
from midstream.engine.worker import state_memory
from midstream_lab.jobs.expiring import EXPIRING
from midstream_lab.mutations.mutation import Mutation, Replacements, named
from midstream_lab.scenarios import targeted
from midstream_lab.scenarios.scenario import Scenario, draw


def on_disk(seed: int) -> Scenario:
    """Tables, joins and sessions lie on local disks while slots die."""
    if seed % 3 == 0:
        return replace(targeted.in_tables(seed), on_disk=True)
    topology = "join" if seed % 3 == 1 else "late_session"
    drawn = draw(seed, topology=topology, parallelism=3, rescale_to=2, faults=("kill_slot",), rows=100)
    return replace(drawn, interval_s=0.002, key_groups=16, on_disk=True, small_chunks=True)


def columns_of_another_run() -> Replacements:
    """A run gets the columns of the one that was moved before, if they fit."""
    original = columns_on_disk.on_disk
    before: list[Columns] = []

    def moved(columns: Columns, disk: LocalDisk) -> Columns:
        made = original(columns, disk)
        others, before[:] = [*before], [made]
        return next((other for other in others if _form(other) == _form(made)), made)

    return [(state_memory, "on_disk", moved)]


def _form(columns: Columns) -> object:
    return [(each.schema, each.height) if isinstance(each, pl.DataFrame) else each is None for each in columns]


def last_row_is_not_written() -> Replacements:
    """A file ends before the last row, in whose place is the one before."""
    original = columns_on_disk.on_disk

    def without_last(column: Any) -> Any:
        rows = np.minimum(np.arange(len(column)), max(0, len(column) - 2))
        return column[rows]

    def moved(columns: Columns, disk: LocalDisk) -> Columns:
        return tuple(each if each is None else without_last(each) for each in original(columns, disk))

    return [(state_memory, "on_disk", moved)]


def removed_rows_return() -> Replacements:
    """A run that is moved has the rows again that were removed from it."""
    original = TableRun.move

    def move(self: Any, columns: Columns) -> None:
        original(self, columns)
        if self.there is not None:
            self.put_back(None, self.height)

    return [(TableRun, "move", move)]


def rows_for_codes() -> Replacements:
    """The index of a run that is moved has its parts exchanged."""
    original = TableRun.move

    def move(self: Any, columns: Columns) -> None:
        original(self, columns)
        if self._index is not None:
            index = self._index
            codes = index.codes.view(np.int64) % self.height
            self._index = type(index)(index.rows.view(np.uint64), codes, index.is_distinct)

    return [(TableRun, "move", move)]


def hashes_of_before() -> Replacements:
    """The hashes of a run of sessions that is moved are in the opposite order."""
    original = IndexedRun.move

    def move(self: Any, columns: Columns) -> None:
        original(self, columns)
        self.hashes = self.hashes[::-1]

    return [(IndexedRun, "move", move)]


def spilled(seed: int) -> Scenario:
    """Entries and timers of process functions are rows while slots die and the job is rescaled."""
    topology = ("typed", "clocks", EXPIRING)[seed % 3]
    drawn = draw(seed, topology=topology, parallelism=2, rescale_to=3, faults=("kill_slot",), rows=150)
    return replace(drawn, interval_s=0.002, key_groups=16, on_disk=True)


def fetched_entries_stay_rows() -> Replacements:
    """What a batch fetches is not removed from the rows."""

    def fetch(self: Any, keys: Any) -> None:
        held = self._state.entries()
        missing = [key for key in dict.fromkeys(keys) if key not in held]
        if missing:
            self._revive(self.lookup(to_polars(self._encoding.flat_batch(missing))))

    return [(SpilledEntries, "fetch", fetch)]


def entries_are_cut() -> Replacements:
    """The rows of one entry may lie in two chunks, of which the second supersedes the first."""
    return [(SpilledEntries, "_keeps_keys_together", False)]


def spilled_in_small_chunks(seed: int) -> Scenario:
    return replace(spilled(seed), small_chunks=True)


def spilled_rows_are_not_stored() -> Replacements:
    """A checkpoint lacks what is spilled."""
    return [(SpilledRows, "chunks", lambda *_: None)]


def spilled_timers_wait() -> Replacements:
    """Spilled timers are not known to be due."""
    return [(SpilledTimers, "_note_first", lambda self: None)]


def deleted_timers_stay_rows() -> Replacements:
    """Spilled timers fire although they have been deleted."""
    return [(SpilledTimers, "settle", lambda self: None)]


def some_due_timers_are_dropped() -> Replacements:
    """Of several runs with spilled timers that are due, those of the first are restored."""
    original = SpilledTimers._revive

    def revive(self: Any, rows: pl.DataFrame) -> None:
        original(self, rows.head(max(1, rows.height - 1)))

    return [(SpilledTimers, "_revive", revive)]


MUTATIONS: Final = named(
    Mutation("a run on disk has the rows of another one", columns_of_another_run, on_disk),
    Mutation("a run on disk lacks its last row", last_row_is_not_written, on_disk),
    Mutation("removed rows are back when their run is moved", removed_rows_return, on_disk),
    Mutation("the index of a table on disk is exchanged", rows_for_codes, on_disk),
    Mutation("the hashes of sessions on disk are in another order", hashes_of_before, on_disk),
    Mutation("an entry is an object and a row", fetched_entries_stay_rows, spilled),
    Mutation("a checkpoint lacks spilled rows", spilled_rows_are_not_stored, spilled),
    Mutation("a long run of spilled rows is cut within an entry", entries_are_cut, spilled_in_small_chunks),
    Mutation("spilled timers are late", spilled_timers_wait, spilled),
    Mutation("deleted timers that are spilled fire", deleted_timers_stay_rows, spilled),
    Mutation("one of the spilled timers is dropped", some_due_timers_are_dropped, spilled),
)
