"""The driver's shell with checks: each instruction of the coordinator is checked before it is carried out."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from midstream.engine.coordinator import Coordinator
from midstream.engine.coordinator.effects import IoKind, TimerKind, io_kind, timer_kind
from midstream.engine.coordinator.events import (
    ClientRequested,
    CoordinatorEvent,
    Instruction,
    JobEnded,
    RunIo,
    SetTimer,
)
from midstream.engine.coordinator.shell import Shell
from midstream.engine.core.interfaces import Done, Failed

if TYPE_CHECKING:
    from midstream.simulation.cluster import SimulatedDriver


class CheckedShell(Shell):
    """The shell of a simulated driver, which is notified of what only the shell sees."""

    def __init__(self, coordinator: Coordinator, driver: SimulatedDriver) -> None:
        super().__init__(coordinator, driver.process, driver, driver)
        self._check = coordinator.check
        self._driver = driver
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
            self._driver.bug(f"the coordinator requests {instruction!r} after the end of the job")
        if instruction.cause != self._handled:
            self._driver.bug(f"{instruction!r} is not of event {self._handled}")
        match instruction:
            case SetTimer(token):
                self._use(token)
            case RunIo(token, work):
                self._use(token)
                if io_kind(token) is IoKind.PUBLISH:
                    assert isinstance(work, partial)
                    _, metadata = work.args
                    self._driver.publishing(metadata)
                if io_kind(token) in (IoKind.COMMIT, IoKind.ABORT):
                    self._driver.observer.commits_here()
                if io_kind(token) is IoKind.SAVEPOINT_LOCATION and isinstance(self._event, ClientRequested):
                    self._claims[token] = self._event.client
            case JobEnded():
                self._driver.about_to_end(instruction)
            case _:  # the others have no token that must be used only once
                pass
        super()._execute(instruction)

    def _use(self, token: str) -> None:
        if token in self._tokens:
            self._driver.bug(f"token {token} is used a second time")
        self._tokens.add(token)

    def _io_done(self, token: str, outcome: Done[object] | Failed) -> None:
        client = self._claims.pop(token, None)
        if client is not None and isinstance(outcome, Done):
            self._driver.observer.location_claimed(client)
        if io_kind(token) is IoKind.PUBLISH:
            self._driver.published(outcome)
        super()._io_done(token, outcome)

    def _timer_fired(self, token: str) -> None:
        if timer_kind(token) is TimerKind.CHECKPOINT:
            self._driver.checkpoint_expired()
        super()._timer_fired(token)
