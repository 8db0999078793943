"""Tables of state machines: what is in them happens, what is not raises."""

from __future__ import annotations

from enum import Enum, auto

import pytest

from midstream.core.errors import InvariantError
from midstream.core.transitions import Row, Table, diagram


class Door(Enum):
    OPEN = auto()
    SHUT = auto()
    LOCKED = auto()


class Push:
    """An event that carries something is a class."""


class Turn(Enum):
    KEY = auto()


ROWS: list[Row[Door, object]] = [
    Row(Door.OPEN, Push, (Door.SHUT,), "it closes"),
    Row(Door.SHUT, Push, (Door.OPEN, Door.SHUT), "it opens, unless it sticks"),
    Row(Door.SHUT, Turn.KEY, (Door.LOCKED,)),
]
TABLE: Table[Door, object] = Table("door", ROWS)


def test_a_table_says_what_follows() -> None:
    assert TABLE.next(Door.OPEN, Push) is Door.SHUT
    assert TABLE.check(Door.SHUT, Push, Door.SHUT) is Door.SHUT
    assert TABLE.allows(Door.SHUT, Turn.KEY)
    assert not TABLE.allows(Door.OPEN, Turn.KEY)


def test_what_is_not_in_the_table_names_machine_event_and_state() -> None:
    with pytest.raises(InvariantError, match="door: KEY while OPEN"):
        TABLE.next(Door.OPEN, Turn.KEY)
    with pytest.raises(InvariantError, match="door: Push while LOCKED"):
        TABLE.row(Door.LOCKED, Push)
    with pytest.raises(InvariantError, match="door: Push while SHUT leads to LOCKED"):
        TABLE.check(Door.SHUT, Push, Door.LOCKED)


def test_two_rows_of_one_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="two rows"):
        Table("door", [*ROWS, Row(Door.OPEN, Push, (Door.LOCKED,))])


def test_the_diagram_has_every_row() -> None:
    assert diagram(TABLE).splitlines()[2:] == [
        "| OPEN | Push | SHUT | it closes |",
        "| SHUT | Push | OPEN, same | it opens, unless it sticks |",
        "| SHUT | KEY | LOCKED |  |",
    ]
