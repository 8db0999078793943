"""The snapshots of one task, from when they are taken until the outcome of their checkpoints is known.

    taken --> stored --> acknowledged --> outcome known
      \\--> declined

A snapshot is stored when both its operators' state and its rows in flight are on storage; if one of them cannot be
written it is declined, and what its sinks prepared is reported with the next one.

Invariants: acknowledgements are sent in the order of the checkpoints, because each one reports what the sinks prepared
for the checkpoints before it. A snapshot refers only to chunks of a *completed* checkpoint, because the files of any
other checkpoint may be deleted at any time.

If a sink cannot make its rows durable, the task fails, because these rows would be lost. If a state file cannot be
written, only the checkpoint fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from midstream.engine.checkpoint.state_files import state_file, store_parts
from midstream.engine.core.errors import InvariantError, StorageError
from midstream.engine.core.ids import TaskId
from midstream.engine.core.interfaces import Done, Failed, Storage
from midstream.engine.operators.base import Snapshot
from midstream.engine.protocol import messages as m
from midstream.engine.protocol.task_metrics import TaskMetrics
from midstream.engine.worker.interfaces import TaskServices


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """The snapshot of a task's operators, in files or ready for the checkpoint's metadata."""

    parts: tuple[tuple[str, tuple[m.PartHandle, ...]], ...]
    """The state parts by operator uid, in the order of the chain."""
    committables: tuple[tuple[str, tuple[bytes, ...]], ...]
    """The committables by operator uid, without the operators that have prepared none."""
    chunks: dict[str, m.ChunkHandle]
    """The handle of every chunk of this snapshot that is in a file, by the chunk's id. Once this snapshot's checkpoint
    has completed, the next snapshot refers to these."""
    files: tuple[str, ...] = ()
    state_bytes: int = 0
    error: Exception | None = None
    """The reason why the state file could not be written, if it could not."""


def store_snapshot(
    storage: Storage,
    uids: Sequence[str],
    snapshots: Sequence[Snapshot],
    known: Mapping[str, m.ChunkHandle],
    file: str,
    inline_bytes_max: int,
) -> StoredSnapshot:
    """Complete and store a snapshot. It runs on the I/O pool, once.

    Raises any exception that an operator's `later` raises.
    """
    results = [snapshot.complete() for snapshot in snapshots]
    committables = tuple(
        (uid, result.committables) for uid, result in zip(uids, results, strict=True) if result.committables
    )
    try:
        stored = store_parts(storage, [result.parts for result in results], known, file, inline_bytes_max)
    except (StorageError, OSError) as error:
        # The file may exist nevertheless: not every storage reports whether a failed write took effect.
        return StoredSnapshot((), committables, {}, (file,), error=error)
    parts = tuple(zip(uids, stored.parts, strict=True))
    return StoredSnapshot(parts, committables, stored.in_files, stored.written.files, stored.written.stored_bytes)


@dataclass(frozen=True, slots=True)
class StoredInFlight:
    """The rows in flight of one task that a barrier overtook, as they are stored."""

    channels: tuple[m.ChannelState, ...] = ()
    files: tuple[str, ...] = ()
    state_bytes: int = 0
    inline_bytes: int = 0
    """How many of the bytes of these rows are in the handles themselves, and so in the checkpoint's metadata."""
    error: Exception | None = None
    """The reason why a file could not be written, if one could not."""

    def with_more(self, more: StoredInFlight) -> StoredInFlight:
        return StoredInFlight(
            self.channels + more.channels,
            self.files + more.files,
            self.state_bytes + more.state_bytes,
            self.inline_bytes + more.inline_bytes,
            self.error or more.error,
        )


@dataclass(slots=True)
class _Unacknowledged:
    """A snapshot that will be acknowledged when its state and its rows in flight have both been stored."""

    operators: tuple[m.OperatorSnapshot, ...]
    """The operators' uids and watermarks. What is stored is added in the acknowledgement."""
    alignment_ms: float
    snapshot_ms: float
    taken_s: float
    """When the snapshot was taken, by the stopwatch."""
    finished: bool
    with_metrics: bool
    """Whether the acknowledgement has the task's metrics."""
    stored: StoredSnapshot | None = None
    in_flight: StoredInFlight | None = None


class TaskSnapshots:
    """The snapshots of one task.

    `metrics` returns the task's metrics. `fail` is called when a snapshot cannot be completed, as when a sink cannot
    make its rows durable. `on_idle` is called when every snapshot has been acknowledged or declined.
    """

    def __init__(
        self,
        task: TaskId,
        services: TaskServices,
        metrics: Callable[[], TaskMetrics],
        fail: Callable[[BaseException], None],
        on_idle: Callable[[], None],
    ) -> None:
        self._task = task
        self._services = services
        self._send = services.send
        self._metrics = metrics
        self._fail = fail
        self._on_idle = on_idle
        self._closed = False
        self._stored: dict[str, m.ChunkHandle] = {}
        """The chunks that a completed checkpoint has in a file. They are not written again."""
        self._unacknowledged: dict[int, _Unacknowledged] = {}
        """The snapshots that have not been acknowledged, by checkpoint, oldest first."""
        self._unconfirmed: dict[int, StoredSnapshot] = {}
        """The snapshots whose checkpoints are not known to have completed, by checkpoint, oldest first."""

    def restored(self, stored: Mapping[str, m.ChunkHandle]) -> None:
        """Note the chunks in the files of the checkpoint from which the task was restored."""
        self._stored = dict(stored)

    def stored_bytes(self, chunk_id: str) -> int | None:
        """The length of the chunk in a file, or None if the next snapshot has to write it."""
        handle = self._stored.get(chunk_id)
        return None if handle is None else handle.length

    def handles_of(self, chunk_id: str) -> Iterator[m.ChunkHandle]:
        """Yield where this task has stored the chunk, or read it."""
        for chunks in (self._stored, *(snapshot.chunks for snapshot in self._unconfirmed.values())):
            if chunk_id in chunks:
                yield chunks[chunk_id]

    def store(
        self,
        checkpoint_id: int,
        operators: list[tuple[m.OperatorSnapshot, Snapshot]],
        *,
        alignment_ms: float,
        began_s: float,
        finished: bool,
        with_metrics: bool,
    ) -> None:
        """Store the operators' snapshots. They are acknowledged once `in_flight_stored` has been called as well.

        `operators` are in the order of the chain. `began_s` is when the snapshot was begun, by the stopwatch.
        `with_metrics`: the acknowledgement has the task's metrics, since no heartbeat may follow it.
        """
        if self._unacknowledged and next(reversed(self._unacknowledged)) >= checkpoint_id:
            raise InvariantError(f"checkpoint {checkpoint_id} after {list(self._unacknowledged)}")
        services = self._services
        assert services.storage is not None, f"checkpoint {checkpoint_id} of a job without checkpoint storage"
        file = state_file(services.epoch, services.attempt, checkpoint_id, *self._task)
        heads, now_s = tuple(head for head, _ in operators), services.clock.stopwatch_s()
        taken = self._unacknowledged[checkpoint_id] = _Unacknowledged(
            heads, alignment_ms, (now_s - began_s) * 1000, now_s, finished, with_metrics
        )
        uids = [head.uid for head in heads]
        snapshots = [snapshot for _, snapshot in operators]
        work = partial(store_snapshot, services.storage, uids, snapshots, self._stored, file, services.inline_bytes_max)

        def done(outcome: Done[StoredSnapshot] | Failed) -> None:
            if self._closed:
                return
            if isinstance(outcome, Failed):
                self._fail(outcome.error)
                return
            taken.stored = outcome.value
            self._acknowledge_in_order()

        services.executor.submit(work, done)

    def in_flight_stored(self, checkpoint_id: int, in_flight: StoredInFlight) -> None:
        """Note that the rows in flight at this snapshot have been stored, or there were none, or they are no longer
        needed."""
        if not self._closed:
            self._unacknowledged[checkpoint_id].in_flight = in_flight
            self._acknowledge_in_order()

    def completed(self, checkpoint_id: int) -> None:
        """Handle the completion of a checkpoint: the next snapshot refers to its chunks, and to no older ones.

        The notification is a message, or at the latest the barrier of the next checkpoint.
        """
        for known in [known for known in self._unconfirmed if known <= checkpoint_id]:
            snapshot = self._unconfirmed.pop(known)
            if known == checkpoint_id:
                self._stored = snapshot.chunks

    def decline(self, checkpoint_id: int, reason: str, counts: bool, files: tuple[str, ...] = ()) -> None:
        self._send(m.CheckpointDecline(self._services.attempt, checkpoint_id, self._task, reason, counts, files))

    @property
    def is_idle(self) -> bool:
        """Whether every snapshot has been acknowledged or declined."""
        return not self._unacknowledged

    def close(self) -> None:
        """Send nothing more."""
        self._closed = True

    def _acknowledge_in_order(self) -> None:
        while self._unacknowledged:
            oldest, taken = next(iter(self._unacknowledged.items()))
            if taken.stored is None or taken.in_flight is None:
                return
            del self._unacknowledged[oldest]
            self._acknowledge(oldest, taken, taken.stored, taken.in_flight)
            if not self._unacknowledged:
                self._on_idle()

    def _acknowledge(
        self, checkpoint_id: int, taken: _Unacknowledged, stored: StoredSnapshot, in_flight: StoredInFlight
    ) -> None:
        """Send the acknowledgement, or the refusal if something could not be written.

        It includes what the sinks prepared for older checkpoints that are not known to have completed.
        """
        earlier: dict[str, list[m.EarlierCommittables]] = {}
        for older, snapshot in self._unconfirmed.items():
            for uid, committables in snapshot.committables:
                earlier.setdefault(uid, []).append(m.EarlierCommittables(older, committables))
        self._unconfirmed[checkpoint_id] = stored
        error = stored.error or in_flight.error
        if error is not None:
            files = stored.files + in_flight.files
            self.decline(checkpoint_id, str(error), counts=True, files=files)
            return
        parts = dict(stored.parts)
        prepared = dict(stored.committables)
        operators = tuple(
            msgspec.structs.replace(
                head,
                parts=parts[head.uid],
                committables=prepared.get(head.uid, ()),
                earlier=tuple(earlier.get(head.uid, ())),
            )
            for head in taken.operators
        )
        self._send(
            m.CheckpointAck(
                self._services.attempt,
                checkpoint_id,
                self._task,
                operators,
                stored.files + in_flight.files,
                stored.state_bytes + in_flight.state_bytes,
                taken.alignment_ms,
                taken.finished,
                in_flight.channels,
                metrics=self._metrics() if taken.with_metrics else None,
                snapshot_ms=taken.snapshot_ms,
                storing_ms=(self._services.clock.stopwatch_s() - taken.taken_s) * 1000,
            )
        )
