"""One consumer for all partitions of a source that are read from the client's memory in one process.

The client's threads, its connections, and its requests to brokers are then shared: with a consumer for each partition, a
broker answers as many requests as there are partitions with rows. Each partition keeps a queue of its own in the client
(see `fetched_records`), so readers neither wait for each other nor see each other's records.

The client writes to a pipe when a record is added to an empty queue. A thread reads the pipe and wakes the partition's
reader.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final, Protocol

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from midstream.connectors.kafka.cluster import PartitionId
from midstream.connectors.kafka.fetched_records import FetchClient
from midstream.engine.core.errors import InvariantError, StorageError

_REPORTS_MAX: Final = 100
"""The largest number of messages that are taken from the consumer at a time."""
_NUMBER_BYTES: Final = 8
_PIPE_READ_BYTES: Final = 4096


class PartitionReader(Protocol):
    """What a consumer hands to the reader of one of its partitions, on any thread that uses the consumer."""

    def add_message(self, message: Message) -> None:
        """Take a message that has come through the consumer: a report, or a record that is astray."""

    def add_error(self, error: KafkaError) -> None:
        """Take an error of the client; it may be about another partition."""


class SharedConsumer:
    """A consumer, the readers of its partitions, and the thread that wakes them."""

    def __init__(self, consumer: Consumer, client: FetchClient) -> None:
        self.consumer = consumer
        self._client = client
        self._turn = threading.Lock()
        self._readers: dict[PartitionId, PartitionReader] = {}
        self._wakes: dict[int, Callable[[], None]] = {}
        """By the number that the client writes for a queue: its address."""
        self._pipe: tuple[int, int] | None = None
        client.on_errors(id(consumer), self._handle(), self)

    def _handle(self) -> int:
        handle = self._client.handle_at(id(self.consumer))
        if handle is None:
            raise InvariantError("the consumer is closed, or has its handle in another place")
        return handle

    def assign(self, at: PartitionId, offset: int, reader: PartitionReader) -> int:
        """Begin to fetch a partition, and return its queue, which belongs to the reader."""
        handle = self._handle()
        queue = self._client.queue_of(handle, at[0].encode(), at[1])
        if queue is None:
            raise StorageError(f"Kafka's client has no queue for partition {at[1]} of {at[0]}")
        self._client.forward(queue, None)
        self._readers[at] = reader
        self.consumer.incremental_assign([TopicPartition(*at, offset)])
        return int(queue)

    def unassign(self, at: PartitionId, queue: int) -> None:
        """Fetch the partition no more, and give back its queue."""
        if self._wakes.pop(queue, None) is not None:
            self._client.watch(queue, -1, None, 0)
        self._client.forget_queue(queue)
        if self._readers.pop(at, None) is not None and self._client.handle_at(id(self.consumer)) is not None:
            self.consumer.incremental_unassign([TopicPartition(*at)])

    def watch(self, queue: int, wake: Callable[[], None]) -> None:
        """Call `wake`, on a thread, whenever a record has been added to this queue while it was empty."""
        with self._turn:
            if self._pipe is None:
                self._pipe = os.pipe()
                os.set_blocking(self._pipe[1], False)  # if the pipe is full, there are wake-ups enough
                arguments = self._pipe[0], self._wakes
                threading.Thread(target=_wake_readers, args=arguments, name="kafka-rows", daemon=True).start()
        self._wakes[queue] = wake
        self._client.watch(queue, self._pipe[1], queue.to_bytes(_NUMBER_BYTES, "little"), _NUMBER_BYTES)

    def poll(self) -> None:
        """Hand what has come through the consumer to the readers of its partitions. Lets the client call its callbacks."""
        if not self._turn.acquire(blocking=False):
            return  # another thread does it
        try:
            messages = self.consumer.consume(_REPORTS_MAX, 0)
        finally:
            self._turn.release()
        for message in messages:
            topic, partition = message.topic(), message.partition()
            reader = None if topic is None or partition is None else self._readers.get((topic, partition))
            if reader is not None:
                reader.add_message(message)
            elif message.error() is not None and topic is None:
                for each in [*self._readers.values()]:
                    each.add_message(message)

    def handle_error(self, error: KafkaError) -> None:
        for reader in [*self._readers.values()]:
            reader.add_error(error)

    def close(self) -> None:
        """Close the consumer. Every partition must be unassigned, and every record given back."""
        self.consumer.close()
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            os.close(pipe[1])  # the thread closes the other end


def _wake_readers(pipe: int, wakes: dict[int, Callable[[], None]]) -> None:
    with os.fdopen(pipe, "rb", buffering=0) as numbers:
        # whole numbers: the client writes each at once, and a pipe does not part them
        while data := numbers.read(_PIPE_READ_BYTES):
            for at in {data[first : first + _NUMBER_BYTES] for first in range(0, len(data), _NUMBER_BYTES)}:
                wake = wakes.get(int.from_bytes(at, "little"))
                if wake is not None:
                    wake()


class SharedConsumers:
    """Opens the consumer of a source with its first partition, and closes it with its last. A copy shares nothing."""

    def __init__(self) -> None:
        self._turn = threading.RLock()  # a reader that is garbage closes on any thread, at any time
        self._shared: SharedConsumer | None = None
        self._users = 0

    def __reduce__(self) -> tuple[type[SharedConsumers], tuple[()]]:
        return SharedConsumers, ()

    def open(self, new_consumer: Callable[[], Consumer], client: FetchClient) -> SharedConsumer:
        with self._turn:
            if self._shared is None:
                self._shared = SharedConsumer(new_consumer(), client)
            self._users += 1
            return self._shared

    def close(self) -> None:
        """Give back what `open` has returned."""
        with self._turn:
            self._users -= 1
            if self._users:
                return
            shared, self._shared = self._shared, None
            assert shared is not None
            shared.close()
