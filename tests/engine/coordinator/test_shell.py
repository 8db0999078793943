"""The shell around a coordinator: slots come once and are lost once, questions have one answer, nothing follows the end."""

from __future__ import annotations

import pytest
from coordinator_world import Bench

from midstream.engine.coordinator import shell
from midstream.engine.coordinator.events import CancelRequested, JobEnded
from midstream.engine.coordinator.placement.attempt_deployer import CAUSE_WAIT_S
from midstream.engine.coordinator.placement.slot_pool import PYTHON
from midstream.engine.core.errors import ClusterError, InvariantError
from midstream.engine.core.ids import TaskId
from midstream.engine.protocol import messages as m


def register(request: str) -> m.Register:
    return m.Register("host", 7000, 100, PYTHON, request)


def test_a_request_is_good_for_one_slot() -> None:
    bench = Bench().start()
    first, second = bench.requests
    assert bench.shell.refusal(register("slot-99")) == "its request is closed"
    assert bench.shell.refusal(register(first)) == ""
    bench.connect(1)
    assert bench.shell.refusal(register(first)) == "its request was answered before"
    bench.shell.slot_failed(second, "no core")
    assert bench.shell.refusal(register(second)) == "its request is closed"


def test_word_of_its_process_that_comes_first_is_why_a_slot_is_lost() -> None:
    bench = Bench().run()
    bench.shell.slot_failed(bench.requests[1], "status 139", "SIGSEGV", "Fatal Python error")
    assert "slot 1 (process 101 on host1) is lost: status 139" in bench.status.failures[0].summary
    assert "Fatal Python error" in bench.status.failures[0].details
    bench.wait(5)
    assert bench.surroundings.abandoned == [], "there is no process any more"


def test_word_of_its_process_that_comes_behind_is_why_a_slot_is_lost() -> None:
    bench = Bench().run()
    bench.surroundings.gone.add(1)
    bench.shell.slot_lost(1, "connection reset")
    bench.wait(0.5)
    assert bench.state == "running", "word is waited for"
    bench.shell.slot_failed(bench.requests[1], "status 139", "SIGSEGV")
    assert "is lost: status 139" in bench.status.failures[0].summary
    bench.wait(5)
    assert len(bench.status.failures) == 1 and bench.surroundings.abandoned == []


def test_a_slot_of_which_no_word_comes_is_lost_and_its_process_abandoned() -> None:
    bench = Bench().run()
    bench.surroundings.gone.add(1)
    bench.shell.slot_lost(1, "connection reset")
    bench.wait(shell.EXIT_WAIT_S_MAX)
    assert "is lost: connection reset" in bench.status.failures[0].summary
    assert bench.surroundings.abandoned == [bench.requests[1]]
    bench.shell.slot_failed(bench.requests[1], "killed")
    assert len(bench.status.failures) == 1, "too late"


def test_word_is_waited_for_less_long_than_the_cause_of_what_peers_see() -> None:
    assert shell.EXIT_WAIT_S_MAX < CAUSE_WAIT_S


def test_a_released_slot_that_does_not_end_is_abandoned() -> None:
    bench = Bench().run()
    bench.answers[m.Cancel] = False
    bench.fail(TaskId(0, 0))
    bench.feed_cancelled(0)
    bench.wait(60)
    assert bench.closed[0] == 1, "it has not cancelled its tasks"
    assert bench.requests[1] in bench.surroundings.abandoned


def test_a_cluster_that_has_ended_is_told_of_when_slots_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def refuse(request: str) -> None:
        raise ClusterError("Spark has ended")

    monkeypatch.setattr(bench.surroundings, "request_slot", refuse)
    bench.start()
    assert bench.error.startswith("Spark has ended, and all slots of the job with it")


def test_a_cluster_that_has_ended_is_told_of_with_the_word_of_a_process() -> None:
    bench = Bench().run()
    bench.surroundings.slots_gone = "Spark has ended"
    bench.lose(0)
    assert bench.error.startswith("Spark has ended, and all slots of the job with it")


def test_every_question_has_one_answer_also_behind_the_end() -> None:
    bench = Bench(held=("savepoint-location",)).run()
    waits = bench.ask(m.DoSavepoint("memory://saved"))
    bench.feed(CancelRequested("enough"))
    bench.wait(30)
    assert bench.ended is not None and waits in bench.replies
    late = bench.ask(m.GetStatus())
    assert bench.replies[late] == m.Reply(error="the job has ended: it was stopped", status=bench.ended.status)


def test_who_waits_when_a_coordinator_breaks_is_answered() -> None:
    bench = Bench().run()
    client = bench.ask(m.DoCheckpoint())
    status = bench.job.status(bench.now_ms)
    bench.shell.conclude(JobEnded("failed", InvariantError("a bug"), status))
    assert bench.replies[client].error == "the job has ended: it failed"
    bench.shell.conclude(JobEnded("stopped", None, status))
    assert bench.ended is not None and bench.ended.state == "failed", "the first end counts"


def test_a_client_that_does_not_ask_is_not_answered() -> None:
    bench = Bench().run()
    client = bench.ask(m.GetStatus())
    with pytest.raises(InvariantError, match=f"client {client} is answered without a request"):
        bench.shell._answer(client, m.Reply())


def test_nothing_follows_the_end() -> None:
    bench = Bench(held=("discover",)).run()
    bench.feed(CancelRequested("enough"))
    bench.wait(11)
    assert bench.ended is not None and not bench.timers
    sent = len(bench.sent)
    bench.release("discover")
    bench.shell.slot_message(0, m.Cancelled(0))
    bench.shell.slot_failed(bench.requests[0], "killed")
    assert bench.shell.refusal(register(bench.requests[0])) == "the job has ended"
    bench.wait(30)
    assert len(bench.sent) == sent
    with pytest.raises(InvariantError, match="CancelRequested after the end"):
        bench.job.handle(CancelRequested("again"), bench.now_ms)
