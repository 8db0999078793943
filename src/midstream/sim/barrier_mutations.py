"""Known bugs of alignment and of snapshots on their way to the coordinator, to be put back on purpose: see `sim.mutations`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from midstream.checkpoint import barriers
from midstream.sim.mutation import Mutation, Replacements
from midstream.worker import snapshots


def skip_alignment() -> Replacements:
    def on_received(self: Any, channel: int, barrier: Any) -> list[Any]:
        if barrier.checkpoint_id <= self._last_id:
            return []
        self._last_id = barrier.checkpoint_id
        return [barriers.TakeSnapshot(barrier)]

    return [(barriers.BarrierHandler, "_on_received", on_received)]


def end_is_no_barrier() -> Replacements:
    def on_end(self: Any, channel: int) -> list[Any]:
        self._open.discard(channel)
        return []

    return [(barriers.BarrierHandler, "_on_end", on_end)]


def ack_before_write() -> Replacements:
    original = snapshots.TaskSnapshots.take

    def take(self: Any, checkpoint_id: int, captured: Any, storage: Any, file: str, **more: Any) -> None:
        class Lazy:
            def write(self, path: str, parts: Any) -> None:
                for _ in parts:  # its handles are known only then
                    pass

        original(self, checkpoint_id, captured, Lazy(), file, **more)  # type: ignore[arg-type]

    return [(snapshots.TaskSnapshots, "take", take)]


def forget_earlier_committables() -> Replacements:
    def completed(self: Any, checkpoint_id: int) -> None:
        self._unconfirmed.clear()

    original = snapshots.TaskSnapshots._acknowledge

    def acknowledge(self: Any, *arguments: Any) -> None:
        self._unconfirmed.clear()
        original(self, *arguments)

    return [(snapshots.TaskSnapshots, "_acknowledge", acknowledge), (snapshots.TaskSnapshots, "completed", completed)]


MUTATIONS: Final[Mapping[str, Mutation]] = {
    "skip_alignment": Mutation("snapshot at the first barrier", skip_alignment),
    "end_is_no_barrier": Mutation("the end of a channel does not complete an alignment", end_is_no_barrier),
    "ack_before_write": Mutation("acknowledge without a file", ack_before_write),
    "forget_earlier_committables": Mutation(
        "forget what was prepared for a checkpoint that failed", forget_earlier_committables
    ),
}
