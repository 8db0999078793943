"""Runs in which channels are read together have some that must not be: those behind a barrier that was aligned."""

from __future__ import annotations

from collections import Counter

import pytest

from effort import some
from midstream.engine.exchange.batch_lease import LeasedBatch
from midstream.engine.exchange.input_gate import InputGate
from midstream_lab.run import run
from midstream_lab.scenarios.scenario import draw
from midstream_lab.scenarios.targeted import joining

SEEDS_MAX = 40


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often rows of several channels come together, and how often a blocked one has rows that would fit."""
    found: Counter[str] = Counter()
    original = InputGate._join

    def join(self: InputGate, first: LeasedBatch, rows_max: int) -> LeasedBatch:
        joined = original(self, first, rows_max)
        heads = [self.channels[index].queue.head_rows(0) for index in self._blocked]
        found["joined"] += len(self.read_from) > 1
        rows = joined.batch.num_rows
        found["blocked"] += first.batch.num_rows * 2 <= rows_max and any(0 < h <= rows_max - rows for h in heads)
        return joined

    monkeypatch.setattr(InputGate, "_join", join)
    return found


def test_channels_are_read_together_while_others_that_have_rows_are_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = counted(monkeypatch)
    with_blocked = 0
    for seed in range(SEEDS_MAX):
        before = found["blocked"]
        outcome = run(joining(seed))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        with_blocked += found["blocked"] > before
        if with_blocked == 3 and found["joined"] >= 20:
            return
    pytest.fail(f"in {SEEDS_MAX} runs: {found}, and {with_blocked} with a blocked channel that had rows")


def test_channels_are_read_together_in_random_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = counted(monkeypatch)
    for seed in some(range(40)):
        run(draw(seed))
        if found["joined"]:
            return
    pytest.fail("none of 40 runs has read several channels together")
