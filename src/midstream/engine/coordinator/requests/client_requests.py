"""The clients that wait for a checkpoint or a stop. Each request gets exactly one answer."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.engine.coordinator.checkpoints.pending_checkpoint import AbortedCheckpoint, CompletedCheckpoint
from midstream.engine.coordinator.effects import Effects
from midstream.engine.coordinator.events import NO_STORAGE
from midstream.engine.core.errors import assert_never
from midstream.engine.protocol.messages import DoCheckpoint, DoStop, Reply


@dataclass(slots=True)
class Stop:
    """A stop that was requested. `drain`: the sources end and the job finishes; else it ends with a checkpoint."""

    drain: bool
    clients: list[int]
    checkpoint: str | None = None
    """The path of its checkpoint or savepoint, once that is complete."""
    with_savepoint: bool = False
    failures: int = 0
    """How often the job has failed since the stop was requested."""
    is_stored: bool = False
    """Whether its checkpoint is complete, after which the sources are paused."""


class ClientRequests:
    def __init__(self, effects: Effects) -> None:
        self.stop: Stop | None = None
        self._effects = effects
        self._checkpoint: list[int] = []
        """The clients that wait for a checkpoint to be triggered."""

    @property
    def draining(self) -> bool:
        return self.stop is not None and self.stop.drain

    @property
    def needs_checkpoint(self) -> bool:
        return bool(self._checkpoint) or self.needs_stop_checkpoint

    @property
    def needs_stop_checkpoint(self) -> bool:
        """Whether the job must stop with a checkpoint that has not completed yet."""
        return self.stop is not None and not self.stop.drain and not self.stop.is_stored

    def handle(self, client: int, request: DoCheckpoint | DoStop, has_storage: bool) -> None:
        match request:
            case DoCheckpoint() if not has_storage:
                self.refuse([client], f"the {NO_STORAGE}")
            case DoStop(drain=False) if not has_storage:
                self.refuse(
                    [client],
                    f"the {NO_STORAGE}, or stop it with drain (--drain)",
                )
            case DoCheckpoint():
                self._checkpoint.append(client)
            case DoStop(drain) if self.stop is None:
                self.stop = Stop(drain, [client])
                self._effects.notifications.stop_requested(drain)
            case DoStop(drain) if self.stop.drain == drain:
                self.stop.clients.append(client)
            case DoStop():
                how = "after draining" if self.stop.drain else "with a checkpoint"
                self.refuse([client], f"the job is stopping already, {how}")
            case _:
                assert_never(request)

    @property
    def can_stop_without_tasks(self) -> bool:
        """Whether the job must stop, and the newest checkpoint is enough for that: it needs no savepoint."""
        return self.stop is not None and self.needs_stop_checkpoint and not self.stop.with_savepoint

    def stop_without_tasks(self, path: str | None) -> None:
        """Stop a job no task of which runs, with the checkpoint at `path`, if there is one."""
        assert self.stop is not None and self.can_stop_without_tasks
        self.stop.is_stored, self.stop.checkpoint = True, path

    def attempt_failed(self, why: str, commits_stalled: bool) -> None:
        """Cancel a stop whose savepoint the failures of the job prevent, or that cannot commit what was written."""
        if self.stop is None or self.stop.drain:
            return
        self.stop.failures += 1
        if commits_stalled or (self.stop.with_savepoint and self.stop.failures > 1):
            self.stop_failed(f"{why}; the job continues; the stop is cancelled")

    def stop_with_savepoint(self, client: int) -> Stop:
        assert self.stop is None
        self.stop = stop = Stop(False, [client], with_savepoint=True)
        self._effects.notifications.stop_requested(False)
        return stop

    def stop_is_stored(self, path: str) -> None:
        """The checkpoint of the stop is complete. If the stop is one with a savepoint, that has still to be made."""
        if self.stop is not None:
            self.stop.is_stored = True
            if not self.stop.with_savepoint:
                self.stop.checkpoint = path

    def checkpoint_completed(self, completed: CompletedCheckpoint) -> None:
        if completed.pending.stops:
            self.stop_is_stored(completed.path)
        for client in completed.pending.clients:
            self._effects.reply(client, Reply(checkpoint=completed.path))

    def checkpoint_aborted(self, aborted: AbortedCheckpoint) -> None:
        if aborted.retry:
            self.requeue(aborted.pending.clients)
            return
        self.refuse(aborted.pending.clients, str(aborted))
        if aborted.pending.stops:
            self.stop_failed(f"{aborted}; the job continues")

    def attempt_over(self, why: str, was_to_stop: bool) -> None:
        if self.stop is not None and not self.stop.drain and (self.stop.is_stored or was_to_stop):
            self.stop_failed(f"{why}; the job continues; the stop is cancelled")

    def take_checkpoint_clients(self) -> tuple[int, ...]:
        """A checkpoint is triggered: return the clients that waited for one, and now wait for this one."""
        clients, self._checkpoint = tuple(self._checkpoint), []
        return clients

    def requeue(self, clients: tuple[int, ...]) -> None:
        self._checkpoint[:0] = clients

    def stop_failed(self, reason: str) -> None:
        """Cancel the stop, if there is one: the job continues to run."""
        stop, self.stop = self.stop, None
        if stop is not None and stop.with_savepoint:
            self._effects.notifications.stop_failed(stop, reason)
        elif stop is not None:
            self.refuse(stop.clients, reason)

    def refuse(self, clients: list[int] | tuple[int, ...], reason: str) -> None:
        for client in clients:
            self._effects.reply(client, Reply(error=reason))

    def job_ended(self, reply_to_stop: Reply, reason: str) -> None:
        """Answer all clients that still wait. `reason`: why no checkpoint is made any more."""
        if self.stop is not None:
            if self.stop.with_savepoint and reply_to_stop == Reply():  # the job finished before it could stop
                reply_to_stop = Reply(error=f"no savepoint was made: {reason}")
            for client in self.stop.clients:
                self._effects.reply(client, reply_to_stop)
        self.refuse(self.take_checkpoint_clients(), reason)
        self.stop = None
