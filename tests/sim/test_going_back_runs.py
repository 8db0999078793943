"""Runs that go back to older checkpoints and savepoints or start over, and drivers that wake up behind others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from midstream.coordinator import Coordinator
from midstream.coordinator.events import JobPlan
from midstream.sim.on_disk_mutations import frozen, going_back_and_forth
from midstream.sim.run import Run, run
from midstream.sim.scenario import Fault, draw


class _Followed(Run):
    """It counts in what ways its job was started."""

    starts: Counter[str] = Counter()

    def _plan(self, *given: object) -> JobPlan:
        plan = super()._plan(*given)  # type: ignore[arg-type]
        by_name = plan.restore is not None and plan.restore != "latest"
        self.starts["fresh" if plan.fresh else str(plan.newer_output) if by_name else "as usual"] += 1
        return plan


def test_a_job_goes_back_and_what_it_puts_out_is_exact_or_what_was_asked_for() -> None:
    went_back = 0
    _Followed.starts.clear()
    for seed in range(12):
        outcome = _Followed(going_back_and_forth(seed), False, Coordinator).go()
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        went_back += outcome.went_back
    assert went_back > 12
    assert all(_Followed.starts[way] > 0 for way in ("take-back", "keep", "None", "fresh")), _Followed.starts


@pytest.mark.parametrize("topology", ["window", "totals", "tables", "random"])
def test_state_of_every_kind_is_that_of_the_checkpoint_that_is_gone_back_to(topology: str) -> None:
    went_back = 0
    for seed in range(6):
        outcome = run(draw(seed, topology=topology, faults=("go_back", "savepoint", "kill_slot"), rows=80))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        went_back += outcome.went_back
    assert went_back > 0


def test_a_driver_that_is_frozen_before_it_writes_metadata_disturbs_nobody_when_it_wakes_up() -> None:
    late = 0
    for seed in range(8):
        outcome = run(frozen(seed), keep_trace=True)
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        assert outcome.trace is not None
        order = list(outcome.trace.lines(r"Deploy job_id=job2|driver0 .*note +wrote chk-\d+/_metadata"))
        late += any("Deploy" in line for line in order) and "wrote" in order[-1]
    assert late > 0, "none wrote behind the next one"


def test_an_id_that_a_frozen_driver_has_claimed_is_not_used_by_the_third_one() -> None:
    """It would overwrite that one's checkpoint when it wakes up."""
    for seed in range(20, 30):
        outcome = run(draw(seed, topology="keyed", faults=("go_back", "freeze_at_publish", "kill_slot"), rows=80))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"


def test_files_that_are_said_not_to_be_written_are_not_left_behind() -> None:
    lied = 0
    for seed in range(8):
        drawn = draw(seed, topology="keyed", faults=(), rows=100)
        faults = tuple(Fault(60 + 40 * i, "storage_lies", seed + i) for i in range(4))
        outcome = run(replace(drawn, faults=faults))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        lied += outcome.faults["storage_lies"]
    assert lied > 0


def test_a_driver_that_wakes_up_between_two_commits_commits_nothing_of_a_line_that_was_left() -> None:
    outcome = run(draw(251_534_597))
    assert not outcome.failures, outcome.failures[0]
