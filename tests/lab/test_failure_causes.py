"""What fails has a reason, in every run: what strikes elsewhere, or long before, excuses nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from midstream.engine.coordinator import Coordinator
from midstream.engine.protocol import messages as m
from midstream.engine.worker.task import Task
from midstream.engine.worker.task_snapshots import TaskSnapshots
from midstream.simulation.faults import Fault
from midstream_lab.campaign import Options, campaign
from midstream_lab.checkers.failure_causes import LASTS_US, FailureCauses
from midstream_lab.run import CIRCLES_MAX, STILL_MAX, Run, run
from midstream_lab.scenarios.scenario import Scenario, draw
from midstream_lab.scenarios.time_bounds import patience_s

EXPIRED = "not complete within 60 s: no answer from sink (subtask 0)"
UNION = "operator 'tally' has union state 'x' and only some of its subtasks have finished: it is not all of it"
TRIGGERED_US = 100_000_000


def struck(**changes: object) -> Scenario:
    """A small job of whose slots one is killed, early."""
    drawn = draw(7, topology="keyed", parallelism=2, faults=(), rows=60)
    calm = replace(drawn, timeout_s=60.0, interval_s=0.002, row_us=0, sink_rows=0, batch_rows=3, aligned_timeout_s=None)
    return replace(calm, faults=(Fault(120, "kill_slot", 1),), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reason", "timeout_s", "struck_us", "is_bug"),
    [
        pytest.param("state could not be written: no room [sim]", 60.0, (), False, id="a-fault-says-so"),
        pytest.param(
            "a channel refers to shared/x, which is no longer kept", 60.0, (TRIGGERED_US,), True, id="refused"
        ),
        pytest.param(UNION, 60.0, (TRIGGERED_US,), True, id="union-state-and-nobody-has-finished"),
        pytest.param(EXPIRED, 60.0, (), True, id="nothing-struck"),
        pytest.param(EXPIRED, 60.0, (TRIGGERED_US - 2 * LASTS_US,), True, id="struck-long-before"),
        pytest.param(EXPIRED, 60.0, (TRIGGERED_US + 1,), True, id="struck-and-too-short-to-explain-it"),
        pytest.param(EXPIRED, 10.0, (TRIGGERED_US + 1,), False, id="struck-since"),
        pytest.param(EXPIRED, 10.0, (TRIGGERED_US - 1,), False, id="struck-just-before"),
        pytest.param(EXPIRED, 4.0, (), False, id="so-long-it-may-take"),
    ],
)
def test_a_failed_checkpoint_is_explained_or_a_bug(
    reason: str, timeout_s: float, struck_us: tuple[int, ...], is_bug: bool
) -> None:
    bugs: list[str] = []
    causes = FailureCauses(list(struck_us), 5.0, lambda directory: directory == "chk-2", bugs.append)
    causes.triggered(1, TRIGGERED_US)
    causes.checkpoint_failed(1, reason, timeout_s)
    assert bugs == ([f"checkpoint 1 fails without a reason: {reason}"] if is_bug else [])


@pytest.mark.parametrize(("topology", "waits_for_all"), [("pipeline", False), ("held", True)])
def test_a_barrier_waits_for_the_rows_in_front_of_it_where_it_cannot_overtake(
    topology: str, waits_for_all: bool
) -> None:
    drawn = draw(7, topology=topology, parallelism=2, faults=(), rows=60)
    slow = replace(drawn, aligned_timeout_s=0.0, batch_rows=3, row_us=1000, sink_rows=0, changes=0.0)
    assert (patience_s(replace(slow, rows=600)) > 2 * patience_s(slow)) == waits_for_all


def test_union_state_refuses_a_checkpoint_once_a_task_has_finished() -> None:
    bugs: list[str] = []
    causes = FailureCauses([], 5.0, lambda _: False, bugs.append)
    causes.on_message(m.TaskFinished(0, m.TaskId(0, 0)), None)
    causes.checkpoint_failed(1, UNION, 60.0)
    assert not bugs


@pytest.mark.parametrize(
    ("reason", "pending_id", "is_bug"),
    [
        pytest.param(
            "checkpoint 3 was cancelled by the coordinator or a task upstream", 3, True, id="the-driver-still-waits"
        ),
        pytest.param(
            "checkpoint 3 was cancelled by the coordinator or a task upstream", 4, False, id="another-one-is-taken-now"
        ),
        pytest.param(
            "checkpoint 3 was cancelled by the coordinator or a task upstream", None, False, id="none-is-taken-now"
        ),
        pytest.param("task v1/0 has finished", 3, False, id="it-had-finished"),
    ],
)
def test_a_checkpoint_that_the_driver_waits_for_is_given_up_by_no_task(
    reason: str, pending_id: int | None, is_bug: bool
) -> None:
    bugs: list[str] = []
    causes = FailureCauses([], 5.0, lambda _: False, bugs.append)
    causes.on_message(m.CheckpointDecline(0, 3, m.TaskId(1, 0), reason, False, ()), pending_id)
    assert bugs == ([f"v1/0 gives up checkpoint 3, which is still pending: {reason}"] if is_bug else [])


def test_the_runs_that_are_broken_below_are_clean() -> None:
    outcome = run(struck())
    assert not outcome.failures and outcome.faults["kill_slot"] == 1 and outcome.checkpoints > 1


def test_a_crash_that_strikes_a_minute_after_it_was_set_up_explains_what_it_breaks() -> None:
    """The slot dies with the next publication, which comes late; the checkpoint after that has no answer from it."""
    outcome = run(draw(77_000_086))
    assert not outcome.failures and outcome.faults["crash_at_publish"] == 1


def test_a_task_that_fails_by_itself_is_a_bug_although_faults_have_struck(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Task.checkpoint_completed

    def failing(self: Task, checkpoint_id: int) -> None:
        original(self, checkpoint_id)
        if checkpoint_id > 1:
            self.fail(RuntimeError("all by itself"))

    monkeypatch.setattr(Task, "checkpoint_completed", failing)
    outcome = run(struck())
    assert "fails without a reason" in outcome.failures[0] and "all by itself" in outcome.failures[0]


def test_an_acknowledgement_that_is_lost_is_a_bug_although_faults_have_struck(monkeypatch: pytest.MonkeyPatch) -> None:
    original: Callable[..., None] = TaskSnapshots._acknowledge

    def losing(self: Any, checkpoint_id: int, *arguments: Any) -> None:
        if checkpoint_id < 3:
            original(self, checkpoint_id, *arguments)

    monkeypatch.setattr(TaskSnapshots, "_acknowledge", losing)
    outcome = run(struck())
    assert "checkpoint 3 fails without a reason: not complete within 60 s" in outcome.failures[0]


# ---- stuck, or long


def test_a_run_that_gets_on_and_has_had_its_steps_is_long_and_has_not_failed() -> None:
    outcome = run(struck(steps_max=200))
    assert outcome.is_long and not outcome.is_stuck and not outcome.failures
    assert outcome.why_not_passed == ["the run is not over after 200 steps"]


def test_long_runs_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Options, "scenario", lambda self, seed: struck(seed=seed, steps_max=200))
    summary = campaign(Options(), range(2), processes=1)
    assert (summary.runs, summary.long, summary.deadlocks, summary.failures) == (2, 2, 0, 0)


@pytest.mark.parametrize(("checkpoints_complete", "polls"), [(False, STILL_MAX), (True, CIRCLES_MAX)])
def test_a_run_in_which_nothing_moves_is_stuck_though_checkpoints_complete(
    checkpoints_complete: bool, polls: int
) -> None:
    prepared = Run(struck(), keep_trace=False, make_coordinator=Coordinator)
    prepared._check_progress()
    for _ in range(polls):
        assert not prepared._is_stuck
        prepared._checker.checkpoints += checkpoints_complete
        prepared._check_progress()
    assert prepared._is_stuck
