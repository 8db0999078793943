"""The records that a consumer has fetched of one partition, as Python objects or straight from the client's memory.

Making a Python object for each record takes three times as long as parsing its JSON, and Python's garbage collector
visits all of them repeatedly. librdkafka has a call that fills an array with pointers to its records instead; numpy
follows the pointers, and Arrow copies all keys or values in one call, which takes a fifth of the time.

The call needs the client's handle. confluent-kafka has it as the first field of a consumer and does not expose it, so
the place is checked: librdkafka must confirm that the handle found there belongs to this very object. Records are read
as Python objects for headers, and where `fetch_probe` finds that reading from memory is not right.

The call takes only from the partition's queue, which is therefore no longer forwarded to the consumer's. So one consumer
can fetch many partitions (`shared_consumer`). Everything else still arrives through the consumer, whose callbacks only
work during calls that confluent-kafka itself makes. Of these, only errors also arrive through the partition's queue (the
topic was deleted, or is refused); so errors get another callback.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from midstream.connectors.common.malformed_records import BadRecord
from midstream.connectors.kafka.record_parser import METADATA, Records
from midstream.engine.core.arrow_types import nulls, repeat
from midstream.engine.core.errors import InvariantError, StorageError

if TYPE_CHECKING:
    from midstream.connectors.kafka.shared_consumer import SharedConsumers

Report: TypeAlias = "tuple[KafkaError, int | None]"
"""A report of a broker or the client other than records, and its offset."""
Words: TypeAlias = npt.NDArray[np.int64]
_AT_ONCE: Final = 4_096
"""The number of records that are released before Python may let another thread run."""
_ERR, _VALUE, _VALUE_BYTES, _KEY, _KEY_BYTES, _OFFSET = 0, 3, 4, 5, 6, 7
"""Indices of the fields in librdkafka's `rd_kafka_message_t`, as words of 8 bytes; the first field is an int of 4 bytes.

The struct is part of librdkafka's public interface.
"""
_WORDS: Final = 8
_INLINE_BYTES: Final = 12
"""Arrow stores a value of up to this length in the view itself."""
_WINDOW_BITS: Final = 30
"""A view reaches 2 GiB into its buffer: half of that is for the window, and the other half for a record at its end."""


class Fetched(Records, Protocol):
    """The records of one partition in their order. They must not be used after `close`."""

    def cut(self, stop: int) -> None:
        """Drop the records from offset `stop` on."""

    def close(self) -> None: ...


class Fetcher(Protocol):
    """Takes from a consumer what has arrived for one partition. `take` never waits, and closes the records of the call
    before it.
    """

    @property
    def consumer(self) -> Consumer: ...

    def on_rows(self, wake: Callable[[], None]) -> bool:
        """See `SplitReader.on_rows`."""

    def assign(self, offset: int) -> None: ...

    def take(self, records_max: int) -> tuple[Fetched, list[Report]]: ...

    def close(self) -> None:
        """Close the records that were taken last, and give back the consumer."""


# ---- as Python objects ----


class ObjectRecords:
    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages
        self._headers: list[list[dict[str, Any]] | str] | None = None
        """The headers of each record, or why they cannot be read. They are read once: after a failure the client keeps
        a list with null pointers in it, and would return that list at the second call.
        """

    def __len__(self) -> int:
        return len(self._messages)

    def offset(self, at: int) -> int:
        offset = self._messages[at].offset()
        assert offset is not None, "what comes of a partition has an offset"
        return offset

    def values(self) -> pa.Array[Any]:
        return pa.array([message.value() for message in self._messages], pa.large_binary())

    def metadata(self, what: str) -> pa.Array[Any]:
        kind = METADATA[what]
        if what == "timestamp":
            return pa.array([_known(*message.timestamp()) for message in self._messages], pa.int64()).cast(kind)
        if what == "headers":
            return pa.array([None if isinstance(found, str) else found for found in self._read_headers()], kind)
        return pa.array([getattr(message, what)() for message in self._messages], kind)

    def without_headers(self) -> Mapping[int, str]:
        return {at: found for at, found in enumerate(self._read_headers()) if isinstance(found, str)}

    def _read_headers(self) -> list[list[dict[str, Any]] | str]:
        if self._headers is None:
            self._headers = [_headers(message) for message in self._messages]
        return self._headers

    def bad(self, at: int, text: str) -> BadRecord:
        message = self._messages[at]
        topic = message.topic()
        assert topic is not None, "a record that was read has a topic"
        known_ms = _known(*message.timestamp())
        offset = self.offset(at)
        return BadRecord(at, topic, message.partition(), offset, message.value(), text, message.key(), known_ms)

    def cut(self, stop: int) -> None:
        self._messages = [message for at, message in enumerate(self._messages) if self.offset(at) < stop]
        self._headers = None

    def close(self) -> None:
        self._messages, self._headers = (), None


def _known(kind: int, ms: int) -> int | None:
    """Return the timestamp, None if the record has none."""
    return ms if kind else None


_call_headers: Final = methodcaller("headers")
"""Calls through the interpreter's check of results. For a name that is not UTF-8 the client returns a list with a null
pointer in it, with an exception set; the interpreter's own fast calls of methods do not check that, and it would crash.
"""


def _headers(message: Message) -> list[dict[str, Any]] | str:
    try:
        headers = _call_headers(message) or []
    except (SystemError, UnicodeDecodeError) as error:
        cause = error.__cause__ if isinstance(error, SystemError) else error
        if not isinstance(cause, UnicodeDecodeError):
            raise
        return f"the name of a header of the record is not UTF-8: {cause}"
    assert isinstance(headers, list), "only who sends gives a dict"
    return [{"name": name, "value": value} for name, value in headers]


class ObjectFetcher:
    """Has a consumer of its own."""

    def __init__(self, consumer: Consumer, topic: str, partition: int) -> None:
        self.consumer = consumer
        self._place = topic, partition

    def on_rows(self, wake: Callable[[], None]) -> bool:
        return False

    def assign(self, offset: int) -> None:
        self.consumer.assign([TopicPartition(*self._place, offset)])

    def take(self, records_max: int) -> tuple[Fetched, list[Report]]:
        messages = self.consumer.consume(records_max, 0)
        good = [message for message in messages if message.error() is None]
        return ObjectRecords(good), _reports(messages) if len(good) < len(messages) else []

    def close(self) -> None:
        self.consumer.close()


def _reports(messages: Sequence[Message]) -> list[Report]:
    return [(error, message.offset()) for message in messages if (error := message.error()) is not None]


# ---- from the client's memory ----


class FetchClient:
    """The calls of librdkafka that are needed. Raises OSError or AttributeError where they are not found."""

    def __init__(self, path: str) -> None:
        """`path`: that of a library that is linked to librdkafka."""
        free, held = ctypes.CDLL(path), ctypes.PyDLL(path)
        # Short calls hold Python's lock (PyDLL): releasing and taking it again would take longer than the call.
        pointer, text, number, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t
        self.version = _typed(held.rd_kafka_version, number)
        self.consume = _typed(free.rd_kafka_consume_batch_queue, ctypes.c_ssize_t, pointer, number, pointer, size)
        self.destroy = _typed(held.rd_kafka_message_destroy, None, pointer)
        self.errstr = _typed(held.rd_kafka_message_errstr, text, pointer)
        self.timestamp = _typed(held.rd_kafka_message_timestamp, ctypes.c_int64, pointer, pointer)
        self.queue_of = _typed(free.rd_kafka_queue_get_partition, pointer, pointer, text, ctypes.c_int32)
        self.forward = _typed(free.rd_kafka_queue_forward, None, pointer, pointer)
        self.watch = _typed(held.rd_kafka_queue_io_event_enable, None, pointer, number, text, size)
        self.forget_queue = _typed(free.rd_kafka_queue_destroy, None, pointer)
        self._owner = _typed(held.rd_kafka_opaque, pointer, pointer)
        self._settings = _typed(held.rd_kafka_conf, pointer, pointer)
        self._call_on_error = _typed(held.rd_kafka_conf_set_error_cb, None, pointer, _ON_ERROR)

    def handle_at(self, address: int) -> int | None:
        """Return the handle of the consumer at this address; None if it is not in its place, or the consumer is closed."""
        handle = ctypes.c_void_p.from_address(address + object.__basicsize__).value
        return handle if handle and handle % 8 == 0 and self._owner(handle) == address else None

    def on_errors(self, address: int, handle: int, handler: ErrorHandler) -> None:
        """Hand errors to `handler`, within any call of the client, from any place. `address`: that of the consumer."""
        _handlers[address] = handler
        self._call_on_error(self._settings(handle), _on_error)


def _typed(call: Any, returns: Any, *takes: Any) -> Any:
    call.restype, call.argtypes = returns, takes
    return call


class _MemoryRecords:
    def __init__(self, client: FetchClient, topic: str, partition: int, records_max: int) -> None:
        self._client = client
        self._topic = topic
        self._partition = partition
        self._pointers: Words = np.empty(records_max, np.int64)
        self._out = 0
        """The number of pointers that are still to be released."""
        self._good: Words = self._pointers[:0]
        """The pointers to records; the others are to reports."""
        self._words = self._at = self._good

    def take(self, queue: int) -> list[Report]:
        """Take what is in the queue; to be called once. From this call on the pointers are released by `close`, also if
        the call fails after they were taken.
        """
        self._out = self._client.consume(queue, 0, self._pointers.ctypes.data, len(self._pointers))
        if self._out < 0:
            raise StorageError("Kafka's client does not report what it has fetched")
        if not self._out:
            return []
        self._good = self._pointers[: self._out]
        self._words, self._at = _followed(self._good)
        errors = self._field(_ERR).astype(np.int32)
        if not errors.any():
            return []
        at = np.flatnonzero(errors)
        reports = [
            self._report(*one)
            for one in zip(self._good[at].tolist(), errors[at].tolist(), self._field(_OFFSET)[at].tolist(), strict=True)
        ]
        self._good, self._at = self._good[errors == 0], self._at[errors == 0]
        return reports

    def __len__(self) -> int:
        return len(self._at)

    def offset(self, at: int) -> int:
        return int(self._words[self._at[at] + _OFFSET])

    def values(self) -> pa.Array[Any]:
        return copied(self._field(_VALUE), self._field(_VALUE_BYTES))

    def metadata(self, what: str) -> pa.Array[Any]:
        kind, count = METADATA[what], len(self)
        if what == "timestamp":
            return pa.array(map(self._timestamp, range(count)), pa.int64(), size=count).cast(kind)
        if what == "key":
            return copied(self._field(_KEY), self._field(_KEY_BYTES))
        if what == "offset":
            return pa.array(self._field(_OFFSET), kind)
        return repeat(pa.scalar(self._topic if what == "topic" else self._partition, kind), count)

    def without_headers(self) -> Mapping[int, str]:
        raise InvariantError("headers are read from the client's Python objects")

    def bad(self, at: int, text: str) -> BadRecord:
        one = self._at[at : at + 1]
        value, key = (
            copied(self._words[one + start], self._words[one + size])[0].as_py()
            for start, size in ((_VALUE, _VALUE_BYTES), (_KEY, _KEY_BYTES))
        )
        return BadRecord(at, self._topic, self._partition, self.offset(at), value, text, key, self._timestamp(at))

    def cut(self, stop: int) -> None:
        self._at = self._at[: int(np.searchsorted(self._field(_OFFSET), stop))]

    def close(self) -> None:
        out, self._out = max(self._out, 0), 0
        self._at = self._at[:0]
        for first in range(0, out, _AT_ONCE):
            deque(map(self._client.destroy, self._pointers[first : min(first + _AT_ONCE, out)].tolist()), maxlen=0)

    def _field(self, word: int) -> Words:
        return self._words[self._at + word]

    def _timestamp(self, at: int) -> int | None:
        kind = ctypes.c_int()
        ms = self._client.timestamp(int(self._good[at]), ctypes.byref(kind))
        return _known(kind.value, ms)

    def _report(self, pointer: int, error: int, offset: int) -> Report:
        return _error(error, self._client.errstr(pointer)), offset if offset >= 0 else None


def _error(code: int, text: bytes | None) -> KafkaError:
    return KafkaError(code, (text or b"").decode(errors="replace"))


class MemoryFetcher:
    """Shares a consumer with the other partitions of its source."""

    def __init__(
        self,
        consumers: SharedConsumers,
        new_consumer: Callable[[], Consumer],
        client: FetchClient,
        topic: str,
        partition: int,
        report_error: Callable[[KafkaError], None],
    ) -> None:
        self._queue: int | None = None
        self._taken: Fetched = ObjectRecords(())
        self._messages: deque[Message] = deque()
        """What has come of the partition through the consumer."""
        self._errors: deque[KafkaError] = deque()
        """Errors of the consumer."""
        self._wake: Callable[[], None] | None = None
        self._client = client
        self._place = topic, partition
        self._is_astray = False
        """Records arrived through the consumer, and none through the partition's queue since."""
        self._report_error = report_error
        self._consumers: SharedConsumers | None = None
        self._shared = consumers.open(new_consumer, client)
        self._consumers = consumers

    @property
    def consumer(self) -> Consumer:
        return self._shared.consumer

    def on_rows(self, wake: Callable[[], None]) -> bool:
        self._wake = wake
        if self._queue is not None:
            self._shared.watch(self._queue, wake)
        return True

    def assign(self, offset: int) -> None:
        self._unassign()  # a topic that was recreated has a new queue
        if self._consumers is None:
            raise InvariantError("the consumer was given back")
        self._queue = self._shared.assign(self._place, offset, self)
        if self._wake is not None:
            self._shared.watch(self._queue, self._wake)
            self._wake()  # records may have come before

    def take(self, records_max: int) -> tuple[Fetched, list[Report]]:
        if self._queue is None:
            raise InvariantError("nothing is assigned to the consumer any more, or yet")
        self._taken.close()
        self._shared.poll()
        while self._errors:
            self._report_error(self._errors.popleft())
        messages = [self._messages.popleft() for _ in range(len(self._messages))]
        reports = _reports(messages)
        if len(reports) < len(messages):
            return self._find_back(messages)
        taken = self._taken = _MemoryRecords(self._client, *self._place, records_max)
        reports += taken.take(self._queue)
        if len(taken):
            self._is_astray = False
        return taken, reports

    def _find_back(self, messages: Sequence[Message]) -> tuple[Fetched, list[Report]]:
        """The partition has got another queue, which is forwarded to the consumer: assign it again from the first of
        these records.

        Reports after that record will come again.
        """
        if self._is_astray:
            raise InvariantError("records came through the consumer, and not through the queue of their partition")
        before = [*takewhile(lambda message: message.error() is not None, messages)]
        offset = messages[len(before)].offset()
        assert offset is not None, "what comes of a partition has an offset"
        self.assign(offset)
        self._is_astray = True
        return ObjectRecords(()), _reports(before)

    def add_message(self, message: Message) -> None:
        self._messages.append(message)

    def add_error(self, error: KafkaError) -> None:
        self._errors.append(error)

    def _unassign(self) -> None:
        self._taken.close()  # closing a client waits for all records that it has given out
        queue, self._queue = self._queue, None
        if queue is not None:
            self._shared.unassign(self._place, queue)
        self._messages.clear()

    def close(self) -> None:
        self._unassign()
        consumers, self._consumers = self._consumers, None
        if consumers is not None:
            consumers.close()

    __del__ = close
    """For a reader that was not closed: its consumer would wait indefinitely for the records that are out."""


class ErrorHandler(Protocol):
    def handle_error(self, error: KafkaError) -> None: ...


_handlers: WeakValueDictionary[int, ErrorHandler] = WeakValueDictionary()
"""By the address of their consumer."""
_ON_ERROR: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


def _on_client_error(handle: int, code: int, text: bytes | None, owner: int) -> None:
    """The callback for errors; confluent-kafka's own would abort the process outside of the calls that it makes itself."""
    handler = _handlers.get(owner)
    if handler is not None:
        handler.handle_error(_error(code, text))


_on_error = _ON_ERROR(_on_client_error)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_on_error))  # consumers may outlive this module when Python ends


def _memory(start: int, count: int) -> npt.NDArray[np.uint8]:
    buffer: Any = pa.foreign_buffer(start, count)
    return np.frombuffer(buffer, np.uint8)


def _followed(pointers: Words) -> tuple[Words, Words]:
    """Return memory as words, and the index of the first word at each pointer. The memory in between must not be read."""
    base = int(pointers.min())
    words = _memory(base, int(pointers.max()) - base + 8 * _WORDS).view(np.int64)
    return words, (pointers - base) >> 3


def copied(starts: Words, sizes: Words, *, window_bits: int = _WINDOW_BITS) -> pa.Array[Any]:
    """Return the bytes at these addresses as large_binary; null for an address of 0.

    Arrow copies them from views into the client's memory. A view has an offset of 32 bits into a buffer. `window_bits`:
    if that does not reach all of the memory, there are several buffers, which begin 2**window_bits bytes apart.
    """
    is_there = starts != 0
    count, there = len(starts), int(np.count_nonzero(is_there))
    if not there:
        return nulls(count, pa.large_binary())
    if there < count:
        sizes = np.where(is_there, sizes, 0)
        starts = np.where(is_there, starts, starts[is_there][0])
    base = int(starts.min())
    at = starts - base
    ends = at + sizes
    memory: npt.NDArray[np.uint8] = _memory(base, int(ends.max()))
    views = np.empty((count, 2), np.int64)
    views[:, 0] = sizes
    if len(memory) >> (window_bits + 1):
        windows, number = np.unique(at >> window_bits, return_inverse=True)
        lows = windows << window_bits
        buffers = [memory[low : ends[number == n].max()] for n, low in enumerate(lows.tolist())]
        views[:, 1] = number | (at - lows[number]) << 32
    else:
        buffers = [memory]
        views[:, 1] = at << 32
    short = np.flatnonzero(sizes <= _INLINE_BYTES)
    if len(short):
        inline = np.zeros((len(short), _INLINE_BYTES), np.uint8)
        for byte in range(_INLINE_BYTES):
            has = sizes[short] > byte
            inline[has, byte] = memory[at[short[has]] + byte]
        views.view(np.uint8)[short, -_INLINE_BYTES:] = inline
    validity = None if there == count else np.packbits(is_there, bitorder="little")
    parts: list[Any] = [validity, views, *buffers]
    made = [None if part is None else pa.py_buffer(part) for part in parts]
    return pa.Array.from_buffers(pa.binary_view(), count, made, count - there).cast(pa.large_binary())
