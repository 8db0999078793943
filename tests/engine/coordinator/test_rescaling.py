"""Rescaling a job that runs: slots first, then a checkpoint, then the switch; whatever is in the way, the job continues."""

from __future__ import annotations

import pytest
from coordinator_world import SCHEMA, Bench, Ledger, ScriptedSource, restored, two_vertices

from in_memory import NeverRun
from midstream.engine.checkpoint.metadata import decode_metadata
from midstream.engine.coordinator.placement.rescale import RescaleStage
from midstream.engine.core.config import AutoscaleBounds, RestartStrategy
from midstream.engine.core.ids import TaskId
from midstream.engine.graph.job_graph import Edge, JobGraph, OperatorSpec, Partitioning, SourceSpec, Vertex
from midstream.engine.operators.source_api import Source
from midstream.engine.protocol import messages as m


def rescale(bench: Bench, parallelism: int) -> int:
    return bench.ask(m.DoRescale(parallelism))


def acknowledged_by_all(bench: Bench) -> int:
    pending = bench.job.checkpoints.pending
    assert pending is not None
    bench.ack(pending.checkpoint_id, *sorted(pending.missing))
    return pending.checkpoint_id


def in_force(bench: Bench) -> tuple[int, int, bytes]:
    """Parallelism that is deployed, slots that live, and the graph that they got last."""
    deployed = bench.messages(m.Deploy)[-1]
    graphs = {}
    for slot, message in bench.sent:
        if isinstance(message, (m.Deploy, m.CommitSinks)):
            graphs[slot] = message.graph or graphs[slot]
    assert len({graphs[slot] for slot in bench.slots}) == 1 and deployed.attempt == bench.attempt
    return len(bench.slots), len(bench.job.slots.live), graphs[bench.slots[0]]


def test_a_job_goes_on_at_a_higher_parallelism_from_the_checkpoint_made_for_it() -> None:
    bench = Bench().run()
    client = rescale(bench, 3)
    assert len(bench.requests) == 3
    assert bench.state == "running"
    assert bench.triggers == []
    bench.connect()
    checkpoint = acknowledged_by_all(bench)
    assert bench.replies[client] == m.Reply(checkpoint=f"memory://checkpoints/chk-{checkpoint}")
    assert bench.state == "running"
    assert in_force(bench) == (3, 3, b"graph of 3")
    assert bench.status.restored_from == f"memory://checkpoints/chk-{checkpoint}"
    assert bench.status.restarts == 0
    assert not bench.status.failures
    assert bench.sink.committed == [(checkpoint, (b"1/0", b"1/1"))]
    assert [v.parallelism for v in bench.status.vertices] == [3, 3]
    second = bench.checkpoint()
    metadata = decode_metadata(bench.storage.files[f"chk-{second}/_metadata"], "test")
    assert [v.parallelism for v in metadata.vertices] == [3, 3]


def test_surplus_slots_are_let_go_once_their_tasks_are_cancelled() -> None:
    bench = Bench(two_vertices(ScriptedSource(("a",)), Ledger(), 3, 3)).run()
    bench.answers[m.Cancel] = False
    client = rescale(bench, 1)
    acknowledged_by_all(bench)
    assert bench.state == "rescaling"
    assert bench.closed == []
    bench.fail(TaskId(1, 2), "ClusterError: the connection to slot 0 is lost")
    for slot in (0, 1, 2):
        bench.feed_cancelled(slot)
    assert bench.closed == [0, 2], "slot 1 has the key groups in the middle"
    assert bench.replies[client].error == ""
    assert in_force(bench) == (1, 1, b"graph of 1")


def test_splits_are_handed_to_the_new_tasks_where_the_checkpoint_left_off() -> None:
    bench = Bench().run()
    bench.say(TaskId(0, 0), m.RequestSplit(0, TaskId(0, 0)))
    rescale(bench, 3)
    bench.connect()
    acknowledged_by_all(bench)
    bench.say(TaskId(0, 2), m.RequestSplit(bench.attempt, TaskId(0, 2)))
    first, second = bench.messages(m.AssignSplit)
    assert (first.attempt, b"a" in first.split) == (0, True)
    assert (second.attempt, second.task, b"b" in second.split) == (1, TaskId(0, 2), True)


def test_a_checkpoint_that_fails_leaves_the_job_as_it_was() -> None:
    bench = Bench().run()
    client = rescale(bench, 3)
    bench.connect()
    bench.say(TaskId(0, 0), m.CheckpointDecline(0, 1, TaskId(0, 0), "the disk is full", True))
    assert bench.replies[client].error == (
        "could not rescale to parallelism 3; the job continues at 2: checkpoint 1 failed: read (subtask 0): the disk is full"
    )
    assert bench.state == "running"
    assert bench.attempt == 0
    assert bench.closed == [2]
    bench.wait(1)
    bench.checkpoint()


def test_slots_that_do_not_come_leave_the_job_as_it_was() -> None:
    bench = Bench(slot_timeout_s=20.0, checkpoint_interval_s=None).run()
    client = rescale(bench, 4)
    assert len(bench.connect(1)) == 1
    bench.wait(20.1)
    assert "the job continues at 2: the job needs 4 slots, and 3 came within 20 s" in bench.replies[client].error
    assert bench.closed == [2]
    assert bench.state == "running" and bench.attempt == 0 and bench.status.slots_needed == 2
    assert bench.connect() == [3]
    assert bench.closed == [2, 3]


def test_a_new_slot_that_is_lost_before_the_switch_is_asked_for_again() -> None:
    bench = Bench().run()
    client = rescale(bench, 3)
    bench.connect()
    bench.lose(2)
    assert len(bench.requests) == 4
    acknowledged_by_all(bench)
    assert bench.state == "running" and bench.attempt == 0
    bench.connect()
    acknowledged_by_all(bench)
    assert bench.replies[client].checkpoint == "memory://checkpoints/chk-2"
    assert in_force(bench)[0] == 3


def test_a_failure_before_the_switch_is_a_failure_like_any_other() -> None:
    bench = Bench().run()
    client = rescale(bench, 3)
    bench.connect()
    bench.fail(TaskId(1, 0))
    assert "the job continues at 2: ValueError: row 7 is bad" in bench.replies[client].error
    assert bench.state == "restarting" and bench.status.restarts == 1
    bench.wait(1)
    assert bench.state == "running"
    assert in_force(bench) == (2, 2, b"graph")


@pytest.mark.parametrize("parallelism", [1, 3])
def test_new_tasks_that_cannot_be_deployed_lead_back_to_the_old_ones(parallelism: int) -> None:
    bench = Bench(restart=RestartStrategy(kind="none")).run()
    client = rescale(bench, parallelism)
    bench.connect()
    bench.answers[m.Deploy] = False
    checkpoint = acknowledged_by_all(bench)
    assert bench.state == "rescaling"
    bench.answers[m.Deploy] = True
    bench.feed_from(0, m.DeployFailed(1, "pool_size: too small", "", fatal=True))
    bench.wait(0.1)
    bench.connect()
    assert f"could not rescale to parallelism {parallelism}; the job continues at 2" in bench.replies[client].error
    assert bench.state == "running" and bench.status.restarts == 0
    assert in_force(bench) == (2, 2, b"graph")
    assert bench.status.restored_from == f"memory://checkpoints/chk-{checkpoint}"


def test_it_goes_back_once_however_many_slots_say_that_the_new_tasks_cannot_be_deployed() -> None:
    bench = Bench(restart=RestartStrategy(kind="none")).run()
    client = rescale(bench, 3)
    bench.connect()
    bench.answers[m.Deploy] = bench.answers[m.Cancel] = False
    acknowledged_by_all(bench)
    for slot in bench.slots:
        bench.feed_cancelled(slot)
    for slot in (2, 0, 1):
        bench.feed_from(slot, m.DeployFailed(1, f"pool_size: too small for slot {slot}", "", fatal=True))
    assert "the job continues at 2: pool_size: too small for slot 2" in bench.replies[client].error
    assert bench.ended is None
    bench.answers[m.Deploy] = bench.answers[m.Cancel] = True
    for slot in (0, 1, 2):
        bench.feed_cancelled(slot)
    bench.wait(0.1)
    assert bench.state == "running"
    assert in_force(bench) == (2, 2, b"graph")


def test_a_new_task_that_fails_before_all_run_leads_back_too() -> None:
    bench = Bench().run()
    client = rescale(bench, 3)
    bench.connect()
    bench.answers[m.Start] = False
    acknowledged_by_all(bench)
    bench.answers[m.Start] = True
    bench.fail(TaskId(0, 2))
    bench.wait(0.1)
    assert "the job continues at 2" in bench.replies[client].error
    assert bench.state == "running"
    assert in_force(bench) == (2, 2, b"graph")


@pytest.mark.parametrize(
    ("parallelism", "reason"),
    [(17, "is above max_parallelism 16"), (2, "")],
)
def test_what_cannot_be_is_refused_and_what_is_already_needs_nothing(parallelism: int, reason: str) -> None:
    bench = Bench().run()
    client = rescale(bench, parallelism)
    assert reason in bench.replies[client].error
    assert bool(reason) == bool(bench.replies[client].error)
    assert bench.triggers == []


def test_it_is_refused_without_checkpoints_while_stopping_and_when_nothing_would_change() -> None:
    bench = Bench(checkpoint_dir=None).run()
    assert "no checkpoint_dir" in bench.replies[rescale(bench, 3)].error
    bench = Bench().run()
    bench.ask(m.DoStop())
    assert "the job is stopping" in bench.replies[rescale(bench, 3)].error
    fixed = two_vertices(ScriptedSource(), Ledger())
    bench = Bench(fixed, graphs=lambda parallelism: fixed).run()
    assert "sets the parallelism of every operator itself" in bench.replies[rescale(bench, 3)].error


def test_one_at_a_time_and_a_stop_goes_first() -> None:
    bench = Bench().run()
    first, second = rescale(bench, 3), rescale(bench, 4)
    assert "being rescaled already, to parallelism 3" in bench.replies[second].error
    stop = bench.ask(m.DoStop())
    assert "a stop was requested" in bench.replies[first].error
    acknowledged_by_all(bench)
    assert bench.replies[stop].checkpoint == "memory://checkpoints/chk-1"


def test_whoever_asked_hears_of_the_jobs_end() -> None:
    bench = Bench(restart=RestartStrategy(kind="none"), held=("rescale",)).run()
    client = rescale(bench, 3)
    bench.fail(TaskId(0, 0))
    assert "ValueError: row 7 is bad" in bench.replies[client].error
    bench.release("rescale")
    assert bench.job.rescaling.stage is RescaleStage.NONE


def test_a_stop_during_the_switch_comes_after_it() -> None:
    bench = Bench().run()
    bench.answers[m.Cancel] = False
    client = rescale(bench, 1)
    acknowledged_by_all(bench)
    assert bench.job.rescaling.stage is RescaleStage.SWITCHING
    stop = bench.ask(m.DoStop())
    for slot in (0, 1):
        bench.feed_cancelled(slot)
    assert bench.replies[client].error == ""
    acknowledged_by_all(bench)
    assert bench.replies[stop].checkpoint == "memory://checkpoints/chk-2"


def with_one_sink(source: Source, parallelism: int) -> JobGraph:
    """read ×N → write ×1: at parallelism 1 both run in one task."""
    read, write = SourceSpec("read", "read", source), OperatorSpec("write", "write", NeverRun(), Ledger())
    if parallelism == 1:
        return JobGraph((Vertex(0, 1, read, (write,)),), (), 16)
    vertices = (Vertex(0, parallelism, read, ()), Vertex(1, 1, None, (write,)))
    return JobGraph(vertices, (Edge(0, 0, 1, Partitioning.REBALANCE, SCHEMA),), 16)


@pytest.mark.parametrize(("own", "timeout_ms"), [(1, None), (2, 250)])
def test_a_stop_leaves_what_the_program_can_go_on_from_at_its_own_parallelism(own: int, timeout_ms: int | None) -> None:
    source = ScriptedSource(("a", "b"))
    bench = Bench(with_one_sink(source, own), graphs=lambda n: with_one_sink(source, n), aligned_timeout_s=0.25).run()
    rescale(bench, 3)
    bench.connect()
    acknowledged_by_all(bench)
    bench.ask(m.DoCheckpoint())
    bench.wait(0.2)
    assert bench.messages(m.TriggerCheckpoint)[-1].timeout_ms == 250, "in any other one barriers may overtake"
    acknowledged_by_all(bench)
    bench.ask(m.DoStop())
    bench.wait(0.2)
    assert bench.messages(m.TriggerCheckpoint)[-1].timeout_ms == timeout_ms


@pytest.mark.parametrize(("own", "timeout_ms"), [(1, None), (2, 250)])
def test_a_job_that_scales_itself_can_always_be_started_at_its_own_parallelism(
    own: int, timeout_ms: int | None
) -> None:
    """Its driver may die, and be started again by a supervisor."""
    source = ScriptedSource(("a", "b"))
    bench = Bench(
        with_one_sink(source, own),
        graphs=lambda n: with_one_sink(source, n),
        aligned_timeout_s=0.25,
        autoscale=AutoscaleBounds(1, 4),
    ).run()
    rescale(bench, 3)
    bench.connect()
    acknowledged_by_all(bench)
    bench.ask(m.DoCheckpoint())
    bench.wait(0.2)
    assert bench.messages(m.TriggerCheckpoint)[-1].timeout_ms == timeout_ms


@pytest.mark.parametrize(("parallelism", "timeout_ms"), [(1, None), (3, 250)])
def test_rows_in_flight_are_let_flow_out_where_their_edge_disappears(parallelism: int, timeout_ms: int | None) -> None:
    source = ScriptedSource()
    bench = Bench(with_one_sink(source, 2), graphs=lambda n: with_one_sink(source, n), aligned_timeout_s=0.25).run()
    client = rescale(bench, parallelism)
    bench.connect()
    assert bench.messages(m.TriggerCheckpoint)[-1].timeout_ms == timeout_ms
    acknowledged_by_all(bench)
    assert bench.replies[client].error == ""
    assert in_force(bench)[0] == parallelism


def test_what_was_in_flight_goes_to_the_new_tasks() -> None:
    bench = Bench(aligned_timeout_s=0.0).run()
    client = rescale(bench, 1)
    pending = bench.job.checkpoints.pending
    assert pending is not None
    file = "shared/e1-a0-c1-v1-s1.channels"
    bench.storage.write(file, [b"rows"])
    state = m.ChannelState(0, 0, 1, False, (m.Segment(file, 0, 4, 0, 1, 10),))
    for ref in sorted(pending.missing):
        mine = ref == TaskId(1, 1)
        ack = m.CheckpointAck(
            0,
            1,
            ref,
            (m.OperatorSnapshot("read" if ref.vertex == 0 else "write"),),
            (file,) if mine else (),
            0,
            channels=(state,) if mine else (),
        )
        bench.say(ref, ack)
    assert bench.replies[client].error == ""
    ((ref, channels),) = restored(bench.messages(m.Deploy)[-1]).channels
    assert ref == TaskId(1, 0)
    assert [(c.producer, c.segments) for c in channels] == [(0, state.segments)]
