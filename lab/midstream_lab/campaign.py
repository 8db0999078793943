"""Many runs: on all cores, with progress reports and one summary at the end; and the shrinking of a failing run.

Each worker process runs whole worlds. A run's outcome depends on its seed alone, so this module
affects only how soon something is found, not what is found.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, takewhile
from multiprocessing import get_context
from multiprocessing.pool import AsyncResult, Pool

from midstream.runtime.process.thread_limits import limit_threads
from midstream.simulation.garbage_collection import collect, collect_rarely, collecting_rarely
from midstream_lab.coverage import Pair, recording
from midstream_lab.run import Outcome, run
from midstream_lab.scenarios.random_scenarios import random_scenario
from midstream_lab.scenarios.scenario import Scenario, draw

SHRINK_TRIES_MAX = 120
CHUNK = 4
"""The number of seeds that are given to a process at a time."""


@dataclass(frozen=True, slots=True)
class Options:
    topology: str = "random"
    parallelism: int | None = None
    rescale_to: int | None = None
    faults: tuple[str, ...] | None = None
    rows: int | None = None
    coverage: bool = False
    """Whether to count which events came in which states."""

    def scenario(self, seed: int) -> Scenario:
        given = (self.parallelism, self.rescale_to, self.faults, self.rows)
        if self.topology == "random" and all(each is None for each in given):
            return random_scenario(seed)
        return draw(
            seed,
            topology=self.topology,
            parallelism=self.parallelism,
            rescale_to=self.rescale_to,
            faults=self.faults,
            rows=self.rows,
        )


@dataclass(frozen=True, slots=True)
class Result:
    """The part of a run's outcome that is kept."""

    seed: int
    failure: str
    is_stuck: bool
    is_long: bool
    lost: int
    doubled: int
    rows: int
    steps: int
    checkpoints: int
    finished_in_checkpoint: int
    launches: int
    rescaled_restores: int
    rescales: int
    scalings: int
    in_flight_in_checkpoint: int
    checkpoints_during_recovery: int
    recovering_restores: int
    recovering_rescaled_restores: int
    recovering_failures: int
    savepoints: int
    savepoints_restored: int
    savepoints_failed: int
    faults: Counter[str]
    pairs: Counter[Pair]


@dataclass(slots=True)
class Summary:
    runs: int = 0
    records_in: int = 0
    lost: int = 0
    duplicated: int = 0
    deadlocks: int = 0
    long: int = 0
    """The number of runs that still made progress when their steps were used up; they have not failed."""
    failures: int = 0
    """The number of runs that failed, in any way."""
    checkpoints_completed: int = 0
    checkpoints_during_recovery: int = 0
    checkpoints_with_finished_tasks: int = 0
    checkpoints_with_rows_in_flight: int = 0
    restores_during_recovery: int = 0
    """The number of restores from checkpoints that were taken while rows were being recovered."""
    rescaled_restores_during_recovery: int = 0
    """The number of these restores at another parallelism."""
    failures_during_recovery: int = 0
    restarts_of_the_job: int = 0
    rescaled_restores: int = 0
    rescales_while_running: int = 0
    changes_by_load: int = 0
    """How often jobs have changed their parallelism by themselves."""
    savepoints_made: int = 0
    savepoints_restored: int = 0
    savepoints_failed: int = 0
    """The number of requests for savepoints that were refused or failed."""
    steps: int = 0
    seconds: float = 0.0
    first_failing_seed: int | None = None
    failure: str = ""
    faults: Counter[str] = field(default_factory=Counter)
    pairs: Counter[Pair] = field(default_factory=Counter)
    """The pairs of state and event, see `midstream_lab.coverage`; empty if coverage was not requested."""

    @property
    def runs_per_s(self) -> float:
        return self.runs / self.seconds if self.seconds else 0.0

    def add(self, result: Result) -> None:
        self.runs += 1
        self.records_in += result.rows
        self.lost += result.lost
        self.duplicated += result.doubled
        self.deadlocks += result.is_stuck
        self.long += result.is_long
        self.checkpoints_completed += result.checkpoints
        self.checkpoints_with_finished_tasks += result.finished_in_checkpoint
        self.checkpoints_with_rows_in_flight += result.in_flight_in_checkpoint
        self.checkpoints_during_recovery += result.checkpoints_during_recovery
        self.restores_during_recovery += result.recovering_restores
        self.rescaled_restores_during_recovery += result.recovering_rescaled_restores
        self.failures_during_recovery += result.recovering_failures
        self.restarts_of_the_job += result.launches - 1
        self.rescaled_restores += result.rescaled_restores
        self.rescales_while_running += result.rescales
        self.changes_by_load += result.scalings
        self.savepoints_made += result.savepoints
        self.savepoints_restored += result.savepoints_restored
        self.savepoints_failed += result.savepoints_failed
        self.steps += result.steps
        self.faults += result.faults
        self.pairs.update(result.pairs)
        if result.failure:
            self.failures += 1
            if self.first_failing_seed is None or result.seed < self.first_failing_seed:
                self.first_failing_seed = result.seed
                self.failure = result.failure


def run_seed(options: Options, seed: int) -> Result:
    if not options.coverage:
        result = _result(run(options.scenario(seed)), Counter())
    else:
        with recording() as pairs:
            result = _result(run(options.scenario(seed)), pairs)
    collect()
    return result


def _result(outcome: Outcome, pairs: Counter[Pair]) -> Result:
    return Result(
        seed=outcome.scenario.seed,
        failure=outcome.failures[0] if outcome.failures else "",
        is_stuck=outcome.is_stuck,
        is_long=outcome.is_long,
        lost=outcome.lost,
        doubled=outcome.doubled,
        rows=outcome.rows,
        steps=outcome.steps,
        checkpoints=outcome.checkpoints,
        finished_in_checkpoint=outcome.finished_in_checkpoint,
        launches=outcome.launches,
        rescaled_restores=outcome.rescaled_restores,
        rescales=outcome.rescales,
        scalings=outcome.scalings,
        in_flight_in_checkpoint=outcome.in_flight_in_checkpoint,
        checkpoints_during_recovery=outcome.checkpoints_during_recovery,
        recovering_restores=outcome.recovering_restores,
        recovering_rescaled_restores=outcome.recovering_rescaled_restores,
        recovering_failures=outcome.recovering_failures,
        savepoints=outcome.savepoints,
        savepoints_restored=outcome.savepoints_restored,
        savepoints_failed=outcome.savepoints_failed,
        faults=outcome.faults,
        pairs=pairs,
    )


def campaign(
    options: Options,
    seeds: Sequence[int],
    *,
    processes: int | None = None,
    progress: Callable[[Summary], None] | None = None,
    failures_max: int = 1,
    seconds_max: float | None = None,
) -> Summary:
    """Run all seeds, or until `failures_max` runs have failed, or for about `seconds_max`."""
    started_s = time.monotonic()
    summary = Summary()

    def in_time() -> bool:
        return seconds_max is None or time.monotonic() - started_s < seconds_max

    chosen = takewhile(lambda _: in_time(), seeds)
    for result in _results(options, chosen, min(processes or os.cpu_count() or 1, -(-len(seeds) // CHUNK))):
        summary.add(result)
        summary.seconds = time.monotonic() - started_s
        if progress is not None:
            progress(summary)
        if summary.failures >= failures_max:
            break
    summary.seconds = time.monotonic() - started_s
    return summary


def _results(options: Options, seeds: Iterator[int], processes: int) -> Iterator[Result]:
    """Yield results in the order of `seeds`, which are consumed only shortly before they are run."""
    if processes == 1:
        with collecting_rarely():
            yield from map(partial(run_seed, options), seeds)
        return
    with workers(processes) as pool:
        begun: deque[AsyncResult[list[Result]]] = deque()
        while chunk := list(islice(seeds, CHUNK)):
            begun.append(pool.apply_async(_run_chunk, (options, chunk)))
            if len(begun) > 2 * processes:
                yield from begun.popleft().get()
        for results in begun:
            yield from results.get()


def _run_chunk(options: Options, seeds: list[int]) -> list[Result]:
    return [run_seed(options, seed) for seed in seeds]


def workers(processes: int) -> Pool:
    """Return processes that run worlds. Their libraries use one thread each, as in a slot, since more would not help."""
    limit_threads()  # the processes inherit it; this one may have imported polars already
    return get_context("spawn").Pool(processes, collect_rarely)


def shrink(scenario: Scenario) -> tuple[Scenario, str]:
    """Return a smaller scenario that still fails, and its failure: with fewer faults and rows, lower parallelism, or
    calmer times.
    """
    failure = (run(scenario).failures or ["passes"])[0]
    tries = 0
    shrunk = True
    while shrunk:
        shrunk = False
        for smaller in _smaller(scenario):
            tries += 1
            if tries > SHRINK_TRIES_MAX:
                return scenario, failure
            failures = run(smaller).failures
            if failures:
                scenario, failure, shrunk = smaller, failures[0], True
                break
    return scenario, failure


def _smaller(scenario: Scenario) -> Iterable[Scenario]:
    faults = scenario.faults
    if len(faults) > 1:
        yield replace(scenario, faults=faults[: len(faults) // 2])
        yield replace(scenario, faults=faults[len(faults) // 2 :])
    for index in range(len(faults)):
        yield replace(scenario, faults=faults[:index] + faults[index + 1 :])
    if scenario.rows > 5:
        yield replace(scenario, rows=scenario.rows // 2)
    if scenario.rescaled is not None:
        yield replace(scenario, rescaled=None)
    if scenario.splits > 1:
        yield replace(scenario, splits=1)
    if scenario.keys > 1:
        yield replace(scenario, keys=1)
    if scenario.sink_rows:
        yield replace(scenario, sink_rows=0)
    if scenario.row_us:
        yield replace(scenario, row_us=0)
    if scenario.rounds > 1:
        yield replace(scenario, rounds=1)
    highest = max(node.parallelism for node in scenario.shape)
    if highest > 1:
        lower = tuple(replace(node, parallelism=min(node.parallelism, highest - 1)) for node in scenario.shape)
        yield replace(scenario, shape=lower, rescaled=None)
    if scenario.tempo.clock_tick_us:
        yield replace(scenario, tempo=replace(scenario.tempo, clock_tick_us=0))
    if scenario.tempo.interleave:
        yield replace(scenario, tempo=replace(scenario.tempo, interleave=0.0))
