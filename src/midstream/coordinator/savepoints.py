"""Savepoints: a place for each is claimed, a checkpoint is made, what it covers is committed, then it is copied.

    CLAIMING --the place is ours--> WAITING --triggered--> STORING --completed--> COMMITTING
                                       ^                      |                       |
                                       +---- try again -------+         all committed |
    (answered) <----------------written------------------ COPYING <-------------------+
    (answered) <--the place is given back-- DISCARDING <--whatever fails, in any of them

The checkpoint is aligned: rows in flight could only be read by the same graph. It is kept for as long
as it is copied, and the job runs on meanwhile. A stop is answered by `Requests`; for it the sources
hold still behind the checkpoint, and if the savepoint fails they read on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

from midstream.checkpoint.metadata import CheckpointMetadata
from midstream.checkpoint.savepoint import Place, SavepointFile, claim_place, discard, write_savepoint
from midstream.coordinator.attempt import Attempt
from midstream.coordinator.effects import Effects
from midstream.coordinator.events import JobPlan
from midstream.coordinator.requests import NO_STORAGE, Requests, Stop
from midstream.core.seams import Done, Failed, Storage
from midstream.protocol.messages import DoSavepoint, DoStop, Reply, StopFailed


class Stage(Enum):
    CLAIMING = auto()
    WAITING = auto()
    """For a checkpoint that is triggered from now on."""
    STORING = auto()
    COMMITTING = auto()
    COPYING = auto()
    DISCARDING = auto()
    """It is not to be. Who asked is told when its place is free again."""


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
    """Clients to tell `reason`, from DISCARDING on."""
    reason: str = ""


class Savepoints:
    """`stop_asked` is told when a stop has been noted that waits for its place until then."""

    def __init__(
        self,
        effects: Effects,
        plan: JobPlan,
        requests: Requests,
        open_storage: Callable[[str], Storage],
        stop_asked: Callable[[], None],
    ) -> None:
        self._effects = effects
        self._requests = requests
        self._open_storage = open_storage
        self._root = plan.config.checkpoint_dir
        self._about = SavepointFile(plan.config.name, plan.job_id)
        self._stop_asked = stop_asked
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
            self._effects.run_io("savepoint-place", work, partial(self._claimed, savepoint))

    def _claimed(self, savepoint: _Savepoint, outcome: Done[Place] | Failed) -> None:
        if isinstance(outcome, Failed):
            self._fail(savepoint, str(outcome.error))
            return
        savepoint.place = outcome.value
        if self._has_ended or self._requests.stop is not None:
            self._fail(savepoint, "the job is stopping already")
            return
        savepoint.stage = Stage.WAITING
        if savepoint.is_stop:
            savepoint.stop = self._requests.stop_with_savepoint(savepoint.client)
            self._stop_asked()

    # ---- its checkpoint ----

    def triggered(self, checkpoint_id: int) -> None:
        for savepoint in self._at(Stage.WAITING):
            savepoint.stage, savepoint.checkpoint_id = Stage.STORING, checkpoint_id

    def completed(self, metadata: CheckpointMetadata, attempt: Attempt) -> None:
        for savepoint in self._of(metadata.checkpoint_id):
            savepoint.stage, savepoint.metadata, savepoint.attempt = Stage.COMMITTING, metadata, attempt

    def aborted(self, checkpoint_id: int, reason: str, *, retry: bool) -> None:
        """`retry`: nothing is wrong with it, it is taken again."""
        for savepoint in self._of(checkpoint_id):
            if retry:
                savepoint.stage = Stage.WAITING
            else:
                self._fail(savepoint, reason)

    # ---- copying ----

    def step(self, source: Storage | None, oldest_uncommitted: int | None) -> None:
        """Copy what is committed: all checkpoints before `oldest_uncommitted`."""
        for savepoint in self._at(Stage.COMMITTING):
            if oldest_uncommitted is not None and oldest_uncommitted <= savepoint.checkpoint_id:
                continue
            assert source is not None and savepoint.metadata is not None and savepoint.place is not None
            savepoint.stage = Stage.COPYING
            work = partial(write_savepoint, source, savepoint.metadata, savepoint.place)
            self._effects.run_io(f"savepoint:{savepoint.checkpoint_id}", work, partial(self._copied, savepoint))

    def _copied(self, savepoint: _Savepoint, outcome: Done[None] | Failed) -> None:
        assert savepoint.place is not None
        if isinstance(outcome, Failed):
            self._fail(savepoint, str(outcome.error))
        elif savepoint.is_stop and self._requests.stop is not savepoint.stop:
            self._fail(savepoint, "")  # a failure came between, and whoever asked knows
        else:
            self._all.remove(savepoint)
            if savepoint.stop is not None:
                savepoint.stop.checkpoint = savepoint.place.url
            elif not self._has_ended:
                self._effects.reply(savepoint.client, Reply(checkpoint=savepoint.place.url))

    # ---- its end ----

    def _fail(self, savepoint: _Savepoint, reason: str) -> None:
        """Let the job run on at once; give the place back, then tell who asked."""
        savepoint.reason = f"no savepoint was made: {reason}"
        if self._has_ended:
            pass
        elif savepoint.stop is None:
            savepoint.refused = [savepoint.client]
        elif self._requests.stop is savepoint.stop:
            savepoint.refused = self._requests.withdraw_stop()
            savepoint.reason += "; the job runs on"
            if savepoint.attempt is not None:  # it still runs, else the stop would have failed with it
                for slot in savepoint.attempt.slots:
                    self._effects.send(slot, StopFailed(savepoint.attempt.number, savepoint.checkpoint_id))
        self._discard(savepoint)

    def _discard(self, savepoint: _Savepoint) -> None:
        savepoint.stage = Stage.DISCARDING
        if savepoint.place is None:
            self._discarded(savepoint, Done(None))
        else:
            gone = partial(self._discarded, savepoint)
            self._effects.run_io("savepoint-discard", partial(discard, savepoint.place), gone)

    def _discarded(self, savepoint: _Savepoint, _: Done[None] | Failed) -> None:
        """If that failed: what is left of it cannot be restored, and says so."""
        self._all.remove(savepoint)
        self._requests.refuse(savepoint.refused, savepoint.reason)

    def job_ended(self, reason: str) -> None:
        """Answer all but stops. What is at work on the I/O pool may come to its end, but nobody waits for it."""
        self._has_ended = True
        for savepoint in list(self._all):
            if savepoint.stage is Stage.DISCARDING:
                self._requests.refuse(savepoint.refused, savepoint.reason)
                savepoint.refused = []
                continue
            if savepoint.stop is None:
                self._requests.refuse([savepoint.client], f"no savepoint was made: {reason}")
            if savepoint.stage not in (Stage.CLAIMING, Stage.COPYING):
                self._discard(savepoint)

    def _at(self, *stages: Stage) -> list[_Savepoint]:
        return [savepoint for savepoint in self._all if savepoint.stage in stages]

    def _of(self, checkpoint_id: int) -> list[_Savepoint]:
        return [s for s in self._at(Stage.STORING) if s.checkpoint_id == checkpoint_id]
