"""What had finished tells its consumers so, and does nothing else."""

from __future__ import annotations

from midstream.engine.core.elements import MAX_WATERMARK_US, EndOfData, EndOfPartition, Watermark
from midstream.engine.core.ids import TaskId
from midstream.engine.exchange.buffer_pool import BufferPool
from midstream.engine.exchange.input_channel import LocalChannel
from midstream.engine.exchange.input_gate import InputGate
from midstream.engine.exchange.result_partition import ResultPartition
from midstream.engine.graph.job_graph import Edge, Partitioning
from midstream.engine.protocol import messages as m
from midstream.engine.worker.finished_on_restore import FinishedOnRestoreTask
from recovering import SCHEMA


def test_a_finished_task_passes_on_its_end_without_waiting_for_that_of_its_producers() -> None:
    pool = BufferPool(100 * 4096, 4096)
    into = ResultPartition(Edge(0, 0, 1, Partitioning.FORWARD, SCHEMA), 0, range(1), 16, pool, 1000)
    out = ResultPartition(Edge(1, 1, 2, Partitioning.KEYED, SCHEMA, ("key",)), 0, range(2), 16, pool, 1000)
    gate = InputGate(into.edge, 0, [LocalChannel(into.subpartitions[0])])
    readers = [LocalChannel(subpartition) for subpartition in out.subpartitions]
    sent: list[m.FromSlot] = []
    task = FinishedOnRestoreTask(TaskId(1, 0), 3, [gate], [out], sent.append)
    task.start()
    assert sent == [m.TaskRunning(3, TaskId(1, 0)), m.TaskFinished(3, TaskId(1, 0))]
    for reader in readers:
        assert [reader.take(1) for _ in range(3)] == [Watermark(MAX_WATERMARK_US), EndOfData(), EndOfPartition()]
    into.broadcast(Watermark(MAX_WATERMARK_US))  # its producer has finished too, and says so a little later
    assert task.metrics().watermark_us == MAX_WATERMARK_US
    task.close()
    assert pool.in_use == 0
