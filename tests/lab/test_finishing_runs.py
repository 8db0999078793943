"""Jobs of which some subtasks have come to their end continue, at any parallelism, and lose nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest

from midstream.engine.checkpoint import redistribute_state
from midstream.engine.checkpoint.metadata import OperatorState
from midstream.engine.graph.job_graph import JobGraph, Partitioning
from midstream.simulation.faults import Fault
from midstream_lab.jobs.shapes import SHAPES
from midstream_lab.jobs.topologies import with_parallelism
from midstream_lab.run import run
from midstream_lab.scenarios.scenario import Scenario, draw

KINDS = ("stop", "kill_driver", "stop_savepoint", "rescale")


def ending(seed: int) -> Scenario:
    """Fewer splits than subtasks, so that some end at once; then all that was joined forward gets other edges."""
    faults = tuple(Fault(150 + 120 * i + seed * 37 % 120, KINDS[(seed + i) % 4], seed * 31 + i) for i in range(4))
    return replace(
        draw(seed, topology="adapting", parallelism=3, faults=(), rows=100),
        shape=with_parallelism(SHAPES["adapting"], 3, Random(seed), same=True),
        rescaled=with_parallelism(SHAPES["adapting"], 3, Random(seed), same=False),
        splits=1 + seed % 2,
        batch_rows=3,
        interval_s=0.0005,
        aligned_timeout_s=(None, 0.0, 0.001)[seed % 3],
        faults=faults,
    )


def test_what_had_partly_finished_goes_on_where_a_forward_edge_becomes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    original = redistribute_state.finished_vertices
    restored = 0

    def finished_vertices(old: Mapping[str, OperatorState], graph: JobGraph) -> frozenset[int]:
        nonlocal restored
        for edge in graph.edges:
            ends = old.get(graph.vertices[edge.source].specs[-1].uid), old.get(graph.vertices[edge.target].specs[0].uid)
            if edge.partitioning is Partitioning.REBALANCE and all(op and op.finished and op.running for op in ends):
                restored += 1
        return original(old, graph)

    monkeypatch.setattr(redistribute_state, "finished_vertices", finished_vertices)
    for seed in range(24):
        outcome = run(ending(seed))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
    assert restored > 5
