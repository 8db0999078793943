"""Rows in flight on an edge on which barriers overtook, and do not any more: their checkpoint is of an older version."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from midstream.graph.job_graph import JobGraph
from midstream.protocol import messages as m
from midstream.sim.mutation_scenarios import held
from midstream.sim.run import run
from midstream.sim.scenario import IN_FLIGHT, Fault
from midstream.worker import slot
from midstream.worker.slot import SlotMachine

STUCK = "not complete within"
"""What checkpoints may come to while barriers overtake everywhere: see the topology."""


def test_what_was_overtaken_by_an_older_version_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    overtakable, original = slot.overtakable, SlotMachine._open
    has_rule = False
    recovered = 0

    def by_version(graph: JobGraph) -> frozenset[int]:
        everywhere = frozenset(edge.id for edge in graph.edges if edge.partitioning.redistributable)
        return overtakable(graph) if has_rule else everywhere

    def opened(self: SlotMachine, deploy: m.Deploy, *arguments: Any) -> None:
        nonlocal has_rule, recovered
        has_rule = (deploy.attempt + int(deploy.job_id.removeprefix("job"))) % 2 == 0
        original(self, deploy, *arguments)
        for task in self.tasks.values():
            aligned = [gate for gate in task.gates if gate.edge.id not in task._seams.overtakable]
            recovered += sum(gate.recovered is not None and gate.edge.partitioning.redistributable for gate in aligned)

    with monkeypatch.context() as patched:
        patched.setattr(slot, "overtakable", by_version)
        patched.setattr(SlotMachine, "_open", opened)
        for seed in range(15):
            struck = tuple(Fault(100 * i, IN_FLIGHT, 31 * seed + i) for i in range(1, 6))
            failures = run(replace(held(seed), faults=struck)).why_not_passed
            assert all(STUCK in failure for failure in failures), (seed, failures)
    assert recovered > 10
