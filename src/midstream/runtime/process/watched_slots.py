"""The base of slots that a driver starts: a thread that waits for each one's end, and how slots are ended."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, TypeVar

from midstream.runtime.process.slot_provider import OnFailed

MEMORY_ADVICE: Final = (
    "if the memory of its machine or container was full, lower pool_size or batch_rows, or give it more memory (on a "
    "cluster: spark.executor.memoryOverhead)"
)
RELEASE_WAIT_S: Final = 3.0
"""How long released slots may take to end by themselves."""


@dataclass(frozen=True, slots=True)
class SlotEnd:
    """See `slot_provider.OnFailed`."""

    reason: str
    crash: str = ""
    last_lines: str = ""


class WatchedSlot(ABC):
    """A slot that is watched. `on_failed` is called with the reason and the details when it ends, unless it was let go."""

    def __init__(self, name: str, on_failed: OnFailed) -> None:
        self._on_failed: OnFailed | None = on_failed
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)

    @abstractmethod
    def wait(self) -> SlotEnd:
        """Wait until the slot has ended, and return why."""

    @abstractmethod
    def kill(self) -> None:
        """End the slot if it lives, even if it hangs."""

    @property
    def lives(self) -> bool:
        return self._thread.is_alive()

    def watch(self) -> None:
        self._thread.start()

    def let_go(self) -> None:
        """Stop watching: from now on, the end of the slot is not a failure."""
        self._on_failed = None

    def join(self, wait_s: float) -> bool:
        self._thread.join(max(0.0, wait_s))
        return not self.lives

    def _watch(self) -> None:
        end = self.wait()
        on_failed = self._on_failed
        if on_failed is not None:
            on_failed(end.reason, end.crash, end.last_lines)


Slot = TypeVar("Slot", bound=WatchedSlot)


def end_all(slots: Collection[Slot], kill_wait_s: float) -> list[Slot]:
    """Stop watching all slots, wait for those that were released, kill the others; return those that are still alive."""
    for slot in slots:
        slot.let_go()
    _join(slots, RELEASE_WAIT_S)
    for slot in slots:
        slot.kill()
    return _join(slots, kill_wait_s)


def _join(slots: Collection[Slot], wait_s: float) -> list[Slot]:
    deadline_s = time.monotonic() + wait_s
    return [slot for slot in slots if not slot.join(deadline_s - time.monotonic())]
