"""Signals of the simulated world."""

from __future__ import annotations

import math
from typing import Final

from midstream.simulation.world import World

WAIT_S_MAX: Final = 600.0
"""The longest wait if none is given; a wait that takes longer hangs."""


class SimSignal:
    """A Signal (engine.core.interfaces); while a process waits for it, other processes run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._world.hang(int(min(math.inf if timeout is None else timeout, WAIT_S_MAX) * 1e6))
        return self._is_set
