"""A checkpoint is distributed once for each restart, off the loop, and nothing that happens meanwhile is in its way."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator_world import Bench, Ledger, ScriptedSource, restored, two_vertices

from midstream.engine.coordinator.events import CancelRequested
from midstream.engine.coordinator.job_phase import Phase
from midstream.engine.coordinator.placement.rescale import RescaleStage
from midstream.engine.coordinator.restore import distribute
from midstream.engine.core.errors import ConfigError
from midstream.engine.core.ids import TaskId
from midstream.engine.protocol import messages as m


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Checkpoint and parallelism of each time that one is distributed."""
    calls: list[tuple[int, int]] = []
    original = distribute.assign_state

    def assign_state(metadata: Any, graph: Any, allow_dropped_state: bool) -> Any:
        calls.append((metadata.checkpoint_id, graph.slots))
        return original(metadata, graph, allow_dropped_state)

    monkeypatch.setattr(distribute, "assign_state", assign_state)
    return calls


def acknowledge_all(bench: Bench) -> None:
    pending = bench.job.checkpoints.pending
    assert pending is not None
    bench.ack(pending.checkpoint_id, *sorted(pending.missing))


def test_once_at_the_start_once_for_each_restart_and_once_for_a_rescale(distributed: list[tuple[int, int]]) -> None:
    before = Bench().run()
    before.checkpoint()
    bench = Bench(storage=before.storage, restore="latest", job_id="job2").run()
    assert distributed == [(1, 2)]
    bench.fail(TaskId(1, 0))
    bench.wait(1)
    assert bench.state == "running"
    assert distributed == [(1, 2), (1, 2)]
    client = bench.ask(m.DoRescale(1))
    acknowledge_all(bench)
    assert bench.replies[client].error == ""
    assert distributed == [(1, 2), (1, 2), (2, 1)]


def test_a_job_that_begins_at_the_beginning_waits_for_nothing(distributed: list[tuple[int, int]]) -> None:
    bench = Bench(held=("distribute",)).run()
    bench.fail(TaskId(1, 0))
    bench.wait(1)
    assert bench.state == "running"
    assert not distributed and not bench.messages(m.Deploy)[-1].restore


def test_a_slot_that_is_lost_while_it_is_distributed_is_replaced_and_that_was_not_in_vain(
    distributed: list[tuple[int, int]],
) -> None:
    bench = Bench(held=("distribute",)).run()
    bench.checkpoint()
    bench.fail(TaskId(1, 0))
    bench.wait(1)
    assert bench.job.phase is Phase.WAITING_TO_DEPLOY and len(bench.messages(m.Deploy)) == 2
    bench.lose(1)
    bench.release("distribute")
    assert len(bench.messages(m.Deploy)) == 2, "one slot is missing"
    bench.connect()
    assert bench.state == "running"
    assert len(bench.messages(m.Deploy)) == 4 and distributed == [(1, 2)]
    assert bench.status.restored_from == "memory://checkpoints/chk-1"


def test_a_job_that_is_cancelled_while_it_is_distributed_ends() -> None:
    bench = Bench(held=("distribute",)).run()
    bench.checkpoint()
    bench.fail(TaskId(1, 0))
    bench.wait(1)
    bench.feed(CancelRequested("enough"))
    bench.release("distribute")
    assert bench.ended is not None and bench.ended.state == "stopped"


def test_a_checkpoint_that_cannot_be_distributed_ends_the_job_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench().run()
    bench.checkpoint()

    def refuse(*_: object) -> None:
        raise ConfigError("rows are still being recovered")

    monkeypatch.setattr(distribute, "assign_state", refuse)
    bench.fail(TaskId(1, 0))
    bench.wait(1)
    assert bench.ended is not None and bench.ended.state == "failed"
    assert "the checkpoint to resume from: rows are still being recovered" in str(bench.ended.error)


def test_while_a_rescale_distributes_its_checkpoint_no_newer_one_takes_its_place() -> None:
    bench = Bench(held=("distribute",), checkpoint_interval_s=1.0).run()
    client = bench.ask(m.DoRescale(1))
    acknowledge_all(bench)
    assert bench.job.rescaling.stage is RescaleStage.DISTRIBUTING
    waiting = bench.ask(m.DoCheckpoint())
    bench.wait(5)
    assert bench.job.checkpoints.pending is None and bench.state == "running"
    bench.release("distribute")
    assert bench.replies[client] == m.Reply(checkpoint="memory://checkpoints/chk-1")
    assert len(bench.slots) == 1
    bench.wait(2)
    acknowledge_all(bench)
    assert bench.replies[waiting].checkpoint == "memory://checkpoints/chk-2"


def test_a_failure_while_a_rescale_distributes_leaves_the_job_at_the_parallelism_it_had() -> None:
    bench = Bench(held=("distribute",)).run()
    client = bench.ask(m.DoRescale(1))
    acknowledge_all(bench)
    bench.fail(TaskId(1, 0))
    assert "the job continues at 2" in bench.replies[client].error
    bench.wait(1)
    bench.release("distribute")
    assert bench.state == "running" and len(bench.slots) == 2
    assert bench.status.restored_from == "memory://checkpoints/chk-1"


def test_a_new_slot_that_is_lost_while_a_rescale_distributes_means_another_checkpoint() -> None:
    bench = Bench(held=("distribute",)).run()
    client = bench.ask(m.DoRescale(3))
    bench.connect()
    acknowledge_all(bench)
    bench.lose(2)
    bench.release("distribute")
    assert bench.job.rescaling.stage is RescaleStage.REQUESTING_SLOTS and client not in bench.replies
    bench.connect()
    acknowledge_all(bench)
    bench.release("distribute")
    assert bench.replies[client] == m.Reply(checkpoint="memory://checkpoints/chk-2")
    assert len(bench.slots) == 3


def test_each_slot_gets_what_its_tasks_take_over() -> None:
    bench = Bench(two_vertices(ScriptedSource(("a",)), Ledger(), 3, 2)).run()
    pending = bench.ask(m.DoCheckpoint())
    for ref in bench.tasks:
        chunk = m.ChunkHandle(f"c{ref}", bench.state_file(1, ref), 0, 5, 0, 1)
        part = (m.PartHandle("p", "split", (chunk,)),)
        bench.storage.write(chunk.file, [b"state"])
        uid = "read" if ref.vertex == 0 else "write"
        bench.say(ref, m.CheckpointAck(0, 1, ref, (m.OperatorSnapshot(uid, part),), (chunk.file,), 5))
    assert bench.replies[pending].error == ""
    bench.fail(TaskId(1, 0))
    bench.wait(1)
    deployed = bench.messages(m.Deploy)[3:]
    found = {ref: ops[0].parts[0].chunks[0].id for deploy in deployed for ref, ops in restored(deploy).tasks}
    assert found == {ref: f"c{ref}" for ref in bench.tasks}
    assert [[ref for ref, _ in restored(deploy).tasks] for deploy in deployed] == [list(d.tasks) for d in deployed]
