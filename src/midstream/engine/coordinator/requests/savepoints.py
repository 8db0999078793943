"""Savepoints: a directory is claimed, a checkpoint is made, its output is committed, then it is copied there.

The stages of a savepoint, and what leads from one to the next, are in SAVEPOINT_TABLE.

The checkpoint is aligned, since rows in flight could only be read by the same graph. It is retained while it is copied,
and the job continues to run meanwhile. A stop is answered by `ClientRequests`; for a stop the sources are paused after the
checkpoint, and resumed if the savepoint fails. When a client receives the failure of its savepoint, the directory is
free again, except at the end of the job, which does not wait for that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Final

from midstream.engine.checkpoint.metadata import CheckpointMetadata
from midstream.engine.checkpoint.savepoint import (
    SavepointFile,
    SavepointLocation,
    claim_location,
    discard,
    write_savepoint,
)
from midstream.engine.checkpoint.store import FencedError, check_epoch
from midstream.engine.coordinator.checkpoints.pending_checkpoint import AbortedCheckpoint, CompletedCheckpoint
from midstream.engine.coordinator.effects import Effects, IoKind
from midstream.engine.coordinator.events import NO_STORAGE, JobPlan
from midstream.engine.coordinator.placement.attempt import Attempt
from midstream.engine.coordinator.requests.client_requests import ClientRequests, Stop
from midstream.engine.core.errors import StorageError
from midstream.engine.core.interfaces import Done, Failed, Storage
from midstream.engine.core.state_machine import Transition, TransitionTable
from midstream.engine.protocol.messages import DoSavepoint, DoStop, Reply, ResumeSources


class SavepointStage(Enum):
    CLAIMING = auto()
    WAITING = auto()
    """It waits for a checkpoint to be triggered."""
    MAKING_CHECKPOINT = auto()
    AWAITS_COMMITS = auto()
    COPYING = auto()
    COPIED = auto()
    """It is complete, and the job has still to stop with it."""
    DISCARDING = auto()
    """It has failed. The client is answered when its directory is free again."""


class SavepointEvent(Enum):
    """The events that lead to another stage."""

    CLAIMED = auto()
    """Its directory is claimed."""
    TRIGGERED = auto()
    COMPLETED = auto()
    TO_BE_REPEATED = auto()
    """Its checkpoint was aborted, and nothing is wrong."""
    ALL_COMMITTED = auto()
    """The output of its checkpoint, and of all earlier ones, is committed."""
    COPIED = auto()
    """Copying has ended, successfully or not."""
    GIVEN_UP = auto()
    """Something has failed, or the job ends."""


_CLAIMED, _TRIGGERED, _COMPLETED, _TO_BE_REPEATED, _ALL_COMMITTED, _COPIED, _GIVEN_UP = SavepointEvent
SAVEPOINT_TABLE: Final[TransitionTable[SavepointStage, SavepointEvent]] = TransitionTable(
    "savepoint",
    (
        Transition(
            SavepointStage.CLAIMING,
            _CLAIMED,
            (SavepointStage.WAITING,),
            "a stop that waited for this savepoint's directory begins",
        ),
        Transition(
            SavepointStage.WAITING, _TRIGGERED, (SavepointStage.MAKING_CHECKPOINT,), "an aligned checkpoint is made"
        ),
        Transition(
            SavepointStage.MAKING_CHECKPOINT,
            _COMPLETED,
            (SavepointStage.AWAITS_COMMITS,),
            "the checkpoint is kept from here on",
        ),
        Transition(
            SavepointStage.MAKING_CHECKPOINT, _TO_BE_REPEATED, (SavepointStage.WAITING,), "the next one is for it"
        ),
        Transition(
            SavepointStage.AWAITS_COMMITS,
            _ALL_COMMITTED,
            (SavepointStage.COPYING,),
            "the checkpoint is copied to the directory",
        ),
        Transition(
            SavepointStage.COPYING,
            _COPIED,
            (SavepointStage.COPIED,),
            "the client is answered; that of a stop, when the job has stopped",
        ),
        *(
            Transition(
                stage, _GIVEN_UP, (SavepointStage.DISCARDING,), "the directory is cleared, then the client is answered"
            )
            for stage in SavepointStage
            if stage not in (SavepointStage.COPYING, SavepointStage.DISCARDING)
        ),
    ),
)


@dataclass(slots=True, eq=False)
class _Savepoint:
    client: int
    is_stop: bool
    stage: SavepointStage = SavepointStage.CLAIMING
    location: SavepointLocation | None = None
    stop: Stop | None = None
    """The stop that waits for it, once the directory is claimed."""
    checkpoint_id: int = 0
    """The id of its checkpoint, from MAKING_CHECKPOINT on."""
    metadata: CheckpointMetadata | None = None
    """The metadata of its checkpoint, from AWAITS_COMMITS on."""
    attempt: Attempt | None = None
    """The attempt in which its checkpoint was made, from AWAITS_COMMITS on."""
    refused: list[int] = field(default_factory=list)
    """The clients that get `reason` as an answer when the directory is free again."""
    reason: str = ""

    def transition(self, event: SavepointEvent) -> None:
        self.stage = SAVEPOINT_TABLE.next(self.stage, event)


class Savepoints:
    def __init__(
        self, effects: Effects, plan: JobPlan, requests: ClientRequests, open_storage: Callable[[str], Storage]
    ) -> None:
        self._effects = effects
        self._requests = requests
        self._open_storage = open_storage
        self._root = plan.config.checkpoint_dir
        self._about = SavepointFile(plan.config.name, plan.job_id)
        self._all: list[_Savepoint] = []
        self._has_ended = False

    @property
    def idle(self) -> bool:
        """Whether no completed checkpoint has still to be copied."""
        return not self._at(SavepointStage.AWAITS_COMMITS, SavepointStage.COPYING)

    @property
    def needs_checkpoint(self) -> bool:
        """Whether a savepoint waits for an aligned checkpoint to be triggered."""
        return bool(self._at(SavepointStage.WAITING))

    @property
    def oldest_needed(self) -> int | None:
        """The oldest completed checkpoint that has to be retained because it is still to be copied."""
        return min(
            (s.checkpoint_id for s in self._at(SavepointStage.AWAITS_COMMITS, SavepointStage.COPYING)), default=None
        )

    # ---- requested, claimed ----

    def request(self, client: int, request: DoSavepoint | DoStop) -> None:
        is_stop = isinstance(request, DoStop)
        directory = request.savepoint if isinstance(request, DoStop) else request.place
        if self._root is None:
            self._requests.refuse([client], f"the {NO_STORAGE}")
        elif isinstance(request, DoStop) and request.drain:
            reason = "a drained job has finished, and a savepoint is for resuming; stop with one or the other"
            self._requests.refuse([client], reason)
        elif self._requests.stop is not None:
            self._requests.refuse([client], "the job is stopping already")
        else:
            savepoint = _Savepoint(client, is_stop)
            self._all.append(savepoint)
            work = partial(claim_location, self._open_storage, directory, self._root, self._about)
            what = f"the directory of a savepoint, {directory or 'below the checkpoint directory'}, to be created"
            self._effects.run_io(IoKind.SAVEPOINT_LOCATION, work, partial(self._claimed, savepoint), waits_for=what)

    def _claimed(self, savepoint: _Savepoint, outcome: Done[SavepointLocation] | Failed) -> None:
        if isinstance(outcome, Failed):
            self._fail(savepoint, str(outcome.error))
            return
        savepoint.location = outcome.value
        if self._has_ended or self._requests.stop is not None:
            self._fail(savepoint, "the job is stopping already")
            return
        savepoint.transition(SavepointEvent.CLAIMED)
        if savepoint.is_stop:
            savepoint.stop = self._requests.stop_with_savepoint(savepoint.client)

    # ---- its checkpoint ----

    def triggered(self, checkpoint_id: int) -> None:
        for savepoint in self._at(SavepointStage.WAITING):
            savepoint.transition(SavepointEvent.TRIGGERED)
            savepoint.checkpoint_id = checkpoint_id

    def checkpoint_completed(self, completed: CompletedCheckpoint) -> None:
        for savepoint in self._of(completed.pending.checkpoint_id):
            savepoint.transition(SavepointEvent.COMPLETED)
            savepoint.metadata, savepoint.attempt = completed.metadata, completed.pending.attempt

    def checkpoint_aborted(self, aborted: AbortedCheckpoint) -> None:
        for savepoint in self._of(aborted.pending.checkpoint_id):
            if aborted.retry:
                savepoint.transition(SavepointEvent.TO_BE_REPEATED)
            else:
                self._fail(savepoint, str(aborted))

    # ---- copying ----

    def advance(self, source: Storage | None, oldest_uncommitted: int | None) -> None:
        """Begin to copy the checkpoints whose output is committed, which are those before `oldest_uncommitted`."""
        for savepoint in self._at(SavepointStage.AWAITS_COMMITS):
            if oldest_uncommitted is not None and oldest_uncommitted <= savepoint.checkpoint_id:
                continue
            assert source is not None and savepoint.metadata is not None and savepoint.location is not None
            savepoint.transition(SavepointEvent.ALL_COMMITTED)
            work = partial(_copy, source, savepoint.metadata, savepoint.location)
            what = f"checkpoint {savepoint.checkpoint_id} to be copied to the savepoint {savepoint.location.url}"
            copied = partial(self._copied, savepoint)
            self._effects.run_io(IoKind.SAVEPOINT, work, copied, about=savepoint.checkpoint_id, waits_for=what)

    def _copied(self, savepoint: _Savepoint, outcome: Done[None] | Failed) -> None:
        assert savepoint.location is not None
        savepoint.transition(SavepointEvent.COPIED)
        if savepoint.refused or self._has_ended:
            self._discard(savepoint)  # its client has been refused, or is refused when the savepoint is gone
        elif isinstance(outcome, Failed) and isinstance(outcome.error, FencedError):
            self._effects.notifications.fenced(outcome.error)
        elif isinstance(outcome, Failed):
            self._fail(savepoint, str(outcome.error))
        elif savepoint.stop is not None:
            savepoint.stop.checkpoint = savepoint.location.url
        else:
            self._all.remove(savepoint)
            self._effects.reply(savepoint.client, Reply(checkpoint=savepoint.location.url))

    # ---- its end ----

    def _fail(self, savepoint: _Savepoint, reason: str) -> None:
        """A savepoint has failed: the job continues, and the client is answered when the directory is free again."""
        if self._has_ended:
            self._discard(savepoint)
        elif savepoint.stop is None:
            self._refuse(savepoint, [savepoint.client], reason)
        else:
            assert self._requests.stop is savepoint.stop
            self._requests.stop_failed(f"{reason}; the job continues")
            if savepoint.attempt is not None:  # the attempt still runs, else the stop would have failed when it ended
                for slot in savepoint.attempt.slots:
                    self._effects.send(slot, ResumeSources(savepoint.attempt.number, savepoint.checkpoint_id))

    def stop_failed(self, stop: Stop, reason: str) -> None:
        savepoint = next(savepoint for savepoint in self._all if savepoint.stop is stop)
        self._refuse(savepoint, stop.clients, reason)

    def _refuse(self, savepoint: _Savepoint, clients: list[int], reason: str) -> None:
        """Store the clients to answer, and discard the savepoint, immediately or when copying has ended."""
        savepoint.refused, savepoint.reason = clients, f"no savepoint was made: {reason}"
        if savepoint.stage is not SavepointStage.COPYING:
            self._discard(savepoint)

    def _discard(self, savepoint: _Savepoint) -> None:
        savepoint.transition(SavepointEvent.GIVEN_UP)
        if savepoint.location is None:
            self._discarded(savepoint, Done(None))
        else:
            gone = partial(self._discarded, savepoint)
            what = f"the directory of an abandoned savepoint, {savepoint.location.url}, to be cleared"
            self._effects.run_io(IoKind.SAVEPOINT_DISCARD, partial(discard, savepoint.location), gone, waits_for=what)

    def _discarded(self, savepoint: _Savepoint, _: Done[None] | Failed) -> None:
        """The directory is free again, or could not be cleared: what remains of the savepoint counts as unfinished."""
        self._all.remove(savepoint)
        self._requests.refuse(savepoint.refused, savepoint.reason)

    def job_ended(self, why: str, stopped: bool) -> None:
        """The job ends: answer all clients except those of stops. Only a complete savepoint remains, and only if the
        job has `stopped` with it.

        I/O that is running for a savepoint may end later. The savepoint is discarded then, but this is not awaited.
        """
        self._has_ended = True
        for savepoint in list(self._all):
            if savepoint.refused:
                self._requests.refuse(savepoint.refused, savepoint.reason)
                savepoint.refused = []
            elif savepoint.stop is None:
                self._requests.refuse([savepoint.client], f"no savepoint was made: {why}")
            has_io = savepoint.stage in (SavepointStage.CLAIMING, SavepointStage.COPYING, SavepointStage.DISCARDING)
            if not has_io and not (stopped and savepoint.stage is SavepointStage.COPIED):
                self._discard(savepoint)

    def _at(self, *stages: SavepointStage) -> list[_Savepoint]:
        return [savepoint for savepoint in self._all if savepoint.stage in stages] if self._all else []

    def _of(self, checkpoint_id: int) -> list[_Savepoint]:
        return [s for s in self._at(SavepointStage.MAKING_CHECKPOINT) if s.checkpoint_id == checkpoint_id]


def _copy(source: Storage, metadata: CheckpointMetadata, location: SavepointLocation) -> None:
    """Copy a checkpoint. Raises StorageError; FencedError if a later coordinator has taken over.

    A later one may have deleted files, or rolled back output. A savepoint that was complete before it took over is one
    of those that existed when the job was started from an older checkpoint.
    """
    try:
        write_savepoint(source, metadata, location)
    except StorageError:
        check_epoch(source, metadata.epoch)
        raise
    check_epoch(source, metadata.epoch)
