"""Who is notified of what: the exchange notifies tasks, and the readers of queues, through two interfaces.

    ElementQueue     --QueueListener-->  its reader: the `InputGate` of the consumer in this slot, or the `PeerLink`
    InputGate        --TaskListener--->  the consumer task
    ResultPartition  --TaskListener--->  the producer task

An `InputGate` connects itself to its channels' queues, and a `PeerLink` to the queue of each subpartition that it
sends. A `Task` registers itself with all its gates and partitions when it is created (`listen`). A task that had
finished registers nowhere. Two notifications concern neither, and are functions given to
constructors: a lost connection (`PeerLink` to the deployment), and a request for rows (`Subpartition` to its partition).

Everything is called on the slot's loop thread, within a step of another task, a call of the transport, or the completion
of a write. So a listener only notes what it must do, and schedules it: it neither reads nor emits before it returns.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

from midstream.engine.core.elements import CheckpointBarrier, EndOfPartition

BarrierOrEnd: TypeAlias = CheckpointBarrier | EndOfPartition
"""The events of which a task is notified when they arrive, before the elements ahead of them are read."""


class QueueListener(Protocol):
    """The reader of queues. `channel` is the index under which it has connected itself to the queue."""

    def on_data(self, channel: int) -> None:
        """Note that the reader may take an element of this channel: called whenever one has been added, and when it
        connects itself to a queue that has some."""
        ...

    def on_arrival(self, channel: int, event: BarrierOrEnd) -> None:
        """Note that `event` has arrived in this channel. It is called before `on_data`, and even if the event completes
        a capture and so does not wait in the queue."""
        ...


class TaskListener(Protocol):
    """A task that reads gates and emits to partitions (`engine.worker.task.Task`)."""

    def wake(self) -> None:
        """Have a step of the task run soon. It is called by:

        - a gate, when a channel that had nothing to read, and is not blocked, gets an element or is resumed
        - a partition, once after each `wake_when_available`, when `is_available` may have become true
        - a partition, from `wake_when_sent` on, whenever the last element of a subpartition has been taken
        """
        ...

    def on_arrival(self, channel: int, event: BarrierOrEnd) -> None:
        """Handle a barrier, or the end of the partition, that a gate has received. It is usually still to be read. The
        channels of all gates are counted."""
        ...

    def on_barrier_sent(self, checkpoint_id: int) -> None:
        """Handle a barrier that was queued in a subpartition, and that its link has just taken to send it. A barrier
        that overtakes, or that a local consumer takes, does not count."""
        ...
