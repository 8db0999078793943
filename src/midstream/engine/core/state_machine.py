"""Tables of state machines: data on which the machines run, and from which the docs and the coverage report read.

A machine looks up every event in its table. A pair of state and event without a row, or a next state that the
row does not allow, is a bug and raises immediately. If the machine keeps its history, the error contains it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Generic, TypeAlias, TypeVar

from midstream.engine.core.errors import InvariantError

S = TypeVar("S", bound=Enum)
E = TypeVar("E")

TransitionHistory: TypeAlias = deque[tuple[S, object]]
"""The last events of one machine, each with the state in which it arrived."""
HISTORY_EVENTS_MAX: Final = 16


def new_history() -> TransitionHistory[Any]:
    return deque(maxlen=HISTORY_EVENTS_MAX)


def nothing(*_: object) -> list[Any]:
    """Do nothing: the action of a row that names no other."""
    return []


@dataclass(frozen=True, slots=True)
class Transition(Generic[S, E]):
    """The states that may follow when `event` comes in `state`, and the action taken then."""

    state: S
    event: E
    """A member of an enum, or a class of events."""
    then: tuple[S, ...]
    what: str = ""
    """A description of the action, for readers."""
    do: Callable[..., Any] = nothing
    """The action, called with the machine and the event by a machine that dispatches by its table."""


class TransitionTable(Generic[S, E]):
    """The rows of one machine, by state and event. Raises ValueError if two rows have the same pair."""

    def __init__(self, machine: str, rows: Iterable[Transition[S, E]]) -> None:
        self.machine: Final = machine
        self.rows: Final = tuple(rows)
        self._by_pair = {(row.state, row.event): row for row in self.rows}
        if len(self._by_pair) < len(self.rows):
            raise ValueError(f"{machine}: two rows of one state and event")

    def row(self, state: S, event: E, history: Iterable[tuple[S, object]] = ()) -> Transition[S, E]:
        """Return the row of this pair. Raises InvariantError, with the history, if there is none."""
        found = self._by_pair.get((state, event))
        if found is None:
            raise self.broken(f"{name_of(event)} while {state.name}", history)
        return found

    def next(self, state: S, event: E, history: Iterable[tuple[S, object]] = ()) -> S:
        """Return the next state, for a pair whose row allows exactly one."""
        (then,) = self.row(state, event, history).then
        return then

    def check(self, state: S, event: E, then: S, history: Iterable[tuple[S, object]] = ()) -> S:
        """Return `then` if it may follow; raises InvariantError, with the history, if not."""
        if then not in self.row(state, event, history).then:
            raise self.broken(f"{name_of(event)} while {state.name} leads to {then.name}", history)
        return then

    def allows(self, state: S, event: E) -> bool:
        return (state, event) in self._by_pair

    def broken(self, rule: str, history: Iterable[tuple[S, object]]) -> InvariantError:
        """Return the error for a machine that broke `rule` after the events of `history`, the newest last."""
        events = "".join(f"\n    {state.name}: {name_of(event)}" for state, event in history)
        return InvariantError(f"{self.machine}: {rule}" + (f"; its last events:{events}" if events else ""))


def name_of(event: object) -> str:
    return event.name if isinstance(event, Enum) else getattr(event, "__name__", str(event))
