"""What all states that a function's class declares have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from midstream.core.errors import JobError


class DeclaredState(ABC):
    """A class attribute of a function. `name` is that of the attribute, from when the operator has opened."""

    kind: ClassVar[str]
    name: str

    @property
    def part_name(self) -> str:
        """Of the part that it is in a snapshot."""
        return f"{self.kind}:{self.name}"

    def bind(self, function: object, name: str) -> None:
        """Be what `function` has under that name, in the place of the declaration."""
        vars(function)[name] = self

    def __set__(self, function: object, value: object) -> None:
        """No checkpoint would have what is put in the place of a state."""
        if value is self:  # as a dataclass does with what it takes for a default
            return
        kind = type(function)
        name = next(name for name, state in declared_states(kind).items() if state is self)
        content = next((f"; write self.{name}.{at} = …" for at in ("value", "frame") if hasattr(type(self), at)), "")
        raise JobError(f"{name!r} of {kind.__name__} is a {type(self).__name__}, which cannot be replaced{content}")

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
