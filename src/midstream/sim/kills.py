"""How soon each mutation is found: in the scenario of its own, and in the random campaign that everybody runs.

A kill is a run that fails under the mutation while the engine as it is passes the same scenario within the same
bound of steps. What the code of the mutation itself raises is no kill: it says nothing about the simulator.
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

from midstream.sim.campaign import workers
from midstream.sim.garbage import collect, collecting_rarely
from midstream.sim.mutation import Mutation
from midstream.sim.mutations import MUTATIONS
from midstream.sim.random_scenarios import random_scenario
from midstream.sim.run import run
from midstream.sim.scenario import Scenario
from midstream.worker.task import Task

STEPS_MAX: Final = 60_000
"""Of a run: one that does not come to its end has failed."""
SCENARIO_SEEDS_MAX: Final = 400
RANDOM_SEEDS_MAX: Final = 2_000
"""A mutation that no run finds in so many is a hole in the simulator."""
KEPT_RUNS: Final = 2 * RANDOM_SEEDS_MAX
FAILURE_CHARS: Final = 300
FRAME: Final = re.compile(r'^  File "(.+?)", line ', re.MULTILINE)


Target: TypeAlias = tuple[Any, str]
"""Owner and name of an attribute that a mutation replaces."""


class Search(msgspec.Struct, frozen=True):
    """For one mutation, in one kind of scenario."""

    seeds: int
    """How many were tried, the one that found it included."""
    seed: int | None
    """The one that found it; None: the mutation survived."""
    failure: str = ""
    """The first line of how its run failed."""
    unfit: tuple[int, ...] = ()
    """Seeds whose runs fail without the mutation, too: they prove nothing."""
    own_error: str = ""
    """The first time that the code of the mutation itself raised: then the mutation is wrong, not the engine."""


class Kill(msgspec.Struct, frozen=True):
    name: str
    what: str
    own: Search | None
    """In its scenario; None: it has none, or that was not asked for."""
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
    """Try the seeds from `start` on until one finds it. `scenario_of` None: those of the random campaign.

    `seconds_max`: of processor time, after which no further seed is tried.
    """
    began_s = time.process_time()
    tried = 0
    unfit: list[int] = []
    own_error = ""
    replaced = frozenset((owner, attribute) for owner, attribute, _ in mutation.replacements())
    for tried, seed in enumerate(range(start, start + seeds_max), 1):
        if scenario_of is None and not replaced & unmutated(seed).reached:
            continue  # not a step of it would be another one
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
    """Whether the engine as it is does."""
    passed = not run(scenario).why_not_passed
    collect()
    return passed


@dataclass(frozen=True, slots=True)
class Unmutated:
    """A run of the random campaign with the engine as it is."""

    passed: bool
    reached: frozenset[Target]
    """What mutations replace, and it has called; all that is no function, too."""


@lru_cache(KEPT_RUNS)
def unmutated(seed: int) -> Unmutated:
    """Shared by all mutations: most are found by the first seeds, and those that are not need not be run where nothing differs."""
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
    """Why tasks fail, where it is the code of the mutation: such a failure is met by restarts, and may not be shown."""
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
    """Raised in its code, or by a call of it that does not fit any more."""
    frames = FRAME.findall(failure)
    own = mutation.replacements
    return bool(frames and frames[-1] == inspect.getfile(own)) or f"{own.__name__}.<locals>" in failure


def _first_line(failure: str) -> str:
    return failure.splitlines()[0][:FAILURE_CHARS]


def kill_of(name: str, random_seeds_max: int = RANDOM_SEEDS_MAX, seconds_max: float | None = None) -> Kill:
    """`random_seeds_max` 0: look for it in its own scenario only, and in random ones only if it has none."""
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
    """As they are known, found by `jobs` processes (one per core)."""
    work = partial(kill_of, random_seeds_max=random_seeds_max, seconds_max=seconds_max)
    processes = min(jobs or os.cpu_count() or 1, len(names))
    if processes == 1:
        with collecting_rarely():
            yield from map(work, names)
        return
    with workers(processes) as pool:
        yield from pool.imap_unordered(work, names)
