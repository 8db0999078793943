"""What a task says of its snapshots: stored ones with handles, failed ones with the files to delete."""

from __future__ import annotations

import pyarrow as pa

from in_memory import MemoryStorage
from midstream.engine.checkpoint.state_files import state_file
from midstream.engine.core.errors import StorageError
from midstream.engine.core.ids import TaskId
from midstream.engine.operators.base import Snapshot, SnapshotResult
from midstream.engine.protocol import messages as m
from midstream.engine.protocol.task_metrics import TaskMetrics
from midstream.engine.state.state_parts import Chunk, Redistribute, StatePart
from midstream.engine.worker.task_snapshots import StoredInFlight, TaskSnapshots
from recovering import Steps, task_seams

ROWS = pa.table({"v": [1, 2, 3]})
TASK = TaskId(1, 0)
METRICS = TaskMetrics(TASK, rows_in=3, rows_out=2, busy_ms=0, backpressured_ms=0, watermark_us=0)


def file_of(checkpoint_id: int) -> str:
    return state_file(1, 0, checkpoint_id, 1, 0)


class World:
    def __init__(self, inline_bytes_max: int) -> None:
        self.storage = MemoryStorage()
        self.steps = Steps()
        self.sent: list[m.FromSlot] = []
        services = task_seams(self.steps, self.storage, inline_bytes_max=inline_bytes_max, send=self.sent.append)
        self.snapshots = TaskSnapshots(TASK, services, lambda: METRICS, self.failed, lambda: None)

    def failed(self, error: BaseException) -> None:
        raise error

    def take(
        self, checkpoint_id: int, *chunks: str, in_flight: StoredInFlight | None = None, with_metrics: bool = False
    ) -> m.FromSlot:
        part = StatePart(Redistribute.UNION, tuple(Chunk(chunk, ROWS) for chunk in chunks))
        operators = [(m.OperatorSnapshot("count"), Snapshot(SnapshotResult(parts={"s": part})))]
        self.snapshots.store(
            checkpoint_id, operators, alignment_ms=0, began_s=0.0, finished=False, with_metrics=with_metrics
        )
        assert self.steps.run_io()
        self.snapshots.in_flight_stored(checkpoint_id, in_flight or StoredInFlight())
        return self.sent[-1]

    def chunks(self, ack: m.FromSlot) -> list[tuple[str, str]]:
        assert isinstance(ack, m.CheckpointAck)
        return [(chunk.id, chunk.file) for chunk in ack.operators[0].parts[0].chunks]


def test_a_checkpoint_that_could_not_be_stored_is_declined_with_the_files_that_were_written() -> None:
    world = World(0)
    in_flight = StoredInFlight(files=("channels",), error=StorageError("the disk is full"))
    decline = world.take(1, "a", in_flight=in_flight)
    assert isinstance(decline, m.CheckpointDecline)
    assert decline.files == (file_of(1), "channels") and decline.counts and "the disk is full" in decline.reason
    assert list(world.storage.files) == [file_of(1)]


def test_what_a_completed_checkpoint_has_in_a_file_is_referred_to() -> None:
    world = World(0)
    assert world.chunks(world.take(1, "a")) == [("a", file_of(1))]
    assert world.chunks(world.take(2, "a", "b")) == [("a", file_of(2)), ("b", file_of(2))], (
        "1 is not known to be complete"
    )
    world.snapshots.completed(2)
    assert world.chunks(world.take(3, "a", "b", "c")) == [("a", file_of(2)), ("b", file_of(2)), ("c", file_of(3))]


def test_little_state_is_in_the_acknowledgement_and_goes_to_a_file_once_it_is_more() -> None:
    world = World(1000)
    first = world.take(1, "a")
    assert world.chunks(first) == [("a", "")] and world.storage.files == {}
    assert isinstance(first, m.CheckpointAck) and first.files == () and first.state_bytes > 0
    world.snapshots.completed(1)
    second = world.take(2, "a", "b", "c", "d")
    assert {file for _, file in world.chunks(second)} == {file_of(2)}
    world.snapshots.completed(2)
    assert world.chunks(world.take(3, "a", "b", "c", "d", "e"))[-2:] == [("d", file_of(2)), ("e", "")]


def test_metrics_are_only_in_acknowledgements_that_need_them() -> None:
    world = World(0)
    usual, last = world.take(1, "a"), world.take(2, "a", with_metrics=True)
    assert isinstance(usual, m.CheckpointAck) and usual.metrics is None
    assert isinstance(last, m.CheckpointAck) and last.metrics is METRICS
