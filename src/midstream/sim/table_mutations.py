"""Known bugs of tables as state, to be put back on purpose: see `sim.mutations`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from midstream.sim import regions
from midstream.sim.mutation import Mutation, Replacements
from midstream.state.table import TableState


def snapshot_of_before() -> Replacements:
    """A snapshot has what the one before had, whatever has been put in since."""
    original = TableState._hold

    def hold(self: Any, *arguments: Any) -> None:
        frozen = vars(self).get("_frozen")
        original(self, *arguments)
        self._frozen = frozen

    return [(TableState, "_hold", hold)]


def last_subtask_only() -> Replacements:
    """Of the tables of several old subtasks only the last is restored."""
    original = TableState.thaw
    return [(TableState, "thaw", lambda self, chunks, where: original(self, chunks[-1:], where))]


MUTATIONS: Final[Mapping[str, Mutation]] = {
    "table_of_before": Mutation(
        "a table is stored as it was at the checkpoint before", snapshot_of_before, regions.in_tables
    ),
    "table_of_the_last": Mutation(
        "of the tables of several subtasks one is restored", last_subtask_only, regions.in_tables
    ),
}
