"""The stand-in for a subtask that had finished in the checkpoint from which the attempt starts.

It has no operators, no source and no input: the rows that it emitted are in its consumers' state, or are recovered by
them. It sends its consumers the end of the data again, because they wait for it after every restore. It ends in the
call in which it starts. It takes no part in checkpoints: the coordinator records its operators as finished again
(`Attempt.plan_checkpoint`, `metadata_builder.operator_states`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from midstream.engine.core.elements import MAX_WATERMARK_US, EndOfData, EndOfPartition, Watermark
from midstream.engine.core.ids import TaskId
from midstream.engine.exchange.input_gate import InputGate
from midstream.engine.exchange.result_partition import ResultPartition
from midstream.engine.protocol import messages as m
from midstream.engine.protocol.task_metrics import TaskMetrics


@dataclass(frozen=True, slots=True)
class FinishedOnRestoreTask:
    """A task that had finished. Its producers have finished as well: only their final events arrive through `gates`."""

    ref: TaskId
    attempt: int
    gates: Sequence[InputGate]
    partitions: Sequence[ResultPartition]
    send: Callable[[m.FromSlot], None]

    def start(self) -> None:
        """Report that the task runs, send the end of its data, and report that it has finished.

        The slot has started its other tasks before it calls this.
        """
        self.send(m.TaskRunning(self.attempt, self.ref))
        for partition in self.partitions:
            for event in (Watermark(MAX_WATERMARK_US), EndOfData(), EndOfPartition()):
                partition.broadcast(event)
        for gate in self.gates:
            gate.discard()
        self.send(m.TaskFinished(self.attempt, self.ref))

    def close(self) -> None:
        for gate in self.gates:
            gate.discard()
        for partition in self.partitions:
            partition.discard()

    def metrics(self) -> TaskMetrics:
        return TaskMetrics(
            self.ref, rows_in=0, rows_out=0, busy_ms=0, backpressured_ms=0, watermark_us=MAX_WATERMARK_US
        )
