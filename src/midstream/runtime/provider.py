"""Where slots come from: the seam between the driver and Spark, or plain processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SlotLaunch:
    """All that a slot needs to find its driver. Travels only over channels that nobody else can read."""

    host: str
    port: int
    secret: bytes = field(repr=False)
    job_id: str
    request: str
    """Which of the driver's requests this slot answers."""


class SlotProvider(Protocol):
    """Starts slot processes that run `runtime.slot.run_slot`. A slot ends by itself when it is released."""

    @property
    def bind_host(self) -> str:
        """The address of this machine at which its slots reach the driver: loopback where all of them are local."""
        ...

    @property
    def slots_max(self) -> int | None:
        """How many slots can run at once; None where that is not known beforehand."""
        ...

    def request(self, launch: SlotLaunch, on_failed: Callable[[str], None]) -> None:
        """Start one more slot; returns at once. `on_failed(reason)` is called from any thread, at most
        once, when the slot's process could not be started or has ended other than by being released."""
        ...

    def close(self) -> None:
        """End every slot that still runs, and everything started for them. Blocks until that is done (seconds)."""
        ...
