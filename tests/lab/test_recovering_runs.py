"""Jobs that fail while they recover: checkpoints during recovery keep what was gained, at any parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from random import Random

import pytest

from effort import known
from midstream.engine.checkpoint import channel_state_references as references
from midstream.engine.checkpoint import redistribute_channel_state
from midstream.engine.checkpoint.channel_state_references import Piece
from midstream.engine.checkpoint.metadata import decode_metadata
from midstream.engine.coordinator import Coordinator
from midstream.engine.protocol.messages import ChannelState
from midstream.simulation.faults import RECOVERING, Fault, is_recovering
from midstream.simulation.trace import Kind
from midstream_lab.fault_kinds import BACKLOGGED
from midstream_lab.faults import strike
from midstream_lab.run import Run, run
from midstream_lab.scenarios.scenario import Scenario, draw, with_backlog
from midstream_lab.scenarios.targeted import rejoined

pytestmark = pytest.mark.turns(3)

POLL_INTERVAL_US = 500


def deep(seed: int, topology: str, parallelism: int, rescale_to: int, *, struck: bool = True) -> Scenario:
    drawn = draw(seed, topology=topology, parallelism=parallelism, rescale_to=rescale_to, faults=())
    return with_backlog(drawn, Random(seed), struck=struck)


@pytest.mark.parametrize(
    ("topology", "parallelism", "rescale_to", "seeds"),
    [
        ("keyed_broadcast", 7, 2, (0, 3)),
        ("keyed", 2, 5, (2, 3)),
        ("pipeline", 3, 2, (0, 1)),
        ("multi_input", 2, 3, (3, 14)),
    ],
)
def test_nothing_is_lost_when_a_job_fails_and_is_rescaled_in_the_midst_of_recovery(
    topology: str, parallelism: int, rescale_to: int, seeds: tuple[int, ...]
) -> None:
    during = struck = rescaled = 0
    for seed in known(seeds, range(40)):
        outcome = run(deep(seed, topology, parallelism, rescale_to))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        during += outcome.checkpoints_during_recovery
        struck += outcome.faults[RECOVERING] + outcome.faults[BACKLOGGED]
        rescaled += outcome.rescaled_restores
    assert during > 0 and struck > 0 and rescaled > 0


def test_a_run_that_is_told_to_go_on_at_another_parallelism_is_struck_during_recovery() -> None:
    drawn = [draw(seed, topology="keyed_broadcast", parallelism=7, rescale_to=2) for seed in range(40)]
    assert 15 < sum(any(fault.kind == RECOVERING for fault in scenario.faults) for scenario in drawn) < 35


def test_what_consumers_share_is_joined_again_wherever_each_of_them_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    merge_shares = references.merge_shares
    shared = differ = 0

    def counted(states: Sequence[ChannelState], whole: Sequence[tuple[int, int]]) -> tuple[ChannelState, list[Piece]]:
        nonlocal shared, differ
        state, pieces = merge_shares(states, whole)
        shared += len(states) > 1
        differ += len({skip for _, _, skip in pieces}) > 1
        return state, pieces

    monkeypatch.setattr(redistribute_channel_state, "merge_shares", counted)
    for seed in range(16):
        outcome = run(rejoined(seed))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
    assert shared > 10 and differ > 5, (shared, differ)


class _FailsEvery(Run):
    """A slot is killed `life_us` after an attempt has begun to recover, again and again."""

    def __init__(self, scenario: Scenario, life_us: int) -> None:
        super().__init__(scenario, False, Coordinator)
        self.in_flight: list[tuple[int, int]] = []
        """Of each checkpoint: which attempt took it, and how many rows were in flight."""
        self.kills = 0
        self._life_us = life_us
        self._since_us: int | None = None
        self.world.schedule(POLL_INTERVAL_US, None, Kind.FAULT, self._watch, "watch")

    def _watch(self) -> None:
        if not self.kills and self.in_flight and self.in_flight[-1][1] > 60:
            self._kill()
        elif self.kills and is_recovering(self.cluster.live_slots):
            self._since_us = self.world.now_us if self._since_us is None else self._since_us
            if self.world.now_us >= self._since_us + self._life_us:
                self._kill()
        self.world.schedule(POLL_INTERVAL_US, None, Kind.FAULT, self._watch, "watch")

    def _kill(self) -> None:
        self._since_us = None
        self.kills += strike(self, Fault(0, "kill_slot", self.kills))

    def _on_write(self, root: str, path: str, data: bytes) -> None:
        super()._on_write(root, path, data)
        if path.endswith("/_metadata"):
            metadata = decode_metadata(data, path)
            with self.world.inspecting():
                rows = sum(
                    found.num_rows for found in self._checker.inspection.rows_in_flight(self.disk, metadata).values()
                )
            self.in_flight.append((metadata.attempt, rows))


@pytest.mark.parametrize("seed", [1, 2, 4])
def test_a_job_that_fails_again_and_again_before_it_has_recovered_still_gets_done(seed: int) -> None:
    """Rows in flight get less from checkpoint to checkpoint, and no failure brings any back."""
    scenario = replace(
        deep(seed, "keyed_broadcast", 3, 2, struck=False),
        rescaled=None,
        faults=(),
        rows=200,
        batch_rows=3,
        sink_pause_s=0.01,
        interval_s=0.005,
        aligned_timeout_s=0.0,
        pool_buffers=1024,
    )
    job = _FailsEvery(scenario, life_us=60_000)
    outcome = job.go()
    assert not outcome.failures, outcome.failures[0]
    assert job.kills >= 3, "it was to fail before it had recovered"
    attempts = sorted({attempt for attempt, _ in job.in_flight})
    last = [[rows for attempt, rows in job.in_flight if attempt == which][-1] for which in attempts]
    recovering = list(takewhile(bool, last[: job.kills]))
    assert len(recovering) >= 3, last
    assert all(later < earlier for earlier, later in pairwise(recovering)), last
