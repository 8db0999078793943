"""Slots that have to leave: others come for them, then a checkpoint, then the switch; no row is read twice for it."""

from __future__ import annotations

import pytest
from coordinator_world import Bench
from test_rescaling import acknowledged_by_all, rescale

from midstream.engine.coordinator.placement.slot_pool import PYTHON
from midstream.engine.core.config import RestartStrategy
from midstream.engine.core.ids import TaskId
from midstream.engine.protocol import messages as m

LEAVES = "slot 1 (process 101 on host1) is being vacated: its node is drained"


def left(**config: object) -> Bench:
    """Slot 1 of two has to leave, slot 2 has come for it, and the checkpoint is under way."""
    bench = Bench(**config).run()  # type: ignore[arg-type]
    bench.leaves(1)
    assert len(bench.requests) == 3 and bench.triggers == []
    bench.connect()
    assert bench.triggers == [1]
    return bench


def test_the_job_goes_on_without_it_from_a_checkpoint_behind_which_nothing_is_read() -> None:
    bench = left()
    assert bench.state == "running" and bench.slots == (0, 1)
    assert all(trigger.pauses_sources for trigger in bench.messages(m.TriggerCheckpoint))
    bench.answers[m.Cancel] = False
    acknowledged_by_all(bench)
    assert bench.state == "moving" and bench.closed == []
    for slot in (0, 1):
        bench.feed_cancelled(slot)
    assert bench.closed == [1]
    assert bench.state == "running" and bench.slots == (0, 2)
    assert bench.status.restored_from == "memory://checkpoints/chk-1"
    assert bench.status.restarts == 0 and not bench.status.failures and not bench.notified
    assert bench.messages(m.ResumeSources) == []
    assert bench.status.warnings == (LEAVES,)
    assert bench.sink.committed == [(1, (b"1/0", b"1/1"))]


def test_nothing_is_asked_for_twice_when_it_is_told_twice_or_of_slots_that_are_no_more() -> None:
    bench = left()
    bench.leaves(1)
    acknowledged_by_all(bench)
    bench.leaves(1)
    assert len(bench.requests) == 3 and bench.slots == (0, 2) and bench.status.warnings == (LEAVES,)


def test_all_may_leave_at_once() -> None:
    bench = Bench().run()
    bench.leaves(1)
    bench.leaves(0)
    bench.connect()
    acknowledged_by_all(bench)
    assert bench.slots == (2, 3) and sorted(bench.closed) == [0, 1] and bench.triggers == [1]


def test_another_one_that_leaves_meanwhile_is_waited_for_and_the_sources_resume_until_then() -> None:
    bench = left()
    bench.leaves(0)
    assert len(bench.requests) == 4
    acknowledged_by_all(bench)  # of the checkpoint that was under way: it is an ordinary one now
    assert bench.state == "running" and bench.slots == (0, 1)
    assert bench.messages(m.ResumeSources) == [m.ResumeSources(0, 1)] * 2
    bench.connect()
    acknowledged_by_all(bench)
    assert bench.slots == (2, 3) and bench.status.restored_from == "memory://checkpoints/chk-2"


def test_one_that_leaves_while_the_checkpoint_is_distributed_is_waited_for() -> None:
    bench = left(held=("distribute",))
    acknowledged_by_all(bench)
    assert bench.waiting
    bench.leaves(0)
    assert bench.messages(m.ResumeSources) == [m.ResumeSources(0, 1)] * 2
    bench.held = ()
    bench.release()
    assert bench.state == "running" and bench.slots == (0, 1)
    bench.connect()
    acknowledged_by_all(bench)
    assert bench.slots == (2, 3)


def test_a_spare_one_that_leaves_is_let_go_and_replaced() -> None:
    bench = left()
    bench.leaves(2)
    assert bench.closed == [2] and len(bench.requests) == 4
    acknowledged_by_all(bench)
    assert bench.slots == (0, 1)
    bench.connect()
    acknowledged_by_all(bench)
    assert bench.slots == (0, 3)


def test_one_that_leaves_before_it_has_registered_is_asked_for_again() -> None:
    bench = Bench().start()
    bench.leaves(0)
    assert "a slot could not be started (0 of 2 are connected): its node is drained" in bench.status.warnings
    bench.wait(1)
    register = m.Register("host0", 7000, 100, PYTHON, bench.requests[0])
    assert bench.shell.refusal(register)
    bench._slots = 1
    bench.connect()
    assert bench.state == "running" and len(bench.requests) == 3 and bench.slots == (1, 2)


@pytest.mark.parametrize("message", [m.Deploy, m.Start])
def test_one_that_leaves_while_the_tasks_are_deployed_or_started_is_left_as_soon_as_they_run(
    message: type[m.Deploy] | type[m.Start],
) -> None:
    bench = Bench()
    bench.answers[message] = False
    bench.start().connect()
    bench.leaves(1)
    assert bench.state == "deploying" and len(bench.requests) == 2
    for slot, sent in list(bench.sent):
        if isinstance(sent, message):
            bench.answers[message] = True
            bench.answer(slot, sent)
    assert len(bench.requests) == 3
    assert {peer.slot for peer in bench.messages(m.Start)[0].peers} == {0, 1}
    bench.connect()
    acknowledged_by_all(bench)
    assert bench.slots == (0, 2)


def test_a_restart_leaves_it_too() -> None:
    bench = Bench().run()
    bench.leaves(1)
    bench.fail(TaskId(1, 0))
    assert bench.state == "restarting" and bench.closed == [1]
    bench.wait(1)
    assert bench.state == "restarting"
    bench.connect()
    assert bench.state == "running" and bench.slots == (0, 2) and bench.status.restarts == 1


def test_one_that_ends_before_its_tasks_have_moved_is_a_failure_like_any_other() -> None:
    bench = left()
    bench.lose(1)
    assert bench.status.restarts == 1 and bench.state == "restarting"
    bench.wait(1)
    assert bench.state == "running" and bench.slots == (0, 2)


def test_one_that_ends_while_its_tasks_are_cancelled_is_none() -> None:
    bench = left(restart=RestartStrategy(kind="none"))
    bench.answers[m.Cancel] = False
    acknowledged_by_all(bench)
    bench.lose(1)
    bench.feed_cancelled(0)
    assert bench.state == "running" and bench.slots == (0, 2)
    assert bench.status.restarts == 0 and not bench.status.failures


def test_tasks_that_fail_to_start_elsewhere_are_started_again() -> None:
    bench = left()
    bench.answers[m.Start] = False
    acknowledged_by_all(bench)
    bench.fail(TaskId(1, 1))
    assert bench.status.restarts == 1
    bench.answers[m.Start] = True
    bench.wait(1)
    assert bench.state == "running" and bench.slots == (0, 2)
    assert bench.status.restored_from == "memory://checkpoints/chk-1"


def test_a_checkpoint_that_fails_is_made_again_in_its_time() -> None:
    bench = left()
    bench.say(TaskId(0, 0), m.CheckpointDecline(0, 1, TaskId(0, 0), "the disk is full", True))
    assert bench.state == "running" and bench.triggers == [1]
    bench.wait(10)
    assert bench.triggers == [1, 2] and bench.messages(m.TriggerCheckpoint)[-1].pauses_sources
    acknowledged_by_all(bench)
    assert bench.slots == (0, 2)


def test_without_an_interval_the_tasks_stay_when_the_checkpoint_fails() -> None:
    bench = left(checkpoint_interval_s=None)
    bench.say(TaskId(0, 0), m.CheckpointDecline(0, 1, TaskId(0, 0), "the disk is full", True))
    assert bench.state == "running" and bench.slots == (0, 1) and bench.closed == [2]
    assert "the tasks stay on slot 1 until it ends: checkpoint 1 failed: read" in " / ".join(bench.status.warnings)


def test_slots_that_do_not_come_leave_the_tasks_where_they_are() -> None:
    bench = Bench(slot_timeout_s=20.0, checkpoint_interval_s=None).run()
    bench.leaves(1)
    bench.wait(20.1)
    assert bench.state == "running" and bench.slots == (0, 1) and bench.attempt == 0
    assert "the tasks stay on slot 1 until it ends: the job needs 2 slots, and 1 came" in " / ".join(
        bench.status.warnings
    )
    assert bench.connect() == [2] and bench.closed == [2]
    bench.lose(1)
    bench.wait(1)
    bench.connect()
    assert bench.state == "running" and bench.status.restarts == 1


def test_without_a_checkpoint_directory_it_runs_on_until_the_slot_ends() -> None:
    bench = Bench(checkpoint_dir=None).run()
    bench.leaves(1)
    assert len(bench.requests) == 2 and bench.slots == (0, 1) and bench.triggers == []
    assert "the tasks stay on slot 1 until it ends: the job has no checkpoint_dir" in bench.status.warnings[1]
    bench.lose(1)
    bench.wait(1)
    bench.connect()
    assert bench.state == "running" and bench.slots == (0, 2)


def test_a_stop_comes_first() -> None:
    bench = left()
    client = bench.ask(m.DoStop(drain=False))
    acknowledged_by_all(bench)
    assert bench.messages(m.ResumeSources) == [m.ResumeSources(0, 1)] * 2
    acknowledged_by_all(bench)
    assert bench.replies[client] == m.Reply(checkpoint="memory://checkpoints/chk-2")


def test_a_stop_that_fails_lets_it_move() -> None:
    bench = left()
    client = bench.ask(m.DoStop(drain=False))
    acknowledged_by_all(bench)
    bench.say(TaskId(0, 0), m.CheckpointDecline(0, 2, TaskId(0, 0), "the disk is full", True))
    assert "the disk is full" in bench.replies[client].error
    bench.wait(1)
    acknowledged_by_all(bench)
    assert bench.slots == (0, 2)


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_rescale_takes_the_place_of_a_move_and_leaves_the_slot_too(parallelism: int) -> None:
    bench = Bench().run()
    bench.leaves(1)
    client = rescale(bench, parallelism)
    assert bench.state == "running"
    bench.connect()
    acknowledged_by_all(bench)
    assert bench.replies[client].error == ""
    assert 1 not in bench.slots and len(bench.slots) == parallelism
    assert bench.status.restarts == 0


def test_a_job_that_is_to_become_smaller_needs_no_other_slot() -> None:
    bench = Bench().run()
    client = rescale(bench, 1)
    bench.leaves(1)
    acknowledged_by_all(bench)
    assert bench.replies[client].error == "" and bench.slots == (0,)


def test_one_that_leaves_during_a_rescale_is_left_with_it() -> None:
    bench = Bench().run()
    client = rescale(bench, 3)
    bench.connect()
    bench.leaves(0)
    acknowledged_by_all(bench)
    assert bench.attempt == 0  # that checkpoint came before there were slots for all
    bench.connect()
    acknowledged_by_all(bench)
    assert bench.replies[client].error == "" and bench.slots == (2, 3, 1), "slot 1 keeps the upper third"


def test_a_rescale_that_fails_leaves_the_slot_all_the_same() -> None:
    bench = Bench(restart=RestartStrategy(kind="none")).run()
    client = rescale(bench, 3)
    bench.leaves(1)
    bench.connect()
    bench.answers[m.Deploy] = False
    acknowledged_by_all(bench)
    bench.answers[m.Deploy] = True
    bench.feed_from(0, m.DeployFailed(1, "pool_size: too small", "", fatal=True))
    bench.wait(0.1)
    assert "the job continues at 2" in bench.replies[client].error
    assert bench.state == "running" and 1 not in bench.slots and len(bench.slots) == 2


def test_the_slot_of_a_job_that_has_finished_is_not_replaced() -> None:
    bench = Bench(checkpoint_dir=None, held=("commit",)).run()
    bench.finish(*bench.tasks, committables=(("write", (b"x",)),))
    bench.leaves(1)
    assert len(bench.requests) == 2
    bench.held = ()
    bench.release("commit")
    assert bench.ended is not None and bench.ended.state == "finished"
