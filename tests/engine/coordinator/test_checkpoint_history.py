"""What a status says of checkpoints that are over: where their time went, and when their output was committed."""

from __future__ import annotations

import pytest

from midstream.engine.coordinator.checkpoints.checkpoint_history import HISTORY_MAX, CheckpointHistory, phases_of
from midstream.engine.core.ids import TaskId
from midstream.engine.protocol.job_status import CheckpointPhases, CheckpointStatus
from midstream.engine.protocol.messages import CheckpointAck


def ack(task: TaskId, alignment_ms: float, snapshot_ms: float, storing_ms: float) -> CheckpointAck:
    return CheckpointAck(0, 1, task, (), (), 0, alignment_ms, snapshot_ms=snapshot_ms, storing_ms=storing_ms)


def completed(checkpoint_id: int) -> CheckpointStatus:
    return CheckpointStatus(checkpoint_id, "completed", 1000 * checkpoint_id, 100, 5)


def test_phases_are_of_the_subtask_that_was_last_and_add_up() -> None:
    first, last = TaskId(0, 1), TaskId(0, 0)
    acks = {first: ack(first, 900.0, 0.0, 0.0), last: ack(last, 20.0, 30.0, 40.0)}
    assert phases_of(acks, 100) == CheckpointPhases(10.0, 20.0, 30.0, 40.0)
    assert phases_of({}, 100) is None


def test_clocks_that_differ_do_not_make_a_phase_negative() -> None:
    task = TaskId(0, 0)
    assert phases_of({task: ack(task, 0.0, 0.0, 100.4)}, 100) == CheckpointPhases(0.0, 0.0, 0.0, 100.4)


def test_output_is_committed_once_no_older_checkpoint_holds_any() -> None:
    history = CheckpointHistory()
    history.completed(completed(1), True, 1100)
    history.completed(completed(2), False, 2100)
    history.completed(completed(3), True, 3100)
    history.committed(1, 3200)
    assert [each.commit_ms for each in history.newest_first] == [None, None, None]
    history.committed(3, 3300)
    assert [each.commit_ms for each in history.newest_first] == [None, None, 2200]
    assert history.last_completed is not None and history.last_completed.commit_ms is None
    history.committed(None, 3400)
    assert [each.commit_ms for each in history.newest_first] == [300, None, 2200]
    assert history.last_completed.id == 3 and history.last_completed is history.newest_first[0]
    history.committed(None, 9999)
    assert history.newest_first[0].commit_ms == 300


def test_a_failed_checkpoint_of_the_same_id_is_not_taken_for_it() -> None:
    history = CheckpointHistory()
    history.completed(completed(1), True, 1100)
    history.failed(CheckpointStatus(1, "failed", 900, 100, 0, "the disk is full"))
    history.committed(None, 1200)
    assert [(each.state, each.commit_ms) for each in history.newest_first] == [("failed", None), ("completed", 100)]


@pytest.mark.parametrize("commits", [True, False])
def test_it_is_bounded(commits: bool) -> None:
    history = CheckpointHistory()
    for n in range(1, 50):
        history.completed(completed(n), commits, n)
    history.committed(None, 99)
    assert [each.id for each in history.newest_first] == list(range(49, 49 - HISTORY_MAX, -1))
