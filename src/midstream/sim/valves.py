"""Event time of each task of a simulated job, compared with what its channels have said."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

from midstream.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.sim.world import World
from midstream.worker import inputs
from midstream.worker.valve import WatermarkValve


class CheckedValve(WatermarkValve):
    """Event time is that of the channel furthest behind, of those that have not ended and are not idle.

    When all of these are idle it is that of the furthest. It never goes back, and begins where a restore puts it.
    """

    def __init__(self, world: World, channels: int) -> None:
        super().__init__(channels)
        self._world = world
        self._said_us = [MIN_WATERMARK_US] * channels
        self._said_idle = [False] * channels

    def advance(self, channel: int, watermark_us: int) -> int | None:
        self._said_us[channel] = max(self._said_us[channel], watermark_us)
        before_us = self.watermark_us
        return self._compared(before_us, super().advance(channel, watermark_us))

    def set_idle(self, channel: int, idle: bool) -> int | None:
        self._said_idle[channel] = idle
        before_us = self.watermark_us
        return self._compared(before_us, super().set_idle(channel, idle))

    def _compared(self, before_us: int, said_us: int | None) -> int | None:
        marks_us = zip(self._said_us, self._said_idle, strict=True)
        open_us = [(mark_us, idle) for mark_us, idle in marks_us if mark_us != MAX_WATERMARK_US]
        waited_for_us = [mark_us for mark_us, idle in open_us if not idle]
        if waited_for_us:
            due_us = min(waited_for_us)
        else:
            due_us = max((mark_us for mark_us, _ in open_us), default=MAX_WATERMARK_US)
        due_us = max(before_us, due_us)
        if self.watermark_us != due_us or said_us != (due_us if due_us > before_us else None):
            self._world.bug(
                f"event time of a task is {self.watermark_us}, was {before_us}, and should be {due_us}: its channels have "
                f"said {self._said_us} (idle: {self._said_idle})"
            )
        return said_us


@contextmanager
def valves_are_checked(world: World) -> Iterator[None]:
    with patch.object(inputs, "WatermarkValve", partial(CheckedValve, world)):
        yield
