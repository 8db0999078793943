"""How often a run restores checkpoints that were taken during recovery, and fails while it recovers.

These are the cases that random runs have least of by themselves, so a run counts them, and a campaign says how many
there were.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from midstream.checkpoint.metadata import CheckpointMetadata
from midstream.checkpoint.state_files import StateFile
from midstream.exchange.gate import InputGate
from midstream.protocol.messages import ChannelState, Deploy
from midstream.sim.cluster import Driver, Slot


def gates_of(slots: Iterable[Slot]) -> Iterator[InputGate]:
    for slot in slots:
        if slot.machine is not None:
            for task in slot.machine.tasks.values():
                yield from task.gates


def is_recovering(slots: Iterable[Slot]) -> bool:
    """Whether some task still has recovered rows to take."""
    return any(gate.recovered is not None and not gate.recovered.is_over for gate in gates_of(slots))


class Recoveries:
    """Counts them. What each method is told happens in this very step."""

    def __init__(self) -> None:
        self.in_flight = 0
        """Completed checkpoints with rows in flight."""
        self.checkpoints = 0
        """With rows that were being recovered, and had not been taken."""
        self.restores = 0
        """Attempts that have gone on from such a one."""
        self.rescaled_restores = 0
        """Of these, how many at another parallelism."""
        self.failures = 0
        """Attempts that ended by a failure while rows were being recovered."""
        self._taken: dict[str, Mapping[str, int]] = {}
        """By path of the checkpoint: how many subtasks each operator had."""
        self._deployed: dict[str, int] = {}
        """By job id, the newest attempt."""

    def completed(self, root: str, metadata: CheckpointMetadata, slots: Iterable[Slot]) -> None:
        self.in_flight += bool(metadata.channels)
        if is_recovering(slots) or any(_was_stored_before(metadata, state) for state in metadata.channels):
            self.checkpoints += 1
            parallelism = {op.uid: op.parallelism for op in metadata.operators}
            self._taken[f"{root}/chk-{metadata.checkpoint_id}"] = parallelism

    def deployed(self, driver: Driver, deploy: Deploy, restored_from: str | None) -> None:
        if self._deployed.get(deploy.job_id) == deploy.attempt:
            return
        self._deployed[deploy.job_id] = deploy.attempt
        before = self._taken.get(restored_from or "")
        if before is not None:
            self.restores += 1
            graph = driver.coordinator.plan.graph
            now = {spec.uid: vertex.parallelism for vertex in graph.vertices for spec in vertex.specs}
            self.rescaled_restores += any(before.get(uid, now[uid]) != now[uid] for uid in now)

    def failed(self, driver: Driver) -> None:
        """An attempt of the driver, or the driver itself. Slots that have died are still as they were."""
        attempt = self._deployed.get(driver.plan.job_id)
        slots = (slot for slot in driver.cluster.slots if slot.driver is driver and slot.machine is not None)
        self.failures += is_recovering(slot for slot in slots if slot.machine and slot.machine.attempt == attempt)


def _was_stored_before(metadata: CheckpointMetadata, state: ChannelState) -> bool:
    """Whether it can be told that rows in flight are those of an older checkpoint (not where they are in the metadata)."""
    files = (StateFile.parse(segment.file) for segment in state.segments if segment.file)
    return state.number is not None or any(file and file.checkpoint_id < metadata.checkpoint_id for file in files)
