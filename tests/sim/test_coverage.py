"""The coverage report: known pairs of state and event are seen, none that was held to be impossible."""

from __future__ import annotations

from midstream.sim.command import simulate
from midstream.sim.coverage import MACHINES, lines_of, recording, report
from midstream.sim.run import run
from midstream.sim.scenario import draw


def test_known_pairs_are_seen_and_no_impossible_one() -> None:
    with recording() as pairs:
        for seed in range(700, 716):
            outcome = run(draw(seed))
            assert not outcome.failures, f"seed {seed}: {outcome.failures[0]}"
    seen = set(pairs)
    for pair in (
        ("barrier handler", "IDLE", "BarrierReceived newer"),
        ("barrier handler", "ALIGNING", "BarrierReceived same"),
        ("task", "RUNNING", "rows"),
        ("task", "FINISHING", "checkpoint_completed"),
        ("slot", "RUNNING", "Cancel"),
        ("coordinator", "RUNNING", "CheckpointAck"),
        ("coordinator", "CANCELLING", "Cancelled"),
        ("task, to the coordinator", "FINISHING", "FINISHED"),
        ("checkpoint", "COLLECTING", "ack"),
        ("channel", "remote: empty", "buffer"),
        ("channel", "local: data", "take"),
    ):
        assert pair in seen, pair
    for machine in report(pairs):
        assert machine.surprising == (), machine.machine
        assert machine.seen + len(machine.unseen) == machine.possible


def test_recording_leaves_the_run_as_it_is() -> None:
    with recording():
        recorded = run(draw(3))
    assert recorded.hash == run(draw(3)).hash


def test_what_was_never_seen_is_listed() -> None:
    found = report({("slot", "IDLE", "Welcome"): 3, ("slot", "DEPLOYED", "Welcome"): 1})
    slot = next(machine for machine in found if machine.machine == "slot")
    assert slot.seen == 1
    assert ("RUNNING", "Cancel") in slot.unseen
    assert [pair[:2] for pair in slot.surprising] == [("DEPLOYED", "Welcome")]
    text = "\n".join(lines_of(found))
    assert "never in RUNNING" in text
    assert "SURPRISING: Welcome in DEPLOYED" in text


def test_the_command_reports_every_machine() -> None:
    result = simulate(seeds="0:2", topology="keyed", rows=40, jobs=1, coverage=True)
    assert [machine["machine"] for machine in result.data["coverage"]] == [machine.name for machine in MACHINES]
    assert "pairs of state and event seen" in result.text
