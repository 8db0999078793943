"""What comes into one task through its gates: batches, worked off in slices; event time; the end.

A batch is worked off in slices of about SLICE_S, so that mails never wait for long. What is left of
it between two slices is in flight, see `rest`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from midstream.checkpoint.barriers import BarrierEvent, BarrierReceived, CancelReceived, ChannelEnded
from midstream.core.elements import (
    CancelCheckpointMarker,
    CheckpointBarrier,
    Element,
    EndOfData,
    EndOfPartition,
    Watermark,
    WatermarkStatus,
)
from midstream.core.errors import InvariantError
from midstream.core.ids import TaskId
from midstream.core.seams import Clock
from midstream.exchange.gate import RECOVERED, InputGate, first_channels
from midstream.worker.chain import Chain
from midstream.worker.checkpoints import Rest
from midstream.worker.source import FIRST_ROWS
from midstream.worker.valve import WatermarkValve

SLICE_S = 0.01
"""How long a step may keep the loop, as far as that can be foreseen."""


@dataclass(slots=True)
class _Current:
    """The batch that is being worked off."""

    gate: int
    channel: int
    port: int
    batch: pa.RecordBatch
    next_row: int


class TaskInput:
    """`handle` is told of barriers as they are read. `is_finished`: the task's operators were restored as finished."""

    def __init__(
        self,
        ref: TaskId,
        gates: Sequence[InputGate],
        chain: Chain,
        clock: Clock,
        handle: Callable[[BarrierEvent], None],
        *,
        rows_max: int,
        is_finished: bool,
    ) -> None:
        self._ref = ref
        self._gates = gates
        self._chain = chain
        self._clock = clock
        self._handle = handle
        self._rows_max = rows_max
        self._is_finished = is_finished
        self._first_channel = first_channels(gates)
        channels = self._first_channel[-1]
        self._valve = WatermarkValve(channels)
        self._was_idle = False
        self._ended_data = [False] * channels
        self._port_open = {
            port: sum(len(gate.channels) for gate in gates if gate.edge.port == port)
            for port in {gate.edge.port for gate in gates}
        }
        self._current: _Current | None = None
        self._rows_per_s = 0.0
        self._next_gate = 0
        self.rows_in = 0
        self.has_ended = False
        """All channels have ended, and so has what was read from them."""
        self.drains = True
        """As far as is known: the input ends for good, so that operators finish."""

    def restore(self, watermark_us: int) -> None:
        """Event time stood there."""
        self._valve.watermark_us = watermark_us

    def work(self) -> bool:
        """A slice of the present batch, or the next element. False: nothing can be read now."""
        if self._current is not None:
            self._process_slice(self._current)
            return True
        for _ in range(len(self._gates)):
            index = self._next_gate
            gate = self._gates[index]
            self._next_gate = (index + 1) % len(self._gates)
            polled = gate.poll(self._rows_max)
            if polled is not None:
                self._on_element(index, polled[0], polled[1])
                return True
        return False

    @property
    def may_go_on(self) -> bool:
        """Whether `work` may find something now; if not, one of the gates will wake the task."""
        return self._current is not None or any(gate.may_have_data for gate in self._gates)

    def rest(self) -> Rest | None:
        """What is left of the present batch."""
        current = self._current
        if current is None:
            return None
        taken = self._gates[current.gate].taken(current.channel)
        return Rest(current.gate, current.batch.slice(current.next_row), taken)

    def _on_element(self, gate: int, index: int, element: Element) -> None:
        channel = self._first_channel[gate] + index
        port = self._gates[gate].edge.port
        if isinstance(element, pa.RecordBatch):
            if index != RECOVERED and self._ended_data[channel]:
                raise InvariantError(f"{self._gates[gate].channels[index].id}: rows after the end of data")
            self.rows_in += element.num_rows
            self._current = _Current(gate, index, port, element, 0)
            self._process_slice(self._current)
            return
        match element:
            case Watermark(timestamp_us):
                self._advance(self._valve.advance(channel, timestamp_us))
            case WatermarkStatus(idle):
                self._advance(self._valve.set_idle(channel, idle))
            case CheckpointBarrier():
                self._handle(BarrierReceived(channel, element))
            case CancelCheckpointMarker(checkpoint_id):
                self._handle(CancelReceived(checkpoint_id))
            case EndOfData(drain):
                self._end_of_data(channel, port, drain)
            case EndOfPartition():
                if not self._ended_data[channel]:
                    raise InvariantError(f"{self._gates[gate].channels[index].id}: closed before the end of data")
                self._handle(ChannelEnded(channel))

    def _process_slice(self, current: _Current) -> None:
        """As many rows of the batch as fit the budget, judged by the rows before them."""
        clock = self._clock
        rest = current.batch.num_rows - current.next_row
        if self._rows_per_s:
            budget = max(1, int(self._rows_per_s * SLICE_S))
            rows = rest if rest <= 2 * budget else budget
        else:
            rows = min(rest, FIRST_ROWS)
        part = current.batch if rows == current.batch.num_rows else current.batch.slice(current.next_row, rows)
        started_s = clock.monotonic_s()
        self._chain.process(part, current.port)
        elapsed_s = clock.monotonic_s() - started_s
        self._rows_per_s = rows / elapsed_s if elapsed_s > 0 else float(2**40)
        current.next_row += rows
        if current.next_row == current.batch.num_rows:
            self._current = None
            self._gates[current.gate].done(current.channel)

    def _advance(self, watermark_us: int | None) -> None:
        if watermark_us is not None:
            self._chain.offer(0, watermark_us)
        is_idle = self._valve.is_idle
        if is_idle != self._was_idle:
            self._was_idle = is_idle
            self._chain.links[0].idle(is_idle)

    def _end_of_data(self, channel: int, port: int, drain: bool) -> None:
        if self._ended_data[channel]:
            raise InvariantError(f"task {self._ref}: channel {channel} ends twice")
        self._ended_data[channel] = True
        self.drains = self.drains and drain
        self._port_open[port] -= 1
        if self._port_open[port] == 0 and drain and not self._is_finished:
            self._chain.end_input(port)
        if all(self._ended_data):
            self.has_ended = True
