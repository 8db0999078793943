"""Measures how many whole runs of the simulator one core makes per second: a small job with one fault, and drawn ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec

from midstream.engine.core.errors import InvariantError
from midstream.simulation.faults import Fault
from midstream.simulation.garbage_collection import collect
from midstream.simulation.world import Tempo
from midstream_lab.campaign import workers
from midstream_lab.run import run as simulate
from midstream_lab.scenarios.random_scenarios import random_scenario
from midstream_lab.scenarios.scenario import Scenario, draw

SMALL_RUNS: Final = 400
WARM_UP_RUNS: Final = 10
RANDOM_RUNS: Final = 200
FIRST_SEED: Final = 1_000_000
ROWS: Final = 200
ROW_US: Final = 20
"""The time that simulated operators take for a row: if it were drawn, some runs would have a dozen checkpoints."""
CHECKPOINTS: Final = 3
"""The least average number of checkpoints per run."""
_FAULTS: Final = {
    1: ("kill_slot", "user_error", "cut_control", "stop_driver"),
    2: ("kill_slot", "user_error", "cut_link", "stop_driver"),
}
"""The faults; at parallelism 1 there is only one slot, which has no links."""
_FAULT_STEP: Final = {1: 40, 2: 160}
"""The step of the fault, chosen so that it strikes before the end."""
_INTERVAL_S: Final = 0.0009


class SimulateResult(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one process of `python -m midstream_lab simulate`, by its processor time."""

    benchmark: str = "simulate"
    small_runs: int
    small_runs_per_s: float
    """Runs of source, keyed count and sink in two subtasks each; 200 rows, 3 checkpoints, 1 fault, a checkpointed end."""
    small_steps_per_run: float
    small_checkpoints_per_run: float
    single_runs_per_s: float
    """The same runs with one subtask each."""
    single_steps_per_run: float
    single_checkpoints_per_run: float
    random_runs: int
    random_runs_per_s: float
    """Runs as `python -m midstream_lab simulate` draws them."""
    random_steps_per_run: float
    random_checkpoints_per_run: float
    steps_per_s: int
    """Steps per second over all of them."""


def small(number: int, parallelism: int) -> Scenario:
    """Return a fixed job; `number` determines the order of events, the fault and its target."""
    drawn = draw(FIRST_SEED + number, topology="keyed", parallelism=parallelism, faults=(), rows=ROWS)
    kinds, step = _FAULTS[parallelism], _FAULT_STEP[parallelism] + number % 40
    return replace(
        drawn,
        splits=2,
        rounds=1,
        row_us=ROW_US,
        queue_time_s=0.01,
        keys=10,
        skew=0.0,
        text_bytes=10,
        blocking=True,
        batch_rows=25,
        interval_s=_INTERVAL_S,
        timeout_s=60.0,
        min_pause_s=0.0,
        retained=1,
        sink_rows=0,
        sink_pause_s=0.002,
        aligned_timeout_s=(None, 0.0)[number % 2],
        tempo=Tempo(io_us=300, control_us=100, data_us=50),
        faults=(Fault(step, kinds[number % len(kinds)], number * 7919),),
    )


def random(number: int) -> Scenario:
    return random_scenario(FIRST_SEED + number)


def run(slots: object) -> SimulateResult:
    """Run the benchmark, without `slots`. Raises InvariantError if a run fails, which makes the speed meaningless."""
    single, double = partial(small, parallelism=1), partial(small, parallelism=2)
    with workers(1) as pool:
        for warm_up in double, random:  # what they import is not theirs to pay for
            pool.apply(_measure, (warm_up, WARM_UP_RUNS))
        small_s, small_steps, small_checkpoints = pool.apply(_measure, (double, SMALL_RUNS))
        single_s, single_steps, single_checkpoints = pool.apply(_measure, (single, SMALL_RUNS))
        random_s, random_steps, random_checkpoints = pool.apply(_measure, (random, RANDOM_RUNS))
    for checkpoints in small_checkpoints, single_checkpoints:
        if checkpoints < CHECKPOINTS * SMALL_RUNS:
            raise InvariantError(f"the small runs have {checkpoints / SMALL_RUNS} checkpoints, not {CHECKPOINTS}")
    return SimulateResult(
        small_runs=SMALL_RUNS,
        small_runs_per_s=round(SMALL_RUNS / small_s, 1),
        small_steps_per_run=round(small_steps / SMALL_RUNS, 1),
        small_checkpoints_per_run=round(small_checkpoints / SMALL_RUNS, 1),
        single_runs_per_s=round(SMALL_RUNS / single_s, 1),
        single_steps_per_run=round(single_steps / SMALL_RUNS, 1),
        single_checkpoints_per_run=round(single_checkpoints / SMALL_RUNS, 1),
        random_runs=RANDOM_RUNS,
        random_runs_per_s=round(RANDOM_RUNS / random_s, 1),
        random_steps_per_run=round(random_steps / RANDOM_RUNS, 1),
        random_checkpoints_per_run=round(random_checkpoints / RANDOM_RUNS, 1),
        steps_per_s=round((small_steps + single_steps + random_steps) / (small_s + single_s + random_s)),
    )


def _measure(scenario: Callable[[int], Scenario], runs: int) -> tuple[float, int, int]:
    """Return the seconds of processor time, the steps and the checkpoints of all runs."""
    began_s = time.process_time()
    steps = checkpoints = 0
    for number in range(runs):
        outcome = simulate(scenario(number))
        collect()
        if outcome.failures:
            raise InvariantError(f"run {outcome.scenario.seed} has failed: {outcome.failures[0]}")
        steps += outcome.steps
        checkpoints += outcome.checkpoints
    return time.process_time() - began_s, steps, checkpoints
