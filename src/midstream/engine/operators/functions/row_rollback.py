"""Undoes what a process function has done for a row for which it fails."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from midstream.engine.operators.functions.process_context import ContextTimers
from midstream.engine.state.keyed_states import State


class RowRollback:
    """What the states, the timers and the emitted rows were before the current row.

    The function works on a copy of each entry that can be changed in place, as after a snapshot; its timers are set when
    it has returned. So nothing of a row that fails is left, but for other attributes of the function, and its metrics.
    """

    def __init__(self, states: Collection[State], timers: ContextTimers) -> None:
        self._states = states
        self._timers = timers
        self._entries: list[tuple[Any, Any]] = []
        self._emitted: list[tuple[list[Any], int]] = []

    def begin(self, emitted: Sequence[list[Any]]) -> None:
        """Begin a row, whose key is current. `emitted`: the lists to which what the function emits is appended."""
        self._entries = [state.begin_row() for state in self._states]
        self._emitted = [(rows, len(rows)) for rows in emitted]
        self._timers.held = []

    def keep(self) -> None:
        """Keep what the function has done."""
        self._timers.release()

    def undo(self) -> None:
        for state, before in zip(self._states, self._entries, strict=True):
            state.roll_back(before)
        for rows, length in self._emitted:
            del rows[length:]
        self._timers.held = None
