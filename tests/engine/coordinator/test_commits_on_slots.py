"""Commits of sinks that commit on slots: which slot is asked for what, when, and what follows from its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from coordinator_world import ROOT, Bench, Ledger, ScriptedSource, two_vertices

from midstream.engine.coordinator.checkpoints.slot_commit_dispatcher import RUNNING_LANES_MAX
from midstream.engine.core.config import RestartStrategy
from midstream.engine.core.ids import TaskId
from midstream.engine.operators.sink_api import Committer, CommitterContext
from midstream.engine.protocol import messages as m

READ0, READ1, WRITE0, WRITE1 = TaskId(0, 0), TaskId(0, 1), TaskId(1, 0), TaskId(1, 1)
ALL = (READ0, READ1, WRITE0, WRITE1)


class OnSlots(Ledger):
    """Lanes are the subtasks, unless told otherwise. On the driver it writes down what it commits, and for which lane."""

    commits_on_slots = True

    def __init__(self, lanes: object = None) -> None:
        super().__init__()
        self.lanes = lanes
        self.committers = 0
        self.closed = 0

    def lane(self, committable: bytes) -> int:
        if self.lanes is None:
            return int(committable.rpartition(b"/")[2])
        if isinstance(self.lanes, Exception):
            raise self.lanes
        return self.lanes  # type: ignore[return-value]

    def committer(self, context: CommitterContext) -> Committer:
        self.committers += 1
        return self

    def close(self) -> None:
        self.closed += 1


def world(sink: OnSlots | None = None, **options: object) -> Bench:
    sink = sink or OnSlots()
    bench = Bench(two_vertices(ScriptedSource(("a",)), sink), **options)  # type: ignore[arg-type]
    bench.sink = sink
    return bench


def asked(bench: Bench) -> list[tuple[int, int, int, tuple[bytes, ...]]]:
    """Slot, lane, checkpoint and committables of every commit so far."""
    return [
        (slot, message.lane, message.checkpoint_id, message.committables)
        for slot, message in bench.sent
        if isinstance(message, m.Commit) and not message.aborts
    ]


def open_requests(bench: Bench) -> list[tuple[int, int]]:
    """Slot and request of every commit that the coordinator has sent, the oldest first."""
    return [(slot, message.request) for slot, message in bench.sent if isinstance(message, m.Commit)]


def answer(bench: Bench, *which: int, error: str = "", stopped: bool = False, fatal: bool = False) -> None:
    """Answer the requests at these places in the order in which they were sent."""
    for at in which:
        slot, request = open_requests(bench)[at]
        done = m.CommitFailed(request, error, "", fatal, "", stopped) if error else m.CommitDone(request)
        bench.feed_from(slot, done)


def test_each_lane_is_one_call_on_the_slot_of_its_number_and_the_next_checkpoint_waits_for_all() -> None:
    bench = world().run()
    bench.checkpoint()
    bench.checkpoint()
    assert asked(bench) == [(0, 0, 1, (b"1/0",)), (1, 1, 1, (b"1/1",))]
    answer(bench, 0)
    assert len(asked(bench)) == 2, "lane 1 is still at checkpoint 1"
    answer(bench, 1)
    assert asked(bench)[2:] == [(0, 0, 2, (b"2/0",)), (1, 1, 2, (b"2/1",))]
    answer(bench, 2, 3)
    assert bench.job.commits.is_drained
    assert bench.sink.committed == [], "nothing was committed on the driver"
    assert bench.sink.committers == 0  # type: ignore[attr-defined]


def test_a_slot_is_told_of_the_sinks_once_and_before_its_first_commit() -> None:
    bench = world().run()
    for number in range(3):
        bench.checkpoint()
        answer(bench, 2 * number, 2 * number + 1)
    for slot in (0, 1):
        told = [x for to, x in bench.sent if to == slot and isinstance(x, (m.CommitSinks, m.Commit))]
        assert [type(x) for x in told] == [m.CommitSinks, m.Commit, m.Commit, m.Commit]
        assert told[0] == m.CommitSinks("job1", b"", ROOT, epoch=1), "it has the graph already"


def test_what_is_of_one_lane_comes_in_one_call_in_the_order_in_which_it_was_prepared() -> None:
    bench = world(OnSlots(lanes=0)).run()
    bench.ask(m.DoCheckpoint())
    bench.ack(1, WRITE1, items=(b"x", b"w"))
    bench.ack(1, *[ref for ref in ALL if ref not in (WRITE0, WRITE1)])
    bench.ack(1, WRITE0, items=(b"z", b"y"))
    assert asked(bench) == [(0, 0, 1, (b"z", b"y", b"x", b"w"))]


def test_negative_lanes_have_slots_too() -> None:
    bench = world(OnSlots(lanes=-3)).run()
    bench.checkpoint()
    assert [place[:2] for place in asked(bench)] == [(1, -3)]


@pytest.mark.parametrize("lane", [1.0, True, None, "a", 2**63, -(2**63) - 1], ids=repr)
def test_a_lane_that_is_no_int_of_64_bits_is_refused_with_the_sinks_name(lane: object) -> None:
    sink = OnSlots(lanes=lane)
    if lane is None:
        sink.lane = lambda committable: None  # type: ignore[assignment, method-assign, return-value]
    bench = world(sink).run()
    bench.checkpoint()
    bench.wait(60)
    assert "sink 'write'" in bench.error and f"lane() returned {lane!r}" in bench.error


def test_an_error_of_the_sinks_lane_is_one_of_the_commit() -> None:
    bench = world(OnSlots(lanes=KeyError("subtask"))).run()
    bench.checkpoint()
    bench.wait(20)
    failure = bench.status.failures[0]
    assert "sink 'write'" in failure.summary and "KeyError: 'subtask'" in failure.summary


def test_so_many_lanes_are_under_way_on_one_slot_and_no_more() -> None:
    sink = OnSlots()
    bench = world(sink).run()
    bench.ask(m.DoCheckpoint())
    bench.ack(1, *[ref for ref in ALL if ref.vertex == 0])
    bench.ack(1, WRITE1, items=())
    sink.lane = lambda committable: 2 * int(committable.split(b"/")[0])  # type: ignore[method-assign]
    items = tuple(b"%d/0" % n for n in range(2 * RUNNING_LANES_MAX))
    bench.ack(1, WRITE0, items=items)
    assert {place[0] for place in asked(bench)} == {0}
    for done in range(2 * RUNNING_LANES_MAX):
        assert len(asked(bench)) == min(RUNNING_LANES_MAX + done, 2 * RUNNING_LANES_MAX)
        answer(bench, done)
    assert bench.job.commits.is_drained


def test_a_lane_that_fails_is_tried_again_alone_once_the_others_have_answered() -> None:
    bench = world().run()
    bench.checkpoint()
    answer(bench, 0, error="OSError: broker away")
    bench.wait(5)
    assert len(asked(bench)) == 2, "lane 1 has not answered"
    answer(bench, 1)
    bench.wait(0.3)
    assert asked(bench)[2:] == [(0, 0, 1, (b"1/0",))]
    answer(bench, 2)
    assert bench.job.commits.is_drained
    assert not bench.status.failures


def test_a_commit_that_keeps_failing_restarts_the_job_which_is_not_deployed_before_it_is_done() -> None:
    bench = world().run()
    bench.checkpoint()
    answer(bench, 1)
    for at in (0, 2, 3, 4, 5):
        answer(bench, at, error="OSError: broker away")
        bench.wait(4)
    failure = bench.status.failures[0].summary
    assert "sink 'write': committing what it wrote up to checkpoint 1" in failure
    assert "lane 0: OSError: broker away" in failure
    assert len(bench.messages(m.Deploy)) == 2, "nothing was deployed again"
    assert bench.state == "restarting"
    assert asked(bench)[-1] == (0, 0, 1, (b"1/0",)), "on a slot that has no tasks"
    answer(bench, 6)
    assert len(bench.messages(m.Deploy)) == 4 and bench.state == "running"
    assert [place for place in asked(bench) if place[1] == 1] == [(1, 1, 1, (b"1/1",))], "lane 1 was done"


def test_a_fatal_failure_of_a_commit_ends_the_job_without_another_try() -> None:
    bench = world().run()
    bench.checkpoint()
    answer(bench, 1)
    answer(bench, 0, error="ConfigError: no such topic", fatal=True)
    assert "ConfigError: no such topic" in bench.error and "--from latest" in bench.error


def test_a_slot_that_dies_in_a_commit_costs_the_attempt_and_its_lane_is_committed_by_another() -> None:
    bench = world().run()
    bench.checkpoint()
    answer(bench, 0)
    bench.lose(1)
    bench.wait(1)
    assert len(asked(bench)) == 2, "one of the two slots is missing"
    bench.connect()
    assert asked(bench)[2:] == [(2, 1, 1, (b"1/1",))]
    assert len(bench.messages(m.Deploy)) == 2
    answer(bench, 2)
    assert len(bench.messages(m.Deploy)) == 4 and bench.state == "running"


def test_the_answer_to_a_request_that_was_given_up_is_ignored() -> None:
    bench = world().run()
    bench.checkpoint()
    answer(bench, 0)
    bench.lose(1)
    bench.wait(1)
    bench.connect()
    for slot in (0, 2):
        bench.feed_from(slot, m.CommitDone(open_requests(bench)[1][1]))
        bench.feed_from(slot, m.CommitDone(999))
    bench.feed_from(0, m.CommitDone(open_requests(bench)[2][1]))  # another slot was asked
    assert len(bench.messages(m.Deploy)) == 2 and not bench.job.commits.is_drained
    answer(bench, 2)
    answer(bench, 2)  # again
    assert bench.state == "running"


def test_a_commit_that_was_told_to_stop_is_waited_for_and_repeated_and_is_no_failure() -> None:
    bench = world().run()
    bench.checkpoint()
    bench.fail(WRITE0)
    assert bench.messages(m.Cancel)
    bench.wait(5)
    assert bench.state == "restarting" and len(asked(bench)) == 2, "both are waited for"
    answer(bench, 0)
    answer(bench, 1, error="OSError: told to stop", stopped=True)
    assert asked(bench)[2:] == [(1, 1, 1, (b"1/1",))]
    answer(bench, 2)
    bench.wait(1)
    assert bench.state == "running"
    assert len(bench.status.failures) == 1


def test_no_commit_is_begun_while_the_tasks_are_cancelled() -> None:
    bench = world().run()
    bench.checkpoint()
    bench.answers[m.Cancel] = False
    bench.fail(WRITE0)
    answer(bench, 0, 1, error="told to stop", stopped=True)
    assert len(asked(bench)) == 2
    for slot in bench.slots:
        bench.feed_cancelled(slot)
    assert asked(bench)[2:] == [(0, 0, 1, (b"1/0",)), (1, 1, 1, (b"1/1",))]


def test_the_output_of_the_restored_checkpoint_is_committed_by_slots_before_anything_is_deployed() -> None:
    first = world().run()
    first.checkpoint()
    again = world(storage=first.storage, restore="latest", job_id="job2").start()
    again.connect(1)
    assert asked(again) == [], "not all slots are there"
    again.connect()
    assert asked(again) == [(0, 0, 1, (b"1/0",)), (1, 1, 1, (b"1/1",))]
    assert not again.messages(m.Deploy)
    answer(again, 0, 1)
    assert again.state == "running"


def resuming(first: Bench, **options: Any) -> Bench:
    """The same job, started again from its newest checkpoint, up to the point where all slots are requested."""
    return world(None, storage=first.storage, restore="latest", job_id="job2", **options).start()


def test_a_job_whose_slots_have_all_come_may_commit_for_longer_than_they_were_waited_for() -> None:
    first = world().run()
    first.checkpoint()
    first.checkpoint()
    again = resuming(first, slot_timeout_s=20.0)
    again.connect()
    again.wait(15)
    answer(again, 0, 1)
    again.wait(15)
    assert again.ended is None and not again.status.failures and not again.messages(m.Deploy)
    answer(again, 2, 3)
    assert again.state == "running"


def test_a_slot_that_is_lost_while_it_commits_is_waited_for_as_long_as_any_other() -> None:
    first = world().run()
    first.checkpoint()
    again = resuming(first, slot_timeout_s=20.0)
    again.connect()
    again.wait(15)
    again.lose(1)
    again.wait(19)
    assert again.ended is None
    again.connect()
    answer(again, 0, 2)
    again.wait(1)
    assert again.state == "running"


def test_a_commit_that_kills_every_slot_that_makes_it_is_a_failure_that_repeats() -> None:
    first = world().run()
    first.checkpoint()
    again = resuming(first, restart=RestartStrategy(same_failures=3))
    again.connect()
    answer(again, 0)
    for slot in (1, 2, 3):
        assert again.ended is None
        again.lose(slot, "was killed by SIGSEGV")
        again.connect()
    assert "the same failure 3 times in a row" in again.error and "slot 3" in again.error


def test_slots_that_are_lost_together_while_they_commit_are_one_failure() -> None:
    """They may have been on one machine."""
    first = world().run()
    first.checkpoint()
    again = resuming(first, restart=RestartStrategy(kind="fixed", attempts=1, delay_s=5.0))
    again.connect()
    again.lose(0)
    again.lose(1)
    again.connect()
    answer(again, 2, 3)
    again.wait(6)
    assert again.state == "running" and again.status.restarts == 1


def test_slots_are_kept_until_a_finished_job_has_committed_everything() -> None:
    bench = world().run()
    bench.end_of_data(*ALL)
    bench.ack(1, *ALL, finished=True)
    bench.finish(*ALL)
    assert bench.closed == [] and bench.ended is None
    answer(bench, 0)
    assert bench.closed == [] and bench.ended is None
    answer(bench, 1)
    assert bench.ended is not None and bench.ended.state == "finished"
    assert sorted(bench.closed) == [0, 1]


def test_a_job_that_stops_has_committed_everything_on_its_slots() -> None:
    bench = world().run()
    bench.ask(m.DoStop(drain=False))
    bench.ack(1, *ALL)
    assert bench.ended is None and len(asked(bench)) == 2
    answer(bench, 0, 1)
    assert bench.ended is not None and bench.ended.state == "stopped"


def test_without_checkpoints_slots_commit_at_the_end() -> None:
    bench = world(checkpoint_dir=None).run()
    bench.finish(*(ref for ref in ALL if ref.vertex == 0))
    bench.finish(WRITE0, committables=(("write", (b"0/0",)),))
    assert asked(bench) == []
    bench.finish(WRITE1, committables=(("write", (b"0/1",)),))
    assert asked(bench) == [(0, 0, 0, (b"0/0",)), (1, 1, 0, (b"0/1",))]
    assert [x.checkpoint_root for x in bench.messages(m.CommitSinks)] == [None, None]
    answer(bench, 0, 1)
    assert bench.ended is not None and bench.ended.state == "finished"


def test_what_a_slot_has_left_that_dies_after_the_end_of_all_tasks_is_committed_by_another_one() -> None:
    bench = world(checkpoint_dir=None).run()
    bench.finish(*(ref for ref in ALL if ref.vertex == 0))
    bench.finish(WRITE0, committables=(("write", (b"0/0",)),))
    bench.finish(WRITE1, committables=(("write", (b"0/1",)),))
    bench.lose(0)
    bench.wait(1)
    assert asked(bench)[2:] == [(1, 0, 0, (b"0/0",))], "lane 1 stays where it is"
    answer(bench, 1, 2)
    assert bench.ended is not None and bench.ended.state == "finished"


def test_the_driver_commits_what_the_last_slot_has_left_and_closes_its_committers() -> None:
    bench = world(checkpoint_dir=None).run()
    bench.finish(*(ref for ref in ALL if ref.vertex == 0))
    bench.finish(WRITE0, committables=(("write", (b"0/0",)),))
    bench.finish(WRITE1, committables=(("write", (b"0/1",)),))
    answer(bench, 0)
    bench.lose(0)
    bench.lose(1)
    bench.wait(1)
    assert bench.sink.committed == [(0, (b"0/1",))]
    assert bench.ended is not None and bench.ended.state == "finished"
    assert (bench.sink.committers, bench.sink.closed) == (1, 1)  # type: ignore[attr-defined]


def test_the_driver_commits_what_a_finished_job_holds_that_is_started_again() -> None:
    first = world().run()
    first.end_of_data(*ALL)
    first.ack(1, *ALL, finished=True)
    again = world(storage=first.storage, restore="latest", job_id="job2").start()
    assert again.sink.committed == [(1, (b"1/0",)), (1, (b"1/1",))]
    assert again.ended is not None and again.ended.state == "finished"
    assert again.requests == []


def test_aborts_go_to_slots_too_and_come_behind_what_is_to_be_committed() -> None:
    bench = world().run()
    bench.checkpoint()
    bench.ask(m.DoCheckpoint())
    bench.ack(2, WRITE0)
    bench.fail(WRITE1)
    answer(bench, 0, 1)
    aborts = [(slot, x.lane, x.committables) for slot, x in bench.sent if isinstance(x, m.Commit) and x.aborts]
    assert aborts == [(0, 0, (b"2/0",))]
    bench.wait(1)
    assert bench.state == "restarting", "they are waited for"
    answer(bench, 2, error="OSError: gone")
    assert bench.state == "running"
    assert any("sink 'write': cleaning up" in text and "OSError: gone" in text for text in bench.status.warnings)


def test_a_job_that_is_cancelled_waits_for_no_slot_and_cleans_up_on_the_driver() -> None:
    bench = world().run()
    bench.checkpoint()
    bench.ask(m.DoCheckpoint())
    bench.ack(2, WRITE0)
    bench.shell.cancel("enough")
    assert bench.ended is not None and bench.ended.state == "stopped"
    assert bench.sink.committed == [] and bench.sink.aborted == [b"2/0"]


def test_a_rescale_lets_no_slot_go_that_is_committing() -> None:
    bench = world().run()
    client = bench.ask(m.DoRescale(1))
    bench.ack(1, *ALL)
    bench.wait(0.5)
    assert bench.closed == []
    answer(bench, 0)
    assert bench.closed == []
    answer(bench, 1, error="told to stop", stopped=True)
    assert bench.closed == [1]
    assert asked(bench)[2:] == [(0, 1, 1, (b"1/1",))]
    answer(bench, 2)
    bench.wait(1)
    assert bench.state == "running" and not bench.replies[client].error


def test_what_a_slot_commits_is_shown_with_its_lane_and_has_a_limit() -> None:
    bench = world().run()
    bench.checkpoint()
    answer(bench, 0)
    bench.wait(10)
    what = "sink 'write' to commit what it wrote up to checkpoint 1 (lane 1, on slot 1)"
    assert [(wait.what, wait.limit_ms) for wait in bench.status.waiting] == [(what, 600_000)]
    bench.wait(600)
    assert what in bench.error


def items_of(commits: Sequence[tuple[int, int, int, tuple[bytes, ...]]]) -> list[bytes]:
    return [item for *_, items in commits for item in items]


def test_what_is_not_committed_yet_is_in_every_later_checkpoint_though_some_lanes_are_done() -> None:
    bench = world().run()
    bench.checkpoint()
    answer(bench, 0)
    bench.checkpoint()
    restored = world(storage=bench.storage, restore="latest", job_id="job2").start()
    restored.connect()
    answer(restored, 0, 1)
    assert items_of(asked(restored)) == [b"1/0", b"1/1", b"2/0", b"2/1"]


def test_slots_that_came_for_a_rescale_commit_what_the_others_have_left() -> None:
    bench = world().run()
    bench.ask(m.DoRescale(4))
    bench.connect(1)
    bench.end_of_data(*ALL)
    bench.wait(0.2)
    pending = bench.job.checkpoints.pending
    assert pending is not None
    bench.ack(pending.checkpoint_id, *ALL, finished=True)
    bench.finish(*ALL)
    bench.lose(0)
    bench.lose(1)
    bench.wait(1)
    assert bench.sink.committed == []
    assert [place[:2] for place in asked(bench)[2:]] == [(1, 0), (2, 0), (2, 1)]


def test_a_coordinator_that_was_superseded_ends_when_a_slot_will_not_commit_for_it() -> None:
    old = world().run()
    old.checkpoint()
    world(storage=old.storage, restore="latest", job_id="job2").start()
    answer(old, 0, error="another coordinator has taken over")
    answer(old, 1)
    assert "another coordinator has taken over" in old.error
    assert len(asked(old)) == 2, "nothing more is asked for"
