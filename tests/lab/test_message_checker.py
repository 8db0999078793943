"""What a coordinator owes its slots and clients is broken by each of these, and kept by what comes before it."""

from __future__ import annotations

import pytest

from midstream.engine.checkpoint.metadata import OperatorState, VertexLayout
from midstream.engine.core.config import JobConfig
from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.core.ids import TaskId
from midstream.engine.graph.idleness import IdleOrigin
from midstream.engine.protocol import messages as m
from midstream.simulation.message_checker import NOT_OPENED, MessageChecker, OwedCommits
from midstream.simulation.world import Tempo, World
from midstream_lab.checkers.event_time_checker import EventTimeChecker
from midstream_lab.checkers.watermark_checker import CheckedWatermarkValve

TASK = TaskId(0, 0)


class Watched:
    """The messages of a driver with the slots 0 and 1 and a pause of 5 ms, at `now_us`."""

    def __init__(self) -> None:
        self.now_us = 0
        self.open = {0, 1}
        self.bugs: list[str] = []
        config = JobConfig(name="job", parallelism=1, checkpoint_dir="memory://x", min_pause_s=0.005)
        self.is_savepoint = False
        self.message_checker = MessageChecker(
            config, self.open, lambda: self.now_us, lambda: self.is_savepoint, self.bugs.append
        )

    def trigger(self, number: int) -> None:
        self.message_checker.sent(0, m.TriggerCheckpoint(0, number, 0, (TASK,), None, False))

    def complete(self, number: int) -> None:
        self.message_checker.sent(0, m.CheckpointCompleted(0, number))

    def deploy(self, slot: int, attempt: int) -> None:
        self.message_checker.sent(slot, m.Deploy("job", attempt, b"", b"", (0, 1), (TASK,)))


@pytest.mark.parametrize(("pause_us", "is_wanted", "bugs"), [(5000, False, 0), (100, False, 1), (100, True, 0)])
def test_checkpoints_keep_the_pause_unless_one_is_asked_for(pause_us: int, is_wanted: bool, bugs: int) -> None:
    watched = Watched()
    watched.trigger(1)
    watched.now_us = 9000
    watched.complete(1)
    watched.now_us += pause_us
    if is_wanted:
        watched.message_checker.on_request(1, m.DoCheckpoint())
    watched.trigger(2)
    assert len(watched.bugs) == bugs


def test_a_client_is_told_of_a_checkpoint_that_was_triggered_for_it() -> None:
    watched = Watched()
    watched.trigger(1)
    watched.message_checker.on_request(1, m.DoCheckpoint())
    watched.message_checker.on_request(2, m.DoCheckpoint())
    watched.trigger(2)
    watched.message_checker.on_reply(1, m.Reply(checkpoint="memory://x/chk-2"))
    assert not watched.bugs
    watched.message_checker.on_reply(2, m.Reply(checkpoint="memory://x/chk-1"))
    assert len(watched.bugs) == 1


def test_an_attempt_is_deployed_when_no_slot_runs_the_one_before() -> None:
    watched = Watched()
    for slot in (0, 1):
        watched.deploy(slot, 0)
    watched.message_checker.on_message(0, m.Cancelled(0))
    watched.open.discard(1)
    watched.deploy(0, 1)
    assert not watched.bugs
    watched.deploy(2, 2)
    assert len(watched.bugs) == 1


def test_a_task_acknowledges_checkpoints_in_their_order() -> None:
    watched = Watched()
    for number, bugs in ((1, 0), (3, 0), (2, 1)):
        watched.message_checker.on_message(0, m.CheckpointAck(0, number, TASK, (), (), 0))
        assert len(watched.bugs) == bugs


def test_no_more_failures_are_counted_than_there_were() -> None:
    watched = Watched()
    watched.trigger(1)
    watched.message_checker.sent(0, m.CheckpointAborted(0, 1))
    watched.message_checker.on_notification("1 checkpoints in a row have failed (tolerable_failures is 0)")
    assert not watched.bugs
    watched.now_us = 9000
    watched.trigger(2)
    watched.complete(2)
    watched.message_checker.on_notification("1 checkpoints in a row have failed (tolerable_failures is 0)")
    assert len(watched.bugs) == 1


def test_a_storage_that_could_not_be_opened_is_tried_again_with_the_next_commit() -> None:
    bugs: list[str] = []
    owed = OwedCommits(bugs.append, "slot1")
    owed.on_request(1)
    owed.not_opened()
    owed.on_request(2)
    for request in (1, 2):  # both were waiting for it
        owed.on_answer(m.CommitFailed(request, f"StorageError: {NOT_OPENED}", ""))
    owed.on_request(3)
    owed.not_opened()
    owed.on_answer(m.CommitFailed(3, f"StorageError: {NOT_OPENED}", ""))
    assert not bugs and not owed.requests
    owed.on_request(4)
    owed.on_answer(m.CommitFailed(4, f"StorageError: {NOT_OPENED}", ""))
    assert len(bugs) == 1


def test_event_time_of_a_task_is_that_of_its_channel_furthest_behind() -> None:
    world = World(0, Tempo())
    valve = CheckedWatermarkValve(world, [IdleOrigin(one=frozenset((0,)), subtask=subtask) for subtask in range(2)])
    assert valve.advance(0, 5) is None
    assert valve.set_idle(1, True) == 5
    assert valve.set_idle(1, False) is None
    assert valve.advance(1, 9) is None
    assert not world.bugs
    valve.watermarks[0], valve._at_lowest = 99, 0  # as if it had not listened
    valve.advance(1, 50)
    assert world.bugs


@pytest.mark.parametrize(
    ("before", "after", "complaints"),
    [
        (("source0", "pass0.1"), ("source0", "new1-1", "pass0.1"), 1),  # of pass0.1, which is not new
        (("source0",), ("source0", "new1-1"), 0),
        (("source0",), ("source0",), 1),
        (("source0", "new1-1"), ("source0", "new1-1"), 1),  # of new1-1
    ],
)
def test_event_time_goes_back_only_in_a_source_whose_first_operator_is_new(
    before: tuple[str, ...], after: tuple[str, ...], complaints: int
) -> None:
    event_times = EventTimeChecker((), (), lambda subtask, part: iter(()), True)

    def check(uids: tuple[str, ...], mark_us: int) -> list[str]:
        operators = {
            uid: OperatorState(
                uid, uid, 0, 1, (m.OperatorSnapshot(uid, watermark_in_us=mark_us, watermark_out_us=mark_us),)
            )
            for uid in uids
        }
        return list(event_times.check("", operators, [VertexLayout(0, "task", 1, uids, "source0")]))

    assert not check(before, MAX_WATERMARK_US)
    assert len(check(after, MIN_WATERMARK_US)) == complaints


def test_a_checkpoint_for_a_savepoint_that_fails_does_not_count() -> None:
    watched = Watched()
    for number, watched.is_savepoint in ((1, True), (2, False)):
        watched.trigger(number)
        watched.message_checker.sent(0, m.CheckpointAborted(0, number))
        watched.now_us += 5_000
    watched.message_checker.on_notification("1 checkpoints in a row have failed (tolerable_failures is 0)")
    assert not watched.bugs
    watched.message_checker.on_notification("2 checkpoints in a row have failed (tolerable_failures is 1)")
    assert "'2 checkpoints in a row have failed' is reported" in watched.bugs[0]


def test_a_task_that_had_finished_in_a_checkpoint_has_in_later_ones_of_its_attempt() -> None:
    watched = Watched()

    def acknowledge(attempt: int, number: int, finished: bool) -> None:
        watched.message_checker.on_message(0, m.CheckpointAck(attempt, number, TASK, (), (), 0, 0.0, finished))

    acknowledge(0, 1, False)
    acknowledge(0, 2, True)
    acknowledge(1, 3, False)
    assert not watched.bugs
    acknowledge(0, 4, False)
    assert watched.bugs == [f"task {TASK} is in checkpoint 4 as running, and had finished in an earlier one"]
