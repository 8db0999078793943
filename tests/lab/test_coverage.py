"""The coverage report: known pairs of state and event are seen, none that was held to be impossible."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest

import midstream.engine.coordinator
from midstream.engine.coordinator.effects import IoKind, TimerKind
from midstream.engine.worker import deployment, slot_machine
from midstream_lab import coverage
from midstream_lab.coverage import lines_of, recording, report
from midstream_lab.impossible_pairs import MACHINES
from midstream_lab.run import run
from midstream_lab.scenarios.scenario import draw
from midstream_lab.simulate import simulate
from midstream_lab.watched_machines import COORDINATOR_EVENTS, NO_MAILS, TASK_MAILS

pytestmark = pytest.mark.turns(2)


def test_known_pairs_are_seen_and_no_impossible_one() -> None:
    with recording() as pairs:
        for seed in range(700, 718):
            outcome = run(draw(seed))
            assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
    seen = set(pairs)
    for pair in (
        ("barrier handler", "IDLE", "BarrierReceived"),
        ("barrier handler", "ALIGNING", "BarrierReceived"),
        ("barrier handler", "CAPTURING", "BarrierAnnounced"),
        ("barrier handler", "IDLE", "BarrierAnnounced, over"),
        ("task", "RUNNING, IDLE", "rows"),
        ("task", "RUNNING, ALIGNING", "rows"),
        ("task", "AWAITS_CHECKPOINT, IDLE", "checkpoint_completed"),
        ("slot request", "LOST", "report of the process"),
        ("slot", "RUNNING", "Cancel"),
        ("coordinator", "RUNNING", "CheckpointAck"),
        ("coordinator", "CANCELLING", "Cancelled"),
        ("task, to the coordinator", "FINISHING", "TaskFinished"),
        ("checkpoint", "COLLECTING", "acknowledge"),
        ("channel", "remote: empty", "buffer"),
        ("channel", "local: data", "take"),
    ):
        assert pair in seen, pair
    for machine in report(pairs):
        assert machine.surprising == (), machine.machine
        assert machine.unlisted == (), machine.machine
        assert machine.seen + len(machine.unseen) == machine.possible


def test_recording_leaves_the_run_as_it_is() -> None:
    with recording():
        recorded = run(draw(3))
    assert recorded.hash == run(draw(3)).hash


def test_what_was_never_seen_is_listed() -> None:
    found = report({("slot", "IDLE", "Welcome"): 3, ("slot", "DEPLOYED", "Welcome"): 1})
    of_slot = next(machine for machine in found if machine.machine == "slot")
    assert of_slot.seen == 1
    assert ("RUNNING", "Cancel") in of_slot.unseen
    assert [pair[:2] for pair in of_slot.surprising] == [("DEPLOYED", "Welcome")]
    text = "\n".join(lines_of(found))
    assert "never in RUNNING" in text
    assert "SURPRISING: Welcome in DEPLOYED" in text


def test_what_is_in_no_list_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    without = tuple(replace(machine, states=machine.states[1:]) for machine in MACHINES)
    monkeypatch.setattr(coverage, "MACHINES", without)
    found = report({("slot", "IDLE", "Welcome"): 3})
    of_slot = next(machine for machine in found if machine.machine == "slot")
    assert of_slot.unlisted == (("IDLE", "Welcome"),) and of_slot.seen == 0
    assert "NOT LISTED: Welcome in IDLE" in "\n".join(lines_of(found))


def test_every_token_of_the_coordinator_is_listed() -> None:
    """Whoever asks for a timer or I/O names its kind: there are no others."""
    listed = set(COORDINATOR_EVENTS)
    assert {f"timer {kind.value}" for kind in TimerKind} <= listed
    assert {f"{kind.value} {outcome}" for kind in IoKind for outcome in ("done", "failed")} <= listed
    used = set()
    for file in sorted(Path(midstream.engine.coordinator.__path__[0]).rglob("*.py")):
        for call in re.findall(r"(?:set_timer|run_io|self\._run)\(\s*([\w.]+)", file.read_text(encoding="utf-8")):
            if call not in ("self", "kind"):  # where they are defined, or passed on
                assert re.fullmatch(r"(TimerKind|IoKind)\.\w+", call), (file.name, call)
                used.add(call)
    assert used == {f"{type(kind).__name__}.{kind.name}" for kind in (*TimerKind, *IoKind)}


def test_every_mail_that_a_slot_sends_its_tasks_is_listed() -> None:
    text = inspect.getsource(deployment) + inspect.getsource(slot_machine)
    called = set(re.findall(r"(?:\btask|self\._task\(ref\)|self\.tasks\[ref\])\.(\w+)\(", text))
    assert called == {*TASK_MAILS, *NO_MAILS}


def test_the_command_reports_every_machine() -> None:
    result = simulate(seeds="0:2", topology="keyed", rows=40, jobs=1, coverage=True)
    assert [machine["machine"] for machine in result.data["coverage"]] == [machine.name for machine in MACHINES]
    assert "pairs of state and event seen" in result.text
