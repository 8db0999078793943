"""Counts how often a run restores checkpoints that were taken during recovery, and fails while it recovers.

These cases are the rarest ones in random runs, so a run counts them, and a campaign reports their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from midstream.engine.checkpoint.metadata import CheckpointMetadata
from midstream.engine.checkpoint.state_files import StateFile
from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.protocol.messages import ChannelState, Deploy
from midstream.simulation.cluster import SimulatedDriver
from midstream.simulation.faults import is_recovering
from midstream.simulation.simulated_slot import SimulatedSlot


class Recoveries:
    """The counters. Each method is called in the step in which its event happens."""

    def __init__(self) -> None:
        self.in_flight = 0
        """The number of completed checkpoints with rows in flight."""
        self.ending = 0
        """The number of completed checkpoints with subtasks that had passed on the end of event time, and not finished."""
        self.partly_finished = 0
        """The number of completed checkpoints in which some subtasks of an operator had finished and others had not, apart
        from sources and what is chained to them.
        """
        self.checkpoints = 0
        """The number of completed checkpoints with rows that were still being recovered."""
        self.restores = 0
        """The number of attempts that were restored from such a checkpoint."""
        self.rescaled_restores = 0
        """The number of these attempts at another parallelism."""
        self.failures = 0
        """The number of attempts that failed while rows were being recovered."""
        self._taken: dict[str, Mapping[str, int]] = {}
        """The parallelism of each operator, by the path of the checkpoint."""
        self._deployed: dict[str, int] = {}
        """The newest attempt, by job id."""

    def completed(self, root: str, metadata: CheckpointMetadata, slots: Iterable[SimulatedSlot]) -> None:
        self.in_flight += bool(metadata.channels)
        running = (op.subtasks[index] for op in metadata.operators for index in op.running)
        self.ending += any(subtask.watermark_out_us == MAX_WATERMARK_US for subtask in running)
        uids = {source.uid for source in metadata.sources}
        sources = {op.vertex for op in metadata.operators if op.uid in uids}
        fed = (op for op in metadata.operators if op.vertex not in sources)
        self.partly_finished += any(0 < len(op.running) < op.parallelism for op in fed)
        if is_recovering(slots) or any(_was_stored_before(metadata, state) for state in metadata.channels):
            self.checkpoints += 1
            parallelism = {op.uid: op.parallelism for op in metadata.operators}
            self._taken[f"{root}/chk-{metadata.checkpoint_id}"] = parallelism

    def deployed(self, driver: SimulatedDriver, deploy: Deploy, restored_from: str | None) -> None:
        if self._deployed.get(deploy.job_id) == deploy.attempt:
            return
        self._deployed[deploy.job_id] = deploy.attempt
        before = self._taken.get(restored_from or "")
        if before is not None:
            self.restores += 1
            graph = driver.coordinator.plan.graph
            now = {spec.uid: vertex.parallelism for vertex in graph.vertices for spec in vertex.specs}
            self.rescaled_restores += any(before.get(uid, now[uid]) != now[uid] for uid in now)

    def failed(self, driver: SimulatedDriver) -> None:
        """Count the failure of the driver's attempt, or of the driver. Slots that have died still have their last
        state.
        """
        attempt = self._deployed.get(driver.plan.job_id)
        slots = (slot for slot in driver.cluster.slots if slot.driver is driver and slot.machine is not None)
        self.failures += is_recovering(slot for slot in slots if slot.machine and slot.machine.attempt == attempt)


def _was_stored_before(metadata: CheckpointMetadata, state: ChannelState) -> bool:
    """Whether rows in flight are known to be those of an older checkpoint; this is unknown if the metadata holds them."""
    files = (StateFile.parse(segment.file) for segment in state.segments if segment.file)
    return state.number is not None or any(file and file.checkpoint_id < metadata.checkpoint_id for file in files)
