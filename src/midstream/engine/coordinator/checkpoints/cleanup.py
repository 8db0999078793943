"""Deletes checkpoints and state files that are not needed any more, one pass at a time.

A pass that fails is repeated immediately, since a job that ends has no later pass. If that fails too, the next pass
deletes these files as well; what remains when the program dies is deleted by the next coordinator
(`engine.checkpoint.store.clean_up`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from midstream.engine.checkpoint.store import FencedError, drop, drop_attempts_before
from midstream.engine.coordinator.effects import Effects, IoKind
from midstream.engine.coordinator.restore.open_directory import OpenedStorage
from midstream.engine.core.errors import StorageError
from midstream.engine.core.interfaces import Done, Failed, Storage


@dataclass(slots=True)
class _Deletions:
    """What the next pass deletes."""

    checkpoints: set[int] = field(default_factory=set)
    """Complete ones."""
    files: set[str] = field(default_factory=set)
    """What only those refer to."""
    unused: set[str] = field(default_factory=set)
    """Files to which no complete checkpoint has ever referred."""
    before: tuple[int, frozenset[str]] | None = None
    """All files of the attempts before this one, except the given ones."""


class CheckpointCleanup:
    def __init__(self, effects: Effects) -> None:
        self._storage: Storage | None = None
        self._epoch = 0
        self._effects = effects
        self._deletions = _Deletions()
        self._running = False
        self._has_failed = False
        """Whether the pass that is running repeats one that has failed."""
        self._stopped = False

    def storage_opened(self, found: OpenedStorage) -> None:
        self._storage, self._epoch = found.storage, found.opened.epoch

    def drop(self, checkpoints: Iterable[int], files: Iterable[str]) -> None:
        """Delete complete checkpoints and the files that only they refer to; if there are none, files of a failed one."""
        ids = set(checkpoints)
        if ids:
            self._deletions.checkpoints |= ids
            self._deletions.files.update(files)
        else:
            self._deletions.unused.update(files)
        self.run()

    def drop_attempts_before(self, attempt: int, referenced: frozenset[str]) -> None:
        """Delete all files of earlier attempts except `referenced`. No slot of those attempts writes any more."""
        self._deletions.before = (attempt, referenced)
        self.run()

    def run(self) -> None:
        if self._running or self._stopped or self._storage is None:
            return
        if self._deletions == _Deletions():
            return
        self._running = True
        deletions, self._deletions = self._deletions, _Deletions()
        work = partial(_clean, self._storage, self._epoch, deletions)
        done = partial(self._done, deletions)
        self._effects.run_io(IoKind.CLEAN, work, done, waits_for="old checkpoint files to be deleted")

    def stop(self, _: StorageError) -> None:
        """Delete nothing more: another coordinator owns the directory."""
        self._stopped = True

    def _done(self, deletions: _Deletions, outcome: Done[None] | Failed) -> None:
        self._running = False
        tries_again, self._has_failed = not self._has_failed, False
        if isinstance(outcome, Done):
            self.run()
        elif isinstance(outcome.error, FencedError):
            self._effects.notifications.fenced(outcome.error)
        else:
            self._deletions.checkpoints |= deletions.checkpoints
            self._deletions.files |= deletions.files
            self._deletions.unused |= deletions.unused
            # What was referenced then and is not now is among these files.
            self._deletions.before = self._deletions.before or deletions.before
            if tries_again:
                self._has_failed = True
                self.run()
                return
            self._effects.notifications.warned(
                f"old checkpoint files could not be deleted (tried again later): {outcome.error}"
            )


def _clean(storage: Storage, epoch: int, deletions: _Deletions) -> None:
    if deletions.unused:  # first, as the marks that `drop` makes need space
        drop(storage, epoch, (), deletions.unused)
    if deletions.checkpoints:
        drop(storage, epoch, sorted(deletions.checkpoints), deletions.files)
    if deletions.before is not None:
        drop_attempts_before(storage, epoch, *deletions.before)
