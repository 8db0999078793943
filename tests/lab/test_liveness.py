"""What a job owes must come within a bound that follows from the scenario, once nothing disturbs the job any more."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from midstream.engine.coordinator.checkpoints.schedule import FINAL_RETRY_MS
from midstream.engine.protocol import messages as m
from midstream_lab.checkers.failure_causes import LASTS_US
from midstream_lab.checkers.liveness_checker import COMMIT_S_MAX, JOB_ENDS, LivenessChecker
from midstream_lab.run import run
from midstream_lab.scenarios.extremes import EXTREMES, SHARE, with_extremes
from midstream_lab.scenarios.random_scenarios import random_scenario
from midstream_lab.scenarios.scenario import draw
from midstream_lab.scenarios.targeted_ends import ending_in_good_time, ending_without_another
from midstream_lab.scenarios.time_bounds import bound_s


class Watched:
    """A job that may owe something for 2 s."""

    def __init__(self) -> None:
        self.now_us = 0
        self.struck_us: list[int] = []
        self.bugs: list[str] = []
        self.liveness = LivenessChecker(2.0, self.struck_us, lambda: self.now_us, self.bugs.append)

    def after(self, seconds: float) -> None:
        self.now_us += int(seconds * 1e6)


@pytest.mark.parametrize(("seconds", "is_late"), [(1.9, False), (2.1, True)])
def test_an_answer_and_the_end_come_within_the_bound(seconds: float, is_late: bool) -> None:
    for what in ("answer", "end"):
        watched = Watched()
        if what == "answer":
            watched.liveness.on_request(1, m.DoCheckpoint())
        else:
            watched.liveness.owes(JOB_ENDS)
        watched.after(seconds)
        watched.liveness.comes(1 if what == "answer" else JOB_ENDS)
        watched.after(100)
        watched.liveness.check()
        assert len(watched.bugs) == is_late, "what has come is owed no more"


def test_what_has_not_come_is_found_when_it_is_looked_for() -> None:
    watched = Watched()
    watched.liveness.on_request(1, m.DoStop(drain=True))
    watched.after(2.1)
    watched.liveness.check()
    assert "an answer to DoStop(drain=True" in watched.bugs[0] and "at most 2.000 s" in watched.bugs[0]


def test_a_fault_an_attempt_and_a_failed_checkpoint_give_more_time_and_then_no_more() -> None:
    watched = Watched()
    watched.liveness.on_request(1, m.DoCheckpoint())
    watched.after(1)
    watched.struck_us.append(watched.now_us)
    watched.after(LASTS_US / 1e6 + 1.9)
    watched.liveness.check()
    watched.liveness.deployed()
    watched.after(1.9)
    watched.liveness.check()
    watched.liveness.failed(1)
    watched.after(2 * FINAL_RETRY_MS / 1000 + 1.9)
    watched.liveness.check()
    assert not watched.bugs
    watched.after(0.2)
    watched.liveness.check()
    assert len(watched.bugs) == 1


def test_each_commit_that_is_done_gives_more_time() -> None:
    watched = Watched()
    watched.liveness.on_message(m.CommitDone(0), None)
    watched.liveness.owes(JOB_ENDS)
    for request in range(5):
        watched.liveness.on_message(m.CommitDone(request), None)
    watched.after(2.0 + 5 * COMMIT_S_MAX)
    watched.liveness.check()
    assert not watched.bugs
    watched.after(0.1)
    watched.liveness.check()
    assert len(watched.bugs) == 1


def test_an_attempt_that_begins_has_not_come_to_its_end() -> None:
    watched = Watched()
    watched.liveness.owes(JOB_ENDS)
    watched.liveness.deployed()
    watched.after(100)
    watched.liveness.check()
    assert not watched.bugs


def test_the_bound_follows_from_the_scenario() -> None:
    drawn = replace(draw(1, topology="keyed", faults=()), timeout_s=600.0)
    slower = replace(drawn, row_us=drawn.row_us + 5000)
    assert 0 < bound_s(drawn) < bound_s(slower) < bound_s(replace(slower, on_slots=1.0)) < math.inf
    assert bound_s(replace(drawn, timeout_s=0.0)) == math.inf


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("region", [ending_without_another, ending_in_good_time])
def test_jobs_without_a_checkpoint_of_their_own_accord_end_in_time(region, seed):
    outcome = run(region(seed))
    assert not outcome.why_not_passed


def test_each_setting_is_far_from_the_usual_in_some_seeds_and_most_seeds_are_as_usual() -> None:
    usual = draw(1)
    drawn = [with_extremes(usual, seed) for seed in range(2000)]
    assert 0.5 * SHARE < sum(scenario != usual for scenario in drawn) / len(drawn) < 1.5 * SHARE
    for name, values in EXTREMES.items():
        assert {getattr(scenario, name) for scenario in drawn} >= {*values}, name


def test_a_slot_in_a_call_for_which_all_others_wait_is_no_stuck_job() -> None:
    """Their looking after state on disk takes tens of thousands of steps meanwhile."""
    assert run(random_scenario(810_000_474)).failures == []
