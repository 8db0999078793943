"""Commits staged rows to their topic, one transaction per subtask and checkpoint; carries out what `MarkedCommit`
decides.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from confluent_kafka import KafkaException

from midstream.connectors.common.external_waits import ExternalWait
from midstream.connectors.kafka.client import ClientConfig, convert_errors, is_for_the_user
from midstream.connectors.kafka.commit_protocol import CommitStep, KnownMarker, MarkedCommit
from midstream.connectors.kafka.staged_records import (
    Leftovers,
    StagedRecords,
    decode,
    delete_staged,
    record_committed,
    recorded_checkpoint,
)
from midstream.connectors.kafka.transactional_producer import (
    TIMEOUT,
    StagedRowsError,
    TransactionalProducer,
    transaction_timeout_ms,
)
from midstream.engine.core.errors import InvariantError, StorageError
from midstream.engine.core.interfaces import Storage
from midstream.engine.operators.sink_api import Committer, CommitterContext

PATIENCE_S: Final = 120.0
"""The time for which one call retries while brokers fail it. The coordinator calls again; the rows wait."""
_PAUSE_MIN_S: Final = 0.1
_PAUSE_MAX_S: Final = 5.0
NO_OFFSET: Final = "docs/guide/kafka.md, 'a marker that is gone'"


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
        self._states: defaultdict[str, KnownMarker] = defaultdict(KnownMarker)
        self._producers: dict[str, TransactionalProducer] = {}
        self._cleaned_attempt: tuple[str, int] | None = None
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
                self._forget(
                    staged.transactional_id
                )  # the job before this one: its transactional ids are never used again

    def abort(self, committables: Sequence[bytes]) -> None:
        delete_staged(self._storage, map(decode, committables))

    def close(self) -> None:
        for transactional_id in list(self._producers):
            self._forget(transactional_id)

    def _commit(self, staged: StagedRecords) -> None:
        run = _CommitRun(self, staged)
        leftovers = None
        if staged.job == self._context.job_id and self._cleaned_attempt != (staged.job, staged.attempt):
            leftovers = Leftovers.of(self._storage, staged)
        if run.run() and leftovers is not None:
            leftovers.delete(self._storage)
            self._cleaned_attempt = staged.job, staged.attempt

    def _forget(self, transactional_id: str) -> None:
        producer = self._producers.pop(transactional_id, None)
        if producer is not None:
            producer.close()
        self._states.pop(transactional_id, None)


class _CommitRun:
    """One commit of what one subtask has staged for one checkpoint."""

    def __init__(self, committer: KafkaCommitter, staged: StagedRecords) -> None:
        self._committer = committer
        self._staged = staged
        self._id = staged.transactional_id
        self._where = f"{committer._where}: cannot commit checkpoint {staged.checkpoint} of subtask {staged.subtask}"
        self._commit = MarkedCommit(committer._states[self._id], staged.checkpoint, staged.after)
        self._what_for = f"of topic {staged.topic!r}, to commit rows"
        self._began_s = 0.0

    def run(self) -> bool:
        """Commit, and return whether a transaction of this call did it. Raises ConfigError for what only the user can
        fix.
        """
        with ExternalWait() as wait:
            return self._run(wait)

    def _run(self, wait: ExternalWait) -> bool:
        commit, stopped = self._commit, self._committer._context.stopped
        failing_since_s, pause_s, is_unreadable = 0.0, _PAUSE_MIN_S, False
        while not commit.is_over:
            try:
                commit.succeeded(self._do(commit.step))
            except KafkaException as error:
                if is_for_the_user(error.args[0]):
                    self._committer._forget(self._id)
                    with convert_errors(self._where):
                        raise
                commit.failed()
                now_s = time.monotonic()
                failing_since_s = failing_since_s or now_s
                wait.begin(f"brokers {self._committer._connection.servers} {self._what_for}")
                if now_s - failing_since_s > PATIENCE_S or stopped.wait(pause_s):
                    raise self._not_committed_error(error) from error
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
        if commit.step is CommitStep.MARKER_MISSING:
            self._committer._forget(self._id)
            raise self._marker_missing_error()
        if commit.step is CommitStep.TOO_EARLY:
            raise InvariantError(
                f"{self._where}: its rows for checkpoint {self._staged.after} are not in topic {self._staged.topic!r} yet, and "
                f"the marker of group {self._id!r} says {commit.known.marker}"
            )
        return commit.was_ours

    def _do(self, step: CommitStep) -> int | None:
        staged, storage = self._staged, self._committer._storage
        match step:
            case CommitStep.LOOK_UP:
                return recorded_checkpoint(storage, staged)
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
            case CommitStep.RECORD:
                record_committed(storage, staged)
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

    def _not_committed_error(self, error: Any) -> StorageError:
        took_ms = (time.monotonic() - self._began_s) * 1000
        slow = ""
        if self._began_s and took_ms > self._producer.timeout_ms:
            slow = f"; sending {self._staged.rows} rows may take longer than {TIMEOUT}={self._producer.timeout_ms}: raise it"
        return StorageError(
            f"{self._where}: {error.args[0].str()}{slow}. Its {self._staged.rows} rows wait in the checkpoint, and are "
            "committed when the brokers answer"
        )

    def _marker_missing_error(self) -> StorageError:
        staged = self._staged
        return StorageError(
            f"{self._where}: the brokers have forgotten up to which checkpoint its rows are in topic {staged.topic!r} (group "
            f"{self._id!r} has no offset of partition 0), so it cannot be determined whether the {staged.rows} rows "
            f"of checkpoint {staged.checkpoint} are there. Possible causes: the job was down for longer than the brokers' "
            "offsets.retention.minutes, the topic was created again, or the sink now writes to another cluster. The rows are "
            f"kept. Check whether the topic has them; commit offset {staged.checkpoint} for that group if it does, or "
            f"{staged.after} if it does not ({NO_OFFSET}), and start the job with --from latest"
        )
