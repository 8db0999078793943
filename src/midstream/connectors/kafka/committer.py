"""Commits staged rows to their topic, one transaction per subtask and checkpoint; carries out what `LaneCommit`
decides.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from midstream.connectors.common.external_waits import ExternalWait
from midstream.connectors.kafka.client import (
    ANSWER_S,
    BrokerSilence,
    ClientConfig,
    explained,
    is_for_the_user,
    made,
    send_all,
)
from midstream.connectors.kafka.cluster import PartitionId
from midstream.connectors.kafka.commit_protocol import CommitStep, LaneCommit, LaneState
from midstream.connectors.kafka.staged_records import (
    Leftovers,
    StagedRecords,
    decode,
    delete_staged,
    note,
    noted,
    read_staged,
    records_of,
)
from midstream.engine.core.errors import ConfigError, InvariantError, StorageError
from midstream.engine.core.interfaces import Signal, Storage
from midstream.engine.operators.sink_api import Committer, CommitterContext

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message, Producer

PATIENCE_S: Final = 120.0
"""The time for which one call retries while brokers fail it. The coordinator calls again; the rows wait."""
_PAUSE_MIN_S: Final = 0.1
_PAUSE_MAX_S: Final = 5.0
_STEP_S: Final = 0.2
"""The interval at which a wait for brokers checks whether the attempt has ended."""
_TIMEOUT_MIN_MS: Final = 60_000
_TIMEOUT_MAX_MS: Final = 900_000
"""The default of the brokers' `transaction.max.timeout.ms`."""
_ROWS_PER_S_MIN: Final = 5_000
"""A transaction may take as long as this rate requires."""
TIMEOUT: Final = "transaction.timeout.ms"
NO_OFFSET: Final = "docs/guide/kafka.md, 'a marker that is gone'"


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
        from confluent_kafka import Producer

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
        with made(where):
            self._producer: Producer = Producer({**options, **connection.config(ours)})
        self._group: Any = None

    def fence(self, topic: str) -> None:
        """End any open transaction of the id; afterwards only this producer can begin one."""
        # The first answer comes on a connection that the client then gives up, the second on one that stays. Without
        # one it would look for the coordinator, find no connected broker, and try again half a second later.
        for _ in range(2):
            self._called(self._producer.list_topics, topic)
        self._called(self._producer.init_transactions)

    def marker(self, topic: str) -> int | None:
        """Return the committed offset of the marker; None if it has none."""
        from confluent_kafka import KafkaException, TopicPartition

        with closing(self._member()) as consumer:
            (found,) = consumer.committed([TopicPartition(*marker_partition(topic))], timeout=ANSWER_S)
        if found.error is not None:
            raise KafkaException(found.error)
        self._silence.polled(True)
        return int(found.offset) if found.offset >= 0 else None

    def begin(self) -> None:
        self._refused, self._is_cut = None, False
        self._producer.begin_transaction()

    def produce(self, storage: Storage, staged: StagedRecords) -> None:
        from confluent_kafka import KafkaError, KafkaException

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
        from confluent_kafka import TopicPartition

        marker = TopicPartition(*marker_partition(topic), checkpoint_id)
        if self._group is None:
            with closing(self._member()) as consumer:
                self._group = consumer.consumer_group_metadata()
        self._called(self._producer.send_offsets_to_transaction, [marker], self._group)

    def commit(self) -> None:
        self._called(self._producer.commit_transaction)

    def abort(self) -> None:
        self._called(self._producer.abort_transaction)

    def close(self) -> None:
        """Close without waiting. An open transaction is aborted by the next producer of the id, or by the brokers in
        time.
        """
        self._silence.close()
        if not self._is_stuck:
            self._producer.purge()
            self._producer.flush(0)

    def _member(self) -> Consumer:
        """Return a consumer of the marker's group, by name only: it joins nothing."""
        from confluent_kafka import Consumer

        ours = {"group.id": self._id, "enable.auto.commit": False, "error_cb": self._silence.on_error}
        with made(self._where):
            return Consumer(self._connection.admin_config(ours))

    def _wait(self, step: Callable[[float], object]) -> None:
        before = len(self._producer)
        step(_STEP_S)
        self._check()  # abandoned records leave the queue as sent ones do
        self._silence.polled(len(self._producer) < before)
        self._check_stopped()

    def _called(self, call: Callable[..., object], *args: Any) -> None:
        """Call on a separate thread: librdkafka's calls may hang if brokers go away in the middle of a transaction."""
        from confluent_kafka import KafkaError, KafkaException

        deadline_s = time.monotonic() + ANSWER_S
        while True:
            answer = _CallResult()
            threading.Thread(target=answer.of, args=(call, *args, ANSWER_S), name="kafka-commit", daemon=True).start()
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
        from confluent_kafka import KafkaError as Codes

        self._is_cut = self._is_cut or error.code() == Codes._ALL_BROKERS_DOWN
        self._silence.on_error(error)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        """Note a record that was not delivered; called from within `poll`, `flush` and the calls that end a
        transaction.
        """
        if error is not None and self._refused is None:
            self._refused = error

    def _check(self) -> None:
        from confluent_kafka import KafkaException

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

    def of(self, call: Callable[..., object], *args: Any) -> None:
        try:
            call(*args)
        except BaseException as error:  # noqa: BLE001 - it is raised on the calling thread
            self.error = error
        self.is_there.set()


class KafkaCommitter(Committer):
    """Commits with transactional producers. `options`: the sink's for its producers; those of `connection` override
    them.
    """

    def __init__(
        self, connection: ClientConfig, options: Mapping[str, Any], context: CommitterContext, where: str
    ) -> None:
        self._connection = connection
        self._options = options
        self._context = context
        self._where = where
        self._states: defaultdict[str, LaneState] = defaultdict(LaneState)
        self._producers: dict[str, TransactionalProducer] = {}
        self._swept: tuple[str, int] | None = None
        """The newest attempt of which something was committed: nothing of older ones is left."""

    @property
    def _storage(self) -> Storage:
        if self._context.storage is None:
            raise InvariantError(f"{self._where}: there are rows to commit, but no checkpoint storage")
        return self._context.storage

    def commit(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        found = [decode(committable) for committable in committables]
        if len({staged.transactional_id for staged in found}) < len(found):
            raise InvariantError(
                f"{self._where}: a subtask has staged rows for checkpoint {checkpoint_id} twice; one marker cannot distinguish them"
            )
        for staged in found:
            if staged.checkpoint != checkpoint_id:
                raise StorageError(
                    f"{self._where}: rows staged for checkpoint {staged.checkpoint} are to be committed as checkpoint "
                    f"{checkpoint_id}; the checkpoint is corrupt or forged"
                )
            self._commit(staged)
            if staged.job != self._context.job_id:
                self._forget(staged.transactional_id)  # the job before this one: its lanes are never used again

    def abort(self, committables: Sequence[bytes]) -> None:
        delete_staged(self._storage, map(decode, committables))

    def close(self) -> None:
        for transactional_id in list(self._producers):
            self._forget(transactional_id)

    def _commit(self, staged: StagedRecords) -> None:
        lane = _LaneTransaction(self, staged)
        leftovers = None
        if staged.job == self._context.job_id and self._swept != (staged.job, staged.attempt):
            leftovers = Leftovers.of(self._storage, staged)
        if lane.run() and leftovers is not None:
            leftovers.delete(self._storage)
            self._swept = staged.job, staged.attempt

    def _forget(self, transactional_id: str) -> None:
        producer = self._producers.pop(transactional_id, None)
        if producer is not None:
            producer.close()
        self._states.pop(transactional_id, None)


class _LaneTransaction:
    """One commit of what one subtask has staged for one checkpoint."""

    def __init__(self, committer: KafkaCommitter, staged: StagedRecords) -> None:
        self._committer = committer
        self._staged = staged
        self._id = staged.transactional_id
        self._where = f"{committer._where}: cannot commit checkpoint {staged.checkpoint} of subtask {staged.subtask}"
        self._commit = LaneCommit(committer._states[self._id], staged.checkpoint, staged.after)
        self._what_for = f"of topic {staged.topic!r}, to commit rows"
        self._began_s = 0.0

    def run(self) -> bool:
        """Commit, and return whether a transaction of this call did it. Raises ConfigError for what only the user can
        fix.
        """
        with ExternalWait() as wait:
            return self._run(wait)

    def _run(self, wait: ExternalWait) -> bool:
        from confluent_kafka import KafkaException

        commit, stopped = self._commit, self._committer._context.stopped
        failing_since_s, pause_s, is_unreadable = 0.0, _PAUSE_MIN_S, False
        while not commit.is_over:
            try:
                commit.succeeded(self._do(commit.step))
            except KafkaException as error:
                if is_for_the_user(error.args[0]):
                    self._committer._forget(self._id)
                    with explained(self._where):
                        raise
                commit.failed()
                now_s = time.monotonic()
                failing_since_s = failing_since_s or now_s
                wait.begin(f"brokers {self._committer._connection.servers} {self._what_for}")
                if now_s - failing_since_s > PATIENCE_S or stopped.wait(pause_s):
                    raise self._kept(error) from error
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)
            except StagedRowsError:
                if is_unreadable:
                    self._committer._forget(self._id)
                    raise
                is_unreadable = True
                commit.failed()  # the marker shows whether another process has committed it
            except BaseException:
                if commit.step is not CommitStep.LOOK_UP:
                    self._committer._forget(self._id)  # its open transaction is aborted after the next fence
                raise
        if commit.step is CommitStep.LOST:
            self._committer._forget(self._id)
            raise self._lost()
        if commit.step is CommitStep.TOO_EARLY:
            raise InvariantError(
                f"{self._where}: its rows for checkpoint {self._staged.after} are not in topic {self._staged.topic!r} yet, and "
                f"the marker of group {self._id!r} says {commit.lane.marker}"
            )
        return commit.was_ours

    def _do(self, step: CommitStep) -> int | None:
        staged, storage = self._staged, self._committer._storage
        match step:
            case CommitStep.LOOK_UP:
                return noted(storage, staged)
            case CommitStep.FENCE:
                self._renewed().fence(staged.topic)
            case CommitStep.READ:
                return self._producer.marker(staged.topic)
            case CommitStep.BEGIN:
                self._began_s = time.monotonic()
                self._producer.begin()
            case CommitStep.PRODUCE:
                self._producer.produce(storage, staged)
            case CommitStep.MARK:
                self._producer.mark(staged.topic, staged.checkpoint)
            case CommitStep.COMMIT:
                self._producer.commit()
            case CommitStep.NOTE:
                note(storage, staged)
            case CommitStep.CLEAN:
                delete_staged(storage, [staged])
            case _:
                raise InvariantError(f"{step} requires no action")
        return None

    @property
    def _producer(self) -> TransactionalProducer:
        return self._committer._producers[self._id]

    def _renewed(self) -> TransactionalProducer:
        committer = self._committer
        old = committer._producers.pop(self._id, None)
        if old is not None:
            old.close()
        timeout_ms = transaction_timeout_ms(committer._connection, self._staged.rows)
        committer._producers[self._id] = new = TransactionalProducer(
            committer._connection,
            committer._options,
            self._id,
            timeout_ms,
            committer._context.stopped,
            committer._where,
            self._what_for,
        )
        return new

    def _kept(self, error: Any) -> StorageError:
        took_ms = (time.monotonic() - self._began_s) * 1000
        slow = ""
        if self._began_s and took_ms > self._producer.timeout_ms:
            slow = f"; sending {self._staged.rows} rows may take longer than {TIMEOUT}={self._producer.timeout_ms}: raise it"
        return StorageError(
            f"{self._where}: {error.args[0].str()}{slow}. Its {self._staged.rows} rows wait in the checkpoint, and are "
            "committed when the brokers answer"
        )

    def _lost(self) -> StorageError:
        staged = self._staged
        return StorageError(
            f"{self._where}: the brokers have forgotten up to which checkpoint its rows are in topic {staged.topic!r} (group "
            f"{self._id!r} has no offset of partition 0), so it cannot be determined whether the {staged.rows} rows "
            f"of checkpoint {staged.checkpoint} are there. Possible causes: the job was down for longer than the brokers' "
            "offsets.retention.minutes, the topic was created again, or the sink now writes to another cluster. The rows are "
            f"kept. Check whether the topic has them; commit offset {staged.checkpoint} for that group if it does, or "
            f"{staged.after} if it does not ({NO_OFFSET}), and start the job with --from latest"
        )


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
    with explained(where), closing(producer):
        producer.fence(topic)
        producer.begin()
        producer.mark(topic, 0)  # reports which right is missing, where reading the marker would only wait
        producer.abort()
        producer.marker(topic)
