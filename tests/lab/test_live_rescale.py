"""Jobs are rescaled while they run, whatever befalls them meanwhile; and shapes of every kind continue at any parallelism."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from effort import some
from midstream.engine.graph.job_graph import Partitioning
from midstream.simulation.faults import PARALLELISMS, Fault
from midstream_lab.jobs.shapes import COMBINED, SHAPES
from midstream_lab.jobs.topologies import with_parallelism
from midstream_lab.run import run
from midstream_lab.scenarios.scenario import Scenario, draw

PAIRS = ((1, 2), (2, 1), (2, 3), (3, 2), (4, 8), (8, 3), (5, 6), (7, 4))


def rescaled_at(step: int, parallelism: int) -> Fault:
    return Fault(step, "rescale", PARALLELISMS.index(parallelism))


def backpressured(seed: int, topology: str, parallelism: int, **changes: object) -> Scenario:
    drawn = draw(seed, topology=topology, parallelism=parallelism, faults=(), rows=100)
    drawn = replace(drawn, aligned_timeout_s=0.0, sink_rows=1, sink_pause_s=0.003, key_groups=16)
    return replace(drawn, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("parallelism", "to"), PAIRS)
def test_a_running_job_goes_on_at_another_parallelism_with_its_rows_in_flight(parallelism: int, to: int) -> None:
    rescales = in_flight = 0
    for seed in some(range(3)):
        faults = tuple(rescaled_at(200 + 100 * i, to) for i in range(4))
        outcome = run(backpressured(seed, "keyed_broadcast", parallelism, faults=faults))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        assert outcome.launches == 1
        rescales += outcome.rescales
        in_flight += outcome.in_flight_in_checkpoint
    assert rescales > 0
    assert in_flight > 0


@pytest.mark.parametrize("kind", ["rescale_struck", "slots_late", "drain_struck"])
def test_nothing_is_lost_or_doubled_by_what_happens_around_a_request(kind: str) -> None:
    struck: Counter[str] = Counter()
    for seed in some(range(40, 50)):
        outcome = run(draw(seed, topology="keyed", faults=(kind,), rows=80))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        struck += outcome.faults
    assert struck[kind] > 0


def test_edges_that_are_forward_at_one_parallelism_only_are_rescaled_too() -> None:
    """The checkpoint for it is aligned then: rows in flight would have nowhere to go."""
    rescales = 0
    for seed in some(range(4)):
        faults = (rescaled_at(250, 2), rescaled_at(600, 3), rescaled_at(900, 1))
        outcome = run(backpressured(seed, "tally", 3, faults=faults))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        rescales += outcome.rescales
    assert rescales > 0


@pytest.mark.turns(3)
@pytest.mark.parametrize("topology", [*SHAPES, *COMBINED])
def test_every_topology_goes_on_at_another_parallelism(topology: str) -> None:
    rescales = 0
    for seed, (parallelism, to) in enumerate(((2, 3), (3, 1), (1, 4))):
        asked = tuple(rescaled_at(80 + 60 * i, (to, parallelism)[i % 2]) for i in range(12))
        outcome = run(backpressured(seed, topology, parallelism, faults=asked, rows=60, splits=7, interval_s=0.005))
        assert not outcome.failures, f"{parallelism} to {to}: {outcome.failures[0]}"
        rescales += outcome.rescales
    assert rescales > 0


def test_every_kind_of_edge_and_of_parallelism_is_drawn() -> None:
    for topology in ("pipeline", "tally", "mixed"):
        seen = {
            entry.partitioning for seed in range(100) for n in draw(seed, topology=topology).shape for entry in n.inputs
        }
        assert seen >= set(Partitioning) - {Partitioning.BROADCAST}, topology
    sets = [{node.parallelism for node in draw(seed).shape} for seed in range(300)]
    assert any({p, p + 1, 2 * p} <= found for found in sets for p in (2, 3, 4))
    assert set(range(1, 9)) <= set().union(*sets)


def test_without_faults_a_checkpoint_that_may_overtake_does_not_wait_for_a_sink_that_takes_nothing() -> None:
    """Rows wait for credit all the time; if a barrier waited with them, its checkpoint would expire."""
    checkpoints = 0
    for seed in some(range(2)):
        scenario = backpressured(
            seed, "pipeline", 2, sink_pause_s=90.0, interval_s=20.0, timeout_s=60.0, text_bytes=2000, batch_rows=10
        )
        outcome = run(replace(scenario, shape=with_parallelism(SHAPES["pipeline"], 2, Random(seed), same=True)))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        assert outcome.seconds > 90
        checkpoints += outcome.in_flight_in_checkpoint
    assert checkpoints > 0
