"""Rows in flight on an edge on which barriers overtook, and do not in the changed program that reads them."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.engine.worker.slot_machine import SlotMachine
from midstream_lab.run import run
from midstream_lab.scenarios.targeted import held_and_changed


@pytest.mark.parametrize("seed", [14, 22])
def test_what_was_overtaken_in_another_program_is_read_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original = SlotMachine._open
    recovered = 0

    def opened(self: SlotMachine, *arguments: Any) -> None:
        nonlocal recovered
        original(self, *arguments)
        for task in self.tasks.values():
            aligned = [gate for gate in task.gates if gate.edge.id not in task._services.unaligned_edges]
            recovered += sum(gate.recovered is not None and gate.edge.partitioning.redistributable for gate in aligned)

    monkeypatch.setattr(SlotMachine, "_open", opened)
    assert not run(held_and_changed(seed)).failures
    assert recovered > 0
