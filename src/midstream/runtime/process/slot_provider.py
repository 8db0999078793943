"""The source of slots: the seam between the driver and Spark, or plain processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from midstream.engine.core.interfaces import SlotAvailability
from midstream.runtime.network.ports import ANY_PORT, Ports
from midstream.runtime.network.tls import JobKeys


@dataclass(frozen=True, slots=True)
class SlotLaunch:
    """The data that a slot needs to find its driver. It travels only over private channels."""

    host: str
    port: int
    keys: JobKeys
    job_id: str
    request: str
    """The driver's request that this slot answers."""
    log_levels: dict[str, int] = field(default_factory=dict)
    """The loggers whose level the program has set, "" for the root: see `runtime.process.slot_output`."""
    ports: Ports = ANY_PORT
    """The ports on which the slot listens for other slots."""


class OnFailed(Protocol):
    """Called when a slot could not start or has ended.

    `reason`: why there is no slot (any more). `crash`: how its process has ended, in the same words each time, if the
    process itself caused this rather than its environment. `last_lines`: the last output of its process.
    """

    def __call__(self, reason: str, crash: str = "", last_lines: str = "") -> None: ...


class OnLeaving(Protocol):
    """Called when what the slot runs on is about to end. No new slots start there; the slot itself works as before.

    `reason`: why it ends.
    """

    def __call__(self, reason: str) -> None: ...


class SlotProvider(Protocol):
    """Starts slot processes that run `runtime.process.slot_main.run_slot`. A slot ends by itself when it is released."""

    @property
    def bind_host(self) -> str:
        """The address of this machine on which the driver listens for slots: loopback if all of them are local."""
        ...

    @property
    def driver_host(self) -> str:
        """The name or address at which slots reach the driver; `bind_host` if nothing is in between."""
        ...

    @property
    def driver_ports(self) -> Ports:
        """The ports on which the driver listens for slots and commands."""
        ...

    @property
    def slot_ports(self) -> Ports:
        """The ports on which each slot listens for other slots."""
        ...

    @property
    def gone(self) -> str:
        """Why no slot can be started any more; empty while slots can be started. Once set, it stays."""
        ...

    def check(self, slots: int) -> None:
        """Raise ClusterError with a remedy if it is known that `slots` slots can never run concurrently."""
        ...

    def request(self, launch: SlotLaunch, on_failed: OnFailed, on_leaving: OnLeaving) -> None:
        """Start one more slot; returns immediately.

        `on_failed` is called from any thread, at most once, when the slot's process could not be started, or has ended
        other than by being released; `on_leaving` likewise, before that, if it is known that the slot will have to end.
        Raises ClusterError if no slot can be started any more.
        """
        ...

    def availability(self) -> SlotAvailability:
        """Find out why no slot has come in time. Blocks for some seconds, so it is called on the I/O pool."""
        ...

    def abandon(self, request: str) -> None:
        """Make sure that the process of a lost slot ends, even if it hangs. Returns immediately."""
        ...

    def close(self) -> None:
        """End every slot that still runs, and everything started for them. Blocks until that is done (seconds)."""
        ...
