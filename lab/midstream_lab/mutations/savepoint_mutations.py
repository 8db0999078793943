"""Known bugs of savepoints, and of stops with them, to be put back on purpose: see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final
from unittest.mock import patch

import msgspec

from midstream.engine.checkpoint import savepoint
from midstream.engine.checkpoint.metadata import CheckpointMetadata, encode_metadata
from midstream.engine.checkpoint.savepoint import SavepointLocation
from midstream.engine.checkpoint.state_files import SHARED
from midstream.engine.checkpoint.store import check_epoch, metadata_path
from midstream.engine.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from midstream.engine.coordinator.requests import savepoints
from midstream.engine.coordinator.requests.client_requests import ClientRequests
from midstream.engine.coordinator.requests.savepoints import Savepoints, SavepointStage
from midstream.engine.core.errors import StorageError
from midstream.engine.core.interfaces import Storage
from midstream.engine.worker.task import Task
from midstream_lab.mutations.mutation import Mutation, Replacements
from midstream_lab.scenarios import targeted
from midstream_lab.scenarios.targeted_at_rest import saved_too_late


def _nothing(*_: Any, **__: Any) -> None:
    pass


def before_committed() -> Replacements:
    original = Savepoints.advance
    return [(Savepoints, "advance", lambda self, source, oldest: original(self, source, None))]


def files_left_out() -> Replacements:
    """A file of state is forgotten."""

    class Forgetful:
        def __init__(self, storage: Storage) -> None:
            self._storage = storage
            self._forgets = True

        def write(self, path: str, parts: Iterable[bytes]) -> None:
            if self._forgets and path.startswith(f"{SHARED}/"):
                self._forgets = False
            else:
                self._storage.write(path, parts)

    original = savepoint.copied

    def copy(source: Storage, target: Any, *rest: Any) -> CheckpointMetadata:
        return original(source, Forgetful(target), *rest)  # type: ignore[arg-type]

    return [(savepoint, "copied", copy)]


def not_copied() -> Replacements:
    """It refers to the files of the job, which the job deletes when it has no use for them any more."""

    def write_savepoint(source: Storage, metadata: CheckpointMetadata, place: SavepointLocation) -> None:
        alone = msgspec.structs.replace(metadata, committables=())
        place.storage.write(metadata_path(metadata.checkpoint_id), [encode_metadata(alone)])

    return [(savepoints, "write_savepoint", write_savepoint)]


def not_retained() -> Replacements:
    """Its checkpoint is deleted when there are newer ones, copied or not."""
    return [(Savepoints, "oldest_needed", None)]


def not_aligned() -> Replacements:
    original = CheckpointCoordinator.trigger

    def trigger(self: Any, attempt: Any, sources: Any, request: Any) -> int:
        return original(self, attempt, sources, replace(request, is_savepoint=False, must_align=False))

    return [(CheckpointCoordinator, "trigger", trigger)]


def keeps_committables() -> Replacements:
    """What it covers has been committed, and a job that resumes from it commits it again."""
    original = savepoint.write_savepoint

    def write_savepoint(source: Storage, metadata: CheckpointMetadata, place: SavepointLocation) -> None:
        with patch.object(msgspec.structs, "replace", _without_committables(msgspec.structs.replace)):
            original(source, metadata, place)

    return [(savepoints, "write_savepoint", write_savepoint)]


def _without_committables(original: Callable[..., Any]) -> Callable[..., Any]:
    def replace(struct: Any, **changes: Any) -> Any:
        changes.pop("committables", None)
        return original(struct, **changes)

    return replace


def sources_hold_still() -> Replacements:
    """After a stop whose savepoint has failed, all sources stay paused."""
    return [(Task, "resume_source", _nothing)]


def place_is_kept() -> Replacements:
    return [(savepoints, "discard", _nothing)]


def refused_at_once() -> Replacements:
    """The client that has requested a stop gets the answer that the job has failed before the place is given back."""

    def stop_failed(self: Any, reason: str) -> None:
        stop, self.stop = self.stop, None
        if stop is not None:
            self.refuse(stop.clients, reason)
            if stop.with_savepoint:
                stop.clients = []
                self._effects.notifications.stop_failed(stop, reason)

    return [(ClientRequests, "stop_failed", stop_failed)]


def copied_after_the_end() -> Replacements:
    """A savepoint that is being copied when the job ends stays, although it was refused."""
    original = Savepoints._copied

    def copied(self: Any, pending: Any, outcome: Any) -> None:
        if self._has_ended:
            self._all.remove(pending)
        else:
            original(self, pending, outcome)

    return [(Savepoints, "_copied", copied)]


def end_does_not_answer() -> Replacements:
    """The client that waits for a savepoint which is being copied when the job ends gets no answer."""
    original = Savepoints.job_ended

    def job_ended(self: Any, *why: Any) -> None:
        copying = self._at(SavepointStage.COPYING)
        self._all = [pending for pending in self._all if pending not in copying]
        original(self, *why)
        self._all += copying

    return [(Savepoints, "job_ended", job_ended)]


def stopped_before_copied() -> Replacements:
    """The job stops when its checkpoint is complete and committed, and forgets what is being copied."""
    return [(Savepoints, "idle", True)]


def retry_is_forgotten() -> Replacements:
    """A checkpoint that is only taken again is not taken for the savepoint."""

    def aborted(self: Any, event: Any) -> None:
        original(self, replace(event, retry=False))

    original = Savepoints.checkpoint_aborted
    return [(Savepoints, "checkpoint_aborted", aborted)]


def completed_behind_a_successor() -> Replacements:
    """A driver that was believed dead completes a savepoint when another one has taken over."""

    def copy(source: Storage, metadata: CheckpointMetadata, place: SavepointLocation) -> None:
        try:
            savepoint.write_savepoint(source, metadata, place)
        except StorageError:
            check_epoch(source, metadata.epoch)
            raise

    return [(savepoint, "check_epoch", _nothing), (savepoints, "_copy", copy)]


MUTATIONS: Final[Mapping[str, Mutation]] = {
    "savepoint_before_committed": Mutation(
        "a savepoint is made before all it covers is committed", before_committed, targeted.saving
    ),
    "savepoint_files_left_out": Mutation("a savepoint has not all of its files", files_left_out, targeted.saving),
    "savepoint_not_copied": Mutation("a savepoint refers to the job's own files", not_copied, targeted.saving),
    "savepoint_not_retained": Mutation("a checkpoint is deleted while it is copied", not_retained, targeted.saving),
    "savepoint_not_aligned": Mutation("barriers overtake rows for a savepoint", not_aligned, targeted.saving),
    "savepoint_keeps_committables": Mutation("a savepoint holds output to commit", keeps_committables, targeted.saving),
    "savepoint_sources_hold_still": Mutation(
        "sources stay paused when a savepoint has failed", sources_hold_still, targeted.saving
    ),
    "savepoint_place_is_kept": Mutation(
        "the place of a savepoint that failed is not given back", place_is_kept, targeted.saving
    ),
    "savepoint_refused_at_once": Mutation(
        "a stop is refused before its savepoint is deleted", refused_at_once, targeted.saving
    ),
    "savepoint_copied_after_the_end": Mutation(
        "a savepoint is there although it was refused", copied_after_the_end, targeted.saving
    ),
    "savepoint_end_does_not_answer": Mutation(
        "the end of the job answers no savepoint that is being copied", end_does_not_answer, targeted.saving
    ),
    "savepoint_stopped_before_copied": Mutation(
        "a job stops before its savepoint is there", stopped_before_copied, targeted.saving
    ),
    "savepoint_retry_is_forgotten": Mutation(
        "a checkpoint to take again makes no savepoint", retry_is_forgotten, targeted.saving
    ),
    "savepoint_completed_behind_a_successor": Mutation(
        "a driver believed dead completes a savepoint", completed_behind_a_successor, saved_too_late
    ),
}
