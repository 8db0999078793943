"""A job starts, runs, fails, is restarted, ends: slots and attempts."""

from __future__ import annotations

import math

import pytest
from coordinator_world import ROOT, Bench, Ledger, ScriptedSource, two_vertices

from in_memory import MemoryStorage
from midstream.engine.checkpoint.directory_records import JobDescriptor, sealed
from midstream.engine.coordinator.events import (
    CancelRequested,
    JobEnded,
    SlotConnected,
    SlotMessage,
    SlotRequestFailed,
    SlotsGone,
)
from midstream.engine.core.config import DEFAULT_RESTART, JobConfig, RestartStrategy
from midstream.engine.core.errors import (
    ClusterError,
    ConfigError,
    DataError,
    InvariantError,
    JobError,
    SchemaError,
    StorageError,
    UnavailableError,
)
from midstream.engine.core.ids import TaskId
from midstream.engine.core.interfaces import SlotAvailability
from midstream.engine.protocol import messages as m
from midstream.engine.protocol.job_status import FlowStatus, OperatorStatus, RecoveryStatus
from midstream.engine.protocol.task_metrics import EdgeMetrics, TaskMetrics

READ0, READ1, WRITE0, WRITE1 = TaskId(0, 0), TaskId(0, 1), TaskId(1, 0), TaskId(1, 1)


def test_a_job_asks_for_its_slots_deploys_starts_and_runs() -> None:
    bench = Bench().start()
    assert len(bench.requests) == 2
    assert bench.state == "created"
    bench.answers[m.Start] = False
    bench.connect()
    assert bench.state == "deploying"
    deploys = bench.messages(m.Deploy)
    assert [d.tasks for d in deploys] == [(READ0, WRITE0), (READ1, WRITE1)]
    assert all(d.slots == (0, 1) and d.graph == b"graph" and d.epoch == 1 for d in deploys)
    assert bench.messages(m.Start)[0].peers == (m.Peer(0, "host0", 7000), m.Peer(1, "host1", 7001))
    for ref in bench.tasks:
        bench.say(ref, m.TaskRunning(0, ref))
    assert bench.state == "running"
    assert bench.status.slot_pids == (100, 101) and bench.status.slot_hosts == ("host0", "host1")
    assert [v.states for v in bench.status.vertices] == [{"running": 2}, {"running": 2}]
    assert not [token for token in bench.timers if token.startswith("slots")]


def test_slots_that_differ_in_number_per_vertex_get_the_tasks_they_can_run() -> None:
    bench = Bench(two_vertices(ScriptedSource(()), Ledger(), sources=1, sinks=3)).run()
    assert [d.tasks for d in bench.messages(m.Deploy)] == [(READ0, WRITE0), (WRITE1,), (TaskId(1, 2),)]


def test_a_bounded_job_without_checkpoints_commits_when_all_tasks_have_finished() -> None:
    bench = Bench(checkpoint_dir=None).run()
    bench.finish(READ0, READ1)
    bench.finish(WRITE1, committables=(("write", (b"one",)),))
    assert not bench.sink.committed
    bench.finish(WRITE0, committables=(("write", (b"zero",)),))
    assert bench.sink.committed == [(0, (b"zero", b"one"))]
    assert bench.ended is not None and bench.ended.state == "finished"
    assert bench.ended.status.state == "finished"
    assert sorted(bench.closed) == [0, 1]
    assert bench.source.closed == 1


def test_a_slot_that_is_lost_while_the_output_of_a_job_without_checkpoints_is_committed_changes_nothing() -> None:
    bench = Bench(checkpoint_dir=None, held=("commit",)).run()
    bench.finish(READ0, READ1, WRITE0)
    bench.finish(WRITE1, committables=(("write", (b"one",)),))
    lost = bench.slots[1]
    bench.lose(lost)
    assert bench.state == "running", "to begin again would commit it a second time"
    bench.release("commit")
    assert bench.sink.committed == [(0, (b"one",))]
    assert bench.ended is not None and bench.ended.state == "finished"
    assert bench.attempt == 0
    assert any(f"slot {lost} " in warning for warning in bench.ended.status.warnings)


def test_a_commit_that_fails_for_good_without_checkpoints_fails_the_job_rather_than_run_it_twice() -> None:
    bench = Bench(checkpoint_dir=None)
    bench.sink.failures = 99
    bench.run()
    bench.finish(*bench.tasks, committables=(("write", (b"x",)),))
    bench.wait(60)
    assert "the target is away" in bench.error
    assert "sink 'write'" in bench.error
    assert bench.attempt == 0


def test_too_few_slots_in_time_name_both_numbers() -> None:
    bench = Bench(slot_timeout_s=20.0).start()
    bench.connect(1)
    bench.wait(21)
    assert isinstance(bench.ended.error, ClusterError)  # type: ignore[union-attr]
    assert "needs 2 slots, and 1 came within 20 s" in bench.error
    assert "too few cores" in bench.error
    assert bench.closed == [0]


def test_the_wait_for_slots_goes_on_while_executors_are_starting_and_not_indefinitely() -> None:
    bench = Bench(slot_timeout_s=20.0).start()
    bench.availability = SlotAvailability(starting="executors are starting (2 launched, 0 registered)")
    bench.wait(99)
    assert bench.ended is None
    assert bench.status.warnings[0].startswith("executors are starting (2 launched, 0 registered); the wait for slots")
    assert len(bench.requests) == 2, "what was requested is not requested again"
    bench.wait(2)
    assert bench.error.startswith("the job needs 2 slots, and 0 came within 100 s: executors are starting (2 launched")
    assert "no core is free" not in bench.error
    late = Bench(slot_timeout_s=20.0).start()
    late.availability = bench.availability
    late.wait(70)
    late.connect()
    assert late.state == "running"


def test_a_job_for_which_no_slot_will_come_any_more_ends_and_can_be_started_again() -> None:
    bench = Bench(slot_timeout_s=20.0, restart=RestartStrategy()).run()
    for slot in tuple(bench.slots):
        bench.lose(slot)
    bench.wait(21)
    assert bench.ended is None and bench.state == "restarting", "all cores may be taken"
    bench.availability = SlotAvailability(gone="the Spark master does not know this application")
    bench.wait(30)
    ended = bench.ended
    assert isinstance(ended, JobEnded)
    assert isinstance(ended.error, UnavailableError)
    assert "the Spark master does not know this application. Start the job again" in bench.error


def test_slots_that_come_while_the_reason_for_their_delay_is_looked_up_are_kept() -> None:
    bench = Bench(slot_timeout_s=20.0, held=("availability",)).start()
    bench.wait(21)
    bench.connect()
    assert bench.state == "running"
    bench.held = ()
    bench.release()
    bench.wait(100)
    assert bench.state == "running" and bench.ended is None


def test_slots_that_cannot_be_started_fail_the_job_with_the_reason() -> None:
    bench = Bench().start()
    for i in range(3):
        bench.feed(SlotRequestFailed(bench.requests[-1], "No module named 'midstream'"))
        assert (bench.ended is None) == (i < 2)
        bench.wait(1)
    assert "No module named 'midstream'" in bench.error
    assert "0 of 2" in bench.error


def test_a_slot_that_fails_to_start_once_is_asked_for_again() -> None:
    bench = Bench().start()
    bench.feed(SlotRequestFailed(bench.requests[0], "killed"))
    bench.feed(SlotRequestFailed(bench.requests[0], "killed"))  # said twice
    bench.wait(1)
    assert len(bench.requests) == 3
    for slot, request in enumerate(bench.requests[1:]):
        bench.feed(SlotConnected(slot, m.Register("h", 1, 1, __import__("coordinator_world").PYTHON, request)))
    assert bench.state == "running"
    assert any("killed" in warning for warning in bench.status.warnings)


@pytest.mark.parametrize("phase", ["created", "deploying", "running", "restarting", "rescaling"])
def test_slots_that_are_gone_for_good_end_the_job_whatever_it_does_and_name_its_last_checkpoint(phase: str) -> None:
    bench = Bench().start()
    if phase == "deploying":
        bench.answers[m.Deploy] = False
    if phase != "created":
        bench.connect()
    if phase not in ("created", "deploying"):
        bench.checkpoint()
    if phase == "restarting":
        bench.lose(0)
    if phase == "rescaling":
        bench.answers[m.Cancel] = False
        rescaling = bench.ask(m.DoRescale(1))
        bench.wait(0.2)
        bench.ack(2, *bench.tasks)
    assert bench.state == phase
    client = bench.ask(m.DoStop(drain=True))
    bench.feed(SlotsGone("Spark has ended"))
    assert bench.ended is not None and bench.ended.state == "failed"
    last = "it has no checkpoint" if phase in ("created", "deploying") else "its last checkpoint is "
    assert "Spark has ended, and all slots of the job with it" in bench.error and last in bench.error
    assert "Spark has ended" in bench.replies[client].error
    assert phase != "rescaling" or "Spark has ended" in bench.replies[rescaling].error
    assert not [token for token in bench.timers if token.startswith(("slots", "slot-retry", "restart"))]


def test_that_slots_are_gone_is_one_failure_however_many_say_so() -> None:
    bench = Bench(held=("discover",)).run()
    for _ in range(30):
        bench.feed(SlotsGone("Spark has ended"))
    assert bench.ended is None
    bench.release()
    assert bench.ended is not None
    assert len(bench.ended.status.failures) == 1


def test_slots_that_are_gone_when_all_is_done_but_to_commit_it_change_nothing() -> None:
    bench = Bench(checkpoint_dir=None, held=("commit",)).run()
    bench.finish(*bench.tasks, committables=(("write", (b"one",)),))
    bench.feed(SlotsGone("Spark has ended"))
    bench.release("commit")
    assert bench.ended is not None and bench.ended.state == "finished"
    assert "Spark has ended" in bench.ended.status.warnings


def test_a_slot_that_nobody_asked_for_is_sent_away() -> None:
    bench = Bench().run()
    bench.feed(SlotConnected(9, m.Register("h", 1, 1, "3.11", "slot-99")))
    bench.feed(SlotMessage(9, m.Deployed(0)))
    assert bench.closed == [9]
    assert bench.state == "running"


def test_a_slot_with_another_python_fails_the_job_with_both_versions() -> None:
    bench = Bench().start()
    bench.connect(1, python="2.7")
    assert "runs Python 2.7, the driver Python" in bench.error


def test_a_failed_task_cancels_everything_and_the_next_attempt_is_deployed_after_the_delay() -> None:
    bench = Bench().run()
    bench.fail(READ1)
    assert [x.attempt for x in bench.messages(m.Cancel)] == [0, 0]
    assert bench.state == "restarting"
    bench.wait(0.4)
    assert len(bench.messages(m.Deploy)) == 2
    bench.wait(0.2)
    assert [d.attempt for d in bench.messages(m.Deploy)] == [0, 0, 1, 1]
    assert bench.state == "running"
    assert bench.status.restarts == 1
    assert bench.status.failures[0].summary == "ValueError: row 7 is bad"
    assert len(bench.requests) == 2  # the slots have survived


def test_messages_of_an_old_attempt_are_ignored() -> None:
    bench = Bench().run()
    bench.fail(READ1)
    bench.wait(1)
    for message in (
        m.TaskFailed(0, READ0, "late", "", True),
        m.TaskRunning(0, READ0),
        m.TaskFinished(0, READ0),
        m.Cancelled(0),
        m.Deployed(0),
        m.CheckpointAck(0, 1, READ0, (), (), 0),
        m.RequestSplit(0, READ0),
    ):
        bench.say(READ0, message)
    assert bench.state == "running"
    assert bench.status.restarts == 1


def test_a_second_failure_of_the_same_attempt_is_noted_but_no_second_restart() -> None:
    bench = Bench().run()
    bench.answers[m.Cancel] = False
    bench.fail(READ1, "first")
    bench.fail(READ0, "second")
    assert bench.status.restarts == 1
    assert [f.summary for f in bench.status.failures] == ["second", "first"]


def test_a_fatal_failure_ends_the_job_at_once_with_the_users_traceback() -> None:
    bench = Bench().run()
    bench.fail(READ1, "map 'f': SchemaError: column x is missing", fatal=True)
    assert isinstance(bench.ended.error, JobError)  # type: ignore[union-attr]
    assert "column x is missing" in bench.error
    assert "Traceback" in bench.error
    assert sorted(bench.closed) == [0, 1]
    assert bench.source.closed == 1


def test_restarts_are_exhausted() -> None:
    bench = Bench(restart=RestartStrategy(kind="fixed", attempts=2, delay_s=0.1)).run()
    for _ in range(2):
        bench.fail(READ0)
        bench.wait(0.2)
        assert bench.state == "running"
    bench.fail(READ0)
    assert "failed after 2 restarts" in bench.error
    assert "row 7 is bad" in bench.error


def test_no_restarts_at_all() -> None:
    bench = Bench(restart=RestartStrategy(kind="none")).run()
    bench.fail(READ0)
    assert "row 7 is bad" in bench.error


def test_the_exponential_delay_doubles_and_starts_over_after_a_quiet_time() -> None:
    strategy = RestartStrategy(kind="exponential", delay_s=1.0, max_delay_s=3.0, reset_after_s=100.0)
    bench = Bench(restart=strategy).run()
    waits = []
    for quiet_s in (0, 0, 0, 0, 101):
        bench.wait(quiet_s)
        bench.fail(READ0)
        before_ms = bench.now_ms
        for _ in range(100):
            bench.wait(0.1)
            if bench.state == "running":
                break
        waits.append(round((bench.now_ms - before_ms) / 1000, 1))
    assert waits == [1.0, 2.0, 3.0, 3.0, 1.0]


def test_a_lost_slot_is_replaced_and_the_others_are_kept() -> None:
    bench = Bench().run()
    bench.lose(1)
    assert len(bench.requests) == 3
    assert [slot for slot, x in bench.sent if isinstance(x, m.Cancel)] == [0]
    bench.wait(1)
    assert bench.state == "restarting"
    bench.connect()
    assert bench.state == "running"
    assert bench.slots == (0, 2)
    assert "slot 1 (process 101 on host1) is lost: connection reset" in bench.status.failures[0].summary


def test_a_slot_lost_while_cancelling_is_not_waited_for() -> None:
    bench = Bench().run()
    bench.answers[m.Cancel] = False
    bench.fail(READ0)
    bench.say(READ0, m.Cancelled(0))
    bench.lose(1)
    bench.wait(1)
    bench.connect()
    assert bench.state == "running"
    assert bench.status.restarts == 1
    assert bench.slots == (0, 2)


def test_a_slot_that_does_not_cancel_in_time_is_given_up() -> None:
    bench = Bench(heartbeat_timeout_s=30.0).run()
    bench.answers[m.Cancel] = False
    bench.fail(READ0)
    bench.say(READ0, m.Cancelled(0))
    bench.wait(31)
    assert bench.closed == [1]
    bench.connect()
    bench.feed(SlotMessage(1, m.Cancelled(0)))  # a zombie speaks
    assert bench.state == "running"
    assert bench.slots == (0, 2)


def test_a_slot_lost_while_gathering_is_asked_for_again_without_a_restart() -> None:
    bench = Bench().start()
    bench.connect(1)
    bench.lose(0)
    assert len(bench.requests) == 3
    bench.connect()
    assert bench.state == "running"
    assert bench.status.restarts == 0


def test_a_slot_lost_while_deploying_is_replaced() -> None:
    bench = Bench().start()
    bench.answers[m.Deploy] = False
    bench.connect()
    bench.lose(0)
    bench.answers[m.Deploy] = True
    bench.wait(1)
    bench.connect()
    assert bench.state == "running"
    assert bench.attempt == 1


def test_a_replacement_that_never_comes_is_asked_for_again_after_the_timeout() -> None:
    bench = Bench(slot_timeout_s=20.0).run()
    bench.lose(1)
    bench.wait(21)
    assert bench.ended is None
    assert len(bench.requests) == 4
    late = bench.requests[2]
    bench.feed(SlotConnected(7, m.Register("h", 1, 1, "3.11", late)))
    assert bench.closed == [7]


def test_the_pause_before_a_restart_may_be_longer_than_slots_are_waited_for() -> None:
    bench = Bench(slot_timeout_s=20.0, restart=RestartStrategy(kind="fixed", attempts=3, delay_s=60.0)).run()
    bench.lose(1)
    bench.connect()
    bench.wait(61)
    assert bench.state == "running" and bench.status.restarts == 1


def test_a_job_that_cannot_be_deployed_at_first_is_not_restarted() -> None:
    bench = Bench().start()
    bench.answers[m.Deploy] = False
    bench.connect()
    bench.say(READ0, m.DeployFailed(0, "operator 'x': OSError: no such file", "Traceback …"))
    assert "no such file" in bench.error


def test_a_deployment_that_fails_later_is_a_failure_like_another() -> None:
    bench = Bench().run()
    bench.answers[m.Deploy] = False
    bench.fail(READ0)
    bench.wait(0.6)
    bench.answers[m.Deploy] = True
    bench.say(READ0, m.DeployFailed(1, "OSError: storage is away", ""))
    bench.wait(1)
    assert bench.state == "running"
    assert bench.attempt == 2


def test_cancelling_ends_the_job_at_once_at_any_time() -> None:
    for steps in range(4):
        bench = Bench()
        if steps > 0:
            bench.start()
        if steps > 1:
            bench.connect()
        if steps > 2:
            bench.fail(READ0)
        bench.feed(CancelRequested("Ctrl-C"))
        assert bench.ended is not None and bench.ended.state == "stopped", steps
        assert bench.ended.error is None
        assert len(bench.closed) == (2 if steps > 1 else 0)


def test_io_that_hangs_does_not_keep_the_job_from_ending() -> None:
    bench = Bench(held=("discover",)).run()
    bench.feed(CancelRequested("Ctrl-C"))
    assert bench.ended is None
    assert bench.state == "stopping"
    bench.wait(11)
    assert bench.ended is not None and bench.ended.state == "stopped"


def test_io_that_comes_to_its_end_after_the_job_leads_to_nothing() -> None:
    bench = Bench(held=("publish",)).run()
    bench.checkpoint()
    bench.feed(CancelRequested("Ctrl-C"))
    bench.wait(11)
    assert bench.ended is not None
    bench.release("publish")
    assert not bench.sink.committed


def test_questions_after_the_end_are_answered() -> None:
    bench = Bench().run()
    bench.feed(CancelRequested("Ctrl-C"))
    client = bench.ask(m.DoCheckpoint())
    assert "ended" in bench.replies[client].error
    status = bench.replies[bench.ask(m.GetStatus())].status
    assert status is not None and status.state == "stopped"


def test_a_slot_that_speaks_for_a_task_it_does_not_run_breaks_a_rule() -> None:
    bench = Bench().run()
    with pytest.raises(InvariantError, match=r"slot 0 sent a message about task .* the last events"):
        bench.feed(SlotMessage(0, m.TaskFinished(0, READ1)))


def test_restoring_without_a_checkpoint_directory_says_what_to_pass() -> None:
    bench = Bench(checkpoint_dir=None, restore="latest").start()
    assert isinstance(bench.ended.error, ConfigError)  # type: ignore[union-attr]
    assert "pass checkpoint_dir=" in bench.error
    assert not bench.requests


def test_another_jobs_checkpoint_directory_is_refused() -> None:
    storage = MemoryStorage()
    storage.files["_job"] = sealed("_job", JobDescriptor("other"))
    bench = Bench(storage=storage).start()
    assert "of another job" in bench.error
    assert not bench.requests


def test_status_shows_rows_rates_and_watermark() -> None:
    bench = Bench().run()

    def beat(slot: int, rows: int, busy_ms: int) -> None:
        refs = bench.tasks_on(slot)
        tasks = tuple(
            TaskMetrics(
                ref,
                rows,
                rows,
                busy_ms,
                0,
                5_000 + slot,
                (("read" if ref.vertex == 0 else "write", rows, rows),),
                edges=(EdgeMetrics(0, rows, 80 * rows, rows // 10),) if ref.vertex == 0 else (),
            )
            for ref in refs
        )
        bench.feed(SlotMessage(slot, m.SlotStatus(0, tasks, 1000 + slot, 5000)))

    for rows, busy_ms in ((10, 0), (30, 500)):
        beat(0, rows, busy_ms)
        beat(1, rows, 0)
        bench.wait(1)
    read = bench.status.vertices[0]
    assert read.operators[0] == OperatorStatus("read", "read", 2, 60, 60)
    assert read.busy == pytest.approx(0.25)
    assert read.watermark_us == 5_000
    assert bench.status.slot_memory_bytes == (1000, 1001)
    assert bench.status.slot_memory_limit_bytes == (5000, 5000)
    assert read.operators[0].work is None, "nothing was seen at work"
    assert bench.status.edges == ((0, 1, "keyed"),)
    assert bench.status.flows == (FlowStatus(60, 4_800, 6),)
    bench.fail(READ1)
    bench.wait(1)
    assert bench.attempt == 1
    assert bench.status.vertices[0].operators[0].rows_out == 60, "totals are those of the job"
    ref = bench.tasks_on(0)[0]
    assert bench.status.flows == (FlowStatus(60, 4_800, 6),), "likewise"
    edges = (EdgeMetrics(0, 5, 400, 1),)
    tasks = (TaskMetrics(ref, 5, 5, 0, 0, 5_000, (("read", 5, 5),), edges=edges),)
    bench.feed(SlotMessage(0, m.SlotStatus(1, tasks)))
    assert bench.status.vertices[0].operators[0].rows_out == 65
    assert bench.status.flows == (FlowStatus(65, 5_200, 7),)


def test_status_says_how_far_each_subtask_has_recovered_until_all_have() -> None:
    bench = Bench().run()

    def beat(first: int, second: int) -> tuple[RecoveryStatus, ...]:
        for slot, recovered in enumerate((first, second)):
            tasks = tuple(
                TaskMetrics(
                    ref, 0, 0, 0, 0, 0, to_recover_bytes=300 * ref.vertex, recovered_bytes=recovered * ref.vertex
                )
                for ref in bench.tasks_on(slot)
            )
            bench.feed(SlotMessage(slot, m.SlotStatus(0, tasks)))
        assert bench.status.vertices[0].recovering == ()
        return bench.status.vertices[1].recovering

    assert beat(0, 100) == (RecoveryStatus(0, 300, 0), RecoveryStatus(1, 300, 100))
    assert beat(300, 200) == (RecoveryStatus(0, 300, 300), RecoveryStatus(1, 300, 200))
    assert beat(300, 300) == ()


def test_a_symptom_that_comes_after_its_cause_is_not_mentioned() -> None:
    bench = Bench().run()
    bench.lose(bench.slots[1])
    symptom(bench)
    bench.wait(2.0)
    assert [failure.summary for failure in bench.status.failures if "the connection to slot" in failure.summary] == []
    assert len(bench.status.failures) == 1 and "is lost" in bench.status.failures[0].summary


def symptom(bench: Bench) -> None:
    message = m.TaskFailed(bench.attempt, READ0, "the connection to slot 1 is lost", "", symptom=True)
    bench.say(READ0, message)


def test_a_lost_connection_waits_for_the_cause_which_is_what_is_reported() -> None:
    bench = Bench().run()
    symptom(bench)
    assert bench.state == "running"
    assert bench.messages(m.Cancel) == []
    bench.lose(bench.slots[1])
    assert bench.state == "restarting"
    assert [failure.summary.split(" (")[0] for failure in bench.status.failures] == [f"slot {bench.slots[1]}"]
    bench.wait(5)
    assert bench.status.restarts == 1


def test_a_lost_connection_that_nothing_explains_is_a_failure_itself() -> None:
    bench = Bench().run()
    symptom(bench)
    bench.wait(1.1)
    bench.wait(5)
    assert bench.status.restarts == 1
    assert bench.status.failures[0].summary == "the connection to slot 1 is lost"


# ---- what people are told, and failures that are the same each time ----

DIVIDE = "divide: ZeroDivisionError at job.py:7"


def failing(
    bench: Bench, times: int, same: str = DIVIDE, summary: str = "divide: division by zero", of_one_row: bool = False
) -> None:
    for _ in range(times):
        bench.fail(READ0, summary, same=same, of_one_row=of_one_row)
        if bench.ended is None:
            bench.wait(100)
            assert bench.state == "running", bench.status


def test_each_failure_is_told_when_it_happens_with_what_follows() -> None:
    bench = Bench(restart=DEFAULT_RESTART).run()
    bench.answers[m.Cancel] = False
    bench.fail(READ0, "divide (subtask 0): division by zero", same=DIVIDE)
    bench.fail(READ1, "of the same attempt, which is over")
    bench.answers[m.Cancel] = True
    for slot in bench.slots:
        bench.feed_cancelled(slot)
    (told,) = bench.notified
    assert told.startswith("divide (subtask 0): division by zero\nTraceback …\n")
    assert told.endswith("\nRestart 1 in 0.2 s, from the beginning.")
    bench.wait(1)
    number = bench.checkpoint()
    bench.fail(READ0, "another", same="elsewhere")
    assert bench.notified[1].endswith(f"Restart 2 in 0.4 s, from {ROOT}/chk-{number}.")


def test_the_same_failure_ten_times_without_a_checkpoint_ends_a_job_that_does_not_say_how_it_is_restarted() -> None:
    assert JobConfig().restart is DEFAULT_RESTART
    bench = Bench(restart=DEFAULT_RESTART, checkpoint_interval_s=None).run()
    failing(bench, 9)
    assert (
        "The same failure 9 times in a row without a checkpoint in between; at 10 the job ends." in bench.notified[-1]
    )
    assert "Traceback" not in bench.notified[-1], "it was told the first time"
    failing(bench, 1)
    assert bench.ended is not None and bench.ended.state == "failed"
    assert bench.error.startswith(
        "the same failure 10 times in a row without a checkpoint in between: divide: division by zero"
    )
    assert len(bench.notified) == 9, "the last one is what the job ends with"
    assert bench.status.restarts == 9


def test_the_same_failure_at_the_same_row_ends_the_job_at_the_second_time() -> None:
    bench = Bench(restart=DEFAULT_RESTART, checkpoint_interval_s=None).run()
    failing(bench, 1, summary="divide: row 7", of_one_row=True)
    failing(bench, 1, summary="divide: row 8", of_one_row=True)
    failing(bench, 3, same="", summary="the database is away")
    bench.checkpoint()
    failing(bench, 1, summary="divide: row 8", of_one_row=True)
    failing(bench, 3, same="", summary="the database is away")
    failing(bench, 1, summary="divide: row 8", of_one_row=True)
    assert bench.ended is not None and bench.ended.state == "failed"
    assert bench.error.startswith(
        "the same failure, of the same row, 2 times in a row without a checkpoint in between: divide: row 8"
    )
    assert bench.status.restarts == 9


def test_a_strategy_that_the_program_names_restarts_for_the_same_row_too() -> None:
    bench = Bench(restart=RestartStrategy(), checkpoint_interval_s=None).run()
    failing(bench, 5, of_one_row=True)
    assert bench.state == "running"


@pytest.mark.parametrize(
    ("error", "ends"),
    [(DataError("b.csv: was changed"), True), (SchemaError("no column n"), True), (StorageError("away"), False)],
)
def test_a_discovery_that_would_fail_again_ends_the_job_whatever_its_strategy(error: Exception, ends: bool) -> None:
    bench = Bench(restart=RestartStrategy()).run()
    bench.source.error = error
    bench.fail(READ0)
    bench.wait(1)
    assert (bench.ended is not None) == ends
    assert not ends or bench.error.endswith(f"source 'read': finding its splits failed: {error}")


def test_a_completed_checkpoint_begins_the_row_anew() -> None:
    bench = Bench(restart=DEFAULT_RESTART, checkpoint_interval_s=None).run()
    failing(bench, 9)
    bench.checkpoint()
    failing(bench, 9)
    assert bench.state == "running"
    failing(bench, 1)
    assert bench.ended is not None and bench.ended.state == "failed"


def test_failures_elsewhere_begin_the_row_anew_and_those_of_the_world_outside_do_not_count() -> None:
    bench = Bench(restart=DEFAULT_RESTART, checkpoint_interval_s=None).run()
    failing(bench, 9)
    failing(bench, 1, same="map: KeyError at job.py:9")
    failing(bench, 9)
    failing(bench, 20, same="", summary="the database is away")
    assert bench.state == "running"
    failing(bench, 1)
    assert bench.ended is not None and bench.ended.state == "failed"


def test_a_strategy_that_the_program_names_has_no_such_limit() -> None:
    bench = Bench(restart=RestartStrategy(), checkpoint_interval_s=None).run()
    failing(bench, 30)
    assert bench.state == "running"


def test_slots_that_crash_the_same_way_count_and_outages_do_not() -> None:
    bench = Bench(restart=DEFAULT_RESTART, checkpoint_interval_s=None, slot_timeout_s=3600.0).run()

    def lose(times: int, crash: str) -> None:
        for _ in range(times):
            bench.lose(bench.slots[0], crash, "about to divide")
            bench.connect()
            bench.wait(100)

    lose(30, "")
    assert bench.state == "running"
    lose(10, "was killed by SIGSEGV")
    assert bench.ended is not None and bench.ended.state == "failed"
    assert "the same failure 10 times in a row" in bench.error
    assert "Its last lines:\nabout to divide" in bench.error


def test_the_parts_of_the_work_are_those_of_the_last_seconds() -> None:
    bench = Bench(parallelism=1).run()

    def beat(*worked_us: int) -> list[float | None]:
        operators = tuple((uid, 0, 0) for uid in ("read", "write"))
        metrics = TaskMetrics(READ0, 0, 0, 0, 0, 0, operators, worked_us=worked_us)
        bench.feed(SlotMessage(0, m.SlotStatus(0, (metrics,))))
        bench.wait(1)
        return [operator.work for operator in bench.status.vertices[0].operators]

    assert beat(0, 0) == [None]
    assert beat(300_000, 100_000) == [0.75]
    assert beat(300_000, 500_000) == [pytest.approx(300 * E / (300 * E + 100 * E + 400))], (
        "an operator that has stopped"
    )
    bench.wait(60)
    assert beat(300_000, 509_900) == [None], "too little to tell"


E = math.exp(-1 / 5)
"""What is left after a second of what was done lately."""


def test_shares_are_those_of_the_last_seconds_however_the_reports_come() -> None:
    bench = Bench(parallelism=1).run()

    def beat(busy_ms: int, backpressured_ms: int = 0) -> list[float]:
        metrics = TaskMetrics(READ0, 0, 0, busy_ms, backpressured_ms, 0, ())
        bench.feed(SlotMessage(0, m.SlotStatus(0, (metrics,))))
        read = bench.status.vertices[0].subtasks[0]
        return [read.busy, read.backpressured]

    assert beat(0) == [0, 0]
    bench.wait(1)
    assert beat(900, 100) == pytest.approx([0.9, 0.1])
    bench.wait(0.01)
    assert beat(900, 110) == pytest.approx([0.9, 0.1], abs=0.02), "a short time says little"
    bench.wait(1)
    assert beat(900, 1110)[0] == pytest.approx(0.9 * E / (E + 1), abs=0.01)
    bench.wait(30)
    assert beat(900, 31_110) == pytest.approx([0, 1], abs=0.01)
    bench.feed(SlotMessage(0, m.TaskFailed(0, READ0, "it broke", "", False, False, "")))
    assert bench.state == "restarting"
    read = bench.status.vertices[0]
    assert (read.backpressured, read.subtasks[0].backpressured, bench.status.bottleneck) == (0, 0, None)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_stop_before_any_task_has_run_ends_the_job_at_once(steps: int) -> None:
    bench = Bench(held=("open",)) if steps == 0 else Bench()
    bench.start()
    client = bench.ask(m.DoStop())
    if steps == 0:
        bench.held = ()
        bench.release()
    assert bench.ended is not None and bench.ended.state == "stopped" and bench.ended.checkpoint is None
    assert bench.replies[client] == m.Reply()


def test_a_stop_before_any_task_has_run_again_ends_it_where_it_was() -> None:
    first = Bench().run()
    first.checkpoint()
    first.feed(CancelRequested("Ctrl-C"))
    bench = Bench(storage=first.storage, restore="latest", job_id="job2").start()
    assert bench.status.restored_from == "memory://checkpoints/chk-1"
    client = bench.ask(m.DoStop())
    assert bench.ended is not None and bench.ended.checkpoint == "memory://checkpoints/chk-1"
    assert bench.replies[client] == m.Reply(checkpoint="memory://checkpoints/chk-1")
