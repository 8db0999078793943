"""Where slots come from: the seam between the driver and Spark, or plain processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from midstream.runtime.ports import ANY_PORT, Ports
from midstream.runtime.tls import JobKeys


@dataclass(frozen=True, slots=True)
class SlotLaunch:
    """All that a slot needs to find its driver. Travels only over channels that nobody else can read."""

    host: str
    port: int
    keys: JobKeys
    job_id: str
    request: str
    """Which of the driver's requests this slot answers."""
    log_levels: dict[str, int] = field(default_factory=dict)
    """Of the loggers whose level the program has set, "" for the root: see `runtime.capture`."""
    ports: Ports = ANY_PORT
    """On which the slot listens for other slots."""


class OnFailed(Protocol):
    """`reason`: why there is no slot, or none any more. `crash`: how its process has ended, equal each time, if that was
    of its own doing and not of what it runs on. `last_lines`: what else its process has left."""

    def __call__(self, reason: str, crash: str = "", last_lines: str = "") -> None: ...


class OnLeaving(Protocol):
    """`reason`: what the slot runs on is to end, which no other slot is started on. The slot itself works as before."""

    def __call__(self, reason: str) -> None: ...


class SlotProvider(Protocol):
    """Starts slot processes that run `runtime.slot.run_slot`. A slot ends by itself when it is released."""

    @property
    def bind_host(self) -> str:
        """The address of this machine on which the driver listens for slots: loopback where all of them are local."""
        ...

    @property
    def driver_host(self) -> str:
        """The name or address at which slots reach the driver; where nothing is in between, `bind_host`."""
        ...

    @property
    def driver_ports(self) -> Ports:
        """On which the driver listens for slots and commands."""
        ...

    @property
    def slot_ports(self) -> Ports:
        """On which each slot listens for other slots."""
        ...

    @property
    def gone(self) -> str:
        """Why no slot can be had any more; empty as long as there can be some. It never changes back."""
        ...

    def check(self, slots: int) -> None:
        """Raises ClusterError, saying what to do, when it is known that `slots` slots can never run at once."""
        ...

    def request(self, launch: SlotLaunch, on_failed: OnFailed, on_leaving: OnLeaving) -> None:
        """Start one more slot; returns at once. `on_failed` is called from any thread, at most
        once, when the slot's process could not be started or has ended other than by being released;
        `on_leaving` likewise, before that, where it is known that it will have to end.
        Raises ClusterError when no slot can be had any more."""
        ...

    def abandon(self, request: str) -> None:
        """The driver has lost this slot: see that its process ends, even if it hangs. Returns at once."""
        ...

    def close(self) -> None:
        """End every slot that still runs, and everything started for them. Blocks until that is done (seconds)."""
        ...
