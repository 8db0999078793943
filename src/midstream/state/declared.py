"""What all states that a function's class declares have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar


class DeclaredState(ABC):
    """A class attribute of a function. `name` is that of the attribute, from when the operator has opened."""

    kind: ClassVar[str]
    name: str

    @property
    def part_name(self) -> str:
        """Of the part that it is in a snapshot."""
        return f"{self.kind}:{self.name}"

    @abstractmethod
    def type_text(self) -> str:
        """What it holds, for people: state of another type is not restored."""


def declared_states(function: type) -> dict[str, DeclaredState]:
    """The states on a class and its bases, by attribute name, in order."""
    found: dict[str, DeclaredState] = {}
    for base in reversed(function.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, DeclaredState):
                found[name] = value
            else:
                found.pop(name, None)
    return found
