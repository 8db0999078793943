"""Runs full of savepoints: asked for at any moment, failing at their place, stopped with, moved, restored, forked."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from effort import some
from midstream.engine.coordinator import Coordinator
from midstream.engine.protocol.messages import DoStop
from midstream.simulation.cluster import SimulatedDriver
from midstream.simulation.faults import Fault
from midstream_lab.fault_kinds import SAVEPOINTS
from midstream_lab.restarter import Restarter
from midstream_lab.run import Run, run
from midstream_lab.savepoints import Saved, Savepoints
from midstream_lab.scenarios.scenario import Scenario, draw

pytestmark = pytest.mark.turns(3)

SAVING = ("savepoint", "stop_savepoint")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What has become of the savepoints of a run."""
    found: Counter[str] = Counter()

    def count(owner: type, method: str) -> None:
        original = getattr(owner, method)

        def counted(self: Any, *arguments: Any, **named: Any) -> Any:
            found[method] += 1
            return original(self, *arguments, **named)

        monkeypatch.setattr(owner, method, counted)

    count(Savepoints, "move")
    count(Savepoints, "forget_below")
    count(Restarter, "_continue_from")
    return found


@pytest.mark.parametrize("topology", ["keyed", "keyed_broadcast", "window", "tally", "random"])
def test_a_savepoint_is_all_that_a_job_needs_to_go_on(topology: str, seen: Counter[str]) -> None:
    made = restored = rescaled = 0
    for seed in range(8):
        outcome = run(draw(seed, topology=topology, rescale_to=1 + seed % 3, faults=SAVING, rows=100))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        made += outcome.savepoints
        restored += outcome.savepoints_restored
        rescaled += outcome.rescaled_restores
    assert made > 0 and restored > 0 and rescaled > 0
    assert seen["move"] > 0, "none was moved to another place"
    assert seen["forget_below"] > 0, "no directory was gone"


def test_a_savepoint_that_fails_leaves_its_place_free_and_the_job_running() -> None:
    """The rules of the run: the place is free, the sources read on, nothing but the savepoint fails."""
    failed = struck = 0
    for seed in some(range(20)):
        outcome = run(draw(seed, topology="keyed", faults=("savepoint_fails",), rows=100))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        assert outcome.launches == 1 or outcome.savepoints > 0, "the job has stopped without one"
        failed += outcome.savepoints_failed
        struck += outcome.faults["savepoint_fails"]
    assert failed > struck / 2


def test_a_stop_with_a_savepoint_before_any_task_runs_is_answered_when_another_stop_ends_the_job() -> None:
    """With the reason that there is: no checkpoint was made, so there is nothing to make a savepoint of."""
    struck = Fault(12, "savepoint_struck", 731169)  # a stop with a savepoint, and 512 µs later a stop, which goes back
    scenario = draw(0, topology="tally", parallelism=7, faults=(), rows=100)
    outcome = run(replace(scenario, faults=(struck,)))
    assert not outcome.failures, outcome.failures[0]
    assert outcome.faults["savepoint_struck"] == 1 and outcome.savepoints_failed == 1


def test_every_state_of_a_savepoint_meets_failures_of_all_kinds(seen: Counter[str]) -> None:
    made = failed = 0
    for seed in some(range(25)):
        outcome = run(draw(seed, topology="keyed", faults=(*SAVEPOINTS, "kill_slot", "kill_driver"), rows=100))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        made += outcome.savepoints
        failed += outcome.savepoints_failed
    assert made > 0 and failed > 0 and seen["_continue_from"] > 0


class _Forked(Run):
    """It ends with a fork whenever there is a savepoint to begin it from."""

    forks = 0

    def _fork(self, share: float = 1.0) -> None:
        before = self.restarter.launches
        super()._fork(share)
        type(self).forks += self.restarter.launches > before


def _scenario(seed: int) -> Scenario:
    return draw(seed, topology="random", faults=("savepoint", "kill_slot"), rows=100)


def test_a_fork_from_an_old_savepoint_has_what_it_stands_for_and_the_rest() -> None:
    for seed in some(range(12)):
        outcome = _Forked(_scenario(seed), False, Coordinator).go()
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
    assert _Forked.forks > 0


def test_a_fork_that_is_stopped_before_its_tasks_are_deployed_has_what_its_savepoint_stands_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stands for that, although the last start of the job that it was forked from has finished with more."""
    stopped: list[SimulatedDriver] = []
    fork = Restarter.fork

    def fork_and_stop(self: Restarter, saved: Saved) -> None:
        fork(self, saved)
        self.driver.request(DoStop())
        stopped.append(self.driver)

    monkeypatch.setattr(Restarter, "fork", fork_and_stop)
    for seed in some(range(12)):
        outcome = _Forked(draw(seed, topology="random", faults=SAVING, rows=100), False, Coordinator).go()
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
    early = [driver for driver in stopped if (driver.plan.job_id, 0) not in driver.cluster.finished]  # not deployed
    states = [None if driver.outcome is None else driver.outcome.state for driver in early]
    assert "stopped" in states and {*states} <= {"stopped", "finished"}


def test_a_savepoint_that_is_changed_afterwards_is_noticed() -> None:
    class Changed(Run):
        def _wind_up(self) -> None:
            for saved in self.savepoints.saved:
                path = min(self.savepoints.files_at(saved.url))
                disk, below = self.savepoints._disk_of(saved.url)
                del disk.files[below + path]
            super()._wind_up()

    complaints = [
        failure
        for seed in range(10)
        for failure in Changed(draw(seed, topology="keyed", faults=("savepoint",), rows=100), False, Coordinator)
        .go()
        .failures
    ]
    assert complaints and all("was changed after it had been made" in complaint for complaint in complaints)
