"""How many whole runs of the simulator one core does in a second: a small job with one fault, and what seeds draw."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import msgspec

from midstream.core.errors import InvariantError
from midstream.sim.campaign import collect, workers
from midstream.sim.run import run as simulate
from midstream.sim.scenario import Fault, Scenario, draw
from midstream.sim.world import Tempo

SMALL_RUNS: Final = 400
RANDOM_RUNS: Final = 200
FIRST_SEED: Final = 1_000_000
ROWS: Final = 200
CHECKPOINTS: Final = 3
"""At least so many on the average."""
_FAULTS: Final = ("kill_slot", "user_error", "cut_link", "stop_driver")


class SimulateResult(msgspec.Struct, frozen=True, kw_only=True):
    """Each figure is of one process of `midstream simulate`, by its processor time."""

    benchmark: str = "simulate"
    small_runs: int
    small_runs_per_s: float
    """Source, keyed count and sink; 200 rows, 3 checkpoints, 1 fault, a checkpointed end."""
    small_steps_per_run: float
    small_checkpoints_per_run: float
    random_runs: int
    random_runs_per_s: float
    """As `midstream simulate` draws them."""
    random_steps_per_run: float
    random_checkpoints_per_run: float
    steps_per_s: int
    """Over all of them."""


def small(number: int) -> Scenario:
    """A fixed job; `number` chooses the order of events and what the fault is and hits."""
    drawn = draw(FIRST_SEED + number, topology="keyed", parallelism=2, faults=(), rows=ROWS)
    return replace(
        drawn,
        splits=2,
        rounds=1,
        keys=10,
        skew=0.0,
        text_bytes=10,
        blocking=True,
        batch_rows=25,
        interval_s=0.001,
        timeout_s=60.0,
        min_pause_s=0.0,
        retained=1,
        sink_rows=0,
        sink_pause_s=0.002,
        aligned_timeout_s=(None, 0.0)[number % 2],
        tempo=Tempo(io_us=300, control_us=100, data_us=50),
        faults=(Fault(160 + number % 40, _FAULTS[number % len(_FAULTS)], number * 7919),),
    )


def random(number: int) -> Scenario:
    return draw(FIRST_SEED + number)


def run() -> SimulateResult:
    """Raises InvariantError when a run fails: then the engine is wrong, and its speed means nothing."""
    with workers(1) as pool:
        pool.apply(_measure, (small, 10))
        small_s, small_steps, small_checkpoints = pool.apply(_measure, (small, SMALL_RUNS))
        random_s, random_steps, random_checkpoints = pool.apply(_measure, (random, RANDOM_RUNS))
    if small_checkpoints < CHECKPOINTS * SMALL_RUNS:
        raise InvariantError(f"the small runs have {small_checkpoints / SMALL_RUNS} checkpoints, not {CHECKPOINTS}")
    return SimulateResult(
        small_runs=SMALL_RUNS,
        small_runs_per_s=round(SMALL_RUNS / small_s, 1),
        small_steps_per_run=round(small_steps / SMALL_RUNS, 1),
        small_checkpoints_per_run=round(small_checkpoints / SMALL_RUNS, 1),
        random_runs=RANDOM_RUNS,
        random_runs_per_s=round(RANDOM_RUNS / random_s, 1),
        random_steps_per_run=round(random_steps / RANDOM_RUNS, 1),
        random_checkpoints_per_run=round(random_checkpoints / RANDOM_RUNS, 1),
        steps_per_s=round((small_steps + random_steps) / (small_s + random_s)),
    )


def _measure(scenario: Callable[[int], Scenario], runs: int) -> tuple[float, int, int]:
    """Seconds of processor time, steps and checkpoints of all of them."""
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
