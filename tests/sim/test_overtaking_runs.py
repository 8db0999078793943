"""Rows in flight on an edge on which barriers overtook, and do not any more: their checkpoint is of an older version."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.sim.regions import outdated
from midstream.sim.run import run
from midstream.worker.slot import SlotMachine


def test_what_was_overtaken_by_an_older_version_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SlotMachine._open
    recovered = 0

    def opened(self: SlotMachine, *arguments: Any) -> None:
        nonlocal recovered
        original(self, *arguments)
        for task in self.tasks.values():
            aligned = [gate for gate in task.gates if gate.edge.id not in task._seams.overtakable]
            recovered += sum(gate.recovered is not None and gate.edge.partitioning.redistributable for gate in aligned)

    monkeypatch.setattr(SlotMachine, "_open", opened)
    for seed in range(12):
        assert not run(outdated(seed)).failures, seed
    assert recovered > 4
