"""A mutation: a known bug, put back on purpose. `midstream_lab.mutations.catalog` lists all of them, `midstream_lab.mutations.mutation_score` searches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from midstream_lab.scenarios.scenario import Scenario, draw

Replacements: TypeAlias = list[tuple[Any, str, Any]]
"""The owner, the name of its attribute, and the value of that attribute while the mutation is applied."""


@dataclass(frozen=True, slots=True)
class Mutation:
    what: str
    replacements: Callable[[], Replacements]
    scenario: Callable[[int], Scenario] | None = None
    """Returns, for a seed, a scenario that finds the bug soon. None: the random campaign finds it soon enough."""


@dataclass(frozen=True, slots=True)
class Equivalent:
    """A change of the engine without an observable effect, so that no run can fail under it."""

    what: str
    proof: str


def named(*mutations: Mutation) -> dict[str, Mutation]:
    """Return the mutations by name: that of the function with their replacements."""
    return {mutation.replacements.__name__: mutation for mutation in mutations}


def of(topology: str) -> Callable[[int], Scenario]:
    """Return what draws the scenarios of a shape that has a name."""
    return partial(draw, topology=topology)


def owner_of(part: Any) -> Any:
    """Return the coordinator to which a part belongs."""
    [(subscriber, _)] = part._effects.notifications.start_failed.subscribers
    return subscriber.__self__


def nothing(*_: Any) -> None:
    """Do nothing, in place of a call that a mutation leaves out."""
    return
