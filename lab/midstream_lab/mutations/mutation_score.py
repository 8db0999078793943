"""Measures how soon each mutation is found: in its own scenario, and in the usual random campaign.

A kill is a run that fails under the mutation while the unchanged engine passes the same scenario within the same bound
of steps. An exception in the mutation's own code is not a kill, since it proves nothing about the simulator.
"""

from __future__ import annotations

import inspect
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import FunctionType
from typing import Any, Final, TypeAlias
from unittest.mock import patch

import msgspec

from midstream.engine.worker.task import Task
from midstream.simulation.garbage_collection import collect, collecting_rarely
from midstream_lab.campaign import workers
from midstream_lab.mutations.catalog import MUTATIONS
from midstream_lab.mutations.mutation import Mutation
from midstream_lab.run import run
from midstream_lab.scenarios.random_scenarios import random_scenario
from midstream_lab.scenarios.scenario import Scenario

STEPS_MAX: Final = 60_000
"""The bound on the steps of a run: a run that does not end within it has failed."""
SCENARIO_SEEDS_MAX: Final = 400
RANDOM_SEEDS_MAX: Final = 2_000
"""A mutation that survives this many runs shows a gap in the simulator."""
KEPT_RUNS: Final = 2 * RANDOM_SEEDS_MAX
FAILURE_CHARS: Final = 300
FRAME: Final = re.compile(r'^  File "(.+?)", line ', re.MULTILINE)


Target: TypeAlias = tuple[Any, str]
"""The owner and the name of an attribute that a mutation replaces."""


class Search(msgspec.Struct, frozen=True):
    """The result of a search for one mutation, in one kind of scenario."""

    seeds: int
    """The number of seeds that were tried, including the one that found the mutation."""
    seed: int | None
    """The seed that found the mutation; None: it survived."""
    failure: str = ""
    """The first line of that run's failure."""
    unfit: tuple[int, ...] = ()
    """The seeds whose runs also fail without the mutation, and so prove nothing."""
    own_error: str = ""
    """The first exception in the mutation's own code: in that case the mutation is wrong, not the engine."""


class Kill(msgspec.Struct, frozen=True):
    name: str
    what: str
    own: Search | None
    """The search in the mutation's own scenario; None if it has none, or if that was not requested."""
    random: Search | None


@contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, attribute, value in mutation.replacements():
            stack.enter_context(patch.object(owner, attribute, value))
        yield


def search(
    mutation: Mutation,
    scenario_of: Callable[[int], Scenario] | None,
    seeds_max: int,
    start: int = 0,
    seconds_max: float | None = None,
) -> Search:
    """Try seeds from `start` on until one finds the mutation. `scenario_of` None: use the scenarios of the random
    campaign.

    `seconds_max`: the processor time after which no further seed is tried.
    """
    began_s = time.process_time()
    tried = 0
    unfit: list[int] = []
    own_error = ""
    replaced = frozenset((owner, attribute) for owner, attribute, _ in mutation.replacements())
    for tried, seed in enumerate(range(start, start + seeds_max), 1):
        if scenario_of is None and not replaced & unmutated(seed).reached:
            continue  # the run would be the same, since it reaches nothing that is replaced
        scenario = bounded((scenario_of or random_scenario)(seed))
        with applied(mutation), _noting(mutation) as own_errors:
            failures = run(scenario).why_not_passed
        collect()
        own_errors += [failure for failure in failures[:1] if _is_of(mutation, failure)]
        if own_errors:
            own_error = own_error or own_errors[0]
        elif failures and (passes(scenario) if scenario_of is not None else unmutated(seed).passed):
            return Search(tried, seed, _first_line(failures[0]), tuple(unfit), own_error)
        elif failures:
            unfit.append(seed)
        if seconds_max is not None and time.process_time() - began_s >= seconds_max:
            break
    return Search(tried, None, "", tuple(unfit), own_error)


def bounded(scenario: Scenario) -> Scenario:
    return replace(scenario, steps_max=min(scenario.steps_max, STEPS_MAX))


def passes(scenario: Scenario) -> bool:
    """Whether the unchanged engine passes the scenario."""
    passed = not run(scenario).why_not_passed
    collect()
    return passed


@dataclass(frozen=True, slots=True)
class Unmutated:
    """A run of the random campaign with the unchanged engine."""

    passed: bool
    reached: frozenset[Target]
    """The targets of mutations that the run has called, and all targets that are not functions."""


@lru_cache(KEPT_RUNS)
def unmutated(seed: int) -> Unmutated:
    """Run a seed of the random campaign with the unchanged engine, once for all mutations.

    Most mutations are found by the first seeds. The others need no run of a seed that does not reach what they replace.
    """
    reached: set[Target] = set()
    with ExitStack() as stack:
        for target in dict.fromkeys(target[:2] for one in MUTATIONS.values() for target in one.replacements()):
            function = inspect.getattr_static(*target)
            if isinstance(function, FunctionType):
                stack.enter_context(patch.object(*target, _noticed(function, target, reached)))
            else:
                reached.add(target)
        passed = not run(bounded(random_scenario(seed))).why_not_passed
    collect()
    return Unmutated(passed, frozenset(reached))


def _noticed(function: FunctionType, target: Target, reached: set[Target]) -> Callable[..., Any]:
    def noticed(*arguments: Any, **named: Any) -> Any:
        reached.add(target)
        return function(*arguments, **named)

    return noticed


@contextmanager
def _noting(mutation: Mutation) -> Iterator[list[str]]:
    """Collect task failures that the mutation's own code causes: the job restarts after them and may not report them."""
    found: list[str] = []
    fail = Task.fail

    def noted(self: Task, error: BaseException, *, symptom: bool = False) -> None:
        failure = "".join(traceback.format_exception(error))
        if _is_of(mutation, failure):
            found.append(failure)
        fail(self, error, symptom=symptom)

    with patch.object(Task, "fail", noted):
        yield found


def _is_of(mutation: Mutation, failure: str) -> bool:
    """Whether a failure was raised in the mutation's code, or by a call of it with arguments that no longer fit."""
    frames = FRAME.findall(failure)
    own = mutation.replacements
    return bool(frames and frames[-1] == inspect.getfile(own)) or f"{own.__name__}.<locals>" in failure


def _first_line(failure: str) -> str:
    return failure.splitlines()[0][:FAILURE_CHARS]


def kill_of(name: str, random_seeds_max: int = RANDOM_SEEDS_MAX, seconds_max: float | None = None) -> Kill:
    """Search for a mutation. `random_seeds_max` 0: only in its own scenario, or in random ones if it has none."""
    mutation = MUTATIONS[name]
    own = None
    if mutation.scenario is not None:
        seeds_max = min(SCENARIO_SEEDS_MAX, random_seeds_max or SCENARIO_SEEDS_MAX)
        own = search(mutation, mutation.scenario, seeds_max, seconds_max=seconds_max)
    elif not random_seeds_max:
        random_seeds_max = SCENARIO_SEEDS_MAX
    random = search(mutation, None, random_seeds_max, seconds_max=seconds_max) if random_seeds_max else None
    return Kill(name, mutation.what, own, random)


def kill_table(
    names: Sequence[str], random_seeds_max: int, jobs: int | None = None, seconds_max: float | None = None
) -> Iterator[Kill]:
    """Yield each result as soon as it is known; `jobs` processes search, by default one per core."""
    work = partial(kill_of, random_seeds_max=random_seeds_max, seconds_max=seconds_max)
    processes = min(jobs or os.cpu_count() or 1, len(names))
    if processes == 1:
        with collecting_rarely():
            yield from map(work, names)
        return
    with workers(processes) as pool:
        yield from pool.imap_unordered(work, names)
