"""A producer of one transactional id, whose calls end when the attempt ends, and the check that a sink may use one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from midstream.connectors.kafka.client import (
    ANSWER_S,
    BrokerSilence,
    ClientConfig,
    convert_errors,
    convert_option_errors,
    send_all,
)
from midstream.connectors.kafka.cluster import PartitionId
from midstream.connectors.kafka.staged_records import StagedRecords, read_staged, records_of
from midstream.engine.core.errors import ConfigError, StorageError
from midstream.engine.core.interfaces import Signal, Storage

_STEP_S: Final = 0.2
"""The interval at which a wait for brokers checks whether the attempt has ended."""
_TIMEOUT_MIN_MS: Final = 60_000
_TIMEOUT_MAX_MS: Final = 900_000
"""The default of the brokers' `transaction.max.timeout.ms`."""
_ROWS_PER_S_MIN: Final = 5_000
"""A transaction may take as long as this rate requires."""
TIMEOUT: Final = "transaction.timeout.ms"


def marker_partition(topic: str) -> PartitionId:
    """Return where the marker is, among the offsets of its group: partition 0 exists in every topic."""
    return topic, 0


class StagedRowsError(StorageError):
    """Staged rows cannot be read: the files are missing or damaged, or another process has committed them in the
    meantime.
    """


class TransactionalProducer:
    """A producer of one transactional id, used until its first failure. Every call may raise KafkaException.

    Blocks in short steps; raises StorageError once `stopped` is set. `options`: the sink's options for its producers.
    `what_for`: see `BrokerSilence`.
    """

    def __init__(
        self,
        connection: ClientConfig,
        options: Mapping[str, Any],
        transactional_id: str,
        timeout_ms: int,
        stopped: Signal,
        where: str,
        what_for: str = "",
    ) -> None:
        self.timeout_ms = timeout_ms
        self._stopped = stopped
        self._where = where
        self._connection = connection
        self._id = transactional_id
        self._silence = BrokerSilence(where, connection.servers, what_for=what_for)
        self._refused: KafkaError | None = None
        self._is_cut = False
        self._is_stuck = False
        """A call has not returned; its thread closes the producer when it does."""
        ours = {
            "transactional.id": transactional_id,
            TIMEOUT: timeout_ms,
            "allow.auto.create.topics": False,  # a query about a topic must not create it
            "delivery.report.only.error": True,
            "error_cb": self._on_error,
            "on_delivery": self._delivered,
        }
        with convert_option_errors(where):
            self._producer: Producer = Producer({**options, **connection.config(ours)})
        self._group: Any = None

    def fence(self, topic: str) -> None:
        """End any open transaction of the id; afterwards only this producer can begin one."""
        # The first answer comes on a connection that the client then gives up, the second on one that stays. Without
        # one it would look for the coordinator, find no connected broker, and try again half a second later.
        for _ in range(2):
            self._call_on_thread(self._producer.list_topics, topic)
        self._call_on_thread(self._producer.init_transactions)

    def marker(self, topic: str) -> int | None:
        """Return the committed offset of the marker; None if it has none."""
        with closing(self._group_consumer()) as consumer:
            (found,) = consumer.committed([TopicPartition(*marker_partition(topic))], timeout=ANSWER_S)
        if found.error is not None:
            raise KafkaException(found.error)
        self._silence.polled(True)
        return int(found.offset) if found.offset >= 0 else None

    def begin(self) -> None:
        self._refused, self._is_cut = None, False
        self._producer.begin_transaction()

    def produce(self, storage: Storage, staged: StagedRecords) -> None:
        rows = 0
        for file in staged.files:
            try:
                batches = read_staged(storage, file)
            except StorageError as error:
                raise StagedRowsError(
                    f"{self._where}: its {staged.rows} rows are not in topic {staged.topic!r} yet, and their staged "
                    f"files cannot be read: {error}. Only a commit deletes such files. If the checkpoint was copied "
                    "from another directory before everything was committed, resume in that directory, and stop the "
                    "job with a savepoint to move it"
                ) from error
            for batch in batches:
                rows += batch.num_rows
                send_all(self._producer, staged.topic, records_of(batch), partial(self._wait, self._producer.poll))
                self._check()
        if rows != staged.rows:
            raise StorageError(f"{self._where}: the staged files have {rows} rows instead of {staged.rows}")
        while len(self._producer):
            self._wait(self._producer.flush)
        self._check()
        if self._is_cut:  # it could continue, but the next calls may hang
            raise KafkaException(KafkaError(KafkaError._ALL_BROKERS_DOWN, "brokers went away in the middle of it"))

    def mark(self, topic: str, checkpoint_id: int) -> None:
        marker = TopicPartition(*marker_partition(topic), checkpoint_id)
        if self._group is None:
            with closing(self._group_consumer()) as consumer:
                self._group = consumer.consumer_group_metadata()
        self._call_on_thread(self._producer.send_offsets_to_transaction, [marker], self._group)

    def commit(self) -> None:
        self._call_on_thread(self._producer.commit_transaction)

    def abort(self) -> None:
        self._call_on_thread(self._producer.abort_transaction)

    def close(self) -> None:
        """Close without waiting. An open transaction is aborted by the next producer of the id, or by the brokers in
        time.
        """
        self._silence.close()
        if not self._is_stuck:
            self._producer.purge()
            self._producer.flush(0)

    def _group_consumer(self) -> Consumer:
        """Return a consumer of the marker's group, by name only: it joins nothing."""
        ours = {"group.id": self._id, "enable.auto.commit": False, "error_cb": self._silence.on_error}
        with convert_option_errors(self._where):
            return Consumer(self._connection.admin_config(ours))

    def _wait(self, step: Callable[[float], object]) -> None:
        before = len(self._producer)
        step(_STEP_S)
        self._check()  # abandoned records leave the queue as sent ones do
        self._silence.polled(len(self._producer) < before)
        self._check_stopped()

    def _call_on_thread(self, call: Callable[..., object], *args: Any) -> None:
        """Call on a separate thread: librdkafka's calls may hang if brokers go away in the middle of a transaction."""
        deadline_s = time.monotonic() + ANSWER_S
        while True:
            answer = _CallResult()
            threading.Thread(target=answer.run, args=(call, *args, ANSWER_S), name="kafka-commit", daemon=True).start()
            while not answer.is_there.wait(_STEP_S):
                self._silence.polled(False)
                self._is_stuck = True  # until it has answered: no other call of this producer is allowed
                self._check_stopped()
                if time.monotonic() > deadline_s:
                    raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"no answer within {ANSWER_S:g} s"))
            self._is_stuck = False
            if answer.error is None:
                self._silence.polled(True)
                return
            is_over = not isinstance(answer.error, KafkaException) or not answer.error.args[0].retriable()
            if is_over or time.monotonic() > deadline_s:
                raise answer.error
            self._silence.polled(False)
            self._check_stopped()
            self._stopped.wait(_STEP_S)

    def _on_error(self, error: KafkaError) -> None:
        self._is_cut = self._is_cut or error.code() == KafkaError._ALL_BROKERS_DOWN
        self._silence.on_error(error)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        """Note a record that was not delivered; called from within `poll`, `flush` and the calls that end a
        transaction.
        """
        if error is not None and self._refused is None:
            self._refused = error

    def _check(self) -> None:
        if self._refused is not None:
            raise KafkaException(self._refused)

    def _check_stopped(self) -> None:
        if self._stopped.is_set():
            raise StorageError(f"{self._where}: the attempt ended before the commit was done")


class _CallResult:
    """The result of a call on another thread."""

    def __init__(self) -> None:
        self.is_there = threading.Event()
        self.error: BaseException | None = None

    def run(self, call: Callable[..., object], *args: Any) -> None:
        try:
            call(*args)
        except BaseException as error:  # noqa: BLE001 - it is raised on the calling thread
            self.error = error
        self.is_there.set()


def transaction_timeout_ms(connection: ClientConfig, rows: int) -> int:
    """Return the user's timeout, or a short one that suffices for these rows: an abandoned transaction blocks readers."""
    value = connection.option(TIMEOUT)
    if value is not None:
        try:
            return int(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise ConfigError(
                f"KafkaSink: option {TIMEOUT!r} is {value!r}, which is not a number of milliseconds"
            ) from None
    return min(_TIMEOUT_MAX_MS, max(_TIMEOUT_MIN_MS, rows * 1000 // _ROWS_PER_S_MIN))


def check_transactions(
    connection: ClientConfig, options: Mapping[str, Any], topic: str, check_id: str, where: str
) -> None:
    """Try everything a commit needs except writing rows. Raises ConfigError or StorageError.

    No row and no offset remains. Brokers remember the transactional id, and the group of its name, until they expire
    (`transactional.id.expiration.ms` and `offsets.retention.minutes`, a week by default).
    """
    producer = TransactionalProducer(
        connection, options, check_id, transaction_timeout_ms(connection, 0), threading.Event(), where
    )
    with convert_errors(where), closing(producer):
        producer.fence(topic)
        producer.begin()
        producer.mark(topic, 0)  # reports which right is missing, where reading the marker would only wait
        producer.abort()
        producer.marker(topic)
