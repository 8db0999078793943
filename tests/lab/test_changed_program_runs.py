"""Runs whose job continues with another program than the one that made the checkpoint, and those that must be refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import replace

import pytest

import midstream_lab.run as sim_run
from effort import known
from midstream.engine.checkpoint import redistribute_state
from midstream.engine.checkpoint.metadata import CheckpointMetadata, EdgeLayout, OperatorState, VertexLayout
from midstream.engine.coordinator import Coordinator
from midstream.engine.core.ids import TaskId
from midstream.engine.graph.graph_builder import check_job_graph
from midstream.engine.graph.job_graph import JobGraph, OperatorSpec
from midstream.engine.protocol.messages import OperatorSnapshot
from midstream.simulation.faults import Fault
from midstream_lab.checkers.checkpoint_checker import at_rest
from midstream_lab.jobs.recorded_rows import Outside, Pass
from midstream_lab.jobs.shapes import COMBINED, KEYED, REBALANCE, SHAPES, Input, Shape, node_of, source_node
from midstream_lab.restarter import ROOT, StartedJob
from midstream_lab.run import Run, run
from midstream_lab.scenarios.changed_programs import NEW, RowLocations
from midstream_lab.scenarios.scenario import Scenario, draw
from midstream_lab.scenarios.targeted import changing, changing_at_the_end, widening

pytestmark = pytest.mark.turns(3)


@pytest.mark.parametrize("scenario_of", [changing, changing_at_the_end, widening])
def test_a_changed_program_goes_on_exactly_or_is_refused_for_a_reason(scenario_of: Callable[[int], Scenario]) -> None:
    starts = refused = 0
    for seed in known((2, 3, 6, 7), range(8)):
        outcome = run(scenario_of(seed))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        starts += outcome.changed
        refused += outcome.contradicted
    assert starts > 4 and refused > 0, (starts, refused)


def summed_in_parts(seed: int) -> Scenario:
    """The driver dies again and again, also while one of two subtasks that sum up has finished and the other has not."""
    drawn = draw(seed, topology="totals", parallelism=2, rescale_to=2, rows=200, faults=())
    nodes = source_node(), node_of("total", Input(0, KEYED)), node_of("sink", Input(1, REBALANCE))
    drawn = replace(
        drawn, shape=tuple(replace(node, parallelism=2) for node in nodes), rescaled=None, splits=2, rounds=1
    )
    kills = tuple(Fault(400 + 150 * i + seed * 37 % 150, "kill_driver", seed + i) for i in range(1, 12))
    drawn = replace(drawn, changes=0.8, aligned_timeout_s=0.0, interval_s=0.001, min_pause_s=0.0, faults=kills)
    return replace(drawn, keys=10, skew=0.9, key_groups=7, batch_rows=3, row_us=1000, sink_rows=0, timeout_s=60.0)


def followed_by_a_new_one(
    graph: JobGraph, shape: Shape, outside: Outside, seed: int, version: int, generators: bool
) -> JobGraph:
    """A program in which the operator that sums up is followed by a new one in its task; version 0 is the original."""
    summing = next(vertex for vertex in graph.vertices if vertex.specs[0].uid == "total1")
    added = (OperatorSpec(f"{NEW}{version}-1", f"{NEW}{version}-1", Pass(outside)),) if version else ()
    longer = replace(summing, operators=summing.operators + added)
    return replace(graph, vertices=tuple(longer if vertex is summing else vertex for vertex in graph.vertices))


def test_a_finished_subtask_may_run_again_in_one_task_with_a_new_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    original = redistribute_state.finished_tasks
    restored = 0

    def finished_tasks(
        old: Mapping[str, OperatorState], graph: JobGraph, vertices: Set[int], in_flight: Collection[TaskId]
    ) -> frozenset[TaskId]:
        nonlocal restored
        summing = next(vertex for vertex in graph.vertices if vertex.specs[0].uid == "total1")
        is_joined = any(spec.uid not in old for spec in summing.specs)
        restored += is_joined and 0 < len(old["total1"].finished) < old["total1"].parallelism
        return original(old, graph, vertices, in_flight)

    monkeypatch.setattr(redistribute_state, "finished_tasks", finished_tasks)
    monkeypatch.setattr(sim_run, "changed", followed_by_a_new_one)
    for seed in known((26,), range(6, 66)):
        outcome = run(summed_in_parts(seed))
        assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
        if restored:
            break
    assert restored


def of(uid: str, finished: tuple[int, ...], parallelism: int = 3) -> OperatorState:
    return OperatorState(uid, uid, 1, parallelism, (OperatorSnapshot(uid),) * parallelism, finished)


@pytest.mark.parametrize(
    ("before", "rest"),
    [
        ([of("total", (0, 2)), of("sink", (0, 1, 2))], {0, 2}),
        ([of("total", (0, 2)), of("sink", (2,))], {2}),
        ([of("total", (0, 2))], set()),
        ([of("total", (0,), parallelism=2), of("sink", (0,))], set()),
    ],
    ids=["all had finished", "the other had not", "the other is new", "another parallelism"],
)
def test_a_subtask_rests_if_all_that_shares_its_task_had_finished(before: list[OperatorState], rest: set[int]) -> None:
    vertices = VertexLayout(0, "source", 3, ("source",), "source"), VertexLayout(1, "total", 3, ("total", "sink"), None)
    assert at_rest(of("total", ()), vertices, before) == rest


def test_an_edge_that_leads_only_to_new_operators_has_no_place_in_the_original_program() -> None:
    """An operator whose rows go nowhere may be followed by new ones, in a task of their own."""
    vertices = tuple(VertexLayout(i, uid, 2, (uid,), None) for i, uid in enumerate(("pass1", f"{NEW}1-1", "sink2")))
    to_new, to_sink = (EdgeLayout(i, 0, i + 1, "forward", (), 0, None, ()) for i in (0, 1))
    metadata = CheckpointMetadata(
        job_name="job",
        job_id="job1",
        checkpoint_id=1,
        epoch=1,
        attempt=0,
        created_ms=0,
        completed_ms=0,
        max_parallelism=8,
        vertices=vertices,
        edges=(to_new, to_sink),
        operators=(),
        sources=(),
        committables=(),
        state_bytes=0,
        files=(),
    )
    assert list(RowLocations(draw(7, topology="pipeline", parallelism=2).shape).of(metadata)) == [to_sink.id]


def tasks_and_edges(graph: JobGraph) -> tuple[list[list[str]], list[tuple[int, int]]]:
    return [[spec.uid for spec in v.specs] for v in graph.vertices], [(e.source, e.target) for e in graph.edges]


@pytest.mark.parametrize("name", [*SHAPES, *COMBINED])
def test_a_version_is_a_valid_program_the_same_at_every_parallelism_with_all_that_has_state(name: str) -> None:
    drawn = draw(0, topology=name, parallelism=2, rescale_to=3)
    prepared = Run(drawn, False, Coordinator)
    shapes = drawn.shape, drawn.rescaled or drawn.shape

    def graphs(version: int) -> list[JobGraph]:
        return [prepared._plan("job", ROOT, shape, version, StartedJob()).graph for shape in shapes]

    original = {spec.uid for vertex in graphs(0)[0].vertices for spec in vertex.specs}
    versions = 0
    for version in range(1, 15):
        first, second = graphs(version)
        check_job_graph(first)
        check_job_graph(second)
        assert tasks_and_edges(first) == tasks_and_edges(second)
        uids = {spec.uid for vertex in first.vertices for spec in vertex.specs if not spec.uid.startswith(NEW)}
        assert uids <= original and all(uid.startswith("pass") for uid in original - uids)
        versions += tasks_and_edges(first) != tasks_and_edges(graphs(0)[0])
    assert versions > 5
