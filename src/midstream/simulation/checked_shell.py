"""The driver's shell with checks: each instruction of the coordinator is checked before it is carried out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from midstream.engine.checkpoint.metadata import CheckpointMetadata
from midstream.engine.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from midstream.engine.coordinator.effects import IoKind, TimerKind, io_kind, timer_kind
from midstream.engine.coordinator.events import (
    ClientRequested,
    CoordinatorEvent,
    EndState,
    Instruction,
    JobEnded,
    JobPlan,
    RunIo,
    SetTimer,
)
from midstream.engine.coordinator.job_phase import Phase
from midstream.engine.coordinator.placement.attempt import Attempt
from midstream.engine.coordinator.placement.rescale import Rescaling
from midstream.engine.coordinator.placement.slot_pool import SlotPool
from midstream.engine.coordinator.requests.savepoints import Savepoints
from midstream.engine.coordinator.shell import Connections, CoordinatorMachine, Host, Shell, ShellLoop
from midstream.engine.core.errors import MidstreamError
from midstream.engine.core.interfaces import Done, Failed


class CheckedMachine(CoordinatorMachine, Protocol):
    """`midstream.engine.coordinator.Coordinator`, or a subclass in tests."""

    plan: JobPlan
    restored_from: str | None
    rescaling: Rescaling
    phase: Phase
    outcome: tuple[EndState, MidstreamError | None] | None
    savepoints: Savepoints
    slots: SlotPool

    @property
    def attempt(self) -> Attempt | None: ...

    @property
    def checkpoints(self) -> CheckpointCoordinator: ...

    def check(self) -> None: ...


class Observer(Protocol):
    """Receives what only the shell sees."""

    def bug(self, text: str) -> None: ...

    def location_claimed(self, client: int) -> None:
        """Note that the directory of the savepoint requested by `client` has been claimed."""
        ...

    def publishing(self, metadata: CheckpointMetadata) -> None:
        """Note that the metadata of a checkpoint is about to be written."""
        ...

    def commits_here(self) -> None:
        """Note that the driver itself is about to commit, or to clean up."""
        ...

    def checkpoint_expired(self) -> None: ...

    def published(self, outcome: Done[object] | Failed) -> None:
        """Note the outcome of writing the metadata."""
        ...

    def about_to_end(self, outcome: JobEnded) -> None: ...


class CheckedShell(Shell):
    def __init__(
        self, coordinator: CheckedMachine, loop: ShellLoop, connections: Connections, host: Host, observer: Observer
    ) -> None:
        super().__init__(coordinator, loop, connections, host)
        self._check: Callable[[], None] = coordinator.check
        self._observer = observer
        self._handled = 0
        """The number of events so far."""
        self._event: CoordinatorEvent | None = None
        """The event that is being handled."""
        self._tokens: set[str] = set()
        self._claims: dict[str, int] = {}
        """The client that requested a savepoint, by the token of the I/O that claims its directory."""

    def _step(self, event: CoordinatorEvent) -> None:
        self._handled += 1
        self._event = event
        super()._step(event)
        self._check()

    def _execute(self, instruction: Instruction) -> None:
        if self.outcome is not None:
            self._observer.bug(f"the coordinator requests {instruction!r} after the end of the job")
        if instruction.cause != self._handled:
            self._observer.bug(f"{instruction!r} is not of event {self._handled}")
        match instruction:
            case SetTimer(token):
                self._use(token)
            case RunIo(token, work):
                self._use(token)
                if io_kind(token) is IoKind.PUBLISH:
                    assert isinstance(work, partial)
                    _, metadata = work.args
                    self._observer.publishing(metadata)
                if io_kind(token) in (IoKind.COMMIT, IoKind.ABORT):
                    self._observer.commits_here()
                if io_kind(token) is IoKind.SAVEPOINT_LOCATION and isinstance(self._event, ClientRequested):
                    self._claims[token] = self._event.client
            case JobEnded():
                self._observer.about_to_end(instruction)
            case _:  # the others have no token that must be used only once
                pass
        super()._execute(instruction)

    def _use(self, token: str) -> None:
        if token in self._tokens:
            self._observer.bug(f"token {token} is used a second time")
        self._tokens.add(token)

    def _io_done(self, token: str, outcome: Done[object] | Failed) -> None:
        client = self._claims.pop(token, None)
        if client is not None and isinstance(outcome, Done):
            self._observer.location_claimed(client)
        if io_kind(token) is IoKind.PUBLISH:
            self._observer.published(outcome)
        super()._io_done(token, outcome)

    def _timer_fired(self, token: str) -> None:
        if timer_kind(token) is TimerKind.CHECKPOINT:
            self._observer.checkpoint_expired()
        super()._timer_fired(token)
