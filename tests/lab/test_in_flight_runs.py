"""Runs full of rows in flight: slow functions and sinks, barriers that overtake, restores at another parallelism."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from effort import some
from midstream.engine.coordinator import Coordinator
from midstream.engine.coordinator.events import JobPlan
from midstream.engine.worker.task_checkpoints import TaskCheckpoints
from midstream.simulation.faults import IN_RECOVERY, Fault
from midstream_lab.fault_kinds import BACKLOGGED
from midstream_lab.jobs.shapes import FORWARD, KEYED, SHAPES, Input, Node, Shape
from midstream_lab.jobs.topologies import with_parallelism
from midstream_lab.restarter import StartedJob
from midstream_lab.run import Run, run
from midstream_lab.scenarios.scenario import Scenario, draw

pytestmark = pytest.mark.turns(3)


def backpressured(seed: int, topology: str, parallelism: int = 3, rescale_to: int = 2) -> Scenario:
    drawn = draw(seed, topology=topology, parallelism=parallelism, rescale_to=rescale_to, rows=100)
    return replace(drawn, aligned_timeout_s=0.0, sink_rows=1, sink_pause_s=0.003, row_us=2000 if seed % 2 else 0)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What has happened in the tasks of a run."""
    found: Counter[str] = Counter()
    original = TaskCheckpoints._capture

    def capture(self: Any, state: Any, channels: Any) -> None:
        found["captured"] += 1
        found["rest of a slice"] += len(self._task.input.rests())
        original(self, state, channels)

    monkeypatch.setattr(TaskCheckpoints, "_capture", capture)
    return found


@pytest.mark.parametrize("topology", ["pipeline", "keyed", "keyed_broadcast", "mixed"])
def test_nothing_is_lost_doubled_or_out_of_order_when_barriers_overtake(topology: str, seen: Counter[str]) -> None:
    in_flight = rescaled = 0
    for seed in range(6):
        outcome = run(backpressured(seed, topology))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        in_flight += outcome.in_flight_in_checkpoint
        rescaled += outcome.rescaled_restores
    assert in_flight > 0 and rescaled > 0
    assert seen["captured"] > 0


def test_checkpoints_come_in_the_middle_of_batches(seen: Counter[str]) -> None:
    for seed in some(range(1, 13, 2)):
        scenario = replace(backpressured(seed, "keyed"), batch_rows=50, row_us=2000, sink_rows=0)
        outcome = run(scenario)
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
    assert seen["rest of a slice"] > 0


@pytest.mark.parametrize(("parallelism", "rescale_to"), [(1, 4), (4, 1), (5, 3), (7, 2)])
def test_rows_in_flight_reach_their_place_at_any_parallelism(parallelism: int, rescale_to: int) -> None:
    for seed in some(range(3)):
        outcome = run(backpressured(seed, "keyed_broadcast", parallelism, rescale_to))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"


def test_a_checkpoint_does_not_wait_for_the_buffers_that_it_holds_itself() -> None:
    """A producer behind an edge that always aligns needs buffers to get to its barrier, while a consumer captures
    all that it sends: those buffers must come back before the barrier does."""
    shape = (
        Node(("source",), (), 3),
        Node(("source",), (), 3),
        Node(("pass",), (Input(1, FORWARD),), 3),
        Node(("count",), (Input(0, KEYED), Input(2, KEYED)), 3),
        Node(("sink",), (Input(3, FORWARD),), 3),
    )
    checkpoints = 0
    for seed in some(range(4)):
        scenario = replace(
            draw(seed, topology="keyed", parallelism=3, faults=(), rows=400),
            shape=shape,
            rescaled=None,
            aligned_timeout_s=0.0,
            sink_rows=1,
            sink_pause_s=0.003,
            pool_buffers=0,
            buffer_bytes=4096,
            text_bytes=2000,
            batch_rows=10,
            row_us=0,
            timeout_s=60.0,
            interval_s=0.005,
        )
        outcome = run(scenario)
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        assert outcome.seconds < 30, "a checkpoint has stood still until it expired"
        checkpoints += outcome.in_flight_in_checkpoint
    assert checkpoints > 0


STOPPED = IN_RECOVERY.index("stop") + 6 * len(IN_RECOVERY)


class _Damaged(Run):
    """Before the job resumes, a byte of every file of rows in flight is changed."""

    def _plan(self, job_id: str, root: str, shape: Shape, version: int, start: StartedJob) -> JobPlan:
        if start.restore is not None:
            for path, content in self.disk.files.items():
                if path.endswith(".channels"):
                    changed = bytearray(content)
                    changed[len(changed) // 2] ^= 1
                    self.disk.files[path] = bytes(changed)
        return super()._plan(job_id, root, shape, version, start)


def test_damaged_rows_in_flight_are_refused_before_a_task_runs() -> None:
    scenario = draw(4, topology="keyed", parallelism=3, rescale_to=2, faults=(), rows=200)
    scenario = replace(scenario, aligned_timeout_s=0.0, sink_rows=1, sink_pause_s=0.01, batch_rows=3, text_bytes=2000)
    scenario = replace(scenario, faults=(Fault(50, BACKLOGGED, STOPPED),), steps_max=30_000)
    damaged = _Damaged(scenario, False, Coordinator)
    outcome = damaged.go()
    assert outcome.launches == 2
    assert "channels (bytes" in outcome.failures[0] and "its checksum is wrong" in outcome.failures[0]
    assert "--from" in outcome.failures[0]


def test_what_finished_tasks_have_left_behind_is_overtaken_too() -> None:
    """With a sink that takes minutes for it, and a minute for a checkpoint."""
    drawn = draw(1, topology="pipeline", parallelism=2, faults=(), rows=100)
    outcome = run(
        replace(
            drawn,
            shape=with_parallelism(SHAPES["pipeline"], 2, Random(1), same=True),
            aligned_timeout_s=0.0,
            timeout_s=60.0,
            interval_s=20.0,
            sink_rows=1,
            sink_pause_s=90.0,
            key_groups=16,
            text_bytes=2000,
            batch_rows=10,
        )
    )
    assert not outcome.failures, outcome.failures[0]
    assert outcome.checkpoints > 10
