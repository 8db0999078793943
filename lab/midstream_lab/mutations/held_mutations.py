"""Known bugs of state that an attempt takes from the one before, to be put back on purpose: see
`midstream_lab.mutations.catalog`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from midstream.engine.checkpoint import held_chunks, state_files
from midstream.engine.protocol.messages import ChunkHandle
from midstream.engine.state.state_parts import WholeChunk
from midstream.engine.state.table_runs import TableRun
from midstream.engine.state.tombstones import TombstonedRun
from midstream.engine.worker import deployment
from midstream_lab.mutations.mutation import Mutation, Replacements, named
from midstream_lab.scenarios.targeted_at_rest import taken_over


def any_chunk_of_as_many_rows() -> Replacements:
    """A restore takes a chunk that is not the one which the checkpoint names, and has as many rows."""

    def stored_bytes(handle: ChunkHandle) -> tuple[object, ...]:
        return (handle.rows,)

    return [(held_chunks, "_stored_bytes", stored_bytes)]


def removed_since_the_checkpoint() -> Replacements:
    """A run that is taken over lacks the rows that were removed after the checkpoint."""
    original = TombstonedRun.restore

    def restore(self: Any, whole: WholeChunk) -> None:
        original(self, whole)
        if isinstance(whole.run, TombstonedRun) and whole.run.there is not None:
            self.there = whole.run.there if self.there is None else self.there & whole.run.there
            self.rows = int(self.there.sum())

    return [(TombstonedRun, "restore", restore)]


def rows_of_others_stay() -> Replacements:
    """A subtask has all rows of a chunk, those of the key groups that others have now, too."""
    original = TombstonedRun.restore

    def restore(self: Any, whole: WholeChunk) -> None:
        original(self, whole)
        self.there, self.rows = self._stored

    return [(TombstonedRun, "restore", restore)]


def rows_of_others_come_back() -> Replacements:
    """A checkpoint does not say which rows of a chunk are those of other subtasks."""
    original = TombstonedRun.restore

    def restore(self: Any, whole: WholeChunk) -> None:
        original(self, whole)
        self._stored = self.there, self.rows

    return [(TombstonedRun, "restore", restore)]


def key_groups_of_before() -> Replacements:
    """A chunk of which a subtask has some rows is restored later by all that had rows of it when it was stored."""
    original = state_files.known_chunks

    def known_chunks(handles: Any, parts: Any) -> dict[str, ChunkHandle]:
        stored = {chunk.id: chunk for handle in handles for chunk in handle.extents}
        return {name: stored[name] for name in original(handles, parts)}

    return [(deployment, "known_chunks", known_chunks)]


def half_of_the_key_groups() -> Replacements:
    """A chunk of which a subtask has some rows is later restored by those only that have its lower key groups."""
    original = state_files.known_chunks

    def known_chunks(handles: Any, parts: Any) -> dict[str, ChunkHandle]:
        return {
            name: msgspec.structs.replace(chunk, key_group_max=(chunk.key_group_min + chunk.key_group_max) // 2)
            for name, chunk in original(handles, parts).items()
        }

    return [(deployment, "known_chunks", known_chunks)]


def searched_by_live_rows() -> Replacements:
    """A run that is taken over is searched by the positions of those rows that were live."""
    return [(TableRun, "held_again", lambda run: TableRun(run.frame, run.living_index()))]


MUTATIONS: Final = named(
    Mutation("a restore takes any chunk of as many rows", any_chunk_of_as_many_rows, taken_over),
    Mutation("removals after the checkpoint are taken over", removed_since_the_checkpoint, taken_over),
    Mutation("rows that go to other subtasks stay, too", rows_of_others_stay, taken_over),
    Mutation("rows that went to other subtasks come back", rows_of_others_come_back, taken_over),
    Mutation("a chunk is restored by all that had rows of it", key_groups_of_before, taken_over),
    Mutation("a chunk is restored for half of its key groups", half_of_the_key_groups, taken_over),
    Mutation("a run that is taken over has positions of live rows", searched_by_live_rows, taken_over),
)
