"""Tables of state machines: data on which the machines run, and from which the docs and the coverage report read.

A machine asks its table for every event. A pair of state and event that has no row, or a state that
does not follow from it, is a bug, and raises at once. A machine that keeps its story has it in the error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Generic, TypeAlias, TypeVar

from midstream.core.errors import InvariantError

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Hashable)

Story: TypeAlias = deque[tuple[S, object]]
"""The last events of one machine, each with the state in which it came."""
STORY_EVENTS_MAX: Final = 16


def new_story() -> Story[Any]:
    return deque(maxlen=STORY_EVENTS_MAX)


@dataclass(frozen=True, slots=True)
class Row(Generic[S, E]):
    """What may follow when `event` comes in `state`."""

    state: S
    event: E
    """A member of an enum, or a class of events."""
    then: tuple[S, ...]
    what: str = ""
    """What is done, for readers."""


class Table(Generic[S, E]):
    """The rows of one machine, by state and event. Raises ValueError if two rows are of one pair."""

    def __init__(self, machine: str, rows: Iterable[Row[S, E]]) -> None:
        self.machine: Final = machine
        self.rows: Final = tuple(rows)
        self._by_pair = {(row.state, row.event): row for row in self.rows}
        if len(self._by_pair) < len(self.rows):
            raise ValueError(f"{machine}: two rows of one state and event")

    def row(self, state: S, event: E, story: Iterable[tuple[S, object]] = ()) -> Row[S, E]:
        """Raises InvariantError, with the story, if the event cannot come in this state."""
        found = self._by_pair.get((state, event))
        if found is None:
            raise self.broken(f"{name_of(event)} while {state.name}", story)
        return found

    def next(self, state: S, event: E, story: Iterable[tuple[S, object]] = ()) -> S:
        """The one state that follows."""
        (then,) = self.row(state, event, story).then
        return then

    def check(self, state: S, event: E, then: S, story: Iterable[tuple[S, object]] = ()) -> S:
        """`then`, if it may follow; raises InvariantError, with the story, if not."""
        if then not in self.row(state, event, story).then:
            raise self.broken(f"{name_of(event)} while {state.name} leads to {then.name}", story)
        return then

    def allows(self, state: S, event: E) -> bool:
        return (state, event) in self._by_pair

    def broken(self, rule: str, story: Iterable[tuple[S, object]]) -> InvariantError:
        """The error of a machine that broke this rule after these events, the newest last."""
        events = "".join(f"\n    {state.name}: {name_of(event)}" for state, event in story)
        return InvariantError(f"{self.machine}: {rule}" + (f"; its last events:{events}" if events else ""))


def name_of(event: object) -> str:
    return event.name if isinstance(event, Enum) else getattr(event, "__name__", str(event))


def diagram(table: Table[S, E]) -> str:
    """The table as rows of Markdown: state, event, next states, what is done."""
    lines = ["| state | event | next | what is done |", "|---|---|---|---|"]
    for row in table.rows:
        then = ", ".join("same" if state is row.state else state.name for state in row.then)
        lines.append(f"| {row.state.name} | {name_of(row.event)} | {then} | {row.what} |")
    return "\n".join(lines)
