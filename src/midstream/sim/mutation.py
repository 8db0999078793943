"""What a mutation is: a known bug, put back on purpose. `sim.mutations` lists them all, `sim.kills` looks for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from midstream.sim.scenario import Scenario

Replacements: TypeAlias = list[tuple[Any, str, Any]]
"""Owner, name of its attribute, and what stands there while the mutation is applied."""


@dataclass(frozen=True, slots=True)
class Mutation:
    what: str
    replacements: Callable[[], Replacements]
    scenario: Callable[[int], Scenario] | None = None
    """Of a seed: a scenario in which the bug shows soon. None: the random campaign finds it soon enough."""


@dataclass(frozen=True, slots=True)
class Equivalent:
    """A change of the engine without an observable effect, so that no run can fail under it."""

    what: str
    proof: str


def owner_of(part: Any) -> Any:
    """The coordinator whose part this is."""
    [(hear, _)] = part._effects.facts.start_failed.hearers
    return hear.__self__


def nothing(*_: Any) -> None:
    """This stands in for what a mutation leaves out."""
    return
