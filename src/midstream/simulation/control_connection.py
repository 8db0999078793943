"""The control connection between a driver and a slot process."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from midstream.engine.protocol import messages as m
from midstream.simulation.network import Pipe

if TYPE_CHECKING:
    from midstream.simulation.cluster import SimulatedDriver
    from midstream.simulation.simulated_slot import SimulatedSlot


class ControlConnection:
    """The connection from the driver's side."""

    def __init__(self, driver: SimulatedDriver, slot: SimulatedSlot) -> None:
        world = driver.cluster.world
        self.number = -1
        """The slot's number, once it has been accepted; -1 before."""
        self.slot = slot
        self.to_slot = Pipe(world, slot.process, slot.received)
        self.to_driver = Pipe(world, driver.process, partial(driver.received, self))
        self.is_open = True
        """Whether the driver still receives messages from it."""
        self.received_us = world.now_us

    def cut(self) -> None:
        """Cut the connection: neither side receives anything more."""
        self.is_open = False
        self.to_slot.is_cut = True
        self.to_driver.is_cut = True

    def release(self) -> None:
        """Release the slot: it ends once it has received everything that was sent, and the driver ignores it."""
        self.is_open = False
        self.to_driver.is_cut = True
        self.to_slot.send(m.Release())
