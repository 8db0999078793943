"""The readers of queues and the tasks of the exchange's tests: they note what they are notified of."""

from __future__ import annotations

from collections.abc import Callable

from midstream.engine.exchange.listeners import BarrierOrEnd


class NotedTask:
    """A `TaskListener`. Whenever it is woken, it notes what `observe` returns."""

    def __init__(self, observe: Callable[[], bool] = lambda: True) -> None:
        self._observe = observe
        self.woken: list[bool] = []
        self.arrived: list[tuple[int, BarrierOrEnd]] = []
        self.sent: list[int] = []

    def wake(self) -> None:
        self.woken.append(self._observe())

    def on_arrival(self, channel: int, event: BarrierOrEnd) -> None:
        self.arrived.append((channel, event))

    def on_barrier_sent(self, checkpoint_id: int) -> None:
        self.sent.append(checkpoint_id)


class NotedReader:
    """A `QueueListener`."""

    def __init__(self) -> None:
        self.noted: list[int | tuple[int, BarrierOrEnd]] = []
        """The channel for each `on_data`, and the event with its channel for each `on_arrival`."""

    @property
    def arrived(self) -> list[BarrierOrEnd]:
        return [noted[1] for noted in self.noted if isinstance(noted, tuple)]

    def on_data(self, channel: int) -> None:
        self.noted.append(channel)

    def on_arrival(self, channel: int, event: BarrierOrEnd) -> None:
        self.noted.append((channel, event))
