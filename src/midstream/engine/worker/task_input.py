"""Reads the gates of one task: it processes batches in slices, and handles watermarks, barriers and ends.

A slice takes SHORT_SLICE_S where calls cost little, and up to SLICE_S where they cost more. Between two slices, mails
and the other gates have their turn, so that none of them waits for a whole slow batch. The rows of the batch
that have not been processed are in flight (see `rests`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import pyarrow as pa

from midstream.engine.checkpoint.barrier_handler import BarrierEvent, BarrierReceived, CancelReceived, ChannelEnded
from midstream.engine.core.elements import (
    CancelCheckpointMarker,
    CheckpointBarrier,
    EndOfData,
    EndOfPartition,
    Event,
    Watermark,
    WatermarkStatus,
)
from midstream.engine.core.errors import InvariantError, assert_never
from midstream.engine.core.ids import TaskId
from midstream.engine.core.interfaces import Clock
from midstream.engine.exchange.batch_lease import LeasedBatch
from midstream.engine.exchange.input_gate import InputGate
from midstream.engine.graph.idleness import IdleOrigin
from midstream.engine.protocol.task_metrics import InputMetrics
from midstream.engine.worker.batch_sizer import BatchSizer
from midstream.engine.worker.gate_recovery import GateRecovery
from midstream.engine.worker.operator_chain import OperatorChain
from midstream.engine.worker.source_rate import FIRST_ROWS
from midstream.engine.worker.watermark_valve import WatermarkValve

SLICE_S = 0.01
"""The limit on the time of a step, on a core of its own. A step overruns only when rows became slower."""
SHORT_SLICE_S = 0.002
"""The time of a slice where short calls cost almost nothing. A barrier waits for a slice at each task on its way, and
for the slices of slow tasks in the same slots."""

PRIORITY_MAX = 64
"""The maximum number of elements read in a row from `priority` gates (see `work`). Then another gate has its turn."""


@dataclass(slots=True, eq=False)
class _GateReading:
    """The reading of one gate: how far its current batch has been processed, and how fast its rows are processed."""

    gate: InputGate
    sizer: BatchSizer
    next_row: int = 0
    """The first row of the current batch that has not been processed."""


class TaskInput:
    """The input of one task.

    `handle` is called with barriers and ends as they are read. `origins` has the origin of each channel (see
    `WatermarkValve`). `ended` is called once, when the data of all channels has ended and all rows read from them have
    been processed.
    """

    def __init__(
        self,
        ref: TaskId,
        gates: Sequence[InputGate],
        origins: Sequence[IdleOrigin],
        chain: OperatorChain,
        clock: Clock,
        handle: Callable[[BarrierEvent], None],
        ended: Callable[[], None],
        rows_max: int,
    ) -> None:
        self._ref = ref
        self._chain = chain
        self._clock = clock
        self._handle = handle
        self._ended = ended
        self._rows_max = rows_max
        self._first_channel = list(accumulate((len(gate.channels) for gate in gates), initial=0))
        """The number of each gate's first channel, with the channels of all gates counted. The last entry is
        the number of channels."""
        channels = self._first_channel[-1]
        assert len(origins) == channels, (ref, origins)
        self._valve = WatermarkValve(origins)
        self._status = WatermarkStatus(idle=False)
        """What was last passed to the chain of whether the input is idle."""
        self._ended_data = [False] * channels
        self._unended_channels = Counter[int]()
        """How many channels of each port have not ended their data."""
        for gate in gates:
            self._unended_channels[gate.edge.port] += len(gate.channels)
        self._readers = [_GateReading(gate, BatchSizer(SLICE_S, SHORT_SLICE_S)) for gate in gates]
        self._next_gate = 0
        self._priority_in_a_row = 0
        self.rows_in = 0
        self.to_recover_bytes = 0
        """The size of the rows in flight that the gates recover after the task's start."""

    def restore(self, watermark_us: int) -> None:
        """Restore the event time that the task had reached."""
        self._valve.watermark_us = watermark_us

    def recover(self) -> None:
        """Begin to recover the rows in flight of all gates."""
        for reader in self._readers:
            if isinstance(reader.gate.recovered, GateRecovery):
                self.to_recover_bytes += reader.gate.recovered.total_bytes
                reader.gate.recovered.start()

    def event_times(self) -> tuple[InputMetrics, ...]:
        """The event time of each gate, over those of its channels for which the valve waits."""
        waited_for = sorted(self._valve.waited_for())
        found = []
        for reader, first, end in zip(self._readers, self._first_channel, self._first_channel[1:], strict=False):
            marks = [
                (self._valve.watermarks[channel], channel - first)
                for channel in waited_for[bisect_left(waited_for, first) : bisect_left(waited_for, end)]
            ]
            if marks:
                lowest_us, slowest = min(marks)
                producer = reader.gate.channels[slowest].id.producer
                found.append(InputMetrics(reader.gate.edge.id, lowest_us, producer, max(marks)[0]))
        return tuple(found)

    def work(self, priority: Sequence[int] = ()) -> bool:
        """Process a slice of a batch, or the next event, of the next gate. Returns False when no gate has an element.

        The `priority` gates, for whose barriers a checkpoint waits, come first. The others have a turn after
        PRIORITY_MAX elements.
        """
        if self._priority_in_a_row < PRIORITY_MAX:
            for index in priority:
                if self._read(index):
                    self._priority_in_a_row += 1
                    return True
        self._priority_in_a_row = 0
        for _ in range(len(self._readers)):
            index = self._next_gate
            self._next_gate = (index + 1) % len(self._readers)
            if self._read(index):
                return True
        return False

    @property
    def may_have_data(self) -> bool:
        """Whether `work` may find an element now. If not, one of the gates will wake the task."""
        for reader in self._readers:  # noqa: SIM110 - a generator takes longer to create than the few to check
            if reader.gate.current_batch is not None or reader.gate.may_have_data:
                return True
        return False

    def rests(self) -> dict[int, tuple[LeasedBatch, int]]:
        """The current batch, and its first row that has not been processed, by the number of the gate."""
        return {
            number: (reader.gate.current_batch, reader.next_row)
            for number, reader in enumerate(self._readers)
            if reader.gate.current_batch is not None
        }

    def _read(self, index: int) -> bool:
        reader = self._readers[index]
        gate = reader.gate
        if gate.current_batch is None:
            polled = gate.poll(min(self._rows_max, self._slice_rows(reader)))
            if polled is None:
                return False
            if not isinstance(polled, LeasedBatch):
                self._on_event(index, *polled)
                return True
            self._on_batch(index, polled.batch)
        self._process_slice(reader)
        return True

    def _slice_rows(self, reader: _GateReading) -> int:
        return reader.sizer.rows(FIRST_ROWS // 2, self._clock.core_share)

    def _on_batch(self, gate: int, batch: pa.RecordBatch) -> None:
        reader, first = self._readers[gate], self._first_channel[gate]
        for channel in reader.gate.read_from:
            if self._ended_data[first + channel]:
                raise InvariantError(f"{reader.gate.channels[channel].id}: rows after the end of data")
        self.rows_in += batch.num_rows
        reader.next_row = 0

    def _on_event(self, gate: int, index: int, event: Event) -> None:
        channel = self._first_channel[gate] + index
        reader = self._readers[gate]
        match event:
            case Watermark(timestamp_us):
                self._advance(self._valve.advance(channel, timestamp_us))
            case WatermarkStatus(idle, assigned):
                self._advance(self._valve.set_idle(channel, idle, assigned))
            case CheckpointBarrier():
                self._handle(BarrierReceived(channel, event))
            case CancelCheckpointMarker(checkpoint_id):
                self._handle(CancelReceived(checkpoint_id))
            case EndOfData():
                self._end_of_data(channel, reader.gate.edge.port)
            case EndOfPartition():
                if not self._ended_data[channel]:
                    raise InvariantError(f"{reader.gate.channels[index].id}: closed before the end of data")
                self._handle(ChannelEnded(channel))
            case _:
                assert_never(event)

    def _process_slice(self, reader: _GateReading) -> None:
        """Process as many rows of the current batch as fit the budget, according to the previous rows of this gate.

        The rest of the batch is divided into slices of about the same size: a short last slice would pay a whole call
        for few rows.
        """
        clock, current_batch = self._clock, reader.gate.current_batch
        assert current_batch is not None
        batch = current_batch.batch
        rest = batch.num_rows - reader.next_row
        budget = self._slice_rows(reader)
        rows = -(-rest // max(1, round(rest / budget)))
        part = batch if rows == batch.num_rows else batch.slice(reader.next_row, rows)
        started_s = clock.own_core_s()
        self._chain.process(part, reader.gate.edge.port)
        reader.sizer.record(rows, clock.own_core_s() - started_s)
        reader.next_row += rows
        if reader.next_row == batch.num_rows:
            reader.gate.processed()

    def check(self) -> None:
        """Check that the chain knows which splits the channels consider, and whether they are idle."""
        if (self._status.idle, self._status.assigned) != (self._valve.is_idle, self._valve.assigned):
            raise InvariantError(f"task {self._ref}: its input was {self._status}, and is {self._valve.assigned}")

    def _advance(self, watermark_us: int | None) -> None:
        valve = self._valve
        if watermark_us is not None:
            if valve.assigned != self._status.assigned:
                self._pass_on(False)  # before the watermark, which may depend on these splits
            self._chain.offer(0, watermark_us)
        self._pass_on(valve.is_idle)

    def _pass_on(self, is_idle: bool) -> None:
        if is_idle is not self._status.idle or self._valve.assigned != self._status.assigned:
            self._status = WatermarkStatus(is_idle, self._valve.assigned)
            self._chain.outputs[0].idle(is_idle, self._valve.assigned)

    def _end_of_data(self, channel: int, port: int) -> None:
        if self._ended_data[channel]:
            raise InvariantError(f"task {self._ref}: channel {channel} ends twice")
        self._ended_data[channel] = True
        self._unended_channels[port] -= 1
        if self._unended_channels[port] == 0:
            self._chain.end_input(port)
        if all(self._ended_data):
            self._ended()
