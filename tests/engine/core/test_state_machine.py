"""Tables of state machines: what is in them happens, what is not raises."""

from __future__ import annotations

from enum import Enum, auto

import pytest

from midstream.engine.core.errors import InvariantError
from midstream.engine.core.state_machine import (
    HISTORY_EVENTS_MAX,
    Transition,
    TransitionHistory,
    TransitionTable,
    new_history,
)


class Door(Enum):
    OPEN = auto()
    SHUT = auto()
    LOCKED = auto()


class Push:
    """An event that carries something is a class."""

    def __str__(self) -> str:
        return "a push"


class Turn(Enum):
    KEY = auto()


ROWS: list[Transition[Door, object]] = [
    Transition(Door.OPEN, Push, (Door.SHUT,), "it closes"),
    Transition(Door.SHUT, Push, (Door.OPEN, Door.SHUT), "it opens, unless it sticks"),
    Transition(Door.SHUT, Turn.KEY, (Door.LOCKED,)),
]
TABLE: TransitionTable[Door, object] = TransitionTable("door", ROWS)


def test_a_table_defines_what_follows() -> None:
    assert TABLE.next(Door.OPEN, Push) is Door.SHUT
    assert TABLE.check(Door.SHUT, Push, Door.SHUT) is Door.SHUT
    assert TABLE.allows(Door.SHUT, Turn.KEY)
    assert not TABLE.allows(Door.OPEN, Turn.KEY)


def test_what_is_not_in_the_table_names_machine_event_and_state() -> None:
    with pytest.raises(InvariantError, match=r"^door: KEY while OPEN$"):
        TABLE.next(Door.OPEN, Turn.KEY)
    with pytest.raises(InvariantError, match=r"^door: Push while LOCKED$"):
        TABLE.row(Door.LOCKED, Push)
    with pytest.raises(InvariantError, match=r"^door: Push while SHUT leads to LOCKED$"):
        TABLE.check(Door.SHUT, Push, Door.LOCKED)


def test_a_machine_that_keeps_its_story_has_it_in_the_error() -> None:
    history: TransitionHistory[Door] = new_history()
    history.extend([(Door.OPEN, Push()), (Door.SHUT, Turn.KEY)])
    with pytest.raises(InvariantError) as refused:
        TABLE.next(Door.LOCKED, Push, history)
    assert str(refused.value).splitlines() == [
        "door: Push while LOCKED; its last events:",
        "    OPEN: a push",
        "    SHUT: KEY",
    ]
    history.extend([(Door.OPEN, Push())] * 100)
    assert len(history) == HISTORY_EVENTS_MAX, "a machine keeps the last ones only"


def test_a_row_that_names_nothing_to_do_does_nothing() -> None:
    assert TABLE.row(Door.OPEN, Push).do("the door", Push()) == []


def test_two_rows_of_one_pair_are_refused() -> None:
    more: Transition[Door, object] = Transition(Door.OPEN, Push, (Door.LOCKED,))
    with pytest.raises(ValueError, match="two rows"):
        TransitionTable("door", [*ROWS, more])
