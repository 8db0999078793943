"""Restores the entries and timers of a process function: as objects or, where they were spilled, as rows."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from midstream.engine.operators.functions.state_spill import StateSpill
from midstream.engine.state.heap_snapshot import KeyEncoding, state_rows, timer_rows
from midstream.engine.state.keyed_states import State
from midstream.engine.state.safe_pickle import OwnCode
from midstream.engine.state.spilled_state import SPILLED_ID
from midstream.engine.state.state_parts import Chunk, StatePart
from midstream.engine.state.state_upgrade import upgrade_at_restore
from midstream.engine.state.timers import TimerQueue


def restore_timers(name: str, queue: TimerQueue, part: StatePart, encoding: KeyEncoding, spill: StateSpill) -> None:
    """Restore the chunks of one kind of timers. `name`: that of the part."""
    spilled = spill.of(name)
    chunks = _spilled_last(part.chunks)
    for chunk, is_spilled in chunks:
        if is_spilled and spilled is not None and spilled.has_columns_of(chunk):
            spilled.restore_chunk(chunk)
            continue
        named, rows = timer_rows(chunk.table, encoding)
        queue.forget(named)
        queue.restore(rows)
        if not is_spilled:
            queue.log.restored(chunk.id, named, len(named))
    if any(is_spilled for _, is_spilled in chunks):
        spill.settle()  # once all rows are here: timers that are rows are spilled no second time


def restore_entries(
    state: State, part: StatePart, encoding: KeyEncoding, own: OwnCode, where: str, spill: StateSpill
) -> None:
    """Restore the chunks of a state. If they are converted, the next checkpoint stores all of it again."""
    upgrade = None if part.stored is None else upgrade_at_restore(state, part.stored, where)
    spilled = spill.of(state.part_name)
    for chunk, is_spilled in _spilled_last(part.chunks):
        if is_spilled:
            spill.settle()
        if is_spilled and spilled is not None and upgrade is None and spilled.has_columns_of(chunk):
            spilled.restore_chunk(chunk)
            continue
        keys, found = state_rows(state, chunk.table, encoding, own, where, upgrade)
        state.forget(keys)
        state.restore(found)
        if is_spilled:
            state.log.changed.update((key, state.entries()[key]) for key in dict.fromkeys(keys))
        elif upgrade is None:
            state.log.restored(chunk.id, dict.fromkeys(keys), len(keys))


def _spilled_last(chunks: Sequence[Chunk]) -> list[tuple[Chunk, bool]]:
    """Return the chunks with whether their rows were spilled. Those were no objects, which come first: what is left of them
    in other chunks is superseded.
    """
    return sorted(((chunk, chunk.id.startswith(SPILLED_ID)) for chunk in chunks), key=itemgetter(1))
