"""A graph may resume from a checkpoint that it fits to, and is told clearly when it does not."""

from __future__ import annotations

import pytest

from checkpoint_samples import MAX_PARALLELISM, SCHEMA, NoRows, chain, metadata_of, pipeline
from midstream.engine.checkpoint.redistribute_state import assign_state, finished_tasks, has_finished
from midstream.engine.core.errors import ConfigError
from midstream.engine.core.ids import TaskId
from midstream.engine.graph.job_graph import Edge, JobGraph, Partitioning, SourceSpec, Vertex
from midstream.engine.protocol.messages import ChunkHandle, OperatorSnapshot, PartHandle


def state(uid: str, subtasks: int, rule: str = "union") -> tuple[OperatorSnapshot, ...]:
    return tuple(
        OperatorSnapshot(uid, (PartHandle("s", rule, (ChunkHandle(f"c{i}", "f", i, 1, 0, 1, 0, 15),)),))
        for i in range(subtasks)
    )


def chunks(snapshot: OperatorSnapshot) -> list[str]:
    return [chunk.id for part in snapshot.parts for chunk in part.chunks]


def rebalanced(workers: int) -> JobGraph:
    """The pipeline without keys, at other parallelisms on both sides of its edge."""
    vertices = pipeline(workers=workers, keyed=False).vertices
    return JobGraph(vertices, (Edge(0, 0, 1, Partitioning.REBALANCE, SCHEMA),), MAX_PARALLELISM)


def test_every_operator_of_a_chain_gets_its_state_back_and_sources_their_position() -> None:
    graph = pipeline(uids=("count", "sum"))
    found = assign_state(
        metadata_of(graph, {"count": state("count", 2, "split"), "sum": state("sum", 2, "split")}), graph
    )
    assert [s.uid for s in found.tasks[TaskId(1, 1)]] == ["count", "sum"]
    assert [chunks(s) for s in found.tasks[TaskId(1, 1)]] == [["c1"], ["c1"]]
    assert found.sources["read"].position == b"5"
    assert not found.finished


def test_an_operator_may_move_to_another_vertex_and_new_ones_begin_empty() -> None:
    old = pipeline(uids=("count",))
    new = JobGraph(
        (
            Vertex(0, 2, SourceSpec("read", "Read", NoRows()), chain("extra")),
            Vertex(1, 1, None, chain("fresh")),
            Vertex(2, 3, None, chain("count")),
        ),
        (
            Edge(0, 0, 1, Partitioning.REBALANCE, SCHEMA),
            Edge(1, 1, 2, Partitioning.KEYED, SCHEMA, ("n",)),
        ),
        MAX_PARALLELISM,
    )
    found = assign_state(metadata_of(old, {"count": state("count", 2)}), new)
    assert set(found.tasks) == {TaskId(2, 0), TaskId(2, 1), TaskId(2, 2)}


def test_another_max_parallelism_is_refused() -> None:
    graph = pipeline()
    with pytest.raises(ConfigError, match="max_parallelism 16, but the job has 8"):
        assign_state(metadata_of(graph), JobGraph(graph.vertices, graph.edges, 8))


def test_state_that_would_be_dropped_is_refused_unless_allowed() -> None:
    old, new = pipeline(uids=("count",)), pipeline(uids=("other",))
    metadata = metadata_of(old, {"count": state("count", 2)})
    with pytest.raises(ConfigError, match=r"state of 'count' \(Count: 2 bytes, 2 rows\), which the job no longer has"):
        assign_state(metadata, new)
    assert assign_state(metadata, new, allow_dropped_state=True).dropped == ("count",)


def test_an_operator_without_state_may_go() -> None:
    assert assign_state(metadata_of(pipeline(uids=("count",))), pipeline(uids=("other",))).dropped == ()


def test_a_source_that_became_another_operator_is_refused() -> None:
    old = pipeline(source="thing")
    new = pipeline(uids=("thing",))
    with pytest.raises(ConfigError, match="'thing' was a source"):
        assign_state(metadata_of(old), new, allow_dropped_state=True)


def test_finished_vertices_are_not_run_again() -> None:
    graph = pipeline(uids=("count",))
    found = assign_state(metadata_of(graph, {"count": state("count", 2)}, finished={"read": (0, 1)}), graph)
    assert found.finished == {TaskId(0, 0), TaskId(0, 1)}
    assert set(found.tasks) == {TaskId(1, 0), TaskId(1, 1)}


def test_state_of_a_partly_finished_operator_comes_from_those_that_still_ran() -> None:
    graph = pipeline(uids=("count",), keyed=False)
    metadata = metadata_of(graph, {"count": state("count", 2, "broadcast")}, finished={"read": (0, 1), "count": (0,)})
    found = assign_state(metadata, graph)
    assert TaskId(1, 0) not in found.tasks
    assert [chunks(s) for s in found.tasks[TaskId(1, 1)]] == [["c1"]]
    wider = assign_state(metadata, pipeline(workers=3, sources=3, uids=("count",), keyed=False))
    assert [[chunks(s) for s in wider.tasks[TaskId(1, i)]] for i in range(3)] == [[["c1"]]] * 3


def test_a_subtask_that_had_finished_is_not_run_again_where_the_parallelism_is_what_it_was() -> None:
    graph = pipeline()
    finished = {"read": (0, 1), "count": (0,)}
    metadata = metadata_of(graph, {"count": state("count", 2, "keyed")}, finished=finished)
    assert assign_state(metadata, graph).finished == {TaskId(0, 0), TaskId(0, 1), TaskId(1, 0)}
    assert assign_state(metadata, pipeline(workers=3)).finished == {TaskId(0, 0), TaskId(0, 1)}
    assert not has_finished(metadata, graph)


def test_a_subtask_that_had_finished_runs_again_where_rows_may_come_to_it() -> None:
    finished = {"read": (0,), "count": (0,)}
    metadata = metadata_of(pipeline(keyed=False), {"count": state("count", 2, "split")}, finished=finished)
    assert assign_state(metadata, pipeline(keyed=False)).finished == {TaskId(0, 0), TaskId(1, 0)}
    old = {op.uid: op for op in metadata.operators}
    graph = pipeline(keyed=False)
    assert finished_tasks(old, graph, frozenset(), {TaskId(1, 0)}) == {TaskId(0, 0)}, "rows in flight to it"
    assert assign_state(metadata, rebalanced(2)).finished == {TaskId(0, 0)}, "the other producer runs on"


@pytest.mark.parametrize("uids", [("count", "fresh"), ("count", "sum")], ids=["a new one", "one that had not finished"])
def test_a_subtask_that_had_finished_runs_again_in_one_task_with_what_had_not(uids: tuple[str, ...]) -> None:
    finished = {"read": (0, 1), "count": (0,)}
    old = pipeline(uids=("count",) if "fresh" in uids else uids)
    found = assign_state(
        metadata_of(old, {"count": state("count", 2, "keyed")}, finished=finished), pipeline(uids=uids)
    )
    assert found.finished == {TaskId(0, 0), TaskId(0, 1)}
    parts = {i: [chunk for snapshot in found.tasks.get(TaskId(1, i), ()) for chunk in chunks(snapshot)] for i in (0, 1)}
    assert "c0" not in parts[0] + parts[1], "the state of the subtask that had finished"


def test_a_chain_of_which_only_some_had_finished_is_refused_naming_both() -> None:
    graph = pipeline(uids=("count", "fresh"))
    metadata = metadata_of(pipeline(uids=("count",)), finished={"read": (0, 1), "count": (0, 1)})
    with pytest.raises(ConfigError, match="'count' and 'fresh'"):
        assign_state(metadata, graph)


def test_a_finished_operator_behind_a_new_source_is_refused_naming_both() -> None:
    metadata = metadata_of(pipeline(), finished={"read": (0, 1), "count": (0, 1)})
    with pytest.raises(ConfigError, match=r"'count' had fully finished.*'fresh'"):
        assign_state(metadata, pipeline(source="fresh"), allow_dropped_state=True)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_partly_finished_operator_runs_again_as_a_whole_where_a_forward_edge_becomes_another(workers: int) -> None:
    finished = {"read": (0,), "count": (0,)}
    metadata = metadata_of(pipeline(keyed=False), {"count": state("count", 2, "split")}, finished=finished)
    found = assign_state(metadata, rebalanced(workers))
    assert found.finished == {TaskId(0, 0)}
    dealt = []
    for subtask in range(workers):
        for part in (part for snapshot in found.tasks.get(TaskId(1, subtask), ()) for part in snapshot.parts):
            dealt += [chunk.id for chunk in part.chunks for row in range(chunk.rows) if row % part.stride == part.index]
    assert dealt == ["c1"], "what the one that still ran had, once"


def test_operators_that_had_partly_finished_apart_may_run_in_one_task() -> None:
    metadata = metadata_of(rebalanced(3), finished={"read": (0,)})
    graph = JobGraph((Vertex(0, 2, SourceSpec("read", "Read", NoRows()), chain("count")),), (), MAX_PARALLELISM)
    assert not assign_state(metadata, graph).finished


def test_keys_that_had_finished_behind_another_source_are_refused() -> None:
    finished = {"read": (0, 1), "count": (0,)}
    metadata = metadata_of(pipeline(), {"count": state("count", 2, "keyed")}, finished=finished)
    with pytest.raises(ConfigError, match=r"'count' had partly finished.*'fresh'.*had not finished: .*state of keys"):
        assign_state(metadata, pipeline(source="fresh"), allow_dropped_state=True)
    assign_state(metadata, pipeline())
    # After a restart at another parallelism all subtasks run, and what had finished has no state.
    without_keys = metadata_of(pipeline(), finished=finished)
    with pytest.raises(ConfigError, match="state of keys"):
        assign_state(without_keys, pipeline(source="fresh"), allow_dropped_state=True)


def test_a_finished_operator_needs_finished_producers_whatever_the_edge() -> None:
    metadata = metadata_of(pipeline(keyed=False), finished={"read": (0,), "count": (0, 1)})
    with pytest.raises(ConfigError, match=r"'count' had fully finished.*'read'.*had partly finished: .*go nowhere"):
        assign_state(metadata, rebalanced(3))


def test_an_automatic_uid_that_has_shifted_is_named_with_the_one_to_set() -> None:
    """An operator of a kind was added before one of a chain that had finished."""
    then, now = pipeline(uids=("kept", "map-1")), pipeline(uids=("kept", "map-2"))
    finished = {"read": (0, 1), "kept": (0, 1), "map-1": (0, 1)}
    with pytest.raises(
        ConfigError, match=r"'kept' and 'map-2' run in one task.* call uid\('map-1'\) on what is 'map-2' "
    ):
        assign_state(metadata_of(then, finished=finished), now)
    assert assign_state(metadata_of(then, finished=finished), then).finished
    other = pipeline(uids=("kept", "filter-2"))
    with pytest.raises(ConfigError, match=r"had not finished\. Put rebalance\(\) between them"):
        assign_state(metadata_of(then, finished=finished), other)


def test_each_subtask_gets_its_own_version_back_and_at_another_parallelism_the_newest() -> None:
    graph = pipeline(workers=3, uids=("join",), keyed=False)
    ids = ("000000000000900-b", "000000000001000-a", "000000000000950-c")
    versions = tuple(
        OperatorSnapshot("join", (PartHandle("table", "newest", (ChunkHandle(name, "f", 0, 1, 0, 1),)),))
        for name in ids
    )
    metadata = metadata_of(graph, {"join": versions})
    found = assign_state(metadata, graph)
    assert [chunks(found.tasks[TaskId(1, i)][0]) for i in range(3)] == [[name] for name in ids]
    for workers in (1, 2, 5):
        found = assign_state(metadata, pipeline(workers=workers, uids=("join",), keyed=False))
        assert [chunks(found.tasks[TaskId(1, i)][0]) for i in range(workers)] == [[ids[1]]] * workers
    not_loaded = metadata_of(graph, {"join": (versions[0], OperatorSnapshot("join"), versions[2])})
    assert chunks(assign_state(not_loaded, graph).tasks[TaskId(1, 1)][0]) == [ids[2]]
