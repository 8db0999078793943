"""The snapshots of one task, from the moment they are taken until their checkpoint's fate is known.

    taken --both parts stored--> stored --in order--> acknowledged --completed--> known
                 \\-- not written: declined; what its sinks prepared is reported with the next one

Invariants: acknowledgements leave in the order of the checkpoints, because each one reports what
the sinks prepared for those before it; only chunks of a *completed* checkpoint are referred to
again, because the files of any other may be deleted at any time.

A sink whose rows cannot be made durable is lost work, so that fails the task; a state file that
cannot be written only fails the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from midstream.checkpoint.state_files import state_file, store_parts
from midstream.core.errors import InvariantError, StorageError
from midstream.core.ids import TaskId
from midstream.core.seams import Done, Failed, Storage
from midstream.operators.base import Snapshot
from midstream.protocol import messages as m
from midstream.worker.seams import TaskSeams


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    parts: tuple[tuple[str, tuple[m.PartHandle, ...]], ...]
    """Per operator uid, in chain order."""
    committables: tuple[tuple[str, tuple[bytes, ...]], ...]
    """Per operator uid, only where there are some."""
    chunks: dict[str, m.ChunkHandle]
    """Every chunk of this snapshot that is in a file, for the next one to refer to once this one has completed."""
    files: tuple[str, ...] = ()
    state_bytes: int = 0
    error: Exception | None = None
    """The state file could not be written."""


def store_snapshot(
    storage: Storage,
    uids: Sequence[str],
    snapshots: Sequence[Snapshot],
    known: Mapping[str, m.ChunkHandle],
    file: str,
    inline_bytes_max: int,
) -> Callable[[], StoredSnapshot]:
    """The work of completing and storing a snapshot, to be run once on the I/O pool.

    Raises whatever an operator's `later` raises.
    """

    def work() -> StoredSnapshot:
        results = [snapshot.complete() for snapshot in snapshots]
        committables = tuple(
            (uid, result.committables) for uid, result in zip(uids, results, strict=True) if result.committables
        )
        try:
            stored = store_parts(storage, [result.parts for result in results], known, file, inline_bytes_max)
        except (StorageError, OSError) as error:
            # it may be there all the same: not every storage knows what has become of a write
            return StoredSnapshot((), committables, {}, (file,), error=error)
        parts = tuple(zip(uids, stored.parts, strict=True))
        return StoredSnapshot(parts, committables, stored.in_files, stored.written.files, stored.written.stored_bytes)

    return work


@dataclass(frozen=True, slots=True)
class StoredInFlight:
    """What a barrier overtook, at rest."""

    channels: tuple[m.ChannelState, ...] = ()
    files: tuple[str, ...] = ()
    state_bytes: int = 0
    inline_bytes: int = 0
    """Of these, how many are in the handles themselves."""
    error: Exception | None = None
    """A file could not be written."""

    def with_more(self, more: StoredInFlight) -> StoredInFlight:
        return StoredInFlight(
            self.channels + more.channels,
            self.files + more.files,
            self.state_bytes + more.state_bytes,
            self.inline_bytes + more.inline_bytes,
            self.error or more.error,
        )


@dataclass(slots=True)
class _Taken:
    """A snapshot on its way to its acknowledgement: both parts have to be at rest."""

    operators: tuple[m.OperatorSnapshot, ...]
    """With uids and watermarks; what is stored is filled in."""
    alignment_ms: float
    snapshot_ms: float
    taken_s: float
    """When, by the stopwatch."""
    finished: bool
    stored: StoredSnapshot | None = None
    in_flight: StoredInFlight | None = None


class TaskSnapshots:
    """`send` acknowledgements; `fail` the task when what a sink has taken cannot be made durable; see `is_idle`."""

    def __init__(
        self,
        task: TaskId,
        seams: TaskSeams,
        send: Callable[[m.FromSlot], None],
        fail: Callable[[BaseException], None],
        on_idle: Callable[[], None],
    ) -> None:
        self._task = task
        self._seams = seams
        self._send = send
        self._fail = fail
        self._on_idle = on_idle
        self._closed = False
        self._stored: dict[str, m.ChunkHandle] = {}
        """Chunks that a completed checkpoint has in a file: they are not written again."""
        self._taken: dict[int, _Taken] = {}
        """Snapshots that have not been acknowledged, oldest first."""
        self._unconfirmed: dict[int, StoredSnapshot] = {}
        """Snapshots of which it is not known yet that their checkpoint completed, by its id, oldest first."""

    def restored(self, stored: Mapping[str, m.ChunkHandle]) -> None:
        """These chunks are in the files of the checkpoint that the task was restored from."""
        self._stored = dict(stored)

    def stored_bytes(self, chunk_id: str) -> int | None:
        """How long the chunk is, if the next snapshot need only refer to it."""
        handle = self._stored.get(chunk_id)
        return None if handle is None else handle.length

    def take(
        self,
        checkpoint_id: int,
        operators: list[tuple[m.OperatorSnapshot, Snapshot]],
        *,
        alignment_ms: float,
        began_s: float,
        finished: bool,
    ) -> None:
        """Store the operators' snapshots, in chain order; `in_flight_stored` has to follow for it to be acknowledged.

        `began_s`: when it was begun, by the stopwatch.
        """
        if self._taken and next(reversed(self._taken)) >= checkpoint_id:
            raise InvariantError(f"checkpoint {checkpoint_id} after {list(self._taken)}")
        seams = self._seams
        assert seams.storage is not None, f"checkpoint {checkpoint_id} of a job without checkpoint storage"
        file = state_file(seams.epoch, seams.attempt, checkpoint_id, *self._task)
        heads, now_s = tuple(head for head, _ in operators), seams.clock.stopwatch_s()
        taken = self._taken[checkpoint_id] = _Taken(heads, alignment_ms, (now_s - began_s) * 1000, now_s, finished)
        uids = [head.uid for head in heads]
        snapshots = [snapshot for _, snapshot in operators]
        work = store_snapshot(seams.storage, uids, snapshots, self._stored, file, seams.inline_bytes_max)

        def done(outcome: Done[StoredSnapshot] | Failed) -> None:
            if self._closed:
                return
            if isinstance(outcome, Failed):
                self._fail(outcome.error)
                return
            taken.stored = outcome.value
            self._acknowledge_in_order()

        seams.executor.submit(work, done)

    def in_flight_stored(self, checkpoint_id: int, in_flight: StoredInFlight) -> None:
        """What was in flight at the snapshot is at rest (or there was nothing, or it is not needed any more)."""
        if not self._closed:
            self._taken[checkpoint_id].in_flight = in_flight
            self._acknowledge_in_order()

    def completed(self, checkpoint_id: int) -> None:
        """Told at the latest by the barrier of the next one: its snapshot refers to what this one has, to nothing older."""
        for known in [known for known in self._unconfirmed if known <= checkpoint_id]:
            snapshot = self._unconfirmed.pop(known)
            if known == checkpoint_id:
                self._stored = snapshot.chunks

    def decline(self, checkpoint_id: int, reason: str, counts: bool, files: tuple[str, ...] = ()) -> None:
        self._send(m.CheckpointDecline(self._seams.attempt, checkpoint_id, self._task, reason, counts, files))

    @property
    def is_idle(self) -> bool:
        """Whether all that was taken is acknowledged or declined."""
        return not self._taken

    def close(self) -> None:
        """Nothing more is sent."""
        self._closed = True

    def _acknowledge_in_order(self) -> None:
        while self._taken:
            oldest, taken = next(iter(self._taken.items()))
            if taken.stored is None or taken.in_flight is None:
                return
            del self._taken[oldest]
            self._acknowledge(oldest, taken, taken.stored, taken.in_flight)
            if not self._taken:
                self._on_idle()

    def _acknowledge(
        self, checkpoint_id: int, taken: _Taken, stored: StoredSnapshot, in_flight: StoredInFlight
    ) -> None:
        """With what the sinks prepared for older checkpoints that are not known to have completed."""
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
                self._seams.attempt,
                checkpoint_id,
                self._task,
                operators,
                stored.files + in_flight.files,
                stored.state_bytes + in_flight.state_bytes,
                taken.alignment_ms,
                taken.finished,
                in_flight.channels,
                snapshot_ms=taken.snapshot_ms,
                storing_ms=(self._seams.clock.stopwatch_s() - taken.taken_s) * 1000,
            )
        )
