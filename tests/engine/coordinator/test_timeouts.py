"""Waits: each has a name, and a limit behind which nothing unsafe follows."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
from coordinator_world import Bench, Ledger, ScriptedSource, two_vertices

from midstream.engine.coordinator.events import CancelRequested
from midstream.engine.core.config import RestartStrategy
from midstream.engine.core.ids import TaskId
from midstream.engine.protocol import messages as m

READ0, READ1, WRITE0, WRITE1 = TaskId(0, 0), TaskId(0, 1), TaskId(1, 0), TaskId(1, 1)
ALL = (READ0, READ1, WRITE0, WRITE1)
METADATA = "waiting for the metadata of checkpoint 2 to be written in memory://checkpoints"


def sentences(bench: Bench) -> list[str]:
    return [wait.sentence for wait in bench.status.waiting]


def hanging(**config: Any) -> Bench:
    """Checkpoint 1 is complete, the metadata of checkpoint 2 does not get written."""
    bench = Bench(checkpoint_interval_s=None, checkpoint_timeout_s=60.0, **config).run()
    bench.checkpoint()
    bench.held = ("publish",)
    bench.ask(m.DoCheckpoint())
    bench.ack(2, *ALL)
    return bench


# ---- metadata that does not get written


def test_metadata_that_hangs_is_named_and_said_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    bench = hanging()
    assert sentences(bench) == []
    with caplog.at_level(logging.WARNING):
        bench.wait(40)
    assert sentences(bench) == [f"{METADATA}, 40 s so far (given up after 60 s)"]
    assert [record.message for record in caplog.records] == [
        f"job bench: {METADATA}, 30 s so far (given up after 60 s)"
    ]
    bench.release("publish")
    assert sentences(bench) == []


def test_metadata_that_hangs_fails_the_checkpoint_whose_outcome_stays_unknown() -> None:
    bench = hanging()
    bench.wait(60)
    failed = bench.status.checkpoints[0]
    assert failed.id == 2 and failed.state == "failed"
    assert (
        "not complete within 60 s" in failed.reason
        and "memory://checkpoints; the write may still succeed" in failed.reason
    )
    assert bench.replies[2].error.endswith(failed.reason)
    assert "metadata of checkpoint 2" in sentences(bench)[0], "it is still under way"
    bench.held = ()
    assert bench.checkpoint() == 3, "its id is not used again"
    bench.release("publish")
    assert "chk-2/_metadata" in bench.storage.files
    assert {bench.state_file(2, ref) for ref in ALL} <= bench.storage.files.keys(), "what it refers to stays"
    assert bench.status.last_checkpoint is not None and bench.status.last_checkpoint.id == 3
    assert bench.checkpoint() == 4 and bench.state == "running"


def test_metadata_that_hangs_again_and_again_fails_the_attempt_with_that() -> None:
    bench = hanging(tolerable_failures=1)
    bench.wait(60)
    assert bench.state == "running"
    bench.ask(m.DoCheckpoint())
    bench.wait(1)
    bench.ack(3, *ALL)
    bench.wait(60)
    assert "2 checkpoints in a row have failed" in bench.status.failures[0].summary
    assert "write of its metadata to memory://checkpoints" in bench.status.failures[0].summary


def test_a_job_that_fails_meanwhile_goes_on_once_the_time_is_up_and_nothing_is_cleaned_up_that_may_count() -> None:
    bench = hanging()
    bench.lose(1)
    bench.connect()
    bench.wait(30)
    assert bench.state == "restarting" and bench.attempt == 0, "which checkpoint is the newest is not known"
    assert sentences(bench) == [f"{METADATA}, 30 s so far (given up after 60 s)"]
    bench.wait(31)
    assert bench.state == "running" and bench.attempt == 1
    assert bench.status.restored_from == "memory://checkpoints/chk-1"
    assert bench.sink.aborted == [], "whoever finds checkpoint 2 commits what was prepared for it"
    bench.held = ()
    bench.release("publish")
    assert bench.sink.committed == [(1, (b"1/0", b"1/1"))], "and nobody else does"
    assert bench.checkpoint() == 3
    assert bench.sink.committed[1:] == [(3, (b"3/0", b"3/1"))]


def test_a_coordinator_that_comes_later_never_offers_metadata_that_landed_after_it_had_begun() -> None:
    bench = hanging()
    bench.wait(61)
    later = Bench(storage=bench.storage, restore="latest", job_id="job2").run()
    assert later.status.restored_from == "memory://checkpoints/chk-1"
    bench.release("publish")  # the old one is told on the way that it is fenced
    assert "another coordinator has taken over" in bench.error
    third = Bench(storage=bench.storage, restore="latest", job_id="job3").run()
    assert third.status.restored_from == "memory://checkpoints/chk-1"


# ---- other waits


def test_a_commit_that_hangs_is_named_and_in_the_end_fails_the_job() -> None:
    bench = Bench(checkpoint_interval_s=None, held=("commit",)).run()
    bench.checkpoint()
    bench.wait(100)
    what = "sink 'write' to commit what it wrote up to checkpoint 1"
    assert sentences(bench) == [f"waiting for {what}, 100 s so far (given up after 600 s)"]
    bench.wait(500)
    assert bench.state == "running"
    bench.wait(30)
    assert f"waited for {what}: the call has not returned within 600 s" in bench.error


def test_a_checkpoint_timeout_that_is_longer_prolongs_the_other_limits() -> None:
    bench = Bench(checkpoint_interval_s=None, checkpoint_timeout_s=1000.0, held=("commit",)).run()
    bench.checkpoint()
    bench.wait(990)
    assert bench.state == "running"
    bench.wait(30)
    assert "not returned within 1000 s" in bench.error


def test_a_drain_that_waits_for_a_restart_shows_that_and_a_cancel_ends_it() -> None:
    bench = Bench(checkpoint_interval_s=None, restart=RestartStrategy(delay_s=20.0)).run()
    draining = bench.ask(m.DoStop(drain=True))
    bench.fail(READ0)
    bench.wait(10)
    assert bench.state == "restarting"
    assert [sentence.partition(",")[0] for sentence in sentences(bench)] == ["waiting for the restart after a failure"]
    assert sentences(bench)[0].endswith("cancel the job to end it without, 9 s so far")
    bench.feed(CancelRequested("somebody has cancelled it"))
    assert bench.ended is not None and bench.ended.state == "stopped"
    assert "somebody has cancelled it" in bench.replies[draining].error


def test_a_source_that_does_not_answer_fails_the_job() -> None:
    bench = Bench(held=("discover",)).run()
    bench.wait(300)
    assert sentences(bench)[0].startswith("waiting for source 'read' to find its splits, 300 s so far")
    bench.wait(330)
    assert "source 'read' to find its splits" in bench.error


def test_a_directory_that_cannot_be_opened_in_time_fails_the_job() -> None:
    bench = Bench(held=("open",)).start()
    bench.wait(300)
    assert sentences(bench) == [
        "waiting for the checkpoint directory memory://checkpoints to be opened, 300 s so far (given up after 600 s)"
    ]
    bench.wait(330)
    assert "to be opened" in bench.error


def test_a_savepoint_that_is_copied_in_takes_as_long_as_it_takes() -> None:
    bench = Bench(held=("open",), restore="memory://elsewhere").start()
    bench.wait(2000)
    assert bench.state == "created" and "memory://elsewhere to be copied to it" in sentences(bench)[0]


def test_slots_that_read_their_state_without_end_fail_the_attempt() -> None:
    bench = Bench(checkpoint_interval_s=None)
    bench.answers[m.Deploy] = False
    bench.start().connect()
    bench.wait(100)
    what = "slots 0, 1 to load the state it resumes from, and to open the operators"
    assert sentences(bench) == [f"waiting for {what}, 99 s so far (given up after 600 s)"]
    bench.wait(510)
    assert f"waited for {what}: not done within 600 s" in bench.status.failures[0].summary
    assert bench.ended is None


def test_slots_and_tasks_that_do_not_answer_are_named() -> None:
    bench = Bench(checkpoint_interval_s=None).start()
    bench.wait(8)
    assert sentences(bench) == ["waiting for 2 of 2 slots to connect, 8 s so far (given up after 60 s)"]
    bench.connect()
    bench.ask(m.DoCheckpoint())
    bench.ack(1, READ0, READ1, WRITE0)
    bench.wait(8)
    assert sentences(bench) == ["waiting for checkpoint 1, of write (subtask 1), 8 s so far (given up after 600 s)"]
    bench.answers[m.Cancel] = False
    bench.lose(0)
    bench.wait(8)
    assert "waiting for slot 1 to cancel the tasks, 7 s so far (given up after 30 s)" in sentences(bench)


def test_what_has_just_begun_is_not_said_to_last_as_long_as_what_was_before() -> None:
    bench = Bench(checkpoint_interval_s=None).run()
    bench.wait(100)
    bench.answers[m.Cancel] = False
    bench.lose(0)  # nothing has looked since
    assert bench.state == "restarting" and sentences(bench) == []


def test_a_wall_clock_that_is_set_makes_no_wait_long() -> None:
    bench = Bench(checkpoint_interval_s=None, held=("commit",)).run()
    bench.checkpoint()
    bench.now_ms += 10_000_000
    bench.wait(1)
    assert bench.state == "running" and sentences(bench) == []


def test_a_slot_in_a_long_call_says_so_until_it_beats_by_itself_again() -> None:
    bench = Bench(checkpoint_interval_s=None).run()
    bench.feed_from(1, m.InCall("operator 'slow' (subtask 1)", 40_400, "job.py:7 in fetch"))
    assert sentences(bench) == ["operator 'slow' (subtask 1) (job.py:7 in fetch) has been in one call for 40 s"]
    bench.feed_from(1, m.SlotStatus(0, ()))
    assert sentences(bench) == []


def test_what_slots_wait_for_outside_is_said_once_for_all_of_them() -> None:
    bench = Bench(checkpoint_interval_s=None).run()
    bench.feed_from(0, m.SlotStatus(0, (), waits=(m.SlotWait("brokers b:9092 of topic 'in'", 6_000),)))
    both = (m.SlotWait("brokers b:9092 of topic 'in'", 7_200), m.SlotWait("the schema registry of topic 'x'", 4_000))
    bench.feed_from(1, m.SlotStatus(0, (), waits=both))
    assert sentences(bench) == ["waiting for brokers b:9092 of topic 'in', 7 s so far"]
    bench.feed_from(1, m.SlotStatus(0, ()))
    assert sentences(bench) == ["waiting for brokers b:9092 of topic 'in', 6 s so far"]
    bench.feed_from(0, m.SlotStatus(0, ()))
    assert sentences(bench) == []


def test_what_slots_warn_of_is_shown_once_for_all_of_them() -> None:
    bench = Bench(checkpoint_interval_s=None).run()
    for slot in (1, 0, 1):
        bench.feed_from(slot, m.SlotStatus(0, (), warnings=("records are read slowly",)))
    (warning,) = bench.status.warnings
    assert warning.startswith("slot 1 ") and warning.endswith(": records are read slowly")
    bench.feed_from(0, m.SlotStatus(0, (), warnings=("records are read slowly", "and another")))
    assert [text.partition(": ")[2] for text in bench.status.warnings] == ["records are read slowly", "and another"]


def test_a_slot_that_is_given_up_in_a_long_call_is_so_with_that_reason() -> None:
    bench = Bench(checkpoint_interval_s=None).run()
    bench.answers[m.Cancel] = False
    bench.lose(0)
    bench.feed_from(1, m.InCall("operator 'slow' (subtask 1)", 29_000, ""))
    bench.wait(31)
    assert bench.closed == [1]
    assert bench.status.warnings[-1].endswith("was given up: operator 'slow' (subtask 1) had been in one call for 29 s")


# ---- savepoints, the final checkpoint, alignment


@pytest.mark.parametrize("request_", [m.DoSavepoint("memory://saved"), m.DoStop(savepoint="memory://saved")])
def test_a_savepoint_that_expires_fails_for_itself_only(request_: m.ClientRequest) -> None:
    bench = Bench(checkpoint_interval_s=None, checkpoint_timeout_s=10.0, tolerable_failures=0).run()
    for _ in range(2):
        client = bench.ask(request_)
        bench.wait(11)
        assert "not complete within 10 s" in bench.replies[client].error
        assert bench.status.failures == () and bench.status.checkpoints_failed == 0
    assert bench.status.checkpoints[0].state == "failed"
    bench.ask(m.DoCheckpoint())
    bench.wait(11)
    assert "1 checkpoints in a row have failed (tolerable_failures is 0)" in bench.status.failures[0].summary


def test_the_final_checkpoint_is_tried_again_after_growing_pauses_as_often_as_any_other() -> None:
    bench = Bench(two_vertices(ScriptedSource(()), Ledger()), checkpoint_interval_s=None, tolerable_failures=3).run()
    bench.storage.refuse = lambda path: path.endswith("/_metadata")
    bench.end_of_data(*ALL)
    times = []
    for number in range(1, 5):
        while number not in bench.triggers:
            bench.wait(0.1)
        times.append(bench.now_ms)
        bench.ack(number, *ALL, finished=True)
    pauses_s = [round((later - earlier) / 1000, 1) for earlier, later in itertools.pairwise(times)]
    assert pauses_s == [1.0, 2.0, 4.0]
    assert "4 checkpoints in a row have failed (tolerable_failures is 3)" in bench.status.failures[0].summary


def test_somebody_who_asks_for_a_checkpoint_does_not_wait_for_that_pause() -> None:
    bench = Bench(two_vertices(ScriptedSource(()), Ledger()), checkpoint_interval_s=None).run()
    bench.storage.refuse = lambda path: path.endswith("/_metadata")
    bench.end_of_data(*ALL)
    bench.ack(1, *ALL, finished=True)
    bench.ask(m.DoCheckpoint())
    bench.wait(0.2)
    assert bench.triggers == [1, 2]


def test_how_long_a_checkpoint_has_waited_for_barriers_is_the_longest_time_of_a_task() -> None:
    bench = Bench(checkpoint_interval_s=None).run()
    bench.ask(m.DoCheckpoint())
    bench.ack(1, WRITE0, alignment_ms=30.0)
    bench.ack(1, WRITE1, alignment_ms=12.5)
    assert bench.status.checkpoints[0].alignment_ms == 30.0
    bench.ack(1, READ0, READ1)
    assert bench.status.checkpoints[0].state == "completed" and bench.status.checkpoints[0].alignment_ms == 30.0


def test_how_long_slots_are_waited_for_begins_anew_when_they_have_not_come_in_time() -> None:
    bench = Bench(checkpoint_interval_s=None, restart=RestartStrategy(kind="fixed", attempts=9, delay_s=0.0)).run()
    bench.lose(1)
    bench.wait(50)
    assert sentences(bench) == ["waiting for 1 of 2 slots to connect, 50 s so far (given up after 60 s)"]
    bench.wait(30)
    assert "the job needs 2 slots, and 1 came within 60 s" in bench.status.failures[0].summary
    assert sentences(bench) == ["waiting for 1 of 2 slots to connect, 21 s so far (given up after 60 s)"]
