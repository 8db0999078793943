"""The base of all states that are declared on a function's class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from midstream.engine.core.errors import JobError


class DeclaredState(ABC):
    """A state declared as a class attribute of a function. Once the operator has opened, `name` is the attribute's
    name.
    """

    kind: ClassVar[str]
    name: str

    @property
    def part_name(self) -> str:
        """The name of the state's part in a snapshot."""
        return f"{self.kind}:{self.name}"

    def bind(self, function: object, name: str) -> None:
        """Replace the declaration by the bound state, as the attribute `name` of `function`."""
        vars(function)[name] = self

    def __set__(self, function: object, value: object) -> None:
        """Refuse assignment to the attribute: what replaced a state would be in no checkpoint."""
        if value is self:  # as a dataclass does with what it takes for a default
            return
        kind = type(function)
        name = next(name for name, state in declared_states(kind).items() if state is self)
        content = next((f"; write self.{name}.{at} = …" for at in ("value", "frame") if hasattr(type(self), at)), "")
        raise JobError(f"{name!r} of {kind.__name__} is a {type(self).__name__}, which cannot be replaced{content}")

    @abstractmethod
    def type_text(self) -> str:
        """Describe the types that the state holds, for messages: state of another type is not restored."""


def declared_states(function: type) -> dict[str, DeclaredState]:
    """Return the states declared on a class and its bases, by attribute name, in order."""
    found: dict[str, DeclaredState] = {}
    for base in reversed(function.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, DeclaredState):
                found[name] = value
            else:
                found.pop(name, None)
    return found
