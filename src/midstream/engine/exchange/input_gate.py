"""The consumer side of one edge for one subtask: all its channels, which are read in turn.

Channels with data take turns. A blocked channel (aligning for a checkpoint) keeps its data until it is resumed. No
channel is read before the gate's recovered rows have been processed, and no channel requests rows before the last of
these has been taken. A task polls its gates only when all its consumers have requested rows. So recovery proceeds from
the sinks upstream, and a source emits no new rows while anything downstream of it is recovered. In-flight data can only
shrink during recovery; channels that must align carry none, so checkpoints never wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from midstream.engine.core.elements import Event
from midstream.engine.core.errors import InvariantError
from midstream.engine.exchange.batch_lease import LeasedBatch, concat_leased
from midstream.engine.exchange.input_channel import InputChannel
from midstream.engine.exchange.listeners import BarrierOrEnd, TaskListener
from midstream.engine.graph.job_graph import Edge


class Recovered(Protocol):
    """The rows in flight that a checkpoint has for a gate (see `engine.worker.gate_recovery`)."""

    @property
    def is_over(self) -> bool: ...

    def take(self) -> LeasedBatch | None: ...

    def discard(self) -> None: ...

    def check(self, current_batch: LeasedBatch | None = None) -> None: ...


class InputGate:
    """All channels of one input of a task. It implements `QueueListener`, for the queues of its channels."""

    def __init__(self, edge: Edge, consumer: int, channels: Sequence[InputChannel]) -> None:
        self.edge = edge
        self.consumer = consumer
        self.channels = channels
        self._listener: TaskListener | None = None
        self._first_channel = 0
        self.recovered: Recovered | None = None
        self._has_requested = False
        self._ready: deque[int] = deque()
        self._is_ready = [False] * len(channels)
        self.current_batch: LeasedBatch | None = None
        """The batch that was polled last, until `processed` is called."""
        self.read_from: list[int] = []
        """The channels from which the current batch was read. Empty if its rows are recovered."""
        self._blocked: set[int] = set()
        for index, channel in enumerate(channels):
            channel.queue.connect(self, index)

    def listen(self, listener: TaskListener, first_channel: int = 0) -> None:
        """Notify `listener`, which reads this gate. `first_channel` is its number for the gate's first channel."""
        self._listener, self._first_channel = listener, first_channel

    def request_rows(self) -> None:
        """Request rows from the producers, if nothing remains to be recovered."""
        if self.recovered is None or self.recovered.is_over:
            self._has_requested = True
            for channel in self.channels:
                channel.request_rows()

    def on_data(self, channel: int) -> None:
        """Queue the channel at this index, which has data, for its turn."""
        if not self._is_ready[channel] and channel not in self._blocked:
            self._is_ready[channel] = True
            self._ready.append(channel)
            if self._listener is not None:
                self._listener.wake()

    def on_arrival(self, channel: int, event: BarrierOrEnd) -> None:
        if self._listener is not None:
            self._listener.on_arrival(self._first_channel + channel, event)

    def poll(self, rows_max: int) -> LeasedBatch | tuple[int, Event] | None:
        """The next batch, or the next event with its channel's index, or None when nothing can be read now.

        A small batch is joined with small ones that wait in other channels, up to `rows_max` rows: more channels mean
        smaller batches, and every operator call has a fixed cost. A batch is the `current_batch` until all its rows
        have been processed, and `processed` is called.
        """
        if self.current_batch is not None:
            raise InvariantError(
                f"edge {self.edge.id}, consumer {self.consumer}: polled before the current batch was processed"
            )
        batch = self.recovered.take() if self.recovered is not None else None
        if not self._has_requested:
            self.request_rows()
        if self.recovered is not None:
            if batch is not None:
                self.current_batch = batch
                return batch
            if not self.recovered.is_over:
                return None
            self.recovered = None
        while self._ready:
            channel = self._ready.popleft()
            self._is_ready[channel] = False
            element = self.channels[channel].take(rows_max)
            if element is None:
                continue
            polled: LeasedBatch | tuple[int, Event]
            if isinstance(element, LeasedBatch):
                self.read_from.append(channel)
                polled = self.current_batch = self._join(element, rows_max) if self._ready else element
            else:
                polled = channel, element
            if self.channels[channel].queue:
                self._is_ready[channel] = True
                self._ready.append(channel)
            return polled
        return None

    def _join(self, first: LeasedBatch, rows_max: int) -> LeasedBatch:
        """Join `first` with batches of its layout of other channels, if it is small enough for the copy to pay off, as in
        a queue.

        The channels of these batches have had their turn.
        """
        rows = first.batch.num_rows
        if rows * 2 > rows_max:
            return first
        batches, ready, self._ready = [first], self._ready, deque()
        more: list[int] = []
        for index in ready:
            channel = self.channels[index]
            if not 0 < channel.queue.head_rows(first.layout) <= rows_max - rows:
                self._ready.append(index)
                continue
            batch = channel.take(rows_max - rows)
            assert isinstance(batch, LeasedBatch), (channel.id, batch)
            batches.append(batch)
            rows += batch.batch.num_rows
            self.read_from.append(index)
            self._is_ready[index] = bool(channel.queue)
            if channel.queue:
                more.append(index)
        self._ready.extend(more)
        return concat_leased(batches)

    def processed(self) -> None:
        """Release the current batch: its rows have been processed."""
        batch, self.current_batch = self.current_batch, None
        if batch is None:
            raise InvariantError(f"edge {self.edge.id}, consumer {self.consumer}: there is no current batch")
        self.read_from.clear()
        batch.release()

    @property
    def may_have_data(self) -> bool:
        """Whether `poll` may return an element now, or has to request rows. If not, the task will be woken."""
        return bool(self._ready) or self.recovered is not None or not self._has_requested

    def block(self, channel: int) -> None:
        if channel in self._blocked:
            raise InvariantError(f"{self.channels[channel].id} is blocked twice")
        self._blocked.add(channel)
        self._lose_turn(channel)

    def resume(self, channel: int) -> None:
        if channel not in self._blocked:
            raise InvariantError(f"{self.channels[channel].id} is resumed but was not blocked")
        self._blocked.discard(channel)
        if self.channels[channel].queue:
            self.on_data(channel)

    def capture(self, channel: int, checkpoint_id: int) -> list[LeasedBatch]:
        """Capture the batches of one channel, as `ElementQueue.capture` does."""
        queue = self.channels[channel].queue
        captured = queue.capture(checkpoint_id)
        if not queue:  # the barrier was the only element
            self._lose_turn(channel)
        return captured

    def _lose_turn(self, channel: int) -> None:
        if self._is_ready[channel]:
            self._is_ready[channel] = False
            self._ready.remove(channel)

    def is_clear(self, channel: int, event: BarrierOrEnd) -> bool:
        """Whether every row of this channel before `event` has been processed, recovered ones included."""
        if self.recovered is not None or channel in self.read_from:
            return False
        return self.channels[channel].queue.is_clear(event)

    def stop_capture(self) -> None:
        for channel in self.channels:
            channel.queue.stop_capture()

    def discard(self) -> None:
        if self.recovered is not None:
            self.recovered.discard()
        for channel in self.channels:
            channel.discard()
        self._ready.clear()
        self.current_batch = None
        self.read_from.clear()

    def check(self) -> None:
        if self._has_requested and self.recovered is not None and not self.recovered.is_over:
            raise InvariantError(
                f"edge {self.edge.id}, consumer {self.consumer}: requests rows while others remain to be recovered"
            )
        if not self._has_requested and any(
            isinstance(item, LeasedBatch) for channel in self.channels for item in channel.queue
        ):
            raise InvariantError(
                f"edge {self.edge.id}, consumer {self.consumer}: rows have arrived that were not requested"
            )
        if self.current_batch is not None:
            self.current_batch.check()
        if self.recovered is not None:
            self.recovered.check(self.current_batch)
        for index, channel in enumerate(self.channels):
            channel.check(self.current_batch)
            if self._is_ready[index] != (bool(channel.queue) and index not in self._blocked):
                raise InvariantError(f"{channel.id}: marked ready={self._is_ready[index]}, which is wrong")
