"""Savepoints: a place for each is claimed, a checkpoint is made, what it covers is committed, then it is copied.

Their stages, and what leads from one to the next, are in SAVEPOINT_TABLE.

The checkpoint is aligned: rows in flight could only be read by the same graph. It is kept for as long
as it is copied, and the job runs on meanwhile. A stop is answered by `Requests`; for it the sources
hold still behind the checkpoint, and if the savepoint fails they read on. Whoever is told that there
is none finds its place free, except at the end of the job, which does not wait for that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Final

from midstream.checkpoint.metadata import CheckpointMetadata
from midstream.checkpoint.savepoint import Place, SavepointFile, claim_place, discard, write_savepoint
from midstream.checkpoint.store import FencedError, check_epoch
from midstream.coordinator.checkpointing.pending import Aborted, Completed
from midstream.coordinator.effects import Effects, IoKind
from midstream.coordinator.events import NO_STORAGE, JobPlan
from midstream.coordinator.placement.attempt import Attempt
from midstream.coordinator.requests.requests import Requests, Stop
from midstream.core.errors import StorageError
from midstream.core.seams import Done, Failed, Storage
from midstream.core.transitions import Row, Table
from midstream.protocol.messages import DoSavepoint, DoStop, ReadOn, Reply


class Stage(Enum):
    CLAIMING = auto()
    WAITING = auto()
    """For a checkpoint that is triggered from now on."""
    STORING = auto()
    COMMITTING = auto()
    COPYING = auto()
    COPIED = auto()
    """The job is still to stop with it."""
    DISCARDING = auto()
    """It is not to be. Who asked is told when its place is free again."""


class SavepointTurn(Enum):
    """What leads to another stage."""

    CLAIMED = auto()
    """Its place is ours."""
    TRIGGERED = auto()
    COMPLETED = auto()
    TO_BE_REPEATED = auto()
    """Its checkpoint was aborted, and nothing is wrong."""
    COMMITTED = auto()
    """All that its checkpoint covers."""
    COPIED = auto()
    """Or not: either way nothing is at work on it any more."""
    OFF = auto()
    """Something has failed, or the job ends."""


_CLAIMED, _TRIGGERED, _COMPLETED, _TO_BE_REPEATED, _COMMITTED, _COPIED, _OFF = SavepointTurn
SAVEPOINT_TABLE: Final[Table[Stage, SavepointTurn]] = Table(
    "savepoint",
    (
        Row(Stage.CLAIMING, _CLAIMED, (Stage.WAITING,), "a stop that waited for its place is noted"),
        Row(Stage.WAITING, _TRIGGERED, (Stage.STORING,), "an aligned checkpoint is made"),
        Row(Stage.STORING, _COMPLETED, (Stage.COMMITTING,), "the checkpoint is kept from here on"),
        Row(Stage.STORING, _TO_BE_REPEATED, (Stage.WAITING,), "the next one is for it"),
        Row(Stage.COMMITTING, _COMMITTED, (Stage.COPYING,), "the checkpoint is copied to the place"),
        Row(Stage.COPYING, _COPIED, (Stage.COPIED,), "who asked is answered; a stop, when the job has stopped"),
        *(
            Row(stage, _OFF, (Stage.DISCARDING,), "the place is given back, then who asked is told")
            for stage in Stage
            if stage not in (Stage.COPYING, Stage.DISCARDING)
        ),
    ),
)


@dataclass(slots=True, eq=False)
class _Savepoint:
    client: int
    is_stop: bool
    stage: Stage = Stage.CLAIMING
    place: Place | None = None
    stop: Stop | None = None
    """The stop that waits for it, once the place is claimed."""
    checkpoint_id: int = 0
    """From STORING on."""
    metadata: CheckpointMetadata | None = None
    """From COMMITTING on."""
    attempt: Attempt | None = None
    """In which its checkpoint was made."""
    refused: list[int] = field(default_factory=list)
    """Clients to tell `reason` when its place is free again."""
    reason: str = ""

    def turn(self, what: SavepointTurn) -> None:
        self.stage = SAVEPOINT_TABLE.next(self.stage, what)


class Savepoints:
    def __init__(
        self, effects: Effects, plan: JobPlan, requests: Requests, open_storage: Callable[[str], Storage]
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
        """No completed checkpoint is still to become a savepoint."""
        return not self._at(Stage.COMMITTING, Stage.COPYING)

    @property
    def wants_checkpoint(self) -> bool:
        """An aligned one."""
        return bool(self._at(Stage.WAITING))

    @property
    def oldest_needed(self) -> int | None:
        """The oldest completed checkpoint that has to be kept."""
        return min((s.checkpoint_id for s in self._at(Stage.COMMITTING, Stage.COPYING)), default=None)

    # ---- asked, claimed ----

    def asked(self, client: int, request: DoSavepoint | DoStop) -> None:
        is_stop = isinstance(request, DoStop)
        place = request.savepoint if isinstance(request, DoStop) else request.place
        if self._root is None:
            self._requests.refuse([client], f"the {NO_STORAGE}")
        elif isinstance(request, DoStop) and request.drain:
            reason = "a drained job has finished, and a savepoint is for going on; stop with one or the other"
            self._requests.refuse([client], reason)
        elif self._requests.stop is not None:
            self._requests.refuse([client], "the job is stopping already")
        else:
            savepoint = _Savepoint(client, is_stop)
            self._all.append(savepoint)
            work = partial(claim_place, self._open_storage, place, self._root, self._about)
            what = f"the place of a savepoint, {place or 'below the checkpoint directory'}, to be made"
            self._effects.run_io(IoKind.SAVEPOINT_PLACE, work, partial(self._claimed, savepoint), waits_for=what)

    def _claimed(self, savepoint: _Savepoint, outcome: Done[Place] | Failed) -> None:
        if isinstance(outcome, Failed):
            self._fail(savepoint, str(outcome.error))
            return
        savepoint.place = outcome.value
        if self._has_ended or self._requests.stop is not None:
            self._fail(savepoint, "the job is stopping already")
            return
        savepoint.turn(SavepointTurn.CLAIMED)
        if savepoint.is_stop:
            savepoint.stop = self._requests.stop_with_savepoint(savepoint.client)

    # ---- its checkpoint ----

    def triggered(self, checkpoint_id: int) -> None:
        for savepoint in self._at(Stage.WAITING):
            savepoint.turn(SavepointTurn.TRIGGERED)
            savepoint.checkpoint_id = checkpoint_id

    def checkpoint_completed(self, completed: Completed) -> None:
        for savepoint in self._of(completed.pending.checkpoint_id):
            savepoint.turn(SavepointTurn.COMPLETED)
            savepoint.metadata, savepoint.attempt = completed.metadata, completed.pending.attempt

    def checkpoint_aborted(self, aborted: Aborted) -> None:
        for savepoint in self._of(aborted.pending.checkpoint_id):
            if aborted.retry:
                savepoint.turn(SavepointTurn.TO_BE_REPEATED)
            else:
                self._fail(savepoint, str(aborted))

    # ---- copying ----

    def step(self, source: Storage | None, oldest_uncommitted: int | None) -> None:
        """Copy what is committed: all checkpoints before `oldest_uncommitted`."""
        for savepoint in self._at(Stage.COMMITTING):
            if oldest_uncommitted is not None and oldest_uncommitted <= savepoint.checkpoint_id:
                continue
            assert source is not None and savepoint.metadata is not None and savepoint.place is not None
            savepoint.turn(SavepointTurn.COMMITTED)
            work = partial(_copy, source, savepoint.metadata, savepoint.place)
            what = f"checkpoint {savepoint.checkpoint_id} to be copied to the savepoint {savepoint.place.url}"
            copied = partial(self._copied, savepoint)
            self._effects.run_io(IoKind.SAVEPOINT, work, copied, about=savepoint.checkpoint_id, waits_for=what)

    def _copied(self, savepoint: _Savepoint, outcome: Done[None] | Failed) -> None:
        assert savepoint.place is not None
        savepoint.turn(SavepointTurn.COPIED)
        if savepoint.refused or self._has_ended:
            self._discard(savepoint)  # whoever asked is told, or has been told, that there is none
        elif isinstance(outcome, Failed) and isinstance(outcome.error, FencedError):
            self._effects.facts.fenced(outcome.error)
        elif isinstance(outcome, Failed):
            self._fail(savepoint, str(outcome.error))
        elif savepoint.stop is not None:
            savepoint.stop.checkpoint = savepoint.place.url
        else:
            self._all.remove(savepoint)
            self._effects.reply(savepoint.client, Reply(checkpoint=savepoint.place.url))

    # ---- its end ----

    def _fail(self, savepoint: _Savepoint, reason: str) -> None:
        """Let the job run on at once; give the place back, then tell who asked."""
        if self._has_ended:
            self._discard(savepoint)
        elif savepoint.stop is None:
            self._refuse(savepoint, [savepoint.client], reason)
        else:
            assert self._requests.stop is savepoint.stop
            self._requests.stop_failed(f"{reason}; the job runs on")
            if savepoint.attempt is not None:  # it still runs, else the stop would have failed with it
                for slot in savepoint.attempt.slots:
                    self._effects.send(slot, ReadOn(savepoint.attempt.number, savepoint.checkpoint_id))

    def stop_failed(self, stop: Stop, reason: str) -> None:
        savepoint = next(savepoint for savepoint in self._all if savepoint.stop is stop)
        self._refuse(savepoint, stop.clients, reason)

    def _refuse(self, savepoint: _Savepoint, clients: list[int], reason: str) -> None:
        """What is being copied can only be taken back when that is over."""
        savepoint.refused, savepoint.reason = clients, f"no savepoint was made: {reason}"
        if savepoint.stage is not Stage.COPYING:
            self._discard(savepoint)

    def _discard(self, savepoint: _Savepoint) -> None:
        savepoint.turn(SavepointTurn.OFF)
        if savepoint.place is None:
            self._discarded(savepoint, Done(None))
        else:
            gone = partial(self._discarded, savepoint)
            what = f"the place of a savepoint that is not made, {savepoint.place.url}, to be cleared"
            self._effects.run_io(IoKind.SAVEPOINT_DISCARD, partial(discard, savepoint.place), gone, waits_for=what)

    def _discarded(self, savepoint: _Savepoint, _: Done[None] | Failed) -> None:
        """If that failed: what is left of it cannot be restored, and says so."""
        self._all.remove(savepoint)
        self._requests.refuse(savepoint.refused, savepoint.reason)

    def job_ended(self, why: str, stopped: bool) -> None:
        """Answer all but stops. Only what is complete may stay, and only if the job has `stopped` with it.

        What is at work on the I/O pool may come to its end, and is taken back then, but nobody waits for it.
        """
        self._has_ended = True
        for savepoint in list(self._all):
            if savepoint.refused:
                self._requests.refuse(savepoint.refused, savepoint.reason)
                savepoint.refused = []
            elif savepoint.stop is None:
                self._requests.refuse([savepoint.client], f"no savepoint was made: {why}")
            is_at_work = savepoint.stage in (Stage.CLAIMING, Stage.COPYING, Stage.DISCARDING)
            if not is_at_work and not (stopped and savepoint.stage is Stage.COPIED):
                self._discard(savepoint)

    def _at(self, *stages: Stage) -> list[_Savepoint]:
        return [savepoint for savepoint in self._all if savepoint.stage in stages] if self._all else []

    def _of(self, checkpoint_id: int) -> list[_Savepoint]:
        return [s for s in self._at(Stage.STORING) if s.checkpoint_id == checkpoint_id]


def _copy(source: Storage, metadata: CheckpointMetadata, place: Place) -> None:
    """Raises FencedError if it fails because a later coordinator has deleted what it was to copy."""
    try:
        write_savepoint(source, metadata, place)
    except StorageError:
        check_epoch(source, metadata.epoch)
        raise
