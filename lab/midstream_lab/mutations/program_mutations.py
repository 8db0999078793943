"""Known bugs of resuming with a changed program, to be put back on purpose: see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from typing import Any, Final

from midstream.engine.checkpoint import redistribute_channel_state, redistribute_state
from midstream.engine.checkpoint.edge_identity import EdgeIdentity, edge_identities
from midstream.engine.operators.functions import process_operator
from midstream.engine.state.heap_snapshot import state_rows
from midstream.engine.state.state_upgrade import upgrade_at_restore
from midstream_lab.mutations.mutation import Mutation, Replacements, named, nothing
from midstream_lab.scenarios import targeted


def edges_by_number() -> Replacements:
    def ends(vertices: Any, edges: Any) -> list[Any]:
        return [EdgeIdentity("", "", 0, None, edge.id) for edge in edges]

    return [(redistribute_channel_state, "edge_identities", ends)]


def edges_by_their_readers() -> Replacements:
    """Rows in flight from one producer may be recovered on the edge of another."""
    return [
        (
            redistribute_channel_state,
            "edge_identities",
            lambda *of: [ends._replace(source="") for ends in edge_identities(*of)],
        )
    ]


def rows_of_gone_edges_are_dropped() -> Replacements:
    original = redistribute_channel_state.assign_channels
    return [(redistribute_state, "assign_channels", lambda metadata, graph, allowed: original(metadata, graph, True))]


def one_had_finished_for_all() -> Replacements:
    """A task whose operators had finished, but for one that is new, counts as finished."""

    def has_finished(old: Any, vertex: Any) -> bool:
        return any(redistribute_state._share(old.get(spec.uid)) == "fully" for spec in vertex.specs)

    return [(redistribute_state, "_has_finished", has_finished)]


def finished_is_fed() -> Replacements:
    return [(redistribute_state, "_check_consumer", nothing)]


def converted_chunks_are_referred_to() -> Replacements:
    """The next checkpoint refers to the old chunks, with the old types, of a state that was converted."""

    def restore_entries(state: Any, part: Any, encoding: Any, own: Any, *_: Any) -> None:
        upgrade = None if part.stored is None else upgrade_at_restore(state, part.stored, "mutation")
        for chunk in part.chunks:
            keys, found = state_rows(state, chunk.table, encoding, own, "mutation", upgrade)
            state.forget(keys)
            state.restore(found)
            state.log.restored(chunk.id, dict.fromkeys(keys), len(keys))

    return [(process_operator, "restore_entries", restore_entries)]


MUTATIONS: Final = named(
    Mutation("rows in flight are recovered on the edge that now has their number", edges_by_number, targeted.changing),
    Mutation(
        "rows in flight are recovered on an edge with the same consumer", edges_by_their_readers, targeted.changing
    ),
    Mutation(
        "rows in flight on an edge that is gone are dropped without an error",
        rows_of_gone_edges_are_dropped,
        targeted.changing,
    ),
    Mutation(
        "a new operator alongside one that had finished counts as finished",
        one_had_finished_for_all,
        targeted.changing_at_the_end,
    ),
    Mutation(
        "an operator that had finished may get rows from one that had not",
        finished_is_fed,
        targeted.changing_at_the_end,
    ),
    Mutation("state that was converted is not stored again", converted_chunks_are_referred_to, targeted.widening),
)
