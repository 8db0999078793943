"""Jobs whose slots have to leave: whatever befalls them meanwhile nothing is lost, and if nothing does no row is read twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from effort import some
from midstream.engine.coordinator import Coordinator
from midstream.simulation.faults import PARALLELISMS, Fault
from midstream_lab.fault_kinds import LEAVING
from midstream_lab.run import Run, run
from midstream_lab.scenarios.scenario import Scenario, draw

pytestmark = pytest.mark.turns(3)

LONG_GRACE = (0, 51, 102)
"""Victims that have two seconds: one slot, or (a fifth of them) all."""


def undisturbed(seed: int, *faults: Fault) -> Scenario:
    drawn = draw(seed, topology="keyed_broadcast", parallelism=3, faults=(), rows=200)
    return replace(drawn, timeout_s=60.0, faults=faults)


def rows_read(job: Run) -> tuple[int, int, int, int]:
    """How many rows its sources have emitted, how many they have, how many restarts and attempts the job had."""
    ended = job.driver.outcome
    assert ended is not None and ended.state == "finished", ended
    emitted = sum(v.operators[0].rows_out for v in ended.status.vertices if v.operators[0].uid in job.sources)
    there = sum(sum(source.rows) for source in job.sources.values())
    return emitted, there, ended.status.restarts, ended.status.attempt + 1


@pytest.mark.parametrize("kind", [LEAVING, "rescale"])
def test_no_row_is_read_twice(kind: str) -> None:
    switched = 0
    for seed in range(8):
        random = Random(f"{kind} {seed}")
        victims = LONG_GRACE if kind == LEAVING else tuple(range(len(PARALLELISMS)))
        faults = tuple(Fault(random.randrange(80, 600), kind, random.choice(victims)) for _ in range(2))
        job = Run(undisturbed(seed, *sorted(faults, key=lambda fault: fault.step)), False, Coordinator)
        outcome = job.go()
        assert not outcome.why_not_passed, f"seed {seed}: {outcome.why_not_passed[0]}"
        emitted, there, restarts, attempts = rows_read(job)
        assert (emitted, restarts) == (there, 0), f"seed {seed}"
        switched += attempts - 1
    assert switched > 5


AT_THE_SAME_TIME = (
    *("kill_slot", "cut_link", "user_error", "slot_fails", "slots_late", "rescale", "rescale_struck", "checkpoint"),
    *("stop", "stop_savepoint", "savepoint_struck", "drain", "kill_driver", "stop_driver", "go_back"),
    *("write_fails", "publish_fails", "publish_hangs", "strike_committing"),
)


@pytest.mark.parametrize("kind", AT_THE_SAME_TIME)
def test_nothing_is_lost_or_doubled_whatever_befalls_a_job_that_moves(kind: str) -> None:
    struck: Counter[str] = Counter()
    for seed in some(range(2)):
        random = Random(f"{kind} {seed}")
        faults = [Fault(random.randrange(80, 500), LEAVING, random.randrange(1 << 20)) for _ in range(2)]
        faults += [Fault(fault.step + random.randrange(1, 80), kind, random.randrange(1 << 20)) for fault in faults]
        drawn = draw(seed, topology="keyed_broadcast", parallelism=3, faults=(), rows=200)
        outcome = run(replace(drawn, faults=tuple(sorted(faults, key=lambda fault: fault.step))))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        struck.update(outcome.faults)
    assert struck[LEAVING] > 1 and struck[kind] > 0
