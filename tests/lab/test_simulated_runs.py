"""The whole engine in one thread: jobs come to their exact end through every kind of fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from effort import some
from midstream.engine.worker.task import Task
from midstream.simulation.faults import Fault
from midstream_lab.fault_kinds import FAULTS
from midstream_lab.jobs.shapes import COMBINED, SHAPES
from midstream_lab.run import run
from midstream_lab.scenarios.scenario import draw


@pytest.mark.turns(3)
@pytest.mark.parametrize("topology", [*SHAPES, *COMBINED, "days", "random"])
def test_without_faults_the_output_is_exact_and_checkpoints_are_consistent_cuts(topology: str) -> None:
    checkpoints = 0
    for seed in some(range(4)):
        outcome = run(draw(seed, topology=topology, faults=(), rows=60))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        assert outcome.launches == 1
        checkpoints += outcome.checkpoints
    assert checkpoints > 0


@pytest.mark.turns(3)
@pytest.mark.parametrize("kind", FAULTS)
def test_nothing_is_lost_or_doubled_through_a_fault_of_one_kind(kind: str) -> None:
    struck = 0
    for seed in some(range(100, 106)):
        outcome = run(draw(seed, topology="keyed", faults=(kind,), rows=80))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        struck += outcome.faults[kind]
    assert struck > 0, "the fault never happened"


@pytest.mark.turns(3)
def test_nothing_is_lost_or_doubled_through_all_faults_at_once() -> None:
    seen: Counter[str] = Counter()
    rescaled = finished = 0
    for seed in range(500, 530):
        outcome = run(draw(seed))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        seen += outcome.faults
        rescaled += outcome.rescaled_restores
        finished += outcome.finished_in_checkpoint
    assert len(seen) >= len(FAULTS) - 3, f"only {sorted(seen)} have happened"
    assert rescaled > 0
    assert finished > 0


@pytest.mark.parametrize("aligned_timeout_s", [None, 0.0])
def test_rows_get_on_although_tasks_are_never_out_of_mail(
    monkeypatch: pytest.MonkeyPatch, aligned_timeout_s: float | None
) -> None:
    """As with checkpoints that follow each other faster than their mails can be handled."""
    original = Task.step

    def step(self: Task, *arguments: float) -> bool:
        if self.is_live:
            self.mails.append(lambda: None)
        return original(self, *arguments)

    monkeypatch.setattr(Task, "step", step)
    scenario = replace(
        draw(1, topology="keyed", parallelism=2, faults=(), rows=20),
        aligned_timeout_s=aligned_timeout_s,
        batch_rows=10,
        timeout_s=60.0,
        interval_s=0.02,
    )
    outcome = run(scenario)
    assert not outcome.failures, outcome.failures[0]
    assert outcome.rows == 20


@pytest.mark.parametrize(("parallelism", "rescale_to"), [(1, 2), (2, 1), (2, 3), (3, 2), (7, 2)])
def test_a_job_that_was_stopped_goes_on_at_another_parallelism(parallelism: int, rescale_to: int) -> None:
    rescaled = 0
    for seed in some(range(2)):
        scenario = draw(
            seed, topology="keyed_broadcast", parallelism=parallelism, rescale_to=rescale_to, faults=(), rows=200
        )
        outcome = run(scenario)
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        rescaled += outcome.rescaled_restores
    assert rescaled > 0


@pytest.mark.parametrize("kind", ["kill_slot", "cut_control", "user_error", "open_fails", "slot_fails"])
def test_a_job_without_checkpoints_begins_again_and_commits_once(kind: str) -> None:
    struck = 0
    for seed in some(range(200, 208)):
        scenario = replace(draw(seed, topology="keyed", faults=(kind,), rows=60), has_checkpoints=False)
        outcome = run(scenario)
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        assert outcome.checkpoints == 0
        struck += outcome.faults[kind]
    assert struck > 0, "the fault never happened"


@pytest.mark.parametrize("topology", ["window", "sliding", "session", "timers"])
def test_windows_and_timers_hold_every_row_through_restores_with_rows_in_flight(topology: str) -> None:
    in_flight = rescaled = 0
    for seed in some(range(40, 52)):
        scenario = replace(draw(seed, topology=topology, rows=60), aligned_timeout_s=0.0)
        outcome = run(scenario)
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        in_flight += outcome.in_flight_in_checkpoint
        rescaled += outcome.rescaled_restores
    assert in_flight > 0
    assert rescaled > 0


def test_a_job_that_can_never_get_on_is_reported_with_who_waits_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstream_lab.run.STILL_STEPS", 500)
    stalled = draw(3, topology="keyed", faults=(), rows=50)
    stalled = replace(stalled, sink_rows=1, sink_pause_s=1e9, interval_s=0.002, timeout_s=0.2)
    outcome = run(stalled)
    assert outcome.is_stuck
    report = outcome.failures[0]
    assert "the job is stuck" in report
    assert "waits for" in report
    assert "still to come:" in report


def test_the_same_seed_is_the_same_run_in_two_processes_with_different_hash_seeds() -> None:
    program = (
        "import json\n"
        "from midstream_lab.run import run\n"
        "from midstream_lab.scenarios.scenario import draw\n"
        "print(json.dumps([[o.hash, o.steps] for o in (run(draw(seed)) for seed in range(20, 22))]))\n"
    )
    found = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        found.append(json.loads(done.stdout))
    assert found[0] == found[1]
    here = [run(draw(seed), keep_trace=True) for seed in range(20, 22)]
    assert [[outcome.hash, outcome.steps] for outcome in here] == found[0], "keeping the trace changes the run"


def test_a_trace_names_channels_checkpoints_and_causes() -> None:
    scenario = replace(
        draw(0, topology="keyed", parallelism=2, faults=(), rows=60),
        interval_s=0.002,
        faults=(Fault(200, "kill_slot", 1),),
    )
    outcome = run(scenario, keep_trace=True)
    assert not outcome.failures
    assert outcome.trace is not None
    assert any("CheckpointAck" in line for line in outcome.trace.lines(r"chk 1\b"))
    assert any("EndOfData" in line for line in outcome.trace.lines(r"e0:0>1", "EndOf"))
    assert len(list(outcome.trace.lines(tail=10))) == 10
    assert all("← #" in line for line in outcome.trace.lines(tail=50))
