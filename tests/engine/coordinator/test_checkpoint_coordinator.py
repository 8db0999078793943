"""Checkpoints: when they are triggered, by whom they are acknowledged, how they end, what is kept."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from coordinator_world import ROOT, Bench, Ledger, ScriptedSource, restored, two_vertices

from in_memory import TORN
from midstream.engine.checkpoint.metadata import CheckpointMetadata, OperatorState, decode_metadata
from midstream.engine.coordinator.checkpoints import checkpoint_coordinator
from midstream.engine.coordinator.checkpoints.metadata_builder import refusal
from midstream.engine.core.config import RestartStrategy
from midstream.engine.core.errors import InvariantError, StorageError
from midstream.engine.core.ids import TaskId
from midstream.engine.protocol import messages as m

READ0, READ1, WRITE0, WRITE1 = TaskId(0, 0), TaskId(0, 1), TaskId(1, 0), TaskId(1, 1)
ALL = (READ0, READ1, WRITE0, WRITE1)


def metadata(bench: Bench, checkpoint_id: int) -> CheckpointMetadata:
    return decode_metadata(bench.storage.files[f"chk-{checkpoint_id}/_metadata"], "test")


def chunk(file: str, rule: str = "keyed") -> m.PartHandle:
    return m.PartHandle("state", rule, (m.ChunkHandle(f"id of {file}", file, 0, 5, 0, 1, 0, 15),))


@pytest.mark.parametrize("holder", [0, 1])
@pytest.mark.parametrize("rule", ["union", "split", "keyed", "broadcast"])
@pytest.mark.parametrize("finished", [(), (0,), (0, 1)])
def test_union_state_of_which_some_subtasks_have_finished_is_refused_whoever_holds_it(
    holder: int, rule: str, finished: tuple[int, ...]
) -> None:
    """What a finished subtask holds is not restored, and every subtask needs all of the union."""
    subtasks = tuple(m.OperatorSnapshot("op", (chunk("a", rule),) if i == holder else ()) for i in range(2))
    state = OperatorState("op", "op", 0, 2, subtasks, finished)
    why = refusal([state], frozenset(), frozenset(("a",)))
    assert bool(why) == (rule == "union" and finished == (0,))
    assert not why or "only some of its subtasks have finished" in why


def test_the_sources_are_triggered_at_the_interval_and_all_tasks_must_acknowledge() -> None:
    bench = Bench(checkpoint_interval_s=10.0).run()
    bench.wait(9.9)
    assert bench.triggers == []
    bench.wait(0.2)
    assert bench.triggers == [1]
    assert bench.triggered_tasks(1) == {READ0, READ1}
    bench.ack(1, READ0, READ1, WRITE0)
    assert bench.storage.checkpoints() == []
    assert bench.status.checkpoints[0].state == "in_progress"
    bench.ack(1, WRITE1)
    assert bench.storage.checkpoints() == [1]
    assert [x.checkpoint_id for x in bench.messages(m.CheckpointCompleted)] == [1, 1]
    assert bench.status.checkpoints_completed == 1
    assert bench.status.last_checkpoint is not None and bench.status.last_checkpoint.state_bytes == 40


def test_the_status_has_the_state_of_each_operator_and_how_it_has_grown() -> None:
    bench = Bench(checkpoint_interval_s=10.0).run()
    assert bench.status.state_growth == ()
    for number, names in enumerate(("", "a", "ab"), 1):
        parts = tuple(chunk(name) for name in names)
        bench.wait(10.1)
        bench.ack(number, READ0, READ1, WRITE0)
        bench.ack(number, WRITE1, parts=dict.fromkeys(ALL, parts).__getitem__, files=lambda ref: ("a", "b"))
        read, write = (vertex.operators[0] for vertex in bench.status.vertices)
        assert (read.state_rows, read.state_bytes) == (0, 0)
        assert (write.state_rows, write.state_bytes) == (len(names), 5 * len(names))
    assert [point.bytes for point in bench.status.state_growth] == [0, 5, 10]
    times = [point.at_ms for point in bench.status.state_growth]
    assert times == sorted(set(times))


def test_the_status_says_who_is_missing_who_was_last_and_how_long_each_phase_took() -> None:
    bench = Bench(checkpoint_interval_s=None, held=("publish",)).run()
    bench.ask(m.DoSavepoint("/savepoints/a"))
    bench.wait(3)
    bench.ack(1, READ0, WRITE1)
    running = bench.status.checkpoints[0]
    assert (running.state, running.tasks, running.tasks_done, running.is_savepoint) == ("in_progress", 4, 2, True)
    assert running.last == "read (subtask 1), write (subtask 0)" and running.metadata_ms == 0
    bench.ack(1, WRITE0)
    bench.ack(1, READ1)
    assert bench.status.checkpoints[0].last == "read (subtask 1)"
    bench.wait(2)
    bench.release("publish")
    done = bench.status.checkpoints[0]
    assert (done.state, done.tasks, done.tasks_done, done.is_savepoint) == ("completed", 4, 4, True)
    assert (done.duration_ms, done.metadata_ms, done.last) == (3_000, 2_000, "read (subtask 1)")


def test_nothing_is_told_before_the_metadata_is_durable() -> None:
    bench = Bench(held=("publish",)).run()
    bench.checkpoint()
    assert not bench.messages(m.CheckpointCompleted)
    assert not bench.sink.committed
    bench.release("publish")
    assert bench.messages(m.CheckpointCompleted)
    assert bench.sink.committed == [(1, (b"1/0", b"1/1"))]


def test_the_next_one_waits_for_the_pause_after_the_last() -> None:
    bench = Bench(checkpoint_interval_s=1.0, min_pause_s=5.0).run()
    bench.wait(5.1)
    bench.wait(3)
    bench.ack(1, *ALL)
    bench.wait(4.9)
    assert bench.triggers == [1]
    bench.wait(0.2)
    assert bench.triggers == [1, 2]


def test_the_pause_begins_when_the_metadata_is_written() -> None:
    bench = Bench(checkpoint_interval_s=1.0, min_pause_s=5.0, held=("publish",)).run()
    bench.wait(5.1)
    bench.ack(1, *ALL)
    bench.wait(8)
    bench.release("publish")
    assert bench.triggers == [1]
    bench.wait(4.9)
    assert bench.triggers == [1]
    bench.wait(0.2)
    assert bench.triggers == [1, 2]


def test_never_two_at_once() -> None:
    bench = Bench(checkpoint_interval_s=1.0).run()
    bench.wait(10)
    assert bench.triggers == [1]
    bench.ack(1, *ALL)
    assert bench.triggers == [1, 2]


def test_while_output_is_not_committed_the_interval_doubles_and_few_checkpoints_wait_for_it() -> None:
    bench = Bench(checkpoint_interval_s=1.0, held=("commit",)).run()
    at_s: list[int] = []
    for second in range(1, 501):
        bench.wait(1)
        while len(at_s) < len(bench.triggers):
            at_s.append(second)
            bench.ack(len(at_s), *ALL)
    pauses = [after - before for before, after in itertools.pairwise(at_s)]
    assert pauses[:6] == [1, 2, 4, 8, 16, 32] and len(at_s) == 9, at_s
    assert len(bench.storage.checkpoints()) == len(at_s), (
        "all are retained: the output of each has still to be committed"
    )
    bench.ask(m.DoCheckpoint())
    assert len(bench.triggers) == len(at_s) + 1, "one that a client requests does not wait"
    bench.ack(len(bench.triggers), *ALL)
    bench.held = ()
    bench.release("commit")
    assert bench.job.commits.is_drained
    bench.wait(1.001)
    assert len(bench.triggers) == len(at_s) + 2


def test_without_an_interval_only_those_asked_for_are_made() -> None:
    bench = Bench(checkpoint_interval_s=None).run()
    bench.wait(1000)
    assert bench.triggers == []
    client = bench.ask(m.DoCheckpoint())
    bench.ack(1, *ALL)
    assert bench.replies[client] == m.Reply(checkpoint="memory://checkpoints/chk-1")


def test_a_request_before_the_job_runs_is_served_when_it_does() -> None:
    bench = Bench().start()
    client = bench.ask(m.DoCheckpoint())
    bench.connect()
    assert bench.triggers == [1]
    bench.ack(1, *ALL)
    assert bench.replies[client].checkpoint


def test_a_request_during_a_checkpoint_waits_for_the_next() -> None:
    bench = Bench().run()
    first = bench.ask(m.DoCheckpoint())
    second = bench.ask(m.DoCheckpoint())
    bench.ack(1, *ALL)
    assert first in bench.replies and second not in bench.replies
    bench.ack(2, *ALL)
    assert bench.replies[second].checkpoint == "memory://checkpoints/chk-2"


def test_a_job_without_checkpoints_says_how_to_have_them() -> None:
    bench = Bench(checkpoint_dir=None).run()
    assert "pass checkpoint_dir=" in bench.replies[bench.ask(m.DoCheckpoint())].error
    assert "pass checkpoint_dir=" in bench.replies[bench.ask(m.DoStop())].error
    bench.wait(100)
    assert bench.triggers == []


def test_a_decline_aborts_and_deletes_what_was_written() -> None:
    bench = Bench().run()
    client = bench.ask(m.DoCheckpoint())
    bench.ack(1, READ0)
    file = bench.state_file(1, READ0)
    assert file in bench.storage.files
    half = bench.state_file(1, READ1)  # its state was written, what it had in flight was not
    bench.storage.files[half] = b"state"
    bench.say(READ1, m.CheckpointDecline(0, 1, READ1, "the disk is full", True, (half,)))
    assert file not in bench.storage.files and half not in bench.storage.files
    assert [x.checkpoint_id for x in bench.messages(m.CheckpointAborted)] == [1, 1]
    assert "the disk is full" in bench.replies[client].error
    assert bench.status.checkpoints_failed == 1
    failed = bench.status.checkpoints[0]
    assert failed.reason == "read (subtask 1): the disk is full" and (failed.state_bytes, failed.in_flight_bytes) == (
        0,
        0,
    )
    assert bench.state == "running"


def test_an_acknowledgement_after_the_abort_is_answered_with_abort_and_its_files_go() -> None:
    bench = Bench().run()
    bench.ask(m.DoCheckpoint())
    bench.say(READ1, m.CheckpointDecline(0, 1, READ1, "no", True))
    told = len(bench.messages(m.CheckpointAborted))
    bench.ack(1, WRITE0)
    assert bench.state_file(1, WRITE0) not in bench.storage.files
    assert len(bench.messages(m.CheckpointAborted)) == told + 1
    assert bench.storage.checkpoints() == []


def test_a_duplicate_acknowledgement_changes_nothing() -> None:
    bench = Bench().run()
    bench.ask(m.DoCheckpoint())
    bench.ack(1, READ0, READ0, READ1, WRITE0)
    assert bench.storage.checkpoints() == []
    bench.ack(1, WRITE1)
    bench.ack(1, READ0)
    assert bench.state_file(1, READ0) in bench.storage.files
    assert bench.state == "running"


def test_what_is_remembered_of_completed_checkpoints_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_coordinator, "IDS_KEPT", 2)
    bench = Bench().run()
    for number in range(1, 9):
        bench.ask(m.DoCheckpoint())
        bench.ack(number, READ0, READ1, WRITE0, WRITE1)
        assert len(bench.job.checkpoints._completed_ids) <= 4
    deleted = set(bench.storage.files)
    for number in range(1, 9):
        bench.ack(number, READ0)  # duplicates of old and of new ones
    assert deleted <= set(bench.storage.files)
    assert bench.state == "running"


def test_an_acknowledgement_of_a_checkpoint_that_never_was_breaks_a_rule() -> None:
    bench = Bench().run()
    with pytest.raises(InvariantError, match="never triggered"):
        bench.ack(17, READ0)


def test_a_checkpoint_that_takes_too_long_fails_and_says_who_is_missing() -> None:
    bench = Bench(checkpoint_timeout_s=60.0, checkpoint_interval_s=None).run()
    client = bench.ask(m.DoCheckpoint())
    bench.ack(1, READ0, READ1, WRITE0)
    bench.wait(61)
    assert "not complete within 60 s" in bench.replies[client].error
    assert "write (subtask 1)" in bench.replies[client].error
    assert "READ" not in bench.replies[client].error


def test_too_many_failures_in_a_row_fail_the_attempt_but_a_success_starts_the_count_over() -> None:
    bench = Bench(tolerable_failures=1).run()

    def decline() -> None:
        bench.wait(0.2)
        bench.ask(m.DoCheckpoint())
        bench.wait(0.2)
        bench.say(READ1, m.CheckpointDecline(0, bench.triggers[-1], READ1, "io error", True))

    decline()
    bench.wait(0.2)
    bench.checkpoint()
    decline()
    assert bench.state == "running"
    decline()
    assert bench.state == "restarting"
    assert "2 checkpoints in a row have failed (tolerable_failures is 1)" in bench.status.failures[0].summary


def test_a_decline_that_does_not_count_is_tried_again_without_anybody_hearing_of_it() -> None:
    bench = Bench(tolerable_failures=0, checkpoint_interval_s=None).run()
    client = bench.ask(m.DoCheckpoint())
    bench.say(READ1, m.CheckpointDecline(0, 1, READ1, "not ready", False))
    assert client not in bench.replies
    bench.wait(0.2)
    assert bench.triggers == [1, 2]
    bench.ack(2, *ALL)
    assert bench.replies[client].checkpoint
    assert bench.state == "running"


def test_metadata_that_cannot_be_written_fails_the_checkpoint_only() -> None:
    bench = Bench().run()
    bench.storage.refuse = lambda path: path.endswith("/_metadata")
    client = bench.ask(m.DoCheckpoint())
    bench.ack(1, *ALL)
    assert "the disk is full" in bench.replies[client].error
    assert not [file for file in bench.storage.files if file.startswith(("chk-1/", "shared/"))]
    assert not bench.sink.committed
    bench.storage.refuse = lambda path: False
    bench.wait(0.2)
    bench.ask(m.DoCheckpoint())
    earlier = (m.EarlierCommittables(1, (b"kept",)),)
    bench.ack(2, READ0, READ1, WRITE0)
    bench.ack(2, WRITE1, earlier=earlier)
    assert bench.sink.committed == [(1, (b"kept",)), (2, (b"2/0", b"2/1"))]
    assert [c.checkpoint_id for c in metadata(bench, 2).committables] == [1, 2]


def test_metadata_of_unknown_fate_keeps_its_files_and_its_output() -> None:
    bench = Bench().run()
    bench.storage.refuse = lambda path: path.endswith("/_metadata")
    bench.storage.refuse_delete = lambda path: path.startswith("chk-1")
    bench.ask(m.DoCheckpoint())
    bench.ack(1, *ALL, parts=lambda ref: (chunk(bench.state_file(1, ref)),))
    assert bench.state_file(1, READ0) in bench.storage.files
    bench.storage.refuse = bench.storage.refuse_delete = lambda path: False
    bench.fail(READ0)
    bench.wait(1)
    assert bench.state == "running"
    assert not bench.sink.aborted
    assert bench.state_file(1, READ0).replace("a1", "a0") in bench.storage.files


def test_earlier_output_of_a_checkpoint_that_did_complete_is_not_committed_twice() -> None:
    bench = Bench().run()
    bench.checkpoint()
    bench.ask(m.DoCheckpoint())
    late = (m.EarlierCommittables(1, (b"1/0",)),)  # this task has not yet heard of 1
    bench.ack(2, *ALL, earlier=late)
    assert bench.sink.committed == [(1, (b"1/0", b"1/1")), (2, (b"2/0", b"2/1"))]


def test_only_as_many_are_kept_as_configured_and_shared_files_live_as_long_as_referenced() -> None:
    bench = Bench(retained_checkpoints=2).run()
    base = {}
    for _ in range(4):
        bench.ask(m.DoCheckpoint())
        n = bench.triggers[-1]
        for ref in ALL:
            base.setdefault(ref, bench.state_file(1, ref))
        bench.ack(n, *ALL, parts=lambda ref, n=n: (chunk(base[ref]), chunk(bench.state_file(n, ref), "split")))  # type: ignore[misc]  # mypy infers no lambda with defaults
    assert bench.storage.checkpoints() == [3, 4]
    written = {int(file.split("-c")[1].split("-")[0]) for file in bench.storage.files if file.startswith("shared/")}
    assert written == {1, 3, 4}  # 1 is still referenced by the later ones, 2 by nobody


def test_the_trigger_says_which_checkpoint_has_completed() -> None:
    bench = Bench(retained_checkpoints=1).run()
    bench.checkpoint()
    bench.ask(m.DoCheckpoint())
    bench.say(READ1, m.CheckpointDecline(0, 2, READ1, "io error", True))
    bench.wait(0.2)
    bench.checkpoint()
    bench.ask(m.DoCheckpoint())
    sent = [message for _, message in bench.sent if isinstance(message, m.TriggerCheckpoint)]
    assert {(trigger.checkpoint_id, trigger.completed_id) for trigger in sent} == {(1, 0), (2, 1), (3, 1), (4, 3)}


def test_a_checkpoint_that_refers_to_a_file_already_dropped_is_not_made() -> None:
    bench = Bench(retained_checkpoints=1).run()
    for n in (1, 2):
        bench.ask(m.DoCheckpoint())
        bench.ack(n, *ALL, parts=lambda ref, n=n: (chunk(bench.state_file(n, ref)),))  # type: ignore[misc]  # mypy infers no lambda with defaults
    assert bench.storage.checkpoints() == [2]
    client = bench.ask(m.DoCheckpoint())
    bench.ack(3, *ALL, parts=lambda ref: (chunk(bench.state_file(1, ref)),), files=lambda ref: ())
    assert "no longer kept" in bench.replies[client].error
    assert bench.storage.checkpoints() == [2]
    assert bench.state == "running"


def test_a_checkpoint_whose_output_is_not_committed_is_not_dropped() -> None:
    bench = Bench(retained_checkpoints=1, held=("commit",)).run()
    for _ in range(3):
        bench.checkpoint()
    assert bench.storage.checkpoints() == [1, 2, 3]
    bench.held = ()
    bench.release("commit")
    assert bench.storage.checkpoints() == [3]
    assert [n for n, _ in bench.sink.committed] == [1, 2, 3]


def test_the_checkpoint_that_the_job_would_restart_from_is_not_dropped_for_newer_ones() -> None:
    first = Bench(retained_checkpoints=3).run()
    for _ in range(3):
        first.checkpoint()
    again: dict[str, Any] = {"restore": "2", "newer_output": "keep", "job_id": "job2"}
    bench = Bench(retained_checkpoints=1, storage=first.storage, **again).run()
    assert bench.storage.checkpoints() == [2, 3]
    bench.fail(READ0)
    bench.wait(1)
    assert bench.state == "running" and bench.job.restored_from == "memory://checkpoints/chk-2"
    assert bench.checkpoint() == 4
    assert bench.storage.checkpoints() == [4]


def test_what_cannot_be_deleted_is_tried_again_later() -> None:
    bench = Bench(retained_checkpoints=1).run()
    bench.storage.refuse_delete = lambda path: True
    bench.checkpoint()
    bench.checkpoint()
    assert bench.storage.checkpoints() == [1, 2]
    assert any("permission denied" in warning for warning in bench.status.warnings)
    bench.storage.refuse_delete = lambda path: False
    bench.checkpoint()
    assert bench.storage.checkpoints() == [3]


# ---- tasks that finish -----------------------------------------------------


def test_when_all_tasks_are_at_the_end_of_their_data_a_checkpoint_follows_at_once_and_the_job_finishes() -> None:
    bench = Bench(checkpoint_interval_s=None).run()
    bench.end_of_data(READ0, READ1, WRITE0)
    assert bench.triggers == []
    bench.end_of_data(WRITE1)
    assert bench.triggers == [1]
    bench.ack(1, *ALL, finished=True)
    assert metadata(bench, 1).finished_vertices == (0, 1)
    bench.wait(100)
    assert bench.triggers == [1]  # they are about to finish: another one would only meet that
    bench.finish(*ALL)
    assert bench.ended is not None and bench.ended.state == "finished"
    assert bench.sink.committed == [(1, (b"1/0", b"1/1"))]
    assert bench.ended.checkpoint is None


def test_end_of_data_during_a_checkpoint_leads_to_another_one_that_is_final() -> None:
    bench = Bench(checkpoint_interval_s=None).run()
    bench.ask(m.DoCheckpoint())
    bench.ack(1, READ0, READ1)
    bench.end_of_data(*ALL)
    bench.ack(1, WRITE0, WRITE1)
    assert bench.triggers == [1, 2]
    bench.ack(2, *ALL, finished=True)
    bench.finish(*ALL)
    assert bench.ended is not None and bench.ended.state == "finished"


def test_tasks_whose_producers_have_all_finished_are_triggered_themselves() -> None:
    bench = Bench(two_vertices(ScriptedSource(()), Ledger(), keyed=False), checkpoint_interval_s=None).run()
    bench.end_of_data(READ0)
    bench.ask(m.DoCheckpoint())
    bench.ack(1, READ0, finished=True)
    bench.ack(1, READ1, WRITE0, WRITE1)
    bench.finish(READ0)
    bench.ask(m.DoCheckpoint())
    assert bench.triggered_tasks(2) == {READ1, WRITE0}  # forward edges: each consumer by itself
    bench.ack(2, READ1, WRITE0, WRITE1)
    assert [op.finished for op in metadata(bench, 2).operators] == [(0,), ()]
    assert metadata(bench, 2).finished_vertices == ()


def test_over_an_all_to_all_edge_one_live_producer_is_enough() -> None:
    bench = Bench(checkpoint_interval_s=None).run()
    bench.end_of_data(READ0)
    bench.ask(m.DoCheckpoint())
    bench.ack(1, READ0, finished=True)
    bench.ack(1, READ1, WRITE0, WRITE1)
    bench.finish(READ0)
    bench.ask(m.DoCheckpoint())
    assert bench.triggered_tasks(2) == {READ1}


def test_checkpoints_go_on_while_tasks_that_are_final_have_rows_that_nobody_has_taken() -> None:
    bench = Bench(checkpoint_interval_s=None).run()
    bench.end_of_data(READ0, READ1)
    bench.ask(m.DoCheckpoint())
    bench.ack(1, READ0, READ1, finished=True)
    bench.ack(1, WRITE0, WRITE1)
    bench.ask(m.DoCheckpoint())
    assert bench.triggered_tasks(2) == {READ0, READ1}
    bench.ack(2, READ0, READ1, finished=True)
    bench.ack(2, WRITE0, WRITE1)
    assert metadata(bench, 2).finished_vertices == (0,)


def test_a_task_that_finishes_while_its_trigger_is_on_the_way_aborts_that_checkpoint_only() -> None:
    bench = Bench(two_vertices(ScriptedSource(()), Ledger(), keyed=False), tolerable_failures=0).run()
    client = bench.ask(m.DoCheckpoint())
    bench.finish(READ0)
    assert bench.status.checkpoints_failed == 0 and bench.status.checkpoints == ()
    assert client not in bench.replies
    bench.wait(0.2)
    assert bench.triggers == [1, 2]
    assert bench.triggered_tasks(2) == {READ1, WRITE0}
    bench.ack(2, READ1, WRITE0, WRITE1)
    assert bench.replies[client].checkpoint
    assert bench.state == "running"


def test_a_task_that_finishes_after_its_acknowledgement_does_not_disturb() -> None:
    bench = Bench(two_vertices(ScriptedSource(()), Ledger(), keyed=False)).run()
    bench.ask(m.DoCheckpoint())
    bench.ack(1, READ0)
    bench.finish(READ0)
    bench.ack(1, READ1, WRITE0, WRITE1)
    assert bench.storage.checkpoints() == [1]


def test_union_state_of_a_partly_finished_operator_makes_no_checkpoint() -> None:
    bench = Bench(two_vertices(ScriptedSource(()), Ledger(), keyed=False), checkpoint_interval_s=None).run()
    bench.end_of_data(READ0)
    client = bench.ask(m.DoCheckpoint())
    bench.ack(1, READ0, finished=True)
    bench.ack(1, READ1, parts=lambda ref: (chunk(bench.state_file(1, ref), "union"),))
    bench.ack(1, WRITE0, WRITE1)
    assert "union state" in bench.replies[client].error
    assert bench.storage.checkpoints() == []
    assert bench.state == "running"


# ---- failures in between ---------------------------------------------------


def test_a_failure_during_a_checkpoint_aborts_it_and_cleans_up_its_output() -> None:
    bench = Bench().run()
    client = bench.ask(m.DoCheckpoint())
    bench.ack(1, READ0, WRITE0)
    bench.fail(READ1)
    assert "the job restarts after a failure" in bench.replies[client].error
    assert bench.sink.aborted == [b"1/0"]
    assert bench.storage.checkpoints() == []
    assert not [file for file in bench.storage.files if file.startswith("shared/")]
    bench.wait(1)
    assert not bench.messages(m.Deploy)[-1].restore


def test_a_failure_while_the_metadata_is_being_written_waits_for_the_outcome_and_restores_it() -> None:
    bench = Bench(held=("publish",)).run()
    bench.ask(m.DoCheckpoint())
    bench.ack(1, *ALL, parts=lambda ref: (chunk(bench.state_file(1, ref)),))
    bench.fail(READ1)
    bench.wait(100)
    assert len(bench.messages(m.Deploy)) == 2
    bench.release("publish")
    assert not bench.messages(m.CheckpointCompleted)  # nobody is left to be told
    assert bench.sink.committed == [(1, (b"1/0", b"1/1"))]
    assert bench.state == "running"
    assert bench.status.restored_from == "memory://checkpoints/chk-1"
    tasks = dict(restored(bench.messages(m.Deploy)[-1]).tasks)
    assert set(tasks) == {READ1, WRITE1}
    assert not bench.sink.aborted


def test_a_failure_while_the_metadata_is_being_written_in_vain_restores_what_was_before() -> None:
    bench = Bench(held=("publish",)).run()
    bench.checkpoint()
    bench.release("publish")
    bench.checkpoint()
    bench.fail(READ1)
    bench.wait(1)
    bench.storage.refuse = lambda path: path.endswith("/_metadata")
    bench.release("publish")
    assert bench.state == "running"
    assert bench.status.restored_from == "memory://checkpoints/chk-1"
    assert bench.sink.aborted == [b"2/0", b"2/1"]


def test_the_next_attempt_starts_from_the_newest_checkpoint_and_its_leavings_are_cleaned_up() -> None:
    bench = Bench().run()
    bench.checkpoint()
    orphan = "shared/e1-a0-c9-v0-s0.state"  # a lost slot had written it and nobody heard of it
    bench.storage.files[orphan] = b"half"
    torn = f"shared/{TORN}e1-a0-c9-v0-s1.state"  # it was killed while it wrote this one
    bench.storage.files[torn] = b"ha"
    alive = f"shared/{TORN}e1-a1-c2-v0-s1.state"  # is being written
    bench.storage.files[alive] = b"ha"
    bench.fail(READ0)
    bench.wait(1)
    assert bench.attempt == 1
    assert orphan in bench.storage.files
    bench.checkpoint()
    assert orphan not in bench.storage.files and torn not in bench.storage.files
    assert alive in bench.storage.files
    assert bench.triggers == [1, 2]


def test_finished_vertices_are_deployed_as_finished_after_a_failure() -> None:
    bench = Bench(checkpoint_interval_s=None).run()
    bench.end_of_data(READ0, READ1)
    bench.ask(m.DoCheckpoint())
    bench.ack(1, READ0, READ1, finished=True)
    bench.ack(1, WRITE0, WRITE1)
    bench.finish(READ0, READ1)
    bench.fail(WRITE0)
    bench.wait(1)
    assert [deploy.finished for deploy in bench.messages(m.Deploy)[-2:]] == [(READ0,), (READ1,)]
    bench.ask(m.DoCheckpoint())
    assert bench.triggers == [1]  # the two sources are about to say that they have finished
    bench.finish(READ0, READ1)
    assert bench.triggers == [1, 2]
    assert bench.triggered_tasks(2) == {WRITE0, WRITE1}


# ---- stopping --------------------------------------------------------------


def test_a_stop_makes_a_checkpoint_commits_it_and_ends() -> None:
    bench = Bench(held=("commit",)).run()
    client = bench.ask(m.DoStop())
    assert bench.state == "stopping"
    bench.ack(1, *ALL)
    assert bench.ended is None
    bench.release("commit")
    assert bench.ended is not None and bench.ended.state == "stopped"
    assert bench.ended.checkpoint == "memory://checkpoints/chk-1"
    assert bench.replies[client] == m.Reply(checkpoint="memory://checkpoints/chk-1")
    assert bench.sink.committed == [(1, (b"1/0", b"1/1"))]
    assert sorted(bench.closed) == [0, 1]
    assert not bench.timers


def test_a_stop_during_a_checkpoint_waits_for_one_of_its_own() -> None:
    bench = Bench().run()
    bench.ask(m.DoCheckpoint())
    bench.ack(1, READ0)
    client = bench.ask(m.DoStop())
    bench.ack(1, READ1, WRITE0, WRITE1)
    assert bench.ended is None
    assert bench.triggers == [1, 2]
    bench.ack(2, *ALL)
    assert bench.replies[client].checkpoint == "memory://checkpoints/chk-2"
    assert bench.ended is not None and bench.ended.state == "stopped"


def test_a_stop_whose_checkpoint_fails_leaves_the_job_running() -> None:
    bench = Bench(checkpoint_interval_s=None).run()
    client = bench.ask(m.DoStop())
    bench.say(READ0, m.CheckpointDecline(0, 1, READ0, "the disk is full", True))
    assert "the disk is full" in bench.replies[client].error
    assert "the job continues" in bench.replies[client].error
    assert bench.state == "running"
    bench.wait(100)
    assert bench.triggers == [1]


def test_a_failure_during_a_stop_lets_the_job_go_on_and_says_so() -> None:
    bench = Bench().run()
    client = bench.ask(m.DoStop())
    bench.ack(1, READ0)
    bench.fail(READ1)
    assert "the job continues; the stop is cancelled" in bench.replies[client].error
    bench.wait(1)
    assert bench.state == "running"


def test_a_stop_of_a_job_that_restarts_ends_it_at_its_newest_checkpoint() -> None:
    bench = Bench(checkpoint_interval_s=None).run()
    bench.checkpoint()
    bench.fail(READ1)
    client = bench.ask(m.DoStop())
    assert bench.replies[client].checkpoint == "memory://checkpoints/chk-1"
    assert bench.ended is not None and bench.ended.state == "stopped"


def test_a_stop_returns_though_discovery_fails_in_each_attempt() -> None:
    bench = Bench(restart=RestartStrategy()).run()
    bench.source.error = OSError("the directory is away")
    bench.fail(READ0)
    bench.wait(30)
    assert bench.status.restarts > 3 and bench.state == "restarting"
    client = bench.ask(m.DoStop())
    assert bench.replies[client] == m.Reply()
    assert bench.ended is not None and bench.ended.state == "stopped"


def test_a_stop_is_refused_when_what_the_newest_checkpoint_holds_cannot_be_committed() -> None:
    bench = Bench(checkpoint_interval_s=None, restart=RestartStrategy()).run()
    bench.sink.failures = 1_000
    bench.checkpoint()
    bench.wait(10)
    assert bench.state == "restarting"
    client = bench.ask(m.DoStop())
    bench.wait(100)
    assert bench.replies[client].error.endswith("the target is away; the job continues; the stop is cancelled")
    bench.sink.failures = 0
    bench.wait(100)
    assert bench.state == "running" and [number for number, _ in bench.sink.committed] == [1]


def test_a_stop_with_a_savepoint_is_refused_at_the_second_failure_before_the_job_runs() -> None:
    bench = Bench(checkpoint_interval_s=None, restart=RestartStrategy()).run()
    bench.source.error = OSError("the directory is away")
    bench.fail(READ0)
    client = bench.ask(m.DoStop(savepoint=f"{ROOT}/savepoints/kept"))
    bench.wait(0.3)
    assert client not in bench.replies and bench.status.restarts == 2
    bench.wait(1)
    assert "the directory is away; the job continues; the stop is cancelled" in bench.replies[client].error
    bench.source.error = None
    bench.wait(10)
    assert bench.state == "running"


def test_a_drain_ends_the_sources_and_the_job_finishes() -> None:
    bench = Bench(checkpoint_interval_s=None).run()
    client = bench.ask(m.DoStop(drain=True))
    assert len(bench.messages(m.StopSources)) == 2
    assert bench.state == "stopping"
    bench.end_of_data(*ALL)
    bench.ack(1, *ALL, finished=True)
    bench.finish(*ALL)
    assert bench.ended is not None and bench.ended.state == "finished"
    assert bench.replies[client] == m.Reply()


def test_a_drain_goes_on_after_a_failure() -> None:
    bench = Bench().run()
    bench.ask(m.DoStop(drain=True))
    bench.fail(READ0)
    bench.wait(1)
    assert [x.attempt for x in bench.messages(m.StopSources)] == [0, 0, 1, 1]
    starts = [i for i, (_, x) in enumerate(bench.sent) if isinstance(x, m.Start) and x.attempt == 1]
    stops = [i for i, (_, x) in enumerate(bench.sent) if isinstance(x, m.StopSources) and x.attempt == 1]
    assert max(starts) < min(stops)


def test_two_ways_to_stop_at_once_are_not_possible() -> None:
    bench = Bench().run()
    first = bench.ask(m.DoStop())
    second = bench.ask(m.DoStop(drain=True))
    third = bench.ask(m.DoStop())
    assert "stopping already" in bench.replies[second].error
    bench.ack(1, *ALL)
    assert bench.replies[first] == bench.replies[third] == m.Reply(checkpoint="memory://checkpoints/chk-1")


def test_a_job_that_fails_answers_everybody_who_waits() -> None:
    bench = Bench().run()
    clients = [bench.ask(m.DoCheckpoint()), bench.ask(m.DoCheckpoint()), bench.ask(m.DoStop(drain=True))]
    bench.fail(READ0, "boom", fatal=True)
    assert all("boom" in bench.replies[client].error for client in clients)


def test_a_wall_clock_that_is_set_back_stops_neither_checkpoints_nor_restarts() -> None:
    bench = Bench(checkpoint_interval_s=10.0).run()
    for n in (1, 2):
        bench.wait(1)
        (wake,) = [token for token in bench.timers if token.startswith("wake")]
        bench.now_ms -= 3_600_000
        bench.shell.fire(wake)
        assert bench.triggers == list(range(1, n + 1))
        bench.ack(n, *ALL)
    bench.fail(READ0)
    (restart,) = [token for token in bench.timers if token.startswith("restart")]
    bench.now_ms -= 3_600_000
    bench.shell.fire(restart)
    assert bench.state == "running"


def test_a_clock_that_is_set_back_after_a_failed_checkpoint_does_not_prolong_the_pause_behind_it() -> None:
    bench = Bench(checkpoint_interval_s=10.0).run()
    bench.wait(10.1)
    bench.say(READ0, m.CheckpointDecline(0, 1, READ0, "the disk is full", counts=True))
    bench.wait(10.1)
    bench.now_ms -= 600_000
    bench.ack(2, *ALL)
    bench.wait(1)
    client = bench.ask(m.DoCheckpoint())
    assert bench.triggers == [1, 2, 3], "the pause after checkpoint 1 is long over"
    bench.ack(3, *ALL)
    assert bench.replies[client].checkpoint


def test_a_clock_that_is_set_back_during_a_checkpoint_does_not_put_off_the_next_one() -> None:
    bench = Bench(checkpoint_interval_s=10.0).run()
    bench.wait(10.1)
    bench.now_ms -= 600_000
    bench.ack(1, *ALL)
    bench.wait(10.1)
    assert bench.triggers == [1, 2]


def test_a_job_that_had_finished_finishes_again_without_doing_anything() -> None:
    bench = Bench(checkpoint_interval_s=None).run()
    bench.end_of_data(*ALL)
    bench.ack(1, *ALL, finished=True)
    bench.finish(*ALL)
    again = Bench(storage=bench.storage, restore="latest", job_id="job2", checkpoint_interval_s=0.1).start()
    assert again.ended is not None and again.ended.state == "finished"
    assert not again.requests, "no slot is needed"
    assert not again.source.positions and not again.source.closed and not again.source.settled
    assert again.ended.status.restored_from == "memory://checkpoints/chk-1"
    assert "had finished in memory://checkpoints/chk-1" in again.ended.status.warnings[-1]
    assert [vertex.states for vertex in again.ended.status.vertices] == [{"finished": 2}, {"finished": 2}]


def test_a_stopped_job_keeps_no_more_checkpoints_than_configured() -> None:
    bench = Bench(retained_checkpoints=1).run()
    bench.checkpoint()
    bench.ask(m.DoStop())
    bench.ack(2, *ALL)
    assert bench.storage.checkpoints() == [2]


@pytest.mark.parametrize("failures", [1, 2])
def test_a_deletion_that_fails_is_tried_again_at_once_and_then_with_the_next_pass(
    monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    bench = Bench(retained_checkpoints=1).run()
    everybody = READ0, READ1, WRITE0, WRITE1
    bench.ask(m.DoCheckpoint())
    bench.ack(1, *everybody)
    delete, left = bench.storage.delete, failures

    def fails(path: str) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise StorageError("deleted, or not")
        delete(path)

    monkeypatch.setattr(bench.storage, "delete", fails)
    bench.ask(m.DoCheckpoint())
    bench.ack(2, *everybody)
    assert ("chk-1/_metadata" in bench.storage.files) is (failures == 2)
    assert any("tried again later" in text for text in bench.status.warnings) is (failures == 2)
    bench.ask(m.DoCheckpoint())
    bench.ack(3, *everybody)
    assert bench.storage.checkpoints() == [3]
