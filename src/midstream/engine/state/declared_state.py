"""The base of all states that are declared on a function's class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pyarrow as pa

from midstream.engine.core.errors import JobError, SchemaError
from midstream.engine.core.schemas import Default, Path
from midstream.engine.core.value_converters import shown

NO_DEFAULTS: Mapping[Path, Default] = {}


class DeclaredState(ABC):
    """A state declared as a class attribute of a function. Once the operator has opened, `name` is the attribute's
    name.
    """

    kind: ClassVar[str]
    name: str
    was: str | None = None
    """The name of the attribute in older checkpoints."""
    migrate: Callable[[Any], Any] | None = None
    """Converts what older checkpoints hold under another type or name."""
    defaults: Mapping[Path, Default] = NO_DEFAULTS
    """The defaults of the fields in the type of its values, or of the columns of a table."""

    def _set_upgrade(self, was: str | None, migrate: Callable[[Any], Any] | None) -> None:
        """Set how the state is restored from older checkpoints. Raises SchemaError for arguments of a wrong type."""
        where = type(self).__name__
        if was is not None and not (isinstance(was, str) and was.isidentifier()):
            raise SchemaError(f"{where}: was={shown(was)} is not the name that an attribute had, such as was='seen'")
        if migrate is not None and not callable(migrate):
            raise SchemaError(f"{where}: migrate={shown(migrate)} is not a function")
        self.was, self.migrate = was, migrate

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
        """Describe the types that the state holds, for messages."""

    @abstractmethod
    def form(self) -> pa.Schema:
        """Return the columns in which a checkpoint has the values and their types; pickled ones are left out."""


def check_former_names(states: Mapping[str, DeclaredState], where: str) -> None:
    """Raise SchemaError if it is not clear which of the states has the content of an older one."""
    taken: dict[str, str] = {}
    for name, state in states.items():
        if state.was is None:
            continue
        what = f"{where}: state {name!r} has was={state.was!r}"
        if state.was in states:
            raise SchemaError(
                f"{what}, and {state.was!r} is declared too: a state has one name at a time. To exchange names, resume once "
                "with a name between"
            )
        if state.was in taken:
            raise SchemaError(f"{what}, and so has {taken[state.was]!r}: only one of them can have what it held")
        taken[state.was] = name


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
