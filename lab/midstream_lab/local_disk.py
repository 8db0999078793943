"""The local disk of a simulated slot: files in memory, which cannot be written at times."""

from __future__ import annotations

import io
from collections.abc import Callable
from random import Random
from typing import IO, Final

from midstream.simulation.network import SIM
from midstream.simulation.world import World

SHARE: Final = 0.1
"""The share of runs in which state lies on local disks by chance."""


def spills(seed: int) -> bool:
    """Whether state lies on local disks in a run of this seed by chance."""
    return Random(f"local disk {seed}").random() < SHARE


class SimLocalDisk:
    """A engine.core.interfaces.LocalDisk. `failing`: the share of files that cannot be written.

    It has a random source of its own, so that it does not change what else a seed draws.
    """

    file_bytes_min: Final = 1

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._random = Random(f"local disk of {name} {world.seed}")
        self.failing = self._random.choice((0.0, 0.0, 0.3))
        self.place = f"{SIM} disk of {name}"
        self.files = 0

    def map(self, write: Callable[[IO[bytes]], None]) -> memoryview:
        self._world.io_point()
        if self._random.random() < self.failing:
            self._world.note((self.place, "is full"))
            raise OSError(28, "No space left on device")
        file = io.BytesIO()
        write(file)
        self._world.io_point()
        self.files += 1
        self._world.note(("wrote", self.place, file.tell(), "bytes"))
        return memoryview(file.getvalue())
