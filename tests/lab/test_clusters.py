"""What only the driver's shell and the cluster decide between them: processes that say how they end, run again, or are all gone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from effort import some
from midstream.engine.coordinator import Coordinator
from midstream.engine.coordinator import events as ev
from midstream.simulation.faults import Fault
from midstream_lab.fault_kinds import CLUSTER_GONE
from midstream_lab.run import Run, run
from midstream_lab.scenarios.scenario import draw


class Listening(Coordinator):
    """Counts how slots are lost."""

    lost: Counter[str] = Counter()

    def handle(self, event: ev.CoordinatorEvent, now_ms: int) -> list[ev.Instruction]:
        if isinstance(event, ev.SlotLost):
            self.lost["crashed" if event.crash else "died" if "died" in event.reason else "silent"] += 1
        return super().handle(event, now_ms)


def test_slots_are_lost_with_word_and_without_and_their_tasks_run_again() -> None:
    Listening.lost.clear()
    slots_refused = 0
    for seed in some(range(24)):
        drawn = draw(seed, topology="keyed", parallelism=2, faults=(), rows=60)
        kinds = ("kill_slot", "cut_control", "stop_slot")
        faults = tuple(Fault(150 + 120 * i, kinds[(seed + i) % 3], 3 * seed + i) for i in range(4))
        prepared = Run(replace(drawn, faults=faults), keep_trace=False, make_coordinator=Listening)
        outcome = prepared.go()
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        slots_refused += sum(driver.slots_refused for driver in prepared.cluster.drivers)
    assert Listening.lost["crashed"] and Listening.lost["died"] and Listening.lost["silent"], Listening.lost
    assert slots_refused > 0


def test_a_job_whose_cluster_ends_is_started_again_on_another_and_is_exact() -> None:
    struck = restored = 0
    for seed in range(12):
        drawn = draw(seed, topology="keyed", parallelism=2, faults=(), rows=60)
        outcome = run(replace(drawn, faults=(Fault(60 + 40 * seed, CLUSTER_GONE, 0),)))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        struck += outcome.faults[CLUSTER_GONE]
        restored += outcome.launches > 1 and outcome.checkpoints > 0
    assert struck > 6 and restored > 3
