"""Triggers the next checkpoint, for the interval, clients, a stop, a rescale or move, or savepoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from midstream.engine.checkpoint.edge_identity import loses_edges
from midstream.engine.coordinator.checkpoints.pending_checkpoint import CheckpointRequest
from midstream.engine.coordinator.placement.rescale import RescaleStage

if TYPE_CHECKING:
    from midstream.engine.coordinator.coordinator import Coordinator
    from midstream.engine.coordinator.placement.split_assignment import SplitAssignment
    from midstream.engine.graph.job_graph import JobGraph


def trigger_when_due(coordinator: Coordinator, sources: SplitAssignment, program: JobGraph) -> None:
    """Trigger a checkpoint of a running job if one is due. `program`: its graph at the program's own parallelism."""
    attempt, checkpoints, requests, rescaling = (
        coordinator.attempt,
        coordinator.checkpoints,
        coordinator.requests,
        coordinator.rescaling,
    )
    assert attempt is not None
    if checkpoints.storage is None or checkpoints.pending is not None or attempt.finished_on_restore:
        return
    if rescaling.stage is RescaleStage.DISTRIBUTING:
        return  # a newer checkpoint would have to be distributed in its place, and might not fit to the new tasks
    if requests.draining and not attempt.at_end_of_data:
        return  # it would record some sources as ended within their input, while others could continue to read
    is_rescale, is_savepoint = rescaling.needs_checkpoint, coordinator.savepoints.needs_checkpoint
    is_requested = requests.needs_checkpoint or rescaling.is_urgent or is_savepoint
    if not checkpoints.schedule.is_now(is_requested, attempt.awaits_checkpoint, coordinator.commits.uncommitted_count):
        return
    clients, is_stop = requests.take_checkpoint_clients(), requests.needs_stop_checkpoint
    must_align = is_savepoint or (is_rescale and rescaling.must_align)
    bounds = coordinator.plan.config.autoscale
    if is_stop or (bounds is not None and not bounds.is_advice):
        # The program is started again at its own parallelism: after a stop; and, without a person who knows that the job
        # has changed it, after its driver has died.
        must_align = must_align or loses_edges(coordinator.plan.graph, program)
    request = CheckpointRequest(
        clients=clients, is_stop=is_stop, is_rescale=is_rescale, is_savepoint=is_savepoint, must_align=must_align
    )
    checkpoint_id = checkpoints.trigger(attempt, sources.snapshot(), request)
    coordinator.savepoints.triggered(checkpoint_id)
