"""Known bugs around data in flight, to be put back on purpose: see `sim.mutations`."""

from __future__ import annotations

from typing import Any

import msgspec

from midstream.exchange.gate import InputGate
from midstream.exchange.partition import ResultPartition, Subpartition
from midstream.exchange.queue import ElementQueue, InFlight, let_go
from midstream.worker import recovery
from midstream.worker.checkpoints import TaskCheckpoints
from midstream.worker.recovery import GateRecovery

Replacements = list[tuple[Any, str, Any]]


def forget_rest() -> Replacements:
    """Of the batch that is being worked on, the rows that were not."""
    original = TaskCheckpoints._capture

    def capture(self: Any, state: Any, channels: Any) -> None:
        rest, self._rest = self._rest, lambda: None
        original(self, state, channels)
        self._rest = rest

    return [(TaskCheckpoints, "_capture", capture)]


def forget_partly_sent() -> Replacements:
    original = Subpartition.overtake

    def overtake(self: Any, barrier: Any) -> Any:
        sending, self.sending = self.sending, ()
        captured = original(self, barrier)
        self.sending = sending
        return captured

    return [(Subpartition, "overtake", overtake)]


class _Nowhere(list[InFlight]):
    def append(self, item: InFlight) -> None:
        item.let_go()


def forget_arrivals() -> Replacements:
    """Only what is there at the snapshot is captured."""
    original = ElementQueue.capture

    def capture(self: Any, checkpoint_id: int) -> Any:
        captured = original(self, checkpoint_id)
        if self._capture is not None:
            self._capture = _Nowhere()
        return captured

    return [(ElementQueue, "capture", capture)]


def forget_output() -> Replacements:
    original = ResultPartition.overtake

    def overtake(self: Any, barrier: Any) -> Any:
        for _, items in original(self, barrier):
            let_go(items)
        return []

    return [(ResultPartition, "overtake", overtake)]


def no_filter() -> Replacements:
    return [(recovery, "rows_of", lambda batch, *_: batch)]


def forget_recovered() -> Replacements:
    """A checkpoint during recovery holds nothing of what was not consumed."""
    return [(GateRecovery, "remaining", lambda self: ())]


def recovered_counts_as_output() -> Replacements:
    """What was recovered is put behind what has arrived since."""
    original = GateRecovery.remaining

    def remaining(self: Any) -> Any:
        return tuple(msgspec.structs.replace(state, is_output=True) for state in original(self))

    return [(GateRecovery, "remaining", remaining)]


def ignore_skip() -> Replacements:
    original = GateRecovery.__init__

    def init(self: Any, edge: Any, states: Any, **more: Any) -> None:
        original(self, edge, [msgspec.structs.replace(state, skip=0) for state in states], **more)

    return [(GateRecovery, "__init__", init)]


def live_before_recovered() -> Replacements:
    """Live data is read while recovered data is still being fetched."""
    original = InputGate.poll

    def poll(self: Any, rows_max: int) -> Any:
        recovered = self.recovered
        if recovered is None or recovered.is_over or recovered._queue:
            return original(self, rows_max)
        self.recovered = None
        polled = original(self, rows_max)
        self.recovered = recovered
        return polled

    return [(InputGate, "poll", poll)]
